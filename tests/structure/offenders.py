"""The rules on how code is cut, by name; no code of the package breaks one.

`python -m tests.structure.offenders` prints what breaks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.structure import limits
from tests.structure.layers import CONTRACTS
from tests.structure.source import Package, read, rollpacker


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


def main() -> None:
    for rule, find in RULES.items():
        for line in sorted(find(rollpacker())):
            print(f"{rule}: {line}")


if __name__ == "__main__":
    main()
