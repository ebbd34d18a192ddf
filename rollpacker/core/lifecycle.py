"""The states of a sample, and the transitions between them; any other transition raises.

A sample is `planned` when its round is made, and ends in one of the states of `FINAL`. The table
`TRANSITIONS` holds for every kind of round; the rounds do not repeat it.
"""

from __future__ import annotations

from enum import StrEnum


class SampleState(StrEnum):
    PLANNED = "planned"
    LAUNCHED = "launched"
    ACTING = "acting"
    """The sample waits for its environment's answer, outside the engine."""
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    ABORTED = "aborted"
    """The sample was stopped because its prompt had as many finished samples as it needs."""
    DEFERRED = "deferred"
    """The prompt was put off to a later round, which does not need this response."""
    FAILED = "failed"
    """The engine, or the sample's environment, could not go on with the sample."""
    DROPPED = "dropped"
    """The sample is not trained on: it has no verdict, or its prompt was given up."""


_S = SampleState

TRANSITIONS: dict[SampleState, frozenset[SampleState]] = {
    _S.PLANNED: frozenset({_S.LAUNCHED, _S.ACTING}),
    _S.LAUNCHED: frozenset({_S.ACTING, _S.GENERATED, _S.ABORTED, _S.DEFERRED, _S.FAILED}),
    _S.ACTING: frozenset({_S.LAUNCHED, _S.GENERATED, _S.ABORTED, _S.DEFERRED, _S.FAILED}),
    _S.GENERATED: frozenset({_S.SCORED, _S.ABORTED, _S.DEFERRED, _S.DROPPED}),
    _S.SCORED: frozenset({_S.TRAINED, _S.ABORTED, _S.DEFERRED, _S.DROPPED}),
    _S.TRAINED: frozenset(),
    _S.ABORTED: frozenset(),
    _S.DEFERRED: frozenset(),
    _S.FAILED: frozenset(),
    _S.DROPPED: frozenset(),
}

FINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)


class LifecycleError(AssertionError):
    """Raised for a transition that `TRANSITIONS` does not have."""


def check(before: SampleState, after: SampleState) -> SampleState:
    """Returns `after` if `TRANSITIONS` has it after `before`; raises `LifecycleError` if not."""
    if after not in TRANSITIONS[before]:
        raise LifecycleError(f"a sample cannot go from {before} to {after}")
    return after


def mermaid() -> str:
    """Text of `TRANSITIONS` as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", "    [*] --> planned"]
    for before, following in TRANSITIONS.items():
        lines += [f"    {before} --> {after}" for after in sorted(following)]
    lines += [f"    {state} --> [*]" for state in TRANSITIONS if state in FINAL]
    return "\n".join(lines) + "\n"
