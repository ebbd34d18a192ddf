"""Plans which devices are used by engines, training replicas and a judge, over all hosts.

    hosts, roles, who takes turns -> plan_placement -> a Placement, or a PlacementError

First fit in the order of the roles. Roles whose config lines name devices have these. Then each
role with a number of devices gets the lowest ones that have room, or the highest ones if a role
before it asks for all devices. At last the roles with `all` get one unit (engine, replica or judge)
each, and then as many as there is room for. A role that takes turns with others goes first to the
devices that these have. Nothing is moved once it is placed, so a plan may exist that is not found:
the error says which role is short and where, and a config line that names devices can place it
otherwise.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rollpacker.core.placement.roles import (
    Host,
    PlacedDevice,
    PlacedHost,
    Placement,
    PlacementError,
    PlacementRequest,
    Role,
    Unit,
    as_line,
    as_ranges,
    text_of_bytes,
)

_MOST_HOSTS = 4
"""Maximum number of hosts that an error message names one by one."""
_MOST_PARTS = 3
"""Number of the largest parts of memory that an error message names."""


def plan_placement(hosts: Sequence[Host], request: PlacementRequest) -> Placement:
    """Returns a plan that gives every role its devices, or raises `PlacementError`."""
    _check_lines(hosts, request)
    fill = _Fill(hosts, request)
    for role, wanted in _in_order(request):
        if (units := fill.place(role, wanted)) < wanted:
            raise PlacementError(_shortage(fill, role, units))
    for role in request.roles:
        if role.count is None:
            fill.place(role, None)
    return _placement(fill)


def _in_order(request: PlacementRequest) -> Iterator[tuple[Role, int]]:
    """Yields every role in the order of placement, with the number of units that it must get."""
    rank = {
        role.name: 0 if role.pinned else 2 if role.count is None else 1 for role in request.roles
    }
    for role in sorted(request.roles, key=lambda role: rank[role.name]):
        yield role, 1 if role.count is None else role.count // role.per_unit


class _Lack(NamedTuple):
    """A device or a host whose memory does not suffice."""

    where: str
    has_bytes: int
    load_bytes: int
    """Bytes that would be needed there."""
    counts: Mapping[str, int]
    """Number of devices there of each role that would be there, by the role's name."""
    held_bytes: int
    """Bytes of the memory there that the run's own process holds."""
    is_locked: bool = False
    """Whether it is the memory of a host that roles keep page-locked for its GPUs."""


