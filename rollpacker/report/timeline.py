"""Pictures of rounds of generation: a bar for every sample from its launch to its end, and a band
below for the other phases of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.core.commands import RoundKind
from rollpacker.report.history import iterate_steps
from rollpacker.report.log import EventLog
from rollpacker.report.spans import Excerpt, read_steps
from rollpacker.report.step_history import Outcome, StepHistory
from rollpacker.writing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTCOME_COLOURS = {
    Outcome.TRAINED: "#2a9d8f",
    Outcome.SURPLUS: "#d9d4c5",
    Outcome.DEFERRED: "#e76f51",
    Outcome.UNUSED: "#8d99ae",
    Outcome.FAILED: "#22223b",
}
PHASE_COLOURS = {
    "environment": "#e9a03b",
    "reward_wait": "#f4d35e",
    "training": "#3d5a80",
    "sync": "#98c1d9",
    "checkpoint": "#b8b8b8",
    "recovery": "#9e2a2b",
    "pool_wait": "#6d6875",
    "switch": "#b5838d",
    "evaluation": "#b392ac",
    "startup": "#e8e8e8",
}
_CHARACTER = 0.0055
"""Width of a character in a label, as a share of the picture's width."""
_LINE = 1.8
"""Height of a line in a label, as a multiple of a character's width."""
_CUT_OUT = ("evaluation", "callbacks", "startup", "checkpoint")
"""Phases that are cut out of the time axis."""
INK, FAINT = "#333333", "#777777"
NUM_STEPS = 6
"""Number of steps in a picture of one run, if the caller names none."""
_NUM_COMPARED = 10
"""Number of steps in a picture of two runs, if the caller names none."""
_KIND_WORDS = {
    RoundKind.SHORT: "short",
    RoundKind.CASCADE: "cascade",
    RoundKind.LONG: "long",
    RoundKind.FLUSH: "flush",
    RoundKind.PLAIN: "plain",
}


def draw_steps(steps: Sequence[StepHistory], out_png: str | Path) -> list[int]:
    """Draw these steps in sequence, those without a launch left out, and return the numbers of the
    steps drawn. Evaluation, callbacks, startup and checkpoints are cut out of the time axis. Raises
    `ValueError` if no step launched a sample."""
    shown = [step for step in steps if step.samples]
    if not shown:
        raise ValueError("no finished step to draw")
    lanes = max(len(step.samples) for step in shown)
    figure, (axes, band) = _figure(1, heights=[max(2.4, min(6.0, lanes * 0.045)), 0.32])
    clock = _Clock(shown)
    _draw_samples(axes, shown, clock, lanes)
    _draw_band(band, shown, clock)
    _label_steps(axes, shown, clock, lanes)
    axes.set_ylabel("samples, longest at the bottom", color=FAINT, fontsize=9)
    _title(axes, "Every sample of the rounds, from launch to its end")
    axes.set_xlim(0, clock.end_s)
    _finish(figure, band, shown, Path(out_png))
    return [step.step for step in shown]


def draw_comparison(
    events_with: str | Path,
    events_without: str | Path,
    out: str | Path,
    *,
    steps: range | None = None,
) -> None:
    """Draw two runs, given their logs, over the same steps on one time axis: with tail batching
    above, without below.

    `steps` None: ten steps that end with the first long round, or as many as both logs have. Raises
    `ValueError` if a log has none of the steps."""
    if steps is None:
        steps = _common_steps(events_with, events_without)
    both = [choose_steps(path, steps) for path in (events_with, events_without)]
    clocks = [_Clock(shown) for shown in both]
    lanes = [max(len(step.samples) for step in shown) for shown in both]
    below = 2.6 * min(1.5, max(0.6, lanes[1] / lanes[0]))
    figure, axes = _figure(2, heights=[2.6, 0.22, 0.12, below, 0.22], blank=2)
    end = max(clock.end_s for clock in clocks)
    names = ("With tail batching", "Without")
    for row, (shown, clock, name) in enumerate(zip(both, clocks, names, strict=True)):
        panel, band = axes[2 * row], axes[2 * row + 1]
        _draw_samples(panel, shown, clock, lanes[row])
        _draw_band(band, shown, clock)
        _label_steps(panel, shown, clock, lanes[row], short=True)
        _title(panel, f"{name}: {len(shown)} steps in {clock.end_s:.2f} s")
        panel.set_ylabel("samples", color=FAINT, fontsize=9)
        for one in (panel, band):
            one.axvline(clock.end_s, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        panel.set_xlim(0, end * 1.005)
    _finish(figure, axes[-1], [step for shown in both for step in shown], Path(out))


def choose_steps(events_path: str | Path, steps: range) -> list[StepHistory]:
    """The steps of a log that are in this range and launched samples. Raises `ValueError` if there
    is no such step."""
    shown = [step for step in read_steps(EventLog(events_path), steps=steps) if step.samples]
    if not shown:
        wanted = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps.start}"
        raise ValueError(f"{events_path} has no finished {wanted} to draw")
    return shown


