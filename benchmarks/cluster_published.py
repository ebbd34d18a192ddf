"""Published values of RollMux / Weave against the simulator.

    python benchmarks/cluster_published.py           # 2 minutes

Fig. 10: throughput per price over dedicated pools, from the phases of Fig. 2 and the prices alone;
OSDI values. The production curve (Fig. 13b): its arrivals and departures of 8+8 pairs, with jobs
drawn from Fig. 2, as a band over seeds and mixes of jobs; the published ratio is 1.84.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from lab import PUBLISHED, ROOT, bench
from msgspec.structs import replace

from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.decide.layout import Layout, Pin, alone_price
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.sim.jobs import Arrival, iteration_factors, model_needs
from rollpacker.cluster.sim.simulation import Simulation
from rollpacker.cluster.sim.spec import ClusterSpec, load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
FIG_2 = PUBLISHED["rollmux"]["fig_2"]
"""Model, seconds of rollout and of training."""
ROLLOUT_HEAVY = ("8B-8K-M", "8B-16K-M", "4B-4K-M", "4B-16K-M", "4B-8K-M")
OSDI = {"a": 1.82, "b": 1.90, "c": 1.99}
FLAT_S = {"7b": 7.5, "14b": 13.8, "32b": 33.8}
"""Hand-over of weights when every replica pulls a model: measured, Fig. 12 (32B on 16 devices)."""
TAIL_SHARE = 0.3
"""Of a rollout runs on an eighth of the devices, after 80 % of the responses are done."""
E_JOB = (300.0, 50.0)
"""Fig. 2 has no 14B-16K-M; the ratio of its phases is published to be 6, its length is assumed."""


def job(name: str, kind: str, *, nodes: int = 1, tail_share: float = TAIL_SHARE) -> ClusterJob:
    """A job of Fig. 2."""
    model, rollout_s, train_s = FIG_2[kind]
    return made(name, model, rollout_s, train_s, nodes=nodes, tail_share=tail_share)


def made(
    name: str, model: str, rollout_s: float, train_s: float, *, nodes: int = 1, tail_share: float
) -> ClusterJob:
    needs: dict[str, Any] = {**model_needs(model)}
    return ClusterJob(
        name=name,
        rounds=(RoundTimes(rollout_s=(rollout_s,), train_s=(train_s,)),),
        steps=1000,
        slo=2.0,
        rollout_devices=8 * nodes,
        train_devices=8 * nodes,
        tail_share=tail_share,
        **needs,
    )


def per_price(
    jobs: Sequence[ClusterJob],
    pins: Sequence[Sequence[int]],
    pools: Sequence[Pool],
    link: float,
    flat_s: Sequence[float],
) -> float:
    """Throughput over price against dedicated pools, whose hand-over of weights takes `flat_s` by
    job: speeds, each weighed by what the job costs alone."""
    rollout, train = pools
    layout = Layout(
        rollout_pool=rollout,
        train_pool=train,
        num_train_nodes=max(train.nodes_for(one.train_devices) for one in jobs),
        jobs=tuple(jobs),
        pins=tuple(map(Pin, pins)),
        link_gb_s=link,
    )
    prices = [alone_price(one, rollout, train) for one in jobs]
    period = layout.period_s()
    progress = sum(
        price * (sum(one.mean) + flat) / period
        for price, one, flat in zip(prices, jobs, flat_s, strict=True)
    )
    return progress / layout.price_per_h


def figure_10() -> dict[str, Any]:
    """Micro-benchmarks in three steps: phases and prices alone; with switches and both ways to hand
    weights over; with tails released besides, as the published system is."""
    spec = load_cluster(MIXED)
    pools = spec.core_pools()
    found: dict[str, Any] = {}
    for label, tail, is_bare in (
        ("phases and prices", 0.0, True),
        ("and switches, hand-over", 0.0, False),
        ("and tails released", TAIL_SHARE, False),
    ):
        a = [job(name, "7B-8K-S", tail_share=tail) for name in "xy"]
        d = [job(name, "8B-8K-M", tail_share=tail) for name in "xy"]
        e = made("e", "14b", *E_JOB, tail_share=tail)
        c = job("c", "32B-8K-S", nodes=2, tail_share=tail)
        cases = {
            "a": (a, [[0], [0]], [FLAT_S["7b"]] * 2),
            "b": ([*d, e], [[0], [1], [2]], [FLAT_S["7b"]] * 2 + [FLAT_S["14b"]]),
            "c": ([c, *d], [[0, 1], [0], [1]], [FLAT_S["32b"]] + [FLAT_S["7b"]] * 2),
        }
        found[label] = {}
        for name, (jobs, pins, flat_s) in cases.items():
            if is_bare:
                jobs, flat_s = [bare(one) for one in jobs], [0.0] * len(jobs)
            value = per_price(jobs, pins, pools, spec.link_gb_s, flat_s)
            found[label][name] = {
                "value": value,
                "osdi": OSDI[name],
                "error": value / OSDI[name] - 1,
            }
    return found


def bare(one: ClusterJob) -> ClusterJob:
    """Nothing but its phases."""
    return replace(one, model_gb=0.0, rollout_switch_s=0.0, train_switch_s=0.0)


# -- the production curve ----------------------------------------------------------


def lives(rng: random.Random) -> list[tuple[float, float]]:
    """Arrival and end, in hours, of jobs of one pair each that make the curve: whoever leaves is
    one of those that are there, all alike."""
    there: list[float] = []
    found: list[tuple[float, float]] = []
    for at_h, change in CURVE:
        for _ in range(abs(change)):
            if change > 0:
                there.append(at_h)
            else:
                found.append((there.pop(rng.randrange(len(there))), at_h))
    found += [(began, CURVE[-1][0] + 10.0) for began in there]
    return sorted(found)


def arrivals_of(kinds: Sequence[str], seed: int) -> list[Arrival]:
    """Jobs of these kinds with those lives; phases 20 % longer or shorter, SLOs between 1 and 2."""
    rng = random.Random(f"curve/{seed}")
    found = []
    for number, (began_h, end_h) in enumerate(lives(rng)):
        model, rollout_s, train_s = FIG_2[rng.choice(kinds)]
        scale = rng.uniform(0.8, 1.2)
        factors = [scale * one for one in iteration_factors(0.1)]
        needs: dict[str, Any] = {**model_needs(model)}
        one = ClusterJob(
            name=f"job-{number:03d}",
            rounds=(
                RoundTimes(
                    rollout_s=tuple(rollout_s * factor for factor in factors),
                    train_s=tuple(train_s * factor for factor in factors),
                ),
            ),
            steps=max(round((end_h - began_h) * 3600 / (scale * (rollout_s + train_s))), 1),
            slo=rng.uniform(1.0, 2.0),
            tail_share=0.2,
            **needs,
        )
        found.append(Arrival(began_h * 3600, one))
    return found


def curve(kinds: Sequence[str], seed: int, spec: ClusterSpec) -> dict[str, Any]:
    """Prices and peaks of one draw."""
    jobs = arrivals_of(kinds, seed)
    found = {
        name: Simulation(spec, jobs, name).run() for name in ("dedicated", "colocated", "rollmux")
    }
    price = {name: one.price_per_h for name, one in found.items()}
    return {
        "jobs": len(jobs),
        "dedicated_over_rollmux": price["dedicated"] / price["rollmux"],
        "colocated_over_rollmux": price["colocated"] / price["rollmux"],
        "slo_kept": found["rollmux"].slo_kept,
        "peak_devices": dict(found["rollmux"].peak_devices),
        "dedicated_peak_devices": dict(found["dedicated"].peak_devices),
    }


def production_curve(seeds: int) -> dict[str, Any]:
    """The band of prices over seeds, for each mix of jobs."""
    # More nodes than the published cluster had: nobody waits for one.
    spec = load_cluster(MIXED, ["pools.0.nodes=80", "pools.1.nodes=80"])
    bands: dict[str, Any] = {}
    for label, kinds in (
        ("all of Fig. 2", [*FIG_2]),
        ("rollout-heavy", ROLLOUT_HEAVY),
        ("one kind", ["8B-8K-M"]),
    ):
        rows = [curve(kinds, seed, spec) for seed in range(seeds)]
        ratios = [row["dedicated_over_rollmux"] for row in rows]
        bands[label] = {
            "dedicated_over_rollmux": [min(ratios), statistics.median(ratios), max(ratios)],
            "rows": rows,
        }
    return bands


CURVE = [
    (float(hour), int(change))
    for hour, change in (word.split(":") for word in PUBLISHED["rollmux"]["curve"].split())
]
"""Hour, and change in pairs of 8 + 8 devices, read off Fig. 13b."""


def main(seeds: int = 3) -> dict[str, Any]:
    return {
        "fig_10": figure_10(),
        "production_curve": {"published": 1.84, "bands": production_curve(seeds)},
    }


if __name__ == "__main__":
    bench(main)
