"""A step's gradient is one number per weight, however its samples are dealt out: over processes,
micro-batches and calls, in any order, all at once or begun before the step was complete.

In float64, so that only a mistake can be larger than the tolerance.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollpacker.algo import ALGORITHMS, AlgorithmConfig, policy_loss, value_loss
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import Response
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.run.ports.training import common_factor
from rollpacker.trainer.critic import from_policy_model
from rollpacker.trainer.frozen import FrozenPolicy
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.lora import adapter_parameters, add_adapter
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.sharding import Shards, full_tensors
from rollpacker.trainer.trainer import (
    CriticConfig,
    LoraConfig,
    ScoreRequest,
    TokenScores,
    TrainConfig,
    TrainSample,
)
from tests.trainer.ranks import Ranks
from tests.trainer.tiny import TEMPERATURE, responses, tiny_model

TOLERANCE = 1e-10
"""Of the largest gradient of a model."""
MAX_RESPONSE_TOKENS = 30
WHOLE = 1_000_000
"""A budget that one micro-batch of all samples does not exceed."""

OWN = Path(__file__).parents[2] / "examples" / "algorithm" / "own.py"

Groups = list[list[tuple[Response, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how its loss is made."""

    algorithm: AlgorithmConfig
    lora: bool = False
    num_layers: int = 2
    critic: CriticConfig = dataclasses.field(
        default_factory=lambda: CriticConfig(max_grad_norm=None)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How a step's samples are dealt out."""

    size: int = 1
    replicas: int = 1
    """With several, some calls are to one of them alone."""
    layout: str = "sorted"
    budget: int = WHOLE
    gradient_sync: str = "step"
    num_early: int = 0
    """Groups whose gradient is begun before the step is known."""
    seed: int | None = None
    """Of owners, calls and orders. None: one call, in order."""


CASES: dict[str, Case] = {
    **{name: Case(algorithm=AlgorithmConfig(name=name)) for name in ALGORITHMS},
    **{
        f"{name}, {list(switches.items())}": Case(algorithm=AlgorithmConfig(name=name, **switches))
        for name, switches in [
            ("grpo", {"kl_coef": 0.3}),
            ("grpo", {"old_logprobs": "rollout", "loss_aggregation": "sequence-mean-token-mean"}),
            ("grpo", {"entropy_coef": 0.1, "mask_truncated": True}),
            ("gspo", {"old_logprobs": "rollout"}),
            ("rloo", {"old_logprobs": "rollout", "clip_dual": 3.0}),
            ("rloo", {"kl_coef": 0.2, "kl_in": "reward"}),
            ("cispo", {"mismatch_correction": "sequence-truncate"}),
            ("dapo", {"mismatch_correction": "token-mask", "overlong_buffer_tokens": 10}),
            ("reinforce_pp", {"normalize_mean": "none", "normalize_std": "none", "whiten": False}),
            ("ppo", {"whiten": False, "kl_coef": 0.1}),
            ("distillation", {"whiten": False, "mask_truncated": True}),
        ]
    },
    **{
        f"outside, {list(functions)}": Case(
            algorithm=AlgorithmConfig(
                name="rloo",
                importance_ratio="token",
                clip_high=0.28,
                old_logprobs="rollout",
                **functions,
            )
        )
        for functions in (
            {"advantage_function": f"{OWN}:leave_one_out", "loss_function": f"{OWN}:clipped"},
            {},
        )
    },
    "lora": Case(algorithm=AlgorithmConfig(kl_coef=0.3, old_logprobs="rollout"), lora=True),
}


@lru_cache
def step_groups() -> Groups:
    """Four groups of three; some responses were cut off. The engine's log-probs are near the
    trainer's, so that some ratios are clipped and others are not."""
    groups = responses(1)
    model = exact_model()
    move(model)
    flat = [response for group in groups for response, _ in group]
    with torch.no_grad():
        log_probs, _ = direct_log_probs(model, flat)
    draw = torch.Generator().manual_seed(2)
    for row, response in enumerate(flat):
        own = log_probs[row, : len(response.tokens)]
        noise = 0.3 * torch.randn(len(own), generator=draw, dtype=own.dtype)
        reason = "length" if len(response.tokens) % 4 == 0 else "stop"
        flat[row] = dataclasses.replace(
            response, log_probs=tuple((own + noise).tolist()), finish_reason=reason
        )
    found = iter(flat)
    return [[(next(found), reward) for _, reward in group] for group in groups]


def learner_of(
    case: Case,
    partition: Partition,
    shards: Shards | None = None,
    config: TrainConfig | None = None,
    stage: Stage | None = None,
) -> Learner:
    """Policy, reference, teacher and critic all differ, and none of their gradients is zero."""
    model = exact_model(num_layers=case.num_layers)
    critic = None
    if case.algorithm.needs_critic:
        critic = from_policy_model(exact_model(3, num_layers=case.num_layers))
        torch.nn.init.constant_(critic.value_head.weight, 0.3)
    teacher = None
    if case.algorithm.needs_teacher:
        teacher = FrozenPolicy(exact_model(5, num_layers=case.num_layers))
    if case.lora:
        add_adapter(model, LoraConfig(rank=2))
        torch.manual_seed(4)
        for parameter in adapter_parameters(model).values():
            torch.nn.init.normal_(parameter, std=0.2)
    learner = Learner(
        model=model,
        tokenizer=None,
        pad_token_id=0,
        config=config
        or TrainConfig(
            steps=1,
            learning_rate=1e-3,
            betas=(0.0, 0.9),  # the optimizer's first moment is then the gradient
            max_grad_norm=None,
            micro_batch_tokens=partition.budget,
            micro_batches=partition.layout,  # type: ignore[arg-type]
            gradient_sync=partition.gradient_sync,  # type: ignore[arg-type]
            critic=case.critic,
        ),
        algorithm=case.algorithm,
        temperature=TEMPERATURE,
        total_steps=1,
        critic=critic,
        teacher=teacher,
        shards=shards,
        stage=stage,
    )
    move(learner.model)
    return learner


def exact_model(seed: int = 0, *, num_layers: int = 2, tied: bool = True) -> torch.nn.Module:
    """float64 throughout: transformers' own norms go through float32, so that even a gradient's
    scale would show in the eighth digit."""
    model = tiny_model(seed, num_layers=num_layers, tied=tied)
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):
            exact = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            model.set_submodule(name, exact.to(module.weight))
    return model


