"""The adaptive deadline against its formula."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.checks.deadlines import AdaptiveDeadline, AdaptiveDeadlineConfig

CHECKS = st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30)


def observed(checks, **settings) -> AdaptiveDeadline:
    deadline = AdaptiveDeadline(AdaptiveDeadlineConfig(**settings))
    for seconds, correct in checks:
        deadline.observe(seconds, correct=correct)
    return deadline


@pytest.mark.parametrize(
    ("checks", "timeout"),
    [
        ([], 30.0),
        ([(0.1, False), (29.0, False)], 30.0),
        ([(0.1, True)], 2.0),
        ([(0.1, True), (4.0, True), (0.2, True)], 6.0),
        ([(4.0, True), (9.0, False)], 6.0),
        ([(25.0, True)], 30.0),
    ],
)
def test_timeouts(checks, timeout):
    assert observed(checks).timeout_s == timeout


@given(CHECKS)
def test_the_formula_and_its_bounds(checks):
    timeout = observed(checks, min_s=1.0, factor=2.0, max_s=20.0).timeout_s
    correct = [seconds for seconds, right in checks if right]
    assert timeout == (min(max(1.0, 2.0 * max(correct)), 20.0) if correct else 20.0)


@given(CHECKS)
def test_switched_off_it_is_always_the_longest(checks):
    assert observed(checks, adaptive=False).timeout_s == 30.0


def test_it_can_grow_although_it_cuts_off():
    """Every correct answer may take longer than the longest before it."""
    deadline = observed([(2.0, True)])
    for _ in range(10):
        deadline.observe(deadline.timeout_s, correct=True)
    assert deadline.timeout_s == 30.0


@given(CHECKS)
def test_a_restored_deadline_is_the_same(checks):
    deadline = observed(checks)
    other = observed([])
    other.set_anchor(json.loads(json.dumps(deadline.anchor_s)))
    assert other.timeout_s == deadline.timeout_s


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_s": 0.0}, "min_s"),
        ({"factor": 0.5}, "factor"),
        ({"max_s": 1.0}, "max_s"),
        ({"max_s": float("inf")}, "max_s"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveDeadlineConfig(**settings)
