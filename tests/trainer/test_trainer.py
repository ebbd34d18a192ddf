"""The gradient of a step, checked against a plain padded implementation, and the step itself."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.engine import Response
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import NonFiniteError, TrainerError
from tests.trainer.tiny import (
    TEMPERATURE,
    gradient_of,
    largest,
    largest_difference,
    responses,
    samples,
    step,
    tiny_model,
    trainer,
)

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum")


def padded_grpo_gradient(model, groups, config: AlgorithmConfig, reference=None):
    """GRPO as one would write it first: everything in one padded batch, with an attention mask."""
    flat = [pair for group in groups for pair in group]
    width = max(len(r.prompt_tokens) + len(r.tokens) for r, _ in flat)
    ids = torch.zeros(len(flat), width, dtype=torch.long)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(flat), width - 1, dtype=torch.bool)
    rollout = torch.zeros(len(flat), width - 1, dtype=torch.float64)
    for i, (r, _) in enumerate(flat):
        prompt, end = len(r.prompt_tokens), len(r.prompt_tokens) + len(r.tokens)
        ids[i, :end] = torch.tensor([*r.prompt_tokens, *r.tokens])
        attention[i, :end] = 1
        mask[i, prompt - 1 : end - 1] = True
        rollout[i, prompt - 1 : end - 1] = torch.tensor(r.log_probs, dtype=torch.float64)
    advantages = []
    for group in groups:
        rewards = torch.tensor([reward for _, reward in group], dtype=torch.float64)
        centred = rewards - rewards.mean()
        advantages.append(
            centred / (rewards.std() + 1e-4) if config.normalize_std == "group" else centred
        )
    advantage = torch.cat(advantages)[:, None]

    def log_probs(m):
        logits = m(input_ids=ids, attention_mask=attention).logits[:, :-1] / TEMPERATURE
        return F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    lp = log_probs(model.eval())
    old = lp.detach() if config.old_logprobs == "recomputed" else rollout
    ratio = (lp - old).exp()
    loss = -torch.min(
        ratio * advantage,
        ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage,
    )
    if reference is not None:
        difference = log_probs(reference).detach() - lp
        loss = loss + config.kl_coef * (difference.exp() - difference - 1)
    lengths = mask.sum(1)
    sums = (loss * mask).sum(1)
    total = {
        "token-mean": sums.sum() / lengths.sum(),
        "sequence-mean-token-mean": (sums / lengths).mean(),
        "sequence-mean-token-sum": sums.mean(),
    }[config.loss_aggregation]
    model.zero_grad()
    total.backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return gradient, total.item()


@pytest.mark.parametrize("old_logprobs", ["recomputed", "rollout"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_and_loss_equal_the_padded_reference(aggregation, old_logprobs):
    config = AlgorithmConfig(loss_aggregation=aggregation, old_logprobs=old_logprobs)
    expected, loss = padded_grpo_gradient(tiny_model(), responses(1), config)
    t = trainer(algorithm=config)
    actual = gradient_of(t, [samples(1, config)])
    assert largest_difference(actual, expected) < 1e-10 * max(1, largest(expected))
    assert step(trainer(algorithm=config), samples(1, config))["actor/loss"] == pytest.approx(loss)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_engines_attention_gives_the_same_gradient(gradient_checkpointing):
    """Trainer and engine share one model; its attention takes no mask at all."""
    expected, _ = padded_grpo_gradient(tiny_model(), responses(1), AlgorithmConfig())
    model = tiny_model()
    install_attention(model)
    t = trainer(model, gradient_checkpointing=gradient_checkpointing)
    assert largest_difference(gradient_of(t, [samples(1)]), expected) < 1e-10


def test_kl_penalty_pulls_towards_the_model_that_the_run_began_with():
    config = AlgorithmConfig(kl_coef=0.3, normalize_std="none")
    model, reference = tiny_model(), tiny_model()
    t = trainer(model, algorithm=config)
    assert step(t, samples(2, config))["actor/kl"] == pytest.approx(0, abs=1e-12)
    expected, _ = padded_grpo_gradient(model, responses(3), config, reference.eval())
    actual = gradient_of(t, [samples(3, config)])
    assert largest_difference(actual, expected) < 1e-10
    without, _ = padded_grpo_gradient(model, responses(3), config)
    assert largest_difference(actual, without) > 1e-3


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_any_split_and_any_order_give_the_same_gradient(dtype, tolerance):
    batch = samples(4)
    one = gradient_of(trainer(tiny_model(dtype=dtype), micro_batch_tokens=10_000), [batch])
    for budget in (1, 40, 100):
        shuffled = random.Random(budget).sample(batch, len(batch))
        parts = [shuffled[:1], shuffled[1:6], shuffled[6:]]
        other = gradient_of(trainer(tiny_model(dtype=dtype), micro_batch_tokens=budget), parts)
        assert largest_difference(one, other) < tolerance


def test_arrival_order_within_a_call_changes_no_bit():
    batch = samples(4)
    model = tiny_model(dtype=torch.float32)
    one = gradient_of(trainer(model), [batch])
    other = gradient_of(trainer(tiny_model(dtype=torch.float32)), [batch[::-1]])
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpointed_layers_give_the_same_gradient_without_dropout():
    plain = gradient_of(trainer(), [samples(5)])
    model = tiny_model()
    checkpointed = gradient_of(trainer(model, gradient_checkpointing=True), [samples(5)])
    assert largest_difference(plain, checkpointed) < 1e-12
    assert not any(module.training for module in model.modules())


def test_metrics_of_a_step():
    batch = samples(6)
    metrics = step(trainer(micro_batch_tokens=64, max_grad_norm=None), batch)
    gradient = gradient_of(trainer(), [batch])
    norm = math.sqrt(sum((g**2).sum().item() for g in gradient.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm)
    assert metrics["actor/lr"] == 1e-2
    assert metrics["train/response_tokens"] == sum(len(s.response_tokens) for s in batch)
    real = sum(len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in batch)
    assert metrics["train/tokens"] == real <= metrics["train/padded_tokens"]
    assert metrics["train/micro_batches"] > 1
    assert 0 < metrics["actor/entropy"] <= math.log(23)
    assert metrics["actor/clip_ratio_low"] == metrics["actor/clip_ratio_high"] == 0
    off = metrics["sampling/sampling_logp_difference/max"]
    assert off >= metrics["sampling/sampling_logp_difference/mean"] > 0


def test_mismatch_is_zero_when_the_rollout_had_the_same_log_probs():
    model = tiny_model().eval()
    batch = []
    for s in samples(7):
        ids = torch.tensor([[*s.prompt_tokens, *s.response_tokens]])
        with torch.no_grad():
            table = F.log_softmax(model(input_ids=ids).logits[0, :-1] / TEMPERATURE, -1)
        lp = table.gather(-1, ids[0, 1:, None])[len(s.prompt_tokens) - 1 :, 0]
        batch.append(dataclasses.replace(s, rollout_log_probs=tuple(lp.tolist())))
    config = AlgorithmConfig(old_logprobs="rollout")
    metrics = step(trainer(model, algorithm=config), batch)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-12
    assert metrics["actor/clip_ratio_low"] == metrics["actor/clip_ratio_high"] == 0


def test_ratios_are_clipped_when_the_rollout_differs():
    config = AlgorithmConfig(old_logprobs="rollout")
    metrics = step(trainer(algorithm=config), samples(8, config))
    assert metrics["actor/clip_ratio_low"] > 0
    assert metrics["actor/clip_ratio_high"] > 0


def test_gradients_are_clipped_to_the_norm():
    """With a tiny epsilon Adam hides the gradient's scale; with a huge one the step shows it."""
    moved = []
    for limit in (1e-3, 1e-6):
        model = tiny_model()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        step(trainer(model, max_grad_norm=limit, eps=1e3), samples(9))
        moved.append(largest_difference(before, dict(model.named_parameters())))
    assert moved[0] == pytest.approx(1e3 * moved[1], rel=1e-3)


