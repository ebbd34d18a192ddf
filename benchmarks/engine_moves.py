"""Moving a response to another engine changes none of its tokens.

Two embedded engines with copies of a tiny model generate the same requests as one does alone, while
samples are moved between them at random, with the tokens that they have, again and again. A third
of the requests take up carried tokens, of which one is another than the weights draw. Compared
with the undisturbed responses: tokens, and how many of the carried ones are said to be kept. A
token may differ where another batch changes logits in their last digits; such are counted.

    python benchmarks/engine_moves.py [--moves 1000] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from machine import write_result
from resume import write_model

from rollpacker.controller.engines import Engines
from rollpacker.controller.held import Handle
from rollpacker.core.events import SampleGenerated, SampleMoved
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.rollout.attention import install_attention
from rollpacker.rollout.collect import collect
from rollpacker.rollout.engine import (
    Carried,
    Engine,
    EngineConfig,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.rollout.torch_engine import TorchEngine
from rollpacker.trainer.model import load_model
from rollpacker.trainer.trainer import ModelConfig

NUM_PROMPTS, SAMPLES_PER_PROMPT, MAX_TOKENS = 12, 8, 300


def make_engine(path: Path) -> Engine:
    loaded = load_model(ModelConfig(path=str(path), device="cpu"))
    install_attention(loaded.model)
    return TorchEngine(model=loaded.model, tokenizer=loaded.tokenizer, config=EngineConfig())


def make_requests(rng: random.Random, seed: int) -> list[GenerationRequest]:
    """Half of them end where they do, half have a length that leaves time to move them."""
    prompts = [tuple(rng.randrange(3, 20) for _ in range(6)) for _ in range(NUM_PROMPTS)]
    sampling = SamplingParams(max_response_tokens=MAX_TOKENS, seed=seed)
    return [
        GenerationRequest(
            sample=SampleId(PromptId("train", 0, row), index, 0),
            prompt_tokens=prompt,
            sampling=sampling,
            forced_length=rng.randrange(100, MAX_TOKENS) if index % 2 else None,
        )
        for row, prompt in enumerate(prompts)
        for index in range(SAMPLES_PER_PROMPT)
    ]


def carrying(
    rng: random.Random, requests: Sequence[GenerationRequest], whole: Sequence[Response]
) -> tuple[list[GenerationRequest], dict[SampleId, int]]:
    """A third of the requests with carried tokens, and how many of these the weights draw again."""
    found, kept = [], {}
    for request, response in zip(requests, whole, strict=True):
        if rng.random() < 1 / 3 and len(response.tokens) > 2:
            tokens = list(response.tokens[: rng.randrange(2, len(response.tokens))])
            kept[request.sample] = place = rng.randrange(len(tokens))
            tokens[place] = 3 + (tokens[place] - 2) % 17
            kept[request.sample] = _num_same(tokens, response.tokens)
            carried = Carried(tokens=tuple(tokens), log_probs=(-1.0,) * len(tokens))
            request = replace(request, carried=carried)
        found.append(request)
    return found, kept


def _num_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(tokens, others, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(tokens))


class Moving:
    """Two engines, between which samples are moved until all have ended."""

    def __init__(self, engines: Sequence[Engine], rng: random.Random) -> None:
        self.moves = 0
        self.ends: dict[SampleId, tuple[SampleGenerated, Response]] = {}
        self._lock = threading.RLock()
        self._rng = rng
        self._engines = Engines(engines, _no_other)
        self._engines.start(self._listen, _die, print)
        self._at: dict[SampleId, int] = {}

    def run(self, requests: Sequence[GenerationRequest], max_moves: int) -> None:
        where = [self._rng.randrange(2) for _ in requests]
        self._at = dict(zip((r.sample for r in requests), where, strict=True))
        moving: set[SampleId] = set()
        self._moving = moving
        with self._lock:
            self._engines.submit(requests, where)
        while len(self.ends) < len(requests):
            time.sleep(self._rng.uniform(0.0, 0.01))
            with self._lock:
                idle = [s for s in self._at if s not in self.ends and s not in moving]
                if not idle or self.moves + len(moving) >= max_moves:
                    continue
                target = self._rng.randrange(2)
                samples = [s for s in idle if self._at[s] != target]
                some = self._rng.sample(samples, min(len(samples), self._rng.randrange(1, 6)))
                moving.update(some)
                self._engines.move(some, target)

    def _listen(self, handle: Handle, outputs: Sequence[EngineOutput]) -> None:
        with self._lock:
            for output in outputs:
                event, response = self._engines.heard(handle, output)
                assert event is not None
                self._moving.discard(event.sample)
                if isinstance(event, SampleMoved):
                    self.moves += 1
                    self._at[event.sample] = event.engine
                else:
                    assert isinstance(event, SampleGenerated) and response is not None, event
                    assert event.sample not in self.ends
                    self.ends[event.sample] = event, response


def _no_other(number: int, incarnation: int) -> Engine:
    raise AssertionError("nobody is lost here")


def _die(handle: Handle, error: BaseException) -> None:
    raise error


def measure(moves: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng = random.Random(0)
    counts = dict.fromkeys(("rounds", "moves", "responses", "tokens", "carried"), 0)
    differ, wrong_kept, largest = [], 0, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        write_model(Path(temporary))
        alone, *others = (make_engine(Path(temporary)) for _ in range(3))
        while counts["moves"] < moves:
            requests = make_requests(rng, counts["rounds"])
            whole = asyncio.run(collect(alone, requests))
            requests, kept = carrying(rng, requests, whole)
            moving = Moving(others, rng)
            moving.run(requests, moves - counts["moves"])
            for response in whole:
                event, found = moving.ends[response.sample]
                if found.tokens != response.tokens:
                    differ.append(_num_same(found.tokens, response.tokens))
                    continue
                pairs = zip(found.log_probs, response.log_probs, strict=True)
                largest = max(largest, max(abs(a - b) for a, b in pairs))
                wrong_kept += event.num_kept != kept.get(response.sample)
            counts["rounds"] += 1
            counts["moves"] += moving.moves
            counts["responses"] += len(whole)
            counts["tokens"] += sum(len(response.tokens) for response in whole)
            counts["carried"] += len(kept)
        for engine in (alone, *others):
            asyncio.run(engine.close())
    return {
        **counts,
        "responses_with_other_tokens": len(differ),
        "wrong_num_kept": wrong_kept,
        "largest_log_prob_difference": largest,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moves", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="100 moves, nothing is written")
    args = parser.parse_args()
    result = measure(100 if args.quick else args.moves)
    print(json.dumps(result, indent=1))
    if not args.quick:
        write_result("engine_moves", result)
    return 1 if result["responses_with_other_tokens"] or result["wrong_num_kept"] else 0


if __name__ == "__main__":
    sys.exit(main())
