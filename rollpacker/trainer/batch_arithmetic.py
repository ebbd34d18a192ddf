"""Arithmetic of a step, from the config alone: prompts and samples that are submitted to engines,
and tokens that are trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArithmetic:
    """Prompts, samples and tokens of one step. Token numbers are upper bounds, for responses
    that all reach the limit."""

    short_prompts: int
    short_samples_per_prompt: int
    short_samples: int
    cascade_rounds: tuple[tuple[int, int], ...]
    """For each kind of round between short and long ones, its number of prompts and of samples per
    prompt. Such a round generates for prompts that a short round (one that ends without the longest
    responses) put off. Empty: there are no such rounds."""
    long_samples: int
    """Number of samples that a long round (one that waits for all of them) submits to engines."""
    pooled: bool
    """Whether the next short round goes on with the prompts that a short round (one
    that ends without the longest responses) puts off. False: rounds of other kinds are
    held for these prompts."""
    trained_prompts: int
    trained_samples: int
    max_trained_tokens: int
    min_micro_batches: int
    max_micro_batches: int
    updates_per_round: int
    """Number of optimizer updates per step, each on an equal share of the step's prompts."""
    steps: int | None
    """Number of steps of the run. None: until the data's epochs are done."""
    most_carried: int
    """The most prompts that can wait for a later round (one batch of generation) at one time, with
    tokens of unfinished responses kept for them. 0: such tokens are not kept."""

    @property
    def most_samples(self) -> int:
        """The most samples that any kind of round (one batch of generation) submits to engines."""
        cascades = (prompts * samples for prompts, samples in self.cascade_rounds)
        return max(self.short_samples, self.long_samples, *cascades)


def batch_arithmetic(config: RunConfig) -> BatchArithmetic:
    """Compute from a run's config how many prompts and samples each kind of round submits to
    engines, and how many tokens a step trains on."""
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    tail = config.tail_batching
    short_prompts = tail.factors.num_prompts(prompts)
    short_samples = tail.factors.num_samples(samples)
    trained = prompts * samples
    longest = longest_sample(config)
    most = most_micro_batch_tokens(config)
    smaller = config.train.micro_batch_tokens == "auto" and config.train.pipeline.stages > 1
    rows = 1 if smaller else max(most // longest, 1)
    # At least two tokens a row, one of which is predicted.
    fewest = math.ceil(trained / most)
    return BatchArithmetic(
        short_prompts=short_prompts,
        short_samples_per_prompt=short_samples,
        short_samples=short_prompts * short_samples,
        cascade_rounds=tuple(
            (tier.factors.num_prompts(prompts), tier.factors.num_samples(samples))
            for tier in tail.tiers
            if tail.enabled
        ),
        long_samples=trained,
        pooled=tail.pooled,
        trained_prompts=prompts,
        trained_samples=trained,
        max_trained_tokens=trained * longest,
        min_micro_batches=fewest,
        max_micro_batches=max(math.ceil(trained / rows), fewest),
        updates_per_round=config.train.updates_per_round,
        steps=config.train.steps,
        most_carried=_most_carried(config),
    )


def _most_carried(config: RunConfig) -> int:
    prompts, tail = config.rollout.prompts_per_step, config.tail
    if not tail.carries:
        return 0
    races = [
        factors.num_prompts(prompts)
        for factors in (tail.factors, *(tier.factors for tier in tail.tiers))
    ]
    # A queue is one short of a round of its own, and a race adds what it defers.
    queues = 0 if tail.pooled else prompts - 1 + sum(race - 1 for race in races[1:])
    begun_early = races[0] if tail.look_ahead else 0
    return queues + max(races) - prompts + begun_early


def tail_notes(config: RunConfig) -> list[str]:
    """Return sentences about the settings of short and long rounds, and of training that
    begins before all rewards are there, for `--dry-run` to print. An empty list means that
    there is nothing to remark."""
    tail, stream = config.tail_batching, config.stream_trainer
    notes = []
    if tail.chooses:
        assert tail.max_length_shift is not None, "its config says what None means"
        bound = (
            f"; what is trained on is at most {100 * tail.max_length_shift:g} % shorter than those"
        )
        notes.append(
            "the short round's factors are those that it begins with; they are chosen anew for the "
            f"run's own lengths{bound if tail.debias == 'none' else ''}"
        )
    if tail.enabled and tail.balance_sources and not config.routed:
        notes.append("balance_sources changes nothing: all prompts of a run are of one source")
    if tail.enabled and tail.debias != "none":
        notes.append(
            f"losses are weighted by length (debias={tail.debias}) once the policy's own lengths "
            "are known, which takes a long round"
        )
    if stream.enabled and stream.reward_wait:
        trained = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        notes.append(
            f"gradients of up to {int(stream.max_share * trained)} of a step's samples begin while "
            "verdicts are awaited (stream_trainer)"
        )
    return notes


def micro_batch_notes(config: RunConfig) -> list[str]:
    """Return a note if the longest sample allowed does not fit into a micro-batch of the configured
    size; else nothing. A sample's last token is not counted: it does not go through the model."""
    row = longest_sample(config) - 1
    if most_micro_batch_tokens(config) >= row:
        return []
    return [
        f"a sample of more than train.micro_batch_tokens={config.train.micro_batch_tokens} tokens "
        f"has a micro-batch of its own: the memory is for the longest, {row} tokens"
    ]


def most_micro_batch_tokens(config: RunConfig) -> int:
    """Return the most tokens of a micro-batch of several samples. A longer sample gets its own."""
    return config.train.most_micro_batch_tokens(longest_sample(config) - 1)


def longest_sample(config: RunConfig) -> int:
    """Return the number of tokens of the longest prompt with the longest response allowed."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens
