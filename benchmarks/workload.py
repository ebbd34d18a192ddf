"""The workload that benchmarks share: the quickstart's model, prompts and rewards, or another's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lab import ROOT

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.engines.engine import SamplingParams

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def load_workload(path: Path, model: Path | None = None, threads: int = 1) -> RunConfig:
    """The config at `path` with so many threads of torch's.

    `model` is a folder in the place of the config's; None: the config's own. Exits if there is no
    model.
    """
    config = load_config(path, [], RunConfig)
    folder = str(model or config.model.path)
    if not Path(folder).is_dir():
        raise SystemExit(
            f"there is no model folder {folder}: make it as the quickstart does (see the README), "
            "or name another with --model"
        )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=folder),
        train=dataclasses.replace(config.train, threads=threads),
    )


def sampling_of(config: RunConfig) -> SamplingParams:
    """How the config's responses are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        seed=config.seed,
    )


def describe_workload(config: RunConfig, path: Path) -> dict[str, object]:
    """Describe the workload that was loaded from `path`, for a result."""
    return {
        "config": path.name,
        "model": Path(config.model.path).name,
        "max_response_tokens": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "threads": config.train.threads,
    }
