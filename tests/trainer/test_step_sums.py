"""Sums of a step's micro-batches against plain arithmetic over all tokens at once."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from rollpacker.trainer.batches import Row, collate
from rollpacker.trainer.step_sums import MicroBatchNumbers, StepSums

NORMS = {"grad_norm": 0.5, "learning_rate": 1e-3}


def micro_batch(seed: int, num_rows: int = 3) -> dict:
    """A micro-batch's made-up numbers."""
    draw = np.random.default_rng(seed)
    rows = [
        Row([5] * int(draw.integers(1, 5)), [6] * int(draw.integers(1, 9))) for _ in range(num_rows)
    ]
    batch = collate(rows, 0, torch.device("cpu"))
    num_tokens = len(batch.targets)

    def tokens(scale: float) -> torch.Tensor:
        return torch.from_numpy(draw.normal(size=num_tokens) * scale)

    return {
        "batch": batch,
        "loss": float(np.float32(draw.normal())),
        "entropy": tokens(1.0).abs(),
        "log_ratio": tokens(0.3),
        "update_log_ratio": tokens(0.1),
        "token_sums": {"kl": tokens(1.0).sum(), "clip_ratio_low": torch.tensor(2.0)},
        "sample_weights": draw.uniform(0.2, 3.0, size=num_rows).tolist(),
    }


def sums_of(parts: list[dict]) -> StepSums:
    sums = StepSums()
    add(sums, *parts)
    return sums


def add(sums: StepSums, *parts: dict) -> None:
    losses = ("loss", "value_loss")
    as_tensors = [
        {name: torch.tensor(v) if name in losses else v for name, v in part.items()}
        for part in parts
    ]
    assert sums.add([MicroBatchNumbers(**part) for part in as_tensors])


def test_metrics_are_means_over_all_tokens() -> None:
    parts = [micro_batch(seed) for seed in range(4)]
    metrics = sums_of(parts).metrics(**NORMS)
    difference, entropy, update = (
        np.concatenate([p[name] for p in parts])
        for name in ("log_ratio", "entropy", "update_log_ratio")
    )
    weights = np.concatenate([p["sample_weights"] for p in parts])
    expected = {
        "actor/loss": sum(p["loss"] for p in parts),
        "actor/grad_norm": 0.5,
        "actor/lr": 1e-3,
        "actor/entropy": entropy.mean(),
        "actor/ppo_kl": -update.mean(),
        "actor/ratio/mean": np.exp(update).mean(),
        "actor/kl": sum(p["token_sums"]["kl"].item() for p in parts) / len(entropy),
        "actor/clip_ratio_low": 8.0 / len(entropy),
        "sampling/sampling_logp_difference/mean": np.abs(difference).mean(),
        "sampling/sampling_logp_difference/max": np.abs(difference).max(),
        "sampling/sampling_logp_difference/outside": (np.abs(difference) > 0.2).mean(),
        "sampling/importance_sampling_ratio/mean": np.exp(difference).mean(),
        "sampling/importance_sampling_ratio/min": np.exp(difference).min(),
        "sampling/importance_sampling_ratio/max": np.exp(difference).max(),
        "train/weights/ess": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "train/response_tokens": len(entropy),
        "train/tokens": sum(p["batch"].num_tokens for p in parts),
        "train/padded_tokens": sum(p["batch"].input_ids.numel() for p in parts),
        "train/micro_batches": 4,
        "train/recomputed_micro_batches": 0,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_ranks_merge_into_the_step_of_one() -> None:
    parts = [micro_batch(seed) for seed in range(5)]
    parts[0]["log_ratio"][0] = 3.0
    parts[4]["log_ratio"][0] = -4.0  # so that largest and smallest are on two ranks
    whole = sums_of(parts)
    ranks = [pickle.loads(pickle.dumps(sums_of(some))) for some in (parts[:2], [], parts[2:])]
    merged = StepSums.merge(ranks)
    assert merged.metrics(**NORMS) == pytest.approx(whole.metrics(**NORMS), rel=1e-12)
    assert ranks[0].micro_batches == 2, "the parts stay as they are"


def test_speed_is_that_of_the_slowest_rank() -> None:
    ranks = []
    for seed, seconds in enumerate((2.0, 4.0)):
        sums = sums_of([micro_batch(seed) | {"flops": 1e9}])
        sums.seconds += seconds
        ranks.append(sums)
    merged = StepSums.merge(ranks)
    metrics = merged.metrics(**NORMS, peak_flops=1e9)
    assert metrics["perf/train_tokens_per_s"] == metrics["train/tokens"] / 4
    assert metrics["perf/mfu/actor"] == pytest.approx(2e9 / (4 * 2 * 1e9))
    assert "perf/mfu/actor" not in merged.metrics(**NORMS)


def test_scale_reaches_the_losses_so_far_and_nothing_else() -> None:
    first, second = micro_batch(0), micro_batch(1)
    sums = sums_of([first | {"value_loss": 3.0}])
    before = sums.metrics(**NORMS, critic_grad_norm=7.0)
    sums.scale(0.25)
    after = sums.metrics(**NORMS, critic_grad_norm=7.0)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"actor/loss", "critic/value_loss"}
    add(sums, second)
    assert sums.metrics(**NORMS)["actor/loss"] == pytest.approx(
        0.25 * first["loss"] + second["loss"]
    )


def test_critic_and_mismatch_metrics_have_their_own_names() -> None:
    part = micro_batch(3)
    num_tokens = len(part["batch"].targets)
    weights = torch.linspace(0.0, 2.0, num_tokens, dtype=torch.float64)
    part["token_sums"] = {
        "mismatch_weight": weights.sum(),
        "mismatch_weight_squared": weights.square().sum(),
        "mismatch_outside": torch.tensor(1.0),
    }
    part |= {"value_loss": 1.5, "value_token_sums": {"value_clip_ratio": torch.tensor(2.0)}}
    sums = sums_of([part])
    metrics = sums.metrics(**NORMS, critic_grad_norm=7.0)
    w = weights.numpy()
    assert metrics["sampling/ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert metrics["sampling/mismatch_outside"] == 1 / num_tokens
    assert metrics["critic/value_clip_ratio"] == 2 / num_tokens
    assert metrics["critic/value_loss"] == 1.5
    assert metrics["critic/grad_norm"] == 7.0
    assert not [name for name in metrics if "mismatch_weight" in name]


def test_what_there_is_not_is_left_out() -> None:
    part = micro_batch(0) | {"sample_weights": (), "update_log_ratio": None}
    metrics = sums_of([part]).metrics(**NORMS)
    assert metrics["actor/ppo_kl"] == 0
    for name in ("train/weights/ess", "sampling/ess", "perf/train_tokens_per_s"):
        assert name not in metrics
    assert not [name for name in metrics if name.startswith("critic/")]


def test_equal_weights_lose_nothing() -> None:
    part = micro_batch(0) | {"sample_weights": [0.3] * 3}
    assert sums_of([part]).metrics(**NORMS)["train/weights/ess"] == pytest.approx(1.0)


def test_one_absurd_token_gives_finite_numbers() -> None:
    part = micro_batch(0)
    part["log_ratio"][0] = 1e4
    metrics = sums_of([part]).metrics(**NORMS)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(20))
    assert metrics["sampling/sampling_logp_difference/max"] == 1e4
