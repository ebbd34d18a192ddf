"""Draws docs/simulation-*.png and rewrites the tables in docs/simulation.md.

The pictures are simulated here, in a few minutes; the tables come from the results that the
benchmarks left in benchmarks/results and from the code's own constants.

    python docs/make_simulation.py             # everything
    python docs/make_simulation.py --tables    # only the tables, at once
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.commands import Abort, Command, Launch, Release, TrainOn
from rollpacker.core.events import (
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record
from rollpacker.sim import latency, presets, workload
from rollpacker.sim import simulate as simulating
from rollpacker.sim.cache_limits import KV_WATERMARK
from rollpacker.sim.machine import MIGRATION_S
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "simulation.md"
sys.path.insert(0, str(ROOT / "benchmarks"))

import sim_calibration  # noqa: E402
import sim_published  # noqa: E402

SET_UPS = {
    "7b-8k": "7B, 8k, 16 GPUs",
    "14b-16k": "14B, 16k, 32 GPUs",
    "32b-32k": "32B, 32k, 64 GPUs",
}
SYSTEMS = sim_published.SYSTEMS
STAGES = {"rollout": "rollout_s", "reward": "reward_s", "training": "train_s", "sync": "sync_s"}
COLOURS = {
    **{"rollout": "#0072B2", "reward": "#E69F00", "training": "#009E73"},
    **{"sync": "#999999", "released": "#8FD3BF"},
}
"""Told apart by people who do not see red and green alike."""
STAGE_NAMES = {
    "rollout": "rollout",
    "reward": "waiting for rewards",
    "training": "training",
    "sync": "weight sync",
}
INK, FAINT = "#222222", "#666666"
# -- simulating ---------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    set_up: str
    overrides: tuple[str, ...]
    steps: int = 40


def run(job: Job) -> SystemResult:
    path = ROOT / f"configs/scenarios/{job.set_up}.yaml"
    return simulating.simulate(load_scenario(path, (*job.overrides, f"steps={job.steps}")))


def run_all(jobs: Sequence[Job], processes: int) -> dict[Job, SystemResult]:
    jobs = list(dict.fromkeys(jobs))
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


# -- drawing ------------------------------------------------------------------------


def figure(width: float, height: float) -> Figure:
    """Inches; shown 900 pixels wide, 9 points are 12 pixels."""
    made = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(made)
    made.set_layout_engine("constrained")
    return made


def plain(axes: Axes, *sides: str) -> None:
    """Without a frame but for these sides."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in sides)
    axes.tick_params(labelsize=9, colors=INK, length=0 if not sides else 3)


def save(made: Figure, name: str) -> None:
    path = DOCS / f"{name}.png"
    made.savefig(path, facecolor="white")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")


# -- where the step time goes ---------------------------------------------------------


def breakdown_jobs() -> list[Job]:
    return [Job(set_up, overrides) for set_up in SET_UPS for overrides in SYSTEMS.values()]


def draw_breakdown(runs: Mapping[Job, SystemResult]) -> None:
    made = figure(9, 5.6)
    for axes, (set_up, title) in zip(made.subplots(3, 1), SET_UPS.items(), strict=True):
        means = {system: runs[Job(set_up, own)].mean for system, own in SYSTEMS.items()}
        room = max(mean["total_s"] for mean in means.values())
        for row, (system, mean) in enumerate(means.items()):
            left = 0.0
            for stage, key in STAGES.items():
                axes.barh(row, mean[key], left=left, height=0.68, color=COLOURS[stage])
                if mean[key] > 0.05 * room:
                    centre = left + mean[key] / 2
                    axes.text(centre, row, f"{mean[key]:.0f}", **_inside(stage))
                left += mean[key]
            speedup = means["verl"]["total_s"] / left
            published = sim_published.MEANS[set_up].get(system, 0.0)
            end = max(left, published) + 0.012 * room
            axes.text(end, row, f"{left:.0f} s   {speedup:.2f}x", **_beside())
            if published:
                axes.plot([published] * 2, [row - 0.45, row + 0.45], color="black", linewidth=2)
        plain(axes, "bottom")
        axes.set_yticks(range(len(SYSTEMS)), SYSTEMS, fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(SYSTEMS) - 0.5, -0.5)
        axes.set_xlim(0, room * 1.2)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel("mean seconds of a step, 40 steps", fontsize=10)
    handles: list[Any] = [Patch(color=COLOURS[s], label=STAGE_NAMES[s]) for s in STAGES]
    handles += axes.plot([], [], color="black", linewidth=2, label="published mean")
    made.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=10)
    save(made, "simulation-breakdown")


