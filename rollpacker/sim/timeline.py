"""Draws simulated systems: some consecutive steps of each on a time axis, and the mean step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.core.commands import RoundKind
from rollpacker.pipeline.sim.show import (
    LANE_INCHES,
    OP_COLOURS,
    OP_WORDS,
    draw_sweep,
    longest_s,
    pipelines_of,
)
from rollpacker.report.timeline import FAINT, INK, PHASE_COLOURS, add_legend, bare_rows
from rollpacker.sim.result import StepResult, SystemResult
from rollpacker.sim.table import STAGES
from rollpacker.writing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
"""Endings that the file name of a picture may have."""
STAGE_COLOURS = {
    "rollout": "#2a9d8f",
    "reward": PHASE_COLOURS["reward_wait"],
    "training": PHASE_COLOURS["training"],
    "weight sync": PHASE_COLOURS["sync"],
}
_LONG = (RoundKind.LONG, RoundKind.FLUSH)
_LONG_COLOUR = "#e76f51"
_MIN_STEPS, _MAX_STEPS = 5, 12
"""Fewest and most consecutive steps to show in a picture."""


def draw(
    results: Mapping[str, SystemResult],
    out: str | Path,
    *,
    title: str,
    reference: str | None = None,
) -> range:
    """Draw the systems one below the other, in the format that the ending of `out` names (one of
    `FORMATS`). Returns the indices (from 0) of the steps shown.

    The upper panel has the same steps of every system: a whole cycle of short rounds and their long
    round if there is one. The next panel has the mean of all steps, with the speed against
    `reference` (None: the first system). Further panels have the last optimizer step of trainers
    with pipeline stages, a lane for each stage. Raises `OSError` if the file cannot be written.
    """
    shown = choose_steps(results)
    pipelines = pipelines_of(results)
    lanes = [one.stages for one in pipelines.values()]
    figure, (above, below, *sweeps) = _figure(len(results), lanes)
    _draw_steps(above, results, shown)
    _draw_means(below, results, reference or next(iter(results)))
    numbers = f"steps {shown[0] + 1} to {shown[-1] + 1}" if len(shown) > 1 else "one step"
    _title(above, f"{title}: {numbers}")
    _title(below, f"Mean step of {max(len(result.steps) for result in results.values())}")
    for axes, (name, found) in zip(sweeps, pipelines.items(), strict=True):
        draw_sweep(axes, name, found, until_s=longest_s(pipelines))
        if axes is not sweeps[-1]:
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
    _legend(figure, ops=bool(sweeps))
    out = Path(out)
    with replacing(out) as temporary:
        figure.savefig(temporary, format=out.suffix.lstrip("."), facecolor="white")
    return shown


def choose_steps(results: Mapping[str, SystemResult]) -> range:
    """Indices of consecutive steps to draw, the same for every system: from after a long round to
    the end of a later long round, so that the mix of rounds is the run's. The system with the
    longest such cycle decides; without long rounds it is the first few steps."""
    num_common = min(len(result.steps) for result in results.values())
    cycles = [_cycle(result.steps[:num_common]) for result in results.values()]
    return max(cycles, key=lambda cycle: (cycle.start > 0, len(cycle)))


def _cycle(steps: Sequence[StepResult]) -> range:
    longs = [place for place, step in enumerate(steps) if step.kind in _LONG]
    if not longs:
        return range(min(len(steps), _MIN_STEPS))
    start = longs[0] + 1
    end = next((place + 1 for place in longs if place + 1 - start >= _MIN_STEPS), None)
    if end is None:  # the run is too short for a whole cycle
        start, end = 0, longs[-1] + 1
    return range(max(start, end - _MAX_STEPS), end)


def _figure(num_systems: int, lanes: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """A figure and its panels: one of steps and one of means, with a row for each system, then one
    for each trainer with pipeline stages, of which `lanes` has the numbers of stages."""
    heights = [0.52 * num_systems + 0.2, 0.36 * num_systems + 0.2]
    heights += [LANE_INCHES * count + 0.1 for count in lanes]
    figure, rows = bare_rows(heights, 9, 1.7 + 0.45 * len(lanes), h_pad=0.06)
    for axes in rows:
        axes.set_ylim(num_systems - 0.5, -0.5)
        axes.set_xlabel("seconds", color=FAINT, fontsize=9)
    return figure, rows


def _draw_steps(axes: Axes, results: Mapping[str, SystemResult], shown: range) -> None:
    """Draw each system's steps side by side in one row, with the kind of round above each step."""
    room = max(sum(result.steps[place].total_s for place in shown) for result in results.values())
    for row, result in enumerate(results.values()):
        left = 0.0
        for place in shown:
            step = result.steps[place]
            _stack(axes, row, left, {s: getattr(step, f) for s, f in STAGES.items()}, height=0.52)
            if left:
                axes.plot([left] * 2, [row - 0.26, row + 0.26], color="white", linewidth=1.6)
            if step.kind != RoundKind.PLAIN and step.total_s > 0.045 * room:
                colour = _LONG_COLOUR if step.kind in _LONG else FAINT
                _text(axes, left + 0.003 * room, row - 0.28, step.kind, 7.5, colour, va="bottom")
            left += step.total_s
        _text(axes, left, row, f"  {_seconds(left)} s", 9)
    axes.set_xlim(0, room * 1.1)
    _label_rows(axes, results)


def _draw_means(axes: Axes, results: Mapping[str, SystemResult], reference: str) -> None:
    totals = {name: result.mean["total_s"] for name, result in results.items()}
    room = max(totals.values())
    for row, (name, result) in enumerate(results.items()):
        mean = result.mean
        stages = {stage: mean[field] for stage, field in STAGES.items()}
        _stack(axes, row, 0.0, stages, height=0.62, label_from=0.06 * room)
        told = f"  {_seconds(totals[name])} s"
        if len(results) > 1:
            told += f"  {totals[reference] / totals[name]:.2f}x"
        _text(axes, totals[name], row, told, 9)
    axes.set_xlim(0, room * 1.16)
    _label_rows(axes, results)


def _stack(
    axes: Axes,
    row: int,
    left: float,
    seconds: Mapping[str, float],
    *,
    height: float,
    label_from: float = float("inf"),
) -> None:
    """Draw a step's stages (`seconds` by stage) side by side from `left` on, each with its seconds
    if they are at least `label_from`."""
    for stage, duration in seconds.items():
        axes.barh(row, duration, left=left, height=height, color=STAGE_COLOURS[stage], linewidth=0)
        if duration >= label_from:
            colour = "white" if stage in ("rollout", "training") else INK
            _text(axes, left + duration / 2, row, _seconds(duration), 8, colour, ha="center")
        left += duration


def _text(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    size: float,
    colour: str = INK,
    *,
    ha: str = "left",
    va: str = "center",
) -> None:
    axes.text(x, y, text, fontsize=size, color=colour, ha=ha, va=va)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _label_rows(axes: Axes, results: Mapping[str, SystemResult]) -> None:
    axes.set_yticks(range(len(results)), list(results))
    axes.tick_params(axis="y", labelcolor=INK, labelsize=10)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=8, fontweight="bold")


def _legend(figure: Figure, *, ops: bool) -> None:
    more = {OP_WORDS[kind]: colour for kind, colour in OP_COLOURS.items()} if ops else {}
    names = {"reward": "reward, after the last response"}
    shown = {names.get(stage, stage): c for stage, c in (STAGE_COLOURS | more).items()}
    add_legend(figure, shown, len(STAGE_COLOURS))