def test_weights_change_in_place():
    model = tiny_model()
    addresses = [p.data_ptr() for p in model.parameters()]
    t = trainer(model)
    before = t.learner.state_hashes()
    step(t, samples(0))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert t.learner.state_hashes()["weights"] != before["weights"]
    assert t.version == 1
    assert all(p.grad is None for p in model.parameters())


def test_training_raises_the_probability_of_what_is_rewarded():
    prompt, good = (7, 8), 5
    group = [
        (
            Response(
                sample=SampleId(PromptId("train", 0, 0), token, 0),
                prompt_tokens=prompt,
                tokens=(token,),
                log_probs=(0.0,),
                finish_reason="stop",
                version=0,
            ),
            float(token == good),
        )
        for token in range(23)
    ]
    batch, _ = build_train_samples([group], AlgorithmConfig())
    t = trainer(tiny_model(dtype=torch.float32), learning_rate=5e-3)

    def probability() -> float:
        with torch.no_grad():
            logits = t.learner.model(input_ids=torch.tensor([prompt])).logits[0, -1] / TEMPERATURE
        return logits.softmax(-1)[good].item()

    before = probability()
    for _ in range(8):
        step(t, batch)
    assert probability() > 3 * before


# --- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_non_finite_advantage_is_refused_by_name(advantage):
    t = trainer()
    step(t, samples(0))
    before = t.learner.state_hashes()
    batch = samples(1)
    batch[3] = dataclasses.replace(batch[3], advantage=advantage)
    with pytest.raises(NonFiniteError, match=str(batch[3].sample)):
        gradient_of(t, [batch])
    assert t.learner.state_hashes() == before and not t.learner.gradients()


