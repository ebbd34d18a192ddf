"""The phases of a job, each named after what the job waits for, and the events that each allows.

    new:         the run to begin;
    fetching:    prompts from the dataset cursor;
    rolling:     responses, turn by turn, then the verdicts on those kept;
    training:    the optimizer step;
    syncing:     the engines to take the new weights;
    committing:  the step to become durable;
    done:        nothing.

Any other event is a bug of the program that sends it and raises. A restored job begins in
`committing`. Late verdicts and `StopRequested` may come at any time.
"""

from __future__ import annotations

from enum import StrEnum

from rollpacker.core.events import (
    Acted,
    Committed,
    EngineLost,
    EngineReady,
    Event,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
    SampleScored,
    StopRequested,
    Trained,
    TrainerLost,
    TrainerReady,
    WeightsSynced,
)


class Phase(StrEnum):
    NEW = "new"
    FETCHING = "fetching"
    ROLLING = "rolling"
    TRAINING = "training"
    SYNCING = "syncing"
    COMMITTING = "committing"
    DONE = "done"


_P = Phase

TRANSITIONS: dict[tuple[Phase, type[Event]], frozenset[Phase]] = {
    (_P.NEW, RunStarted): frozenset({_P.FETCHING, _P.DONE}),
    # Fewer prompts than asked for: more are fetched, or too few are left for a race. They join the
    # long queue, and what it holds is launched, or the step goes on with what it has.
    (_P.FETCHING, PromptsFetched): frozenset(
        {_P.FETCHING, _P.ROLLING, _P.TRAINING, _P.COMMITTING, _P.DONE}
    ),
    # A round is over: train on it, commit a step that has nothing to train on, or replace groups
    # without signal (dynamic sampling). Its last event is a response, an answer, or a verdict.
    **{
        (_P.ROLLING, event): frozenset({_P.ROLLING, _P.TRAINING, _P.COMMITTING, _P.FETCHING})
        for event in (SampleGenerated, SampleAborted, SampleFailed, Acted, SampleScored)
    },
    (_P.TRAINING, Trained): frozenset({_P.SYNCING}),
    (_P.SYNCING, WeightsSynced): frozenset({_P.COMMITTING}),
    # Once more where the wish to stop came while the commit was under way, without a checkpoint.
    (_P.COMMITTING, Committed): frozenset({_P.FETCHING, _P.ROLLING, _P.COMMITTING, _P.DONE}),
    **{(phase, StopRequested): frozenset({phase}) for phase in Phase},
    (_P.ROLLING, SampleMoved): frozenset({_P.ROLLING}),
    **{(phase, EngineReady): frozenset({phase}) for phase in Phase},
    # One loss too many ends the run. In a round, all that it waited for may have been samples of
    # the lost engine that had been told to stop.
    **{(phase, EngineLost): frozenset({phase, _P.DONE}) for phase in Phase},
    (_P.ROLLING, EngineLost): frozenset(
        {_P.ROLLING, _P.TRAINING, _P.COMMITTING, _P.FETCHING, _P.DONE}
    ),
    # It is brought back in whatever phase the job is, or the run is given up.
    **{(phase, TrainerLost): frozenset({phase, _P.DONE}) for phase in Phase},
    **{(phase, TrainerReady): frozenset({phase}) for phase in Phase},
    # What was cancelled is answered late.
    **{
        (phase, event): frozenset({phase})
        for phase in Phase
        for event in (Acted, SampleScored)
        if phase is not _P.ROLLING
    },
}
"""Phases in which the job may be after an event, by the phase before it and the kind of event."""


WAITS_FOR: dict[Phase, str] = {
    _P.FETCHING: "prompts from the dataset",
    _P.TRAINING: "the optimizer step of step {next_step}",
    _P.SYNCING: "the engine to take version {version} of the weights",
    _P.COMMITTING: "the commit of step {step}",
}
"""What the job waits for in a phase, in words, for messages. A round describes its own waiting."""


class ProtocolError(AssertionError):
    """Raised for an event that does not fit the job's phase, a bug of the event's sender."""


def expect(phase: Phase, event: Event, **facts: int) -> None:
    """Raises `ProtocolError` unless `TRANSITIONS` has the event in this phase, and the event's
    fields have the values that `facts` gives by name."""
    if (phase, type(event)) not in TRANSITIONS:
        raise ProtocolError(f"{type(event).__name__} in phase {phase}")
    for name, value in facts.items():
        if getattr(event, name) != value:
            raise ProtocolError(f"{event} instead of {name} {value}")


def mermaid() -> str:
    """`TRANSITIONS` as a Mermaid diagram for the docs, without events that keep the phase."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (before, event), following in TRANSITIONS.items():
        for after in sorted(following - {before}):
            arrows.setdefault((before, after), []).append(event.__name__)
    lines = [
        f"    {before} --> {after}: {' / '.join(by)}" for (before, after), by in arrows.items()
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> new", *lines, "    done --> [*]"]) + "\n"
