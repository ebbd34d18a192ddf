"""One rank's share of a training step: what turns samples into a gradient and an update.

    score       other models' log-probs and the critic's values, for the advantages
    accumulate  forward and backward of these samples, micro-batch by micro-batch
    rescale     the samples so far were weighted provisionally: correct them by one factor
    apply       clip, step, forget the gradients

It knows no algorithm: losses are `algo`'s, advantages and weights come with the samples. Alone it
is the whole trainer; with `shards` it is one of several equals, each with samples of its own and a
part of every parameter. Then each forward and backward pass is a joint one: a rank with fewer
micro-batches runs empty ones along (`filler`), so that nobody waits for ever.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollpacker import algo
from rollpacker.algo.base import AlgorithmConfig
from rollpacker.core.ids import SampleId
from rollpacker.trainer import checkpoint
from rollpacker.trainer.base import (
    NonFiniteError,
    ScoreRequest,
    TokenScores,
    TrainConfig,
    TrainerError,
    TrainSample,
)
from rollpacker.trainer.batches import Batcher
from rollpacker.trainer.checkpointing import enable_checkpointing, layers_in_training
from rollpacker.trainer.compiling import compile_layers
from rollpacker.trainer.critic import Critic, load_critic_weights, save_critic
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.frozen import FrozenPolicy, frozen_copy
from rollpacker.trainer.lora import (
    adapter_off,
    has_adapter,
    load_adapter,
    merged_weights,
    save_adapter,
)
from rollpacker.trainer.memory import PeakMemory
from rollpacker.trainer.micro_batch import MicroBatch, Row, row_length
from rollpacker.trainer.optimizer import build_optimizer
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.schedule import check_schedule, learning_rate
from rollpacker.trainer.sharding import (
    ShardedGradients,
    Shards,
    any_rank,
    full_tensors,
    same_number,
    shard,
)
from rollpacker.trainer.step_sums import StepSums
from rollpacker.weight_probe import weight_probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Learner:
    """Policy, optimizer and what else the algorithm asks for: a critic, a reference, a teacher.

    `model` is a plain causal model or one with an adapter; it is trained in place and stays in eval
    mode. `temperature` is the sampling temperature: log-probs are taken at it. `total_steps` is
    where schedules end. With `kl_coef` > 0 the reference is the model *as given* (without its
    adapter, if it has one; else a frozen copy), so build the learner from the run's first model and
    `load` afterwards. `shards`: see the module's head; everything is a joint call then.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        pad_token_id: int,
        config: TrainConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        total_steps: int | None,
        gradient_checkpointing: bool = False,
        critic: Critic | None = None,
        teacher: FrozenPolicy | None = None,
        shards: Shards | None = None,
    ) -> None:
        check_schedule(config)
        if config.schedule != "constant" and total_steps is None:
            raise ValueError(
                f"train.schedule={config.schedule} needs to know where it ends: set train.steps"
            )
        assert temperature > 0, temperature
        self.version = 0
        self.model = model.eval()
        self._tokenizer = tokenizer
        self._config = config
        self._algorithm = algorithm
        self._temperature = temperature
        self._total_steps = total_steps
        self._shards = shards
        self._run_dtype = model.dtype
        self._writes = shards is None or shards.rank == 0
        self._has_adapter = has_adapter(model)
        self.device = next(model.parameters()).device
        self._peak = PeakMemory(self.device)
        self._flops = FlopModel.of(model)
        self._reference = self._make_reference()
        self._teacher = teacher
        self._checkpointed = enable_checkpointing(model) if gradient_checkpointing else []
        self._policy = Policy(model)
        if config.compile:
            compile_layers(model)
        frozen = [one.policy for one in (self._reference, teacher) if one is not None]
        self._batcher = Batcher(
            model,
            layout=config.micro_batches,
            max_tokens=config.micro_batch_tokens,
            pad_token_id=pad_token_id,
            device=self.device,
            others=[one.model for one in (*frozen, critic) if one is not None],
            dtype=self._run_dtype,
        )
        if shards is not None:
            for one in frozen:
                shard(one, shards, param_dtype=None, gradient_sync="step")
        self._actor = _Trained(self._policy, model, config, shards, self._run_dtype)
        self._critic = critic
        self._critic_trained: _Trained | None = None
        if critic is not None:
            if gradient_checkpointing:
                self._checkpointed = [*self._checkpointed, *enable_checkpointing(critic.model)]
            self._critic_trained = _Trained(critic, critic, config, shards, self._run_dtype)
        self._forget_step()

    # -- the calls ---------------------------------------------------------------------

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScores]:
        """See `Trainer`."""
        rows = [(request.prompt_tokens, request.response_tokens) for request in requests]
        scores: dict[int, TokenScores] = {}
        with self._batcher.attention():
            for places, batch in self._micro_batches(rows):
                columns = self._score_columns(batch)
                split = {
                    name: values.double().cpu().split(list(batch.num_targets))
                    for name, values in columns.items()
                }
                for row, place in enumerate(places):
                    scores[place] = TokenScores(
                        **{name: tuple(parts[row].tolist()) for name, parts in split.items()}
                    )
        return [scores[place] for place in range(len(requests))]

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """See `Trainer`. Also raises `NonFiniteError` for an advantage that is no finite number."""
        self._refuse_bad_advantages(samples)
        ordered = sorted(samples, key=_by_length)
        self._accumulated.append((1.0, ordered))
        self._run(ordered)

    def rescale(self, factor: float) -> None:
        """See `Trainer`. Whole gradients that wait to be summed over ranks are FSDP's: those are
        multiplied in `apply`, and until then new losses are divided by the same."""
        assert self._accumulated, "nothing was accumulated"
        assert math.isfinite(factor) and factor > 0, factor
        if self._shards is None:
            for trained in self._trained().values():
                for gradient in trained.optimizer.gradients().values():
                    gradient.mul_(factor)
        else:
            self._scale *= factor
        self._accumulated = [(so_far * factor, part) for so_far, part in self._accumulated]
        self._sums.scale(factor)

    def apply(self) -> StepOutcome:
        """See `Trainer`. Raises `TrainerError` if nothing was accumulated, on any rank."""
        if not any_rank(any(part for _, part in self._accumulated), self._shards):
            raise TrainerError("apply() without a sample since the last step")
        rate = learning_rate(self.version, self._config, self._total_steps)
        norms = self._finish_gradients()
        if not all(math.isfinite(norm) for norm in norms.values()):
            norms = self._recompute()
        critic = self._config.critic
        critic_norm = None
        if self._critic_trained is not None:
            critic_norm = norms["critic"]
            self._critic_trained.step(critic.learning_rate, critic.max_grad_norm, self._scale)
        if self._critic_trained is not None and self.version < critic.warmup_steps:
            self._actor.forget_gradients()
        else:
            self._actor.step(rate, self._config.max_grad_norm, self._scale)
        self.version += 1
        outcome = StepOutcome(
            sums=self._sums,
            grad_norm=norms["actor"],
            learning_rate=rate,
            critic_grad_norm=critic_norm,
            peak_memory_bytes=self._peak.read(),
        )
        self._peak.reset()
        self._forget_step()
        self._offload()
        return outcome

    def discard(self) -> None:
        """Drop what was accumulated since the last step."""
        for trained in self._trained().values():
            trained.forget_gradients()
        self._forget_step()

    # -- weights on their way out ------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in the run's dtype, by the names of a plain model, on rank 0; an adapter is
        merged in. All ranks must iterate to the end."""
        named = self.model.named_parameters()
        if self._has_adapter:
            named = merged_weights(self.model)
        elif self._shards is None:
            return named
        return full_tensors(named, self._shards, self._run_dtype)

    @torch.no_grad()
    def write_weights(self, buffer: Mapping[str, Tensor] | None) -> str | None:
        """Copy the weights into tensors of the same names, if there are any here. Returns the probe
        of what was written, on rank 0."""
        for name, value in self.weights():
            if buffer is not None:
                buffer[name].copy_(value)
        return None if buffer is None else weight_probe(buffer.items())

    def state_hashes(self) -> dict[str, str]:
        """SHA-256 of the weights and of the optimizer's state, by `weights` and `optimizer`. With
        several ranks: of whole tensors, on rank 0."""
        tensors = {
            "weights": dict(full_tensors(self._named_state(), self._shards)),
            "optimizer": dict(full_tensors(self._actor.optimizer.state().items(), self._shards)),
        }
        return {name: checkpoint.tensors_sha256(values) for name, values in tensors.items()}

    def gradients(self) -> dict[str, Tensor]:
        """The step's gradient so far, by parameter, in full precision. With several ranks: what is
        summed over them already."""
        gradients = self._actor.optimizer.gradients()
        return {name: gradient * self._scale for name, gradient in gradients.items()}

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        return (item for item in self.model.named_parameters() if item[1].requires_grad)

    # -- micro-batches -----------------------------------------------------------------

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], MicroBatch]]:
        """Places in `rows` and their tensors; at the end as many fillers, without places, as other
        ranks have more micro-batches."""
        plan = self._batcher.plan([row_length(row) for row in rows])
        num_fillers = same_number(len(plan), self._shards) - len(plan)
        for places in plan:
            yield places, self._batcher.batch([rows[place] for place in places])
        for _ in range(num_fillers):
            yield [], self._batcher.filler()

    def _run(
        self, samples: Sequence[TrainSample], *, factor: float = 1.0, suspicious: bool = False
    ) -> None:
        """Forward and backward of all of them, their weights multiplied by `factor`. `suspicious`:
        look at the gradient after each micro-batch."""
        rows = [(sample.prompt_tokens, sample.response_tokens) for sample in samples]
        self._reload_gradients()
        with self._batcher.attention(), layers_in_training(self._checkpointed):
            for places, batch in self._micro_batches(rows):
                part = [samples[place] for place in places]
                self._add(batch, part, factor)
                if suspicious:
                    self._refuse_bad_gradient(part)

    def _add(self, batch: MicroBatch, samples: Sequence[TrainSample], factor: float) -> None:
        """One micro-batch. A loss that is not finite is computed once more: memory and kernels
        fail, too."""
        started = time.perf_counter()
        for attempt in range(2):
            result = self._losses(batch, samples) if samples else self._no_losses(batch)
            if not any_rank(not result.finite, self._shards):
                break
            if attempt:
                self.discard()
                raise NonFiniteError(_describe_loss(result, samples))
            self._sums.recomputed_micro_batches += 1
            logger.warning("a loss or log-prob is not finite; its micro-batch is computed again")
        for loss in result.losses:
            (loss * (factor / self._scale)).backward()
        if samples:
            self._synchronize()
            self._note(batch, samples, result, factor, time.perf_counter() - started)

    def _losses(self, batch: MicroBatch, samples: Sequence[TrainSample]) -> _Losses:
        reference = self._penalized(batch)
        log_probs, entropy = self._policy(batch, self._temperature)
        rollout = _flat([s.rollout_log_probs for s in samples], log_probs)
        counts = torch.tensor(batch.num_targets)
        places = torch.arange(len(samples)).repeat_interleave(counts).to(self.device)
        config = self._algorithm
        is_own = config.old_logprobs == "recomputed"
        token = algo.token_loss(
            log_probs,
            log_probs.detach() if is_own else rollout,
            _flat([s.advantage for s in samples], log_probs, batch.num_targets),
            places,
            num_samples=len(samples),
            config=config,
            ref_log_probs=_known_reference(samples, log_probs) if reference is None else reference,
            rollout_log_probs=rollout,
            entropy=entropy if config.entropy_coef else None,
        )
        weights = _flat([s.token_weight for s in samples], log_probs, batch.num_targets)
        losses = [(token.per_token * weights).sum()]
        value_sums: Mapping[str, Tensor] = {}
        if self._critic is not None:
            value = algo.value_loss(
                self._critic(batch),
                _flat([_needed(s.values, "values") for s in samples], log_probs),
                _flat([_needed(s.returns, "returns") for s in samples], log_probs),
                config=config,
            )
            losses.append((value.per_token * weights).sum())
            value_sums = value.sums
        return _Losses(
            losses=losses,
            per_token=token.per_token.detach(),
            entropy=entropy.detach(),
            log_ratio=log_probs.detach() - rollout,
            update_log_ratio=None if is_own else log_probs.detach() - rollout,
            sums=token.sums,
            value_sums=value_sums,
        )

    def _no_losses(self, batch: MicroBatch) -> _Losses:
        """A filler's: the passes of the others, with nothing in them."""
        self._penalized(batch)
        log_probs, entropy = self._policy(batch, self._temperature)
        losses = [(log_probs.sum() + entropy.sum()) * 0.0]
        if self._critic is not None:
            losses.append(self._critic(batch).sum() * 0.0)
        return _Losses(
            losses=losses,
            per_token=log_probs,
            entropy=entropy,
            log_ratio=log_probs,
            update_log_ratio=None,
            sums={},
            value_sums={},
        )

    def _note(
        self,
        batch: MicroBatch,
        samples: Sequence[TrainSample],
        result: _Losses,
        factor: float,
        seconds: float,
    ) -> None:
        lengths = [len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in samples]
        self._sums.add_micro_batch(
            batch=batch,
            loss=result.losses[0].item() * factor,
            entropy=result.entropy,
            log_ratio=result.log_ratio,
            token_sums=result.sums,
            update_log_ratio=result.update_log_ratio,
            sample_weights=[sample.loss_weight for sample in samples],
            seconds=seconds,
            flops=self._flops.training(lengths, len(batch.targets)),
            value_loss=result.losses[1].item() * factor if len(result.losses) > 1 else None,
            value_token_sums=result.value_sums,
        )

    # -- other models ------------------------------------------------------------------

    def _make_reference(self) -> FrozenPolicy | None:
        if not self._algorithm.needs_reference or self._has_adapter:
            return None
        return frozen_copy(self.model)

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        if self._reference is not None:
            return self._reference.log_probs(batch, self._temperature)
        with torch.no_grad(), adapter_off(self.model):
            log_probs: Tensor = self._policy(batch, self._temperature)[0]
        return log_probs

    def _penalized(self, batch: MicroBatch) -> Tensor | None:
        """The reference's log-probs [N], if the loss has a penalty on them."""
        config = self._algorithm
        if not config.needs_reference or config.kl_in != "loss":
            return None
        return self._reference_log_probs(batch)

    def _score_columns(self, batch: MicroBatch) -> dict[str, Tensor]:
        """What the advantages need to know of a micro-batch's targets; [N] each."""
        config = self._algorithm
        columns: dict[str, Tensor] = {}
        if config.reference_in_scores:
            columns["ref_log_probs"] = self._reference_log_probs(batch)
        if self._teacher is not None:
            columns["teacher_log_probs"] = self._teacher.log_probs(batch, self._temperature)
        if columns:
            columns["log_probs"] = self._policy(batch, self._temperature)[0]
        if self._critic is not None:
            columns["values"] = self._critic(batch)
        return columns

    # -- the end of a step -------------------------------------------------------------

    def _offload(self) -> None:
        """Optimizer state and gradients wait in host memory, if the config says so. Whoever asks
        for gradients or steps brings back what it needs."""
        if self._config.offload:
            for trained in self._trained().values():
                trained.optimizer.offload()

    def _reload_gradients(self) -> None:
        """Before a backward pass adds to them."""
        if self._config.offload:
            for trained in self._trained().values():
                trained.optimizer.reload(state=False)

    def _trained(self) -> dict[str, _Trained]:
        if self._critic_trained is None:
            return {"actor": self._actor}
        return {"actor": self._actor, "critic": self._critic_trained}

    def _finish_gradients(self) -> dict[str, float]:
        """Sum the gradients over the ranks; their norms."""
        filler = self._batcher.filler() if self._shards is not None else None

        def run_filler() -> None:
            assert filler is not None
            with self._batcher.attention(), layers_in_training(self._checkpointed):
                for loss in self._no_losses(filler).losses:
                    loss.backward()

        finish: Callable[[], object] = run_filler
        for trained in self._trained().values():
            if trained.sharded is not None:
                finish = partial(trained.sharded.finish, finish)
        if self._shards is not None:
            finish()
        return {name: t.norm() * self._scale for name, t in self._trained().items()}

    def _recompute(self) -> dict[str, float]:
        """The gradient is not finite: compute it once more, looking at it after each micro-batch.
        If it was a passing fault the step goes on."""
        logger.warning("the gradient is not finite; the step's is computed once more")
        accumulated = self._accumulated
        num_recomputed = self._sums.recomputed_micro_batches + self._sums.micro_batches
        self.discard()
        for trained in self._trained().values():
            trained.sum_at_once()
        for factor, samples in accumulated:
            self._run(samples, factor=factor, suspicious=True)
        self._accumulated = accumulated
        self._sums.recomputed_micro_batches += num_recomputed
        norms = {name: trained.norm() for name, trained in self._trained().items()}
        for trained in self._trained().values():
            trained.sum_at_once(False)
        if not all(math.isfinite(norm) for norm in norms.values()):
            self.discard()
            raise NonFiniteError(
                f"the gradient's norm is {norms}, though each micro-batch's is finite; no update"
                " was applied"
            )
        return norms

    def _refuse_bad_gradient(self, samples: Sequence[TrainSample]) -> None:
        bad = [name for t in self._trained().values() for name in t.non_finite()]
        if bad:
            self.discard()
            for trained in self._trained().values():
                trained.sum_at_once(False)
            of = f"samples {_named([s.sample for s in samples])}" if samples else "another process"
            raise NonFiniteError(
                f"the gradient is not finite, first in {bad[0]}, after the micro-batch of {of};"
                " no update was applied"
            )

    def _refuse_bad_advantages(self, samples: Sequence[TrainSample]) -> None:
        bad = [
            f"sample {sample.sample}: advantage is {value}"
            for sample in samples
            for value in _as_tuple(sample.advantage)
            if not math.isfinite(value)
        ]
        if any_rank(bool(bad), self._shards):  # the others would wait for this rank's passes
            self.discard()
            raise NonFiniteError(bad[0] if bad else "an advantage is not finite on another rank")

    def _forget_step(self) -> None:
        self._sums = StepSums()
        self._scale = 1.0
        """What the gradient so far must still be multiplied by; with several ranks only."""
        self._accumulated: list[tuple[float, list[TrainSample]]] = []
        """The step's samples, with what their weights were multiplied by since."""

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _by_prefix(self) -> list[tuple[str, _Trained]]:
        """What is trained, with the prefix of its tensors in a checkpoint."""
        return [(f"{name}/", trained) for name, trained in self._trained().items()]

    # -- checkpoints -------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """See `Trainer`."""
        checkpoint.save_model(
            self.model,
            self._tokenizer,
            folder / "model",
            shards=self._shards,
            dtype=self._run_dtype,
            weights=merged_weights(self.model) if self._has_adapter else None,
        )
        if self._has_adapter:
            save_adapter(self.model, folder / "adapter", write=self._writes)
        if self._critic is not None:
            state = dict(full_tensors(self._critic.state_dict().items(), self._shards))
            if self._writes:
                save_critic(self._critic, folder / "critic", state)
        tensors = {
            f"{prefix}{name}": value
            for prefix, trained in self._by_prefix()
            for name, value in trained.state().items()
        }
        checkpoint.save_trainer(
            tensors,
            {"version": self.version, "total_steps": self._total_steps},
            folder / "trainer",
            self._shards,
        )
        self._offload()

    def load(self, folder: Path) -> None:
        """See `Trainer`. Raises `TrainerError` if what lies there is not this model's."""
        state = checkpoint.load_trainer_state(folder / "trainer")
        if self._has_adapter:
            load_adapter(self.model, folder / "adapter")
        else:
            checkpoint.load_model_weights(self.model, folder / "model", self._shards)
        if self._critic is not None:
            load_critic_weights(self._critic, folder / "critic")
        saved = checkpoint.saved_names(folder / "trainer")
        likes = {
            f"{prefix}{name}": value
            for prefix, trained in self._by_prefix()
            for name, value in trained.state_like().items()
            if f"{prefix}{name}" in saved  # there is no state before the first update
        }
        tensors = checkpoint.load_trainer_tensors(folder / "trainer", likes, self._shards)
        for prefix, trained in self._by_prefix():
            trained.load_state(
                {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
            )
        self.discard()
        self._offload()
        self.version = int(state["version"])


class _Trained:
    """A module with an optimizer, sharded or not."""

    def __init__(
        self,
        module: nn.Module,
        named_by: nn.Module,
        config: TrainConfig,
        shards: Shards | None,
        run_dtype: torch.dtype,
    ) -> None:
        """`named_by`: the part of `module` whose parameter names are to be used."""
        self.module = module
        self.sharded: ShardedGradients | None = None
        self._sums_at_once = config.gradient_sync == "micro-batch"
        self._widened: frozenset[str] = frozenset()
        """Parameters that sharding makes float32; of one process the optimizer has masters."""
        if shards is not None:
            low = (torch.bfloat16, torch.float16)
            named = named_by.named_parameters()
            self._widened = frozenset(n for n, p in named if p.requires_grad and p.dtype in low)
            self.sharded = shard(
                module,
                shards,
                param_dtype=run_dtype if run_dtype in low else None,
                gradient_sync=config.gradient_sync,
            )
        self._named_by = named_by
        self.optimizer = build_optimizer(named_by.named_parameters(), config)

    def step(self, learning_rate: float, max_grad_norm: float | None, scale: float) -> None:
        """Update with the gradient times `scale`."""
        self.optimizer.step(learning_rate, max_grad_norm, gradient_scale=scale)

    def forget_gradients(self) -> None:
        """Also those that wait to be summed over the ranks."""
        if self.sharded is not None:
            self.sharded.forget()
        self.optimizer.forget_gradients()

    def norm(self) -> float:
        """Of the whole gradient so far."""
        norm = torch.nn.utils.get_total_norm(list(self.optimizer.gradients().values()))
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def non_finite(self) -> list[str]:
        """Parameters whose gradient is not finite, on any rank."""
        norms = {n: torch.linalg.vector_norm(g) for n, g in self.optimizer.gradients().items()}
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in norms.items()}
        return [name for name, norm in whole.items() if not bool(norm.isfinite())]

    def sum_at_once(self, at_once: bool = True) -> None:
        """Sum gradients over the ranks at every backward pass."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(at_once or self._sums_at_once)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's; with the weights themselves where a checkpoint's model has fewer
        digits."""
        masters = dict(self._masters())
        return self.optimizer.state() | {f"master.{n}": p.detach() for n, p in masters.items()}

    def state_like(self) -> dict[str, Tensor]:
        """Tensors of the names, shapes and places that `state` may have."""
        return self.optimizer.state_like() | {
            f"master.{n}": torch.empty_like(p) for n, p in self._masters()
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        rest = dict(tensors)
        for name, parameter in self._masters():
            if f"master.{name}" not in rest:
                raise TrainerError(f"the optimizer's state lacks the master weights of {name}")
            parameter.copy_(rest.pop(f"master.{name}"))
        self.optimizer.load_state(rest)

    def _masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (item for item in self._named_by.named_parameters() if item[0] in self._widened)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Losses:
    """What a forward pass of one micro-batch gives; [N] each but for the losses."""

    losses: Sequence[Tensor]
    """The policy's, and the critic's if there is one; weighted sums."""
    per_token: Tensor
    entropy: Tensor
    log_ratio: Tensor
    """Trainer's minus engine's log-probs."""
    update_log_ratio: Tensor | None
    """Log-probs minus old ones, if they can differ."""
    sums: Mapping[str, Tensor]
    value_sums: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        """The losses, and trainer's and engine's log-probs, which the loss may have cut."""
        whole = torch.stack([loss.detach().double() for loss in self.losses])
        return bool(whole.isfinite().all() & self.log_ratio.isfinite().all())


def _by_length(sample: TrainSample) -> tuple[int, SampleId]:
    return len(sample.prompt_tokens) + len(sample.response_tokens), sample.sample


def _flat(
    values: Sequence[float | tuple[float, ...]], like: Tensor, counts: Sequence[int] = ()
) -> Tensor:
    """[N], sample after sample. Single numbers hold for all of a sample's `counts` tokens."""
    flat: list[float] = []
    for index, value in enumerate(values):
        flat.extend(value if isinstance(value, tuple) else (value,) * counts[index])
    assert len(flat) == len(like), "there must be one number per response token"
    return torch.tensor(flat, dtype=like.dtype, device=like.device)


def _as_tuple(advantage: float | tuple[float, ...]) -> tuple[float, ...]:
    return advantage if isinstance(advantage, tuple) else (advantage,)


def _known_reference(samples: Sequence[TrainSample], like: Tensor) -> Tensor | None:
    """Good for a metric: the penalty is in the advantages already."""
    known = [s.ref_log_probs for s in samples if s.ref_log_probs is not None]
    return _flat(known, like) if len(known) == len(samples) else None


def _needed(values: tuple[float, ...] | None, name: str) -> tuple[float, ...]:
    assert values is not None, f"training the critic needs {name}"
    return values


def _describe_loss(result: _Losses, samples: Sequence[TrainSample]) -> str:
    """Which samples made the loss or a log-prob non-finite; tokens are row after row."""
    if not samples or result.finite:
        return "a loss is not finite in another process; no update was applied"
    finite = result.per_token.isfinite() & result.log_ratio.isfinite()
    rows = finite.split([len(s.response_tokens) for s in samples])
    bad = [s.sample for s, row in zip(samples, rows, strict=True) if not row.all()]
    values = ", ".join(f"{loss.item()}" for loss in result.losses)
    which = _named(bad) if bad else f"only the sum of {_named([s.sample for s in samples])}"
    return f"the loss is {values} (samples: {which}); no update was applied"


def _named(samples: Sequence[SampleId], limit: int = 5) -> str:
    more = f" and {len(samples) - limit} more" if len(samples) > limit else ""
    return ", ".join(map(str, samples[:limit])) + more
