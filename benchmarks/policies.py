"""Policies a known number of updates apart: the quickstart's while it learns, a checkpoint a step.

Trained when they are first asked for, without tail batching, and kept in `runs/`.
"""

from __future__ import annotations

from pathlib import Path

from lab import ROOT, rollpacker

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig

NAME = "carry-policies"
CONFIG = ROOT / "configs" / "quickstart.yaml"
STEPS = 60


def quickstart(dtype: str = "float32") -> RunConfig:
    """The quickstart's config. Exits if its warmed-up model is not there."""
    config = load_config(CONFIG, [f"model.dtype={dtype}"], RunConfig)
    if not Path(config.model.path).is_dir():
        raise SystemExit(
            f"there is no model folder {config.model.path}: make it as the quickstart does (see the"
            " README)"
        )
    return config


def policy_folder(step: int) -> Path:
    """Where the weights after so many updates are."""
    folder = ROOT / "runs" / NAME / "checkpoints" / f"step_{step:06}" / "model"
    if not folder.is_dir():
        rollpacker(
            *("train", str(CONFIG), f"name={NAME}", f"train.steps={STEPS}", "--overwrite"),
            *(f"checkpoint.keep_last={STEPS}", "checkpoint.every_steps=1"),
            *("eval.every_steps=1000", "tail_batching.enabled=false"),
        )
    return folder
