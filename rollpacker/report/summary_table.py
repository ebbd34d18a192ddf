"""What came of a run, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.report.summary import LAST_STEPS
from rollpacker.report.time_book import CAUSES
from rollpacker.report.writing import clock, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_WIDTH = 100
"""Of the table, in a terminal that is wider."""
MANY_LOST = 0.02
"""Share of the responses without a verdict from which it is said once more, below the tables."""
_NUM_REASONS = 5
_NUM_EVENTS = 10
_REASON_WIDTH = 38
_TELLING_S = 0.5
_LOST_BY = {
    "environment": "raised",
    "deadline": "too slow",
    "infrastructure": "process died",
    "prompt": "prompt too long",
}


def render(summary: Mapping[str, Any]) -> RenderableType:
    """The table printed at the end of a run; fits 80 columns."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.text import Text

    steps = summary["steps"]
    head = Text.assemble(
        "\n",
        (printable(str(summary.get("run", "run"))), "bold"),
        f"  {steps['total']} step{'' if steps['total'] == 1 else 's'}",
        f" in {clock(summary['wall_s'])}",
        f", {summary['sessions']} sessions" if summary["sessions"] > 1 else "",
        "" if summary["finished"] or "failed" in summary else "  (not finished)",
    )
    parts: list[RenderableType] = [head]
    if "failed" in summary:
        parts.append(Text(f"failed: {printable(summary['failed'])}", "bold red"))
    if (learning := _result_table(summary)).row_count:
        parts.append(learning)
    parts += [_rounds_table(summary), _seconds_table(summary), _counts_table(summary)]
    if "episodes" in summary:
        parts += _episode_tables(summary["episodes"])
    if "engines" in summary:
        parts.append(_engines_table(summary["engines"]))
    if "trainer" in summary:
        parts.append(Text(_trainer_line(summary["trainer"]), "yellow"))
    if "pipeline" in summary:
        parts += _pipeline_tables(summary["pipeline"])
    if "salvaged" in summary:
        count = summary["salvaged"]
        told = (
            f"{count['samples']:,} responses ({count['tokens']:,} tokens) were taken up by resumes"
        )
        parts.append(Text(f"{told} of what a kill had interrupted", "dim"))
    if "switches" in summary:
        parts.append(_switches_table(summary["switches"]))
    if any(_is_telling(kind) for kind in summary["checks"].values()):
        parts.append(_checks_table(summary["checks"]))
    if summary.get("unsandboxed"):
        parts.append(Text("model-written code ran WITHOUT isolation in this run", "bold red"))
    if summary.get("weighted_carrying"):
        parts.append(Text("weighted carrying: not exact (tokens of older weights)", "bold red"))
    if lost := _lost(summary["samples"]):
        parts.append(Text(lost, "yellow"))
    if summary.get("paths"):
        parts.append(_paths_table(summary["paths"]))
    return Constrain(Group(*parts), MAX_WIDTH)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True
    )
    for number, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=number > 0,
            ratio=None if number else 1,
        )
    return table


def _result_table(summary: Mapping[str, Any]) -> Table:
    table = _table("learning", "before", "after", "change")
    evaluations = summary["evaluations"]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        rows = [("held-out pass@1", "eval/pass@1"), ("held-out reward", "eval/reward")]
        for name, key in rows:
            change = _change(first.get(key), last.get(key))[2] if len(evaluations) > 1 else ""
            after = _with_error(last, key) if len(evaluations) > 1 else ""
            table.add_row(name, _with_error(first, key), after, change)
        if any(one.get("eval/no_verdict") for one in (first, last)):
            after = _without_verdict(last) if len(evaluations) > 1 else ""
            table.add_row("held out, without a verdict", _without_verdict(first), after, "")
    reward = summary["training_reward"]
    if reward["first"] is not None:
        name = f"training reward (first, last {LAST_STEPS} {reward['kind'] or ''} rounds)"
        table.add_row(name, *_change(reward["first"], reward["last"]))
    return table


def _without_verdict(metrics: Mapping[str, float]) -> str:
    """Of an evaluation. Earlier versions did not write how many responses there were."""
    told = f"{metrics.get('eval/no_verdict', 0):.0f}"
    return f"{told} of {metrics['eval/samples']:.0f}" if "eval/samples" in metrics else told


