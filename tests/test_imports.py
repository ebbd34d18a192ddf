"""Functions named in a config: found, or refused with one clear message."""

import math
from pathlib import Path

import pytest

from rollpacker.imports import ImportSpecError, load_function


def test_by_module_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_function("math:sqrt") is math.sqrt
    (tmp_path / "mine_here.py").write_text("class A:\n    @staticmethod\n    def f(): return 5\n")
    by_file = load_function(f"{tmp_path}/mine_here.py:A.f")
    assert by_file() == 5
    assert load_function(f"{tmp_path}/../{tmp_path.name}/mine_here.py:A.f") is by_file
    monkeypatch.chdir(tmp_path)
    assert load_function("mine_here.py:A.f") is by_file
    assert load_function("mine_here:A.f")() == 5


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
