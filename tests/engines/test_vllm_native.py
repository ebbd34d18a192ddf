"""vLLM's second model runner, which draws with vLLM's own noise. Its kernels are for GPUs: Triton's
interpreter runs them here, a thousand times slower, so few tokens are generated.

Needs vLLM and TRITON_INTERPRET=1: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.engines.engine import EngineOutput
from rollpacker.engines.vllm import verify as vllm_verify
from rollpacker.engines.vllm.engine import VllmEngine
from tests.engines.test_carry import Letters
from tests.engines.tiny import SECOND_RUNNER, VOCABULARY, carrying, generate, moved, request
from tests.engines.with_vllm import (
    check_alike,
    check_empty,
    check_plain,
    made,
    model_of,
    outputs_of,
    responses,
    served,
    taken,
)

pytestmark = pytest.mark.skipif(
    not SECOND_RUNNER, reason="needs vLLM and TRITON_INTERPRET=1: make vllm, then make test-vllm"
)

SAMPLINGS = (
    {},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.0},
    {"top_p": 0.5, "seed": 9},
)
ASKED = [request(row, max_response_tokens=12, **sampling) for row, sampling in enumerate(SAMPLINGS)]
AMOUNT = 0.02
"""How far the weights move: about one carried token in twenty comes out differently then."""


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """With the weights that the last test left. It schedules ahead, as on a GPU, which vLLM would
    not do on a CPU. It truncates in torch, as vLLM does without Triton, whose interpreter does not
    know all that vLLM's kernel for it uses."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample import sampler, states

    def truncated(logits: Any, top_k: Any, top_p: Any, **of_the_kernel: Any) -> Any:
        return apply_top_k_top_p_pytorch(logits, top_k, top_p)

    check = CpuPlatform.check_and_update_config

    def schedule_ahead(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(schedule_ahead))
        for module in (sampler, states):
            patch.setattr(module, "apply_top_k_top_p", truncated)
        engine = made(model_of(tied=False), tokenizer=Letters())
        yield engine
        asyncio.run(engine.close())


def test_it_draws_as_the_embedded_engine_and_says_the_log_probs(engine: VllmEngine) -> None:
    """Whoever shares a step, and while vLLM prepares the next step before it knows this one's
    tokens."""
    assert engine._vllm.vllm_config.use_v2_model_runner
    assert engine._vllm.engine_core.engine_core.batch_queue is not None
    check_alike(engine, model_of(tied=False), ASKED, ties=0)


def test_carried_tokens_are_drawn_again_in_the_pieces_in_which_they_are_read(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tied=False)
    taken(engine, model)
    asked = [request(1, forced_length=17, top_p=0.9), request(2, forced_length=16)]
    old = responses(engine, asked)
    monkeypatch.setattr(engine._scheduler, "max_num_scheduled_tokens", 9)
    monkeypatch.setattr(vllm_verify, "DRAW_LOGITS", 4 * VOCABULARY)
    requests = [carrying(one, had, 15) for one, had in zip(asked, old, strict=True)]
    outputs = outputs_of(engine, requests)
    check_plain(outputs, requests, old, ties=0)
    assert [output.event.num_kept for output in outputs] == [15, 15]


def test_whatever_is_carried_both_engines_make_the_same_of_it(engine: VllmEngine) -> None:
    model, dice = model_of(tied=False), random.Random(2)
    old = generate(model, ASKED, tokenizer=Letters())
    moved(model, 4 * AMOUNT, seed=5)
    options = (
        {"floor": len(old[0].tokens)},
        {"redraws": ((0, 2),)},
        {"redraws": ((2, 1), (4, 4)), "most_verified": 5},
        {"verify": False},
        {"ceiling": 2, "most_verified": 1},
    )
    requests = [
        carrying(one, had, len(had.tokens) - dice.randint(0, 2), **option)
        for one, had, option in zip(ASKED, old, options, strict=True)
    ]
    outputs = check_alike(engine, model, requests, ties=0)
    assert any(output.event.num_redraws for output in outputs)
    kept = [output.event.num_kept for output in outputs]
    assert kept[3] is None and any(
        count < len(one.carried.tokens)
        for count, one in zip(kept, requests, strict=True)
        if count is not None
    )


def test_an_aborted_response_brings_its_tokens_and_log_probs(engine: VllmEngine) -> None:
    taken(engine, model_of(tied=False))
    short, long = request(0, forced_length=3), request(1, forced_length=200)
    (plain,) = responses(engine, [request(1, forced_length=8)])

    def answer(outputs: Sequence[EngineOutput]) -> None:
        engine.abort([long.sample])

    ended, aborted = served(engine, [short, long], answer)
    assert isinstance(ended.event, SampleGenerated) and isinstance(aborted.event, SampleAborted)
    response = aborted.response
    assert response is not None and 2 <= len(response.tokens) == len(response.log_probs) < 8
    assert response.tokens == plain.tokens[: len(response.tokens)]
    assert response.log_probs == pytest.approx(plain.log_probs[: len(response.tokens)], abs=1e-4)
    check_empty(engine)
