"""Makes the table and the sentences in which `rollpacker plan` tells its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from rollpacker.sim.plan_result import Finding, Plan
    from rollpacker.sim.plan_run import AsMeasured
    from rollpacker.sim.result import SystemResult

MIN_FEWER, MIN_FASTER = 0.08, 0.02
"""The result mentions trained tokens if the best settings train on fewer than the current settings
by more than the first share. It says that tokens per second are the same if they are higher than
with the current settings by less than the second share."""
COLUMNS = ("step s", "saved s", "tokens/s", "short/cascade/long s", "shift", "oracle")
SHARED_COLUMNS = ("price/1k", "busy s", "saved s", "step s", "shift", "oracle")
NO_TAIL_SHARE = 0.3
"""Share of responses at the length limit above which a sentence says that the limit, rather than a
few very long responses, ends most rounds."""


def left(seconds: float) -> str:
    """The time left as rough words, such as "about a minute". Empty for 0 seconds: not known."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return "about a minute" if seconds > 0 else ""
    return f"about {minutes} minutes" if minutes < 100 else f"about {seconds / 3600:.0f} hours"


def trust(plan: Plan, real: AsMeasured) -> list[str]:
    """Makes a line that says how far the simulated seconds of the run's step are from the measured
    ones (`real`). Gains in `plan` that are no larger are not to be trusted."""
    off = real.offset
    direction = "longer" if off > 0 else "shorter"
    told = (
        f"Simulated as it was, the run's step is {abs(off):.1%} {direction} than measured "
        f"({_seconds(real.measured.mean['total_s'], plan)} s): trust no smaller difference than "
        "that"
    )
    gain = abs(plan.best.saved_s) / plan.current.cost_s
    small = not plan.stays and gain <= abs(off)
    return [told + (f", and the {gain:.1%} above are smaller." if small else ".")]


def ranking(plan: Plan, real: AsMeasured | None = None) -> Table:
    from rollpacker.report.table import table

    columns = COLUMNS if plan.base.prices is None else SHARED_COLUMNS
    made = table("setting", *columns, expand=False, dense=True)
    if real is not None:
        made.add_row("measured", *_measured_cells(real.measured, plan))
    rows = [("current", plan.current)]
    rows += [(_label(finding), finding) for finding in plan.ranked[:5]]
    rows += [(f"{_label(finding)} (too short)", finding) for finding in plan.too_short[:2]]
    if plan.oracle is not None:
        rows.append(("oracle", plan.oracle))
    for name, finding in rows:
        made.add_row(name, *_cells(finding, plan), style="bold" if finding is plan.best else None)
    return made


def _measured_cells(measured: SystemResult, plan: Plan) -> list[str]:
    from rollpacker.sim.plan_result import total_s

    cost_s = total_s if plan.base.prices is None else plan.base.prices.busy_s
    costs_s = [cost_s(step) for step in measured.steps]
    rounds = ""
    kinds_s = {
        kind: [s for s, step in zip(costs_s, measured.steps, strict=True) if step.kind == kind]
        for kind in ("short", "cascade", "long")
    }
    if any(kinds_s.values()):
        rounds = "/".join(_seconds(sum(s) / len(s), plan) if s else "-" for s in kinds_s.values())
    mean_s = sum(costs_s) / len(costs_s)
    tokens = sum(step.tokens_trained for step in measured.steps) / sum(costs_s)
    costs = _costs(plan, mean_s, "", measured.mean["total_s"], tokens, rounds)
    return [*costs, f"{measured.length_shift:+.1%}", ""]


def _costs(
    plan: Plan, cost_s: float, saved: str, step_s: float, tokens: float, rounds: str
) -> list[str]:
    """A row's cells as texts: cost in seconds, saved seconds, tokens per second, and rounds. With
    shared pools of devices: price, cost, saved seconds, and seconds of a step."""
    told = [_seconds(cost_s, plan), saved]
    if plan.base.prices is None:
        return [*told, f"{tokens:,.0f}", rounds]
    price = f"{plan.base.prices.price_of_1k_prompts(cost_s):,.2f}"
    return [price, *told, _seconds(step_s, plan)]


