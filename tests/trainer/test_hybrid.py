"""Models with linear attention, state spaces or convolutions beside attention: padded micro-batches
of them, what is refused, and what training does with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.resume import ALPHABET, write_config
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.trainer.batches import Batcher, row_length
from rollpacker.trainer.checkpoint import save_model
from rollpacker.trainer.compiling import compile_layers
from rollpacker.trainer.critic import from_policy_model
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.model import (
    ModelError,
    check_padding,
    load_model,
    write_character_tokenizer,
)
from rollpacker.trainer.model_shape import num_parameters, read_shape
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.sharding import Shards, full_tensors, same_number, shard
from rollpacker.trainer.trainer import LoraConfig, ModelConfig
from rollpacker.weights.buffer import WeightBuffer
from tests.trainer.families import CPU, SHAPE, log_probs_of, new_rows
from tests.trainer.hybrids import DELTA_NET, FAMILIES, hybrid_model, in_double
from tests.trainer.ranks import Ranks
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
    lengths = torch.tensor([row_length(row) for row in rows])
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
    with pytest.raises(ModelError, match=r"here cannot be trained: .* depends on what comes after"):
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


def test_it_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = hybrid_model()
    assert not compile_layers(model, backend="eager")
    assert "layers of type linear_attention, it runs uncompiled" in caplog.text
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_a_critic_of_the_same_kind_is_trained_beside_it() -> None:
    model = hybrid_model()
    critic = from_policy_model(model)
    nn.init.normal_(critic.value_head.weight)  # it begins at zero
    found = Batcher(
        model, layout="auto", max_tokens=64, pad_token_id=PADDING, device=CPU, others=[critic.model]
    )
    assert found.layout == "sorted"
    rows = new_rows()
    values = critic(found.batch(rows[:3]))
    parts = [critic(found.batch([row])) for row in rows[:3]]
    assert (values - torch.cat(parts)).abs().max() < 1e-4 * values.abs().max()


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


# -- several processes, and weights on their way ---------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout_s=240) as group:  # they import what this test is about
        yield group


def gradients_of_shares(shards: Shards | None) -> dict[str, Tensor]:
    """Each process takes some of the rows. Layers are checkpointed where there are several."""
    model = in_double(hybrid_model())
    batcher = batcher_of(model, max_tokens=64)
    if shards is not None:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    policy = Policy(model)
    rows = new_rows()
    batches = [
        batcher.batch([rows[i] for i in run]) for run in batcher.plan([*map(row_length, rows)])
    ]
    if shards is None:
        for batch in batches:
            policy(batch, 1.0)[0].sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    sums = shard(policy, shards, param_dtype=None, gradient_sync="step")
    mine = batches[: len(batches) - 1] if shards.rank == 0 else batches[-1:]
    mine += [batcher.filler()] * (same_number(len(mine), shards) - len(mine))
    real = len(batches) - 1 if shards.rank == 0 else 1
    for place, batch in enumerate(mine):
        (policy(batch, 1.0)[0].sum() * float(place < real)).backward()
    sums.finish(lambda: (policy(batcher.filler(), 1.0)[0].sum() * 0.0).backward())
    named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    return dict(full_tensors(named, shards))


def test_two_processes_compute_the_gradient_of_one(ranks: Ranks) -> None:
    got, expected = ranks.run(2, gradients_of_shares)[0], gradients_of_shares(None)
    assert largest_difference(got, expected) < 1e-10 * largest(expected)


def test_weights_arrive_whole_through_the_buffer() -> None:
    model, other = hybrid_model(seed=1), hybrid_model(seed=2)
    buffer = WeightBuffer.create(model.named_parameters())
    with buffer.writing(1) as tensors, torch.no_grad():
        for name, value in model.named_parameters():
            tensors[name].copy_(value)
    with buffer.reading(1) as tensors, torch.no_grad():
        for name, value in other.named_parameters():
            value.copy_(tensors[name])
    ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


# -- files -----------------------------------------------------------------------------------------


def test_of_a_multimodal_folder_the_text_model_is_loaded_and_saved(tmp_path: Path) -> None:
    vision = {
        **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
        **{"out_hidden_size": 32, "num_position_embeddings": 16},
    }
    text = SHAPE | DELTA_NET | {"vocab_size": 40}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    tokenizer = write_character_tokenizer("abcdefghij", tmp_path / "whole")
    ids = torch.arange(30)[None]
    wanted = whole(input_ids=ids).logits
    loaded = load_model(ModelConfig(path=str(tmp_path / "whole"), device="cpu")).model
    assert torch.equal(loaded(input_ids=ids).logits, wanted)
    assert not any("visual" in name for name, _ in loaded.named_parameters())
    counted = num_parameters(tmp_path / "whole", "whole", [])
    assert counted == sum(p.numel() for p in loaded.parameters())
    save_model(loaded, tokenizer, tmp_path / "text")
    again = load_model(ModelConfig(path=str(tmp_path / "text"), device="cpu")).model
    assert torch.equal(again(input_ids=ids).logits, wanted)


def test_flops_count_attention_in_the_layers_that_have_it() -> None:
    model = hybrid_model(tie_word_embeddings=False)
    flops = FlopModel.of(model)
    in_layers = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim > 1]
    assert any(p.ndim == 3 for p in in_layers)  # the convolution, which each token goes through
    assert flops.body == 6 * sum(p.numel() for p in in_layers)
    assert flops.windows == (None,)
    assert flops.attention == 12 * SHAPE["num_attention_heads"] * SHAPE["head_dim"]


@pytest.mark.parametrize("told", ["layer_types", "full_attention_interval"])
def test_the_estimate_knows_which_layers_keep_keys_and_values(tmp_path: Path, told: str) -> None:
    folder = tmp_path / "model"
    kinds = [*["linear_attention"] * 3, "full_attention"] * 2
    tokenizer = write_character_tokenizer(ALPHABET, folder)
    model = hybrid_model(
        num_hidden_layers=8, layer_types=kinds, vocab_size=len(tokenizer), tie_word_embeddings=True
    )
    model.save_pretrained(folder)
    if told != "layer_types":
        settings = json.loads((folder / "config.json").read_text())
        del settings["layer_types"]
        (folder / "config.json").write_text(json.dumps(settings | {told: 4}))
    notes: list[str] = []
    shape = read_shape(folder, notes)
    assert shape is not None and (shape.layers, shape.attention_layers) == (8, 2)
    found = estimate(load_config(write_config(tmp_path, steps=1), [], RunConfig), has_cuda=False)
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    (cache,) = [part for part in found.memory.parts if part.name == "kv cache"]
    heads = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert f"x {2 * 2 * heads * 4} bytes" in cache.formula
    assert any("6 of 8 layers are no attention" in note for note in found.notes)
