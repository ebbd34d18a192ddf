"""What a process that trains holds in memory, part by part.

Exact are weights, gradients, optimizer state and adapters, by formulas. Activations are what the
model's layers keep when they run without data (`trainer/layer_trace.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollpacker.trainer.batch_arithmetic import (
    batch_arithmetic,
    longest_sample,
    most_micro_batch_tokens,
)
from rollpacker.trainer.layer_trace import LayerTrace, TraceSettings, trace_layers
from rollpacker.trainer.model_shape import DecoderShape, model_folder, num_parameters, read_shape

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.trainer.trainer import LoraConfig

GIB = 1 << 30
LOGIT_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""`logprobs.BLOCK_ELEMENTS`, which this module cannot import without torch."""

BYTES_OF_8BIT = 1 + 4 / 256
"""A moment of 8 bits: its code, and a float32 scale for every 256."""
BYTES_OF_4BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""An element of a 4-bit matrix: its code, a code of 8 bits for the scale of every 64, and a float32
scale for every 256 of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One line of the estimate."""

    name: str
    size_bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What a process that trains holds, at the peak of a step."""

    config: RunConfig
    shape: DecoderShape | None
    parameters: int | None
    element: int
    """Bytes of a number in the dtype that is computed in."""
    on_cuda: bool

    @property
    def block_elements(self) -> int:
        """Logits that are computed at a time."""
        return LOGIT_BLOCK_ELEMENTS["cuda" if self.on_cuda else "cpu"]

    @property
    def ranks(self) -> int:
        """Processes that the model, or a stage of it, is sharded over."""
        train = self.config.train
        return (train.processes or 1) // train.replicas // train.pipeline.stages

    @property
    def kept(self) -> int:
        """Bytes of a trained parameter at rest: shards are float32, which makes them their own
        masters."""
        return 4 if (self.config.train.processes or 1) > 1 else self.element

    @property
    def shared(self) -> str:
        return f" / {self.ranks} processes" if self.ranks > 1 else ""

    def parts(self, notes: list[str]) -> list[MemoryPart]:
        """All of them, as far as the model is known; `notes` say what is not."""
        parts: list[MemoryPart] = []
        if self.parameters is not None:
            parts += self._policy(self.parameters, notes)
            parts += self._other_models(self.parameters, notes)
        if self.shape is not None:
            parts += self._working_memory(self.shape, notes)
        return parts

    def trace(self, path: str, lora: LoraConfig | None, notes: list[str]) -> LayerTrace | None:
        """What the layers of a model hold in the largest micro-batch of rows that are as long as
        they may be. None if that is not known; `notes` then say why."""
        folder = model_folder(path)
        if folder is None:
            return None
        row = longest_sample(self.config) - 1  # the last token does not go through the model
        settings = TraceSettings(
            dtype="bfloat16" if self.element < 4 else "float32",
            checkpointing=self.config.model.gradient_checkpointing,
            lora=lora,
            rows=max(self.micro_batch_tokens // row, 1),
            row_tokens=row,
        )
        return trace_layers(folder, settings, notes)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        return min(
            max(most_micro_batch_tokens(self.config), longest_sample(self.config) - 1),
            batch_arithmetic(self.config).max_trained_tokens,
        )

    def policy_weights(self, name: str, parameters: int) -> MemoryPart:
        """The policy's weights, codes of 4 bits where it is quantized."""
        coded = self._coded_matrices()
        if not coded:
            quantized = self.config.model.quantization is not None
            what = "not quantized, so at most: parameters" if quantized else "parameters"
            is_trained = self.config.model.lora is None
            return self.at_rest(name, parameters, what, is_trained=is_trained)
        size = (parameters - coded) * self.kept + coded * BYTES_OF_4BIT
        formula = f"layers' matrices x {BYTES_OF_4BIT:.3f} bytes, the rest x {self.kept} bytes"
        return memory_part(name, int(size), formula)

    def _coded_matrices(self) -> int:
        if self.config.model.quantization is None or self.shape is None:
            return 0
        return self.shape.layers * self.shape.layer_matrices

    def _policy(self, parameters: int, notes: list[str]) -> list[MemoryPart]:
        parts = [self.policy_weights("weights", parameters)]
        if self.config.model.quantization is not None and self.shape is None:
            notes.append(
                "the weights are counted as if they were not quantized: how many of them are "
                "matrices in layers is not known without its config.json"
            )
        elif self.config.model.quantization is not None:
            whole = text_of_bytes(parameters * self.element)
            notes.append(f"while it loads, host memory holds the whole model, {whole}")
        if self.config.model.lora is None:
            return parts + self.trained(parameters, "parameters", self.kept)
        adapters = self.num_adapter_parameters(notes)
        if adapters is None:
            return parts
        formula = f"rank x (in + out) of the targeted matrices x 4 bytes{self.shared}"
        parts.append(memory_part("adapters", adapters * 4 // self.ranks, formula))
        return parts + self.trained(adapters, "adapters", 4)

    def at_rest(
        self, name: str, count: int, what: str = "parameters", *, is_trained: bool = True
    ) -> MemoryPart:
        """So many parameters between two calls."""
        kept = self.kept if is_trained else self.element
        return memory_part(name, count * kept // self.ranks, f"{what} x {kept} bytes{self.shared}")

    def trained(self, count: int, what: str, kept: int, *, prefix: str = "") -> list[MemoryPart]:
        """What so many parameters need besides for being trained."""
        whole = self.ranks > 1 and self.config.train.gradient_sync == "step"
        gradients, shared = (count * 4, "") if whole else (count * 4 // self.ranks, self.shared)
        parts = [memory_part(f"{prefix}gradients", gradients, f"{what} x 4 bytes{shared}")]
        parts.append(self.optimizer(count, what, prefix))
        if kept < 4:
            parts.append(memory_part(f"{prefix}master", count * 4, f"{what} x 4 bytes"))
        return parts

    def optimizer(self, count: int, what: str, prefix: str = "") -> MemoryPart:
        """Its state of so many parameters."""
        matrices = 0
        if self.config.train.optimizer == "muon" and self.shape is not None:
            in_layers = self.shape.layers * self.shape.layer_matrices
            matrices = count if what == "adapters" else min(in_layers, count)
        if self.config.train.optimizer == "adamw_8bit":
            size = int(2 * count * BYTES_OF_8BIT)
            formula = f"{what} x 2 moments x {BYTES_OF_8BIT:.3f} bytes"
            return memory_part(f"{prefix}optimizer", size, formula)
        formula = f"{what} x 2 moments x 4 bytes{self.shared}"
        if matrices:
            formula += ", one moment for the matrices in layers (muon)"
        return memory_part(f"{prefix}optimizer", (8 * count - 4 * matrices) // self.ranks, formula)

    def num_adapter_parameters(self, notes: list[str]) -> int | None:
        """None if the model's shape is unknown. Not counted are modules whose names say nothing of
        their size; `notes` name them."""
        lora, shape = self.config.model.lora, self.shape
        assert lora is not None
        if shape is None:
            return None
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
            parts.append(self.at_rest("reference", parameters, is_trained=False))
        if algorithm.needs_teacher and model.teacher is not None:
            teacher = num_parameters(model_folder(model.teacher), model.teacher, notes)
            if teacher is not None:
                parts.append(self.at_rest("teacher", teacher, "its parameters", is_trained=False))
        if algorithm.needs_critic:
            parts += self._critic(parameters, notes)
        return parts

    def _critic(self, parameters: int, notes: list[str]) -> list[MemoryPart]:
        path, shape = self.config.train.critic.path, self.shape
        count: int | None = parameters
        if path is not None:
            folder = model_folder(path)
            count = num_parameters(folder, path, notes)
            shape = read_shape(folder, notes) if folder else None
        if count is None:
            return []
        if shape is not None and not shape.tied:
            count -= shape.embedding
        parts = [self.at_rest("critic", count, "parameters without output layer")]
        return parts + self.trained(count, "its parameters", self.kept, prefix="critic ")

    def _working_memory(self, shape: DecoderShape, notes: list[str]) -> list[MemoryPart]:
        """What a micro-batch takes while its backward pass begins."""
        model, tokens = self.config.model, self.micro_batch_tokens
        trace = self.trace(model.path, model.lora, notes)
        if trace is None:
            return []
        layer, ends = round(trace.saved), round(trace.ends)
        size = shape.layers * layer + ends
        formula = f"(layers x {layer} + {ends}) bytes"
        if self.config.algorithm.needs_critic:
            size, formula = 2 * size, f"{formula}, twice (critic)"
        parts = [memory_part("activations", tokens * size, f"{tokens} tokens x {formula}")]
        if self._coded_matrices():
            largest = shape.hidden * max(shape.feed_forward, shape.query)
            formula = f"the largest matrix while it is used x {self.element} bytes"
            parts.append(memory_part("decoded", largest * self.element, formula))
        if self.ranks > 1:
            root = shape.embedding * (1 if shape.tied else 2)
            parts.append(
                memory_part(
                    "gathered",
                    (root + 2 * shape.layer_matrices) * self.element,
                    f"whole embeddings, output layer and two layers x {self.element} bytes",
                )
            )
        logits, backward = self.logits(shape, tokens), trace.backward_bytes
        formula = (
            f"a block of logits (at most {self.block_elements:,}), hidden states and the output "
            "layer's gradient"
            if logits >= backward
            else "one layer's activations and gradients"
        )
        return [*parts, memory_part("backward", max(logits, backward), formula)]

    def logits(self, shape: DecoderShape, tokens: int) -> int:
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


def memory_part(name: str, size_bytes: int, formula: str) -> MemoryPart:
    """A part whose size is rounded down to whole bytes."""
    return MemoryPart(name=name, size_bytes=int(size_bytes), formula=formula)


def text_of_bytes(size_bytes: int) -> str:
    """The size as text, in the largest unit that fits."""
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / 1024:.1f} KiB"
