"""Asks ray which hosts there are, for their devices, for an agent on each, and to carry calls.

    join(address): connect to a cluster, by token only (`ray_connection.py`).
    RayCluster.nodes: what ray knows of each host, by address.
    RayCluster.reserve(wanted): reserve devices on hosts; the error tells how many are in use.
    RayCluster.own_gpus: names of the GPUs that ray has reserved on this process's host.
    RayCluster.connect(address): return a function that makes a new agent on that host.

Actors are never restarted by ray and no call is repeated by it. A placement group's bundle is tied
to its host by the resource `node:ADDRESS` and not by the node's id: a raylet (ray's process on a
host) that comes back has another id, and a new agent has to find its devices still reserved. An
agent holds the GPUs of its bundle, so that ray tells it which they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollpacker.workers.hosts.agent import Agent
from rollpacker.workers.hosts.facts import HostFacts, facts
from rollpacker.workers.hosts.ray_connection import (
    LOCAL,
    check_answers,
    connect,
    disconnect,
    find_head,
    say_short,
)
from rollpacker.workers.hosts.remote_host import Answer, Calls, Gone, Unavailable

LEASE_S = 12.0
"""Seconds without a call from the run after which an agent ends, with all its processes."""
PROBE_S = 1.0
ASK_S = 60.0
"""Seconds within which a host must report its cores and so on; ray first starts a process there."""
GROUPS = {"say": "say", "hear": "hear"}
"""Agent's methods that ray runs in threads of their own, so that long calls do not delay them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A host of the ray cluster, with the numbers of CPU cores and GPUs that ray knows of."""

    address: str
    num_cpus: int
    num_gpus: int


class RayCluster:
    """A ray cluster to which this process is connected (by `join`)."""

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._bundles: dict[str, int] = {}
        """Number of each host's bundle in the placement group, by the host's address."""
        self._gpus: dict[str, float] = {}
        """Number of GPUs that are reserved on each host, by address."""
        self.own_gpus: list[str] = []
        self._head: str = ray.get_runtime_context().gcs_address

    @property
    def nodes(self) -> dict[str, RayNode]:
        """Return the cluster's live hosts by address: this process's own first, the others sorted
        by address."""
        own = _own_address()
        alive = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
        found = {}
        for address in sorted(alive, key=lambda one: (one != own, _numbers(one))):
            resources = alive[address]["Resources"]
            found[address] = RayNode(
                address=address,
                num_cpus=int(resources.get("CPU", 0)),
                num_gpus=int(resources.get("GPU", 0)),
            )
        return found

    @property
    def own_address(self) -> str:
        """Return the network address of this process's host, as ray knows it."""
        return _own_address()

    def facts(self, address: str) -> HostFacts:
        """Return the host's cores, memory and so on. Raises `ValueError` if it cannot be asked."""
        found: HostFacts = _ask(address, facts)
        return found

    def sees(self, address: str, path: str) -> bool:
        """Return whether `path` exists on that host. Raises `ValueError` if it cannot be asked."""
        return bool(_ask(address, os.path.exists, path))

    def reserve(self, wanted: Mapping[str, Mapping[str, float]], *, within_s: float) -> None:
        """Reserve these numbers of `CPU` and `GPU`, by host's address, until this process
        disconnects, and find out `own_gpus`. Raises `ValueError` after `within_s` seconds, with how
        much is in use."""
        bundles = [{**resources, f"node:{address}": 0.001} for address, resources in wanted.items()]
        self._bundles = {address: place for place, address in enumerate(wanted)}
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(within_s):
            remove_placement_group(self._group)
            self._group = None
            raise ValueError(
                f"ray could not reserve {_said(wanted)} within {within_s:g} s. {_taken()}. "
                "Wait for the others, or ask for fewer devices"
            )
        self._gpus = {address: resources.get("GPU", 0.0) for address, resources in wanted.items()}
        if self._gpus.get(self.own_address):
            self.own_gpus = _ask(self.own_address, _reserved, **self._bundle_of(self.own_address))

    def _bundle_of(self, address: str) -> dict[str, Any]:
        """Return ray's options for a task or actor that holds all GPUs reserved on this host."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundles[address]
        )
        return {"num_gpus": self._gpus[address], "scheduling_strategy": strategy}

    def connect(self, address: str) -> Callable[[int], Calls]:
        """Return a function that makes a new agent on that host, with the host's reserved devices.
        Its argument is the process id of the last agent there, or 0 (`Connect`)."""
        options = self._bundle_of(address)

        def make(predecessor: int) -> Calls:
            try:
                _check_reached(address)
                return _RayCalls(
                    _Actor.options(**options, name=None, lifetime=None).remote(
                        lease_s=LEASE_S, predecessor=predecessor
                    )
                )
            except Exception as error:  # whatever ray says of a cluster that is gone
                raise Gone(str(error)) from error

        return make

    def has_head(self) -> bool:
        """Return whether the cluster's head still takes connections."""
        try:
            check_answers(self._head)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """Release the reserved devices and disconnect. If ray's head is gone, the devices are not
        released one by one: ray would wait for a head until it ended this process."""
        with contextlib.suppress(Exception):
            if self._group is not None and self.has_head():
                remove_placement_group(self._group)
        self._group = None
        disconnect()


