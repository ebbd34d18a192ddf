"""What a step will launch, train and need in memory, from the config and the model's config.json
alone.

Behind `--dry-run`: loads no weights (safetensors headers give the exact number of parameters), and
torch only to run the model's layers without data (`trainer/layer_trace.py`). Memory is what
training needs at its peak plus the engine's keys and values; the formulas stand beside each line.
Not in it: torch itself, and what an allocator keeps of freed blocks, which is a matter of the order
of sizes (`benchmarks/memory_estimate.py` measures how much).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.trainer.batch_arithmetic import (
    BatchArithmetic,
    batch_arithmetic,
    longest_sample,
    micro_batch_notes,
    tail_notes,
)
from rollpacker.trainer.model_shape import DecoderShape, model_folder, num_parameters, read_shape
from rollpacker.trainer.stage_memory import Stages, stages_of
from rollpacker.trainer.training_memory import (
    GIB,
    MemoryPart,
    TrainingMemory,
    memory_part,
    text_of_bytes,
)

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

CARRIED_TOKEN_BYTES = 12
"""What a token that waits for its prompt's next launch takes: itself and its log-prob, as
`run/ports/carried.py` keeps them."""
CPU_CACHE_GIB = 1.0
"""What the engine takes for keys and values on a CPU unless told otherwise."""
_PROC_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What `--dry-run` prints."""

    device: str
    dtype: str
    num_parameters: int | None
    batch: BatchArithmetic
    whole: bool
    """The model's shape is known, so that no part of the memory is missing."""
    memory: tuple[MemoryPart, ...]
    """What the run's own process holds. Empty if nothing is known of the model."""
    processes: int
    """How many the trainer has of its own; 0 if it works in the run's process."""
    process_memory: tuple[MemoryPart, ...]
    """What each of these processes holds; of a trainer in pipeline stages `stages` says it."""
    stages: Stages | None
    notes: tuple[str, ...]
    """What could not be known, and what looks wrong."""

    @property
    def total_bytes(self) -> int | None:
        """On a CPU of all processes; on CUDA of the run's own, since the others have a GPU each.
        None if parts of it are not known."""
        if not self.whole:
            return None
        processes = 0 if self.device == "cuda" else self.processes
        return _total(self.memory) + sum(self.process_bytes(one) for one in range(processes))

    def process_bytes(self, number: int) -> int:
        """What this one of the trainer's processes holds, as far as it is known."""
        if self.stages is not None:
            return self.stages.of_process(number).size_bytes
        return _total(self.process_memory)

    def lines(self) -> list[str]:
        """The whole estimate as text, one fact a line."""
        b = self.batch
        rest, awaited = "", "all awaited"
        if b.pooled:
            rest = "; the rest goes on in the next round"
            awaited += " (where an epoch or the run ends)"
        steps = "until the epochs are done" if b.steps is None else str(b.steps)
        updates = ""
        if b.updates_per_round > 1:
            share = b.trained_prompts // b.updates_per_round
            updates = f", in {b.updates_per_round} updates of {share} prompts each"
        lines = [
            f"short round   {b.short_prompts} prompts x {b.short_samples_per_prompt} samples = "
            f"{b.short_samples} launched; the first {b.trained_samples} in full groups are kept"
            f"{rest}",
            *(
                f"cascade {number}     {prompts} deferred prompts x {samples} samples = "
                f"{prompts * samples} launched; likewise"
                for number, (prompts, samples) in enumerate(b.cascade_rounds, start=1)
            ),
            f"long round    {b.long_samples} launched, {awaited}",
            f"a step trains {b.trained_prompts} prompts, {b.trained_samples} samples, at most "
            f"{b.max_trained_tokens:,} tokens in {b.min_micro_batches} to {b.max_micro_batches} "
            f"micro-batches{updates}",
            f"steps         {steps}",
        ]
        if self.num_parameters is not None:
            lines.append(
                f"model         {self.num_parameters:,} parameters, {self.dtype}, {self.device}"
            )
        where = "besides torch and what the allocator keeps"
        lines += _memory_lines(self.memory, where, whole=self.whole)
        if self.process_memory:
            lines.append(f"and in each of the trainer's {self.processes} processes:")
            lines += _memory_lines(self.process_memory, "in each", whole=self.whole)
        if self.stages is not None:
            lines += _stage_lines(self.stages)
        return lines + [f"note: {note}" for note in self.notes]


