"""A run's seconds by cause. Every second between the first and the last entry of a log belongs to
exactly one cause, so the causes add up to the wall time."""

from __future__ import annotations

from rollpacker.core.events import Entered
from rollpacker.core.records import CALLBACK_SECONDS, POOL_SWITCH, Entry, Note, Record, Session
from rollpacker.report.step_history import POOL_WAIT
from rollpacker.report.turn_book import ENVIRONMENT

CAUSES: dict[str, str] = {
    "decode": "slots that were generating",
    "tail_idle": "slots empty while the rest of the round finished",
    "imbalance": "engines with nothing to do while others generated",
    ENVIRONMENT: "nothing to generate, environments had their turn",
    "reward_wait": "nothing left to generate, verdicts still out",
    "training": "gradients and the optimizer step, also in waits",
    "sync": "new weights on their way to the engine",
    "checkpoint": "making the step durable",
    "recovery": "a trainer that was lost, on its way back",
    "controller": "decisions, fetching prompts, gaps",
    "evaluation": "held-out evaluation",
    "callbacks": "the program's own callbacks",
    "startup": "loading before the first event",
    POOL_WAIT: "other jobs had the pool",
    POOL_SWITCH: "parked processes waking up on it",
}
"""Every cause of time (what a run spends seconds on), with its meaning in words."""

POOL_CAUSES = (POOL_WAIT, POOL_SWITCH)

AROUND_STEPS = ("evaluation", "callbacks", "startup", *POOL_CAUSES)
"""Causes whose seconds are not part of a step's own seconds."""

RARE_CAUSES = ("imbalance", ENVIRONMENT, "recovery", "callbacks", *POOL_CAUSES)
"""Causes that a report leaves out if they have no seconds."""

WHILE_AWAY = ("reward_wait", "evaluation", ENVIRONMENT)
"""Phases during which no engine is needed. If engines release a pool of devices in such a phase,
these seconds count for the phase, not as `POOL_SWITCH`."""

ROLLOUT_CAUSES = ("decode", "tail_idle", "imbalance")

STEP_CAUSES = tuple(cause for cause in CAUSES if cause not in AROUND_STEPS)