@torch.no_grad()
def move(model: torch.nn.Module) -> None:
    """Away from the reference, by the same on every rank."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.mul_(1.1)


def dealt(rows: Sequence[Any], size: int, draw: random.Random | None) -> list[list[Any]]:
    """Shares of each rank, some of them empty."""
    if draw is None:
        return [list(rows), *([] for _ in range(size - 1))]
    shares: list[list[Any]] = [[] for _ in range(size)]
    for row in draw.sample(list(rows), len(rows)):
        shares[draw.randrange(size)].append(row)
    return shares


def scores_of(
    learner: Learner,
    groups: Groups,
    case: Case,
    shards: Shards | None,
    draw: random.Random | None,
    *,
    always: bool = False,
) -> dict[SampleId, TokenScores]:
    if not (always or case.algorithm.needs_scores):
        return {}
    requests = requests_of(groups)
    rank, size = (0, 1) if shards is None else (shards.rank, shards.size)
    share = dealt(requests, size, draw)[rank]
    mine = {r.sample: s for r, s in zip(share, learner.score(share), strict=True)}
    if shards is None:
        return mine
    all_scores: list[Any] = [None] * size
    dist.all_gather_object(all_scores, mine)
    return {sample: scores for part in all_scores for sample, scores in part.items()}


def requests_of(groups: Groups) -> list[ScoreRequest]:
    return [
        ScoreRequest(sample=r.sample, prompt_tokens=r.prompt_tokens, response_tokens=r.tokens)
        for group in groups
        for r, _ in group
    ]


def calls_of(
    groups: Groups, case: Case, partition: Partition, scores: Mapping[SampleId, TokenScores]
) -> Iterator[list[TrainSample] | float]:
    """What the trainer is told: samples to accumulate, or a factor to rescale with."""
    draw = None if partition.seed is None else random.Random(partition.seed)
    early = [] if draw is None else draw.sample(groups, partition.num_early)
    streamed: dict[SampleId, TrainSample] = {}
    for part in split(early, draw):
        samples, _ = built(part, case, scores, partial=True)
        streamed |= {sample.sample: sample for sample in samples}
        yield samples
    samples, _ = built(groups, case, scores)
    if streamed:
        yield common_factor(samples, streamed)
    yield from split([s for s in samples if s.sample not in streamed], draw)


def built(
    groups: Groups, case: Case, scores: Mapping[SampleId, TokenScores], *, partial: bool = False
) -> tuple[list[TrainSample], Mapping[str, float]]:
    return build_train_samples(
        groups,
        case.algorithm,
        scores=scores,
        partial=partial,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )


def built_with(
    groups: Groups,
    case: Case,
    scores: Mapping[SampleId, TokenScores],
    updates: Sequence[int] | None,
) -> tuple[list[TrainSample], Mapping[str, float]]:
    """The same of a step with several updates."""
    return build_train_samples(
        groups,
        case.algorithm,
        scores=scores,
        updates=updates,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )


def split(rows: Sequence[Any], draw: random.Random | None) -> list[list[Any]]:
    """One or two parts, in a new order."""
    if draw is None or len(rows) < 2:
        return [list(rows)] if rows else []
    shuffled, cut = draw.sample(list(rows), len(rows)), draw.randrange(len(rows))
    return [part for part in (shuffled[:cut], shuffled[cut:]) if part]


def gradients(
    shards: Shards | None, case: Case, partition: Partition
) -> tuple[dict[str, dict[str, Tensor]], float]:
    """By model and parameter, on rank 0; and this rank's share of the loss."""
    learner = learner_of(case, partition, shards)
    draw = None if partition.seed is None else random.Random(partition.seed)
    groups = step_groups()
    scores = scores_of(learner, groups, case, shards, draw)
    rank, size = (0, 1) if shards is None else (shards.rank, shards.size)
    for call in calls_of(groups, case, partition, scores):
        if isinstance(call, float):
            learner.rescale(call)
            continue
        called = range(size)
        if draw is not None and draw.random() < 0.7:
            share, replica = size // partition.replicas, draw.randrange(partition.replicas)
            called = range(replica * share, (replica + 1) * share)
        shares = dealt(call, len(called), draw)
        if rank in called:
            learner.accumulate(shares[called.index(rank)])
    outcome = learner.apply()
    return first_moments(learner, shards), outcome.sums.totals["loss"]


