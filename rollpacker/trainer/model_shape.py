"""A decoder's shape and number of parameters, read from its files without torch.

The files are `config.json` and the safetensors headers of a local model or the hub's local copy."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOT_TEXT = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mtp)\."
)
"""Matches names of weights that a text model does not load: those for images and sound, and those
for predicting several tokens ahead."""
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Widths and counts that describe a decoder, from a model's config."""

    layers: int
    attention_layers: int
    """Number of layers that keep keys and values. Other layers keep a state of fixed size."""
    hidden: int
    feed_forward: int
    """Inner width of a layer's feed-forward part, or of one of its experts."""
    query: int
    """Width of all queries: query heads x head size."""
    key_value: int
    vocabulary: int
    tied: bool
    """Whether the output layer shares the embeddings' weight."""
    max_positions: int | None
    experts: int = 1
    """Number of feed-forward parts in a layer: more than one in a mixture of experts."""
    used_experts: int = 1
    """Number of experts that a token goes through in each layer."""

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Number of elements of one layer's weight matrices, those of attention and
        of all feed-forward parts, with what chooses among these."""
        return self._matrices(self.experts) + (self.hidden * self.experts) * (self.experts > 1)

    @property
    def used_matrices(self) -> int:
        """Number of elements of the matrices of a layer that one token goes through."""
        return self._matrices(self.used_experts)

    def _matrices(self, experts: int) -> int:
        attention = 2 * self.query + 2 * self.key_value
        return self.hidden * (attention + 3 * experts * self.feed_forward)


def model_folder(path: str) -> Path | None:
    """Return the folder of a model's files on this machine: the path itself, or the hub's local
    copy. None: the files are not on this machine."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.count("/") > 1 or path.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def read_shape(folder: Path, notes: list[str]) -> DecoderShape | None:
    """Read a decoder's shape from `config.json`. None: it cannot be read; `notes` say why."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        return decoder_shape(tied | (config.get("text_config") or config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"{folder / 'config.json'} does not tell the model's shape ({error!r})")
        return None


def decoder_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Read a decoder's shape from a text model's config, whose entries have different names in
    different model families. Raises `KeyError` for an entry that is missing."""

    def first(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        raise KeyError(names[0])

    hidden = first("hidden_size", "n_embd", "d_model")
    heads = first("num_attention_heads", "n_head")
    head_size = config.get("head_dim") or hidden // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    layers = first("num_hidden_layers", "n_layer")
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    feed_forward = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    if experts > 1:
        feed_forward = config.get("moe_intermediate_size") or feed_forward
    return DecoderShape(
        layers=layers,
        attention_layers=_attention_layers(config, layers),
        hidden=hidden,
        feed_forward=feed_forward,
        query=heads * head_size,
        key_value=key_value_heads * head_size,
        vocabulary=first("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", True)),
        max_positions=positions,
        experts=experts,
        used_experts=config.get("num_experts_per_tok") or 1,
    )


def _attention_layers(config: Mapping[str, Any], layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds:
        return sum(
            kind == "hybrid" or (kind.endswith("attention") and not kind.startswith("linear"))
            for kind in kinds
        )
    return layers // int(config.get("full_attention_interval") or 1)


def num_parameters(folder: Path | None, path: str, notes: list[str]) -> int | None:
    """Return a model's number of parameters from the headers of its files, else from its config,
    else from a number in its name (such as 7B). None: it cannot be known. If it is not from the
    files, `notes` says so."""
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if files:
        return sum(_parameters_in(file) for file in files)
    shape = read_shape(folder, []) if folder else None
    if shape is not None:
        notes.append(
            f"the weights of {path} are not on this machine: its parameters are counted from its "
            "config.json, without biases and norms"
        )
        return shape.layers * shape.layer_matrices + shape.embedding * (1 if shape.tied else 2)
    match = _SIZE_IN_NAME.search(path.rsplit("/", 1)[-1])
    if match is None:
        notes.append(
            f"the model {path} is not on this machine: its size, and so the memory, cannot be known"
        )
        return None
    count = float(match.group(1)) * (1e9 if match.group(2) in "bB" else 1e6)
    what = "weights are" if folder else "model is"
    notes.append(
        f"the {what} not on this machine: {match.group(0)} parameters is from its name {path}"
    )
    if folder is None:
        notes.append(
            "logits, activations and keys and values, and so the memory, cannot be known without "
            f"its config.json: hf download {path} config.json"
        )
    return int(count)


def _parameters_in(file: Path) -> int:
    """Count the parameters of a safetensors file from its header: eight bytes of length, then
    JSON of every tensor's shape."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(
        math.prod(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and not _NOT_TEXT.search(name)
    )
