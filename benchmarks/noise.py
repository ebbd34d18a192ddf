"""Which noise couples two policies better: inversion of one uniform, or Gumbel and argmax.

A sample keeps its noise when the weights change. Under both policies the same noise gives the same
token most of the time; how often it does not (a mismatch) depends on how noise becomes a token:

    inversion   one uniform per token, through the cumulative distribution, vocabulary in its order
    frequent    the same, the vocabulary in the order of the old policy's own frequencies
    ranked      the same, each policy in the order of its own probabilities there (a sort a step)
    gumbel      argmax of log-probability + Gumbel noise, a keyed one per entry of the vocabulary
    rounds      the same in two rounds, a group of tokens and then one of it: what the engine does

No noise need be drawn: each has a closed form per position, given both distributions p and q. The
least possible is their total variation TV, and Gumbel's is at most 2 TV / (1 + TV).

Two kinds of policies: the quickstart's while it learns, some updates apart, at the positions of
responses of the older one; and synthetic logits of wide vocabularies, peaked as those of language
models are (most positions nearly certain, some open, a long tail of frequencies), the update a
change of low rank. Then the processor's milliseconds per decode step that each costs.

    python benchmarks/noise.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import policies
import torch
import torch.nn.functional as F
from machine import write_result

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.sampling import (
    DrawMode,
    draw,
    exponentials,
    noise_size,
    num_groups,
)
from rollpacker.engines.engine import GenerationRequest, Response, SamplingParams
from rollpacker.run.parts import policy as build

KINDS = ("inversion", "frequent", "ranked", "gumbel", "rounds")
REAL_PAIRS = ((20, 21), (20, 22), (20, 25), (40, 41), (40, 42), (40, 45), (55, 56), (55, 60))
VOCABULARIES = {"tiny": 16, "32k": 32_000, "151k": 151_936}
CHANGES = (0.003, 0.01, 0.03, 0.1)
"""Standard deviation of the change of a logit, synthetic."""
TINY = 1e-300
BLOCK = 1 << 20
"""Entries of noise at a time."""
_GAMMA, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


# -- mismatches in closed form, all float64 [positions, vocabulary] --------------------------------


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p - q).abs().sum(-1) / 2


def inversion(p: torch.Tensor, q: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """One minus the overlap of each token's stretch of the unit interval."""
    if order is not None:
        p, q = p[:, order], q[:, order]
    return _no_overlap(p, p.cumsum(-1), q, q.cumsum(-1))


