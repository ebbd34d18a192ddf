"""What a step will launch, train and need in memory, from the config and the model's config.json
alone.

Behind `--dry-run`: loads neither torch nor any weights (safetensors headers give the exact number
of parameters). Memory is the peak of training plus the engine's keys and values; the formulas stand
beside each line. Not in it: torch itself, and what an allocator leaves between blocks.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

GIB = 1 << 30
CPU_CACHE_GIB = 1.0
"""What the engine takes for keys and values on a CPU unless told otherwise."""
SOFTMAX_BLOCK_BYTES = 2 * 4 * (1 << 24)
"""Two float32 copies of one block of logits."""
_SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bBmM])(?![a-zA-Z0-9])")
_PROC_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    name: str
    size_bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArithmetic:
    """Of one step; token numbers are upper bounds, for responses that all reach the limit."""

    short_prompts: int
    short_samples_per_prompt: int
    short_samples: int
    cascade_rounds: tuple[tuple[int, int], ...]
    """Prompts, and samples of each, that every further race of deferred prompts launches."""
    long_samples: int
    """Of a long round, and of a plain one."""
    trained_prompts: int
    trained_samples: int
    max_trained_tokens: int
    min_micro_batches: int
    max_micro_batches: int
    optimizer_steps: int | None
    """None: until the data's epochs are done."""

    @property
    def most_samples(self) -> int:
        """Launched in the largest round."""
        cascades = (prompts * samples for prompts, samples in self.cascade_rounds)
        return max(self.short_samples, self.long_samples, *cascades)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    device: str
    dtype: str
    num_parameters: int | None
    batch: BatchArithmetic
    memory: tuple[MemoryPart, ...]
    """Empty if nothing is known of the model."""
    notes: tuple[str, ...]
    """What could not be known, and what looks wrong."""

    @property
    def total_bytes(self) -> int:
        return sum(part.size_bytes for part in self.memory)

    def lines(self) -> list[str]:
        """The whole estimate as text, one fact a line."""
        b = self.batch
        steps = "until the epochs are done" if b.optimizer_steps is None else str(b.optimizer_steps)
        lines = [
            f"short round   {b.short_prompts} prompts x {b.short_samples_per_prompt} samples = "
            f"{b.short_samples} launched; the first {b.trained_samples} in full groups are kept",
            *(
                f"cascade {number}     {prompts} deferred prompts x {samples} samples = "
                f"{prompts * samples} launched; likewise"
                for number, (prompts, samples) in enumerate(b.cascade_rounds, start=1)
            ),
            f"long round    {b.long_samples} launched, all awaited",
            f"a step trains {b.trained_prompts} prompts, {b.trained_samples} samples, at most "
            f"{b.max_trained_tokens:,} tokens in {b.min_micro_batches} to {b.max_micro_batches} "
            "micro-batches",
            f"steps         {steps}",
        ]
        if self.num_parameters is not None:
            lines.append(
                f"model         {self.num_parameters:,} parameters, {self.dtype}, {self.device}"
            )
        lines += [f"{p.name:<13} {_size(p.size_bytes):>10}  {p.formula}" for p in self.memory]
        if self.memory:
            lines.append(
                f"{'memory':<13} {_size(self.total_bytes):>10}  together, besides torch itself"
            )
        return lines + [f"note: {note}" for note in self.notes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What the formulas need of a model's config."""

    layers: int
    hidden: int
    feed_forward: int
    query: int
    """Query heads x head size."""
    key_value: int
    vocabulary: int
    max_positions: int | None


def estimate(config: RunConfig, *, has_cuda: bool | None = None) -> Estimate:
    """Reads `config.json` and safetensors headers of a local model (or of the hub's local copy),
    nothing else.

    `has_cuda` says what device "auto" will find; None looks for a driver. What cannot be known is a
    note.
    """
    if has_cuda is None:
        has_cuda = _PROC_NVIDIA.exists()
    on_cuda = config.model.device == "cuda" or (config.model.device == "auto" and has_cuda)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_cuda else "float32"
    notes: list[str] = []
    folder = _folder(config.model.path)
    shape = _read_shape(folder, notes) if folder else None
    parameters = _num_parameters(folder, config.model.path, notes)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if shape and shape.max_positions is not None and longest > shape.max_positions:
        notes.append(
            f"prompt and response may reach {longest} tokens, the model's context is "
            f"{shape.max_positions}: longer prompts are left out"
        )
    notes += _tail_notes(config)
    memory = _training_memory(config, shape, parameters, 2 if dtype == "bfloat16" else 4)
    memory += _cache_memory(config, shape, on_cuda, 2 if dtype == "bfloat16" else 4, notes)
    return Estimate(
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
        num_parameters=parameters,
        batch=_batch(config),
        memory=tuple(memory),
        notes=tuple(notes),
    )


def _batch(config: RunConfig) -> BatchArithmetic:
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    tail = config.tail_batching
    short_prompts, short_samples = tail.num_prompts(prompts), tail.num_samples(samples)
    trained = prompts * samples
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    rows = max(config.train.micro_batch_tokens // longest, 1)
    # At least two tokens a row, one of which is predicted.
    fewest = math.ceil(trained / max(config.train.micro_batch_tokens, 1))
    return BatchArithmetic(
        short_prompts=short_prompts,
        short_samples_per_prompt=short_samples,
        short_samples=short_prompts * short_samples,
        cascade_rounds=tuple(
            (tier.num_prompts(prompts), tier.num_samples(samples))
            for tier in tail.tiers
            if tail.enabled
        ),
        long_samples=trained,
        trained_prompts=prompts,
        trained_samples=trained,
        max_trained_tokens=trained * longest,
        min_micro_batches=fewest,
        max_micro_batches=max(math.ceil(trained / rows), fewest),
        optimizer_steps=config.train.steps,
    )


def _tail_notes(config: RunConfig) -> list[str]:
    """What the arithmetic of a step does not tell of tail batching and streaming."""
    tail, stream = config.tail_batching, config.stream_trainer
    notes = []
    if tail.chooses:
        bound = (
            f"; what is trained on is at most {100 * tail.max_length_shift:g} % shorter than those"
        )
        notes.append(
            "the short round's factors are those that it begins with; they are chosen anew for the "
            f"run's own lengths{bound if tail.debias == 'none' else ''}"
        )
    if tail.enabled and tail.balance_sources:
        notes.append("balance_sources changes nothing: all prompts of a run are of one source")
    if tail.enabled and tail.debias != "none":
        notes.append(
            f"losses are weighted by length (debias={tail.debias}) once the policy's own lengths "
            "are known, which takes a long round"
        )
    if stream.enabled and stream.reward_wait:
        trained = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        notes.append(
            f"gradients of up to {int(stream.max_share * trained)} of a step's samples begin while "
            "verdicts are awaited (stream_trainer)"
        )
    return notes


def _training_memory(
    config: RunConfig, shape: _Shape | None, parameters: int | None, element: int
) -> list[MemoryPart]:
    parts: list[MemoryPart] = []
    if parameters is not None:
        parts.append(_part("weights", parameters * element, f"parameters x {element} bytes"))
        parts.append(_part("gradients", parameters * 4, "parameters x 4 bytes"))
        parts.append(_part("optimizer", parameters * 8, "parameters x 2 moments x 4 bytes"))
        if element < 4:
            parts.append(_part("master", parameters * 4, "parameters x 4 bytes"))
        if config.algorithm.kl_coef > 0:
            parts.append(
                _part(
                    "reference", parameters * element, f"parameters x {element} bytes (kl_coef > 0)"
                )
            )
    if shape is None:
        return parts
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = max(config.train.micro_batch_tokens, longest)
    logits = tokens * shape.vocabulary * element * 2
    block = min(SOFTMAX_BLOCK_BYTES, tokens * shape.vocabulary * 8)
    parts.append(
        _part(
            "logits",
            logits + block,
            f"{tokens} tokens of a micro-batch x {shape.vocabulary} x {element} bytes, and their "
            "gradient, and a float32 block (if all were response)",
        )
    )
    parts.append(_activations(shape, tokens, element, config.model.gradient_checkpointing))
    return parts


def _activations(shape: _Shape, tokens: int, element: int, checkpointed: bool) -> MemoryPart:
    """Saved for backward by one decoder layer with fused attention and a gated MLP; bfloat16 norms
    save float32."""
    elements = 6 * shape.hidden + 2 * shape.query + 2 * shape.key_value + 4 * shape.feed_forward
    per_layer = elements * element + (4 * shape.hidden if element < 4 else 0)
    if checkpointed:
        size = tokens * (shape.layers * shape.hidden * element + per_layer)
        formula = "tokens x (layers x hidden + one layer's (6 hidden + 2 query + 2 kv + 4 ffn))"
    else:
        size = tokens * shape.layers * per_layer
        formula = "tokens x layers x (6 hidden + 2 query + 2 kv + 4 ffn)"
    return _part("activations", size, f"{formula} x {element} bytes")


def _cache_memory(
    config: RunConfig, shape: _Shape | None, on_cuda: bool, element: int, notes: list[str]
) -> list[MemoryPart]:
    if shape is None:
        return []
    engine = config.rollout.engine
    batch = _batch(config)
    per_token = 2 * shape.layers * shape.key_value * element
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    rows = min(batch.most_samples, engine.max_slots or 1024)
    wanted = rows * longest * per_token
    budget_gib = engine.kv_cache_gib
    if budget_gib is None and not on_cuda:
        budget_gib = CPU_CACHE_GIB
    if budget_gib is None:
        notes.append(
            "keys and values take at most 60 % of the GPU memory that is free after the model "
            "(rollout.engine.kv_cache_gib sets another limit)"
        )
    limit = wanted if budget_gib is None else int(budget_gib * GIB)
    at_once = min(limit // (longest * per_token), rows)
    if at_once < 1:
        notes.append(
            f"the cache of {budget_gib} GiB does not hold one response of {longest} tokens "
            f"({_size(longest * per_token)})"
        )
    formula = f"{at_once} of {rows} rows at once x {longest} tokens x {per_token} bytes"
    return [_part("kv cache", min(wanted, limit), formula)]


def _folder(path: str) -> Path | None:
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


def _read_shape(folder: Path, notes: list[str]) -> _Shape | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        return _shape(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"{folder / 'config.json'} does not tell the model's shape ({error!r})")
        return None


def _shape(config: Mapping[str, Any]) -> _Shape:
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
    return _Shape(
        layers=first("num_hidden_layers", "n_layer"),
        hidden=hidden,
        feed_forward=config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        query=heads * head_size,
        key_value=key_value_heads * head_size,
        vocabulary=first("vocab_size"),
        max_positions=positions,
    )


def _num_parameters(folder: Path | None, path: str, notes: list[str]) -> int | None:
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if files:
        return sum(_parameters_in(file) for file in files)
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
            "logits, activations and keys and values cannot be known without its config.json"
        )
    return int(count)


def _parameters_in(file: Path) -> int:
    """From the header: eight bytes of length, then JSON of every tensor's shape."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(
        math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    )


def _part(name: str, size_bytes: int, formula: str) -> MemoryPart:
    return MemoryPart(name=name, size_bytes=int(size_bytes), formula=formula)


def _size(size_bytes: int) -> str:
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB"
