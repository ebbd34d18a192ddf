"""Fits constants for the seconds that a machine takes to the log of a run on it, and reads the
run's workload.

The constants are those of *that* machine, model and software, in seconds; none comes from a
datasheet. Prompt lengths are not in a log: what they cost is inside the constants per sample."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import PromptId
from rollpacker.core.records import POOL_SWITCH, Entry, Session
from rollpacker.report.decode_fit import DecodeFit, fit_line, fit_rounds
from rollpacker.report.engine_book import engines_of
from rollpacker.report.fitted_run import FittedRun, RoundErrors, TrainFit, Workload
from rollpacker.report.history import iterate_steps
from rollpacker.report.least_squares import robust_fit
from rollpacker.report.reward_fit import Checks
from rollpacker.report.step_history import CarriedInto, End, RoundHistory, StepHistory
from rollpacker.report.token_clock import (
    ClockError,
    Stretch,
    by_engine,
    finished_rounds,
    iterate_rounds,
    stretches,
)

MIN_ROUNDS = 3
DRAFTED_SHARE = 0.02
"""If in more than this share of rounds samples end in an order that one token per decode step
cannot explain, the engine is taken to draft: to give several tokens of a sample in a step."""


def fit_run(
    entries: Iterable[Entry], *, slots: int | None = None, may_draft: bool = False
) -> FittedRun:
    """Fit the constants of a run's machine to its log. `slots`: maximum number of samples that an
    engine generates at once; None: as the log has it, or else unlimited. With several engines the
    constants are those of one engine while the others run beside it.

    `may_draft`: whether the engine may have given several tokens of a sample in a step. Whether it
    did is decided from the order in which samples ended.

    Raises `ValueError` if the log holds too few complete rounds or training steps. A last line
    that a crash cut off is ignored."""
    measured = _Measured(_Clocked(slots, may_draft))
    for step in iterate_steps(entries, unfinished=True):
        measured.add(step)
    measured.clocked.settle()
    _check(measured)
    return _fit(measured)


def predict_rounds(
    fit: DecodeFit, entries: Iterable[Entry], *, slots: int | None = None, may_draft: bool = False
) -> dict[str, RoundErrors]:
    """Predict the seconds of another log's rounds from the lengths of their responses. Returns the
    errors by kind of round, and for "all" rounds. `slots` and `may_draft` are as for `fit_run`.
    Raises `ValueError` if the decode steps of no round can be counted."""
    clocked = _Clocked(slots, may_draft)
    for round_ in iterate_rounds(entries):
        clocked.add(round_)
    clocked.settle()
    if not clocked.rounds:
        raise ValueError(f"the log holds no round that can be predicted {clocked.reason}".rstrip())
    return _round_errors(fit, clocked.rounds)


ClockedRounds = list[tuple[RoundKind, list[list[Stretch]]]]
"""A list of rounds (batches of generation): the kind of each, and for each engine its stretches
(decode steps in a row between two ends of samples)."""


@dataclass(slots=True)
class _Clocked:
    """Gathers the rounds of a log, and counts the decode steps between their samples' ends."""

    slots: int | None
    """Maximum number of samples that each engine generates at once. None: as the log has it."""
    may_draft: bool = False
    rounds: ClockedRounds = field(default_factory=list)
    num_skipped: int = 0
    """Number of rounds left out: their samples' ends do not tell the decode steps."""
    reason: str = ""
    """Why the decode steps of the last skipped round cannot be counted. Empty: none was skipped."""
    drafted: bool = False
    """Whether the engine gave several tokens of a sample in a decode step, as the order shows in
    which samples ended. If so, `rounds` has the rounds counted that way (`_as_drafted`)."""
    _as_drafted: ClockedRounds = field(default_factory=list)
    """The rounds, with decode steps counted as if a step could give several tokens of a sample.
    Empty unless `may_draft`."""

    def add(self, round_: RoundHistory) -> None:
        if self.may_draft:
            with contextlib.suppress(ClockError):
                self._as_drafted.append((round_.kind, self._parts(round_, drafted=True)))
        try:
            self.rounds.append((round_.kind, self._parts(round_, drafted=False)))
        except ClockError as error:
            self.num_skipped += 1
            self.reason = str(error)

    def _parts(self, round_: RoundHistory, *, drafted: bool) -> list[list[Stretch]]:
        return [
            stretches(one, slots=one.slots if self.slots is None else self.slots, drafted=drafted)
            for one in by_engine(round_)
        ]

    def settle(self) -> None:
        """Decide, after the last round, whether the engine gave several tokens in a step."""
        num_gained = len(self._as_drafted) - len(self.rounds)
        if num_gained > DRAFTED_SHARE * len(self._as_drafted):
            self.drafted, self.rounds = True, self._as_drafted
            self.num_skipped -= num_gained


