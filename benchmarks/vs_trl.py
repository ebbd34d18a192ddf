"""Training with TRL's `GRPOTrainer` and with RollPacker: the same model, prompts, reward and step.

Both run on a CPU in float32 in this one process, in turns, each turn from the same start weights on
the same rows. Several of TRL's settings are tried first; the fastest is what RollPacker is compared
with. RollPacker runs as configured, event log and metrics on. A turn's first steps warm up and do
not count.

    python benchmarks/vs_trl.py [--only 0 2] [--quick]
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lab import bench
from step_times import StepTime, describe, rollpacker_steps
from trl_side import TrlSetting, continuous_batching, trl_steps
from workload import QUICKSTART, describe_workload, load_workload

from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.rewards.reward import RewardConfig

SYNC = TailBatchingConfig(enabled=False)
TAIL = TailBatchingConfig(flush_each_epoch=False)
PERIOD = 5
"""Steps after which the long queue is empty again at the factors 1.25, 1.25."""
EQUAL_TOKENS = 128
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    prompts_per_step: int
    equal_lengths: bool = False
    target: float = 8.0
    """RollPacker's steps per second over TRL's that the project promises, tail batching off."""
    search_steps: int
    """Steps that each of TRL's settings is tried for."""
    blocks: int
    """Turns of each arm."""
    steps: int
    """Measured steps per turn; a warm-up comes on top."""
    settings: tuple[TrlSetting, ...]


def generate(samples_per_pass: int | None, **options: Any) -> TrlSetting:
    """TRL with the model's own `generate`, its default."""
    passes = "one pass" if samples_per_pass is None else f"passes of {samples_per_pass}"
    extra = "".join(f", {key}={value}" for key, value in options.items())
    return TrlSetting(
        name=f"generate, {passes}{extra}", samples_per_pass=samples_per_pass, options=options
    )


def paged(samples_per_pass: int | None, batch_tokens: int, num_blocks: int) -> TrlSetting:
    """TRL with transformers' continuous batching."""
    return TrlSetting(
        name=f"continuous batching of {batch_tokens}, {num_blocks} blocks",
        samples_per_pass=samples_per_pass,
        options=continuous_batching(batch_tokens, num_blocks),
    )


def workloads(config: RunConfig) -> list[Workload]:
    own = config.rollout.prompts_per_step
    samples = own * config.rollout.samples_per_prompt
    small = (generate(None), generate(32), paged(32, samples // 2, 256), paged(32, samples, 128))
    large = (generate(64), paged(64, 512, 1024))
    equal = Workload(
        name=f"all of {EQUAL_TOKENS} tokens",
        **{"equal_lengths": True, "target": 1.5, "prompts_per_step": own},
        **{"search_steps": 2, "blocks": 2, "steps": 5},
        settings=(generate(None), generate(32)),
    )
    tail = Workload(
        **{"name": "long tail", "prompts_per_step": own, "settings": small},
        **{"search_steps": 4, "blocks": 3, "steps": 8},
    )
    large_tail = Workload(
        **{"name": "long tail, 64 prompts", "prompts_per_step": 64, "settings": large},
        **{"search_steps": 1, "blocks": 2, "steps": 2},
    )
    return [tail, large_tail, equal]


def shortened(workload: Workload) -> Workload:
    return dataclasses.replace(
        workload, blocks=1, steps=1, search_steps=1, settings=workload.settings[:2]
    )


def in_file_order(config: RunConfig, prompts: int) -> RunConfig:
    """So many prompts a step, rows in file order, evaluation off."""
    rollout = dataclasses.replace(config.rollout, prompts_per_step=prompts)
    data = dataclasses.replace(config.data, eval=None, eval_fraction=0.0, shuffle=False)
    train = dataclasses.replace(config.train, schedule="constant", warmup_steps=0)
    return dataclasses.replace(config, rollout=rollout, data=data, train=train)


@contextmanager
def config_for(workload: Workload, config: RunConfig) -> Iterator[RunConfig]:
    """The config with the workload's sizes."""
    config = in_file_order(config, workload.prompts_per_step)
    if not workload.equal_lengths:
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        make_endless(Path(config.model.path), Path(folder))
        yield dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=folder),
            rollout=dataclasses.replace(config.rollout, max_response_tokens=EQUAL_TOKENS),
            rewards=(RewardConfig(function=f"{Path(__file__).with_name('digits.py')}:share"),),
        )


