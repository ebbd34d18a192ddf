"""The probe sees what differs and nothing else."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.trainer.model import character_tokenizer, new_model
from rollpacker.weights.probe import weight_probe


def tiny_model() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return new_model({"model_type": "qwen2", **sizes, **heads}, character_tokenizer("abc"), 0)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (400, 300), "b.weight": (7, 5), "c.bias": (1,), "d.empty": (0, 4)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_order_and_layout_do_not_matter() -> None:
    named = weights()
    probe = weight_probe(named.items())
    assert probe == weight_probe(reversed(named.items()))
    transposed = named | {"a.weight": named["a.weight"].t().contiguous().t()}
    assert not transposed["a.weight"].is_contiguous()
    assert probe == weight_probe(transposed.items())


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "c.bias"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_changed_first_or_last_element_is_seen(name: str, place: int) -> None:
    named = weights()
    probe = weight_probe(named.items())
    named[name].view(-1)[place] += 1e-3
    assert weight_probe(named.items()) != probe


def test_names_shapes_and_missing_tensors_are_seen() -> None:
    named = weights()
    probe = weight_probe(named.items())
    renamed = {name.replace("c.", "e."): value for name, value in named.items()}
    reshaped = named | {"b.weight": named["b.weight"].view(5, 7)}
    fewer = {name: value for name, value in named.items() if name != "d.empty"}
    assert len({probe, *(weight_probe(x.items()) for x in (renamed, reshaped, fewer))}) == 4


def test_sampled_places_spread_over_the_whole_tensor() -> None:
    """Of ten equal stretches of a tensor, a change of any one is seen."""
    probe = weight_probe([("w", torch.zeros(10, 1000))])
    for stretch in range(10):
        changed = torch.zeros(10, 1000)
        changed[stretch] = 1.0
        assert weight_probe([("w", changed)]) != probe


def test_one_whole_update_is_seen() -> None:
    model = tiny_model()
    engine = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert weight_probe(engine.items()) == weight_probe(model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-6 * torch.sign(torch.randn_like(parameter))
    assert weight_probe(engine.items()) != weight_probe(model.named_parameters())


def test_a_tied_output_layer_counts_once() -> None:
    model = tiny_model()
    once = dict(model.named_parameters())
    twice = dict(model.state_dict())
    assert "lm_head.weight" in twice and "lm_head.weight" not in once
    assert weight_probe(once.items()) == weight_probe(twice.items())
    copied = {name: value.clone() for name, value in twice.items()}
    assert weight_probe(once.items()) == weight_probe(copied.items())
    copied["lm_head.weight"] += 1e-3
    assert weight_probe(once.items()) != weight_probe(copied.items()), "a stale copy"


def test_it_is_cheap() -> None:
    named = [(f"layers.{i}.weight", torch.zeros(512, 256)) for i in range(300)]
    weight_probe(named)
    started = time.thread_time()
    weight_probe(named)
    assert time.thread_time() - started < 0.2, "a hundred times what it takes"
