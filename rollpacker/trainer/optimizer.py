"""AdamW with float32 master weights and gradient sums, whatever precision the model runs in.

For a bfloat16 model every backward pass adds its gradients to float32 sums and frees them; the step
updates float32 masters and rounds them into the model, in place. A float32 model is its own master.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rollpacker.trainer.base import NonFiniteError, TrainerError

_FULL_PRECISION = (torch.float32, torch.float64)


class MasterAdamW:
    """Weight decay is on matrices only, not on biases and norms."""

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            if self._masters[name] is not weight:
                weight.register_post_accumulate_grad_hook(_GradientSum(self._masters[name]))
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=betas,
            eps=eps,
            fused=True,
        )

    def gradients(self) -> dict[str, Tensor]:
        """The sums so far, by parameter; parameters without any are left out."""
        return {n: m.grad for n, m in self._masters.items() if m.grad is not None}

    def rescale_gradients(self, factor: float) -> None:
        """Multiply the sums so far."""
        for gradient in self.gradients().values():
            gradient.mul_(factor)

    def forget_gradients(self) -> None:
        for name, master in self._masters.items():
            master.grad = None
            self._weights[name].grad = None

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        """Clip, update, forget the gradients. Returns their norm before clipping.

        Raises `NonFiniteError` if that is NaN or infinite; weights and optimizer are then as
        before.
        """
        gradients = list(self.gradients().values())
        norm = torch.nn.utils.get_total_norm(gradients)
        norm_value = norm.item()
        if not torch.isfinite(norm):
            bad = [name for name, g in self.gradients().items() if not bool(g.isfinite().all())]
            self.forget_gradients()
            where = (
                f", first in {bad[0]}" if bad else " (each gradient is finite, their norm is not)"
            )
            raise NonFiniteError(
                f"the gradient's norm is {norm_value}{where}; no update was applied"
            )
        if max_grad_norm is not None:
            masters = [m for m in self._masters.values() if m.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(masters, max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._round_into_model()
        self.forget_gradients()
        return norm_value

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                self._weights[name].copy_(master)

    def state(self) -> dict[str, Tensor]:
        """`exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`, and `master.NAME` where master and weight
        differ."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
            if master is not self._weights[name]:
                tensors[f"master.{name}"] = master.detach()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """What `state` gave, exactly. Raises `TrainerError` if it belongs to other parameters."""
        per_name: dict[str, dict[str, Tensor]] = {}
        for full_name, value in tensors.items():
            key, _, name = full_name.partition(".")
            if name not in self._masters:
                raise TrainerError(f"the optimizer's state has {name}, which the model has not")
            if key != "step" and value.shape != self._masters[name].shape:
                raise TrainerError(
                    f"the optimizer's state of {name} has shape {tuple(value.shape)}, "
                    f"the model's has {tuple(self._masters[name].shape)}"
                )
            per_name.setdefault(name, {})[key] = value
        for name, master in self._masters.items():
            saved = per_name.get(name, {}).pop("master", None)
            if master is self._weights[name]:
                continue
            if saved is None:
                raise TrainerError(f"the optimizer's state lacks the master weights of {name}")
            master.copy_(saved)
        self._load_adamw({n: state for n, state in per_name.items() if state})
        self.forget_gradients()

    def _load_adamw(self, per_name: Mapping[str, dict[str, Tensor]]) -> None:
        name_of = {id(master): name for name, master in self._masters.items()}
        ordered = [name_of[id(p)] for group in self._adamw.param_groups for p in group["params"]]
        self._adamw.load_state_dict(
            {
                "state": {i: per_name[n] for i, n in enumerate(ordered) if n in per_name},
                "param_groups": self._adamw.state_dict()["param_groups"],
            }
        )


class _GradientSum:
    """Moves a parameter's fresh gradient into its master's float32 sum."""

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


def _master_of(weight: nn.Parameter) -> Tensor:
    if weight.dtype in _FULL_PRECISION:
        return weight
    return weight.detach().to(torch.float32, copy=True).requires_grad_()
