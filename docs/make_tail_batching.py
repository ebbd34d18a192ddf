"""The pictures and tables of docs/tail-batching.md.

python docs/make_tail_batching.py [--tables]

The pictures are simulated here; the tables are those of the committed results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from make_simulation import figure, filled, plain, result, save, table
from matplotlib.patches import Patch

from rollpacker.core.commands import Launch, TrainOn
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCENARIO = ROOT / "configs/scenarios/14b-16k.yaml"
STEPS = 60
SYNCHRONOUS, OURS, PUBLISHED = "#0072B2", "#E69F00", "#999999"
NEW, CARRIED, STEP = "#0072B2", "#E69F00", "#EEEEEE"
"""Told apart by people who do not see red and green alike."""
INK, FAINT = "#222222", "#666666"

POOL = (
    *("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "cluster.gpus=8"),
    *("rewards=[]", "lengths={preset: rollpacker-math}", "train.context_parallel=1"),
    *("tail_batching.prompt_factor=2", "tail_batching.max_deferrals=4", "train.fixed_s=6"),
    *("sync_s=3", "steps=9", "seed=4"),
)
"""A pool small enough to be seen whole."""
ROUNDS = range(3, 8)
"""Rounds that are drawn."""


def records_of(*overrides: str) -> list[Record]:
    records: list[Record] = []
    simulate(load_scenario(SCENARIO, overrides), observe=records.append)
    return records


# -- lengths trained ----------------------------------------------------------------


def trained_lengths(records: Sequence[Record]) -> dict[PromptId, list[int]]:
    """Lengths of the responses trained on, by prompt."""
    lengths: dict[SampleId, int] = {}
    trained: dict[PromptId, list[int]] = {}
    for record in records:
        if isinstance(record.event, SampleGenerated):
            lengths[record.event.sample] = record.event.num_tokens
        for command in record.commands:
            if isinstance(command, TrainOn):
                for group in command.groups:
                    trained[group[0].prompt] = [lengths[sample] for sample in group]
    return trained


def draw_lengths() -> None:
    """Of the prompts that all three have trained on by then."""
    made = figure(9, 3.4)
    axes = made.subplots()
    curves = {
        "synchronous": ("system=verl", SYNCHRONOUS, 4.0, "solid"),
        "order only": ("system=rollpacker", OURS, 1.6, "solid"),
        "published": ("system=rollpacker-published", PUBLISHED, 1.6, "dashed"),
    }
    runs = {
        name: trained_lengths(records_of(system, f"steps={STEPS}"))
        for name, (system, *_) in curves.items()
    }
    prompts = set.intersection(*(set(trained) for trained in runs.values()))
    for name, (_, colour, width, style) in curves.items():
        lengths = np.sort([length for prompt in prompts for length in runs[name][prompt]])
        longer = 1 - np.arange(lengths.size) / lengths.size
        label = f"{name}: {lengths.mean():,.0f} tokens on average"
        axes.plot(lengths, longer, color=colour, lw=width, ls=style, label=label)
    plain(axes, "left", "bottom")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(100, 17_000)
    axes.set_ylim(3e-3, 1.05)
    axes.set_xticks([100, 300, 1000, 3000, 10_000], ["100", "300", "1,000", "3,000", "10,000"])
    axes.set_yticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
    axes.minorticks_off()
    axes.set_xlabel("tokens of a response", fontsize=9, color=INK)
    axes.set_ylabel("responses trained on\nthat are longer", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    save(made, "tail-batching-lengths")


# -- a pool -------------------------------------------------------------------------


@dataclass
class Turn:
    """A group in one round."""

    start_s: float
    carried: bool
    end_s: float = 0.0
    trained: bool = False


@dataclass
class Rounds:
    """What the rounds of a run looked like."""

    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """First launch and last response of each."""
    turns: dict[PromptId, dict[int, Turn]] = field(default_factory=dict)


def rounds_of(records: Sequence[Record]) -> Rounds:
    found, number = Rounds(), 0
    for record in records:
        event = record.event
        if isinstance(event, SampleGenerated | SampleAborted):
            found.turns[event.sample.prompt][number].end_s = record.time_s
            start_s, _ = found.spans[number]
            found.spans[number] = (start_s, record.time_s)
        for command in record.commands:
            if isinstance(command, Launch):
                number = command.round
                found.spans.setdefault(number, (record.time_s, record.time_s))
                carried = command.carried or (0,) * len(command.samples)
                for sample, tokens in zip(command.samples, carried, strict=True):
                    rounds = found.turns.setdefault(sample.prompt, {})
                    turn = rounds.setdefault(number, Turn(record.time_s, False))
                    turn.carried |= tokens > 0
            elif isinstance(command, TrainOn):
                for group in command.groups:
                    found.turns[group[0].prompt][number].trained = True
    return found


def draw_pool() -> None:
    found = rounds_of(records_of("system=rollpacker", *POOL))
    first_s, last_s = found.spans[ROUNDS[0]][0], found.spans[ROUNDS[-1]][1]
    shown = {
        prompt: {number: turn for number, turn in turns.items() if number in ROUNDS}
        for prompt, turns in found.turns.items()
        if turns.keys() & set(ROUNDS)
    }
    made = figure(9, 0.6 + 0.14 * len(shown))
    axes = made.subplots()
    for number in ROUNDS[:-1]:
        end_s, next_s = found.spans[number][1], found.spans[number + 1][0]
        axes.axvspan(end_s - first_s, next_s - first_s, color=STEP, lw=0)
    for row, turns in enumerate(shown.values()):
        for number, turn in turns.items():
            colour = CARRIED if turn.carried else NEW
            left, width = turn.start_s - first_s, turn.end_s - turn.start_s
            axes.barh(row, max(width, 0.15), left=left, height=0.62, color=colour)
            if turn.trained:
                axes.plot(found.spans[number][1] - first_s, row, "o", ms=3.2, color=INK)
    plain(axes, "bottom")
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlim(-0.5, last_s - first_s + 0.5)
    axes.set_xlabel("seconds", fontsize=9, color=INK)
    axes.set_ylabel("prompts, as they were fetched", fontsize=9, color=INK)
    handles = [
        Patch(color=NEW, label="first launch"),
        Patch(color=CARRIED, label="goes on from what it carries"),
        Patch(color=STEP, label="optimizer step, new weights"),
    ]
    dot = axes.plot([], [], "o", ms=3.2, color=INK, label="trained on after this round")[0]
    axes.legend(handles=[*handles, dot], frameon=False, fontsize=9, loc="lower left")
    save(made, "tail-batching-pool")


# -- tables -----------------------------------------------------------------------------


def order_only_table() -> str:
    """Every setting, all seeds together."""
    rows = result("order_only")["rows"]
    configs = list(dict.fromkeys(row["config"] for row in rows))
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells: list[object] = [arm]
        for config in configs:
            own = [row for row in rows if (row["config"], row["arm"]) == (config, arm)]
            num, equal, carried = (
                sum(row[key] for row in own) for key in ("responses", "equal", "deferred_responses")
            )
            cells.append(f"{equal:,} of {num:,} ({carried:,} carried)")
        lines.append(cells)
    return table(("equal responses", *configs), lines)


def carry_exact_table() -> str:
    names = {
        "quickstart": "quickstart, real updates",
        "wide vocabulary": "3,001 tokens in the vocabulary, random model",
    }
    found = result("carry_exact")
    rows = [
        [text, *(f"{found[name][key]:,}" for key in ("tokens", "aborts", "different", "ties"))]
        for name, text in names.items()
    ]
    return table(("", "tokens compared", "aborts", "different", "ties"), rows)


def tail_batching_table() -> str:
    rows = result("tail_batching")["rows"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells: list[object] = [arm]
        for size in sizes:
            (row,) = [row for row in rows if (row["arm"], row["size"]) == (arm, size)]
            low, high = row["speedup_95"]
            cells.append(f"{row['speedup']:.2f} ({low:.2f}-{high:.2f})")
        own = [row for row in rows if row["arm"] == arm]
        generated = [row["generated_per_kept"] for row in own]
        shifts = [row["length_over_sync"] - 1 for row in own]
        cells.append(f"{min(generated):.2f}-{max(generated):.2f}")
        cells.append("0" if not any(shifts) else f"{min(shifts):+.1%} to {max(shifts):+.1%}")
        lines.append(cells)
    return table(("over `off`", *sizes, "generated per trained", "length shift"), lines)


def learning_table() -> str:
    found = result("learning")
    rows = [
        [text, *(f"{found[name][key]:{form}}" for key in ("mean", "low", "high"))]
        for name, text, form in (
            ("shift", "length shift, as it is by default", "+.1%"),
            ("shift_published", "length shift, as published", "+.1%"),
            ("on_minus_off", "final pass@1, with tail batching minus without", "+.3f"),
            ("off_over_on_rollout_s", "rollout seconds, without over with", ".2f"),
            ("off_over_on_seconds_to_goal", "seconds to the same pass@1, without over with", ".2f"),
        )
    ]
    return table(("", "mean", "95 % from", "to"), rows)


def drafts_table() -> str:
    rows = []
    for one in result("drafts")["results"]:
        for kind in ("plain", "long"):
            part = one[kind]
            rows.append(
                [
                    f"{one['prompts']} x {one['samples_per_prompt']}, {kind} rounds",
                    f"{part['steps_fewer']:.0%}",
                    f"{part['round_speed']['ratio']:.2f}",
                    f"{part['last_tenth_speed']['ratio']:.2f}",
                    f"{one['different_responses']} of {one['responses']:,}",
                ]
            )
    head = ("quickstart", "decode steps fewer", "round faster", "last tenth faster")
    return table((*head, "responses that differ"), rows)


def noise_table() -> str:
    rows = []
    for row in result("noise")["rows"]:
        cells = [f"{row[key]:.4f}" for key in ("tv", "inversion", "rounds", "bound")]
        prefix = [f"{row['prefix_kept'][key]:.0%}" for key in ("inversion", "rounds")]
        rows.append([f"quickstart, step {row['step']}", *cells, *prefix])
    head = ("per token, one update", "total variation", "inversion", "ours", "bound")
    return table((*head, "prefix kept: inversion", "ours"), rows)


KINDS = ("bfloat16", "noise 0.01", "noise 0.03")


def shifted(row: Mapping[str, float]) -> str:
    return f"{row['shift']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"


def numerics_table() -> str:
    """Queues, by mismatches per token times carried tokens."""
    names = {"short": "short random model", "long": "long random model", "quickstart": "quickstart"}
    rows = []
    for name, row in result("numerics")["rows"].items():
        if name.startswith("lengths") and name.endswith(", queue"):
            _, world, kind, _ = name.split(", ")
            product, length = row["mismatch_times_length"], row["carried_tokens"]
            cells = [f"{product:.2g}", f"{row['mismatch_per_token']:.1e} x {length:.0f}"]
            cells += [f"{row['share_kept']:.0%}", f"{row['equal'] / row['responses']:.1%}"]
            rows.append((product, [f"{names[world]}, {kind}", *cells, shifted(row)]))
    head = (
        "",
        "mismatch x length",
        "which is",
        "tokens kept",
        "responses equal",
        "length shift, 95 %",
    )
    return table(head, [cells for _, cells in sorted(rows)])


def complement_table() -> str:
    """The short random model's arms at growing mismatch x length."""
    found = result("numerics")["rows"]
    noises = [f"noise {sd}" for sd in (0.003, 0.03, 0.3)]
    first = f"lengths, short, {noises[0]}, "
    rows = [
        [
            name.removeprefix(first),
            *(shifted(found[name.replace(noises[0], one)]) for one in noises),
        ]
        for name in found
        if name.startswith(first)
    ]
    many = [shifted(found[f"redraws, short, {one}, queue"]) for one in noises[1:]]
    rows.insert(1, ["queue, 400 redraws", "", *many])
    return table(("length shift, 95 %", *noises), rows)


