"""A lane for each stage: when it computed what in a sweep, and when it waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.virtual_time import Timeline
from rollpacker.pipeline.sim.phase import PipelineResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OP_COLOURS = {"F": "#4f81bd", "I": "#e9a03b", "W": "#b9bfcc"}
OP_WORDS = {"F": "forward", "I": "backward for inputs", "W": "backward for weights"}
LANE_INCHES = 0.13
_INK, _FAINT, _EMPTY = "#333333", "#777777", "#f1f1f1"


def draw_sweep(axes: Axes, name: str, found: PipelineResult, *, until_s: float) -> None:
    """The last sweep of the slowest replica; stage 0 above. What is not coloured is idle. All
    sweeps of a picture end at `until_s` or before."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    sweep, start_s = found.last, began_s(found.last)
    for stage, spans in enumerate(sweep.spans):
        axes.barh(stage, sweep.makespan_s - start_s, height=0.86, color=_EMPTY, linewidth=0)
        for kind in KINDS:
            boxes = [
                Rectangle((span.start_s - start_s, stage - 0.43), span.end_s - span.start_s, 0.86)
                for span in spans
                if span.op.kind == kind
            ]
            collection = PatchCollection(
                boxes, facecolor=OP_COLOURS[kind], edgecolor="white", linewidth=0.15
            )
            axes.add_collection(collection)
    axes.set_xlim(0, until_s * 1.02)
    axes.set_ylim(found.stages - 0.4, -0.6)
    axes.set_yticks(range(found.stages), [str(stage) for stage in range(found.stages)])
    axes.tick_params(axis="y", labelsize=6)
    text = f"{name}: last sweep, a lane per stage, {sweep.makespan_s - start_s:.3g} s"
    axes.set_title(text, loc="left", fontsize=9, color=_INK, pad=3)


def began_s(sweep: Timeline) -> float:
    return min((spans[0].start_s for spans in sweep.spans if spans), default=0.0)


def longest_s(found: Mapping[str, PipelineResult]) -> float:
    """Seconds of the longest of the last sweeps."""
    return max(one.last.makespan_s - began_s(one.last) for one in found.values())
