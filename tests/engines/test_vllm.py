"""What vLLM as an engine makes of requests.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.engines.engine import Carried, EngineError, EngineOutput, GenerationRequest
from rollpacker.engines.vllm.engine import VllmEngine
from rollpacker.engines.vllm.setup import BLOCK_TOKENS
from tests.engines.test_engine import Letters, Recorder
from tests.engines.tiny import END, VOCABULARY, generate, group, request
from tests.engines.with_vllm import (
    is_tie,
    made,
    model_of,
    needs_vllm,
    responses,
    says,
    served,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """Of `model_of()`, which no test may change."""
    engine = made(model_of(), tokenizer=Letters())
    yield engine
    asyncio.run(engine.close())


def test_greedy_tokens_are_those_of_generate(engine: VllmEngine) -> None:
    model = model_of()
    requests = [request(row, temperature=0.0) for row in range(24)]
    for response in responses(engine, requests):
        prompt = torch.tensor([response.prompt_tokens])
        wanted = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
        wanted = wanted[0, prompt.shape[1] :].tolist()
        log_probs = says(model, response.prompt_tokens, response.tokens)
        for place, (one, other) in enumerate(zip(response.tokens, wanted, strict=False)):
            if one != other:
                assert is_tie(log_probs[place])
                break
        else:
            assert list(response.tokens) == wanted


def test_log_probs_are_those_of_the_distribution_drawn_from(engine: VllmEngine) -> None:
    model = model_of()
    requests = [request(row, index) for row in range(9) for index in range(4)]
    for response in responses(engine, requests):
        wanted = says(model, response.prompt_tokens, response.tokens)
        found = torch.tensor(response.log_probs, dtype=torch.float64)
        picked = wanted.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        assert (found - picked).abs().max() < 1e-3


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.3}, {"seed": 9}],
)
def test_tokens_are_those_of_the_embedded_engine(
    engine: VllmEngine, sampling: dict[str, float]
) -> None:
    """The same noise: only at a near tie may one come out differently."""
    requests = [sample for row in range(9) for sample in group(row, 6, **sampling)]
    pairs = list(zip(responses(engine, requests), generate(model_of(), requests), strict=True))
    same = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    assert len(same) >= 53
    for one, other in same:
        assert one.finish_reason == other.finish_reason
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)


def test_what_ends_in_one_step_comes_in_launch_order(engine: VllmEngine) -> None:
    requests = [request(17 - row, forced_length=4 + row % 2) for row in range(8)]
    recorder = Recorder(8)
    engine.start(recorder, recorder.on_error)
    engine.submit(requests)
    recorder.wait()
    heard = [[output.event.sample.prompt.row for output in call] for call in recorder.calls]
    assert heard == [[17, 15, 13, 11], [16, 14, 12, 10]]


def test_forced_length_is_exact_and_ends_as_stop(engine: VllmEngine) -> None:
    free, forced = request(1, temperature=0.0), request(1, 1, temperature=0.0, forced_length=70)
    one, other = responses(engine, [free, forced])
    assert (len(other.tokens), other.finish_reason) == (70, "stop")
    assert other.tokens[: len(one.tokens)] == one.tokens


def test_a_response_ends_with_the_end_token_or_at_the_limit(engine: VllmEngine) -> None:
    found = responses(engine, [sample for row in range(9) for sample in group(row, 6)])
    stopped = [one for one in found if one.finish_reason == "stop"]
    cut = [one for one in found if one.finish_reason == "length"]
    assert stopped and cut and len(stopped) + len(cut) == len(found)
    assert all(one.tokens.index(END) == len(one.tokens) - 1 for one in stopped)
    assert all(len(one.tokens) == 24 and END not in one.tokens for one in cut)


def test_a_stop_string_ends_the_response_with_the_string_in_it(engine: VllmEngine) -> None:
    letters = Letters()
    (free,) = responses(engine, [request(4, seed=1)])
    text = letters.decode(free.tokens)
    assert len(text) > 8
    stop = text[3:6]
    (stopped,) = responses(engine, [request(4, seed=1, stop=("~~", stop))])
    assert letters.decode(stopped.tokens) == text[: text.index(stop) + 3]
    assert len(stopped.log_probs) == len(stopped.tokens)
    assert stopped.finish_reason == "stop"


def test_an_abort_inside_the_listener_takes_effect_before_the_next_step(
    engine: VllmEngine,
) -> None:
    short, long, late = request(0, forced_length=3), request(1, forced_length=50), request(2)
    whole = responses(engine, [long])[0]

    def answer(outputs: Sequence[EngineOutput]) -> None:
        if outputs[0].event.sample == short.sample:
            engine.abort([long.sample])
            engine.submit([late])

    outputs = served(engine, [short, long], answer, wanted=3)
    assert [output.event.sample for output in outputs] == [short.sample, long.sample, late.sample]
    event, response = outputs[1].event, outputs[1].response
    assert isinstance(event, SampleAborted) and response is not None
    assert event.num_tokens == 3
    assert response.tokens == whole.tokens[:3]
    assert response.log_probs == pytest.approx(whole.log_probs[:3], abs=1e-4)
    assert response.finish_reason == "aborted"


def test_neighbours_of_an_aborted_sample_are_undisturbed(engine: VllmEngine) -> None:
    requests = [request(row, forced_length=10 + 3 * row) for row in range(8)]
    wanted = {one.sample: one.tokens for one in responses(engine, requests)}
    victims = [requests[row].sample for row in (1, 4, 5)]

    def answer(outputs: Sequence[EngineOutput]) -> None:
        if outputs[0].event.sample.prompt.row == 0:
            engine.abort(victims)

    outputs = served(engine, requests, answer)
    generated = [o.response for o in outputs if isinstance(o.event, SampleGenerated)]
    assert len(generated) == 5
    assert all(one is not None and one.tokens == wanted[one.sample] for one in generated)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(0, max_response_tokens=512), "context of 512"),
        (request(0, prompt=[]), "no tokens"),
        (request(0, prompt=[7, VOCABULARY]), "vocabulary"),
        (
            replace(request(0), carried=Carried(tokens=(7,) * 25, log_probs=(0.0,) * 25)),
            "25 carried",
        ),
    ],
)
def test_a_request_that_can_never_run_fails_with_its_reason(
    engine: VllmEngine, asked: GenerationRequest, reason: str
) -> None:
    failed, generated = served(engine, [asked, request(1, forced_length=2)])
    assert isinstance(failed.event, SampleFailed)
    assert reason in failed.event.reason
    assert isinstance(generated.event, SampleGenerated)


@pytest.mark.parametrize("count", [1, 5, 23])
def test_what_is_carried_unverified_goes_on_as_if_undisturbed(
    engine: VllmEngine, count: int
) -> None:
    """A move at the same weights: tokens and noise stay."""
    requests = [request(row, forced_length=24) for row in range(9)]
    whole = responses(engine, requests)
    moved = [
        replace(
            one,
            carried=Carried(
                tokens=other.tokens[:count], log_probs=other.log_probs[:count], verify=False
            ),
        )
        for one, other in zip(requests, whole, strict=True)
    ]
    found = responses(engine, moved)
    assert [one.tokens for one in found] == [one.tokens for one in whole]
    for one, other in zip(found, whole, strict=True):
        assert one.log_probs[:count] == other.log_probs[:count]
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_a_response_that_was_carried_whole_ends_at_once(engine: VllmEngine) -> None:
    asked = request(3)
    (whole,) = responses(engine, [asked])
    carried = Carried(tokens=whole.tokens, log_probs=whole.log_probs, verify=False)
    (found,) = responses(engine, [replace(asked, carried=carried)])
    assert found == whole


def test_weights_cannot_change_while_samples_run(engine: VllmEngine) -> None:
    refusals: list[str] = []

    def answer(outputs: Sequence[EngineOutput]) -> None:
        if outputs[0].event.sample.prompt.row == 0:
            with pytest.raises(EngineError) as caught:
                asyncio.run(engine.update_weights(1))
            refusals.append(str(caught.value))

    served(engine, [request(0, forced_length=2), request(1, forced_length=9)], answer)
    assert "1 samples run" in refusals[0]
    assert engine.status().version == 0


def test_many_requests_with_random_aborts_leave_nothing_behind(engine: VllmEngine) -> None:
    chance = random.Random(0)
    requests = [request(row, forced_length=1 + row % 17) for row in range(1000)]
    waiting = [one.sample for one in requests]

    def answer(outputs: Sequence[EngineOutput]) -> None:
        engine.abort(chance.sample(waiting, 9))

    files = len(os.listdir("/proc/self/fd"))
    outputs = served(engine, requests, answer)
    assert sorted(output.event.sample for output in outputs) == sorted(waiting)
    assert {type(output.event) for output in outputs} == {SampleGenerated, SampleAborted}
    scheduler = engine._scheduler
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    assert not engine._live and not engine._draws.by_number
    assert not engine._vllm.output_processor.request_states
    assert engine._vllm.reset_prefix_cache()
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_further_turn_finds_what_came_before_in_the_prefix_cache(engine: VllmEngine) -> None:
    """But for what is left of a block, and what ended a response by a stop string here."""
    asked = [request(row, forced_length=70, max_response_tokens=70) for row in range(3)]
    asked.append(request(3, max_response_tokens=200, stop=("j",)))
    asked = [replace(one, keep=True) for one in asked]
    first = {one.event.sample: one for one in served(engine, asked)}
    assert not any(one.event.num_reused for one in first.values())
    further = [
        replace(
            one,
            prompt_tokens=(*one.prompt_tokens, *first[one.sample].response.tokens, 9, 8, 7),
            turn=2,
        )
        for one in asked
    ]
    second = {one.event.sample: one for one in served(engine, further)}
    engine.let_go([one.sample for one in asked])
    for one in further:
        event = second[one.sample].event
        num_before = len(one.prompt_tokens) - 4
        assert num_before - BLOCK_TOKENS < event.num_reused <= num_before
