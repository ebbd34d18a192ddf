"""What a launch leaves to the next one, by how its sample ended."""

from __future__ import annotations

import pytest

from rollpacker.core.ids import PromptId
from rollpacker.core.lifecycle import SampleState
from rollpacker.core.rounds.groups import CarriedLength, Group, Waiting

BEFORE = CarriedLength(10, False)


@pytest.mark.parametrize(
    ("tokens", "kept", "left"),
    [
        (4, 4, 10),  # stopped while it came out as it was left
        (4, 3, 4),  # ... after it had come out otherwise
        (12, 10, 12),
        (0, 0, 0),  # the engine failed on it: what it had came out otherwise, and is gone
    ],
)
def test_what_is_left(tokens: int, kept: int, left: int) -> None:
    group = Group(Waiting(PromptId("train", 0, 0), 1, (BEFORE,)), None, None)
    group.add(1, SampleState.LAUNCHED)
    group.states[0] = SampleState.DEFERRED
    group.lengths[0], group.kept_tokens[0] = tokens, kept
    assert [one.tokens for one in group.to_carry()] == [left]
