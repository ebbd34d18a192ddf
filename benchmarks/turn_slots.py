"""What keeping rows between turns is worth: 64 trajectories of eight turns on the embedded engine.

Models with random weights; environments answer at once, with tokens that are drawn, as are the
lengths of messages. The arms, kept and computed anew at each turn, take turns in one run, each on
an engine of its own. Tokens per second count drawn tokens, over seconds of the processor; those of
the clock are beside them.

    python benchmarks/turn_slots.py [--repeats 2]
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import batch_invariance
import torch
from lab import bench, earlier
from machine import machine_info
from transformers import PreTrainedModel

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import (
    EngineConfig,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)

TRAJECTORIES, TURNS = 64, 8
DRAWN = (16, 64)
"""Tokens of a message, least and most."""
MODELS = {
    "0.2 M": (512, 64, 192, 4, 4, 2),
    "1 M": (512, 128, 512, 4, 4, 2),
}
"""Vocabulary, width, inner width, layers, heads, key heads."""
POINTS = {
    "short answers": {"model": "0.2 M", "prompt": 64, "given": (8, 24)},
    "tool results": {"model": "0.2 M", "prompt": 100, "given": (50, 200)},
    "long prompts": {"model": "0.2 M", "prompt": 500, "given": (50, 200)},
    "tool results, larger model": {"model": "1 M", "prompt": 100, "given": (50, 200)},
    "little memory": {"model": "0.2 M", "prompt": 100, "given": (50, 200), "share": 0.6},
}
"""Tokens of a prompt and of an answer; share: of the memory that all rows at once have in the end,
so much is there for those that run and those that are kept."""


def random_model(name: str) -> PreTrainedModel:
    vocabulary, width, inner, layers, heads, key_heads = MODELS[name]
    return batch_invariance.make_model(
        **{"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner},
        **{"num_hidden_layers": layers, "num_attention_heads": heads, "initializer_range": 0.1},
        **{"num_key_value_heads": key_heads, "max_position_embeddings": 4096},
        **{"tie_word_embeddings": False, "eos_token_id": None},
    )


class Talk:
    """All trajectories, whose environments answer at once, in the engine's own thread."""

    def __init__(self, model: PreTrainedModel, point: dict[str, Any], *, keeps: bool) -> None:
        self.keeps = keeps
        self.given = point["given"]
        self.vocabulary: int = model.config.vocab_size
        gib = None
        if "share" in point:
            config = model.config
            each = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads
            each *= config.hidden_size // config.num_attention_heads
            longest = point["prompt"] + TURNS * (sum(DRAWN) + sum(self.given)) // 2
            gib = point["share"] * TRAJECTORIES * longest * each / 2**30
        self.engine = TorchEngine(
            model=model, tokenizer=None, config=EngineConfig(kv_cache_gib=gib)
        )
        self.engine.start(self.on_outputs, self.on_error)
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self.prompt: int = point["prompt"]

    def play(self) -> tuple[float, float]:
        """Seconds of the processor and of the clock."""
        self.responses: list[Response] = []
        self.num_reused = self.num_left = 0
        self.requests: dict[SampleId, GenerationRequest] = {}
        for row in range(TRAJECTORIES):
            sample = SampleId(PromptId("train", 0, row), 0, 0)
            chance = random.Random(f"prompt {row}")
            tokens = tuple(chance.randrange(self.vocabulary) for _ in range(self.prompt))
            sampling = SamplingParams(max_response_tokens=DRAWN[1])
            self.requests[sample] = self.next(
                GenerationRequest(sample=sample, prompt_tokens=tokens, sampling=sampling, turn=0)
            )
        self.num_left = TRAJECTORIES
        self.over.clear()
        before, began = time.process_time(), time.monotonic()
        self.engine.submit([*self.requests.values()])
        self.over.wait()
        assert not self.errors, self.errors
        return time.process_time() - before, time.monotonic() - began

    def next(self, request: GenerationRequest) -> GenerationRequest:
        turn = request.turn + 1
        length = random.Random(f"{request.sample} {turn}").randint(*DRAWN)
        keep = self.keeps and turn < TURNS
        return replace(request, turn=turn, forced_length=length, keep=keep)

    def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        going = []
        for output in outputs:
            response, event = output.response, output.event
            assert response is not None and isinstance(event, SampleGenerated)
            self.responses.append(response)
            self.num_reused += event.num_reused
            request = self.requests[response.sample]
            if request.turn == TURNS:
                self.num_left -= 1
                continue
            chance = random.Random(f"answer {response.sample} {request.turn}")
            given = [chance.randrange(self.vocabulary) for _ in range(chance.randint(*self.given))]
            tokens = (*response.prompt_tokens, *response.tokens, *given)
            request = self.next(replace(request, prompt_tokens=tokens))
            self.requests[response.sample] = request
            going.append(request)
        if going:
            self.engine.submit(going)
        if not self.num_left:
            self.over.set()

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)
        self.over.set()

    def found(self) -> dict[tuple[SampleId, int], Response]:
        """Responses by sample and number of tokens before them."""
        return {(one.sample, len(one.prompt_tokens)): one for one in self.responses}


def measure(name: str, repeats: int) -> dict[str, Any]:
    point = POINTS[name]
    model = random_model(point["model"])
    arms = {arm: Talk(model, point, keeps=arm == "kept") for arm in ("kept", "anew")}
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    loads = []
    same, difference = True, 0.0
    for number in range(repeats):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        for arm in order:
            seconds[arm].append(arms[arm].play())
            loads.append(machine_info()["load_average_1min"])
        kept, anew = arms["kept"].found(), arms["anew"].found()
        same &= {k: r.tokens for k, r in kept.items()} == {k: r.tokens for k, r in anew.items()}
        difference = max(
            difference,
            *(
                abs(one - other)
                for key in kept.keys() & anew.keys()
                for one, other in zip(kept[key].log_probs, anew[key].log_probs, strict=True)
            ),
        )
        asyncio.run(_renew(arms))
    drawn = sum(len(one.tokens) for one in arms["kept"].responses)
    before = sum(len(one.prompt_tokens) for one in arms["kept"].responses)
    cpu = {arm: [one for one, _ in seconds[arm]] for arm in arms}
    clock = {arm: [one for _, one in seconds[arm]] for arm in arms}
    pairs = zip(cpu["anew"], cpu["kept"], strict=True)
    result = {
        **point,
        "repeats": repeats,
        "drawn_tokens": drawn,
        "tokens_before_turns": before,
        "of_these_kept": arms["kept"].num_reused,
        "tokens_per_processor_s": {arm: round(drawn / median(cpu[arm])) for arm in arms},
        "tokens_per_clock_s": {arm: round(drawn / median(clock[arm])) for arm in arms},
        "times": round(median(anew / kept for anew, kept in pairs), 2),
        "same_tokens": same,
        "largest_log_prob_difference": difference,
        "load_averages": loads,
    }
    for talk in arms.values():
        asyncio.run(talk.engine.close())
    return result


async def _renew(arms: dict[str, Talk]) -> None:
    """Nothing of a repeat is left for the next one."""
    for talk in arms.values():
        await talk.engine.update_weights(0)


def main(repeats: int = 2, points: Sequence[str] = tuple(POINTS)) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {} if len(points) == len(POINTS) else earlier(main, "points")
    for name in points:
        found[name] = measure(name, repeats)
        print(name, found[name], flush=True)
    settings = {"trajectories": TRAJECTORIES, "turns": TURNS, "drawn": DRAWN, "threads": 1}
    return {**settings, "points": found}


if __name__ == "__main__":
    bench(main, points=POINTS)
