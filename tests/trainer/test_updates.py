"""Several optimizer steps per round, against a computation that shares no code with the package;
in float64, in one process and in two."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollpacker.algo import AlgorithmConfig
from rollpacker.core.rounds.dynamic_sampling import updates_of
from rollpacker.run.ports.training import metrics_of_updates
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.outcome import StepOutcome, step_metrics
from rollpacker.trainer.sharding import Shards, full_tensors
from rollpacker.trainer.trainer import CriticConfig, TrainConfig
from tests.trainer.ranks import Ranks
from tests.trainer.test_partition import (
    Case,
    Partition,
    built_with,
    dealt,
    exact_model,
    learner_of,
    scores_of,
    step_groups,
)
from tests.trainer.tiny import TEMPERATURE

RATE, DECAY = 0.02, 0.1
UPDATES = TrainConfig(
    steps=4,
    updates_per_round=2,
    learning_rate=RATE,
    weight_decay=DECAY,
    max_grad_norm=0.5,
    micro_batch_tokens=100,
    critic=CriticConfig(learning_rate=RATE),
)
GRPO = AlgorithmConfig(name="grpo", clip_high=0.28)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout_s=180.0) as started:
        yield started


def round_of(
    shards: Shards | None, case: Case, config: TrainConfig = UPDATES
) -> tuple[list[StepOutcome], dict[str, Tensor]]:
    """This rank's outcomes of a round of two updates, and on rank 0 the weights after it."""
    learner: Learner = learner_of(case, Partition(), shards, config)
    rank, size = (0, 1) if shards is None else (shards.rank, shards.size)
    groups = step_groups()
    updates = updates_of(len(groups), config.updates_per_round)
    scores = scores_of(learner, groups, case, shards, None, always=True)
    samples, _ = built_with(groups, case, scores, updates)
    outcomes = []
    for update in range(config.updates_per_round):
        mine = [s for s in samples if updates[s.sample.prompt.row] == update]
        learner.accumulate(dealt(mine, size, None)[rank] if size == 1 else mine[rank::size])
        last = update == config.updates_per_round - 1
        outcomes.append(learner.apply() if last else learner.update())
    assert learner.version == 1
    named = full_tensors(learner.model.named_parameters(), shards)
    return outcomes, {name: value.detach().clone() for name, value in named}


def metrics_of(answers: list[tuple[list[StepOutcome], dict[str, Tensor]]]) -> list[dict]:
    return [step_metrics(outcomes, None) for outcomes in zip(*(a for a, _ in answers), strict=True)]


def by_hand() -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Plain torch: transformers' logits sample by sample, GRPO's and PPO's formulas, AdamW."""
    model = exact_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=RATE,
        betas=(0.9, 0.95),
        eps=1e-8,
    )

    def log_probs(response) -> Tensor:
        ids = torch.tensor([[*response.prompt_tokens, *response.tokens]])
        logits = model(input_ids=ids).logits[0, :-1] / TEMPERATURE
        chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return chosen[len(response.prompt_tokens) - 1 :]

    groups = step_groups()
    with torch.no_grad():
        old = {r.sample: log_probs(r) for group in groups for r, _ in group}
    metrics = []
    for update in (0, 1):
        mine = groups[update::2]
        tokens = sum(len(r.tokens) for group in mine for r, _ in group)
        loss = torch.zeros((), dtype=torch.float64)
        found = {"ratio": 0.0, "kl": 0.0, "low": 0.0, "high": 0.0}
        for group in mine:
            rewards = torch.tensor([reward for _, reward in group], dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for (response, _), advantage in zip(group, advantages.tolist(), strict=True):
                new = log_probs(response)
                ratio = (new - old[response.sample]).exp()
                of_token = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                loss = loss - of_token.sum() / tokens
                found["ratio"] += ratio.sum().item() / tokens
                found["kl"] += (old[response.sample] - new).sum().item() / tokens
                found["low"] += ((ratio < 0.8) & (advantage < 0)).sum().item() / tokens
                found["high"] += ((ratio > 1.28) & (advantage > 0)).sum().item() / tokens
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        metrics.append({**found, "loss": loss.item(), "norm": norm.item()})
    return metrics, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2])
