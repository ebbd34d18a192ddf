"""Sums over a step's micro-batches, and the step's metrics computed from them.

Only sums, smallest and largest values are kept, so that the records of several ranks can be merged
into one."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollpacker.trainer.batches import MicroBatch

OUTSIDE_NATS = 0.2
"""Difference (natural log) between the trainer's and the engine's log-prob of a token beyond which
the token counts in `sampling/sampling_logp_difference/outside`. The trainer's probability is then
more than 1.22 or less than 0.82 times the engine's."""
MAX_LOG_RATIO = 20.0
"""Largest absolute log of an importance ratio, so that one broken token gives no infinity."""
WEIGHT, WEIGHT_SQUARED = "mismatch_weight", "mismatch_weight_squared"
"""Names of two sums over tokens, reported by the loss: of the weights that correct for mismatch of
engine and trainer, and of their squares. They give the effective sample size, `sampling/ess`."""
OUTSIDE_SUM = "mismatch_outside"
"""Name of a sum reported by the loss: the number of tokens whose mismatch weight was cut or left
out. It becomes `sampling/mismatch_outside`; sums of other names become `actor/NAME`."""
_ADDED = (
    *("response_tokens", "real_tokens", "padded_tokens", "micro_batches"),
    *("recomputed_micro_batches", "samples", "ranks", "flops"),
)
"""Fields of `StepSums` that are added up when the records of several ranks are merged."""


_LOSSES = ("loss", "value_loss")
_LEAST, _MOST = "least", "most"
"""Names under which a micro-batch's smallest and largest log of an importance ratio are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchNumbers:
    """Numbers of one micro-batch's forward and backward pass. Tensors may still be computed by a
    device; those by sampled token are [N]."""

    batch: MicroBatch
    loss: Tensor
    """The micro-batch's share of the step's loss."""
    entropy: Tensor
    log_ratio: Tensor
    """The trainer's log-probs minus the engine's."""
    update_log_ratio: Tensor | None = None
    """The trainer's log-probs minus the old ones in the loss. None: they are the same."""
    token_sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums over the tokens, by the names that the loss gives them."""
    value_loss: Tensor | None = None
    """The micro-batch's share of the critic's loss. None: there is no critic."""
    value_token_sums: Mapping[str, Tensor] = field(default_factory=dict)
    factor: float = 1.0
    """Factor of the losses, which corrects provisional sample weights."""
    sample_weights: Sequence[float] = ()
    """Factors of the samples' losses; 1 is no change. Empty: samples are not counted."""
    flops: float = 0.0
    is_filler: bool = False
    """Whether the micro-batch has weight 0 and is not counted."""

    def scalars(self) -> dict[str, Tensor]:
        """Return the sums over the tokens, by the names of the totals that they are added to."""
        ratio = torch.zeros_like(self.entropy)
        if self.update_log_ratio is not None:
            ratio = self.update_log_ratio.detach()
        ratio, difference = ratio.double(), self.log_ratio.detach().double()
        least, most = difference.aminmax()
        losses = {"loss": self.loss, "value_loss": self.value_loss}
        return {
            **{name: loss.detach() for name, loss in losses.items() if loss is not None},
            "entropy": self.entropy.detach().sum(dtype=torch.float64),
            "difference": difference.abs().sum(),
            "outside": (difference.abs() > OUTSIDE_NATS).sum(),
            "ratio": difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().sum(),
            "actor/ppo_kl": -ratio.sum(),
            "actor/ratio/mean": ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().sum(),
            **{_total_name(name): value for name, value in self.token_sums.items()},
            **{f"critic/{name}": value for name, value in self.value_token_sums.items()},
            _LEAST: least,
            _MOST: most,
        }


