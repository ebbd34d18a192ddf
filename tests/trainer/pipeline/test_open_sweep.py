"""A sweep that takes micro-batches, and scoring, while others are under way."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollpacker.pipeline.plan.choosers import Op, StageState
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.executor import Executor, OpenSweep
from rollpacker.pipeline.stages.orders import Ready
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.trainer.trainer import NonFiniteError, PipelineConfig, TrainerError
from tests.trainer import test_partition as partition
from tests.trainer.pipeline.stages import ReadyOrder, in_stages
from tests.trainer.pipeline.test_stages import (
    BUILDING,
    LOAD,
    PPO,
    Counting,
    Silent,
    at_random,
    case_of,
    of_stage,
    scores_of,
)
from tests.trainer.test_partition import Partition

STREAMED = Partition(layout="packed", budget=40, num_early=2, seed=5)


@pytest.mark.parametrize(
    ("layers", "seeds"), [((2, 1), range(15)), ((1, 1, 1), range(15, 30))], ids=str
)
def test_portions_that_come_at_any_time_change_no_bit(layers, seeds):
    """30 random orders and delays of everything, with scoring in between."""
    case = case_of(PPO, 3)
    calls = partition.calls_of(partition.step_groups(), case, STREAMED, scores_of(PPO, 3))
    assert [type(call) for call in calls] == [list, list, float, list, list]
    first = at_random(layers, STREAMED, 30)
    for seed in seeds:
        again = at_random(layers, STREAMED, seed)
        for model, gradients in first.items():
            for name, gradient in gradients.items():
                assert torch.equal(again[model][name], gradient), (seed, model, name)


def first_stage() -> tuple[Executor, Callable[[int], None]]:
    """Of two; and what gives it this many gradients of those that it waits for."""
    executor = Executor(Place(index=0, count=2), timeout_s=60)
    executor.connect(Silent(), None)
    given = iter(range(1000))

    def arrive(count: int) -> None:
        for _ in range(count):
            executor.arrive("I", next(given), torch.tensor(0.0))

    return executor, arrive


def test_scoring_and_later_micro_batches_wait_for_no_backward():
    executor, arrive = first_stage()
    trained, scored = Counting(), Counting()
    sweep = executor.open(trained, ReadyOrder(0))
    sweep.add([LOAD] * 2)
    sweep.forward(scored, 3)  # returns, though no gradient has come
    assert [kind for kind, _, _ in trained.done] == ["F", "F"]
    sweep.add([LOAD] * 2)
    sweep.add([LOAD])
    arrive(5)
    sweep.forward(scored, 0)
    sweep.drain()
    assert [number for _, number, _ in scored.done] == [0, 1, 2]
    for wanted in ("F", "I", "W"):
        assert [number for kind, number, _ in trained.done if kind == wanted] == list(range(5))
    assert executor.clock.take(0, 1, {}).peak_live_tokens == 5 * LOAD.tokens
    assert executor.clock.take(0, 1, {}).peak_live_tokens == 0


def test_what_arrives_early_is_taken_in_the_order_of_the_calls():
    executor = Executor(Place(index=1, count=2), timeout_s=60)
    executor.connect(None, Silent())
    for number in range(6):
        executor.arrive("F", number, torch.tensor(float(number)))
    trained, scored = Counting(), Counting()
    sweep = executor.open(trained, ReadyOrder(1))
    sweep.add([LOAD])
    sweep.add([LOAD])
    sweep.forward(scored, 2)
    sweep.add([LOAD])
    sweep.drain()
    executor.sweep([LOAD], scored)
    assert [value for kind, _, value in trained.done if kind == "F"] == [0.0, 1.0, 4.0]
    assert [value for _, _, value in scored.done] == [2.0, 3.0, 5.0]


def test_forwards_of_one_call_at_most_wait_behind_those_of_another():
    """The cap keeps the second call's from beginning, and the third call waits for them."""
    executor, arrive = first_stage()
    trained = Counting()
    config = PipelineConfig(stages=2, live_tokens=2 * LOAD.tokens)
    sweep = executor.open(trained, Ready(Place(index=0, count=2), config))
    for _ in range(2):
        sweep.add([LOAD] * 2)
    third = threading.Thread(target=sweep.add, args=([LOAD] * 2,))
    third.start()
    until = time.monotonic() + 60
    while len(trained.done) < 2:
        assert time.monotonic() < until
        time.sleep(0.001)
    third.join(0.1)
    assert third.is_alive() and [kind for kind, _, _ in trained.done] == ["F", "F"]
    arrive(2)
    third.join()
    arrive(4)
    sweep.drain()
    assert executor.clock.take(0, 1, {}).peak_live_tokens == 2 * LOAD.tokens


class Failing(Counting):
    def weights(self, micro_batch: int) -> None:
        raise OSError(f"no room for W{micro_batch}")


def ended(sweep: OpenSweep) -> None:
    sweep._thread.join(60)
    assert not sweep._thread.is_alive()


def test_what_goes_wrong_between_two_calls_is_raised_by_the_next():
    for call in (
        lambda sweep: sweep.add([LOAD]),
        lambda sweep: sweep.forward(Counting(), 1),
        lambda sweep: sweep.drain(),
    ):
        executor, arrive = first_stage()
        sweep = executor.open(Failing(), ReadyOrder(0))
        sweep.add([LOAD])
        arrive(1)
        ended(sweep)
        with pytest.raises(OSError, match="no room for W0"):
            call(sweep)