def ranked(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    ends = []
    for probs in (p, q):
        sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
        ends.append(torch.empty_like(probs).scatter_(-1, order, sorted_probs.cumsum(-1)))
    return _no_overlap(p, ends[0], q, ends[1])


def _no_overlap(
    p: torch.Tensor, p_ends: torch.Tensor, q: torch.Tensor, q_ends: torch.Tensor
) -> torch.Tensor:
    overlap = torch.minimum(p_ends, q_ends) - torch.maximum(p_ends - p, q_ends - q)
    return 1 - overlap.clamp_(min=0).sum(-1)


def gumbel(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Both take token i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i): the same
    exponential of each token is the smallest when divided by its p, and by its q."""
    return 1 - _both_take(p, q).sum(-1)


def rounds(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Both take token i if both take its group, and then both take it of the group."""
    size, groups = p.shape[1], num_groups(p.shape[1])
    padding = -size % groups
    p_groups, q_groups = (
        F.pad(probs, (0, padding)).unflatten(1, (-1, groups)).transpose(1, 2).clamp(min=TINY)
        for probs in (p, q)
    )
    p_sums, q_sums = p_groups.sum(-1), q_groups.sum(-1)
    inside = _both_take(p_groups / p_sums[..., None], q_groups / q_sums[..., None]).sum(-1)
    return 1 - (_both_take(p_sums, q_sums) * inside).sum(-1)


def _both_take(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Per token, the probability that both policies take it."""
    p, q = p.clamp(min=TINY), q.clamp(min=TINY)
    _, order = (q / p).sort(dim=-1)
    sorted_p, sorted_q = p.gather(-1, order), q.gather(-1, order)
    below, above = sorted_p.cumsum(-1), sorted_q.sum(-1, keepdim=True) - sorted_q.cumsum(-1)
    both = 1 / (below / sorted_p + above / sorted_q)
    return torch.empty_like(both).scatter_(-1, order, both)


def compare(p: torch.Tensor, q: torch.Tensor) -> dict[str, np.ndarray]:
    frequent = p.mean(0).argsort(descending=True)
    tv = total_variation(p, q)
    return {
        "tv": tv.numpy(),
        "inversion": inversion(p, q).numpy(),
        "frequent": inversion(p, q, frequent).numpy(),
        "ranked": ranked(p, q).numpy(),
        "gumbel": gumbel(p, q).numpy(),
        "rounds": rounds(p, q).numpy(),
        "bound": (2 * tv / (1 + tv)).numpy(),
    }


def summary(found: dict[str, np.ndarray]) -> dict[str, float]:
    row = {name: float(value.mean()) for name, value in found.items()}
    return {**row, "inversion_over_rounds": row["inversion"] / max(row["rounds"], 1e-12)}


# -- real policies ---------------------------------------------------------------------------------


def respond(step: int, num_prompts: int, num_longest: int) -> list[Response]:
    """The longest responses of a policy, and as many others at random."""
    config = policies.quickstart()
    policy = build.load_policy(config, model_path=str(policies.policy_folder(step)), threads=1)
    rows = policy.train_prompts.rows
    requests = [
        GenerationRequest(
            sample=SampleId(PromptId("train", 0, row), index, 0),
            prompt_tokens=rows[row].tokens,
            sampling=SamplingParams(max_response_tokens=config.rollout.max_response_tokens),
        )
        for row in range(num_prompts)
        for index in range(2)
    ]

    async def run() -> list[Response]:
        try:
            return await collect(policy.engine, requests)
        finally:
            await policy.engine.close()

    responses = sorted(asyncio.run(run()), key=lambda one: -len(one.tokens))
    others = np.random.default_rng(0).permutation(len(responses) - num_longest)[:num_longest]
    return responses[:num_longest] + [responses[num_longest + int(place)] for place in others]


def distributions(step: int, responses: list[Response]) -> list[torch.Tensor]:
    """Of each response, what the policy says at its positions: float64 [tokens, vocabulary]."""
    config = policies.quickstart()
    loaded = build.load_policy(config, model_path=str(policies.policy_folder(step)), threads=1)
    found = []
    for response in responses:
        ids = torch.tensor([response.prompt_tokens + response.tokens])
        with torch.inference_mode():
            logits = loaded.loaded.model(input_ids=ids, use_cache=False).logits[0]
        found.append(logits[len(response.prompt_tokens) - 1 : -1].double().softmax(-1))
    return found


def kept(mismatch: np.ndarray) -> float:
    """Expected share of a response before its first mismatch."""
    return float(np.cumprod(1 - mismatch).sum() / len(mismatch))


def real_row(old: int, new: int, num_prompts: int, num_longest: int) -> dict[str, object]:
    responses = respond(old, num_prompts, num_longest)
    p, q = distributions(old, responses), distributions(new, responses)
    rows: dict[str, object] = {"step": old, "updates": new - old}
    for name, part in (("longest", slice(num_longest)), ("others", slice(num_longest, None))):
        p_part, q_part = p[part], q[part]
        found = compare(torch.cat(p_part), torch.cat(q_part))
        frequent = torch.cat(p_part).mean(0).argsort(descending=True)
        kinds: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
            "inversion": inversion,
            "frequent": partial(inversion, order=frequent),
            "ranked": ranked,
            "gumbel": gumbel,
            "rounds": rounds,
        }
        prefixes = {
            kind: [kept(function(a, b).numpy()) for a, b in zip(p_part, q_part, strict=True)]
            for kind, function in kinds.items()
        }
        rows[name] = {
            "tokens": len(found["tv"]),
            "mean_tokens": len(found["tv"]) / len(p_part),
            **summary(found),
            "prefix_kept": {kind: float(np.mean(value)) for kind, value in prefixes.items()},
        }
    return rows


# -- synthetic policies ----------------------------------------------------------------------------


def synthetic(vocabulary: int, change: float, positions: int, seed: int) -> dict[str, float]:
    """Logits = sharpness x (what fits here + frequencies that fall off with the rank, as in
    byte-pair vocabularies), and the same moved by a change of rank 64 whose entries have the
    standard deviation `change`."""
    rng = torch.Generator().manual_seed(seed)
    normal: dict[str, Any] = {"generator": rng, "dtype": torch.float64}
    ranks = torch.arange(vocabulary).double() + 1
    directions = torch.randn(64, vocabulary, **normal) / 8
    p_all, q_all = [], []
    for _ in range(positions):
        logits = 2.2 * torch.randn(1, vocabulary, **normal) - 0.8 * ranks.log()
        few = torch.randint(vocabulary, (12,), generator=rng)
        logits[0, few] += 9 + 4 * torch.randn(12, **normal)
        logits *= 1.0 + 1.5 * float(torch.rand(1, generator=rng))
        moved = logits + change * torch.randn(1, 64, **normal) @ directions
        p_all.append(logits.softmax(-1))
        q_all.append(moved.softmax(-1))
    p, q = torch.cat(p_all), torch.cat(q_all)
    entropy = -(p * p.clamp(min=TINY).log()).sum(-1)
    return {
        "vocabulary": vocabulary,
        "change": change,
        "mean_entropy": float(entropy.mean()),
        "median_entropy": float(entropy.median()),
        "share_over_0.9": float((p.amax(-1) > 0.9).double().mean()),
        **summary(compare(p, q)),
    }


# -- cost ------------------------------------------------------------------------------------------


def inversion_draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens and log-probabilities [2, rows], as the engine drew before."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
    cdf = probs.cumsum(dim=-1)
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[1] - 1)
    return torch.cat((tokens, probs.gather(-1, tokens).log_()), dim=1).T


def gumbel_draw(logits: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """One exponential per entry of the vocabulary, in blocks."""
    rows, vocabulary = logits.shape
    probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
    best = torch.full((rows,), torch.inf, dtype=torch.float64)
    tokens = torch.zeros(rows, dtype=torch.int64)
    size = max(1, BLOCK // rows)
    for start in range(0, vocabulary, size):
        part = probs[:, start : start + size]
        # Another key per block; the hash of one block is as costly as that of any other.
        noise = exponentials(keys ^ start, counts, 1, part.shape[1])[:, 0]
        score, place = (noise / part).min(dim=-1)
        tokens = torch.where(score < best, place + start, tokens)
        best = torch.minimum(score, best)
    return torch.stack((tokens, probs.gather(1, tokens[:, None])[:, 0].log_()))


def rounds_draw(logits: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The engine's own, its noise made at each step (it makes that of several steps at once where
    it is small)."""
    rows, vocabulary = logits.shape
    noise = exponentials(keys, counts, 1, noise_size(vocabulary))[:, 0]
    ones, whole = torch.ones(rows, dtype=torch.float64), torch.full((rows,), vocabulary)
    return torch.stack(draw(logits, noise, ones, whole, ones, DrawMode()))


def ranked_draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    probs, order = torch.softmax(logits, -1, dtype=torch.float64).sort(dim=-1, descending=True)
    cdf = probs.cumsum(-1)
    place = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    place.clamp_(max=logits.shape[1] - 1)
    return torch.stack((order.gather(1, place)[:, 0], probs.gather(1, place).log_()[:, 0]))


def ordered_draw(logits: torch.Tensor, uniform: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    tokens, log_probs = inversion_draw(logits[:, order], uniform)
    return torch.stack((order[tokens.long()], log_probs))


def costs(repeats: int) -> list[dict[str, object]]:
    """Milliseconds of processor time a step, median; the arms take turns."""
    return [
        {
            "vocabulary": name,
            "rows": rows,
            "milliseconds": _timed(_arms(rows, vocabulary), repeats),
        }
        for name, vocabulary in VOCABULARIES.items()
        for rows in (8, 64)
    ]


def _arms(rows: int, vocabulary: int) -> dict[str, Callable[[], object]]:
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(vocabulary, generator=rng)
    logits = 3 * torch.randn(rows, vocabulary, generator=rng)
    uniform = torch.rand(rows, dtype=torch.float64, generator=rng)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=rng)
    counts = torch.arange(rows)
    return {
        "inversion": partial(inversion_draw, logits, uniform),
        "frequent": partial(ordered_draw, logits, uniform, order),
        "ranked": partial(ranked_draw, logits, uniform),
        "gumbel": partial(gumbel_draw, logits, keys, counts),
        "rounds": partial(rounds_draw, logits, keys, counts),
    }


def _timed(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            start = time.process_time()
            arm()
            seconds[name].append(time.process_time() - start)
    return {name: 1000 * median(values[1:]) for name, values in seconds.items()}


def check_closed_forms() -> dict[str, float]:
    """How far they are from how often draws really differ, in standard errors."""
    rng = torch.Generator().manual_seed(3)
    size = 100_000
    keys = torch.randint(-(2**62), 2**62, (size,), generator=rng)
    counts = torch.zeros(size, dtype=torch.int64)
    uniform = torch.rand(size, dtype=torch.float64, generator=rng)
    off = {}
    for vocabulary, kinds in ((16, ("inversion", "ranked", "gumbel")), (150, ("rounds",))):
        p_logits = 2 * torch.randn(1, vocabulary, generator=rng)
        q_logits = p_logits + 0.3 * torch.randn(1, vocabulary, generator=rng)
        draws: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "inversion": lambda logits: inversion_draw(logits, uniform),
            "ranked": lambda logits: ranked_draw(logits, uniform),
            "gumbel": lambda logits: gumbel_draw(logits, keys, counts),
            "rounds": lambda logits: rounds_draw(logits, keys, counts),
        }
        closed = compare(p_logits.double().softmax(-1), q_logits.double().softmax(-1))
        for kind in kinds:
            one, other = (draws[kind](x.expand(size, -1))[0] for x in (p_logits, q_logits))
            wanted, given = float(closed[kind][0]), float((one != other).double().mean())
            off[kind] = abs(given - wanted) / (wanted * (1 - wanted) / size) ** 0.5
    assert max(off.values()) < 5, off
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--longest", type=int, default=24, help="responses compared of each kind")
    parser.add_argument("--positions", type=int, default=48, help="of each synthetic policy")
    parser.add_argument("--repeats", type=int, default=15, help="of each timed draw")
    args = parser.parse_args()
    torch.set_num_threads(1)
    off = check_closed_forms()
    print("closed forms against draws, standard errors:", {k: round(v, 1) for k, v in off.items()})
    timed = costs(args.repeats)
    for row in timed:
        print(
            row["vocabulary"], row["rows"], {k: round(v, 3) for k, v in row["milliseconds"].items()}
        )
    wide = [
        synthetic(VOCABULARIES[name], change, args.positions, seed=0)
        for name in ("32k", "151k")
        for change in CHANGES
    ]
    for row in wide:
        print({k: round(v, 5) for k, v in row.items()})
    real = [real_row(old, new, args.prompts, args.longest) for old, new in REAL_PAIRS]
    for row in real:
        print(row["step"], row["updates"])
        for part in ("longest", "others"):
            print("  ", part, row[part])
    write_result(
        "noise",
        {
            "closed_forms_off_standard_errors": off,
            "real": real,
            "synthetic": wide,
            "milliseconds_per_step": timed,
        },
    )


if __name__ == "__main__":
    main()
