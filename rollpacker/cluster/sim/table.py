"""Policies on the same jobs, as a table and in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rollpacker.cluster.sim.policies import POLICIES
from rollpacker.cluster.sim.result import PolicyResult
from rollpacker.report.table import MAX_WIDTH, lines

Results = Mapping[str, PolicyResult]
"""By policy; the first is what the others are compared with."""


def render(results: Results) -> str:
    """A row per policy, and a row per policy and pool."""
    first = next(iter(results.values()))
    rows = [["policy", "price/h", "of the first", "SLO kept", "slowdown"]]
    for name, one in results.items():
        rows.append(
            [
                *(name, f"{one.price_per_h:,.2f}", f"{one.price_per_h / first.price_per_h:.2f}x"),
                *(f"{one.slo_kept:.1%}", f"{one.slowdown_mean:.3f}"),
            ]
        )
    pools = [["devices", "pool", "peak", "busy"]]
    for name, one in results.items():
        for pool, peak in one.peak_devices.items():
            pools.append([name, pool, f"{peak:,}", f"{one.busy[pool]:.0%}"])
    return "\n".join([*lines(rows), "", *lines(pools)])


def explain(results: Results) -> str:
    """What the columns are, and who the policies are."""
    told = (
        "Price/h is the whole price over the hours that the jobs would take without sharing; "
        "slowdown is elapsed over elapsed without waits for pools and switches, over a job's life; "
        "busy is of the device time that is paid for."
    )
    told = textwrap.fill(told, MAX_WIDTH)
    return "\n".join([told, "", *(f"  {name:<10}  {POLICIES[name]}" for name in results)])
