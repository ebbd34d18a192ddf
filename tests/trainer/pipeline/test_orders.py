"""Every `train.pipeline.order` in sweeps with gradients, and the budget that stages choose."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch

from rollpacker.core.packs import plan_packs
from rollpacker.pipeline.plan.choosers import ORDERS, Op, Order, StageState, live_token_caps
from rollpacker.pipeline.plan.order import orders_to_csv
from rollpacker.pipeline.plan.plan import plan_1f1b
from rollpacker.pipeline.plan.split import plan_budget
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.work import (
    Link,
    Load,
    Measured,
    OpCost,
    StageCost,
    Work,
    constant,
)
from rollpacker.pipeline.sim.phase import Pipeline, PipelineMachine
from rollpacker.pipeline.sim.spec import PipelineSpec
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.orders import (
    NewChooser,
    Orders,
    SweepChooser,
)
from rollpacker.pipeline.stages.overseer import Arrangement
from rollpacker.pipeline.stages.stage import Stage, expected
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.trainer import PipelineConfig, TrainConfig, TrainerError
from tests.trainer import test_partition as partition
from tests.trainer.pipeline.stages import ReadyOrder, ThreadPeers, in_stages
from tests.trainer.pipeline.test_stages import (
    BUILDING,
    PPO,
    Gradients,
    case_of,
    of_stage,
    scores_of,
    union,
)
from tests.trainer.test_partition import Partition, assert_equal
from tests.trainer.tiny import tiny_model

Found = tuple[Gradients, list[Order]]
LAYERS = (1, 1, 1)
KL = "grpo, [('kl_coef', 0.3)]"
BUDGET = 20
CSV = "plan.csv"
SLOW = Measured(
    stages=tuple(
        StageCost(*(OpCost(fixed_s=part / 100, per_token_s=part) for part in parts))
        for parts in ((1.0, 1.5, 0.5), (1.0, 1.0, 1.0), (0.5, 2.0, 1.0))
    ),
    links=(Link(120.0), Link(15.0)),
    bytes_per_token=0.0,
)
"""Stages that differ, and links that take some micro-batches' time."""


class Recorded:
    """A chooser that notes what it chose."""

    def __init__(self, chooser: SweepChooser, ops: list[Op]) -> None:
        self._chooser, self._ops = chooser, ops

    def add(self, loads: Sequence[Load]) -> None:
        self._chooser.add(loads)

    def choose(self, state: StageState) -> Op | None:
        op = self._chooser.choose(state)
        self._ops += [] if op is None else [op]
        return op


def orders_of(
    config: PipelineConfig, seen: list[list[Op]] | None = None, csv: str | None = None
) -> Callable[[Place, ThreadPeers], NewChooser]:
    """For `in_stages`. What each stage ran goes to `seen`."""

    def of(place: Place, peers: ThreadPeers) -> NewChooser:
        made = Orders(place, config, peers=peers, csv=csv)
        ops = [] if seen is None else seen[place.index]
        return lambda _measured: Recorded(made.new_chooser(SLOW), ops)

    return of


def lengths() -> list[int]:
    """Tokens of each sample that go through the model."""
    groups = partition.step_groups()
    return [len(r.prompt_tokens) + len(r.tokens) - 1 for group in groups for r, _ in group]


def num_micro_batches() -> int:
    return len(plan_packs(lengths(), BUDGET))


def gradient_in(order: str, live_tokens: int | Literal["auto"] = "auto") -> Found:
    """Of one sweep whose messages come when they will, and what the stages ran."""
    case, scores = case_of(PPO, len(LAYERS)), scores_of(PPO, len(LAYERS))
    how, draw = Partition(layout="packed", budget=BUDGET), random.Random(order)
    csv = orders_to_csv(plan_1f1b(len(LAYERS), num_micro_batches())) if order == CSV else None
    config = PipelineConfig(stages=len(LAYERS), order=order, live_tokens=live_tokens)
    seen: list[list[Op]] = [[] for _ in LAYERS]
    answers = in_stages(
        LAYERS,
        lambda stage: of_stage(stage, case, how, scores)[0],
        orders=orders_of(config, seen, csv),
        delay=lambda: draw.choice((0.0, 0.0, 0.003)),
    )
    return union(answers), [tuple(ops) for ops in seen]


