"""What rewards took comes out of a log again: calls of batches, on workers."""

from __future__ import annotations

import pytest

from rollpacker.core.commands import Score
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.report.reward_fit import Checks
from rollpacker.report.step_history import SampleHistory, StepHistory, Verdict

FIXED_S, SAMPLE_S = 0.003, 0.02


def steps_of(num_workers: int, num_steps: int = 20, first_s: float = 0.0) -> list[StepHistory]:
    """Batches of 1, 2, 3, ... samples, asked for faster than they are answered."""
    now, number, steps = 0.0, 0, []
    free = [0.0] * num_workers
    for _ in range(num_steps):
        step = StepHistory()
        done = []
        for size in (1, 7, 2, 12, 3, 5):
            now += 0.01
            place = min(range(num_workers), key=free.__getitem__)
            warm_up_s = first_s if not steps and not done else 0.0
            end_s = max(now, free[place]) + FIXED_S + size * SAMPLE_S + warm_up_s
            free[place] = end_s
            for _ in range(size):
                sample = SampleId(PromptId("train", 0, number // 8), number % 8, 0)
                number += 1
                done.append((end_s, now, sample))
        for end_s, asked_s, sample in sorted(done, key=lambda one: one[0]):
            step.samples[sample] = SampleHistory(sample, 0.0, num_tokens=10 + sample.index)
            event = SampleScored(
                time_s=end_s, sample=sample, value=1.0, seconds=round(end_s - asked_s, 6)
            )
            step.checks.asked.append(Score(sample=sample))
            step.checks.verdicts.append(Verdict(event, end_s, asked_s, 0.0))
        steps.append(step)
        now = max(free) + 0.1
    return steps


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_calls_and_workers_come_back(num_workers: int) -> None:
    checks = Checks()
    for step in steps_of(num_workers):
        checks.add(step)
    calls = checks.calls()
    assert calls is not None
    assert calls.num_workers == num_workers
    assert calls.fixed_s == pytest.approx(FIXED_S, rel=0.05)
    assert calls.per_sample_s == pytest.approx(SAMPLE_S, rel=0.01)
    assert len(calls.recorded) == 20 * 6


def test_a_warm_up_call_is_told_apart() -> None:
    checks = Checks()
    for step in steps_of(1, first_s=3.0):
        checks.add(step)
    calls = checks.calls()
    assert calls is not None
    assert calls.warm_ups == pytest.approx((3.0 + FIXED_S + SAMPLE_S,))
    assert max(call.seconds for call in calls.recorded) < 0.5


def test_what_was_said_of_a_response_is_kept_by_row() -> None:
    checks = Checks()
    for step in steps_of(1, num_steps=1):
        checks.add(step)
    first = checks.by_row[0][0]
    assert (first.num_tokens, first.value, first.timed_out) == (10, 1.0, False)
    assert sum(map(len, checks.by_row.values())) == 30


def test_a_log_without_verdicts_has_no_calls() -> None:
    assert Checks().calls() is None
