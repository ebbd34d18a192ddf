"""Programs that import `rollpacker.trl` go on, and are told where it is now."""

import importlib
import sys

import pytest

pytest.importorskip("trl")


def test_the_old_path_warns_and_is_the_same() -> None:
    from rollpacker.integrations.trl import rollout_function

    sys.modules.pop("rollpacker.trl", None)
    with pytest.warns(FutureWarning, match="rollpacker.integrations.trl"):
        old = importlib.import_module("rollpacker.trl")
    assert old.rollout_function is rollout_function