@lru_cache
def in_order(order: str) -> Found:
    return gradient_in(order)


@pytest.mark.parametrize("order", [*ORDERS[:-1], CSV])
def test_no_order_changes_a_bit(order: str) -> None:
    ready, _ = in_order("ready")
    found, _ = in_order(order)
    for model, gradients in ready.items():
        for name, gradient in gradients.items():
            assert torch.equal(found[model][name], gradient), (model, name)


@pytest.mark.parametrize("live_tokens", ["auto", 80])
@pytest.mark.parametrize("order", ORDERS[:-1])
def test_stages_run_what_the_simulator_plans_for_the_same_costs(
    order: str, live_tokens: int | Literal["auto"]
) -> None:
    _, ran = in_order(order) if live_tokens == "auto" else gradient_in(order, live_tokens)
    loads = [Load.of([lengths()[row] for row in pack]) for pack in plan_packs(lengths(), BUDGET)]
    delays = {number: link.latency_s for number, link in enumerate(SLOW.links)}
    spec = PipelineSpec(
        stages=len(LAYERS),
        order=order,
        links="host",
        slow_links_s=delays,
        micro_batch_tokens=BUDGET,
    )
    machine = PipelineMachine(
        costs=SLOW.stages,
        layers=LAYERS,
        caps=tuple(
            live_token_caps(
                live_tokens,
                num_stages=len(LAYERS),
                longest=max(load.tokens for load in loads),
            )
        ),
        num_replicas=1,
        stage_gpus=1,
        bytes_per_token=0.0,
    )
    step = Pipeline(spec, machine).train(lengths(), 0.0)
    assert step.num_micro_batches == len(loads) > 2 * len(LAYERS)
    assert list(step.slowest.orders) == ran


def test_orders_differ_and_a_file_is_run_as_it_is_written() -> None:
    """So that the tests above compare something."""
    ran = {order: tuple(in_order(order)[1]) for order in ORDERS[:-1]}
    assert len(set(ran.values())) == len(ran)
    assert in_order(CSV)[1] == plan_1f1b(len(LAYERS), num_micro_batches())


# -- what cannot be run ----------------------------------------------------------------