def test_non_finite_loss_names_the_samples_and_changes_nothing():
    config = AlgorithmConfig(old_logprobs="rollout")
    t = trainer(algorithm=config)
    step(t, samples(0, config))
    before = t.learner.state_hashes()
    batch = samples(1, config)
    batch[5] = dataclasses.replace(
        batch[5], rollout_log_probs=(-math.inf,) * len(batch[5].response_tokens), advantage=-1.0
    )
    with pytest.raises(NonFiniteError, match=str(batch[5].sample)) as caught:
        gradient_of(t, [batch])
    assert str(batch[4].sample) not in str(caught.value)
    assert t.learner.state_hashes() == before and not t.learner.gradients()
    assert step(t, samples(1, config)) and t.version == 2


def test_non_finite_gradient_changes_nothing_and_leaves_the_next_step_alone():
    first, second = samples(0), samples(1)
    t, undisturbed = trainer(), trainer()
    for each in (t, undisturbed):
        step(each, first)
    before = t.learner.state_hashes()
    hook = t.learner.model.model.norm.weight.register_hook(lambda g: g * math.nan)
    with pytest.raises(NonFiniteError, match="norm"):
        step(t, second)
    hook.remove()
    assert t.learner.state_hashes() == before and not t.learner.gradients() and t.version == 1
    assert without_speed(step(t, second)) == without_speed(step(undisturbed, second))
    assert t.learner.state_hashes() == undisturbed.learner.state_hashes()


def without_speed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_apply_without_samples_is_refused():
    with pytest.raises(TrainerError, match="without a sample"):
        step(trainer(), [])


def test_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"train\.steps"):
        trainer(total_steps=None, schedule="linear")


# --- bfloat16 -------------------------------------------------------------------------------------


def test_bfloat16_keeps_updates_that_are_smaller_than_its_steps():
    model = tiny_model(dtype=torch.bfloat16)
    start = {n: p.detach().float() for n, p in model.named_parameters()}
    t = trainer(model, learning_rate=2e-5)
    for _ in range(30):
        step(t, samples(0))
    masters = {
        n.removeprefix("master."): m
        for n, m in t.learner.trained["actor"].optimizer.state().items()
        if "master" in n
    }
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
        assert torch.equal(weight, masters[name].bfloat16())
        # 30 steps of 2e-5 add up, although one of them is lost in a bfloat16 number like 0.2.
        assert (masters[name] - start[name]).abs().max() > 2e-4
    assert t.learner.state_hashes()["weights"]


