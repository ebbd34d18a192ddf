"""Rows that are kept between turns: the same tokens, fewer of them computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rollpacker.core.events import SampleGenerated
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from tests.engines.engines import Heard
from tests.engines.tiny import make_engine, request, tiny_model

GIVEN = (17, 30, 9, 22, 41, 11, 35)
"""Tokens of which each answer has some."""


class Talk:
    """Several samples on one engine, turn by turn."""

    def __init__(self, engine: TorchEngine, num_samples: int = 4, **sampling: object) -> None:
        self.engine = engine
        self.heard = Heard()
        self.requests = [
            replace(request(row, max_response_tokens=9, **sampling), keep=True)
            for row in range(num_samples)
        ]
        for one in range(num_samples):
            self.requests[one] = replace(self.requests[one], forced_length=4 + one)
        engine.start(self.heard, self.heard.on_error)

    def turn(self, requests: Sequence[GenerationRequest] | None = None) -> list[EngineOutput]:
        """All samples' next turn; their environments answer."""
        requests = self.requests if requests is None else requests
        before = len(self.heard.outputs)
        self.engine.submit(requests)
        outputs = self.heard.wait_for(before + len(requests))[before:]
        found = {output.event.sample: output for output in outputs}
        for place, asked in enumerate(self.requests):
            output = found.get(asked.sample)
            if output is not None and output.response is not None:
                given = GIVEN[: 1 + (place + asked.turn) % 7]
                self.requests[place] = replace(
                    asked,
                    prompt_tokens=asked.prompt_tokens + output.response.tokens + given,
                    turn=asked.turn + 1,
                )
        return [found[asked.sample] for asked in requests]


def play(
    change: Callable[[TorchEngine, Talk], None] = lambda engine, talk: None,
    turns: int = 4,
    model_type: str = "qwen2",
    sampling: dict[str, object] | None = None,
    num_samples: int = 4,
    **options: object,
) -> tuple[list[EngineOutput], int]:
    """Outputs of all turns, and the tokens that were prefilled; `change` comes between turns."""
    engine = make_engine(tiny_model(model_type), **options)
    try:
        talk = Talk(engine, num_samples, **(sampling or {}))
        found = []
        for number in range(turns):
            if number:
                change(engine, talk)
            found += talk.turn()
        return found, engine.num_prefilled_tokens
    finally:
        asyncio.run(engine.close())


def unkept(engine: TorchEngine, talk: Talk) -> None:
    engine.let_go([one.sample for one in talk.requests])


def events(outputs: Sequence[EngineOutput]) -> list[SampleGenerated]:
    found = [output.event for output in outputs]
    assert all(isinstance(one, SampleGenerated) for one in found)
    return found  # type: ignore[return-value]


def check_same(kept: Sequence[EngineOutput], anew: Sequence[EngineOutput]) -> None:
    assert len(kept) == len(anew)
    for one, other in zip(kept, anew, strict=True):
        assert one.response is not None and other.response is not None
        assert one.response.prompt_tokens == other.response.prompt_tokens
        assert one.response.tokens == other.response.tokens
        assert one.response.log_probs == pytest.approx(other.response.log_probs, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plain_forward": False},
        {"max_slots": 2},
        {"draft_tokens": 0, "width_buckets": False},
        {"model_type": "mistral"},
        {"model_type": "gemma3_text"},
        {"sampling": {"temperature": 0.7, "top_p": 0.9}},
    ],
)
def test_a_row_that_was_kept_goes_on_as_if_it_were_computed_anew(
    options: dict[str, object],
) -> None:
    kept, prefilled = play(**options)
    anew, all_prefilled = play(unkept, **options)
    check_same(kept, anew)
    assert not any(event.num_reused for event in events(anew))
    for before, after in zip(events(kept)[:-4], events(kept)[4:], strict=True):
        assert after.num_reused == before.num_held > 0
    reused = sum(event.num_reused for event in events(kept))
    assert prefilled == all_prefilled - reused


def test_the_tokens_that_are_held_are_all_but_the_newest() -> None:
    outputs, _ = play(turns=1)
    for output in outputs:
        assert output.event.num_held == (
            len(output.response.prompt_tokens) + len(output.response.tokens) - 1
        )