class TimeBook:
    """Assigns each interval between a log's entries to causes, by the phase that the run was in.

    With live(t) the samples in the engine and peak their maximum in the step, decode is the
    integral of live / peak over the rollout and tail_idle the integral of 1 - live / peak: "slots
    empty while the rest of the round finished". Of that, imbalance is the share of engines that had
    no sample at all. `slots` caps live and peak where engines have fewer slots than samples.
    Seconds that the controller spent on a record (`cost_s`) are taken out of the interval after the
    record and counted as controller, as is all time without another cause. The seconds of a note (a
    log entry on a span of time) are evaluation, callbacks, startup or switch."""

    def __init__(self, slots: int | None) -> None:
        self.slots = slots
        """Maximum number of samples that the engines of the current session (process of the run)
        generate at once: as the log or the constructor's argument has it. None: not known."""
        self._given_slots = slots
        self.start_s: float | None = None
        self.now_s = 0.0
        self.totals = dict.fromkeys(CAUSES, 0.0)
        """Seconds by cause in all committed steps, without the step under way."""
        self._owed_s = 0.0
        self._open = dict.fromkeys(CAUSES, 0.0)
        self._rollout_s = 0.0
        self._live_s = 0.0
        self._idle_s = 0.0
        self._idle_share = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the first log entry to the last."""
        return 0.0 if self.start_s is None else self.now_s - self.start_s

    def advance(self, entry: Entry, phase: str, num_live: int, idle_share: float = 0.0) -> None:
        """Count the time since the last log entry under its causes. In that time the run was in
        `phase`, with `num_live` samples in engines. `idle_share`: share of engines without samples
        meanwhile, if others had some."""
        self._idle_share = idle_share
        if isinstance(entry, Record):
            self._advance(entry.time_s, phase, num_live)
            if isinstance(entry.event, Entered):  # its last seconds were the switch
                switch_s = min(entry.event.switch_s, self._open[POOL_WAIT])
                self._open[POOL_WAIT] -= switch_s
                self._open[POOL_SWITCH] += switch_s
            if entry.cost_s > 0.0:
                self._owed_s += entry.cost_s
        elif isinstance(entry, Note):
            if self.start_s is None:
                self.start_s = self.now_s = entry.time_s - entry.seconds
            # Gradients are a phase of the run, not a span beside it.
            span_s = 0.0 if entry.name == "gradients" else entry.seconds
            if entry.name == POOL_SWITCH and phase in WHILE_AWAY:
                span_s = 0.0
            cause = entry.name if entry.name in AROUND_STEPS else "controller"
            told_s = entry.metrics.get(CALLBACK_SECONDS, 0.0)
            if told_s:  # they came last
                self._advance(
                    entry.time_s - told_s, phase, num_live, cause=cause, span_s=span_s - told_s
                )
                cause, span_s = "callbacks", told_s
            self._advance(entry.time_s, phase, num_live, cause=cause, span_s=span_s)
        else:
            self._advance(entry.time_s, phase, num_live)
            self._owed_s = 0.0

    def begin_session(self, session: Session) -> None:
        self.slots = self._given_slots if session.slots is None else session.slots

    def step_seconds(self, peak_live: int) -> dict[str, float]:
        """Seconds by cause since the last committed step. The step under way goes on counting.
        `peak_live`: largest number of the step's samples in engines at once."""
        return self._seconds_so_far(peak_live)

    def close_step(self, peak_live: int) -> dict[str, float]:
        """Returns the seconds by cause since the last committed step, and begins a new step.
        `peak_live`: largest number of the old step's samples in engines at once."""
        seconds = self._seconds_so_far(peak_live)
        for cause, value in seconds.items():
            self.totals[cause] += value
        self._open = dict.fromkeys(CAUSES, 0.0)
        self._rollout_s = self._live_s = self._idle_s = 0.0
        return seconds

    def abandon_step(self, peak_live: int) -> None:
        """Note that the run begins the current step again. The step's seconds so far stay counted,
        for its next attempt. `peak_live`: largest number of samples in engines so far."""
        self._open = self._seconds_so_far(peak_live)
        self._rollout_s = self._live_s = self._idle_s = 0.0

    def seconds(self, peak_live: int) -> dict[str, float]:
        """Seconds by cause up to the last log entry. They add up to `wall_s`. `peak_live`: largest
        number of samples that the step under way had in engines at once."""
        so_far = self._seconds_so_far(peak_live)
        return {cause: self.totals[cause] + so_far[cause] for cause in CAUSES}

    def _advance(
        self, time_s: float, phase: str, num_live: int, *, cause: str = "", span_s: float = 0.0
    ) -> None:
        """Count the time from the last log entry to `time_s`: its first `span_s` seconds as
        `cause`, next those that the controller spent on earlier entries (`cost_s`) as "controller",
        the rest as `phase`."""
        if self.start_s is None:
            self.start_s = self.now_s = time_s
        rest = time_s - self.now_s
        if rest <= 0.0:
            return
        self.now_s = time_s
        if span_s > 0.0:
            span_s = min(span_s, rest)
            self._open[cause] += span_s
            rest -= span_s
        if self._owed_s > 0.0:
            own = min(self._owed_s, rest)
            self._owed_s -= own
            self._open["controller"] += own
            rest -= own
        if phase == "rollout":
            self._rollout_s += rest
            self._idle_s += rest * self._idle_share
            self._live_s += rest * (num_live if self.slots is None else min(num_live, self.slots))
        else:
            self._open[phase] += rest

    def _seconds_so_far(self, peak_live: int) -> dict[str, float]:
        seconds = dict(self._open)
        peak = peak_live if self.slots is None else min(peak_live, self.slots)
        # The integral can top the interval by a rounding error.
        decode = min(self._live_s / peak, self._rollout_s) if peak else self._rollout_s
        seconds["decode"] += decode
        imbalance = min(self._idle_s, self._rollout_s - decode)
        seconds["imbalance"] += imbalance
        seconds["tail_idle"] += self._rollout_s - decode - imbalance
        return seconds