class _Fill:
    """The devices of all hosts, and the roles and units placed on them so far."""

    def __init__(
        self, hosts: Sequence[Host], request: PlacementRequest, *, endless: bool = False
    ) -> None:
        """`endless`: memory counts as unlimited, to see whether a plan fails for lack of memory."""
        self.hosts, self.request, self.endless = hosts, request, endless
        sizes = [host.num_devices(request.kind) for host in hosts]
        self.host_of = [number for number, size in enumerate(sizes) for _ in range(size)]
        self.local = [local for size in sizes for local in range(size)]
        """Number that each device has on its own host, by the device's number over all hosts."""
        self.on: list[set[str]] = [set() for _ in self.host_of]
        """Names of the roles placed on each device."""
        self.units: dict[str, list[tuple[int, ...]]] = {role.name: [] for role in request.roles}
        self._taken: list[Counter[str]] = [Counter() for _ in hosts]
        """For each host, the number of its devices that each role has, by the role's name."""

    def place(self, role: Role, wanted: int | None) -> int:
        """Places up to `wanted` units (engines, training replicas or judges) of this role. None:
        all that fit. Returns the number placed."""
        placed = 0
        for devices in self._tries(role):
            while wanted is None or placed < wanted:
                unit = self._unit(role, devices)
                if unit is None:
                    break
                self.units[role.name].append(unit)
                for device in unit:
                    self.on[device].add(role.name)
                    self._taken[self.host_of[device]][role.name] += 1
                placed += 1
        return placed

    def lack(self, role: Role) -> _Lack | None:
        """Finds what is short for another unit of this role: the first device (or host, for CPU
        cores and page-locked memory) without memory for it. None: memory is not what is short."""
        for device in role.pinned or range(len(self.on)):
            number = self.host_of[device]
            host = self.hosts[number]
            if not self._is_free(role, device) or self._has_room(role, device, role.per_unit):
                continue
            counts = self._taken[number] + Counter({role.name: role.per_unit})
            if self.request.kind == "cpu":
                load = self.request.load(counts)
                return _Lack(host.name, host.left_bytes, load, counts, host.held_bytes)
            together = Counter(self._together(role, device))
            load, has = self.request.load(together), host.gpu_bytes[self.local[device]]
            if load > has:
                return _Lack(f"device {device} on {host.name}", has, load, together, 0)
            load = self.request.host_load(counts)
            return _Lack(host.name, host.left_bytes, load, counts, host.held_bytes, is_locked=True)
        return None

    def _tries(self, role: Role) -> Iterator[list[int]]:
        """Yields lists of devices from which a unit may be made, the best first: on one host, those
        used by roles that take turns with this one; then all of one host; then all of all hosts, if
        allowed."""
        devices = list(role.pinned or range(len(self.on)))
        if role.count is not None and not role.pinned and self._is_after_all(role):
            devices.reverse()
        of_hosts = [
            list(group) for _, group in itertools.groupby(devices, self.host_of.__getitem__)
        ]
        for of_host in of_hosts:
            yield [device for device in of_host if self.on[device]]
        for of_host in of_hosts:
            yield sorted(of_host, key=lambda device: not self.on[device])
        if role.across_hosts:
            yield devices

    def _is_after_all(self, role: Role) -> bool:
        before = itertools.takewhile(lambda one: one.name != role.name, self.request.roles)
        return any(one.count is None and not self.request.shares(one, role) for one in before)

    def _unit(self, role: Role, devices: Sequence[int]) -> tuple[int, ...] | None:
        """Numbers of the first of these `devices` that can make one unit (engine, training replica
        or judge) of the role. None: too few of them are free and have memory."""
        found: list[int] = []
        on_host: Counter[int] = Counter()
        for device in devices:
            number = self.host_of[device]
            if self._is_free(role, device) and self._has_room(role, device, on_host[number] + 1):
                found.append(device)
                on_host[number] += 1
                if len(found) == role.per_unit:
                    return tuple(sorted(found))
        return None

    def _is_free(self, role: Role, device: int) -> bool:
        """Whether this role may have the device: no role has it, or only roles that share devices
        with this one by taking turns (`colocate`)."""
        turns = self.request.colocate if role.name in self.request.colocate else frozenset()
        return role.name not in self.on[device] and self.on[device] <= turns

    def _has_room(self, role: Role, device: int, on_host: int) -> bool:
        """Whether the device's memory suffices for one more unit. `on_host`: number of the unit's
        devices on this host, this one included."""
        number = self.host_of[device]
        if self.endless:
            return True
        counts = self._taken[number] + Counter({role.name: on_host})
        if self.request.kind == "cpu":
            return self.request.load(counts) <= self.hosts[number].left_bytes
        load = self.request.load(Counter(self._together(role, device)))
        return (
            load <= self.hosts[number].gpu_bytes[self.local[device]]
            and self.request.host_load(counts) <= self.hosts[number].left_bytes
        )

    def _together(self, role: Role, device: int) -> set[str]:
        """Names of the roles for which the device's memory must suffice: those placed on it, this
        one, and all roles that may share devices with this one, since roles placed first must not
        take the memory that later ones need."""
        names = self.on[device] | {role.name}
        if role.name in self.request.colocate and not role.pinned:
            names |= {one.name for one in self.request.roles
                      if one.name in self.request.colocate and not one.pinned}  # fmt: skip
        return names