def _label(finding: Finding) -> str:
    """Name of a row of the plan's table: the `tail_batching` factors by which its settings launch
    more prompts and responses than needed, or "current factors" for those of the run."""
    names = [idea.name for idea in finding.candidate.ideas if idea.slot == "factors"]
    return names[0].removeprefix("factors ") if names else "current factors"


def _cells(finding: Finding, plan: Plan) -> list[str]:
    saved = ""
    if finding is not plan.current:
        saved = f"{_seconds(finding.saved_s, plan)} ± {_seconds(finding.saved_error_s, plan)}"
    rounds = ""
    if finding.kinds_s.keys() & {"short", "cascade", "long"}:
        kinds = (finding.kinds_s.get(kind) for kind in ("short", "cascade", "long"))
        rounds = "/".join("-" if s is None else _seconds(s, plan) for s in kinds)
    oracle = plan.oracle
    gap = "" if oracle is None else f"{finding.cost_s / oracle.cost_s - 1:+.0%}"
    tokens = finding.tokens_per_s
    costs = _costs(plan, finding.cost_s, saved, finding.step_s, tokens, rounds)
    return [*costs, f"{finding.shift:+.1%}", gap]


def _seconds(value: float, plan: Plan) -> str:
    """Seconds as a text: one decimal if a step takes ten seconds or more, else three."""
    return f"{value:.{1 if plan.current.cost_s >= 10 else 3}f}"


def explain(plan: Plan, *, corrected: bool) -> list[str]:
    """Lines that say what to do, and why. `corrected`: whether `tail_batching.debias` is on."""
    return [
        "",
        *_verdict(plan),
        *_reasons(plan),
        *_rejected(plan),
        "",
        *_small_print(plan, corrected),
    ]


def _verdict(plan: Plan) -> list[str]:
    return [*_what_to_do(plan), *_pays(plan)]


def _pays(plan: Plan) -> list[str]:
    """Says in a sentence that tail batching does not pay with these settings. Empty if it does."""
    if plan.pays:
        return []
    gain, without = "", plan.untailed
    if plan.has_tail_batching and without is not None:
        best_s, without_s = _seconds(plan.best.cost_s, plan), _seconds(without.cost_s, plan)
        what, of = ("a step", "of") if plan.base.prices is None else ("pools that are busy", "for")
        gain = f" ({what} {of} {best_s} s with it, {of} {without_s} s without)"
    why, capped = "", plan.base.capped_share
    if capped is not None and capped > NO_TAIL_SHARE:
        why = f", as {capped:.0%} of the responses run to the cap and there is no tail to cut off"
    return ["", f"Tail batching does not pay here{gain}{why}: tail_batching.enabled=false will do."]


def _what_to_do(plan: Plan) -> list[str]:
    best, now = plan.best, plan.current
    if plan.stays:
        if not plan.current_keeps:
            return [
                f"Nothing that was tried keeps the bound of {plan.max_shift:.1%}, the current "
                "settings do not either: raise --max-shift, or correct the shift with "
                "tail_batching.debias=moments."
            ]
        if plan.refused is not None:
            return [_why_refused(plan, plan.refused)]
        return [
            "Stay with the current settings: nothing within the bound is faster by more than "
            "the noise."
        ]
    error = f" ± {best.saved_error_s / now.cost_s:.1%}" if best.saved_error_s >= 0 else ""
    lines = [f"Best: {best.candidate.name}"]
    what, more = "The step takes", "longer"
    if plan.base.prices is not None:
        what, more = "The pools that the job holds cost", "more"
    if best.saved_s < 0:
        lines.append(
            f"{what} {-best.saved_s / now.cost_s:.1%}{error} {more}, which is the price of "
            f"the bound: the current settings shorten by {-now.shift:.1%}."
        )
    else:
        lines.append(
            f"{what} {best.saved_s / now.cost_s:.1%}{error} less: "
            f"{_seconds(best.cost_s, plan)} s instead of {_seconds(now.cost_s, plan)} s."
        )
        fewer = 1 - best.tokens / now.tokens if now.tokens else 0.0
        if fewer > MIN_FEWER:
            rate = best.tokens_per_s / now.tokens_per_s
            why = "is shorter only because it trains" if rate < 1 + MIN_FASTER else "trains"
            lines.append(
                f"It {why} on {fewer:.0%} fewer tokens: in trained tokens per second it is "
                f"{rate:.2f}x the current settings."
            )
    if plan.given_up is not None:
        lines.append(plan.given_up)
    lines += ["", "Changes:"]
    lines += [f"  {key}={_shown(value)}" for key, value in sorted(best.candidate.changes.items())]
    return lines


