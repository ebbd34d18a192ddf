"""What other numerics than float32 on a CPU do to tail batching: bfloat16, and logits with noise.

On a GPU a token's logits depend on who shares its batch, and decoding it is another sum than
verifying it. A stand-in for that: `disturb` adds Gaussian noise to the logits of the embedded
engine in every pass, a hash of the kind of pass, its number of rows, the row's place, and the row's
own random numbers, which stand for its sample and position. So a run repeats bit for bit, and
whatever goes through the model in another batch meets other logits.

With bfloat16, and with noise of several standard deviations, this measures what `carry_exact.py`,
`order_only.py` (here with lengths), `batch_invariance.py` and the length shift of `learning.py` do
in float32. Lengths are those of frozen policies, so that nothing but numerics differs between
rounds: the quickstart's after 20 updates, and two random models. `long` has responses of some 240
tokens. `short` has fewer, of a law without memory, and is quick enough for many: there noise
is larger, so that what counts, mismatches per token times carried tokens, is that of long
responses; `redraws` is its queue with more redraws than engines allow. Arms are compared with
rounds that wait for all; intervals are bootstraps over prompts.

A finished cell is kept in runs/numerics and not measured again.

    python benchmarks/numerics.py [--only TEXT] [--jobs 1]
    python benchmarks/numerics.py --cell "lengths, short, noise 0.3, 0"       # one, prints JSON
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import batch_invariance
import carry_exact
import numpy as np
import policies
import shadow
import torch
from lab import ROOT, bench, in_process
from tail_batching import SYNC, Arm

from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.embedded import decoder, extend, sampling
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig, EngineOutput
from rollpacker.run.parts.policy import load_policy

KEPT = ROOT / "runs" / "numerics"
RESAMPLES = 2_000
STEP = 20
"""Updates of the quickstart's policy whose lengths are measured."""
_PLACES = 1 << 32

# -- noise -----------------------------------------------------------------------------------------


def disturb(sd: float) -> None:
    """Add noise of this standard deviation to the logits of this process's embedded engines."""
    assert decoder.draw is extend.draw is sampling.draw, "engines draw in another way now"
    if sd:
        decoder.draw = _disturbed(sd, 0)  # type: ignore[attr-defined]
        extend.draw = _disturbed(sd, 1)  # type: ignore[attr-defined]


def _disturbed(sd: float, kind: int) -> Callable[..., Any]:
    def draw(logits: torch.Tensor, noise: torch.Tensor, *settings: Any) -> Any:
        return sampling.draw(logits + sd * _normal(logits, noise, kind), noise, *settings)

    return draw


def _normal(logits: torch.Tensor, noise: torch.Tensor, kind: int) -> torch.Tensor:
    """Standard normal numbers of the logits' shape and type (Box and Muller)."""
    rows, size = logits.shape
    keys = (torch.arange(rows) * 2 + kind) * _PLACES + rows
    own = noise[:, 0].contiguous().view(torch.int64)
    radii, angles = sampling.exponentials(keys, own, 1, 2 * size)[:, 0].split(size, dim=1)
    return ((2 * radii).sqrt_() * ((-angles).exp_() * (2 * math.pi)).cos_()).to(logits.dtype)


# -- lengths of frozen policies --------------------------------------------------------------------


def random_policy(end: float, dtype: str, shape: dict[str, Any]) -> Any:
    """A random model with prompts. `end` is a factor of the end token's row in its output matrix:
    the smaller, the longer are responses."""
    model = batch_invariance.make_model(**shape, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[batch_invariance.END] *= end
    model = model.to(getattr(torch, dtype))
    rng = np.random.default_rng(0)
    sizes = rng.integers(4, 9, 4096)
    prompts = [tuple(rng.integers(2, shape["vocab_size"], size).tolist()) for size in sizes]
    return SimpleNamespace(
        engine=TorchEngine(model=model, tokenizer=None, config=EngineConfig()),
        train_prompts=SimpleNamespace(rows=[SimpleNamespace(tokens=one) for one in prompts]),
    )


TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.25}
SMALL = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
WORLDS: dict[str, tuple[float, int, int, dict[str, Any]]] = {
    "short": (1.0, 512, 64, TWO_HEADS | SMALL | {"max_position_embeddings": 1024}),
    "long": (0.2, 2000, 16, TWO_HEADS | {"vocab_size": 48, "max_position_embeddings": 4000}),
}
"""Random models by name: factor of the end token, longest response, prompts a round, and shape."""
ARMS = {
    "queue": {},
    "pool": {"stragglers": "pool"},
    "queue, no complement": {"complement": False},
    "queue, carry none": {"carry": "none"},
    "queue, carry weighted": {"carry": "weighted"},
}
"""Settings beside `prompt_factor` 1.25."""