def _part_lines(parts: Sequence[MemoryPart]) -> list[str]:
    return [f"{p.name:<16} {text_of_bytes(p.size_bytes):>10}  {p.formula}" for p in parts]


def _memory_lines(parts: Sequence[MemoryPart], where: str, *, whole: bool) -> list[str]:
    lines = _part_lines(parts)
    if parts and whole:
        lines.append(f"{'memory':<16} {text_of_bytes(_total(parts)):>10}  together, {where}")
    elif parts:
        lines.append(f"{'memory':<16} {'not known':>10}  parts are missing, see the notes")
    return lines


def _stage_lines(stages: Stages) -> list[str]:
    each = f", in each of its {stages.shards} processes" if stages.shards > 1 else ""
    lines = []
    for one in stages.stages:
        layers = f"{one.layers} layer{'s' if one.layers > 1 else ''}"
        lines.append(
            f"{f'stage {one.index}':<16} {text_of_bytes(one.size_bytes):>10}  {layers}, at most "
            f"{one.live_tokens:,} live tokens{each}:"
        )
        lines += [f"  {line}" for line in _part_lines(one.parts)]
    count = stages.num_micro_batches
    micro_batches = f"at most {count} micro-batch{'es' if count > 1 else ''}"
    lines.append(
        f"bubble        {100 * stages.bubble_share:.0f} % of the stages' time, in sweeps of "
        f"{micro_batches} (responses as long as they may be), over links that take no time"
    )
    return lines


def _total(parts: Sequence[MemoryPart]) -> int:
    return sum(part.size_bytes for part in parts)


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
    folder = model_folder(config.model.path)
    shape = read_shape(folder, notes) if folder else None
    parameters = num_parameters(folder, config.model.path, notes)
    longest = longest_sample(config)
    if shape and shape.max_positions is not None and longest > shape.max_positions:
        notes.append(
            f"prompt and response may reach {longest} tokens, the model's context is "
            f"{shape.max_positions}: longer prompts are left out"
        )
    if shape and shape.attention_layers < shape.layers:
        notes.append(
            f"{shape.layers - shape.attention_layers} of {shape.layers} layers are no attention: "
            "the sizes of their matrices are counted as attention's, which is a guess, and what "
            "they keep for the backward pass as transformers' own code keeps it: the kernels of "
            "flash-linear-attention keep less. model.gradient_checkpointing=true keeps it of one "
            "layer at a time"
        )
    element = 2 if dtype == "bfloat16" else 4
    notes += tail_notes(config) + micro_batch_notes(config)
    run, process, stages = _memory(config, shape, parameters, element, on_cuda, notes)
    run += _cache_memory(config, shape, on_cuda, element, notes)
    run += [] if shape is None else _carried_memory(config, on_cuda, notes)
    return Estimate(
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
        num_parameters=parameters,
        batch=batch_arithmetic(config),
        whole=stages is not None or any(part.name == "activations" for part in (*run, *process)),
        memory=tuple(run),
        processes=config.train.processes or 0,
        process_memory=tuple(process),
        stages=stages,
        notes=tuple(notes),
    )


