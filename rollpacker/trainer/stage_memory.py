"""What each pipeline stage has, keeps and holds in memory, and how long stages wait for each other.

From the config and `config.json`s alone, like all of the estimate (`trainer/estimate.py`); what a
layer keeps by `trainer/layer_trace.py`. Layers and caps of live tokens are those of the run
(`pipeline/plan/split.py`, `pipeline/plan/choosers.py`).

A micro-batch that is live is in one of two states: its forward pass is done, and what autograd
saved is there; or its I is done, too, and inputs and output gradients of the linear layers wait for
W. A stage that is not the last may have all its live tokens in the first state, when a slow link
holds their gradients up. The last one has one micro-batch of them, since its I follows F at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollpacker.pipeline.plan.choosers import live_token_caps
from rollpacker.pipeline.plan.split import expected_bubble, layers_of_stages
from rollpacker.trainer.batch_arithmetic import (
    batch_arithmetic,
    longest_sample,
    most_micro_batch_tokens,
)
from rollpacker.trainer.layer_trace import LayerTrace
from rollpacker.trainer.model_shape import DecoderShape, model_folder, num_parameters, read_shape
from rollpacker.trainer.training_memory import MemoryPart, TrainingMemory, memory_part

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

MOST_SIMULATED = 256
"""Micro-batches of the sweep that the bubble is predicted for: more have less of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSweep:
    """The largest sweep of a process: all responses are as long as they may be."""

    micro_batch_tokens: int
    """Of the largest micro-batch."""
    num_micro_batches: int
    tokens: int
    row_tokens: int
    """Of each row."""

    @classmethod
    def of(cls, config: RunConfig, shards: int) -> LargestSweep:
        """One update of a step, on one of so many shards of its stage."""
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
class StageEstimate:
    """One stage, in each of its processes."""

    index: int
    layers: int
    """Of the policy."""
    live_tokens: int
    """At most."""
    parts: tuple[MemoryPart, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """All stages of a run."""

    stages: tuple[StageEstimate, ...]
    shards: int
    """Processes of each stage; process n is of stage n // shards."""
    num_micro_batches: int
    """Of a sweep, at most."""
    bubble_share: float
    """Of all stages' time in such a sweep."""

    def of_process(self, number: int) -> StageEstimate:
        return self.stages[number // self.shards]

    @property
    def largest(self) -> StageEstimate:
        return max(self.stages, key=lambda one: one.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """One of the models that go through the stages together."""

    name: str
    shape: DecoderShape
    parameters: int
    layers: tuple[int, ...]
    """Of each stage."""
    is_trained: bool
    trace: LayerTrace | None
    """None for models that are only asked."""
    has_head: bool = True

    def in_stage(self, stage: int) -> int:
        """Parameters, the last stage's mirror of a tied weight among them."""
        shape = self.shape
        ends = 1 if shape.tied or not self.has_head else 2
        layer = (self.parameters - ends * shape.embedding - shape.hidden) // shape.layers
        count = layer * self.layers[stage]
        if stage == 0:
            count += shape.embedding
        if stage == len(self.layers) - 1:
            count += shape.hidden + (shape.embedding if self.has_head else 0)  # with the norm
        return count

    def mirrored_in(self, stage: int) -> int:
        """Of these, what the first stage owns and updates."""
        if stage == len(self.layers) - 1 and self.has_head and self.shape.tied:
            return self.shape.embedding
        return 0


def stages_of(models: TrainingMemory, notes: list[str]) -> Stages | None:
    """None: the shape or size of the policy is not known, or what layers keep of it or of a critic;
    the policy's `layers` and the cap are then unchecked.

    Raises `ValueError` for layers or a cap of live tokens that the run would refuse.
    """
    config = models.config
    pipeline = config.train.pipeline
    sweep = LargestSweep.of(config, models.ranks)
    caps = live_token_caps(
        pipeline.live_tokens, num_stages=pipeline.stages, longest=sweep.micro_batch_tokens
    )
    decoders = _decoders(models, notes)
    if not decoders:
        return None
    live = [min(cap, sweep.tokens) for cap in caps]
    found = []
    for stage in range(pipeline.stages):
        of_stage = _Stage(models, decoders, stage, sweep, live[stage])
        found.append(
            StageEstimate(
                index=stage,
                layers=decoders[0].layers[stage],
                live_tokens=live[stage],
                parts=tuple(of_stage.parts()),
            )
        )
    bubble = expected_bubble(
        [_flops(models, decoders, stage, sweep) for stage in range(pipeline.stages)],
        min(sweep.num_micro_batches, MOST_SIMULATED),
        [cap // sweep.micro_batch_tokens for cap in caps],
    )
    return Stages(
        stages=tuple(found),
        shards=models.ranks,
        num_micro_batches=sweep.num_micro_batches,
        bubble_share=bubble,
    )


def _decoders(models: TrainingMemory, notes: list[str]) -> list[_Decoder]:
    """The policy first. Empty if its shape or size is not known, or what layers keep is not."""
    config, shape, parameters = models.config, models.shape, models.parameters
    if shape is None or parameters is None:
        return []
    pipeline, has_adapter = config.train.pipeline, config.model.lora is not None
    adapters = (models.num_adapter_parameters(notes) or 0) if has_adapter else 0
    each = 4 if has_adapter else 6  # FLOPs, as `FlopModel` counts them
    policy = _Decoder(
        name="policy",
        shape=shape,
        parameters=parameters,
        layers=layers_of_stages(
            () if pipeline.layers == "auto" else pipeline.layers,
            num_layers=shape.layers,
            num_stages=pipeline.stages,
            layer_work=each * shape.layer_matrices + 6 * adapters / shape.layers,
            last_work=each * shape.embedding,
        ),
        is_trained=not has_adapter,
        trace=models.trace(config.model.path, config.model.lora, notes),
    )
    found = [policy]
    if config.algorithm.needs_reference and not has_adapter:
        found.append(dataclasses.replace(policy, name="reference", is_trained=False, trace=None))
    if config.algorithm.needs_teacher and config.model.teacher is not None:
        found += _other("teacher", _read(config.model.teacher, notes), policy)
    if config.algorithm.needs_critic:
        path = config.train.critic.path
        known = (shape, parameters) if path is None else _read(path, notes)
        trace = models.trace(path or config.model.path, None, notes)
        found += _other("critic", known, policy, trace)
    graphs = [one for one in found if one.name in ("policy", "critic")]
    return found if all(one.trace for one in graphs) else []


def _other(
    name: Literal["teacher", "critic"],
    known: tuple[DecoderShape, int] | None,
    policy: _Decoder,
    trace: LayerTrace | None = None,
) -> list[_Decoder]:
    """A model beside the policy, split as the policy is if it has as many layers."""
    if known is None:
        return []
    (shape, parameters), is_critic = known, name == "critic"
    # A critic has no output layer.
    without_head = shape.embedding if is_critic and not shape.tied else 0
    layers = layers_of_stages(
        policy.layers if shape.layers == policy.shape.layers else (),
        num_layers=shape.layers,
        num_stages=len(policy.layers),
        layer_work=shape.layer_matrices,
        last_work=0 if is_critic else shape.embedding,
    )
    other = _Decoder(
        name=name,
        shape=shape,
        parameters=parameters - without_head,
        layers=layers,
        is_trained=is_critic,
        trace=trace,
        has_head=not is_critic,
    )
    return [other]


def _read(path: str, notes: list[str]) -> tuple[DecoderShape, int] | None:
    """Another model. None, and a note, if its shape or size is not known."""
    folder = model_folder(path)
    count = num_parameters(folder, path, notes)
    shape = read_shape(folder, notes) if folder else None
    return None if shape is None or count is None else (shape, count)


class _Stage:
    """The sums of one stage."""

    def __init__(
        self,
        models: TrainingMemory,
        decoders: Sequence[_Decoder],
        stage: int,
        sweep: LargestSweep,
        live_tokens: int,
    ) -> None:
        self._decoders, self._stage = decoders, stage
        self._sweep, self._live = sweep, live_tokens
        self._element = models.element
        self._is_last = stage == models.config.train.pipeline.stages - 1
        self._has_adapter = models.config.model.lora is not None
        self._own = dataclasses.replace(
            models,
            shape=dataclasses.replace(decoders[0].shape, layers=decoders[0].layers[stage]),
            parameters=decoders[0].in_stage(stage),
        )
        """A whole model of this stage's layers."""
        self._adapters = self._own.num_adapter_parameters([]) or 0 if self._has_adapter else 0

    def parts(self) -> list[MemoryPart]:
        at_rest = [part for decoder in self._decoders for part in self._at_rest(decoder)]
        whole = sum(decoder.in_stage(self._stage) for decoder in self._decoders) + self._adapters
        formula = f"all parameters whole during a sweep x {self._element} bytes"
        sweep = [
            memory_part("gathered", whole * self._element, formula),
            *self._activations(),
            self._backward(),
            self._messages(),
        ]
        more = self._summing() - sum(part.size_bytes for part in sweep)
        if more > 0:
            formula = "more than a sweep, while gradients are summed over processes at a step's end"
            sweep.append(memory_part("summing", more, formula))
        return [*at_rest, *sweep]

    def _at_rest(self, decoder: _Decoder) -> list[MemoryPart]:
        """Weights, gradients and optimizer state of a model's stage."""
        count = decoder.in_stage(self._stage)
        mirrored = decoder.mirrored_in(self._stage)
        name = "weights" if decoder.name == "policy" else decoder.name
        what = "parameters with the tied weight's mirror" if mirrored else "parameters"
        parts = [self._own.at_rest(name, count, what, is_trained=decoder.is_trained)]
        prefix = "" if decoder.name == "policy" else f"{decoder.name} "
        if decoder.is_trained:
            formula = "parameters x 4 bytes, whole until the step's end"
            parts.append(memory_part(f"{prefix}gradients", 4 * count, formula))
            parts.append(self._own.optimizer(count - mirrored, "own parameters", prefix))
        elif decoder.name == "policy" and self._adapters:
            shared = self._own.shared
            parts.append(
                memory_part(
                    "adapters",
                    4 * self._adapters // self._own.ranks,
                    f"rank x (in + out) of the targeted matrices x 4 bytes{shared}",
                )
            )
            parts.append(memory_part("gradients", 4 * self._adapters, "adapters x 4 bytes"))
            parts.append(self._own.optimizer(self._adapters, "adapters"))
        return parts

    def _summing(self) -> int:
        """Bytes besides what is there at rest, when FSDP2 comes to the last gradients: those of
        embeddings and output layer, with their input and output of the sum. Those of layers are
        shards by then."""
        policy, ranks = self._decoders[0], self._own.ranks
        if not policy.is_trained:
            return 0
        layers = policy.layers[self._stage] * policy.shape.layer_matrices
        root = policy.in_stage(self._stage) - layers
        # The input, beside the gradients or the output; a single process makes a quotient besides.
        sums = 8 if ranks == 1 else 4
        fresh = self._element if self._element < 4 else 0
        shards = 4 * layers * (1 / ranks - 1)  # less than the whole ones that are counted
        return int(root * (sums + self._element + fresh) + shards)

    def _activations(self) -> list[MemoryPart]:
        """Of the live tokens: as after F, those whose I may be done as it leaves them."""
        after_f = round(sum(self._after_f(one, trace) for one, trace in self._graphs))
        after_i = round(sum(one.layers[self._stage] * trace.waiting for one, trace in self._graphs))
        most = max(after_f, after_i)
        live, first = self._live, self._live
        if self._is_last:
            first = min(self._sweep.micro_batch_tokens, live)
        formula = f"{first} live tokens x {most:,} bytes" + (
            " (inputs and gradients that W needs)" if after_i > after_f else ""
        )
        parts = [memory_part("activations", first * most, formula)]
        if first < live:
            formula = f"{live - first} live tokens x {after_i:,} bytes of inputs and gradients"
            parts.append(memory_part("kept for W", (live - first) * after_i, formula))
        return parts

    @property
    def _graphs(self) -> list[tuple[_Decoder, LayerTrace]]:
        """The models that a sweep differentiates, and what their layers keep."""
        return [(one, one.trace) for one in self._decoders if one.trace is not None]

    def _after_f(self, decoder: _Decoder, trace: LayerTrace) -> float:
        """Bytes per token between F and I."""
        # Behind the layers: the last stage's norm and what enters the output layer; or what left.
        end = trace.ends if self._is_last else self._element * decoder.shape.hidden
        return decoder.layers[self._stage] * trace.saved + end

    def _backward(self) -> MemoryPart:
        """The most that one op takes besides while it runs."""
        sweep, element = self._sweep.micro_batch_tokens, self._element
        shape, policy = self._decoders[0].shape, self._decoders[0]
        trained = policy.is_trained
        choices = {"one layer's gradients": max(one.backward_bytes for _, one in self._graphs)}
        if self._is_last:
            choices["a block of logits, hidden states and the output layer's gradient"] = (
                self._own.logits(shape, sweep)
            )
        # On a CPU a gradient in half precision is widened as a whole before it is added.
        widened = 4 if element < 4 and not self._own.on_cuda else 0
        if trained and (self._stage == 0 or self._is_last):
            choices["the embeddings' or the output layer's gradient, added to its sum"] = (
                element * sweep * shape.hidden + (element + widened) * shape.embedding
            )
        largest = max(
            one.shape.hidden * max(one.shape.feed_forward, one.shape.query)
            for one, _ in self._graphs
        )
        if element < 4:
            # Those of a micro-batch are widened once all are there.
            fresh = policy.layers[self._stage] * shape.layer_matrices if trained else self._adapters
            choices[f"a micro-batch's gradients x {element} bytes, before they are summed"] = (
                element * fresh + widened * largest
            )
        elif trained:
            choices["the largest matrix's gradient"] = element * largest
        formula = max(choices, key=choices.__getitem__)
        return memory_part("backward", choices[formula], formula)

    def _messages(self) -> MemoryPart:
        """To and from its neighbours."""
        hidden = sum(one.shape.hidden for one in self._decoders)
        neighbours = (self._stage > 0) + (not self._is_last)
        size = neighbours * self._sweep.micro_batch_tokens * hidden * self._element
        formula = "hidden states or their gradient, one on the way at each border"
        return memory_part("messages", size, formula)


def _flops(
    models: TrainingMemory, decoders: Sequence[_Decoder], stage: int, sweep: LargestSweep
) -> tuple[float, float, float]:
    """F, I and W of a full micro-batch, all of whose tokens are predicted: 2 FLOPs for each
    parameter of a product, and in F 4 for each width of a query and pair of tokens.

    The output layer's W is in the last stage's I, with the logits that are computed again there.
    """
    config = models.config
    tokens = sweep.micro_batch_tokens
    pairs = tokens * sweep.row_tokens / 2
    f = i = w = 0.0
    for one in decoders:
        in_loss = one.name in ("policy", "critic") or (
            one.name == "reference" and config.algorithm.reference_in_loss
        )
        if not in_loss:
            continue
        layers = one.layers[stage]
        forward = layers * (2 * one.shape.layer_matrices * tokens + 4 * one.shape.query * pairs)
        f += forward
        if one.name != "reference":
            again = forward if config.model.gradient_checkpointing else 0.0
            products = 2.0 * layers * one.shape.layer_matrices * tokens
            i += products + 8 * layers * one.shape.query * pairs + again
            w += products if one.is_trained else 0.0
        if stage == len(one.layers) - 1 and one.has_head:
            product = 2.0 * one.shape.embedding * tokens
            f += product
            if one.name != "reference":
                in_blocks = tokens * one.shape.vocabulary > models.block_elements
                i += product * (1 + in_blocks + one.is_trained)
    return f, i, w
