"""The part of a scenario that describes the GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollpacker.bounds import check_at_least
from rollpacker.sim.hardware import GPUS, GpuSpec
from rollpacker.sim.scenario_checks import TRAINED_PARAMETER_BYTES, check_known

MIN_SPEC, MAX_SPEC = 1e-6, 1e9
"""Smallest and largest value that a number of a GPU's datasheet may have."""
MAX_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs of a scenario (`cluster.*`), which generation and training share or divide."""

    gpu: str | GpuSpec
    """Name of a GPU preset, or the numbers of a GPU's datasheet."""
    gpus: int
    """Number of GPUs of the cluster, which must fit in one node or fill several whole nodes."""
    gpus_per_node: int = 8
    """Number of GPUs of a node; no engine or trainer's tensor-parallel group spans two nodes."""
    train_gpu: str | GpuSpec | None = None
    """Kind of the trainer's GPUs, if the trainer has GPUs of its own; null: the same as `gpu`."""
    train_gpus: int | None = None
    """Number of devices that only train; then all `gpus` only generate. null: as many as `gpus` if
    `train_gpu` is set, else the trainer shares the engines' devices."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "gpus", "gpus_per_node", "train_gpus")
        self._check_count("gpus", self.gpus)
        self._check_count("train_gpus", self.trainer_gpus)
        for key, gpu in (("gpu", self.gpu), ("train_gpu", self.train_gpu)):
            if isinstance(gpu, str):
                check_known(key, gpu, GPUS)
            elif gpu is not None:
                _check_numbers(key, gpu)

    def _check_count(self, key: str, gpus: int) -> None:
        if gpus > MAX_GPUS:
            raise ValueError(f"{key} must be at most {MAX_GPUS:,}, not {gpus:,}")
        if gpus > self.gpus_per_node and gpus % self.gpus_per_node:
            whole = gpus // self.gpus_per_node * self.gpus_per_node
            raise ValueError(
                f"{key} must fill whole nodes of gpus_per_node ({self.gpus_per_node}), not "
                f"{gpus}: take {whole} or {whole + self.gpus_per_node}"
            )

    @property
    def node_gpus(self) -> int:
        """Number of GPUs in each node."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def gpu_spec(self) -> GpuSpec:
        return GPUS[self.gpu] if isinstance(self.gpu, str) else self.gpu

    @property
    def is_apart(self) -> bool:
        """Whether the trainer has devices of its own, so that the engines keep theirs."""
        return self.train_gpu is not None or self.train_gpus is not None

    @property
    def trainer_gpus(self) -> int:
        """Number of GPUs of the trainer, whether or not it shares these GPUs with the engines."""
        return self.gpus if self.train_gpus is None else self.train_gpus

    @property
    def trainer_gpu_spec(self) -> GpuSpec:
        """Datasheet of the GPUs that train."""
        if self.train_gpu is None:
            return self.gpu_spec
        return GPUS[self.train_gpu] if isinstance(self.train_gpu, str) else self.train_gpu


def check_training_memory(params: float, cluster: Cluster) -> None:
    """Raises `ValueError` if the trainer's GPUs together cannot hold the weights, gradients and
    optimizer state of a model with `params` parameters; activations are not counted."""
    gpus, gpus_per_node = cluster.trainer_gpus, cluster.gpus_per_node
    key = "train_gpus" if cluster.is_apart else "gpus"
    gpu_gb = cluster.trainer_gpu_spec.memory_gb
    needed, there = params * TRAINED_PARAMETER_BYTES / 1e9, gpus * gpu_gb
    if needed > there:
        least = math.ceil(needed / gpu_gb)
        if least > gpus_per_node:  # whole nodes
            least = math.ceil(least / gpus_per_node) * gpus_per_node
        raise ValueError(
            f"cluster.{key} is {gpus}: training needs {TRAINED_PARAMETER_BYTES} bytes of each of "
            f"{params / 1e9:.1f}e9 parameters (weights, gradients, optimizer), {needed:,.1f} GB in "
            f"all, but {gpus} x {gpu_gb:g} GB are {there:,.1f}: take "
            f"{least} GPUs or more, larger ones, or a smaller model"
        )


def _check_numbers(key: str, gpu: GpuSpec) -> None:
    for name in ("memory_gb", "bandwidth_tb_s", "tflops", "nvlink_gb_s"):
        value = getattr(gpu, name)
        if not MIN_SPEC <= value <= MAX_SPEC:
            raise ValueError(
                f"{key} has {name}={value:g}, which no GPU has: mind the unit in its name"
            )