@dataclass(slots=True)
class StepSums:
    """Sums over a step's micro-batches, on one rank or on all. Fillers (micro-batches of weight 0,
    run to keep step with other ranks) are not counted."""

    response_tokens: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    recomputed_micro_batches: int = 0
    samples: int = 0
    """Number of samples that have a loss weight."""
    ranks: int = 1
    flops: float = 0.0
    seconds: float = 0.0
    """Seconds of forward and backward passes; for several ranks, those of the slowest."""
    min_log_ratio: float = math.inf
    max_log_ratio: float = -math.inf
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Further sums over the micro-batches, by name: `loss`, and those that the loss reports. A sum
    to which nothing was added is 0."""

    def add(self, parts: Sequence[MicroBatchNumbers]) -> bool:
        """Add the numbers of these micro-batches, all of which are read from the device in one
        transfer. Returns whether they are finite."""
        named = [part.scalars() for part in parts]
        scalars = [value.double() for numbers in named for value in numbers.values()]
        read = iter(torch.stack(scalars).tolist() if scalars else ())
        finite = True
        for part, names in zip(parts, named, strict=True):
            numbers = {name: next(read) for name in names}
            looked_at = ("loss", "value_loss", _LEAST, _MOST)  # the others may be too large
            finite &= all(math.isfinite(numbers.get(name, 0.0)) for name in looked_at)
            if not part.is_filler:
                self._add(part, numbers)
        return finite

    def _add(self, part: MicroBatchNumbers, numbers: dict[str, float]) -> None:
        self.response_tokens += len(part.batch.targets)
        self.real_tokens += part.batch.num_tokens
        self.padded_tokens += part.batch.input_ids.numel()
        self.micro_batches += 1
        self.flops += part.flops
        self.samples += len(part.sample_weights)
        self.totals["weights"] += sum(part.sample_weights)
        self.totals["weights_squared"] += sum(weight * weight for weight in part.sample_weights)
        self.min_log_ratio = min(self.min_log_ratio, numbers.pop(_LEAST))
        self.max_log_ratio = max(self.max_log_ratio, numbers.pop(_MOST))
        for name, number in numbers.items():
            self.totals[name] += number * (part.factor if name in _LOSSES else 1.0)

    def scale(self, factor: float) -> None:
        """Multiply the losses added so far by `factor`, since they were computed with provisional
        sample weights, before all of the step's samples were known."""
        for name in _LOSSES:
            if name in self.totals:
                self.totals[name] *= factor

    @staticmethod
    def merge(parts: Iterable[StepSums]) -> StepSums:
        """Merge the records of one or more ranks into that of the whole step."""
        first, *others = parts
        merged = copy.deepcopy(first)
        for part in others:
            for name in _ADDED:
                setattr(merged, name, getattr(merged, name) + getattr(part, name))
            merged.seconds = max(merged.seconds, part.seconds)
            merged.min_log_ratio = min(merged.min_log_ratio, part.min_log_ratio)
            merged.max_log_ratio = max(merged.max_log_ratio, part.max_log_ratio)
            for name, value in part.totals.items():
                merged.totals[name] += value
        return merged

    def metrics(
        self,
        *,
        grad_norm: float,
        learning_rate: float,
        critic_grad_norm: float | None = None,
        peak_flops: float | None = None,
    ) -> dict[str, float]:
        """Return the step's metrics, named as in `docs/metrics.md`. `peak_flops` is the peak FLOP/s
        of one rank's device; None: the utilization (MFU) is left out. At least one micro-batch must
        have been added."""
        assert self.response_tokens > 0, "a step without response tokens has no metrics"
        return {
            "actor/loss": self.totals["loss"],
            "actor/grad_norm": grad_norm,
            "actor/lr": learning_rate,
            "actor/entropy": self._mean("entropy"),
            "actor/ppo_kl": self._mean("actor/ppo_kl"),
            **{name: self._mean(name) for name in self.totals if "/" in name},
            **self._critic(critic_grad_norm),
            **self._sampling(),
            **self._effective_sizes(),
            "train/response_tokens": float(self.response_tokens),
            "train/tokens": float(self.real_tokens),
            "train/padded_tokens": float(self.padded_tokens),
            "train/micro_batches": float(self.micro_batches),
            "train/recomputed_micro_batches": float(self.recomputed_micro_batches),
            **self._speed(peak_flops),
        }

    def _mean(self, name: str) -> float:
        return self.totals[name] / self.response_tokens

    def _critic(self, grad_norm: float | None) -> dict[str, float]:
        if "value_loss" not in self.totals:
            return {}
        norm = {} if grad_norm is None else {"critic/grad_norm": grad_norm}
        return {"critic/value_loss": self.totals["value_loss"], **norm}

    def _sampling(self) -> dict[str, float]:
        return {
            "sampling/sampling_logp_difference/mean": self._mean("difference"),
            "sampling/sampling_logp_difference/max": max(-self.min_log_ratio, self.max_log_ratio),
            "sampling/sampling_logp_difference/outside": self._mean("outside"),
            "sampling/importance_sampling_ratio/mean": self._mean("ratio"),
            "sampling/importance_sampling_ratio/min": _ratio(self.min_log_ratio),
            "sampling/importance_sampling_ratio/max": _ratio(self.max_log_ratio),
        }

    def _effective_sizes(self) -> dict[str, float]:
        totals = self.totals
        sizes = {}
        if totals["weights_squared"] > 0:
            sizes["train/weights/ess"] = _effective_size(
                totals["weights"], totals["weights_squared"], self.samples
            )
        if totals[WEIGHT_SQUARED] > 0:
            sizes["sampling/ess"] = _effective_size(
                totals[WEIGHT], totals[WEIGHT_SQUARED], self.response_tokens
            )
        return sizes

    def _speed(self, peak_flops: float | None) -> dict[str, float]:
        if self.seconds <= 0:
            return {}
        speed = {"perf/train_tokens_per_s": self.real_tokens / self.seconds}
        if peak_flops is not None and self.flops > 0:
            speed["perf/mfu/actor"] = self.flops / (self.seconds * self.ranks * peak_flops)
        return speed


def _total_name(name: str) -> str:
    if name in (WEIGHT, WEIGHT_SQUARED):
        return name
    return f"sampling/{name}" if name == OUTSIDE_SUM else f"actor/{name}"


def _ratio(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))


def _effective_size(total: float, squares: float, count: int) -> float:
    """Return the effective sample size of `count` weights, as a share of their count: (sum w)^2 /
    (n sum w^2). It is 1 if all weights are equal."""
    return total * total / (count * squares)
