"""What control costs: the full controller against a bare loop over the same engine and trainer.

Both arms do the same plain rounds (tail batching off) of the quickstart with the same seed, so they
generate and train on the same tokens; the bare loop has no core, event log, metrics, samples file
or display. Arms are interleaved in blocks. Also: memory beyond torch itself, and how long
`rollpacker --help` takes.

    python benchmarks/overhead.py [--steps 30] [--blocks 6]
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).parent))

from machine import ROOT, write_result

OVERRIDES = [
    "tail_batching.enabled=false",
    "eval.every_steps=null",
    "eval.max_prompts=1",
    "checkpoint.every_steps=1000000",
    "train.threads=1",
]


def full(config_path: str, steps: int) -> dict[str, float]:
    """Seconds a step of the real thing, and the controller's own account of itself."""
    from rollpacker.run.train import train

    with tempfile.TemporaryDirectory() as folder:
        overrides = [*OVERRIDES, f"train.steps={steps}", f"runs_dir={folder}"]
        run = train(config_path, overrides)
        rows = [
            json.loads(line)
            for line in (run.folder / "metrics.jsonl").read_text().splitlines()
            if '"timing_s/step"' in line
        ]
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


def in_process(arm: str, config: str, steps: int) -> dict[str, float]:
    """One arm in a process of its own, with its peak memory."""
    command = [sys.executable, __file__, "--arm", arm, "--config", config, "--steps", str(steps)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument(
        "--arm", choices=("full", "bare"), help="run one arm here (used internally)"
    )
    args = parser.parse_args()
    if args.arm:
        result = (full if args.arm == "full" else bare)(args.config, args.steps)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**result, "peak_mib": peak}))
        return
    blocks = []
    for block in range(args.blocks):
        order = ("full", "bare") if block % 2 == 0 else ("bare", "full")
        blocks.append({arm: in_process(arm, args.config, args.steps) for arm in order})
        ratio = blocks[-1]["full"]["step_s"] / blocks[-1]["bare"]["step_s"]
        print(f"block {block + 1}: full / bare step time {ratio:.3f}", flush=True)
    ratios = [b["full"]["step_s"] / b["bare"]["step_s"] for b in blocks]
    torch_mib = torch_alone_mib()
    result = {
        "steps_per_block": args.steps,
        "blocks": blocks,
        "overhead_median": statistics.median(ratios) - 1,
        "overhead_range": [min(ratios) - 1, max(ratios) - 1],
        "controller_share_of_step_median": statistics.median(
            b["full"]["controller_share"] for b in blocks
        ),
        "torch_alone_mib": torch_mib,
        "beyond_torch_mib": max(b["full"]["peak_mib"] for b in blocks) - torch_mib,
        "help_s": help_seconds(),
    }
    print(json.dumps({k: v for k, v in result.items() if k != "blocks"}, indent=1))
    write_result("overhead", result)


if __name__ == "__main__":
    main()
