"""Carried tokens that vLLM draws anew: what comes of them is what plain generation gives, and what
the embedded engine makes of the same.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.extend import MAX_REDRAWS
from rollpacker.engines.engine import EngineOutput, GenerationRequest, Response
from rollpacker.engines.vllm import verify as vllm_verify
from rollpacker.engines.vllm.draws import Settings
from rollpacker.engines.vllm.engine import VllmEngine
from tests.engines.test_carry import SAMPLINGS, Letters
from tests.engines.tiny import VOCABULARY, carrying, generate, group, moved, request
from tests.engines.with_vllm import (
    check_alike,
    check_empty,
    check_plain,
    made,
    model_of,
    needs_vllm,
    num_agreeing,
    outputs_of,
    responses,
    says,
    served,
    taken,
)

pytestmark = needs_vllm

AMOUNT = 0.02
"""How far the weights move: about one carried token in twenty comes out differently then."""


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """With the weights that the last test left."""
    engine = made(model_of(tied=False), tokenizer=Letters())
    yield engine
    asyncio.run(engine.close())


def sizes_of(old: Sequence[Response], dice: random.Random) -> list[int]:
    """How much of each is carried: nothing, a token, all, anything."""
    return [dice.choice((0, 1, len(o.tokens), dice.randint(0, len(o.tokens)))) for o in old]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("amount", [0.0, AMOUNT])
def test_carried_responses_equal_those_from_scratch(
    engine: VllmEngine, sampling: str, amount: float
) -> None:
    model = model_of(tied=False)
    taken(engine, model)
    asked = [one for row in range(8) for one in group(row, 4, **SAMPLINGS[sampling])]
    old = responses(engine, asked)
    taken(engine, moved(model, amount, seed=1))
    wanted = responses(engine, asked)
    sizes = sizes_of(old, random.Random(0))
    requests = [carrying(*three) for three in zip(asked, old, sizes, strict=True)]
    check_plain(outputs_of(engine, requests), requests, wanted)
    changed = sum(
        num_agreeing(one.tokens[:size], other.tokens) < size
        for one, other, size in zip(old, wanted, sizes, strict=True)
    )
    assert changed == 0 if not amount else changed > 3


def test_kept_tokens_get_the_log_probs_of_the_weights_that_are_now(engine: VllmEngine) -> None:
    model = model_of(tied=False)
    taken(engine, model)
    asked = [one for row in range(8) for one in group(row, 4)]
    old = responses(engine, asked)
    taken(engine, moved(model, AMOUNT, seed=2))
    requests = [carrying(one, had, len(had.tokens)) for one, had in zip(asked, old, strict=True)]
    num_kept = 0
    for output, had in zip(outputs_of(engine, requests), old, strict=True):
        response, kept = output.response, output.event.num_kept
        wanted = says(model, response.prompt_tokens, response.tokens)
        picked = wanted.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        found = torch.tensor(response.log_probs, dtype=torch.float64)
        assert (found - picked).abs().max() < 1e-3
        assert response.tokens[:kept] == had.tokens[:kept]
        num_kept += kept
        before = torch.tensor(had.log_probs[:kept], dtype=torch.float64)
        assert kept < 3 or (found[:kept] - before).abs().max() > 1e-3
    assert num_kept > 60


@pytest.mark.parametrize("amount", [0.0, 0.0005])
def test_long_carried_responses_are_drawn_in_the_pieces_in_which_they_are_read(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, amount: float
) -> None:
    model = model_of(tied=False)
    taken(engine, model)
    asked = [request(row, forced_length=400) for row in range(6)]
    old = responses(engine, asked)
    taken(engine, moved(model, amount, seed=3))
    wanted = responses(engine, asked)
    requests = [carrying(one, had, 390) for one, had in zip(asked, old, strict=True)]
    monkeypatch.setattr(engine._scheduler, "max_num_scheduled_tokens", 150)
    monkeypatch.setattr(vllm_verify, "DRAW_LOGITS", 40 * VOCABULARY)
    steps = engine.status().decode_steps
    outputs = outputs_of(engine, requests)
    check_plain(outputs, requests, wanted)
    kept = sorted(output.event.num_kept for output in outputs)
    assert kept[1:] == [390] * 5 if not amount else kept[-1] < 390
    assert engine.status().decode_steps - steps > 6 * 390 // 150


def test_siblings_with_the_same_carried_tokens_are_each_looked_at(engine: VllmEngine) -> None:
    """vLLM has the keys and values of the first one's in its prefix cache when the second comes."""
    model = model_of(tied=False)
    taken(engine, model)
    first = request(2, forced_length=100)
    (old,) = responses(engine, [first])
    others = [
        replace(request(2, index, forced_length=100), noise=first.sample) for index in range(1, 4)
    ]
    requests = [carrying(one, old, 90) for one in others]
    for one in requests:
        (output,) = outputs_of(engine, [one])
        assert output.event.num_kept == 90
        assert output.response.tokens == old.tokens


