"""The contract of callbacks: what a program can see and do while a run trains
(`rollpacker.train(..., callbacks=[Mine()])`).

Trackers (`rollpacker/trackers/`) are callbacks too, called after the program's own, so that they
get the values which those have logged. Light: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

Metrics = Mapping[str, Any]
"""A row of `metrics.jsonl` without its `step`: names as in docs/metrics.md, numbers and texts."""


class CallbackError(RuntimeError):
    """A callback raised; the message names class, method and step. The run can be resumed."""


class RunningRun(Protocol):
    """The run, as a callback sees it."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path:
        """`runs_dir/name`, which exists."""
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
        """The step that it went on from. None: it began anew."""
        ...

    def log(self, name: str, value: float) -> None:
        """Add a value to the row of the step or evaluation that is being told, in the log as in
        `metrics.jsonl`. Only inside `on_step` and `on_evaluation` of a program's own callbacks, and
        under a name that the run itself does not use."""
        ...

    def samples(self, *, untrained: bool = False) -> list[dict[str, Any]]:
        """Samples that were trained on in the step that is being told, or generated in the
        evaluation: rows as in `samples/*.parquet`. `untrained`: also those of the step that are
        kept only because their check was slow. Empty with `save_samples: false`."""
        ...

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after the step at hand, with a checkpoint, as Ctrl-C does. Thread-safe."""
        ...


class Callback:
    """Override what you need. Methods are called in the thread that called `rollpacker.train`. The
    run waits meanwhile, and the seconds are shown (`timing_s/callbacks`). What a method raises ends
    the run, resumable, with a `CallbackError` that names it."""

    def on_start(self, run: RunningRun) -> None:
        """Everything is loaded; the first round begins."""

    def on_step(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        """Step number `step`, counted from 1, is trained; its checkpoint, if one is due, comes
        next. So a step is told again only where a resume takes it again. `metrics` has no seconds
        of what still comes; a tracker is told later and gets the whole row."""

    def on_evaluation(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        """The policy as it stands after `step` steps was evaluated. Comes before `on_step`."""

    def on_end(self, run: RunningRun, reason: str | None) -> None:
        """The run has ended; its reports are written. `reason`: why; None: by an error, or at once
        by a second interrupt, and then no report is written. Called once if `on_start` was."""
