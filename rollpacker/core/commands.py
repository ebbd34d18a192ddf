"""Commands, the only output of the core (the scheduling code here): small frozen records of what is
to be done. Each kind is a subclass of `BaseCommand` and has exactly one port on every bus (the
method that carries commands of this kind out), which the bus checks when it is connected."""

from __future__ import annotations

from enum import StrEnum

from rollpacker.codec import Omitted
from rollpacker.core.ids import PoolName, PromptId, SampleId
from rollpacker.core.messages import BaseCommand


class RoundKind(StrEnum):
    PLAIN = "plain"
    """Tail batching is off or does not pay: the round waits for every sample that it launches."""
    SHORT = "short"
    """A race: more samples are launched than needed, and the first to finish are kept."""
    CASCADE = "cascade"
    """A race (the first to finish are kept) among prompts that an earlier race left unfinished."""
    LONG = "long"
    """Prompts that earlier rounds left unfinished are generated again, and all are awaited."""
    FLUSH = "flush"
    """A LONG round of any size that empties the queue at the end of an epoch or of the run."""
    AHEAD = "ahead"
    """No round of its own: prompts of the next step that are begun in slots which the round under
    way leaves empty."""


NOWHERE = -1
"""Number of the engine in a record about a sample that no engine has been given yet."""


class FetchPrompts(BaseCommand, frozen=True, kw_only=True):
    """Ask for the dataset's next `count` prompts. The event `PromptsFetched` is the answer."""

    count: int


class Launch(BaseCommand, frozen=True, kw_only=True):
    """Start generating these samples in engines (one "launch" of each). Samples of one prompt are
    adjacent and share its prefill."""

    round: int
    kind: RoundKind
    samples: tuple[SampleId, ...]
    version: int
    tensor_parallel: int = 1
    """Number of devices of each engine in this round. If it changes from one round to the next, and
    `FleetConfig.num_devices` is set, `Resize` is given first."""
    speculate: Omitted[bool] = False
    """True if engines decode speculatively (by checking drafted tokens) in this round."""
    carried: Omitted[tuple[int, ...]] = ()
    """Number of response tokens that an earlier launch (submission to an engine) of the prompt left
    for each sample, aligned with `samples`; generation goes on after these. Empty: none are left.
    Where samples take turns with environments, the environments' tokens count."""
    most_verified: Omitted[int | None] = None
    """Most carried tokens of each sample that its engine verifies in passes (all at once). Tokens
    beyond are decoded with the random numbers that they had. None: all carried tokens are
    verified."""
    replaces: Omitted[tuple[SampleId, ...]] = ()
    """Failed samples that these replace, aligned with `samples`: a replacement draws its tokens
    with the random numbers of the failed sample. Empty: nothing is replaced."""
    engines: Omitted[tuple[int, ...]] = ()
    """Number of the engine that each sample runs in, aligned with `samples`. Empty: all run in
    engine 0. `NOWHERE`: no engine is there yet, and `Place` follows once one is."""


class Place(BaseCommand, frozen=True, kw_only=True):
    """Start these samples again under their own ids, because their engine was lost or none was
    there to take them. They begin with the tokens that their last `Launch` or `Continue` began
    with, and an unfinished `Move` of such a sample is void."""

    samples: tuple[SampleId, ...]
    engines: tuple[int, ...]
    """Number of the engine that each sample runs in, aligned with `samples`."""


class Move(BaseCommand, frozen=True, kw_only=True):
    """Move these samples to another engine, with the tokens that they have. The answer for a sample
    is `SampleMoved`, or the event of its end if it had just ended. A sample whose earlier move is
    not done goes to this engine instead, which may be the one that it is still in."""

    samples: tuple[SampleId, ...]
    engine: int
    """Number, from 0, of the engine that the samples go to."""


class Replace(BaseCommand, frozen=True, kw_only=True):
    """Start a new engine in place of a lost one, with the weights of `version`; answered by
    `EngineReady`. Given again if the engine came up with older weights, which are then updated."""

    engine: int
    incarnation: int
    """Incarnation of the new engine: how often the engine of this number was replaced."""
    version: int


