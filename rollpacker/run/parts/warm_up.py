"""Supervised fine-tuning of a model, for `rollpacker warmup`, and for a run whose model does not
exist yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from rollpacker.config.schema import RunConfig
    from rollpacker.config.warmup import WarmupConfig
    from rollpacker.trainer.warmup import WarmupProgress, WarmupResult


def make_missing(config: RunConfig) -> None:
    """If the run's model does not exist and the config has a warm-up, run that and write the model.
    Raises `ValueError` with a message for the user."""
    from rollpacker.config.load import load_config
    from rollpacker.config.warmup import WarmupConfig

    path = config.model.path
    if config.warmup is not None and not Path(path).expanduser().exists():
        warm_up(load_config(config.warmup, [f"output={json.dumps(path)}"], WarmupConfig))


def warm_up(config: WarmupConfig, *, overwrite: bool = False) -> None:
    """Fine-tune a model, show the progress, and write the model to the folder `config.output`.
    Raises `ValueError` with a message for the user."""
    from rollpacker.run import output
    from rollpacker.run.parts.hub import look_for_names
    from rollpacker.trainer.warmup_output import check_output

    check_output(Path(config.output).expanduser(), config, overwrite)
    if config.model is not None:
        look_for_names({"model.path": config.model.path})
    from rollpacker.trainer.warmup import run_warmup  # takes seconds

    console = output.console()
    if console.is_terminal:
        result = _with_progress_bar(config, console, overwrite=overwrite)
    else:
        result = run_warmup(config, _LinePrinter(console), overwrite=overwrite)
    losses = ", ".join(f"{loss:.3f}" for loss in result.losses)
    console.print(
        f"Warmed up {result.num_parameters:,} parameters in {result.elapsed_s:.0f} s "
        f"(final loss by stage: {losses}). The model is in {result.output}",
        highlight=False,
        soft_wrap=True,
    )


def _with_progress_bar(config: WarmupConfig, console: Console, *, overwrite: bool) -> WarmupResult:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from rollpacker.trainer.warmup import run_warmup

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        tasks = [
            bar.add_task(f"Warm-up {i + 1}/{len(config.stages)}", total=stage.steps, loss=0.0)
            for i, stage in enumerate(config.stages)
        ]

        def show(progress: WarmupProgress) -> None:
            bar.update(tasks[progress.stage], completed=progress.step, loss=progress.loss)

        return run_warmup(config, show, overwrite=overwrite)


class _LinePrinter:
    """Prints a line of progress after each tenth of a warm-up stage, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, progress: WarmupProgress) -> None:
        tenth = progress.step * 10 // progress.num_steps
        if tenth == (progress.step - 1) * 10 // progress.num_steps:
            return
        self._console.print(
            f"warm-up {progress.stage + 1}/{progress.num_stages}: "
            f"step {progress.step}/{progress.num_steps}, loss {progress.loss:.3f}, "
            f"{progress.elapsed_s:.0f} s",
            highlight=False,
            soft_wrap=True,
        )
