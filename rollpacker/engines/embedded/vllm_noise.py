"""The noise (random numbers) with which vLLM's second model runner draws tokens, computed in torch.

vLLM hashes a request's seed, a position and a token (MurmurHash3 of 32 bits), and adds Gumbel noise
made of the hash to the token's logit. This module makes standard exponentials of the same hash:
Gumbel noise is minus the logarithm of one, and the largest sum of logit and Gumbel noise is the
smallest ratio of exponential to probability. So from the same logits the embedded engine draws the
token that vLLM draws, but for ties in the last digits of a float32.

Written after `vllm/v1/worker/gpu/sample/gumbel.py` of vLLM 0.32. A position counts the prompt's
tokens, too: the noise of a drawn token is that of the position before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_NUM_BYTES = 16
"""Length of what is hashed: seed (8 bytes), position and token (4 bytes each)."""
_SERIES_UP_TO = 0.25
"""Uniform number below which the logarithm comes from a series of `_SERIES_TERMS` terms, as in
vLLM, whose GPU kernel has no exact one."""
_SERIES_TERMS = 8


def exponentials(keys: Tensor, first: Tensor, count: int, size: int) -> Tensor:
    """Return vLLM's noise at the positions first[i] ... first[i] + count - 1 of sample i, whose key
    (int64) is vLLM's seed: a standard exponential for each of the `size` tokens of the vocabulary,
    float64 [samples, count, size]."""
    positions = first[:, None] + torch.arange(count, device=keys.device)
    tokens = torch.arange(size, device=keys.device)
    return _exponential(
        _uniform(_hashed(keys[:, None, None], positions[:, :, None], tokens))
    ).double()


def _exponential(uniform: Tensor) -> Tensor:
    series = torch.zeros_like(uniform)
    for term in range(_SERIES_TERMS, 0, -1):
        series = 1 / term + uniform * series
    direct = (1 - uniform).clamp_(min=2.0**-24).log_().neg_()
    return torch.where(uniform < _SERIES_UP_TO, uniform * series, direct)


def _hashed(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """MurmurHash3 of each (seed, position, token): 32 bits, as int64. The arguments are int64 and
    are broadcast."""
    bits = torch.zeros_like(seeds)
    for word in (seeds, seeds >> 32, positions, tokens):
        key = _rotated((word & _MASK) * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
        bits = (_rotated(bits ^ key, 13) * 5 + 0xE6546B64) & _MASK
    bits = bits ^ _NUM_BYTES
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _MASK
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _MASK
    return bits ^ (bits >> 16)


def _rotated(bits: Tensor, by: int) -> Tensor:
    return (bits << by | bits >> (32 - by)) & _MASK


def _uniform(bits: Tensor) -> Tensor:
    """Numbers between 0 and 1, float32, from 32 bits each: halves are scaled one by one, as vLLM
    scales them, so that small numbers keep all digits."""
    high, low = (bits >> 16).float(), (bits & 0xFFFF).float()
    return high * 2.0**-16 + (low + 0.5) * 2.0**-32
