"""The modules that are trained (policy, critic), each with its gradients and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from rollpacker.trainer.optimizer import MirrorGradient, build_optimizer
from rollpacker.trainer.sharding import ShardedGradients, Shards, shard, whole
from rollpacker.trainer.trainer import TrainConfig, TrainerError

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Trained:
    """A module that is trained, with its gradients, its optimizer and its part of a checkpoint."""

    def __init__(
        self,
        module: nn.Module,
        named_by: nn.Module,
        config: TrainConfig,
        shards: Shards | None,
        run_dtype: torch.dtype,
        mirror: str | None = None,
    ) -> None:
        """Shard `module` if `shards` are given, and build its optimizer. Gradients and state
        go by the parameter names in `named_by`, a submodule or `module` itself. `run_dtype` is
        the dtype of the computation. `mirror` names this stage's copy of a tied weight that
        another pipeline stage updates: its gradient is summed here, but it is not updated.
        None: there is no such copy."""
        self.module = module
        self._named_by = named_by
        self._offloads = config.offload
        self._sharded: ShardedGradients | None = None
        self._widened: frozenset[str] = frozenset()
        """Names of trainable parameters that sharding changed from half precision to float32."""
        if shards is not None:
            named = named_by.named_parameters()
            self._widened = frozenset(
                n for n, p in named if p.requires_grad and p.dtype in _LOW_PRECISION
            )
            self._sharded = shard(
                module,
                shards,
                param_dtype=run_dtype if run_dtype in _LOW_PRECISION else None,
                gradient_sync="step" if config.keeps_whole_gradients else "micro-batch",
            )
        own = dict(named_by.named_parameters())
        mirrored = None if mirror is None else own.pop(mirror)
        self._mirror = None
        if mirrored is not None and mirrored.requires_grad:
            self._mirror = MirrorGradient(mirrored)
        self._widened -= {mirror}
        self.optimizer = build_optimizer(own.items(), config)

    # -- gradients -------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop all gradients of the module, also those not summed over the ranks yet."""
        if self._sharded is not None:
            self._sharded.forget()
        self.optimizer.forget_gradients()
        if self._mirror is not None:
            self._mirror.forget()

    def mirror_gradient(self) -> Tensor | None:
        """Return the gradient of the copy of a tied weight that another pipeline stage updates, in
        full precision. None: there is no gradient yet."""
        assert self._mirror is not None
        return self._mirror.gradient

    def norm(self) -> float:
        """Return the gradient's norm over all ranks, leaving out a tied weight that another
        pipeline stage updates."""
        norm = torch.nn.utils.get_total_norm(list(self.optimizer.gradients().values()))
        return whole(norm).item()

    def non_finite(self) -> list[str]:
        """Return names of parameters whose gradient, as far as this rank has it, is not finite."""
        if self._sharded is not None:
            return self._sharded.non_finite()
        gradients = dict(self.optimizer.gradients())
        if self._mirror is not None and self._mirror.gradient is not None:
            gradients["the tied output layer"] = self._mirror.gradient
        return [n for n, g in gradients.items() if not bool(torch.linalg.vector_norm(g).isfinite())]

    def multiply_gradients(self, factor: float) -> bool:
        """Multiply the gradients so far by `factor`, and return True. Returns False, with nothing
        changed, for a sharded module, whose gradients FSDP2 holds until they are summed."""
        if self._sharded is not None:
            return False
        for gradient in self.optimizer.gradients().values():
            gradient.mul_(factor)
        if self._mirror is not None and self._mirror.gradient is not None:
            self._mirror.gradient.mul_(factor)
        return True

    # -- host memory -----------------------------------------------------------------------

    def offload(self) -> None:
        """Move optimizer state and gradients to host memory, if `train.offload` is set. They are
        brought back by the methods that use them."""
        if self._offloads:
            self.optimizer.offload()

    def reload_gradients(self) -> None:
        """Bring the gradients back from host memory, before a backward pass adds to them."""
        if self._offloads:
            self.optimizer.reload(state=False)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors kept for training the module: weights, optimizer state and gradients,
        summed over the ranks or not."""
        if self._sharded is not None:
            yield from self._sharded.tensors()
        yield from self.optimizer.tensors()
        if self._mirror is not None and self._mirror.gradient is not None:
            yield self._mirror.gradient

    # -- checkpoints -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by name, and as `master.NAME` the float32 weights that the
        checkpoint's model folder would hold in half precision."""
        masters = {f"master.{n}": p.detach() for n, p in self._masters()}
        return self.optimizer.state() | masters

    def state_like(self) -> dict[str, Tensor]:
        """Return tensors with the names, shapes and placements of all that `state` may return.
        Their values are arbitrary."""
        masters = {f"master.{n}": torch.empty_like(p) for n, p in self._masters()}
        return self.optimizer.state_like() | masters

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load copies of the tensors that `state` returned: optimizer state, and float32 master
        weights. Raises `TrainerError` if a master weight is missing."""
        rest = dict(tensors)
        for name, parameter in self._masters():
            if f"master.{name}" not in rest:
                raise TrainerError(f"the optimizer's state lacks the master weights of {name}")
            parameter.copy_(rest.pop(f"master.{name}"))
        self.optimizer.load_state(rest)

    def _masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (item for item in self._named_by.named_parameters() if item[0] in self._widened)

    def summing(self, run_filler: Callable[[], object]) -> Callable[[], object]:
        """Return a function that calls `run_filler` (forward and backward of a
        micro-batch of weight 0) in such a way that the backward pass also sums this
        module's gradients over the ranks."""
        return run_filler if self._sharded is None else partial(self._sharded.finish, run_filler)


def sum_gradients(all_trained: Iterable[Trained], run_filler: Callable[[], object]) -> None:
    """Sum the gradients of all these modules over the ranks. FSDP2 sums in a backward
    pass, so `run_filler` is called once, which runs forward and backward of a small
    micro-batch of weight 0."""
    finish = run_filler
    for trained in all_trained:
        finish = trained.summing(finish)
    if finish is not run_filler:
        finish()
