"""The trainer protocol and the records that cross it. Light: no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rollpacker.core.ids import SampleId
from rollpacker.pipeline.plan.choosers import check_order_name
from rollpacker.spans import Rewritten, Spans, num_outside

if TYPE_CHECKING:
    from torch import Tensor

    from rollpacker.weights.buffer import WeightSource

AUTO_MICRO_BATCH_TOKENS = 4096
"""`train.micro_batch_tokens: auto`, where no sample is longer and nothing speaks for less."""


class TrainerError(RuntimeError):
    """Training cannot go on."""


class TrainerProcessError(TrainerError):
    """A process of the trainer ended. The run can be resumed."""


class RanksLost(TrainerProcessError):
    """A process of the trainer ended, or can be used no more; all have been ended, and
    `Trainer.restore` brings others in their place."""

    def __init__(self, reason: str) -> None:
        """`reason` says in words which process was lost, and how."""
        super().__init__(
            f"{reason}. No update of this step was kept; --resume goes on from the last checkpoint"
        )
        self.reason = reason


class TrainerStateError(TrainerError):
    """The files of a checkpoint cannot be read, or belong to another model."""


class NonFiniteError(TrainerError):
    """A NaN or an infinity in rewards, loss or gradient. No update was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy (`model.*`)."""

    path: str
    """A Hugging Face model folder, or a name on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, float32 on a CPU. With bfloat16 the optimizer keeps float32 master
    weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    chat_template_kwargs: Mapping[str, object] | None = None
    """Passed on to the tokenizer's `apply_chat_template`."""
    quantization: Literal["4bit"] | None = None
    """4bit: the matrices inside the layers are kept as 4-bit NormalFloat codes (bitsandbytes), with
    `model.lora` trained above them, in the trainer and in the engine alike."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (peft) instead of the weights. The engine generates with the same
    adapters; checkpoints hold the merged model and, beside it, the adapter."""
    teacher: str | None = None
    """A model folder or hub name with the same vocabulary, for algorithm.advantage=teacher."""

    def __post_init__(self) -> None:
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                f"quantization={self.quantization} needs model.lora: codes of 4 bits cannot be "
                "trained, an adapter above them can"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (`model.lora.*`). The reference model is then the model without them."""

    rank: int = 16
    alpha: float = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of modules as peft takes them."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be a positive number, not {self.alpha}")
        if not self.target_modules:
            raise ValueError("target_modules must name at least one module, or all-linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The value model of algorithm.advantage=gae (`train.critic.*`)."""

    path: str | None = None
    """Where its body comes from. None: model.path."""
    learning_rate: float = 1e-5
    """Constant: `train.schedule` and its warm-up are the policy's."""
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    """Steps at the beginning in which the critic alone is trained. They count as steps for
    everything else, such as the policy's schedule."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be a positive number, not {self.learning_rate}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError("max_grad_norm must be more than 0, or null for none")
        if self.warmup_steps < 0:
            raise ValueError("warmup_steps must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """The trainer's models in stages, one after the other (`train.pipeline.*`)."""

    stages: int = 1
    """Parts of the layers. Each has train.processes / stages processes, and is sharded over
    them."""
    layers: Literal["auto"] | tuple[int, ...] = "auto"
    """Layers of each stage; auto: stages of about the same work."""
    order: str = "ready"
    """The order of a stage's ops. ready: the first ready op, backwards for inputs first. 1f1b:
    one forward, one backward by turns. zero-bubble: backwards for weights fill in, planned as if
    every op took as long and links nothing. adapted: planned before each sweep for what the last
    steps measured. Else a CSV of torch's format, such as `rollpacker plan --csv` writes, for as
    many micro-batches as each sweep has."""
    live_tokens: int | Literal["auto"] = "auto"
    """Tokens whose activations a stage keeps at most; more of them bridge slower links. auto: two
    micro-batches for each stage from this one to the last."""
    links: Literal["host", "direct", "auto"] = "auto"
    """host: between stages by way of host memory and TCP, which survives lost connections and does
    not hold a stage up. direct: through torch.distributed, on a CPU only. auto: host on CUDA; on a
    CPU direct, and host as long as a link is slow."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of each host over which host links go, such as [eth0, eth1]: the first,
    and another one while it falls silent. Empty: over the address at which processes meet."""
    relayout: Literal["propose", "do", "never"] = "propose"
    """Another split of the layers once a stage is slow, or another order of the processes once the
    network between two of a stage is. propose: in the log. do: between two steps the processes
    start anew so."""

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, not {self.stages}")
        check_order_name(self.order)
        if self.live_tokens != "auto" and self.live_tokens < 1:
            raise ValueError(f"live_tokens must be at least 1, or auto, not {self.live_tokens}")
        if self.layers != "auto" and len(self.layers) != self.stages:
            raise ValueError(
                f"layers={list(self.layers)} must have a number for each of the {self.stages} "
                "stages"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Optimizer and micro-batches (`train.*`)."""

    steps: int | None = None
    """Steps, each a round that is trained on. The long queue is emptied at the end, which can add
    steps. None: until `epochs` are done."""
    updates_per_round: int = 1
    """Optimizer steps that a round feeds, each on an equal share of its prompts. From the second
    one on the policy is no longer the one that sampled: ratios differ from 1, and clips act."""
    epochs: int | None = None
    """Passes over the training data. None: as many as `steps` needs. One of the two must be set."""
    processes: int | None = None
    """Processes of the trainer's own, over which parameters, gradients and optimizer state are
    sharded (FSDP2). They train while the engine generates (stream_trainer). None: the trainer works
    in the run's own process, on the engine's weights. Under `torchrun` its processes are these."""
    replicas: int = 1
    """Whole copies of the model among these processes, each sharded over its part of them. A
    replica computes gradients alone; they are added up over all at the end of a step."""
    colocate: bool = False
    """Engines and the trainer's processes share devices, one process on each, and one engine or its
    share of one. With stream_trainer engines let go of their devices towards the end of a round;
    their samples go on in the others, and replicas begin on the groups that are complete. On
    CUDA whoever has not its turn waits in host memory."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    gradient_sync: Literal["step", "micro-batch"] = "step"
    """With several processes: gradients are added up over them once a step, or after every
    micro-batch, which needs less memory."""
    learning_rate: float = 1e-6
    schedule: str = "constant"
    """constant, linear, cosine, or another schedule of transformers by its name."""
    schedule_options: Mapping[str, float | str] = field(default_factory=dict)
    """Further arguments of that schedule, such as num_cycles."""
    warmup_steps: int = 0
    min_learning_rate_ratio: float = 0.0
    """Where linear and cosine end, as a share of learning_rate."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit: AdamW with moments of 8 bits (bitsandbytes). muon: torch's Muon for the matrices
    inside the layers, AdamW for all else."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    """None: gradients are not clipped."""
    micro_batch_tokens: int | Literal["auto"] = AUTO_MICRO_BATCH_TOKENS
    """Tokens per micro-batch, padding included. One longer sample gets its own. auto: 4096, or what
    the longest sample has, since there must be room for it; in pipeline stages as much less as
    makes a sweep quicker, by the samples' lengths."""
    micro_batches: Literal["auto", "sorted", "packed"] = "auto"
    """packed: rows end to end without padding. sorted: rows of like length, padded to the longest.
    auto: packed, where the model's attention allows it."""
    offload: bool = False
    """Keep optimizer state and gradients in host memory while they are not needed (CUDA)."""
    compile: bool = False
    """Run the layers through torch.compile. If that fails, the run goes on without and says so."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    threads: int | Literal["auto"] = "auto"
    """Torch threads of this process on a CPU. auto: a short measurement picks."""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("set train.steps or train.epochs")
        for name in ("steps", "epochs", "micro_batch_tokens", "processes", "updates_per_round"):
            value = getattr(self, name)
            if value not in (None, "auto") and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.replicas < 1 or (self.processes or 1) % self.replicas:
            raise ValueError(
                f"replicas ({self.replicas}) must divide train.processes "
                f"({self.processes or 'not set'}): each replica has as many of the processes"
            )
        self._check_pipeline()
        if self.optimizer == "adamw_8bit" and (self.processes or 1) > 1:
            raise ValueError(
                "optimizer=adamw_8bit does not go with several processes, whose shards cut its "
                "blocks: set optimizer=adamw, or processes=1"
            )
        if self.schedule != "constant" and self.steps is None:
            raise ValueError(
                f"schedule={self.schedule} needs to know where it ends: set train.steps"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be a positive number, not {self.learning_rate}")
        if self.warmup_steps < 0:
            raise ValueError("warmup_steps must not be negative")
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ValueError("min_learning_rate_ratio must lie between 0 and 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError("weight_decay must be a number from 0 upwards")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError("max_grad_norm must be more than 0, or null for none")
        if self.threads != "auto" and self.threads < 1:
            raise ValueError("threads must be at least 1, or auto")

    def most_micro_batch_tokens(self, longest: int = 0) -> int:
        """Tokens of a micro-batch of several samples, at most, where the longest has so many."""
        if self.micro_batch_tokens != "auto":
            return self.micro_batch_tokens
        most, cap = max(AUTO_MICRO_BATCH_TOKENS, longest), self.pipeline.live_tokens
        return most if cap == "auto" or self.pipeline.stages == 1 else min(most, cap)

    def _check_pipeline(self) -> None:
        stages = self.pipeline.stages
        if stages == 1:
            return
        if (self.processes or 1) % stages:
            raise ValueError(
                f"pipeline.stages ({stages}) must divide train.processes "
                f"({self.processes or 'not set'}): each stage has as many of the processes"
            )
        cap = self.pipeline.live_tokens
        if cap != "auto" and self.micro_batch_tokens != "auto" and cap < self.micro_batch_tokens:
            raise ValueError(
                f"pipeline.live_tokens={cap} is less than a micro-batch may have "
                f"(micro_batch_tokens={self.micro_batch_tokens}): raise it, or lower "
                "micro_batch_tokens"
            )
        for name, has, wanted in (
            ("replicas", self.replicas, 1),
            ("compile", self.compile, False),
            ("gradient_sync", self.gradient_sync, "step"),
        ):
            if has != wanted:
                raise ValueError(
                    f"{name}={has} does not go with pipeline.stages={stages}: set it to {wanted}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A response whose tokens other models are asked about, before there are advantages."""

    sample: SampleId
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    given: Spans = ()
    """Spans of the response's tokens that the model was given and did not draw."""
    rewritten: Rewritten = ()
    """Where in them it saw another prompt: each is trained on as a row of its own (`rows`)."""

    @property
    def num_targets(self) -> int:
        """Number of drawn tokens."""
        return num_outside(len(self.response_tokens), self.given)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of a response's drawn tokens, one number for each, that advantages may depend on
    besides rewards. A field is None where the algorithm does not need it. Log-probs are at the
    sampling temperature."""

    log_probs: tuple[float, ...] | None = None
    """The policy's own log-probs, as the trainer computes them."""
    ref_log_probs: tuple[float, ...] | None = None
    """The reference model's log-probs."""
    teacher_log_probs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    """The critic's values of the state before each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample(ScoreRequest):
    """One sample as the trainer takes it, the same for all algorithms."""

    rollout_log_probs: tuple[float, ...]
    """The engine's log-probs, one per drawn token, as in all fields that follow."""
    advantage: float | tuple[float, ...]
    """One number for all drawn tokens, or one each."""
    token_weight: float
    """Weight of each drawn token's loss in the step's sum, with the step's *global* denominator
    already in it: 1 / (tokens of the whole step) for token-mean. Any split of the samples then adds
    up to the same gradient. A sample that is accumulated before the denominator is known has
    another one in it, and `Trainer.rescale` makes up for it."""
    ref_log_probs: tuple[float, ...] | None = None
    """The reference model's log-probs, if they were asked for before."""
    loss_weight: float = 1.0
    """Factor in `token_weight` that undoes the selection by length; the rest of it is the
    denominator."""
    values: tuple[float, ...] | None = None
    """The critic's estimates that the advantages were made of."""
    returns: tuple[float, ...] | None = None
    """Values that the critic should have given for the drawn tokens. None: there is no critic."""
    old_log_probs: tuple[float, ...] | None = None
    """The trainer's own under the weights that sampled. None: the policy was not updated since, so
    they are what it says now."""

    @property
    def advantages(self) -> tuple[float, ...]:
        """The advantage as a tuple: of all drawn tokens together, or one number each."""
        return self.advantage if isinstance(self.advantage, tuple) else (self.advantage,)


class Trainer(Protocol):
    """`accumulate` any number of times, then `apply`: a step of one update. With more, each but the
    last is `accumulate` and `update`. `rescale` comes between two calls of `accumulate` if the
    first samples had to be weighted provisionally."""

    @property
    def version(self) -> int:
        """Steps applied so far, however many updates each had."""
        ...

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """Score responses for the advantages, under the weights as they are, in the requests'
        order. It is not called if the algorithm needs no scores. `replicas` are those that
        compute; None: all."""
        ...

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        """Add these samples' share of the step's gradient. `replicas`: those that compute; None:
        all.

        Raises `NonFiniteError` that names the samples if the loss is NaN or infinite. Of a model in
        pipeline stages, the update does.
        """
        ...

    async def rescale(self, factor: float) -> None:
        """Multiply what was accumulated so far, gradient and loss, by `factor`."""
        ...

    async def update(self) -> Mapping[str, float]:
        """An update of a step that is not its last: clip, step, forget the gradients; `version`
        and the schedules stay. Returns and raises what `apply` does."""
        ...

    async def apply(self) -> Mapping[str, float]:
        """The last update of a step: clip, step, forget the gradients; `version` goes up by one.

        Returns the update's metrics, named as in `docs/metrics.md`. Raises `NonFiniteError`, with
        weights and optimizer untouched and the gradients forgotten, if the gradient is NaN or
        infinite.
        """
        ...

    async def hand_over(self) -> HandOver:
        """The weights for the engine, and a hash of a fixed sample of them."""
        ...

    async def offload(self) -> None:
        """Let go of the devices' memory: it all waits in host memory until `reload`. Idempotent."""
        ...

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        """Take it back, bit for bit, as far as it was let go of. `replicas`: those that do; None:
        all. Only these may be asked for anything, and only all of them for what is joint."""
        ...

    def save(self, folder: Path) -> None:
        """Write `folder/model` (a Hugging Face folder) and `folder/trainer` (safetensors, JSON)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore all of it from what `save` wrote, bit for bit at the same number of processes."""
        ...

    def how_lost(self) -> str | None:
        """Why processes of it can be used no more, in words, if that shows without a call. None:
        they live, as far as is known, or there are none. Called between calls."""
        ...

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        """After `RanksLost`, or where `how_lost` says so: start new processes, and bring them to
        where `version` was reached, from a folder that `save` wrote; None: from the beginning.
        Gradients since then are lost. `tell` is called now and then, as a sign of life, in any
        thread. Raises `RanksLost` if one of the new ones ends meanwhile.
        """
        ...

    def close(self) -> None:
        """End threads and processes. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Weights on their way to an engine."""

    weights: Mapping[str, Tensor] | WeightSource | None
    """The weights that training changes, by the names of the model's parameters. None: the
    engine reads the trainer's own tensors. Tensors are valid until the next call to the trainer;
    a source is until the next `hand_over`, so that an engine which joins meanwhile can read it
    too."""
    probe: str | None
    """SHA-256 of a fixed sample of their elements (`weight_probe`), in the engine's dtype. None:
    the engine's tensors are the trainer's, so there is nothing to compare."""
