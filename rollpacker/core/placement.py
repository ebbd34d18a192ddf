"""Which device does what: engines, training replicas and a judge, on the devices of all hosts.

    hosts, roles, who takes turns -> plan_placement -> a Placement, or a PlacementError

No device is over its memory, and no unit on two hosts unless its role may be; ranges are what they
say, and `all` is as many units as fit beside the others. Where there is a solution it is found
(`core/placement_search.py`), always the same one; where there is none, the error says what is short
and which nearest setting fits (`core/placement_nearest.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rollpacker.core.placement_nearest import nearest
from rollpacker.core.placement_search import Search
from rollpacker.core.placement_shortage import check_lines, shortage
from rollpacker.core.roles import (
    Host,
    PlacedDevice,
    PlacedHost,
    Placement,
    PlacementError,
    PlacementRequest,
    Role,
    Unit,
)


def plan_placement(hosts: Sequence[Host], request: PlacementRequest) -> Placement:
    """Raises `PlacementError`, with the nearest setting that fits if there is one."""
    try:
        return _plan(hosts, request)
    except PlacementError as error:
        changes = nearest(hosts, request, _plan)
        if changes is None:
            raise PlacementError(
                f"{error}. No other setting of placement fits: it takes other hosts, or less for "
                "each device (rollout.engine.kv_cache_gib, train.micro_batch_tokens)"
            ) from None
        said = " and ".join(f"{key}={value}" for key, value in changes.items())
        raise PlacementError(f"{error}. The nearest that fits: {said}", changes) from None


def _plan(hosts: Sequence[Host], request: PlacementRequest) -> Placement:
    """The same, where the error does not say what would fit.

    A unit that may be on several hosts is on one of them unless there would be fewer units.
    """
    check_lines(hosts, request)
    if not any(role.across_hosts for role in request.roles):
        return _found(hosts, request)
    roles = tuple(replace(role, across_hosts=False) for role in request.roles)
    across = _found(hosts, request)
    try:
        within = _plan(hosts, replace(request, roles=roles))
    except PlacementError:
        return across
    as_many = all(len(within.of(role.name)) == len(across.of(role.name)) for role in request.roles)
    return within if as_many else across


def _found(hosts: Sequence[Host], request: PlacementRequest) -> Placement:
    search = Search(hosts, request)
    counts = search.counts()
    if counts is None:
        raise PlacementError(shortage(hosts, request))
    return _placement(hosts, request, search.devices(counts))


def _placement(
    hosts: Sequence[Host], request: PlacementRequest, devices: dict[str, list[int]]
) -> Placement:
    """Units of these devices, and what is on each."""
    units = [
        unit
        for role in request.roles
        for unit in _units(role, _by_host(hosts, request, role, devices[role.name]))
    ]
    on: dict[int, list[Unit]] = {}
    for unit in units:
        for device in unit.devices:
            on.setdefault(device, []).append(unit)
    placed, placed_hosts, first = [], [], 0
    for host in hosts:
        size = host.num_devices(request.kind)
        for local in range(size):
            here = on.get(first + local, [])
            placed.append(
                PlacedDevice(
                    number=first + local,
                    host=host.name,
                    local=local,
                    units=tuple(unit.name for unit in here),
                    used_bytes=request.load(Counter(unit.role for unit in here)),
                    memory_bytes=None if request.kind == "cpu" else host.gpu_bytes[local],
                )
            )
        together = Counter(unit.role for local in range(size) for unit in on.get(first + local, []))
        placed_hosts.append(
            PlacedHost(
                name=host.name,
                used_bytes=request.load(together)
                if request.kind == "cpu"
                else sum(device.used_bytes for device in placed[first:]),
                held_bytes=host.held_bytes,
                memory_bytes=host.memory_bytes if request.kind == "cpu" else None,
            )
        )
        first += size
    return Placement(
        kind=request.kind,
        units=tuple(units),
        devices=tuple(placed),
        hosts=tuple(placed_hosts),
        unknown=tuple(role.name for role in request.roles if role.needs(role.per_unit) is None),
    )


def _by_host(
    hosts: Sequence[Host], request: PlacementRequest, role: Role, devices: Sequence[int]
) -> Iterator[Sequence[int]]:
    """Devices from which units are cut: host by host, or all where a unit may be on several."""
    if role.across_hosts:
        yield devices
        return
    ends = itertools.accumulate(host.num_devices(request.kind) for host in hosts)
    first = 0
    for end in ends:
        yield [device for device in devices if first <= device < end]
        first = end


def _units(role: Role, parts: Iterator[Sequence[int]]) -> list[Unit]:
    found: list[Unit] = []
    for part in parts:
        assert len(part) % role.per_unit == 0, "the search counts in units"
        for start in range(0, len(part), role.per_unit):
            own = tuple(part[start : start + role.per_unit])
            found.append(Unit(role=role.name, name=f"{role.unit} {len(found)}", devices=own))
    return found
