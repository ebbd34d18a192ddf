"""What sweeps are expected to cost while nothing was measured: in proportion to FLOPs, over links
that take no time. It is the same in every run and on every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.pipeline.plan.split import plan_budget
from rollpacker.pipeline.plan.work import Link, Measured, OpCost, StageCost
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.micro_batch import MICRO_BATCH_OVERHEAD_TOKENS

ATTENTION_OF_F = 1 / 3
"""Of attention's FLOPs. The rest is I's: attention has no weights of its own."""


def expected(flops: FlopModel, layers: Sequence[int]) -> Measured:
    """Of a model with these layers on each stage. Its seconds are FLOPs."""
    last = len(layers) - 1
    stages = [_stage_cost(flops, n / sum(layers), stage == last) for stage, n in enumerate(layers)]
    return Measured(stages=tuple(stages), links=(Link(),) * last, bytes_per_token=0.0)


def _stage_cost(flops: FlopModel, share: float, is_last: bool) -> StageCost:
    """Of a stage with this share of the layers: matrices in the layers cost F, I and W the same."""
    per_token = max(flops.body, 1.0) * share / 3
    # Windows that end somewhere make pairs of a token and few others, which count as none.
    pairs = share * flops.attention * sum(window is None for window in flops.windows)

    def op(of_attention: float, of_output: float) -> OpCost:
        return OpCost(
            fixed_s=MICRO_BATCH_OVERHEAD_TOKENS * per_token,
            per_token_s=per_token,
            per_pair_s=of_attention * pairs,
            per_target_s=of_output * flops.output if is_last else 0.0,
        )

    return StageCost(
        f=op(ATTENTION_OF_F, 1 / 3),
        i=op(1 - ATTENTION_OF_F, 2 / 3),  # the output layer's weights have their product here
        w=op(0.0, 0.0),
    )


def expected_budget(
    lengths: Sequence[int],
    cost: Measured,
    *,
    most_tokens: int,
    packs: Callable[[Sequence[int], int], list[list[int]]],
) -> int:
    """The tokens of a micro-batch, up to `most_tokens`, with which a sweep over rows of these
    lengths is expected to be quickest. `packs`: see `plan_budget`."""
    if not lengths:
        return most_tokens
    plan = plan_budget(lengths, cost.stages, cost.links, most_tokens=most_tokens, packs=packs)
    return plan.micro_batch_tokens
