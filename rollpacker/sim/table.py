"""Plain tables, at most 100 columns wide, of simulation results, and sentences on their meaning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rollpacker.core.commands import RoundKind
from rollpacker.pipeline.sim.show import pipeline_tables
from rollpacker.report.table import lines
from rollpacker.report.turn_book import ENVIRONMENT
from rollpacker.sim.result import (
    BUBBLE_CAUSES,
    OTHER_POOL,
    PIPELINE,
    SystemResult,
)

Results = Mapping[str, SystemResult]
"""Mapping from the name of each simulated system to its result, in the order of tables. The first
is the one that others are compared with."""

STAGES = {
    "rollout": "rollout_s",
    "reward": "reward_s",
    "training": "train_s",
    "weight sync": "sync_s",
}
"""Mapping from the name of each part of a step in tables, in order of time, to the field of
`StepResult` with its seconds."""
ORACLE = "oracle"
MIN_FASTER = 0.02
"""Share by which steps must be shorter, or tokens per second more, to count as different."""
MANY_TIMES = 2.0
"""Ratio of two durations from which on the text shows the ratio, not a percentage."""
MIN_FEWER = 0.08
"""Share by which a system must train on fewer tokens for the text to mention it. Smaller
differences also come about by chance in a few dozen steps, which begin with short responses."""
_NOTABLE_SHIFT = 0.03
"""Share by which mean trained lengths must differ from the policy's own to be called shorter or
longer. Smaller differences come about by chance in a few dozen steps."""


def render(
    results: Results,
    *,
    reference: str | None = None,
    idle: bool = True,
    last_stage: str = "weight sync",
) -> str:
    """Returns tables of seconds, rounds, lengths and, if `idle`, idle device time, a row per
    system. `reference` is the system whose speed counts as 1 (None: the first). `last_stage` names
    the column for what follows the optimizer step: in a real run more than the weight sync."""
    tables = [
        _seconds_table(results, reference or next(iter(results)), last_stage),
        _rounds_table(results),
        _lengths_table(results),
        *([_idle_table(results)] if idle else []),
        *pipeline_tables(results),
    ]
    return "\n\n".join("\n".join(lines(rows)) for rows in tables)


def _seconds_table(results: Results, reference: str, last_stage: str) -> list[list[str]]:
    """Rows of a table: mean seconds of a step and its stages, and trained tokens per second."""
    stages = [*[*STAGES][:-1], last_stage]
    rows = [["seconds of a step, mean", "step", "speed", "tokens/s", *stages]]
    base = results[reference].mean["total_s"]
    digits = _digits(results)
    flattered = _flattered(results, reference)
    for name, result in results.items():
        mean = result.mean
        speed = f"{'~' if name in flattered else ''}{_number(_over(base, mean['total_s']), 2)}x"
        seconds = (_number(mean[field], digits) for field in STAGES.values())
        tokens = _number(result.trained_tokens_per_s, 0)
        rows.append([name, _number(mean["total_s"], digits), speed, tokens, *seconds])
    return rows


def _flattered(results: Results, reference: str) -> set[str]:
    """Names of systems whose speed gets a mark in the table. Their steps, or the reference's, have
    not yet trained on the prompts with the longest responses, and look short for that."""
    if _misses_the_longest(results[reference]):
        return set(results) - {reference}
    return {name for name, result in results.items() if _misses_the_longest(result)}


def _rounds_table(results: Results) -> list[list[str]]:
    """Rows of a table: mean seconds and number of rounds of each kind, degrees of tensor
    parallelism, preemptions, and releases of engines' devices to the trainer."""
    digits = _digits(results)
    met = {step.kind for result in results.values() for step in result.steps}
    kinds = [kind.value for kind in RoundKind if kind.value in met]
    rows = [["rounds, seconds x number", *kinds, "TP", "preemptions", "releases"]]
    for name, result in results.items():
        seconds = [[step.total_s for step in result.steps if step.kind == kind] for kind in kinds]
        cells = [f"{_number(_mean(s), digits)} x {len(s)}" if s else "-" for s in seconds]
        degrees = sorted({step.tensor_parallel for step in result.steps})
        preemptions = sum(step.preemptions for step in result.steps)
        counts = [f"{preemptions:,}", f"{result.num_releases:,}"]
        rows.append([name, *cells, ", ".join(map(str, degrees)), *counts])
    return rows


