"""Starts a cluster's jobs on ray, and ends them, by a detached actor on each host: a *warden*.

The service calls `RayRunner`, which calls the warden of a host; the warden starts a keeper (the
job's parent process), and that `rollpacker train`. Wardens and jobs outlive the service: the next
service finds them by name. They are no jobs of ray's own (`ray job submit`): these need ray's
dashboard, an HTTP server and two dozen packages, and do not promise that all of a job is gone, on
every host, when `kill` returns.

What runs on a host that ray has lost is unknown. A job counts as gone from it when it was away for
so long that its keepers have ended everything (`Wardens.is_empty`), and not before.

A host that stands for a node of a pool was started with `--resources='{"pool_NAME": 1}'`. If no
host has such a resource, and no phase has several nodes, the head's host stands for all nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.autoscaler.sdk import request_resources

from rollpacker.cluster.on_ray.warden import HOSTS, Start
from rollpacker.cluster.on_ray.wardens import MARGIN_S, Wardens
from rollpacker.cluster.service.runner import NoHost
from rollpacker.workers.hosts.ray_agents import LEASE_S
from rollpacker.workers.hosts.token import MODE, PATH
from rollpacker.writing import replacing

if TYPE_CHECKING:
    from rollpacker.cluster.decide.nodes import Node
    from rollpacker.cluster.service.runner import JobOrder

NODES_FILE = "nodes.json"
"""File in the cluster's folder: for each node of a pool, the address of its host (machine)."""
STARTS_FILE = "starts.jsonl"
"""File in the cluster's folder, one JSON object a line: on which hosts each job was started, with
which exit code it ended, and which of its hosts were cut off at that time."""
BEGIN_S, KILL_S = 3.0, 2.0
"""Most seconds for which a call of this module waits for a job to start, and to be killed."""
CODES_S = 0.02
"""Seconds for which a host's answer with jobs' exit codes is used again before it is asked anew."""


def pool_resource(pool: str) -> str:
    """Return the name of the ray resource that marks the hosts of this pool."""
    return f"pool_{pool}"


