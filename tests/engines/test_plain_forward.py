"""Which models run as plain calls, and that they say what their modules say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.kv_slots import LayerProbe
from rollpacker.engines.embedded.plain_forward import FAMILIES, plain_forward
from rollpacker.engines.embedded.probe import plain_agrees
from rollpacker.trainer.lora import adapter_parameters, add_adapter
from rollpacker.trainer.trainer import LoraConfig
from tests.engines.tiny import MODELS, generate, group, make_engine, request, tiny_model

PLAIN_MODELS = [name.lower() for name in FAMILIES]
VARIANTS = [
    *((name, {}) for name in PLAIN_MODELS),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("mistral", {"sliding_window": None}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
]


def _scatter_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Norm weights and biases too: a fresh model has ones and zeros there."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn(weight.shape, generator=noise).to(weight.dtype))
    return model


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_logits_equal_those_of_the_modules(
    model_type: str, overrides: dict[str, object], dtype: torch.dtype
) -> None:
    model = _scatter_weights(tiny_model(model_type, **overrides)).to(dtype)
    install_attention(model)
    plain = plain_forward(model)
    assert plain is not None
    plain.reserve(13)
    ids = torch.randint(1, 48, (3, 13), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([12, 4, 0])
    with torch.inference_mode():
        wanted = model(input_ids=ids, use_cache=False).logits[torch.arange(3), ends]
        given = plain.prefill(ids, ends, LayerProbe())
    assert given.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2 * float(wanted.abs().max())
    torch.testing.assert_close(given, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS)
def test_plain_and_generic_engines_sample_the_same(
    model_type: str, overrides: dict[str, object]
) -> None:
    model = _scatter_weights(tiny_model(model_type, **overrides))
    requests = [
        *(sample for row in range(5) for sample in group(row, 3)),
        *group(8, 3, temperature=0.6, top_p=0.8, max_response_tokens=60),
    ]
    generic = generate(model, requests, plain_forward=False, max_slots=6)
    plain = generate(model, requests, max_slots=6)
    assert [response.tokens for response in plain] == [response.tokens for response in generic]
    for one, other in zip(plain, generic, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
def test_low_rank_adapters_run_as_plain_calls_too(
    dtype: torch.dtype, targets: tuple[str, ...]
) -> None:
    pytest.importorskip("peft")
    model = add_adapter(tiny_model().to(dtype), LoraConfig(rank=2, target_modules=targets))
    before = _logits_both_ways(model)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(0.3)
    wanted, given = _logits_both_ways(model)
    assert (wanted - before[0]).abs().max() > 0.1
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2 * float(wanted.abs().max())
    torch.testing.assert_close(given, wanted, atol=tolerance, rtol=0)


def _logits_both_ways(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    install_attention(model)
    plain = plain_forward(model)
    assert plain is not None
    plain.reserve(13)
    ids = torch.randint(1, 48, (3, 13), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([12, 12, 12])
    with torch.inference_mode():
        wanted = model(input_ids=ids, use_cache=False).logits[:, -1]
        return wanted, plain.prefill(ids, ends, LayerProbe())


class Adapter(nn.Module):
    """A low-rank update around a linear layer, as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


def _add_adapter(model: PreTrainedModel) -> None:
    layer = model.model.layers[1]
    layer.mlp.up_proj = Adapter(layer.mlp.up_proj)


def _add_hook(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, args, output: -output)


def _replace_forward(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda hidden: mlp.down_proj(mlp.up_proj(hidden))


def _change_activation(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [_add_adapter, _add_hook, _replace_forward, _change_activation])
def test_a_changed_model_runs_through_its_modules(
    change: Callable[[PreTrainedModel], None],
) -> None:
    model = tiny_model()
    requests = [request(row, temperature=0.0) for row in range(4)]
    engine = make_engine(model)

    async def run() -> tuple[list, list]:
        before = await collect(engine, requests)
        change(model)
        after = await collect(engine, requests)
        await engine.close()
        return before, after

    before, after = asyncio.run(run())
    assert plain_forward(model) is None
    wanted = generate(model, requests, plain_forward=False)
    assert [r.tokens for r in after] == [r.tokens for r in wanted] != [r.tokens for r in before]


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - set(PLAIN_MODELS)))
def test_other_architectures_are_not_taken_for_these(model_type: str) -> None:
    assert plain_forward(tiny_model(model_type)) is None


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"hidden_act": "gelu"},
    ],
)
def test_what_plain_calls_do_not_know_is_left_to_the_model(overrides: dict[str, object]) -> None:
    assert plain_forward(tiny_model("llama", **overrides)) is None


def test_mixed_dtypes_are_left_to_the_model() -> None:
    model = tiny_model().to(torch.bfloat16)
    model.model.norm.float()
    assert plain_forward(model) is None


def test_a_plain_pass_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    install_attention(model)
    assert plain_agrees(model, torch.device("cpu"))
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward
    calls: list[int] = []

    def drifting(self: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple:
        calls.append(len(calls))
        return forward(self, hidden, position_ids + len(calls) * position_ids)

    monkeypatch.setattr(rotary, "forward", drifting)
    assert not plain_agrees(model, torch.device("cpu"))


@pytest.mark.parametrize("plain", [True, False])
def test_weights_changed_in_place_or_replaced_are_seen(plain: bool) -> None:
    model = tiny_model(seed=0)
    requests = [request(row, temperature=0.0) for row in range(4)]
    engine = make_engine(model, plain_forward=plain)

    async def run() -> list[list]:
        seen = [await collect(engine, requests)]
        with torch.no_grad():
            for weight, new in zip(
                model.parameters(), tiny_model(seed=1).parameters(), strict=True
            ):
                weight.copy_(new)
        seen.append(await collect(engine, requests))
        for weight, new in zip(model.parameters(), tiny_model(seed=2).parameters(), strict=True):
            weight.data = new.data
        seen.append(await collect(engine, requests))
        await engine.close()
        return seen

    seen = asyncio.run(run())
    for seed, responses in enumerate(seen):
        wanted = generate(tiny_model(seed=seed), requests, plain_forward=False)
        assert [r.tokens for r in responses] == [r.tokens for r in wanted]


def test_weights_are_views_of_the_parameters_and_seen_at_the_next_step() -> None:
    model = tiny_model()
    plain = plain_forward(model)
    assert plain is not None
    plain.reserve(4)
    ids, ends = torch.tensor([[7, 8, 9]]), torch.tensor([2])
    with torch.inference_mode():
        before = plain.prefill(ids, ends, LayerProbe())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-2)
    with torch.inference_mode():
        after = plain.prefill(ids, ends, LayerProbe())
        install_attention(model)
        wanted = model(input_ids=ids, use_cache=False).logits[:, -1]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, wanted, atol=1e-4, rtol=0)
