"""What happened: the only input of the core. Past tense, frozen, small.

Events hold ids, counts and seconds; tokens and tensors stay with whoever made them. `time_s` is
seconds since the run began (virtual seconds in a simulation), stamped by the driver when it takes
the event in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rollpacker.codec import Omitted
from rollpacker.core.ids import PoolName, PromptId, SampleId
from rollpacker.core.messages import BaseEvent


class RunStarted(BaseEvent, frozen=True, kw_only=True):
    """The driver is ready. The first event of a run, once; a resumed run begins with `Committed`
    instead."""


class PromptsFetched(BaseEvent, frozen=True, kw_only=True):
    """Answer to `FetchPrompts`. Never crosses an epoch; may be shorter than asked, then
    `epoch_ended` is true."""

    prompts: tuple[PromptId, ...]
    epoch_ended: bool
    """True if these were the last prompts of their epoch."""
    data_ended: bool = False
    """No further epoch will come."""


class SampleGenerated(BaseEvent, frozen=True, kw_only=True):
    """A response is complete; in a run of several turns, a message of the model."""

    sample: SampleId
    num_tokens: int
    """Response tokens, the end-of-sequence token included; of this turn alone, here and in
    `SampleAborted`."""
    finish_reason: str
    """"stop" (end token or stop string) or "length" (the limit was reached)."""
    version: int
    """Version of the weights that sampled every token of it."""
    preemptions: int = 0
    """How often the engine had to put it back for lack of key-value cache."""
    num_kept: Omitted[int | None] = None
    """Tokens carried into this launch that came out the same under the weights at hand. None:
    nothing was carried, or it was not looked at."""
    num_redraws: Omitted[int] = 0
    """How often its end was drawn anew, because it came before the place where the response had
    been cut off (`tail_batching.complement`)."""
    num_reused: Omitted[int] = 0
    """Tokens before the response that the engine did not have to compute, since it had kept them
    from an earlier turn."""
    num_held: Omitted[int] = 0
    """Tokens that it keeps now for the next turn, the prompt's among them."""
    room: Omitted[int | None] = None
    """So many more it can keep beside the rows that run; negative: so many should go for those that
    wait, and for what comes next. None: it does not say."""
    engine: Omitted[int] = 0
    """The engine that says so ..."""
    incarnation: Omitted[int] = 0
    """... and how often that one had been replaced when it was given the sample."""


class SampleAborted(BaseEvent, frozen=True, kw_only=True):
    """The engine let go of a sample after `Abort`; its slot is free."""

    sample: SampleId
    num_tokens: int
    """Tokens generated so far: the response would have been at least this long (a censored
    length)."""
    preemptions: int = 0
    num_kept: Omitted[int | None] = None
    """See `SampleGenerated`."""
    num_redraws: Omitted[int] = 0
    engine: Omitted[int] = 0
    """The engine that says so ..."""
    incarnation: Omitted[int] = 0
    """... and how often that one had been replaced when it was given the sample."""


class SampleFailed(BaseEvent, frozen=True, kw_only=True):
    """The engine could not produce this sample."""

    sample: SampleId
    reason: str
    engine: Omitted[int] = 0
    """The engine that says so ..."""
    incarnation: Omitted[int] = 0
    """... and how often that one had been replaced when it was given the sample."""


