"""The losses of samples, computed from the models' outputs for the samples' tokens.

This module knows no model: the outputs are handed over, whether the models ran on one device or in
pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollpacker import algo
from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import SampleId
from rollpacker.trainer.micro_batch import on_device
from rollpacker.trainer.trainer import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The models' outputs for the N sampled tokens of some samples, sample after sample; each
    tensor is [N]. Gradients flow through `log_probs`, `entropy` and `values`."""

    log_probs: Tensor
    """The policy's log-probs, at the sampling temperature."""
    entropy: Tensor
    ref_log_probs: Tensor | None = None
    """The reference model's log-probs. None: the loss does not use them."""
    values: Tensor | None = None
    """The critic's values. None: there is no critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of one micro-batch, and tensors [N] with a number for each sampled token."""

    losses: Sequence[Tensor]
    """The policy's loss, then the critic's if there is one: scalars to call `backward` on, each the
    sum of token losses times token weights."""
    per_token: Tensor
    entropy: Tensor
    log_ratio: Tensor
    """The trainer's log-probs minus the engine's."""
    update_log_ratio: Tensor | None
    """The trainer's log-probs now minus its log-probs under the weights that sampled. None: the
    policy was not updated since it sampled, so the two are equal."""
    sums: Mapping[str, Tensor]
    value_sums: Mapping[str, Tensor]

    def detached(self) -> Losses:
        """Return the losses without their autograd graph."""
        return replace(self, losses=[loss.detach() for loss in self.losses])

    @property
    def finite(self) -> bool:
        """Whether the losses are finite, and also the log-probs, as the loss may have clipped a
        ratio of non-finite ones."""
        whole = torch.stack([loss.detach().double() for loss in self.losses])
        return bool(whole.isfinite().all() & self.log_ratio.isfinite().all())


def losses_of(
    outputs: Outputs, samples: Sequence[TrainSample], *, config: AlgorithmConfig
) -> Losses:
    """Compute these samples' share of the step's losses from the models' outputs for them."""
    log_probs, num_targets = outputs.log_probs, [s.num_targets for s in samples]
    rollout = _flat([s.rollout_log_probs for s in samples], log_probs)
    places = torch.arange(len(samples)).repeat_interleave(torch.tensor(num_targets))
    old = _old_log_probs(samples, log_probs, rollout, config)
    reference = outputs.ref_log_probs
    token = algo.token_loss(
        log_probs,
        log_probs.detach() if old is None else old,
        _flat([s.advantage for s in samples], log_probs, num_targets),
        on_device(places, log_probs.device),
        num_samples=len(samples),
        config=config,
        ref_log_probs=_known_reference(samples, log_probs) if reference is None else reference,
        rollout_log_probs=rollout,
        entropy=outputs.entropy,
    )
    weights = _flat([s.token_weight for s in samples], log_probs, num_targets)
    losses = [(token.per_token * weights).sum()]
    value_sums: Mapping[str, Tensor] = {}
    if outputs.values is not None:
        value = algo.value_loss(
            outputs.values,
            _flat([_needed(s.values, "values") for s in samples], log_probs),
            _flat([_needed(s.returns, "returns") for s in samples], log_probs),
            config=config,
        )
        losses.append((value.per_token * weights).sum())
        value_sums = value.sums
    return Losses(
        losses=losses,
        per_token=token.per_token.detach(),
        entropy=outputs.entropy.detach(),
        log_ratio=log_probs.detach() - rollout,
        update_log_ratio=None if old is None else log_probs.detach() - old,
        sums=token.sums,
        value_sums=value_sums,
    )


def no_losses(outputs: Outputs) -> Losses:
    """Return losses of weight zero. The backward pass of a filler (a micro-batch run only to keep
    step with other ranks) gives every parameter a zero gradient with them."""
    losses = [(outputs.log_probs.sum() + outputs.entropy.sum()) * 0.0]
    if outputs.values is not None:
        losses.append(outputs.values.sum() * 0.0)
    return Losses(
        losses=losses,
        per_token=outputs.log_probs.detach(),
        entropy=outputs.entropy.detach(),
        log_ratio=outputs.log_probs.detach(),
        update_log_ratio=None,
        sums={},
        value_sums={},
    )


def describe_bad_losses(losses: Losses, samples: Sequence[TrainSample]) -> str:
    """Return a message that names the samples whose loss or log-probs are not finite."""
    finite = losses.per_token.isfinite() & losses.log_ratio.isfinite()
    lengths = [s.num_targets for s in samples]
    rows = torch.split(finite, lengths)
    bad = [s.sample for s, row in zip(samples, rows, strict=True) if not row.all()]
    values = ", ".join(f"{loss.item()}" for loss in losses.losses)
    which = named(bad) if bad else f"only the sum of {named([s.sample for s in samples])}"
    return f"the loss is {values} (samples: {which}); no update was applied"


def named(samples: Sequence[SampleId], limit: int = 5) -> str:
    """Return a text with the first `limit` different samples and the number of further ones."""
    samples = list(dict.fromkeys(samples))
    more = f" and {len(samples) - limit} more" if len(samples) > limit else ""
    return ", ".join(map(str, samples[:limit])) + more


def _flat(
    values: Sequence[float | tuple[float, ...]], like: Tensor, counts: Sequence[int] = ()
) -> Tensor:
    """Put the samples' values into one tensor [N], sample after sample. A value that is a
    single number is repeated for each token that the model sampled; `counts` has each
    sample's number of these."""
    flat: list[float] = []
    for index, value in enumerate(values):
        flat.extend(value if isinstance(value, tuple) else (value,) * counts[index])
    assert len(flat) == len(like), "there must be one number per response token"
    return on_device(torch.tensor(flat, dtype=like.dtype), like.device)


def _old_log_probs(
    samples: Sequence[TrainSample], like: Tensor, rollout: Tensor, config: AlgorithmConfig
) -> Tensor | None:
    """Return the log-probs [N] under the weights that sampled, which are the importance ratio's
    denominator. None: the policy was not updated since, so its present log-probs serve."""
    if config.old_logprobs == "rollout":
        return rollout
    known = [s.old_log_probs for s in samples if s.old_log_probs is not None]
    assert len(known) in (0, len(samples)), "the samples of one update"
    return _flat(known, like) if known else None


def _known_reference(samples: Sequence[TrainSample], like: Tensor) -> Tensor | None:
    """Return the reference model's log-probs that the samples brought along; None if some sample
    has none. They serve a metric alone, as a penalty on them is in the advantages already."""
    known = [s.ref_log_probs for s in samples if s.ref_log_probs is not None]
    return _flat(known, like) if len(known) == len(samples) else None


def _needed(values: tuple[float, ...] | None, name: str) -> tuple[float, ...]:
    assert values is not None, f"training the critic needs {name}"
    return values
