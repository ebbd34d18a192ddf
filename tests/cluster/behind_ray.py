"""Engines on another host of a cluster, for the suite of all engines."""

from __future__ import annotations

import atexit
from functools import cache

from rollpacker.weights.between_hosts.spread import OwnHost, Spread
from rollpacker.workers.hosts.ray_agents import join
from rollpacker.workers.hosts.remote_host import RemoteHost
from rollpacker.workers.hosts.token import demand_token


@cache
def another_host() -> RemoteHost:
    """Of the cluster that this process joins, where it has one core."""
    demand_token()
    cluster = join()
    _, address, *_ = cluster.nodes
    cluster.reserve({address: {"CPU": 1.0}}, within_s=120.0)
    atexit.register(cluster.close)
    spread = Spread()
    OwnHost(spread, address=cluster.own_address)
    return RemoteHost(address, cluster.connect(address), spread, heartbeat_s=5.0)