def _lost(samples: Mapping[str, Any]) -> str | None:
    """One sentence, where so many responses got no verdict that a reward may never judge some."""
    lost = sum(samples["no_verdict"].values())
    finished = samples["launched"] - samples["aborted"] - samples["failed"]
    if lost <= MANY_LOST * finished:
        return None
    reason = max(samples["no_verdict"], key=samples["no_verdict"].__getitem__)
    return (
        f"{lost:,} of {finished:,} responses were left without a verdict, most: {printable(reason)}"
    )


def _rounds_table(summary: Mapping[str, Any]) -> Table:
    table = _table("rounds", "steps", "step s", "rollout s", "median tokens", "longest")
    for kind, of_kind in summary["steps"]["by_kind"].items():
        table.add_row(
            kind,
            str(of_kind["steps"]),
            _number(of_kind["mean_step_s"]),
            _number(of_kind["mean_rollout_s"]),
            _number(of_kind["median_tokens"], 0),
            _number(of_kind["longest_tokens"], 0),
        )
    if len(summary["steps"]["by_kind"]) > 1:
        steps = summary["steps"]
        means = _number(steps["mean_step_s"]), _number(steps["mean_rollout_s"])
        table.add_row("all", str(steps["total"]), *means, "", "", style="bold")
    return table


def _seconds_table(summary: Mapping[str, Any]) -> Table:
    table = _table("where the seconds went", "s", "%")
    wall = summary["wall_s"] or 1.0
    for cause, seconds in summary["seconds"].items():
        name = f"{cause.replace('_', ' '):<12} [dim]{CAUSES[cause]}[/]"
        table.add_row(name, f"{seconds:.2f}", f"{100 * seconds / wall:.1f}")
    total = sum(summary["seconds"].values())
    name = f"sum (wall time {summary['wall_s']:.2f} s)"
    table.add_row(name, f"{total:.2f}", f"{100 * total / wall:.1f}", style="bold")
    return table


def _counts_table(summary: Mapping[str, Any]) -> Table:
    from rich.text import Text

    table = _table("tokens, lengths, prompts", "")
    tokens, lengths, prompts = summary["tokens"], summary["lengths"], summary["prompts"]
    table.add_row("tokens generated", f"{tokens['generated']:,}")
    table.add_row("tokens trained on", f"{tokens['trained']:,}")
    table.add_row("generated per trained", _number(tokens["generated_per_trained"], 2))
    table.add_row("mean trained length, 50 steps", _number(lengths["trained_mean"], 1))
    table.add_row("the policy's own, estimated", _number(lengths["policy_mean"], 1))
    if lengths["shift"] is not None:
        table.add_row("length shift of training", f"{100 * lengths['shift']:+.0f} %")
        share = f"{100 * lengths['tail_trained_share']:.0f} %"
        table.add_row("trained on, of its longest 5 %", share)
    if lengths["weighted_mean"] is not None:
        table.add_row("mean trained length, weighted", _number(lengths["weighted_mean"], 1))
        size = f"{100 * lengths['effective_sample_size']:.0f} %"
        table.add_row("effective sample size of the weights", size)
    if summary["carrying"]:
        _add_carrying(table, summary["carrying"])
    streaming = summary["streaming"]
    if streaming["samples"] or streaming["steps_without"]:
        begun = f"{streaming['samples']:,} in {streaming['steps']:,} steps"
        table.add_row("samples whose gradient was asked for early", begun)
        if streaming["steps_without"]:
            table.add_row("steps without", _reasons(streaming["steps_without"]))
    table.add_row("prompts trained on", f"{prompts['trained']:,}")
    table.add_row("prompts deferred", f"{prompts['deferred']:,}")
    if prompts["long_queue"]:
        table.add_row("prompts that still wait", f"{prompts['long_queue']:,}")
    table.add_row("prompts dropped", _reasons(prompts["dropped"]))
    for said in prompts.get("dropped_after", {}).values():
        table.add_row("the first of them after", Text(_short(printable(said))))
    table.add_row("samples without a verdict", _reasons(summary["samples"]["no_verdict"]))
    if summary["samples"]["failed"]:
        table.add_row(
            "samples that engine or environment failed on", f"{summary['samples']['failed']:,}"
        )
    return table