class Alone:
    """Peers of a stage that is the only one."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]


def choosers(
    order: str, num_stages: int, csv: str | None = None, **settings: Any
) -> list[SweepChooser]:
    """Of all stages, each with nobody to compare with."""
    config = PipelineConfig(stages=num_stages, order=order, **settings)
    places = [Place(index=index, count=num_stages) for index in range(num_stages)]
    cost = OpCost(per_token_s=1.0)
    known = Measured(
        stages=(StageCost(cost, cost, cost),) * num_stages,
        links=(Link(),) * (num_stages - 1),
        bytes_per_token=0.0,
    )
    return [Orders(p, config, peers=Alone(), csv=csv).new_chooser(known) for p in places]


def test_a_plan_for_another_number_of_micro_batches_is_refused() -> None:
    csv = orders_to_csv(plan_1f1b(2, 12))
    chooser, _ = choosers(CSV, 2, csv)
    chooser.add([])
    with pytest.raises(
        ValueError,
        match=r"order=plan\.csv is a plan for 12 micro-batches, and a sweep has 9 of them.*"
        r"train\.micro_batch_tokens",
    ):
        chooser.add([Load(tokens=5)] * 9)
    chooser.add([Load(tokens=5)])  # has but one order, whatever is planned for more
    state = StageState(0, 2, tokens=[5])
    assert chooser.choose(state) == Op("F", 0)


def test_a_plan_that_needs_more_live_tokens_is_refused_with_what_it_needs() -> None:
    first, _, last = choosers("1f1b", 3, live_tokens=30)
    for chooser in (first, last):  # all stages say the same
        with pytest.raises(
            ValueError,
            match=r"order=1f1b keeps activations of 36 tokens on stage 0, and "
            r"train\.pipeline\.live_tokens=30 leaves room for 30: set it to 36",
        ):
            chooser.add([Load(tokens=n) for n in (10, 12, 14, 10, 12, 10)])
    hoarding = "\n".join(
        ",".join(f"{s}{kind}{m}" for kind in "FIW" for m in range(9)) for s in range(2)
    )
    with pytest.raises(ValueError, match=r"live_tokens=auto leaves room for 40: set it to 90"):
        choosers(CSV, 2, hoarding)[0].add([Load(tokens=10)] * 9)
    for order in ("zero-bubble", "adapted", "ready"):
        with pytest.raises(ValueError, match="live_tokens=9 is less than a micro-batch of 10"):
            choosers(order, 2, live_tokens=9)[0].add([Load(tokens=10)])


@pytest.mark.parametrize("order", [*ORDERS[:-1], CSV])
def test_plans_stay_below_the_cap_of_every_stage(order: str) -> None:
    """auto: two of the largest micro-batches for each stage from this one to the last."""
    rng = random.Random(order)
    loads = [Load(tokens=rng.randint(1, 100)) for _ in range(12)]
    csv = orders_to_csv(plan_1f1b(3, 12)) if order == CSV else None
    longest = max(load.tokens for load in loads)
    for stage, chooser in enumerate(choosers(order, 3, csv)):
        chooser.add(loads)
        state = StageState(stage, 3)
        state.add([load.tokens for load in loads])
        state.close()
        while not state.finished:
            while state.num_f_arrived < 12:
                state.arrive("F")
            while state.num_i_arrived < 12:
                state.arrive("I")
            op = chooser.choose(state)
            assert op is not None
            state.done(op)
        assert state.peak_live_tokens <= 2 * (3 - stage) * longest


@pytest.mark.parametrize("order", [*ORDERS, CSV])
def test_portions_of_an_open_sweep_are_planned_one_after_the_other(order: str) -> None:
    """Also where stages get behind: what was added is run before what comes."""
    csv = orders_to_csv(plan_1f1b(2, 3)) if order == CSV else None
    made = choosers(order, 2, csv)
    portions = [[Load(tokens=4), Load(tokens=9), Load(tokens=5)] for _ in range(3)]
    for chooser in made:
        for portion in portions:
            chooser.add(portion)
    loads = [load for portion in portions for load in portion]
    work = Work.of(SLOW.stages[:2], loads)
    added_s = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 900.0, 900.0, 900.0]
    timeline = run(made, work, constant([Link(7.0)]), added_s=added_s)
    if order != "ready":
        for order_of_stage in timeline.orders:
            assert [op.micro_batch // 3 for op in order_of_stage] == [0] * 9 + [1] * 9 + [2] * 9


@pytest.mark.parametrize("order", ORDERS[:-1])
def test_streamed_samples_are_planned_as_they_come(order: str) -> None:
    """While stages still work on those before; scores are asked for in between."""
    case, scores = case_of(KL, 3), scores_of(KL, 3)
    config = PipelineConfig(stages=3, order=order)
    how = Partition(layout="packed", budget=BUDGET, num_early=3, seed=1)
    found = in_stages(
        LAYERS, lambda stage: of_stage(stage, case, how, scores)[0], orders=orders_of(config)
    )
    assert_equal(union(found), of_stage(None, case, Partition(), scores)[0])


def test_stages_with_different_plans_stop_and_are_named() -> None:
    """One stage believes that it is fast."""
    config = PipelineConfig(stages=3, order="adapted")
    wrong = dataclasses.replace(SLOW, stages=(SLOW.stages[0],) * 3)
    errors: list[str] = []

    def orders(place: Place, peers: ThreadPeers) -> NewChooser:
        made = Orders(place, config, peers=peers)
        return lambda _measured: made.new_chooser(wrong if place.index == 1 else SLOW)

    def run_stage(stage: Stage) -> None:
        with BUILDING:
            learner = partition.learner_of(
                case_of("grpo", 3), Partition(layout="packed", budget=BUDGET), stage=stage
            )
        with pytest.raises(TrainerError) as error:
            learner.accumulate(partition.built(partition.step_groups(), case_of("grpo", 3), {})[0])
        errors.append(str(error.value))

    in_stages(LAYERS, run_stage, orders=orders)
    assert len(errors) == 3
    for error in errors:
        assert "planned different sweeps (train.pipeline.order=adapted): stage 1 another" in error


def test_plans_reckon_with_what_was_measured_last_and_before_that_with_flops() -> None:
    known: list[Measured] = []
    case = case_of("grpo", 3)

    def orders(place: Place, _peers: ThreadPeers) -> NewChooser:
        def new_chooser(measured: Measured) -> ReadyOrder:
            known.extend([measured] if place.is_first else [])
            return ReadyOrder(place.index)

        return new_chooser

    def run_stage(stage: Stage) -> None:
        with BUILDING:
            learner = partition.learner_of(case, Partition(), stage=stage)
        for measured in (None, SLOW):
            stage.arrange(Arrangement(links="host", measured=measured))
            learner.accumulate(partition.built(partition.step_groups(), case, {})[0])
            learner.apply()

    in_stages(LAYERS, run_stage, orders=orders)
    assert known == [expected(FlopModel.of(tiny_model(num_layers=3)), LAYERS), SLOW]
    assert len(known[0].links) == 2 and len({stage.f.per_target_s for stage in known[0].stages}) > 1


def test_a_name_of_no_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order is .gpipe.\. Known: 1f1b, "):
        PipelineConfig(stages=2, order="gpipe")


# -- micro_batch_tokens: auto ----------------------------------------------------------


def budget_of(rows: Sequence[int], num_stages: int, most: int = 4096) -> int:
    """Of a model with eight layers."""
    flops = FlopModel.of(tiny_model(num_layers=8))
    cost = expected(flops, [8 // num_stages] * num_stages)
    return plan_budget(rows, cost.stages, cost.links, most_tokens=most)


def test_a_deeper_pipeline_has_smaller_micro_batches() -> None:
    rng = random.Random(1)
    rows = [rng.randint(50, 800) for _ in range(48)]
    chosen = [budget_of(rows, stages) for stages in (1, 2, 4, 8)]
    assert chosen == sorted(chosen, reverse=True) and chosen[-1] < chosen[0] / 2
    assert all(count <= 4096 for count in chosen)
    assert budget_of([], 2) == 4096
    # More than enough of the largest ones: nothing is to be had from smaller ones.
    assert budget_of(rows * 40, 2) > 2048


def test_the_budget_depends_on_lengths_alone() -> None:
    """Not on what was measured, nor on the order of the rows."""
    rng = random.Random(2)
    rows = [rng.randint(50, 800) for _ in range(48)]
    chosen = []

    def run_stage(stage: Stage) -> None:
        with BUILDING:
            policy = Policy(tiny_model(num_layers=3).eval())
        stage.policy(policy)
        chosen.append(stage.budget(rows, plan_packs, most_tokens=4096))
        stage.measured = SLOW
        chosen.append(stage.budget(rows[::-1], plan_packs, most_tokens=4096))

    in_stages(LAYERS, run_stage)
    assert len(chosen) == 6 and len(set(chosen)) == 1


@pytest.mark.parametrize("layout", ["packed", "sorted"])
def test_auto_gives_the_gradient_of_the_whole_model(layout: str) -> None:
    case = case_of("grpo", 3)
    whole, _ = of_stage(None, case, Partition(), {})
    how = Partition(layout=layout, budget="auto")  # type: ignore[arg-type]
    found = in_stages(LAYERS, lambda stage: of_stage(stage, case, how, {}))
    assert_equal(union([gradients for gradients, _ in found]), whole)
    alone, outcome = of_stage(None, case, how, {})
    assert_equal(alone, whole)
    assert outcome.sums.micro_batches == 1, "all fits into one micro-batch of the default size"


def test_auto_has_room_for_the_longest_sample_and_heeds_a_cap() -> None:
    train = TrainConfig(steps=1, micro_batch_tokens="auto")
    assert train.most_micro_batch_tokens() == 4096
    assert train.most_micro_batch_tokens(9000) == 9000
    capped = dataclasses.replace(
        train, processes=2, pipeline=PipelineConfig(stages=2, live_tokens=3000)
    )
    assert capped.most_micro_batch_tokens(9000) == 3000
    given = TrainConfig(steps=1, micro_batch_tokens=512)
    assert given.most_micro_batch_tokens(9000) == 512
    with pytest.raises(ValueError, match="micro_batch_tokens must be at least 1, not 0"):
        TrainConfig(steps=1, micro_batch_tokens=0)
