"""The core decides alike on every processor; see `processors.py`.

Affordable because each child computes some of the goldens only. The whole matrix, all simulations
under every set of `kernels`, is one for the nightly tier.
"""

from __future__ import annotations

import json

import pytest

from tests.golden.outputs import GOLDEN
from tests.golden.processors import decisions, decisions_under, kernels

EXPECTED = json.loads(GOLDEN.read_text())["decisions"]


def test_decisions_are_what_they_were() -> None:
    assert decisions() == EXPECTED, "to rewrite: python -m tests.golden.outputs --write"


@pytest.mark.parametrize("name", kernels())
def test_decisions_do_not_depend_on_the_processor(name: str) -> None:
    assert decisions_under(kernels()[name]) == EXPECTED
