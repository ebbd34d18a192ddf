"""The engines of a run: one in its own process, or several, each in one of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollpacker.cli.parts import Policy
    from rollpacker.config.schema import RunConfig
    from rollpacker.controller.engines import Engines
    from rollpacker.rollout.engine import Engine, EngineConfig


def build_engines(config: RunConfig, policy: Policy) -> Engines:
    """Those that the config asks for. Processes begin to load at once. Raises `ValueError` if there
    are fewer devices."""
    from rollpacker.controller.engines import Engines

    count = config.rollout.engines
    if count == 1:
        return Engines([policy.engine])
    from rollpacker.core.plain import to_plain
    from rollpacker.rollout.messages import EngineSetup
    from rollpacker.rollout.process_engine import ProcessEngine

    environments = _environments(count, policy.loaded.device.type)
    setup = EngineSetup(
        make=f"{__name__}:engine_of_process",
        config=config.rollout.engine,
        arguments={
            "model": to_plain(config.model),
            "threads": max(policy.threads // count, 1),
        },
    )

    def make(number: int, incarnation: int) -> Engine:
        name = f"engine {number}" + (f" ({incarnation + 1})" if incarnation else "")
        return ProcessEngine(
            setup,
            name=name,
            heartbeat_s=config.deadlines.heartbeat_s,
            environment=environments[number],
        )

    return Engines([make(number, 0) for number in range(count)], make)


def _environments(count: int, device: str) -> list[Mapping[str, str]]:
    """What each process must find in its environment to be on a device of its own."""
    if device != "cuda":
        return [{}] * count
    import torch

    num_devices = torch.cuda.device_count()
    if count > num_devices:
        raise ValueError(
            f"rollout.engines={count}, and this machine has {num_devices} GPU"
            f"{'' if num_devices == 1 else 's'}: each engine needs one of its own. Set "
            f"rollout.engines={num_devices}, or model.device=cpu"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(num_devices)] if visible is None else visible.split(",")
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:count]]


def engine_of_process(*, config: EngineConfig, model: Mapping[str, Any], threads: int) -> Engine:
    """Called in the process of an engine. `model`: the run's `model`, as JSON has it."""
    import torch

    from rollpacker.core.plain import from_plain
    from rollpacker.imports import load_function
    from rollpacker.rollout.attention import install_attention
    from rollpacker.rollout.table import ENGINES
    from rollpacker.trainer.lora import add_adapter
    from rollpacker.trainer.model import load_model
    from rollpacker.trainer.trainer import ModelConfig

    torch.set_num_threads(threads)
    own = from_plain(ModelConfig, model)
    loaded = load_model(own)
    if own.lora is not None:
        add_adapter(loaded.model, own.lora)
    install_attention(loaded.model)
    make = load_function(ENGINES[config.name])
    engine: Engine = make(model=loaded.model, tokenizer=loaded.tokenizer, config=config)
    return engine
