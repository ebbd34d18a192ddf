"""Functions named in a config: found, or refused with one clear message."""

import logging
import math
from pathlib import Path

import pytest

from rollpacker.imports import (
    ImportSpecError,
    MissingPackageError,
    load_function,
    missing,
    require,
)
from rollpacker.run.error_messages import classify
from rollpacker.warn_once import WarnOnce


def test_by_module_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function("math:sqrt") is math.sqrt
    (tmp_path / "mine_here.py").write_text("class A:\n    @staticmethod\n    def f(): return 5\n")
    by_file = load_function(f"{tmp_path}/mine_here.py:A.f")
    assert by_file() == 5
    assert load_function(f"{tmp_path}/../{tmp_path.name}/mine_here.py:A.f") is by_file
    monkeypatch.chdir(tmp_path)
    assert load_function("mine_here.py:A.f") is by_file
    assert load_function("mine_here:A.f")() == 5


def test_of_files_only_a_near_name_is_suggested(tmp_path: Path) -> None:
    """All endings are alike, which had made any short name a near one."""
    (tmp_path / "one.py").write_text("")
    (tmp_path / "rewards.py").write_text("")
    for asked, hint in (("nofile", False), ("reward", True)):
        with pytest.raises(ImportSpecError) as caught:
            load_function(f"{tmp_path}/{asked}.py:f")
        assert str(caught.value).endswith(f'Did you mean "{tmp_path}/rewards.py"?') == hint
        assert ("Did you mean" in str(caught.value)) == hint


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("math", "names no function"),
        (":f", "names no function"),
        ("math:", "names no function"),
        ("math:sqroot", 'Did you mean "sqrt"?'),
        ("math:pi", "is a float, not a function"),
        ("no_such_module_here:f", "there is no module no_such_module_here"),
        ("math.deeper:f", "math"),
        ("nowhere/file.py:f", "there is no file"),
    ],
)
def test_refusals(spec: str, expected: str) -> None:
    with pytest.raises(ImportSpecError) as caught:
        load_function(spec)
    assert expected in str(caught.value)
    assert spec in str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\nraise KeyError('k')\n", ["KeyError", "'k'", "line 2"]),
        ("x = (\n", ["SyntaxError", "line 1"]),
        ("import no_such_thing\n", ["ModuleNotFoundError", "no_such_thing", "line 1"]),
        ("import sys\nsys.exit(1)\n", ["SystemExit", "line 2"]),
    ],
)
def test_a_file_that_fails_itself(tmp_path: Path, source: str, expected: list[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ImportSpecError) as caught:
        load_function(f"{path}:f")
    for part in [*expected, "broken.py"]:
        assert part in str(caught.value)


def test_a_missing_package_is_one_sentence_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("numpy", extra="math", what="this")
    (tmp_path / "no_such_package").mkdir()  # a folder of that name in the working folder
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("no_such_package", "nor_this_one", "nor_this_one.part"):
        with pytest.raises(MissingPackageError) as caught:
            require(name, extra="report", what="drawing the timeline")
        assert str(caught.value) == missing(name, extra="report", what="drawing the timeline")
        assert str(caught.value) == (
            f"drawing the timeline needs {name}, which is not installed: pip install"
            " 'rollpacker[report]'"
        )
    assert classify(caught.value)[0] == 2


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    warn = WarnOnce(logging.getLogger("some.part"))
    for number in range(3):
        warn("row %d is cut", number)
        warn("something else")
    WarnOnce(logging.getLogger("some.part"))("something else")
    assert caplog.messages == ["row 0 is cut", "something else", "something else"]


def test_noise_of_other_packages_is_left_out_and_nothing_else(caplog) -> None:
    import logging

    from rollpacker.imports import silence_noise

    silence_noise()
    silence_noise()
    other = logging.getLogger("torchao")
    other.warning("Failed to load /some/where/_C.so: Could not load this library")
    other.warning("another thing")
    pytree = logging.getLogger("torch.utils._pytree")
    pytree.warning("%s is an Enum subclass and is now natively supported", "X")
    pytree.error("a real error")
    assert [record.getMessage() for record in caplog.records] == ["another thing", "a real error"]
    assert len(other.filters) == 1