@dataclass(slots=True)
class _Asked:
    """Gathers the prompts of a log and the lengths of their responses, in the log's order."""

    sources: set[str] = field(default_factory=set)
    fetched: dict[PromptId, None] = field(default_factory=dict)
    """Prompts that were fetched, each of them once, though a resumed run fetches some again."""
    pools: dict[int, list[int]] = field(default_factory=dict)
    stopped: dict[int, list[int]] = field(default_factory=dict)
    capped: set[int] = field(default_factory=set)

    def add(self, step: StepHistory) -> None:
        self.fetched |= dict.fromkeys(step.prompts.fetched)
        self.sources |= {prompt.source for prompt in step.prompts.fetched}
        for end in step.ends():
            pools = self.pools if end.is_finished else self.stopped
            pools.setdefault(end.sample.prompt.row, []).append(end.num_tokens)
            if end.carried is not None:
                self._forget(end.sample.prompt.row, end.carried)
            if end.end is End.AT_LIMIT:
                self.capped.add(end.num_tokens)

    def _forget(self, row: int, before: CarriedInto) -> None:
        """Remove the length of a response's earlier launch, since the response now goes on. `row`:
        the prompt's row in the dataset; `before`: the earlier launch's tokens."""
        told = (self.pools if before.whole else self.stopped).get(row, [])
        if before.num_tokens in told:
            told.remove(before.num_tokens)

    @property
    def num_lengths(self) -> int:
        return sum(len(pool) for pool in self.pools.values())

    def workload(self) -> Workload:
        return Workload(
            source=min(self.sources, default=""),
            rows=tuple(prompt.row for prompt in self.fetched),
            pools={row: tuple(pool) for row, pool in sorted(self.pools.items()) if pool},
            stopped={row: tuple(pool) for row, pool in sorted(self.stopped.items()) if pool},
            max_response_tokens=max(self.capped, default=None),
        )