def test_ratios_clips_and_weights_equal_an_own_computation(size, ranks):
    expected, weights = by_hand()
    assert expected[0]["ratio"] == pytest.approx(1) and expected[0]["high"] == 0
    assert expected[1]["low"] > 0 and expected[1]["high"] > 0, "clips act in the second update"
    case = Case(algorithm=GRPO)
    answers = [round_of(None, case)] if size == 1 else ranks.run(size, round_of, case)
    names = {
        "ratio": "actor/ratio/mean",
        "kl": "actor/ppo_kl",
        "low": "actor/clip_ratio_low",
        "high": "actor/clip_ratio_high",
        "loss": "actor/loss",
        "norm": "actor/grad_norm",
    }
    for found, wanted in zip(metrics_of(answers), expected, strict=True):
        for key, name in names.items():
            assert found[name] == pytest.approx(wanted[key], rel=1e-9, abs=1e-12), name
    assert answers[0][1].keys() == weights.keys()
    for name, value in answers[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "case",
    [
        Case(algorithm=dataclasses.replace(GRPO, kl_coef=0.1), lora=True),
        Case(algorithm=AlgorithmConfig(name="ppo")),
        Case(algorithm=AlgorithmConfig(name="grpo", mismatch_correction="token-truncate")),
        Case(algorithm=AlgorithmConfig(name="gspo", old_logprobs="rollout")),
    ],
    ids=["lora", "ppo", "mismatch", "rollout"],
)
def test_two_processes_do_what_one_does(case, ranks):
    whole = round_of(None, case)
    answers = ranks.run(2, round_of, case)
    first, second = (metrics_of(a) for a in ([whole], answers))
    for one, two in zip(first, second, strict=True):
        for name, value in one.items():
            if name.startswith(("actor/", "critic/", "sampling/")):
                assert two[name] == pytest.approx(value, rel=1e-7, abs=1e-10), name
    if case.algorithm.needs_critic:
        assert first[1]["critic/value_clip_ratio"] > first[0]["critic/value_clip_ratio"] == 0
    for name, value in answers[0][1].items():
        torch.testing.assert_close(value, whole[1][name], rtol=1e-6, atol=1e-8)


def test_each_update_has_its_own_denominators_and_old_log_probs():
    groups, case = step_groups(), Case(algorithm=GRPO)
    learner = learner_of(case, Partition(), None, UPDATES)
    scores = scores_of(learner, groups, case, None, None, always=True)
    samples, _ = built_with(groups, case, scores, updates_of(len(groups), 2))
    for update in (0, 1):
        mine = [s for s in samples if s.sample.prompt.row % 2 == update]
        total = sum(s.token_weight * len(s.response_tokens) for s in mine)
        assert total == pytest.approx(1)
        old = [s.old_log_probs for s in mine]
        expected = [None] * len(mine) if update == 0 else [scores[s.sample].log_probs for s in mine]
        assert old == expected
    whole, _ = built_with(groups, case, scores, None)
    assert [s.advantage for s in whole] == [s.advantage for s in samples]


def test_updates_are_dealt_out_in_turn():
    assert updates_of(6, 3) == (0, 1, 2, 0, 1, 2)
    assert updates_of(5, 2) == (0, 1, 0, 1, 0)
    assert updates_of(2, 4) == (0, 1) and updates_of(0, 4) == ()


def test_the_metrics_of_a_step_are_means_and_counts_sums():
    first = {"actor/loss": 1.0, "train/tokens": 3.0, "actor/ratio/mean": 1.0, "x/max": 5.0}
    second = {"actor/loss": 3.0, "train/tokens": 4.0, "actor/ratio/mean": 1.5, "x/max": 2.0}
    assert metrics_of_updates([first]) == first
    assert metrics_of_updates([first, second]) == {
        "actor/loss": 2.0,
        "train/tokens": 7.0,
        "x/max": 5.0,
        "actor/ratio/mean": 1.25,
        "actor/ratio/mean/update_1": 1.0,
        "actor/ratio/mean/update_2": 1.5,
        "train/updates": 2.0,
    }


@pytest.mark.parametrize("old", ["recomputed", "rollout"])
def test_engine_and_trainer_are_compared_under_the_same_weights(old):
    """The policy's way from update to update is no difference between the two."""
    case = Case(algorithm=dataclasses.replace(GRPO, old_logprobs=old))
    first, second = metrics_of([round_of(None, case)])
    metrics = metrics_of_updates([first, second])
    names = [name for name in first if "_logp_difference/" in name or "_sampling_ratio/" in name]
    assert len(names) == 6
    for name in names:
        assert metrics[name] == first[name] != second[name], name
    assert metrics["actor/entropy"] == (first["actor/entropy"] + second["actor/entropy"]) / 2


def test_a_round_of_two_updates_has_one_learning_rate_and_one_version():
    config = dataclasses.replace(UPDATES, schedule="linear")
    outcomes, _ = round_of(None, Case(algorithm=GRPO), config)
    assert outcomes[0].learning_rate == outcomes[1].learning_rate == RATE
