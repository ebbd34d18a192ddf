"""Memory of a process, part by part, from the config and the models' `config.json`. The process is
a trainer in the run's own process, a rank, a pipeline stage's rank or an engine.

Weights, gradients, optimizer state, adapters, keys and values are exact, by formulas. Activations
are what the model's layers keep when they run without data (`trainer/layer_trace.py`). Not counted
are torch itself, a CUDA context, and what an allocator keeps of freed blocks.

In a pipeline stage, a micro-batch takes memory in one of two states. After its forward pass, all
that autograd saved is kept. After its backward pass for inputs, inputs and output gradients of the
linear layers are kept for the backward pass for weights (W). In a stage before the last all tokens
may be in the first state, if a slow link holds up their gradients. In the last stage one
micro-batch at most is in that state, since its backward pass for inputs follows at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rollpacker.pipeline.plan.choosers import live_token_caps
from rollpacker.pipeline.plan.split import expected_bubble, layers_of_stages
from rollpacker.trainer.batch_arithmetic import (
    batch_arithmetic,
    longest_sample,
    most_micro_batch_tokens,
)
from rollpacker.trainer.layer_trace import LayerTrace, TraceSettings, trace_layers
from rollpacker.trainer.model_shape import DecoderShape, model_folder, num_parameters, read_shape

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

GIB = 1 << 30
CPU_CACHE_GIB = 1.0
"""GiB that an engine on a CPU takes for keys and values unless the config sets another limit."""
WHAT_IS_LEFT = "one response at least; gets what is left (rollout.engine.kv_cache_gib)"
"""Formula of an engine's keys and values on a GPU without a limit of their own."""
MOST_SIMULATED = 256
"""Largest number of micro-batches with which an update is simulated to predict the stages' idle
time. Updates of more micro-batches have a smaller share of idle time."""
LOGIT_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Number of logits that are computed at a time, by type of device: a copy of
`logprobs.BLOCK_ELEMENTS`, which this module cannot import without torch."""
BYTES_OF_8BIT = 1 + 4 / 256
"""Bytes per element of an 8-bit optimizer moment: one byte, and 1/256 of a float32 scale."""
BYTES_OF_4BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per element of a 4-bit matrix: half a byte, 1/64 of an 8-bit scale, and the share of a
float32 scale for every 256 of these scales."""
OF_A_TURN = (
    *("gradients", "critic gradients", "activations", "decoded", "gathered", "backward"),
    *("kept for W", "messages", "summing"),
)
"""Names of memory parts that a trainer holds only while it computes and applies gradients, from a
step's first gradient to its update. Between steps that memory is free."""
OFFLOADED = ("optimizer", "critic optimizer", "master", "critic master")
"""Names of memory parts that a trainer holds at all times, but with `train.offload` on CUDA only
from a step's first gradient to its update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a process's memory: its name, its size, and the formula for the size in words."""

    name: str
    size_bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one process, or of one engine on one of its devices, at a step's peak."""

    parts: tuple[MemoryPart, ...] = ()
    name: str = ""
    """Name of the process if processes of its kind differ in memory, such as "stage 1".
    Empty: they are all alike."""
    layers: int = 0
    """Number of the policy's layers in this pipeline stage; 0 without stages."""
    live_tokens: int = 0
    """Largest number of tokens whose activations this stage keeps at once; 0 without stages."""
    in_turn: tuple[str, ...] = ()
    """Names of the parts held only while the process uses a device shared with an engine."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def turn_bytes(self) -> int:
        """Bytes held only while the process, not the engine, uses the device that they share."""
        return sum(part.size_bytes for part in self.parts if part.name in self.in_turn)

    @property
    def stays_bytes(self) -> int:
        """Bytes held even while the engine uses the device that it shares with this process."""
        return self.size_bytes - self.turn_bytes

    @property
    def has_activations(self) -> bool:
        """Whether activations are among the parts. They are not if a model could not be traced."""
        return any(part.name == "activations" for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The largest sweep (micro-batches of one update) that a process may have, as if all responses
    were as long as allowed."""

    micro_batch_tokens: int
    """Number of tokens of the sweep's largest micro-batch, which is the length of the longest
    sample if that does not fit otherwise."""
    num_micro_batches: int
    tokens: int
    row_tokens: int
    """Number of tokens of a sample of the greatest length allowed, without its last, which does
    not go through the model."""
    bubble_share: float = 0.0
    """Predicted share of the time in which pipeline stages are idle, over all stages."""

    @classmethod
    def of(cls, config: RunConfig, shards: int) -> Sweep:
        """Return the largest sweep (one update's micro-batches) of a process, if `shards` processes
        share the update's samples."""
        batch = batch_arithmetic(config)
        row = longest_sample(config) - 1  # the last token does not go through the model
        rows = math.ceil(batch.trained_samples / batch.updates_per_round / shards)
        most = most_micro_batch_tokens(config)
        # With auto they are smaller as a rule; the memory is for the largest that there may be.
        each = 1 if config.train.micro_batch_tokens == "auto" else max(most // row, 1)
        return cls(
            micro_batch_tokens=min(max(most, row), rows * row),
            num_micro_batches=math.ceil(rows / each),
            tokens=rows * row,
            row_tokens=row,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One of the models of a run, with its size, its shape and its split into pipeline stages."""

    name: Literal["policy", "reference", "teacher", "critic"]
    path: str
    parameters: int
    """Number of all parameters of the model; for a critic without those of an output layer."""
    shape: DecoderShape | None
    """The model's shape. None if no `config.json` on this machine gives it."""
    is_trained: bool
    layers: tuple[int, ...] = ()
    """Number of layers in each pipeline stage. Empty: the model is not split."""

    @property
    def has_head(self) -> bool:
        return self.name != "critic"

    def layers_in(self, stage: int) -> int:
        """Return a stage's or an unsplit model's number of layers; 0 if the shape is not known."""
        if self.layers:
            return self.layers[stage]
        return 0 if self.shape is None else self.shape.layers

    def matrices_in(self, stage: int) -> int:
        """Return the number of elements of the weight matrices in a stage's layers; 0 if the
        model's shape is not known."""
        return 0 if self.shape is None else self.layers_in(stage) * self.shape.layer_matrices

    def in_stage(self, stage: int) -> int:
        """Return the number of this model's parameters in a pipeline stage, with the last stage's
        copy of a tied weight. A model that is not split has all parameters in its one stage."""
        shape = self.shape
        if not self.layers or shape is None:
            return self.parameters
        ends = 1 if shape.tied or not self.has_head else 2
        layer = (self.parameters - ends * shape.embedding - shape.hidden) // shape.layers
        count = layer * self.layers[stage]
        if stage == 0:
            count += shape.embedding
        if stage == len(self.layers) - 1:
            count += shape.hidden + (shape.embedding if self.has_head else 0)  # with the norm
        return count

    def mirrored_in(self, stage: int) -> int:
        """Return how many parameters of a stage are its copy of the first stage's tied weight."""
        is_last = len(self.layers) > 1 and stage == len(self.layers) - 1
        if is_last and self.has_head and self.shape is not None and self.shape.tied:
            return self.shape.embedding
        return 0


Graphs = Sequence[tuple[Decoder, LayerTrace]]
"""The models whose gradients are computed, the policy first, each with a trace of what its layers
keep for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """The models of a run, and the settings of training on which their memory depends."""

    config: RunConfig
    dtype: Literal["bfloat16", "float32"]
    """Name of the dtype that the models compute in."""
    on_cuda: bool
    decoders: tuple[Decoder, ...]
    """The models, the policy first. Empty: the policy's number of parameters is not known."""

    @classmethod
    def of(cls, config: RunConfig, *, on_cuda: bool, notes: list[str]) -> TrainingMemory:
        """Return the models of the run with their sizes and shapes, and the settings. `notes` gets
        a sentence for each size or shape that cannot be known."""
        dtype = config.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if on_cuda else "float32"
        algorithm, lora, decoders = config.algorithm, config.model.lora, list[Decoder]()
        policy = _decoder("policy", config.model.path, notes, is_trained=lora is None)
        if policy is not None:
            decoders.append(policy)
            if algorithm.needs_reference and lora is None:
                decoders.append(replace(policy, name="reference", is_trained=False))
            if algorithm.needs_teacher and config.model.teacher is not None:
                teacher = _decoder("teacher", config.model.teacher, notes, is_trained=False)
                decoders += [] if teacher is None else [teacher]
            if algorithm.needs_critic:
                path = config.train.critic.path
                critic: Decoder | None = replace(policy, name="critic", is_trained=True)
                if path is not None:
                    critic = _decoder("critic", path, notes, is_trained=True)
                decoders += [] if critic is None else [_without_head(critic)]
        return cls(config=config, dtype=dtype, on_cuda=on_cuda, decoders=tuple(decoders))

    @property
    def policy(self) -> Decoder | None:
        return self.decoders[0] if self.decoders else None

    @property
    def element(self) -> int:
        """Bytes of a number in the dtype that the models compute in."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def block_elements(self) -> int:
        """Number of logits that are computed at one time on this type of device."""
        return LOGIT_BLOCK_ELEMENTS["cuda" if self.on_cuda else "cpu"]

    @property
    def ranks(self) -> int:
        """Number of processes over which one replica of the model, or a stage of it, is sharded."""
        train = self.config.train
        return (train.processes or 1) // train.replicas // train.pipeline.stages

    @property
    def kept(self) -> int:
        """Bytes that one number of a trained weight takes between two passes: 4 with several
        processes, since shards are kept in float32; else as many as in `dtype`."""
        return 4 if (self.config.train.processes or 1) > 1 else self.element

    def notes(self) -> list[str]:
        """Return sentences about what is not counted of quantized weights and adapters, and about
        memory that loading takes."""
        policy, model, notes = self.policy, self.config.model, []
        if policy is None:
            return []
        if model.quantization is not None and policy.shape is None:
            notes.append(
                "the weights are counted as if they were not quantized: how many of them are "
                "matrices in layers is not known without its config.json"
            )
        elif model.quantization is not None:
            whole = text_of_bytes(policy.parameters * self.element)
            notes.append(f"while it loads, host memory holds the whole model, {whole}")
        if unknown := sorted(self._targets() - self._target_sizes().keys()):
            notes.append(f"adapters of {', '.join(unknown)} are not counted: their size is unknown")
        return notes

    # -- what is there between two calls -------------------------------------------------------

    def weights(self, name: str, decoder: Decoder, stage: int = 0) -> MemoryPart:
        """Return the memory part `name` for a model's weights (4-bit codes if it is quantized)."""
        count, what = decoder.in_stage(stage), "parameters"
        if decoder.name == "policy" and self.config.model.quantization is not None:
            if coded := decoder.matrices_in(stage):
                size = (count - coded) * self.kept + coded * BYTES_OF_4BIT
                formula = f"layers' matrices x {BYTES_OF_4BIT:.3f} bytes, the rest x {self.kept}"
                return memory_part(name, size, f"{formula} bytes")
            what = "not quantized, so at most: parameters"
        elif decoder.mirrored_in(stage):
            what = "parameters with the tied weight's mirror"
        kept = self.kept if decoder.is_trained else self.element
        return memory_part(name, count * kept // self.ranks, f"{what} x {kept} bytes{self._shared}")

    def at_rest(self, decoder: Decoder, stage: int = 0) -> list[MemoryPart]:
        """Return the memory parts that are there whether or not passes run: weights, gradients and
        optimizer state of a model, or of its part in a pipeline stage."""
        is_policy, count = decoder.name == "policy", decoder.in_stage(stage)
        weights = self.weights("weights" if is_policy else decoder.name, decoder, stage)
        if decoder.is_trained:
            prefix = "" if is_policy else f"{decoder.name} "
            own = count - decoder.mirrored_in(stage)
            matrices = decoder.matrices_in(stage)
            parts = self._trained(count, own, "parameters", min(matrices, own), prefix)
            if self.kept < 4:
                parts.append(memory_part(f"{prefix}master", count * 4, "parameters x 4 bytes"))
            return [weights, *parts]
        adapters = self.num_adapter_parameters(decoder.layers_in(stage)) if is_policy else 0
        if not adapters:
            return [weights]
        formula = f"rank x (in + out) of the targeted matrices x 4 bytes{self._shared}"
        own_part = memory_part("adapters", 4 * adapters // self.ranks, formula)
        return [weights, own_part, *self._trained(adapters, adapters, "adapters", adapters)]

    def _trained(
        self, count: int, own: int, what: str, matrices: int, prefix: str = ""
    ) -> list[MemoryPart]:
        """Return the memory parts for gradients of `count` parameters, and for optimizer state of
        `own` of them, which this process updates. `matrices` of these are in layers' matrices
        (Muon keeps less for them). `prefix` goes before the parts' names, and `what` names the
        parameters in formulas."""
        whole = self.ranks > 1 and self.config.train.keeps_whole_gradients
        gradients, shared = (count * 4, "") if whole else (count * 4 // self.ranks, self._shared)
        size, formula = 8 * own, f"{what} x 2 moments x 4 bytes{self._shared}"
        if self.config.train.optimizer == "adamw_8bit":
            size = int(2 * own * BYTES_OF_8BIT)
            formula = f"{what} x 2 moments x {BYTES_OF_8BIT:.3f} bytes"
        elif self.config.train.optimizer == "muon":
            size -= 4 * matrices
            formula += ", one moment for the matrices in layers (muon)"
        return [
            memory_part(f"{prefix}gradients", gradients, f"{what} x 4 bytes{shared}"),
            memory_part(f"{prefix}optimizer", size // self.ranks, formula),
        ]

    @property
    def _shared(self) -> str:
        return f" / {self.ranks} processes" if self.ranks > 1 else ""

    def num_adapter_parameters(self, layers: int) -> int:
        """Return the number of parameters of the adapters in `layers` layers together; 0 if there
        are no adapters or the model's shape is not known."""
        lora, sizes = self.config.model.lora, self._target_sizes()
        if lora is None:
            return 0
        return lora.rank * layers * sum(sizes[name] for name in self._targets() & sizes.keys())

    def _targets(self) -> set[str]:
        lora = self.config.model.lora
        if lora is None:
            return set()
        named = set(lora.target_modules)
        return set(self._target_sizes()) if named == {"all-linear"} else named

    def _target_sizes(self) -> dict[str, int]:
        """Mapping from the name of each module that may have an adapter to the sum of its input and
        output widths. Empty if the model's shape is not known."""
        shape = None if self.policy is None else self.policy.shape
        if shape is None:
            return {}
        return {
            "q_proj": shape.hidden + shape.query,
            "k_proj": shape.hidden + shape.key_value,
            "v_proj": shape.hidden + shape.key_value,
            "o_proj": shape.query + shape.hidden,
            "gate_proj": shape.hidden + shape.feed_forward,
            "up_proj": shape.hidden + shape.feed_forward,
            "down_proj": shape.feed_forward + shape.hidden,
        }

    # -- what is there during a step -----------------------------------------------------------

    def rank(self, notes: list[str]) -> Memory:
        """Return the memory of a process that trains whole models or shards of them, without
        pipeline stages. If a model cannot be traced, activations are missing; `notes` say why."""
        parts = [part for decoder in self.decoders for part in self.at_rest(decoder)]
        sweep, policy = Sweep.of(self.config, 1), self.policy
        if policy is not None and policy.shape is not None:
            graphs = self._graphs(self.decoders, sweep, notes)
            if graphs:
                parts += _Working(self, self.decoders, graphs, 0, sweep, None).parts()
        return self._memory(parts)

    def _memory(
        self, parts: Sequence[MemoryPart], name: str = "", layers: int = 0, live_tokens: int = 0
    ) -> Memory:
        offloads = self.config.train.offload and self.on_cuda
        return Memory(
            parts=tuple(parts),
            name=name,
            layers=layers,
            live_tokens=live_tokens,
            in_turn=OF_A_TURN + (OFFLOADED if offloads else ()),
        )

    def _graphs(self, decoders: Sequence[Decoder], sweep: Sweep, notes: list[str]) -> Graphs:
        """Trace the layers of policy and critic with a sweep's largest micro-batch. Empty if the
        policy cannot be traced; a critic that cannot be traced is taken to be like the policy."""
        found: list[tuple[Decoder, LayerTrace]] = []
        for decoder in decoders:
            if decoder.name not in ("policy", "critic"):
                continue
            settings = TraceSettings(
                dtype=self.dtype,
                checkpointing=self.config.model.gradient_checkpointing,
                lora=self.config.model.lora if decoder.name == "policy" else None,
                rows=max(sweep.micro_batch_tokens // sweep.row_tokens, 1),
                row_tokens=sweep.row_tokens,
            )
            folder = model_folder(decoder.path)
            trace = None if folder is None else trace_layers(folder, settings, notes)
            if trace is None and not found:
                return []
            found.append((decoder, trace) if trace is not None else found[0])
        return found

    # -- pipeline stages -----------------------------------------------------------------------

    def stages(self, notes: list[str]) -> tuple[tuple[Memory, ...], Sweep] | None:
        """Return the memory of a process of each pipeline stage, and the largest sweep (one
        update's micro-batches). None if the policy's shape, or what its layers keep, is not known.
        Raises `ValueError` for layers or `live_tokens` (cap on tokens with kept activations) of the
        stages that the run would refuse; when None is returned, these may be wrong unnoticed."""
        pipeline, sweep = self.config.train.pipeline, Sweep.of(self.config, self.ranks)
        caps = live_token_caps(
            pipeline.live_tokens, num_stages=pipeline.stages, longest=sweep.micro_batch_tokens
        )
        decoders = self._split()
        graphs = self._graphs(decoders, sweep, notes)
        if not graphs:
            return None
        live = [min(cap, sweep.tokens) for cap in caps]
        found = [
            self._memory(
                [
                    *(part for decoder in decoders for part in self.at_rest(decoder, stage)),
                    *_Working(self, decoders, graphs, stage, sweep, live[stage]).parts(),
                ],
                f"stage {stage}",
                decoders[0].layers[stage],
                live[stage],
            )
            for stage in range(pipeline.stages)
        ]
        again = self.config.model.gradient_checkpointing
        bubble = expected_bubble(
            [_work(decoders[0], stage, checkpointing=again) for stage in range(pipeline.stages)],
            min(sweep.num_micro_batches, MOST_SIMULATED),
            [cap // sweep.micro_batch_tokens for cap in caps],
        )
        return tuple(found), replace(sweep, bubble_share=bubble)

    def _split(self) -> list[Decoder]:
        """Return the models whose shapes are known, each with its number of layers in each stage.
        The policy is split as the config says, or evenly by work; another model is split like the
        policy if it has as many layers."""
        pipeline, policy = self.config.train.pipeline, self.policy
        if policy is None or policy.shape is None:
            return []
        shape = policy.shape
        each = 4 if self.config.model.lora is not None else 6  # FLOPs, as `FlopModel` counts them
        adapters = self.num_adapter_parameters(shape.layers)
        layers = layers_of_stages(
            () if pipeline.layers == "auto" else pipeline.layers,
            num_layers=shape.layers,
            num_stages=pipeline.stages,
            layer_work=each * shape.used_matrices + 6 * adapters / shape.layers,
            last_work=each * shape.embedding,
        )
        found = [replace(policy, layers=layers)]
        for other in self.decoders[1:]:
            if other.shape is None:
                continue
            own = layers_of_stages(
                layers if other.shape.layers == shape.layers else (),
                num_layers=other.shape.layers,
                num_stages=pipeline.stages,
                layer_work=other.shape.used_matrices,
                last_work=other.shape.embedding if other.has_head else 0,
            )
            found.append(replace(other, layers=own))
        return found


@dataclass(frozen=True, slots=True)
class _Working:
    """Computes the memory that one process needs for an update's forward and backward passes,
    besides weights and optimizer state."""

    models: TrainingMemory
    decoders: Sequence[Decoder]
    graphs: Graphs
    stage: int
    sweep: Sweep
    live_tokens: int | None
    """Largest number of tokens whose activations this pipeline stage keeps at one time. None: the
    model is not in stages, and runs on one micro-batch after the other."""

    def parts(self) -> list[MemoryPart]:
        models, element, policy = self.models, self.models.element, self.decoders[0]
        shape = self._shape
        if self.live_tokens is None:
            parts = self._activations()
            if models.config.model.quantization is not None:
                largest = shape.hidden * max(shape.feed_forward, shape.query)
                formula = f"the largest matrix while it is used x {element} bytes"
                parts.append(memory_part("decoded", largest * element, formula))
            if models.ranks > 1:
                whole = shape.embedding * (1 if shape.tied else 2) + 2 * shape.layer_matrices
                formula = f"whole embeddings, output layer and two layers x {element} bytes"
                parts.append(memory_part("gathered", whole * element, formula))
            return [*parts, self._backward()]
        whole = sum(decoder.in_stage(self.stage) for decoder in self.decoders) + self._adapters
        formula = f"all parameters whole during a sweep x {element} bytes"
        gathered = memory_part("gathered", whole * element, formula)
        parts = [gathered, *self._activations(), self._backward(), self._messages()]
        more = self._summing() - sum(part.size_bytes for part in parts)
        if more > 0 and policy.is_trained:
            formula = "more than a sweep, while gradients are summed over processes at a step's end"
            parts.append(memory_part("summing", more, formula))
        return parts

    @property
    def _shape(self) -> DecoderShape:
        shape = self.decoders[0].shape
        assert shape is not None, "the policy could be traced"
        return shape

    @property
    def _is_last(self) -> bool:
        return self.stage == max(len(self.decoders[0].layers), 1) - 1

    @property
    def _adapters(self) -> int:
        return self.models.num_adapter_parameters(self.decoders[0].layers_in(self.stage))

    def _activations(self) -> list[MemoryPart]:
        """Return the memory parts for activations, which a forward pass keeps. The last pipeline
        stage keeps those of one micro-batch at most; its further tokens have had their backward
        pass for inputs, and count with what the backward pass for weights needs."""
        after_f = after_i = 0
        formulas = []
        for decoder, trace in self.graphs:
            hidden = self._shape.hidden if decoder.shape is None else decoder.shape.hidden
            layers, saved = decoder.layers_in(self.stage) or self._shape.layers, round(trace.saved)
            # Behind the layers: the last stage's norm and what enters the output layer; or what
            # has left.
            end = round(trace.ends) if self._is_last else self.models.element * hidden
            after_f += layers * saved + end
            after_i += round(layers * trace.waiting)
            of = "" if decoder.name == "policy" else f"{decoder.name}'s "
            formulas.append(f"({of}layers x {saved} + {end})")
        formula = f"{' + '.join(formulas)} bytes"
        tokens = self.sweep.micro_batch_tokens
        if self.live_tokens is None:
            formula = f"{tokens} tokens x {formula}"
            return [memory_part("activations", tokens * after_f, formula)]
        most, first = max(after_f, after_i), self.live_tokens
        if self._is_last:
            first = min(tokens, first)
        if after_i > after_f:
            formula = f"{after_i:,} bytes of inputs and gradients that W needs"
        parts = [memory_part("activations", first * most, f"{first} live tokens x {formula}")]
        if rest := self.live_tokens - first:
            formula = f"{rest} live tokens x {after_i:,} bytes of inputs and gradients"
            parts.append(memory_part("kept for W", rest * after_i, formula))
        return parts

    def _backward(self) -> MemoryPart:
        """Return the memory part for the most that a backward pass takes besides activations,
        at the one moment that takes most: a layer's gradients, a block of logits, or
        gradients being summed."""
        models, policy, shape = self.models, self.decoders[0], self._shape
        element, tokens = models.element, self.sweep.micro_batch_tokens
        choices = {
            "one layer's activations and gradients": max(
                one.backward_bytes for _, one in self.graphs
            )
        }
        if self._is_last:
            block = f"a block of logits (at most {models.block_elements:,})"
            choices[f"{block}, hidden states and the output layer's gradient"] = self._logits()
        if self.live_tokens is not None:
            # On a CPU a gradient in half precision is widened as a whole before it is added.
            widened = 4 if element < 4 and not models.on_cuda else 0
            if policy.is_trained and (self.stage == 0 or self._is_last):
                choices["the embeddings' or the output layer's gradient, added to its sum"] = (
                    element * tokens * shape.hidden + (element + widened) * shape.embedding
                )
            if element < 4:  # those of a micro-batch are widened once all are there
                largest = shape.hidden * max(shape.feed_forward, shape.query)
                fresh = policy.matrices_in(self.stage) if policy.is_trained else self._adapters
                choices[f"a micro-batch's gradients x {element} bytes, before they are summed"] = (
                    element * fresh + widened * largest
                )
        formula = max(choices, key=choices.__getitem__)
        return memory_part("backward", choices[formula], formula)

    def _logits(self) -> int:
        """Return the bytes for logits: two float32 copies of a block of them, a third for the
        entropy's gradient or if there is only one block; also hidden states with their gradient,
        and the output layer's gradient if that layer is trained."""
        models, shape, tokens = self.models, self._shape, self.sweep.micro_batch_tokens
        elements = tokens * shape.vocabulary
        is_one = elements <= models.block_elements
        copies = 3 if models.config.algorithm.entropy_coef or is_one else 2
        block = min(elements, models.block_elements) * 4 * copies
        hidden = tokens * shape.hidden * (4 + models.element)
        is_trained = models.config.model.lora is None
        return block + hidden + (shape.embedding * models.element if is_trained else 0)

    def _messages(self) -> MemoryPart:
        """Return the memory part for hidden states, or their gradients, sent to or received from
        the neighbouring stages."""
        hidden = sum(one.shape.hidden for one in self.decoders if one.shape is not None)
        neighbours = (self.stage > 0) + (not self._is_last)
        size = neighbours * self.sweep.micro_batch_tokens * hidden * self.models.element
        formula = "hidden states or their gradient, one on the way at each border"
        return memory_part("messages", size, formula)

    def _summing(self) -> int:
        """Return the bytes, besides weights and optimizer state, held when FSDP2 sums the last
        gradients: those of embeddings and output layer. The layers' gradients are then shards."""
        policy, ranks, element = self.decoders[0], self.models.ranks, self.models.element
        layers = policy.matrices_in(self.stage)
        root = policy.in_stage(self.stage) - layers
        # The input, beside the gradients or the output; a single process makes a quotient besides.
        sums = 8 if ranks == 1 else 4
        fresh = element if element < 4 else 0
        shards = 4 * layers * (1 / ranks - 1)  # less than the whole ones that are counted
        return int(root * (sums + element + fresh) + shards)


def _work(decoder: Decoder, stage: int, *, checkpointing: bool) -> tuple[float, float, float]:
    """Return the work of a micro-batch's forward pass, backward pass for inputs and backward pass
    for weights in a stage, in matrix elements that are multiplied with. The output layer's weight
    gradient counts as part of the last stage's backward pass for inputs."""
    assert decoder.shape is not None
    layers = float(decoder.layers_in(stage) * decoder.shape.used_matrices)
    head = float(decoder.shape.embedding) if stage == len(decoder.layers) - 1 else 0.0
    again = layers if checkpointing else 0.0
    trained = layers if decoder.is_trained else 0.0
    return layers + head, layers + again + 2 * head, trained


# -- one device ----------------------------------------------------------------------------------


def cache_rows(models: TrainingMemory) -> tuple[int, int, int | None]:
    """Return three numbers: the most samples that an engine generates at once, the bytes of the
    longest sample's keys and values, and the most bytes for all keys and values (None: what is left
    of a GPU). All three are 0 if the model's shape is not known."""
    config, policy = models.config, models.policy
    if policy is None or policy.shape is None:
        return 0, 0, 0
    engine, shape, gib = config.rollout.engine, policy.shape, config.rollout.engine.kv_cache_gib
    if gib is None and not models.on_cuda:
        gib = CPU_CACHE_GIB
    rows = min(batch_arithmetic(config).most_samples, engine.max_slots or 1024)
    token = 2 * max(shape.attention_layers, 1) * shape.key_value * models.element
    return rows, longest_sample(config) * token, None if gib is None else int(gib * GIB)


def engine_memory(config: RunConfig, devices: int, *, on_cuda: bool) -> Memory | None:
    """Return the memory that an engine on this many devices holds on each of them. None: the
    model's shape is not known."""
    models = TrainingMemory.of(config, on_cuda=on_cuda, notes=[])
    policy = models.policy
    if policy is None or policy.shape is None:
        return None
    weights, formula = policy.parameters * models.element, f"parameters x {models.element} bytes"
    if devices > 1:
        formula += f" / {devices} devices"
    parts = [memory_part("weights", weights // devices, formula)]
    if config.model.lora is not None:
        adapters = models.num_adapter_parameters(policy.shape.layers)
        parts.append(memory_part("adapters", 4 * adapters, "adapters x 4 bytes"))
    rows, one_sample, size = cache_rows(models)
    formula = "of each device"
    if size is None:  # what is left of the GPU's memory, as long as one response has room
        size, formula = one_sample // devices, WHAT_IS_LEFT
    elif config.rollout.engine.name == "torch":  # which takes what its rows need; others all of it
        size = min(size, rows * (one_sample // devices))
    return Memory(parts=(*parts, memory_part("kv cache", size, formula)))


def rank_memory(config: RunConfig, *, on_cuda: bool) -> Memory | None:
    """Return the memory of one of the trainer's processes; None if the model's memory is not known.
    Of pipeline stages, whose processes differ, this is the largest on CUDA, and the mean on a CPU,
    where they share memory. Raises `ValueError` if the run would refuse the split into stages."""
    models = TrainingMemory.of(config, on_cuda=on_cuda, notes=[])
    if config.train.pipeline.stages == 1:
        memory = models.rank([])
        return memory if memory.has_activations else None
    found = models.stages([])
    if found is None:
        return None
    stages, _ = found
    if on_cuda:
        return max(stages, key=lambda one: one.size_bytes)
    sums: Counter[str] = Counter()
    for stage in stages:
        sums.update({part.name: part.size_bytes for part in stage.parts})
    means = [(name, size // len(stages)) for name, size in sums.items()]
    parts = tuple(memory_part(name, size, "mean of the stages") for name, size in means)
    return replace(stages[0], parts=parts, name="")


def micro_batch_choices(config: RunConfig, *, on_cuda: bool) -> tuple[tuple[int, int], ...]:
    """Return the numbers of tokens that a micro-batch may have, from which each of the trainer's
    processes chooses by its free memory; each with the bytes that the process takes at its peak,
    the smallest first. Empty: there is nothing to choose, or the memory is not known."""
    train = config.train
    is_fixed = train.micro_batch_tokens != "auto" or train.pipeline.stages > 1
    if is_fixed or train.processes is None or not on_cuda:
        return ()
    least, found = most_micro_batch_tokens(config), list[tuple[int, int]]()
    most = max(Sweep.of(config, 1).tokens, least)  # more than all samples of an update is no use
    for tokens in dict.fromkeys(min(least << doubled, most) for doubled in range(5)):
        chosen = replace(config, train=replace(train, micro_batch_tokens=tokens))
        memory = rank_memory(chosen, on_cuda=on_cuda)
        if memory is None:
            return ()
        found.append((tokens, memory.size_bytes))
    return tuple(found)


def chosen_tokens(choices: Sequence[tuple[int, int]], room_bytes: float) -> int:
    """Return the largest number of tokens among `micro_batch_choices` whose bytes, with a tenth for
    what an allocator keeps, have room; the smallest number if none has."""
    fitting = [tokens for tokens, size in choices if size <= 0.9 * room_bytes]
    return max(fitting, default=choices[0][0])


def run_memory(config: RunConfig, *, on_cuda: bool) -> int:
    """Return the bytes of host memory that the run's own process takes: weights on their way from
    the trainer's processes to the engines (with adapters these alone), and on a CPU a model that it
    computes with; 0 if the model's size is not known."""
    models = TrainingMemory.of(config, on_cuda=on_cuda, notes=[])
    policy = models.policy
    if policy is None:
        return 0
    whole = policy.parameters * models.element
    if config.model.lora is None:
        sent = whole
    else:
        sent = 4 * models.num_adapter_parameters(policy.layers_in(0))
    is_apart = config.train.processes is not None or config.placement is not None
    if on_cuda:
        return sent * is_apart
    return sent + whole * config.run_computes


def _decoder(
    name: Literal["policy", "teacher", "critic"], path: str, notes: list[str], *, is_trained: bool
) -> Decoder | None:
    """Read a model's size and shape from the files at `path` (a folder or a hub name). None: the
    number of parameters cannot be known. `notes` gets sentences on what is not known."""
    folder = model_folder(path)
    shape = read_shape(folder, notes) if folder else None
    count = num_parameters(folder, path, notes)
    if count is None:
        return None
    return Decoder(name=name, path=path, parameters=count, shape=shape, is_trained=is_trained)


def _without_head(critic: Decoder) -> Decoder:
    """Return the critic's record with the output layer's parameters taken off: a critic is made
    from a causal LM, and has no such layer."""
    shape = critic.shape
    head = 0 if shape is None or shape.tied else shape.embedding
    return replace(critic, parameters=critic.parameters - head)


def memory_part(name: str, size_bytes: float, formula: str) -> MemoryPart:
    """Make a memory part, with its size rounded down to whole bytes."""
    return MemoryPart(name=name, size_bytes=int(size_bytes), formula=formula)


def text_of_bytes(size_bytes: int) -> str:
    """Return a size as text in the largest unit that fits: GiB, MiB or KiB."""
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB"