def _lengths_table(results: Results) -> list[list[str]]:
    """Rows of a table: mean lengths of trained and of the policy's own responses, and by what share
    they differ ("shift"). "paired" compares with the same prompts only, so without chance."""
    rows = [
        [
            *("tokens of a response", "trained", "own", "shift", "paired"),
            *("beyond P95", "generated/trained", "mismatch"),
        ]
    ]
    for name, result in results.items():
        rows.append(
            [
                name,
                _number(result.trained_length_mean, 0),
                _number(result.policy_length_mean, 0),
                _percent(result.length_shift, sign=True),
                _percent(result.paired_shift, 1, sign=True),
                _percent(result.tail_trained_share, 1),
                _number(_over(result.tokens_generated, result.tokens_trained), 2),
                f"{result.mismatch:.0e}" if result.mismatch else "-",
            ]
        )
    return rows


def _idle_table(results: Results) -> list[list[str]]:
    causes = [*BUBBLE_CAUSES]
    for rare in (ENVIRONMENT, PIPELINE, OTHER_POOL):
        if any(rare in result.bubble for result in results.values()):
            causes.append(rare)
    rows = [["idle, of all device time", *(cause.replace("_", " ") for cause in causes), "sum"]]
    for name, result in results.items():
        idle = [result.bubble.get(cause, 0.0) for cause in causes]
        shares = [_over(seconds, result.device_seconds) for seconds in (*idle, sum(idle))]
        rows.append([name, *(_percent(share, 1) for share in shares)])
    return rows


# -- in words ----------------------------------------------------------------------


def explain(results: Results) -> str:
    """A few sentences on the fastest system except the oracle, which nobody can build: where its
    step's time goes, how long its step is beside others', and what it trains on."""
    name = min(
        (name for name in results if name != ORACLE or len(results) == 1),
        key=lambda name: results[name].mean["total_s"],
    )
    told = (
        _where_it_goes(name, results),
        _what_is_trained(name, results[name]),
        *_mark_explained(results, next(iter(results))),
        *_trains_on_less(results, next(iter(results))),
        *_faster_than_the_oracle(results),
    )
    return " ".join(filter(None, told))


def explain_what_if(results: Results) -> str:
    """A few sentences on three results in this order: a run as measured, the run simulated, and the
    run simulated with other settings. The third is missing if nothing was changed."""
    measured, same, *others = results.values()
    changed = others[0] if others else same
    before, after = same.mean["total_s"], changed.mean["total_s"]
    real, digits = measured.mean["total_s"], _digits(results)
    fit = (
        f"Simulated as it was, the run's step is {_compared(before, real)} measured "
        f"({_number(real, digits)} s): trust no smaller difference than that."
    )
    if not others:
        return " ".join(filter(None, (fit, _what_is_trained("Simulated the run", same))))
    told = (
        f"With the changes a step would take {_number(after, digits)} s instead of "
        f"{_number(before, digits)} s, which is {_compared(after, before)} before; both are "
        f"simulated. {fit}"
    )
    simulated = {"The run as it was": same, "the run with the changes": changed}
    less = _trains_on_less(simulated, "The run as it was")
    trained = _what_is_trained("With the changes the run", changed)
    mark = _mark_explained(results, list(results)[1])
    return " ".join(filter(None, (told, trained, *mark, *less)))


def _mark_explained(results: Results, reference: str) -> list[str]:
    if not _flattered(results, reference):
        return []
    return ["~ marks a speed over steps in which the longest responses are still to come."]


def _trains_on_less(results: Results, reference: str) -> list[str]:
    """A warning for every system whose step is shorter than the reference's at least in part
    because it trains on fewer tokens; empty if there is no such system."""
    base = results[reference]
    told = []
    for name, result in results.items():
        faster = _over(base.mean["total_s"], result.mean["total_s"])
        tokens = _over(result.mean["tokens_trained"], base.mean["tokens_trained"])
        if not (faster > 1 + MIN_FASTER and tokens < 1 - MIN_FEWER):
            continue
        rate = _over(result.trained_tokens_per_s, base.trained_tokens_per_s)
        what = (
            f"its step is shorter only because it trains on {_percent(1 - tokens)} fewer tokens"
            if rate < 1 + MIN_FASTER
            else f"its step is {_percent(1 - 1 / faster)} shorter and trains on "
            f"{_percent(1 - tokens)} fewer tokens"
        )
        told.append(
            f"Mind {name}: {what}; in trained tokens per second it is {_number(rate, 2)}x "
            f"{reference}."
        )
    return told


