"""A trainer's state on disk: a Hugging Face folder, safetensors and JSON. Nothing is pickled.

Who calls decides when a folder is complete (manifest, rename); these functions only write and read
files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollpacker.trainer.base import TrainerError
from rollpacker.trainer.model import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer.json"
FORMAT = 1


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Weights, config and generation config, and the tokenizer if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def load_model_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy a saved model's parameters and buffers into `model`, in place.

    Raises `TrainerError` if the folder cannot be read or holds another model.
    """
    try:
        with no_progress_bars():
            saved = type(model).from_pretrained(
                folder, dtype=model.dtype, local_files_only=True, use_safetensors=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainerError(f"{folder}: cannot read the model: {error}") from error
    source = saved.state_dict()
    target = model.state_dict()
    for name, value in target.items():
        if name not in source or source[name].shape != value.shape:
            raise TrainerError(
                f"{folder} holds another model: {name} is missing or differs in shape"
            )
    if extra := source.keys() - target.keys():
        raise TrainerError(f"{folder} holds another model: it also has {min(extra)}")
    for name, value in target.items():
        value.copy_(source[name])


def save_trainer(
    tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(on_cpu, folder / OPTIMIZER_FILE)
    text = json.dumps({"format": FORMAT, **state}, indent=2) + "\n"
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def load_trainer(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `save_trainer` wrote. Raises `TrainerError` if it cannot be read."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / OPTIMIZER_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainerError(f"{folder}: cannot read the trainer's state: {error}") from error
    if state.get("format") != FORMAT:
        raise TrainerError(
            f"{folder / STATE_FILE}: format {state.get('format')} is not the one that this version "
            f"reads ({FORMAT})"
        )
    return tensors, state


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """One hash over names, types, shapes and bytes, independent of the mapping's order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
