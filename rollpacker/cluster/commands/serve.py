"""`rollpacker cluster serve FILE`: runs the cluster's service in this process, until Ctrl-C."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollpacker.cluster.seats.mailbox import Mailbox
    from rollpacker.cluster.service.runner import Runner
    from rollpacker.cluster.sim.spec import ClusterSpec

START_RAY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The means by which a service reaches its jobs on this host or on ray: mailbox and runner."""

    said: str
    mailbox: Mailbox
    runner: Runner
    left: str
    """Words for the service's last line, on what goes on after its end, such as running jobs."""


def run(args: argparse.Namespace) -> int:
    """Run the service until Ctrl-C. Raises `ValueError` for a user's mistake, before any start."""
    from rollpacker.cluster.commands.desk import take_lock
    from rollpacker.cluster.seats.mail_file import check_local
    from rollpacker.cluster.service.book import NAME
    from rollpacker.cluster.sim.spec import load_cluster
    from rollpacker.run.error_messages import naming
    from rollpacker.run.output import print_line

    spec = load_cluster(args.file, args.overrides)
    if args.local and (several := _of_several_nodes(spec)):
        raise ValueError(
            f"--local: every node is this host, and {several}: jobs on two of them would be on the "
            "same devices at once. Give each phase one node, or serve on ray, a host for each node"
        )
    if args.folder is None and not NAME.fullmatch(spec.name):
        raise ValueError(
            f"name is {spec.name!r}, and its folder would be runs/{spec.name}-cluster: take "
            "letters, digits, -, _ and ., a hundred at most, or give --folder"
        )
    folder = Path(args.folder or f"runs/{spec.name}-cluster").expanduser()
    check_local(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder), take_lock(folder):
        ground = _local(folder) if args.local else _on_ray(spec, folder)
        first = f"{spec.name}: {ground.said}; its folder is {folder}. Ctrl-C ends the service"
        try:
            serve(spec, folder, ground, began=lambda: print_line(first))
        except KeyboardInterrupt:
            print_line(f"The service has ended; {ground.left}. The same command goes on")
    return 130


