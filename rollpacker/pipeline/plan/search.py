"""Better orders of a pipeline's ops, by local search.

Ready-first (each stage runs whichever op has its input) never waits for something better, which now
and then costs a few percent. A tabu search (as for job shops: Nowicki and Smutnicki 1996) starts
from ready-first's orders: take the longest chain of ops and messages without a gap, which alone
makes the sweep as long as it is; exchange two neighbours on one stage in the chain; keep the best
exchange, even a worse one, and do not undo it for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollpacker.pipeline.plan.choosers import KINDS, Kind, Op, Order
from rollpacker.pipeline.plan.work import Link, Work

TABU_LENGTH = 8
TRIED_AT_ONCE = 12
"""Number of exchanges of two ops that one step of the search tries at most."""

_Ops = list[list[Op]]
OpPlace = tuple[int, int]
"""The place of an op: the stage's number, and the op's index in the stage's order."""


def improve(
    orders: Sequence[Order],
    work: Work,
    links: Sequence[Link],
    *,
    caps: Sequence[int | None] | None = None,
    budget_ops: int,
) -> list[Order]:
    """Exchange neighbouring ops in `orders` (by stage, within `caps`), and return the best orders
    found. The search ends after `budget_ops` simulated ops, or with nothing left to exchange."""
    sweep = _Sweep(work, links)
    current: _Ops = [list(order) for order in orders]
    length_s, chain = sweep.longest_chain(current)
    best, best_s = [tuple(order) for order in current], length_s
    least_s = max(map(work.stage_s, range(work.num_stages)))
    left = budget_ops // max(sum(map(len, orders)), 1)
    tabu: list[tuple[int, Op, Op]] = []
    while left > 0 and best_s > least_s * (1 + 1e-9):
        found = None
        for stage, place in _exchanges(current, chain, work, caps)[: min(TRIED_AT_ONCE, left)]:
            first, second = current[stage][place : place + 2]
            current[stage][place : place + 2] = second, first
            trial_s, trial_chain = sweep.longest_chain(current)
            current[stage][place : place + 2] = first, second
            left -= 1
            allowed = (stage, first, second) not in tabu or trial_s < best_s - 1e-12
            if allowed and (found is None or trial_s < found[0]):
                found = (trial_s, trial_chain, stage, place)
        if found is None:
            break
        length_s, chain, stage, place = found
        first, second = current[stage][place : place + 2]
        current[stage][place : place + 2] = second, first
        tabu = [*tabu, (stage, second, first)][-TABU_LENGTH:]
        if length_s < best_s - 1e-12:
            best, best_s = [tuple(order) for order in current], length_s
    return best


def _exchanges(
    orders: _Ops, chain: Sequence[OpPlace], work: Work, caps: Sequence[int | None] | None
) -> list[OpPlace]:
    """Return the places of ops that may be exchanged with the next op of their stage, both in the
    longest chain of waiting ops. Places where the chain enters or leaves a stage come first."""
    ends: list[OpPlace] = []
    inner: list[OpPlace] = []
    for index in range(len(chain) - 1):
        (stage, place), (next_stage, next_place) = chain[index], chain[index + 1]
        if stage != next_stage or next_place != place + 1:
            continue
        if not _may_exchange(orders[stage], place, stage, work, caps):
            continue
        starts = index == 0 or chain[index - 1][0] != stage
        stops = index + 2 == len(chain) or chain[index + 2][0] != stage
        (ends if starts or stops else inner).append((stage, place))
    return ends + inner


def _may_exchange(
    order: Sequence[Op], place: int, stage: int, work: Work, caps: Sequence[int | None] | None
) -> bool:
    first, second = order[place], order[place + 1]
    if first.kind == second.kind or first.micro_batch == second.micro_batch:
        return False
    cap = None if caps is None else caps[stage]
    if cap is None or (first.kind, second.kind) != ("W", "F"):
        return True
    # The forward would come before what makes room for it.
    done = order[:place]
    forwards = sum(1 for op in done if op.kind == "F") + 1
    freed = sum(1 for op in done if op.kind == "W")
    return sum(work.tokens[:forwards]) - sum(work.tokens[:freed]) <= cap


Cause = OpPlace | None
"""The op for which another op had to wait: the one before it on its stage, or the one whose message
came last. None: the other op waited for nothing."""


class _Sweep:
    """Computes the seconds of a sweep with given orders, faster than `virtual_time.run` does."""

    def __init__(self, work: Work, links: Sequence[Link]) -> None:
        self._num_stages = work.num_stages
        self._count = work.num_micro_batches
        self._seconds: list[dict[Kind, tuple[float, ...]]] = [
            {kind: work.table(kind)[stage] for kind in KINDS} for stage in range(work.num_stages)
        ]
        self._latency_s = [link.latency_s for link in links]
        self._leaves_s = [[link.leaves_s(size) for size in work.message_bytes] for link in links]

    def longest_chain(self, orders: _Ops) -> tuple[float, list[OpPlace]]:
        """Return the seconds until all ops are done, and the longest chain of ops that waited for
        each other, first to last. If the orders deadlock: infinity and no places."""
        num_stages, count = self._num_stages, self._count
        causes: list[list[Cause]] = [[None] * len(order) for order in orders]
        at, free_s = [0] * num_stages, [0.0] * num_stages
        input_s = {kind: [[-1.0] * count for _ in orders] for kind in ("F", "I")}
        """Second at which each op's input arrives, by kind, stage and micro-batch; -1: unknown."""
        input_s["F"][0] = [0.0] * count
        senders: dict[str, list[list[Cause]]] = {
            kind: [[None] * count for _ in orders] for kind in ("F", "I")
        }
        """By kind, stage and micro-batch, the op that decided when the input arrives."""
        left: dict[str, list[tuple[float, Cause]]] = {
            kind: [(-1.0, None)] * num_stages for kind in ("F", "I")
        }
        """By direction and link, the second after its last message, and the op that made that."""
        waiting = list(range(num_stages))
        while waiting:
            stage = waiting.pop()
            order, seconds, time_s = orders[stage], self._seconds[stage], free_s[stage]
            told = set()
            for place in range(at[stage], len(order)):
                kind, m = order[place]
                cause: Cause = (stage, place - 1) if place else None
                if kind != "W":
                    arrives_s = input_s[kind][stage][m]
                    if arrives_s < 0:
                        break
                    if arrives_s > time_s:
                        time_s, cause = arrives_s, senders[kind][stage][m]
                time_s += seconds[kind][m]
                causes[stage][place] = cause
                at[stage] = place + 1
                if kind == "W" or (kind == "I" and not stage):
                    continue
                if kind == "F" and stage == num_stages - 1:
                    input_s["I"][stage][m], senders["I"][stage][m] = time_s, (stage, place)
                    continue
                link, target = (stage, stage + 1) if kind == "F" else (stage - 1, stage - 1)
                sent_s, sender = left[kind][link]
                if time_s >= sent_s:
                    sent_s, sender = time_s, (stage, place)
                sent_s += self._leaves_s[link][m]
                left[kind][link] = sent_s, sender
                input_s[kind][target][m] = sent_s + self._latency_s[link]
                senders[kind][target][m] = sender
                told.add(target)
            free_s[stage] = time_s
            waiting += told
        if any(done < len(order) for done, order in zip(at, orders, strict=True)):
            return math.inf, []
        length_s = max(free_s)
        chain: list[OpPlace] = []
        stage = free_s.index(length_s)
        following: Cause = (stage, len(orders[stage]) - 1) if self._count else None
        while following is not None:
            chain.append(following)
            following = causes[following[0]][following[1]]
        return length_s, chain[::-1]
