"""New weights across a slow link between two pools, to hosts that have a fast network among them.

    trainer's host ==slow link==> switch --fast--> host 1 .. host R

Hosts are network namespaces of this machine (`tests/cluster/netns.py`), each with one process; the
link is held by tc's token bucket, on the trainer's side and on the switch's. Bytes are those of the
trainer's interface; contents are compared by SHA-256, and differ in each transfer. Arms, in turns:

    published       what RollPacker does: each shard crosses once and is passed on (`publish`)
    each pulls      each host takes the whole model from the trainer, over the same ports
    gloo, each      torch.distributed over gloo: the trainer sends the model to each host at once
    gloo broadcast  its broadcast

Then, with the most hosts, amid it: the link is cut for 3 and 12 s, one host for 3 s, one is killed.
Calls to hosts go by pipes here, by ray in a run, and are not among the bytes. As root.

    python benchmarks/cluster_link.py [--megabytes 200] [--mbit 400] [--hosts 1,2,4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from tests.cluster.netns import why_impossible
from tests.cluster.slow_link import ARMS, FAULTS, Pools


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--hosts", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if reason := why_impossible():
        sys.exit(reason)
    num_bytes, counts = given.megabytes * 10**6, [int(n) for n in given.hosts.split(",")]
    transfers: list[dict[str, Any]] = []
    for count in counts:
        with Pools(count, given.mbit, num_bytes) as pools:
            pools.begin_gloo()
            for number in range(given.rounds):
                for place in range(len(ARMS)):
                    one = pools.transfer(ARMS[(place + number) % len(ARMS)])
                    transfers.append({**one, "round": number, "load": os.getloadavg()[0]})
                    print(transfers[-1], flush=True)
    faults: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        with Pools(max(counts), given.mbit, num_bytes) as pools:
            for fault in FAULTS:
                faults.append(pools.fault(fault))
                print(faults[-1], flush=True)
    conclude(given, num_bytes, transfers, faults)


def conclude(
    given: argparse.Namespace,
    num_bytes: int,
    transfers: list[dict[str, Any]],
    faults: list[dict[str, Any]],
) -> None:
    from machine import write_result

    alone_s = num_bytes * 8 / (given.mbit * 1e6)
    table: dict[str, dict[str, Any]] = {}
    for count in sorted({one["hosts"] for one in transfers}):
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
    most = max(one["hosts"] for one in transfers)
    of = [table[f"{arm}, {most}"]["seconds_median"] for arm in ("each pulls", "published")]
    across = max(one["models_across"] for one in transfers if one["arm"] == "published")
    shown = {"faster_than_each_pulls": round(of[0] / of[1], 2), "models_across_at_most": across}
    for name, row in table.items():
        print(f"{name:20} {row}")
    print(shown)
    path = write_result(
        "cluster_link",
        {
            "megabytes": given.megabytes,
            "mbit": given.mbit,
            "one_model_over_the_link_s": alone_s,
            "shown": shown,
            "table": table,
            "transfers": transfers,
            "faults": faults,
        },
    )
    print(f"written: {path}")
    if across > 1.01 or (most >= 4 and shown["faster_than_each_pulls"] < 2.5):
        sys.exit(1)


if __name__ == "__main__":
    main()
