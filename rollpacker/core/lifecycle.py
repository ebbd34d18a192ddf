"""A sample's life, as one table. Whatever is not in it is a bug and raises.

A sample is `planned` when its round is made, and ends in one of the states of `FINAL`. The table
does not know which policy plays; the policies do not repeat the table.
"""

from __future__ import annotations

from enum import StrEnum


class SampleState(StrEnum):
    PLANNED = "planned"
    LAUNCHED = "launched"
    ACTING = "acting"
    """The environment has the turn; the engine does not have the sample."""
    GENERATED = "generated"
    SCORED = "scored"
    TRAINED = "trained"
    ABORTED = "aborted"
    """The sample was surplus: its group was complete without it."""
    DEFERRED = "deferred"
    """The prompt was left for a later round, which does not need this response."""
    FAILED = "failed"
    """The engine, or the sample's environment, could not go on with the sample."""
    DROPPED = "dropped"
    """The sample has no verdict, or its group is not trained on."""


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
    """Returns `after` if `TRANSITIONS` allows it after `before`, and raises `LifecycleError`
    otherwise."""
    if after not in TRANSITIONS[before]:
        raise LifecycleError(f"a sample cannot go from {before} to {after}")
    return after


def mermaid() -> str:
    """`TRANSITIONS` as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", "    [*] --> planned"]
    for before, following in TRANSITIONS.items():
        lines += [f"    {before} --> {after}" for after in sorted(following)]
    lines += [f"    {state} --> [*]" for state in TRANSITIONS if state in FINAL]
    return "\n".join(lines) + "\n"
