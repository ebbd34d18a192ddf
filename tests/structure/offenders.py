"""The list of known offenders, which may only shrink.

`python -m tests.structure.offenders` prints it as the package stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.structure import limits
from tests.structure.layers import CONTRACTS
from tests.structure.source import Package, read, rollpacker

FILE = Path(__file__).with_name("known_offenders.txt")

HEAD = """\
# Code that breaks a rule of tests/structure/limits.py and is known to. No line is added here: new
# code keeps the rules. Whoever mends an offender takes its line out, and the test asks for that.
"""


def _texts_of_others() -> Iterator[str]:
    for module in read("tests", "benchmarks", "examples").modules.values():
        yield module.source


RULES: dict[str, Callable[[Package], Iterator[str]]] = {
    "function-over-60-lines": limits.long_functions,
    "starred-literal-in-call": limits.starred_literals,
    "base-of-one-subclass": lambda package: limits.lone_bases(package, _texts_of_others()),
    "small-module-of-one-importer": lambda package: limits.lone_modules(package, CONTRACTS),
    "class-in-two-parts": limits.split_classes,
    "circle": limits.rings,
}


def known(rule: str) -> Counter[str]:
    lines = FILE.read_text().splitlines()
    return Counter(line.removeprefix(f"{rule}: ") for line in lines if line.startswith(f"{rule}: "))


def differences(rule: str, package: Package, listed: Counter[str]) -> list[str]:
    """What breaks the rule and is not listed, and what is listed and does not break it."""
    found = Counter(RULES[rule](package))
    new = [f"new: {line}" for line in sorted((found - listed).elements())]
    mended = [
        f"mended, take its line out of {FILE.name}: {line}"
        for line in sorted((listed - found).elements())
    ]
    return new + mended


def main() -> None:
    print(HEAD)
    for rule, find in RULES.items():
        for line in sorted(find(rollpacker())):
            print(f"{rule}: {line}")


if __name__ == "__main__":
    main()
