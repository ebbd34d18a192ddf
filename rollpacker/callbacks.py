"""Callbacks: what a program can see and do while a run trains
(`rollpacker.train(..., callbacks=[Mine()])`). Trackers (`rollpacker/trackers/`) are callbacks, too,
called after the program's own, so that they get the values that these have logged. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Metrics = Mapping[str, Any]
"""A row of `metrics.jsonl` without `step`: numbers and texts by the names in docs/metrics.md."""


class CallbackError(RuntimeError):
    """A callback raised an error; the message names class, method and step. The run can be
    resumed."""


class RunningRun(Protocol):
    """A run as its callbacks see it: facts such as its folder, and methods for them to call."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path:
        """The run's folder, `runs_dir/name`, which exists."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved configuration as plain values, as `config.yaml` holds it."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Number of steps that the run is going to have. None if it is not known."""
        ...

    @property
    def resumed_step(self) -> int | None:
        """Step of the checkpoint from which the run was resumed. None for a new run."""
        ...

    def log(self, name: str, value: float) -> None:
        """Add a value to the metrics of the step or evaluation being reported, in the event log and
        in `metrics.jsonl`. Allowed only inside `on_step` and `on_evaluation` of a program's own
        callbacks, and under a name that the run itself does not use."""
        ...

    def samples(self, *, untrained: bool = False) -> list[dict[str, Any]]:
        """Returns rows as in `samples/*.parquet`: the samples trained on in the step being
        reported, or generated in the evaluation. `untrained`: also samples of the step that are
        kept only because their check was slow. Empty with `save_samples: false`."""
        ...

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after the step at hand, with a checkpoint, for this reason. Thread-safe."""
        ...


class Callback:
    """Base class of callbacks: override the methods you need. They are called in the thread that
    called `rollpacker.train`; the run waits meanwhile, and the seconds are shown
    (`timing_s/callbacks`). An error in a method ends the run, resumable, with a `CallbackError`
    that names the method."""

    def on_start(self, run: RunningRun) -> None:
        """Called when everything is loaded, before anything is generated."""

    def on_step(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        """Called when step number `step` (from 1 on) is trained, before its checkpoint; again for
        the same step only if a resume repeats it. `metrics` lacks the seconds of what is still to
        come; trackers are called later and get the whole row."""

    def on_evaluation(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        """Called when the policy was evaluated after `step` steps, before that step's `on_step`.
        `metrics`: the evaluation's, by name."""

    def on_end(self, run: RunningRun, reason: str | None) -> None:
        """Called once when the run has ended, if `on_start` was called. `reason`: why it ended;
        None if an error or a second interrupt ended it, so that no reports were written."""
