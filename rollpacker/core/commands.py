"""What to do: the only output of the core. Imperative, frozen, small.

Each kind has exactly one port on every bus, which the bus checks when it is connected; a
subclass of `BaseCommand` is one.
"""

from __future__ import annotations

from enum import StrEnum

from rollpacker.codec import Omitted
from rollpacker.core.ids import PoolName, PromptId, SampleId
from rollpacker.core.messages import BaseCommand


class RoundKind(StrEnum):
    PLAIN = "plain"
    """Tail batching is off: what is launched is awaited."""
    SHORT = "short"
    """More is launched than needed; the first to finish are kept."""
    CASCADE = "cascade"
    """Deferred prompts race once more, at their own factors."""
    LONG = "long"
    """Deferred prompts only; all are awaited."""
    FLUSH = "flush"
    """A long round, possibly smaller, that empties the queue at the end of an epoch or of the
    run."""


NOWHERE = -1
"""Instead of an engine's number: none is there."""


class FetchPrompts(BaseCommand, frozen=True, kw_only=True):
    """Ask the dataset cursor for `count` fresh prompts; answered by `PromptsFetched`."""

    count: int


class Launch(BaseCommand, frozen=True, kw_only=True):
    """Start these samples. Samples of one prompt are adjacent and share their prompt's prefill."""

    round: int
    kind: RoundKind
    samples: tuple[SampleId, ...]
    version: int
    tensor_parallel: int = 1
    """Devices per engine in this round; engines of another degree are laid out anew first, where
    the core knows of them by `Resize`."""
    speculate: Omitted[bool] = False
    """Decode speculatively in this round."""
    carried: Omitted[tuple[int, ...]] = ()
    """Tokens that an earlier launch of each sample's prompt left for it, aligned with `samples`;
    empty if nobody has any. The sample takes them up (`tail_batching.carry`). Of a trajectory all
    that came after its prompt, given tokens too."""
    replaces: Omitted[tuple[SampleId, ...]] = ()
    """The samples that the engine failed on and that these are launched for, aligned with
    `samples`: each draws with the noise of the one that it replaces. Empty: nobody failed."""
    engines: Omitted[tuple[int, ...]] = ()
    """Where each sample runs, aligned with `samples`. Empty: all on engine 0. `NOWHERE`: no engine
    is there; `Place` follows when one is."""


class Place(BaseCommand, frozen=True, kw_only=True):
    """Start these samples again, from what their launch, or the `Continue` of the turn at hand,
    gave them and under their own ids: their engine was lost, or none was there to take them. Of a
    sample that was to move, nothing of the move holds any longer."""

    samples: tuple[SampleId, ...]
    engines: tuple[int, ...]
    """Where each runs, aligned with `samples`."""


class Move(BaseCommand, frozen=True, kw_only=True):
    """Let these go on in another engine, with the tokens that they have; each is answered by
    `SampleMoved`, or by how it ended if it just had. One that was to move to another engine, and
    has not yet, goes to this one instead, which may be the one that it is in."""

    samples: tuple[SampleId, ...]
    engine: int
    """Where they go."""


class Replace(BaseCommand, frozen=True, kw_only=True):
    """Let a new engine take the place of a lost one, at the weights of `version`; answered by
    `EngineReady`. Said once more of one that came up with older weights: it takes these."""

    engine: int
    incarnation: int
    """Incarnation of the new engine."""
    version: int


class Resize(BaseCommand, frozen=True, kw_only=True):
    """End all engines, and replacements on their way, and lay the devices out anew: engine k has
    those from k * `tensor_parallel` on, and the weights of `version`. Each is answered by
    `EngineReady`, or by `EngineLost`. Said when no engine has a sample; those of the `Launch` that
    follows wait for a `Place`."""

    tensor_parallel: int
    """Devices of each engine."""
    incarnations: tuple[int, ...]
    """Incarnations of the new engines, from engine 0 on. There are no other engines."""
    version: int


class Abort(BaseCommand, frozen=True, kw_only=True):
    """Stop these samples now; each is answered by `SampleAborted` (or by a late
    `SampleGenerated`). One that waits for an engine (`NOWHERE`, or its engine was lost) has stopped
    already, without an answer; one that is to move stays, and its engine answers."""

    samples: tuple[SampleId, ...]


class Act(BaseCommand, frozen=True, kw_only=True):
    """Give the sample's latest message to its environment; answered by `Acted`. Turn 0 has no
    message: begin the episode, whose prompt the answer is. Where environments need not be begun,
    turn 1 begins it."""

    sample: SampleId
    turn: int
    """Messages of the model so far."""
    timeout_s: float | None = None
    """The environment may take so many seconds for each answer. None: its own limit holds."""
    retry: Omitted[int] = 0
    """How often it was said before: the episode was lost each time. It is played again from its
    start, with the same messages, up to this one."""


class CancelAct(BaseCommand, frozen=True, kw_only=True):
    """Nobody needs these episodes any more: end them. Those whose `Act` was not answered still are,
    by `Acted` with an answer that was there already or with cause "cancelled"."""

    samples: tuple[SampleId, ...]


class Continue(BaseCommand, frozen=True, kw_only=True):
    """Go on with these: what their environments gave them stands behind what they have, and the
    model's next message begins. Each is answered as one that was launched."""

    samples: tuple[SampleId, ...]
    engines: Omitted[tuple[int, ...]] = ()
    """Engine of each sample, as in `Launch`: where possible the one that generated the turn
    before."""


