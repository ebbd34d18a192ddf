"""Moved between two engines again and again, responses are what they are undisturbed, for real."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.resume import write_model
from rollpacker.core.events import SampleGenerated, SampleMoved
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import (
    Carried,
    Engine,
    EngineConfig,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.held import Handle
from rollpacker.trainer.model import load_model
from rollpacker.trainer.trainer import ModelConfig

NUM_MOVES = 60


def make_engine(path: Path) -> Engine:
    loaded = load_model(ModelConfig(path=str(path), device="cpu"))
    install_attention(loaded.model)
    return TorchEngine(model=loaded.model, tokenizer=loaded.tokenizer, config=EngineConfig())


def make_requests(rng: random.Random) -> list[GenerationRequest]:
    prompts = [tuple(rng.randrange(3, 20) for _ in range(6)) for _ in range(6)]
    return [
        GenerationRequest(
            sample=SampleId(PromptId("train", 0, row), index, 0),
            prompt_tokens=prompt,
            sampling=SamplingParams(max_response_tokens=500),
            forced_length=rng.randrange(100, 500),
        )
        for row, prompt in enumerate(prompts)
        for index in range(4)
    ]


def carrying(request: GenerationRequest, whole: Response) -> GenerationRequest:
    """With carried tokens, of which the eleventh is not what the weights draw."""
    tokens = list(whole.tokens[:40])
    tokens[10] = 3 + (tokens[10] - 2) % 17
    carried = Carried(tokens=tuple(tokens), log_probs=(-1.0,) * len(tokens))
    return replace(request, carried=carried)


class Moving:
    """Moves samples between engines until all have ended."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.moves: list[SampleMoved] = []
        self.ends: dict[SampleId, tuple[SampleGenerated, Response]] = {}
        self._at: dict[SampleId, int] = {}
        self._moving: set[SampleId] = set()
        self._lock = threading.RLock()
        self._engines = Engines(engines, lambda *_: pytest.fail("none is lost"))
        self._engines.start(self._listen, lambda handle, error: print(error), print)

    def run(self, requests: Sequence[GenerationRequest], rng: random.Random) -> None:
        with self._lock:
            self._at = {request.sample: rng.randrange(2) for request in requests}
            self._engines.submit(requests, list(self._at.values()))
        until = time.monotonic() + 60
        while len(self.ends) < len(requests):
            assert time.monotonic() < until, "samples are missing"
            time.sleep(rng.uniform(0.0, 0.01))
            with self._lock:
                target = rng.randrange(2)
                over = self.ends.keys() | self._moving
                movable = [s for s, at in self._at.items() if at != target and s not in over]
                # Half of them when some have ended, so that a slow machine moves long ones, too.
                if len(self.moves) < (NUM_MOVES if self.ends else NUM_MOVES // 2):
                    some = rng.sample(movable, min(len(movable), rng.randrange(1, 6)))
                    self._moving.update(some)
                    self._engines.move(some, target)

    def _listen(self, handle: Handle, outputs: Sequence[EngineOutput]) -> None:
        with self._lock:
            for output in outputs:
                event, response = self._engines.heard(handle, output)
                assert event is not None
                self._moving.discard(event.sample)
                if isinstance(event, SampleMoved):
                    self.moves.append(event)
                    self._at[event.sample] = event.engine
                else:
                    assert isinstance(event, SampleGenerated) and response is not None, event
                    assert event.sample not in self.ends
                    self.ends[event.sample] = event, response


def test_moves_change_no_token(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    write_model(tmp_path)
    alone, *others = (make_engine(tmp_path) for _ in range(3))
    requests = make_requests(rng)
    whole = asyncio.run(collect(alone, requests))
    pairs = zip(requests, whole, strict=True)
    carried = [carrying(r, w) if r.sample.index == 0 else r for r, w in pairs]
    moving = Moving(others)
    moving.run(carried, rng)
    assert len(moving.moves) >= NUM_MOVES // 2
    assert any(move.num_tokens > 50 for move in moving.moves)
    for response in whole:
        event, found = moving.ends[response.sample]
        assert found.tokens == response.tokens
        assert found.log_probs == pytest.approx(response.log_probs, abs=1e-4)
        assert event.num_kept == (10 if response.sample.index == 0 else None)
    for engine in (alone, *others):
        asyncio.run(engine.close())