class SampleMoved(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Move`: the sample goes on in another engine."""

    sample: SampleId
    engine: int
    """The one that has it now."""
    incarnation: Omitted[int] = 0
    num_tokens: int = 0
    """Response tokens that it brought along; they stay as they are."""


class EngineReady(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Replace`: the engine can take samples. At the start all are ready, unsaid."""

    engine: int
    incarnation: int
    version: int
    """Version of its weights."""


class EngineLost(BaseEvent, frozen=True, kw_only=True):
    """The engine has ended, hangs, or computes what cannot be used. Whatever it still says is not
    heeded."""

    engine: int
    incarnation: int
    reason: str


class TrainerLost(BaseEvent, frozen=True, kw_only=True):
    """A process of the trainer has ended, or can be used no more, and with it all of them. What was
    asked of them is not answered: whoever obeys it begins it again when they are back."""

    incarnation: int
    """How often they had been brought back."""
    reason: str


class TrainerReady(BaseEvent, frozen=True, kw_only=True):
    """Answer to `RestoreTrainer`: the trainer is where it was, and goes on with what it was asked
    for."""

    incarnation: int
    version: int
    """Version of its weights."""


class ToolCall(NamedTuple):
    """A call of a tool that a message made."""

    tool: str
    """Empty: the model asked for one that there is not."""
    seconds: float | None
    """From the call to its result. None: it was not run, since there is no such tool or the
    arguments were wrong."""
    is_well: bool
    """False: it was not run, or raised. The model was told so."""


class Acted(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Act`: what the environment made of a turn."""

    sample: SampleId
    turn: int
    num_tokens: int = 0
    """Given to the model by the answer: they stand behind what it has."""
    is_over: bool = False
    """The episode is: the model is not asked again."""
    seconds: float | None = None
    """In the environment, without waiting; limits and adaptive deadlines go by it."""
    reason: str = ""
    """Why it is over, as a finish reason ("" is "done"), or why the episode was lost."""
    cause: str = ""
    """Cause of a lost episode: "environment" (it raised), "deadline" (it was too slow),
    "infrastructure" (its process died: worth another try), "prompt" (the prompt that it said cannot
    be taken) or "cancelled"."""
    calls: Omitted[tuple[ToolCall, ...]] = ()
    """Calls of tools, in order, without those that an environment makes of a message by itself.
    Where the answer was too slow, the last call had not ended."""


class SampleScored(BaseEvent, frozen=True, kw_only=True):
    """The verdict on a sample. `value` None is "no verdict" and `reason` says why; it is never a
    zero."""

    sample: SampleId
    value: float | None
    parts: Mapping[str, float | None] = msgspec.field(default_factory=dict)
    """Each reward function's own value."""
    reason: str = ""
    seconds: float | None = None
    """Execution time of the check, without waiting; adaptive deadlines learn from it."""
    correct: bool | None = None
    """Whether what was timed was right. None: a value above 0 is."""
    timed_out: bool = False
    """The answer ran into its time limit and counts as wrong."""
    cause: str = ""
    """Without a verdict: "sample" (this response cannot be judged), "deadline" (the reward was too
    slow), "infrastructure" (a worker or an endpoint failed: worth asking again) or "cancelled"."""


class Trained(BaseEvent, frozen=True, kw_only=True):
    """The optimizer step is done; `version` is the version of the new weights."""

    step: int
    version: int
    metrics: Mapping[str, int | float] = msgspec.field(default_factory=dict)


class WeightsSynced(BaseEvent, frozen=True, kw_only=True):
    """Every engine now samples from `version`."""

    version: int


class Committed(BaseEvent, frozen=True, kw_only=True):
    """The step is part of the run for good (and on disk, if a checkpoint was due)."""

    step: int
    checkpointed: bool = False


class StopRequested(BaseEvent, frozen=True, kw_only=True):
    """Somebody wants the run to end after the step at hand."""

    reason: str = "asked to stop"


class Entered(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Enter`: the pool's devices are the run's until `Leave`."""

    pool: PoolName
    switch_s: float = 0.0
    """Seconds of the time since `Enter` that waking up took, once the pool was there."""


class PoolNeeded(BaseEvent, frozen=True, kw_only=True):
    """The driver itself needs a pool, for what is no command of its own; answered by `Enter` once
    no other pool is held, and by nothing if this one is. Only where pools are shared."""

    pool: PoolName
    purpose: str
    """evaluation, or recovery of the trainer."""


class PoolUnneeded(BaseEvent, frozen=True, kw_only=True):
    """Purpose that has ended."""


class Reminded(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Remind`: the seconds are over."""


Event = (
    RunStarted
    | PromptsFetched
    | SampleGenerated
    | SampleAborted
    | SampleFailed
    | SampleMoved
    | EngineReady
    | EngineLost
    | TrainerLost
    | TrainerReady
    | Acted
    | SampleScored
    | Trained
    | WeightsSynced
    | Committed
    | StopRequested
    | Entered
    | PoolNeeded
    | PoolUnneeded
    | Reminded
)