def _placement(fill: _Fill) -> Placement:
    request = fill.request
    units = [
        Unit(role=role.name, name=f"{role.unit} {number}", devices=devices)
        for role in request.roles
        for number, devices in enumerate(sorted(fill.units[role.name]))
    ]
    on: list[list[Unit]] = [[] for _ in fill.on]
    for unit in units:
        for device in unit.devices:
            on[device].append(unit)
    on_cpu = request.kind == "cpu"
    devices = [
        PlacedDevice(
            number=number,
            host=fill.hosts[host].name,
            local=local,
            units=tuple(unit.name for unit in on[number]),
            used_bytes=request.load(Counter(unit.role for unit in on[number])),
            memory_bytes=None if on_cpu else fill.hosts[host].gpu_bytes[local],
        )
        for number, (host, local) in enumerate(zip(fill.host_of, fill.local, strict=True))
    ]
    together = [Counter[str]() for _ in fill.hosts]
    for units_there, number in zip(on, fill.host_of, strict=True):
        together[number].update(unit.role for unit in units_there)
    load = request.load if on_cpu else request.host_load
    placed_hosts = [
        PlacedHost(
            name=host.name,
            used_bytes=load(counts),
            held_bytes=host.held_bytes,
            memory_bytes=host.memory_bytes,
        )
        for host, counts in zip(fill.hosts, together, strict=True)
    ]
    return Placement(
        kind=request.kind,
        units=tuple(units),
        devices=tuple(devices),
        hosts=tuple(placed_hosts),
        unknown=tuple(role.name for role in request.roles if role.needs(role.per_unit) is None),
        needs=tuple((role.name, role.need) for role in request.roles),
    )


# -- what is wrong, in a sentence ------------------------------------------------------------


def _check_lines(hosts: Sequence[Host], request: PlacementRequest) -> None:
    """Raises `PlacementError` if the roles' config lines contradict each other, name devices that
    do not exist, make no whole units, or ask for more devices than there are."""
    num_devices = sum(host.num_devices(request.kind) for host in hosts)
    if not num_devices:
        word = "core" if request.kind == "cpu" else "CUDA device"
        raise PlacementError(f"there is no {word} on {_hosts(hosts, request)}")
    for role in request.roles:
        count, line = role.count, f"placement.{role.name}.devices={as_line(role.devices)}"
        if count is not None and (count % role.per_unit or not count):
            raise PlacementError(
                f"{line} is {_devices(count)}, which are no whole {role.unit}s: {_each(role)}"
            )
        if missing := [device for device in role.pinned if device >= num_devices]:
            raise PlacementError(
                f"{line} names {as_ranges(missing)}, but there are {_devices(num_devices)} "
                f"(0 to {num_devices - 1}) on {_hosts(hosts, request)}"
            )
    for one, other in itertools.combinations(request.roles, 2):
        _check_apart(request, one, other)
    counts = {r.name: r.per_unit if r.count is None else r.count for r in request.roles}
    named = {d for r in request.roles if r.name in request.colocate for d in r.pinned}
    shared = [counts[r.name] for r in request.roles if r.name in request.colocate]
    alone = sum(counts[r.name] for r in request.roles if r.name not in request.colocate)
    if (needed := alone + max([len(named), *shared])) > num_devices:
        wanted = ", ".join(_wanted(role) for role in request.roles)
        raise PlacementError(
            f"{wanted}: at least {_devices(needed)}, and there are {num_devices} on "
            f"{_hosts(hosts, request)}"
        )


def _check_apart(request: PlacementRequest, one: Role, other: Role) -> None:
    if request.shares(one, other):
        return
    if one.count is None and other.count is None:
        raise PlacementError(
            f"placement.{one.name} and placement.{other.name} both ask for all devices, and nothing"
            " says that they take turns"
        )
    if both := sorted(set(one.pinned) & set(other.pinned)):
        raise PlacementError(
            f"placement.{one.name} ({as_line(one.devices)}) and placement.{other.name} "
            f"({as_line(other.devices)}) both have {_devices(len(both))}, {as_ranges(both)}, and "
            "nothing says that they take turns"
        )


