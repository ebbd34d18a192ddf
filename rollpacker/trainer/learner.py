"""One rank's share of a training step: a learner turns samples into a gradient and an update.

Its calls in a step: `score` returns log-probs of the models and values of the critic, from which
advantages are computed. `accumulate` runs forward and backward of samples. `rescale` multiplies the
gradient and losses so far, if the samples' weights were provisional. `update` clips the gradients,
steps the optimizer and drops the gradients. `apply` is the step's last update.

Losses are defined in `algo`; advantages and weights come with the samples; `passes` cuts samples
into micro-batches and runs the models. Without `shards` one learner is the whole trainer. With
`shards` there is a learner on each rank, with samples of its own and a part of every parameter.
Ranks then make each call together: those of one replica (a whole copy of the model) `score` and
`accumulate`, all ranks the other calls.

If a loss or a gradient is not finite, the step's gradient is computed again from all its samples.
If that fails too, an error names the samples of the micro-batch that failed. With pipeline stages,
passes go on after a call has returned, so that such a fault is found in `update`; calls that need
weights or gradients first wait for these passes."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.trainer.batches import Batcher, budget_of
from rollpacker.trainer.critic import Critic
from rollpacker.trainer.frozen import FrozenPolicy
from rollpacker.trainer.learner_files import LearnerFiles
from rollpacker.trainer.losses import Losses, describe_bad_losses, losses_of, named
from rollpacker.trainer.memory import PeakMemory
from rollpacker.trainer.model_set import ModelSet
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.passes import LocalPasses, Look, Passes
from rollpacker.trainer.rows import joined, rows_of
from rollpacker.trainer.schedule import check_schedule, learning_rate
from rollpacker.trainer.sharding import Shards, any_of_replica, any_rank, shard
from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.trained import Trained, sum_gradients
from rollpacker.trainer.trainer import (
    NonFiniteError,
    ScoreRequest,
    TokenScores,
    TrainConfig,
    TrainerError,
    TrainSample,
)
from rollpacker.weights.delivery import Delivery, Member
from rollpacker.weights.host_store import HostStore
from rollpacker.weights.probe import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollpacker.pipeline.stages.overseer import Arrangement
    from rollpacker.pipeline.stages.stage import Stage

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """What a learner has accumulated since its last update: samples, sums for metrics, and a factor
    for the gradient. Replaced by a new one at every update, and when a step is given up."""

    sums: StepSums = field(default_factory=StepSums)
    gradient_scale: float = 1.0
    """Factor by which the gradient accumulated so far must still be multiplied."""
    parts: list[tuple[float, list[TrainSample]]] = field(default_factory=list)
    """For each call of `accumulate`, its samples, and the factor (from `rescale`) by which their
    loss weights were multiplied after the call."""
    finite: bool = True
    """Whether all losses known so far are finite. With pipeline stages, losses become known after
    the call of `accumulate` that they belong to."""

    @property
    def has_samples(self) -> bool:
        return any(samples for _, samples in self.parts)

    def rescale(self, factor: float, *, gradient_has_it: bool) -> None:
        """Multiply the loss weights of all samples so far, which were provisional, by
        `factor`. With `gradient_has_it` the accumulated gradient is multiplied already,
        else `update` will do it."""
        if not gradient_has_it:
            self.gradient_scale *= factor
        self.parts = [(so_far * factor, samples) for so_far, samples in self.parts]
        self.sums.scale(factor)

    def anew(self) -> OpenStep:
        """Return this step with the same samples but empty sums, to compute its gradient again. The
        sums note how many micro-batches were computed in vain. The gradient's factor stays, since
        it must be the same in all replicas."""
        done = self.sums.recomputed_micro_batches + self.sums.micro_batches
        return OpenStep(
            sums=StepSums(recomputed_micro_batches=done),
            gradient_scale=self.gradient_scale,
            parts=self.parts,
        )


class Learner:
    """Trains a policy. A learner holds the policy, its optimizer, and what else the algorithm asks
    for: a critic, a reference, a teacher. `model` is a plain causal model or one with an adapter;
    it is trained in place and stays in eval mode. `temperature` is the sampling temperature:
    log-probs are taken at it. `total_steps` is where schedules end. With `kl_coef` > 0 the
    reference is the model *as given* (without its adapter, if it has one; else a frozen copy), so
    build the learner from the run's first model and `load` afterwards. `shards` are the ranks that
    share the model; None: this is the only one. With `stage`, the models are cut down in place to
    that pipeline stage's layers, and all stages make every call together, with the same samples."""

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
        stage: Stage | None = None,
    ) -> None:
        check_schedule(config)
        if config.schedule != "constant" and total_steps is None:
            raise ValueError(
                f"train.schedule={config.schedule} needs to know where it ends: set train.steps"
            )
        assert temperature > 0, temperature
        model.train(False)
        self.version = 0
        self.model = model
        self.device = next(model.parameters()).device if shards is None else shards.device
        self._config = config
        self._total_steps = total_steps
        self._shards = shards
        self._stage = stage
        self._peak = PeakMemory(self.device)
        self._losses = partial(losses_of, config=algorithm)
        run_dtype = model.dtype
        models = ModelSet.of(
            model,
            critic=critic,
            teacher=teacher,
            algorithm=algorithm,
            temperature=temperature,
            gradient_checkpointing=gradient_checkpointing,
            compiled=config.compile,
            scores_policy=config.updates_per_round > 1 and algorithm.old_logprobs == "recomputed",
            stage=stage,
        )
        self.critic = critic = models.critic
        self._plain_scores = models.plain_scores
        self._passes = _passes(models, config, pad_token_id, self.device, shards, stage)
        self.trained = _trained(models, config, shards, run_dtype)
        self._files = LearnerFiles(
            model=model,
            tokenizer=tokenizer,
            critic=critic,
            trained=self.trained,
            shards=shards,
            run_dtype=run_dtype,
            stage=stage,
        )
        self._step = OpenStep()
        self._modules = [models.policy, *models.frozen, *([] if critic is None else [critic])]
        self._host = HostStore()

    # -- the calls -------------------------------------------------------------------------

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScores]:
        """Return the responses' log-probs and values under the present weights, for advantages."""
        rows = [rows_of(request) for request in requests]
        return joined(self._passes.score([row for of in rows for row in of]), map(len, rows))

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """Add the gradient of these samples' losses to the step's. Raises `NonFiniteError` if an
        advantage or a loss is not finite; with pipeline stages, `update` raises that for a loss."""
        self._refuse_bad_advantages(samples)
        ordered = sorted((row for one in samples for row in rows_of(one)), key=_by_length)
        self._step.parts.append((1.0, ordered))
        finite = self._differentiate(ordered)
        if finite is not None and self._any_of_replica(not finite):
            self._compute_again("a loss or a log-prob")

    def rescale(self, factor: float) -> None:
        """Multiply the gradient and losses accumulated so far by `factor`, as the samples' weights
        were provisional. A gradient that cannot be multiplied yet is multiplied in `update`; until
        then new losses are divided by the factor to make up for it."""
        assert self._step.parts or self._replicas > 1, "nothing was accumulated"
        assert math.isfinite(factor) and factor > 0, factor
        at_rest = self._passes.rescale(factor)
        multiplied = [at_rest and t.multiply_gradients(factor) for t in self.trained.values()]
        self._step.rescale(factor, gradient_has_it=all(multiplied))

    def apply(self) -> StepOutcome:
        """Make the step's last update, and return its record. Raises the same errors as
        `update`."""
        outcome = self.update()
        self.version += 1
        return outcome

    def update(self) -> StepOutcome:
        """Clip the gradients, step the optimizer, drop the gradients, and return a record of the
        update. Raises `TrainerError` if no rank has accumulated anything, and `NonFiniteError` if
        the gradient is not finite even when it is computed again."""
        if not self._any(self._step.has_samples):
            raise TrainerError("an update without a sample since the last one")
        self._finish_passes()
        if self._stage is not None and self._any_of_replica(not self._step.finite):
            self._compute_again("a loss or a log-prob")
        rate = learning_rate(self.version, self._config, self._total_steps)
        norms = self._summed_norms()
        if not _all_finite(norms):
            self._compute_again_jointly()
            norms = self._summed_norms()
        if not _all_finite(norms):
            self.discard()
            raise NonFiniteError(
                f"the gradient's norm is {norms}, though each micro-batch's is finite; no update"
                " was applied"
            )
        self._update_weights(rate, norms)
        outcome = StepOutcome(
            sums=self._step.sums,
            grad_norm=norms["actor"],
            learning_rate=rate,
            critic_grad_norm=norms.get("critic"),
            peak_memory_bytes=self._peak.read(),
            lora_merge_loss=self._files.lora_merge_loss(),
            stage_times=None if self._stage is None else self._stage.take_times(),
        )
        self._peak.reset()
        self._step = OpenStep()
        self._offload()
        return outcome

    def discard(self) -> None:
        """Drop the samples and gradients accumulated since the last update."""
        self._finish_passes()  # what is on its way between stages cannot be called back
        for trained in self.trained.values():
            trained.forget_gradients()
        self._step = OpenStep()

    def arrange(self, arrangement: Arrangement) -> None:
        """Send tensors between pipeline stages, and plan with the costs of their work, as
        `arrangement` says, from the next step on. Only for a model in pipeline stages."""
        assert self._stage is not None and not self._step.has_samples
        self._stage.arrange(arrangement)

    def gradients(self) -> dict[str, Tensor]:
        """Return the actor's gradient so far, by parameter name, in full precision. With several
        ranks, gradients that are not summed over the ranks yet are missing in it."""
        self._finish_passes()
        gradients = self.trained["actor"].optimizer.gradients()
        scale = self._step.gradient_scale
        return {name: gradient * scale for name, gradient in gradients.items()}

    # -- what goes out ---------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that an engine needs, whole tensors by name, on rank 0."""
        self._finish_passes()
        return self._files.weights()

    def write_weights(self, buffer: Mapping[str, Tensor] | None) -> tuple[str | None, int]:
        """Copy the weights into `buffer` (None: this rank only takes part); see
        `LearnerFiles.write_weights`."""
        self._finish_passes()
        return self._files.write_weights(buffer)

    def send_weights(self, delivery: Delivery, member: Member) -> Samples:
        """Send this rank's part of the weights to engines; see `LearnerFiles.send_weights`."""
        self._finish_passes()
        return self._files.send_weights(delivery, member, self.version)

    def log_probs_of(self, text: Sequence[int]) -> tuple[float, ...]:
        """Return the policy's log-probs of the tokens of `text` from the second one on, under the
        present weights. Of several ranks all must call this; empty in all pipeline stages but the
        last."""
        self._finish_passes()
        request = ScoreRequest(
            sample=SampleId(PromptId("train", 0, 0), 0, 0),
            prompt_tokens=tuple(text[:1]),
            response_tokens=tuple(text[1:]),
        )
        found = self._passes.score([request], self._plain_scores)
        return (found[0].log_probs or ()) if found else ()

    def state_hashes(self) -> dict[str, str]:
        """Return the SHA-256 of the weights (`weights`) and the optimizer's state (`optimizer`)."""
        self._finish_passes()
        return self._files.state_hashes()

    def offload(self) -> None:
        """Move the models, gradients and optimizer states from the device to host memory."""
        self._finish_passes()
        kept = [tensor for trained in self.trained.values() for tensor in trained.tensors()]
        for module in self._modules:
            kept += [*module.parameters(), *module.buffers()]
        self._host.offload(kept)

    def reload(self) -> None:
        """Move what `offload` moved back to the device."""
        self._host.reload()

    def save(self, folder: Path) -> None:
        """Write a checkpoint (model, optimizer states, version) to `folder`."""
        self._finish_passes()
        with contextlib.ExitStack() as reading:
            offloaded = (one.optimizer.offloaded_state for one in self.trained.values())
            for store in (self._host, *offloaded):
                reading.enter_context(store.readable())
            self._files.save(folder, version=self.version, total_steps=self._total_steps)
        self._offload()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint. Raises `TrainerError` if the checkpoint is another model's."""
        self._finish_passes()
        version = self._files.load(folder)
        self.discard()
        self._offload()
        self.version = version

    # -- gradients -------------------------------------------------------------------------

    def _differentiate(
        self, samples: Sequence[TrainSample], factor: float = 1.0, look: Look | None = None
    ) -> bool | None:
        """Run forward and backward over these samples, with their loss weights multiplied by
        `factor`. Returns whether all losses on this rank were finite; None if that is not known
        yet, as with pipeline stages."""
        for trained in self.trained.values():
            trained.reload_gradients()
        return self._passes.differentiate(
            samples,
            self._losses,
            factor=factor,
            gradient_factor=factor / self._step.gradient_scale,
            sums=self._step.sums,
            look=look,
        )

    def _finish_passes(self) -> None:
        finite = self._passes.finish()
        self._step.finite = self._step.finite and finite

    def _compute_again(self, what: str) -> None:
        """Compute the step's gradient again from all its samples, as memory or kernels may fail
        once. `what` names for the log what was not finite. Raises `NonFiniteError`, naming samples,
        if a loss or gradient is not finite again."""
        logger.warning("%s is not finite; the step's gradient is computed once more", what)
        again = self._step.anew()
        self.discard()
        self._step = again
        for factor, samples in again.parts:
            self._differentiate(samples, factor, self._refuse_non_finite)

    def _compute_again_jointly(self) -> None:
        """Compute the gradient again, in all replicas, after the summed gradient was not finite. If
        one replica finds that its part is not finite again, all replicas raise `NonFiniteError`."""
        refused: NonFiniteError | None = None
        try:
            self._compute_again("the gradient")
        except NonFiniteError as error:
            refused = error
        if self._any(refused is not None):
            self.discard()
            raise refused or NonFiniteError(
                "the gradient is not finite in another replica; no update was applied"
            )

    def _summed_norms(self) -> dict[str, float]:
        """Sum the gradients over the ranks, and return the norm of each module's whole gradient."""
        sum_gradients(self.trained.values(), self._passes.differentiate_nothing)
        scale = self._step.gradient_scale
        if self._stage is None:
            return {name: trained.norm() * scale for name, trained in self.trained.items()}
        self._stage.sum_tied(self.trained["actor"])
        return {n: self._stage.norm(trained.norm()) * scale for n, trained in self.trained.items()}

    def _update_weights(self, rate: float, norms: Mapping[str, float]) -> None:
        """Step the optimizers of critic and actor; `rate` is the actor's learning rate. A
        pipeline stage has only a part of each gradient, and clips it by the whole
        gradient's norm from `norms`."""
        actor, critic = self.trained["actor"], self.trained.get("critic")
        scale, config = self._step.gradient_scale, self._config
        whole: Mapping[str, float] = {} if self._stage is None else norms
        if critic is not None:
            critic.optimizer.step(
                config.critic.learning_rate,
                config.critic.max_grad_norm,
                gradient_scale=scale,
                whole_norm=whole.get("critic"),
            )
            if self.version < config.critic.warmup_steps:
                actor.forget_gradients()
                return
        actor.optimizer.step(
            rate, config.max_grad_norm, gradient_scale=scale, whole_norm=whole.get("actor")
        )
        if self._stage is not None:
            self._stage.share_tied(actor)

    def _any_of_replica(self, flag: bool) -> bool:
        """Whether the flag is true on any rank of this rank's replica, in all pipeline stages."""
        flag = any_of_replica(flag, self._shards)
        return flag if self._stage is None else self._stage.any(flag)

    def _any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank of any replica, in all pipeline stages."""
        flag = any_rank(flag, self._shards)
        return flag if self._stage is None else self._stage.any(flag)

    @property
    def _replicas(self) -> int:
        return 1 if self._shards is None else self._shards.replicas

    def _offload(self) -> None:
        for trained in self.trained.values():
            trained.offload()

    # -- what is not finite ----------------------------------------------------------------

    def _refuse_non_finite(self, losses: Losses, samples: Sequence[TrainSample]) -> None:
        """Raise `NonFiniteError`, naming some of `samples`, if a loss of the last micro-batch or a
        gradient is not finite."""
        bad_losses = not losses.finite
        if self._any_of_replica(bad_losses):
            self._refuse(
                describe_bad_losses(losses, samples)
                if bad_losses and samples
                else "a loss is not finite in another process; no update was applied"
            )
        bad = [name for trained in self.trained.values() for name in trained.non_finite()]
        if self._any_of_replica(bool(bad)):
            of = "a micro-batch of another process"
            if bad and samples:
                of = f"the micro-batch of samples {named([s.sample for s in samples])}"
            first = f", first in {bad[0]}" if bad else ""
            self._refuse(f"the gradient is not finite{first}, after {of}; no update was applied")

    def _refuse_bad_advantages(self, samples: Sequence[TrainSample]) -> None:
        bad = [
            f"sample {sample.sample}: advantage is {value}"
            for sample in samples
            for value in sample.advantages
            if not math.isfinite(value)
        ]
        if self._any_of_replica(bool(bad)):  # others would wait for this rank's passes
            self._refuse(bad[0] if bad else "an advantage is not finite on another rank")

    def _refuse(self, message: str) -> NoReturn:
        self.discard()
        raise NonFiniteError(message)


def _passes(
    models: ModelSet,
    config: TrainConfig,
    pad_token_id: int,
    device: torch.device,
    shards: Shards | None,
    stage: Stage | None,
) -> Passes:
    model = models.policy.model
    assert isinstance(model.dtype, torch.dtype)
    batcher = Batcher(
        model,
        layout=config.micro_batches,
        max_tokens=budget_of(config, None if stage is None else stage.budget),
        pad_token_id=pad_token_id,
        device=device,
        others=list(models.besides_the_policy()),
        dtype=model.dtype,
    )
    if stage is not None:
        return stage.passes(models, batcher, shards)
    return LocalPasses(models, batcher, device=device, shards=shards)


def _trained(
    models: ModelSet, config: TrainConfig, shards: Shards | None, run_dtype: torch.dtype
) -> dict[str, Trained]:
    """Shard the models if `shards` are given, and return the trained modules (`actor` and maybe
    `critic`), each with its optimizer."""
    if shards is not None:
        for one in models.frozen:
            shard(one, shards, param_dtype=None, gradient_sync="step")
    policy = models.policy
    mirror = getattr(policy, "mirror", None)  # a stage's
    trained = {"actor": Trained(policy, policy.model, config, shards, run_dtype, mirror)}
    if models.critic is not None:
        trained["critic"] = Trained(models.critic, models.critic, config, shards, run_dtype)
    return trained


def _all_finite(norms: Mapping[str, float]) -> bool:
    return all(math.isfinite(norm) for norm in norms.values())


def _by_length(sample: TrainSample) -> tuple[int, SampleId]:
    return len(sample.prompt_tokens) + len(sample.response_tokens), sample.sample
