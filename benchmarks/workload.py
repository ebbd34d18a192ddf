"""The workload that benchmarks share: the quickstart's model, prompts and rewards, or another's."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from machine import ROOT

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=ROOT / "configs" / "quickstart.yaml",
        help="whose prompts, rewards and limits to use (default: the quickstart's)",
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face folder instead of the config's")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")


def load_workload(args: argparse.Namespace) -> RunConfig:
    """The config with the model and threads of the command line. Exits if there is no model."""
    config = load_config(args.config, [], RunConfig)
    path = str(args.model or config.model.path)
    if not Path(path).is_dir():
        raise SystemExit(
            f"there is no model folder {path}: make it as the quickstart does (see the README), "
            "or name another with --model"
        )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=path),
        train=dataclasses.replace(config.train, threads=args.threads),
    )


def describe_workload(config: RunConfig, args: argparse.Namespace) -> dict[str, object]:
    """What a result says about the workload."""
    return {
        "config": args.config.name,
        "model": Path(config.model.path).name,
        "max_response_tokens": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "threads": args.threads,
    }
