"""Estimate of a step's work and memory, from the config and the model's config.json alone.

`--dry-run` prints it. No weights are loaded (safetensors headers give the exact number of
parameters), and torch is loaded only to run the model's layers without data
(`trainer/layer_trace.py`). Memory is what training needs at its peak plus the engine's keys and
values; the formulas stand beside each line. Not counted are torch itself, and what an allocator
keeps of freed blocks, which depends on the order of sizes (`benchmarks/memory_estimate.py` measures
how much)."""

from __future__ import annotations

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
from rollpacker.trainer.training_memory import (
    GIB,
    WHAT_IS_LEFT,
    Memory,
    MemoryPart,
    Sweep,
    TrainingMemory,
    cache_rows,
    engine_memory,
    memory_part,
    text_of_bytes,
)

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

CARRIED_TOKEN_BYTES = 12
"""Bytes of a generated token that is kept for its prompt's next submission to an engine: the token
and its log-prob, as `run/ports/carried.py` keeps them."""
_PROC_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimate of a step's work and memory that `--dry-run` prints."""

    device: str
    dtype: str
    num_parameters: int | None
    batch: BatchArithmetic
    memory: Memory
    """Memory of the run's own process. It has no parts if the model's shape is not known."""
    engines: int
    """Number of engines in processes of their own; 0 if the run's process has the one engine."""
    engine: Memory
    """Memory that an engine in a process of its own takes on each of its `engine_devices`. It has
    no parts if there is no such engine, or if nothing is known of its memory."""
    engine_devices: int
    processes: int
    """Number of the trainer's own processes; 0 if the trainer works in the run's process."""
    ranks: tuple[Memory, ...]
    """Memory of each of the trainer's processes: one record for all of them, or one for each
    pipeline stage, in the order of the stages. Empty if the trainer has no processes of its own, or
    if nothing is known of their memory."""
    sweep: Sweep | None
    """The largest sweep (an update's micro-batches going through the pipeline stages). None: the
    model is not in stages, or its memory is not known."""
    notes: tuple[str, ...]
    """Notes about facts that could not be known, and about settings that look wrong."""

    @property
    def whole(self) -> bool:
        """Whether the estimate has all parts of the memory. It lacks some if the
        model's shape is not known."""
        return any(memory.has_activations for memory in (self.memory, *self.ranks))

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all processes together on a CPU; on CUDA bytes of the run's own process, or if
        it uses no GPU of that other process which takes the most of its own GPU. None: parts of
        the memory are not known."""
        if not self.whole:
            return None
        ranks = [self.rank(number).size_bytes for number in range(self.processes)]
        engines = [self.engine.size_bytes] * (self.engines * self.engine_devices)
        if self.device == "cuda":
            return self.memory.size_bytes or max(*ranks, *engines)
        return self.memory.size_bytes + sum(ranks) + sum(engines)

    def rank(self, number: int) -> Memory:
        """Return the memory of the trainer's process with this number. The record has no parts if
        the memory is not known."""
        if not self.ranks:
            return Memory()
        return self.ranks[number * len(self.ranks) // self.processes]

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
        if self.engine.parts:
            lines.append(f"and on each device of the {self.engines} engines:")
            lines += _memory_lines(self.engine, "on each", whole=True)
        if self.sweep is not None:
            lines += self._stage_lines(self.sweep)
        elif self.ranks and self.ranks[0].parts:
            lines.append(f"and in each of the trainer's {self.processes} processes:")
            lines += _memory_lines(self.ranks[0], "in each", whole=self.whole)
        return lines + [f"note: {note}" for note in self.notes]

    def _stage_lines(self, sweep: Sweep) -> list[str]:
        shards = self.processes // len(self.ranks)
        each = f", in each of its {shards} processes" if shards > 1 else ""
        lines = []
        for one in self.ranks:
            layers = f"{one.layers} layer{'s' if one.layers > 1 else ''}"
            lines.append(
                f"{one.name:<16} {text_of_bytes(one.size_bytes):>10}  {layers}, at most "
                f"{one.live_tokens:,} live tokens{each}:"
            )
            lines += [f"  {line}" for line in _part_lines(one)]
        count = sweep.num_micro_batches
        return [
            *lines,
            f"bubble        {100 * sweep.bubble_share:.0f} % of the stages' time, in sweeps of at "
            f"most {count} micro-batch{'es' if count > 1 else ''} (responses as long as they may "
            "be), over links that take no time",
        ]


def _part_lines(memory: Memory) -> list[str]:
    return [f"{p.name:<16} {text_of_bytes(p.size_bytes):>10}  {p.formula}" for p in memory.parts]


def _memory_lines(memory: Memory, where: str, *, whole: bool) -> list[str]:
    lines = _part_lines(memory)
    if memory.parts and whole:
        size = text_of_bytes(memory.size_bytes)
        lines.append(f"{'memory':<16} {size:>10}  together, {where}")
    elif memory.parts:
        lines.append(f"{'memory':<16} {'not known':>10}  parts are missing, see the notes")
    return lines


def estimate(config: RunConfig, *, has_cuda: bool | None = None) -> Estimate:
    """Estimate a run from its config, and from the `config.json` and safetensors headers of a model
    on this machine. `has_cuda` says whether device "auto" will find CUDA; None: found out by
    looking for a driver. Each fact that cannot be known becomes a note."""
    if has_cuda is None:
        has_cuda = _PROC_NVIDIA.exists()
    on_cuda = config.model.device == "cuda" or (config.model.device == "auto" and has_cuda)
    notes: list[str] = []
    models = TrainingMemory.of(config, on_cuda=on_cuda, notes=notes)
    policy = models.policy
    shape = None if policy is None else policy.shape
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
    notes += [*tail_notes(config), *micro_batch_notes(config), *models.notes()]
    parts = _engine_memory(models, notes)
    ranks: tuple[Memory, ...] = ()
    sweep = None
    if config.train.processes is None:
        parts += models.rank(notes).parts
    elif config.train.pipeline.stages == 1:
        ranks = (models.rank(notes),)
    else:
        found = models.stages(notes)
        ranks, sweep = ((), None) if found is None else found
        notes += _stage_notes(config.train.pipeline.stages, sweep)
    engine = None
    apart, degree = config.engines_are_apart, config.parallelism_planner.initial
    if apart:
        engine = engine_memory(config, degree, on_cuda=on_cuda)
    if shape is not None:
        parts += [] if apart else _cache_memory(models, notes)
        parts += _carried_memory(config, on_cuda, notes)
    return Estimate(
        device="cuda" if on_cuda else "cpu",
        dtype=models.dtype,
        num_parameters=None if policy is None else policy.parameters,
        batch=batch_arithmetic(config),
        memory=Memory(parts=tuple(parts)),
        engines=config.rollout.engines if apart else 0,
        engine=engine or Memory(),
        engine_devices=degree,
        processes=config.train.processes or 0,
        ranks=ranks,
        sweep=sweep,
        notes=tuple(notes),
    )


def _stage_notes(count: int, sweep: Sweep | None) -> list[str]:
    if sweep is None:
        return [
            "layers and memory of pipeline stages are not known without the model's config.json"
        ]
    if sweep.num_micro_batches >= count:
        return []
    return [
        f"{sweep.num_micro_batches} micro-batches at most for {count} pipeline stages, which idle "
        f"for {100 * sweep.bubble_share:.0f} % of a sweep: lower train.micro_batch_tokens or "
        "train.pipeline.stages"
    ]


def _engine_memory(models: TrainingMemory, notes: list[str]) -> list[MemoryPart]:
    """Return the memory parts of the run's own process for its engine's copy of the model, and for
    the weights or adapters on their way to engines' copies. Empty if the engine uses the trainer's
    tensors, as the embedded one does. Engines in processes of their own have their copies
    there."""
    config, policy = models.config, models.policy
    lora, apart = config.model.lora, config.engines_are_apart
    is_sent = config.train.processes is not None or apart
    is_copy = is_sent or lora is not None or config.rollout.engine.name == "vllm"
    if policy is None or not is_copy:
        return []
    size = changed = policy.parameters * models.element
    formula = f"parameters x {models.element} bytes, apart from training"
    if config.model.quantization is not None:
        weights = models.weights("engine", policy)
        size, formula = weights.size_bytes, f"{weights.formula}, apart from training"
    if lora is not None:
        changed = 4 * models.num_adapter_parameters(policy.layers_in(0))
        size, formula = size + changed, f"{formula}; adapters x 4 bytes"
    parts = [] if apart else [memory_part("engine", size, formula)]
    if is_sent and models.on_cuda:
        notes.append(f"weights go to the engine through {text_of_bytes(changed)} of host memory")
    elif is_sent:
        what = "weights" if lora is None else "adapters"
        parts.append(memory_part("hand-over", changed, f"the {what} on their way to the engine"))
    return parts


def _carried_memory(config: RunConfig, on_cuda: bool, notes: list[str]) -> list[MemoryPart]:
    """Return the memory part for tokens generated for prompts that were put off to a later round.
    These tokens are kept, so that generation can go on from them."""
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


def _cache_memory(models: TrainingMemory, notes: list[str]) -> list[MemoryPart]:
    """Return the memory part for keys and values of the samples that an engine runs at once."""
    rows, one_sample, limit = cache_rows(models)
    longest = longest_sample(models.config)
    if limit is None:
        return [memory_part("kv cache", one_sample, WHAT_IS_LEFT)]
    at_once = min(limit // one_sample, rows)
    if at_once < 1:
        notes.append(
            f"the cache of {limit / GIB:g} GiB does not hold one response of {longest} tokens "
            f"({text_of_bytes(one_sample)})"
        )
    formula = f"{at_once} of {rows} rows at once x {longest} tokens x {one_sample // longest} bytes"
    return [memory_part("kv cache", min(rows * one_sample, limit), formula)]
