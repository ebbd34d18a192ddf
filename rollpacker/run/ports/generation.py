"""The engines' port: carries out the core's commands `Launch`, `Continue`, `Place`, `Move` and
`Abort`, and tells the core how samples ended and which engines were lost.

An engine in the run's own process reports between two decode steps and waits for the answer. What
the core commands when a sample has finished is done inside that call, so that an abort takes effect
at the same decode step in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TypeGuard

from rollpacker.bus import Routes
from rollpacker.core.commands import Abort, Continue, Launch, LetGo, Move, Place, Release
from rollpacker.core.events import (
    SampleAborted,
    SampleFailed,
    SampleGenerated,
)
from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import (
    NOT_NUMBERS,
    EngineError,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.run.errors import EnginesLost
from rollpacker.run.ports.carried import CarriedTokens
from rollpacker.run.ports.engines import EngineEvent, Engines, FleetEvent
from rollpacker.run.ports.episodes import Episodes
from rollpacker.run.ports.held import Handle
from rollpacker.run.ports.salvage import Salvage
from rollpacker.run.ports.scoring import Scoring
from rollpacker.run.ports.shared import Shared
from rollpacker.run.ports.shared_devices import SharedDevices
from rollpacker.run.ports.waiting import Collecting
from rollpacker.trainer.trainer import NonFiniteError

SALVAGED = ("perf/salvaged_samples", "perf/salvaged_tokens")
"""Names of the metrics for samples and tokens that a resume did not have to generate again."""


@dataclass(eq=False, slots=True)
class Generation:
    """The engines' port: carries out commands in the thread in which they come, and receives each
    engine's outputs in that engine's thread."""

    shared: Shared
    scoring: Scoring
    _: KW_ONLY
    engines: Engines
    devices: SharedDevices
    carried: CarriedTokens
    salvage: Salvage
    rows: Sequence[PromptRow]
    sampling: SamplingParams
    checkpoints: Path
    episodes: Episodes | None = None
    """Plays samples that take turns with environments. None if samples are single responses."""
    _collecting: Collecting | None = field(default=None, init=False)
    """Gathers engines' outputs during an evaluation, whose samples the core does not know. None
    between evaluations."""
    _policy_is_broken: bool = field(default=False, init=False)
    """Whether the weights have become NaN: the run ends, and outputs are ignored."""

    def routes(self) -> Routes:
        further: Routes = {}
        if self.episodes is not None:
            let_go = self.engines.let_go
            further = {Continue: self._continue, LetGo: lambda command: let_go(command.samples)}
        return {
            **further,
            Launch: self._launch,
            Place: self._place,
            Move: lambda command: self.engines.move(command.samples, command.engine),
            Abort: lambda command: self.engines.abort(command.samples),
            Release: lambda command: None,  # the moves of what its engines have come with it
        }

    def start(self) -> None:
        """Receive the engines' outputs from now on."""
        if self.episodes is not None:
            self.episodes.let_go_of = self.engines.let_go
        self.salvage.wake = lambda: self.shared.main.post(self._tell_salvaged)
        self._let_salvage_answer()
        self.engines.start(self._on_outputs, self._on_error, self._tell)

    async def collect(self, requests: Sequence[GenerationRequest]) -> Sequence[Response]:
        """Returns the engines' responses to requests that do not come from the core, as in an
        evaluation. Samples that fail are left out. Raises `DeadlineExceeded`, or the error of the
        only engine."""
        await self.devices.to_engines()
        collecting = Collecting(len(requests), asyncio.get_running_loop())
        self.shared.main.awaited = collecting.done
        watching = asyncio.ensure_future(self.shared.watch.check_engines_always())
        try:
            with self.shared.bus.lock:
                self._collecting = collecting
                self.engines.forget()
                self.engines.submit_anywhere(requests)
            what = "the responses of an evaluation"
            return await self.shared.watch.by(
                "generation_s", collecting.done, what, self.shared.watch.engine_works
            )
        finally:
            watching.cancel()
            self._collecting = self.shared.main.awaited = None

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Tell engines to discard their caches of these samples. For evaluations, which do not go
        through the core: in training the command `LetGo` does this."""
        with self.shared.bus.lock:
            self.engines.let_go(samples)

    def _launch(self, command: Launch) -> None:
        self.shared.desk.round_kind = self.shared.desk.round_kind or command.kind
        requests = self.carried.requests(command, self.rows, self.sampling)
        if self.episodes is None:
            self.salvage.launched(command.version, requests)
        else:
            requests = self.episodes.launched(requests)
        self.engines.submit(requests, command.engines)
        self._fetch_engines()

    def _continue(self, command: Continue) -> None:
        assert self.episodes is not None
        requests = self.episodes.further(command.samples, self.sampling)
        self.engines.submit(requests, command.engines)
        self._fetch_engines()

    def _place(self, command: Place) -> None:
        self.engines.place(command.samples, command.engines)
        self._fetch_engines()

    def _fetch_engines(self) -> None:
        """If requests wait for an engine whose device the trainer has, have the device moved
        back."""
        if self.devices.are_awaited:
            self.shared.main.later(self.devices.to_engines)

    def _on_outputs(self, handle: Handle, outputs: Sequence[EngineOutput]) -> None:
        """Handle outputs in the engine's thread. An engine in this process waits meanwhile, between
        two decode steps."""
        with self.shared.bus.lock:
            for output in outputs:
                is_its_own = self.engines.has(handle, output.event.sample)
                if self._collecting is not None:
                    event, response = self.engines.heard(handle, output)
                    if is_its_own and event is not None:
                        self._collecting.add(event, response)
                elif self._policy_is_broken:
                    return
                elif is_its_own and _is_not_numbers(output.event):
                    self._blame(handle, output.event)
                else:
                    event, response = self.engines.heard(handle, output)
                    self._take(event, response)
                    if is_its_own and event is not None:
                        self.salvage.ended(event, response)
            waits = self._collecting is None and self.scoring.waits
        if waits:  # outside of the lock, which the event loop would at once wait for
            self.shared.main.post(self.scoring.start)

    def _take(self, event: EngineEvent | None, response: Response | None) -> None:
        """Tell the core of an engine's event (None: there is nothing to tell), and keep the
        response for rewards and for later steps."""
        if event is None:
            return
        if self.episodes is not None:
            if isinstance(event, SampleGenerated) and response is not None:
                self.episodes.heard(event, response)
            elif isinstance(event, SampleAborted | SampleFailed):
                self.episodes.let_go(event, response)
        elif isinstance(event, SampleGenerated | SampleAborted) and response is not None:
            self.carried.ended(event, response)
            if isinstance(event, SampleGenerated):
                self.shared.desk.lay_down(response)
        self.shared.bus.take(event)

    def _let_salvage_answer(self) -> None:
        for handle in self.engines.living:
            handle.salvage = self.salvage

    def _tell_salvaged(self) -> None:
        """Tell the core the results in `salvage.bin` of samples launched after a resume. A sample
        aborted in the killed run, but not in this one, goes to its engine. Used on the loop."""
        told: list[int] = []
        with self.shared.bus.lock:
            for handle, output in self.salvage.outputs():
                self._on_outputs(handle, [output])
                if isinstance(output.event, SampleGenerated):
                    told.append(output.event.num_tokens)
            for handle, request in self.salvage.not_stopped():
                self.engines.submit([request], [handle.number])
            if told:
                counts = {SALVAGED[0]: len(told), SALVAGED[1]: sum(told)}
                self.shared.bus.note("salvaged", 0.0, self.shared.bus.job.step, counts)

    def _blame(self, handle: Handle, event: SampleFailed) -> None:
        """Handle a NaN in an engine's logits: lose the engine, or end the run if the weights have
        NaN."""
        if self.engines.blame(handle):
            self._policy_is_broken = True
            self.shared.main.post(self.shared.main.fail, self._broken_policy(event))
        else:
            self.engines.lose(handle, event.reason)

    def _tell(self, event: FleetEvent) -> None:
        """Tell the core of lost and new engines. In an evaluation, also submit a lost engine's
        requests to others; or end the run, if the core has given up on its engines."""
        self._let_salvage_answer()
        self.shared.bus.take(event)
        fleet = self.shared.bus.job.fleet
        if self._collecting is None or fleet is None:
            return
        if fleet.given_up:
            self.shared.main.post(self.shared.main.fail, EnginesLost(fleet.given_up))
        else:
            self.engines.place_anywhere()

    def _broken_policy(self, event: SampleFailed) -> NonFiniteError:
        step = self.shared.bus.job.step
        newest = self.checkpoints / f"step_{step:06d}"
        spoilt = f"; remove {newest} first, its weights are spoilt" if newest.exists() else ""
        return NonFiniteError(
            f"step {step + 1}: {event.reason} (sample {event.sample}). --resume goes on from the "
            f"last checkpoint{spoilt}. Lower train.learning_rate, or clip gradients more"
        )

    def _on_error(self, handle: Handle, error: BaseException) -> None:
        """Handle an engine's error, in any thread. The engine is lost if another can replace it;
        else the run ends."""
        if self.engines.make is None or not isinstance(error, EngineError):
            self.shared.main.post(self.shared.main.fail, error)
            return
        with self.shared.bus.lock:
            self.engines.lose(handle, str(error))


def _is_not_numbers(event: EngineEvent) -> TypeGuard[SampleFailed]:
    return isinstance(event, SampleFailed) and event.reason.startswith(NOT_NUMBERS)
