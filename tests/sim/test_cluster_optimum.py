"""The exact partition that benchmarks compare cluster policies with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest

from rollpacker.cluster.sim.jobs import Arrival, arrivals
from rollpacker.cluster.sim.simulation import hours_alone
from tests.sim.test_cluster import FEW, job, simulated, spec_of

pytest.importorskip("scipy", reason="the optimum is solved by scipy's HiGHS")

from benchmarks.cluster_optimum import Columns, OptimumSimulation, cheapest_partition


def partitions(items: Sequence[str]) -> Iterator[list[frozenset[str]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [one for one in rest if one not in others]
            for more in partitions(left):
                yield [frozenset((first, *others)), *more]


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_the_best_of_all_partitions(seed: int) -> None:
    spec = spec_of("jobs.count=7", f"seed={seed}", "max_group=4")
    jobs = [one.job for one in arrivals(spec)]
    columns = Columns(spec).of(jobs)
    price = {one.jobs: one.price for one in columns}
    best = min(
        math.fsum(price.get(group, math.inf) for group in groups)
        for groups in partitions([one.name for one in jobs])
    )
    chosen = cheapest_partition([one.name for one in jobs], columns)
    assert math.fsum(one.price for one in chosen) == pytest.approx(best)
    assert sorted(name for one in chosen for name in one.jobs) == sorted(one.name for one in jobs)


def test_no_policy_that_keeps_slos_is_cheaper() -> None:
    """Who heeds no SLO may be cheaper than the cheapest that keeps them all."""
    spec = spec_of(*FEW)
    jobs = arrivals(spec)
    optimum = OptimumSimulation(spec, jobs).run(hours_alone(jobs))
    assert len(optimum.jobs) == 25
    assert all(one.slowdown >= 1 - 1e-9 for one in optimum.jobs)
    for name in ("dedicated", "rollmux"):
        assert simulated(spec, name).price_per_h > optimum.price_per_h, name


def test_two_jobs_that_fill_each_others_waits_cost_half() -> None:
    """Equal phases, no switches: one generates while the other trains."""
    jobs = [Arrival(0.0, job(one, 100, 100, 200)) for one in "ab"]
    spec = spec_of()
    shared = OptimumSimulation(spec, jobs).run(hours_alone(jobs))
    assert simulated(spec, "dedicated", jobs).price_per_h / shared.price_per_h == pytest.approx(
        2, rel=0.01
    )
    assert shared.busy == pytest.approx({"cheap": 1, "fast": 1}, rel=0.01)