class RayRunner:
    """The `Runner` that runs jobs on ray's hosts. This process must be connected to ray."""

    def __init__(self, name: str, *, head: str, folder: str | Path, one_host: bool = False) -> None:
        """`name`: the cluster's, for its actors. `head`: ray's address, for all hosts. `folder`:
        path on every host for records and output of jobs. `one_host`: if no host is marked as a
        pool's, the head's host stands for all nodes. Not to be set if a phase has several nodes:
        two jobs would use the same devices."""
        self._folder = Path(folder).resolve()
        self._head = head
        self._one_host = one_host
        self._folder.mkdir(parents=True, exist_ok=True)
        self._wardens = Wardens(name, head=head, folder=self._folder)
        self._nodes: dict[str, str] = {}
        """Address of the host (machine) of each node, by the node's name POOL/NUMBER."""
        with contextlib.suppress(FileNotFoundError):
            self._nodes = json.loads((self._folder / NODES_FILE).read_text())
        self._places: dict[Start, tuple[str, ...]] = {}
        """For each start of a job, the addresses of its nodes' hosts, and of hosts of earlier tries
        at it; the first is the host on which its first process was started."""
        self._codes: dict[Start, int] = {}
        """Exit codes of the starts of jobs that have ended."""
        self._left: dict[str, set[Start]] = {}
        """For each host, the starts of jobs that ended while the host was cut off. What they left
        there is killed before another job is started on the host."""
        self._read_starts()
        self._gone_s: dict[Start, float] = {}
        """For each start of a job, the time in seconds since when its first process is gone."""
        self._said_codes: dict[str, tuple[float, Mapping[Start, int | None]]] = {}
        """For each host, the time of its last answer, and exit codes in it (None: the job runs)."""

    def _read_starts(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for line in (self._folder / STARTS_FILE).read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # its writer was killed
                    said = json.loads(line)
                    start = (said["job"], said["incarnation"])
                    if "code" in said:
                        self._codes[start] = said["code"]
                        for address in said.get("left", ()):
                            self._left.setdefault(address, set()).add(start)
                    else:
                        self._places[start] = tuple(said["hosts"])
                        self._codes.pop(start, None)
                        for address in said["hosts"]:  # `_clear` came before
                            self._left.pop(address, None)

    def _write_start(self, start: Start, **facts: Any) -> None:
        line = json.dumps({"job": start[0], "incarnation": start[1], **facts})
        with (self._folder / STARTS_FILE).open("a") as file:
            file.write(f"\n{line}")  # the last one may be half of one

    # -- where ---------------------------------------------------------------------------

    def hosts(self, *, fresh: bool = True) -> dict[str, dict[str, float]]:
        """Return the resources of ray's hosts, by address. `fresh`: ask ray anew each time."""
        return self._wardens.hosts(fresh=fresh)

    def host_of(self, node: Node) -> str | None:
        """Return the address of the host (machine) that stands for the node. It is chosen once, and
        replaced if ray loses it; a host on which another start may still run is not chosen. None:
        ray has no free host of the pool. Raises `OSError` if ray does not answer."""
        hosts = self.hosts()
        is_marked = any(
            name.startswith(pool_resource("")) for one in hosts.values() for name in one
        )
        if self._one_host and not is_marked:
            return next(iter(hosts), None)
        of_pool = [address for address, one in hosts.items() if pool_resource(node.pool) in one]
        name = f"{node.pool}/{node.number}"
        if self._nodes.get(name) not in of_pool:
            taken = {host for one, host in self._nodes.items() if one.startswith(f"{node.pool}/")}
            for start in self._places.keys() - self._codes.keys():
                taken.update(self._places[start])
            free = [address for address in of_pool if address not in taken]
            if not free:
                return None
            self._nodes[name] = free[0]
            with replacing(self._folder / NODES_FILE) as draft:
                draft.write_text(json.dumps(self._nodes, indent=1))
        return self._nodes[name]

    def _address(self, node: Node) -> str:
        address = self.host_of(node)
        if address is None:
            raise NoHost(
                node,
                f"ray has no host for node {node.number} of the pool {node.pool}: start one with "
                f'ray start --address={self._head} --resources=\'{{"{pool_resource(node.pool)}": '
                "1}'",
            )
        return address

    def has_host(self, node: Node) -> bool:
        """Whether a host (machine) stands for the node. Raises `OSError` if ray does not answer."""
        return self.host_of(node) is not None

    # -- jobs ----------------------------------------------------------------------------

    def start(self, order: JobOrder) -> None:
        """Start the job, unless the start of this number (incarnation) was made before. Its first
        process runs on the host of its first training node, and writes checkpoints there."""
        start = (order.job, order.incarnation)
        rollout = [self._address(node) for node in order.rollout_nodes]
        train = [self._address(node) for node in order.train_nodes]
        address, code = train[0], self._codes.get(start)
        earlier = self._places.get(start, ()) if code is None else ()
        if code not in (None, -1) or (earlier and earlier[0] != address):
            return  # on what was its node then; whether it runs there still, `ended` says
        environ = dict(order.environ)
        if len(self.hosts()) > 1:
            for variable, addresses in zip(HOSTS.values(), (rollout, train), strict=True):
                environ[variable] = ",".join(dict.fromkeys(addresses))
        own = {"RAY_ADDRESS": self._head, **{name: os.environ[name] for name in (MODE, PATH)}}
        places = tuple(dict.fromkeys((*train, *rollout, *earlier)))
        for place in places:
            self._wardens.make(place)
            self._clear(place)
        if places != earlier:
            self._write_start(start, hosts=places)
            self._places[start] = places
            self._codes.pop(start, None)  # nobody knew it, or its host was away for too long
            self._gone_s.pop(start, None)
        order = replace(order, environ=environ)
        self._wardens.tell([address], "begin", order, own, key=start, within_s=BEGIN_S)
        self._wardens.forget(address, "codes")
        self._said_codes.pop(address, None)

    def _clear(self, address: str) -> None:
        """Kill what earlier jobs may have left on a host that was cut off. Their keepers (parent
        processes) have done that, unless a keeper was killed or stopped."""
        for start in sorted(self._left.get(address, ())):
            self._wardens.tell([address], "kill", *start, key=start, within_s=KILL_S)
        self._left.pop(address, None)

    def stop(self, job: str, incarnation: int) -> None:
        """Ask this start of the job to save a checkpoint and end after its present iteration."""
        start = (job, incarnation)
        if start in self._places and start not in self._codes:
            self._wardens.tell([self._places[start][0]], "stop", job, incarnation, key=start)

    def kill(self, job: str, incarnation: int) -> None:
        """Kill all processes of this start of the job. All hosts are asked, but only those of its
        nodes are waited for. Raises `OSError` as long as one of these is cut off."""
        start, hosts = (job, incarnation), self.hosts()
        if start in self._codes or start not in self._places:
            return
        self._kill_everywhere(start, hosts)
        code: int | None = -1
        if (first := self._places[start][0]) in hosts:  # it may have ended before, with another one
            code = self._wardens.tell([first], "codes", [start], key=start)[0][start]
        if code is not None:
            self._end(start, code)

    def _kill_everywhere(self, start: Start, hosts: Mapping[str, Mapping[str, float]]) -> None:
        first, *others = self._places[start]
        for address in hosts.keys() - {first}:  # it may take long until the first process is gone
            self._wardens.begin(address, "kill", *start, key=("before", start))
        self._kill_on(first, start)
        gone_s = self._gone_s.setdefault(start, time.monotonic())
        for address in others:
            self._kill_on(address, start)
            if address not in hosts and time.monotonic() - gone_s < LEASE_S + MARGIN_S:
                raise OSError(
                    f"{address} is cut off, and what {start[0]} has there may still go on"
                )
        for address in hosts:
            self._wardens.forget(address, "kill", ("before", start))

    def _kill_on(self, address: str, start: Start) -> None:
        if address in self.hosts(fresh=False):
            self._wardens.tell([address], "kill", *start, key=start, within_s=KILL_S)
        elif not self._wardens.is_empty(address):
            raise OSError(f"{address} is cut off, and what {start[0]} has there is not gone yet")
        else:
            self._left.setdefault(address, set()).add(start)

    def ended(self, job: str, incarnation: int) -> int | None:
        """Return the exit code of this start of the job, once no host has any process of it; None
        before that, or while hosts do not answer; -1 for an unknown start."""
        start = (job, incarnation)
        if start not in self._places:
            return -1
        with contextlib.suppress(OSError):
            if start not in self._codes and (code := self._code(start)) is not None:
                self._kill_everywhere(start, self.hosts())
                self._end(start, code)
        return self._codes.get(start)

    def _end(self, start: Start, code: int) -> None:
        if start not in self._codes:
            left = sorted(address for address, starts in self._left.items() if start in starts)
            self._write_start(start, code=code, left=left)
            self._codes[start] = code

    def _code(self, start: Start) -> int | None:
        address = self._places[start][0]
        if address not in self.hosts(fresh=False):
            return -1 if self._wardens.is_empty(address) else None
        said_s, codes = self._said_codes.get(address, (0.0, {}))
        if start not in codes or time.monotonic() - said_s > CODES_S:
            # Whoever asks about one asks about the others, too.
            known = [one for one, there in self._places.items() if there[0] == address]
            known = [one for one in known if one not in self._codes]
            (codes,) = self._wardens.tell([address], "codes", known)
            self._said_codes[address] = time.monotonic(), codes
        return codes.get(start)

    def last_lines(self, job: str) -> str:
        """Return the end of what the job's last start has printed. Empty if it cannot be read."""
        places = {start[1]: places[0] for start, places in self._places.items() if start[0] == job}
        if not places or (address := places[max(places)]) not in self.hosts(fresh=False):
            return ""
        with contextlib.suppress(OSError):
            return str(self._wardens.tell([address], "last_lines", job, key=job)[0])
        return ""

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """Ask ray's autoscaler, where there is one, for this many nodes of each pool."""
        bundles = [{pool_resource(pool): 1} for pool, n in num_nodes.items() for _ in range(n)]
        self._wardens.ask_ray(request_resources, None, bundles)