def _add_carrying(table: Table, carrying: Mapping[str, Any]) -> None:
    table.add_row("tokens carried into a later launch", f"{carrying['tokens']:,}")
    if carrying["kept_ratio"] is not None:
        table.add_row("kept, of those looked at", f"{100 * carrying['kept_ratio']:.1f} %")
        by_age = carrying["mismatch_per_token_by_age"]
        lines = [f"{rate:.1e} (age {age})" for age, rate in list(by_age.items())[:_NUM_REASONS]]
        table.add_row("came out differently, per token", "\n".join(lines))
    if carrying["redraws"]:
        table.add_row("early ends drawn once more", f"{carrying['redraws']:,}")
    table.add_row("oldest carried tokens, in updates", f"{carrying['largest_age']:,}")
    if carrying.get("importance_ess") is not None:
        size = f"{100 * carrying['importance_ess']:.1f} %"
        table.add_row("effective sample size of importance ratios", size)
        outside = f"{100 * carrying['importance_outside']:.2f} %"
        table.add_row("tokens whose importance ratio was clipped", outside)


def _episode_tables(episodes: Mapping[str, Any]) -> list[RenderableType]:
    """Trajectories: their turns, who took the time, how they ended, and what was lost."""
    from rich.markup import escape
    from rich.text import Text

    table = _table("trajectories", "")
    table.add_row("whole ones", f"{episodes['trajectories']:,}")
    turns = f"{_number(episodes['mean_turns'], 1)} (most {episodes['most_turns']:,})"
    table.add_row("turns of one", turns)
    table.add_row("policy seconds of one", _number(episodes["mean_policy_s"]))
    table.add_row("environment seconds of one", _number(episodes["mean_environment_s"]))
    table.add_row("ended by", _reasons(episodes["ended"]))
    for one in episodes["lost"]:
        what = _LOST_BY.get(one["cause"], one["cause"])
        first = escape(_short(printable(one["first"])))
        table.add_row(f"lost answers, {escape(what)}", f"{one['count']:,} (first: {first})")
    sources = _table("environments", "answers", "mean s", "longest", "waited s", "lost")
    for name, one in episodes["sources"].items():
        sources.add_row(
            Text(printable(name)),
            f"{one['answers']:,}",
            _number(one["mean_s"]),
            _number(one["longest_s"]),
            _number(one["mean_waited_s"]),
            f"{sum(one['lost'].values()):,}",
        )
    tools = _table("tools", "calls", "failed", "hung", "mean s", "p99 s", "longest")
    for name, one in episodes["tools"].items():
        tools.add_row(
            Text(printable(name) or "(there is no such tool)"),
            f"{one['calls']:,}",
            f"{one['failed']:,}",
            f"{one['hung']:,}",
            _number(one["mean_s"]),
            _number(one["p99_s"]),
            _number(one["longest_s"]),
        )
    slowest = [one for one in episodes["slowest"] if one["seconds"] >= _TELLING_S][:3]
    lines = [
        f"slowest {one['seconds']:9.3f} s  {printable(one['sample'])}, turn {one['turn']}"
        + (f", {printable(one['tool'])}" if one["tool"] else "")
        + ("" if one["came"] else " (did not come)")
        for one in slowest
    ]
    told = Text("\n".join(lines) + "\n", "dim")
    return [table, sources, *([tools] if tools.row_count else []), *([told] if lines else [])]


