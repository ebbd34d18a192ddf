"""Carried tokens equal generation from scratch, whatever the sampling and the model."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded import extend
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.embedded.extend import MAX_REDRAWS
from rollpacker.engines.engine import Carried, EngineOutput, GenerationRequest, Response
from tests.engines.tiny import (
    END,
    MODELS,
    VOCABULARY,
    carrying,
    generate,
    group,
    make_engine,
    moved,
    request,
    tiny_model,
)


class Letters:
    """A tokenizer whose token t is one letter."""

    eos_token_id = END

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


def serve(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], **options: object
) -> list[EngineOutput]:
    """What a fresh engine says of each request, in their order."""
    outputs: dict[SampleId, EngineOutput] = {}
    errors: list[BaseException] = []
    done = threading.Event()

    def listen(new: Sequence[EngineOutput]) -> None:
        outputs.update((output.event.sample, output) for output in new)
        if len(outputs) == len(requests):
            done.set()

    def fail(error: BaseException) -> None:
        errors.append(error)
        done.set()

    engine = make_engine(model, **options)
    engine.start(listen, fail)
    engine.submit(requests)
    assert done.wait(60)
    assert not errors, errors
    assert engine.status().num_running == engine.status().num_waiting == 0
    asyncio.run(engine.close())
    return [outputs[one.sample] for one in requests]


SAMPLINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
    "long": {"max_response_tokens": 60},
    "forced": {"forced_length": 33},
    "stop": {"stop": ("GH", "K", "MAN")},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("options", [{}, {"plain_forward": False}])
@pytest.mark.parametrize("amount", [0.0, 0.02])
def test_carried_responses_equal_those_from_scratch(
    sampling: str, options: dict[str, object], amount: float
) -> None:
    _check_equal("qwen2", SAMPLINGS[sampling], options, amount)


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - {"qwen2"}))
def test_carried_responses_equal_those_from_scratch_on_every_model(model_type: str) -> None:
    for options in ({}, {"plain_forward": False}):
        _check_equal(model_type, {}, options, 0.02)


def _check_equal(
    model_type: str,
    sampling: dict[str, object],
    options: dict[str, object],
    amount: float,
    **overrides: object,
) -> None:
    model = tiny_model(model_type, **overrides)
    some_differ = _check_moved(model, lambda: moved(model, amount, seed=1), sampling, options)
    if amount and sampling.get("temperature") != 0:
        assert some_differ


def _check_moved(
    model: PreTrainedModel,
    move: Callable[[], object],
    sampling: dict[str, object],
    options: dict[str, object],
) -> bool:
    """Whether a carried token differed somewhere."""
    requests = [one for row in range(8) for one in group(row, 4, **sampling)]
    options = {"tokenizer": Letters(), "max_slots": 7, **options}
    old = generate(model, requests, **options)
    move()
    wanted = generate(model, requests, **options)
    dice = random.Random(0)
    sizes = [dice.choice((0, 1, len(one.tokens), dice.randint(0, len(one.tokens)))) for one in old]
    outputs = serve(model, list(map(carrying, requests, old, sizes)), **options)
    responses = [output.response for output in outputs]
    assert [one.tokens for one in responses] == [one.tokens for one in wanted]
    assert [one.finish_reason for one in responses] == [one.finish_reason for one in wanted]
    for one, other in zip(responses, wanted, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    for output, one, size, new in zip(outputs, old, sizes, wanted, strict=True):
        agreed = [a == b for a, b in zip(one.tokens[:size], new.tokens, strict=False)]
        kept = agreed.index(False) if False in agreed else len(agreed)
        assert output.event.num_kept == (kept if size else None)
        assert output.event.num_redraws == 0
    return any(
        output.event.num_kept not in (None, size)
        for output, size in zip(outputs, sizes, strict=True)
    )


def test_passes_that_keep_to_small_budgets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend, "FIRST_PORTION", 7)
    monkeypatch.setattr(extend, "PREFILL_LOGITS", 20 * VOCABULARY)
    monkeypatch.setattr(extend, "EXTEND_SCORES", {"cpu": 3000})
    monkeypatch.setattr(extend, "DRAW_LOGITS", 3 * VOCABULARY)
    _check_equal("mistral", SAMPLINGS["long"], {}, 0.02)


def test_a_wide_vocabulary_and_a_low_rank_adapter() -> None:
    _check_equal("qwen2", {}, {}, 0.02, vocab_size=201)
    pytest.importorskip("peft")
    from rollpacker.trainer.lora import adapter_parameters, add_adapter
    from rollpacker.trainer.trainer import LoraConfig

    model = add_adapter(tiny_model(), LoraConfig(rank=2, target_modules=("all-linear",)))

    def move() -> None:
        with torch.no_grad():
            for place, weight in enumerate(adapter_parameters(model).values()):
                noise = torch.Generator().manual_seed(place)
                weight.add_(0.02 * torch.randn(weight.shape, generator=noise))

    _check_moved(model, move, {}, {})


def test_samples_with_one_noise_draw_the_same_tokens() -> None:
    model = tiny_model()
    asked = request(3)
    other = dataclasses.replace(
        asked, sample=SampleId(asked.sample.prompt, 5, 2), noise=asked.sample
    )
    one, two = generate(model, [asked, other])
    assert one.tokens == two.tokens
    assert two.sample == other.sample
    (fresh,) = generate(model, [dataclasses.replace(other, noise=None)])
    assert fresh.tokens != one.tokens


def _launch(
    engine: TorchEngine, requests: Sequence[GenerationRequest], dice: random.Random | None
) -> dict[SampleId, EngineOutput]:
    """One output each; `dice` abort some whenever something comes out, which a ticker sees to."""
    outputs: dict[SampleId, EngineOutput] = {}
    live = {one.sample for one in requests}
    done = threading.Event()
    errors: list[BaseException] = []

    def tick() -> None:
        sample = SampleId(PromptId("tick", 0, 0), len(ticks), 0)
        ticks.append(
            dataclasses.replace(request(0, forced_length=dice.randint(1, 6)), sample=sample)
        )
        engine.submit(ticks[-1:])

    def listen(new: Sequence[EngineOutput]) -> None:
        for output in new:
            if output.event.sample in live:
                live.remove(output.event.sample)
                outputs[output.event.sample] = output
        if not live:
            done.set()
        elif any(output.event.sample.prompt.source == "tick" for output in new):
            engine.abort([one for one in sorted(live) if dice.random() < 0.25])
            tick()

    def fail(error: BaseException) -> None:
        errors.append(error)
        done.set()

    ticks: list[GenerationRequest] = []
    engine.start(listen, fail)
    if dice is not None:
        tick()
    engine.submit(requests)
    assert done.wait(60)
    assert not errors, errors
    if ticks:
        engine.abort([ticks[-1].sample])
    while engine.status().num_running + engine.status().num_waiting:
        pass
    return outputs


@pytest.mark.parametrize(("complement", "most"), [(False, None), (True, None), (True, 4)])
def test_several_aborts_under_weights_that_move(complement: bool, most: int | None) -> None:
    dice = random.Random(int(complement))
    model = tiny_model()
    sampling = {"max_response_tokens": 60}
    asked = {one.sample: one for row in range(12) for one in group(row, 4, **sampling)}
    floors = dict.fromkeys(asked, 0)
    engine = make_engine(model, max_slots=20)
    num_equal = num_redraws = num_aborts = 0
    for version in range(5):
        outputs = _launch(engine, list(asked.values()), dice if version < 4 else None)
        assert engine._decoder.rows.num_rows == 0
        finished = [one for one in outputs.values() if isinstance(one.event, SampleGenerated)]
        scratch = (
            {
                response.sample: response
                for response in generate(
                    model,
                    [
                        dataclasses.replace(asked[one.event.sample], carried=None, noise=None)
                        for one in finished
                    ],
                    max_slots=20,
                )
            }
            if finished
            else {}
        )
        for sample, output in outputs.items():
            event, response = output.event, output.response
            if isinstance(event, SampleAborted):
                num_aborts += 1
                size = event.num_tokens
                assert (response is None) == (size == 0)
                floors[sample] = max(floors[sample], size)
                if response is not None:
                    assert response.finish_reason == "aborted"
                    assert len(response.tokens) == len(response.log_probs) == size
                    floor = floors[sample] if complement else 0
                    asked[sample] = carrying(
                        asked[sample], response, size, floor=floor, most_verified=most
                    )
                continue
            del asked[sample]
            num_redraws += event.num_redraws
            if complement and event.finish_reason == "stop":
                assert event.num_tokens > floors[sample] or event.num_redraws == MAX_REDRAWS
            if event.num_redraws == 0:
                num_equal += event.num_kept is not None
                assert response.tokens == scratch[sample].tokens
        moved(model, 0.02, seed=version)
        asyncio.run(engine.update_weights(version + 1))
    asyncio.run(engine.close())
    assert not asked
    assert num_equal > 10
    assert num_aborts > 40
    assert (num_redraws > 0) == complement


def test_an_end_that_always_comes_is_taken_once_the_redraws_are_used_up() -> None:
    model = tiny_model(tie_word_embeddings=False)
    asked = [request(row, seed=1, max_response_tokens=40) for row in range(6)]
    old = generate(model, asked)
    for sizes in ([len(one.tokens) - 1 for one in old], [1] * 6):
        model = tiny_model(tie_word_embeddings=False)
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head.copy_(0.01 * head)
            model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
            model.lm_head.bias[END] = 40.0
        requests = [
            carrying(one, response, size, floor=size)
            for one, response, size in zip(asked, old, sizes, strict=True)
            if size
        ]
        for output in serve(model, requests):
            assert output.event.num_redraws == MAX_REDRAWS
            assert output.event.num_kept == 0
            assert output.response.tokens == (END,)


def test_tokens_before_the_first_that_differs_stay_when_an_end_is_drawn_again() -> None:
    model = tiny_model()
    asked = [one for row in range(9) for one in group(row, 6, max_response_tokens=40)]
    old = generate(model, asked)
    moved(model, 0.03, seed=3)
    scratch = generate(model, asked)
    requests = [
        carrying(one, response, len(response.tokens) - 1, floor=len(response.tokens) - 1)
        for one, response in zip(asked, old, strict=True)
        if len(response.tokens) > 1
    ]
    fresh = {response.sample: response for response in scratch}
    num_redrawn = 0
    for output in serve(model, requests):
        event, wanted = output.event, fresh[output.event.sample].tokens
        if not event.num_redraws:
            assert output.response.tokens == wanted
            continue
        num_redrawn += 1
        kept = event.num_kept + (len(wanted) > event.num_kept + 1)
        assert output.response.tokens[:kept] == wanted[:kept]
        log_probs = _full_pass(model, output.response)
        assert output.response.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
    assert num_redrawn > 3


def _full_pass(model: PreTrainedModel, response: Response) -> torch.Tensor:
    ids = torch.tensor([response.prompt_tokens + response.tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    log_probs = logits[len(response.prompt_tokens) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]


def test_weighted_carrying_keeps_all_tokens_and_goes_on_from_them() -> None:
    model = tiny_model()
    asked = [one for row in range(8) for one in group(row, 3, max_response_tokens=30)]
    old = generate(model, asked)
    dice = random.Random(5)
    sizes = [dice.randint(1, len(one.tokens)) for one in old]
    requests = [
        carrying(one, response, size, verify=False)
        for one, response, size in zip(asked, old, sizes, strict=True)
    ]
    same = serve(model, requests)
    assert [output.response.tokens for output in same] == [one.tokens for one in old]
    moved(model, 0.05, seed=1)
    changed = serve(model, requests)
    assert [output.response.tokens for output in changed] != [one.tokens for one in old]
    for output, response, size in zip(changed, old, sizes, strict=True):
        assert output.event.num_kept is None
        assert output.response.tokens[:size] == response.tokens[:size]
        assert output.response.log_probs[:size] == response.log_probs[:size]
        wanted = _full_pass(model, output.response)[size:].tolist()
        assert output.response.log_probs[size:] == pytest.approx(wanted, abs=1e-4)


def test_a_sample_aborted_while_it_waits_reports_what_was_carried() -> None:
    model = tiny_model()
    asked = [request(row, forced_length=200) for row in range(2)]
    (old,) = generate(model, [request(1, forced_length=20)])
    waiting = carrying(asked[1], old, 17)
    engine = make_engine(model, max_slots=1)
    outputs: list[EngineOutput] = []
    done = threading.Event()

    def listen(new: Sequence[EngineOutput]) -> None:
        outputs.extend(new)
        if len(outputs) == 2:
            done.set()

    engine.start(listen, lambda error: done.set())
    engine.submit([asked[0], waiting])
    engine.abort([waiting.sample, asked[0].sample])
    assert done.wait(30)
    asyncio.run(engine.close())
    output = next(one for one in outputs if one.event.sample == waiting.sample)
    assert output.event == SampleAborted(time_s=0.0, sample=waiting.sample, num_tokens=17)
    assert output.response.tokens == old.tokens[:17]
    assert output.response.log_probs == old.log_probs[:17]
    assert output.response.finish_reason == "aborted"


@pytest.mark.parametrize(
    ("carried", "reason"),
    [
        (Carried(tokens=(7, 99), log_probs=(0.0, 0.0)), "vocabulary"),
        (Carried(tokens=(7, -1), log_probs=(0.0, 0.0)), "vocabulary"),
        (
            Carried(tokens=(7,) * 25, log_probs=(0.0,) * 25),
            "25 carried tokens are more than the 24",
        ),
        (Carried(tokens=(7, 8), log_probs=(0.0,)), "1 log-prob"),
    ],
)
def test_carried_tokens_that_cannot_be_fail_with_the_reason(carried: Carried, reason: str) -> None:
    good, bad = request(0), dataclasses.replace(request(1), carried=carried)
    outputs = serve(tiny_model(), [good, bad])
    assert isinstance(outputs[0].event, SampleGenerated)
    assert isinstance(outputs[1].event, SampleFailed)
    assert reason in outputs[1].event.reason


def test_a_group_that_carries_is_prefilled_once() -> None:
    model = tiny_model()
    asked = group(8, 4, forced_length=12)
    old = generate(model, asked)
    engine = make_engine(model)
    requests = [carrying(one, response, 9) for one, response in zip(asked, old, strict=True)]
    responses = asyncio.run(collect(engine, requests))
    assert [one.tokens for one in responses] == [one.tokens for one in old]
    assert engine.num_prefilled_tokens == len(asked[0].prompt_tokens)
    assert engine.status().generated_tokens == 4 * 3
    asyncio.run(engine.close())


def test_what_had_ended_does_not_outgrow_the_siblings_that_were_cut_off() -> None:
    model = tiny_model()
    asked = [one for row in range(9) for one in group(row, 6, max_response_tokens=40)]
    old = generate(model, asked)
    ceiling = sorted(len(one.tokens) for one in old)[len(old) // 3]
    whole = [pair for pair in zip(asked, old, strict=True) if len(pair[1].tokens) <= ceiling]
    moved(model, 0.1, seed=3)
    free = serve(model, [carrying(one, had, len(had.tokens)) for one, had in whole])
    held = serve(
        model, [carrying(one, had, len(had.tokens), ceiling=ceiling) for one, had in whole]
    )
    num_redrawn = 0
    for one, other, (_, had) in zip(free, held, whole, strict=True):
        assert one.response is not None and other.response is not None
        if len(one.response.tokens) <= ceiling:
            assert other.response.tokens == one.response.tokens
            continue
        assert one.event.num_kept == other.event.num_kept < len(had.tokens)
        start = one.event.num_kept + 1
        assert other.response.tokens[:start] == one.response.tokens[:start]
        num_redrawn += other.event.num_redraws > 0
        used_up = other.event.num_redraws == MAX_REDRAWS
        assert used_up or len(other.response.tokens) <= ceiling
    assert num_redrawn > 5


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_not_verified_in_a_pass_is_generated_as_it_would_be(sampling: str) -> None:
    """Tokens, kept tokens and redraws are the same however many carried tokens passes verify."""
    model, dice = tiny_model(), random.Random(sampling)
    asked = [one for row in range(9) for one in group(row, 4, **SAMPLINGS[sampling])]
    old = generate(model, asked, tokenizer=Letters())
    moved(model, 0.03, seed=5)
    rules = []
    for one, had in zip(asked, old, strict=True):
        size = dice.choice((1, len(had.tokens), dice.randint(1, len(had.tokens))))
        rule = {
            "floor": dice.choice((0, size, size + 3)),
            "ceiling": dice.choice((None, size + 1)) if size == len(had.tokens) else None,
            "redraws": dice.choice(((), (), ((0, 2),), ((size // 2, 1),))),
        }
        rules.append((one, had, size, rule))
    found = {}
    for most in (None, 1, 6, 1000):
        requests = [carrying(*given, most_verified=most, **rule) for *given, rule in rules]
        assert all(one.carried.num_verified >= 1 for one in requests if one.carried)
        found[most] = [
            (
                output.response.tokens,
                output.response.redraws,
                output.event.finish_reason,
                output.event.num_kept,
                output.event.num_redraws,
            )
            for output in serve(model, requests, tokenizer=Letters(), draft_tokens=0)
        ]
    assert found[1] == found[6] == found[1000] == found[None]
    beyond = [kept for _, _, _, kept, _ in found[1] if kept > 6]
    assert sampling in ("forced", "greedy", "long") or len(beyond) > 1


def test_tokens_of_later_redraws_are_verified_with_their_own_noise() -> None:
    model = tiny_model()
    asked = [one for row in range(9) for one in group(row, 6, max_response_tokens=40)]
    old = generate(model, asked)
    moved(model, 0.05, seed=3)
    requests = [
        carrying(one, response, len(response.tokens) - 1, floor=len(response.tokens) - 1)
        for one, response in zip(asked, old, strict=True)
        if len(response.tokens) > 1
    ]
    redrawn = [o for o in serve(model, requests) if 0 < o.event.num_redraws < MAX_REDRAWS]
    assert len(redrawn) > 5
    by_sample = {one.sample: one for one in requests}
    again = []
    for output in redrawn:
        response = output.response
        assert response is not None and response.redraws
        again.append(
            carrying(
                by_sample[response.sample],
                response,
                len(response.tokens),
                floor=len(response.tokens) - 1,
                redraws=response.redraws,
            )
        )
    for output, asked_again, before in zip(serve(model, again), again, redrawn, strict=True):
        assert asked_again.carried is not None and before.response is not None
        assert output.event.num_kept == len(asked_again.carried.tokens)
        assert output.event.num_redraws == 0
        assert output.response.tokens == before.response.tokens
        assert output.response.redraws == before.response.redraws
