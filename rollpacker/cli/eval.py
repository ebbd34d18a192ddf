"""`rollpacker eval RUN_OR_MODEL`: pass@1 and pass@k of a run's newest model or of any model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli.arguments import add_overrides

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.ports.evaluation import EvalResult


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        help="pass@1 and pass@k of a run or a model",
        description="Evaluate a run's newest checkpoint, or a model folder, on held-out prompts.",
    )
    parser.add_argument("target", metavar="RUN_OR_MODEL", help="a run's folder or a model's folder")
    add_overrides(parser, "replace single settings of the config")
    parser.add_argument(
        "--task",
        metavar="TASK_OR_CONFIG",
        help="a config file whose data.eval and rewards to use, or the name of a reasoning-gym "
        "task. A run's own config if left out",
    )
    parser.add_argument(
        "-k", type=int, help="samples per prompt: pass@1, pass@2, pass@4, ... and pass@K"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Evaluate a model, and return the exit code. Raises `ValueError` for a user's mistake."""
    import asyncio

    from rollpacker.run.parts.hub import look_for_hub

    if args.k is not None and args.k < 1:
        raise ValueError("-k must be at least 1")
    config, model = _resolve(args)
    look_for_hub(config, model_path=model)
    if args.k is not None:
        config = dataclasses.replace(
            config, eval=dataclasses.replace(config.eval, samples_per_prompt=args.k)
        )
    result = asyncio.run(_evaluate(config, model))
    told = result.out_of_reach(config.eval.pass_threshold)
    if told is not None:
        print(f"rollpacker: {told}", file=sys.stderr)
    if args.json:
        print(json.dumps({"model": model, **result.metrics}))
    else:
        print(f"{model}: {len(result.passed)} prompts x {config.eval.samples_per_prompt} samples")
        for line in _lines(result.metrics):
            print(f"  {line}")
    return 0


def _lines(metrics: Mapping[str, float]) -> Iterator[str]:
    for name, value in metrics.items():
        name = name.removeprefix("eval/")
        if not name.startswith("stderr/"):
            error = metrics.get(f"eval/stderr/{name}")
            beside = "" if error is None else f" ± {error:.4f} (standard error)"
            yield f"{name:<18} {value:.4f}{beside}"


def _resolve(args: argparse.Namespace) -> tuple[RunConfig, str]:
    """Returns the config that says how to evaluate, and the path of the model's folder."""
    from rollpacker.config.earlier import as_it_was
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig

    target = Path(args.target)
    run_config = target / "config.yaml"
    is_run, model = _is_run(target), model_of(target)
    if args.task is None:
        if not target.exists():
            raise ValueError(f"there is no run or model at {target}")
        if run_config.is_file() and not is_run:
            raise ValueError(f"the run {target} has no checkpoint yet")
        if not is_run:
            raise ValueError(f"{target} is no run's folder: say with --task what to evaluate it on")
        return load_config(run_config, args.overrides, RunConfig, below=as_it_was), model
    if Path(args.task).suffix in (".yaml", ".yml"):
        return load_config(args.task, args.overrides, RunConfig), model
    return _task_config(args.task, model, args.overrides), model


def _is_run(target: Path) -> bool:
    return (target / "config.yaml").is_file() and (target / "checkpoints").is_dir()


def model_of(target: Path) -> str:
    """Path of the model's folder that `target` means: the newest model of a run, the model of a
    checkpoint, or `target` itself. Raises `CheckpointError` for a run without a checkpoint."""
    from rollpacker.run.folder.checkpoint import newest_checkpoint

    if _is_run(target):
        return str(newest_checkpoint(target / "checkpoints").folder / "model")
    if (target / "manifest.json").is_file():  # one checkpoint of a run
        return str(target / "model")
    return str(target)


def _task_config(task: str, model: str, overrides: list[str]) -> RunConfig:
    import tempfile

    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig

    plain = {
        "name": "eval",
        "model": {"path": model},
        "data": {
            "train": {"kind": "reasoning_gym", "tasks": [{"task": task}], "size": 1},
            "eval": {"kind": "reasoning_gym", "tasks": [{"task": task}], "size": 200},
        },
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 256},
        "train": {"steps": 1},
        "rewards": [{"function": "reasoning_gym"}],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        path.write_text(json.dumps(plain))  # JSON is YAML
        return load_config(path, overrides, RunConfig)


async def _evaluate(config: RunConfig, model: str) -> EvalResult:
    from rollpacker.engines.collect import collect
    from rollpacker.rewards.reward import Progress
    from rollpacker.run.parts.policy import load_policy
    from rollpacker.run.ports.evaluation import evaluate

    policy = load_policy(config, model_path=model)
    if policy.eval_prompts is None:
        raise ValueError("this config has no held-out data: set data.eval or data.eval_fraction")
    num_steps = config.num_steps(len(policy.train_prompts.rows))
    player = policy.player
    try:
        if player is not None:
            await player.environments.open()
        return await evaluate(
            config,
            policy.eval_prompts,
            generate=lambda requests: collect(policy.engine, requests),
            let_go=policy.engine.let_go,
            score=policy.reward.score,
            decode=policy.decode,
            progress=Progress(num_steps, num_steps),
            player=player,
        )
    finally:
        await policy.engine.close()
        if player is not None:
            await player.environments.close()
        await policy.reward.close()
