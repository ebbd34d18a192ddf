"""Builds a run's metrics and display, and the callbacks and trackers that are told of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.config.load import to_plain
from rollpacker.report.live import LiveReport
from rollpacker.run.output import console, in_notebook
from rollpacker.run.ports.audience import Audience, CallInThread, ToldRun
from rollpacker.trackers.by_name import make_tracker

if TYPE_CHECKING:
    from rollpacker.callbacks import Callback
    from rollpacker.config.schema import RunConfig


def build_audience(
    config: RunConfig,
    folder: Path,
    *,
    num_rows: int,
    resumed_step: int | None,
    callbacks: Sequence[Callback],
    call: CallInThread,
    display: bool,
) -> tuple[LiveReport, Audience]:
    """Returns the observer that makes metrics of log entries and shows them, and the `Audience`
    that calls callbacks and trackers. `num_rows`: number of training prompts. `resumed_step`: step
    of the checkpoint; None for a new run. `call`: calls a function in the thread that called
    `train`. `display`: whether metrics are shown."""
    steps = config.num_steps(num_rows)
    live = LiveReport(
        folder,
        total_steps=steps,
        resume=resumed_step is not None,
        slots=config.rollout.max_slots,
        max_response_tokens=config.rollout.max_response_tokens,
        console=console(goes_on=True) if display else None,
        show=display,
        notebook=config.name if in_notebook() else None,
    )
    run = ToldRun(
        name=config.name,
        folder=folder,
        config=to_plain(config),
        total_steps=steps,
        resumed_step=resumed_step,
    )
    audience = Audience(
        run,
        callbacks=callbacks,
        trackers=build_trackers(config),
        call=call,
        row_so_far=live.row_so_far,
    )
    live.on_row = audience.row_written
    return live, audience


def build_trackers(config: RunConfig) -> list[Callback]:
    """Returns the config's trackers, such as wandb, which get each step's finished metrics."""
    return [make_tracker(tracker) for tracker in config.tracker_configs]