def test_long_answers_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    anew, _ = play(unkept)
    monkeypatch.setattr("rollpacker.engines.embedded.extend.PREFILL_TOKENS", {"cpu": 3})
    kept, _ = play()
    check_same(kept, anew)


def test_nothing_is_kept_of_who_is_cut_off_or_does_not_ask() -> None:
    def cut_off(engine: TorchEngine, talk: Talk) -> None:
        talk.requests[0] = replace(talk.requests[0], forced_length=None)
        talk.requests[1] = replace(talk.requests[1], keep=False)

    outputs, _ = play(cut_off, turns=2)
    first, second, third, _ = events(outputs)[4:]
    assert (first.finish_reason, first.num_held) == ("length", 0) or first.num_held
    assert (second.num_held, second.room) == (0, None)
    assert third.num_held


def test_new_weights_are_computed_with_anew() -> None:
    def renewed(engine: TorchEngine, talk: Talk) -> None:
        asyncio.run(engine.update_weights(1))

    def offloaded(engine: TorchEngine, talk: Talk) -> None:
        asyncio.run(engine.offload())
        asyncio.run(engine.reload())

    for change in (renewed, offloaded):
        outputs, _ = play(change, turns=2)
        assert not any(event.num_reused for event in events(outputs))


def test_another_beginning_is_kept_as_far_as_it_is_the_same() -> None:
    def rewritten(engine: TorchEngine, talk: Talk) -> None:
        if talk.requests[3].turn == 2:
            old = talk.requests[3].prompt_tokens
            other = (*old[:4], 1 + old[4] % 40, *old[5:])
            talk.requests[3] = replace(talk.requests[3], prompt_tokens=other)

    def both(engine: TorchEngine, talk: Talk) -> None:
        rewritten(engine, talk)
        unkept(engine, talk)

    kept, _ = play(rewritten, turns=2)
    anew, _ = play(both, turns=2)
    check_same(kept, anew)
    assert events(kept)[7].num_reused == 4


def test_an_abort_leaves_nothing() -> None:
    engine = make_engine(tiny_model(), max_slots=1)
    talk = Talk(engine)
    try:
        talk.turn()
        last = talk.requests[3]
        engine.submit([replace(one, forced_length=30) for one in talk.requests])
        engine.abort([last.sample])  # waits for the one slot
        talk.heard.wait_for(8)
        again = talk.turn([last])
        assert again[0].event.num_reused == 0
    finally:
        asyncio.run(engine.close())


TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Of the tiny model: keys and values, layers, heads, their size, float32."""


def test_memory_is_for_rows_that_run() -> None:
    """The budget holds all rows of a turn, and less than that besides."""
    gib = 260 * TOKEN_BYTES / 2**30
    kept, prefilled = play(kv_cache_gib=gib, turns=6)
    anew, all_prefilled = play(unkept, turns=6)
    check_same(kept, anew)
    assert any(event.room is not None and event.room < 0 for event in events(kept))
    assert prefilled < all_prefilled
    reused = sum(event.num_reused for event in events(kept))
    assert reused == all_prefilled - prefilled


def test_what_is_kept_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    over = []
    engine = make_engine(tiny_model(), kv_cache_gib=200 * TOKEN_BYTES / 2**30)
    kept, settle = engine._kept, engine._kept.settle

    def looked(*arguments: object) -> None:
        settle(*arguments)  # type: ignore[arg-type]
        taken = kept._allocated + kept.num_tokens
        over.append(kept.num_tokens > 0 and taken > engine._decoder.slots.budget_tokens)

    kept.settle = looked  # type: ignore[method-assign]
    try:
        talk = Talk(engine, num_samples=6)
        for _ in range(5):
            talk.turn()
        assert len(over) >= 5 and not any(over) and kept.num_tokens
        engine.let_go([one.sample for one in talk.requests[1:]])
        talk.turn(talk.requests[:1])
        assert set(kept._rows) <= {talk.requests[0].sample}
    finally:
        asyncio.run(engine.close())
