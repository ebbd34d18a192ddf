"""FSDP2: a model's parameters, gradients and optimizer state, sharded over processes.

A program with the same weights in every process calls these functions in this order:

- `join` joins the processes that torchrun has started, by gloo on a CPU and nccl on CUDA.
- `shard` shards the model. An optimizer that is built afterwards has `DTensor`s.
- Forward and backward are collectives, so every process runs `same_number` micro-batches. One that
  has fewer adds fillers (micro-batches of weight 0). A process whose loss is not finite must run a
  backward pass all the same, since the others wait in theirs.
- `ShardedGradients.finish` sums the gradients over the processes.
- If `any_rank` says that a loss was not finite in some process, all processes `forget` their
  gradients; else all step the optimizer.
- `leave` ends the process group.

All processes call these functions, in the same order. With `shards=None` there is one process with
a plain model, and no process group is needed.

With several replicas (`join(device, replicas=2)`) each is a whole copy of the model, sharded over
its own processes. Forward, backward and `same_number` are then collectives of one replica alone,
whatever other replicas do; `finish`, `any_rank` and an optimizer's step are collectives of all."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rollpacker.trainer.saved_weights import read_weights
from rollpacker.trainer.trainer import TrainerError

TIMEOUT_S = 1800.0
"""Seconds that a process waits for others, enough to load or write a large model meanwhile."""
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The torch.distributed backends by type of device. With CUDA, small numbers are exchanged through
host memory, so that no process waits for a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The processes that share a model, as seen from one of them."""

    rank: int
    size: int
    mesh: DeviceMesh
    """Mesh of the processes: [size], or with several replicas [replicas, processes per replica].
    With pipeline stages, the mesh of this process's stage."""
    device: torch.device
    """The device on which this process computes: the CPU, or one CUDA device."""
    pipelines: DeviceMesh | None = None
    """Mesh [stages, processes per stage] of a model in pipeline stages. None: there are none."""

    @property
    def leads(self) -> bool:
        """Whether this process is the model's first, or with pipeline stages its stage's first."""
        return not any(self.mesh.get_coordinate() or ())

    @property
    def replicas(self) -> int:
        """Number of whole copies of the model. Replica r begins at rank r * size / replicas."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def own_replica(self) -> dist.ProcessGroup:
        """The process group of the replica that this process belongs to."""
        return self.mesh.get_group(-1)


def join(
    device: torch.device, timeout_s: float = TIMEOUT_S, *, replicas: int = 1, stages: int = 1
) -> Shards:
    """Join the processes that torchrun's environment variables describe, divided evenly into
    `replicas` or pipeline `stages`, and return this process's view of them. On CUDA the process's
    device is that of LOCAL_RANK. A process that waits longer than `timeout_s` for the others fails.
    Raises `TrainerError` if a variable is not set, `ValueError` if devices are too few."""
    if missing := [name for name in _ENVIRONMENT if name not in os.environ]:
        raise TrainerError(f"{', '.join(missing)} not set: start the processes with torchrun")
    if device.type == "cuda":
        local_rank, num_devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= num_devices:
            raise ValueError(
                f"process {local_rank} of the trainer on this machine has no GPU: there are "
                f"{num_devices}, and each process needs its own. Lower train.processes, or what "
                "torchrun starts"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(_BACKENDS[device.type], timeout=timedelta(seconds=timeout_s))
    size = dist.get_world_size()
    assert size % replicas == 0, f"{size} processes for {replicas} replicas"
    if stages > 1:
        assert size % stages == 0 and replicas == 1, f"{size} processes for {stages} stages"
        names = ("stage", "shard")
        mesh = init_device_mesh(device.type, (stages, size // stages), mesh_dim_names=names)
        return Shards(
            rank=dist.get_rank(), size=size, mesh=mesh["shard"], device=device, pipelines=mesh
        )
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    mesh = init_device_mesh(
        device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    return Shards(rank=dist.get_rank(), size=size, mesh=mesh, device=device)


def leave() -> None:
    """End torch's process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ShardedGradients:
    """Sums a sharded model's gradients over the processes: in every backward pass, or once in
    `finish`. All gradients are dropped by `forget`."""

    def __init__(
        self, root: nn.Module, gradient_sync: Literal["step", "micro-batch"], replicas: int = 1
    ) -> None:
        assert isinstance(root, FSDPModule)
        self._root: nn.Module = root
        self._fsdp: FSDPModule = root
        self._at_every_backward = gradient_sync == "micro-batch"
        self._is_complete = self._at_every_backward and replicas == 1
        """Whether gradients are summed over all processes after every backward pass, so that
        `finish` has nothing to do."""
        self._sum_at_backward()

    def _sum_at_backward(self) -> None:
        """Set whether backward passes sum gradients over processes: over none with `gradient_sync`
        "step", over the processes of the replica with "micro-batch"."""
        self._fsdp.set_requires_gradient_sync(self._at_every_backward)
        self._fsdp.set_requires_all_reduce(self._is_complete)

    def finish(self, run_filler: Callable[[], object]) -> None:
        """Sum the gradients over the processes, so that every parameter's `grad` is its shard of
        the sum. FSDP2 sums in a backward pass, so `run_filler` must run forward and backward of the
        whole model once, with a loss of weight zero. Nothing is done if every backward pass has
        summed over all processes."""
        if self._is_complete:
            return
        self._fsdp.set_requires_gradient_sync(True)
        try:
            run_filler()
        finally:
            self._sum_at_backward()

    def forget(self) -> None:
        """Drop all gradients of the module in this process, summed or not. This must also be called
        after a forward pass with gradients that no backward pass follows."""
        if self._fsdp._get_fsdp_state()._is_root is not None:  # there was a forward
            _free_after_forward(self._root)
        for parameter in self._root.parameters():
            parameter.grad = None
        for group in _parameter_groups(self._root):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # there is one since the first forward
                    parameter._unsharded_param.grad = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the gradients that this process keeps until `finish` sums them over the processes.
        Gathered parameters that a forward pass has left are freed first."""
        if self._fsdp._get_fsdp_state()._is_root is not None:  # there was a forward
            _free_after_forward(self._root)
        for group in _parameter_groups(self._root):
            if group._partial_reduce_output is not None:
                yield group._partial_reduce_output
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                for gradient in (
                    parameter.unsharded_accumulated_grad,
                    None if whole is None else whole.grad,
                ):
                    if gradient is not None:
                        yield gradient

    def non_finite(self) -> list[str]:
        """Return the names of parameters whose gradient, as far as this process has it, is not
        finite. Gradients already summed within a replica are kept per layer; for these the layer's
        first parameter is named."""
        found = []
        for group in _parameter_groups(self._root):
            in_replica = group._partial_reduce_output
            spoilt = in_replica is not None and not _is_finite(in_replica)
            for number, parameter in enumerate(group.fsdp_params):
                gradients = [parameter.unsharded_accumulated_grad, parameter.sharded_param.grad]
                if hasattr(parameter, "_unsharded_param"):
                    gradients.append(parameter._unsharded_param.grad)
                if (spoilt and number == 0) or any(
                    g is not None and not _is_finite(g) for g in gradients
                ):
                    found.append(str(parameter._param_fqn).removeprefix("model."))
        return found


def shard(
    root: nn.Module,
    shards: Shards,
    *,
    param_dtype: torch.dtype | None,
    gradient_sync: Literal["step", "micro-batch"],
) -> ShardedGradients:
    """Shard `root` in place with FSDP2, layer by layer. All forward passes must go through `root`
    itself. Every process must have the same weights before, or none: a parameter without memory is
    made as a shard, which its process reads from the model's files. The computation is in
    `param_dtype`; trainable parameters of lower precision become float32, and gradients are summed
    in float32. None: no parameter is cast. Gradients are sums over processes, not means. With
    `gradient_sync` "step" each process keeps whole gradients until `finish`; with "micro-batch"
    only its shard."""
    policy = MixedPrecisionPolicy()
    if param_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in [*_layers(root), root]:
        if param_dtype is not None:
            _widen_trainable(module)
        # The root's own parameters (embeddings, head) are the last of a forward and the first of
        # its backward: they stay between the two.
        fully_shard(
            module, mesh=shards.mesh, mp_policy=policy, reshard_after_forward=module is not root
        )
    read_weights(root, shards.device)
    for group in _parameter_groups(root):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()
    for sharded in _sharded_modules(root):
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    root.register_forward_hook(_after_forward)
    return ShardedGradients(root, gradient_sync, shards.replicas)


@contextmanager
def gathered(roots: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which every process has the whole parameters of these modules, as far as they
    are sharded. Forward and backward are then not collectives, so processes may run different
    numbers of them; gradients are not summed over processes."""
    sharded = [root for root in roots if isinstance(root, FSDPModule)]
    for root in sharded:
        root._get_fsdp_state()._lazy_init()
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)
        for module in _sharded_modules(root):
            module.unshard()
    try:
        yield
    finally:
        for root in sharded:
            root.set_reshard_after_forward(True)
            root.set_reshard_after_forward(False, recurse=False)
            root.set_reshard_after_backward(True)
            for module in _sharded_modules(root):
                module.reshard()
            _free_after_forward(root)


