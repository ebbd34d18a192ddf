"""The simulated trainer: gradients of groups, optimizer steps, weight sync and commits."""

from __future__ import annotations

from collections.abc import Callable

from rollpacker.bus import Routes
from rollpacker.core.commands import Commit, StartGradients, SyncWeights, TrainOn
from rollpacker.core.events import Committed, Event, Trained, WeightsSynced
from rollpacker.core.ids import SampleId
from rollpacker.pipeline.sim.phase import Pipeline
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.machine import Machine
from rollpacker.sim.responses import Responses
from rollpacker.sim.tally import Tally


class GradientWork:
    """The trainer's work on gradients while other responses are generated, in device-seconds. It
    gets done at the speed of the devices that the trainer has at the time."""

    def __init__(self) -> None:
        self.backlog_s = 0.0
        self.done_s = 0.0
        """Device-seconds of gradient work done since the round of generation began."""
        self._devices = 0
        self._since_s = 0.0

    def advance(self, now_s: float) -> None:
        if now_s <= self._since_s:
            return
        if self._devices:
            worked_s = min(self.backlog_s, self._devices * (now_s - self._since_s))
            self.backlog_s -= worked_s
            self.done_s += worked_s
        self._since_s = now_s

    def have(self, now_s: float, devices: int, *, after_s: float = 0.0) -> None:
        """Give the trainer `devices` devices in all, from `after_s` seconds after `now_s` on."""
        self.advance(now_s)
        self._devices = devices
        self._since_s = max(self._since_s, now_s + after_s)

    def begin_round(self, now_s: float) -> None:
        """Take all devices away from the trainer, since every device generates now."""
        self.have(now_s, 0)
        self.done_s = 0.0


class Training:
    """Carries out commands to begin gradients (`StartGradients`), end a step (`TrainOn`), bring
    weights to engines (`SyncWeights`) and save a step (`Commit`)."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        responses: Responses,
        tally: Tally,
        work: GradientWork,
        step_done: Callable[[Event], None],
    ) -> None:
        """`step_done` is called with the event `Committed` of each step that trained on samples."""
        self._clock = clock
        self._machine = machine
        self._responses = responses
        self._tally = tally
        self._work = work
        self._step_done = step_done
        self._streamed: set[SampleId] = set()
        """First sample of each prompt whose gradients in this step have begun already."""
        self._version = 0

    def routes(self) -> Routes:
        return {
            StartGradients: self._start_gradients,
            TrainOn: self._train,
            SyncWeights: self._sync,
            Commit: self._commit,
        }

    def _work_s(self, lengths: list[int]) -> float:
        """Device-seconds that the gradients of responses of these lengths (tokens) take."""
        tokens = sum(lengths) + len(lengths) * self._machine.prompt_tokens
        return self._machine.latency.train_s(tokens, 1)

    def _start_gradients(self, command: StartGradients) -> None:
        self._work.advance(self._clock.time_s)
        lengths = self._responses.lengths_of(command.groups)
        self._work.backlog_s += self._work_s(lengths)
        self._tally.streamed(len(lengths))
        self._streamed.update(group[0] for group in command.groups)

    def _train(self, command: TrainOn) -> None:
        work, latency = self._work, self._machine.latency
        work.advance(self._clock.time_s)
        responses = self._responses
        lengths, own = responses.lengths_of(command.groups), responses.own_tokens(command.groups)
        self._tally.training_begins(self._clock.time_s, lengths, own)
        rest = [group for group in command.groups if group[0] not in self._streamed]
        work_s = work.backlog_s + self._work_s(responses.lengths_of(rest))
        phase_s = work_s / self._machine.trainer_gpus
        if self._machine.pipeline is not None:
            left_s = work.backlog_s / self._machine.trainer_gpus
            phase_s = left_s + self._swept_s(self._machine.pipeline, responses.lengths_of(rest))
        work.backlog_s = work.done_s = 0.0
        self._streamed.clear()
        self._clock.after(
            latency.train_fixed_s + phase_s,
            Trained(time_s=0.0, step=command.step, version=self._version + 1),
        )

    def _swept_s(self, pipeline: Pipeline, lengths: list[int]) -> float:
        """Seconds that responses of these lengths (tokens) take to pass the trainer's pipeline
        stages. Counts the stages' idle time, as if gradients begun during generation had none."""
        if not lengths:
            return 0.0
        prompt_tokens = self._machine.prompt_tokens
        step = pipeline.train([length + prompt_tokens for length in lengths], self._clock.time_s)
        self._tally.pipeline_waited(step.idle_device_s)
        return step.seconds

    def _sync(self, command: SyncWeights) -> None:
        self._tally.trained(self._clock.time_s)
        self._version = command.version
        self._clock.after(
            self._machine.latency.sync_s, WeightsSynced(time_s=0.0, version=command.version)
        )

    def _commit(self, command: Commit) -> None:
        commit_s = self._machine.latency.commit_s
        committed = Committed(time_s=0.0, step=command.step, checkpointed=False)
        self._clock.after(commit_s, committed)
        self._responses.clear()
        if self._tally.committed(self._clock.time_s + commit_s):
            self._step_done(committed)
