"""The value model against a loop over single states, and its life on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rollpacker.trainer.activation_checkpointing import enable_checkpointing, layers_in_training
from rollpacker.trainer.batches import Row, collate
from rollpacker.trainer.critic import (
    Critic,
    from_policy_model,
    load_critic,
    load_critic_weights,
    save_critic,
)
from rollpacker.trainer.model import ModelError, character_tokenizer, new_model
from rollpacker.trainer.trainer import ModelConfig, TrainerError

ROWS = [Row([3, 4], [5, 6, 7]), Row([5], [4]), Row([6, 5, 4, 3], [3, 7])]
TOKENIZER = character_tokenizer("abcdefg")


def language_model(model_type: str = "qwen2", seed: int = 0, **settings: object) -> PreTrainedModel:
    architecture = {
        "model_type": model_type,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
    }
    if model_type != "gpt2":
        architecture |= {"intermediate_size": 24, "num_key_value_heads": 1}
    return new_model(architecture | settings, TOKENIZER, seed).double()


def with_random_head(critic: Critic) -> Critic:
    torch.manual_seed(1)
    for parameter in critic.value_head.parameters():
        torch.nn.init.normal_(parameter)
    return critic


def batch():
    return collate(ROWS, 0, torch.device("cpu"))


def one_state_at_a_time(model: PreTrainedModel, critic: Critic) -> list[float]:
    """Values by the whole language model's last hidden state, without padding."""
    values = []
    for context, targets, _ in ROWS:
        for end in range(len(targets)):
            ids = torch.tensor([[*context, *targets[:end]]])
            hidden = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
            values.append((hidden @ critic.value_head.weight[0] + critic.value_head.bias).item())
    return values


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gpt2"])
def test_values_are_those_of_the_state_before_each_token(model_type: str) -> None:
    model = language_model(model_type)
    critic = with_random_head(from_policy_model(model))
    values = critic(batch())
    expected = torch.tensor(one_state_at_a_time(model, critic), dtype=torch.float64)
    assert values.dtype == torch.float64
    assert expected.std() > 0.1
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)


def test_a_new_critic_says_zero_and_shares_nothing_with_the_policy() -> None:
    model = language_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    critic = from_policy_model(model)
    assert critic(batch()).tolist() == [0.0] * 6
    assert "lm_head" not in " ".join(critic.state_dict())
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter += 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_parameter_is_trained_even_if_the_policy_is_frozen() -> None:
    critic = with_random_head(from_policy_model(language_model().requires_grad_(False)))
    critic(batch()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in critic.parameters())


def test_bfloat16_values_come_in_full_precision() -> None:
    critic = with_random_head(from_policy_model(language_model().bfloat16()))
    values = critic(batch())
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_checkpointed_layers_give_the_same_gradient() -> None:
    def gradient(checkpointed: bool) -> list[torch.Tensor]:
        critic = with_random_head(from_policy_model(language_model(attention_dropout=0.5)))
        layers = enable_checkpointing(critic.model) if checkpointed else []
        assert len(layers) > 0 or not checkpointed
        with layers_in_training(layers):
            critic(batch()).square().sum().backward()
        assert not any(module.training for module in critic.modules())
        return [p.grad for p in critic.parameters()]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-12, atol=1e-12)


def test_load_critic_takes_a_causal_lm_folder(tmp_path: Path) -> None:
    model = language_model(tie_word_embeddings=False).float()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    critic = load_critic(
        ModelConfig(path="elsewhere", dtype="bfloat16", device="cpu"), str(tmp_path)
    )
    expected = from_policy_model(model.bfloat16())
    assert critic.state_dict().keys() == expected.state_dict().keys()
    for name, value in critic.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, expected.state_dict()[name])


def test_a_model_without_a_body_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Qwen2Model.*train\.critic\.path"):
        from_policy_model(language_model().get_decoder())


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_saved_and_loaded_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    critic = with_random_head(from_policy_model(language_model(model_type)))
    save_critic(critic, tmp_path / "critic")
    other = from_policy_model(language_model(model_type, seed=1))
    tensors = dict(other.named_parameters())
    load_critic_weights(other, tmp_path / "critic")
    for name, value in critic.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert all(tensors[n] is p for n, p in other.named_parameters()), "in place"


def test_another_architecture_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    save_critic(from_policy_model(language_model()), tmp_path / "critic")
    for settings in ({"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"hidden_size": 32}):
        critic = with_random_head(from_policy_model(language_model(**settings)))
        before = {name: value.clone() for name, value in critic.state_dict().items()}
        with pytest.raises(TrainerError, match=r"critic of another architecture.*critic\.path"):
            load_critic_weights(critic, tmp_path / "critic")
        assert all(torch.equal(value, before[n]) for n, value in critic.state_dict().items())


@pytest.mark.parametrize("missing", ["model.safetensors", "value_head.safetensors"])
def test_an_incomplete_folder_is_refused(missing: str, tmp_path: Path) -> None:
    critic = from_policy_model(language_model())
    save_critic(critic, tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(TrainerError, match="cannot read the critic"):
        load_critic_weights(critic, tmp_path)


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    critic = from_policy_model(language_model())
    save_critic(critic, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load_critic_weights(critic, tmp_path)


def test_a_sharded_critic_saves_and_loads(tmp_path: Path) -> None:
    """One process, but DTensors all the same."""
    plain = with_random_head(from_policy_model(language_model()))
    expected = plain(batch()).tolist()
    save_critic(plain, tmp_path / "plain")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        critic = from_policy_model(language_model(seed=1))
        for layer in critic.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(critic, mesh=mesh)
        load_critic_weights(critic, tmp_path / "plain")
        assert critic(batch()).tolist() == expected
        state = {name: value.full_tensor() for name, value in critic.state_dict().items()}
        save_critic(critic, tmp_path / "sharded", state)
    finally:
        dist.destroy_process_group()
    again = from_policy_model(language_model(seed=2))
    load_critic_weights(again, tmp_path / "sharded")
    assert again(batch()).tolist() == expected
