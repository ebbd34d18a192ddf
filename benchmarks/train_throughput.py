"""Training throughput: the trainer's micro-batches, sorted or packed, against padded ones of 64.

Forward and backward of one step's samples whose lengths have a tail (longest at least ten times the
median), arms interleaved in one process. Padded: a plain loop over 64 samples at a time in launch
order and in finishing order, and over all at once. Others: the trainer itself. All arms must give
the same gradient; what runs on CUDA only is compared in float64, on a few samples, by torch's
unfused FlexAttention.

    python benchmarks/train_throughput.py            # one thread, a few minutes
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from lab import bench
from torch.nn.attention import flex_attention as torch_flex

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.trainer.batches import Batcher, MicroBatch, Row, collate, row_length
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.micro_batch import row_of
from rollpacker.trainer.model import character_tokenizer, new_model
from rollpacker.trainer.packing import KINDS, pack, packed_attention
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import TrainConfig, TrainSample

ARCHITECTURE = {
    **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 512, "tie_word_embeddings": True},
}
ALPHABET = "0123456789+-=;! "
PADDED_ROWS = 64
BUDGETS = (2048, 4096, 8192)
BASELINE = "padded_64_launch_order"
ALL_TOGETHER = "padded_all_together"
CHECKED_SAMPLES = 24
FLOAT32_TOLERANCE = 1e-6
FLOAT64_TOLERANCE = 1e-10
"""The largest differences of gradients, as shares of the largest element."""
CPU = torch.device("cpu")


def make_samples(num_prompts: int, group_size: int, seed: int) -> list[TrainSample]:
    """In launch order. Lengths are lognormal, cut at 450, like those of a quickstart round."""
    draw = np.random.default_rng(seed)
    groups = []
    for row in range(num_prompts):
        prompt = tuple(draw.integers(3, 19, draw.integers(4, 20)).tolist())
        group = []
        for index in range(group_size):
            length = int(np.clip(draw.lognormal(math.log(16), 1.1), 2, 450))
            response = Response(
                sample=SampleId(PromptId("train", 0, row), index, 0),
                prompt_tokens=prompt,
                tokens=tuple(draw.integers(3, 19, length).tolist()),
                log_probs=(-2.0,) * length,
                finish_reason="stop",
                version=0,
            )
            group.append((response, float(draw.integers(0, 2))))
        groups.append(group)
    samples, _ = build_train_samples(groups, AlgorithmConfig())
    return samples


def new_learner(budget: int, layout: str) -> Learner:
    return Learner(
        model=new_model(ARCHITECTURE, character_tokenizer(ALPHABET), seed=0),
        tokenizer=None,
        pad_token_id=0,
        config=TrainConfig(steps=1, micro_batch_tokens=budget, micro_batches=layout),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        total_steps=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    learner: Learner
    run: Callable[[], None]
    """One forward and backward of all samples."""
    padded_tokens: int
    max_repeats: int | None = None


def rows_of(samples: Sequence[TrainSample]) -> list[Row]:
    return [row_of(s) for s in samples]


def add_gradient(policy: Policy, batch: MicroBatch, samples: Sequence[TrainSample]) -> None:
    """Forward and backward of one micro-batch, as a plain loop does it."""
    log_probs, _ = policy(batch, 1.0)
    weights = torch.tensor([s.advantage * s.token_weight for s in samples], dtype=log_probs.dtype)
    weights = weights.repeat_interleave(torch.tensor(batch.num_targets))
    (-(log_probs - log_probs.detach()).exp() * weights).sum().backward()


def padded_arm(samples: Sequence[TrainSample], num_rows: int, **settings: int) -> Arm:
    """`num_rows` rows at a time as they come, padded to the longest of them."""
    learner = new_learner(1, "sorted")
    policy = Policy(learner.model)
    parts = [samples[first : first + num_rows] for first in range(0, len(samples), num_rows)]

    def run() -> None:
        for part in parts:
            add_gradient(policy, collate(rows_of(part), 0, CPU), part)

    padded = sum(len(part) * max(map(row_length, rows_of(part))) for part in parts)
    return Arm(learner=learner, run=run, padded_tokens=padded, **settings)


def trainer_arm(samples: Sequence[TrainSample], budget: int, layout: str) -> Arm:
    learner = new_learner(budget, layout)
    batcher = Batcher(learner.model, layout=layout, max_tokens=budget, pad_token_id=0, device=CPU)
    rows = rows_of(samples)
    plan = batcher.plan([row_length(row) for row in rows])
    padded = sum(batcher.batch([rows[i] for i in places]).input_ids.numel() for places in plan)
    return Arm(learner=learner, run=partial(learner.accumulate, samples), padded_tokens=padded)


def make_arms(samples: Sequence[TrainSample]) -> dict[str, Arm]:
    finished = sorted(samples, key=lambda s: len(s.response_tokens))
    arms = {
        BASELINE: padded_arm(samples, PADDED_ROWS),
        "padded_64_finishing_order": padded_arm(finished, PADDED_ROWS),
        ALL_TOGETHER: padded_arm(samples, len(samples), max_repeats=3),
    }
    for layout in ("sorted", "packed"):
        for budget in BUDGETS:
            arms[f"{layout}_{budget}"] = trainer_arm(samples, budget, layout)
    return arms


def gradients_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: gradient.clone() for name, gradient in learner.gradients().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element, as a share of the largest element of `b`."""
    assert a.keys() == b.keys()
    largest = max(gradient.abs().max().item() for gradient in b.values())
    return max((a[name] - b[name]).abs().max().item() for name in a) / largest


