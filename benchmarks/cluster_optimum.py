"""What cluster policies are compared with: at every arrival and end, the cheapest feasible
partition of the jobs that are present, exact, made anew for nothing.

It is no bound: it knows the jobs present alone, and round robin alone. A group is feasible if it
has at most `max_group` jobs, host memory has room, and its period is within every member's SLO.
Feasible groups, each with its cheapest pins, are columns of a set-partitioning problem by the price
of work, which HiGHS solves (`scipy.optimize.milp`).

    python benchmarks/cluster_optimum.py configs/clusters/mixed.yaml jobs.count=30   # its price
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab import bench

from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.layout import Layout, Pin
from rollpacker.cluster.decide.nodes import pairs
from rollpacker.cluster.sim.jobs import Arrival, arrivals
from rollpacker.cluster.sim.result import Bill, JobResult, PolicyResult
from rollpacker.cluster.sim.simulation import hours_alone
from rollpacker.cluster.sim.spec import ClusterSpec, load_cluster

EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Column:
    """A feasible group, with its cheapest pins."""

    jobs: frozenset[str]
    price: float
    """Of work."""
    layout: Layout
    period_s: float


class Columns:
    """Of all jobs so far: a subset is looked at once."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._pairs = pairs(spec.core_pools())
        self._known: dict[frozenset[str], Column | None] = {}
        self._is_alike = True
        """All jobs train on as many devices. Else a job with more of them brings training nodes
        that make the others faster, and a group may be feasible though a part of it is not."""

    def of(self, jobs: Sequence[ClusterJob]) -> list[Column]:
        """All feasible groups of these jobs."""
        by_name = {job.name: job for job in jobs}
        self._is_alike = self._is_alike and len({job.train_devices for job in jobs}) < 2
        names = [*by_name]
        found: list[Column] = []
        level: list[tuple[int, ...]] = [(n,) for n in range(len(names))]
        for size in range(1, self._spec.max_group + 1):
            following = []
            for members in level:
                chosen = [by_name[names[n]] for n in members]
                column = self._column(chosen)
                if column is not None:
                    found.append(column)
                elif self._is_alike:
                    continue  # one more job only lengthens the period
                if size < self._spec.max_group:
                    following += [(*members, n) for n in range(members[-1] + 1, len(names))]
            level = following
        return found

    def _column(self, jobs: Sequence[ClusterJob]) -> Column | None:
        key = frozenset(job.name for job in jobs)
        if key not in self._known:
            self._known[key] = self._cheapest(jobs, key)
        return self._known[key]

    def _cheapest(self, jobs: Sequence[ClusterJob], key: frozenset[str]) -> Column | None:
        """None: no pins make the group feasible."""
        smaller = [key - {job.name} for job in jobs] if self._is_alike and len(jobs) > 2 else []
        if any(self._known.get(part, 0) is None for part in smaller):
            return None
        best: Column | None = None
        for rollout, train in self._pairs:
            count = max(train.nodes_for(job.train_devices) for job in jobs)
            for pins in _pinnings([rollout.nodes_for(job.rollout_devices) for job in jobs]):
                layout = Layout(
                    rollout_pool=rollout,
                    train_pool=train,
                    num_train_nodes=count,
                    jobs=tuple(jobs),
                    pins=pins,
                    link_gb_s=self._spec.link_gb_s,
                )
                works = layout.works_s()
                fastest = min(work / sum(job.mean) for job, work in zip(jobs, works, strict=True))
                if best is not None and layout.price_per_h * min(fastest, 1.0) >= best.price:
                    continue  # the price of work is at least that
                if not layout.memory_fits():
                    continue
                period = layout.closed_period_s()
                if any(
                    period > job.slo * work * (1 + EPSILON)
                    for job, work in zip(jobs, works, strict=True)
                ):
                    continue
                price = layout.price_of_work([period] * len(jobs))
                if best is None or price < best.price:
                    best = Column(key, price, layout, period)
        return best


def _pinnings(widths: Sequence[int]) -> Iterable[tuple[Pin, ...]]:
    """Every way to put jobs of so many nodes on nodes, but for the nodes' names."""
    if len(widths) == 1:
        yield (Pin(range(widths[0])),)
        return
    for rest in _pinnings(widths[:-1]):
        there = max(max(pin) for pin in rest) + 1  # type: ignore[type-var, operator]
        for old in _subsets(range(there), widths[-1]):
            new = range(there, there + widths[-1] - len(old))
            yield (*rest, Pin((*old, *new)))


def _subsets(items: Sequence[int], most: int) -> Iterable[tuple[int, ...]]:
    if not items or not most:
        yield ()
        return
    yield from _subsets(items[1:], most)
    for rest in _subsets(items[1:], most - 1):
        yield (items[0], *rest)


