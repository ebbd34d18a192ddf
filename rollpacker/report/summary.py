"""What came of a run: one pass over its event log, as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.core.records import Entry
from rollpacker.report.accounting import Accounting
from rollpacker.report.carrying import add_up as add_up_carried
from rollpacker.report.checks import add_up
from rollpacker.report.log import EventLog, events_path
from rollpacker.report.step_history import StepHistory
from rollpacker.report.step_summary import StepSummary
from rollpacker.report.time_book import CAUSES
from rollpacker.report.writing import printable, replacing

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_WIDTH = 120
"""Of the table, in a terminal that is wider."""
SUMMARY_FILE = "summary.json"
_LAST_STEPS = 5
_NUM_REASONS = 5
_REASON_WIDTH = 38
_TELLING_S = 0.5
_OFF_POLICY = {
    "importance_ess": "sampling/ess",
    "importance_outside": "sampling/mismatch_outside",
    "log_prob_difference": "sampling/sampling_logp_difference/mean",
}
"""With weighted carrying: how far the tokens trained on are from the policy's own."""


def summarize(run: str | Path) -> dict[str, Any]:
    """The summary of a run folder (or of an event log).

    Raises `ValueError` if there is no log, `LogError` if it is none.
    """
    events = events_path(run)
    summary = summarize_entries(EventLog(events))
    return with_paths(summary, events.parent)


