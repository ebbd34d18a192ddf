"""The hosts of a cluster on ray, and on each a detached actor that starts and ends jobs: a *warden*
(`warden.py`).

A host that does not answer keeps no caller waiting: its call goes on, and the same call made again
later returns the answer. Ray takes up to a minute to give such a host up.

Service and wardens ask ray's head which hosts belong to the cluster. Ray never takes back a raylet
(its process on a host) that it has given up. So on a host whose raylet was given up, the keepers
(jobs' parent processes) end all jobs `keeper.FENCE_S` later, even if nobody can reach the host.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollpacker.cluster.on_ray.mail import NAMESPACE
from rollpacker.cluster.on_ray.warden import Warden
from rollpacker.cluster.service.keeper import FENCE_S
from rollpacker.workers.hosts.ray_connection import check_answers, say_short

ANSWER_S = 1.0
MUTE_S = 1.0
"""Seconds without an answer from a host after which further calls no longer wait for it."""
HOSTS_S = 1.0
"""Seconds for which ray's list of hosts is used again, if a caller needs no fresh one."""
MARGIN_S = 5.0
"""Seconds added to `FENCE_S` until a lost host counts as free of jobs: kills take a while."""

# Ray starts it again, also without a service: jobs end where none is for `FENCE_S`.
_Actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=16)(
    Warden
)


class Wardens:
    """Calls the wardens (on each host, the actor that starts and ends jobs). This process must be
    connected to ray. All methods raise `OSError` if ray's head does not answer."""

    def __init__(self, name: str, *, head: str, folder: Path) -> None:
        """`name`: the cluster's. `head`: ray's address. `folder`: on each host, for jobs' files."""
        self._name, self._head, self._folder = name, head, folder
        self._actors: dict[str, Any] = {}
        self._calls: dict[tuple[str, str, Hashable], tuple[Any, float]] = {}
        """Calls still without an answer, each with the time of its begin. The keys are host,
        method, and the `key` that distinguishes calls of one method."""
        self._hosts: dict[str, dict[str, float]] = {}
        self._looked_s = -math.inf
        self._away: dict[str, tuple[frozenset[str], float]] = {}
        """For each host that ray has lost: ids of the raylets (ray's processes on a host) that it
        had, and the time in seconds since when all of these are known to be lost."""

    # -- hosts ---------------------------------------------------------------------------

    def hosts(self, *, fresh: bool = True) -> dict[str, dict[str, float]]:
        """Return the resources of the hosts that ray counts as alive, by address, the head's first.
        `fresh`: ask ray, even if its last answer is less than `HOSTS_S` seconds old."""
        if fresh or time.monotonic() - self._looked_s > HOSTS_S:
            nodes = self.ask_ray(ray.nodes)
            head = "node:__internal_head__"
            alive = [node for node in nodes if node["Alive"]]
            alive.sort(key=lambda node: (head not in node["Resources"], node["NodeManagerAddress"]))
            self._hosts = {node["NodeManagerAddress"]: node["Resources"] for node in alive}
            self._looked_s = time.monotonic()
            raylets = defaultdict[str, set[str]](set)
            for node in nodes:
                raylets[node["NodeManagerAddress"]].add(node["NodeID"])
            self._away = {
                address: self._away_since(address, frozenset(raylets[address]))
                for address in {*raylets, *self._away} - self._hosts.keys()
            }
        return self._hosts

    def _away_since(self, address: str, raylets: frozenset[str]) -> tuple[frozenset[str], float]:
        known = self._away.get(address)
        return known if known and known[0] == raylets else (raylets, self._looked_s)

    def is_empty(self, address: str) -> bool:
        """Whether the host was lost so long ago that all jobs there have been ended by their
        keepers (parent processes)."""
        if address in self.hosts(fresh=False):
            return False
        _, since_s = self._away.setdefault(address, (frozenset(), time.monotonic()))
        if time.monotonic() - since_s <= FENCE_S + MARGIN_S:
            return False
        return address not in self.hosts() and self._away[address][1] == since_s

    # -- calls ---------------------------------------------------------------------------

    def begin(self, address: str, method: str, *arguments: Any, key: Hashable = None) -> None:
        """Begin a call of a method of this host's warden (actor), unless a call of the method with
        the same `key` has no answer yet. `key`: distinguishes calls with different arguments."""
        call = (address, method, key)
        if call not in self._calls:
            function = getattr(self._actor(address), method)
            self._calls[call] = function.remote(*arguments), time.monotonic()

    def tell(
        self,
        addresses: Sequence[str],
        method: str,
        *arguments: Any,
        key: Hashable = None,
        within_s: float = ANSWER_S,
    ) -> list[Any]:
        """Call a method of these hosts' wardens (actors), and return the answers. Raises `OSError`
        for the first host without an answer after `within_s` seconds (the call goes on), or with an
        error. `key`: distinguishes calls with different arguments."""
        for address in addresses:
            self.begin(address, method, *arguments, key=key)
        mute = self._mute()
        asked = [self._calls[address, method, key][0] for address in addresses]
        awaited = [one for one, there in zip(asked, addresses, strict=True) if there not in mute]
        if awaited:
            ray.wait(awaited, num_returns=len(awaited), timeout=within_s)
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
        for address, reference in zip(addresses, asked, strict=True):
            if reference not in done:
                raise OSError(f"{address} does not answer")
        return [self._answer(address, method, key) for address in addresses]

    def forget(self, address: str, method: str, key: Hashable = None) -> None:
        """Forget the call of this method and `key`: its answer will not be asked for."""
        self._calls.pop((address, method, key), None)

    def _answer(self, address: str, method: str, key: Hashable) -> Any:
        reference, _ = self._calls.pop((address, method, key))
        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise OSError(f"{address}: {error.cause}") from error
        except RayActorError as error:  # another one goes on in its place
            self._actors.pop(address, None)
            raise OSError(f"{address}: its warden is gone; ray starts another one") from error
        except RayError as error:
            raise OSError(f"{address}: {say_short(error)}") from error

    def _mute(self) -> set[str]:
        now_s = time.monotonic()
        old = {
            reference: address
            for (address, _, _), (reference, began_s) in self._calls.items()
            if now_s - began_s > MUTE_S
        }
        if not old:
            return set()
        _, unanswered = ray.wait(list(old), num_returns=len(old), timeout=0)
        return {old[reference] for reference in unanswered}

    def ask_ray(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of ray's own functions. Raises `OSError` if ray's head does not answer."""
        try:
            check_answers(self._head)
            return function(*arguments)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise OSError(f"ray at {self._head} cannot be asked: {say_short(error)}") from error

    # -- wardens -------------------------------------------------------------------------

    def make(self, address: str) -> None:
        """Make the warden (actor) of this host before it is needed: ray takes seconds for that."""
        self._actor(address)

    def _actor(self, address: str) -> Any:
        if address not in self._actors:
            self._actors[address] = self.ask_ray(self._make, address)
        return self._actors[address]

    def _make(self, address: str) -> Any:
        return _Actor.options(
            name=f"warden-{self._name}-{address}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            resources={f"node:{address}": 0.001},
        ).remote(self._folder, address, _is_member)


def _is_member() -> bool:
    """Whether ray's head still counts the host of this process as alive."""
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and node["Alive"] for node in ray.nodes())
