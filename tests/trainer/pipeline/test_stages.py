"""A model in pipeline stages gives the gradient of the whole one, in whatever order its ops run."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import SampleId
from rollpacker.pipeline.plan.choosers import ReadyFirst
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.crossing import pack, unpack
from rollpacker.pipeline.stages.cut import Absent, Place, cut
from rollpacker.pipeline.stages.executor import Executor
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.sharding import Shards, full_tensors
from rollpacker.trainer.trainer import NonFiniteError, TokenScores, TrainConfig, TrainerError
from tests.trainer import test_partition as partition
from tests.trainer.families import FAMILIES, new_model
from tests.trainer.pipeline.stages import RandomOrder, in_stages
from tests.trainer.test_partition import CASES, Case, Partition, assert_equal
from tests.trainer.tiny import TEMPERATURE, samples, tiny_model

Gradients = dict[str, dict[str, Tensor]]
Scores = Mapping[SampleId, TokenScores]
PPO = "ppo, [('whiten', False), ('kl_coef', 0.1)]"
"""Policy, reference and critic cross every border."""
BUILDING = threading.Lock()
"""Models are drawn from torch's only generator."""


def of_stage(
    stage: Stage | None,
    case: Case,
    how: Partition,
    scores: Scores,
    shards: Shards | None = None,
    pause: Callable[[], None] = lambda: None,
) -> tuple[Gradients, StepOutcome]:
    """The gradient of this stage's parameters (on the first of its shards); without a stage, of the
    whole model's. Scores are asked for in as many parts as there are calls, before each."""
    with BUILDING:
        learner = partition.learner_of(case, how, shards, stage=stage)
    groups = partition.step_groups()
    rank, size = (0, 1) if shards is None else (shards.rank, shards.size)
    requests = partition.requests_of(groups)[rank::size] if case.algorithm.needs_scores else []
    draw = None if how.seed is None else random.Random(how.seed)
    calls = list(partition.calls_of(groups, case, how, scores))
    for number, call in enumerate(calls):
        pause()
        if asked := requests[number :: len(calls)]:
            found = learner.score(asked)
            assert len(found) == (len(asked) if stage is None or stage.place.is_last else 0)
            for request, of_sample in zip(asked, found, strict=False):
                assert_same(of_sample, scores[request.sample])
        pause()
        if isinstance(call, float):
            learner.rescale(call)
        else:
            learner.accumulate(partition.dealt(call, size, draw)[rank])
    outcome = learner.apply()
    return partition.first_moments(learner, shards), outcome


@lru_cache
def scores_of(name: str, num_layers: int) -> Scores:
    case = case_of(name, num_layers)
    learner = partition.learner_of(case, Partition())
    return partition.scores_of(learner, partition.step_groups(), case, None, None)


def case_of(name: str, num_layers: int) -> Case:
    return dataclasses.replace(CASES[name], num_layers=num_layers)


def assert_same(found: TokenScores, expected: TokenScores) -> None:
    for field in dataclasses.fields(TokenScores):
        wanted = getattr(expected, field.name)
        assert getattr(found, field.name) == (
            None if wanted is None else pytest.approx(wanted, rel=1e-10, abs=1e-12)
        )


def union(parts: Sequence[Gradients]) -> Gradients:
    """Of all stages. No name is on two of them."""
    whole: Gradients = {}
    for part in parts:
        for model, gradients in part.items():
            assert not whole.get(model, {}).keys() & gradients.keys()
            whole.setdefault(model, {}).update(gradients)
    return whole