def _common_steps(one: str | Path, other: str | Path) -> range:
    """Numbers of steps that are in both logs, around the first long round of the first log."""
    others = {step.step for step in iterate_steps(EventLog(other))}
    excerpt = Excerpt(_NUM_COMPARED)
    for step in iterate_steps(EventLog(one)):
        if step.step in others:
            excerpt.feed(step)
    numbers = [step.step for step in excerpt.steps] or [1]
    return range(numbers[0], numbers[-1] + 1)


@dataclass(slots=True)
class _Clock:
    """Converts a time of the run into a place on the time axis, in seconds. The first step starts
    at 0. Evaluation, callbacks, startup and checkpoints are cut out."""

    start_s: float
    end_s: float
    cuts: list[tuple[float, float]]

    def __init__(self, steps: Sequence[StepHistory]) -> None:
        self.start_s = _begin(steps[0])
        self.cuts = sorted(
            (phase.start_s, phase.end_s)
            for step in steps
            for phase in step.phases
            if phase.name in _CUT_OUT
        )
        self.cuts = _union(self.cuts)
        self.end_s = self(steps[-1].end_s)

    def __call__(self, time_s: float) -> float:
        gone = sum(
            max(0.0, min(time_s, end) - max(start, self.start_s)) for start, end in self.cuts
        )
        return time_s - self.start_s - gone


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _begin(step: StepHistory) -> float:
    return step.start_s if step.rollout_start_s is None else step.rollout_start_s


def _figure(
    panels: int, *, heights: list[float], blank: int | None = None
) -> tuple[Figure, list[Axes]]:
    """Returns a figure and its rows (`Axes`), which have these `heights` in inches and share the
    time axis. The row with the number `blank` is hidden and not returned; None: all rows are."""
    around = 1.15 + 0.35 * (panels - 1)
    figure, rows = bare_rows(heights, 12, around, sharex=True, h_pad=0.02, hspace=0.0)
    for axes in rows:
        axes.set_yticks([])
    if blank is not None:
        rows[blank].set_visible(False)
    return figure, [axes for row, axes in enumerate(rows) if row != blank]


def bare_rows(
    heights: list[float], width: float, around: float, *, sharex: bool = False, **padding: float
) -> tuple[Figure, list[Axes]]:
    """Returns a figure and its rows (`Axes`) without frames, of these `heights` in inches. `width`
    is the figure's, `around` what it is higher than its rows; `padding` goes to matplotlib's
    constrained layout."""
    # The object interface: no display, no global state of pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights) + around), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", **padding)
    rows = figure.subplots(len(heights), 1, sharex=sharex, height_ratios=heights)
    for axes in rows:
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, labelcolor=FAINT, labelsize=9)
    return figure, list(rows)