def test_bfloat16_gradients_add_up_in_float32():
    batch = samples(4)
    model = tiny_model(dtype=torch.bfloat16)
    exact = gradient_of(trainer(tiny_model(dtype=torch.float32)), [batch])
    summed = gradient_of(trainer(model, micro_batch_tokens=1), [batch])
    assert all(g.dtype == torch.float32 for g in summed.values())
    assert all(p.grad is None for p in model.parameters())
    assert largest_difference(exact, summed) < 0.05 * largest(exact)


# --- repeatability --------------------------------------------------------------------------------


def test_two_runs_are_bit_identical():
    hashes = []
    for _ in range(2):
        t = trainer(tiny_model(dtype=torch.float32))
        for seed in range(3):
            step(t, samples(seed))
        hashes.append(t.learner.state_hashes())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_streamed_before_the_step_is_known_give_the_same_step(aggregation, dtype):
    """Some groups with provisional weights, a rescale, the rest: the gradient of one call."""
    config = AlgorithmConfig(loss_aggregation=aggregation)
    groups = responses(6, num_groups=6)
    whole, _ = build_train_samples(groups, config)
    early, _ = build_train_samples([groups[4], groups[1]], config, partial=True)
    of_whole = {sample.sample: sample for sample in whole}
    factors = {of_whole[s.sample].token_weight / s.token_weight for s in early}
    assert max(factors) == pytest.approx(min(factors), rel=1e-12)
    assert all(of_whole[s.sample].advantage == s.advantage for s in early)
    rest = [s for s in whole if s.sample not in {e.sample for e in early}]

    async def stream(t) -> None:
        for group in (early[:3], early[3:]):
            await t.accumulate(group)
        await t.rescale(next(iter(factors)))
        await t.accumulate(rest)

    one = trainer(tiny_model(dtype=dtype), algorithm=config)
    expected = gradient_of(one, [whole])
    other = trainer(tiny_model(dtype=dtype), algorithm=config)
    asyncio.run(stream(other))
    actual = other.learner.gradients()
    assert actual.keys() == expected.keys()
    # A bfloat16 model adds its gradients up in float32, but makes each in bfloat16.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    norm = sum(g.double().square().sum() for g in expected.values()).sqrt()
    difference = sum((actual[n].double() - g.double()).square().sum() for n, g in expected.items())
    assert difference.sqrt() / norm < tolerance
    metrics = [dict(asyncio.run(t.apply())) for t in (one, other)]
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "train/response_tokens"):
        expected_value = pytest.approx(metrics[0][name], rel=tolerance, abs=1e-8)
        assert metrics[1][name] == expected_value, name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_weights_multiply_the_samples_and_not_the_denominator(aggregation):
    config = AlgorithmConfig(loss_aggregation=aggregation)
    groups = responses(7, num_groups=3)
    plain, metrics = build_train_samples(groups, config)
    ones = [[1.0] * len(group) for group in groups]
    assert build_train_samples(groups, config, weights=ones) == (plain, metrics)
    weights = [[2.0 ** (index - 1) for index in range(len(group))] for group in groups]
    weighted, of_weighted = build_train_samples(groups, config, weights=weights)
    assert of_weighted == metrics
    flat = [weight for group in weights for weight in group]
    for sample, before, weight in zip(weighted, plain, flat, strict=True):
        assert sample == dataclasses.replace(
            before, token_weight=before.token_weight * weight, loss_weight=weight
        )
    # The gradient is the weighted sum of the samples' own.
    actual = gradient_of(trainer(algorithm=config), [weighted])
    expected: dict[str, torch.Tensor] = {}
    for sample, weight in zip(plain, flat, strict=True):
        for name, gradient in gradient_of(trainer(algorithm=config), [[sample]]).items():
            expected[name] = expected.get(name, 0) + weight * gradient
    assert largest_difference(actual, expected) < 1e-12
    with pytest.raises(ValueError, match="zip"):
        build_train_samples(groups, config, weights=weights[:1])


def test_rescaling_nothing_is_a_bug():
    with pytest.raises(AssertionError, match="nothing was accumulated"):
        asyncio.run(trainer().rescale(2.0))
