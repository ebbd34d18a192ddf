"""Every algorithm, one row each. A new one adds its file and its row; the trainer does not
change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rollpacker.algo import grpo
from rollpacker.algo.base import AlgorithmConfig


class AdvantageFunction(Protocol):
    def __call__(
        self, rewards: Tensor, group_ids: Tensor, *, config: AlgorithmConfig
    ) -> Tensor: ...


class TokenWeightFunction(Protocol):
    def __call__(
        self, lengths: Sequence[int], *, config: AlgorithmConfig, denominator: int | None = None
    ) -> list[float]: ...


LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""As `grpo.policy_loss`: (logprobs, old_logprobs, advantages, mask, *, config, ref_logprobs) ->
per-token loss and sums over tokens, which the trainer turns into means under `actor/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    advantages: AdvantageFunction
    token_weights: TokenWeightFunction
    loss: LossFunction


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(
        advantages=grpo.advantages, token_weights=grpo.token_weights, loss=grpo.policy_loss
    ),
}
