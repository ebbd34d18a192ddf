"""Splits a model's layers over pipeline stages, and finds the size of micro-batches that is best
for a pipeline."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from rollpacker.core.packs import plan_packs
from rollpacker.pipeline.plan.plan import ready_choosers
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.work import Link, Load, StageCost, Work, constant

BUDGET_FACTOR = 1.2599210498948732
"""Factor between two numbers of tokens that `plan_budget` tries: three of them per doubling."""
MOST_MICRO_BATCHES = 16
"""Number of micro-batches per stage from which no smaller micro-batches are tried: filling and
draining the pipeline then cost less than a tenth."""


def split_layers(
    layer_s: Sequence[float],
    num_stages: int,
    *,
    last_s: float = 0.0,
    slowness: Sequence[float] | None = None,
) -> list[int]:
    """Return the number of layers of each stage, so that the slowest stage is as fast as it can be;
    among such splits the most even one. A stage's layers are neighbours. `layer_s`: seconds (or any
    unit) of each layer, forward and backward. `last_s`: those of the output layer and loss, on the
    last stage. `slowness`: by stage, the factor by which the same work takes longer; None: 1.
    Raises `ValueError` with fewer layers than stages."""
    count = len(layer_s)
    if count < num_stages:
        raise ValueError(
            f"{num_stages} stages need as many layers, and the model has {count}: lower "
            "train.pipeline.stages"
        )
    sums = [0.0]
    for seconds in layer_s:
        sums.append(sums[-1] + seconds)
    factors = [1.0] * num_stages if slowness is None else list(slowness)
    assert len(factors) == num_stages and min(factors) > 0

    def stage_s(stage: int, first: int, end: int) -> float:
        extra = last_s if stage == num_stages - 1 else 0.0
        return factors[stage] * (sums[end] - sums[first] + extra)

    slowest = _least(count, num_stages, max, stage_s)[0]
    limit = slowest * (1 + 1e-9)

    def square(stage: int, first: int, end: int) -> float:
        seconds = stage_s(stage, first, end)
        return seconds * seconds if seconds <= limit else math.inf

    cuts = _least(count, num_stages, operator.add, square)[1]
    return [end - first for first, end in zip([0, *cuts], [*cuts, count], strict=True)]


def _least(
    count: int,
    num_stages: int,
    joined: Callable[[float, float], float],
    cost: Callable[[int, int, int], float],
) -> tuple[float, list[int]]:
    """Return the least cost of a split of `count` layers, and the first layer of each stage but the
    first. `cost(stage, first, end)` is the cost of one stage with layers `first` to `end - 1`, and
    `joined` adds it to that of the stages before. Exact, O(stages x layers^2)."""
    table = [math.inf] * (count + 1)
    table[0] = 0.0
    choices: list[list[int]] = []
    for stage in range(num_stages):
        after, choice = [math.inf] * (count + 1), [0] * (count + 1)
        rest = num_stages - 1 - stage
        for end in range(stage + 1, count - rest + 1):
            for first in range(stage, end):
                total = joined(table[first], cost(stage, first, end))
                if total < after[end]:
                    after[end], choice[end] = total, first
        table = after
        choices.append(choice)
    cuts, end = [], count
    for choice in reversed(choices):
        end = choice[end]
        cuts.append(end)
    return table[count], cuts[-2::-1]


def check_layers(layers: Sequence[int], *, num_layers: int, num_stages: int) -> None:
    """Raise `ValueError` unless each stage has a layer and the numbers add up to `num_layers`."""
    where = f"train.pipeline.layers={list(layers)}"
    if len(layers) != num_stages:
        raise ValueError(f"{where} must have a number for each of {num_stages} stages")
    advice = f"split the model's {num_layers} layers, or set it to auto"
    if min(layers) < 1:
        raise ValueError(f"{where}: every stage needs a layer; {advice}")
    if sum(layers) != num_layers:
        raise ValueError(
            f"{where} adds up to {sum(layers)}, but the model has {num_layers} layers; {advice}"
        )


def layers_of_stages(
    given: Sequence[int], *, num_layers: int, num_stages: int, layer_work: float, last_work: float
) -> tuple[int, ...]:
    """Return the number of layers of each stage: `given`, or if that is empty, the split with the
    least work on the slowest stage. A layer is `layer_work`; the last stage has `last_work`
    besides. Raises `ValueError` if `given` does not add up, or layers are fewer than stages."""
    if given:
        check_layers(given, num_layers=num_layers, num_stages=num_stages)
        return tuple(given)
    return tuple(split_layers([layer_work] * num_layers, num_stages, last_s=last_work))


def expected_bubble(
    costs: Sequence[tuple[float, float, float]],
    num_micro_batches: int,
    live_micro_batches: Sequence[int],
) -> float:
    """Return the expected share of all stages' time that is spent waiting, if each op runs as soon
    as its input is there and links take no time. `costs`: by stage, of forward, backward for inputs
    and backward for weights, in any unit. A stage keeps activations of at most
    `live_micro_batches`."""
    f_s, i_s, w_s = zip(*costs, strict=True)
    work = Work.even(num_micro_batches, f_s=f_s, i_s=i_s, w_s=w_s)
    links = constant([Link()] * (len(costs) - 1))
    return run(ready_choosers(len(costs), caps=live_micro_batches), work, links).bubble_share


def plan_budget(
    lengths: Sequence[int],
    costs: Sequence[StageCost],
    links: Sequence[Link],
    *,
    most_tokens: int,
    packs: Callable[[Sequence[int], int], list[list[int]]] = plan_packs,
) -> int:
    """Return the limit on a micro-batch's tokens with which rows (a prompt with its response each)
    of these lengths are expected to pass the stages quickest, by simulation with `ReadyFirst`.

    `packs` (lengths, budget) returns the rows of each micro-batch, by number. Small micro-batches
    fill and drain the pipeline fast and are even in size; each op has a fixed cost, which large
    ones save. Numbers of tokens from `most_tokens` (what memory allows) down are tried. Without
    rows, `most_tokens` is returned.
    """
    fewest = max(sum(lengths) // (MOST_MICRO_BATCHES * len(costs)), 1)
    best, best_s = most_tokens, math.inf
    seen = {0}
    budget = float(most_tokens)
    while budget >= fewest or (best_s == math.inf and lengths):
        packed = packs(lengths, round(budget))
        if len(packed) not in seen:
            seen.add(len(packed))
            loads = [Load.of([lengths[row] for row in pack]) for pack in packed]
            choosers, work = ready_choosers(len(costs)), Work.of(costs, loads)
            took_s = run(choosers, work, constant(links)).makespan_s
            if took_s < best_s:
                best, best_s = round(budget), took_s
        budget /= BUDGET_FACTOR
    return best
