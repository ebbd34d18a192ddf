"""Functions can be read in one go, and code is cut where it falls apart by itself.

The rules are in `tests/structure/limits.py`."""

import pytest

from tests.structure import limits
from tests.structure.offenders import RULES
from tests.structure.source import Package, rollpacker


@pytest.mark.parametrize("rule", RULES)
def test_no_code_breaks_a_rule(rule: str) -> None:
    assert "\n".join(RULES[rule](rollpacker())) == ""


def test_rooms_keep_their_budgets() -> None:
    assert "\n".join(limits.over_budget(rollpacker(), limits.BUDGETS)) == ""


def package(source: str, **others: str) -> Package:
    """A package of `a.py` with this source, and of other files by name."""
    texts = {"a": source, **others}
    return Package.of_texts({f"rollpacker/{name}.py": text for name, text in texts.items()})


def test_long_functions_are_found() -> None:
    long = "class C:\n    def f():\n" + "        pass\n" * 60
    assert list(limits.long_functions(package(long))) == ["rollpacker/a.py C.f"]
    assert list(limits.long_functions(package(long.removesuffix("        pass\n")))) == []


def test_starred_literals_in_calls_are_found() -> None:
    for call in ("f(*(a, b), c)", "f(c, *[a, b])", "f(g(*(a, *b)))"):
        source = f"def here():\n    return {call}\n"
        assert list(limits.starred_literals(package(source))) == ["rollpacker/a.py here"]
    for right in ("f(*a)", "x = (*(a, b), c)", "f((a, b))", "f(*g(a))"):
        assert list(limits.starred_literals(package(right + "\n"))) == []


def test_bases_of_one_subclass_are_found() -> None:
    pair = "class A: ...\nclass B(A): ...\nb = B()\n"
    assert list(limits.lone_bases(package(pair))) == ["rollpacker/a.py A"]
    assert list(limits.lone_bases(package(pair + "a = A()\n"))) == []
    assert list(limits.lone_bases(package(pair + "a = A.of(1)\n"))) == []
    assert list(limits.lone_bases(package(pair), ["module.A(1)"])) == []
    assert list(limits.lone_bases(package(pair), ["class C(module.A):"])) == []
    assert list(limits.lone_bases(package(pair), ["class C(module.AB):"])) == ["rollpacker/a.py A"]
    assert list(limits.lone_bases(package(pair + "class C(A): ...\n"))) == []
    elsewhere = "from rollpacker.a import A\nclass C(A): ...\n"
    assert list(limits.lone_bases(package(pair, b=elsewhere))) == []
    assert list(limits.lone_bases(package(pair.replace("A:", "A(Protocol):")))) == []


def test_small_modules_of_one_importer_are_found() -> None:
    taker = "from rollpacker.a import x\n"
    found = limits.lone_modules(package("x = 1\n", b=taker), ())
    assert list(found) == ["rollpacker/a.py imported by rollpacker.b"]
    for right in (
        limits.lone_modules(package("x = 1\n" * 60, b=taker), ()),
        limits.lone_modules(package("x = 1\n", b=taker, c=taker), ()),
        limits.lone_modules(package("x = 1\n", b=taker), ("a",)),
        limits.lone_modules(package("x = 1\n"), ()),
        limits.lone_modules(package(taker, **{"algo/x": "", "b": "import rollpacker.algo.x"}), ()),
    ):
        assert list(right) == []


SPLIT = """
class C:
    def __init__(self): self.x = self.y = self.z = 1
    def a(self): return self.x
    def b(self): self.x += 1
    def c(self): return self.y
"""


def test_classes_in_two_parts_are_found() -> None:
    assert list(limits.split_classes(package(SPLIT))) == ["rollpacker/a.py C 2+1"]
    for tie in (
        "return self.x + self.y",
        "return self.a() + self.c()",
        "return f(self)",
    ):
        assert list(limits.split_classes(package(SPLIT + f"    def d(self): {tie}\n"))) == []
    for right in (
        SPLIT.replace("self.y", "self.x"),
        SPLIT.replace("return self.y", "return 1"),
        SPLIT.replace("C:", "C(Protocol):"),
        SPLIT.replace("C:", "C(torch.nn.Module):"),
        "@dataclass\nclass C:\n    x: int\n    y: int\n"
        "    def a(self): return self.x\n    def c(self): return self.y\n",
    ):
        assert list(limits.split_classes(package(right))) == []


def test_a_base_ties_the_methods_of_its_subclass() -> None:
    base = "class B:\n    def d(self): return self.x, self.y\n"
    assert list(limits.split_classes(package(base + SPLIT.replace("C:", "C(B):")))) == []
    base = "class B:\n    def d(self): return self.z\n"
    found = limits.split_classes(package(base + SPLIT.replace("C:", "C(B):")))
    assert list(found) == ["rollpacker/a.py C 2+1+1"]


def test_rooms_over_their_budget_are_found() -> None:
    texts = {"rollpacker/core/job/job.py": "x\n" * 10, "rollpacker/core/__init__.py": "y\n"}
    texts |= {"rollpacker/bus.py": "z\n", "rollpacker/core/lengths/fit.py": "x\n" * 5}
    made_up = Package.of_texts(texts)
    assert list(limits.over_budget(made_up, {"": 1, "core": 16})) == []
    assert list(limits.over_budget(made_up, {"": 1, "core": 15})) == [
        "rollpacker/core has 16 lines, over its budget of 15"
    ]
    assert list(limits.over_budget(made_up, {"": 1, "core": 11, "core.lengths": 5})) == []
    assert list(limits.over_budget(made_up, {"": 1})) == [
        "rollpacker/core has 16 lines and no budget"
    ]
