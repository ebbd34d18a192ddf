"""Drawing tokens, with noise that depends on the sample and on nothing else.

Each sample has a key; the noise for its token number t is a hash of (key, t), a uniform in [0, 1)
that is inverted through the double-precision cumulative distribution. Who shares the batch, how
many slots there are and which device computes has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from rollpacker.core.ids import SampleId

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_key(seed: int, sample: SampleId, turn: int = 0) -> int:
    """64-bit key of a sample's noise; every further turn has noise of its own."""
    text = f"{seed}|{sample}" if turn == 0 else f"{seed}|{sample}|{turn}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, first: np.ndarray, count: int) -> np.ndarray:
    """Noise for tokens first[i] ... first[i] + count - 1 of the samples with these keys (uint64).

    Returns float64 [samples, count] in [0, 1), multiples of 2^-53. The hash is two rounds of the
    SplitMix64 finalizer (Steele, Lea and Flood 2014), the key entering before each.
    """
    counter = first.astype(np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    key = keys[:, None]
    bits = _mix(_mix(counter * _GAMMA + key) ^ key)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = bits ^ (bits >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class DrawMode:
    """Which parts of `draw` any row of a batch needs; other rows come out the same bit for bit."""

    greedy: bool = False
    tempered: bool = False
    truncated: bool = False


def draw(
    logits: torch.Tensor,
    noise: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    mode: DrawMode,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, and its log-probability under the distribution that it was drawn from.

    logits [rows, vocabulary]; noise, temperature, top_p float64 [rows]; top_k int64 [rows], the
    vocabulary's size where it is off. A temperature of 0 is greedy: log-probability under the plain
    softmax. Returns int64 and float64 [rows]; the log-probability is NaN if the row's logits hold a
    NaN.
    """
    scores = logits
    if mode.tempered:
        divisor = torch.where(temperature > 0, temperature, 1.0)
        scores = logits.double() / divisor[:, None]
    probs = torch.softmax(scores, dim=-1, dtype=torch.float64)
    if mode.truncated:
        probs = _truncate(probs, top_k, top_p)
    cdf = probs.cumsum(dim=-1)
    # Below the last entry whatever the rounding, so a token of probability 0 is never drawn.
    target = noise.unsqueeze(1) * cdf.narrow(1, cdf.shape[1] - 1, 1)
    tokens = torch.searchsorted(cdf, target, right=True)
    # Only a NaN leads past the end.
    tokens.clamp_(max=logits.shape[-1] - 1)
    if mode.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.where(temperature[:, None] > 0, tokens, best)
    return tokens.squeeze(1), probs.gather(-1, tokens).log_().squeeze(1)


def _truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the top_k likeliest tokens, of those the fewest that reach top_p; renormalize."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = ranked.masked_fill(rank >= top_k[:, None], 0.0)
    before = ranked.cumsum(dim=-1) - ranked
    total = ranked.sum(dim=-1, keepdim=True)
    ranked = ranked.masked_fill((before >= top_p[:, None] * total) & (rank > 0), 0.0)
    ranked /= ranked.sum(dim=-1, keepdim=True)
    kept = torch.zeros_like(probs).scatter_(-1, order, ranked)
    wanted = (top_k < probs.shape[-1]) | (top_p < 1)
    return torch.where(wanted[:, None], kept, probs)
