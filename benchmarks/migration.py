"""Samples that move between engines at the same weights keep the tokens that they would have had.

Two embedded engines, each in a process of its own. Samples are moved at random moments: aborted in
one engine, and given to the other with the tokens and log-probabilities that they have. What comes
out is compared, token for token, with one engine that generates all of it undisturbed. A sample
that differs is listed with the first token that does, and where it moved; rounding decides between
candidates that are equally likely, and depends on who shares a batch.

    python benchmarks/migration.py [--moves 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_process import request, write_model
from machine import write_result

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.engine import (
    Carried,
    EngineConfig,
    EngineOutput,
    GenerationRequest,
    Response,
)
from rollpacker.engines.messages import EngineSetup
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.run.parts.engines import engine_setup

ROWS = 48
LENGTHS = (60, 300)


class Mover:
    """Listens to both engines and sends what was aborted to the other one."""

    def __init__(self, engines: Sequence[ProcessEngine]) -> None:
        self.engines = engines
        self.where: dict[SampleId, int] = {}
        self.requests: dict[SampleId, GenerationRequest] = {}
        self.tokens: dict[SampleId, tuple[int, ...]] = {}
        self.num_moves = 0
        self.moved: dict[SampleId, list[int]] = {}
        """At which lengths each sample moved."""
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        for number, engine in enumerate(engines):
            engine.start(lambda outputs, n=number: self._heard(n, outputs), self._died)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for number, engine in enumerate(self.engines):
            part = requests[number :: len(self.engines)]
            with self.changed:
                self.where.update((one.sample, number) for one in part)
                self.requests.update((one.sample, one) for one in part)
            engine.submit(part)

    def _heard(self, number: int, outputs: Sequence[EngineOutput]) -> None:
        to = 1 - number
        moving = []
        with self.changed:
            for output in outputs:
                event, response = output.event, output.response
                if isinstance(event, SampleGenerated):
                    self.tokens[event.sample] = response.tokens
                    del self.where[event.sample]
                else:
                    assert isinstance(event, SampleAborted), event
                    moving.append(self._taken_along(event, response))
                    self.where[event.sample] = to
            self.changed.notify_all()
        if moving:
            self.engines[to].submit(moving)

    def _taken_along(self, event: SampleAborted, response: Response | None) -> GenerationRequest:
        self.num_moves += 1
        self.moved.setdefault(event.sample, []).append(event.num_tokens)
        request = self.requests[event.sample]
        if response is None:
            return request
        carried = Carried(tokens=response.tokens, log_probs=response.log_probs, verify=False)
        return replace(request, carried=carried)

    def _died(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def move_some(self, draw: random.Random) -> None:
        with self.changed:
            chosen = draw.sample(sorted(self.where), min(6, len(self.where)))
            by_engine = {n: [s for s in chosen if self.where[s] == n] for n in (0, 1)}
        for number, samples in by_engine.items():
            self.engines[number].abort(samples)

    def wait(self, seconds: float) -> bool:
        """Whether all are done."""
        with self.changed:
            is_over = self.changed.wait_for(lambda: self.error or not self.where, seconds)
        assert self.error is None, self.error
        return bool(is_over)


def sampled(row: int, draw: random.Random) -> GenerationRequest:
    plain = request(row, 0, draw.randint(*LENGTHS))
    temperature = draw.choice((0.0, 0.7, 1.0))
    return replace(plain, sampling=replace(plain.sampling, temperature=temperature))


def undisturbed(
    setup: EngineSetup, requests: Sequence[GenerationRequest]
) -> dict[SampleId, Response]:
    engine = ProcessEngine(setup)

    async def run() -> dict[SampleId, Response]:
        found = {response.sample: response for response in await collect(engine, requests)}
        await engine.close()
        return found

    return asyncio.run(run())


def moved(setup: EngineSetup, rounds: Sequence[Sequence[GenerationRequest]], moves: int) -> Mover:
    engines = [ProcessEngine(setup, name=f"engine-{number}") for number in range(2)]
    mover = Mover(engines)
    draw = random.Random(0)
    for number, requests in enumerate(rounds, start=1):
        mover.submit(requests)
        while not mover.wait(draw.random() / 50):
            if mover.num_moves < moves * number / len(rounds):
                mover.move_some(draw)
    for engine in engines:
        asyncio.run(engine.close())
    return mover


def compare(expected: dict[SampleId, Response], mover: Mover) -> dict[str, Any]:
    different = []
    for sample, tokens in mover.tokens.items():
        wanted = expected[sample].tokens
        if tokens != wanted:
            pairs = enumerate(zip(tokens, wanted, strict=True))
            place = next(place for place, (one, other) in pairs if one != other)
            moved_at = mover.moved.get(sample, [])
            different.append({"sample": str(sample), "token": place, "moved_at": moved_at})
    return {
        "moves": mover.num_moves,
        "samples": len(mover.tokens),
        "samples_moved": len(mover.moved),
        "tokens": sum(map(len, mover.tokens.values())),
        "different": different,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moves", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(1)
    num_rounds = max(given.moves // (2 * ROWS), 1)
    rounds = [
        [sampled(number * ROWS + row, draw) for row in range(ROWS)] for number in range(num_rounds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        setup = engine_setup(write_model(Path(folder)), EngineConfig(max_slots=ROWS), threads=1)
        mover = moved(setup, rounds, given.moves)
        expected = undisturbed(setup, [one for requests in rounds for one in requests])
    payload = compare(expected, mover)
    print(payload)
    print(write_result("migration", payload))


if __name__ == "__main__":
    main()
