"""What a step will launch, train and need in memory, from the config and the model's config.json
alone.

Behind `--dry-run`: loads neither torch nor any weights (safetensors headers give the exact number
of parameters). Memory is the peak of training plus the engine's keys and values; the formulas stand
beside each line. Not in it: torch itself, and what an allocator leaves between blocks
(`benchmarks/memory_estimate.py` measures both).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

GIB = 1 << 30
CPU_CACHE_GIB = 1.0
"""What the engine takes for keys and values on a CPU unless told otherwise."""
MALLOC_SHARE = 0.3
"""What glibc's malloc keeps on a CPU, between blocks in use, on top of what training needs. Fitted
to three settings of `benchmarks/memory_estimate.py`, which has others to check it."""
LOGIT_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""`logprobs.BLOCK_ELEMENTS`, which this module cannot import without torch."""
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
    """Of the run's own process. Empty if nothing is known of the model."""
    processes: int
    """Of the trainer's own; 0 if it works in the run's process."""
    process_memory: tuple[MemoryPart, ...]
    """Of each of these."""
    notes: tuple[str, ...]
    """What could not be known, and what looks wrong."""

    @property
    def total_bytes(self) -> int:
        """On a CPU of all processes; on CUDA of the run's own, since the others have a GPU each."""
        processes = 0 if self.device == "cuda" else self.processes
        return _total(self.memory) + processes * _total(self.process_memory)

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
        lines += _memory_lines(self.memory, "besides torch itself")
        if self.process_memory:
            lines.append(f"and in each of the trainer's {self.processes} processes:")
            lines += _memory_lines(self.process_memory, "in each")
        return lines + [f"note: {note}" for note in self.notes]


def _memory_lines(parts: Sequence[MemoryPart], where: str) -> list[str]:
    lines = [f"{p.name:<16} {_size(p.size_bytes):>10}  {p.formula}" for p in parts]
    if parts:
        lines.append(f"{'memory':<16} {_size(_total(parts)):>10}  together, {where}")
    return lines


def _total(parts: Sequence[MemoryPart]) -> int:
    return sum(part.size_bytes for part in parts)


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
    tied: bool
    """The output layer is the embeddings."""
    max_positions: int | None

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's matrices."""
        attention = 2 * self.query + 2 * self.key_value
        return self.hidden * (attention + 3 * self.feed_forward)

    @property
    def saved_per_layer(self) -> int:
        """Elements per token that backward keeps of a decoder layer with fused attention and a
        gated MLP."""
        ends = 6 * self.hidden + 2 * self.query + 2 * self.key_value
        return ends + 4 * self.feed_forward


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
    longest = _longest(config)
    if shape and shape.max_positions is not None and longest > shape.max_positions:
        notes.append(
            f"prompt and response may reach {longest} tokens, the model's context is "
            f"{shape.max_positions}: longer prompts are left out"
        )
    element = 2 if dtype == "bfloat16" else 4
    notes += _tail_notes(config) + _micro_batch_notes(config)
    run, process = _memory(config, shape, parameters, element, on_cuda, notes)
    if not on_cuda:
        for parts in (run, process):
            parts += _malloc(parts)
    run += _cache_memory(config, shape, on_cuda, element, notes)
    return Estimate(
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
        num_parameters=parameters,
        batch=_batch(config),
        memory=tuple(run),
        processes=config.train.processes or 0,
        process_memory=tuple(process),
        notes=tuple(notes),
    )