def _inside(stage: str) -> dict[str, Any]:
    colour = INK if stage in ("reward", "sync", "released") else "white"
    return {"ha": "center", "va": "center", "fontsize": 9, "color": colour}


def _beside() -> dict[str, Any]:
    return {"ha": "left", "va": "center", "fontsize": 9.5, "color": INK}


# -- what the factors do --------------------------------------------------------------

GRID = (1.0, 1.125, 1.25, 1.5)
PAPER = (1.25, 1.25)
HANDLING: Mapping[str, tuple[str, ...]] = {
    "published": (),
    "generated": ("tail_batching.race=generated", "stream_trainer.reward_wait=true"),
}
CASCADES = (
    *((PAPER, PAPER), ((1.25, 1.125), (1.25, 1.125)), ((1.25, 1.0), (1.25, 1.125))),
    *(((1.25, 1.125), (1.5, 1.0)), ((1.5, 1.0), (1.125, 1.125))),
)
FACTOR_STEPS = 45
"""Whole periods at each of the factors."""


def factor_job(factors: tuple[float, float], handling: str) -> Job:
    own = (
        f"tail_batching.prompt_factor={factors[0]}",
        f"tail_batching.sample_factor={factors[1]}",
    )
    published = SYSTEMS["rollpacker"]
    return Job("14b-16k", (*published, *own, *HANDLING[handling]), FACTOR_STEPS)


def cascade_job(tiers: tuple[tuple[float, float], tuple[float, float]]) -> Job:
    first, (then_p, then_s) = tiers
    job = factor_job(first, "generated")
    own = f"tail_batching.tiers=[{{prompt_factor: {then_p}, sample_factor: {then_s}}}]"
    # Long rounds are rare: more steps until their share is right.
    return Job(job.set_up, (*job.overrides, own), 3 * FACTOR_STEPS)


def bound_job(system: str) -> Job:
    # The oracle sorts 20 steps at a time: whole windows.
    return Job("14b-16k", SYSTEMS[system], 40)


def factor_jobs() -> list[Job]:
    pairs = [(p, s) for p in GRID for s in GRID]
    jobs = [factor_job(pair, handling) for pair in pairs for handling in HANDLING]
    jobs += [cascade_job(tiers) for tiers in CASCADES]
    return jobs + [bound_job(system) for system in ("rlhfuse", "oracle")]


def draw_factors(runs: Mapping[Job, SystemResult]) -> None:
    """Step time and length shift over both factors."""
    made = figure(6, 4.6)
    axes = made.subplots()
    found = [[runs[factor_job((p, s), "published")] for s in GRID] for p in GRID]
    seconds = [[result.mean["total_s"] for result in row] for row in found]
    low, high = min(map(min, seconds)), max(map(max, seconds))
    image = axes.imshow(seconds, cmap="cividis_r", vmin=low, vmax=high, origin="lower")
    for y, row in enumerate(found):
        for x, result in enumerate(row):
            value = seconds[y][x]
            colour = "white" if value > (low + high) / 2 else INK
            for place, text, size in (
                (y + 0.11, f"{value:.0f} s", 11),
                (y - 0.22, f"{result.length_shift:+.0%}", 9),
            ):
                axes.text(x, place, text, ha="center", va="center", fontsize=size, color=colour)
    at = GRID.index(PAPER[0]) - 0.47
    axes.add_patch(Rectangle((at, at), 0.94, 0.94, fill=False, edgecolor="#D55E00", linewidth=2.5))
    axes.set_xticks(range(len(GRID)), [f"{value:g}" for value in GRID])
    axes.set_yticks(range(len(GRID)), [f"{value:g}" for value in GRID])
    plain(axes)
    axes.set_xlabel("sample factor (samples launched / kept)", fontsize=10)
    axes.set_ylabel("prompt factor (prompts launched / kept)", fontsize=10)
    bar = made.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label("mean seconds of a step", fontsize=10)
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)
    save(made, "simulation-factors")


MARKS: Mapping[str, tuple[str, str, str]] = {
    "published": ("o", "#0072B2", "factors, rewards as published"),
    "generated": ("^", "#E69F00", "factors, race on generated, training in the reward wait"),
    "cascade": ("s", "#009E73", "the same with a second race"),
}


