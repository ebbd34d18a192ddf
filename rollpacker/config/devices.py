"""Checks that engines, trainer and parallelism planner agree on the use of each device."""

from __future__ import annotations

from rollpacker.config.rollout import RolloutConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.trainer.trainer import ModelConfig, TrainConfig


def check_devices(
    rollout: RolloutConfig, train: TrainConfig, planner: ParallelismConfig, model: ModelConfig
) -> None:
    """Raises `ValueError` if settings of engines, trainer and planner contradict each other."""
    if rollout.engines > 1 and model.quantization is not None:
        raise ValueError(
            f"rollout.engines={rollout.engines} does not go with model.quantization="
            f"{model.quantization}: what a process of its own would generate with is "
            "untested. Set rollout.engines=1"
        )
    if train.colocate:
        _check_colocated(rollout, train, planner)
    if planner.of_several:
        _check_degrees(rollout, planner)


def _check_colocated(
    rollout: RolloutConfig, train: TrainConfig, planner: ParallelismConfig
) -> None:
    devices, processes = rollout.engines * planner.initial, train.processes
    if devices == 1 or devices != processes:
        share = "" if planner.initial == 1 else f", {planner.initial} of them for each engine"
        raise ValueError(
            "train.colocate puts one engine and one process of the trainer on each device, of "
            f"at least two{share}: set rollout.engines (now {rollout.engines}) and train.processes "
            f"(now {'not set' if processes is None else processes}) to the number of devices"
        )
    if planner.enabled:
        raise ValueError(
            "train.colocate does not go with parallelism_planner.enabled=true, which makes engines "
            "of another degree between rounds: leave one of them out"
        )


def _check_degrees(rollout: RolloutConfig, planner: ParallelismConfig) -> None:
    engine = rollout.engine
    if not engine.is_tensor_parallel:
        raise ValueError(
            f"parallelism_planner does not go with rollout.engine.name={engine.name}: it runs "
            "on one device, and puts no sample back for want of memory, by which the planner "
            "decides. Set rollout.engine.name=vllm, or leave parallelism_planner out"
        )
    if planner.enabled and len(planner.degrees) == 1:
        raise ValueError(
            f"parallelism_planner.degrees ({planner.degrees[0]}) leaves nothing to choose: "
            "name several, such as [1, 2]"
        )
    num_devices = rollout.engines * planner.initial
    wrong = next((one for one in planner.reachable if num_devices % one), None)
    if wrong is not None:
        raise ValueError(
            f"parallelism_planner.degrees has {wrong}, which does not divide the "
            f"{num_devices} devices of the engines (rollout.engines={rollout.engines} "
            f"times parallelism_planner.initial={planner.initial}): choose other degrees, or "
            "another number of engines"
        )