def serve(
    spec: ClusterSpec,
    folder: Path,
    ground: Ground,
    *,
    began: Callable[[], None] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Run the service until `is_over` returns true; `began` is called once it can be asked. Raises
    `ValueError` if the folder's stored events lead to other decisions than those stored."""
    from rollpacker.cluster.commands.desk import ServiceFacts, write_facts
    from rollpacker.cluster.decide.cluster import Cluster
    from rollpacker.cluster.service.service import Service
    from rollpacker.cluster.sim.policies import SHIPPED, policy
    from rollpacker.config.load import to_plain

    first_nodes = _first_nodes(folder, spec)
    cluster = Cluster(
        [replace(pool, nodes=first_nodes[pool.name]) for pool in spec.core_pools()],
        policy(SHIPPED, spec),
        link_gb_s=spec.link_gb_s,
        max_group=spec.max_group,
        quotas=spec.core_quotas(),
        ageing_s=spec.ageing_h * 3600,
    )
    changed = _changed(folder, spec)
    try:
        service = Service(
            cluster,
            name=spec.name,
            folder=folder,
            mailbox=ground.mailbox,
            runner=ground.runner,
            tell=_tell,
        )
    except ValueError as error:
        if not changed:
            raise
        raise ValueError(
            f"{folder} has jobs of a cluster with {' '.join(changed)}, which is not what this one "
            "has, and they would be on other nodes or wait no more. Serve it with these settings "
            "until its jobs have ended, or give the changed cluster a folder of its own with "
            f"--folder ({error})"
        ) from error
    facts = ServiceFacts(
        name=spec.name,
        mailbox=ground.mailbox.address,
        host=socket.gethostname(),
        pid=os.getpid(),
        spec=to_plain(spec),
        first_nodes=first_nodes,
    )
    try:
        service.grow({pool.name: pool.nodes for pool in spec.pools})
        write_facts(folder, facts)
        began()
        service.run(is_over)
    finally:
        service.close()


def _first_nodes(folder: Path, spec: ClusterSpec) -> dict[str, int]:
    """Return the number of nodes that each pool had when the folder was first served. If the pools
    have other names or fewer nodes by now, return the present numbers."""
    from rollpacker.cluster.commands.desk import FACTS_FILE, read_facts

    now = {pool.name: pool.nodes for pool in spec.pools}
    if not (folder / FACTS_FILE).exists():
        return now
    facts = read_facts(folder)
    first = facts.first_nodes or {pool["name"]: pool["nodes"] for pool in facts.spec["pools"]}
    has_grown = first.keys() == now.keys() and all(first[pool] <= now[pool] for pool in now)
    return dict(first) if has_grown else now


def _changed(folder: Path, spec: ClusterSpec) -> list[str]:
    """Return the settings, other than name, jobs and seed, that have changed since the folder was
    last served, each as key=old value. Empty for a folder that was never served."""
    from rollpacker.cluster.commands.desk import FACTS_FILE, read_facts
    from rollpacker.config.load import differences, to_plain

    if not (folder / FACTS_FILE).exists():
        return []
    before = dict(read_facts(folder).spec)
    pairs = differences(before, to_plain(spec))
    told = json.JSONEncoder(separators=(",", ":")).encode
    return [
        f"{key}={told(was)}"
        for key, was, _ in pairs
        if key.split(".")[0] not in ("name", "jobs", "seed")
    ]


def _of_several_nodes(spec: ClusterSpec) -> str:
    """Return a sentence on the first phase (rollout, train) for which the cluster has more than one
    node, with their number. Empty if there is none."""
    for phase in ("rollout", "train"):
        count = sum(pool.nodes for pool in spec.pools if pool.phase == phase)
        if count > 1:
            return f"{spec.name} has {count} {phase} nodes"
    return ""


def _tell(line: str) -> None:
    from rollpacker.run.output import print_line
    from rollpacker.writing import printable

    print_line(f"{time.strftime('%H:%M:%S')}  {printable(line)}")


def _local(folder: Path) -> Ground:
    from rollpacker.cluster.seats.mail_file import FileMailbox
    from rollpacker.cluster.service.local_runner import LocalRunner

    path = (folder / "mail").resolve()
    return Ground(
        said="on this host, without ray",
        mailbox=FileMailbox(path),
        runner=LocalRunner(folder),
        left="jobs that run go on",
    )


def _on_ray(spec: ClusterSpec, folder: Path) -> Ground:
    """Return the mailbox and the runner on the ray cluster that RAY_ADDRESS names or that this
    machine belongs to, else on one that is started here and outlives this process, as jobs do.
    Raises `ValueError` if ray is missing or cannot be started."""
    from rollpacker.imports import missing
    from rollpacker.workers.hosts.token import demand_token

    if (lacks := missing("ray", extra="ray", what="a cluster on ray")) is not None:
        raise ValueError(f"{lacks}. On this host alone it can do without: --local")
    demand_token()
    from rollpacker.cluster.on_ray.jobs import RayRunner
    from rollpacker.cluster.on_ray.mail import RayMailbox
    from rollpacker.workers.hosts.ray_connection import LOCAL, connect, find_head, head_address

    head = find_head()
    started = head in (None, LOCAL)
    if started:
        head = _start_ray()
    assert head is not None
    connect(head)
    name = cluster_id(spec.name, folder)
    try:
        mailbox = RayMailbox(f"mail-{name}")
    except OSError as error:
        raise ValueError(f"{error}. Start ray again on all hosts, and then this") from error
    runner = RayRunner(
        name, head=head_address(), folder=folder, one_host=not _of_several_nodes(spec)
    )
    num_hosts = len(runner.hosts())
    hosts = f"{num_hosts} host{'s' * (num_hosts > 1)}"
    return Ground(
        said=f"on the ray cluster {head}, {'started here, ' * started}{hosts}",
        mailbox=mailbox,
        runner=runner,
        left="ray and jobs that run go on" + ("; ray stop ends them" if started else ""),
    )


def cluster_id(name: str, folder: Path) -> str:
    """Return a name that is unique to the service of this folder, for its actors on ray: several
    services may share one ray cluster."""
    place = f"{socket.gethostname()}:{folder.resolve()}"
    return f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _start_ray() -> str:
    """Start a ray head on this machine. Returns its address. Raises `ValueError` if that fails."""
    from rollpacker.workers.hosts.ray_connection import find_head

    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    environment = {name: one for name, one in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        done = subprocess.run(
            [*command, "--include-dashboard=false", "--disable-usage-stats"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_RAY_S,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"ray start --head has not ended within {START_RAY_S:g} s") from None
    head = find_head() if done.returncode == 0 else None
    if head is None:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ValueError(f"ray could not be started here (ray start --head): {said}")
    return head
