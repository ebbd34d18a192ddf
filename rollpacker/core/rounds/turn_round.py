"""A round whose samples are trajectories: messages of the model, and its environment's answers.

    SampleGenerated, "stop":    Act, since the environment has the turn;
    ... if it was cut off:      Conclude, and the sample is generated;
    Acted:                      Continue, since the engine has the next turn;
    ... over, or at a limit:    Conclude, and the sample is generated;
    ... of turn 0:              Launch, since the environment has given the prompt;
    ... if it was lost:         Act once more, or the sample has failed.

Otherwise it is like a round of single responses: trajectories race, are aborted and are deferred.
`CancelAct` stops one whose environment has the turn, without an answer of the engine. A deferred
trajectory is sampled again turn by turn, and compared with what it was (`Retracing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from rollpacker.core.checks.acting import Acting, Episode, Retracing
from rollpacker.core.checks.reward_schedule import RewardSchedule
from rollpacker.core.commands import CancelAct, Command, Conclude, Continue, LetGo, Release
from rollpacker.core.events import (
    Acted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
)
from rollpacker.core.fleet.stream_plan import StreamPlan
from rollpacker.core.ids import SampleId
from rollpacker.core.lifecycle import SampleState, check
from rollpacker.core.rounds.groups import Group, RoundPlan
from rollpacker.core.rounds.round import ACTING, GENERATED, LAUNCHED, Round, StrayEventError, listed


class TurnRound(Round):
    """A `Round` whose samples take turns with environments; `on_acted` handles their answers."""

    def __init__(
        self,
        plan: RoundPlan,
        rewards: RewardSchedule,
        late: Counter[str],
        acting: Acting,
        stream: StreamPlan,
    ) -> None:
        """`stream`: plan of gradients before the round's end, which hears of each sample's end."""
        super().__init__(plan, rewards, late)
        self._acting = acting
        self._stream = stream
        self._begins = acting.config.begins
        self._ended: list[tuple[int, bool]] = []
        """Tokens of each sample ended since `stream` was last told, and whether it was complete."""
        self._num_told = 0
        """Number of launched samples that `stream` knows of."""
        self.num_acting = 0
        """Number of samples that wait for their environment: for an answer, or for the prompt."""

    def launch(self) -> list[Command]:
        """Commands that start the round. Where environments give the prompts, these ask for them,
        and each sample is launched once its prompt is there."""
        commands = super().launch()
        self._num_told = self.num_launched
        return commands

    def waiting_for(self) -> str:
        """What the round waits for, in words, for a deadline: responses, answers or verdicts."""
        episodes = self._acting.episodes
        acting = [sample for sample, episode in episodes.items() if episode.acts]
        if not acting:
            return super().waiting_for()
        answers = f"{listed(acting, 'answer')} from the environments"
        if len(acting) == self.num_under_way:
            return answers
        return f"{super().waiting_for()}, {answers} among them"

    # -- events ------------------------------------------------------------------------

    def on_generated(self, event: SampleGenerated) -> list[Command]:
        """Handles a message of the model, which goes to its environment or ends the trajectory."""
        sample = event.sample
        episode, start = self._in_engine(event)
        in_all = start + event.num_tokens
        group, index = self._group_of(sample)
        episode.retracing.drawn(start, event.num_tokens, event.num_kept)
        if group.states[index] is not LAUNCHED:
            late = replace(event, num_tokens=in_all, num_kept=episode.retracing.kept)
            commands = super().on_generated(late)
            group.whole[index] = False  # the trajectory is not
            commands = self._told(commands, in_all)
            return [*commands, LetGo(samples=(sample,))] if event.num_held else commands
        if event.version != self._version:
            raise self._wrong_version(event)
        self.preemptions += event.preemptions
        episode.turns += 1
        episode.tokens, episode.given = in_all, 0
        if event.finish_reason == "stop":
            group.states[index] = check(LAUNCHED, ACTING)
            episode.acts = episode.is_open = True
            self.num_acting += 1
            let_go = self._acting.kept.leave(event)
            asked = self._acting.ask(sample, episode.tokens)
            return [*asked, LetGo(samples=tuple(let_go))] if let_go else asked
        most = self._acting.config.limits.max_trajectory_tokens
        cut_off = most is not None and episode.tokens >= most
        return self._told(self._conclude(sample, "tokens" if cut_off else event.finish_reason))

    def on_acted(self, event: Acted, retry: int) -> list[Command]:
        """Handles the environment's answer to an `Act` that was given `retry` times before."""
        sample = event.sample
        self._acting.kept.back(sample, None if event.cause else event.time_s)
        episode = self._acting.episodes.get(sample)
        if episode is None or not episode.acts:
            self._late["Acted"] += event.cause != "cancelled"
            return self._start_waiting(sample)
        if event.turn != episode.turns or event.cause == "cancelled":
            raise StrayEventError(f"{event} in turn {episode.turns} of a sample that is needed")
        if event.cause == "infrastructure" and retry < self._acting.max_retries:
            return [self._acting.ask_again(sample, retry)]
        episode.acts = False
        self.num_acting -= 1
        if event.cause:
            ended = self._end_episodes([sample])  # some of it may be there still
            commands = [*ended, *self._lost(event, *self._group_of(sample))]
        else:
            commands = self._go_on(event, episode)
        return self._told([*commands, *self._start_waiting(sample)])

    def on_scored(self, event: SampleScored) -> list[Command]:
        """Handles a verdict as `Round.on_scored` does. The prompt may need fewer samples now, so
        those that wait for environments are put in order again."""
        commands = super().on_scored(event)
        self._acting.look_again(event.sample.prompt)
        return commands

    def on_aborted(self, event: SampleAborted) -> list[Command]:
        """Handles a stopped sample as `Round.on_aborted` does; its tokens are those of all its
        turns (messages and answers), not only of the last."""
        episode, start = self._in_engine(event)
        if episode.retracing.stopped(start, event.num_tokens, event.num_kept):
            episode.tokens = start + event.num_tokens
        group, index = self._group_of(event.sample)
        num_tokens, num_kept = _let_go(episode, group, index)
        stopped = replace(event, num_tokens=num_tokens, num_kept=num_kept)
        return self._told(super().on_aborted(stopped), num_tokens, is_complete=False)

    def on_failed(self, event: SampleFailed) -> list[Command]:
        """Handles a sample that the engine failed on, and ends its episode."""
        self._in_engine(event)
        commands = [*self._end_episodes([event.sample]), *super().on_failed(event)]
        return self._told(commands, 0, is_complete=False)

    # -- turns -------------------------------------------------------------------------

    def _go_on(self, event: Acted, episode: Episode) -> list[Command]:
        sample = event.sample
        episode.given = event.num_tokens
        episode.environment_s += event.seconds or 0.0
        if event.is_over:
            return self._conclude(sample, event.reason or "done")
        group, index = self._group_of(sample)
        if not event.turn:  # what it gave is the prompt
            episode.given = 0
            group.states[index] = check(ACTING, LAUNCHED)
            return super()._launch([sample], episode.replaces)
        tokens = episode.tokens + episode.given
        limits = self._acting.config.limits
        reason = limits.reached(episode.turns, tokens, episode.environment_s)
        if reason:
            return self._conclude(sample, reason)
        group.states[index] = check(ACTING, LAUNCHED)
        return [Continue(samples=(sample,))]

    def _conclude(self, sample: SampleId, reason: str) -> list[Command]:
        episode = self._acting.episodes[sample]
        episode.is_open = False
        group, index = self._leave_engine(sample, episode.tokens, episode.retracing.kept)
        group.whole[index] = True
        group.states[index] = check(group.states[index], GENERATED)
        self._ended.append((episode.tokens, True))
        concluded = Conclude(sample=sample, reason=reason)
        commands = [concluded, *self._generated(group, index, episode.tokens)]
        self._acting.look_again(sample.prompt)
        return commands

    def _lost(self, event: Acted, group: Group, index: int) -> list[Command]:
        """Fails the sample of a lost episode, and replaces it if that is allowed. If the
        environment raised or was too slow, the replacement has other random numbers, since the same
        messages would end alike. If the prompt is unusable, no sample of it is replaced."""
        self._leave_engine(event.sample, 0, 0)
        self._ended.append((0, False))
        if event.cause == "prompt":
            group.num_retries = self.plan.max_retries
        # Nothing that the sample did: a process has many episodes, and takes all of them along.
        is_chance = event.cause == "infrastructure"
        return self._failed(group, index, is_chance=is_chance, of_place=is_chance)

    def _begin_as(self) -> SampleState:
        return ACTING if self._begins else LAUNCHED

    def _launch(
        self, samples: list[SampleId], replaces: tuple[SampleId, ...] = ()
    ) -> list[Command]:
        episodes = self._acting.episodes
        # Who failed before its launch is named nowhere else: name whose noise it was to have.
        replaces = tuple((episodes[one].replaces or (one,))[0] for one in replaces)
        for sample in samples:
            group, index = self._group_of(sample)
            retracing = Retracing(group.carried_at(index).tokens)
            episodes[sample] = Episode(acts=self._begins, replaces=replaces, retracing=retracing)
        if not self._begins:
            return super()._launch(samples, replaces)
        self.num_acting += len(samples)
        return [command for sample in samples for command in self._acting.ask(sample)]

    def _stop(self, running: list[SampleId], unneeded: list[SampleId]) -> list[Command]:
        episodes = self._acting.episodes
        acting = [sample for sample in running if episodes[sample].acts]
        in_engine = [sample for sample in running if not episodes[sample].acts]
        self._acting.forget(acting)
        self.num_acting -= len(acting)
        for sample in acting:
            episode = episodes[sample]
            episode.acts = False
            group, index = self._group_of(sample)
            num_tokens, num_kept = _let_go(episode, group, index)
            self._leave_engine(sample, num_tokens, num_kept)
            group.whole[index] = num_kept is None and group.carried_at(index).whole
            self._ended.append((num_tokens, False))
        return [*super()._stop(in_engine, unneeded), *self._end_episodes(running)]

    def _end_episodes(self, samples: Iterable[SampleId]) -> list[Command]:
        episodes = self._acting.episodes
        samples = [sample for sample in samples if sample in episodes and episodes[sample].is_open]
        for sample in samples:
            episodes[sample].is_open = False
            self._acting.kept.back(sample)
        return [CancelAct(samples=tuple(samples))] if samples else []

    def _start_waiting(self, sample: SampleId) -> list[Command]:
        if not self._acting.num_waiting:
            return []
        return self._acting.start_waiting(sample.prompt.source, self.missing)

    # -- bookkeeping -------------------------------------------------------------------

    def _told(
        self, commands: list[Command], num_tokens: int | None = None, *, is_complete: bool = True
    ) -> list[Command]:
        """Reports to `stream` all samples that ended, and one more with `num_tokens` tokens (None:
        no other). Returns `commands`, and `Release` if devices are to be released now."""
        if num_tokens is not None:
            self._ended.append((num_tokens, is_complete))
        ended, self._ended = self._ended, []
        added, self._num_told = self.num_launched - self._num_told, self.num_launched
        if not self._stream.may_release:
            return commands
        for num_tokens, is_complete in ended:
            if not is_complete:
                self._stream.on_stopped(num_tokens)
            elif devices := self._stream.on_finished(num_tokens):
                commands.append(Release(devices=devices))
        if added:
            self._stream.on_added(added)
        return commands

    def _in_engine(
        self, event: SampleGenerated | SampleAborted | SampleFailed
    ) -> tuple[Episode, int]:
        """Returns the episode of a sample that an engine has, and the trajectory's tokens before
        the message that the engine generates. Raises `StrayEventError` for any other sample."""
        episode = self._acting.episodes.get(event.sample)
        if episode is None:
            raise self._stray(event.sample)
        if episode.acts:
            raise StrayEventError(f"{event}: its turn is with the environment")
        return episode, episode.tokens + episode.given


def _let_go(episode: Episode, group: Group, index: int) -> tuple[int, int | None]:
    """Returns the number of tokens of a stopped trajectory that can be kept, and how many of these
    equal those of an earlier launch. None: not compared, and all of the earlier ones are kept."""
    kept = episode.retracing.kept
    if kept is None and episode.retracing.carried:
        return group.carried_at(index).tokens, None
    return episode.tokens, kept
