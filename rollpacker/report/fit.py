"""What a machine costs and what a run asked of it, fitted to the run's event log.

The constants are those of *that* machine, model and software, in seconds; none comes from a
datasheet. Prompt lengths are not in a log: what they cost is inside the constants per sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rollpacker.core.commands import Commit, Launch, Score, TrainOn
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    SampleAborted,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Note, Record, Session
from rollpacker.report.decode_fit import DecodeFit, fit_line, fit_table, nonnegative_least_squares
from rollpacker.report.token_clock import (
    ClockError,
    LoggedRound,
    RoundFold,
    Stretch,
    iterate_rounds,
    stretches,
)

MIN_ROUNDS = 3
FORMS = ("step", "step_with_ends", "table")
REWARD_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFit:
    """A training step takes fixed_s + per_token_s * (trained response tokens)."""

    fixed_s: float
    per_token_s: float
    num: int
    mean_error: float
    """As in `RoundErrors`."""


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
    """Samples that the engine decodes at the same time; None: all that are launched."""
    num_steps: int
    num_rounds: int
    """Rounds that the constants were fitted to."""
    num_skipped: int
    """Rounds whose token clock could not be told: samples failed, or ended out of order."""
    step: DecodeFit
    """The form max(launch, bytes + cache) + sequences and a prefill per sample, nothing else."""
    step_with_ends: DecodeFit
    """The same with a cost of each admission to the engine and of each sample's end: nearer the
    truth where rounds of different kinds, or few slots, are compared."""
    table: DecodeFit
    """As `step_with_ends`, but a table over running samples instead of a straight line."""
    errors: Mapping[str, Mapping[str, RoundErrors]]
    """Of the three above, by name, then by kind of round and "all"."""
    rewards: RewardFit
    train: TrainFit
    sync_s: float
    """From the end of training until the engine has the new weights (median, as are the next)."""
    commit_s: float
    """A commit without a checkpoint; with one if there was none without."""
    checkpoint_s: float | None
    """A commit with a checkpoint, evaluations taken out; None: there was none."""
    between_s: float
    """From a commit to the launch of the next round."""
    workload: Workload

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it; `from_plain` is the way back."""
        plain = asdict(self)
        plain["rewards"]["quantiles"] = _pairs(self.rewards.quantiles)
        plain["rewards"]["check_quantiles"] = _pairs(self.rewards.check_quantiles)
        plain["workload"]["pools"] = _pairs(self.workload.pools)
        plain["workload"]["stopped"] = _pairs(self.workload.stopped)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FittedRun:
        """Raises `ValueError` for what `to_plain` did not write."""
        try:
            workload, rewards = plain["workload"], plain["rewards"]
            return cls(
                **{
                    **plain,
                    **{form: _decode_fit(plain[form]) for form in FORMS},
                    "errors": {form: _errors(plain["errors"][form]) for form in FORMS},
                    "rewards": RewardFit(
                        **{
                            **rewards,
                            "quantiles": dict(rewards["quantiles"]),
                            "check_quantiles": dict(rewards["check_quantiles"]),
                        }
                    ),
                    "train": TrainFit(**plain["train"]),
                    "workload": Workload(
                        **{
                            **workload,
                            "rows": tuple(workload["rows"]),
                            "pools": _lengths(workload["pools"]),
                            "stopped": _lengths(workload["stopped"]),
                        }
                    ),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a fitted run ({type(error).__name__}: {error})") from error

    def describe(self) -> str:
        """What this machine costs, as a table for people."""
        return "\n".join(
            f"{name:<31}{value:>13}  {what}".rstrip() for name, value, what in _rows(self)
        )


def fit_run(entries: Iterable[Entry], *, slots: int | None = None) -> FittedRun:
    """Fit a run's log. `slots` None: as the log says, or as many as samples were launched.

    Raises `ValueError` if the log holds too little, and says what it does hold. A log whose last
    line was cut off is none the worse for it (see `EventLog`).
    """
    run = _Run()
    for entry in entries:
        run.feed(entry)
    return run.fit(slots)


def predict_rounds(
    fit: DecodeFit, entries: Iterable[Entry], *, slots: int | None = None
) -> dict[str, RoundErrors]:
    """Another log's rounds, by kind and "all", predicted from their own lengths with these
    constants. Raises `ValueError` if the log holds no round whose token clock can be told."""
    clocked, reason = _clocked(list(iterate_rounds(entries)), slots)
    if not clocked:
        raise ValueError(f"the log holds no round that can be predicted {reason}".rstrip())
    return _round_errors(fit, clocked)


Clocked = list[tuple[LoggedRound, list[Stretch]]]


def _clocked(rounds: Sequence[LoggedRound], slots: int | None) -> tuple[Clocked, str]:
    """The rounds whose clock can be told, and why another could not."""
    clocked: Clocked = []
    reason = ""
    for round_ in rounds:
        try:
            known = round_.slots if slots is None else slots
            clocked.append((round_, stretches(round_, slots=known)))
        except ClockError as error:
            reason = str(error)
    return clocked, reason


def _round_errors(fit: DecodeFit, clocked: Clocked) -> dict[str, RoundErrors]:
    predicted = np.array([fit.seconds(parts).sum() for _, parts in clocked])
    measured = np.array([sum(part.seconds for part in parts) for _, parts in clocked])
    kinds = np.array([str(round_.kind) for round_, _ in clocked])
    groups = {kind: kinds == kind for kind in sorted(set(kinds.tolist()))}
    groups["all"] = np.ones(len(kinds), np.bool_)
    return {
        kind: RoundErrors(
            num=int(which.sum()),
            mean_s=float(measured[which].mean()),
            ratio=float(predicted[which].sum() / measured[which].sum()),
            mean_error=float(np.mean(np.abs(predicted[which] / measured[which] - 1))),
        )
        for kind, which in groups.items()
    }


@dataclass(slots=True)
class _Run:
    """One pass over a log. Durations in seconds."""

    job: Mapping[str, Any] = field(default_factory=dict)
    slots: int | None = None
    steps: set[int] = field(default_factory=set)
    rounds: list[LoggedRound] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    verdicts: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    trained: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, seconds) of each training step."""
    synced: list[float] = field(default_factory=list)
    committed: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    between: list[float] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    rows: list[int] = field(default_factory=list)
    pools: dict[int, list[int]] = field(default_factory=dict)
    stopped: dict[int, list[int]] = field(default_factory=dict)
    capped: set[int] = field(default_factory=set)
    fold: RoundFold = field(default_factory=RoundFold)
    judged_since: dict[SampleId, float] = field(default_factory=dict)
    lengths: dict[SampleId, int] = field(default_factory=dict)
    fetched: set[PromptId] = field(default_factory=set)
    since: dict[str, float] = field(default_factory=dict)
    """When the phase of this name began."""
    tokens: int = 0
    evaluated_s: float = 0.0
    """Seconds of evaluations since the last `Commit`."""

    def feed(self, entry: Entry) -> None:
        round_ = self.fold.feed(entry)
        if round_ is not None and round_.ends:
            self.rounds.append(round_)
            self.since["rollout"] = round_.ends[-1].time_s
        if isinstance(entry, Session):
            self.job, self.slots = entry.job, entry.slots
            self.judged_since.clear()
            self.since.clear()
        elif isinstance(entry, Note):
            self.evaluated_s += entry.seconds
        else:
            self._take(entry)
            for command in entry.commands:
                self._obey(command, entry)

    def _take(self, record: Record) -> None:
        event, now = record.event, record.time_s
        match event:
            case PromptsFetched():
                for prompt in event.prompts:
                    self._fetch(prompt)
            case SampleGenerated():
                row = event.sample.prompt.row
                self.pools.setdefault(row, []).append(event.num_tokens)
                self.lengths[event.sample] = event.num_tokens
                if event.finish_reason == "length":
                    self.capped.add(event.num_tokens)
            case SampleAborted():
                self.stopped.setdefault(event.sample.prompt.row, []).append(event.num_tokens)
            case SampleScored():
                if event.sample in self.judged_since:
                    self.verdicts.append(now - self.judged_since.pop(event.sample))
                if event.seconds is not None:
                    self.checks.append(event.seconds)
            case Trained():
                if (seconds := self._ended("training", now)) is not None:
                    self.trained.append((self.tokens, seconds))
                self.since["sync"] = now
            case WeightsSynced():
                if (seconds := self._ended("sync", now)) is not None:
                    self.synced.append(seconds)
            case Committed():
                if (seconds := self._ended("commit", now)) is not None:
                    seconds = max(0.0, seconds - self.evaluated_s)
                    self.committed[event.checkpointed].append(seconds)
                self.steps.add(event.step)
                self.since["between"] = now
            case _:
                pass

    def _obey(self, command: object, record: Record) -> None:
        now = record.time_s
        match command:
            case Score(sample=sample):
                self.judged_since[sample] = now
            case Launch():
                if (seconds := self._ended("between", now)) is not None:
                    self.between.append(seconds)
            case TrainOn(groups=groups):
                if (seconds := self._ended("rollout", now)) is not None:
                    self.exposed.append(seconds)
                self.tokens = sum(self.lengths.get(s, 0) for group in groups for s in group)
                self.lengths.clear()
                self.since["training"] = now
            case Commit():
                self.since["commit"] = now
                self.evaluated_s = 0.0
            case _:
                pass

    def _fetch(self, prompt: PromptId) -> None:
        self.sources.add(prompt.source)
        if prompt not in self.fetched:  # a resumed run fetches again what it had not committed
            self.fetched.add(prompt)
            self.rows.append(prompt.row)

    def _ended(self, phase: str, now: float) -> float | None:
        began = self.since.pop(phase, None)
        return None if began is None else now - began

    def fit(self, slots: int | None) -> FittedRun:
        clocked, reason = _clocked(self.rounds, slots)
        self._check(clocked, reason, slots)
        parts = [parts for _, parts in clocked]
        fits = {
            "step": fit_line(parts, full=False),
            "step_with_ends": fit_line(parts, full=True),
            "table": fit_table(parts),
        }
        with_checkpoint, without = self.committed[True], self.committed[False]
        return FittedRun(
            job=self.job,
            slots=self.slots if slots is None else slots,
            num_steps=len(self.steps),
            num_rounds=len(clocked),
            num_skipped=len(self.rounds) - len(clocked),
            **fits,
            errors={form: _round_errors(fit, clocked) for form, fit in fits.items()},
            rewards=RewardFit(
                quantiles=_quantiles(self.verdicts),
                check_quantiles=_quantiles(self.checks),
                num=len(self.verdicts),
                exposed_s=statistics.fmean(self.exposed) if self.exposed else 0.0,
            ),
            train=_fit_training(self.trained),
            sync_s=_median(self.synced),
            commit_s=_median(without or with_checkpoint),
            checkpoint_s=_median(with_checkpoint) if with_checkpoint else None,
            between_s=_median(self.between),
            workload=self._workload(),
        )

    def _check(self, clocked: Clocked, reason: str, slots: int | None) -> None:
        num = sum(len(pool) for pool in self.pools.values())
        usable = (
            f"its {num} response lengths can still serve as a scenario's trace (lengths.trace)"
            if num
            else ""
        )
        if not self.rounds and not num:
            raise ValueError("the log holds no generated response: nothing can be fitted to it")
        if len(self.rounds) < MIN_ROUNDS:
            raise ValueError(
                f"the log holds {_counted(len(self.rounds), 'finished round')}, and fitting takes "
                f"at least {MIN_ROUNDS}: let the run go on; {usable}"
            )
        if len(clocked) < MIN_ROUNDS or 2 * len(clocked) < len(self.rounds):
            known = self.slots if slots is None else slots
            had = "one slot for every sample" if known is None else f"{known} slots"
            raise ValueError(
                f"{len(self.rounds) - len(clocked)} of {len(self.rounds)} rounds do not fit an "
                f"engine with {had} ({reason}): either the engine had another number of slots than "
                "the log says (fit_run takes it as slots=...), or lines of the log are missing or "
                f"changed (rollpacker replay tells); {usable}"
            )
        if not any(part.seconds > 0 for _, parts in clocked for part in parts):
            raise ValueError(f"the log's rounds take no time: nothing can be fitted; {usable}")
        if len(self.trained) < MIN_ROUNDS:
            raise ValueError(
                f"the log holds {_counted(len(self.trained), 'training step')}, and fitting takes "
                f"at least {MIN_ROUNDS}; {usable}"
            )
        if len(self.sources) > 1:
            names = ", ".join(sorted(self.sources))
            raise ValueError(f"the log has prompts of several sources ({names}): fit one at a time")

    def _workload(self) -> Workload:
        return Workload(
            source=min(self.sources, default=""),
            rows=tuple(self.rows),
            pools={row: tuple(pool) for row, pool in sorted(self.pools.items())},
            stopped={row: tuple(pool) for row, pool in sorted(self.stopped.items())},
            max_response_tokens=max(self.capped, default=None),
        )


def _fit_training(trained: Sequence[tuple[int, float]]) -> TrainFit:
    """Relative least squares; outliers (a stall) count as far as twice the typical error."""
    tokens, seconds = np.array(trained, dtype=np.float64).T
    columns = np.column_stack([np.ones_like(tokens), tokens])
    weights = 1 / np.maximum(seconds, 1e-9)
    for _ in range(20):
        x = nonnegative_least_squares(columns * weights[:, None], seconds * weights)
        errors = np.abs(columns @ x / np.maximum(seconds, 1e-9) - 1)
        scale = 2 * 1.4826 * float(np.median(errors)) + 1e-12
        robust = np.sqrt(np.minimum(1, scale / np.maximum(errors, 1e-300)))
        weights = robust / np.maximum(seconds, 1e-9)
    return TrainFit(
        fixed_s=float(x[0]),
        per_token_s=float(x[1]),
        num=len(trained),
        mean_error=float(errors.mean()),
    )


def _quantiles(values: Sequence[float]) -> dict[float, float]:
    if not values:
        return {}
    found = np.quantile(np.array(values), REWARD_QUANTILES).tolist()
    return dict(zip(REWARD_QUANTILES, found, strict=True))


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _pairs(mapping: Mapping[Any, Any]) -> list[list[Any]]:
    """JSON has no keys but strings."""
    return [[key, list(v) if isinstance(v, tuple) else v] for key, v in mapping.items()]


def _lengths(pairs: Iterable[tuple[int, Iterable[int]]]) -> dict[int, tuple[int, ...]]:
    return {row: tuple(pool) for row, pool in pairs}


def _decode_fit(plain: Mapping[str, Any]) -> DecodeFit:
    knots = tuple((float(count), float(level)) for count, level in plain["knots"])
    return DecodeFit(**{**plain, "knots": knots})


def _errors(plain: Mapping[str, Any]) -> dict[str, RoundErrors]:
    return {kind: RoundErrors(**errors) for kind, errors in plain.items()}


def _rows(run: FittedRun) -> list[tuple[str, str, str]]:
    """(constant, value, remark) for `describe`."""
    step, train, rewards = run.step_with_ends, run.train, run.rewards
    rows = [
        ("fitted to", f"{run.num_rounds} rounds", f"{run.num_skipped} left out"),
        ("decode step, floor", _micro(step.launch_s), "a step takes max(floor, base + K x token)"),
        ("decode step, base", _micro(step.bytes_s), "+ n x sample, with"),
        ("... per cached response token", _micro(step.per_cached_token_s), "K tokens in the cache"),
        ("... per running sample", _micro(step.per_sequence_s), "and n samples running"),
        ("admission to the engine", _milli(step.admission_s), "each time samples are admitted"),
        ("... per sample", _micro(step.per_admitted_s), "prefill"),
        ("end of a sample", _micro(step.per_ended_s), "its slot is cleared, its end reported"),
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
    rows += [
        ("wait for verdicts", _milli(rewards.exposed_s), "exposed, a round"),
        ("training step", _milli(train.fixed_s), f"mean error {100 * train.mean_error:.0f} %"),
        ("... per trained token", _micro(train.per_token_s), ""),
        ("weight sync", _milli(run.sync_s), ""),
        ("commit", _milli(run.commit_s), ""),
    ]
    if run.checkpoint_s is not None:
        rows.append(("... with a checkpoint", _milli(run.checkpoint_s), ""))
    rows.append(("from commit to launch", _milli(run.between_s), ""))
    return rows


def _told(run: FittedRun, kind: str) -> str:
    form, *others = (run.errors[name][kind] for name in ("step_with_ends", "table", "step"))
    table, without = (f"{100 * other.mean_error:.0f} %" for other in others)
    return (
        f"fit/log {form.ratio:.2f}, mean error {100 * form.mean_error:.0f} % "
        f"(table {table}, steps alone {without})"
    )


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.2f} us"


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