def sum_in_full_precision(root: nn.Module) -> None:
    """Add to FSDP2's gradient sums the gradients that the `gathered` parameters got outside of a
    backward pass, as FSDP2 itself does after such a pass."""
    for group in _parameter_groups(root):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def whole(value: Tensor) -> Tensor:
    """Return a `DTensor` gathered into a plain tensor, a collective of its processes. Any other
    tensor is returned as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def first_element(value: Tensor) -> int:
    """Return how many elements of the whole tensor come before those that this process has of a
    `DTensor`, which is sharded by its first dimension. 0 for any other tensor."""
    if not isinstance(value, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return offset[0] * math.prod(value.shape[1:]) if offset else 0


def placed_like(target: Tensor, value: Tensor) -> Tensor:
    """Return the unsharded tensor `value` on the target's device and in its dtype; sharded like the
    target if that is a `DTensor`. Every process must have all of `value`, so nothing is sent."""
    value = value.to(device=target.device, dtype=target.dtype)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def full_tensors(
    named: Iterable[tuple[str, Tensor]], shards: Shards | None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield unsharded tensors in host memory, one at a time, on rank 0 (with pipeline stages on the
    first process of each stage). Other processes get nothing but must iterate to the end too.
    Floating-point tensors are first cast to `dtype`; None: they are not cast."""
    for name, value in named:
        value = value.detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        gathered_value = whole(value)
        if shards is None or shards.leads:
            yield name, gathered_value.cpu()