def draw_shift(runs: Mapping[Job, SystemResult]) -> None:
    """Step time against length shift."""
    made = figure(9, 5.0)
    axes = made.subplots()
    pairs = [(p, s) for p in GRID for s in GRID]
    found = {name: [runs[factor_job(pair, name)] for pair in pairs] for name in HANDLING}
    found["cascade"] = [runs[cascade_job(tiers)] for tiers in CASCADES]
    for name, results in found.items():
        marker, colour, label = MARKS[name]
        shifts = [-100 * r.length_shift for r in results]
        times = [r.mean["total_s"] for r in results]
        axes.scatter(
            *(shifts, times, 46),
            marker=marker, color=colour, label=label, alpha=0.85, linewidths=0,
        )  # fmt: skip
    _special(axes, runs[factor_job(PAPER, "published")], "*", 240, "the paper's setting")
    _special(axes, runs[bound_job("oracle")], "D", 70, "oracle: all lengths known")
    _special(axes, runs[bound_job("rlhfuse")], "P", 80, "rlhfuse: waits for all")
    axes.set_xlabel("trained responses are shorter than the policy's by, %", fontsize=10)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 400)
    axes.set_xlim(-3, 63)
    plain(axes, "left", "bottom")
    axes.set_ylabel("mean seconds of a step, 14B at 16k", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=10)
    save(made, "simulation-shift")


def _special(axes: Axes, result: SystemResult, marker: str, size: float, label: str) -> None:
    axes.scatter(
        *([-100 * result.length_shift], [result.mean["total_s"]], size),
        marker=marker, color="white", edgecolors="black", linewidths=1.5, label=label, zorder=5,
    )  # fmt: skip


# -- one short and one long round -------------------------------------------------------


@dataclass
class Round:
    """What happened between two commits; times from the round's launch."""

    kind: str
    began: float
    running: list[tuple[float, int]]
    """Responses being generated, from this time on."""
    checking: list[tuple[float, int]]
    """Responses whose prompt still needs verdicts and that have none, from this time on."""
    gpus: int
    released: tuple[float, int] | None = None
    train_on: float = 0.0
    trained: float = 0.0
    synced: float = 0.0

    @property
    def generated(self) -> float:
        return next(when for when, count in self.running if count == 0)


class _Recorder:
    """Makes the rounds out of a simulation's records."""

    def __init__(self, samples_per_prompt: int, gpus: int) -> None:
        self.rounds: list[Round] = []
        self._needed, self._gpus = samples_per_prompt, gpus
        self._num_running = 0
        self._pending: dict[PromptId, set[SampleId]] = {}
        """Generated and without a verdict, as long as the prompt needs one."""
        self._num_scored: Counter[PromptId] = Counter()

    def __call__(self, record: Record) -> None:
        event, now = record.event, record.time_s
        if isinstance(event, SampleGenerated):
            self._run(now, -1)
            if self._num_scored[event.sample.prompt] < self._needed:
                self._pending.setdefault(event.sample.prompt, set()).add(event.sample)
            self._check(now)
        elif isinstance(event, SampleScored):
            prompt = event.sample.prompt
            self._num_scored[prompt] += 1
            self._pending.get(prompt, set()).discard(event.sample)
            if self._num_scored[prompt] == self._needed:
                self._pending.pop(prompt, None)
            self._check(now)
        elif isinstance(event, Trained):
            self.rounds[-1].trained = now - self.rounds[-1].began
        elif isinstance(event, WeightsSynced) and self.rounds:
            self.rounds[-1].synced = now - self.rounds[-1].began
        for command in record.commands:
            self._obey(now, command)

    def _obey(self, now: float, command: Command) -> None:
        if isinstance(command, Launch):
            self.rounds.append(Round(str(command.kind), now, [], [], self._gpus))
            self._num_running = 0
            self._pending.clear()
            self._num_scored.clear()
            self._run(now, len(command.samples))
            self._check(now)
        elif isinstance(command, Abort):
            self._run(now, -len(command.samples))
        elif isinstance(command, Release):
            self.rounds[-1].released = (now - self.rounds[-1].began, len(command.devices))
        elif isinstance(command, TrainOn):
            self.rounds[-1].train_on = now - self.rounds[-1].began
            self._pending.clear()
            self._check(now)

    def _run(self, now: float, change: int) -> None:
        self._num_running += change
        self.rounds[-1].running.append((now - self.rounds[-1].began, self._num_running))

    def _check(self, now: float) -> None:
        num_pending = sum(map(len, self._pending.values()))
        self.rounds[-1].checking.append((now - self.rounds[-1].began, num_pending))


def record_rounds(steps: int) -> list[Round]:
    scenario = load_scenario(
        ROOT / "configs/scenarios/14b-16k.yaml", (*SYSTEMS["rollpacker"], f"steps={steps}")
    )
    recorder = _Recorder(scenario.rollout.samples_per_prompt, scenario.cluster.gpus)
    simulating.simulate(scenario, observe=recorder)
    return [made for made in recorder.rounds if made.synced]


