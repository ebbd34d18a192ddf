"""The trainer of one device: a policy-gradient step in length-sorted micro-batches.

It meets `train.base.Trainer` and knows no algorithm: the per-token loss is a row of `algo.table`,
advantages and weights come with the samples. The model is shared with the engine: it stays in eval
mode, and updates go into the same storage. Torch works in a thread of its own, so the caller's
event loop stays free.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from rollpacker.algo.base import AlgorithmConfig
from rollpacker.algo.table import ALGORITHMS
from rollpacker.trainer import checkpoint
from rollpacker.trainer.base import NonFiniteError, TrainConfig, TrainerError, TrainSample
from rollpacker.trainer.batches import MicroBatch, collate, plan_micro_batches
from rollpacker.trainer.logprobs import response_log_probs
from rollpacker.trainer.optimizer import MasterAdamW
from rollpacker.trainer.schedule import learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Result = TypeVar("Result")


@dataclass(slots=True)
class _StepSums:
    """What the step's micro-batches added up to."""

    response_tokens: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    max_difference: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value


class TorchTrainer:
    """One model on one device. `accumulate` and `apply` must not overlap; the driver awaits each.

    `temperature` is the sampling temperature: log-probabilities are taken at it. `total_steps` is
    where the linear and cosine schedules end. With `kl_coef` > 0 a frozen copy of the model *as
    given* is the reference, so build the trainer from the run's first model and `load` afterwards.
    `tokenizer`, if given, is saved with the model. `threads` is torch's number of threads for this
    trainer's work on a CPU.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        config: TrainConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        total_steps: int | None,
        pad_token_id: int,
        gradient_checkpointing: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        threads: int | None = None,
    ) -> None:
        if config.schedule != "constant" and total_steps is None:
            raise ValueError(
                f"train.schedule={config.schedule} needs to know where it ends: set train.steps"
            )
        assert temperature > 0, temperature
        self.version = 0
        self.model = model.eval()
        self._config = config
        self._algorithm = algorithm
        self._loss = ALGORITHMS[algorithm.name].loss
        self._temperature = temperature
        self._total_steps = total_steps
        self._pad_token_id = pad_token_id
        self._tokenizer = tokenizer
        self._reference = _frozen_copy(model) if algorithm.kl_coef > 0 else None
        self._checkpointed_layers = _enable_checkpointing(model) if gradient_checkpointing else []
        self._optimizer = MasterAdamW(
            model, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        self._sums = _StepSums()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer",
            initializer=torch.set_num_threads if threads is not None else None,
            initargs=(threads,) if threads is not None else (),
        )

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """See `Trainer`. Also raises `NonFiniteError` for an advantage that is no finite number."""
        await self._in_thread(lambda: self._accumulate(list(samples)))

    async def rescale(self, factor: float) -> None:
        """See `Trainer`."""
        await self._in_thread(lambda: self._rescale(factor))

    async def apply(self) -> Mapping[str, float]:
        """See `Trainer`. Means are over response tokens; `train/tokens` and `train/padded_tokens`
        count what went through the model, without and with padding. Raises `TrainerError` if
        nothing was accumulated."""
        return await self._in_thread(self._apply)

    def save(self, folder: Path) -> None:
        state = {"version": self.version, "total_steps": self._total_steps}
        checkpoint.save_model(self.model, self._tokenizer, folder / "model")
        checkpoint.save_trainer(self._optimizer.state(), state, folder / "trainer")

    def load(self, folder: Path) -> None:
        """See `Trainer`. Raises `TrainerError` if what lies there is not this model's."""
        checkpoint.load_model_weights(self.model, folder / "model")
        tensors, state = checkpoint.load_trainer(folder / "trainer")
        self._optimizer.load_state(tensors)
        self._sums = _StepSums()
        self.version = int(state["version"])

    def state_hashes(self) -> dict[str, str]:
        """SHA-256 of the weights and of the optimizer's state, by `weights` and `optimizer`."""
        return {
            "weights": checkpoint.tensors_sha256(dict(self.model.named_parameters())),
            "optimizer": checkpoint.tensors_sha256(self._optimizer.state()),
        }

    def gradients(self) -> dict[str, Tensor]:
        """The step's gradient so far, by parameter, in full precision. Not copies."""
        return self._optimizer.gradients()

    def discard(self) -> None:
        """Drop what was accumulated since the last step."""
        self._optimizer.forget_gradients()
        self._sums = _StepSums()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._executor.shutdown()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _accumulate(self, samples: list[TrainSample]) -> None:
        for sample in samples:
            # Never true of a finite number: NaN and the infinities only.
            if sample.advantage - sample.advantage != 0:
                self.discard()
                raise NonFiniteError(f"sample {sample.sample}: advantage is {sample.advantage}")
        samples.sort(key=lambda s: (len(s.prompt_tokens) + len(s.response_tokens), s.sample))
        lengths = [len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in samples]
        with self._layers_in_training():
            for run in plan_micro_batches(lengths, self._config.micro_batch_tokens):
                self._add_micro_batch(samples[run])

    def _rescale(self, factor: float) -> None:
        assert self._sums.micro_batches, "nothing was accumulated"
        assert math.isfinite(factor) and factor > 0, factor
        self._optimizer.rescale_gradients(factor)
        self._sums.totals["loss"] *= factor

    def _add_micro_batch(self, samples: list[TrainSample]) -> None:
        rows = [(s.prompt_tokens, s.response_tokens) for s in samples]
        batch = collate(rows, self._pad_token_id, self.model.device)
        log_probs, entropy = response_log_probs(self.model, batch, self._temperature)
        rollout = self._per_token([s.rollout_log_probs for s in samples], log_probs)
        per_token, token_sums = self._loss(
            log_probs,
            log_probs.detach() if self._algorithm.old_logprobs == "recomputed" else rollout,
            self._per_sample([s.advantage for s in samples], batch, log_probs),
            config=self._algorithm,
            ref_logprobs=self._reference_log_probs(batch),
        )
        weights = self._per_sample([s.token_weight for s in samples], batch, log_probs)
        loss = (per_token * weights).sum()
        loss_value = loss.item()
        if not torch.isfinite(loss):
            self.discard()
            raise NonFiniteError(_describe_loss(per_token.detach(), loss_value, samples))
        loss.backward()
        self._note(batch, loss_value, entropy, log_probs.detach() - rollout, token_sums)

    def _note(
        self,
        batch: MicroBatch,
        loss: float,
        entropy: Tensor,
        difference: Tensor,
        token_sums: Mapping[str, Tensor],
    ) -> None:
        sums = self._sums
        sums.response_tokens += len(batch.targets)
        sums.real_tokens += batch.num_tokens
        sums.padded_tokens += batch.input_ids.numel()
        sums.micro_batches += 1
        sums.add("loss", loss)
        sums.add("entropy", entropy.sum().item())
        sums.add("difference", difference.abs().sum().item())
        sums.max_difference = max(sums.max_difference, difference.abs().max().item())
        for name, value in token_sums.items():
            sums.add(f"actor/{name}", value.item())

    def _apply(self) -> dict[str, float]:
        sums = self._sums
        if not sums.micro_batches:
            raise TrainerError("apply() without a sample since the last step")
        rate = learning_rate(self.version, self._config, self._total_steps)
        self._sums = _StepSums()
        norm = self._optimizer.step(rate, self._config.max_grad_norm)
        self.version += 1
        tokens = sums.response_tokens
        means = {name: value / tokens for name, value in sums.totals.items() if "/" in name}
        return {
            "actor/loss": sums.totals["loss"],
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/entropy": sums.totals["entropy"] / tokens,
            **means,
            "sampling/sampling_logp_difference/mean": sums.totals["difference"] / tokens,
            "sampling/sampling_logp_difference/max": sums.max_difference,
            "train/response_tokens": float(tokens),
            "train/tokens": float(sums.real_tokens),
            "train/padded_tokens": float(sums.padded_tokens),
            "train/micro_batches": float(sums.micro_batches),
        }

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return response_log_probs(self._reference, batch, self._temperature)[0]

    @contextmanager
    def _layers_in_training(self) -> Iterator[None]:
        """Layers checkpoint only in training mode. What is inside them stays in eval mode: no
        dropout."""
        for layer in self._checkpointed_layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._checkpointed_layers:
                layer.training = False

    @staticmethod
    def _per_token(values: Sequence[Sequence[float]], like: Tensor) -> Tensor:
        flat = [value for row in values for value in row]
        assert len(flat) == len(like), "rollout_log_probs must have one value per response token"
        return torch.tensor(flat, dtype=like.dtype, device=like.device)

    @staticmethod
    def _per_sample(values: Sequence[float], batch: MicroBatch, like: Tensor) -> Tensor:
        repeats = torch.tensor(batch.num_targets)
        flat = torch.tensor(values, dtype=like.dtype).repeat_interleave(repeats)
        return flat.to(like.device)


def _describe_loss(per_token: Tensor, loss: float, samples: Sequence[TrainSample]) -> str:
    """Which samples made the loss non-finite; per_token is row after row of `samples`."""
    rows = per_token.split([len(s.response_tokens) for s in samples])
    bad = [str(s.sample) for s, row in zip(samples, rows, strict=True) if not row.isfinite().all()]
    named = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return f"the loss is {loss} (samples: {named or 'only their sum'}); no update was applied"


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()


def _enable_checkpointing(model: PreTrainedModel) -> list[nn.Module]:
    """Switch it on and return the layers that it works on."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} does not support gradient checkpointing: "
            "set model.gradient_checkpointing=false"
        )
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(settings)
    else:  # transformers before it renamed the method
        model.gradient_checkpointing_enable(settings)
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