# -- the partition -----------------------------------------------------------------


def cheapest_partition(names: Sequence[str], columns: Sequence[Column]) -> list[Column]:
    """The cheapest choice of columns in which every job is once: a set-partitioning problem, solved
    by HiGHS without a gap."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    numbers = {name: n for n, name in enumerate(names)}
    has_job = np.zeros((len(names), len(columns)))
    for at, column in enumerate(columns):
        has_job[[numbers[name] for name in column.jobs], at] = 1
    found = milp(
        [column.price for column in columns],
        constraints=LinearConstraint(has_job, 1, 1),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.status == 0, found.message
    return [column for column, share in zip(columns, found.x, strict=True) if share > 0.5]


# -- in virtual time ---------------------------------------------------------------


@dataclass(slots=True)
class _Life:
    job: ClusterJob
    submitted_s: float
    iterations_left: float
    rate: float = 0.0
    """Iterations per second now."""
    work_s: float = 0.0
    """Seconds of an iteration as the job is now, without waits."""
    done_work_s: float = 0.0


class OptimumSimulation:
    """Jobs get on at the rates of the partition of the moment."""

    def __init__(self, spec: ClusterSpec, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._columns = Columns(spec)
        self._bill = Bill(spec.core_pools())
        self._lives: dict[str, _Life] = {}
        self._partition: list[Column] = []
        self._partitions: dict[frozenset[str], list[Column]] = {}
        self._now_s = 0.0

    def run(self, hours: float) -> PolicyResult:
        """`hours`: what the price is shared out over."""
        results: list[JobResult] = []
        coming = [*reversed(self._arrivals)]
        while coming or self._lives:
            ends = [
                (self._now_s + life.iterations_left / life.rate, name)
                for name, life in self._lives.items()
            ]
            end_s, name = min(ends, default=(math.inf, ""))
            if coming and coming[-1].at_s <= end_s:
                arrival = coming.pop()
                self._pass_until(arrival.at_s)
                job = arrival.job
                self._lives[job.name] = _Life(job, arrival.at_s, job.steps)
            else:
                self._pass_until(end_s)
                results.append(self._result(self._lives.pop(name)))
            self._regroup()
        return self._bill.result(results, hours)

    def _result(self, life: _Life) -> JobResult:
        cold_s = life.job.cold_start_s
        elapsed_s = self._now_s - life.submitted_s + cold_s
        return JobResult(life.job.name, life.job.slo, elapsed_s / (life.done_work_s + cold_s))

    def _pass_until(self, at_s: float) -> None:
        seconds = at_s - self._now_s
        self._bill.pass_until(at_s)
        for life in self._lives.values():
            done = life.rate * seconds
            life.iterations_left -= done
            life.done_work_s += done * life.work_s
        for column in self._partition:
            layout = column.layout
            for job, pin, one in zip(layout.jobs, layout.pins, layout.sharings, strict=True):
                turns = seconds / column.period_s
                holds = one.holds(job.mean)
                rollout_s = (holds.rollout_s - one.rollout_switch_s) * len(pin)
                train_s = (holds.train_s - one.train_switch_s) * layout.num_train_nodes
                self._bill.work(layout.rollout_pool.name, turns * rollout_s)
                self._bill.work(layout.train_pool.name, turns * train_s)
        self._now_s = at_s

    def _regroup(self) -> None:
        for column in self._partition:
            self._count(column, -1)
        names = frozenset(self._lives)
        if names not in self._partitions:
            jobs = [life.job for life in self._lives.values()]
            columns = self._columns.of(jobs)
            self._partitions[names] = (
                cheapest_partition([job.name for job in jobs], columns) if jobs else []
            )
        self._partition = self._partitions[names]
        for column in self._partition:
            self._count(column, 1)
            for job, work in zip(column.layout.jobs, column.layout.works_s(), strict=True):
                life = self._lives[job.name]
                life.rate, life.work_s = 1 / column.period_s, work

    def _count(self, column: Column, sign: int) -> None:
        layout = column.layout
        self._bill.change(layout.rollout_pool.name, sign * len(layout.rollout_nodes))
        self._bill.change(layout.train_pool.name, sign * layout.num_train_nodes)


def main(*overrides: str, file: str) -> None:
    spec = load_cluster(file, overrides)
    jobs = arrivals(spec)
    found = OptimumSimulation(spec, jobs).run(hours_alone(jobs))
    print(f"{found.price_per_h:,.2f} per hour, {found.slo_kept:.1%} of the SLOs kept")


if __name__ == "__main__":
    bench(main)
