"""The summary of a run as JSON, made in one pass over its event log."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollpacker.core.records import Entry
from rollpacker.pipeline.report import summarize_pipeline
from rollpacker.report.accounting import Accounting
from rollpacker.report.carrying import add_up as add_up_carried
from rollpacker.report.checks import add_up
from rollpacker.report.episodes import add_up as add_up_episodes
from rollpacker.report.log import EventLog, events_path
from rollpacker.report.step_history import StepHistory
from rollpacker.report.step_summary import StepSummary
from rollpacker.report.time_book import RARE_CAUSES, ROLLOUT_CAUSES
from rollpacker.writing import replacing

SUMMARY_FILE = "summary.json"
LAST_STEPS = 5
_OFF_POLICY = {
    "importance_ess": "sampling/ess",
    "importance_outside": "sampling/mismatch_outside",
    "log_prob_difference": "sampling/sampling_logp_difference/mean",
}
"""Mapping from names in the summary to metrics that measure how far carried tokens (kept from older
weights) are from the current policy's own, in runs with `tail_batching.carry=weighted`."""


def summarize(run: str | Path) -> dict[str, Any]:
    """The summary of a run, given its folder or its event log.

    Raises `ValueError` if there is no log, `LogError` if the file is no event log."""
    events = events_path(run)
    summary = summarize_entries(EventLog(events))
    return with_paths(summary, events.parent)


