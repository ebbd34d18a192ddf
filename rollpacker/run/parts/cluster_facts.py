"""Facts about the hosts of a ray cluster that the placement of a run's parts needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.core.placement.roles import Host
    from rollpacker.workers.hosts.facts import HostFacts
    from rollpacker.workers.hosts.ray_agents import RayCluster


def rooms() -> list[Host]:
    """Returns the cluster's hosts, each with its cores, memory and GPUs. Raises `ValueError` if
    there is no cluster, or if its hosts differ in something that must be the same."""
    cluster = join_cluster()
    try:
        return rooms_of(cluster, facts_of(cluster))
    finally:
        cluster.close()


def join_cluster() -> RayCluster:
    """Join the ray cluster that RAY_ADDRESS names, or that this machine is part of, and return it.
    Raises `ValueError` if ray is missing or no cluster is there."""
    from rollpacker.imports import require

    require("ray", extra="ray", what="runtime=ray")
    from rollpacker.workers.hosts.token import demand_token

    demand_token()
    from rollpacker.workers.hosts.ray_agents import join

    return join()


def facts_of(cluster: RayCluster) -> dict[str, HostFacts]:
    """Returns facts about every host, by address, this host's first. Raises `ValueError` if hosts
    differ in something that must be the same, such as versions."""
    from rollpacker.workers.hosts.facts import differences

    facts = {address: cluster.facts(address) for address in cluster.nodes}
    if differs := differences(facts):
        raise ValueError("; ".join(differs))
    return facts


def rooms_of(cluster: RayCluster, facts: Mapping[str, HostFacts]) -> list[Host]:
    """Returns the hosts with cores, memory and devices, as `plan_placement` takes them. On a CPU, a
    host has a device for each processor core that ray has there."""
    from rollpacker.core.placement.roles import Host

    return [
        Host(
            name=address,
            cores=cluster.nodes[address].num_cpus,
            memory_bytes=one.memory_bytes,
            gpu_bytes=one.gpu_bytes[: cluster.nodes[address].num_gpus],
            address=address,
            shm_bytes=one.shm_bytes,
        )
        for address, one in facts.items()
    ]