# -- as the embedded engine does it ----------------------------------------------------------------


def test_ends_before_the_floor_and_beyond_the_ceiling_are_not_taken(engine: VllmEngine) -> None:
    model = model_of(tied=False)
    asked = [one for row in range(9) for one in group(row, 6, max_response_tokens=40)]
    old = generate(model, asked)
    moved(model, 0.05, seed=3)
    cut_off = [
        carrying(one, had, len(had.tokens) - 1, floor=len(had.tokens) - 1)
        for one, had in zip(asked, old, strict=True)
    ]
    outputs = check_alike(engine, model, cut_off, ties=2)
    assert sum(output.event.num_redraws > 0 for output in outputs) > 5
    for output, one in zip(outputs, cut_off, strict=True):
        used_up = output.event.num_redraws == MAX_REDRAWS
        stopped = output.event.finish_reason == "stop"
        assert not stopped or used_up or output.event.num_tokens > one.carried.floor
    ceiling = sorted(len(one.tokens) for one in old)[len(old) // 3]
    held = [
        carrying(one, had, len(had.tokens), ceiling=ceiling)
        for one, had in zip(asked, old, strict=True)
        if len(had.tokens) <= ceiling
    ]
    assert sum(o.event.num_redraws > 0 for o in check_alike(engine, model, held, ties=2)) > 3
    # What was drawn with noise of later redraws is carried once more.
    again = [
        carrying(
            one,
            had := output.response,
            len(had.tokens),
            floor=len(had.tokens) - 1,
            redraws=had.redraws,
        )
        for one, output in zip(cut_off, outputs, strict=True)
        if output.event.num_redraws
    ]
    for output, one in zip(check_alike(engine, model, again, ties=0), again, strict=True):
        assert output.event.num_kept == len(one.carried.tokens)
        assert (output.event.num_redraws, output.response.redraws) == (0, one.carried.redraws)
    moved(model, 0.05, seed=4)
    outputs = check_alike(engine, model, again, ties=2)
    assert len({output.event.num_redraws for output in outputs}) > 1


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whatever_is_carried_both_engines_make_the_same_of_it(
    engine: VllmEngine, sampling: str
) -> None:
    model, dice = model_of(tied=False), random.Random(sampling)
    asked = [one for row in range(9) for one in group(row, 4, **SAMPLINGS[sampling])]
    old = generate(model, asked, tokenizer=Letters())
    moved(model, AMOUNT, seed=5)
    requests = []
    for one, had, size in zip(asked, old, sizes_of(old, dice), strict=True):
        options = {
            "floor": dice.choice((0, size, size + 3)),
            "ceiling": dice.choice((None, None, size + 1)),
            "redraws": dice.choice(((), ((0, 2),), ((size // 2, 1), (size // 2 + 3, 4)))),
            "verify": dice.random() < 0.9 or len(had.tokens) == size,
            "most_verified": dice.choice((None, None, 1, 5)),
        }
        requests.append(carrying(one, had, size, **options))
    check_alike(engine, model, requests, ties=2)


def test_an_end_that_always_comes_is_taken_once_the_turns_are_used_up(
    engine: VllmEngine,
) -> None:
    """Greedy tokens need no noise."""
    model = model_of(tied=False)
    asked = [request(row, temperature=0.0, max_response_tokens=40) for row in range(9)]
    old = generate(model, asked)
    moved(model, AMOUNT, seed=6)
    requests = [
        carrying(one, had, len(had.tokens) - 1, floor=40)
        for one, had in zip(asked, old, strict=True)
    ]
    ended = [output.event for output in check_alike(engine, model, requests)]
    assert any(one.finish_reason == "stop" for one in ended)
    assert all((one.num_redraws == MAX_REDRAWS) == (one.finish_reason == "stop") for one in ended)


def test_where_a_pass_gives_no_numbers_the_token_is_drawn_as_in_plain_generation(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong carried token may spoil those before it too."""

    class Spoilt(Settings):
        def draw(self, *about: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, log_probs = super().draw(*about)
            return tokens, log_probs.index_fill(0, torch.arange(3, len(tokens)), torch.nan)

    taken(engine, model_of(tied=False))
    asked = request(1, forced_length=24)
    (old,) = responses(engine, [asked])
    monkeypatch.setattr(vllm_verify, "Settings", Spoilt)
    (output,) = outputs_of(engine, [carrying(asked, old, 20)])
    assert output.response.tokens == old.tokens
    assert output.response.log_probs == pytest.approx(old.log_probs, abs=1e-3)
    assert output.event.num_kept == 3


# -- aborts ----------------------------------------------------------------------------------------


def test_who_is_aborted_before_its_tokens_were_looked_at_brings_them_back(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tied=False)
    taken(engine, model)
    short, long = request(0, forced_length=2), request(1, forced_length=400)
    (old,) = responses(engine, [long])
    monkeypatch.setattr(engine._scheduler, "max_num_scheduled_tokens", 20)

    def answer(outputs: Sequence[EngineOutput]) -> None:
        if outputs[0].event.sample == short.sample:
            engine.abort([long.sample])

    asked = carrying(long, old, 390)
    _, aborted = served(engine, [short, asked], answer)
    assert aborted.event == SampleAborted(time_s=0.0, sample=long.sample, num_tokens=390)
    assert aborted.response == replace(
        old,
        tokens=old.tokens[:390],
        log_probs=old.log_probs[:390],
        finish_reason="aborted",
    )
    check_empty(engine)


@pytest.mark.parametrize("complement", [False, True])
def test_several_aborts_under_weights_that_move(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, complement: bool
) -> None:
    """While they wait, are read, and go on. Who ends has what plain generation gives."""
    dice, model = random.Random(int(complement)), model_of(tied=False)
    monkeypatch.setattr(engine._scheduler, "max_num_scheduled_tokens", 90)
    asked = {one.sample: one for row in range(10) for one in group(row, 4, max_response_tokens=60)}
    floors = dict.fromkeys(asked, 0)
    num_other = num_carried = num_redraws = num_unseen = 0
    for version in range(5):
        taken(engine, model)
        outputs = launched(engine, list(asked.values()), dice if version < 4 else None)
        check_empty(engine)
        plain = [
            replace(asked[sample], carried=None)
            for sample, output in outputs.items()
            if isinstance(output.event, SampleGenerated)
        ]
        wanted = {one.sample: one.tokens for one in responses(engine, plain)} if plain else {}
        for sample, output in outputs.items():
            event, response = output.event, output.response
            assert isinstance(event, SampleGenerated | SampleAborted)
            if isinstance(event, SampleGenerated):
                carried = asked.pop(sample).carried
                num_redraws += event.num_redraws
                if complement and event.finish_reason == "stop":
                    assert event.num_tokens > floors[sample] or event.num_redraws == MAX_REDRAWS
                if not event.num_redraws and (carried is None or not carried.redraws):
                    num_carried += event.num_kept is not None
                    num_other += response.tokens != wanted[sample]
                continue
            floors[sample] = max(floors[sample], event.num_tokens)
            if response is None:
                continue
            before = asked[sample].carried
            redraws = response.redraws
            if before is not None and event.num_kept is None:
                num_unseen += 1
                assert response.tokens == before.tokens
                redraws = before.redraws
            floor = floors[sample] if complement else 0
            asked[sample] = carrying(
                asked[sample], response, event.num_tokens, floor=floor, redraws=redraws
            )
        moved(model, AMOUNT, seed=version)
    assert not asked and num_other <= 2
    assert num_carried > 10 and num_unseen > 3
    assert (num_redraws > 0) == complement


def launched(
    engine: VllmEngine, requests: Sequence[GenerationRequest], dice: random.Random | None
) -> dict[SampleId, EngineOutput]:
    """What becomes of these. Beside them short samples follow each other, and whenever one ends the
    `dice` abort some."""
    live = {one.sample for one in requests}
    found: dict[SampleId, EngineOutput] = {}
    ticks = [
        replace(request(0, forced_length=1 + n % 5), sample=SampleId(PromptId("tick", 0, n), 0, 0))
        for n in range(25 if dice is not None else 0)
    ]
    left = ticks[1:]

    def answer(outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if output.event.sample in live:
                live.remove(output.event.sample)
                found[output.event.sample] = output
            elif dice is not None:
                engine.abort([one for one in sorted(live) if dice.random() < 0.15])
                if left:
                    engine.submit([left.pop()])

    served(engine, [*ticks[:1], *requests], answer, wanted=len(ticks) + len(requests))
    return found
