"""Draws tokens, with noise (random numbers) that depends on the sample and on nothing else.

Each sample has a key. The noise for its token number t is a hash of (key, t, place): every token of
the vocabulary gets a standard exponential, and the token with the smallest ratio of exponential to
probability is drawn (the Gumbel trick). When the weights change a little, the same noise gives the
same token almost as often as is possible at all. benchmarks/results/noise.json compares this to one
uniform number inverted through the cumulative distribution, where a change of any earlier entry
moves all borders behind it. The other samples of the batch, the number of slots and the device have
no influence.

A wide vocabulary is drawn from in two rounds, which takes a few hundred exponentials in place of a
hundred thousand: token j belongs to group j modulo the number of groups; first a group is drawn by
its probability, then a token of the group. Neighbours in the vocabulary, which are often alike, so
are in different groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDE_VOCABULARY = 64
"""Largest vocabulary that is drawn from in one round. A larger one takes two: group, then token."""
AT_ONCE = 1 << 18
"""Most logits drawn from together on a CPU, per torch thread: as float64 these are 2 MiB, which
stay in the thread's cache. All rows of a wide vocabulary would need new memory at each token."""
# The constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def num_groups(vocabulary_size: int) -> int:
    """Number of groups of tokens of which the first round draws one. A small vocabulary, drawn from
    in a single round, has as many groups as tokens."""
    if vocabulary_size <= WIDE_VOCABULARY:
        return vocabulary_size
    return 1 << math.ceil(math.log2(vocabulary_size) / 2)


def noise_size(vocabulary_size: int) -> int:
    """Number of random numbers that one draw takes: one a group, then one a token of the group."""
    groups = num_groups(vocabulary_size)
    return groups if groups == vocabulary_size else groups - (-vocabulary_size // groups)


def exponentials(keys: Tensor, first: Tensor, count: int, size: int) -> Tensor:
    """Noise (random numbers) for the tokens first[i] ... first[i] + count - 1 of sample i, whose
    key (int64) is keys[i]. Returns standard exponentials, float64 [samples, count, size]. A token's
    number and key are hashed in two rounds of the SplitMix64 finalizer, the key entering before
    each; a third round hashes the result with each of the `size` indices."""
    counter = first[:, None] + torch.arange(1, count + 1, device=keys.device)
    key = keys[:, None]
    token = _mix(_mix(counter * _GAMMA + key) ^ key)
    places = torch.arange(1, size + 1, device=keys.device) * _GAMMA
    bits = _mix(token[:, :, None] + places)
    # 52 bits and a half: neither 0 nor 1, whose logarithms would be no noise.
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)).mul_(_MIX_1)
    bits = bits.bitwise_xor_(_shifted(bits, 27)).mul_(_MIX_2)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """The 64-bit numbers shifted right, with zeros coming in; torch's shift repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


@dataclass(frozen=True, slots=True)
class DrawMode:
    """Whether any row of a batch is greedy, has another temperature than 1, or is truncated: `draw`
    leaves out the parts that none needs. Other rows get the same with and without them."""

    greedy: bool = False
    tempered: bool = False
    truncated: bool = False


def draw(
    logits: Tensor, noise: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, mode: DrawMode
) -> tuple[Tensor, Tensor]:
    """Draw one token per row. Returns the tokens and their log-probabilities under the distribution
    that they were drawn from, int64 and float64 [rows].

    logits [rows, vocabulary]; noise float64 [rows, `noise_size` or vocabulary]; temperature, top_p
    float64 [rows]; top_k int64 [rows], the vocabulary's size where it is off. At temperature 0 the
    likeliest token is taken, and its log-probability is that under the plain softmax. The
    log-probability is NaN if the row's logits hold a NaN.
    """
    at_once = max(AT_ONCE * torch.get_num_threads() // logits.shape[1], 1)
    if logits.device.type == "cpu" and len(logits) > at_once:
        found = []
        for start in range(0, len(logits), at_once):
            part = slice(start, start + at_once)
            settings = (temperature[part], top_k[part], top_p[part])
            found.append(draw(logits[part], noise[part], *settings, mode))
        return torch.cat([tokens for tokens, _ in found]), torch.cat([said for _, said in found])
    scores = logits
    if mode.tempered:
        divisor = torch.where(temperature > 0, temperature, 1.0)
        scores = logits.double() / divisor[:, None]
    probs = torch.softmax(scores, dim=-1, dtype=torch.float64)
    if mode.truncated:
        probs = _truncate(probs, top_k, top_p)
    tokens = _winners(probs, noise)
    if mode.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        tokens = torch.where(temperature[:, None] > 0, tokens, best)
    return tokens.squeeze(1), probs.gather(-1, tokens).log_().squeeze(1)


def _winners(probs: Tensor, noise: Tensor) -> Tensor:
    """Return the drawn tokens [rows, 1]: in each row that with the smallest ratio of exponential to
    probability. A token of probability 0 is never drawn. Noise with a number for every token (a
    small vocabulary's, or vLLM's) takes a single round."""
    size = probs.shape[-1]
    groups = num_groups(size)
    if noise.shape[-1] == size:
        return (noise / probs).argmin(dim=-1, keepdim=True)
    whole, rest = divmod(size, groups)
    sums = probs[:, : whole * groups].view(-1, whole, groups).sum(dim=1)
    if rest:
        sums[:, :rest] += probs[:, whole * groups :]
    group = (noise[:, :groups] / sums).argmin(dim=-1, keepdim=True)
    rounds = noise.shape[1] - groups
    tokens = group + groups * torch.arange(rounds, device=probs.device)
    inside = probs.gather(-1, tokens.clamp(max=size - 1)).masked_fill_(tokens >= size, 0.0)
    place = (noise[:, groups:] / inside).argmin(dim=-1, keepdim=True)
    winners: Tensor = tokens.gather(-1, place)
    return winners


def _truncate(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep in each row the top_k likeliest tokens, and of these the fewest whose probabilities
    reach top_p in sum. Returns the probabilities, normalized again."""
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
