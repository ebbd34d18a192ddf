"""The three checks of numbers that configs share."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rollpacker.bounds import check_at_least, check_positive, check_within


@pytest.mark.parametrize(
    ("check", "value", "told"),
    [
        (lambda one: check_at_least(one, 1, "n"), 0, "n must be at least 1, not 0"),
        (lambda one: check_at_least(one, 0, "n"), math.inf, "n must be at least 0, not inf"),
        (lambda one: check_positive(one, "n"), math.nan, "n must be more than 0, not nan"),
        (lambda one: check_positive(one, "n", otherwise="auto"), 0, "more than 0, or auto, not 0"),
        (lambda one: check_within(one, "[0, 1)", "n"), 1, "n must lie in [0, 1), not 1"),
        (lambda one: check_within(one, "(0, 1]", "n"), 0, "n must lie in (0, 1], not 0"),
        (lambda one: check_within(one, "[0, 1]", "n"), math.nan, "n must lie in [0, 1], not nan"),
    ],
)
def test_what_lies_outside_is_refused(check, value, told) -> None:
    with pytest.raises(ValueError) as raised:
        check(SimpleNamespace(n=value))
    assert told in str(raised.value)


def test_what_lies_inside_and_no_number_at_all_pass() -> None:
    one = SimpleNamespace(low=0, high=1, none=None, auto="auto")
    check_at_least(one, 0, "low", "high", "none", "auto")
    check_positive(one, "high", "none", "auto")
    check_within(one, "[0, 1]", "low", "high", "none", "auto")
