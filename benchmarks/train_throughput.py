"""Training throughput: length-sorted micro-batches under a token budget, against padded ones of 64.

    python benchmarks/train_throughput.py            # one thread, a few minutes

Forward and backward of one step's samples whose response lengths have a tail (longest at least ten
times the median), on a character-level model, arms interleaved in one process. The padded arm takes
64 samples at a time in launch order (lengths mixed) and in finishing order (as if all had decoded
side by side: shortest first). All arms must give the same gradient.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from machine import write_result

from rollpacker.algo.base import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.rollout.base import Response
from rollpacker.trainer.base import TrainConfig, TrainSample
from rollpacker.trainer.batches import collate, plan_micro_batches
from rollpacker.trainer.logprobs import response_log_probs
from rollpacker.trainer.model import character_tokenizer, new_model
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.torch_trainer import TorchTrainer

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ALPHABET = "0123456789+-=;! "
PADDED_ROWS = 64
BUDGETS = (2048, 4096, 8192)
BASELINE = "padded_64_launch_order"


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


def new_trainer(budget: int) -> TorchTrainer:
    model = new_model(ARCHITECTURE, character_tokenizer(ALPHABET), seed=0)
    return TorchTrainer(
        model=model,
        config=TrainConfig(steps=1, micro_batch_tokens=budget),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        total_steps=1,
        pad_token_id=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    trainer: TorchTrainer
    run: Callable[[], int]
    """One forward and backward of all samples; returns the padded tokens."""


def padded_rows(trainer: TorchTrainer, samples: Sequence[TrainSample]) -> int:
    """What a plain loop does: 64 rows at a time as they come, padded to the longest of them."""
    padded = 0
    for first in range(0, len(samples), PADDED_ROWS):
        rows = samples[first : first + PADDED_ROWS]
        pairs = [(s.prompt_tokens, s.response_tokens) for s in rows]
        batch = collate(pairs, 0, torch.device("cpu"))
        log_probs, _ = response_log_probs(trainer.model, batch, 1.0)
        weights = torch.cat(
            [torch.full((len(s.response_tokens),), s.advantage * s.token_weight) for s in rows]
        )
        (-(log_probs - log_probs.detach()).exp() * weights).sum().backward()
        padded += batch.input_ids.numel()
    return padded


def length_sorted(trainer: TorchTrainer, samples: Sequence[TrainSample], budget: int) -> int:
    asyncio.run(trainer.accumulate(samples))
    lengths = sorted(len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in samples)
    runs = plan_micro_batches(lengths, budget)
    return sum((run.stop - run.start) * lengths[run.stop - 1] for run in runs)


def make_arms(samples: Sequence[TrainSample]) -> dict[str, Arm]:
    finished = sorted(samples, key=lambda s: len(s.response_tokens))
    launch, finishing = new_trainer(1), new_trainer(1)
    arms = {
        BASELINE: Arm(trainer=launch, run=partial(padded_rows, launch, samples)),
        "padded_64_finishing_order": Arm(
            trainer=finishing, run=partial(padded_rows, finishing, finished)
        ),
    }
    for budget in BUDGETS:
        trainer = new_trainer(budget)
        arms[f"length_sorted_{budget}"] = Arm(
            trainer=trainer, run=partial(length_sorted, trainer, samples, budget)
        )
    return arms


def measure(samples: Sequence[TrainSample], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of each arm, after one untimed pass that compares the gradients."""
    arms = make_arms(samples)
    padded: dict[str, int] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name, arm in arms.items():
        padded[name] = arm.run()
        gradients[name] = {n: g.clone() for n, g in arm.trainer.gradients().items()}
        arm.trainer.discard()
    wall: dict[str, list[float]] = {name: [] for name in arms}
    processor: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            wall_start, processor_start = time.perf_counter(), time.process_time()
            arm.run()
            wall[name].append(time.perf_counter() - wall_start)
            processor[name].append(time.process_time() - processor_start)
            arm.trainer.discard()
    real = sum(len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in samples)
    result = {}
    for name in arms:
        expected = gradients[BASELINE]
        difference = max((gradients[name][n] - g).abs().max().item() for n, g in expected.items())
        assert difference < 1e-6, (name, difference)
        median_s, processor_s = statistics.median(wall[name]), statistics.median(processor[name])
        result[name] = {
            "median_s": median_s,
            "median_processor_s": processor_s,
            "real_tokens_per_s": real / median_s,
            "speed_up": statistics.median(wall[BASELINE]) / median_s,
            "speed_up_processor_time": statistics.median(processor[BASELINE]) / processor_s,
            "padded_to_real_tokens": padded[name] / real,
            "largest_gradient_difference": difference,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = make_samples(args.prompts, args.group_size, args.seed)
    lengths = [len(s.response_tokens) for s in samples]
    tail = max(lengths) / statistics.median(lengths)
    assert tail >= 10, f"the workload has no tail: longest / median = {tail:.1f}"
    arms = measure(samples, args.repeats)
    workload = {
        "samples": len(samples),
        "response_tokens": sum(lengths),
        "median_length": statistics.median(lengths),
        "mean_length": statistics.fmean(lengths),
        "max_length": max(lengths),
        "longest_over_median": tail,
        "seed": args.seed,
        "repeats": args.repeats,
        "torch_threads": torch.get_num_threads(),
        "architecture": ARCHITECTURE,
    }
    write_result("train_throughput", {"workload": workload, "arms": arms})
    for name, row in arms.items():
        print(
            f"{name:28} {row['median_s']:7.3f} s  {row['real_tokens_per_s']:9,.0f} tokens/s  "
            f"x{row['speed_up']:.2f} (x{row['speed_up_processor_time']:.2f} in processor time)  "
            f"padded/real {row['padded_to_real_tokens']:.2f}"
        )


if __name__ == "__main__":
    main()