def make_endless(source: Path, folder: Path) -> None:
    """A random model of the source's architecture and size that never samples the end token.

    One channel of the residual stream is set by the embedding and written by no layer, so it stays
    positive; the output layer reads it for the end token alone, with a large negative weight.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -1e4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def block_config(config: RunConfig, block: int) -> RunConfig:
    """Other rows and other noise in every block."""
    seed = config.seed + block
    train = dataclasses.replace(config.data.train, seed=config.data.train.seed + block)
    data = dataclasses.replace(config.data, train=train)
    return dataclasses.replace(config, seed=seed, data=data)


def run_workload(workload: Workload, config: RunConfig) -> dict[str, Any]:
    """First TRL's settings, once each; then RollPacker and the best of them, in turns."""
    with config_for(workload, config) as own:
        tried = {
            setting: run_turn(own, setting, workload.search_steps) for setting in workload.settings
        }
        best = min(tried, key=lambda setting: seconds_per_longest(tried[setting]))
        arms: dict[str, TrlSetting | TailBatchingConfig] = {"RollPacker": SYNC, "TRL": best}
        if not workload.equal_lengths:
            arms["RollPacker, tail batching"] = TAIL
        steps: dict[str, list[StepTime]] = {name: [] for name in arms}
        for block in range(1, workload.blocks + 1):
            for name, arm in arms.items():
                gc.collect()
                steps[name] += run_turn(block_config(own, block), arm, workload.steps)
    if workload.equal_lengths:
        lengths = {n for taken in steps.values() for step in taken for n in step.lengths}
        assert lengths == {EQUAL_TOKENS}, f"not all responses are equally long: {sorted(lengths)}"
    result: dict[str, Any] = {
        "workload": workload.name,
        "prompts_per_step": workload.prompts_per_step,
        "target": workload.target,
        "tried": {setting.name: describe(taken) for setting, taken in tried.items()},
        "best_trl": best.name,
        "arms": {name: describe(taken) for name, taken in steps.items()},
    }
    result["speedup"], result["speedup_95"] = ratio(steps["TRL"], steps["RollPacker"])
    if not workload.equal_lengths:
        result["speedup_tail_batching"], result["speedup_tail_batching_95"] = ratio(
            steps["TRL"], steps["RollPacker, tail batching"]
        )
    return result


def seconds_per_longest(steps: Sequence[StepTime]) -> float:
    """Seconds of a step per token of its longest response.

    Draws differ between settings, and a step's time goes with its longest response: this way no
    setting is chosen because it happened to draw short ones.
    """
    return sum(step.seconds for step in steps) / sum(max(step.lengths) for step in steps)


def run_turn(
    config: RunConfig, arm: TrlSetting | TailBatchingConfig, num_steps: int
) -> list[StepTime]:
    """One arm's measured steps: whole periods of tail batching, its first period left out."""
    if isinstance(arm, TrlSetting):
        return trl_steps(config, num_steps + 1, arm)[1:]
    if not arm.enabled:
        return rollpacker_steps(config, num_steps + 1, arm)[1:]
    periods = max(1, round(num_steps / PERIOD))
    return rollpacker_steps(config, (periods + 1) * PERIOD, arm)[PERIOD:]


def ratio(slow: Sequence[StepTime], fast: Sequence[StepTime]) -> tuple[float, list[float]]:
    """Mean seconds of `slow` over those of `fast`; 95 % interval by a bootstrap over steps."""
    rng = np.random.default_rng(0)
    means = []
    for taken in (slow, fast):
        seconds = np.array([step.seconds for step in taken])
        picks = rng.integers(len(seconds), size=(RESAMPLES, len(seconds)))
        means.append(seconds[picks].mean(axis=1))
    low, high = np.quantile(means[0] / means[1], [0.025, 0.975])
    slow_s, fast_s = (statistics.fmean(step.seconds for step in taken) for taken in (slow, fast))
    return slow_s / fast_s, [float(low), float(high)]


def prepared(path: Path, model: Path | None, threads: int) -> RunConfig:
    """The workload, in a process that has so many threads and in which TRL says little."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # also for threads that torch starts later
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    return load_workload(path, model, threads)


def main(
    config: Path = QUICKSTART,
    model: Path | None = None,
    threads: int = 1,
    only: Sequence[int] = (),
    quick: bool = False,
) -> dict[str, Any]:
    """`only`: numbers of workloads, from 0; none: all."""
    own = prepared(config, model, threads)
    results = []
    for number, workload in enumerate(workloads(own)):
        if not only or number in only:
            results.append(run_workload(shortened(workload) if quick else workload, own))
            print(results[-1], flush=True)
    missed = [r["workload"] for r in results if r["speedup"] < r["target"]]
    return {"setup": describe_workload(own, config), "missed": missed, "results": results}


if __name__ == "__main__":
    bench(main, holds=lambda found: not found["missed"])
