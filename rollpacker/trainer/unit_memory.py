"""What one engine and one process of the trainer take on each device, from the config alone.

For `core/placement/placement.py`: what stays while another role has its turn, and what is held
besides while it works. The same formulas as the whole run's estimate (`trainer/estimate.py`); like
there torch itself, a CUDA context and what an allocator keeps are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollpacker.trainer.batch_arithmetic import batch_arithmetic, longest_sample
from rollpacker.trainer.estimate import CPU_CACHE_GIB
from rollpacker.trainer.model_shape import model_folder, num_parameters, read_shape
from rollpacker.trainer.stage_memory import Stages, stages_of
from rollpacker.trainer.training_memory import (
    GIB,
    MemoryPart,
    TrainingMemory,
    memory_part,
)

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

OF_A_TURN = (
    *("gradients", "critic gradients", "activations", "decoded", "gathered", "backward"),
    *("kept for W", "messages", "summing"),
)
"""Parts that a process of the trainer holds from the first gradient of a step to its update."""
OFFLOADED = ("optimizer", "critic optimizer", "master", "critic master")
"""Further ones with `train.offload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """On one device."""

    stays: tuple[MemoryPart, ...]
    turn: tuple[MemoryPart, ...]
    of: str = ""
    """Which of several unlike ones this is, the largest."""

    @property
    def stays_bytes(self) -> int:
        return sum(part.size_bytes for part in self.stays)

    @property
    def turn_bytes(self) -> int:
        return sum(part.size_bytes for part in self.turn)


def engine_memory(config: RunConfig, devices: int, *, on_cuda: bool) -> UnitMemory | None:
    """Of one engine on each of so many devices; None: the model is not known.

    All of it stays: an engine keeps weights and cache until it ends.
    """
    models = _models(config, on_cuda=on_cuda)
    if models.parameters is None or models.shape is None:
        return None
    weights = models.parameters * models.element
    parts = [memory_part("weights", weights // devices, "parameters of an engine's own copy")]
    if config.model.lora is not None:
        adapters = models.num_adapter_parameters([]) or 0
        parts.append(memory_part("adapters", 4 * adapters, "adapters x 4 bytes"))
    engine = config.rollout.engine
    longest = longest_sample(config)
    per_token = 2 * max(models.shape.attention_layers, 1) * models.shape.key_value * models.element
    one_sample = longest * per_token // devices
    budget_gib = CPU_CACHE_GIB if engine.kv_cache_gib is None and not on_cuda else None
    budget_gib = engine.kv_cache_gib if engine.kv_cache_gib is not None else budget_gib
    if budget_gib is None:
        # It takes what is left of the GPU's memory, as long as one response has room.
        return UnitMemory(stays=(*parts, memory_part("kv cache", one_sample, "at least")), turn=())
    rows = min(batch_arithmetic(config).most_samples, engine.max_slots or 1024)
    size = int(budget_gib * GIB)
    if engine.name == "torch":  # which takes what its rows need; others all of it at once
        size = min(size, rows * one_sample)
    return UnitMemory(stays=(*parts, memory_part("kv cache", size, "of each device")), turn=())


def rank_memory(config: RunConfig, *, on_cuda: bool) -> UnitMemory | None:
    """Of one process of the trainer, where the config says how many there are; None: the model is
    not known. In pipeline stages the processes are unlike: on CUDA it is the largest, and on a CPU,
    where they share memory, the mean. Raises `ValueError` as `stages_of` does."""
    models = _models(config, on_cuda=on_cuda)
    if models.parameters is None or models.shape is None:
        return None
    of, stages = "", None
    if config.train.pipeline.stages > 1:
        stages = stages_of(models, [])
        if stages is None:
            return None
        parts = _mean(stages)
    else:
        parts = models.parts([])
        if not any(part.name == "activations" for part in parts):
            return None
    if stages is not None and on_cuda:
        of, parts = f"stage {stages.largest.index}", list(stages.largest.parts)
    freed = OF_A_TURN + (OFFLOADED if config.train.offload and on_cuda else ())
    turn = tuple(part for part in parts if part.name in freed)
    stays = tuple(part for part in parts if part not in turn)
    return UnitMemory(stays=stays, turn=turn, of=of)


def _mean(stages: Stages) -> list[MemoryPart]:
    """Each part over all stages, those that have none included."""
    sums: Counter[str] = Counter()
    for stage in stages.stages:
        sums.update({part.name: part.size_bytes for part in stage.parts})
    count = len(stages.stages)
    return [memory_part(name, size // count, "mean of the stages") for name, size in sums.items()]


def run_memory(config: RunConfig) -> int:
    """Bytes that the run's own process holds on a CPU, and the weights on their way from trainer to
    engines, on the host where it is; 0: the model is not known."""
    models = _models(config, on_cuda=False)
    return 0 if models.parameters is None else 2 * models.parameters * models.element


def _models(config: RunConfig, *, on_cuda: bool) -> TrainingMemory:
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_cuda else "float32"
    notes: list[str] = []
    folder = model_folder(config.model.path)
    return TrainingMemory(
        config=config,
        shape=read_shape(folder, notes) if folder else None,
        parameters=num_parameters(folder, config.model.path, notes),
        element=2 if dtype == "bfloat16" else 4,
        on_cuda=on_cuda,
    )
