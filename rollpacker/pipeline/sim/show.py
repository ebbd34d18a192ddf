"""Shows the pipeline stages of simulated trainers: as a picture, a table and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.virtual_time import Timeline
from rollpacker.pipeline.sim.phase import PipelineResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rollpacker.sim.result import SystemResult

OP_COLOURS = {"F": "#4f81bd", "I": "#e9a03b", "W": "#b9bfcc"}
OP_WORDS = {"F": "forward", "I": "backward for inputs", "W": "backward for weights"}
LANE_INCHES = 0.13
_INK, _FAINT, _EMPTY = "#333333", "#777777", "#f1f1f1"


def draw_sweep(axes: Axes, name: str, found: PipelineResult, *, until_s: float) -> None:
    """Draw the slowest replica's last sweep (all micro-batches once), a lane per stage, stage 0 on
    top. What is not coloured is idle. The time axis ends at `until_s`, the longest sweep's end."""
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
    """Return the seconds of the longest of the systems' last sweeps, for a common time axis."""
    return max(one.last.makespan_s - began_s(one.last) for one in found.values())


def pipelines_of(results: Mapping[str, SystemResult]) -> dict[str, PipelineResult]:
    """Return the pipeline results of the systems whose trainer has stages, by system name."""
    return {name: one.pipeline for name, one in results.items() if one.pipeline is not None}


def pipeline_tables(results: Mapping[str, SystemResult]) -> list[list[list[str]]]:
    """Return a table (rows of cells) of the systems' passes with gradients, as a list of one; an
    empty list if no trainer has stages."""
    found = pipelines_of(results)
    if not found:
        return []
    base_s = next(iter(found.values())).sweep_s
    rows = [
        [
            *("sweeps through the stages", "order", "links", "seconds", "speed", "idle"),
            *("micro-batches", "live tokens"),
        ]
    ]
    for name, one in found.items():
        rows.append(
            [
                *(name, one.order.rpartition("/")[2], one.links, f"{one.sweep_s:,.3f}"),
                f"{base_s / one.sweep_s:.2f}x" if one.sweep_s else "-",
                f"{one.bubble_share:.1%}",
                str(one.num_micro_batches),
                f"{max(one.peak_live_tokens):,}",
            ]
        )
    return [rows]


def explain_pipelines(results: Mapping[str, SystemResult]) -> str:
    """Return sentences that explain the table of sweeps, and what would make them faster. Empty if
    no trainer has stages."""
    found = pipelines_of(results)
    if not found:
        return ""
    first = next(iter(found.values()))
    told = [
        "seconds are those of the sweep with gradients, of the slowest replica; idle is the part "
        "of the phase's GPU time in which stages waited."
    ]
    if first.layers:
        told.append(f"The {first.stages} stages have {_listed(first.layers)} layers.")
    if first.relayout:
        told.append(
            f"A stage is slow: with {_listed(first.relayout)} layers the others would wait less "
            "(train.pipeline.relayout=do)."
        )
    return " ".join(told)[0].upper() + " ".join(told)[1:]


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers[:-1])) + f" and {layers[-1]}" if len(layers) > 1 else "all"
