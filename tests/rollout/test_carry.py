"""Carried tokens equal generation from scratch, whatever the sampling and the model."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.core.ids import SampleId
from rollpacker.rollout import extend
from rollpacker.rollout.engine import Carried, EngineOutput, GenerationRequest, Response
from tests.rollout.tiny import (
    END,
    MODELS,
    VOCABULARY,
    generate,
    group,
    make_engine,
    tiny_model,
)


class Letters:
    """A tokenizer whose token t is one letter."""

    eos_token_id = END

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


def _moved(model: PreTrainedModel, amount: float, seed: int) -> PreTrainedModel:
    """The model with its weights changed a little, in place."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            change = torch.randn(weight.shape, generator=noise).to(weight)
            weight.add_(amount * weight.std(unbiased=False) * change)
    return model


def _serve(
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


def _carrying(
    asked: GenerationRequest, old: Response, num_tokens: int, **options: object
) -> GenerationRequest:
    carried = Carried(
        tokens=old.tokens[:num_tokens], log_probs=old.log_probs[:num_tokens], **options
    )
    return dataclasses.replace(asked, carried=carried)


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
@pytest.mark.parametrize("options", [{}, {"plain_forward": False}, {"static_shapes": True}])
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
    model_type: str, sampling: dict[str, object], options: dict[str, object], amount: float
) -> None:
    model = tiny_model(model_type)
    requests = [one for row in range(8) for one in group(row, 4, **sampling)]
    options = {"tokenizer": Letters(), "max_slots": 7, **options}
    old = generate(model, requests, **options)
    _moved(model, amount, seed=1)
    wanted = generate(model, requests, **options)
    dice = random.Random(0)
    sizes = [dice.choice((0, 1, len(one.tokens), dice.randint(0, len(one.tokens)))) for one in old]
    outputs = _serve(model, list(map(_carrying, requests, old, sizes)), **options)
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
    if amount and sampling.get("temperature") != 0:
        assert any(
            output.event.num_kept not in (None, size)
            for output, size in zip(outputs, sizes, strict=True)
        )


def test_passes_that_keep_to_small_budgets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend, "MAX_GUESS", 7)
    monkeypatch.setattr(extend, "PREFILL_LOGITS", 20 * VOCABULARY)
    monkeypatch.setattr(extend, "EXTEND_SCORES", {"cpu": 3000})
    _check_equal("mistral", SAMPLINGS["long"], {}, 0.02)