def first_moments(learner: Learner, shards: Shards | None) -> dict[str, dict[str, Tensor]]:
    """By model and parameter, on rank 0: the gradients of the only update so far."""
    found = {}
    for name, trained in learner.trained.items():
        moments = {
            n.removeprefix("exp_avg."): value
            for n, value in trained.optimizer.state().items()
            if n.startswith("exp_avg.")
        }
        found[name] = {n: v.clone() for n, v in full_tensors(moments.items(), shards)}
    return found


def assert_equal(
    found: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]]
) -> None:
    assert found.keys() == expected.keys()
    for model, wanted in expected.items():
        assert found[model].keys() == wanted.keys()
        largest = max(value.abs().max().item() for value in wanted.values())
        assert largest > 1e-6
        for name, value in wanted.items():
            assert found[model][name].dtype == torch.float64
            difference = (found[model][name] - value).abs().max().item()
            assert difference < TOLERANCE * largest, (model, name, difference, largest)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, timeout_s=180.0) as started:
        yield started


def partitions(case: Case, *sizes: tuple[int, int]) -> st.SearchStrategy[Partition]:
    """Each of the sizes is of processes and replicas."""
    return st.builds(
        lambda size, **settings: Partition(size=size[0], replicas=size[1], **settings),
        size=st.sampled_from(sizes),
        layout=st.sampled_from(["sorted", "packed"]),
        budget=st.sampled_from([1, 40, 100, WHOLE]),
        gradient_sync=st.sampled_from(["step", "micro-batch"]),
        num_early=st.just(0) if case.algorithm.needs_whole_batch else st.integers(0, 4),
        seed=st.integers(0, 2**16),
    )


@pytest.mark.parametrize("name", CASES)
def test_any_partition_gives_the_gradient_of_the_whole(name, ranks):
    case = CASES[name]
    whole, loss = gradients(None, case, Partition())

    @settings(deadline=None, max_examples=3, database=None)
    @given(partition=partitions(case, (1, 1), (2, 1), (4, 1)))
    def check(partition: Partition) -> None:
        answers = ranks.run(partition.size, gradients, case, partition)
        assert_equal(answers[0][0], whole)
        assert sum(part for _, part in answers) == pytest.approx(loss, rel=1e-10, abs=1e-12)

    check()


@pytest.mark.parametrize("name", ["grpo", "ppo, [('whiten', False), ('kl_coef', 0.1)]", "lora"])
def test_replicas_that_accumulate_alone_give_the_gradient_of_the_whole(name, ranks):
    """A critic and adapters, too."""
    case = CASES[name]
    whole, loss = gradients(None, case, Partition())

    @settings(deadline=None, max_examples=4, database=None)
    @given(partition=partitions(case, (2, 2), (4, 2), (4, 4)))
    def check(partition: Partition) -> None:
        answers = ranks.run(partition.size, gradients, case, partition, replicas=partition.replicas)
        assert_equal(answers[0][0], whole)
        assert sum(part for _, part in answers) == pytest.approx(loss, rel=1e-10, abs=1e-12)

    check()


def test_functions_from_outside_give_the_gradient_of_the_same_ones_inside(ranks):
    """In one process and in two, begun early or not."""
    outside, inside = (CASES[name] for name in CASES if name.startswith("outside"))
    wanted, loss = gradients(None, inside, Partition())
    for partition in (Partition(), Partition(size=2, budget=40, num_early=2, seed=1)):
        answers = ranks.run(partition.size, gradients, outside, partition)
        assert_equal(answers[0][0], wanted)
        assert sum(part for _, part in answers) == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_whole_gradient_is_that_of_a_direct_computation(name):
    """Padded [N, T] tensors, transformers' own logits with a mask, autograd."""
    case = CASES[name]
    assert_equal(gradients(None, case, Partition())[0], directly(case))


