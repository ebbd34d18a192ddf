"""A run's checks, drawn again for other responses."""

from __future__ import annotations

import pytest

from rollpacker.core.commands import CancelScore, Score
from rollpacker.core.events import Event, SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.report.reward_fit import Call, Calls, Check
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.latency import MeasuredModel, StepCost
from rollpacker.sim.machine import Machine
from rollpacker.sim.ports.recorded_rewards import RecordedRewards
from rollpacker.sim.recorded_checks import RecordedCalls, RecordedChecks
from rollpacker.sim.responses import Responses
from rollpacker.sim.workload import Workload


def check(num_tokens: int, seconds: float, **rest: object) -> Check:
    told = {"value": 1.0, "correct": None, "timed_out": False, "cause": ""} | rest
    return Check(num_tokens, seconds, held_s=seconds + 0.01, **told)  # type: ignore[arg-type]


def calls(num_workers: int = 1, warm_ups: tuple[float, ...] = ()) -> Calls:
    """0.1 s and 0.02 s a sample."""
    recorded = tuple(Call(n, 0.1 + 0.02 * n, alone=n > 4) for n in range(1, 9))
    return Calls(
        recorded=recorded,
        num_workers=num_workers,
        fixed_s=0.1,
        per_sample_s=0.02,
        warm_ups=warm_ups,
    )


def test_a_response_is_judged_as_the_recorded_one_of_its_prompt_that_is_nearest() -> None:
    checks = RecordedChecks({7: [check(100, 3.0, timed_out=True), check(10, 0.02)]}, None)
    assert checks.check(7, 30, 0.5).seconds == 0.02  # type: ignore[union-attr]
    assert checks.check(7, 90, 0.5).timed_out  # type: ignore[union-attr]
    assert checks.check(8, 12, 0.5).seconds == 0.02  # type: ignore[union-attr]
    assert RecordedChecks({}, None).check(7, 30, 0.5) is None


def test_no_call_is_longer_than_what_was_seen_for_its_size() -> None:
    recorded = RecordedCalls(calls())
    drawn = [recorded.call_s(n, luck / 10, alone=False) for n in (1, 8, 16) for luck in range(10)]
    assert min(drawn) == pytest.approx(0.12)
    assert max(drawn) == pytest.approx(0.1 + 16 * 0.02)


class Port:
    """The port on a clock of its own, for responses of 10 tokens."""

    def __init__(self, checks: RecordedChecks, num_samples: int) -> None:
        self.clock = VirtualClock()
        workload = Workload.from_pools({0: [10]}, max_response_tokens=99, samples_per_prompt=8)
        cost = StepCost(launch_s=0.1, bytes_s=0, per_cached_token_s=0, per_sequence_s=0)
        machine = Machine(latency=MeasuredModel(step=cost), gpus=1, prompt_tokens=0)
        responses = Responses(workload)
        self.samples = [SampleId(PromptId("a", 0, 0), n, 0) for n in range(num_samples)]
        responses.keys = {sample: n for n, sample in enumerate(self.samples)}
        responses.lengths = [10] * num_samples
        self.port = RecordedRewards(
            self.clock, machine, workload, responses, None, checks, lambda: False
        )
        self.said: list[tuple[float, SampleScored]] = []

    def ask(self, *numbers: int, timeout_s: float | None = None) -> None:
        obey = self.port.routes()[Score]
        for number in numbers:
            obey(Score(sample=self.samples[number], timeout_s=timeout_s))

    def run(self, last: int) -> list[float]:
        """Until so many verdicts were given; their times."""

        def take(event: Event) -> None:
            assert isinstance(event, SampleScored)
            self.said.append((self.clock.time_s, event))
            if len(self.said) == last:
                self.clock.stop()

        self.clock.run(take)
        return [time_s for time_s, _ in self.said]


ONE = {0: [check(10, 0.2)]}


def test_what_is_asked_for_at_once_is_one_call() -> None:
    port = Port(RecordedChecks(ONE, calls()), 5)
    port.ask(0, 1, 2, 3, 4)
    assert port.run(5) == pytest.approx([0.2] * 5, abs=1e-5)


@pytest.mark.parametrize(("num_workers", "second_s"), [(1, 0.24), (2, 0.12)])
def test_calls_wait_for_a_worker(num_workers: int, second_s: float) -> None:
    port = Port(RecordedChecks(ONE, calls(num_workers)), 2)
    port.ask(0)
    port.clock.after(1e-4, SampleScored(time_s=0.0, sample=port.samples[0], value=None))
    port.run(1)
    port.clock._stopped = False
    port.ask(1)
    assert port.run(3)[1:] == pytest.approx([0.12, second_s], abs=1e-3)


def test_the_first_call_warms_up() -> None:
    port = Port(RecordedChecks(ONE, calls(warm_ups=(5.0,))), 1)
    port.ask(0)
    assert port.run(1) == pytest.approx([5.0], abs=1e-5)
    warm = Port(RecordedChecks(ONE, calls(warm_ups=(5.0,)), warm=True), 1)
    warm.ask(0)
    assert warm.run(1) == pytest.approx([0.12], abs=1e-5)


def test_a_cancelled_check_is_answered_once() -> None:
    port = Port(RecordedChecks(ONE, calls()), 3)
    port.ask(0, 1, 2)
    port.port.routes()[CancelScore](CancelScore(samples=(port.samples[1],)))
    port.run(3)
    assert [(event.sample.index, event.cause) for _, event in port.said] == [
        (1, "cancelled"),
        (0, ""),
        (2, ""),
    ]


def test_a_check_of_its_own_keeps_its_worker_and_meets_the_deadline_of_now() -> None:
    checks = RecordedChecks({0: [check(10, 0.5, timed_out=True)]}, None)
    port = Port(checks, 1)
    port.ask(0, timeout_s=2.0)
    assert port.run(1) == pytest.approx([2.01])
    event = port.said[0][1]
    assert (event.seconds, event.value, event.timed_out) == (2.0, 0.0, True)
