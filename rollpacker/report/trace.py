"""Writes `trace.json` in Chrome's trace format, for Perfetto (ui.perfetto.dev) and
chrome://tracing.

One process of the trace shows what the run did (rounds, phases, live samples), another shows every
sample in a lane. A sample's span is named after what became of the sample, by which viewers colour
it. The trace of a long run holds only its last steps, which the first process's name states."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollpacker.report.step_history import Outcome, Phase, StepHistory
from rollpacker.report.time_book import POOL_CAUSES
from rollpacker.report.turn_book import ENVIRONMENT
from rollpacker.writing import replacing

_RUN, _SAMPLES = 1, 2
_TRACKS = {
    "round": 1,
    "reward_wait": 2,
    "training": 3,
    "sync": 4,
    "checkpoint": 5,
    "evaluation": 6,
    "startup": 7,
    "callbacks": 8,
    "other": 9,
    "recovery": 10,
    "pool_wait": 11,
    "switch": 12,
    "environment": 13,
}
_COLOURS = {
    Outcome.TRAINED: "good",
    Outcome.SURPLUS: "grey",
    Outcome.DEFERRED: "bad",
    Outcome.UNUSED: "black",
    Outcome.FAILED: "terrible",
}
"""Colour of a sample's span by what became of the sample, in chrome://tracing's names. Perfetto
ignores these colours and goes by the span's name."""


def write_steps_trace(steps: Sequence[StepHistory], out: str | Path, *, num_steps: int) -> None:
    """Write these steps, the last ones of the run's `num_steps` steps, as a trace to `out`. Every
    sample takes about 200 bytes: 50 steps of 100 samples make 1 MB."""
    held = steps_held(steps, num_steps)
    with replacing(Path(out)) as temporary, temporary.open("w", encoding="utf-8") as file:
        told = json.dumps({"steps": held}, separators=(",", ":"))
        file.write(f'{{"displayTimeUnit":"ms","otherData":{told},"traceEvents":[\n')
        for number, event in enumerate(_trace_events(steps, held)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def steps_held(steps: Sequence[StepHistory], num_steps: int) -> str:
    """A text on which of a run's `num_steps` steps the trace holds, such as "all 12 steps" or
    "steps 151 to 200, the last 50 of 200"."""
    if len(steps) == num_steps:
        return "the 1 step" if num_steps == 1 else f"all {num_steps:,} steps"
    if len(steps) == 1:
        return f"step {steps[0].step}, the last of {num_steps:,}"
    first, last = steps[0].step, steps[-1].step
    return f"steps {first} to {last}, the last {len(steps):,} of {num_steps:,}"


def _trace_events(steps: Sequence[StepHistory], held: str) -> Iterator[dict[str, Any]]:
    yield _name("process_name", _RUN, 0, f"run ({held})")
    yield _name("process_name", _SAMPLES, 0, "samples")
    named = {phase.name for step in steps for phase in step.phases}
    unused = {*(POOL_CAUSES if named.isdisjoint(POOL_CAUSES) else ()), *({ENVIRONMENT} - named)}
    for name, track in _TRACKS.items():
        if name in unused:
            continue
        yield _name("thread_name", _RUN, track, name.replace("_", " "))
    num_lanes = 0
    for step in steps:
        if step.rollout_start_s is not None:
            end = step.rollout_end_s or step.end_s
            arguments = {"step": step.step, "samples": len(step.samples)}
            yield _span(str(step.kind), _RUN, 1, step.rollout_start_s, end, arguments)
        for phase in step.phases:
            yield _phase(phase, step.step)
        yield from _live_counter(step)
        for lane, event in _sample_spans(step):
            num_lanes = max(num_lanes, lane + 1)
            yield event
    for lane in range(num_lanes):
        yield _name("thread_name", _SAMPLES, lane + 1, f"lane {lane:03d}")


def _phase(phase: Phase, step: int) -> dict[str, Any]:
    track = _TRACKS.get(phase.name, _TRACKS["other"])
    name = phase.name.replace("_", " ")
    return _span(name, _RUN, track, phase.start_s, phase.end_s, {"step": step})


def _live_counter(step: StepHistory) -> Iterator[dict[str, Any]]:
    """Yields trace events with the number of samples being generated, one for each change."""
    changes: dict[float, int] = {}
    for span in step.samples.values():
        end = step.end_s if span.end_s is None else span.end_s
        changes[span.start_s] = changes.get(span.start_s, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    live = 0
    for time_s in sorted(changes):
        live += changes[time_s]
        yield {
            "ph": "C",
            "name": "live samples",
            "pid": _RUN,
            "ts": _us(time_s),
            "args": {"samples": live},
        }


def _sample_spans(step: StepHistory) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the lane and the trace event of every sample in a step. A sample gets the lowest lane
    that is free when it starts."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_lanes = 0
    for span in sorted(step.samples.values(), key=lambda span: span.start_s):
        while busy and busy[0][0] <= span.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        end = step.end_s if span.end_s is None else span.end_s
        heapq.heappush(busy, (end, lane))
        arguments = {
            "id": str(span.sample),
            "step": step.step,
            "tokens": span.num_tokens,
            "reward": span.reward,
        }
        name = str(span.outcome)
        event = _span(name, _SAMPLES, lane + 1, span.start_s, end, arguments)
        event["cname"] = _COLOURS[span.outcome]
        yield lane, event


def _span(
    name: str, process: int, track: int, start_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": track,
        "ts": _us(start_s),
        "dur": max(0, _us(end_s) - _us(start_s)),
        "args": arguments,
    }


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _us(time_s: float) -> int:
    return round(time_s * 1e6)