def with_paths(summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A summary with the run's name and what its folder holds."""
    return {"run": folder.resolve().name, **summary, "paths": _paths(folder)}


def summarize_entries(entries: Iterable[Entry]) -> dict[str, Any]:
    """The same from entries alone, without `run` and `paths`."""
    summary = RunSummary()
    for entry in entries:
        summary.feed(entry)
    return summary.plain()


class RunSummary:
    """Feed it a log's entries; `plain` is what came of them so far."""

    def __init__(self) -> None:
        self.accounting = Accounting()
        self._steps: list[StepSummary] = []

    def feed(self, entry: Entry) -> tuple[StepHistory, StepSummary] | None:
        """The step that was committed with it, for those who want more of it in the same pass."""
        step = self.accounting.history.step
        summary = self.accounting.feed(entry)
        if summary is None:
            return None
        self._steps.append(summary)
        return step, summary

    def plain(self) -> dict[str, Any]:
        """What `summary.json` holds but for `run` and `paths`."""
        accounting, steps = self.accounting, self._steps
        history = accounting.history
        not_streamed = [step.samples.not_streamed for step in steps]
        dropped = _add_up([*(step.prompts.dropped for step in steps), history.step.prompts.dropped])
        return {
            "finished": history.finished,
            "sessions": history.num_sessions,
            "steps": _steps(steps),
            "wall_s": accounting.time.wall_s,
            "seconds": {
                cause: seconds
                for cause, seconds in accounting.seconds().items()
                if seconds or cause != "callbacks"  # most runs have none
            },
            "evaluations": [
                {"step": step, **metrics} for step, metrics in sorted(history.evaluations.items())
            ],
            "training_reward": _training_reward(steps),
            "tokens": _tokens(steps),
            "lengths": _lengths(steps),
            "prompts": {
                "trained": sum(step.prompts.trained for step in steps),
                "deferred": sum(step.prompts.deferred for step in steps),
                "long_queue": len(history.queue),
                "dropped": dropped,
            },
            "samples": {
                "launched": sum(step.samples.launched for step in steps),
                "trained": sum(step.samples.trained for step in steps),
                "aborted": sum(step.samples.aborted for step in steps),
                "failed": sum(step.samples.failed for step in steps),
                "no_verdict": _add_up(step.samples.no_verdict for step in steps),
            },
            "carrying": _carrying(steps),
            "streaming": {
                "samples": sum(step.samples.streamed for step in steps),
                "steps": sum(step.samples.streamed > 0 for step in steps),
                "steps_without": _add_up({reason: 1} for reason in not_streamed if reason),
            },
            "checks": {
                name: kind.plain() for name, kind in add_up(step.checks for step in steps).items()
            },
            **dict.fromkeys(sorted(history.marks), True),
        }


def write_summary(summary: Mapping[str, Any], path: str | Path) -> None:
    """Write it as JSON, in one atomic replacement."""
    with replacing(Path(path)) as temporary:
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        # A half surrogate has no bytes; as an escape JSON knows it.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def _steps(steps: list[StepSummary]) -> dict[str, Any]:
    kinds: dict[str, list[StepSummary]] = {}
    for step in steps:
        kinds.setdefault("none" if step.kind is None else str(step.kind), []).append(step)
    return {
        "total": len(steps),
        "mean_step_s": _mean([step.step_s for step in steps]),
        "mean_rollout_s": _mean([step.rollout_s for step in steps]),
        "by_kind": {
            kind: {
                "steps": len(of_kind),
                "mean_step_s": _mean([step.step_s for step in of_kind]),
                "mean_rollout_s": _mean([step.rollout_s for step in of_kind]),
                "median_tokens": _mean(
                    [s.lengths.trained.median for s in of_kind if s.lengths.trained]
                ),
                "longest_tokens": max(
                    (s.lengths.trained.max for s in of_kind if s.lengths.trained), default=None
                ),
            }
            for kind, of_kind in kinds.items()
        },
    }


def _carrying(steps: list[StepSummary]) -> dict[str, Any] | None:
    """What became of carried tokens; None if nothing was carried."""
    counts = add_up_carried(step.carry for step in steps)
    if not counts.tokens:
        return None
    weighted = [s.trainer for s in steps if "weighted_carrying" in s.marks and s.trainer]
    return {
        **counts.plain(),
        **{
            name: _mean([trainer[metric] for trainer in weighted if metric in trainer])
            for name, metric in _OFF_POLICY.items()
            if weighted
        },
    }


def _training_reward(steps: list[StepSummary]) -> dict[str, float | None]:
    rewards = [step.rewards.mean for step in steps if step.rewards.mean is not None]
    return {"first": _mean(rewards[:_LAST_STEPS]), "last": _mean(rewards[-_LAST_STEPS:])}


def _lengths(steps: list[StepSummary]) -> dict[str, float | None]:
    """Trained lengths against the policy's own, over the last steps (see `LengthBias`)."""
    last = steps[-1].lengths.bias if steps else {}
    names = {
        "trained_mean": "length/trained_mean",
        "policy_mean": "length/policy_mean",
        "shift": "length/shift",
        "tail_trained_share": "length/tail_trained_share",
        "weighted_mean": "length/weighted_mean",
        "effective_sample_size": "debias/effective_sample_size",
    }
    return {name: last.get(metric) for name, metric in names.items()}


def _tokens(steps: list[StepSummary]) -> dict[str, float | None]:
    generated = sum(step.tokens.generated for step in steps)
    trained = sum(step.tokens.trained for step in steps)
    return {
        "generated": generated,
        "trained": trained,
        "generated_per_trained": generated / trained if trained else None,
    }


def _paths(folder: Path) -> dict[str, str]:
    names = {
        "timeline": folder / "timeline.png",
        "trace": folder / "trace.json",
        "metrics": folder / "metrics.jsonl",
        "samples": folder / "samples",
    }
    paths = {name: str(path) for name, path in names.items() if path.exists()}
    models = sorted((folder / "checkpoints").glob("step_*/model"))
    models = [model for model in models if ".tmp" not in model.parent.name]
    return {**paths, "model": str(models[-1])} if models else paths


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


# As a table.


def render(summary: Mapping[str, Any]) -> RenderableType:
    """The table printed at the end of a run; fits 80 columns."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.text import Text

    steps = summary["steps"]
    head = Text.assemble(
        "\n",
        (printable(str(summary.get("run", "run"))), "bold"),
        f"  {steps['total']} steps in {clock(summary['wall_s'])}",
        f", {summary['sessions']} sessions" if summary["sessions"] > 1 else "",
        "" if summary["finished"] else "  (not finished)",
    )
    parts: list[RenderableType] = [head, _result_table(summary), _rounds_table(summary)]
    parts += [_seconds_table(summary), _counts_table(summary)]
    if any(_is_telling(kind) for kind in summary["checks"].values()):
        parts.append(_checks_table(summary["checks"]))
    if summary.get("unsandboxed"):
        parts.append(Text("model-written code ran WITHOUT isolation in this run", "bold red"))
    if summary.get("weighted_carrying"):
        parts.append(Text("weighted carrying: not exact (tokens of older weights)", "bold red"))
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
            if len(evaluations) > 1:
                table.add_row(name, *_change(first.get(key), last.get(key)))
            else:
                table.add_row(name, _number(first.get(key)), "", "")
    reward = summary["training_reward"]
    name = f"training reward (first, last {_LAST_STEPS} steps)"
    table.add_row(name, *_change(reward["first"], reward["last"]))
    return table


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
    table.add_row("samples without a verdict", _reasons(summary["samples"]["no_verdict"]))
    if summary["samples"]["failed"]:
        table.add_row("samples that the engine failed on", f"{summary['samples']['failed']:,}")
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


def clock(seconds: float) -> str:
    """Seconds for people: "12.3 s", "4:05", "1:02:03"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