def _engines_table(engines: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("engines", "samples", "tokens", "busy", "lost", "away s")
    for one in engines:
        busy = one["busy_share"]
        table.add_row(
            f"engine {one['engine']}",
            f"{one['samples']:,}",
            f"{one['tokens']:,}",
            "-" if busy is None else f"{100 * busy:.0f} %",
            f"{one['losses']:,}",
            _number(one["mean_away_s"], 1),
        )
    return table


def _trainer_line(trainer: Mapping[str, Any]) -> str:
    count = trainer["losses"]
    times = "once" if count == 1 else f"{count} times"
    return f"the trainer was lost {times}, and back after {trainer['mean_away_s']:.1f} s on average"


def _switches_table(switches: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("devices of an engine", "before step", "seconds")
    for one in switches:
        degree = one["tensor_parallel"]
        table.add_row(f"{degree} each", f"{one['before_step']:,}", _number(one["seconds"], 1))
    return table


def _pipeline_tables(pipeline: Mapping[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    stages = _table("pipeline stages", "layers", "busy", "busy s", "waiting s", "live tokens")
    for one in pipeline["stages"]:
        busy = one["busy_ratio"]
        stages.add_row(
            f"stage {one['stage']}{_since(one)}",
            f"{one['layers']:,}",
            "-" if busy is None else f"{100 * busy:.0f} %",
            _number(one["busy_s"], 2),
            _number(one["waiting_s"], 2),
            f"{one['live_tokens']:,}",
        )
    links = _table(f"links ({pipeline['links_used']})", "ms a message")
    for one in pipeline["links"]:
        links.add_row(f"{_link(one['link'])}{_since(one)}", _ms(one["message_s"]))
    lines = [_pipeline_line(event) for event in pipeline["events"][-_NUM_EVENTS:]]
    return [stages, links, *([Text("\n".join(lines), "dim")] if lines else [])]


def _pipeline_line(event: Mapping[str, Any]) -> str:
    if event["event"] == "links":
        slow = ", ".join(map(_link, event["slow_links"]))
        why = f"since {slow} was slow" if slow else "since all links had been well for a while"
        return f"before step {event['step']}: {event['links']} links, {why}"
    if event["event"] == "layout":
        layers = ", ".join(map(str, event["layers"]))
        took = f"which took {_number(event['seconds'], 1)} s"
        return f"before step {event['step']}: another layout, {layers} layers, {took}"
    state = "slow" if event["event"] == "slow" else "well again"
    if "stage" in event:
        return f"step {event['step']}: stage {event['stage']} was {state}"
    took = f"{_ms(event['message_s'])} ms a message, usually {_ms(event['usual_s'])}"
    return f"step {event['step']}: {_link(event['link'])} was {state} ({took})"


def _link(number: int) -> str:
    return f"link {number}-{number + 1}"


def _since(one: Mapping[str, Any]) -> str:
    return "" if one["slow_since"] is None else f" [yellow]slow since step {one['slow_since']}[/]"


def _ms(seconds: float | None) -> str:
    return _number(None if seconds is None else 1e3 * seconds, 1)


def _is_telling(kind: Mapping[str, Any]) -> bool:
    """Checks that took long enough to matter, or went wrong."""
    counts = (kind["timed_out"], kind["retries"], kind["failed"], kind["deadline_s"])
    return kind["longest_s"] >= _TELLING_S or any(counts)


def _checks_table(kinds: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    table = _table("checks", "count", "mean s", "longest", "queued s", "limit", "out", "failed")
    for name, kind in kinds.items():
        table.add_row(
            Text(printable(name)),
            f"{kind['checks']:,}",
            _number(kind["mean_s"]),
            _number(kind["longest_s"]),
            _number(kind["mean_queue_s"]),
            _number(kind["deadline_s"], 2),
            f"{kind['timed_out']:,}",
            f"{sum(kind['failed'].values()):,}",
        )
    slowest = sorted(
        (one for kind in kinds.values() for one in kind["slowest"]),
        key=lambda one: -one["seconds"],
    )
    lines = [f"slowest {one['seconds']:9.3f} s  {printable(one['sample'])}" for one in slowest[:3]]
    return Group(table, Text("\n".join(lines) + "\n", style="dim", overflow="fold"))


def _paths_table(paths: Mapping[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, path in paths.items():
        table.add_row(name, Text(printable(path)))
    return table


def _change(before: float | None, after: float | None) -> tuple[str, str, str]:
    if before is None or after is None:
        return _number(before), _number(after), ""
    return _number(before), _number(after), f"{after - before:+.3f}"


def _with_error(metrics: Mapping[str, float], key: str) -> str:
    """A metric of an evaluation, and its standard error where that is known."""
    error = metrics.get(key.replace("eval/", "eval/stderr/"))
    return _number(metrics.get(key)) + ("" if error is None else f" ± {error:.3f}")


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _reasons(counts: Mapping[str, int]) -> str:
    """As markup, in which a reason is text."""
    from rich.markup import escape

    if not counts:
        return "0"
    most = sorted(counts.items(), key=lambda item: -item[1])
    lines = [
        f"{num:,} ({escape(_short(printable(reason)))})" for reason, num in most[:_NUM_REASONS]
    ]
    if len(most) > _NUM_REASONS:
        lines.append(f"{sum(num for _, num in most[_NUM_REASONS:]):,} (other reasons)")
    return "\n".join(lines)


def _short(reason: str) -> str:
    """What fits beside its label in 80 columns; summary.json has it whole."""
    return reason if len(reason) <= _REASON_WIDTH else reason[: _REASON_WIDTH - 3] + "..."