def _shortage(fill: _Fill, role: Role, units: int) -> str:
    lack = fill.lack(role)
    if lack is not None and _fits_without_memory(fill, role):
        held, roles = lack.held_bytes, [r for r in fill.request.roles if lack.counts.get(r.name)]
        needs = "; ".join(_needs(fill.request, one, lack.is_locked) for one in roles)
        beside = f" beside the {text_of_bytes(held)} of the run's own process" if held else ""
        return (
            f"{_wanted(role)}, and {lack.where} has {text_of_bytes(lack.has_bytes)}{beside}, while "
            f"what would be there takes {text_of_bytes(lack.load_bytes)} ({needs})"
            f"{_largest(roles, lack)}"
        )
    others = [one for one in fill.request.roles if one.name != role.name and fill.units[one.name]
              and not fill.request.shares(one, role)]  # fmt: skip
    placed = ", ".join(f"{one.name} ({as_ranges(_all_of(fill, one))})" for one in others)
    beside = f" beside {placed}" if placed else ""
    num_devices = len(fill.on)
    one_host = "" if role.across_hosts else " on one host"
    what = f"only {units} of them fit" if units else "none of them fits"
    hint = (
        f". Roles get the first devices that have room, in their order: lines such as "
        f"placement.{role.name}.devices=0-3 place them otherwise"
    )
    return (
        f"{_wanted(role)}, {_each(role)}{one_host}: {what} on the {_devices(num_devices)} of "
        f"{_hosts(fill.hosts, fill.request)}{beside}{'' if role.pinned else hint}"
    )


def _fits_without_memory(fill: _Fill, role: Role) -> bool:
    endless = _Fill(fill.hosts, fill.request, endless=True)
    for one, wanted in _in_order(fill.request):
        units = endless.place(one, wanted)
        if one.name == role.name:
            return units >= wanted
    raise AssertionError("the role is one of the request's")


def _all_of(fill: _Fill, role: Role) -> list[int]:
    return sorted(device for unit in fill.units[role.name] for device in unit)


def _largest(roles: Sequence[Role], lack: _Lack) -> str:
    """The largest parts of the memory that would be needed, as the end of a sentence. Empty if no
    parts are known."""
    parts = [
        (lack.counts[role.name] * size, f"{name} of {role.name}")
        for role in roles
        for name, size in (role.need.host_parts if lack.is_locked else role.need.parts)
    ]
    parts = sorted(parts, key=lambda part: -part[0])[:_MOST_PARTS]
    named = ", ".join(f"{name} {text_of_bytes(size)}" for size, name in parts)
    return f"; the largest parts are {named}" if parts else ""


def _needs(request: PlacementRequest, role: Role, is_locked: bool) -> str:
    need, word = role.need, "core" if request.kind == "cpu" else "device"
    if is_locked:
        return f"{role.name} keeps {text_of_bytes(need.on_host)} of host memory for each device"
    turn = f", {text_of_bytes(need.turn)} of it while it works" if need.turn else ""
    of = f" ({need.of}, the most of all)" if need.of else ""
    return f"{role.name}{of} takes {text_of_bytes(need.most)} on each {word}{turn}"


def _wanted(role: Role) -> str:
    if role.count is None:
        return f"{role.name} asks for at least {_devices(role.per_unit)}"
    units = role.count // role.per_unit
    named = f" ({as_line(role.devices)})" if role.pinned else ""
    plural = "" if units == 1 else "s"
    return f"{role.name} asks for {_devices(role.count)}{named}, {units} {role.unit}{plural}"


def _each(role: Role) -> str:
    key = "" if role.per_key is None else f" (placement.{role.name}.{role.per_key})"
    return f"each has {role.per_unit}{key}"


def _hosts(hosts: Sequence[Host], request: PlacementRequest) -> str:
    if len(hosts) == 1:
        return hosts[0].name
    named = ", ".join(
        f"{host.name} {host.num_devices(request.kind)}" for host in hosts[:_MOST_HOSTS]
    )
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{len(hosts)} hosts ({named}{more})"


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
