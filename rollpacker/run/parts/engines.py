"""Builds the inference engines of a run: one in the run's process, or several in processes of their
own, each of which calls `make_engine`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rollpacker.run.driving import Caller
from rollpacker.run.parts.policy import engine_in_process
from rollpacker.run.parts.trainer import give_adapter
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.shared_devices import let_go_of_all

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.fleet.parallelism import ParallelismConfig
    from rollpacker.engines.engine import Engine, EngineConfig
    from rollpacker.engines.messages import EngineSetup
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.policy import LoadedPolicy
    from rollpacker.run.ports.deliveries import Deliveries
    from rollpacker.trainer.trainer import ModelConfig

logger = logging.getLogger(__name__)


def build_engines(
    config: RunConfig,
    policy: LoadedPolicy,
    hosts: Hosts,
    *,
    shares_pools: bool = False,
) -> Engines:
    """Returns the engines that the config asks for, on these hosts; engines in processes begin to
    load. `shares_pools`: whether other jobs use their devices by turns. Raises `ValueError` for a
    model that so many devices cannot share."""
    from rollpacker.engines.process_engine import ProcessEngine

    count, planner = config.rollout.engines, config.parallelism_planner
    sleeps = config.train.colocate or shares_pools
    if not config.engines_are_apart:
        loaded = policy.loaded
        give_adapter(config, loaded.model)
        if not sleeps:
            return Engines([policy.engine])
        return Engines([engine_in_process(loaded, config.engine, sleeps=True)])
    if planner.of_several:
        check_heads(policy.loaded.model.config, planner)
    num_devices = count * planner.initial

    def make(number: int, incarnation: int, tensor_parallel: int) -> Engine:
        host, environment = hosts.of_engine(number, tensor_parallel)
        return ProcessEngine(
            engine_setup(
                config.model,
                config.engine,
                threads=max(policy.threads * tensor_parallel // num_devices, 1),
                tensor_parallel=tensor_parallel,
                sleeps=sleeps,
            ),
            name=f"engine {number}" + (f", made anew {incarnation} times" if incarnation else ""),
            heartbeat_s=config.deadlines.heartbeat_s,
            start_s=config.deadlines.start_s,
            environment=environment,
            host=host,
        )

    first = [make(number, 0, planner.initial) for number in range(count)]
    return Engines(first, make, planner.initial, deliveries_of(config, hosts, shares_pools))


def deliveries_of(config: RunConfig, hosts: Hosts, shares_pools: bool) -> Deliveries | None:
    """Returns what brings weights straight to engines in processes of their own, as
    `rollout.weights_carrier` says. None: they read them from host memory. Raises `ValueError` for a
    carrier that does not go with the rest of the config."""
    from rollpacker.run.ports.deliveries import Deliveries
    from rollpacker.trainer.launch import store_at
    from rollpacker.trainer.model import model_device

    on_cuda = model_device(config.model.device).type == "cuda"
    carrier, why_not = config.rollout.weights_carrier, None
    if config.train.colocate or shares_pools:
        why_not = "engines and trainer have their devices by turns"
    elif config.model.lora is not None:
        why_not = "of adapters there is little to carry"
    elif len(hosts.by_name) > 1:
        why_not = "engines are on several machines" if carrier != "broadcast" else None
    elif on_cuda and carrier == "ipc":
        why_not = "each process sees the memory of its own GPUs alone"
    elif carrier == "auto" and not on_cuda and (config.train.processes or 1) == 1:
        why_not = "one process of the trainer writes as fast"
    if carrier == "auto" and why_not is None:
        carrier = "broadcast" if on_cuda else "ipc"
    if carrier == "auto" or carrier == "host":
        logger.info("weights go to engines through host memory: %s", why_not or "as configured")
        return None
    if why_not is not None:
        raise ValueError(
            f"rollout.weights_carrier={carrier} cannot be had, since {why_not}: leave it at auto"
        )
    logger.info("weights go to engines by %s", carrier)
    return Deliveries(carrier, hosts.address, store_at)


def open_engines(
    config: RunConfig, policy: LoadedPolicy, hosts: Hosts, stack: ExitStack, *, shares_pools: bool
) -> Engines:
    """Returns the engines, all loaded; `stack` closes them. Engines that share devices with the
    trainer have released these, so that it can load first. Raises `EngineError` if an engine cannot
    be made; for a user's mistake that is a `ValueError`, too."""
    from rollpacker.engines.process_engine import ProcessEngine

    engines = build_engines(config, policy, hosts, shares_pools=shares_pools)
    stack.callback(lambda: Caller().run(engines.close()))

    async def load() -> None:
        for handle in engines.living:
            if isinstance(handle.engine, ProcessEngine):
                await handle.engine.ready()
        if config.train.colocate or shares_pools:
            await let_go_of_all(engines)

    Caller().run(load())
    return engines


def check_heads(model: Any, planner: ParallelismConfig) -> None:
    """Raise `ValueError` if the model's attention heads cannot be split evenly over a number of
    devices in `planner.reachable`, which an engine may get. `model`: its transformers config."""
    text = model.get_text_config()
    heads = text.num_attention_heads
    of_keys = getattr(text, "num_key_value_heads", None) or heads
    for degree in planner.reachable:
        if heads % degree or (of_keys % degree and degree % of_keys):
            raise ValueError(
                f"parallelism_planner: {degree} devices cannot share an engine of this model, whose"
                f" {heads} attention heads and {of_keys} heads of keys and values they would have "
                "to share evenly: choose other degrees"
            )


def engine_setup(
    model: ModelConfig,
    config: EngineConfig,
    *,
    threads: int | None,
    tensor_parallel: int = 1,
    sleeps: bool = False,
) -> EngineSetup:
    """Returns the message on which a new process calls `make_engine`. `model`: the model's config.
    `threads`: number of torch's threads; None: torch's default. `tensor_parallel`: number of the
    engine's devices. `sleeps`: whether the engine has to release its devices at times."""
    from rollpacker.engines.messages import EngineSetup

    return EngineSetup(
        make=f"{__name__}:make_engine",
        config=config,
        arguments={
            "model": asdict(model),
            "threads": threads,
            "tensor_parallel": tensor_parallel,
            "sleeps": sleeps,
        },
    )


def make_engine(
    *,
    config: EngineConfig,
    model: Mapping[str, Any],
    threads: int | None = None,
    tensor_parallel: int = 1,
    sleeps: bool = False,
) -> Engine:
    """Load model and tokenizer, and return the engine; called in the engine's own process. `model`
    holds the fields of a `ModelConfig`. An engine with its own code for the model gets names and
    shapes, and reads the weights itself. Raises `ValueError` if they are invalid."""
    import torch

    from rollpacker.engines.table import BRING_THEIR_OWN_MODEL
    from rollpacker.trainer.model import load_model, local_folder
    from rollpacker.trainer.trainer import LoraConfig, ModelConfig

    if threads is not None:
        torch.set_num_threads(threads)
    lora = None if model["lora"] is None else LoraConfig(**model["lora"])
    reads_itself = config.name in BRING_THEIR_OWN_MODEL
    loaded = load_model(ModelConfig(**{**model, "lora": lora}), without_weights=reads_itself)
    if lora is not None:
        from rollpacker.trainer.lora import add_adapter

        add_adapter(loaded.model, lora)
    own: dict[str, Any] = {} if tensor_parallel == 1 else {"tensor_parallel": tensor_parallel}
    if reads_itself:
        own["folder"] = str(local_folder(model["path"]))
    return engine_in_process(loaded, config, sleeps=sleeps, **own)