@pytest.mark.parametrize("layers", [(1, 1), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_gradient_of_the_whole_model(name, layers):
    """Whatever the loss asks for: scores, a reference, a teacher, a critic, adapters."""
    num_layers, draw = sum(layers), random.Random(name)
    case, scores = case_of(name, num_layers), scores_of(name, num_layers)
    whole, outcome = of_stage(None, case, Partition(), scores)
    early = 0 if case.algorithm.needs_whole_batch else 2
    for how in (
        Partition(layout="packed", budget=40),
        Partition(layout="sorted", budget=100, num_early=early, seed=draw.randrange(1000)),
    ):
        answers = in_stages(layers, lambda stage, how=how: of_stage(stage, case, how, scores))
        assert_equal(union([gradients for gradients, _ in answers]), whole)
        sums = answers[-1][1].sums
        assert sums.totals["loss"] == pytest.approx(outcome.sums.totals["loss"], rel=1e-10)
        assert sums.response_tokens == outcome.sums.response_tokens
        for _, of_one in answers:
            assert of_one.grad_norm == pytest.approx(outcome.grad_norm, rel=1e-10)
            critic_norm = outcome.critic_grad_norm or 0.0
            assert (of_one.critic_grad_norm or 0.0) == pytest.approx(critic_norm, rel=1e-10)


def at_random(layers: Sequence[int], how: Partition, seed: int) -> Gradients:
    """Ops in any order, and messages, calls and scoring at any time."""
    case, scores = case_of(PPO, 3), scores_of(PPO, 3)
    draw = random.Random(seed)
    answers = in_stages(
        layers,
        lambda stage: of_stage(
            stage, case, how, scores, pause=lambda: time.sleep(draw.choice((0.0, 0.0, 0.01)))
        ),
        new_chooser=lambda stage: RandomOrder(seed * 10 + stage),
        delay=lambda: draw.choice((0.0, 0.0, 0.003)),
    )
    return union([gradients for gradients, _ in answers])


@pytest.mark.parametrize("layers", [(2, 1), (1, 1, 1)], ids=str)
def test_no_order_and_no_delay_changes_a_bit(layers):
    how = Partition(layout="packed", budget=40)
    first = at_random(layers, how, 0)
    for seed in range(1, 16):
        again = at_random(layers, how, seed)
        for model, gradients in first.items():
            for name, gradient in gradients.items():
                assert torch.equal(again[model][name], gradient), (seed, model, name)


def updated(
    stage: Stage | None,
    *,
    num_updates: int,
    tied: bool = False,
    budget: int = 40,
    checkpointing: bool = False,
    shards: Shards | None = None,
) -> dict[str, Tensor]:
    """Weights and optimizer state of a bfloat16 model; of several shards, on the first."""
    with BUILDING:
        model = tiny_model(dtype=torch.bfloat16, num_layers=3, tied=tied)
    learner = Learner(
        model=model,
        tokenizer=None,
        pad_token_id=0,
        config=TrainConfig(
            steps=3,
            learning_rate=1e-2,
            betas=(0.0, 0.9),  # the first moment is the last gradient, clipped
            micro_batch_tokens=budget,
            max_grad_norm=0.05,
            gradient_sync="step",  # as with stages by default
        ),
        algorithm=AlgorithmConfig(),
        temperature=TEMPERATURE,
        total_steps=3,
        gradient_checkpointing=checkpointing,
        stage=stage,
        shards=shards,
    )
    rank, size = (0, 1) if shards is None else (shards.rank, shards.size)
    for seed in range(num_updates):
        learner.accumulate(samples(seed)[rank::size])
        learner.apply()
    state = learner.trained["actor"].optimizer.state()
    found = dict(full_tensors([*state.items(), *model.named_parameters()], shards))
    return {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_bfloat16_model_is_updated_as_in_one_process(checkpointing):
    """The gradients of its micro-batches are summed in float32, and all stages clip alike."""
    how = {"num_updates": 3, "checkpointing": checkpointing}
    whole = updated(None, **how)
    parts = in_stages((1, 1, 1), lambda stage: updated(stage, **how))
    found = {name: value for part in parts for name, value in part.items()}
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7, msg=name)


def test_a_tied_bfloat16_weight_is_updated_by_both_stages_gradients():
    """Each stage sums its own in float32; one process adds the two of a micro-batch in bfloat16."""
    whole = updated(None, num_updates=1, tied=True)
    parts = in_stages((1, 1, 1), lambda stage: updated(stage, num_updates=1, tied=True))
    mirror = parts[-1].pop("lm_head.weight")
    assert torch.equal(mirror, parts[0]["model.embed_tokens.weight"])
    found = {name: value for part in parts for name, value in part.items()}
    assert found.keys() == whole.keys()
    moments = [name for name in whole if name.startswith("exp_avg.")]
    (embedding,) = (name for name in moments if "embed" in name)
    bound = 2**-7 * whole[embedding].abs().max().item()
    torch.testing.assert_close(found[embedding], whole[embedding], rtol=0, atol=bound)
    # All gradients are clipped by one factor, and the tied weight's share of the norm differs by
    # its bfloat16 rounding (how much depends on the processor's kernels); nothing else differs.
    norm = math.hypot(*(whole[name].norm().item() for name in moments))
    off = (found[embedding] - whole[embedding]).norm().item() / norm
    name = moments[-1]
    factor = (found[name].norm() / whole[name].norm()).item()
    assert abs(factor - 1) <= 1.01 * off + 1e-6
    for name in moments:
        if name != embedding:
            torch.testing.assert_close(found[name], factor * whole[name], rtol=2e-6, atol=1e-9)


def test_parts_of_other_stages_are_freed_and_names_stay():
    whole = tiny_model(num_layers=4)
    names = {name for name, _ in whole.named_parameters()}
    seen: set[str] = set()
    for index in range(2):
        model = tiny_model(num_layers=4).eval()
        alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        cut(model, Place(index=index, count=2), (3, 1))
        gc.collect()
        here = {name for name, _ in model.named_parameters()}
        left = {name for name, parameter in alive.items() if parameter() is not None}
        assert left == {name.replace("lm_head", "model.embed_tokens") for name in here}
        assert not here & seen
        seen |= here
    assert seen == names | {"lm_head.weight"}
    assert "model.layers.3.mlp.up_proj.weight" in here


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_can_be_cut(family):
    for index in range(2):
        cut(new_model(family), Place(index=index, count=2), (1, 1))


def test_a_model_whose_stages_do_not_reproduce_it_is_refused():
    """Its second layer uses something of the first besides the hidden states."""
    model = tiny_model().eval()
    first, second = model.model.layers
    box: list[Tensor] = []
    first.register_forward_hook(lambda _module, _inputs, output: box.append(output))
    second.register_forward_hook(lambda _m, _inputs, output: output + (box.pop() if box else 0))
    with pytest.raises(ValueError, match=r"model\.layers\.1 does not give in stage 1 what"):
        cut(model, Place(index=1, count=2), (1, 1))


@pytest.mark.parametrize(
    ("layers", "why"),
    [((1, 2), "adds up to 3"), ((2, 0), "every stage needs"), ((2,), "a number for each of 2")],
)
def test_layers_that_do_not_fit_are_refused(layers, why):
    with pytest.raises(ValueError, match=rf"train\.pipeline\.layers=.*{why}"):
        cut(tiny_model().eval(), Place(index=0, count=2), layers)


def test_more_stages_than_layers_are_refused():
    policy = Policy(tiny_model().eval())
    with pytest.raises(ValueError, match="3 stages need as many layers, and the model has 2"):
        in_stages((0, 0, 0), lambda stage: stage.policy(policy), given=())


def test_stages_have_about_the_same_work_unless_told_otherwise():
    """The output layer counts as well, so that the last stage has fewer layers."""

    def layers_of(stage: Stage) -> int:
        with BUILDING:
            model = tiny_model(num_layers=5)
        policy = stage.policy(Policy(model.eval()))
        return sum(type(layer) is not Absent for layer in policy.model.model.layers)

    assert in_stages((0, 0), layers_of, given=()) == [3, 2]


def test_fewer_micro_batches_than_stages_are_warned_of_once(caplog):
    case, how = case_of("grpo", 2), Partition()

    def run(stage: Stage) -> None:
        with BUILDING:
            learner = partition.learner_of(case, how, stage=stage)
        for _ in range(2):
            learner.accumulate(partition.built(partition.step_groups(), case, {})[0])
            learner.apply()

    in_stages((1, 1), run)
    warned = [text for text in caplog.messages if "pipeline stages" in text]
    assert len(warned) == 1 and "at least 50 % of such" in warned[0]


def test_a_loss_that_is_not_finite_is_named_on_all_stages():
    """Once more, micro-batch by micro-batch; afterwards the stages work on."""
    case = case_of("grpo", 2)
    bad = partition.built(partition.step_groups(), case, {})[0]
    broken = dataclasses.replace(
        bad[4], rollout_log_probs=(math.nan,) * len(bad[4].response_tokens)
    )

    def run(stage: Stage) -> str:
        with BUILDING:
            learner = partition.learner_of(case, Partition(layout="packed", budget=40), stage=stage)
        with pytest.raises(NonFiniteError) as error:
            learner.accumulate([*bad[:4], broken, *bad[5:]])
            learner.apply()
        learner.accumulate(bad)
        assert math.isfinite(learner.apply().grad_norm)
        return str(error.value)

    first, last = in_stages((1, 1), run)
    assert "not finite in another process" in first
    assert f"samples: {broken.sample}" in last


class Silent:
    """An end of a link that loses everything."""

    def send(self, number: int, tensor: Tensor) -> None:
        pass


class Counting:
    """Ops of a stage that only note what they were."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, float | None]] = []

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None:
        return self._note("F", micro_batch, arrived)

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None:
        return self._note("I", micro_batch, arrived)

    def weights(self, micro_batch: int) -> None:
        self._note("W", micro_batch, None)

    def _note(self, kind: str, micro_batch: int, arrived: Tensor | None) -> Tensor:
        self.done.append((kind, micro_batch, None if arrived is None else arrived.item()))
        return torch.tensor(float(micro_batch))


LOAD = Load(tokens=5)


def test_a_stage_that_nothing_reaches_says_so():
    executor = Executor(Place(index=1, count=2), timeout_s=0.05)
    executor.connect(None, Silent())
    with pytest.raises(TrainerError, match="nothing has reached pipeline stage 1 for"):
        executor.sweep([LOAD] * 2, Counting(), ReadyFirst(1))


def test_a_lost_link_ends_a_sweep_that_waits():
    executor = Executor(Place(index=1, count=2), timeout_s=60)
    executor.connect(None, Silent())
    executor.fail(TrainerError("the link is lost"))
    with pytest.raises(TrainerError, match="the link is lost"):
        executor.sweep([LOAD] * 2, Counting(), ReadyFirst(1))


def test_what_the_next_sweep_sends_early_waits_for_it():
    executor = Executor(Place(index=1, count=2), timeout_s=60)
    executor.connect(None, Silent())
    for number, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        executor.arrive("F", number, torch.tensor(value))
    ops = Counting()
    executor.sweep([LOAD], ops)
    executor.sweep([LOAD] * 2, ops, ReadyFirst(1))
    executor.sweep([LOAD], ops)
    scored, *trained, again = ops.done
    assert scored == ("F", 0, 1.0) and again == ("F", 0, 4.0)
    assert [(k, m) for k, m, _ in trained] == [
        *(("F", 0), ("I", 0), ("F", 1), ("I", 1)),
        *(("W", 0), ("W", 1)),
    ]
    assert [value for kind, _, value in trained if kind == "F"] == [2.0, 3.0]


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float64]], ids=str)
def test_what_is_packed_is_unpacked(dtypes):
    tensors = [torch.randn(1, 3, 5).to(dtype) for dtype in dtypes]
    found = unpack(pack(tensors), [(one.shape, one.dtype) for one in tensors])
    for one, other in zip(found, tensors, strict=True):
        assert torch.equal(one, other)
