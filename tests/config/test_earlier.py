"""A key that earlier versions had is refused with what to do about it."""

from __future__ import annotations

import pytest

from rollpacker.config.check import all_keys
from rollpacker.config.document import ConfigError
from rollpacker.config.earlier import GONE
from rollpacker.config.load import config_of
from rollpacker.config.schema import RunConfig


@pytest.mark.parametrize("key", sorted(GONE))
def test_a_key_that_is_gone_is_refused_with_one_sentence(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of({}, [f"{key}=true"], RunConfig)
    (told,) = (line for line in str(caught.value).splitlines() if key in line)
    assert told.endswith(f"is no known key. {GONE[key]}.")


def test_no_key_that_is_gone_is_there() -> None:
    assert not GONE.keys() & set(all_keys(RunConfig))
