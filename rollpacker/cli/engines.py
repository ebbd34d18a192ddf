"""Engines in processes of their own: what such a process is told, and what it makes of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.rollout.engine import Engine, EngineConfig
    from rollpacker.rollout.messages import EngineSetup
    from rollpacker.trainer.trainer import ModelConfig


def engine_setup(model: ModelConfig, config: EngineConfig, *, threads: int | None) -> EngineSetup:
    """What a process needs to make this engine, over the model that `model` names, with so many of
    torch's threads."""
    from rollpacker.rollout.messages import EngineSetup

    return EngineSetup(
        make=f"{__name__}:make_engine",
        config=config,
        arguments={"model": asdict(model), "threads": threads},
    )


def make_engine(
    *, config: EngineConfig, model: Mapping[str, Any], threads: int | None = None
) -> Engine:
    """Load model and tokenizer, in the process that is to run the engine. `model` holds the fields
    of a `ModelConfig`. Raises `ValueError` for what is wrong with them."""
    import torch

    from rollpacker.imports import load_function
    from rollpacker.rollout.table import ENGINES
    from rollpacker.trainer.model import load_model
    from rollpacker.trainer.trainer import LoraConfig, ModelConfig

    if threads is not None:
        torch.set_num_threads(threads)
    lora = None if model["lora"] is None else LoraConfig(**model["lora"])
    loaded = load_model(ModelConfig(**{**model, "lora": lora}))
    make: Any = load_function(ENGINES[config.name])
    engine: Engine = make(model=loaded.model, tokenizer=loaded.tokenizer, config=config)
    if lora is not None:  # as with an engine of the run's own process: over the engine's modules
        from rollpacker.trainer.lora import add_adapter

        add_adapter(loaded.model, lora)
    return engine