def draw_timeline() -> None:
    rounds = record_rounds(12)
    long = next(made for made in rounds if made.kind == "long" and made.released is not None)
    short = rounds[rounds.index(long) - 1]
    made = figure(9, 6.2)
    grid = made.subplots(4, 1, sharex=True, height_ratios=[3, 1.1, 3, 1.1])
    for (counts, strip), shown in zip((grid[:2], grid[2:]), (short, long), strict=True):
        _draw_counts(counts, shown)
        _draw_gpus(strip, shown)
    grid[3].set_xlabel("seconds since the launch, 14B at 16k", fontsize=10)
    grid[3].set_xlim(0, long.synced * 1.02)
    handles: list[Any] = grid[0].get_legend_handles_labels()[0]
    handles += [Patch(color=COLOURS[s], label=f"GPUs: {STAGE_NAMES[s]}") for s in STAGES]
    made.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=10)
    save(made, "simulation-rounds")


def _draw_counts(axes: Axes, shown: Round) -> None:
    for series, colour, label in (
        (shown.running, COLOURS["rollout"], "responses being generated"),
        (shown.checking, "#D55E00", "complete, verdict awaited"),
    ):
        times, counts = zip(*series, strict=True)
        values = [max(count, 0.5) for count in counts]
        axes.step(
            *((*times, shown.train_on), (*values, values[-1])),
            where="post", color=colour, linewidth=1.8, label=label,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(0.7, 2500)
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.7)
    plain(axes, "left", "bottom")
    axes.set_ylabel("number (log)", fontsize=10)
    told = f"{shown.kind.capitalize()} round: {shown.synced:.0f} s"
    axes.set_title(told, loc="left", fontsize=11, fontweight="bold")


def _draw_gpus(axes: Axes, shown: Round) -> None:
    def block(start: float, end: float, low: int, high: int, stage: str) -> None:
        axes.add_patch(Rectangle((start, low), end - start, high - low, color=COLOURS[stage], lw=0))

    end, gpus = shown.generated, shown.gpus
    block(0, end, 0, gpus, "rollout")
    if shown.released is not None:
        when, count = shown.released
        block(when, end, 0, count, "released")
        told = "released: gradients of finished groups"
        axes.text((when + end) / 2, count / 2, told, **_inside("released"))
    block(end, shown.train_on, 0, gpus, "reward")
    block(shown.train_on, shown.trained, 0, gpus, "training")
    block(shown.trained, shown.synced, 0, gpus, "sync")
    axes.set_ylim(0, gpus)
    axes.set_yticks([0, gpus])
    axes.set_ylabel("GPUs", fontsize=10)
    plain(axes, "bottom")


# -- tables -----------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown; the first column is text, the others are told to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def text_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return loaded


def fitted_table() -> str:
    """The constants that were fitted."""
    values = sim_published.shipped()
    rows = [
        [f"`{name}`", f"{sim_calibration.BEFORE[name]:.4g}", f"{values[name]:.4g}", unit, source]
        for name, (unit, source) in sim_calibration.SOURCES.items()
    ]
    return text_table(("constant", "before", "value", "unit", "held most by"), rows)


def calibration_table() -> str:
    """The other constants of the datasheet model: `Calibration`."""
    rows = [
        [f"`{name}`", f"{value:.4g}", unit, source]
        for name, (value, unit, source) in latency.Calibration().constants().items()
        if name not in sim_calibration.SOURCES
    ]
    return text_table(("constant", "value", "unit", "source"), rows)


