"""How often does a token come out differently after an update? The engine's noise, and inversion's.

A sample keeps its noise when the weights change. How often the token changes (a mismatch) depends
on how noise becomes a token:

    inversion   one uniform number per token, through the cumulative distribution
    rounds      argmax of log-probability + Gumbel noise, keyed for each entry of the vocabulary:
                what the engine does with a vocabulary as small as this one

Each has a closed form, given both distributions of a position, which is first checked against
draws. The least possible is their total variation TV, and Gumbel's is at most 2 TV / (1 + TV).
Policies are the quickstart's while it learns, one update apart, at the positions of the longest
responses: means over positions, and the share of a response before its first mismatch.

    python benchmarks/noise.py [--prompts 160] [--longest 24]

Needs the quickstart's warmed-up model in runs/ (`make quickstart` leaves it there).
"""

from __future__ import annotations

import asyncio
from typing import Any

import policies
import torch
from lab import bench

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.engine import GenerationRequest, Response, SamplingParams
from rollpacker.run.parts.policy import LoadedPolicy, load_policy

STEPS = (20, 40, 55)
TINY = 1e-300


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Total variation of two distributions, float64 [positions, vocabulary], for each position."""
    return (p - q).abs().sum(-1) / 2


def inversion(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """One minus what the two stretches of the unit interval that each token has overlap."""
    p_ends, q_ends = p.cumsum(-1), q.cumsum(-1)
    overlap = torch.minimum(p_ends, q_ends) - torch.maximum(p_ends - p, q_ends - q)
    return 1 - overlap.clamp(min=0).sum(-1)


def rounds(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Both policies draw token i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    p, q = p.clamp(min=TINY), q.clamp(min=TINY)
    larger = torch.maximum(p[:, None] / p[..., None], q[:, None] / q[..., None])
    return 1 - (1 / larger.sum(-1)).sum(-1)


def off_in_standard_errors(draws: int = 100_000) -> dict[str, float]:
    """How far each closed form is from how often that many draws really differ."""
    rng = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1, 16, generator=rng, dtype=torch.float64)
    moved = logits + 0.3 * torch.randn(1, 16, generator=rng, dtype=torch.float64)
    p, q = logits.softmax(-1), moved.softmax(-1)
    uniform = torch.rand(draws, 1, generator=rng, dtype=torch.float64)
    waits = -torch.rand(draws, 16, generator=rng, dtype=torch.float64).log()
    differ = {
        "inversion": [(uniform > x.cumsum(-1)).sum(-1) for x in (p, q)],
        "rounds": [(waits / x).argmin(-1) for x in (p, q)],
    }
    found = {}
    for name, wanted in (("inversion", inversion(p, q)), ("rounds", rounds(p, q))):
        one, other = differ[name]
        rate, expected = float((one != other).double().mean()), float(wanted)
        found[name] = abs(rate - expected) / (expected * (1 - expected) / draws) ** 0.5
    return found


def policy_after(step: int) -> LoadedPolicy:
    return load_policy(
        policies.quickstart(), model_path=str(policies.policy_folder(step)), threads=1
    )


def longest_responses(step: int, num_prompts: int, count: int) -> list[Response]:
    """The longest responses of the policy after `step` updates, two samples a prompt."""
    policy = policy_after(step)
    sampling = SamplingParams(max_response_tokens=policies.quickstart().rollout.max_response_tokens)
    requests = [
        GenerationRequest(
            sample=SampleId(PromptId("train", 0, row), index, 0),
            prompt_tokens=policy.train_prompts.rows[row].tokens,
            sampling=sampling,
        )
        for row in range(num_prompts)
        for index in range(2)
    ]

    async def generated() -> list[Response]:
        try:
            return await collect(policy.engine, requests)
        finally:
            await policy.engine.close()

    return sorted(asyncio.run(generated()), key=lambda one: -len(one.tokens))[:count]


def distributions(step: int, responses: list[Response]) -> list[torch.Tensor]:
    """What the policy says at each position of each response: float64 [tokens, vocabulary]."""
    model = policy_after(step).loaded.model
    found = []
    for response in responses:
        ids = torch.tensor([response.prompt_tokens + response.tokens])
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        found.append(logits[len(response.prompt_tokens) - 1 : -1].double().softmax(-1))
    return found


def kept(mismatches: torch.Tensor) -> float:
    """Expected share of a response before its first mismatch."""
    return float((1 - mismatches).cumprod(0).mean())


def row(step: int, num_prompts: int, count: int) -> dict[str, Any]:
    responses = longest_responses(step, num_prompts, count)
    old, new = distributions(step, responses), distributions(step + 1, responses)
    pairs = list(zip(old, new, strict=True))
    variation = torch.cat([total_variation(p, q) for p, q in pairs])
    by_kind = {kind.__name__: [kind(p, q) for p, q in pairs] for kind in (inversion, rounds)}
    return {
        "step": step,
        "tokens": len(variation),
        "tv": float(variation.mean()),
        "bound": float((2 * variation / (1 + variation)).mean()),
        **{name: float(torch.cat(found).mean()) for name, found in by_kind.items()},
        "prefix_kept": {
            name: sum(map(kept, found)) / len(found) for name, found in by_kind.items()
        },
    }


def main(prompts: int = 160, longest: int = 24) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "closed_forms_off_standard_errors": off_in_standard_errors(),
        "rows": [row(step, prompts, longest) for step in STEPS],
    }


def holds(found: dict[str, Any]) -> bool:
    """The closed forms are those of draws, and the engine's noise keeps more than inversion's."""
    off = found["closed_forms_off_standard_errors"]
    return max(off.values()) < 5 and all(
        one["tv"] <= one["rounds"] <= one["bound"] and one["rounds"] < one["inversion"]
        for one in found["rows"]
    )


if __name__ == "__main__":
    bench(main, holds=holds)
