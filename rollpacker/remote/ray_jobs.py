"""Who starts a cluster's jobs on ray, and ends them: a detached actor on each host, a *warden*.

    service -- Runner --> RayRunner --> warden of a host --> keeper --> `rollpacker train ...`

Wardens and jobs outlive the service: the next one finds them by name. Jobs are no jobs of ray's own
(`ray job submit`), for which every cluster needs ray's dashboard: an HTTP server, and two dozen
packages. That could not promise what a lease needs either: that all of a job is gone, on every
host, when `kill` returns.

Which hosts are a pool's nodes follows from ray's resources: a host was started with
`--resources='{"pool_NAME": 1}'`. Where no host has any such, and a phase has no more than one node,
both nodes are the host of the head.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rollpacker.cluster.local_runner import GONE_S
from rollpacker.remote.ray_connection import check_answers, say_short
from rollpacker.remote.ray_mail import NAMESPACE
from rollpacker.remote.token import MODE, PATH
from rollpacker.remote.warden import HOSTS, Start, Warden

if TYPE_CHECKING:
    from rollpacker.cluster.runner import Order
    from rollpacker.core.coexecution.nodes import Node

NODES_FILE = "nodes.json"
"""Of the cluster's folder: which host is which node."""
ANSWER_S = 5.0
START_S = 15.0
"""Within which ray has made a warden, for which it starts a process first."""
HOSTS_S, CODES_S = 1.0, 0.02
"""So old may be what ray and what a warden said, where nothing hangs on it."""

_Actor: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=16)(Warden)


def pool_resource(pool: str) -> str:
    """Of the hosts that are this pool's nodes, as ray knows it."""
    return f"pool_{pool}"


