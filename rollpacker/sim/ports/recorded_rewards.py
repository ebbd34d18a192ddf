"""Gives the verdicts that a real run has recorded, after the seconds that its checks took.

The scheduling core limits how many checks run at once if their kind has workers or a deadline;
such a check takes the seconds of a recorded check. Other checks are put together as in a real run
(`run/ports/scoring.py`): checks that come while no further call of the reward can begin join one
batch. Every batch is one call, and the reward's workers run a few calls at once.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

from rollpacker.core.commands import Score
from rollpacker.core.events import Event, SampleScored
from rollpacker.core.ids import SampleId
from rollpacker.report.reward_fit import MOST_AT_ONCE, Check
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.machine import Machine
from rollpacker.sim.ports.rewards import Rewards
from rollpacker.sim.recorded_checks import RecordedCalls, RecordedChecks
from rollpacker.sim.responses import Responses
from rollpacker.sim.workload import Workload

HANDED_OVER_S = 1e-6
"""Seconds from the end of a response to the call of the reward that checks it, so that responses
that end in the same decode step share a call."""


class RecordedRewards(Rewards):
    """Carries out `Score` (check a response) and `CancelScore` with recorded verdicts."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        workload: Workload,
        responses: Responses,
        max_response_tokens: int | None,
        checks: RecordedChecks,
        is_generating: Callable[[], bool],
    ) -> None:
        """`is_generating` tells whether engines generate: rewards' calls then take other times."""
        super().__init__(clock, machine, workload, responses, max_response_tokens)
        self._checks = checks
        self._luck = random.Random(workload.seed)
        self._batches = (
            None
            if checks.calls is None
            else _Batches(clock, checks.calls, self._luck, is_generating, self._was_cancelled)
        )

    def _score(self, command: Score) -> None:
        check = self._check_of(command.sample)
        if self._batches is not None:
            self._batches.ask(_scored(command.sample, check, None)[0])
            return
        event, held_s = _scored(command.sample, check, command.timeout_s)
        self._clock.after(held_s, event)

    def _check_of(self, sample: SampleId) -> Check | None:
        responses = self._responses
        length = responses.lengths[responses.keys[sample]]
        return self._checks.check(sample.prompt.row, length, self._luck.random())


def _scored(
    sample: SampleId, check: Check | None, timeout_s: float | None
) -> tuple[SampleScored, float]:
    """The verdict of a recorded check on a sample, and the seconds until it comes. `check` None:
    the verdict has no value and comes at once. A check that takes `timeout_s` seconds or more has
    timed out; None: no limit."""
    if check is None:
        return SampleScored(time_s=0.0, sample=sample, value=None, cause="sample"), 0.0
    seconds, value, timed_out = check.seconds, check.value, check.timed_out
    if timeout_s is not None:
        # One that ran into the limit of its time would have gone on: the limit of now ends it.
        ran_out = timed_out or seconds >= timeout_s
        if ran_out:
            seconds, value, timed_out = timeout_s, 0.0, True
    event = SampleScored(
        time_s=0.0,
        sample=sample,
        value=value,
        seconds=seconds,
        correct=check.correct,
        timed_out=timed_out,
        cause=check.cause,
    )
    return event, check.held_s - check.seconds + seconds


class _Batches:
    """Puts checks that wait into one call of the reward each time a call may begin."""

    def __init__(
        self,
        clock: VirtualClock,
        calls: RecordedCalls,
        luck: random.Random,
        is_generating: Callable[[], bool],
        passes_over: Callable[[Event], bool],
    ) -> None:
        """`passes_over` returns True for a verdict not to be given, as its check was cancelled."""
        self._is_generating = is_generating
        self._passes_over = passes_over
        self._clock = clock
        self._calls = calls
        self._luck = luck
        self._asked: list[SampleScored] = []
        self._free = [0.0] * calls.num_workers
        """Heap of the seconds of the clock at which each worker of the reward becomes free."""
        self._running: list[tuple[float, int, Sequence[SampleScored]]] = []
        """Heap of running calls: (seconds at which the call ends, its number, its verdicts)."""
        self._done: deque[SampleScored] = deque()
        self._begins = math.inf
        """Time in seconds at which the checks in `_asked` begin as one call; inf: not known yet."""
        self._num_begun = 0

    @property
    def next_finish(self) -> float:
        """Time in seconds at which a call begins or a verdict is given next; inf: none is due."""
        if self._done:
            return self._clock.time_s
        return min(self._begins, self._running[0][0] if self._running else math.inf)

    def ask(self, verdict: SampleScored) -> None:
        """Queue a check, whose `verdict` is given when the call that makes the check has ended."""
        self._asked.append(verdict)
        if self._begins == math.inf and len(self._running) < MOST_AT_ONCE:
            self._begins = self._clock.time_s + HANDED_OVER_S
            self._clock.expect(self, self._next)

    def _next(self) -> Event | None:
        now = self._clock.time_s
        if self._begins <= now:
            self._begin(now)
        if not self._done and self._running and self._running[0][0] <= now:
            _, _, verdicts = heapq.heappop(self._running)
            self._done.extend(verdicts)
            if self._asked and self._begins == math.inf:
                self._begins = now + HANDED_OVER_S
        if not self._done:
            return None
        verdict = self._done.popleft()
        return None if self._passes_over(verdict) else verdict

    def _begin(self, now: float) -> None:
        alone = not self._is_generating()
        seconds = self._calls.call_s(len(self._asked), self._luck.random(), alone=alone)
        if self._num_begun < len(self._calls.warm_ups):
            seconds = self._calls.warm_ups[self._num_begun]
        done_s = max(now, self._free[0]) + seconds
        heapq.heapreplace(self._free, done_s)
        heapq.heappush(self._running, (done_s, self._num_begun, self._asked))
        self._num_begun += 1
        self._asked, self._begins = [], math.inf