def assumed_table() -> str:
    """What is neither fitted nor on a datasheet."""
    deadline, planner = AdaptiveDeadlineConfig(), ParallelismConfig()
    code, math_kind = presets.REWARD_KINDS["code"], presets.REWARD_KINDS["math"]
    paper = "the paper"
    rows: list[list[object]] = [
        ["training work", f"{latency.TRAIN_FLOPS_PER_PARAM:g}", "FLOP per token and parameter",
         "6 for forward and backward, 2 each for two log-prob passes"],
        ["prompt tokens found in the cache", latency.SHARED_PREFILL_SHARE, "share",
         "assumed: samples of one prompt share its prefill"],
        ["memory for weights and cache", latency.KV_MEMORY_SHARE, "share of a GPU's",
         "vLLM's default"],
        ["cache kept free at admission", KV_WATERMARK, "share", "assumed, as vLLM's"],
        ["release until training can begin", MIGRATION_S, "s",
         f"{paper}, section 4.4: at most this"],
        ["window of the release", " to ".join(f"{v:g}" for v in presets.RELEASE_WINDOW),
         "share finished", f"{paper} tries from 0.2 on; 0.4 is what its configurations fix"],
        ["judge on GPUs of its own", simulating.DEDICATED_JUDGE_SHARE, "share of its rate",
         "assumed, middle of Fig. 13a"],
        ["math check", f"{_only(math_kind.seconds_quantiles):g} s, {math_kind.workers} workers", "",
         "assumed: never matters"],
        ["code check", "by quantile", "s", f"{paper}, Fig. 7a"],
        ["`slowest_correct_s` of code", code.slowest_correct_s, "s",
         "assumed: what runs past the gap in Fig. 7a is not correct"],
        ["correct answers", workload.CORRECT_SHARE, "share of those in time",
         "assumed; it moves nothing but the deadline"],
        ["deadline: factor, least, most",
         f"{deadline.factor:g}, {deadline.min_s:g}, {deadline.max_s:g}", "-, s, s",
         f"{paper}, section 4.3"],
        ["planner: double at, halve after", f"{planner.rise:g}, {planner.calm_rounds}",
         "times the preemptions, rounds", f"{paper}, section 4.2"],
    ]  # fmt: skip
    return text_table(("constant", "value", "unit", "source"), rows)


def _only(law: Mapping[float, float] | None) -> float:
    assert law is not None and len(law) == 1
    return next(iter(law.values()))


def _facts(group: str) -> list[dict[str, Any]]:
    return [row for row in result("sim_published")["facts"] if row["group"] == group]


def _error(row: Mapping[str, Any]) -> str:
    return f"{row['simulated'] / row['published'] - 1:+.0%}"


def _fact_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [r["fact"], r["source"], f"{r['published']:g}", f"{r['simulated']:g}", _error(r)]
        for r in rows
    ]


_FACT_HEAD = ("fact", "source", "published", "simulated", "error")


def errors_table() -> str:
    """Error factors of every group, of the worlds before and the shipped one."""
    calibration, published = result("sim_calibration"), result("sim_published")
    factors = calibration["error_factors"]
    rows: list[list[object]] = []
    for group, weight in calibration["weights"].items():
        number = len([row for row in published["facts"] if row["group"] == group])
        values = [factors[world][group] for world in ("A", "B")]
        values.append(published["error_factors"][group])
        rows.append([group, number, f"{weight:g}", *(f"{value:.2f}" for value in values)])
    losses = [f"{calibration['loss'][world]:.4f}" for world in ("A", "B", "shipped")]
    rows.append(["loss that the fit minimises", len(published["facts"]), "-", *losses])
    head = ("group", "facts", "weight in the fit", "world A", "world B", "shipped")
    return table(head, rows)


def means_table() -> str:
    rows = [
        [r["fact"], f"{r['published']:.1f}", f"{r['simulated']:.1f}", _error(r)]
        for r in _facts("step times")
    ]
    return table(("mean step, s", "published", "simulated", "error"), rows)


def splits_table() -> str:
    splits = result("sim_published")["splits"]
    rows = []
    for name, published in sim_published.SPLITS.items():
        set_up, kind = name.split()
        found = splits[f"{set_up} rollpacker"][kind]
        keys = ("sync_s", "rollout_s", "reward_s", "train_s")
        pairs = zip(published, keys, strict=True)
        rows.append([name, *(f"{seconds:.1f} / {found[key]:.1f}" for seconds, key in pairs)])
    return table(("published / simulated, s", "sync", "rollout", "reward", "training"), rows)


BLIND_PARTS = {
    "+ tail batching": "+ tail batching",
    "+ reward scheduler": "+ reward scheduler",
    "+ parallelism planner": "+ reward scheduler",
    "+ stream trainer": "+ stream trainer = rollpacker",
}
"""Table 2's rows and those of the predictions, which added the planner before the scheduler."""


def blind() -> list[tuple[str, str, float, float]]:
    """Group, fact, published, and as predicted before anybody compared, in world A."""
    predicted = result("sim_predictions")
    rows = []
    for part, values in sim_published.ABLATION.items():
        for set_up, published in zip(SET_UPS, values, strict=True):
            own = predicted["ablation"][f"{set_up} A"][BLIND_PARTS[part]]
            rows.append(("ablation", f"{set_up}, {part}", published, own["speedup_over_verl"]))
    grown = predicted["scaling"]["batch grows with the GPUs"]
    for row in grown:
        published_pair = sim_published.SCALING[row["gpus"]]
        for system, published in zip(("verl", "rollpacker"), published_pair, strict=True):
            times = row["prompts_per_step"] / grown[0]["prompts_per_step"]
            own = times * grown[0]["verl"] / row[system]
            if (row["gpus"], system) != (32, "verl"):
                name = f"{system}, {row['gpus']} GPUs, over verl on 32"
                rows.append(("scaling", name, published, own))
    return rows


