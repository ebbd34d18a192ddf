"""Which noise couples two policies better: inversion of one uniform, or Gumbel and argmax.

A sample keeps its noise when the weights change. Under both policies the same noise gives the same
token most of the time; how often it does not (a mismatch) depends on how noise becomes a token:

    inversion   one uniform per token, through the cumulative distribution, vocabulary in its order
    frequent    the same, the vocabulary in the order of the old policy's own frequencies
    ranked      the same, each policy in the order of its own probabilities there (a sort a step)
    gumbel      argmax of log-probability + Gumbel noise, a keyed one per entry of the vocabulary

No noise need be drawn: each has a closed form per position, given both distributions p and q. The
least possible is their total variation TV, and Gumbel's is at most 2 TV / (1 + TV).

Two kinds of policies: the quickstart's while it learns, some updates apart, at the positions of
responses of the older one; and synthetic logits of wide vocabularies, peaked as those of language
models are (about half of the positions almost certain, a long tail of frequencies), the update a
change of low rank. Then the seconds per decode step that each costs.

    python benchmarks/noise.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import policies
import torch
from machine import write_result

from rollpacker.cli import parts
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.rollout.collect import collect
from rollpacker.rollout.engine import GenerationRequest, Response, SamplingParams
from rollpacker.rollout.sampling import DrawMode, draw, uniforms

KINDS = ("inversion", "frequent", "ranked", "gumbel")
REAL_PAIRS = ((20, 21), (20, 22), (20, 25), (40, 41), (40, 42), (40, 45), (55, 56), (55, 60))
VOCABULARIES = {"tiny": 16, "32k": 32_000, "151k": 151_936}
CHANGES = (0.003, 0.01, 0.03, 0.1)
"""Standard deviation of the change of a logit, synthetic."""
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
    tiny = torch.finfo(torch.float64).tiny
    p, q = p.clamp(min=tiny), q.clamp(min=tiny)
    ratio, order = (q / p).sort(dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    below, above = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    return 1 - (1 / (below / p + above / q)).sum(-1)


def compare(p: torch.Tensor, q: torch.Tensor) -> dict[str, np.ndarray]:
    frequent = p.mean(0).argsort(descending=True)
    tv = total_variation(p, q)
    return {
        "tv": tv.numpy(),
        "inversion": inversion(p, q).numpy(),
        "frequent": inversion(p, q, frequent).numpy(),
        "ranked": ranked(p, q).numpy(),
        "gumbel": gumbel(p, q).numpy(),
        "bound": (2 * tv / (1 + tv)).numpy(),
    }


def summary(found: dict[str, np.ndarray]) -> dict[str, float]:
    row = {name: float(value.mean()) for name, value in found.items()}
    return {**row, "inversion_over_gumbel": row["inversion"] / max(row["gumbel"], 1e-12)}


# -- real policies ---------------------------------------------------------------------------------


def respond(step: int, num_prompts: int, num_longest: int) -> list[Response]:
    """The longest responses of a policy, and as many others at random."""
    config = policies.quickstart()
    policy = parts.load_policy(config, model_path=str(policies.policy_folder(step)), threads=1)
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
    loaded = parts.load_policy(config, model_path=str(policies.policy_folder(step)), threads=1)
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
        prefixes = {
            "inversion": [
                kept(inversion(a, b).numpy()) for a, b in zip(p_part, q_part, strict=True)
            ],
            "frequent": [
                kept(inversion(a, b, frequent).numpy()) for a, b in zip(p_part, q_part, strict=True)
            ],
            "ranked": [kept(ranked(a, b).numpy()) for a, b in zip(p_part, q_part, strict=True)],
            "gumbel": [kept(gumbel(a, b).numpy()) for a, b in zip(p_part, q_part, strict=True)],
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
    """Logits = sharpness x (Zipf's frequencies, their places shuffled, + what fits here), and the
    same moved by a change of rank 64 whose entries have the standard deviation `change`."""
    rng = torch.Generator().manual_seed(seed)
    normal = dict(generator=rng, dtype=torch.float64)
    ranks = torch.randperm(vocabulary, generator=rng).double() + 1
    directions = torch.randn(64, vocabulary, **normal) / 8
    parts_found: list[dict[str, np.ndarray]] = []
    entropy, top = [], []
    for _ in range(positions):
        fit = 2.0 * torch.randn(1, vocabulary, **normal)
        few = torch.randint(vocabulary, (1, 8), generator=rng)
        boost = 6 + 4 * torch.randn(1, 1, **normal)
        fit.scatter_add_(1, few, boost + 3 * torch.randn(1, 8, **normal))
        logits = fit - ranks.log()
        logits[0, few[0, 0]] += 6 * float(torch.rand(1, generator=rng)) * 2
        moved = logits + change * torch.randn(1, 64, **normal) @ directions
        p, q = logits.softmax(-1), moved.softmax(-1)
        parts_found.append(compare(p, q))
        entropy.append(float(-(p * p.clamp(min=1e-300).log()).sum()))
        top.append(float(p.max()))
    # The order of frequencies is that of all positions, which `compare` of one does not know.
    found = {
        name: np.concatenate([part[name] for part in parts_found])
        for name in parts_found[0]
        if name != "frequent"
    }
    return {
        "vocabulary": vocabulary,
        "change": change,
        "mean_entropy": float(np.mean(entropy)),
        "share_over_0.9": float(np.mean(np.array(top) > 0.9)),
        **summary(found),
    }


# -- cost ------------------------------------------------------------------------------------------


def gumbel_draw(
    logits: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the engine would do: the keyed hash of (key, t, token), in blocks of the vocabulary."""
    rows, vocabulary = logits.shape
    best = torch.full((rows,), -torch.inf, dtype=torch.float64)
    tokens = torch.zeros(rows, dtype=torch.int64)
    base = _mixed((counts + 1) * _GAMMA + keys) ^ keys
    size = max(1, BLOCK // rows)
    for start in range(0, vocabulary, size):
        stop = min(start + size, vocabulary)
        places = torch.arange(start + 1, stop + 1) * _GAMMA
        bits = _mixed(places + base[:, None]).bitwise_and_((1 << 53) - 1)
        uniform = bits.double().add_(0.5).mul_(2.0**-53)
        noise = uniform.log_().neg_().log_()
        score, place = (logits[:, start:stop] - noise).max(dim=-1)
        better = score > best
        tokens = torch.where(better, place + start, tokens)
        best = torch.where(better, score, best)
    normal = torch.logsumexp(logits.double(), dim=-1)
    return tokens, logits.gather(1, tokens[:, None])[:, 0].double() - normal


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def ranked_draw(logits: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    probs, order = torch.softmax(logits, -1, dtype=torch.float64).sort(dim=-1, descending=True)
    cdf = probs.cumsum(-1)
    place = torch.searchsorted(cdf, noise[:, None] * cdf[:, -1:], right=True)
    place.clamp_(max=logits.shape[1] - 1)
    return order.gather(1, place)[:, 0], probs.gather(1, place).log_()[:, 0]


def ordered_draw(
    logits: torch.Tensor, noise: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(logits)
    ones, whole = torch.ones(rows, dtype=torch.float64), torch.full((rows,), logits.shape[1])
    tokens, log_probs = draw(logits[:, order], noise, ones, whole, ones, DrawMode())
    return order[tokens], log_probs


def costs(repeats: int) -> list[dict[str, object]]:
    """Milliseconds a step, median; the arms take turns."""
    rng = torch.Generator().manual_seed(0)
    found = []
    for name, vocabulary in VOCABULARIES.items():
        order = torch.randperm(vocabulary, generator=rng)
        for rows in (8, 64):
            logits = 3 * torch.randn(rows, vocabulary, generator=rng)
            noise = torch.rand(rows, dtype=torch.float64, generator=rng)
            ones = torch.ones(rows, dtype=torch.float64)
            whole = torch.full((rows,), vocabulary)
            keys = torch.randint(-(2**62), 2**62, (rows,), generator=rng)
            counts = torch.arange(rows)
            arms = {
                "inversion": lambda: draw(logits, noise, ones, whole, ones, DrawMode()),
                "frequent": lambda: ordered_draw(logits, noise, order),
                "ranked": lambda: ranked_draw(logits, noise),
                "gumbel": lambda: gumbel_draw(logits, keys, counts),
            }
            found.append(
                {"vocabulary": name, "rows": rows, "milliseconds": _timed(arms, repeats)}
            )
    return found


def _timed(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * median(values[1:]) for name, values in seconds.items()}


def check_closed_forms() -> dict[str, float]:
    """Against draws: how far the largest closed form is from what the functions above really do,
    in standard errors."""
    rng = torch.Generator().manual_seed(3)
    p_logits = 2 * torch.randn(1, 16, generator=rng).float()
    q_logits = p_logits + 0.3 * torch.randn(1, 16, generator=rng)
    size = 200_000
    p, q = (x.expand(size, -1).contiguous() for x in (p_logits, q_logits))
    keys = torch.randint(-(2**62), 2**62, (size,), generator=rng)
    counts = torch.zeros(size, dtype=torch.int64)
    noise = torch.from_numpy(
        uniforms(keys.numpy().view(np.uint64), np.zeros(size, np.int64), 1)[:, 0].copy()
    )
    ones, whole = torch.ones(size, dtype=torch.float64), torch.full((size,), 16)
    drawn = {
        "inversion": [draw(x, noise, ones, whole, ones, DrawMode())[0] for x in (p, q)],
        "ranked": [ranked_draw(x, noise)[0] for x in (p, q)],
        "gumbel": [gumbel_draw(x, keys, counts)[0] for x in (p, q)],
    }
    closed = compare(p_logits.double().softmax(-1), q_logits.double().softmax(-1))
    off = {}
    for kind, (one, other) in drawn.items():
        wanted = float(closed[kind][0])
        given = float((one != other).double().mean())
        off[kind] = abs(given - wanted) / (wanted * (1 - wanted) / size) ** 0.5
    frequencies = torch.bincount(drawn["gumbel"][0], minlength=16) / size
    off["gumbel_law"] = float(
        (frequencies - p_logits[0].softmax(-1)).abs().max() * (4 * size) ** 0.5
    )
    assert max(off.values()) < 5, off
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--longest", type=int, default=24, help="responses compared of each kind")
    parser.add_argument("--positions", type=int, default=64, help="of each synthetic policy")
    parser.add_argument("--repeats", type=int, default=15, help="of each timed draw")
    args = parser.parse_args()
    torch.set_num_threads(1)
    off = check_closed_forms()
    print("closed forms against draws, standard errors:", {k: round(v, 1) for k, v in off.items()})
    timed = costs(args.repeats)
    for row in timed:
        print(row["vocabulary"], row["rows"], {k: round(v, 3) for k, v in row["milliseconds"].items()})
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
