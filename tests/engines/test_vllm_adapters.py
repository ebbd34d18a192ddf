"""Adapters in vLLM: what it says with them, after updates, and what is refused.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.engines.embedded.attention import UnsupportedModelError
from rollpacker.engines.engine import EngineError, Response
from rollpacker.engines.vllm import weights as vllm_weights
from rollpacker.engines.vllm.adapters import adapter_arguments
from rollpacker.engines.vllm.engine import VllmEngine
from rollpacker.trainer.lora import adapter_off, adapter_parameters, add_adapter
from rollpacker.trainer.trainer import LoraConfig
from tests.engines.tiny import group, request, tiny_model
from tests.engines.with_vllm import SHAPE, is_tie, made, model_of, needs_vllm, responses, says

pytestmark = needs_vllm

ALL = ("all-linear",)
SETTING = {
    "qwen2": ({"tie_word_embeddings": True}, ALL, 3),
    "qwen3": ({"head_dim": 32, "tie_word_embeddings": False}, ("q_proj", "v_proj", "lm_head"), 8),
    "llama": ({"tie_word_embeddings": False}, ("up_proj", "o_proj", "embed_tokens"), 17),
}
"""What of the base and the adapter differs: tied or not, its targets, its rank."""
REQUESTS = [
    *(one for row in range(9) for one in group(row, 3)),
    request(9, prompt=[7 + n % 40 for n in range(100)]),
    *(request(row, temperature=0.0) for row in range(10, 20)),
]
"""One has a prompt of several blocks, whose keys and values vLLM keeps. The last are greedy."""


def adapted(kind: str = "qwen2", *, seed: int = 0) -> PreTrainedModel:
    settings, targets, rank = SETTING[kind]
    model = tiny_model(kind, seed=seed, **{**SHAPE, **settings})
    return add_adapter(model, LoraConfig(rank=rank, alpha=2.0 * rank, target_modules=targets))


def trained(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Another adapter for it, as an update brings it."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: value.detach() + 0.05 * torch.randn(value.shape, generator=noise)
        for name, value in adapter_parameters(model).items()
    }


def check(model: PreTrainedModel, found: Sequence[Response]) -> None:
    """Responses to `REQUESTS` that a full forward pass of the module agrees with."""
    assert differences(model, found).max() < 1e-3
    for asked, response in zip(REQUESTS, found, strict=True):
        if asked.sampling.temperature == 0:
            wanted = says(model, response.prompt_tokens, response.tokens)
            pairs = zip(response.tokens, wanted, strict=True)
            assert all(token == int(one.argmax()) or is_tie(one) for token, one in pairs)


def differences(model: PreTrainedModel, found: Sequence[Response]) -> torch.Tensor:
    """Of all their log-probabilities to those of a full forward pass."""
    parts = []
    for response in found:
        wanted = says(model, response.prompt_tokens, response.tokens)
        picked = wanted.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        parts.append((torch.tensor(response.log_probs, dtype=torch.float64) - picked).abs())
    return torch.cat(parts)


@pytest.mark.parametrize("kind", SETTING)
def test_after_every_update_vllm_says_what_the_model_says_with_its_adapter(kind: str) -> None:
    model, other = adapted(kind), adapted(kind)
    engine = made(model)
    try:
        before = base_of(engine)
        texts = []
        for version in range(1, 5):
            weights = trained(other, version)
            asyncio.run(engine.update_weights(version, weights))
            found = responses(engine, REQUESTS)
            assert {one.version for one in found} == {version}
            check(model, found)
            texts.append([one.tokens for one in found])
        assert all(one != other for one, other in itertools.pairwise(texts))
        with adapter_off(model), pytest.raises(AssertionError):
            check(model, found)
        after = base_of(engine)
    finally:
        asyncio.run(engine.close())
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def base_of(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """What vLLM computes the base with: for matrices in a layout of a kernel's, its answers."""

    def look(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in model.named_parameters()}
        for name, module in model.named_modules():
            if hasattr(module, "base_layer") and hasattr(module.base_layer, "input_size"):
                module = module.base_layer
                probe = torch.linspace(-1, 1, 3 * module.input_size).view(3, -1)
                found[f"{name} of probe"] = module.quant_method.apply(module, probe)
        return found

    (found,) = engine._vllm.apply_model(look)
    return found


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    engine = made(adapted())
    asyncio.run(engine.update_weights(1, trained(adapted(), 1)))
    yield engine
    asyncio.run(engine.close())


def test_a_folder_that_cannot_be_written_to(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EngineError, match=r"cannot go through .*/gone to vLLM: .*TMPDIR"):
        asyncio.run(engine.update_weights(2, trained(engine._model, 2)))


def test_an_adapter_that_vllm_did_not_take_is_noticed_before_anything_is_generated(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_weights, "load_adapter", lambda model, vllm, tensors: None)
    with pytest.raises(EngineError, match="does not compute what the model does"):
        asyncio.run(engine.update_weights(9, trained(engine._model, 9)))


def test_in_half_precision_too() -> None:
    """The adapter stays in float32."""
    model = add_adapter(model_of().bfloat16(), LoraConfig(rank=4, target_modules=ALL))
    engine = made(model)
    try:
        asyncio.run(engine.update_weights(1, trained(model, 1)))
        found = responses(engine, REQUESTS)
        dtypes = engine._vllm.apply_model(dtypes_of_adapter)
    finally:
        asyncio.run(engine.close())
    assert dtypes == [{torch.float32}]
    near = differences(model, found).mean()
    with adapter_off(model):
        far = differences(model, found).mean()
    assert near < 0.1 < 1.0 < far


def dtypes_of_adapter(model: torch.nn.Module) -> set[torch.dtype]:
    stacks = [
        one for module in model.lora_manager.modules.values() for one in module.lora_a_stacked
    ]
    return {one.dtype for one in stacks}


@pytest.mark.parametrize(
    ("rank", "targets", "tied", "says"),
    [
        (513, ALL, True, "model.lora.rank=513: vLLM takes adapters of rank 512 at most"),
        (4, ("q_proj", "lm_head"), False, "no place for an adapter of lm_head: leave it out"),
    ],
)
def test_what_vllm_cannot_take_is_said_when_the_engine_starts(
    rank: int, targets: tuple[str, ...], tied: bool, says: str
) -> None:
    model = add_adapter(model_of(tied=tied), LoraConfig(rank=rank, target_modules=targets))
    with pytest.raises(UnsupportedModelError, match=says):
        made(model)
    asyncio.run(made(model_of()).close())  # it has let go


def test_on_a_gpu_adapters_need_half_precision() -> None:
    with pytest.raises(UnsupportedModelError, match=r"set model.dtype=bfloat16"):
        adapter_arguments(adapted(), on_cpu=False)
    arguments = adapter_arguments(adapted().bfloat16(), on_cpu=False)
    assert (arguments["max_lora_rank"], arguments["lora_dtype"]) == (8, "auto")