def _why_refused(plan: Plan, refused: Finding) -> str:
    assert plan.base.trust is not None
    now = plan.current
    gain = refused.tokens_per_s / now.tokens_per_s - 1
    what = "the step takes" if plan.base.prices is None else "the pools cost"
    return (
        f"Stay with the current settings: with {refused.candidate.name} {what} "
        f"{refused.saved_s / now.cost_s:.1%} less, but trained tokens per second change by "
        f"{gain:+.1%}, which is not more than the {plan.base.trust:.1%} by which "
        "the simulation is off."
    )


def _shown(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _reasons(plan: Plan) -> list[str]:
    if not plan.reasons:
        return []
    lines = ["", "Why (what is lost if only this one is left out):"]
    for reason in plan.reasons:
        lost, error = (_seconds(s, plan) for s in (reason.left_out_s, reason.left_out_error_s))
        lines.append(f"  saves {lost:>6} ± {error} s  {reason.idea.name}")
    return lines


def _rejected(plan: Plan) -> list[str]:
    if not plan.rejected:
        return []
    lines = ["", "Tried and not needed, with what each saves alone:"]
    return lines + [f"  {saved:+7.1%}    {idea.name}" for idea, saved in plan.rejected]


def _small_print(plan: Plan, corrected: bool) -> list[str]:
    if corrected:
        bound = (
            "tail_batching.debias is on: its weights undo the shift, so the bound, which is on the "
            "shift after the correction, holds for every factor. The table has the shift before."
        )
    else:
        bound = (
            f"Bound: trained responses on average at most {plan.max_shift or 0:.1%} shorter "
            f"{'or longer ' if plan.base.order_only else ''}than the policy's own"
            + (
                f", at {plan.base.mismatch:.1e} mismatches per carried token and update."
                if plan.base.order_only
                else "."
            )
        )
    measured = plan.base.measured_shift
    if measured is not None and not corrected:
        bound += (
            f" The current settings are held to it by the shift that the run measured "
            f"({measured:+.1%}), not by the simulated one ({plan.current.shift:+.1%})."
        )
    return [
        bound,
        *_prices(plan),
        f"Simulated: {plan.num_simulated} steps; these results: {plan.num_seeds} seeds of "
        f"{plan.num_steps} steps or more, kinds of round weighted as in the long run; ± is the "
        "standard error over the seeds.",
    ]


def _prices(plan: Plan) -> list[str]:
    """A sentence on the prices of shared device pools, and what they include. Empty without."""
    prices = plan.base.prices
    if prices is None:
        return []
    return [
        f"Shared pools: rollout nodes cost {prices.rollout_per_h:,.2f} an hour and training nodes "
        f"{prices.train_per_h:,.2f}, each while the job holds them; for busy s all of them "
        "cost as much. price/1k is that of a thousand prompts trained on. Waits for verdicts and "
        "commits cost nothing, and make the step longer; no gradient begins before its turn."
    ]
