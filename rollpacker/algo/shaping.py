"""Changes to rewards that depend on a response's length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig


def shape_rewards(
    rewards: Tensor,
    lengths: Sequence[int],
    *,
    config: AlgorithmConfig,
    max_response_tokens: int | None,
) -> Tensor:
    """Rewards [N] less DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4): nothing up
    to `overlong_buffer_tokens` before `max_response_tokens`, then linearly more up to
    `overlong_penalty` at the limit. Raises `ValueError` if the punishment is on and the limit is
    None, or not above the buffer."""
    buffer = config.overlong_buffer_tokens
    if buffer == 0:
        return rewards
    if max_response_tokens is None or max_response_tokens <= buffer:
        raise ValueError(
            f"overlong_buffer_tokens ({buffer}) must be less than max_response_tokens "
            f"({max_response_tokens})"
        )
    over = torch.tensor(lengths, dtype=rewards.dtype) - (max_response_tokens - buffer)
    return rewards - config.overlong_penalty * (over / buffer).clamp(0, 1)
