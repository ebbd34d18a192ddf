"""Make training samples from responses and rewards, with their advantages and token weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.shaping import shape_rewards
from rollpacker.algo.step import StepAdvantages, step_advantages
from rollpacker.algo.turns import Turns
from rollpacker.algo.weights import token_weights
from rollpacker.core.ids import SampleId
from rollpacker.spans import outside
from rollpacker.trainer.trainer import NonFiniteError, TokenScores, TrainSample

if TYPE_CHECKING:
    from rollpacker.engines.engine import Response
    from rollpacker.rewards.reward import TurnRewards


def build_train_samples(
    groups: Sequence[Sequence[tuple[Response, float]]],
    config: AlgorithmConfig,
    *,
    weights: Sequence[Sequence[float]] | None = None,
    partial: bool = False,
    scores: Mapping[SampleId, TokenScores] | None = None,
    max_response_tokens: int | None = None,
    updates: Sequence[int] | None = None,
    reward_parts: Mapping[SampleId, Mapping[str, float | None]] | None = None,
    turn_rewards: Mapping[SampleId, TurnRewards] | None = None,
) -> tuple[list[TrainSample], dict[str, float]]:
    """Return all training samples of one step, in the order given, and metrics of their advantages.
    Pass the whole step at once, since the losses' denominators count all its tokens or samples.
    Raises `NonFiniteError`, naming the sample, if a reward is NaN or infinite; `ValueError` if the
    algorithm cannot work with what it is given.

    - `groups`: for each prompt its (response, reward) pairs, without samples whose reward failed.
    - `weights`: for each sample, in the order of `groups`, a factor of its loss (None: 1). The
      denominators do not depend on it.
    - `partial`: whether the step has further groups, not given here. Token weights then lack the
      denominator: all are too large by one common factor.
    - `scores`: log-probs and values of every sample, needed if `config.needs_scores`.
    - `max_response_tokens`: needed for the overlong penalty and for fixed-length losses.
    - `updates`: for each group, the number (from 0) of the step's optimizer update that trains on
      it (None: 0). Each update has its own denominators; later ones take old log-probs from
      `scores`.
    - `reward_parts`: each reward's own values, for an advantage function that asks for them.
    - `turn_rewards`: rewards by dialogue turn; a sample that is not among them has one turn."""
    flat = [(response, reward) for group in groups for response, reward in group]
    _check_rewards(groups, config, partial=partial)
    if not flat:
        return [], {}
    responses = [response for response, _ in flat]
    lengths = [response.num_drawn for response in responses]
    rewards = torch.tensor([reward for _, reward in flat], dtype=torch.float64)
    of_group = [0] * len(groups) if updates is None else updates
    of_update = [u for u, group in zip(of_group, groups, strict=True) for _ in group]
    shaped = shape_rewards(rewards, lengths, config=config, max_response_tokens=max_response_tokens)
    step = step_advantages(
        shaped,
        torch.tensor([index for index, group in enumerate(groups) for _ in group]),
        lengths,
        config=config,
        turns=_turns(responses, rewards, shaped, turn_rewards or {}, config),
        known=_for_own(responses, reward_parts or {}, config),
        **_flat_scores(responses, scores, config),
    )
    denominator = 1 if partial else None
    of_token = _token_weights(responses, of_update, config, denominator, max_response_tokens)
    of_sample = [1.0] * len(flat) if weights is None else [w for group in weights for w in group]
    of_token = [t * w for t, w in zip(of_token, of_sample, strict=True)]
    samples = _samples(responses, of_token, of_sample, step, scores or {})
    if config.old_logprobs == "recomputed":
        samples = [_with_old(s, u, scores) for s, u in zip(samples, of_update, strict=True)]
    return samples, _metrics(step, samples)


def _check_rewards(
    groups: Sequence[Sequence[tuple[Response, float]]], config: AlgorithmConfig, *, partial: bool
) -> None:
    if partial and config.needs_whole_batch:
        raise ValueError(
            f"algorithm {config.name} compares rewards over the whole step, so it cannot begin "
            "before the round is over: switch stream_trainer off"
        )
    for group in groups:
        for response, reward in group:
            if not math.isfinite(reward):
                raise NonFiniteError(f"the reward of sample {response.sample} is {reward}")
        if len(group) == 1 and config.needs_groups:
            raise ValueError(
                f"sample {group[0][0].sample} is alone in its group, and algorithm {config.name} "
                f"(normalize_mean={config.normalize_mean}) compares samples of one prompt: "
                "set rollout.samples_per_prompt to 2 or more"
            )


def _is_left_out(response: Response, config: AlgorithmConfig) -> bool:
    return config.mask_truncated and response.is_cut_off


def _token_weights(
    responses: Sequence[Response],
    of_update: Sequence[int],
    config: AlgorithmConfig,
    denominator: int | None,
    max_response_tokens: int | None,
) -> list[float]:
    """Return for each response the weight of its tokens' losses. Weights are divided by
    `denominator`, or if that is None by a count over the responses of the same update
    (`of_update`: each response's)."""
    weights = [0.0] * len(responses)
    for update in set(of_update):
        places = [place for place, of in enumerate(of_update) if of == update]
        of_places = token_weights(
            [responses[place].num_drawn for place in places],
            config=config,
            denominator=denominator,
            counted=[not _is_left_out(responses[place], config) for place in places],
            max_response_tokens=max_response_tokens,
        )
        for place, weight in zip(places, of_places, strict=True):
            weights[place] = weight
    return weights


def _with_old(
    sample: TrainSample, update: int, scores: Mapping[SampleId, TokenScores] | None
) -> TrainSample:
    """Return the sample with the trainer's log-probs under the weights that sampled it (from
    `scores`); for the step's first update (number 0), whose weights are the same, as it is."""
    if update == 0:
        return sample
    own = (scores or {}).get(sample.sample)
    assert own is not None and own.log_probs is not None, f"{sample.sample} was not asked about"
    return replace(sample, old_log_probs=own.log_probs)


def _turns(
    responses: Sequence[Response],
    rewards: Tensor,
    shaped: Tensor,
    turn_rewards: Mapping[SampleId, TurnRewards],
    config: AlgorithmConfig,
) -> Turns | None:
    """Return the dialogue turns of these samples, each with its number of sampled tokens and its
    reward; None if the algorithm gives credit to whole samples. What penalties take off a sample's
    reward (`shaped` minus `rewards`, [N]) is taken off its last turn."""
    if config.credit == "trajectory":
        return None
    counts: list[int] = []
    lengths: list[int] = []
    values: list[float] = []
    num_drawn: tuple[int, ...]
    of_turns: tuple[float, ...]
    for response, reward, final in zip(responses, rewards.tolist(), shaped.tolist(), strict=True):
        known = turn_rewards.get(response.sample)
        if known is None or len(known.values) == 1:
            num_drawn, of_turns = (response.num_drawn,), (final,)
        else:
            num_drawn = known.num_drawn
            assert sum(num_drawn) == response.num_drawn, f"{response.sample}: tokens of its turns"
            assert len(num_drawn) == len(known.values), f"{response.sample}: rewards of its turns"
            of_turns = (*known.values[:-1], known.values[-1] + (final - reward))
        counts.append(len(num_drawn))
        lengths += num_drawn
        values += of_turns
    return Turns(counts, lengths, torch.tensor(values, dtype=torch.float64))


def _for_own(
    responses: Sequence[Response],
    reward_parts: Mapping[SampleId, Mapping[str, float | None]],
    config: AlgorithmConfig,
) -> dict[str, object]:
    """Return the further tensors that a user's own advantage function may ask for, by name: [N]
    with a number per sample, or [K] with one per sampled token of all samples. Empty if the
    algorithm has no such function."""
    if config.own_advantages is None:
        return {}
    parts = [reward_parts.get(response.sample, {}) for response in responses]
    names = dict.fromkeys(name for of_sample in parts for name in of_sample)

    def values(name: str) -> Tensor:
        found = [of_sample.get(name) for of_sample in parts]
        numbers = [math.nan if value is None else value for value in found]
        return torch.tensor(numbers, dtype=torch.float64)

    return {
        "rewards_by_name": {name: values(name) for name in names},
        "truncated": torch.tensor([r.is_cut_off for r in responses]),
        "tokens": torch.tensor([token for r in responses for token in outside(r.tokens, r.given)]),
        "rollout_log_probs": torch.tensor(
            [value for r in responses for value in r.log_probs], dtype=torch.float64
        ),
    }


def _flat_scores(
    responses: Sequence[Response],
    scores: Mapping[SampleId, TokenScores] | None,
    config: AlgorithmConfig,
) -> dict[str, Tensor | None]:
    """Return the models' scores (log-probs, values) of all samples by name, one tensor for each
    name, sample after sample; None for a score that some sample lacks. Empty if the algorithm needs
    none. Raises `ValueError` for a sample without scores."""
    if not config.needs_scores:
        return {}
    names = ("log_probs", "ref_log_probs", "teacher_log_probs", "values")
    found: dict[str, list[float] | None] = {name: [] for name in names}
    for response in responses:
        own = (scores or {}).get(response.sample)
        if own is None:
            raise ValueError(
                f"algorithm {config.name} needs the scores of sample {response.sample}, and there "
                "are none"
            )
        for name in names:
            of_sample = getattr(own, name)
            so_far = found[name]
            if of_sample is None or so_far is None:
                found[name] = None
                continue
            assert len(of_sample) == response.num_drawn, f"{response.sample}: {name}"
            so_far.extend(of_sample)
    return {
        name: None if flat is None else torch.tensor(flat, dtype=torch.float64)
        for name, flat in found.items()
    }


def _samples(
    responses: Sequence[Response],
    token_weights: Sequence[float],
    loss_weights: Sequence[float],
    step: StepAdvantages,
    scores: Mapping[SampleId, TokenScores],
) -> list[TrainSample]:
    advantages = _by_sample(step, [response.num_drawn for response in responses])
    returns = None if step.returns is None else step.returns.tolist()
    starts = list(accumulate((r.num_drawn for r in responses), initial=0))
    samples = []
    for index, (response, weight) in enumerate(zip(responses, token_weights, strict=True)):
        tokens = slice(starts[index], starts[index + 1])
        own = scores.get(response.sample, TokenScores())
        samples.append(
            TrainSample(
                sample=response.sample,
                prompt_tokens=response.prompt_tokens,
                response_tokens=response.tokens,
                given=response.given,
                rewritten=response.rewritten,
                rollout_log_probs=response.log_probs,
                advantage=advantages[index],
                token_weight=weight,
                loss_weight=loss_weights[index],
                ref_log_probs=own.ref_log_probs,
                values=own.values,
                returns=None if returns is None else tuple(returns[tokens]),
            )
        )
    return samples


def _by_sample(
    step: StepAdvantages, num_drawn: Sequence[int]
) -> Sequence[float | tuple[float, ...]]:
    """Return for each sample its advantage, or the advantages of its sampled tokens. A sample of a
    single turn has one advantage."""
    if step.turns is not None:
        per_token, has_one = step.turns.over_tokens(step.advantages), step.turns.counts
    elif step.per_token:
        per_token, has_one = step.advantages, [0] * len(num_drawn)
    else:
        found: list[float] = step.advantages.tolist()
        return found
    parts = torch.split(per_token, list(num_drawn))
    return [
        part[0].item() if count == 1 else tuple(part.tolist())
        for part, count in zip(parts, has_one, strict=True)
    ]


def _metrics(step: StepAdvantages, samples: Sequence[TrainSample]) -> dict[str, float]:
    num_zero = sum(not any(sample.advantages) for sample in samples)
    return {
        "critic/advantages/mean": step.advantages.mean().item(),
        "critic/advantages/max": step.advantages.max().item(),
        "critic/advantages/min": step.advantages.min().item(),
        "critic/zero_advantages": num_zero / len(samples),
        **step.metrics,
    }
