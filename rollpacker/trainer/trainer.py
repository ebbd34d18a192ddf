"""The interface `Trainer` and the records that are passed through it. No torch is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rollpacker.bounds import check_at_least, check_positive, check_within
from rollpacker.core.ids import SampleId
from rollpacker.pipeline.plan.choosers import check_order_name
from rollpacker.spans import Rewritten, Spans, num_outside

if TYPE_CHECKING:
    from torch import Tensor

    from rollpacker.weights.buffer import WeightSource
    from rollpacker.weights.delivery import Delivery

AUTO_MICRO_BATCH_TOKENS = 4096
"""Default of `train.micro_batch_tokens`. If that setting is `auto`, a micro-batch may have this
many tokens, or as many as the longest sample if that is longer."""


class TrainerError(RuntimeError):
    """Raised when training cannot go on; the base of the trainer's errors."""


class TrainerProcessError(TrainerError):
    """A process of the trainer ended. The run can be resumed."""


class RanksLost(TrainerProcessError):
    """A process of the trainer ended, or can no longer be used. All of its processes have then been
    ended, and `Trainer.restore` starts new ones."""

    def __init__(self, reason: str) -> None:
        """Store the message; `reason` says in words which process was lost, and how."""
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
    """Settings of the policy, which is the model that is trained (`model.*`)."""

    path: str
    """A Hugging Face model folder, or a name on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the weights. auto: bfloat16 on CUDA, float32 on a CPU. With bfloat16 the optimizer
    keeps float32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    chat_template_kwargs: Mapping[str, object] | None = None
    """Further keyword arguments for the tokenizer's `apply_chat_template`. None: there are none."""
    quantization: Literal["4bit"] | None = None
    """How frozen weights are kept. 4bit: the matrices inside the layers as 4-bit NormalFloat
    codes (bitsandbytes), in trainer and engine alike; only adapters (`model.lora`) are then
    trained. None: unquantized."""
    lora: LoraConfig | None = None
    """Settings of low-rank adapters (peft), which are then trained instead of the weights. None:
    the weights are trained. The engine generates with the same adapters; checkpoints hold the
    merged model and, beside it, the adapter."""
    teacher: str | None = None
    """The teacher of algorithm.advantage=teacher: a folder or hub name of a model with the policy's
    vocabulary. None: there is no teacher."""

    def __post_init__(self) -> None:
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                f"quantization={self.quantization} needs model.lora: codes of 4 bits cannot be "
                "trained, an adapter above them can"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Settings of low-rank adapters (`model.lora.*`). The reference model is then the
    model without its adapters."""

    rank: int = 16
    alpha: float = 32.0
    """The product of an adapter's two matrices is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get adapters, as in peft's `target_modules`. all-linear: every
    linear layer but the output layer."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rank")
        check_positive(self, "alpha")
        if not self.target_modules:
            raise ValueError("target_modules must name at least one module, or all-linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Settings of the critic, the value model of algorithm.advantage=gae (`train.critic.*`)."""

    path: str | None = None
    """Folder or hub name of the model whose layers the critic starts from. None: model.path."""
    learning_rate: float = 1e-5
    """The critic's learning rate. It is constant: `train.schedule` and `train.warmup_steps` are for
    the policy alone."""
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    """Steps at the beginning in which the critic alone is trained. They count as steps for
    everything else, such as the policy's schedule."""

    def __post_init__(self) -> None:
        check_positive(self, "learning_rate")
        check_positive(self, "max_grad_norm", otherwise="null for none")
        check_at_least(self, 0, "warmup_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Settings of the stages into which the models' layers are split (`train.pipeline.*`)."""

    stages: int = 1
    """Number of pipeline stages; 1: the models are not split. Each stage has train.processes /
    stages processes, over which its layers are sharded."""
    layers: Literal["auto"] | tuple[int, ...] = "auto"
    """Number of layers in each stage. auto: a split into stages of about the same work."""
    order: str = "ready"
    """The order in which a stage runs its ops: forwards, backwards for inputs and backwards for
    weights. ready: whichever op is ready first, backwards for inputs before others. 1f1b: a forward
    and a backward by turns. zero-bubble: backwards for weights fill the waits, planned as if all
    ops took the same time and messages none. adapted: planned before each sweep (an update's
    micro-batches) from the times of the last steps. Any other value: a CSV file in torch's format,
    such as `rollpacker plan --csv` writes, for as many micro-batches as each sweep has."""
    live_tokens: int | Literal["auto"] = "auto"
    """The most tokens whose activations a stage keeps at once; with more, a stage waits
    less for slow links. auto: the tokens of two micro-batches for the stage itself and
    for each stage behind it."""
    links: Literal["host", "direct", "auto"] = "auto"
    """How stages send tensors to each other. host: through host memory and TCP, which survives lost
    connections and does not hold a stage up. direct: through torch.distributed, on a CPU only.
    auto: host on CUDA; on a CPU direct, and host for as long as a link is slow."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of each host for links through host memory, such as [eth0, eth1]. The
    first is used, and another while the first is silent. Empty: the address by which the trainer's
    processes find each other."""
    relayout: Literal["propose", "do", "never"] = "propose"
    """What is done about a slow stage, where another split of the layers would be quicker, or a
    slow link, where another order of the processes would be. propose: the change is proposed in the
    log. do: the processes are started anew with it between two steps. never: nothing."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "stages")
        check_order_name(self.order)
        check_at_least(self, 1, "live_tokens", otherwise="auto")
        if self.layers != "auto" and len(self.layers) != self.stages:
            raise ValueError(
                f"layers={list(self.layers)} must have a number for each of the {self.stages} "
                "stages"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of training: steps, processes, optimizer and micro-batches (`train.*`)."""

    steps: int | None = None
    """Number of steps, each of which trains on one round of generated samples. Prompts that were
    put off to later rounds are trained on at the end, which can add steps. None: until `epochs` are
    done."""
    updates_per_round: int = 1
    """Number of optimizer updates per step, each on an equal share of its prompts. From the
    second update on the policy is no longer the one that sampled: importance ratios differ
    from 1 and may be clipped."""
    epochs: int | None = None
    """Passes over the training data. None: as many as `steps` needs. Not both can be None."""
    processes: int | None = None
    """Number of the trainer's own processes, over which parameters, gradients and optimizer state
    are sharded (FSDP2). With stream_trainer.enabled they train while the engine generates. None:
    the trainer works in the run's own process, on the engine's weights. Under `torchrun` the
    processes are those that torchrun started."""
    replicas: int = 1
    """Number of whole copies of the model, each sharded over its share of the trainer's processes.
    A replica computes gradients alone; they are added up over all replicas at the end of a step."""
    colocate: bool = False
    """Whether engines and the trainer's processes share devices: each device then has one trainer
    process, and an engine or a part of one. If training begins during generation (stream_trainer),
    engines leave their devices towards the end of a round; their samples go on in other engines,
    and replicas train on prompts whose samples are all done. On CUDA, trainer and engine wait in
    host memory for their turn."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    gradient_sync: Literal["auto", "step", "micro-batch"] = "auto"
    """When gradients are added up over several processes, in float32. step: once a step; until then
    each process keeps whole gradients, 4 bytes for every parameter. micro-batch: after every
    micro-batch; each process keeps its share of them, and more is sent, which a slow network makes
    dear. auto: micro-batch, and with pipeline stages step."""
    learning_rate: float = 1e-6
    schedule: str = "constant"
    """How the learning rate changes over the steps: constant, linear, cosine, or another schedule
    of transformers by its name."""
    schedule_options: Mapping[str, float | str] = field(default_factory=dict)
    """Further arguments of `schedule`, such as num_cycles."""
    warmup_steps: int = 0
    min_learning_rate_ratio: float = 0.0
    """Final learning rate of the schedules linear and cosine, as a share of learning_rate."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """The optimizer. adamw: AdamW. adamw_8bit: AdamW with moments of 8 bits (bitsandbytes). muon:
    torch's Muon for the matrices inside the layers, AdamW for all else."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    """Largest norm of the gradient. A gradient with a larger norm is scaled down to this one. None:
    gradients are never scaled down."""
    micro_batch_tokens: int | Literal["auto"] = AUTO_MICRO_BATCH_TOKENS
    """Largest number of tokens of a micro-batch, padding included; a longer sample gets a
    micro-batch of its own. auto: 4096, or the length of the longest sample if that is more. On CUDA
    processes of the trainer (`processes`) take two, four, eight or sixteen times as many if their
    memory has room, by --dry-run's estimate, at the start; with pipeline stages fewer tokens if
    that makes an update quicker, by the samples' lengths."""
    micro_batches: Literal["auto", "sorted", "packed"] = "auto"
    """How samples lie in a micro-batch. packed: end to end without padding. sorted: samples of like
    length, padded to the longest. auto: packed, if the model's attention allows it."""
    offload: bool = False
    """Keep optimizer state and gradients in host memory while they are not
    needed. Only with CUDA."""
    compile: bool = False
    """Run the layers through torch.compile. If that fails, the run goes on without and says so."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    threads: int | Literal["auto"] = "auto"
    """Number of torch's threads on a CPU in the run's own process. auto: chosen by a
    measurement."""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("set train.steps or train.epochs")
        check_at_least(self, 1, "steps", "epochs", "micro_batch_tokens", "processes")
        check_at_least(self, 1, "updates_per_round")
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
        check_positive(self, "learning_rate")
        check_at_least(self, 0, "warmup_steps", "weight_decay")
        check_within(self, "[0, 1]", "min_learning_rate_ratio")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        check_positive(self, "max_grad_norm", otherwise="null for none")
        check_at_least(self, 1, "threads", otherwise="auto")

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether each of several processes keeps whole gradients until a step's end."""
        stages = self.pipeline.stages > 1
        return self.gradient_sync == "step" or (self.gradient_sync == "auto" and stages)

    def most_micro_batch_tokens(self, longest: int = 0) -> int:
        """Return the most tokens that a micro-batch of several samples may have, if the longest
        sample has `longest` tokens. With pipeline stages it is not above `pipeline.live_tokens`."""
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
            if has not in (wanted, "auto"):
                raise ValueError(
                    f"{name}={has} does not go with pipeline.stages={stages}: set it to {wanted}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A response for which the models compute log-probs and values (`TokenScores`), before
    advantages are computed from these."""

    sample: SampleId
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    given: Spans = ()
    """Spans of response tokens that the model was given, such as a tool's result, and did not
    sample. They are not trained on."""
    rewritten: Rewritten = ()
    """Positions in the response at which the chat template rewrote the dialogue so far,
    each with the prompt that the model saw from there on. What follows each position is
    trained on as a separate row."""

    @property
    def num_targets(self) -> int:
        """Number of response tokens that the model sampled, which are those to train on."""
        return num_outside(len(self.response_tokens), self.given)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Numbers for each response token that the model sampled, on which advantages may depend
    besides rewards. A field is None if the algorithm does not need it. Log-probs are at the
    sampling temperature."""

    log_probs: tuple[float, ...] | None = None
    """The policy's own log-probs, as the trainer computes them."""
    ref_log_probs: tuple[float, ...] | None = None
    """The reference model's log-probs."""
    teacher_log_probs: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None
    """The critic's value of the text before each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample(ScoreRequest):
    """A sample to train on, with advantage and loss weight, in one form for all algorithms."""

    rollout_log_probs: tuple[float, ...]
    """The engine's log-prob of each sampled token."""
    advantage: float | tuple[float, ...]
    """The advantage: one number for all sampled tokens, or one per sampled token."""
    token_weight: float
    """Factor of each sampled token's loss in the step's loss. It contains the step's *global*
    denominator, such as 1 / (tokens of the whole step) for token-mean, so any split of the samples
    adds up to the same gradient. A sample that is accumulated before the denominator is known has a
    provisional weight, which `Trainer.rescale` corrects."""
    ref_log_probs: tuple[float, ...] | None = None
    """The reference model's log-probs, if advantages needed them. None: they did not."""
    loss_weight: float = 1.0
    """Factor of `token_weight` that corrects for a round's preference for short responses; the
    other factor is the denominator's. 1: no correction."""
    values: tuple[float, ...] | None = None
    """The critic's values from which the advantages come, per sampled token. None: no critic."""
    returns: tuple[float, ...] | None = None
    """The values that the critic is trained towards, per sampled token. None: no critic."""
    old_log_probs: tuple[float, ...] | None = None
    """The trainer's log-probs under the weights that sampled. None: the policy was not updated
    since, so its present log-probs are the same."""

    @property
    def advantages(self) -> tuple[float, ...]:
        """The advantage as a tuple: one number for all sampled tokens, or one per sampled token."""
        return self.advantage if isinstance(self.advantage, tuple) else (self.advantage,)


class Trainer(Protocol):
    """The calls by which the driver (the run's main loop) trains the policy. A step is any
    number of calls of `accumulate`, then `apply`; with several updates per step, each but the
    last ends with `update`. `rescale` corrects the step's gradient if loss weights given to
    `accumulate` were provisional."""

    @property
    def version(self) -> int:
        """Number of steps that the weights have had. Several updates in a step count as one."""
        ...

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """Return scores of the responses under the present weights, in the requests' order;
        advantages are computed from them. Not called if the algorithm needs no scores. `replicas`
        are the numbers of the replicas that compute; None: all."""
        ...

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        """Add these samples' share of the step's gradient. `replicas` are the numbers of the
        replicas that compute; None: all. Raises `NonFiniteError`, which names the samples, if a
        loss is NaN or infinite. With pipeline stages, the update raises that error instead."""
        ...

    async def rescale(self, factor: float) -> None:
        """Multiply the gradient and the loss that were accumulated so far by `factor`, which
        corrects provisional loss weights."""
        ...

    async def update(self) -> Mapping[str, float]:
        """Make an update that is not the step's last: clip the gradients, step the optimizer, drop
        the gradients. `version` and the schedules stay. Returns the update's metrics, and raises
        `NonFiniteError` as `apply` does."""
        ...

    async def apply(self) -> Mapping[str, float]:
        """Make the step's last update: clip the gradients, step the optimizer, drop the gradients,
        and add one to `version`. Returns the update's metrics, named as in `docs/metrics.md`.
        Raises `NonFiniteError`, with weights and optimizer untouched and the gradients dropped, if
        the gradient is NaN or infinite."""
        ...

    @property
    def holders(self) -> tuple[int, ...]:
        """Ids of the processes that each hold a part of the weights, and together all. They are the
        senders of a delivery, in this order. Processes that were started anew have others."""
        ...

    async def hand_over(self, delivery: Delivery | None = None) -> HandOver:
        """Return the weights for the engine, with a hash of a fixed sample of their elements. With
        `delivery`, send them to the engines that take part in it, which must receive them at the
        same time. Raises `UndeliveredError` if not all engines took them."""
        ...

    async def offload(self) -> None:
        """Move all that the trainer holds in its devices' memory to host memory,
        until `reload`. Idempotent."""
        ...

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        """Move what `offload` moved back to the devices of these replicas (None: of all), bit for
        bit. Only reloaded replicas may be called; a call of all needs all of them reloaded."""
        ...

    def save(self, folder: Path) -> None:
        """Write `folder/model` (a Hugging Face folder) and `folder/trainer` (safetensors, JSON)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore model, optimizer and version from what `save` wrote. With the same number of
        processes, that is exact to the bit."""
        ...

    def how_lost(self) -> str | None:
        """Return in words why processes of the trainer can no longer be used, if that shows without
        calling them. None: all are alive as far as is known. To be called between other calls."""
        ...

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        """Start new processes after `RanksLost`, or when `how_lost` gives a reason, and bring
        them to the present `version`, from the folder `checkpoint` that `save` wrote (None:
        from the run's beginning). Gradients of the open step are lost. `tell` is called now
        and then, in any thread, to show that the work goes on. Raises `RanksLost` if a new
        process ends meanwhile."""
        ...

    def close(self) -> None:
        """End the trainer's threads and processes. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Weights that an engine is to take over, and a hash by which the engine can check its copy."""

    weights: Mapping[str, Tensor] | WeightSource | None
    """The weights that training changes, by the names of the model's parameters, or a source to
    read them from. None: the engine reads the trainer's own tensors, or they were delivered. Given
    tensors are valid until the next call to the trainer, a source until the next `hand_over`, so
    that an engine which joins meanwhile can read it too."""
    probe: str | None
    """SHA-256 of a fixed sample of the weights' elements (`weight_probe`), by which
    an engine checks its copy. None: the engine's tensors are the trainer's, so
    there is nothing to compare."""
    text: tuple[int, ...] = ()
    """Tokens of which engines that compute with code of their own must give the trainer's log-probs
    (`Engine.compare`). Empty: the hash is enough, or there is one copy of the weights."""
    log_probs: tuple[float, ...] = ()
    """The trainer's log-probs of the tokens of `text` from the second one on."""
    is_delivered: bool = False
    """Whether the weights went straight to the engines of that time."""
    host_bytes: int = 0
    """Bytes that were written to host memory which is neither the trainer's nor an engine's, for
    this hand-over. The buckets of a delivery do not count: they are where the weights are, on a CPU
    in host memory too, and have room for a part."""
