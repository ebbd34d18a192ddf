"""Tokens of a dialogue with their origin."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.dialogue.trajectory import Segment, Trajectory
from tests.dialogue.played import handed_on


def test_what_training_needs() -> None:
    trajectory = Trajectory((9, 9))
    for segment in (
        Segment((1, 2), (-0.5, -1.0)),
        Segment((3,)),
        Segment(()),
        Segment((4,)),
        Segment((5,), (-2.0,)),
    ):
        trajectory = trajectory.and_then(segment)
    assert trajectory.tokens == (1, 2, 3, 4, 5)
    assert [one[1:] for one in handed_on(trajectory)] == [
        (True, -0.5),
        (True, -1.0),
        (False, 0.0),
        (False, 0.0),
        (True, -2.0),
    ]
    assert trajectory.given == ((2, 4),)
    assert trajectory.num_sampled == 3
    assert [turn.tokens for turn in trajectory.turns] == [(1, 2), (5,)]


TOKENS = st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e6, 0.0)), max_size=5)
SEGMENTS = st.lists(st.tuples(TOKENS, st.booleans()), max_size=8)


@given(st.lists(st.integers(0, 2**31)), SEGMENTS)
def test_what_is_put_in_is_there(prompt: list[int], parts: list) -> None:
    trajectory = Trajectory(tuple(prompt))
    seen: list[tuple[int, bool, float]] = []
    for tokens, is_sampled in parts:
        ids, log_probs = tuple(t for t, _ in tokens), tuple(p for _, p in tokens)
        trajectory = trajectory.and_then(Segment(ids, log_probs if is_sampled else None))
        seen += [(t, is_sampled, p if is_sampled else 0.0) for t, p in tokens]
    assert handed_on(trajectory) == seen
    kinds = [one.is_sampled for one in trajectory.segments]
    assert all(a != b for a, b in itertools.pairwise(kinds))