@dataclass(slots=True)
class _Measured:
    """Gathers the seconds of generation, rewards, training, new weights and commits in a log's
    steps, and the workload (prompts and lengths of responses)."""

    clocked: _Clocked
    asked: _Asked = field(default_factory=_Asked)
    session: Session | None = None
    """The last session (process of the run) in the log. None: there was none."""
    num_steps: int = 0
    checks: Checks = field(default_factory=Checks)
    exposed: list[float] = field(default_factory=list)
    """Seconds that each training step waited for verdicts after the end of generation."""
    trained: list[tuple[int, float]] = field(default_factory=list)
    """A pair (trained tokens, seconds) for each training step."""
    stopped: list[float] = field(default_factory=list)
    """For each order to stop samples, the seconds until the last sample had stopped."""
    synced: list[float] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Seconds from each commit of a step to the next launch of samples."""

    @property
    def slots(self) -> int | None:
        """Maximum number of samples that each engine generates at once. None: no limit."""
        session, given = self.session, self.clocked.slots
        if given is not None or session is None or session.slots is None:
            return given
        return session.slots // engines_of(session.job)

    def add(self, step: StepHistory) -> None:
        rounds = finished_rounds(step)
        for round_ in rounds:
            self.clocked.add(round_)
            end_s, told_s = round_.ends[-1].end_s, round_.told_to_stop_s
            if round_.ends[-1].end is End.STOPPED and end_s is not None and told_s is not None:
                self.stopped.append(end_s - told_s)
        self.asked.add(step)
        self.session = step.session or self.session
        self.checks.add(step)
        turns = step.turns
        if step.rounds and turns.committed_before_s is not None:
            self.between.append(_own_s(step, turns.committed_before_s, step.rounds[0].start_s))
        if turns.train_on_s is not None:
            if rounds:
                last_s = rounds[-1].ends[-1].end_s
                assert last_s is not None
                self.exposed.append(_own_s(step, last_s, turns.train_on_s))
            if turns.trained_s is not None:
                tokens = sum(sample.num_tokens for sample in step.trained_samples())
                self.trained.append((tokens, _training_s(step, turns.train_on_s, turns.trained_s)))
        if turns.trained_s is not None and turns.synced_s is not None:
            self.synced.append(turns.synced_s - turns.trained_s)
        self.num_steps += step.step > 0
        if step.step and turns.commit_s is not None:
            notes = [note for note in step.notes if note.time_s >= turns.commit_s]
            beside_s = sum(note.seconds for note in notes if note.name != POOL_SWITCH)
            seconds = _own_s(step, turns.commit_s, step.end_s)
            self.committed.append(max(0.0, seconds - beside_s))


def _own_s(step: StepHistory, start_s: float, end_s: float) -> float:
    """Seconds between two times, without waits for device pools that other jobs used."""
    return end_s - start_s - step.waited_s(start_s, end_s)


def _training_s(step: StepHistory, train_on_s: float, trained_s: float) -> float:
    """Seconds of a training step: from the command to train (`train_on_s`) to the trainer's answer
    (`trained_s`), plus those of gradients that were computed before the command."""
    begun_s = sum(
        max(0.0, min(note.time_s, train_on_s) - (note.time_s - note.seconds))
        for note in step.notes
        if note.name == "gradients"
    )
    return trained_s - train_on_s + begun_s


def _fit(measured: _Measured) -> FittedRun:
    clocked, session = measured.clocked, measured.session
    parts = [part for _, parts in clocked.rounds for part in parts]
    step = fit_rounds(parts) if clocked.drafted else fit_line(parts)
    checks = measured.checks
    return FittedRun(
        job={} if session is None else session.job,
        slots=measured.slots,
        num_steps=measured.num_steps,
        num_rounds=len(clocked.rounds),
        num_skipped=clocked.num_skipped,
        step=step,
        errors=_round_errors(step, clocked.rounds),
        checks={row: tuple(found) for row, found in sorted(checks.by_row.items())},
        calls=checks.calls(),
        exposed_s=_mean(measured.exposed),
        stop_s=_mean(measured.stopped),
        train=_fit_training(measured.trained),
        sync_s=_mean(measured.synced),
        commit_s=_mean(measured.committed),
        between_s=_mean(measured.between),
        workload=measured.asked.workload(),
    )


def _check(measured: _Measured) -> None:
    """Raises `ValueError` if a log has too few usable rounds or too few training steps."""
    clocked, num = measured.clocked, measured.asked.num_lengths
    num_rounds = len(clocked.rounds) + clocked.num_skipped
    usable = (
        f"its {num} response lengths can still serve as a scenario's trace (lengths.trace)"
        if num
        else ""
    )
    if not num_rounds and not num:
        raise ValueError("the log holds no generated response: nothing can be fitted to it")
    if num_rounds < MIN_ROUNDS:
        raise ValueError(
            f"the log holds {_counted(num_rounds, 'finished round')}, and fitting takes "
            f"at least {MIN_ROUNDS}: let the run go on; {usable}"
        )
    if len(clocked.rounds) < max(MIN_ROUNDS, num_rounds / 2):
        known = measured.slots
        had = "one slot for every sample" if known is None else f"{known} slots"
        raise ValueError(
            f"{clocked.num_skipped} of {num_rounds} rounds do not fit an engine with {had} "
            f"({clocked.reason}): either the engine had another number of slots than the log says "
            "(fit_run takes it as slots=...), or lines of the log are missing or "
            f"changed (rollpacker replay tells); {usable}"
        )
    some = (stretch for _, parts in clocked.rounds for part in parts for stretch in part)
    if not any(stretch.seconds > 0 for stretch in some):
        raise ValueError(f"the log's rounds take no time: nothing can be fitted; {usable}")
    if len(measured.trained) < MIN_ROUNDS:
        raise ValueError(
            f"the log holds {_counted(len(measured.trained), 'training step')}, and fitting takes "
            f"at least {MIN_ROUNDS}; {usable}"
        )
    if len(measured.asked.sources) > 1:
        names = ", ".join(sorted(measured.asked.sources))
        raise ValueError(f"the log has prompts of several sources ({names}): fit one at a time")


def _round_errors(fit: DecodeFit, clocked: ClockedRounds) -> dict[str, RoundErrors]:
    # A round is over when its last engine is.
    predicted, measured = (
        np.array([max(map(seconds_of, parts)) for _, parts in clocked])
        for seconds_of in (lambda part: fit.seconds(part).sum(), _measured_s)
    )
    kinds = np.array([str(kind) for kind, _ in clocked])
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


def _measured_s(part: Sequence[Stretch]) -> float:
    return sum(stretch.seconds for stretch in part)


def _fit_training(trained: Sequence[tuple[int, float]]) -> TrainFit:
    tokens, seconds = np.array(trained, dtype=np.float64).T
    columns = np.column_stack([np.ones_like(tokens), tokens])
    fixed_s, per_token_s = robust_fit(columns, seconds).constants
    errors = np.abs((fixed_s + per_token_s * tokens) / np.maximum(seconds, 1e-9) - 1)
    return TrainFit(fixed_s=fixed_s, per_token_s=per_token_s, mean_error=float(errors.mean()))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
