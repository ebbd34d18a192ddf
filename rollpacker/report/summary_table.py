"""The summary of a run as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.report.carrying import why_awaited
from rollpacker.report.summary import LAST_STEPS
from rollpacker.report.table import MAX_WIDTH, cell, table, table_of
from rollpacker.report.time_book import CAUSES
from rollpacker.writing import clock, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MANY_LOST = 0.02
"""Share of responses without a verdict above which a sentence below the tables says so."""
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
    """The tables that are printed at the end of a run. They fit 80 columns."""
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
    if awaited := why_awaited(summary["carrying"] or {"rounds_awaited": 0}):
        parts.append(Text(awaited, "yellow"))
    if lost := _lost(summary["samples"]):
        parts.append(Text(lost, "yellow"))
    if summary.get("paths"):
        parts.append(_paths_table(summary["paths"]))
    return Constrain(Group(*parts), MAX_WIDTH)


def _result_table(summary: Mapping[str, Any]) -> Table:
    made = table("learning", "before", "after", "change")
    evaluations = summary["evaluations"]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        rows = [("held-out pass@1", "eval/pass@1"), ("held-out reward", "eval/reward")]
        for name, key in rows:
            change = _change(first.get(key), last.get(key))[2] if len(evaluations) > 1 else ""
            after = _with_error(last, key) if len(evaluations) > 1 else ""
            made.add_row(name, _with_error(first, key), after, change)
        if any(one.get("eval/no_verdict") for one in (first, last)):
            after = _without_verdict(last) if len(evaluations) > 1 else ""
            made.add_row("held out, without a verdict", _without_verdict(first), after, "")
    reward = summary["training_reward"]
    if reward["first"] is not None:
        name = f"training reward (first, last {LAST_STEPS} {reward['kind'] or ''} rounds)"
        made.add_row(name, *_change(reward["first"], reward["last"]))
    return made


def _without_verdict(metrics: Mapping[str, float]) -> str:
    """A text with the number of an evaluation's responses without a verdict, and of all its
    responses if the log has that number (older versions did not write it)."""
    told = f"{metrics.get('eval/no_verdict', 0):.0f}"
    return f"{told} of {metrics['eval/samples']:.0f}" if "eval/samples" in metrics else told


def _lost(samples: Mapping[str, Any]) -> str | None:
    """A sentence on responses without a verdict, if they are more than the share `MANY_LOST`. Else
    None."""
    lost = sum(samples["no_verdict"].values())
    finished = samples["launched"] - samples["aborted"] - samples["failed"]
    if lost <= MANY_LOST * finished:
        return None
    reason = max(samples["no_verdict"], key=samples["no_verdict"].__getitem__)
    return (
        f"{lost:,} of {finished:,} responses were left without a verdict, most: {printable(reason)}"
    )


def _rounds_table(summary: Mapping[str, Any]) -> Table:
    steps = summary["steps"]
    columns: dict[str, tuple[str, int | str]] = {
        "steps": ("steps", 0),
        "step s": ("mean_step_s", 3),
        "rollout s": ("mean_rollout_s", 3),
        "median tokens": ("median_tokens", 0),
        "longest": ("longest_tokens", 0),
    }
    made = table_of("rounds", steps["by_kind"], columns)
    if len(steps["by_kind"]) > 1:
        means = cell(steps["mean_step_s"]), cell(steps["mean_rollout_s"])
        made.add_row("all", str(steps["total"]), *means, "", "", style="bold")
    return made


def _seconds_table(summary: Mapping[str, Any]) -> Table:
    made = table("where the seconds went", "s", "%")
    wall = summary["wall_s"] or 1.0
    for cause, seconds in summary["seconds"].items():
        name = f"{cause.replace('_', ' '):<12} [dim]{CAUSES[cause]}[/]"
        made.add_row(name, f"{seconds:.2f}", f"{100 * seconds / wall:.1f}")
    total = sum(summary["seconds"].values())
    name = f"sum (wall time {summary['wall_s']:.2f} s)"
    made.add_row(name, f"{total:.2f}", f"{100 * total / wall:.1f}", style="bold")
    return made


def _counts_table(summary: Mapping[str, Any]) -> Table:
    from rich.text import Text

    tokens, lengths, prompts = summary["tokens"], summary["lengths"], summary["prompts"]
    rows: list[tuple[str, str]] = [
        ("tokens generated", cell(tokens["generated"], 0)),
        ("tokens trained on", cell(tokens["trained"], 0)),
        ("generated per trained", cell(tokens["generated_per_trained"], 2)),
        ("mean trained length, 50 steps", cell(lengths["trained_mean"], 1)),
        ("the policy's own, estimated", cell(lengths["policy_mean"], 1)),
    ]
    if lengths["shift"] is not None:
        rows.append(("length shift of training", f"{100 * lengths['shift']:+.0f} %"))
        rows.append(("trained on, of its longest 5 %", cell(lengths["tail_trained_share"], "%")))
    if lengths["weighted_mean"] is not None:
        rows.append(("mean trained length, weighted", cell(lengths["weighted_mean"], 1)))
        size = cell(lengths["effective_sample_size"], "%")
        rows.append(("effective sample size of the weights", size))
    if summary["carrying"]:
        rows += _carrying(summary["carrying"])
    streaming = summary["streaming"]
    if streaming["samples"] or streaming["steps_without"]:
        begun = f"{streaming['samples']:,} in {streaming['steps']:,} steps"
        rows.append(("samples whose gradient was asked for early", begun))
        if streaming["steps_without"]:
            rows.append(("steps without", _reasons(streaming["steps_without"])))
    rows.append(("prompts trained on", cell(prompts["trained"], 0)))
    rows.append(("prompts deferred", cell(prompts["deferred"], 0)))
    if prompts["long_queue"]:
        rows.append(("prompts that still wait", cell(prompts["long_queue"], 0)))
    rows.append(("prompts dropped", _reasons(prompts["dropped"])))
    for said in prompts.get("dropped_after", {}).values():
        rows.append(("the first of them after", _short(printable(said))))
    rows.append(("samples without a verdict", _reasons(summary["samples"]["no_verdict"])))
    if failed := summary["samples"]["failed"]:
        rows.append(("samples that engine or environment failed on", cell(failed, 0)))
    made = table("tokens, lengths, prompts", "")
    for name, value in rows:
        made.add_row(name, Text(value))
    return made


def _carrying(carrying: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "tokens carried into a later launch", cell(carrying["tokens"], 0)
    if carrying["kept_ratio"] is not None:
        yield "kept, of those looked at", f"{100 * carrying['kept_ratio']:.1f} %"
        by_age = list(carrying["mismatch_per_token_by_age"].items())[:_NUM_REASONS]
        rates = "\n".join(f"{rate:.1e} (age {age})" for age, rate in by_age)
        yield "came out differently, per token", rates
    if carrying["most_verified"] is not None:
        yield "verified in passes, of a response", cell(carrying["most_verified"], 0)
    if carrying["redraws"]:
        yield "early ends drawn once more", cell(carrying["redraws"], 0)
    yield "oldest carried tokens, in updates", cell(carrying["largest_age"], 0)
    if carrying.get("importance_ess") is not None:
        size = f"{100 * carrying['importance_ess']:.1f} %"
        yield "effective sample size of importance ratios", size
        outside = f"{100 * carrying['importance_outside']:.2f} %"
        yield "tokens whose importance ratio was clipped", outside


def _episode_tables(episodes: Mapping[str, Any]) -> list[RenderableType]:
    """Tables for a terminal: of episodes (turns, seconds, ends, answers that environments failed to
    give), of environments and of tool calls. `episodes` is that part of the summary."""
    from rich.text import Text

    made = table("trajectories", "")
    made.add_row("whole ones", cell(episodes["trajectories"], 0))
    turns = f"{cell(episodes['mean_turns'], 1)} (most {episodes['most_turns']:,})"
    made.add_row("turns of one", turns)
    made.add_row("policy seconds of one", cell(episodes["mean_policy_s"]))
    made.add_row("environment seconds of one", cell(episodes["mean_environment_s"]))
    made.add_row("ended by", Text(_reasons(episodes["ended"])))
    for one in episodes["lost"]:
        what = _LOST_BY.get(one["cause"], one["cause"])
        first = _short(printable(one["first"]))
        made.add_row(Text(f"lost answers, {what}"), Text(f"{one['count']:,} (first: {first})"))
    sources = table_of(
        "environments",
        episodes["sources"],
        {
            "answers": ("answers", 0),
            "mean s": ("mean_s", 3),
            "longest": ("longest_s", 3),
            "waited s": ("mean_waited_s", 3),
            "lost": ("lost", 0),
        },
    )
    tools = table_of(
        "tools",
        {name or "(there is no such tool)": one for name, one in episodes["tools"].items()},
        {
            "calls": ("calls", 0),
            "failed": ("failed", 0),
            "hung": ("hung", 0),
            "mean s": ("mean_s", 3),
            "p99 s": ("p99_s", 3),
            "longest": ("longest_s", 3),
        },
    )
    slowest = [one for one in episodes["slowest"] if one["seconds"] >= _TELLING_S][:3]
    lines = [
        f"slowest {one['seconds']:9.3f} s  {printable(one['sample'])}, turn {one['turn']}"
        + (f", {printable(one['tool'])}" if one["tool"] else "")
        + ("" if one["came"] else " (did not come)")
        for one in slowest
    ]
    told = Text("\n".join(lines) + "\n", "dim")
    return [made, sources, *([tools] if tools.row_count else []), *([told] if lines else [])]


def _engines_table(engines: Sequence[Mapping[str, Any]]) -> Table:
    columns: dict[str, tuple[str, int | str]] = {
        "samples": ("samples", 0),
        "tokens": ("tokens", 0),
        "busy": ("busy_share", "%"),
        "lost": ("losses", 0),
        "away s": ("mean_away_s", 1),
    }
    return table_of("engines", {f"engine {one['engine']}": one for one in engines}, columns)


def _trainer_line(trainer: Mapping[str, Any]) -> str:
    count = trainer["losses"]
    times = "once" if count == 1 else f"{count} times"
    return f"the trainer was lost {times}, and back after {trainer['mean_away_s']:.1f} s on average"


def _switches_table(switches: Sequence[Mapping[str, Any]]) -> Table:
    made = table("devices of an engine", "before step", "seconds")
    for one in switches:
        degree = f"{one['tensor_parallel']} each"
        made.add_row(degree, cell(one["before_step"], 0), cell(one["seconds"], 1))
    return made


def _pipeline_tables(pipeline: Mapping[str, Any]) -> list[RenderableType]:
    from rich.text import Text

    stages = table_of(
        "pipeline stages",
        {f"stage {one['stage']}{_since(one)}": one for one in pipeline["stages"]},
        {
            "layers": ("layers", 0),
            "busy": ("busy_ratio", "%"),
            "busy s": ("busy_s", 2),
            "waiting s": ("waiting_s", 2),
            "live tokens": ("live_tokens", 0),
        },
    )
    links = table_of(
        f"links ({pipeline['links_used']})",
        {f"{_link(one['link'])}{_since(one)}": one for one in pipeline["links"]},
        {"ms a message": ("message_s", "ms")},
    )
    lines = [_pipeline_line(event) for event in pipeline["events"][-_NUM_EVENTS:]]
    return [stages, links, *([Text("\n".join(lines), "dim")] if lines else [])]


def _pipeline_line(event: Mapping[str, Any]) -> str:
    if event["event"] == "links":
        slow = ", ".join(map(_link, event["slow_links"]))
        why = f"since {slow} was slow" if slow else "since all links had been well for a while"
        return f"before step {event['step']}: {event['links']} links, {why}"
    if event["event"] == "layout":
        layers = ", ".join(map(str, event["layers"]))
        took = f"which took {cell(event['seconds'], 1)} s"
        return f"before step {event['step']}: another layout, {layers} layers, {took}"
    state = "slow" if event["event"] == "slow" else "well again"
    if "stage" in event:
        return f"step {event['step']}: stage {event['stage']} was {state}"
    took = f"{cell(event['message_s'], 'ms')} ms a message, usually {cell(event['usual_s'], 'ms')}"
    return f"step {event['step']}: {_link(event['link'])} was {state} ({took})"


def _link(number: int) -> str:
    return f"link {number}-{number + 1}"


def _since(one: Mapping[str, Any]) -> str:
    return "" if one["slow_since"] is None else f" slow since step {one['slow_since']}"


def _is_telling(kind: Mapping[str, Any]) -> bool:
    """Whether `kind`, the counts of checks of one data source, is worth a row of the table: some
    check took long, went wrong, or had a deadline."""
    counts = (kind["timed_out"], kind["retries"], kind["failed"], kind["deadline_s"])
    return kind["longest_s"] >= _TELLING_S or any(counts)


def _checks_table(kinds: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    made = table_of(
        "checks",
        kinds,
        {
            "count": ("checks", 0),
            "mean s": ("mean_s", 3),
            "longest": ("longest_s", 3),
            "queued s": ("mean_queue_s", 3),
            "limit": ("deadline_s", 2),
            "out": ("timed_out", 0),
            "failed": ("failed", 0),
        },
    )
    slowest = sorted(
        (one for kind in kinds.values() for one in kind["slowest"]),
        key=lambda one: -one["seconds"],
    )
    lines = [f"slowest {one['seconds']:9.3f} s  {printable(one['sample'])}" for one in slowest[:3]]
    return Group(made, Text("\n".join(lines) + "\n", style="dim", overflow="fold"))


def _paths_table(paths: Mapping[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, path in paths.items():
        made.add_row(name, Text(printable(path)))
    return made


def _change(before: float | None, after: float | None) -> tuple[str, str, str]:
    if before is None or after is None:
        return cell(before), cell(after), ""
    return cell(before), cell(after), f"{after - before:+.3f}"


def _with_error(metrics: Mapping[str, float], key: str) -> str:
    """A metric of an evaluation as a text, with its standard error if that is known."""
    error = metrics.get(key.replace("eval/", "eval/stderr/"))
    return cell(metrics.get(key)) + ("" if error is None else f" ± {error:.3f}")


def _reasons(counts: Mapping[str, int]) -> str:
    """The most frequent reasons as a text, each on a line with the number of times."""
    if not counts:
        return "0"
    most = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"{num:,} ({_short(printable(reason))})" for reason, num in most[:_NUM_REASONS]]
    if len(most) > _NUM_REASONS:
        lines.append(f"{sum(num for _, num in most[_NUM_REASONS:]):,} (other reasons)")
    return "\n".join(lines)


def _short(reason: str) -> str:
    """A reason cut short, so that it fits beside its label in 80 columns. `summary.json` has all of
    it."""
    return reason if len(reason) <= _REASON_WIDTH else reason[: _REASON_WIDTH - 3] + "..."