def add_legend(figure: Figure, colours: Mapping[str, str], num_columns: int) -> None:
    """Add a legend below a figure, with a patch of its colour for each name."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="outside lower left",
        ncols=num_columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
    )


def _draw_samples(axes: Axes, steps: Sequence[StepHistory], clock: _Clock, lanes: int) -> None:
    """Draw a bar for each sample. A step's samples are stacked, the longest at the bottom."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    boxes: dict[Outcome, list[Any]] = {outcome: [] for outcome in Outcome}
    for step in steps:
        spans = sorted(step.samples.values(), key=lambda s: -((s.end_s or step.end_s) - s.start_s))
        # A round with fewer samples stands on the same ground.
        for lane, span in enumerate(spans):
            left = clock(span.start_s)
            width = clock(step.end_s if span.end_s is None else span.end_s) - left
            boxes[span.outcome].append(Rectangle((left, lane + 0.08), width, 0.84))
    for outcome, patches in boxes.items():
        collection = PatchCollection(patches, facecolor=OUTCOME_COLOURS[outcome], linewidth=0)
        axes.add_collection(collection)
    axes.set_ylim(-0.5, lanes + 0.5)


def _draw_band(axes: Axes, steps: Sequence[StepHistory], clock: _Clock) -> None:
    """Draw a band with what the run did: rollout in grey, the other phases in colour."""
    for step in steps:
        if step.rollout_start_s is not None:
            left, right = clock(step.rollout_start_s), clock(step.rollout_end_s or step.end_s)
            axes.barh(0, right - left, left=left, height=0.8, color="#eeeeee")
        for phase in step.phases:
            left, right = clock(phase.start_s), clock(phase.end_s)
            if right > left:
                colour = PHASE_COLOURS.get(phase.name, "#cccccc")
                axes.barh(0, right - left, left=left, height=0.8, color=colour)
    axes.set_ylim(-0.5, 0.5)


def _label_steps(
    axes: Axes, steps: Sequence[StepHistory], clock: _Clock, lanes: int, *, short: bool = False
) -> None:
    """Draw a faint line where a step begins, and above it the step's number and kind of round. If
    that does not fit, the label is the number alone, upright if need be. `short`: the label is the
    kind alone, or nothing if that does not fit."""
    taken_s = -clock.end_s
    """Place on the time axis, in seconds, where the previous label ends."""
    for number, step in enumerate(steps):
        left, right = clock(_begin(step)), clock(step.end_s)
        if number:
            axes.axvline(left, color="#dddddd", linewidth=0.8, zorder=0)
        kind = "" if step.kind is None else _KIND_WORDS[step.kind]
        long = step.kind in (RoundKind.LONG, RoundKind.FLUSH)
        texts = [(kind, 0)] if short else [(f"{step.step}  {kind}", 0), (f"{step.step}", 0)]
        fitting = [one for one in texts if len(one[0]) * _CHARACTER * clock.end_s <= right - left]
        if not fitting and not short and left >= taken_s:
            fitting = [(f"{step.step}", 90)]
        if not fitting:
            continue
        text, rotation = fitting[0]
        taken_s = left + clock.end_s * _CHARACTER * (_LINE if rotation else len(text))
        axes.text(
            left,
            lanes + 0.5,
            text if rotation else f" {text}",
            rotation=rotation,
            fontsize=8,
            va="bottom",
            ha="left",
            color=OUTCOME_COLOURS[Outcome.DEFERRED] if long else FAINT,
            clip_on=False,
        )


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, color=INK, pad=18, fontweight="bold")


def _finish(figure: Figure, bottom: Axes, steps: Sequence[StepHistory], out: Path) -> None:
    bottom.set_xlabel("seconds", color=FAINT, fontsize=9)
    seen = {span.outcome for step in steps for span in step.samples.values()}
    phases = {phase.name for step in steps for phase in step.phases}
    shown = phases.difference(_CUT_OUT)
    names = {str(one): colour for one, colour in OUTCOME_COLOURS.items() if one in seen}
    names |= {n.replace("_", " "): colour for n, colour in PHASE_COLOURS.items() if n in shown}
    add_legend(figure, names, len(names))
    with replacing(out) as temporary:
        figure.savefig(temporary, format=out.suffix.lstrip(".") or "png", facecolor="white")
