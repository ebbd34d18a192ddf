"""The embedded engine's port of the noise of vLLM's second model runner. What vLLM's own kernels
give is written down here; where vLLM and Triton's interpreter are (`make test-vllm`) they are
run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollpacker.engines.embedded import vllm_noise
from rollpacker.engines.embedded.rows import Pending, RowTable
from rollpacker.engines.embedded.sampling import DrawMode, draw
from rollpacker.engines.engine import GenerationRequest, SamplingParams, sample_key
from tests.engines.tiny import SECOND_RUNNER, VOCABULARY, generate, group, request, tiny_model

MANY = 30 * 4096
HASHES = {  # (seed, position, token): 32 bits
    (0, 0, 0): 0x8134CDF8,
    (1, 0, 0): 0x92228D1B,
    (0, 1, 0): 0xD568719,
    (0, 0, 1): 0x990201,
    (-1, 1 << 20, 151_935): 0x5232A005,
    ((1 << 63) - 1, 7, 50_256): 0x188E536,
    (-(1 << 63), 12_345, 3): 0xD4138E0B,
    (0x123456789ABCDEF, 511, 47): 0xF797AC10,
}
SEEDS = torch.tensor([5, -9, 1 << 40]).repeat(4)
POSITIONS = torch.arange(12) + 30
LOGITS = torch.arange(12 * 48).reshape(12, 48).mul(37).remainder(101).float() / 25
DRAWN = [7, 42, 35, 44, 37, 41, 36, 35, 9, 33, 44, 22]
"""What vLLM's `gumbel_sample` draws from LOGITS with SEEDS at POSITIONS."""


def test_the_hash_is_that_of_vllms_kernel() -> None:
    seeds, positions, tokens = (torch.tensor(column) for column in zip(*HASHES, strict=True))
    assert vllm_noise._hashed(seeds, positions, tokens).tolist() == list(HASHES.values())


def test_tokens_are_drawn_as_vllms_kernel_draws_them() -> None:
    noise = vllm_noise.exponentials(SEEDS, POSITIONS, 1, 48)[:, 0]
    columns = torch.ones(12, dtype=torch.float64), torch.full((12,), 48), torch.ones(12)
    assert draw(LOGITS, noise, *columns, DrawMode())[0].tolist() == DRAWN


def test_noise_is_exponential_and_of_its_own_position() -> None:
    keys = torch.tensor([sample_key(0, request(n).sample) >> 1 for n in range(40)])
    noise = vllm_noise.exponentials(keys, torch.zeros_like(keys), 50, 100)
    assert noise.min() > 0 and noise.dtype == torch.float64
    assert noise.mean().item() == pytest.approx(1, abs=0.01)
    assert noise.var().item() == pytest.approx(1, abs=0.03)
    later = vllm_noise.exponentials(keys[3:4], torch.tensor([20]), 5, 100)
    assert torch.equal(later[0], noise[3, 20:25])


def test_rows_draw_with_the_noise_of_the_position_before_the_token() -> None:
    """Counted from the prompt's first token, as vLLM counts."""
    rows = RowTable(torch.device("cpu"), VOCABULARY, noise_of_vllm=True)
    rows.reserve(2)
    asked = GenerationRequest(
        sample=request(7).sample,
        prompt_tokens=(1, 2, 3),
        sampling=SamplingParams(max_response_tokens=9),
    )
    entry = Pending(asked, 0)
    first = rows.add([entry])
    rows.begin(0, torch.tensor([4]).numpy(), torch.zeros(1).numpy())
    key = entry.key(0)
    keys = torch.tensor([key if key < 1 << 63 else key - (1 << 64)])
    wanted = vllm_noise.exponentials(keys, torch.tensor([2]), 2, VOCABULARY)
    assert torch.equal(first, wanted[:, 0]) and torch.equal(rows.next_noise()[:1], wanted[:, 1])


def test_the_embedded_engine_draws_with_the_noise_that_it_is_told() -> None:
    asked = [one for row in range(3) for one in group(row, 2)]
    plain, own, of_vllm = (
        [one.tokens for one in generate(tiny_model(), asked, **options)]
        for options in ({"noise": "auto"}, {"noise": "rollpacker"}, {"noise": "vllm"})
    )
    assert plain == own != of_vllm
    drafting = generate(tiny_model(), asked, noise="vllm", draft_tokens=0)
    assert [one.tokens for one in drafting] == of_vllm


if SECOND_RUNNER:
    from vllm.triton_utils import tl, triton
    from vllm.v1.worker.gpu.sample.gumbel import (
        _log1p_neg_stable,
        gumbel_sample,
        murmur3_uniform32,
    )

    @triton.jit
    def noise_of_vllm(seeds: Any, places: Any, tokens: Any, uniform: Any, noise: Any) -> None:
        """A kernel for `MANY` entries, in programs of 4,096."""
        index = tl.program_id(0) * 4096 + tl.arange(0, 4096)
        seed, place, token = (
            tl.load(seeds + index),
            tl.load(places + index),
            tl.load(tokens + index),
        )
        found = murmur3_uniform32(seed, place, token)
        tl.store(uniform + index, found)
        tl.store(noise + index, -_log1p_neg_stable(found))


needs_kernels = pytest.mark.skipif(
    not SECOND_RUNNER, reason="needs vLLM and TRITON_INTERPRET=1: make vllm, then make test-vllm"
)


@needs_kernels
def test_noise_is_bit_by_bit_that_of_vllms_kernel() -> None:
    dice = torch.Generator().manual_seed(0)
    seeds, positions, tokens = (
        torch.randint(*bounds, (MANY,), generator=dice)
        for bounds in ((-(1 << 63), (1 << 63) - 1), (0, 1 << 20), (0, 200_000))
    )
    uniform, noise = torch.empty(2, MANY)
    noise_of_vllm[(MANY // 4096,)](seeds, positions, tokens, uniform, noise)
    mine = vllm_noise._uniform(vllm_noise._hashed(seeds, positions, tokens))
    assert torch.equal(mine, uniform)
    made = vllm_noise._exponential(mine)
    in_series = mine < 0.25  # elsewhere a logarithm's last digit is the library's own
    assert torch.equal(made[in_series], noise[in_series])
    assert torch.allclose(made, noise, rtol=3e-7, atol=0)


@needs_kernels
def test_vllm_draws_what_is_written_down_here() -> None:
    each, ones = torch.arange(12, dtype=torch.int32), torch.ones(12)
    found = gumbel_sample(
        LOGITS, each, ones, SEEDS, POSITIONS, apply_temperature=False, is_drafting=False
    )
    assert found.tolist() == DRAWN
