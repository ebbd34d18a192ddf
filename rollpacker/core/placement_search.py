"""Finds devices for roles whenever there are some: an exact search.

Only counts matter. Whatever a host's units are, each of their devices takes the same memory, so
that a host is known by how many units of each role it can hold, and what holds more can hold less.
Largest such counts are made once for each kind of host. From the last host to the first a table
then says, for what the other roles still lack, how many units of one role these hosts can hold;
walking back from the first host to the last takes the first choice that leaves the rest possible.

Colocated roles with free choice share devices as far as they can: on GPUs such a device must hold
all of them together, one of them working.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.roles import Host, PlacementRequest, Role

Counts = tuple[int, ...]
"""Of each free role: units, or devices where a unit may be on several hosts."""
_IMPOSSIBLE = -(1 << 24)


@dataclass(frozen=True, slots=True)
class Site:
    """The devices of one host, as the search sees them."""

    pins: tuple[frozenset[str], ...]
    """By device: roles whose lines name it."""
    device_bytes: tuple[int, ...] | None
    pool_bytes: int | None
    """What its devices share. One of the two is None."""


class Search:
    """Of one request on these hosts. All ranges must exist and be whole units."""

    def __init__(self, hosts: Sequence[Host], request: PlacementRequest) -> None:
        self.request = request
        self.free = [role for role in request.roles if not role.pinned]
        self.steps = [1 if role.across_hosts else role.per_unit for role in self.free]
        self.sites: list[Site] = []
        first = 0
        for host in hosts:
            size = host.num_devices(request.kind)
            pins = (
                frozenset(role.name for role in request.roles if number in role.pinned)
                for number in range(first, first + size)
            )
            on_cpu = request.kind == "cpu"
            self.sites.append(
                Site(
                    tuple(pins),
                    None if on_cpu else host.gpu_bytes,
                    host.left_bytes if on_cpu else None,
                )
            )
            first += size
        self._blocks = self._make_blocks()

    def _make_blocks(self) -> list[tuple[int, ...]]:
        """Free roles that may be on the same devices, by their numbers."""
        together = [i for i, role in enumerate(self.free) if role.name in self.request.colocate]
        alone = [(i,) for i in range(len(self.free)) if i not in together]
        return [tuple(together), *alone] if together else list(alone)

    # -- one host ----------------------------------------------------------------------

    def allowed(self, site: Site, device: int) -> tuple[bool, ...]:
        """By block: whether this device may be part of it."""
        pins = site.pins[device]
        answers = []
        for block in self._blocks:
            names = {self.free[i].name for i in block}
            shared = all(pin in self.request.colocate for pin in pins)
            free = not pins or (shared and names <= self.request.colocate)
            if free and site.device_bytes is not None:
                load = self.request.load(dict.fromkeys(names | pins, 1))
                free = load <= site.device_bytes[device]
            answers.append(free)
        return tuple(answers)

    def _fits(self, site: Site) -> Callable[[Counts], bool]:
        """Whether this host can hold so many of each free role: its devices by Hall's condition,
        its memory by the sum."""
        kinds = Counter(self.allowed(site, device) for device in range(len(site.pins)))
        sets = [
            subset
            for size in range(1, len(self._blocks) + 1)
            for subset in itertools.combinations(range(len(self._blocks)), size)
        ]
        room = [
            sum(count for kind, count in kinds.items() if any(kind[b] for b in subset))
            for subset in sets
        ]
        pinned = Counter(name for pins in site.pins for name in pins)

        def fits(counts: Counts) -> bool:
            devices = [count * step for count, step in zip(counts, self.steps, strict=True)]
            sizes = [max(devices[i] for i in block) for block in self._blocks]
            for subset, most in zip(sets, room, strict=True):
                if sum(sizes[b] for b in subset) > most:
                    return False
            if site.pool_bytes is None:
                return True
            names = (role.name for role in self.free)
            together = pinned + Counter(dict(zip(names, devices, strict=True)))
            return self.request.load(together) <= site.pool_bytes

        return fits

    def holds(self, site: Site) -> list[Counts]:
        """The largest counts that this host can hold: none of them is within another."""
        fits = self._fits(site)
        size, num = len(site.pins), len(self.free)
        most = []
        for i, role in enumerate(self.free):
            wanted = size if role.count is None else role.count
            bound = min(size, wanted) // self.steps[i]
            most.append(
                _largest(bound, lambda n, i=i: fits(tuple(n if j == i else 0 for j in range(num))))  # type: ignore[misc]
            )
        last = max(range(num), key=lambda i: (most[i], -i))
        others = [i for i in range(num) if i != last]
        found: dict[Counts, int] = {}
        for head in itertools.product(*(range(most[i] + 1) for i in others)):
            counts = dict(zip(others, head, strict=True))

            def fits_with(n: int, counts: Mapping[int, int] = counts) -> bool:
                return fits(tuple(n if i == last else counts[i] for i in range(num)))

            if fits_with(0):
                found[head] = _largest(most[last], fits_with)
        kept = []
        for head, value in found.items():
            nexts = ((*head[:i], head[i] + 1, *head[i + 1 :]) for i in range(len(head)))
            if all(found.get(one, -1) < value for one in nexts):
                counts = dict(zip(others, head, strict=True)) | {last: value}
                kept.append(tuple(counts[i] for i in range(num)))
        return kept

    # -- all hosts ---------------------------------------------------------------------

    def counts(self) -> list[Counts] | None:
        """By host: how many of each free role it gets. None: it is impossible.

        Of roles that take as many as fit, the first of the request is given the most, as long as
        each of them gets one.
        """
        if not self.free:
            return [() for _ in self.sites]
        known = {site: self.holds(site) for site in dict.fromkeys(self.sites)}
        options = [known[site] for site in self.sites]
        demands = [self._demand(i) for i in range(len(self.free))]
        for i, role in enumerate(self.free):
            if role.count is None:
                table = _tables(options, demands, i)[0]
                most = int(table[tuple(d for j, d in enumerate(demands) if j != i)])
                if most < demands[i]:
                    return None
                demands[i] = most - most % (role.per_unit // self.steps[i])
        value = max(range(len(demands)), key=lambda i: (demands[i], -i))
        tables = _tables(options, demands, value)
        if tables[0].flat[-1] < demands[value]:
            return None
        return list(_walk(options, tables, demands, value))

    def _demand(self, i: int) -> int:
        role = self.free[i]
        count = role.per_unit if role.count is None else role.count
        return count // self.steps[i]

    def devices(self, counts: Sequence[Counts]) -> dict[str, list[int]]:
        """By role: its devices, ascending, for what `counts` said."""
        found: dict[str, list[int]] = {role.name: list(role.pinned) for role in self.request.roles}
        first = 0
        for site, of_site in zip(self.sites, counts, strict=True):
            wanted = [count * step for count, step in zip(of_site, self.steps, strict=True)]
            for block, devices in zip(self._blocks, self._matched(site, wanted), strict=True):
                for i in block:
                    found[self.free[i].name] += [first + d for d in devices[: wanted[i]]]
            first += len(site.pins)
        return {name: sorted(devices) for name, devices in found.items()}

    def _matched(self, site: Site, wanted: Sequence[int]) -> list[list[int]]:
        """By block: its devices on this host. Kuhn's matching, lowest numbers first; those that a
        colocated role is on before others."""
        allowed = [self.allowed(site, device) for device in range(len(site.pins))]
        order = sorted(range(len(allowed)), key=lambda d: (not site.pins[d], d))
        owner: dict[int, int] = {}

        def take(block: int, seen: set[int]) -> bool:
            mine = [device for device in order if allowed[device][block] and device not in seen]
            seen.update(mine)
            free = next((device for device in mine if device not in owner), None)
            for device in mine if free is None else [free]:
                if device not in owner or take(owner[device], seen):
                    owner[device] = block
                    return True
            return False

        for number, block in enumerate(self._blocks):
            for _ in range(max(wanted[i] for i in block)):
                done = take(number, set())
                assert done, "counts that fit have devices"
        return [
            [device for device in order if owner.get(device) == number]
            for number in range(len(self._blocks))
        ]


def without_memory(request: PlacementRequest) -> PlacementRequest:
    """The same where memory has no end."""
    roles = (replace(role, needs=lambda per_unit: None) for role in request.roles)
    return replace(request, roles=tuple(roles))


def only(request: PlacementRequest, role: Role) -> PlacementRequest:
    """This role, and those whose devices are named."""
    kept = (one for one in request.roles if one.pinned or one.name == role.name)
    return replace(request, roles=tuple(kept))


def _largest(bound: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `bound` that fits, 0 if none does; what is below it fits as well."""
    low, high = 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _tables(
    options: Sequence[Sequence[Counts]], demands: Sequence[int], value: int
) -> list[NDArray[np.int32]]:
    """By host: the most of role `value` that this host and all after it can hold, for every amount
    of the other roles that they must hold at least."""
    others = [i for i in range(len(demands)) if i != value]
    last = np.full([demands[i] + 1 for i in others], _IMPOSSIBLE, np.int32)
    last[(0,) * len(others)] = 0
    tables = [last]
    for of_host in reversed(options):
        after = tables[-1]
        best = np.full_like(after, _IMPOSSIBLE)
        for counts in {_clipped(counts, demands, value) for counts in of_host}:
            shifted = after
            for axis, i in enumerate(others):
                if counts[i]:
                    shifted = _later(shifted, axis, counts[i])
            np.maximum(best, shifted + counts[value], out=best)
        tables.append(best)
    return tables[::-1]


def _clipped(counts: Counts, demands: Sequence[int], value: int) -> Counts:
    """No more than is asked for of the other roles."""
    return tuple(count if i == value else min(count, demands[i]) for i, count in enumerate(counts))


def _later(table: NDArray[np.int32], axis: int, by: int) -> NDArray[np.int32]:
    """`table` at an index that is lower by so many, but not below 0."""
    index = np.maximum(np.arange(table.shape[axis]) - by, 0)
    return np.take(table, index, axis=axis)


def _walk(
    options: Sequence[Sequence[Counts]],
    tables: Sequence[NDArray[np.int32]],
    demands: Sequence[int],
    value: int,
) -> Iterator[Counts]:
    """By host, the choice with the most of the first role that leaves the rest possible."""
    left = list(demands)
    for of_host, after in zip(options, tables[1:], strict=True):
        clipped = {tuple(map(min, counts, left)) for counts in of_host}
        for counts in sorted(clipped, reverse=True):
            rest = [have - count for have, count in zip(left, counts, strict=True)]
            if after[tuple(n for i, n in enumerate(rest) if i != value)] >= rest[value]:
                yield counts
                left = rest
                break
        else:
            raise AssertionError("the tables said that there is a way")
