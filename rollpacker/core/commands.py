"""What to do: the only output of the core. Imperative, frozen, small.

A driver must have a `case` for each of them; `Command` is a closed union so that a type checker
finds the driver that forgot one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollpacker.core.ids import PromptId, SampleId


class RoundKind(StrEnum):
    PLAIN = "plain"
    """Tail batching is off: what is launched is awaited."""
    SHORT = "short"
    """More is launched than needed; the first to finish are kept."""
    LONG = "long"
    """Deferred prompts only; all are awaited."""
    FLUSH = "flush"
    """A long round, possibly smaller, that empties the queue at the end of an epoch or of the
    run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPrompts:
    """Ask the dataset cursor for `count` fresh prompts; answered by `PromptsFetched`."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start these samples. Samples of one prompt are adjacent and share their prompt's prefill."""

    round: int
    kind: RoundKind
    samples: tuple[SampleId, ...]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop these samples now; each is answered by `SampleAborted` (or by a late
    `SampleGenerated`)."""

    samples: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Judge this generated sample; answered by `SampleScored`."""

    sample: SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Defer:
    """These prompts join the long queue. Whatever was generated for them in this round can be let
    go."""

    prompts: tuple[PromptId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """This prompt will not be trained on, for this reason. Recorded, never silent."""

    prompt: PromptId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOn:
    """One optimizer step on these groups; answered by `Trained`.

    Groups are in launch order and the samples of a group in index order, whatever order they
    finished in. Every sample listed has a verdict.
    """

    step: int
    groups: tuple[tuple[SampleId, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights:
    """Bring the engines to `version`; answered by `WeightsSynced`."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Make the step durable; answered by `Committed`.

    The job's `state()` at this moment is what a checkpoint holds: a run restored from it continues
    when it is given `Committed` again.
    """

    step: int
    last: bool
    """Nothing follows, as far as is known now: a checkpoint and an evaluation are due whatever
    their intervals."""
    stopping: bool = False
    """The run was asked to end here: a checkpoint is due, and quickly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is over; no command follows."""

    reason: str
    failed: bool = False
    """The run cannot do what it is for; going on would only waste time."""


Command = (
    FetchPrompts | Launch | Abort | Score | Defer | Drop | TrainOn | SyncWeights | Commit | Finish
)
