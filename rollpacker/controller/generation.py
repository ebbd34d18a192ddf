"""The engine's port: `Launch` and `Abort` in, finished, aborted and failed samples out.

The engine reports between two decode steps and waits for the answer: what the core says to a
sample that has finished is obeyed inside that call, so that an abort takes effect at the same
decode step in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from rollpacker.bus import Bus, Routes
from rollpacker.controller.carried import CarriedTokens
from rollpacker.controller.desk import Desk
from rollpacker.controller.main_task import MainTask
from rollpacker.controller.scoring import Scoring
from rollpacker.controller.waiting import Collecting
from rollpacker.controller.watch import Watch
from rollpacker.core.commands import Abort, Command, Launch, Move, Place, Release, Replace
from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.data.dataset import PromptRow
from rollpacker.rollout.engine import (
    NOT_NUMBERS,
    Engine,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.trainer.trainer import NonFiniteError


@dataclass(eq=False, slots=True)
class Generation:
    """Obeys in whatever thread the command comes; hears the engine in the engine's own."""

    bus: Bus
    main: MainTask
    desk: Desk
    scoring: Scoring
    watch: Watch
    _: KW_ONLY
    engine: Engine
    carried: CarriedTokens
    rows: Sequence[PromptRow]
    sampling: SamplingParams
    checkpoints: Path
    _collecting: Collecting | None = field(default=None, init=False)
    """What is gathered for an evaluation, of which the core does not know."""
    _policy_is_broken: bool = field(default=False, init=False)
    """The run ends for it; what the engine still reports is not looked at."""

    def routes(self) -> Routes:
        return {
            Launch: self._launch,
            Abort: lambda command: self.engine.abort(command.samples),
            **dict.fromkeys((Place, Move, Replace, Release), self._one_engine),
        }

    def start(self) -> None:
        """Listen to the engine from now on."""
        self.engine.start(self._on_outputs, self._on_error)

    async def collect(self, requests: Sequence[GenerationRequest]) -> Sequence[Response]:
        """The engine's responses to requests of which the core does not know. Samples that fail
        are left out.

        Raises what the engine died of, or `DeadlineExceeded`.
        """
        collecting = Collecting(len(requests), asyncio.get_running_loop())
        self._collecting = collecting
        self.main.awaited = collecting.done
        try:
            self.engine.submit(requests)
            what = "the responses of an evaluation"
            return await self.watch.by(
                "generation_s", collecting.done, what, self.watch.engine_works
            )
        finally:
            self._collecting = self.main.awaited = None

    def _launch(self, command: Launch) -> None:
        self.desk.round_kind = self.desk.round_kind or command.kind
        self.engine.submit(self.carried.requests(command, self.rows, self.sampling))

    def _one_engine(self, command: Command) -> None:
        raise AssertionError(f"{command}: a run has one engine, on one device")

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Called in the engine's thread, between two decode steps."""
        with self.bus.lock:
            if self._collecting is not None:
                self._collecting.add(outputs)
                return
            if self._policy_is_broken:
                return
            for output in outputs:
                event = output.event
                if isinstance(event, SampleFailed) and event.reason.startswith(NOT_NUMBERS):
                    self._policy_is_broken = True
                    self.main.post(self.main.fail, self._broken_policy(event))
                    return
                if not isinstance(event, SampleFailed):
                    self.carried.ended(event, output.response)
                if isinstance(event, SampleGenerated):
                    assert output.response is not None, f"{event.sample} has no response"
                    self.desk.lay_down(output.response)
                self.bus.take(event)
            waits = self.scoring.waits
        if waits:  # outside of the lock, which the event loop would at once wait for
            self.main.post(self.scoring.start)

    def _broken_policy(self, event: SampleFailed) -> NonFiniteError:
        """An update that was finite may still have spoilt the weights."""
        step = self.bus.job.step
        newest = self.checkpoints / f"step_{step:06d}"
        spoilt = f"; remove {newest} first, its weights are spoilt" if newest.exists() else ""
        return NonFiniteError(
            f"step {step + 1}: {event.reason} (sample {event.sample}). --resume goes on from the "
            f"last checkpoint{spoilt}. Lower train.learning_rate, or clip gradients more"
        )

    def _on_error(self, error: BaseException) -> None:
        self.main.post(self.main.fail, error)