COUNTED = ("verified", "offered", "kept", "cut", "looked_at", "redraws")
"""Carried responses that were verified, their carried tokens, those that were kept, responses of
which some were not, tokens looked at up to the first that differed, and redraws."""


class Watched(Arm):
    """An arm that counts what became of carried tokens."""

    counts: Counter[str]

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            had, kept = self._launched[output.event.sample], output.event.num_kept
            if had and kept is not None:
                numbers = 1, had, kept, kept < had, min(kept + 1, had), output.event.num_redraws
                self.counts.update(dict(zip(COUNTED, numbers, strict=True)))
        super()._on_outputs(outputs)


def lengths(world: str, dtype: str, seed: int, only: Sequence[str] = tuple(ARMS)) -> dict[str, Any]:
    """Trained tokens of each arm by prompt, beside those of rounds that wait for all."""
    config = dataclasses.replace(policies.quickstart(dtype), seed=seed)
    if world == "quickstart":
        policy: Any = load_policy(config, model_path=str(policies.policy_folder(STEP)), threads=1)
        arms, rounds = ("queue",), 12
    else:
        end, limit, prompts, shape = WORLDS[world]
        rollout = dataclasses.replace(
            config.rollout, prompts_per_step=prompts, max_response_tokens=limit
        )
        config = dataclasses.replace(config, rollout=rollout)
        policy = random_policy(end, dtype, shape)
        arms, rounds = (tuple(ARMS), 10) if world == "short" else (("queue",), 6)
    off = _rounds(policy, config, SYNC, rounds)
    found: dict[str, Any] = {}
    for name in (arm for arm in arms if arm in only):
        settings: dict[str, Any] = {"prompt_factor": 1.25, "flush_each_epoch": False, **ARMS[name]}
        arm = _rounds(policy, config, TailBatchingConfig(**settings), rounds)
        pairs: dict[str, list[int]] = {}
        for key in off.trained.keys() & arm.trained.keys():
            pair = pairs.setdefault(str(key[0]), [0, 0])
            pair[0] += len(arm.trained[key])
            pair[1] += len(off.trained[key])
        found[name] = {
            **arm.counts,
            "responses": len(arm.trained),
            "equal": sum(off.trained.get(key) == one for key, one in arm.trained.items()),
            "generated": sum(one.generated_tokens for one in arm.rounds),
            "pairs": [pairs[key] for key in sorted(pairs)],
        }
    return found


def _rounds(policy: Any, config: RunConfig, tail: TailBatchingConfig, rounds: int) -> Watched:
    arm = Watched(policy, config, "", tail, rounds)
    arm.counts = Counter()
    while not arm.finished:
        arm.run_round()
    return arm


# -- cells -----------------------------------------------------------------------------------------


