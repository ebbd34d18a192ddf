"""AdamW, also with 8-bit moments, and Muon. Master weights and gradient sums are float32, whatever
precision the model has.

For a bfloat16 model every backward pass adds its gradients to float32 sums and frees them; the step
updates float32 masters and rounds them into the model, in place. A float32 weight is its own
master. Parameters may be plain tensors or, all of them, FSDP2's `DTensor`s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollpacker.trainer.quantization import (
    IN_A_LAYER,
    adamw_8bit,
    moments_like,
    moments_of,
    restore_moments,
)
from rollpacker.trainer.sharding import placed_like, whole
from rollpacker.trainer.trainer import NonFiniteError, TrainConfig, TrainerStateError
from rollpacker.weights.host_store import HostStore, local

_FULL_PRECISION = (torch.float32, torch.float64)


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: TrainConfig
) -> MasterOptimizer:
    """Build the optimizer that `train.optimizer` names, for the parameters that require a gradient.
    Call this after sharding, which replaces the parameters. Raises `ValueError` if the model or the
    installed torch does not allow what the config asks for."""
    return MasterOptimizer(
        named_parameters,
        optimizer=config.optimizer,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


class MasterOptimizer:
    """Updates float32 masters of a model's weights. Weight decay is on matrices only, not on biases
    and norms. With optimizer="muon", Muon updates the matrices inside the layers, with momentum
    0.95 and torch's other defaults; AdamW, with `betas` and `eps`, updates embeddings, head, norms
    and biases. Muon's updates are scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`:
    an orthogonal update of a matrix [A, B] times 0.2 * sqrt(max(A, B)) has a root mean square of
    about 0.2, as AdamW's typically has; Liu et al. 2025, "Muon is scalable for LLM training"). So
    both use one learning rate and one weight decay, of AdamW's usual size. `offload` moves tensors
    to host memory that are on devices of type `offload_from`."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw",
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        offload_from: str = "cuda",
    ) -> None:
        self._weights = {n: p for n, p in named_parameters if p.requires_grad}
        self._masters = {name: _master_of(weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                _after_gradient(weight, _GradientSum(self._masters[name]))
        orthogonal = self._orthogonalized_names() if optimizer == "muon" else set()
        elementwise = {n: m for n, m in self._masters.items() if n not in orthogonal}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._is_coded = optimizer == "adamw_8bit"
        if elementwise:
            make = _adamw_8bit if self._is_coded else _adamw
            self._optimizers.append(make(elementwise.values(), betas, eps, weight_decay))
        if orthogonal:
            matrices = [self._masters[name] for name in self._masters if name in orthogonal]
            self._optimizers.append(_muon(matrices, weight_decay))
        self._orthogonal = frozenset(orthogonal)
        self.offloaded_state = HostStore(offload_from)
        self._offloaded_gradients = HostStore(offload_from)
        self._parked_gradients: dict[str, Tensor] = {}

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradients of those parameters that have one, by name, not copied."""
        self.reload(state=False)
        return {n: m.grad for n, m in self._masters.items() if m.grad is not None}

    def forget_gradients(self) -> None:
        self._parked_gradients = {}
        self._offloaded_gradients.forget()
        for name, master in self._masters.items():
            master.grad = None
            self._weights[name].grad = None

    def step(
        self,
        learning_rate: float,
        max_grad_norm: float | None,
        *,
        gradient_scale: float = 1.0,
        whole_norm: float | None = None,
    ) -> float:
        """Multiply the gradients by `gradient_scale`, clip them, update the weights, drop the
        gradients. Returns the gradients' norm over all processes, after scaling and before
        clipping. Optimizer state is brought back from host memory first. `whole_norm` is given for
        a pipeline stage: the norm of the gradient over all stages, by which the stage then clips,
        and which is returned. None: this model's own norm is used. Raises `NonFiniteError` if the
        norm is NaN or infinite; weights and optimizer are then unchanged."""
        self.reload()
        gradients = self.gradients()
        shards = [local(gradient) for gradient in gradients.values()]
        if gradient_scale != 1.0 and shards:
            torch._foreach_mul_(shards, gradient_scale)
        norm = whole(torch.nn.utils.get_total_norm(list(gradients.values())))
        if whole_norm is not None:
            norm = torch.full_like(norm, whole_norm)
        norm_value = norm.item()
        if not torch.isfinite(norm):
            where = _describe_non_finite(gradients)
            self.forget_gradients()
            raise NonFiniteError(
                f"the gradient's norm is {norm_value}{where}; no update was applied"
            )
        if max_grad_norm is not None and shards:
            torch._foreach_mul_(shards, torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        self._round_into_model()
        self.forget_gradients()
        return norm_value

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors, keyed by kind and parameter name: `exp_avg.NAME`,
        `exp_avg_sq.NAME` and `step.NAME`, or `momentum_buffer.NAME` for Muon, or with 8 bits
        `state1.NAME`, `absmax1.NAME` and so on; and `master.NAME` for float32 weights kept beside
        the model's. The tensors are not copied; they are `DTensor`s where the parameters are.
        Offloaded tensors are brought back first, unless they can be read in host memory."""
        if not self.offloaded_state.is_readable:
            self.reload()
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._state_of(master).items():
                tensors[f"{key}.{name}"] = value
            if master is not self._weights[name]:
                tensors[f"master.{name}"] = master.detach()
        return tensors

    def state_like(self) -> dict[str, Tensor]:
        """Return tensors with the names, shapes, dtypes and placements of all that `state` may
        return. Their values are arbitrary."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, blank in self._blank_state(name).items():
                tensors[f"{key}.{name}"] = blank
            if master is not self._weights[name]:
                tensors[f"master.{name}"] = torch.empty_like(master.detach())
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a copy of what `state` returned, bit for bit, and drop the gradients. Sharded
        parameters need `DTensor`s. Raises `TrainerStateError` if the state is for other parameters
        or another `train.optimizer`."""
        self.reload()
        per_name: dict[str, dict[str, Tensor]] = {}
        for full_name, value in tensors.items():
            key, _, name = full_name.partition(".")
            self._check_state(key, name, value)
            per_name.setdefault(name, {})[key] = value
        masters = {name: per_name.get(name, {}).pop("master", None) for name in self._masters}
        for name, master in self._masters.items():
            if master is not self._weights[name] and masters[name] is None:
                raise TrainerStateError(f"the optimizer's state lacks the master weights of {name}")
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                saved = masters[name]
                assert saved is not None, name
                master.copy_(saved)
        for optimizer in self._optimizers:
            self._load_into(optimizer, {n: state for n, state in per_name.items() if state})
        self.forget_gradients()

    def offload(self) -> None:
        """Move optimizer state, float32 master weights and gradients to host memory. `reload` must
        be called before the next backward pass."""
        gradients = self.gradients()
        for name in gradients:
            self._masters[name].grad = None
        self._parked_gradients = gradients
        self._offloaded_gradients.offload(gradients.values())
        self.offloaded_state.offload(
            value
            for name, master in self._masters.items()
            for value in [
                *(v for k, v in self._state_of(master).items() if k != "step"),
                *([master] if master is not self._weights[name] else []),
            ]
        )

    def reload(self, *, state: bool = True) -> None:
        """Bring back what `offload` moved, bit for bit. With `state` false only the gradients come
        back, which is enough for backward passes; `step` then brings back the rest. Idempotent."""
        self._offloaded_gradients.reload()
        for name, gradient in self._parked_gradients.items():
            assert self._masters[name].grad is None, f"a backward pass while {name} was offloaded"
            self._masters[name].grad = gradient
        self._parked_gradients = {}
        if state:
            self.offloaded_state.reload()

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors kept for training: the trained weights, float32 master
        weights, gradients and optimizer state. Gradients that `offload` has moved to
        host memory are left out."""
        for name, master in self._masters.items():
            yield from (self._weights[name], master)
            if master.grad is not None:
                yield master.grad
            yield from (one for one in self._state_of(master).values() if isinstance(one, Tensor))

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                self._weights[name].copy_(master)

    def _orthogonalized_names(self) -> set[str]:
        names = {n for n, m in self._masters.items() if m.ndim == 2 and IN_A_LAYER.search(n)}
        if not names:
            raise ValueError(
                "train.optimizer=muon is for the matrices inside a model's layers, and this model "
                "trains none: set train.optimizer=adamw"
            )
        return names

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        for optimizer in self._optimizers:
            if master in optimizer.state:
                state: dict[str, Tensor] = optimizer.state[master]
                return moments_of(state) if self._is_coded else state
        return {}

    def _blank_state(self, name: str) -> dict[str, Tensor]:
        """Return tensors with the names, shapes and dtypes of the optimizer state of the parameter
        `name`. Their values are arbitrary."""
        master = self._masters[name]
        if self._is_coded:
            return moments_like(master)
        if name in self._orthogonal:
            return {"momentum_buffer": torch.empty_like(master.detach())}
        blank = {key: torch.empty_like(master.detach()) for key in ("exp_avg", "exp_avg_sq")}
        return blank | {"step": torch.tensor(0.0)}

    def _check_state(self, key: str, name: str, value: Tensor) -> None:
        if name not in self._masters:
            raise TrainerStateError(f"the optimizer's state has {name}, which the model has not")
        master = self._masters[name]
        kept = self._blank_state(name) | {"master": master}
        if key in kept and value.shape != kept[key].shape:
            raise TrainerStateError(
                f"the optimizer's state of {name} has shape {tuple(value.shape)}, "
                f"the model's has {tuple(kept[key].shape)}"
            )
        if key not in kept:
            raise TrainerStateError(
                f"the optimizer's state of {name} has {key}, which this optimizer does not keep: "
                "it was saved with another train.optimizer"
            )
        assert key == "step" or isinstance(value, DTensor) == isinstance(master, DTensor), name

    def _load_into(
        self, optimizer: torch.optim.Optimizer, per_name: Mapping[str, dict[str, Tensor]]
    ) -> None:
        if self._is_coded:
            restore_moments(optimizer, {self._masters[n]: state for n, state in per_name.items()})
            return
        name_of = {id(master): name for name, master in self._masters.items()}
        ordered = [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        optimizer.load_state_dict(
            {
                "state": {
                    i: {key: value.clone() for key, value in per_name[n].items()}
                    for i, n in enumerate(ordered)
                    if n in per_name
                },
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )


class MirrorGradient:
    """Sums, in full precision, the gradient of this pipeline stage's copy of a tied weight. Another
    stage, which owns the weight, updates it."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._sum: Tensor | None = None
        """Float32 sum of the gradients of a half-precision weight. None: there was no gradient yet,
        or the weight is in full precision and its own `grad` is the sum."""
        if weight.dtype not in _FULL_PRECISION:
            _after_gradient(weight, self._add)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient summed so far, not copied. None: there was no backward pass."""
        return self._weight.grad if self._sum is None else self._sum

    def forget(self) -> None:
        self._weight.grad = self._sum = None

    def _add(self, weight: Tensor) -> None:
        fresh = weight.grad
        assert fresh is not None
        self._sum = fresh.float() if self._sum is None else self._sum.add_(fresh)
        weight.grad = None


class _GradientSum:
    """A hook on a parameter that moves each new gradient into the float32 sum of gradients."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, weight: Tensor) -> None:
        fresh = weight.grad
        assert fresh is not None
        if self._master.grad is None:
            self._master.grad = fresh.to(self._master.dtype)
        else:
            self._master.grad.add_(fresh)
        weight.grad = None


def _after_gradient(weight: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's


def _master_of(weight: nn.Parameter) -> Tensor:
    if weight.dtype in _FULL_PRECISION:
        return weight
    return weight.detach().to(torch.float32, copy=True).requires_grad_()


def _adamw(
    masters: Iterable[Tensor], betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    groups = _decayed(list(masters), weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def _adamw_8bit(
    masters: Iterable[Tensor], betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    masters = list(masters)
    if isinstance(masters[0], DTensor):
        raise ValueError(
            "train.optimizer=adamw_8bit does not go with several processes (train.processes), "
            "whose shards cut its blocks: set train.optimizer=adamw"
        )
    return adamw_8bit(_decayed(masters, weight_decay), betas, eps)


def _decayed(masters: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: matrices with weight decay, and all else without."""
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _muon(matrices: list[Tensor], weight_decay: float) -> torch.optim.Optimizer:
    if isinstance(matrices[0], DTensor):
        return _ShardedMuon(matrices, weight_decay)
    return torch.optim.Muon(
        matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )


class _ShardedMuon(torch.optim.Optimizer):
    """torch's Muon for matrices of which every process has a shard. An update needs the whole
    matrix. torch's own arithmetic on shards adds bfloat16 numbers up in another order, which
    changes the update by more than a percent. So the momentum is kept in shards, each matrix in
    turn is gathered, every process computes its update and keeps its shard."""

    def __init__(self, matrices: list[Tensor], weight_decay: float) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody gives one
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: DTensor, group: Mapping[str, float]) -> None:
        gradient = matrix.grad
        assert isinstance(gradient, DTensor)
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1.0 - group["momentum"])
        nesterov = gradient.lerp(buffer, group["momentum"])
        assert isinstance(nesterov, DTensor)
        update = _orthogonal_update(nesterov.full_tensor(), group["lr"])
        shard = placed_like(matrix, update)
        matrix.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(shard)


def _orthogonal_update(gradient: Tensor, learning_rate: float) -> Tensor:
    """Return the change that torch's Muon, without momentum and decay, makes to a matrix with this
    gradient at this learning rate."""
    change = torch.zeros_like(gradient, requires_grad=True)
    change.grad = gradient
    torch.optim.Muon(
        [change],
        lr=learning_rate,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()  # type: ignore[no-untyped-call]  # torch's
    return change.detach()


def _describe_non_finite(gradients: Mapping[str, Tensor]) -> str:
    for name, gradient in gradients.items():
        if whole(gradient.isfinite().logical_not().sum()).item():
            return f", first in {name}"
    return " (each gradient is finite, their norm is not)"