def blind_table() -> str:
    rows = [
        [name, f"{published:.2f}x", f"{own:.2f}x", f"{own / published - 1:+.0%}"]
        for _, name, published, own in blind()
    ]
    return table(("speed-up", "published", "predicted", "error"), rows)


def blind_sensitivity() -> list[tuple[tuple[float, float], str, float, dict[str, float]]]:
    """Factors, limit, published, predicted in each world: of 14B at all limits, as committed."""
    found = []
    for row in result("sim_predictions")["sensitivity"]:
        factors = (row["prompt_factor"], row["sample_factor"])
        columns = zip(("8k", "16k", "32k"), sim_published.SENSITIVITY[factors], strict=True)
        for cap, published in columns:
            found.append((factors, cap, published, {w: row[f"{cap} {w}"] for w in "AB"}))
    return found


def blind_sensitivity_table() -> str:
    read = result("sim_calibration")["sensitivity"]
    set_ups = dict(zip(("8k", "16k", "32k"), SET_UPS, strict=True))
    lines: dict[str, list[str]] = {}
    for factors, cap, published, own in blind_sensitivity():
        pair = f"{factors[0]:g}, {factors[1]:g}"
        fact = f"{set_ups[cap]}, factors ({pair}), s"
        cells = [f"{own[w]:.0f} / {read[w][fact]:.0f}" for w in "AB"]
        lines.setdefault(pair, [pair]).extend([f"{published:g}", *cells])
    head = ["prompt, sample factor"]
    for cap in set_ups:
        head += [f"{cap} published", f"{cap} A", f"{cap} B"]
    return table(head, list(lines.values()))


def blind_errors_table() -> str:
    """Error factors of the predictions."""

    def factor(pairs: Sequence[tuple[float, float]]) -> str:
        return f"{sim_published.error_factor(math.log(a / b) for a, b in pairs):.2f}"

    rows = []
    for group in ("ablation", "scaling"):
        pairs = [(own, published) for g, _, published, own in blind() if g == group]
        rows.append([f"{group}, {len(pairs)} speed-ups", factor(pairs), "-"])
    ours = [(o, p) for g, n, p, o in blind() if g == "scaling" and n.startswith("rollpacker")]
    rows.append([f"scaling, rollpacker alone, {len(ours)} speed-ups", factor(ours), "-"])
    cells = blind_sensitivity()
    for told, chosen in (
        ("sensitivity, 14B at three limits, as committed", cells),
        ("sensitivity, of it the 16k column", [c for c in cells if c[1] == "16k"]),
    ):
        values = [factor([(own[w], published) for _, _, published, own in chosen]) for w in "AB"]
        rows.append([told, *values])
    read = result("sim_calibration")["sensitivity_error_factors"]
    told = "sensitivity, the same constants, columns read as the three set-ups"
    rows.append([told, *(f"{read[w]:.2f}" for w in "AB")])
    return table(("predictions off by a factor of", "world A", "world B"), rows)


def ablation_table() -> str:
    published = {row["fact"]: row["published"] for row in _facts("ablation")}
    published |= {
        f"{s}, verl + asynchronous rewards": v for s, v in sim_published.OVERLAP_ALONE.items()
    }
    found = result("sim_published")["systems"]
    rows = []
    for name in found["7b-8k"]:
        cells = [name]
        for set_up in SET_UPS:
            row, known = found[set_up][name], published.get(f"{set_up}, {name}")
            told = "" if known is None else f" ({known:.2f}x)"
            cells += [f"{row['step_s']:.1f} s, {row['speedup_over_verl']:.2f}x{told}"]
        rows.append(cells)
    return table(("mean step, speed-up over verl (published)", *SET_UPS), rows)


def cost_table() -> str:
    """What stands beside a speed-up."""
    found = result("sim_published")["systems"]
    rows = []
    for set_up in SET_UPS:
        verl = 1 + found[set_up]["verl"]["length_shift"]
        for system in SYSTEMS:
            row = found[set_up][system]
            tokens = row["speedup_over_verl"] * (1 + row["length_shift"]) / verl
            rows.append(
                [
                    f"{set_up}, {system}",
                    *(f"{row['step_s']:.1f}", f"{row['speedup_over_verl']:.2f}x", f"{tokens:.2f}x"),
                    *(f"{row['length_shift']:+.1%}", f"{row['tail_trained_share']:.1%}"),
                    f"{row['generated_per_trained']:.2f}",
                ]
            )
    head = ("set-up, system", "step, s", "over verl", "trained tokens/s over verl", "length shift")
    return table((*head, "trained beyond own P95", "generated / trained"), rows)