def learning(dtype: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return shadow.measured(
            "configs/quickstart.yaml",
            [
                *(f"seed={seed}", f"runs_dir={folder}", f"model.dtype={dtype}"),
                *("save_samples=false", "eval.every_steps=null", "checkpoint.every_steps=1000000"),
                f"train.steps={LEARNING_STEPS}",
            ],
        )


LEARNING_STEPS = 40
MANY_REDRAWS = 400
"""Where an engine's 16 redraws of an end that may not be (`complement`) are too few to tell."""
KINDS = ("bfloat16", "noise 0.01", "noise 0.03")
CELLS = [
    *(f"lengths, short, noise {sd}, 0" for sd in (0.3, 0.03, 0.003)),
    *(f"same weights, {kind}, 0" for kind in KINDS),
    *(f"carry, {kind}, 0" for kind in KINDS),
    *(f"lengths, {world}, {kind}, 0" for world in ("quickstart", "long") for kind in KINDS),
    *(f"learning, {kind}, 0" for kind in KINDS),
    *(f"batch, {kind}, 0" for kind in KINDS),
    *(f"lengths, short, noise {sd}, {seed}" for seed in (1, 2) for sd in (0.3, 0.03, 0.003)),
    *(f"lengths, long, {kind}, {seed}" for seed in (1, 2) for kind in KINDS),
    *(f"learning, {kind}, 1" for kind in KINDS),
    *(f"redraws, short, noise {sd}, {seed}" for seed in (0, 1, 2) for sd in (0.3, 0.03)),
]
"""What is measured, in this order: part, world, kind of numerics, seed."""


def run(cell: str) -> dict[str, Any]:
    part, *world, kind, number = cell.split(", ")
    seed = int(number)
    torch.set_num_threads(1)
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    disturb(float(kind.removeprefix("noise ")) if kind.startswith("noise") else 0.0)
    if part == "lengths":
        return lengths(world[0], dtype, seed)
    if part == "redraws":
        extend.MAX_REDRAWS = MANY_REDRAWS
        return lengths(world[0], dtype, seed, ["queue"])
    if part == "learning":
        return learning(dtype, seed)
    if part == "batch":
        return batch_invariance.main(32, 8, dtype)
    counts = carry_exact.quickstart_arm(
        20_000, seed, complement=False, dtype=dtype, moves=part == "carry"
    )
    return carry_exact.described(counts)


def kept(cell: str) -> dict[str, Any]:
    """What a cell has found, measured in a process of its own where that is not yet known."""
    path = KEPT / f"{cell}.json"
    if not path.is_file():
        found = in_process(__file__, "--cell", cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
        print(cell, flush=True)
    return dict(json.loads(path.read_text()))


# -- what was found --------------------------------------------------------------------------------


def shift(pairs: Sequence[Sequence[int]]) -> dict[str, float]:
    """Trained tokens over those of the policy's own, less one, and the 95 % interval. `pairs` are
    both numbers of each prompt."""
    ours, own = np.array(pairs, dtype=float).T
    rng = np.random.default_rng(0)
    picks = (rng.integers(len(own), size=len(own)) for _ in range(RESAMPLES))
    low, high = np.percentile([ours[p].sum() / own[p].sum() - 1 for p in picks], [2.5, 97.5])
    return {"shift": ours.sum() / own.sum() - 1, "low": float(low), "high": float(high)}


def row_of_lengths(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One arm's counts of all seeds, in numbers that do not depend on how many there were."""
    pairs = [pair for one in seeds for pair in one["pairs"]]
    total = {
        name: sum(one.get(name, 0) for one in seeds)
        for name in (*COUNTED, "responses", "equal", "generated")
    }
    rate = total["cut"] / max(total["looked_at"], 1)
    length = total["offered"] / max(total["verified"], 1)
    return {
        **total,
        **shift(pairs),
        "mismatch_per_token": rate,
        "carried_tokens": length,
        "mismatch_times_length": rate * length,
        "share_kept": total["kept"] / max(total["offered"], 1),
        "generated_per_trained": total["generated"] / sum(ours for ours, _ in pairs),
    }


def together(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is written: a row for each part, world, kind of numerics and arm, with all seeds."""
    rows: dict[str, Any] = {}
    for row in dict.fromkeys(cell.rpartition(", ")[0] for cell in found):
        seeds = [one for cell, one in found.items() if cell.rpartition(", ")[0] == row]
        if row.startswith(("lengths", "redraws")):
            for arm in seeds[0]:
                rows[f"{row}, {arm}"] = row_of_lengths([one[arm] for one in seeds])
        elif row.startswith("learning"):
            pairs = [pair for one in seeds for pair in one.pop("tokens_and_own")]
            rows[row] = {**shift(pairs), "seeds": seeds}
        else:
            rows[row] = seeds[0]
    return rows


def main(only: str = "", jobs: int = 1, cell: str | None = None) -> dict[str, Any] | int:
    if cell is not None:
        print(json.dumps(run(cell)))
        return 0
    cells = [one for one in CELLS if only in one]
    with ThreadPoolExecutor(jobs) as pool:
        found = dict(zip(cells, pool.map(kept, cells), strict=True))
    return {"rows": together(found)}


if __name__ == "__main__":
    bench(main)
