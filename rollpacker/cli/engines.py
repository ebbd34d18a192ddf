"""The engines of a run: one in its own process, or several, each in one of its own; and what such a
process makes of what it is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.cli.parts import Policy
    from rollpacker.config.schema import RunConfig
    from rollpacker.controller.engines import Engines
    from rollpacker.rollout.engine import Engine, EngineConfig
    from rollpacker.rollout.messages import EngineSetup
    from rollpacker.trainer.trainer import ModelConfig


def build_engines(config: RunConfig, policy: Policy) -> Engines:
    """Those that the config asks for. Processes begin to load at once. Raises `ValueError` if there
    are fewer devices."""
    from rollpacker.controller.engines import Engines
    from rollpacker.rollout.process_engine import ProcessEngine

    count = config.rollout.engines
    if count == 1:
        return Engines([policy.engine])
    environments: list[dict[str, str]] = [{}] * count
    if policy.loaded.device.type == "cuda":
        import torch

        if config.train.colocate:
            raise ValueError(
                "train.colocate is for a CPU: on CUDA an engine in a process of its own keeps its "
                "weights and its cache on the device while the trainer needs the room. Leave it "
                "out, so that the trainer has devices of its own, or set model.device=cpu"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environments = one_device_each(count, torch.cuda.device_count(), visible)
    threads = max(policy.threads // count, 1)
    setup = engine_setup(config.model, config.rollout.engine, threads=threads)

    def make(number: int, incarnation: int) -> Engine:
        return ProcessEngine(
            setup,
            name=f"engine {number}" + (f", replaced {incarnation} times" if incarnation else ""),
            heartbeat_s=config.deadlines.heartbeat_s,
            environment=environments[number],
        )

    return Engines([make(number, 0) for number in range(count)], make)


def one_device_each(count: int, num_devices: int, visible: str | None) -> list[dict[str, str]]:
    """What each process must find in its environment to be on a device of its own. `visible`:
    CUDA_VISIBLE_DEVICES of this process. Raises `ValueError` if there are too few."""
    if count > num_devices:
        devices = f"{num_devices} CUDA device{'' if num_devices == 1 else 's'}"
        raise ValueError(
            f"rollout.engines={count}, but torch sees {devices}, and each engine needs one of its "
            f"own: set rollout.engines={num_devices}, or model.device=cpu"
        )
    names = [str(n) for n in range(num_devices)] if visible is None else visible.split(",")
    return [{"CUDA_VISIBLE_DEVICES": name.strip()} for name in names[:count]]


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