def numerics_exact_table() -> str:
    found, lines = result("numerics")["rows"], []
    for kind in KINDS:
        same, moving = (found[f"{part}, {kind}"] for part in ("same weights", "carry"))
        batches = list(found[f"batch, {kind}"]["arms"].values())
        changed, compared = (
            sum(one[f"tokens_{what}"] for one in batches) for what in ("changed", "compared")
        )
        cells = [f"{one['mismatches_per_token']:.1e}" for one in (same, moving)]
        cells += [f"{moving['share_kept']:.0%}"]
        cells += [f"{one['different'] / one['responses']:.0%}" for one in (same, moving)]
        cells += [f"{changed / compared:.1e}", shifted(found[f"learning, {kind}"])]
        lines.append([kind, *cells])
    head = ("quickstart", "mismatch per token, same weights", "weights that move", "tokens kept")
    head += ("carried responses that differ, same weights", "weights that move")
    return table(
        (*head, "tokens that another batch changes", "length shift while it learns"), lines
    )


def carry_pays_table() -> str:
    """Seconds of a step by arm and mismatch."""
    found = result("carry_pays")["arms"]
    rates = list(dict.fromkeys(name.split(", ")[1] for name in found if ", " in name))
    arms = list(dict.fromkeys(name.split(", ")[0] for name in found if ", " in name))
    rows = []
    for arm in arms:
        own = [found[f"{arm}, {rate}"] for rate in rates]
        shifts = ", ".join(f"{one['shift']:+.1%}" for one in own)
        rows.append([arm, *(f"{one['step_s']:.1f} s" for one in own), shifts])
    off = f"{found['off']['step_s']:.1f} s"
    heads = [f"mismatch {rate}" for rate in rates]
    return table(
        ("7B, 8k, simulated", *heads, "length shifts"), [*rows, ["off", *[off] * len(rates), "0"]]
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "order_only": order_only_table,
    "carry_exact": carry_exact_table,
    "tail_batching": tail_batching_table,
    "learning": learning_table,
    "drafts": drafts_table,
    "noise": noise_table,
    "numerics": numerics_table,
    "complement": complement_table,
    "numerics_exact": numerics_exact_table,
    "carry_pays": carry_pays_table,
}
PAGE = DOCS / "tail-batching.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="draw nothing")
    if not parser.parse_args().tables:
        draw_pool()
        draw_lengths()
    PAGE.write_text(filled(PAGE.read_text(), TABLES))


if __name__ == "__main__":
    main()
