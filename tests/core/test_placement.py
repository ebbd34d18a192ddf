"""Roles on devices: what every plan obeys, and that there is one whenever there can be one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.placement import plan_placement
from rollpacker.core.roles import (
    Host,
    Need,
    Placement,
    PlacementError,
    PlacementRequest,
    Role,
)

NAMES = {"rollout": "engine", "train": "replica", "judge": "judge"}
PER_KEYS = {"rollout": "per_engine", "train": "per_replica", "judge": None}


def role(
    name: str, devices: object = "all", per_unit: int = 1, stays: int = 0, turn: int = 0, **more
):
    return Role(
        name=name,
        unit=NAMES[name],
        devices=devices,
        per_unit=per_unit,
        per_key=PER_KEYS[name],
        needs=lambda per_unit: Need(stays, turn),
        **more,
    )


def request(*roles: Role, colocate: tuple[str, ...] = (), kind: str = "cpu") -> PlacementRequest:
    return PlacementRequest(roles=roles, colocate=frozenset(colocate), kind=kind)


def gpus(*sizes: int, memory: int = 80) -> list[Host]:
    return [
        Host(name=f"h{n}", cores=16, memory_bytes=1000, gpu_bytes=(memory,) * size)
        for n, size in enumerate(sizes)
    ]


def cores(*sizes: int, memory: int = 100) -> list[Host]:
    return [Host(name=f"h{n}", cores=size, memory_bytes=memory) for n, size in enumerate(sizes)]


def devices_of(placement: Placement, name: str) -> list[tuple[int, ...]]:
    return [unit.devices for unit in placement.of(name)]


# -- what a plan must obey, read off the plan alone ------------------------------------------


def starts(hosts: list[Host], kind: str) -> list[range]:
    ends = list(itertools.accumulate(host.num_devices(kind) for host in hosts))
    return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def check(hosts: list[Host], asked: PlacementRequest, plan: Placement) -> None:
    ranges = starts(hosts, asked.kind)
    owned: dict[str, list[int]] = {}
    for one in asked.roles:
        own = [device for unit in plan.of(one.name) for device in unit.devices]
        owned[one.name] = own
        assert own and len(own) == len(set(own)), "a device is in one unit of a role"
        for unit in plan.of(one.name):
            assert len(unit.devices) == one.per_unit
            if not one.across_hosts:
                assert any(set(unit.devices) <= set(r) for r in ranges), "a unit on two hosts"
        if one.pinned:
            assert sorted(own) == list(one.pinned)
        elif one.count is not None:
            assert len(own) == one.count
    for one, other in itertools.combinations(asked.roles, 2):
        if not {one.name, other.name} <= asked.colocate:
            assert not set(owned[one.name]) & set(owned[other.name]), "a device in two plans"
    check_memory(hosts, asked, owned)
    for host, placed in zip(hosts, plan.hosts, strict=True):
        assert (placed.name, placed.memory_bytes is None) == (host.name, asked.kind == "cuda")
    for device in plan.devices:
        on = [u.name for u in plan.units if device.number in u.devices]
        assert list(device.units) == on


def load(asked: PlacementRequest, counts: Counter[str]) -> int:
    """Written anew: everything that stays, and turns: all that take none, and the largest."""
    turns = {one.name: one.need.turn * counts[one.name] for one in asked.roles}
    alone = sum(turn for name, turn in turns.items() if name not in asked.colocate)
    shared = max([turn for name, turn in turns.items() if name in asked.colocate], default=0)
    return sum(one.need.stays * counts[one.name] for one in asked.roles) + alone + shared


def check_memory(hosts: list[Host], asked: PlacementRequest, owned: dict[str, list[int]]) -> None:
    for host, devices in zip(hosts, starts(hosts, asked.kind), strict=True):
        if asked.kind == "cpu":
            counts = Counter({n: len(set(own) & set(devices)) for n, own in owned.items()})
            assert load(asked, counts) <= host.memory_bytes
            continue
        for device, has in zip(devices, host.gpu_bytes, strict=True):
            on = Counter(name for name, own in owned.items() if device in own)
            assert load(asked, on) <= has


# -- brute force -----------------------------------------------------------------------------


def subsets(one: Role, ranges: list[range]) -> Iterator[frozenset[int]]:
    """Every set of devices that this role may have, were it alone and memory endless."""
    devices = [device for r in ranges for device in r]
    if one.pinned:
        sizes, pool = [len(one.pinned)], [d for d in devices if d in one.pinned]
    else:
        sizes = [one.count] if one.count else range(one.per_unit, len(devices) + 1, one.per_unit)
        pool = devices
    for size in sizes:
        if size % one.per_unit:
            continue
        for some in itertools.combinations(pool, size):
            chosen = frozenset(some)
            if one.across_hosts or all(len(chosen & set(r)) % one.per_unit == 0 for r in ranges):
                yield chosen


def brute_force(hosts: list[Host], asked: PlacementRequest) -> tuple[int, ...] | None:
    """Devices of each role in the best solution, tried one by one; None: there is none."""
    ranges = starts(hosts, asked.kind)
    colocated = {r.name for r in asked.roles if r.name in asked.colocate and not r.pinned}
    best: tuple[int, ...] | None = None

    def fits(owned: dict[str, frozenset[int]]) -> bool:
        widened = dict(owned)
        if asked.kind == "cuda":  # a device of one of them must hold all of them
            union = frozenset().union(*(owned.get(name, frozenset()) for name in colocated))
            widened |= dict.fromkeys(colocated, union)
        try:
            check_memory(hosts, asked, {n: sorted(own) for n, own in widened.items()})
        except AssertionError:
            return False
        return True

    def choose(index: int, owned: dict[str, frozenset[int]]) -> None:
        nonlocal best
        if index == len(asked.roles):
            sizes = tuple(len(owned[one.name]) for one in asked.roles)
            if best is None or sizes > best:
                best = sizes
            return
        one = asked.roles[index]
        for chosen in choices[one.name]:
            apart = (o for n, o in owned.items() if not {n, one.name} <= asked.colocate)
            if all(not chosen & other for other in apart):
                extended = owned | {one.name: chosen}
                if fits(extended):
                    choose(index + 1, extended)

    choices = {one.name: list(subsets(one, ranges)) for one in asked.roles}
    choose(0, {})
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Host], PlacementRequest]:
    names = draw(
        st.sampled_from([["rollout", "train"], ["rollout"], ["rollout", "train", "judge"]])
    )
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    most = 8 if len(names) < 3 else 6
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    while sum(sizes) > most:
        sizes.pop()
    hosts = [
        Host(
            name=f"h{n}",
            cores=size if kind == "cpu" else 4,
            memory_bytes=draw(st.integers(0, 30)),
            gpu_bytes=tuple(draw(st.integers(2, 10)) for _ in range(size))
            if kind == "cuda"
            else (),
        )
        for n, size in enumerate(sizes)
    ]
    colocate = draw(st.sampled_from([(), ("rollout", "train"), tuple(names)]))
    total = sum(sizes)
    roles = []
    for name in names:
        per_unit = 1 if name == "judge" else draw(st.sampled_from([1, 1, 2, 3]))
        number = st.integers(1, max(total // per_unit, 1)).map(lambda n, p=per_unit: n * p)
        pinned = st.sets(st.integers(0, total - 1), min_size=1).map(lambda s: tuple(sorted(s)))
        devices = draw(st.one_of(number, number, st.just("all"), pinned))
        stays, turn = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        across = draw(st.sampled_from([False, False, False, True]))
        roles.append(role(name, devices, per_unit, stays, turn, across_hosts=across))
    return hosts, request(*roles, colocate=colocate if len(names) > 1 else (), kind=kind)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_plan_obeys_its_lines_and_there_is_one_whenever_brute_force_has_one(case) -> None:
    hosts, asked = case
    alls = [one for one in asked.roles if one.count is None]
    unsaid = any(not {a.name, b.name} <= asked.colocate for a, b in itertools.combinations(alls, 2))
    best = None if unsaid else brute_force(hosts, asked)
    if best is None:
        with pytest.raises(PlacementError) as error:
            plan_placement(hosts, asked)
        if error.value.nearest:
            near = applied(asked, error.value.nearest)
            check(hosts, near, plan_placement(hosts, near))
        return
    plan = plan_placement(hosts, asked)
    check(hosts, asked, plan)
    assert tuple(plan.num_devices(one.name) for one in asked.roles) == best
    assert plan_placement(hosts, asked) == plan


def applied(asked: PlacementRequest, changes) -> PlacementRequest:
    """The request with these overrides, read as a user's."""
    roles = {one.name: one for one in asked.roles}
    colocate, across = asked.colocate, None
    for key, text in changes.items():
        part, *rest = key.removeprefix("placement.").split(".")
        if part in ("colocate", "across_hosts"):
            names = frozenset(name for name in text.strip("[]").split(",") if name)
            colocate, across = (names, across) if part == "colocate" else (colocate, names)
        elif rest == ["devices"]:
            roles[part] = with_(roles[part], devices=parsed(text))
        else:
            assert rest == [PER_KEYS[part]]
            roles[part] = with_(roles[part], per_unit=int(text))
    if across is not None:
        roles = {name: with_(one, across_hosts=name in across) for name, one in roles.items()}
    return request(*roles.values(), colocate=tuple(colocate), kind=asked.kind)


def with_(one: Role, **changes: object) -> Role:
    from dataclasses import replace

    return replace(one, **changes)


def parsed(text: str) -> object:
    if text == "all":
        return text
    if text.isdecimal():
        return int(text)
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return tuple(n for first, *last in ends for n in range(first, (last or [first])[0] + 1))