def sensitivity_table() -> str:
    found = {row["fact"]: row for row in _facts("sensitivity")}
    rows = []
    for factors in sim_published.SENSITIVITY:
        pair = f"{factors[0]:g}, {factors[1]:g}"
        cells = [pair]
        for set_up in SET_UPS:
            row = found[f"{set_up}, factors ({pair}), s"]
            cells.append(f"{row['published']:g} / {row['simulated']:.0f}, {_error(row)}")
        rows.append(cells)
    head = ("prompt, sample factor", *(f"{name}, published / simulated" for name in SET_UPS))
    return table(head, rows)


def scaling_table() -> str:
    published = {row["fact"]: row["published"] for row in _facts("scaling")}
    grown = "batch grows with the GPUs"
    rows = []
    for name, found in result("sim_published")["scaling"].items():
        for row in found:
            seconds = [f"{row[system]:.0f}" for system in SYSTEMS]
            times = row["prompts_per_step"] / found[0]["prompts_per_step"]
            for system in ("verl", "rollpacker"):
                known = published.get(f"{system}, {row['gpus']} GPUs, over verl on 32")
                told = f" ({known:.2f}x)" if known and name == grown else ""
                seconds.append(f"{times * found[0]['verl'] / row[system]:.2f}x{told}")
            told = f"{name}: {row['gpus']} GPUs, {row['prompts_per_step']} prompts"
            rows.append([told, *seconds, f"{row['verl'] / row['rollpacker']:.2f}x"])
    throughput = [f"throughput of {system} (published)" for system in ("verl", "rollpacker")]
    return table(("14B, mean step, s", *SYSTEMS, *throughput, "rollpacker over verl"), rows)


def checks_table() -> str:
    groups = ("code alone", "lengths", "32B rollout", "adaptive timeout", "stream trainer")
    return table(_FACT_HEAD, _fact_rows([row for group in groups for row in _facts(group)]))


def unfitted_table() -> str:
    return table(_FACT_HEAD, _fact_rows(result("sim_published")["unfitted"]))


WRONG = 1.15
"""Facts that are off by this factor or more are listed."""


def wrong_table() -> str:
    """Everything that the model misses by much, the worst first."""
    published = result("sim_published")

    def size(row: Mapping[str, Any]) -> float:
        return abs(math.log(row["simulated"] / row["published"]))

    rows = [r for r in [*published["facts"], *published["unfitted"]] if size(r) >= math.log(WRONG)]
    return table(_FACT_HEAD, _fact_rows(sorted(rows, key=size, reverse=True)))


def speed_table() -> str:
    found = result("sim_speed")
    rows = []
    for name in ("with rewards", "without a reward stage"):
        speed = found[name]
        rows.append(
            [
                f"{speed['steps']} steps of `128-gpus.yaml`, {name}",
                f"{speed['cpu_s']:.0f} s",
                f"{speed['events_per_step']:,.0f}",
                f"{speed['peak_mib_at_a_tenth']:.0f}, {speed['peak_mib']:.0f} MiB",
            ]
        )
    header = (
        "one core",
        "processor time",
        "events a step",
        "peak memory after a tenth, at the end",
    )
    return table(header, rows)


def sim_vs_real_table() -> str:
    rows = []
    for row in result("sim_vs_real")["rows"]:
        for what in ("mean", "short", "long"):
            one = row[what]
            rows.append(
                [
                    f"{row['workload']}, {'all rounds' if what == 'mean' else what}",
                    f"{one['rounds']}",
                    f"{one['real_s'] * 1e3:.0f} ms",
                    f"{one['predicted_s'] * 1e3:.0f} ms",
                    f"{one['ratio']:.2f}",
                ]
            )
    return table(("rollout", "rounds", "real", "predicted", "ratio"), rows)


def sim_from_rewards_table() -> str:
    rows = []
    for name, row in result("sim_from_rewards")["cases"].items():
        step, wait = row["step_s"], row["wait_s"]
        rows.append(
            [
                name,
                *(f"{step:.3f}", f"{row['simulated_step_s']:.3f}", f"{row['step_error']:+.0%}"),
                *(f"{1e3 * wait:,.1f} ms", f"{1e3 * row['simulated_wait_s']:,.1f} ms"),
                f"{abs(row['simulated_wait_s'] - wait) / step:.1%}",
            ]
        )
    head = ("reward", "step, s", "simulated, s", "error", "exposed wait", "simulated")
    return table((*head, "apart, of the step"), rows)