def with_paths(summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The summary with the run's name (`run`) and the paths of files in its folder (`paths`)."""
    return {"run": folder.resolve().name, **summary, "paths": _paths(folder)}


def summarize_entries(entries: Iterable[Entry]) -> dict[str, Any]:
    """The summary that these log entries give, without "run" and "paths"."""
    summary = RunSummary()
    for entry in entries:
        summary.feed(entry)
    return summary.plain()


class RunSummary:
    """Makes a run's summary: `feed` takes the log's entries, `plain` returns the summary so far."""

    def __init__(self) -> None:
        self.accounting = Accounting()
        self._steps: list[StepSummary] = []

    def feed(self, entry: Entry) -> tuple[StepHistory, StepSummary] | None:
        """Read a log entry. Returns the step that the entry commits, as history and as summary.
        None: it commits none."""
        step = self.accounting.history.step
        summary = self.accounting.feed(entry)
        if summary is None:
            return None
        self._steps.append(summary)
        return step, summary

    def plain(self) -> dict[str, Any]:
        """The summary so far: the content of `summary.json`, without "run" and "paths"."""
        accounting, steps = self.accounting, self._steps
        history, finish = accounting.history, accounting.history.finish
        failed = {"failed": finish.reason} if finish is not None and finish.failed else {}
        not_streamed = [step.samples.not_streamed for step in steps]
        left = history.step.prompts
        dropped = _add_up([*(step.prompts.dropped for step in steps), left.dropped])
        afters = [*(step.prompts.dropped_after for step in steps), left.dropped_after]
        after = {why: said for one in reversed(afters) for why, said in one.items()}
        return {
            "finished": None if finish is None or failed else finish.reason,
            "sessions": history.num_sessions,
            "steps": _steps(steps),
            "wall_s": accounting.time.wall_s,
            "seconds": {
                cause: seconds
                for cause, seconds in accounting.seconds().items()
                if seconds or cause not in RARE_CAUSES
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
                **({"dropped_after": after} if after else {}),
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
            **_episodes(steps),
            **self._engines(),
            **self._trainer(),
            **_pipeline(steps),
            **_salvaged(steps),
            **failed,
            **dict.fromkeys(sorted(history.marks), True),
        }

    def _engines(self) -> dict[str, Any]:
        """By "engines" the counts of each engine, and by "switches" each change of all engines'
        numbers of devices. Empty for a run with a single engine."""
        book = self.accounting.history.engines
        counts, seconds = book.counts, self.accounting.seconds()
        if not counts:
            return {}
        # Some moments of a rollout are booked to other causes, such as the controller.
        rollout_s = max(sum(seconds[cause] for cause in ROLLOUT_CAUSES), book.any_busy_s)
        return {
            "engines": [
                {
                    "engine": number,
                    "samples": one.samples,
                    "tokens": one.tokens,
                    "busy_share": one.busy_s / rollout_s if rollout_s else None,
                    "losses": one.losses,
                    "mean_away_s": one.away_s / one.losses if one.losses else None,
                }
                for number, one in sorted(counts.items())
            ],
            **self._switches(),
        }

    def _trainer(self) -> dict[str, Any]:
        """How often the trainer was lost, and how long until it was back. Empty: never lost."""
        book = self.accounting.history.trainer
        if not book.losses:
            return {}
        return {"trainer": {"losses": book.losses, "mean_away_s": book.away_s / book.losses}}

    def _switches(self) -> dict[str, Any]:
        """A row for each change of the number of devices of each engine. Empty: there was none."""
        switches = self.accounting.history.engines.switches
        if not switches:
            return {}
        return {
            "switches": [
                {
                    "before_step": one.step,
                    "tensor_parallel": one.tensor_parallel,
                    "seconds": one.seconds,
                }
                for one in switches
            ]
        }


def write_summary(summary: Mapping[str, Any], path: str | Path) -> None:
    """Write the summary as JSON to `path`, in one atomic replacement."""
    with replacing(Path(path)) as temporary:
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        # A half surrogate has no bytes; as an escape JSON knows it.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary that a finished run wrote into its folder. None if there is no such file, if the
    log is newer, or if another version of the package wrote the file."""
    path = folder / SUMMARY_FILE
    try:
        if path.stat().st_mtime_ns < events_path(folder).stat().st_mtime_ns:
            return None
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    known = {"run", "paths", *RunSummary().plain()}
    if not isinstance(summary, dict) or not known <= summary.keys() or not summary["finished"]:
        return None
    return summary


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
    """Counts of carried tokens (kept from earlier launches of samples). None if there were none."""
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


def _salvaged(steps: list[StepSummary]) -> dict[str, Any]:
    """Counts of responses and tokens of interrupted rounds that resumes kept. Empty if none."""
    names = {"samples": "perf/salvaged_samples", "tokens": "perf/salvaged_tokens"}
    counts = {
        name: int(sum(step.logged.get(metric, 0.0) for step in steps))
        for name, metric in names.items()
    }
    return {"salvaged": counts} if counts["samples"] else {}


def _episodes(steps: list[StepSummary]) -> dict[str, Any]:
    """Counts of the episodes (conversations with environments) of all steps. Empty if none."""
    found = add_up_episodes(step.episodes for step in steps)
    return {"episodes": found.plain()} if found else {}


def _pipeline(steps: list[StepSummary]) -> dict[str, Any]:
    """Summary of a trainer's pipeline stages and the links between these, by the key "pipeline".
    Empty for a trainer without pipeline stages."""
    found = summarize_pipeline(steps)
    return {} if found is None else {"pipeline": found}


def _training_reward(steps: list[StepSummary]) -> dict[str, Any]:
    """Mean training reward of the `first` and the `last` `LAST_STEPS` steps, both None if there are
    too few. Only the most frequent kind of round counts: long rounds' prompts are harder."""
    known = [(step.kind, step.rewards.mean) for step in steps if step.rewards.mean is not None]
    kind = Counter(kind for kind, _ in known).most_common(1)[0][0] if known else None
    rewards = [mean for of, mean in known if of == kind]
    if len(rewards) < 2 * LAST_STEPS:
        return {"first": None, "last": None}
    first, last = _mean(rewards[:LAST_STEPS]), _mean(rewards[-LAST_STEPS:])
    return {"first": first, "last": last, "kind": None if kind is None else str(kind)}


def _lengths(steps: list[StepSummary]) -> dict[str, float | None]:
    """Metrics that compare trained lengths with the policy's own over the last steps (see
    `LengthBias`)."""
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
