"""What is wrong with the lines of a placement, or short of them, in a sentence."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from rollpacker.core.placement_search import Search, only, without_memory
from rollpacker.core.roles import (
    Host,
    PlacementError,
    PlacementRequest,
    Role,
    as_line,
    as_ranges,
    text_of_bytes,
)

_MOST_HOSTS = 4
"""Named in one message."""


def check_lines(hosts: Sequence[Host], request: PlacementRequest) -> None:
    """Raises `PlacementError` for lines that contradict each other, or name devices that there are
    not, that make no whole units or that have too little memory."""
    num_devices = sum(host.num_devices(request.kind) for host in hosts)
    if not num_devices:
        raise PlacementError(f"there is no {_word(request)} on {_hosts(hosts, request)}")
    for role in request.roles:
        _check_units(role)
        if role.pinned and role.pinned[-1] >= num_devices:
            missing = [device for device in role.pinned if device >= num_devices]
            raise PlacementError(
                f"placement.{role.name}.devices={_line(role)} names "
                f"{as_ranges(missing)}, but there are {_devices(num_devices)} "
                f"(0 to {num_devices - 1}) on {_hosts(hosts, request)}"
            )
    for one, other in itertools.combinations(request.roles, 2):
        _check_apart(request, one, other)
    _check_hosts(hosts, request)
    _check_pinned_memory(hosts, request)


def shortage(hosts: Sequence[Host], request: PlacementRequest) -> str:
    """Why this request, whose lines are sound, has no solution."""
    num_devices = sum(host.num_devices(request.kind) for host in hosts)
    if (needed := _fewest(request)) > num_devices:
        wanted = ", ".join(_wanted(role) for role in request.roles)
        return (
            f"{wanted}: at least {_devices(needed)}, and there are {num_devices} on "
            f"{_hosts(hosts, request)}"
        )
    for role in request.roles:
        alone = only(request, role)
        if role.pinned or Search(hosts, alone).counts() is not None:
            continue
        if Search(hosts, without_memory(alone)).counts() is None:
            return (
                f"{_wanted(role)}, {_each(role)} on one host: they do not fit on "
                f"the {_devices(num_devices)} of {_hosts(hosts, request)}{_besides(request)}"
            )
        return _memory_of(hosts, request, [role])
    if Search(hosts, without_memory(request)).counts() is None:
        wanted = ", ".join(f"{_wanted(role)}, {_each(role)}" for role in request.roles)
        return (
            f"{wanted}: these do not fit beside each other on the {_devices(num_devices)} of "
            f"{_hosts(hosts, request)}"
        )
    return _memory_of(hosts, request, request.roles)


def _check_units(role: Role) -> None:
    count = role.count
    if count is not None and (count % role.per_unit or not count):
        raise PlacementError(
            f"placement.{role.name}.devices={_line(role)} is {_devices(count)}, which are no whole "
            f"{role.unit}s: {_each(role)}"
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
            f"placement.{one.name} ({_line(one)}) and placement.{other.name} ({_line(other)}) both "
            f"have {_devices(len(both))}, {as_ranges(both)}, and nothing says that they take turns"
        )


def _check_hosts(hosts: Sequence[Host], request: PlacementRequest) -> None:
    """Ranges are whole units on each host."""
    first = 0
    for host in hosts:
        end = first + host.num_devices(request.kind)
        for role in request.roles:
            here = [device for device in role.pinned if first <= device < end]
            if len(here) % role.per_unit and not role.across_hosts:
                raise PlacementError(
                    f"placement.{role.name}.devices={_line(role)} has {_devices(len(here))} on "
                    f"{host.name} ({as_ranges(here)}), which are no whole {role.unit}s: "
                    f"{_each(role)}, and none may be on two hosts"
                )
        first = end


def _check_pinned_memory(hosts: Sequence[Host], request: PlacementRequest) -> None:
    search = Search(hosts, request)
    first = 0
    for host, site in zip(hosts, search.sites, strict=True):
        loads: Iterable[tuple[str, int, int]]
        if site.device_bytes is None:
            together = Counter(name for pins in site.pins for name in pins)
            loads = [(host.name, request.load(together), host.left_bytes)]
        else:
            loads = (
                (f"device {first + local} on {host.name}", request.load(Counter(pins)), has)
                for local, (pins, has) in enumerate(zip(site.pins, site.device_bytes, strict=True))
            )
        for where, load, has in loads:
            if load > has:
                roles = [role for role in request.roles if role.pinned]
                raise PlacementError(
                    f"{where} has {text_of_bytes(has)}{_held(host)}, and what would be there takes "
                    f"{text_of_bytes(load)} ({_needs(request, roles)})"
                )
        first += len(site.pins)


def _fewest(request: PlacementRequest) -> int:
    """Devices without which there is no solution, whatever the hosts."""
    counts = {r.name: r.per_unit if r.count is None else r.count for r in request.roles}
    named = {d for r in request.roles if r.name in request.colocate for d in r.pinned}
    shared = [counts[r.name] for r in request.roles if r.name in request.colocate]
    alone = sum(counts[r.name] for r in request.roles if r.name not in request.colocate)
    return alone + max([len(named), *shared])


def _memory_of(hosts: Sequence[Host], request: PlacementRequest, roles: Sequence[Role]) -> str:
    """The sentence for a want of memory."""
    what = _needs(request, roles)
    if request.kind == "cuda":
        most = max(max(host.gpu_bytes, default=0) for host in hosts)
        together = [role.name for role in roles if role.name in request.colocate]
        load = max(
            [request.load({role.name: 1}) for role in roles]
            + [request.load(dict.fromkeys(together, 1))]
        )
        turns = f" ({' and '.join(together)} share it)" if len(together) > 1 else ""
        enough = "the largest has" if load > most else "too few have as much: the largest has"
        return (
            f"{what}: up to {text_of_bytes(load)} on one device{turns}, and {enough} "
            f"{text_of_bytes(most)}"
        )
    wanted = ", ".join(_wanted(role) for role in roles)
    named = hosts[:_MOST_HOSTS]
    memory = ", ".join(
        f"{host.name} {text_of_bytes(host.left_bytes)}{_held(host)}" for host in named
    )
    return f"{wanted}; {what}: more than the hosts' memory ({memory}{_more(hosts)})"


def _held(host: Host) -> str:
    if not host.held_bytes:
        return ""
    return f" beside the {text_of_bytes(host.held_bytes)} of the run's own process"


def _needs(request: PlacementRequest, roles: Sequence[Role]) -> str:
    """Memory of each role in words."""
    parts = []
    for role in roles:
        needs = role.need
        word = "core" if request.kind == "cpu" else "device"
        turn = f", {text_of_bytes(needs.turn)} of it while it works" if needs.turn else ""
        of = f" ({needs.of}, the most of all)" if needs.of else ""
        parts.append(f"{role.name}{of} takes {text_of_bytes(needs.most)} on each {word}{turn}")
    return "; ".join(parts)


def _wanted(role: Role) -> str:
    if role.count is None:
        return f"{role.name} asks for at least {_devices(role.per_unit)}"
    units = role.count // role.per_unit
    named = f" ({_line(role)})" if role.pinned else ""
    plural = "" if units == 1 else "s"
    return f"{role.name} asks for {_devices(role.count)}{named}, {units} {role.unit}{plural}"


def _each(role: Role) -> str:
    key = "" if role.per_key is None else f" (placement.{role.name}.{role.per_key})"
    return f"each has {role.per_unit}{key}"


def _besides(request: PlacementRequest) -> str:
    named = [f"{role.name} ({_line(role)})" for role in request.roles if role.pinned]
    return f" beside {', '.join(named)}" if named else ""


def _line(role: Role) -> str:
    return as_line(role.devices)


def _hosts(hosts: Sequence[Host], request: PlacementRequest) -> str:
    if len(hosts) == 1:
        return hosts[0].name
    named = (f"{host.name} {host.num_devices(request.kind)}" for host in hosts[:_MOST_HOSTS])
    return f"{len(hosts)} hosts ({', '.join(named)}{_more(hosts)})"


def _more(hosts: Sequence[Host]) -> str:
    return f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _word(request: PlacementRequest) -> str:
    return "core" if request.kind == "cpu" else "CUDA device"
