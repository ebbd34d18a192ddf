"""`rollpacker warmup CONFIG [key=value ...]`: supervised fine-tuning of a model before a run."""

from __future__ import annotations

import argparse
from typing import Any

from rollpacker.cli.arguments import add_overrides


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "warmup",
        help="fine-tune a model on prompt-completion pairs before reinforcement learning",
        description="Fine-tune on JSONL rows of prompt and completion, or of chat messages, and "
        "write a model folder.",
    )
    parser.add_argument("config", help="YAML file")
    add_overrides(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model that is in the output folder"
    )


def run(args: argparse.Namespace) -> int:
    """Fine-tune a model, and return the exit code. Raises `ValueError` for a user's mistake."""
    from rollpacker.config.load import load_config
    from rollpacker.config.warmup import WarmupConfig
    from rollpacker.run.parts.warm_up import warm_up

    warm_up(load_config(args.config, args.overrides, WarmupConfig), overwrite=args.overwrite)
    return 0