def test_a_lost_link_ends_a_sweep_that_waits_for_more():
    executor, _ = first_stage()
    sweep = executor.open(Counting(), ReadyOrder(0))
    executor.fail(TrainerError("the link is lost"))
    ended(sweep)
    with pytest.raises(TrainerError, match="the link is lost"):
        sweep.add([LOAD])


def test_a_call_that_waits_hears_of_a_lost_link():
    executor, _ = first_stage()
    sweep = executor.open(Counting(), ReadyOrder(0))
    threading.Timer(0.05, executor.fail, [TrainerError("the link is lost")]).start()
    with pytest.raises(TrainerError, match="the link is lost"):
        sweep.add([LOAD])
        sweep.drain()  # the gradient never comes


def test_time_without_anything_to_do_is_not_waiting():
    """Neither as a reason to give up nor in what is told of a step's speed."""
    executor = Executor(Place(index=0, count=1), timeout_s=0.02)
    executor.connect(None, None)
    sweep = executor.open(Counting(), ReadyOrder(0))
    began = time.perf_counter()
    for _ in range(2):
        time.sleep(0.5)
        sweep.add([LOAD])
    sweep.drain()
    assert sweep.seconds < time.perf_counter() - began - 0.6


class Chosen(ReadyOrder):
    """Notes which micro-batches it has been told of when it is asked."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.num_told = 0

    def add(self, loads: object) -> None:
        self.num_told += len(loads)  # type: ignore[arg-type]

    def choose(self, state: StageState) -> Op | None:
        assert self.num_told >= len(state.tokens)
        return super().choose(state)


def test_the_cap_of_live_tokens_is_never_exceeded():
    """Counted by the stages, over a streamed step."""
    case, scores = case_of("grpo", 2), scores_of("grpo", 2)
    for cap in (50, 90):
        config = PipelineConfig(stages=2, live_tokens=cap)
        answers = in_stages(
            (1, 1),
            lambda stage: of_stage(stage, case, STREAMED, scores),
            new_chooser=lambda stage, config=config: Ready(Place(index=stage, count=2), config),
        )
        for _, outcome in answers:
            assert 0 < outcome.stage_times.peak_live_tokens <= cap


def test_a_chooser_is_told_before_it_is_asked():
    case, scores = case_of("grpo", 2), scores_of("grpo", 2)
    in_stages((1, 1), lambda stage: of_stage(stage, case, STREAMED, scores), new_chooser=Chosen)


class Slow(ReadyOrder):
    """Takes as long to be told of the second portion as the sweep to end the first."""

    def __init__(self, stage: int, is_over: threading.Event) -> None:
        super().__init__(stage)
        self._is_over = is_over
        self._num_added = 0

    def add(self, loads: object) -> None:
        self._num_added += 1
        assert self._num_added < 2 or self._is_over.wait(60)


class Ending(Counting):
    def __init__(self, is_over: threading.Event) -> None:
        super().__init__()
        self._is_over = is_over

    def weights(self, micro_batch: int) -> None:
        self._is_over.set()


def test_a_sweep_goes_on_while_more_is_planned():
    executor = Executor(Place(index=0, count=1), timeout_s=60)
    executor.connect(None, None)
    is_over = threading.Event()
    sweep = executor.open(Ending(is_over), Slow(0, is_over))
    sweep.add([LOAD])
    sweep.add([LOAD])
    sweep.drain()


def test_draining_in_the_middle_changes_no_bit():
    """Whoever looks at gradients in the middle of a step, and whoever drops it."""
    case = case_of("grpo", 2)
    samples = partition.built(partition.step_groups(), case, {})[0]

    def run(stage: Stage, looks: bool) -> dict[str, Tensor]:
        with BUILDING:
            learner = partition.learner_of(case, Partition(layout="packed", budget=40), stage=stage)
        if looks:
            learner.accumulate(samples[:3])
            learner.discard()
        learner.accumulate(samples[:6])
        if looks:
            assert set(learner.gradients()) == set(learner.trained["actor"].optimizer.gradients())
        learner.rescale(0.5)
        learner.accumulate(samples[6:])
        outcome = learner.apply()
        assert outcome.sums.micro_batches > 3 or not stage.place.is_last
        return partition.first_moments(learner, None)["actor"]

    plain, looked = (
        in_stages((1, 1), lambda stage, looks=looks: run(stage, looks)) for looks in (False, True)
    )
    for one, other in zip(plain, looked, strict=True):
        for name, gradient in one.items():
            assert torch.equal(other[name], gradient), name


def test_a_streamed_loss_that_is_not_finite_is_named_by_apply():
    case = case_of("grpo", 2)
    samples = partition.built(partition.step_groups(), case, {})[0]
    broken = dataclasses.replace(
        samples[1], rollout_log_probs=(math.nan,) * len(samples[1].response_tokens)
    )

    def run(stage: Stage) -> str:
        with BUILDING:
            learner = partition.learner_of(case, Partition(layout="packed", budget=40), stage=stage)
        learner.accumulate([samples[0], broken, samples[2]])
        learner.rescale(2.0)
        learner.accumulate(samples[3:])
        with pytest.raises(NonFiniteError) as error:
            learner.apply()
        learner.accumulate(samples)
        assert math.isfinite(learner.apply().grad_norm)
        return str(error.value)

    first, last = in_stages((1, 1), run)
    assert "not finite in another process" in first and f"samples: {broken.sample}" in last