class RayRunner:
    """See `Runner`. This process is connected to ray."""

    def __init__(self, name: str, *, head: str, folder: str | Path, one_host: bool = False) -> None:
        """`name`: of the cluster, for its wardens. `head`: ray's, as all hosts reach it. What is
        known of jobs, and what they print, is in `folder`, on the host of each. `one_host`: nodes
        may be the head's host where no host says which pool it is of. Never of a phase that has
        several: two jobs would be on the same devices at once."""
        self._name = name
        self._folder = Path(folder).resolve()
        self._head = head
        self._one_host = one_host
        self._folder.mkdir(parents=True, exist_ok=True)
        self._nodes: dict[str, str] = {}
        """Addresses of nodes, by POOL/NUMBER."""
        with contextlib.suppress(FileNotFoundError):
            self._nodes = json.loads((self._folder / NODES_FILE).read_text())
        self._lock = threading.Lock()
        self._wardens: dict[str, Any] = {}
        self._places: dict[Start, str] = {}
        """The host's address."""
        self._codes: dict[Start, int] = {}
        """Of those that have ended."""
        self._asked_codes: dict[str, tuple[float, Mapping[Start, int | None]]] = {}
        """By host: when it was asked last, and what it said."""
        self._hosts: dict[str, dict[str, float]] = {}
        self._hosts_s = -math.inf

    # -- where ---------------------------------------------------------------------------

    def hosts(self, *, fresh: bool = True) -> dict[str, dict[str, float]]:
        """Address and resources of the hosts that ray takes to be there, the head's first.
        `fresh`: not as they were a second ago. Raises `OSError`."""
        now_s = time.monotonic()
        if fresh or now_s - self._hosts_s > HOSTS_S:
            alive = [node for node in self._asked(ray.nodes) if node["Alive"]]
            head = "node:__internal_head__"
            alive.sort(key=lambda node: (head not in node["Resources"], node["NodeManagerAddress"]))
            self._hosts = {node["NodeManagerAddress"]: node["Resources"] for node in alive}
            self._hosts_s = now_s
        return self._hosts

    def host_of(self, node: Node) -> str | None:
        """The node's address, which stays its own while that host is there, or until another one
        takes its place; None: ray has fewer hosts of the pool. Raises `OSError`."""
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
            free = [address for address in of_pool if address not in taken]
            if not free:
                return None
            self._nodes[name] = free[0]
            draft = self._folder / f"{NODES_FILE}.new"
            draft.write_text(json.dumps(self._nodes, indent=1))
            draft.replace(self._folder / NODES_FILE)
        return self._nodes[name]

    def _address(self, node: Node) -> str:
        address = self.host_of(node)
        if address is None:
            raise OSError(
                f"ray has no host for node {node.number} of the pool {node.pool}: start one with "
                f'ray start --address={self._head} --resources=\'{{"{pool_resource(node.pool)}": '
                "1}'"
            )
        return address

    # -- wardens -------------------------------------------------------------------------

    def _asked(self, function: Any, *arguments: Any) -> Any:
        try:
            check_answers(self._head)
            return function(*arguments)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise OSError(f"ray at {self._head} cannot be asked: {say_short(error)}") from error

    def _warden(self, address: str) -> Any:
        with self._lock:
            if address not in self._wardens:
                self._wardens[address] = self._asked(self._make, address)
            return self._wardens[address]

    def _make(self, address: str) -> Any:
        return _Actor.options(
            name=f"warden-{self._name}-{address}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            resources={f"node:{address}": 0.001},
        ).remote(self._folder)

    def _tell(
        self, addresses: Sequence[str], method: str, *arguments: Any, within_s: float = ANSWER_S
    ) -> list[Any]:
        """Their answers. Raises `OSError` for the first that has none."""
        asked = [self._ask(one, method, *arguments) for one in addresses]
        answers = []
        for address, reference in zip(addresses, asked, strict=True):
            try:
                try:
                    answers.append(ray.get(reference, timeout=within_s))
                except RayActorError:  # it is gone: another one goes on in its place
                    with self._lock:
                        self._wardens.pop(address, None)
                    reference = self._ask(address, method, *arguments)
                    answers.append(ray.get(reference, timeout=within_s))
            except RayTaskError as error:
                cause = error.cause
                raise OSError(f"{address}: {cause}") from error
            except GetTimeoutError:
                raise OSError(f"{address} has not answered for {within_s:g} s") from None
            except RayError as error:
                raise OSError(f"{address}: {say_short(error)}") from error
        return answers

    def _ask(self, address: str, method: str, *arguments: Any) -> Any:
        return getattr(self._warden(address), method).remote(*arguments)

    # -- jobs ----------------------------------------------------------------------------

    def start(self, order: Order) -> None:
        """See `Runner`. The job's first process is on the host of its first training node, which
        writes its checkpoints."""
        rollout = [self._address(node) for node in order.rollout_nodes]
        train = [self._address(node) for node in order.train_nodes]
        environ = dict(order.environ)
        if len(self.hosts()) > 1:
            for variable, addresses in zip(HOSTS.values(), (rollout, train), strict=True):
                environ[variable] = ",".join(dict.fromkeys(addresses))
        own = {"RAY_ADDRESS": self._head, **{name: os.environ[name] for name in (MODE, PATH)}}
        start = (order.job, order.incarnation)
        # Started by an earlier service, on what were its nodes then: it is there already.
        address = self._find(start) or train[0]
        order = replace(order, environ=environ)
        self._tell([address], "begin", order, own, within_s=START_S)
        self._places[start] = address
        self._asked_codes.pop(address, None)

    def _find(self, start: Start) -> str | None:
        """The host that this job was started on."""
        if start not in self._places:
            addresses = list(self.hosts())
            answers = self._tell(addresses, "knows", start, within_s=START_S)
            for address, knows in zip(addresses, answers, strict=True):
                if knows:
                    self._places[start] = address
                    break
        return self._places.get(start)

    def stop(self, job: str, incarnation: int) -> None:
        """See `Runner`."""
        if (address := self._find((job, incarnation))) is not None:
            self._tell([address], "stop", job, incarnation)

    def kill(self, job: str, incarnation: int) -> None:
        """See `Runner`. On every host that ray takes to be there: what was on another is gone with
        it, since agents end after `LEASE_S` without a call (`ray_agents.py`), and ray gives a host
        up only after a minute."""
        self._tell(list(self.hosts()), "kill", job, incarnation, within_s=ANSWER_S + GONE_S)
        self._asked_codes.clear()

    def ended(self, job: str, incarnation: int) -> int | None:
        """See `Runner`. Once it says a code, nothing of the job is on any host. None also of a job
        whose host does not answer."""
        start = (job, incarnation)
        if start not in self._codes and (code := self._code(start)) is not None:
            if code != -1:
                self.kill(job, incarnation)
            self._codes[start] = code
        return self._codes.get(start)

    def _code(self, start: Start) -> int | None:
        address = self._find(start)
        if address is None or address not in self.hosts(fresh=False):
            return -1
        asked_s, codes = self._asked_codes.get(address, (-math.inf, {}))
        if start not in codes or time.monotonic() - asked_s > CODES_S:
            # Whoever asks about one asks about the others, too.
            known = [one for one, there in self._places.items() if there == address]
            known = [one for one in known if one not in self._codes]
            try:
                answers = self._tell([address], "codes", known)[0]
            except OSError:
                return None  # as far as anybody can say; its lease ends if it is silent, too
            codes = dict(zip(known, answers, strict=True))
            self._asked_codes[address] = time.monotonic(), codes
        return codes[start]

    def last_lines(self, job: str) -> str:
        """See `Runner`: of its last start that is known here."""
        places = {start[1]: address for start, address in self._places.items() if start[0] == job}
        if not places:
            return ""
        with contextlib.suppress(OSError):
            address = places[max(places)]
            return str(self._tell([address], "last_lines", job)[0])
        return ""

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """See `Runner`. Ray's autoscaler is told, where there is one."""
        bundles = [{pool_resource(pool): 1} for pool, n in num_nodes.items() for _ in range(n)]
        self._asked(request_resources, None, bundles)

    def remove(self) -> None:
        """End the wardens. Jobs go on."""
        for address in self.hosts():
            with contextlib.suppress(Exception):  # gone, or cannot be reached
                ray.kill(self._warden(address))
        self._wardens.clear()