def _check_reached(address: str) -> None:
    """Raise `OSError` if the host at this address cannot be reached. Ray itself would wait for such
    a host, perhaps for longer than it is cut off."""
    error = OSError(f"ray has no host {address} now")
    for node in ray.nodes():  # where its raylet was started anew, the earlier one may be there, too
        if node["Alive"] and node["NodeManagerAddress"] == address:
            try:
                place = (address, node["NodeManagerPort"])
                socket.create_connection(place, timeout=PROBE_S).close()
                return
            except OSError as refused:
                error = refused
    raise error


def _reserved() -> list[str]:
    """Return the names of the GPUs that ray has given this process, in an order that stays."""
    return sorted(map(str, ray.get_gpu_ids()), key=lambda name: (len(name), name))


class _RayAgent(Agent):
    """An agent in an actor of ray, which may use the GPUs that ray has given the actor."""

    def __init__(self, *, lease_s: float, predecessor: int) -> None:
        super().__init__(lease_s=lease_s, predecessor=predecessor, gpus=_reserved())


_Actor: Any = ray.remote(
    num_cpus=0,
    max_restarts=0,
    max_task_retries=0,
    concurrency_groups={"say": 1, "hear": 1, "bulk": 8},
)(_RayAgent)


class _RayCalls:
    """Calls the methods of one agent (the run's process on a host) through ray. Meets `Calls`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._methods: dict[str, Any] = {}

    def begin(self, method: str, *arguments: Any) -> Answer:
        if method not in self._methods:
            group = GROUPS.get(method, "bulk")
            asked = getattr(self._actor, method).options(concurrency_group=group)
            self._methods[method] = asked
        try:
            return _RayAnswer(self._methods[method].remote(*arguments))
        except RayActorError as error:
            raise Gone(say_short(error)) from error

    def end(self) -> None:
        with contextlib.suppress(Exception):  # it cannot be reached: its lease ends it
            ray.kill(self._actor)


class _RayAnswer:
    """The answer of an agent to a call through ray, which may not have come yet."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def result(self, timeout_s: float) -> Any:
        try:
            return ray.get(self._reference, timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError from None
        except ActorUnavailableError as error:
            raise Unavailable(say_short(error)) from error
        except (ActorDiedError, ActorUnschedulableError) as error:
            raise Gone(say_short(error)) from error
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise Gone(say_short(error)) from error


def _numbers(address: str) -> list[tuple[int, str]]:
    """Return a key that sorts addresses by their numbers: 10.0.0.9 before 10.0.0.10."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"[.:]", address)]


def _own_address() -> str:
    address: str = ray.util.get_node_ip_address()
    return address


def _ask(address: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what `function` returns in a process of ray on this host. `options`: ray's, in place
    of those that choose the host. Raises `ValueError`."""
    there = {"num_cpus": 0, "max_retries": 0}
    there |= options or {"resources": {f"node:{address}": 0.001}}
    try:
        asked = ray.remote(function).options(**there).remote(*arguments)
        return ray.get(asked, timeout=ASK_S)
    except (GetTimeoutError, RayError) as error:
        raise ValueError(
            f"{address} is in ray's cluster, and cannot be asked what it has: "
            f"{say_short(error) or f'no answer within {ASK_S:g} s'}. Is RollPacker installed "
            "there, in the environment that ray was started from?"
        ) from error


def _taken() -> str:
    left, there = ray.available_resources(), ray.cluster_resources()
    return "Of all hosts together " + ", ".join(
        f"{there.get(one, 0) - left.get(one, 0):g} of {there.get(one, 0):g} {one} are taken"
        for one in ("CPU", "GPU")
        if one in there
    )


def _said(wanted: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{amount:g} {resource} on {address}"
        for address, resources in wanted.items()
        for resource, amount in resources.items()
    )


def join(address: str | None = None) -> RayCluster:
    """Connect to the cluster at `address` (that of its head, HOST:PORT). None: the cluster that
    this machine belongs to, or else a new one of this machine alone that ends with this process.

    Raises `ValueError` with one message for a mistake that the user can correct.
    """
    connect(address or find_head() or LOCAL, log_to_driver=True)
    return RayCluster()
