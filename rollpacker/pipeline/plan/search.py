"""Better orders than ready-first finds, by local search.

Ready-first never waits for something better, which now and then costs a few percent. A tabu search
(as for job shops: Nowicki and Smutnicki 1996) starts from its orders: take the longest chain of ops
and messages without a gap, which alone makes the sweep as long as it is; exchange two neighbours on
one stage in it; keep the best exchange, even a worse one, and do not undo it for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollpacker.pipeline.plan.choosers import KINDS, Kind, Op, Order
from rollpacker.pipeline.plan.work import Link, Work

TABU_LENGTH = 8
TRIED_AT_ONCE = 12
"""Exchanges compared in one step."""

_Ops = list[list[Op]]
Place = tuple[int, int]
"""A stage, and where in its order."""


def improve(
    orders: Sequence[Order],
    work: Work,
    links: Sequence[Link],
    *,
    caps: Sequence[int | None] | None = None,
    budget_ops: int,
) -> list[Order]:
    """Orders whose sweep is at most as long as that of `orders`, which must be valid. The search
    ends when it has timed `budget_ops` ops, or nothing is left to exchange."""
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
    orders: _Ops, chain: Sequence[Place], work: Work, caps: Sequence[int | None] | None
) -> list[Place]:
    """(stage, place) of ops in the chain that may change places with the next one, which is in the
    chain too: first those at the ends of a run on one stage, where an exchange helps most."""
    ends: list[Place] = []
    inner: list[Place] = []
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


class _Sweep:
    """Times orders fast: one op after the other, without events."""

    def __init__(self, work: Work, links: Sequence[Link]) -> None:
        self.num_stages = work.num_stages
        self.num_micro_batches = work.num_micro_batches
        self.seconds: list[dict[Kind, tuple[float, ...]]] = [
            {kind: work.table(kind)[stage] for kind in KINDS} for stage in range(work.num_stages)
        ]
        self.latency_s = [link.latency_s for link in links]
        self.leaves_s = [[link.leaves_s(size) for size in work.message_bytes] for link in links]

    def longest_chain(self, orders: _Ops) -> tuple[float, list[Place]]:
        """Seconds of the sweep, and the ops that make it so long, first to last. Infinite, without
        a chain, where the orders deadlock."""
        if self.num_micro_batches == 0:
            return 0.0, []
        trial = _Trial(self, orders)
        waiting = list(range(self.num_stages))
        while waiting:
            waiting += trial.advance(waiting.pop())
        if any(trial.at[stage] < len(order) for stage, order in enumerate(orders)):
            return math.inf, []
        return max(trial.free_s), trial.chain()


class _Trial:
    """One timing of some orders."""

    def __init__(self, sweep: _Sweep, orders: _Ops) -> None:
        count, stages = sweep.num_micro_batches, sweep.num_stages
        self._sweep = sweep
        self._orders = orders
        self.at = [0] * stages
        """How many ops of each stage are timed."""
        self.free_s = [0.0] * stages
        self._ends_s = [[0.0] * (3 * count) for _ in range(stages)]
        self._waited = [[False] * (3 * count) for _ in range(stages)]
        """The op began when its input came, not when the op before it was over."""
        self._input_s = {kind: [[-1.0] * count for _ in range(stages)] for kind in ("F", "I")}
        """Negative: not known yet."""
        self._input_s["F"][0] = [0.0] * count
        self._left_s = {kind: [0.0] * stages for kind in ("F", "I")}

    def advance(self, stage: int) -> list[int]:
        """Times the stage's ops up to one whose input is not known; the stages that got one."""
        sweep, order, seconds = self._sweep, self._orders[stage], self._sweep.seconds[stage]
        ends_s, waited = self._ends_s[stage], self._waited[stage]
        f_input_s, i_input_s = self._input_s["F"][stage], self._input_s["I"][stage]
        last = sweep.num_stages - 1
        time_s, place = self.free_s[stage], self.at[stage]
        down = up = False
        while place < len(order):
            kind, m = order[place]
            if kind != "W":
                input_s = (f_input_s if kind == "F" else i_input_s)[m]
                if input_s < 0:
                    break
                if input_s > time_s:
                    time_s, waited[place] = input_s, True
            time_s += seconds[kind][m]
            ends_s[place] = time_s
            place += 1
            if kind == "F":
                if stage == last:
                    i_input_s[m] = time_s
                else:
                    self._send("F", stage, stage + 1, m, time_s)
                    down = True
            elif kind == "I" and stage:
                self._send("I", stage - 1, stage - 1, m, time_s)
                up = True
        self.at[stage], self.free_s[stage] = place, time_s
        return [*([stage + 1] if down else []), *([stage - 1] if up else [])]

    def _send(self, kind: Kind, link: int, target: int, m: int, now_s: float) -> None:
        left_s = self._left_s[kind]
        left_s[link] = max(now_s, left_s[link]) + self._sweep.leaves_s[link][m]
        self._input_s[kind][target][m] = left_s[link] + self._sweep.latency_s[link]

    def chain(self) -> list[Place]:
        """From the op that ends last back to one that nothing held up."""
        places = [{op: place for place, op in enumerate(order)} for order in self._orders]
        stage = self.free_s.index(max(self.free_s))
        place = len(self._orders[stage]) - 1
        chain = [(stage, place)]
        while True:
            if self._waited[stage][place]:
                kind, m = self._orders[stage][place]
                if kind == "I" and stage < self._sweep.num_stages - 1:
                    stage += 1
                    m = self._first_in_queue("I", stage - 1, m, places[stage], stage)
                elif kind == "F":
                    stage -= 1
                    m = self._first_in_queue("F", stage, m, places[stage], stage)
                place = places[stage][Op(kind, m)]
            elif place == 0:
                return chain[::-1]
            else:
                place -= 1
            chain.append((stage, place))

    def _first_in_queue(
        self, kind: Kind, link: int, m: int, places: dict[Op, int], stage: int
    ) -> int:
        """The message whose posting decided when this one left: itself, or one before it."""
        leaves_s, ends_s = self._sweep.leaves_s[link], self._ends_s[stage]
        first, taken_s = m, 0.0
        latest_s = -1.0
        for earlier in range(m, -1, -1):
            if earlier < m and leaves_s[earlier] == 0.0:
                break
            taken_s += leaves_s[earlier]
            left_s = ends_s[places[Op(kind, earlier)]] + taken_s
            if left_s > latest_s:
                first, latest_s = earlier, left_s
        return first
