"""Carried tokens in verl's way to vLLM: what comes of them is what RollPacker's own engine makes of
the same, under weights that have moved, and with requests of others between them. vLLM's
asynchronous engine with verl's worker extension is real; verl's server and client are not there."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from tests.integrations_verl.training import ENVIRONMENT

os.environ |= ENVIRONMENT

from rollpacker.core.events import SampleAborted
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.integrations.verl.carry import ENGINE, Anew, generated
from tests.engines.test_carry import Letters, serve
from tests.engines.tiny import VOCABULARY, carrying, generate, group, moved
from tests.engines.with_vllm import model_of

SIZE = 16
"""Tokens after which the second of two tries is stopped."""


class Vllm:
    """What the client has of verl's server."""

    def __init__(self, folder: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=24,
            max_num_batched_tokens=64,  # prompts are read in pieces
            enable_prefix_caching=True,
            distributed_executor_backend="mp",
            **{**ENGINE, "logits_processors": list(ENGINE["logits_processors"])},
        )
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.num_asked = 0

    async def ask(self, prompt: Sequence[int], stop_after: int | None = None, **params: Any) -> Any:
        """The tokens after a prompt. `stop_after`: aborted once there are so many."""
        from vllm import SamplingParams, TokensPrompt

        self.num_asked += 1
        name, reason = str(self.num_asked), "completed"
        async for output in self.engine.generate(
            TokensPrompt(prompt_token_ids=list(prompt)),
            SamplingParams(logprobs=0, detokenize=False, **params),
            name,
        ):
            last = output.outputs[0]
            if last.finish_reason == "abort":
                reason = "aborted"
            elif stop_after is not None and len(last.token_ids) >= stop_after:
                await self.engine.abort(name)
        said = zip(last.token_ids, last.logprobs, strict=True)
        return SimpleNamespace(
            token_ids=list(last.token_ids),
            log_probs=[found[token].logprob for token, found in said],
            stop_reason=reason,
            num_preempted=None,
        )

    async def take_anew(self, name: str | None) -> Anew:
        found: list[Anew] = await self.engine.collective_rpc("take_anew", args=(name or "",))
        return found[0]

    async def generated(
        self, request: GenerationRequest, stop_after: int | None = None
    ) -> EngineOutput:
        async def ask(given: list[int], more: dict[str, Any]) -> Any:
            one = request.sampling
            sampling = {"temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k}
            prompt = [*request.prompt_tokens, *given]
            return await self.ask(prompt, stop_after, **sampling, **more)

        output, _ = await generated(request, 0, ask, self.take_anew)
        return output


async def outputs_of(
    folder: Path, requests: Sequence[GenerationRequest]
) -> tuple[list[EngineOutput], list[EngineOutput], list[Any]]:
    """The ends of these, those of the same where they are stopped, and others' responses."""
    vllm = Vllm(folder)
    try:
        banned: dict[str, Any] = {"vocab_size": VOCABULARY, "banned_token_ids": []}
        await vllm.engine.collective_rpc("monkey_patch_model", kwargs=banned)
        greedy = [vllm.ask([7, 8, 9], temperature=0.0, max_tokens=20) for _ in range(8)]
        whole = [vllm.generated(one) for one in requests]
        mixed = [one for pair in zip(whole, greedy, strict=False) for one in pair]
        found = await asyncio.gather(*mixed, *whole[len(greedy) :])
        others = found[1 : 2 * len(greedy) : 2]
        ends = [one for one in found if isinstance(one, EngineOutput)]
        stopped = await asyncio.gather(*(vllm.generated(one, SIZE) for one in requests))
        return ends, stopped, others
    finally:
        vllm.engine.shutdown()


def test_carried_tokens_come_out_as_in_the_own_engine(tmp_path: Path) -> None:
    model, dice = model_of(tied=False), random.Random(0)
    asked = [one for row in range(9) for one in group(row, 4, max_response_tokens=40)]
    old = generate(model, asked)
    moved(model, 0.02, seed=1).save_pretrained(tmp_path)
    requests = []
    for one, had in zip(asked, old, strict=True):
        size = dice.choice((0, 1, len(had.tokens), dice.randint(0, len(had.tokens))))
        options: dict[str, Any] = {
            "floor": dice.choice((0, size, size + 3)),
            "ceiling": dice.choice((None, None, size + 1)),
            "redraws": dice.choice(((), ((0, 2),), ((size // 2, 1), (size // 2 + 3, 4)))),
            "most_verified": dice.choice((None, None, 1, 5)),
        }
        requests.append(carrying(one, had, size, **options) if size else one)
    ends, stopped, others = asyncio.run(outputs_of(tmp_path, requests))
    assert len({tuple(one.token_ids) for one in others}) == 1
    num_other, num_kept, num_redraws = 0, 0, 0
    for one, other in zip(ends, serve(model, requests, tokenizer=Letters()), strict=True):
        assert one.response is not None and other.response is not None
        if one.response.tokens != other.response.tokens:
            num_other += 1
            continue
        assert one.event == other.event
        assert one.response.redraws == other.response.redraws
        assert one.response.log_probs == pytest.approx(other.response.log_probs, abs=1e-3)
        num_kept += one.event.num_kept or 0
        num_redraws += one.event.num_redraws
    assert num_other <= 2  # near ties
    assert num_kept > 50 and num_redraws > 10
    for one, whole in zip(stopped, ends, strict=True):
        assert one.response is not None and whole.response is not None
        if isinstance(one.event, SampleAborted) and not one.event.num_redraws:
            count = len(one.response.tokens)
            assert whole.response.tokens[:count] == one.response.tokens or (
                whole.event.num_redraws > 0
            )
    assert sum(isinstance(one.event, SampleAborted) for one in stopped) > 5
