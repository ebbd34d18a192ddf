"""Events, the only input of the core (the scheduling code of `rollpacker/core`): small frozen
records of what has happened, in the past tense. Events hold ids, counts and seconds; tokens and
tensors stay with whoever made them. `time_s` is seconds since the run began (virtual in a
simulation), set by the driver (the program that carries out the commands) when it takes the event
in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rollpacker.codec import Omitted
from rollpacker.core.ids import PoolName, PromptId, SampleId
from rollpacker.core.messages import BaseEvent


class RunStarted(BaseEvent, frozen=True, kw_only=True):
    """The program that carries out the commands is ready. This is the first event of a run, once; a
    resumed run begins with `Committed` instead."""


class PromptsFetched(BaseEvent, frozen=True, kw_only=True):
    """Prompts that the dataset gave in answer to `FetchPrompts`. All are of one epoch (pass over
    the dataset); if they are fewer than asked for, `epoch_ended` is true."""

    prompts: tuple[PromptId, ...]
    epoch_ended: bool
    """True if these were the last prompts of their epoch."""
    data_ended: bool = False
    """True if no further epoch will come."""


class SampleGenerated(BaseEvent, frozen=True, kw_only=True):
    """The engine completed a response or, in a run of several turns, a message of the model."""

    sample: SampleId
    num_tokens: int
    """Number of tokens of the response, or this turn's message, with the end-of-sequence token."""
    finish_reason: str
    """Why generation ended: "stop" (end token or stop string) or "length" (at the limit)."""
    version: int
    """Version of the weights that sampled every token of the response."""
    preemptions: int = 0
    """How often the engine put the sample back into its queue for lack of key-value cache."""
    num_kept: Omitted[int | None] = None
    """Number of carried-over tokens (left by an earlier launch of the prompt) that came out the
    same under the current weights. None: nothing was carried over, or nothing was compared."""
    num_redraws: Omitted[int] = 0
    """How often the response came to an end before the length at which an earlier launch
    (submission to an engine) had been cut off, and its end was sampled again to make it longer
    (`tail_batching.complement`)."""
    num_reused: Omitted[int] = 0
    """Number of tokens of the context that the engine did not compute for this response, since it
    had kept their keys and values from the sample's earlier turn (message)."""
    num_held: Omitted[int] = 0
    """Tokens, prompt included, whose keys and values the engine keeps for the next turn."""
    room: Omitted[int | None] = None
    """Tokens that the engine can still keep for samples that wait for environments. Negative: so
    many kept tokens should be dropped to make room. None: the engine does not report it."""
    engine: Omitted[int] = 0
    """Number of the engine that completed the response."""
    incarnation: Omitted[int] = 0
    """How often that engine had been replaced when it was given the sample (its incarnation)."""


