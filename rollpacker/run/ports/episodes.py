"""The environments' port: carries out the core's commands `Act`, `CancelAct` and `Conclude`, and
answers with `Acted`; it also makes the engines' requests for each turn. Everything is used on the
event loop, except for commands and engine outputs, which come in engine threads under the bus's
lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field

from rollpacker.bus import Routes
from rollpacker.core.commands import Act, CancelAct, Conclude
from rollpacker.core.events import Acted, SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import GenerationRequest, Response, SamplingParams
from rollpacker.environments.environment import Answered, Begun, Episode, Lost
from rollpacker.run.ports.carried import CarriedTokens
from rollpacker.run.ports.carried_turns import CarriedTurns
from rollpacker.run.ports.player import Play, Player, ends_of
from rollpacker.run.ports.scoring import Scoring
from rollpacker.run.ports.shared import Shared

_CANCELLED = Lost(reason="not needed any more", cause="cancelled")


@dataclass(eq=False, slots=True)
class Episodes:
    """The episodes of the current step, each a sample that takes turns with an environment."""

    shared: Shared
    scoring: Scoring
    player: Player
    _: KW_ONLY
    rows: Sequence[PromptRow]
    carried: CarriedTokens
    let_go_of: Callable[[Sequence[SampleId]], None] = lambda samples: None
    """Tells engines to discard their caches of these samples. Called under the bus's lock."""
    _turns: CarriedTurns = field(init=False)
    _plays: dict[SampleId, Play] = field(default_factory=dict, init=False)
    _noise: dict[SampleId, SampleId | None] = field(default_factory=dict, init=False)
    """For each sample: the sample with whose random numbers it is drawn. None: with its own."""
    _tasks: dict[SampleId, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _concluded: list[Play] = field(default_factory=list, init=False)
    """Episodes that the core has concluded (ended) in this step, for the step's metrics."""
    _lost: dict[str, int] = field(default_factory=dict, init=False)
    """Number of episodes lost in this step, by cause."""

    def __post_init__(self) -> None:
        self._turns = CarriedTurns(self.carried)

    def routes(self) -> Routes:
        return {
            Act: self._on_act,
            CancelAct: self._on_cancel,
            Conclude: self._conclude,
        }

    # -- for the engines' port, under the bus's lock -----------------------------------------------

    def launched(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Returns the engines' requests for samples' first turns: `requests` with the prompts that
        the samples' environments gave, and with tokens of earlier steps to draw again."""
        found = []
        for request in requests:
            play = self._play_of(request.sample)
            self._noise[request.sample] = request.noise
            found.append(self._turns.launched(self.player.launched(play, request)))
        return found

    def further(
        self, samples: Sequence[SampleId], sampling: SamplingParams
    ) -> list[GenerationRequest]:
        """Returns the engines' requests for the next turns of these samples."""
        plays = [self._plays[sample] for sample in samples]
        return [
            self._turns.further(self.player.request(play, sampling, self._noise[play.sample]), play)
            for play in plays
        ]

    def heard(self, event: SampleGenerated, response: Response) -> None:
        """Add a turn that an engine has generated to its episode."""
        play = self._plays.get(response.sample) or self._turns.play_of(response.sample)
        if play is not None:
            self._turns.drawn(event, play, response)
            play.count_kept(event.num_reused)
            play.heard(response)

    def let_go(self, event: SampleAborted | SampleFailed, response: Response | None) -> None:
        """Note that an engine was stopped amid a sample, or failed on it. An episode that its
        environment has not begun is forgotten; others stay until the core cancels them."""
        play = self._plays.get(event.sample)
        if isinstance(event, SampleAborted):
            self._turns.aborted(event, play, response)
        if play is not None and not play.is_begun:
            del self._plays[event.sample]

    def _play_of(self, sample: SampleId) -> Play:
        play = self._plays.get(sample)
        if play is None:
            play = self._plays[sample] = self.player.new(sample, self.rows[sample.prompt.row])
        return play

    # -- commands ----------------------------------------------------------------------------------

    def _conclude(self, command: Conclude) -> None:
        """End a trajectory. Its response goes to the desk at once, as rewards may need it next."""
        self.let_go_of([command.sample])
        play = self._plays.pop(command.sample)
        response = play.response(command.reason)
        self._turns.concluded(response)
        self.shared.desk.lay_down(response)
        known = self.shared.desk[command.sample]
        known.episode = self.player.episode(play)
        self._concluded.append(play)
        if not self.player.must_finish(play, command.reason):
            self.shared.main.post_together(self.player.end, play)
            return
        known.finish = Future()
        known.finish.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self.shared.main.post_together(self._finish, play, known.finish)

    def _finish(self, play: Play, future: Future[Episode | Lost]) -> None:
        task = asyncio.ensure_future(self._finished(play, future))
        self._tasks[play.sample] = task
        self.shared.watch.num_worth += 1
        task.add_done_callback(lambda done: self._finish_ended(play.sample, done))

    async def _finished(self, play: Play, future: Future[Episode | Lost]) -> None:
        try:
            lost = await self.player.finish(play)
            future.set_result(lost or self.player.episode(play))
        finally:
            self.player.end(play)

    def _finish_ended(self, sample: SampleId, task: asyncio.Task[None]) -> None:
        if self._tasks.get(sample) is task:
            del self._tasks[sample]
        error = None if task.cancelled() else task.exception()
        self.shared.watch.num_worth -= 1
        self.shared.watch.sign()
        if error is not None:
            self.shared.main.fail(error)

    def _on_act(self, command: Act) -> None:
        self.carried.begun(command.sample.prompt)
        self.shared.main.post_together(self._start, command)

    def _on_cancel(self, command: CancelAct) -> None:
        plays = [self._plays.get(sample) for sample in command.samples]
        self._turns.cancelled([play for play in plays if play is not None])
        self.shared.main.post_together(self._cancel, command.samples)

    def _start(self, command: Act) -> None:
        task = asyncio.ensure_future(self._act(command))
        self._tasks[command.sample] = task
        task.add_done_callback(lambda done: self._done(command, done))

    def _cancel(self, samples: Sequence[SampleId]) -> None:
        with self.shared.bus.lock:
            self.let_go_of(samples)
        for sample in samples:
            task = self._tasks.get(sample)
            if task is not None:
                task.cancel()
            with self.shared.bus.lock:
                play = self._plays.pop(sample, None)
            if play is not None:
                self.player.end(play)

    async def _act(self, command: Act) -> None:
        play = self._plays.get(command.sample)  # which needs no lock, that an engine may have
        if play is None:
            with self.shared.bus.lock:
                play = self._play_of(command.sample)
        answer: Begun | Answered | Lost
        if command.turn == 0:
            answer = await self.player.begin(play, timeout_s=command.timeout_s)
        else:
            answer = await self.player.act(
                play, command.turn, anew=command.retry > 0, timeout_s=command.timeout_s
            )
        self._answer(command, play, answer)

    def _answer(self, command: Act, play: Play | None, answer: Begun | Answered | Lost) -> None:
        sample, turn = command.sample, command.turn
        match answer:
            case Lost():
                if answer.cause != "cancelled":
                    self._lost[answer.cause] = self._lost.get(answer.cause, 0) + 1
                event = Acted(
                    time_s=0.0,
                    sample=sample,
                    turn=turn,
                    seconds=answer.seconds,
                    reason=answer.reason,
                    cause=answer.cause,
                    calls=answer.calls,
                )
            case Begun():
                seconds = round(answer.seconds, 6)
                event = Acted(time_s=0.0, sample=sample, turn=turn, seconds=seconds)
            case Answered():
                assert play is not None
                is_over = answer.done or answer.truncated
                event = Acted(
                    time_s=0.0,
                    sample=sample,
                    turn=turn,
                    num_tokens=0 if is_over else play.num_given,
                    is_over=is_over,
                    seconds=round(answer.seconds, 6),
                    reason="truncated" if answer.truncated else "",
                    calls=answer.calls,
                )
        self.shared.bus.take(event)
        if self.scoring.waits:  # no engine is there to hand over what was asked for
            self.scoring.start()

    def _done(self, command: Act, task: asyncio.Task[None]) -> None:
        if self._tasks.get(command.sample) is task:
            del self._tasks[command.sample]
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._answer(command, None, _CANCELLED)
        self.shared.watch.sign()
        if error is not None:
            self.shared.main.fail(error)

    # -- a step's end ------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of this step's episodes, and forgets the episodes. Used under the
        bus's lock."""
        concluded, self._concluded = self._concluded, []
        lost, self._lost = self._lost, {}
        self.player.forget_prompts()
        self._turns.settle()
        # Engines are empty: who does not act here was let go of without anybody's saying so.
        self._plays = {s: play for s, play in self._plays.items() if s in self._tasks}
        self._noise = {s: noise for s, noise in self._noise.items() if s in self._plays}
        found = ends_of(concluded)
        found.update({f"episodes/lost/{cause}": float(count) for cause, count in lost.items()})
        return found