class LetGo(BaseCommand, frozen=True, kw_only=True):
    """Engines need not keep what they computed of these, which are with their environments: the
    room is for others. They are computed again when they go on. Of those of `Conclude` and
    `CancelAct` nothing is kept, unsaid."""

    samples: tuple[SampleId, ...]


class Conclude(BaseCommand, frozen=True, kw_only=True):
    """The trajectory is over: its episode can end, and what it came to is laid down as the sample's
    response. Tokens that were given after its last message are no part of it."""

    sample: SampleId
    reason: str
    """Finish reason of the trajectory: "done" or what the environment says, "length" (a message was
    cut off), or the limit that was reached: "turns", "tokens", "environment_s"."""


LIMITS = frozenset(("length", "tokens", "turns", "environment_s", "truncated"))
"""Finish reasons of what a limit ended; the last of them: one of the environment's own."""

OF_TURNS = (Act, CancelAct, Continue, LetGo, Conclude)
"""Said only where samples take turns with environments (`JobConfig.acting`)."""


class Score(BaseCommand, frozen=True, kw_only=True):
    """Judge this generated sample; answered by `SampleScored`."""

    sample: SampleId
    timeout_s: float | None = None
    """The check (of a program: each of its tests) may run for so many seconds. None: the reward's
    own limit holds."""
    retry: int = 0
    """How often it was asked for before: the machinery failed."""


class CancelScore(BaseCommand, frozen=True, kw_only=True):
    """Nobody needs these verdicts any more: end the checks. Each is still answered by
    `SampleScored`, with a verdict that was there already or with cause "cancelled"."""

    samples: tuple[SampleId, ...]


class Defer(BaseCommand, frozen=True, kw_only=True):
    """The prompts join the long queue. Responses that were generated for them in this round may be
    released."""

    prompts: tuple[PromptId, ...]


class Drop(BaseCommand, frozen=True, kw_only=True):
    """This prompt will not be trained on, for this reason. Recorded, never silent."""

    prompt: PromptId
    reason: str


class Release(BaseCommand, frozen=True, kw_only=True):
    """The devices are not needed for the rest of the round: their engines hand their requests, with
    what was generated of them, to the others, and the trainer may use the devices."""

    devices: tuple[int, ...]


class StartGradients(BaseCommand, frozen=True, kw_only=True):
    """Accumulate the gradients of these groups now, while the round goes on. No update: the
    groups come again in the step's `TrainOn`, which asks for the rest and applies the step."""

    step: int
    groups: tuple[tuple[SampleId, ...], ...]
    devices: Omitted[tuple[int, ...]] = ()
    """Devices that compute the gradients, released by their engines. Empty: all devices of the
    trainer."""


class TrainOn(BaseCommand, frozen=True, kw_only=True):
    """One optimizer step on these groups; answered by `Trained`.

    Groups are in the order in which their prompts came to the round, and the samples of a group in
    index order, whatever order they finished in. Every sample listed has a verdict.
    """

    step: int
    groups: tuple[tuple[SampleId, ...], ...]
    weights: tuple[tuple[float, ...], ...] | None = None
    """Weight of each sample's loss, aligned with `groups`; they undo the selection by length. Their
    mean is 1 over many steps, not in one. None: all 1."""
    num_missing: int = 0
    """Dynamic sampling gave up refilling: so many groups are fewer than the step should have."""
    num_streamed: int = 0
    """Samples whose gradients were asked for before, by `StartGradients`."""
    not_streamed: str = ""
    """Why that was done with none of them, if it should have been."""


class SyncWeights(BaseCommand, frozen=True, kw_only=True):
    """Bring the engines to `version`; answered by `WeightsSynced`."""

    version: int


class RestoreTrainer(BaseCommand, frozen=True, kw_only=True):
    """Let new processes take the place of the lost ones, with weights and optimizer as they were
    after the optimizer step that made `version`; answered by `TrainerReady`, or by `TrainerLost`.
    Nothing else is said again: of `TrainOn`, `SyncWeights` or `Commit`, what was not answered is
    done from its beginning. Gradients that were begun ahead of their step are not: `TrainOn` has
    all groups."""

    incarnation: int
    """Incarnation of the new processes."""
    version: int


class Commit(BaseCommand, frozen=True, kw_only=True):
    """Make the step durable; answered by `Committed`.

    The job's `state()` at this moment is what a checkpoint holds: a run restored from it continues
    when it is given `Committed` again.
    """

    step: int
    last: bool
    """Nothing follows, as far as is known now."""
    stopping: bool = False
    """The run was asked to end here, and quickly."""
    checkpoint: Omitted[bool] = False
    """Write one, after the evaluation if that is due too."""
    evaluate: Omitted[bool] = False
    """Evaluate this step. One that is due when the run is asked to stop waits for its resume."""


class Enter(BaseCommand, frozen=True, kw_only=True):
    """Wait until the devices of this pool are the run's, and wake up who is parked there; answered
    by `Entered`. The rollout pool's engines then have the weights that were published last."""

    pool: PoolName
    purpose: str
    """round, step, turns, or what `PoolNeeded` says."""


class Leave(BaseCommand, frozen=True, kw_only=True):
    """Park who is on this pool's devices, and give them to others; after what was said before. Said
    of a pool that is still waited for, it ends the wait, and no `Entered` follows."""

    pool: PoolName


class Remind(BaseCommand, frozen=True, kw_only=True):
    """Say `Reminded` after so many seconds. The last one holds: what an earlier one asked for may
    still come, or not. Only where pools are shared."""

    after_s: float


class Finish(BaseCommand, frozen=True, kw_only=True):
    """The run is over; no command follows."""

    reason: str
    failed: bool = False
    """The run cannot do what it is for; going on would only waste time."""


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