class SampleAborted(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Abort`: the engine stopped the sample and has room for another one."""

    sample: SampleId
    num_tokens: int
    """Number of tokens generated so far; the whole response would be at least this long."""
    preemptions: int = 0
    num_kept: Omitted[int | None] = None
    """Number of tokens from an earlier launch (submission to an engine) that were sampled again as
    they were. None: not compared."""
    num_redraws: Omitted[int] = 0
    engine: Omitted[int] = 0
    """Number of the engine that stopped the sample."""
    incarnation: Omitted[int] = 0
    """How often that engine had been replaced when it was given the sample (its incarnation)."""


class SampleFailed(BaseEvent, frozen=True, kw_only=True):
    """The engine failed on this sample, which has no response; `reason` says why, in words."""

    sample: SampleId
    reason: str
    engine: Omitted[int] = 0
    """Number of the engine that failed on the sample."""
    incarnation: Omitted[int] = 0
    """How often that engine had been replaced when it was given the sample (its incarnation)."""


class SampleMoved(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Move`: the sample goes on in another engine, with the tokens that it has."""

    sample: SampleId
    engine: int
    """Number of the engine that has the sample now."""
    incarnation: Omitted[int] = 0
    num_tokens: int = 0
    """Number of response tokens that the sample brought along; they are not sampled again."""


class EngineReady(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Replace` or `Resize`: the engine can take samples. Engines that a run begins with
    are ready without this event."""

    engine: int
    incarnation: int
    version: int
    """Version of the weights that the engine came up with."""


class EngineLost(BaseEvent, frozen=True, kw_only=True):
    """The engine has ended, hangs, or computes what cannot be used. Events that this incarnation of
    the engine (counted by its replacements) still sends are ignored."""

    engine: int
    incarnation: int
    reason: str


class TrainerLost(BaseEvent, frozen=True, kw_only=True):
    """A process of the trainer has ended or can be used no more, so that all of them are lost.
    Commands that they had not answered are begun again once they are back."""

    incarnation: int
    """How often the trainer's processes had been started anew before this loss."""
    reason: str


class TrainerReady(BaseEvent, frozen=True, kw_only=True):
    """Answer to `RestoreTrainer`: the trainer has the weights of `version` again, and goes on with
    the commands that it had not answered."""

    incarnation: int
    version: int
    """Version of the weights that the trainer has now."""


class ToolCall(NamedTuple):
    """A call of a tool that a message of the model made."""

    tool: str
    """Name of the tool. Empty: the model asked for a tool that does not exist."""
    seconds: float | None
    """Seconds from the call to its result. None: the call was not run, since there is no such tool
    or its arguments were wrong."""
    is_well: bool
    """False if the call was not run, or raised an error, of which the model was told."""


class Acted(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Act`: the environment's answer to the model's message, or the episode's loss."""

    sample: SampleId
    turn: int
    num_tokens: int = 0
    """Number of tokens that the environment's answer adds to the sample."""
    is_over: bool = False
    """True if the episode is over: the model is not asked again."""
    seconds: float | None = None
    """Seconds that the environment took for the answer, without waiting in a queue. They count for
    the trajectory's time limit, and adaptive deadlines follow them. None: not measured."""
    reason: str = ""
    """Why the episode is over, as a finish reason ("" means "done"), or why it was lost."""
    cause: str = ""
    """Cause of a lost episode: "environment" (it raised), "deadline" (too slow), "infrastructure"
    (its process died: worth a retry), "prompt" (that is unusable) or "cancelled"."""
    calls: Omitted[tuple[ToolCall, ...]] = ()
    """Tool calls that the model's message asked for, in order, without those that the environment
    made on its own account. If the answer was too slow, the last call had not ended."""


class SampleScored(BaseEvent, frozen=True, kw_only=True):
    """The reward's verdict on a sample. Without one `value` is None, and `reason` says why."""

    sample: SampleId
    value: float | None
    parts: Mapping[str, float | None] = msgspec.field(default_factory=dict)
    """Value of each reward function, by name. None: that function gave no verdict."""
    reason: str = ""
    seconds: float | None = None
    """Seconds of the check, without waiting; deadlines adapt to them. None: not measured."""
    correct: bool | None = None
    """True if the reward found the response correct. None: it is correct if `value` is above 0."""
    timed_out: bool = False
    """True if the checked response ran into its time limit, and so counts as wrong."""
    cause: str = ""
    """Cause of a missing verdict: "sample" (this response cannot be judged), "deadline" (the reward
    was too slow), "infrastructure" (a worker or endpoint failed: worth a retry) or "cancelled"."""


class Trained(BaseEvent, frozen=True, kw_only=True):
    """The optimizer step is done; `version` is the version of the new weights."""

    step: int
    version: int
    metrics: Mapping[str, int | float] = msgspec.field(default_factory=dict)


class WeightsSynced(BaseEvent, frozen=True, kw_only=True):
    """Answer to `SyncWeights`: every engine now samples from the weights of `version`."""

    version: int


class Committed(BaseEvent, frozen=True, kw_only=True):
    """The step is part of the run for good, and its checkpoint, if one was due, is on disk."""

    step: int
    checkpointed: bool = False


class StopRequested(BaseEvent, frozen=True, kw_only=True):
    """The run was asked to end after the current step, for example by Ctrl-C."""

    reason: str = "asked to stop"


class Entered(BaseEvent, frozen=True, kw_only=True):
    """The run has the devices of this pool, which `Enter` asked for, until `Leave`."""

    pool: PoolName
    switch_s: float = 0.0
    """Seconds that it took to wake up the engines or trainer that had been parked on the pool."""


class PoolNeeded(BaseEvent, frozen=True, kw_only=True):
    """The driver (the program that carries out commands) needs a pool of devices for work that no
    command asks for. The answer is `Enter`, once no other pool is held, or nothing if the run holds
    this pool. Sent only if pools are shared."""

    pool: PoolName
    purpose: str
    """What the pool is needed for: evaluation, or recovery of the trainer."""


class PoolUnneeded(BaseEvent, frozen=True, kw_only=True):
    """Takes back the last `PoolNeeded`: the driver (which carries out commands) needs no pool."""


class Reminded(BaseEvent, frozen=True, kw_only=True):
    """Answer to `Remind`: the seconds that the command named are over."""


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
