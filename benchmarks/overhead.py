"""What control costs: the full controller against a bare loop over the same engine and trainer.

Both arms do the same plain rounds (tail batching off) of the quickstart with the same seed, so they
generate and train on the same tokens; the bare loop has no core, event log, metrics, samples file
or display. Arms are interleaved in blocks. Also: memory beyond torch itself, and how long
`rollpacker --help` takes.

    python benchmarks/overhead.py [--steps 30] [--blocks 6]
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab import bench, in_process, metrics, turns

OVERRIDES = [
    *("tail_batching.enabled=false", "eval.every_steps=null", "eval.max_prompts=1"),
    *("checkpoint.every_steps=1000000", "train.threads=1"),
]


def full(config_path: str, steps: int) -> dict[str, float]:
    """Seconds a step of the real thing, and the controller's own account of itself."""
    from rollpacker.run.train import train

    with tempfile.TemporaryDirectory() as folder:
        overrides = [*OVERRIDES, f"train.steps={steps}", f"runs_dir={folder}"]
        run = train(config_path, overrides)
        rows = [row for row in metrics(run.folder) if "timing_s/step" in row]
    rows = rows[:-1]  # the last step writes a checkpoint
    return {
        "step_s": sum(row["timing_s/step"] for row in rows) / len(rows),
        "controller_share": sum(row["timing_s/controller"] for row in rows)
        / sum(row["timing_s/step"] for row in rows),
    }


def bare(config_path: str, steps: int) -> dict[str, float]:
    """Seconds a step of a loop with nothing but engine, reward and trainer."""
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.parts.policy import load_policy

    config = load_config(config_path, [*OVERRIDES, f"train.steps={steps}"], RunConfig)
    policy = load_policy(config)
    return asyncio.run(_bare_loop(config, policy, steps))


async def _bare_loop(config: Any, policy: Any, steps: int) -> dict[str, float]:
    from rollpacker.core.ids import SampleId
    from rollpacker.engines.collect import collect
    from rollpacker.engines.engine import GenerationRequest, SamplingParams
    from rollpacker.rewards.reward import UNKNOWN
    from rollpacker.run.parts.job import build_cursor
    from rollpacker.run.parts.trainer import build_samples_function, build_trainer
    from rollpacker.run.ports.evaluation import reward_input

    trainer, build = build_trainer(config, policy, None), build_samples_function(config)
    cursor = build_cursor(config, policy)
    sampling = SamplingParams(
        max_response_tokens=config.rollout.max_response_tokens, seed=config.seed
    )
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        prompts, _, _ = cursor.take(config.rollout.prompts_per_step)
        rows = policy.train_prompts.rows
        requests = [
            GenerationRequest(
                sample=SampleId(prompt, index, 0),
                prompt_tokens=rows[prompt.row].tokens,
                sampling=sampling,
            )
            for prompt in prompts
            for index in range(config.rollout.samples_per_prompt)
        ]
        responses = sorted(await collect(policy.engine, requests), key=lambda r: r.sample)
        verdicts = await policy.reward.score(
            [reward_input(rows[r.sample.prompt.row], r, policy.decode, UNKNOWN) for r in responses]
        )
        size = config.rollout.samples_per_prompt
        scored = [(r, v.value) for r, v in zip(responses, verdicts, strict=True)]
        groups = [scored[i : i + size] for i in range(0, len(scored), size)]
        await trainer.accumulate(build(groups)[0])
        await trainer.apply()
        await policy.engine.update_weights(trainer.version)
        times.append(time.perf_counter() - began)
    await policy.engine.close()
    return {"step_s": sum(times[:-1]) / len(times[:-1])}


ARMS = {"full": full, "bare": bare}


def torch_alone_mib() -> float:
    code = (
        "import torch, resource; torch.ones(64, 64) @ torch.ones(64, 64);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    )


def help_seconds(repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(
            [Path(sys.executable).parent / "rollpacker", "--help"], check=True, capture_output=True
        )
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main(
    config: str = "configs/quickstart.yaml",
    steps: int = 30,
    blocks: int = 6,
    arm: str | None = None,
) -> dict[str, Any] | None:
    """`arm`: one, in this process."""
    if arm:
        result = ARMS[arm](config, steps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**result, "peak_mib": peak}))
        return None
    found: list[dict[str, dict[str, float]]] = [{} for _ in range(blocks)]
    for block, name in turns(ARMS, blocks):
        given = ("--arm", name, "--config", config, "--steps", str(steps))
        found[block][name] = in_process(__file__, *given)
        print(block, name, found[block][name], flush=True)
    ratios = [block["full"]["step_s"] / block["bare"]["step_s"] for block in found]
    torch_mib = torch_alone_mib()
    return {
        "steps_per_block": steps,
        "blocks": found,
        "overhead_median": statistics.median(ratios) - 1,
        "overhead_range": [min(ratios) - 1, max(ratios) - 1],
        "controller_share_of_step_median": statistics.median(
            block["full"]["controller_share"] for block in found
        ),
        "torch_alone_mib": torch_mib,
        "beyond_torch_mib": max(block["full"]["peak_mib"] for block in found) - torch_mib,
        "help_s": help_seconds(),
    }


if __name__ == "__main__":
    bench(main)
