"""Of settings near a placement that does not fit, the first one that does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from rollpacker.core.roles import (
    Host,
    Placement,
    PlacementError,
    PlacementRequest,
    Role,
    as_line,
)

Plan = Callable[[Sequence[Host], PlacementRequest], Placement]
Devices = Literal["all"] | int | tuple[int, ...]


def nearest(
    hosts: Sequence[Host], request: PlacementRequest, plan: Plan
) -> Mapping[str, str] | None:
    """Keys and values of the nearest request that `plan` finds devices for; None: there is none.

    Nearest is, in this order: fewer of a role's devices, and of these the most; turns that nobody
    takes yet; another size of a unit, the closest; a unit on several hosts; two of these; and at
    last one unit of each role.
    """
    for near in _candidates(hosts, request, plan):
        if _fits(hosts, near, plan):
            return _changes(request, near)
    return None


def _fits(hosts: Sequence[Host], request: PlacementRequest, plan: Plan) -> bool:
    try:
        plan(hosts, request)
    except PlacementError:
        return False
    return True


def _candidates(
    hosts: Sequence[Host], request: PlacementRequest, plan: Plan
) -> Iterator[PlacementRequest]:
    if _contradicts(request):
        yield from _turns(request)
    yield from _fewer(hosts, request, plan)
    others = [*_turns(request), *_sizes(hosts, request), *_across(request)]
    yield from others
    for one in others:
        yield from _fewer(hosts, one, plan)
    for one in [request, *_turns(request)]:
        yield from _least(hosts, one)


def _contradicts(request: PlacementRequest) -> bool:
    """Two roles want the same devices without turns."""
    return any(
        not request.shares(one, other)
        and ((one.count is None and other.count is None) or set(one.pinned) & set(other.pinned))
        for one, other in itertools.combinations(request.roles, 2)
    )


def _turns(request: PlacementRequest) -> Iterator[PlacementRequest]:
    """Two roles that take turns, or more; then none at all."""
    names = [role.name for role in request.roles]
    for size in range(2, len(names) + 1):
        for some in itertools.combinations(names, size):
            if not frozenset(some) <= request.colocate:
                yield replace(request, colocate=request.colocate | frozenset(some))
    if request.colocate:
        yield replace(request, colocate=frozenset())


def _fewer(
    hosts: Sequence[Host], request: PlacementRequest, plan: Plan
) -> Iterator[PlacementRequest]:
    """With as many of one role's devices as fit, the smallest change first."""
    found: list[tuple[int, int, Devices]] = []
    for number, role in enumerate(request.roles):
        if role.pinned:
            kept = _whole_units(hosts, request, role)
            if kept and kept != role.pinned:
                found.append((len(role.pinned) - len(kept), number, kept))
            continue
        for count in _descending(hosts, request, role):
            if _fits(hosts, _with(request, role, devices=count), plan):
                asked = 0 if role.count is None else role.count
                found.append((abs(asked - count), number, count))
                break
    for _, number, devices in sorted(found, key=lambda one: one[:2]):
        yield _with(request, request.roles[number], devices=devices)


def _descending(hosts: Sequence[Host], request: PlacementRequest, role: Role) -> Iterator[int]:
    """Numbers of devices below what is asked for, whole units."""
    most = sum(host.num_devices(request.kind) for host in hosts)
    if role.count is not None:
        most = min(most, role.count - 1)
    yield from range(most - most % role.per_unit, 0, -role.per_unit)


def _whole_units(hosts: Sequence[Host], request: PlacementRequest, role: Role) -> tuple[int, ...]:
    """Of the devices that a line names, those that exist, that no line before it has for itself,
    and that make whole units on each host."""
    taken: set[int] = set()
    for other in request.roles:
        if other.name == role.name:
            break
        if not request.shares(role, other):
            taken |= set(other.pinned)
    kept: list[int] = []
    first = 0
    for host in hosts:
        end = first + host.num_devices(request.kind)
        here = [d for d in role.pinned if first <= d < end and d not in taken]
        kept += here[: len(here) - len(here) % role.per_unit]
        first = end
    return tuple(kept)


def _sizes(hosts: Sequence[Host], request: PlacementRequest) -> Iterator[PlacementRequest]:
    """Units of another size, the closest first and of two as close the smaller."""
    most = sum(host.num_devices(request.kind) for host in hosts)
    sized = [role for role in request.roles if role.per_key is not None]
    sizes = sorted(range(1, min(most, 64) + 1))
    tried = [
        (abs(size - role.per_unit), size, number)
        for number, role in enumerate(sized)
        for size in sizes
        if size != role.per_unit and (role.count is None or role.count % size == 0)
    ]
    for _, size, number in sorted(tried):
        yield _with(request, sized[number], per_unit=size)


def _across(request: PlacementRequest) -> Iterator[PlacementRequest]:
    for role in request.roles:
        if not role.across_hosts and role.per_unit > 1:
            yield _with(request, role, across_hosts=True)


def _least(hosts: Sequence[Host], request: PlacementRequest) -> Iterator[PlacementRequest]:
    """One unit of each role, of one size after the other."""
    most = max((host.num_devices(request.kind) for host in hosts), default=0)
    for size in range(1, most + 1):
        roles = (
            replace(role, devices=size, per_unit=size)
            if role.per_key is not None
            else replace(role, devices=role.per_unit)
            for role in request.roles
        )
        yield replace(request, roles=tuple(roles))


def _with(
    request: PlacementRequest,
    role: Role,
    *,
    devices: Devices | None = None,
    per_unit: int | None = None,
    across_hosts: bool | None = None,
) -> PlacementRequest:
    """This role with another line."""
    changed = replace(
        role,
        devices=role.devices if devices is None else devices,
        per_unit=role.per_unit if per_unit is None else per_unit,
        across_hosts=role.across_hosts if across_hosts is None else across_hosts,
    )
    roles = tuple(changed if one.name == role.name else one for one in request.roles)
    return replace(request, roles=roles)


def _changes(old: PlacementRequest, new: PlacementRequest) -> dict[str, str]:
    """What the user has to set, as overrides."""
    changes = {}
    for before, after in zip(old.roles, new.roles, strict=True):
        line = f"placement.{after.name}"
        if after.devices != before.devices:
            changes[f"{line}.devices"] = as_line(after.devices)
        if after.per_unit != before.per_unit:
            changes[f"{line}.{after.per_key}"] = str(after.per_unit)
    if new.colocate != old.colocate:
        changes["placement.colocate"] = _listed(new, new.colocate)
    across = {role.name for role in new.roles if role.across_hosts}
    if across != {role.name for role in old.roles if role.across_hosts}:
        changes["placement.across_hosts"] = _listed(new, across)
    return changes


def _listed(request: PlacementRequest, names: frozenset[str] | set[str]) -> str:
    return f"[{','.join(role.name for role in request.roles if role.name in names)}]"