def debias_table() -> str:
    rows = []
    for row in result("debias")["rows"]:
        moments = row["moments"]
        rows.append(
            [
                f"{row['rho']:g}, {row['hard_share']:.0%}, ({row['factors']})",
                f"{row['trained']:.2f}",
                f"{row['estimated']:.2f}",
                f"{moments['mean']:.2f}",
                f"{max(map(abs, moments['quantile_errors'])):.1%}",
                f"{moments['effective_sample_size']:.2f}",
            ]
        )
    header = (
        *("correlation, hard, factors", "trained / own", "estimated / own", "weighted / own"),
        *("worst quantile 25 to 95", "effective sample size"),
    )
    return table(header, rows)


def debias_run_table() -> str:
    found = result("debias_run")
    rows = []
    for arm, summary in found["summary"].items():
        runs = [r for name, r in found["results"].items() if name.startswith(f"{arm}, ")]
        sizes = [run["effective_sample_size"] for run in runs]
        rows.append(
            [
                arm if arm.startswith("frozen") else f"learning {arm}",
                f"{summary['mean']:.3f} ± {summary['half_width']:.3f}",
                f"{sum(sizes) / len(sizes):.2f}",
            ]
        )
    return table(("arm", "weighted trained length over off", "effective sample size"), rows)


def _place(one: Mapping[str, Any]) -> str:
    """The set-up; of results from before the fit, with the world."""
    return f"{one['setup']}, {one['world']}" if "world" in one else str(one["setup"])


def beyond_table() -> str:
    rows = []
    for one in result("beyond")["results"]:
        best = one["best"]
        bound = next(o for o in one["oracles"] if o["name"] == "oracle, window of 20")
        rows.append(
            [
                _place(one),
                f"{one['paper']['step_s']:.1f} s, {one['paper']['length_shift']:+.1%}",
                f"{best['step_s']:.1f} s, {best['length_shift']:+.1%}",
                f"{best['saved_share']:.1%} ± {best['saved_error_share']:.1%}",
                f"{best['step_s'] / bound['step_s'] - 1:+.0%}",
            ]
        )
    header = ("set-up", "the paper's setting", "planned", "saved", "against the oracle")
    return table(header, rows)


def ideas_table() -> str:
    results = result("beyond")["results"]
    places = [_place(one) for one in results]
    names = [idea["name"] for idea in results[0]["ideas"]]
    rows = []
    for name in names:
        cells = [name]
        for one in results:
            idea = next((i for i in one["ideas"] if i["name"] == name), None)
            cells.append("" if idea is None else f"{idea['saved_share']:+.1%}")
        rows.append(cells)
    return table(("saved by each idea alone", *places), rows)


def order_only_table() -> str:
    """Speed-ups over verl by step and rollout, and shifts, at growing chances of a mismatch."""
    results = result("order_only_sim")["arms"]
    names = [name for name in next(iter(results.values())) if name != "verl"]
    rows = []
    for name in names:
        cells = [name]
        for one in results.values():
            found = one[name]
            cells.append(
                f"{found['step_speedup']:.2f}x ({found['rollout_speedup']:.2f}x), "
                f"{found['shift']:+.1%}"
            )
        rows.append(cells)
    return table(("over verl: step (rollout), length shift", *results), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "order_only": order_only_table,
    "fitted": fitted_table,
    "calibration": calibration_table,
    "assumed": assumed_table,
    "errors": errors_table,
    "means": means_table,
    "splits": splits_table,
    "blind": blind_table,
    "blind_sensitivity": blind_sensitivity_table,
    "blind_errors": blind_errors_table,
    "ablation": ablation_table,
    "cost": cost_table,
    "sensitivity": sensitivity_table,
    "scaling": scaling_table,
    "checks": checks_table,
    "unfitted": unfitted_table,
    "wrong": wrong_table,
    "speed": speed_table,
    "sim_vs_real": sim_vs_real_table,
    "sim_from_rewards": sim_from_rewards_table,
    "debias": debias_table,
    "debias_run": debias_run_table,
    "beyond": beyond_table,
    "ideas": ideas_table,
}
_PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with every table as it is now."""

    def fill(place: re.Match[str]) -> str:
        name = place.group(1)
        return f"<!-- table: {name} -->\n{tables[name]()}\n<!-- end -->"

    return _PLACE.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", action="store_true", help="draw nothing")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at the same time")
    args = parser.parse_args()
    if not args.tables:
        runs = run_all([*breakdown_jobs(), *factor_jobs()], args.jobs)
        draw_breakdown(runs)
        draw_factors(runs)
        draw_shift(runs)
        draw_timeline()
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
