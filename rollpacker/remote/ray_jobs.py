"""Who starts a cluster's jobs on ray, and ends them: a detached actor on each host, a *warden*.

    service -- Runner --> RayRunner --> warden of a host --> guardian --> `rollpacker train ...`

Wardens and jobs outlive the service: the next one finds them by name. They are no jobs of ray's own
(`ray job submit`), for which every cluster needs ray's dashboard: an HTTP server, and two dozen
packages. That could not promise what a lease needs either: that all of a job is gone, on every
host, when `kill` returns.

Which hosts are a pool's nodes follows from ray's resources: a host was started with
`--resources='{"pool_NAME": 1}'`. Where no host has any such, every node is the host of the head.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rollpacker.remote.ray_connection import check_answers, say_short
from rollpacker.remote.ray_mail import NAMESPACE
from rollpacker.remote.token import MODE, PATH
from rollpacker.remote.warden import GONE_S, HOSTS, Warden

if TYPE_CHECKING:
    from rollpacker.cluster.runner import Order
    from rollpacker.core.coexecution.nodes import Node

ANSWER_S = 5.0
START_S = 60.0
"""Within which ray has made a warden: it starts a process for it first."""
LAST_BYTES = 4000
HOSTS_S, CODES_S = 1.0, 0.02
"""So old may be what ray and what a warden said, where nothing hangs on it."""

_Actor: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=16)(Warden)


def pool_resource(pool: str) -> str:
    """Of the hosts that are this pool's nodes, as ray knows it."""
    return f"pool_{pool}"


class RayRunner:
    """See `Runner`. This process is connected to ray."""

    def __init__(self, name: str, *, folder: str | Path) -> None:
        """`name`: of the cluster, for its wardens and its jobs' marks. What jobs print is written
        below `folder`, on their hosts."""
        self._name = name
        self._folder = Path(folder).resolve()
        self._head: str = ray.get_runtime_context().gcs_address
        self._lock = threading.Lock()
        self._wardens: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        """Of jobs, by mark: the host's address."""
        self._codes: dict[str, int] = {}
        """Of jobs that have ended, by mark."""
        self._asked_codes: dict[str, tuple[float, Mapping[str, int | None]]] = {}
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
        """The node's address; None: ray has fewer hosts of the pool now. Raises `OSError`."""
        hosts = self.hosts()
        if not any(name.startswith(pool_resource("")) for one in hosts.values() for name in one):
            return next(iter(hosts), None)
        of_pool = sorted(a for a, one in hosts.items() if pool_resource(node.pool) in one)
        return of_pool[node.number] if node.number < len(of_pool) else None

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
        ).remote()

    def _tell(
        self, addresses: Sequence[str], method: str, *arguments: Any, within_s: float = START_S
    ) -> list[Any]:
        """Their answers. Raises `OSError` for the first that has none."""
        asked = [(one, getattr(self._warden(one), method).remote(*arguments)) for one in addresses]
        answers = []
        for address, reference in asked:
            try:
                answers.append(ray.get(reference, timeout=within_s))
            except RayActorError as error:  # with all that it had; the next call makes another
                with self._lock:
                    self._wardens.pop(address, None)
                raise OSError(f"the warden of {address} is gone: {say_short(error)}") from error
            except GetTimeoutError:
                raise OSError(f"{address} has not answered for {within_s:g} s") from None
            except RayError as error:
                raise OSError(f"{address}: {say_short(error)}") from error
        return answers

    # -- jobs ----------------------------------------------------------------------------

    def _mark(self, job: str, incarnation: int) -> str:
        return f"{self._name}/{job}/{incarnation}"

    def output(self, job: str) -> Path:
        """Where a job's lines are, on the host that it runs on."""
        return self._folder / "jobs" / f"{job}.log"

    def start(self, order: Order) -> None:
        """See `Runner`. The job's first process is on the host of its first training node, which
        writes its checkpoints."""
        rollout = [self._address(node) for node in order.rollout_nodes]
        train = [self._address(node) for node in order.train_nodes]
        environ = {**order.environ, "RAY_ADDRESS": self._head}
        environ |= {name: os.environ[name] for name in (MODE, PATH)}
        if len(self.hosts()) > 1:
            for variable, addresses in zip(HOSTS.values(), (rollout, train), strict=True):
                environ[variable] = ",".join(dict.fromkeys(addresses))
        mark = self._mark(order.job, order.incarnation)
        # Started by an earlier service, on what were its nodes then: it is there already.
        address = self._find(mark) or train[0]
        output = str(self.output(order.job))
        self._tell([address], "start", mark, list(order.command), environ, order.folder, output)
        self._places[mark] = address
        self._asked_codes.pop(address, None)

    def _find(self, mark: str) -> str | None:
        """The host that this job was started on."""
        if mark not in self._places:
            addresses = list(self.hosts())
            for address, knows in zip(addresses, self._tell(addresses, "knows", mark), strict=True):
                if knows:
                    self._places[mark] = address
        return self._places.get(mark)

    def stop(self, job: str, incarnation: int) -> None:
        """See `Runner`."""
        mark = self._mark(job, incarnation)
        if (address := self._find(mark)) is not None:
            self._tell([address], "stop", mark, within_s=ANSWER_S)

    def kill(self, job: str, incarnation: int) -> None:
        """See `Runner`. On every host that ray takes to be there: what was on another is gone with
        it, since agents end after `LEASE_S` without a call (`ray_agents.py`), and ray gives a host
        up only after a minute."""
        mark = self._mark(job, incarnation)
        self._tell(list(self.hosts()), "kill", mark, within_s=ANSWER_S + GONE_S)
        self._asked_codes.clear()

    def ended(self, job: str, incarnation: int) -> int | None:
        """See `Runner`. Once it says a code, nothing of the job is on any host."""
        mark = self._mark(job, incarnation)
        if mark not in self._codes and (code := self._code(mark)) is not None:
            self.kill(job, incarnation)
            self._codes[mark] = code
        return self._codes.get(mark)

    def _code(self, mark: str) -> int | None:
        address = self._find(mark)
        if address is None or address not in self.hosts(fresh=False):
            return -1
        try:
            code: int | None = self._codes_of(address).get(mark, -1)
        except OSError:
            if address in self._wardens:
                raise
            return -1  # the warden died, and with it the job
        return code

    def _codes_of(self, address: str) -> Mapping[str, int | None]:
        """Of all jobs there: whoever asks about one asks about the others, too."""
        now_s = time.monotonic()
        asked_s, codes = self._asked_codes.get(address, (-math.inf, {}))
        if now_s - asked_s > CODES_S:
            codes = self._tell([address], "codes", within_s=ANSWER_S)[0]
            self._asked_codes[address] = now_s, codes
        return codes

    def last_lines(self, job: str) -> str:
        """The end of what the job has printed, or nothing if that cannot be read now."""
        found = ""
        with contextlib.suppress(OSError):
            for address in dict.fromkeys(self._places.values()):
                lines = self._tell(
                    [address], "last_lines", str(self.output(job)), LAST_BYTES, within_s=ANSWER_S
                )
                found = lines[0] or found
        return found

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """See `Runner`. Ray's autoscaler is told, where there is one."""
        bundles = [{pool_resource(pool): 1} for pool, n in num_nodes.items() for _ in range(n)]
        self._asked(request_resources, None, bundles)

    def remove(self) -> None:
        """End the wardens, and with them all jobs."""
        for address in self.hosts():
            with contextlib.suppress(Exception):  # gone, or cannot be reached
                ray.kill(self._warden(address))
        self._wardens.clear()