def _memory(
    config: RunConfig,
    shape: DecoderShape | None,
    parameters: int | None,
    element: int,
    on_cuda: bool,
    notes: list[str],
) -> tuple[list[MemoryPart], list[MemoryPart], Stages | None]:
    """What the run's own process holds, and what each of the trainer's, or of its stages'."""
    processes = config.train.processes
    models = TrainingMemory(
        config=config,
        shape=shape,
        parameters=parameters,
        element=element,
        on_cuda=on_cuda,
    )
    engine = _engine_memory(config, models, on_cuda, notes)
    if processes is None:
        return engine + models.parts(notes), [], None
    if processes > 1 and parameters is not None:
        notes.append(
            "while it loads, each process of the trainer holds the whole model in float32, "
            f"{text_of_bytes(parameters * 4)}, of which it keeps its share"
        )
    if config.train.pipeline.stages == 1:
        return engine, models.parts(notes), None
    stages = stages_of(models, notes)
    notes += _stage_notes(config, stages)
    return engine, [], stages


def _stage_notes(config: RunConfig, stages: Stages | None) -> list[str]:
    count = config.train.pipeline.stages
    if stages is None:
        return [
            "layers and memory of pipeline stages are not known without the model's config.json"
        ]
    if stages.num_micro_batches >= count:
        return []
    return [
        f"{stages.num_micro_batches} micro-batches at most for {count} pipeline stages, which idle "
        f"for {100 * stages.bubble_share:.0f} % of a sweep: lower train.micro_batch_tokens or "
        "train.pipeline.stages"
    ]


def _engine_memory(
    config: RunConfig, models: TrainingMemory, on_cuda: bool, notes: list[str]
) -> list[MemoryPart]:
    """The engine's own copy of the model, where it has one, and what training changes of it on the
    way there."""
    processes, lora = config.train.processes, config.model.lora
    if models.parameters is None or (processes is None and lora is None):
        return []
    size = models.parameters * models.element
    formula = f"parameters x {models.element} bytes, apart from training"
    changed = size
    if config.model.quantization is not None:
        weights = models.policy_weights("engine", models.parameters)
        size, formula = weights.size_bytes, f"{weights.formula}, apart from training"
    if lora is not None:
        changed = 4 * (models.num_adapter_parameters([]) or 0)
        size, formula = size + changed, f"{formula}; adapters x 4 bytes"
    parts = [memory_part("engine", size, formula)]
    if processes is None:
        return parts
    if on_cuda:
        notes.append(f"weights go to the engine through {text_of_bytes(changed)} of host memory")
        return parts
    what = "weights" if lora is None else "adapters"
    return [*parts, memory_part("hand-over", changed, f"the {what} on their way to the engine")]


def _carried_memory(config: RunConfig, on_cuda: bool, notes: list[str]) -> list[MemoryPart]:
    """What deferred prompts keep for their next launch."""
    prompts = batch_arithmetic(config).most_carried
    if not prompts:
        return []
    samples, tokens = config.rollout.samples_per_prompt, config.rollout.max_response_tokens
    if config.environment is not None:  # where nothing bounds them, without what is given
        turns = config.environment.max_turns
        tokens = config.environment.max_trajectory_tokens or turns * tokens
    size = prompts * samples * tokens * CARRIED_TOKEN_BYTES
    formula = (
        f"at most {prompts} deferred prompts x {samples} samples x {tokens} tokens x "
        f"{CARRIED_TOKEN_BYTES} bytes"
    )
    if on_cuda:
        notes.append(f"carried tokens take {text_of_bytes(size)} of host memory: {formula}")
        return []
    return [memory_part("carried tokens", size, formula)]


def _cache_memory(
    config: RunConfig, shape: DecoderShape | None, on_cuda: bool, element: int, notes: list[str]
) -> list[MemoryPart]:
    if shape is None:
        return []
    engine = config.rollout.engine
    batch = batch_arithmetic(config)
    per_token = 2 * max(shape.attention_layers, 1) * shape.key_value * element
    longest = longest_sample(config)
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
            f"({text_of_bytes(longest * per_token)})"
        )
    formula = f"{at_once} of {rows} rows at once x {longest} tokens x {per_token} bytes"
    return [memory_part("kv cache", min(wanted, limit), formula)]