def measure(samples: Sequence[TrainSample], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of each arm, after one untimed pass that compares the gradients."""
    arms = make_arms(samples)
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name, arm in arms.items():
        arm.run()
        gradients[name] = gradients_of(arm.learner)
        arm.learner.discard()
    wall: dict[str, list[float]] = {name: [] for name in arms}
    processor: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name, arm in arms.items():
            if arm.max_repeats is not None and repeat >= arm.max_repeats:
                continue
            wall_start, processor_start = time.perf_counter(), time.process_time()
            arm.run()
            wall[name].append(time.perf_counter() - wall_start)
            processor[name].append(time.process_time() - processor_start)
            arm.learner.discard()
    real = sum(row_length(row) for row in rows_of(samples))
    result = {}
    for name, arm in arms.items():
        difference = largest_difference(gradients[name], gradients[BASELINE])
        assert difference < FLOAT32_TOLERANCE, (name, difference)
        median_s, processor_s = statistics.median(wall[name]), statistics.median(processor[name])
        result[name] = {
            "median_s": median_s,
            "median_processor_s": processor_s,
            "repeats": len(wall[name]),
            "real_tokens_per_s": real / median_s,
            "speed_up": statistics.median(wall[BASELINE]) / median_s,
            "speed_up_processor_time": statistics.median(processor[BASELINE]) / processor_s,
            "padded_to_real_tokens": arm.padded_tokens / real,
            "relative_gradient_difference": difference,
        }
    return result


def compare_packed_attention(samples: Sequence[TrainSample]) -> dict[str, float]:
    """In float64: how far the gradient of a pack is from that of padded rows, for each packed
    attention that a CPU can run."""
    model = new_model(ARCHITECTURE, character_tokenizer(ALPHABET), seed=0).double().eval()
    policy, rows = Policy(model), rows_of(samples)

    def gradient(batch: MicroBatch) -> dict[str, torch.Tensor]:
        model.zero_grad()
        add_gradient(policy, batch, samples)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradient(collate(rows, 0, CPU))
    differences = {}
    for kind in KINDS:
        if kind == "varlen":
            continue  # a CUDA kernel
        # torch refuses FlexAttention's backward on a CPU, though its unfused form has one.
        with mock.patch.object(torch_flex, "_validate_device"), packed_attention(model, kind):
            differences[kind] = largest_difference(gradient(pack(rows, CPU)), expected)
        assert differences[kind] < FLOAT64_TOLERANCE, (kind, differences)
    return differences


def main(
    repeats: int = 11, prompts: int = 64, group_size: int = 8, seed: int = 0
) -> dict[str, Any]:
    torch.set_num_threads(1)
    samples = make_samples(prompts, group_size, seed)
    lengths = [len(s.response_tokens) for s in samples]
    tail = max(lengths) / statistics.median(lengths)
    assert tail >= 10, f"the workload has no tail: longest / median = {tail:.1f}"
    workload = {
        "samples": len(samples),
        "response_tokens": sum(lengths),
        "median_length": statistics.median(lengths),
        "mean_length": statistics.fmean(lengths),
        "max_length": max(lengths),
        "longest_over_median": tail,
        "seed": seed,
        "repeats": repeats,
        "torch_threads": torch.get_num_threads(),
        "architecture": ARCHITECTURE,
    }
    return {
        "workload": workload,
        "arms": measure(samples, repeats),
        "relative_float64_gradient_difference": compare_packed_attention(samples[:CHECKED_SAMPLES]),
    }


if __name__ == "__main__":
    bench(main)
