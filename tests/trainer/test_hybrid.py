"""Models with linear attention, state spaces or convolutions beside attention: padded micro-batches
of them, what is refused, and what training does with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rollpacker.trainer.batches import Batcher
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.model import ModelError, check_padding
from rollpacker.trainer.trainer import LoraConfig
from tests.trainer.families import CPU, log_probs_of, new_rows
from tests.trainer.hybrids import FAMILIES, hybrid_model, in_double
from tests.trainer.tiny import gradient_of, largest, largest_difference, samples, step, trainer

PADDING = 7
"""A token as any other: no layer may see it."""


def batcher_of(model: nn.Module, layout: str = "auto", max_tokens: int = 10_000) -> Batcher:
    return Batcher(model, layout=layout, max_tokens=max_tokens, pad_token_id=PADDING, device=CPU)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_beside_others_computes_what_it_computes_alone(family: str) -> None:
    """Log-probs and gradients of rows that differ in length by up to a chunk of linear attention
    and more."""
    model, rows = in_double(hybrid_model(family)), new_rows()
    batcher = batcher_of(model)
    assert batcher.layout == "sorted" and len(batcher.plan([1, 2, 3])) == 1
    together = batcher.batch(rows)
    assert together.input_ids.numel() > 3 * together.num_tokens / 2
    log_probs = log_probs_of(model, together)
    log_probs.sum().backward()
    beside = gradients(model)
    for row, part in zip(rows, log_probs.split(list(together.num_targets)), strict=True):
        alone = log_probs_of(model, batcher.batch([row]))
        assert alone.dtype == torch.float64
        assert (alone - part).abs().max() < 1e-10
        alone.sum().backward()
    by_themselves = gradients(model)
    assert any("self_attn" in name for name in beside)
    assert largest_difference(beside, by_themselves) < 1e-10 * largest(by_themselves)


def test_a_mask_of_the_padding_changes_nothing() -> None:
    """transformers sets hidden states of padding to zero where a mask is given. Padding on the
    right comes after all that is looked at, so that none is needed."""
    model, rows = in_double(hybrid_model()), new_rows()
    batch = batcher_of(model).batch(rows)
    lengths = torch.tensor([len(context) + len(targets) - 1 for context, targets in rows])
    mask = (torch.arange(batch.input_ids.shape[1]) < lengths[:, None]).long()
    assert not mask.all()
    with torch.no_grad():
        free = model(input_ids=batch.input_ids, use_cache=False).logits
        masked = model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits
    assert (free - masked)[mask.bool()].abs().max() < 1e-10
    assert (free - masked)[~mask.bool()].abs().max() > 1e-3


def test_packs_are_refused_with_a_reason() -> None:
    model = hybrid_model()
    says = (
        "train.micro_batches=packed is not possible: Qwen3_5ForCausalLM has layers of type "
        "linear_attention: a row of a pack would begin with what the one before it left"
    )
    with pytest.raises(ValueError, match=says):
        batcher_of(model, "packed")
    with pytest.raises(ValueError, match=says):
        trainer(model, micro_batches="packed")


def test_a_model_that_looks_ahead_is_refused() -> None:
    model = hybrid_model()
    check_padding(model, "here")

    def look_ahead(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * output.mean(1, keepdim=True)

    model.model.layers[0].linear_attn.register_forward_hook(look_ahead)
    with pytest.raises(ModelError, match="here cannot be trained: .* depends on what comes after"):
        check_padding(model, "here")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_steps_gradient_does_not_depend_on_who_shares_a_micro_batch(checkpointing: bool) -> None:
    batch = samples()
    alone, together = (
        gradient_of(
            trainer(
                in_double(hybrid_model()),
                micro_batch_tokens=tokens,
                gradient_checkpointing=checkpointing and tokens > 1,
            ),
            [batch],
        )
        for tokens in (1, 4096)
    )
    assert largest_difference(alone, together) < 1e-10 * largest(alone)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_trains_every_parameter(optimizer: str) -> None:
    model = hybrid_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    metrics = step(trainer(model, optimizer=optimizer), samples())
    assert metrics["actor/grad_norm"] > 0
    after = model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (("all-linear",), {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"}),
        (("in_proj_qkv", "out_proj"), {"in_proj_qkv", "out_proj"}),
    ],
)
def test_adapters_reach_the_matrices_of_linear_attention(
    targets: tuple[str, ...], adapted: set[str]
) -> None:
    model = add_adapter(hybrid_model(), LoraConfig(rank=2, target_modules=targets))
    found = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted <= found and "conv1d" not in found
    if targets != ("all-linear",):
        assert found == adapted
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(trainer(model), samples())
    for name, value in model.state_dict().items():
        if "lora_B" in name:
            assert not torch.equal(before[name], value)
        elif "lora_A" not in name:
            assert torch.equal(before[name], value)
