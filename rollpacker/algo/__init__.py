"""Algorithms: what turns rewards into advantages, and advantages into a loss.

An algorithm is a small file with a row of switches; the arithmetic is pure functions of tensors.
Importing this package loads no torch: the functions are loaded when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.own import Algorithm
from rollpacker.algo.row import Row
from rollpacker.algo.table import ALGORITHMS

if TYPE_CHECKING:
    from rollpacker.algo.baselines import advantages
    from rollpacker.algo.loss import TokenLoss, policy_loss, token_loss, value_loss
    from rollpacker.algo.shaping import shape_rewards
    from rollpacker.algo.step import StepAdvantages, step_advantages
    from rollpacker.algo.weights import token_weights

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "Row",
    "StepAdvantages",
    "TokenLoss",
    "advantages",
    "policy_loss",
    "shape_rewards",
    "step_advantages",
    "token_loss",
    "token_weights",
    "value_loss",
]

_LAZY = {
    "StepAdvantages": "step",
    "TokenLoss": "loss",
    "advantages": "baselines",
    "policy_loss": "loss",
    "shape_rewards": "shaping",
    "step_advantages": "step",
    "token_loss": "loss",
    "token_weights": "weights",
    "value_loss": "loss",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