def directly(case: Case) -> dict[str, dict[str, Tensor]]:
    learner = learner_of(case, Partition())
    config, model = case.algorithm, learner.model
    groups = step_groups()
    flat = [response for group in groups for response, _ in group]
    mask = torch.zeros(len(flat), MAX_RESPONSE_TOKENS, dtype=torch.bool)
    for row, response in enumerate(flat):
        mask[row, : len(response.tokens)] = True

    def padded(values: Sequence[Sequence[float]]) -> Tensor:
        table = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        for row, numbers in enumerate(values):
            table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return table

    scores = {} if not config.needs_scores else direct_scores(case, flat)
    samples, _ = built(groups, case, scores)
    log_probs, entropy = direct_log_probs(model, flat)
    reference = None
    if config.kl_coef > 0 and config.kl_in == "loss":
        with torch.no_grad():
            reference, _ = direct_log_probs(exact_model(), flat)
    rollout = padded([response.log_probs for response in flat])
    advantages = padded(
        [
            s.advantage
            if isinstance(s.advantage, tuple)
            else (s.advantage,) * len(s.response_tokens)
            for s in samples
        ]
    )
    counted = torch.tensor([s.token_weight > 0 for s in samples])
    loss, _ = policy_loss(
        log_probs,
        log_probs.detach() if config.old_logprobs == "recomputed" else rollout,
        advantages,
        mask & counted[:, None],
        config=config,
        ref_logprobs=reference,
        rollout_logprobs=rollout,
        entropy=entropy,
    )
    found = {"actor": autograd(loss, model)}
    if config.needs_critic:
        critic = learner.critic
        values = direct_values(critic, flat)
        old = padded([s.values for s in samples])
        returns = padded([s.returns for s in samples])
        of_token = value_loss(values[mask], old[mask], returns[mask], config=config).per_token
        found["critic"] = autograd(of_token.mean(), critic)  # PPO's row says token-mean
    return found


def autograd(loss: Tensor, module: torch.nn.Module) -> dict[str, Tensor]:
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def padded_inputs(flat: Sequence[Response]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and attention mask [N, W], and of each response token [N, T] the position that
    predicts it and itself."""
    width = max(len(r.prompt_tokens) + len(r.tokens) for r in flat)
    ids = torch.zeros(len(flat), width, dtype=torch.long)
    attention = torch.zeros_like(ids)
    positions = torch.zeros(len(flat), MAX_RESPONSE_TOKENS, dtype=torch.long)
    targets = torch.zeros_like(positions)
    for row, r in enumerate(flat):
        prompt, end = len(r.prompt_tokens), len(r.prompt_tokens) + len(r.tokens)
        ids[row, :end] = torch.tensor([*r.prompt_tokens, *r.tokens])
        attention[row, :end] = 1
        positions[row, : len(r.tokens)] = torch.arange(prompt - 1, end - 1)
        targets[row, : len(r.tokens)] = torch.tensor(r.tokens)
    return ids, attention, positions, targets


def direct_log_probs(model: torch.nn.Module, flat: Sequence[Response]) -> tuple[Tensor, Tensor]:
    """[N, T] each, NaN beyond a response."""
    ids, attention, positions, targets = padded_inputs(flat)
    logits = model.eval()(input_ids=ids, attention_mask=attention).logits / TEMPERATURE
    table = logits.log_softmax(-1)[torch.arange(len(flat))[:, None], positions]
    return table.gather(-1, targets[..., None])[..., 0], -(table.exp() * table).sum(-1)


def direct_values(critic: Any, flat: Sequence[Response]) -> Tensor:
    ids, attention, positions, _ = padded_inputs(flat)
    hidden = critic.model(input_ids=ids, attention_mask=attention).last_hidden_state
    return critic.value_head(hidden)[torch.arange(len(flat))[:, None], positions, 0]


@torch.no_grad()
def direct_scores(case: Case, flat: Sequence[Response]) -> dict[SampleId, TokenScores]:
    learner = learner_of(case, Partition())
    config = case.algorithm
    columns: dict[str, Tensor] = {"log_probs": direct_log_probs(learner.model, flat)[0]}
    if config.reference_in_scores:
        columns["ref_log_probs"] = direct_log_probs(exact_model(), flat)[0]
    if config.needs_teacher:
        columns["teacher_log_probs"] = direct_log_probs(exact_model(5), flat)[0]
    if config.needs_critic:
        columns["values"] = direct_values(learner.critic, flat)
    return {
        r.sample: TokenScores(
            **{name: tuple(v[row, : len(r.tokens)].tolist()) for name, v in columns.items()}
        )
        for row, r in enumerate(flat)
    }
