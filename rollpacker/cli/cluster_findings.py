"""What `rollpacker doctor` finds out about the hosts of a config with `runtime=ray`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollpacker.cli.findings import GIB, Finding

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.remote.facts import HostFacts
    from rollpacker.remote.ray_agents import Cluster


def cluster(config: RunConfig) -> list[Finding]:
    """Token, hosts, their versions and their memory; whether what the config asks for fits. Joins
    the cluster for that, or where there is none starts one of this machine, and leaves it again."""
    from rollpacker.cli.cluster_facts import join_cluster

    try:
        joined = join_cluster()
    except ValueError as error:
        text, _, cure = str(error).partition(": ")
        return [Finding("fail", "cluster", text, cure)]
    try:
        facts = {address: joined.facts(address) for address in joined.nodes}
        return [*_of_hosts(facts), _ports(facts), _placement(config, joined, facts)]
    except ValueError as error:
        return [Finding("fail", "cluster", str(error), "Look at that host, or take it out.")]
    finally:
        joined.close()


def _of_hosts(facts: Mapping[str, HostFacts]) -> list[Finding]:
    from rollpacker.cli.hosts import SHM_BYTES
    from rollpacker.remote.facts import differences

    found = []
    for address, one in facts.items():
        text = (
            f"{address} ({one.name}): {one.num_cores} cores, {len(one.gpu_bytes)} GPUs, "
            f"{one.memory_bytes / GIB:.0f} GiB, {one.shm_bytes / GIB:.1f} GiB free in /dev/shm"
        )
        if one.shm_bytes < SHM_BYTES:
            cure = f"Let /dev/shm there have {SHM_BYTES >> 20} MiB (in a container: --shm-size)."
            found.append(Finding("fail", "host", text, cure))
        else:
            found.append(Finding("ok", "host", text))
    differ = differences(facts)
    cure = "Install the same versions on every host."
    found += [Finding("fail", "versions", one, cure) for one in differ]
    return found if differ else [*found, Finding("ok", "versions", "the same on every host")]


def _ports(facts: Mapping[str, HostFacts]) -> Finding:
    text = (
        "ray's own processes listen on every interface, whatever their address; who has no token "
        "is refused. Ours listen on the loopback and on the addresses above"
    )
    if len(facts) == 1:
        return Finding("ok", "ports", text)
    cure = "Let a firewall keep all but these hosts out."
    return Finding("warn", "ports", text, cure)


def _placement(config: RunConfig, cluster: Cluster, facts: Mapping[str, HostFacts]) -> Finding:
    from rollpacker.cli.cluster_facts import rooms_of
    from rollpacker.cli.placement import plan_of

    try:
        plan = plan_of(config, rooms_of(cluster, facts))
    except ValueError as error:
        text, _, cure = str(error).partition(". ")
        return Finding("fail", "placement", text, cure or "Change placement.")
    counts = ", ".join(f"{len(plan.of(role))} of {role}" for role in ("rollout", "train"))
    return Finding("ok", "placement", f"{counts}: train --dry-run shows where")
