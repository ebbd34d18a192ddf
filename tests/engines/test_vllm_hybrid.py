"""vLLM as the engine of a model with linear attention, which on a CPU it runs in bfloat16 alone.

Needs vLLM (`make vllm`, then `make test-vllm`) and a torchvision that goes with its torch.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.engines.engine import GenerationRequest, Response
from rollpacker.engines.vllm.engine import VllmEngine
from tests.engines.tiny import group, request
from tests.engines.with_vllm import made, needs_vllm, responses, says, served
from tests.trainer.hybrids import hybrid_model

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(
        find_spec("torchvision") is None, reason="vLLM's code for Qwen3.5 imports torchvision"
    ),
]

SHAPE = {
    **{"vocab_size": 48, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 1024},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 1},
    **{"linear_num_value_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "initializer_range": 0.2,
}
LONG = [6 + (place * place + 3 * place) % 41 for place in range(600)]
"""More than vLLM shares of a prompt at a time, of which a hybrid's layers keep one state each."""


@pytest.fixture
def model() -> PreTrainedModel:
    return hybrid_model(**SHAPE).to(torch.bfloat16)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[VllmEngine]:
    engine = made(model)
    yield engine
    asyncio.run(engine.close())


def mean_error(
    model: PreTrainedModel, found: Sequence[Response], exact: PreTrainedModel
) -> tuple[float, float]:
    """How far log-probs are from those of a full forward pass in float32: the engine's, and those
    of a full forward pass in bfloat16."""
    errors = []
    for response in found:
        prompt, tokens = response.prompt_tokens, response.tokens
        chosen = torch.tensor(tokens)[:, None]
        wanted, rounded = (says(one, prompt, tokens).gather(1, chosen) for one in (exact, model))
        drawn = torch.tensor(response.log_probs, dtype=torch.float64)[:, None]
        errors.append(torch.cat([(drawn - wanted).abs(), (rounded - wanted).abs()], 1))
    engines, models = torch.cat(errors).mean(0).tolist()
    return engines, models


def requests_of(prompt: Sequence[int] | None = None) -> list[GenerationRequest]:
    return [one for row in range(1, 7) for one in group(row, 4, prompt=prompt)]


def test_log_probs_are_those_of_a_full_forward_pass(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    """As near as bfloat16 lets two ways of computing be, also where prompts share their beginning,
    and after an update."""
    for update in (False, True):
        if update:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.3)
            asyncio.run(engine.update_weights(1))
        exact = copy.deepcopy(model).float()
        for prompt in (None, LONG, LONG):
            found = responses(engine, requests_of(prompt))
            assert {one.version for one in found} == {int(update)}
            engines, models = mean_error(model, found, exact)
            assert engines < 1.5 * models + 0.01


def test_a_prompt_of_one_token_fails_alone(engine: VllmEngine) -> None:
    """vLLM's convolution takes none, and would end the engine."""
    lone, *others = served(engine, [request(0, prompt=[7]), *group(2, 3)])
    assert isinstance(lone.event, SampleFailed)
    assert "no prompt of a single token" in lone.event.reason
    assert [type(one.event) for one in others] == [SampleGenerated] * 3


def test_the_same_sample_is_drawn_alike_whoever_it_runs_beside(engine: VllmEngine) -> None:
    """But where rounding made one of two near tokens the other."""
    requests = requests_of()
    together = responses(engine, requests)
    alone = [responses(engine, [one])[0] for one in requests[:8]]
    pairs = zip(alone, together[:8], strict=True)
    assert sum(one.tokens[:4] == other.tokens[:4] for one, other in pairs) >= 6
