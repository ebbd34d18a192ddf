"""Orders of the ops of a sweep (all micro-batches once through the stages), planned beforehand.

The names are those of `train.pipeline.order`. W is the part of a backward that is for weights.

    1f1b: as many forwards as stages follow, then a forward and a whole backward by turns.
    zero-bubble: twice as many forwards first, W where there is time; as if links took no time.
    adapted: planned with the links as they are now, and improved by a search.
    ready: no plan; before each op, a chooser of `ready_choosers` is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollpacker.pipeline.plan.choosers import (
    Op,
    Order,
    ReadyFirst,
    check_caps,
    even_quotas,
)
from rollpacker.pipeline.plan.search import improve
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.work import Link, Work, constant

SEARCH_OPS = 15_000
"""Number of simulated ops after which the search for a better plan ends, in some 30 ms."""

Caps = Sequence[int | None] | None
"""For each stage, the most tokens whose activations it may keep. None: any number."""


def ready_choosers(
    num_stages: int, *, quotas: Sequence[int] | None = None, caps: Caps = None
) -> list[ReadyFirst]:
    """Return a `ReadyFirst` chooser for each stage, with these `quotas` and `caps`."""
    return [ReadyFirst(stage, quotas=quotas, caps=caps) for stage in range(num_stages)]


def plan_order(name: str, work: Work, links: Sequence[Link], *, caps: Caps = None) -> list[Order]:
    """Return by stage the order of ops called `name` (one of `ORDERS` but `ready`) for times of ops
    (`work`) and links. `caps`: by stage, the most tokens to keep activations of; 1f1b ignores it.
    Raises `ValueError` if one micro-batch exceeds a cap."""
    if name == "1f1b":
        return plan_1f1b(work.num_stages, work.num_micro_batches)
    if name == "zero-bubble":
        return plan_zero_bubble(as_if_even(work), caps=caps)
    assert name == "adapted", name
    return plan_adapted(work, links, caps=caps)


def plan_1f1b(num_stages: int, num_micro_batches: int) -> list[Order]:
    """Return the 1f1b order of each stage: as many forwards as stages follow, then a forward and a
    whole backward by turns. A stage before n others keeps activations of n + 1 micro-batches."""
    orders = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage - 1, num_micro_batches)
        ops = [Op("F", m) for m in range(ahead)]
        for m in range(num_micro_batches):
            if m + ahead < num_micro_batches:
                ops.append(Op("F", m + ahead))
            ops += [Op("I", m), Op("W", m)]
        orders.append(tuple(ops))
    return orders


def plan_zero_bubble(work: Work, *, caps: Caps = None) -> list[Order]:
    """Return the zero-bubble order (ZB-H2) of each stage: stage i of S first runs 2 (S - i) - 1
    forwards, then whichever op has its input (backward for inputs, forward, backward for weights),
    as if links took no time. Raises `ValueError` if a micro-batch alone exceeds one of `caps`."""
    stages = work.num_stages
    check_caps(caps or (), work.tokens)
    choosers = ready_choosers(stages, quotas=even_quotas(stages, 2 * stages - 1), caps=caps)
    return list(run(choosers, work, constant([Link()] * (stages - 1))).orders)


def plan_adapted(
    work: Work, links: Sequence[Link], *, caps: Caps = None, search_ops: int = SEARCH_OPS
) -> list[Order]:
    """Return by stage the best order that a search finds for these times of ops and links, after
    `search_ops` simulated ops. Raises `ValueError` if one micro-batch exceeds one of `caps`."""
    check_caps(caps or (), work.tokens)
    first = run(ready_choosers(work.num_stages, caps=caps), work, constant(links))
    return improve(first.orders, work, links, caps=caps, budget_ops=search_ops)


def as_if_even(work: Work) -> Work:
    """Return a copy of `work` in which all ops take the same time: zero-bubble's order is planned
    for that, as its authors' measurements show."""
    ones = ((1.0,) * work.num_micro_batches,) * work.num_stages
    return replace(work, f_s=ones, i_s=ones, w_s=ones)
