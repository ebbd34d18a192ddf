"""Tries the user's own functions on made-up tensors before a run begins.

What would be wrong later is reported now, with one message: a signature, a shape, a number that is
not finite, a loss that no gradient comes through, or one that changes with the samples it is
computed together with, so that the gradient would depend on how a step is cut into micro-batches.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.loss import token_loss
from rollpacker.algo.own import OwnFunction
from rollpacker.algo.step import step_advantages

_TOLERANCE = 1e-5
"""Largest difference, as a share of the largest number, at which two results count as equal. The
tensors are float64, of which a function may make float32."""
_TRIED = "tried on made-up tensors before the run"


class _AnyReward(dict[str, Tensor]):
    """Made-up rewards for trying a function before rewards have names: any name gives the same."""

    def __init__(self, rewards: Tensor) -> None:
        super().__init__({"reward": rewards})
        self._rewards = rewards

    def __missing__(self, name: str) -> Tensor:
        return self._rewards.clone()


def check_own(config: AlgorithmConfig, *, samples_per_prompt: int) -> None:
    """Loads and tries the user's functions that `config` names, if there are any. Raises
    `ValueError`, with one message, if a function cannot be trained with."""
    advantages, loss = config.own_advantages, config.own_loss
    if advantages is not None:
        _check_present(
            advantages,
            {
                "values": (config.needs_critic, "algorithm.advantage=gae"),
                "teacher_log_probs": (config.needs_teacher, "algorithm.advantage=teacher"),
            },
        )
        _check_advantages(config, advantages, samples_per_prompt)
    if loss is not None:
        _check_loss(config, loss)


def grouped_advantages(config: AlgorithmConfig, *, samples_per_prompt: int) -> bool:
    """Whether advantages depend on a sample's group alone, as tried with made-up groups."""
    whole, *parts = (_advantages(config, samples_per_prompt, group) for group in (None, 0, 1, 2))
    return _are_close(torch.cat(parts), whole)


def _check_present(own: OwnFunction, needed: dict[str, tuple[bool, str]]) -> None:
    for name, (is_there, setting) in needed.items():
        if name in own.takes and not is_there:
            raise ValueError(f"{own.said_by} takes {name}, which there is only with {setting}")


def _check_advantages(config: AlgorithmConfig, own: OwnFunction, samples_per_prompt: int) -> None:
    whole = _tried(own, lambda: _advantages(config, samples_per_prompt, None))
    if not bool(whole.isfinite().all()):
        raise ValueError(
            f"{own.said_by}: {int((~whole.isfinite()).sum())} of {len(whole)} advantages are not "
            f"finite, {_TRIED}; equal rewards in a group are among them"
        )


def _advantages(config: AlgorithmConfig, samples_per_prompt: int, group: int | None) -> Tensor:
    """Advantages of three made-up groups, or of group number `group` alone (None: all three). The
    last has a sample less, as where a verdict is missing, and the second has equal rewards."""
    least = 2 if config.needs_groups else 1
    sizes = [samples_per_prompt, samples_per_prompt, max(samples_per_prompt - 1, least)]
    group_ids = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    places = torch.arange(len(group_ids))
    rewards = torch.where(group_ids == 1, 1.0, (places * 7 % 4).double())
    lengths = 1 + places * 5 % 3
    is_asked = torch.ones_like(group_ids, dtype=torch.bool) if group is None else group_ids == group
    of_token = is_asked.repeat_interleave(lengths)
    numbers = torch.arange(len(of_token), dtype=torch.float64)[of_token].sin() - 1.5
    return step_advantages(
        rewards[is_asked],
        group_ids[is_asked],
        lengths[is_asked].tolist(),
        config=config,
        log_probs=numbers,
        ref_log_probs=1.1 * numbers,
        teacher_log_probs=0.9 * numbers,
        values=0.3 * numbers,
        known={
            "rewards_by_name": _AnyReward(rewards[is_asked]),
            "truncated": torch.zeros_like(is_asked[is_asked]),
            "tokens": torch.arange(len(of_token))[of_token],
            "rollout_log_probs": 1.01 * numbers,
        },
    ).advantages


def _check_loss(config: AlgorithmConfig, own: OwnFunction) -> None:
    lengths = torch.tensor([3, 1, 4])
    sample_ids = torch.arange(3).repeat_interleave(lengths)
    numbers = torch.arange(8, dtype=torch.float64)
    log_probs = (numbers.sin() - 1.5).requires_grad_()
    signs = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)[sample_ids]
    entropy = (numbers.cos() + 1.5).requires_grad_()

    def of(places: Tensor) -> Tensor:
        ids = torch.unique(sample_ids[places], return_inverse=True)[1]
        given = log_probs[places]
        return token_loss(
            given,
            given.detach() + 0.02 * (numbers[places] * 7).cos(),
            signs[places],
            ids,
            num_samples=int(ids.max()) + 1,
            config=config,
            ref_log_probs=given.detach() - 0.1 if config.needs_reference else None,
            rollout_log_probs=given.detach() - 0.01,
            entropy=entropy[places],
        ).per_token

    whole = _tried(own, lambda: of(torch.arange(8)))
    if not bool(whole.isfinite().all()):
        raise ValueError(f"{own.said_by}: losses that are not finite, {_TRIED}")
    gradient = None
    if whole.requires_grad:
        (gradient,) = torch.autograd.grad(whole.sum(), log_probs, allow_unused=True)
    if gradient is None or not bool(gradient.any()):
        raise ValueError(
            f"{own.said_by}: no gradient comes through it to log_probs, {_TRIED}: something "
            "detaches them, or the loss does not use them"
        )
    if not bool(gradient.isfinite().all()):
        raise ValueError(f"{own.said_by}: its gradient is not finite, {_TRIED}")
    parts = [
        _tried(own, partial(of, (sample_ids == sample).nonzero()[:, 0])) for sample in range(3)
    ]
    if not _are_close(whole.detach(), torch.cat(parts).detach()):
        raise ValueError(
            f"{own.said_by}: the loss of a sample changes with the samples it is computed together "
            "with, so that the gradient would depend on micro-batches and processes. Give the loss "
            "of each token, without a mean over others (algorithm.loss_aggregation adds them up); "
            "what compares samples belongs into the advantages"
        )


def _tried(own: OwnFunction, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, ValueError) and own.said_by in str(error):
            raise
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise ValueError(
            f"{own.said_by} raised {type(error).__name__}: {error}{where}, {_TRIED} (groups need "
            "not have equally many samples)"
        ) from error


def _are_close(found: Tensor, expected: Tensor) -> bool:
    scale = max(float(expected.abs().max()), 1.0)
    same_shape = found.shape == expected.shape
    return same_shape and bool(((found - expected).abs() <= _TOLERANCE * scale).all())