class Resize(BaseCommand, frozen=True, kw_only=True):
    """End all engines, and replacements that are being started, and regroup the devices: engine k
    has the `tensor_parallel` devices from k * `tensor_parallel` on, and the weights of `version`.
    Each engine answers by `EngineReady`, or is reported by `EngineLost`. Given only while no engine
    has a sample; those of the `Launch` that follows wait for a `Place`."""

    tensor_parallel: int
    """Number of devices of each engine."""
    incarnations: tuple[int, ...]
    """Incarnation (how often it was replaced) of each new engine: of engine 0, 1, and so on."""
    version: int


class Abort(BaseCommand, frozen=True, kw_only=True):
    """Stop these samples now. The answer for a sample is `SampleAborted`, or a late
    `SampleGenerated`. A sample that waits for an engine (`NOWHERE`, or its engine was lost) has
    stopped already, without an answer; one whose `Move` is not done stays in its engine."""

    samples: tuple[SampleId, ...]


class Act(BaseCommand, frozen=True, kw_only=True):
    """Give the sample's latest message to its environment; answered by `Acted`. In turn 0 there is
    no message yet: the environment begins the episode and answers with the prompt. Environments
    that need no such beginning start the episode at turn 1."""

    sample: SampleId
    turn: int
    """Number of messages that the model has written in this episode so far."""
    timeout_s: float | None = None
    """Seconds that the environment may take for an answer. None: its own limit holds."""
    retry: Omitted[int] = 0
    """How often this command was given before, because the episode was lost. The episode is then
    played again from its start, with the same messages, up to this one."""


class CancelAct(BaseCommand, frozen=True, kw_only=True):
    """End these episodes, which nobody needs any more. An `Act` on them that is still open is
    answered by `Acted`, with an answer that was there already or with cause "cancelled"."""

    samples: tuple[SampleId, ...]


class Continue(BaseCommand, frozen=True, kw_only=True):
    """Let the model write its next message in these samples, after what their environments
    answered. Each sample ends in the same events as after `Launch`."""

    samples: tuple[SampleId, ...]
    engines: Omitted[tuple[int, ...]] = ()
    """Number of each sample's engine: where possible the one that generated the last turn."""


class LetGo(BaseCommand, frozen=True, kw_only=True):
    """Allow engines to free the keys and values of these samples, whose environments are to answer,
    to make room for others; they are computed again when the samples go on. For samples of
    `Conclude` and `CancelAct`, engines free them without this command."""

    samples: tuple[SampleId, ...]


class Conclude(BaseCommand, frozen=True, kw_only=True):
    """End the episode of this sample and store the trajectory as the sample's response. Tokens that
    the environment gave after the model's last message are no part of it."""

    sample: SampleId
    reason: str
    """Finish reason of the trajectory: "done" or what the environment says, "length" (a message was
    cut off), or the limit that was reached: "turns", "tokens", "environment_s"."""


LIMITS = frozenset(("length", "tokens", "turns", "environment_s", "truncated"))
"""Finish reasons of trajectories that a limit ended; "truncated" is an environment's own limit."""

OF_TURNS = (Act, CancelAct, Continue, LetGo, Conclude)
"""Kinds of command given only where samples take turns with environments (`JobConfig.acting`)."""


class Score(BaseCommand, frozen=True, kw_only=True):
    """Ask the reward for its verdict on this generated sample; answered by `SampleScored`."""

    sample: SampleId
    timeout_s: float | None = None
    """Seconds that the check, or each test of a program, may take. None: the reward's own limit."""
    retry: int = 0
    """How often this verdict was asked for before, because a worker or an endpoint failed."""


class CancelScore(BaseCommand, frozen=True, kw_only=True):
    """End these checks, whose verdicts nobody needs any more. Each check is still answered by
    `SampleScored`, with a verdict that was there already or with cause "cancelled"."""

    samples: tuple[SampleId, ...]


class Defer(BaseCommand, frozen=True, kw_only=True):
    """Put these unfinished prompts into the queue for a later round. Responses that were generated
    for them in this round may be released."""

    prompts: tuple[PromptId, ...]


class Drop(BaseCommand, frozen=True, kw_only=True):
    """Give this prompt up: it will not be trained on. The reason, in words, is recorded."""

    prompt: PromptId
    reason: str


class Release(BaseCommand, frozen=True, kw_only=True):
    """Free these devices for the rest of the round: their engines hand unfinished samples, with the
    tokens that those have, to the other engines, and the trainer may use the devices."""

    devices: tuple[int, ...]


