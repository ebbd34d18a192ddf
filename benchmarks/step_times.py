"""Steps of both sides of vs_trl.py in one form, and the RollPacker side."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Commit, Launch, TrainOn
from rollpacker.core.events import RunStarted, SampleGenerated, Trained
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Entry, Record
from rollpacker.core.rounds.tail_batching import TailBatchingConfig


@dataclass(frozen=True, slots=True)
class StepTime:
    seconds: float
    """The whole step, one optimizer step's end to the next's."""
    generation_s: float
    lengths: tuple[int, ...]
    """Response tokens of the samples trained on."""
    computed_per_real: float
    """Training: tokens that went through the model, padding included, per token that is real."""


def describe(steps: Sequence[StepTime]) -> dict[str, float]:
    """Means over steps, as a result holds them."""
    return {
        "steps": len(steps),
        "s_per_step": statistics.fmean(s.seconds for s in steps),
        "median_s_per_step": statistics.median(s.seconds for s in steps),
        "generation_s": statistics.fmean(s.generation_s for s in steps),
        "samples_per_step": statistics.fmean(len(s.lengths) for s in steps),
        "mean_tokens": statistics.fmean(n for s in steps for n in s.lengths),
        "mean_longest": statistics.fmean(max(s.lengths) for s in steps),
        "max_over_median": statistics.fmean(
            max(s.lengths) / statistics.median(s.lengths) for s in steps
        ),
        "train_computed_per_real": statistics.fmean(s.computed_per_real for s in steps),
    }


class _Watch:
    """An observer of a run that keeps each step's seconds and lengths."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        self._step_began_s = 0.0
        self._round_began_s = 0.0
        self._generation_s = 0.0
        self._computed_per_real = 1.0
        self._lengths: dict[SampleId, int] = {}
        self._trained: tuple[int, ...] = ()

    def feed(self, entry: Entry) -> None:
        if not isinstance(entry, Record):
            return
        event, now = entry.event, entry.time_s
        if isinstance(event, RunStarted):
            self._step_began_s = now
        elif isinstance(event, SampleGenerated):
            self._lengths[event.sample] = event.num_tokens
        elif isinstance(event, Trained):
            metrics = event.metrics
            self._computed_per_real = metrics["train/padded_tokens"] / metrics["train/tokens"]
        for command in entry.commands:
            if isinstance(command, Launch):
                self._round_began_s = now
            elif isinstance(command, TrainOn):
                self._generation_s = now - self._round_began_s
                self._trained = tuple(self._lengths[s] for g in command.groups for s in g)
                self._lengths.clear()
            elif isinstance(command, Commit):
                self._end_step(now + entry.cost_s)

    def _end_step(self, now: float) -> None:
        self.steps.append(
            StepTime(
                now - self._step_began_s, self._generation_s, self._trained, self._computed_per_real
            )
        )
        self._step_began_s = now

    def close(self) -> None:
        pass


def rollpacker_steps(config: RunConfig, num_steps: int, tail: TailBatchingConfig) -> list[StepTime]:
    """Train `num_steps` steps with the public API, everything on that a user has on by default.

    Only evaluation and the checkpoints between first and last step are off; the last one comes
    after the last step's end and does not count.
    """
    import rollpacker

    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        rollpacker.train(
            dataclasses.replace(
                config,
                name="run",
                runs_dir=folder,
                tail_batching=tail,
                train=dataclasses.replace(config.train, steps=num_steps, epochs=None),
                data=dataclasses.replace(config.data, eval=None, eval_fraction=0.0),
                checkpoint=dataclasses.replace(config.checkpoint, every_steps=10**9),
            ),
            observers=[watch],
        )
    return watch.steps[:num_steps]  # the rest only empties the long queue