def same_number(count: int, shards: Shards | None) -> int:
    """Return the largest `count` among the processes of this process's replica. It serves to run
    equally many micro-batches."""
    return int(_largest([count], None if shards is None else shards.own_replica)[0])


def any_of_replica(flag: bool, shards: Shards | None) -> bool:
    """Whether the flag is true in any process of this process's replica."""
    return same_number(int(flag), shards) == 1


def any_rank(flag: bool, shards: Shards | None) -> bool:
    """Whether the flag is true in any process of any replica."""
    return max_over_ranks([int(flag)], shards) == [1.0]


def max_over_ranks(values: Sequence[float], shards: Shards | None) -> list[float]:
    """Return for each place in `values` the largest number that any process of any replica has
    there, in float64. All processes must give the same number of values."""
    return _largest(values, None if shards is None else dist.group.WORLD)


def _largest(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Return for each of `values` the largest that any process of `group` gave. None: there is no
    group, and the values are returned as they are."""
    if group is None:
        return [float(value) for value in values]
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers.tolist()


def _is_finite(gradient: Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(torch.linalg.vector_norm(local).isfinite())


def _layers(root: nn.Module) -> list[nn.Module]:
    """Return the model's layers: the modules that transformers says must not be split. Raises
    `TrainerError` if it names none."""
    models = [module for module in root.modules() if isinstance(module, PreTrainedModel)]
    names = {name for model in models for name in model._no_split_modules or ()}
    layers = [module for module in root.modules() if type(module).__name__ in names]
    if not layers:
        raise TrainerError(
            f"{type(root).__name__}: the model does not say what its layers are "
            "(_no_split_modules), so it cannot be sharded: leave train.processes unset"
        )
    return layers


def _widen_trainable(module: nn.Module) -> None:
    """Make trainable half-precision parameters float32, in place, before the module is sharded."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _parameter_groups(root: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's internal records of parameters, one for each sharded module."""
    for module in _sharded_modules(root):
        if (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            yield group


def _after_forward(root: nn.Module, _inputs: object, _output: object) -> None:
    """A forward hook that frees, after a forward pass without gradients, what a backward pass would
    have freed. Otherwise the next forward pass would use outdated gathered parameters."""
    if torch.is_grad_enabled() or _stays_gathered(root):
        return
    _free_after_forward(root)


def _stays_gathered(root: nn.Module) -> bool:
    return any(not group.reshard_after_backward for group in _parameter_groups(root))


def _free_after_forward(root: nn.Module) -> None:
    """Free the root's gathered parameters, which FSDP2 keeps for a backward pass, and its notes for
    prefetching in that pass. Until then `named_parameters` yields gathered ones, not shards."""
    assert isinstance(root, FSDPModule)
    root.reshard()
    # FSDP2 notes the order of forwards for the next backward's prefetching. A model that only
    # scores would let it grow without end, and any other would prefetch what it does not need.
    root._get_fsdp_state()._comm_ctx.post_forward_order.clear()
    for group in _parameter_groups(root):
        group._post_forward_indices.clear()
