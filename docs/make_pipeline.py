"""The picture and the tables of docs/pipeline.md.

python docs/make_pipeline.py [--tables]

The picture is simulated here; the tables are those of the committed results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from make_simulation import figure, filled, result, save, table
from matplotlib.patches import Patch

from rollpacker.pipeline.sim.show import OP_COLOURS, OP_WORDS, draw_sweep, longest_s
from rollpacker.sim.scenario import load_scenario, with_pipeline
from rollpacker.sim.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "pipeline.md"
SCENARIO = ROOT / "configs/scenarios/pipeline-14b.yaml"
NAMES = ("1f1b", "zero-bubble", "host", "adapted")
ALL = (*NAMES, "ready")


def draw_lanes() -> None:
    """A sweep with a slow link, as the orders and links run it."""
    scenario = load_scenario(SCENARIO, ["steps=1"])
    found = {}
    for name in ("zero-bubble", "host", "ready"):
        one = simulate(with_pipeline(scenario, name)).pipeline
        assert one is not None
        found[name] = one
    made = figure(9, 4.6)
    rows = made.subplots(len(found), 1, sharex=True)
    for axes, (name, one) in zip(rows, found.items(), strict=True):
        draw_sweep(axes, name, one, until_s=longest_s(found))
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
    rows[-1].set_xlabel("seconds", fontsize=8)
    made.legend(
        handles=[Patch(color=OP_COLOURS[kind], label=OP_WORDS[kind]) for kind in OP_COLOURS],
        loc="outside lower left",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    save(made, "pipeline-lanes")


def rows_of(place: str, part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result("pipeline_published")[place][part]
    return rows


def bubbles_table() -> str:
    return table(
        ["delay of the first link, ms", "zero-bubble, ms", "ready, ms"],
        [
            [f"{row['delay_ms']:g}", f"{row['zero_bubble_ms']:.0f}", f"{row['ready_ms']:.0f}"]
            for row in rows_of("model", "dependency_bubbles")
        ],
    )


def law_table() -> str:
    return table(
        ["slack", "threshold, ms", "(slack - 1) t", "slope", "2N / (slack + 1)"],
        [
            [
                str(row["slack"]),
                f"{row['threshold_ms']:.2f}",
                f"{row['expected_threshold_ms']:.0f}",
                f"{row['slope']:.2f}",
                f"{row['expected_slope']:.2f}",
            ]
            for row in rows_of("model", "delay_law")
        ],
    )


def fixed_table() -> str:
    found = result("pipeline_published")["fixed_ms"]
    return table(
        ["model", "direct, ms", "host, ms"],
        [
            [model.upper(), *(f"{ms:.1f}" for ms in costs.values())]
            for model, costs in found.items()
        ],
    )


def sweep_table() -> str:
    return _against(
        rows_of("compared", "sweep"), ["delay, ms"], lambda row: [f"{row['delays_ms']['6']:g}"]
    )


def single_table() -> str:
    return _against(rows_of("compared", "single"), ["model", "link", "delay, ms"], _where)


def larger_table() -> str:
    return _predicted(rows_of("predicted", "larger"), ["model", "link", "delay, ms"], _where)


def several_table() -> str:
    return _predicted(
        rows_of("predicted", "several_links"), ["model", "links", "delay, ms"], _where
    )


def changing_table() -> str:
    def where(row: Mapping[str, Any]) -> list[str]:
        links = row["links"] if row["links"] == "all" else ", ".join(map(str, row["links"]))
        low, high = row["hold_s"]
        return [row["model"].upper(), links, f"{low:g} to {high:g}"]

    return _predicted(rows_of("predicted", "changing"), ["model", "links", "held, s"], where)


def _where(row: Mapping[str, Any]) -> list[str]:
    delays = row["delays_ms"]
    return [row["model"].upper(), ", ".join(delays), f"{next(iter(delays.values())):g}"]


def learning_table() -> str:
    """Of ten steps' weights and of pass@1, in one process and in two stages."""
    arms = result("pipeline_learning")["arms"]
    words = {"ppo": "PPO", "distillation": "distillation", "lora": "GRPO with LoRA"}
    rows = [
        [
            f"GRPO, seed {seed['seed']}",
            _apart(seed["weights"]["largest_difference"]),
            f"{seed['one process']['before']:.3f} to {seed['one process']['after']:.3f}",
            f"{seed['two stages']['before']:.3f} to {seed['two stages']['after']:.3f}",
            seed["weights"]["samples_part_in_step"] or "never",
        ]
        for seed in arms["grpo"]["seeds"]
    ]
    for name, words_of in words.items():
        arm = arms[name]
        apart = _apart(arm["weights"]["largest_difference"])
        rows.append([words_of, apart, "", f"{arm['before']:.3f} to {arm['after']:.3f}", ""])
    return table(
        [
            "quickstart",
            "weights after ten steps differ by",
            "pass@1, one process",
            "pass@1, two stages",
            "first step with other samples",
        ],
        rows,
    )


def resumed_table() -> str:
    """Weights one step after a resume, by where the run began and where it went on."""
    found = {
        (one["before"], one["after"]): one["weight_difference_one_step_later"]
        for one in result("pipeline_resume")["resumed"]
    }
    layouts = list(dict.fromkeys(before for before, _ in found))
    return table(
        ["began in", *layouts],
        [
            [before, *(_apart(found.get((before, after))) for after in layouts)]
            for before in layouts
        ],
    )


def _apart(difference: float | None) -> str:
    if difference is None:
        return ""
    return f"{difference:.0e}" if difference else "equal"


Where = Callable[[Mapping[str, Any]], list[str]]


def _against(rows: Sequence[Mapping[str, Any]], heads: list[str], where: Where) -> str:
    """Simulated, published and by how much it is off."""
    cells = [
        [
            *where(row),
            *(
                f"{row['simulated_ms'][name]:.0f} / {row['published_ms'][name]} "
                f"({row['errors'][name]:+.1%})"
                for name in NAMES
            ),
        ]
        for row in rows
    ]
    return table([*heads, *NAMES], cells)


def _predicted(rows: Sequence[Mapping[str, Any]], heads: list[str], where: Where) -> str:
    cells = [[*where(row), *(f"{row['simulated_ms'][n]:.0f}" for n in ALL)] for row in rows]
    return table([*heads, *ALL], cells)


TABLES: Mapping[str, Callable[[], str]] = {
    "bubbles": bubbles_table,
    "law": law_table,
    "fixed": fixed_table,
    "sweep": sweep_table,
    "single": single_table,
    "larger": larger_table,
    "several": several_table,
    "changing": changing_table,
    "learning": learning_table,
    "resumed": resumed_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", action="store_true", help="draw nothing")
    if not parser.parse_args().tables:
        draw_lanes()
    PAGE.write_text(filled(PAGE.read_text(), TABLES))


if __name__ == "__main__":
    main()