def _faster_than_the_oracle(results: Results) -> list[str]:
    """A list of one sentence on why systems are faster than the oracle; empty if none is. The
    oracle bounds only systems that await every response of a round and train on all responses."""
    oracle = results.get(ORACLE)
    if oracle is None or len(results) == 1:
        return []
    told = []
    for name, result in results.items():
        if result.mean["total_s"] > (1 - MIN_FASTER) * oracle.mean["total_s"] or name == ORACLE:
            continue
        rate = _over(result.trained_tokens_per_s, oracle.trained_tokens_per_s)
        why = (
            "leaves long responses out"
            if _shift(result) < -_NOTABLE_SHIFT
            else "awaits nobody: what is not complete goes on in a later round"
        )
        told.append(f"{name} {why} ({_number(rate, 2)}x the oracle's tokens per second)")
    if not told:
        return []
    return [
        "The oracle bounds only what reordering gives to rounds that await every response and "
        f"train on all of them, so that it is no bound here: {'; '.join(told)}."
    ]


def _shift(result: SystemResult) -> float:
    """Mean trained length over the policy's own (for the same prompts if known), minus 1."""
    return result.paired_shift if math.isfinite(result.paired_shift) else result.length_shift


def _where_it_goes(name: str, results: Results) -> str:
    mean, digits = results[name].mean, _digits(results)
    total = mean["total_s"]
    stage = max(STAGES, key=lambda stage: mean[STAGES[stage]])
    seconds = mean[STAGES[stage]]
    what = "the wait for rewards" if stage == "reward" else stage
    told = (
        f"The largest part of {name}'s step is {what}: {_number(seconds, digits)} of "
        f"{_number(total, digits)} s ({_percent(_over(seconds, total))})."
    )
    others = dict.fromkeys([next(iter(results)), ORACLE])
    compared = [
        f"{_compared(total, results[other].mean['total_s'])} {other}'s"
        for other in others
        if other in results and other != name
    ]
    return f"{told} The step is {' and '.join(compared)}." if compared else told


def _what_is_trained(name: str, result: SystemResult) -> str:
    shift = _shift(result)
    if not math.isfinite(shift):
        return ""
    tail = f"{_percent(result.tail_trained_share, 1)} of them are longer than the policy's P95"
    if abs(shift) < _NOTABLE_SHIFT:
        own = f"{name} trains on responses as long as the policy's own; {tail}."
        return own + _not_yet_trained(name, result)
    direction = "shorter" if shift < 0 else "longer"
    return (
        f"{name} trains on responses {_percent(abs(shift))} {direction} than the policy's own; "
        f"{tail} (5% without selection)."
    )


def _misses_the_longest(result: SystemResult) -> bool:
    """Whether trained responses are as long as all responses to their prompts, but shorter than the
    policy's mean: prompts with the longest responses have not been trained on yet."""
    return abs(_shift(result)) < _NOTABLE_SHIFT and result.length_shift < -_NOTABLE_SHIFT


def _not_yet_trained(name: str, result: SystemResult) -> str:
    if not _misses_the_longest(result):
        return ""
    later = result.steps[len(result.steps) // 2 :]
    later_s = sum(step.total_s for step in later) / len(later)
    digits, mean_s = _digits({name: result}), result.mean["total_s"]
    short = (
        f" The first steps are short for that: the later half take {_number(later_s, digits)} s "
        f"each, not {_number(mean_s, digits)} s."
        if later_s > mean_s
        else ""
    )
    return (
        f" That is paired, against the same prompts; the shift of "
        f"{_percent(result.length_shift, sign=True)} is against all prompts, of which the longest "
        f"are still to come or wait in the pool.{short} Simulate more steps."
    )


def _compared(seconds: float, others: float) -> str:
    """Text that compares `seconds` with `others`, to put before a name: "12% shorter than"."""
    ratio = _over(seconds, others)
    if abs(ratio - 1) < 0.005:
        return "as long as"
    if ratio >= MANY_TIMES:
        return f"{ratio:.{0 if ratio >= 10 else 1}f}x as long as"
    return f"{_percent(abs(ratio - 1))} {'shorter' if ratio < 1 else 'longer'} than"


# -- numbers -----------------------------------------------------------------------


def _digits(results: Results) -> int:
    """Number of decimals of seconds in all tables, chosen by the shortest mean step."""
    shortest = min(result.mean["total_s"] for result in results.values())
    return 1 if shortest >= 10 else 2 if shortest >= 1 else 3


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def _percent(share: float, digits: int = 0, *, sign: bool = False) -> str:
    if not math.isfinite(share):
        return "-"
    return f"{100 * share:{'+' if sign else ''}.{digits}f}%"


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