class StartGradients(BaseCommand, frozen=True, kw_only=True):
    """Accumulate the gradients of these groups (a prompt's samples) now, while the round goes on,
    without an optimizer step. The step's `TrainOn` lists these groups again, together with the rest
    of the batch, whose gradients are added before the optimizer step."""

    step: int
    groups: tuple[tuple[SampleId, ...], ...]
    devices: Omitted[tuple[int, ...]] = ()
    """Devices, freed by `Release`, that compute the gradients. Empty: all of the trainer's."""


class TrainOn(BaseCommand, frozen=True, kw_only=True):
    """Take one optimizer step on these groups; answered by `Trained`. Groups are in the order in
    which their prompts came to the round, and the samples of a group in index order, whatever order
    they finished in. Every sample listed has a verdict."""

    step: int
    groups: tuple[tuple[SampleId, ...], ...]
    weights: tuple[tuple[float, ...], ...] | None = None
    """Weight of each sample's loss, as in `groups`. Where the first samples to finish are kept,
    long responses are too rare and weigh more; over many steps the mean is 1. None: all are 1."""
    num_missing: int = 0
    """Number of groups that the step lacks because dropped prompts were not all replaced."""
    num_streamed: int = 0
    """Number of samples whose gradients were computed before, by `StartGradients`."""
    not_streamed: str = ""
    """Why no gradients were computed early, in words. Empty: some were, or none were due."""


class SyncWeights(BaseCommand, frozen=True, kw_only=True):
    """Give all engines the weights of `version`; answered by `WeightsSynced`."""

    version: int


class RestoreTrainer(BaseCommand, frozen=True, kw_only=True):
    """Start new trainer processes in place of the lost ones, with weights and optimizer as they
    were after the optimizer step that made `version`; answered by `TrainerReady` or `TrainerLost`.
    A `TrainOn`, `SyncWeights` or `Commit` that was not answered is then done from its beginning
    without being given again, but `StartGradients` is not: `TrainOn` has all groups."""

    incarnation: int
    """Incarnation of the new trainer processes: how often they have been started anew."""
    version: int


class Commit(BaseCommand, frozen=True, kw_only=True):
    """Make the step part of the run for good; answered by `Committed`. The job's `state()` at this
    moment is what a checkpoint holds: a restored run goes on when it is given `Committed` again."""

    step: int
    last: bool
    """True if the job knows of no step after this one."""
    stopping: bool = False
    """True if the run was asked to end after this step, and quickly."""
    checkpoint: Omitted[bool] = False
    """True if a checkpoint is to be written, after the evaluation if that is due too."""
    evaluate: Omitted[bool] = False
    """True if the weights are to be evaluated after this step. An evaluation that is due when the
    run is asked to stop is made when the run is resumed."""


class Enter(BaseCommand, frozen=True, kw_only=True):
    """Wait until the run may use this pool's devices, and wake up its engines or trainer, which
    `Leave` had parked there; answered by `Entered`. Engines then have the newest weights."""

    pool: PoolName
    purpose: str
    """Use of the pool: "round" (to begin one), "step" (to train), "turns" (to go on with samples
    whose environments answered), or the purpose of a `PoolNeeded`."""


class Leave(BaseCommand, frozen=True, kw_only=True):
    """Park the run's engines or trainer on this pool's devices (free the devices' memory) and give
    the devices to other jobs, once all commands before this one are done. If the run still waits
    for the pool, the wait ends and no `Entered` follows."""

    pool: PoolName


class Remind(BaseCommand, frozen=True, kw_only=True):
    """Send the event `Reminded` after `seconds`. A newer command replaces an earlier one, whose
    event may still come, or not. Given only where pools are shared."""

    after_s: float


class Finish(BaseCommand, frozen=True, kw_only=True):
    """End the run: no command follows."""

    reason: str
    failed: bool = False
    """True if the run ends since it cannot do its work, so that going on would only waste time."""


Command = (
    FetchPrompts
    | Launch
    | Place
    | Move
    | Replace
    | Resize
    | Abort
    | Act
    | CancelAct
    | Continue
    | LetGo
    | Conclude
    | Score
    | CancelScore
    | Defer
    | Drop
    | Release
    | StartGradients
    | TrainOn
    | SyncWeights
    | RestoreTrainer
    | Commit
    | Enter
    | Leave
    | Remind
    | Finish
)
