"""The stages of simulated trainers, as a table and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollpacker.pipeline.sim.phase import PipelineResult

if TYPE_CHECKING:
    from rollpacker.sim.result import SystemResult


def pipelines_of(results: Mapping[str, SystemResult]) -> dict[str, PipelineResult]:
    """Those that have stages, by name."""
    return {name: one.pipeline for name, one in results.items() if one.pipeline is not None}


def pipeline_tables(results: Mapping[str, SystemResult]) -> list[list[list[str]]]:
    """One table, or none where nobody has stages: the sweep with gradients, and what it keeps."""
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
    """What the stages are, and what would make them faster."""
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
