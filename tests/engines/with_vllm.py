"""What the tests of vLLM as an engine share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from msgspec import structs
from transformers import PreTrainedModel

from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.engines.collect import collect
from rollpacker.engines.engine import EngineConfig, EngineOutput, GenerationRequest, Response
from rollpacker.engines.vllm.engine import VllmEngine
from tests.engines.test_carry import Letters, serve
from tests.engines.test_engine import Recorder
from tests.engines.tiny import NOISE, tiny_model

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="needs vLLM: make vllm, then make test-vllm"
)

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of size 32, the smallest of vLLM's on a CPU."""
TIE = 1e-4
"""Log-probabilities that are closer may change places."""


def model_of(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    return tiny_model(seed=seed, tie_word_embeddings=tied, **SHAPE)


def made(model: PreTrainedModel, *, tokenizer: object = None, **config: object) -> VllmEngine:
    settings = {"name": "vllm", "kv_cache_gib": 0.02, "noise": NOISE, **config}
    return VllmEngine(model=model, tokenizer=tokenizer, config=EngineConfig(**settings))


def responses(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[Response]:
    return asyncio.run(collect(engine, requests))


def served(
    engine: VllmEngine,
    requests: Sequence[GenerationRequest],
    answer: Callable[[Sequence[EngineOutput]], None] | None = None,
    wanted: int | None = None,
) -> list[EngineOutput]:
    recorder = Recorder(wanted or len(requests), answer)
    engine.start(recorder, recorder.on_error)
    engine.submit(requests)
    recorder.wait()
    assert not recorder.errors
    return recorder.outputs


def says(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of a full forward pass, before each of these."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def is_tie(log_probs: torch.Tensor) -> bool:
    first, second = log_probs.topk(2).values.tolist()
    return first - second < TIE


def taken(engine: VllmEngine, model: PreTrainedModel) -> None:
    """The engine takes these weights."""
    version = engine.status().version + 1
    asyncio.run(engine.update_weights(version, dict(model.named_parameters())))


def outputs_of(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[EngineOutput]:
    found = {output.event.sample: output for output in served(engine, requests)}
    return [found[one.sample] for one in requests]


def num_agreeing(tokens: Sequence[int], others: Sequence[int]) -> int:
    same = [one == other for one, other in zip(tokens, others, strict=False)]
    return same.index(False) if False in same else len(same)


def check_plain(
    outputs: Sequence[EngineOutput],
    requests: Sequence[GenerationRequest],
    wanted: Sequence[Response],
    ties: int = 1,
) -> None:
    """Each is the response that plain generation gives, but for so many that a near tie parts, and
    says how many of its carried tokens are in it."""
    num_other = 0
    for output, asked, plain in zip(outputs, requests, wanted, strict=True):
        assert isinstance(output.event, SampleGenerated) and output.response is not None
        if output.response.tokens != plain.tokens:
            num_other += 1
            continue
        assert output.response.finish_reason == plain.finish_reason
        assert output.response.log_probs == pytest.approx(plain.log_probs, abs=1e-3)
        carried = asked.carried.tokens if asked.carried is not None else ()
        kept = num_agreeing(carried, plain.tokens) if carried else None
        assert (output.event.num_kept, output.event.num_redraws) == (kept, 0)
    assert num_other <= ties


def check_empty(engine: VllmEngine) -> None:
    scheduler = engine._scheduler
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    assert not engine._live and not engine._draws.by_number
    assert not engine._vllm.output_processor.request_states
    assert engine._vllm.reset_prefix_cache()


def check_alike(
    engine: VllmEngine,
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    ties: int = 1,
) -> list[EngineOutput]:
    """Both engines make the same of these, but for near ties. Returns vLLM's."""
    taken(engine, model)
    found = outputs_of(engine, requests)
    num_other = 0
    for one, other in zip(found, serve(model, requests, tokenizer=Letters()), strict=True):
        assert type(one.event) is type(other.event)
        if isinstance(one.event, SampleFailed) and isinstance(other.event, SampleFailed):
            assert one.event.reason == other.event.reason
            continue
        mine, theirs = one.response, other.response
        assert mine is not None and theirs is not None
        if mine.tokens != theirs.tokens:
            num_other += 1
            continue
        own = {"preemptions": one.event.preemptions, "version": one.event.version}
        assert one.event == structs.replace(other.event, **own)
        assert (mine.finish_reason, mine.redraws) == (theirs.finish_reason, theirs.redraws)
        assert mine.log_probs == pytest.approx(theirs.log_probs, abs=1e-3)
    assert num_other <= ties
    check_empty(engine)
    return found
