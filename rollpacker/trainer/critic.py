"""The value model: a causal LM's body and a linear value head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollpacker.trainer.batches import MicroBatch
from rollpacker.trainer.model import ModelError, load_model, no_progress_bars
from rollpacker.trainer.saved_weights import SavedWeights, device_of, empty_twin
from rollpacker.trainer.sharding import placed_like
from rollpacker.trainer.trainer import ModelConfig, TrainerStateError

BODY = "model."
HEAD = "value_head."
HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """The value model: `model` is a causal LM without its output layer, which is put in eval mode
    and made trainable. The value head starts at zero, so a new critic gives 0 everywhere."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)
        like = next(model.parameters())
        size, device = model.config.get_text_config().hidden_size, device_of(model)
        self.value_head = nn.Linear(size, 1, device=device, dtype=like.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.eval()

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the values of the texts before each of the batch's N targets: [N], in float32
        (float64 for a float64 model)."""
        output = self.model(input_ids=batch.input_ids, use_cache=False, **batch.model_inputs)
        return self.from_hidden_states(output.last_hidden_state, batch)

    def from_hidden_states(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Return values [N] as `forward` does, from hidden states [B, W, D] after the last norm."""
        hidden = hidden.flatten(0, 1).index_select(0, batch.positions)
        # A value in bfloat16 would have three digits; the head costs next to nothing.
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        weight, bias = self.value_head.weight.to(dtype), self.value_head.bias.to(dtype)
        values: Tensor = hidden.to(dtype) @ weight[0] + bias
        return values


def from_policy_model(model: PreTrainedModel) -> Critic:
    """Return a critic on a deep copy of a causal LM without its output layer. Raises `ModelError`
    if the output layer cannot be told from the rest."""
    return Critic(copy.deepcopy(_body(model)))


def load_critic(config: ModelConfig, path: str, *, weights_later: bool = False) -> Critic:
    """Return a critic on the body of the causal LM in `path` (a Hugging Face folder or a hub name),
    in `config`'s dtype and on its device. With `weights_later` it reads its weights once it is
    sharded. Raises `ModelError` if it cannot be loaded."""
    config = replace(config, path=path)
    loaded = load_model(config, setting="train.critic.path", weights_later=weights_later)
    return Critic(_body(loaded.model))


def save_critic(critic: Critic, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a critic to `folder`: the body as a Hugging Face folder, and the value head beside it.
    `state` are the unsharded tensors by the critic's names, for a sharded critic; None: the
    critic's own tensors are written."""
    folder.mkdir(parents=True, exist_ok=True)
    state = critic.state_dict() if state is None else state
    with no_progress_bars():
        critic.model.save_pretrained(folder, state_dict=_part(state, BODY))
    head = {name: value.detach().cpu() for name, value in _part(state, HEAD).items()}
    save_file(head, folder / HEAD_FILE)


@torch.no_grad()
def load_critic_weights(critic: Critic, folder: Path) -> None:
    """Copy a critic that `save_critic` wrote into `critic`, in place; each rank of a sharded critic
    copies its shard. Raises `TrainerStateError`, with nothing changed, if the folder cannot be read
    or holds a critic of another architecture."""
    body, head = _read(folder, critic)
    for name, value in critic.state_dict().items():
        if name.startswith(HEAD):
            value.copy_(placed_like(value, head[name.removeprefix(HEAD)]))
        else:
            body.fill(value, name.removeprefix(BODY))


def _body(model: PreTrainedModel) -> PreTrainedModel:
    body = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers'
    if body is model or not isinstance(body, PreTrainedModel):
        raise ModelError(
            f"a critic cannot be made from {type(model).__name__}: its body cannot be told from its"
            " output layer; set train.critic.path to another causal LM with the same vocabulary"
        )
    return body


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)}


def _read(folder: Path, critic: Critic) -> tuple[SavedWeights, dict[str, Tensor]]:
    """Return a saved critic's body, to be read, and the tensors of its value head. Raises
    `TrainerStateError` if they are not those of this critic's architecture."""
    twin = empty_twin(critic.model)
    try:
        body, head = SavedWeights(folder, twin), load_file(folder / HEAD_FILE)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainerStateError(f"{folder}: cannot read the critic: {error}") from error
    own = {name: value.shape for name, value in twin.state_dict().items()}
    wrong = {BODY + name for name in {*body.unknown, *(own.keys() ^ body.shapes.keys())}}
    wrong |= {BODY + n for n in own.keys() & body.shapes.keys() if own[n] != body.shapes[n]}
    own_head = critic.value_head.state_dict() or head  # a pipeline stage may have none
    wrong |= {HEAD + name for name in own_head.keys() ^ head.keys()}
    wrong |= {HEAD + n for n in own_head.keys() & head.keys() if own_head[n].shape != head[n].shape}
    if wrong:
        raise TrainerStateError(
            f"{folder} holds a critic of another architecture: {min(wrong)} is missing on one side"
            " or has another shape; set train.critic.path to the model that it was made from"
        )
    return body, head
