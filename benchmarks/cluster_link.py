"""New weights across a slow link between two pools, to hosts that have a fast network among them.

    trainer's host ==slow link==> switch --fast--> host 1 .. host R

Hosts are network namespaces (`tests/cluster/netns.py`); tc's token bucket holds the link. Bytes are
those of the trainer's interface; contents are compared by SHA-256. Arms, in turns: `published`,
what RollPacker does (each shard crosses once and is passed on), each host pulls the whole model,
gloo to each at once, and gloo's broadcast. Then, with the most hosts, amid it: the link is cut for
3 and 12 s, one host for 3 s, one is killed. As root.

    python benchmarks/cluster_link.py [--megabytes 200] [--mbit 400] [--hosts 1 2 4] [--rounds 3]
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from lab import bench, turns

from tests.cluster.netns import why_impossible
from tests.cluster.slow_link import ARMS, FAULTS, Pools


def main(
    megabytes: int = 200,
    mbit: float = 400.0,
    hosts: Sequence[int] = (1, 2, 4),
    rounds: int = 3,
    quick: bool = False,
) -> dict[str, Any]:
    if reason := why_impossible():
        raise SystemExit(reason)
    if quick:
        megabytes, hosts, rounds = 20, (2,), 1
    num_bytes = megabytes * 10**6
    transfers: list[dict[str, Any]] = []
    for count in hosts:
        with Pools(count, mbit, num_bytes) as pools:
            pools.begin_gloo()
            for number, arm in turns(ARMS, rounds):
                one = pools.transfer(arm)
                transfers.append({**one, "round": number, "load": os.getloadavg()[0]})
                print(transfers[-1], flush=True)
    faults: list[dict[str, Any]] = []
    for _ in range(rounds):
        with Pools(max(hosts), mbit, num_bytes) as pools:
            faults += [pools.fault(fault) for fault in FAULTS]
    alone_s = num_bytes * 8 / (mbit * 1e6)
    table: dict[str, dict[str, Any]] = {}
    for count in hosts:
        for arm in ARMS:
            those = [one for one in transfers if (one["hosts"], one["arm"]) == (count, arm)]
            seconds = [one["seconds"] for one in those]
            table[f"{arm}, {count}"] = {
                "seconds_median": statistics.median(seconds),
                "seconds": [min(seconds), max(seconds)],
                "over_link": round(statistics.median(seconds) / alone_s, 3),
                "models_across": max(one["models_across"] for one in those),
                "processor_s": statistics.median(one["processor_s"] for one in those),
            }
    pulled, published = (
        table[f"{arm}, {max(hosts)}"]["seconds_median"] for arm in ("each pulls", "published")
    )
    across = max(one["models_across"] for one in transfers if one["arm"] == "published")
    return {
        "megabytes": megabytes,
        "mbit": mbit,
        "one_model_over_the_link_s": alone_s,
        "shown": {
            "hosts": max(hosts),
            "faster_than_each_pulls": round(pulled / published, 2),
            "models_across_at_most": across,
        },
        "table": table,
        "transfers": transfers,
        "faults": faults,
    }


def holds(found: dict[str, Any]) -> bool:
    """One model crosses the link, and with four hosts that is worth something."""
    shown = found["shown"]
    is_faster = shown["hosts"] < 4 or shown["faster_than_each_pulls"] >= 2.5
    return is_faster and shown["models_across_at_most"] <= 1.01


if __name__ == "__main__":
    bench(main, holds=holds)
