"""Orders of a sweep, planned in virtual time before it runs.

1f1b         one forward, one backward (I and W together), after as many forwards as stages follow
zero-bubble  twice as many warm-up forwards, W where there is time; as if links took no time
adapted      planned with the links as they are now
ready        no plan: `ready_choosers`, which the executor asks as it goes
"""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.core.pipeline import (
    Op,
    Order,
    ReadyFirst,
    adapted_quotas,
)
from rollpacker.core.pipeline_time import run
from rollpacker.core.pipeline_work import Link, Work, constant

ORDERS = ("1f1b", "zero-bubble", "adapted", "ready")

Caps = Sequence[int | None] | None
"""Live tokens by stage; None: as many as there are."""


def ready_choosers(
    num_stages: int, *, quotas: Sequence[int] | None = None, caps: Caps = None
) -> list[ReadyFirst]:
    """One for each stage."""
    return [ReadyFirst(stage, quotas=quotas, caps=caps) for stage in range(num_stages)]


def plan_1f1b(num_stages: int, num_micro_batches: int) -> list[Order]:
    """By stage: as many forwards as stages follow, then by turns F and I with its W."""
    orders = []
    for stage in range(num_stages):
        ops = [Op("F", m) for m in range(min(num_stages - stage - 1, num_micro_batches))]
        for m in range(num_micro_batches):
            if len(ops) < num_micro_batches + 2 * m:
                ops.append(Op("F", m + min(num_stages - stage - 1, num_micro_batches)))
            ops += [Op("I", m), Op("W", m)]
        orders.append(tuple(ops))
    return orders


def plan_zero_bubble(work: Work, *, caps: Caps = None) -> list[Order]:
    """By stage: 2 (S - i) - 1 forwards first (ZB-H2), then what is ready of I, F and W, in the
    times of `work` and over links that take none."""
    stages = work.num_stages
    quotas = [2 * (stages - stage) - 1 for stage in range(stages)]
    choosers = ready_choosers(stages, quotas=quotas, caps=caps)
    return list(run(choosers, work, constant([Link()] * (stages - 1))).orders)


def plan_adapted(work: Work, links: Sequence[Link], *, caps: Caps = None) -> list[Order]:
    """By stage: the order for these times and links."""
    sizes = work.message_bytes
    typical = sum(sizes) // max(len(sizes), 1)
    quotas = adapted_quotas(
        work.mean_s("F"),
        work.mean_s("I"),
        [link.seconds(typical) for link in links],
        work.num_micro_batches,
    )
    choosers = ready_choosers(work.num_stages, quotas=quotas, caps=caps)
    return list(run(choosers, work, constant(links)).orders)
