"""What a fit to a run's log found: constants of its machine, and its workload. For a simulator, and
as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.report.decode_fit import DecodeFit
from rollpacker.report.reward_fit import Calls, Check

FORMS = ("step", "step_with_ends", "table")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundErrors:
    """Rounds predicted again with constants of one set, against what the log says."""

    num: int
    mean_s: float
    """Measured seconds from launch to the last end."""
    ratio: float
    """Predicted over measured, of the sums."""
    mean_error: float
    """Mean of |predicted - measured| / measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFit:
    """Verdicts, in seconds."""

    quantiles: Mapping[float, float]
    """From the end of a response to its verdict, over all samples that were judged."""
    check_quantiles: Mapping[float, float]
    """Of a check's own execution time; empty if the log does not tell."""
    num: int
    exposed_s: float
    """From the last end of a round to the start of training, on average."""
    by_row: Mapping[int, tuple[Check, ...]] = field(default_factory=dict)
    """What was said of the responses to each row, and in how many seconds."""
    calls: Calls | None = None
    """Where checks go to the rewards in batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFit:
    """A training step takes fixed_s + per_token_s * (trained response tokens)."""

    fixed_s: float
    per_token_s: float
    num: int
    mean_error: float
    """As in `RoundErrors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFit:
    """What lies between a step's new weights and the next one's launch, mean seconds."""

    plain_s: float
    """A commit without a checkpoint; with one if there was none without."""
    checkpoint_s: float | None
    """A commit with a checkpoint, evaluations taken out; None: there was none."""
    checkpoint_share: float
    """Of the commits, so many had one."""
    between_s: float
    """From a commit to the launch of the next round."""

    @property
    def mean_s(self) -> float:
        """With as many checkpoints as there were, until the next launch."""
        more_s = 0.0 if self.checkpoint_s is None else self.checkpoint_s - self.plain_s
        return self.between_s + self.plain_s + self.checkpoint_share * more_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was asked and how long the answers were, in tokens."""

    source: str
    rows: tuple[int, ...]
    """Dataset rows in the order they were fetched; once per epoch."""
    pools: Mapping[int, tuple[int, ...]]
    """Lengths of each row's finished responses, in order of appearance."""
    stopped: Mapping[int, tuple[int, ...]]
    """How far each row's stopped responses had come: lower bounds of their lengths."""
    max_response_tokens: int | None
    """Length of the responses that ran into the limit; None: none did."""

    @property
    def longest(self) -> int:
        """Longest finished response."""
        return max(max(pool) for pool in self.pools.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """Everything that a simulator needs to know of a machine and a workload."""

    job: Mapping[str, Any]
    """`JobConfig` as a plain mapping, of the last session."""
    slots: int | None
    """Samples that an engine decodes at the same time; None: all that it is given."""
    num_steps: int
    num_rounds: int
    """Rounds that the constants were fitted to."""
    num_skipped: int
    """Rounds whose token clock could not be told: samples failed, or ended out of order."""
    step: DecodeFit
    """The form max(launch, bytes + cache) + sequences and a prefill per sample, nothing else. Where
    the engine drafted all three forms are one, a table fitted to whole rounds, in which a step
    stands for a token."""
    step_with_ends: DecodeFit
    """The same with a cost of each admission to the engine and of each sample's end: nearer the
    truth where rounds of different kinds, or few slots, are compared."""
    table: DecodeFit
    """As `step_with_ends`, but a table over running samples instead of a straight line."""
    errors: Mapping[str, Mapping[str, RoundErrors]]
    """Of the three above, by name, then by kind of round and "all"."""
    rewards: RewardFit
    stop_s: float = 0.0
    """From telling samples to stop until the engine has let go of them: a decode step takes its
    time."""
    train: TrainFit
    sync_s: float
    """From the end of training until the engine has the new weights, on average."""
    commit: CommitFit
    workload: Workload

    @property
    def drafted(self) -> bool:
        """The engine gave several tokens of a sample in a step (`rollout.engine.draft_tokens`)."""
        return bool(self.step.knots)

    def describe(self) -> str:
        """What this machine costs, as a table for people."""
        return "\n".join(
            f"{name:<31}{value:>13}  {what}".rstrip() for name, value, what in _rows(self)
        )


def _rows(run: FittedRun) -> list[tuple[str, str, str]]:
    """(constant, value, remark) for `describe`."""
    step, train, rewards = run.step_with_ends, run.train, run.rewards
    rows = [("fitted to", f"{run.num_rounds} rounds", f"{run.num_skipped} left out")]
    if run.drafted:
        rows.append(("drafts", "yes", "a decode step stands for a token; fitted to whole rounds"))
    else:
        rows += [
            (
                "decode step, floor",
                _micro(step.launch_s),
                "a step takes max(floor, base + K x token)",
            ),
            ("decode step, base", _micro(step.bytes_s), "+ n x sample, with"),
            ("decode step, per sample", _micro(step.per_sequence_s), "and n samples running"),
            (
                "admissions to the engine",
                _milli(step.admission_s),
                "each time samples are admitted",
            ),
            ("end of a sample", _micro(step.per_ended_s), "its slot is cleared, its end reported"),
        ]
    rows += [
        ("decode step, per cached token", _micro(step.per_cached_token_s), "K tokens in the cache"),
        ("admission of a sample", _micro(step.per_admitted_s), "prefill"),
        ("stop of a sample", _milli(run.stop_s), "until the engine lets go of it"),
        ("stalls", f"{100 * (step.stalls - 1):+.1f} %", "contained in the constants"),
    ]
    rows += [
        (f"decode step, {count:g} running", _micro(level), "with an empty cache, from the table")
        for count, level in run.table.knots
    ]
    rows += [
        (f"generation, {kind} rounds", f"{errors.mean_s:.3f} s", _told(run, kind))
        for kind, errors in run.errors["step_with_ends"].items()
    ]
    rows += [
        (f"verdict, {100 * q:g} % quantile", _milli(seconds), "after the response")
        for q, seconds in rewards.quantiles.items()
    ]
    if rewards.calls is not None:
        calls = rewards.calls
        at_once = f"{calls.num_workers} at once" if calls.num_workers > 1 else "one at a time"
        rows += [
            ("call of the rewards", _milli(calls.fixed_s), f"{at_once}, where they are batches"),
            ("... per sample", _milli(calls.per_sample_s), ""),
        ]
    rows += [
        ("wait for verdicts", _milli(rewards.exposed_s), "exposed, a round"),
        ("training step", _milli(train.fixed_s), f"mean error {100 * train.mean_error:.0f} %"),
        ("... per trained token", _micro(train.per_token_s), ""),
        ("weight sync", _milli(run.sync_s), ""),
        ("commit", _milli(run.commit.plain_s), ""),
    ]
    if run.commit.checkpoint_s is not None:
        rows.append(("... with a checkpoint", _milli(run.commit.checkpoint_s), ""))
    rows.append(("from commit to launch", _milli(run.commit.between_s), ""))
    return rows


def _told(run: FittedRun, kind: str) -> str:
    form, *others = (run.errors[name][kind] for name in ("step_with_ends", "table", "step"))
    if run.drafted:
        return f"fit/log {form.ratio:.2f}, mean error {100 * form.mean_error:.0f} %"
    table, without = (f"{100 * other.mean_error:.0f} %" for other in others)
    return (
        f"fit/log {form.ratio:.2f}, mean error {100 * form.mean_error:.0f} % "
        f"(table {table}, steps alone {without})"
    )


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.2f} us"


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