def _malloc(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """For a process that trains; one that holds the engine's copy alone has few, large blocks."""
    if not any(part.name == "gradients" for part in parts):
        return []
    needed = sum(part.size_bytes for part in parts)
    formula = f"what malloc keeps of freed blocks: {MALLOC_SHARE:.0%} of the above, as measured"
    return [_part("malloc", MALLOC_SHARE * needed, formula)]


def _batch(config: RunConfig) -> BatchArithmetic:
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    tail = config.tail_batching
    short_prompts = tail.factors.num_prompts(prompts)
    short_samples = tail.factors.num_samples(samples)
    trained = prompts * samples
    longest = _longest(config)
    rows = max(config.train.micro_batch_tokens // longest, 1)
    # At least two tokens a row, one of which is predicted.
    fewest = math.ceil(trained / max(config.train.micro_batch_tokens, 1))
    return BatchArithmetic(
        short_prompts=short_prompts,
        short_samples_per_prompt=short_samples,
        short_samples=short_prompts * short_samples,
        cascade_rounds=tuple(
            (tier.factors.num_prompts(prompts), tier.factors.num_samples(samples))
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


def _micro_batch_notes(config: RunConfig) -> list[str]:
    """A sample's last token does not go through the model."""
    row = _longest(config) - 1
    if config.train.micro_batch_tokens >= row:
        return []
    return [
        f"a sample of more than train.micro_batch_tokens={config.train.micro_batch_tokens} tokens "
        f"has a micro-batch of its own: the memory is for the longest, {row} tokens"
    ]


def _longest(config: RunConfig) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def _memory(
    config: RunConfig,
    shape: _Shape | None,
    parameters: int | None,
    element: int,
    on_cuda: bool,
    notes: list[str],
) -> tuple[list[MemoryPart], list[MemoryPart]]:
    """Of the run's own process, and of each of the trainer's."""
    processes = config.train.processes
    engine: list[MemoryPart] = []
    if parameters is not None and (processes is not None or config.model.lora is not None):
        size, formula = parameters * element, f"parameters x {element} bytes, apart from training"
        engine.append(_part("engine", size, formula))
        if on_cuda:
            notes.append(f"weights go to the engine through {_size(size)} of host memory")
        else:
            engine.append(_part("hand-over", size, "the same once more, on its way to the engine"))
    models = _Models(
        config=config,
        shape=shape,
        parameters=parameters,
        element=element,
        block_elements=LOGIT_BLOCK_ELEMENTS["cuda" if on_cuda else "cpu"],
    )
    training = models.parts(notes)
    if processes is None:
        return engine + training, []
    if processes > 1 and parameters is not None:
        notes.append(
            "while it loads, each process of the trainer holds the whole model in float32, "
            f"{_size(parameters * 4)}, of which it keeps its share"
        )
    return engine, training


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """What a process that trains holds, at the peak of a step."""

    config: RunConfig
    shape: _Shape | None
    parameters: int | None
    element: int
    """Bytes of a number in the dtype that is computed in."""
    block_elements: int
    """Logits that are computed at a time."""

    @property
    def ranks(self) -> int:
        return self.config.train.processes or 1

    @property
    def kept(self) -> int:
        """Bytes of a parameter at rest: shards are float32, which makes them their own masters."""
        return 4 if self.ranks > 1 else self.element

    @property
    def shared(self) -> str:
        return f" / {self.ranks} processes" if self.ranks > 1 else ""

    def parts(self, notes: list[str]) -> list[MemoryPart]:
        parts: list[MemoryPart] = []
        if self.parameters is not None:
            parts += self._policy(self.parameters, notes)
            parts += self._other_models(self.parameters, notes)
        if self.shape is not None:
            parts += self._working_memory(self.shape)
        return parts

    def _policy(self, parameters: int, notes: list[str]) -> list[MemoryPart]:
        parts = [self._at_rest("weights", parameters)]
        if self.config.model.lora is None:
            return parts + self._trained(parameters, "parameters", self.kept)
        adapters = None if self.shape is None else self._adapters(self.shape, notes)
        if adapters is None:
            return parts
        formula = f"rank x (in + out) of the targeted matrices x 4 bytes{self.shared}"
        parts.append(_part("adapters", adapters * 4 // self.ranks, formula))
        return parts + self._trained(adapters, "adapters", 4)

    def _at_rest(self, name: str, count: int, what: str = "parameters") -> MemoryPart:
        formula = f"{what} x {self.kept} bytes{self.shared}"
        return _part(name, count * self.kept // self.ranks, formula)

    def _trained(self, count: int, what: str, kept: int, *, prefix: str = "") -> list[MemoryPart]:
        whole = self.ranks > 1 and self.config.train.gradient_sync == "step"
        gradients, shared = (count * 4, "") if whole else (count * 4 // self.ranks, self.shared)
        parts = [_part(f"{prefix}gradients", gradients, f"{what} x 4 bytes{shared}")]
        parts.append(self._optimizer(count, what, prefix))
        if kept < 4:
            parts.append(_part(f"{prefix}master", count * 4, f"{what} x 4 bytes"))
        return parts

    def _optimizer(self, count: int, what: str, prefix: str) -> MemoryPart:
        matrices = 0
        if self.config.train.optimizer == "muon" and self.shape is not None:
            in_layers = self.shape.layers * self.shape.layer_matrices
            matrices = count if what == "adapters" else min(in_layers, count)
        formula = f"{what} x 2 moments x 4 bytes{self.shared}"
        if matrices:
            formula += ", one moment for the matrices in layers (muon)"
        return _part(f"{prefix}optimizer", (8 * count - 4 * matrices) // self.ranks, formula)

    def _adapters(self, shape: _Shape, notes: list[str]) -> int | None:
        lora = self.config.model.lora
        assert lora is not None
        sizes = {
            "q_proj": shape.hidden + shape.query,
            "k_proj": shape.hidden + shape.key_value,
            "v_proj": shape.hidden + shape.key_value,
            "o_proj": shape.query + shape.hidden,
            "gate_proj": shape.hidden + shape.feed_forward,
            "up_proj": shape.hidden + shape.feed_forward,
            "down_proj": shape.feed_forward + shape.hidden,
        }
        names = set(sizes) if lora.target_modules == ("all-linear",) else set(lora.target_modules)
        if unknown := sorted(names - sizes.keys()):
            notes.append(f"adapters of {', '.join(unknown)} are not counted: their size is unknown")
        return lora.rank * shape.layers * sum(sizes[name] for name in names & sizes.keys())

    def _other_models(self, parameters: int, notes: list[str]) -> list[MemoryPart]:
        algorithm, model = self.config.algorithm, self.config.model
        parts: list[MemoryPart] = []
        if algorithm.needs_reference and model.lora is None:
            parts.append(self._at_rest("reference", parameters))
        if algorithm.needs_teacher and model.teacher is not None:
            teacher = _num_parameters(_folder(model.teacher), model.teacher, notes)
            if teacher is not None:
                parts.append(self._at_rest("teacher", teacher, "its parameters"))
        if algorithm.needs_critic:
            parts += self._critic(parameters, notes)
        return parts

    def _critic(self, parameters: int, notes: list[str]) -> list[MemoryPart]:
        path, shape = self.config.train.critic.path, self.shape
        count: int | None = parameters
        if path is not None:
            folder = _folder(path)
            count = _num_parameters(folder, path, notes)
            shape = _read_shape(folder, notes) if folder else None
        if count is None:
            return []
        if shape is not None and not shape.tied:
            count -= shape.embedding
        parts = [self._at_rest("critic", count, "parameters without output layer")]
        return parts + self._trained(count, "its parameters", self.kept, prefix="critic ")

    def _working_memory(self, shape: _Shape) -> list[MemoryPart]:
        """What a micro-batch takes while its backward pass begins."""
        tokens = min(
            max(self.config.train.micro_batch_tokens, _longest(self.config) - 1),
            _batch(self.config).max_trained_tokens,
        )
        size, formula = self._activations(shape)
        if self.config.algorithm.needs_critic:
            size, formula = 2 * size, f"{formula}, twice (critic)"
        parts = [_part("activations", tokens * size, f"{tokens} tokens x {formula}")]
        if self.ranks > 1:
            root = shape.embedding * (1 if shape.tied else 2)
            parts.append(
                _part(
                    "gathered",
                    (root + 2 * shape.layer_matrices) * self.element,
                    f"whole embeddings, output layer and two layers x {self.element} bytes",
                )
            )
        logits, layer = self._logits(shape, tokens), tokens * self._one_layer(shape)
        formula = (
            f"a block of logits (at most {self.block_elements:,}), hidden states and the output "
            "layer's gradient"
            if logits >= layer
            else "one layer's activations and gradients"
        )
        return [*parts, _part("backward", max(logits, layer), formula)]

    def _activations(self, shape: _Shape) -> tuple[int, str]:
        """Bytes per token that stay until backward comes to them."""
        last = 3 * shape.hidden * self.element + self._norm_bytes(shape)
        if self.config.model.gradient_checkpointing:
            size = shape.layers * shape.hidden * self.element
            return size + last, f"(layers + 3) x hidden x {self.element} bytes"
        formula = f"layers x (6 hidden + 2 query + 2 kv + 4 ffn) x {self.element} bytes"
        return shape.layers * self._saved_bytes(shape) + last, formula

    def _saved_bytes(self, shape: _Shape) -> int:
        """Of one layer, per token."""
        size = shape.saved_per_layer * self.element + self._norm_bytes(shape)
        if self.config.model.lora is not None:
            size -= 2 * shape.hidden * self.element  # for the weights of norms, which are frozen
            if self.element < 4:  # adapters save their inputs in float32, each its own
                size += 4 * (5 * shape.hidden + shape.query + shape.feed_forward)
                size -= 2 * (2 * shape.hidden + shape.feed_forward)
        return size

    def _norm_bytes(self, shape: _Shape) -> int:
        """Per token, what a layer's norms save in float32 besides."""
        return 4 * shape.hidden if self.element < 4 else 0

    def _one_layer(self, shape: _Shape) -> int:
        """Bytes per token while backward is in a layer: its gradients, and with checkpointing what
        it computes again."""
        gradients = (3 * shape.feed_forward + 2 * shape.hidden) * self.element
        again = self._saved_bytes(shape) if self.config.model.gradient_checkpointing else 0
        return gradients + again

    def _logits(self, shape: _Shape, tokens: int) -> int:
        """Two float32 copies of a block, a third for the entropy's gradient or where the whole is
        one block; hidden states and the gradients of both ends."""
        elements = tokens * shape.vocabulary
        copies = 2
        if self.config.algorithm.entropy_coef or elements <= self.block_elements:
            copies = 3
        block = min(elements, self.block_elements) * 4 * copies
        hidden = tokens * shape.hidden * (4 + self.element)
        output_layer = 0 if self.config.model.lora is not None else shape.embedding * self.element
        return block + hidden + output_layer


def _cache_memory(
    config: RunConfig, shape: _Shape | None, on_cuda: bool, element: int, notes: list[str]
) -> list[MemoryPart]:
    if shape is None:
        return []
    engine = config.rollout.engine
    batch = _batch(config)
    per_token = 2 * shape.layers * shape.key_value * element
    longest = _longest(config)
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
        tied=bool(config.get("tie_word_embeddings", True)),
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
