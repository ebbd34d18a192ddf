"""Roles on devices: what every plan obeys, and what is said where there is none."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.placement.placement import plan_placement
from rollpacker.core.placement.roles import (
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
    name: str,
    devices: object = "all",
    per_unit: int = 1,
    stays: int = 0,
    turn: int = 0,
    locked: int = 0,
    **more,
):
    return Role(
        name=name,
        unit=NAMES[name],
        devices=devices,
        per_unit=per_unit,
        per_key=PER_KEYS[name],
        needs=lambda per_unit: Need(stays, turn, host_parts=(("weights", locked),)),
        **more,
    )


def sharded(name: str, devices: object, size: int) -> Role:
    """A role whose units share out what they take."""
    return with_(role(name, devices), needs=lambda per_unit: Need(size // per_unit, 0))


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
    check_locked(hosts, asked, owned)
    for host, placed in zip(hosts, plan.hosts, strict=True):
        assert (placed.name, placed.memory_bytes) == (host.name, host.memory_bytes)
        assert placed.used_bytes <= host.memory_bytes
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


def check_locked(hosts: list[Host], asked: PlacementRequest, owned: dict[str, list[int]]) -> None:
    """What roles keep in host memory for their GPUs, on each host together."""
    for host, devices in zip(hosts, starts(hosts, asked.kind), strict=True):
        locked = sum(
            one.need.on_host * len(set(owned.get(one.name, ())) & set(devices))
            for one in asked.roles
        )
        assert asked.kind == "cpu" or locked <= host.memory_bytes


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
            check_locked(hosts, asked, {n: sorted(own) for n, own in owned.items()})
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
        locked = draw(st.sampled_from([0, 0, 2, 5])) if kind == "cuda" else 0
        roles.append(role(name, devices, per_unit, stays, turn, locked, across_hosts=across))
    return hosts, request(*roles, colocate=colocate if len(names) > 1 else (), kind=kind)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_plan_obeys_its_lines_and_is_always_the_same(case) -> None:
    hosts, asked = case
    alls = [one for one in asked.roles if one.count is None]
    unsaid = any(not {a.name, b.name} <= asked.colocate for a, b in itertools.combinations(alls, 2))
    best = None if unsaid else brute_force(hosts, asked)
    try:
        plan = plan_placement(hosts, asked)
    except PlacementError as error:
        with pytest.raises(PlacementError, match=f"^{re.escape(str(error))}$"):
            plan_placement(hosts, asked)
        assert best is None or not_of_one_kind(hosts, asked)
        return
    assert best is not None, "a plan that brute force does not find breaks a rule"
    check(hosts, asked, plan)
    assert plan_placement(hosts, asked) == plan


def not_of_one_kind(hosts: list[Host], asked: PlacementRequest) -> bool:
    """First fit may fail where there is a plan: with several roles, with units of several devices,
    or with devices of which some are larger than others."""
    return len(asked.roles) > 1 or asked.roles[0].per_unit > 1 or len(hosts) > 1


def with_(one: Role, **changes: object) -> Role:
    return replace(one, **changes)


# -- what is impossible ----------------------------------------------------------------------

TURNS = ("rollout", "train")
IMPOSSIBLE = {
    # more devices than exist
    "one more than there are": (gpus(8), [role("rollout", 9)], {}, "9 devices, and there are 8"),
    "twice as many": (gpus(4, 4), [role("rollout", 16, 2)], {}, "at least 16 devices, and there"),
    "two roles beside each other": (
        gpus(8),
        [role("rollout", 6), role("train", 4)],
        {},
        "at least 10 devices, and there are 8 on h0",
    ),
    "and a judge": (
        cores(4),
        [role("rollout", 2), role("train", 2), role("judge", 1)],
        {},
        "judge asks for 1 device, 1 judge: at least 5 devices, and there are 4",
    ),
    "turns save nothing for a judge": (
        gpus(4),
        [role("rollout", 4), role("train", 4), role("judge", 1)],
        {"colocate": TURNS},
        "at least 5 devices, and there are 4",
    ),
    "all leaves one unit at least": (
        gpus(4),
        [role("rollout", "all", 2), role("train", 3)],
        {},
        "rollout asks for at least 2 devices.*: at least 5 devices, and there are 4",
    ),
    "of a hundred hosts": (
        gpus(*[8] * 100),
        [role("rollout", 640, 4), role("train", 192, 8)],
        {},
        "at least 832 devices, and there are 800 on 100 hosts .h0 8, h1 8, h2 8, h3 8 and 96 more",
    ),
    # a range that does not exist, or overlaps
    "a range that ends beyond": (
        gpus(8),
        [role("rollout", tuple(range(4, 12)), 2)],
        {},
        "devices=4-11 names 8-11, but there are 8 devices .0 to 7",
    ),
    "a range beyond, of one": (gpus(2), [role("train", (1, 2))], {}, "devices=1-2 names 2, but"),
    "a range that overlaps": (
        gpus(8),
        [role("rollout", tuple(range(6))), role("train", (4, 5, 6, 7))],
        {},
        r"placement.rollout \(0-5\) and placement.train \(4-7\) both have 2 devices, 4-5, and",
    ),
    "the same range twice": (
        cores(4),
        [role("rollout", (0, 1)), role("train", (0, 1))],
        {},
        r"both have 2 devices, 0-1, and nothing says that they take turns",
    ),
    "a judge in the middle of a range": (
        gpus(8),
        [role("rollout", tuple(range(8))), role("train", tuple(range(8))), role("judge", (3,))],
        {"colocate": TURNS},
        r"placement.judge \(3-3\) both have 1 device, 3",
    ),
    "all, twice": (gpus(8), [role("rollout"), role("train")], {}, "both ask for all devices"),
    "all, three times": (
        gpus(8),
        [role("rollout"), role("train"), role("judge", "all")],
        {"colocate": TURNS},
        "placement.rollout and placement.judge both ask for all",
    ),
    "a range leaves too few": (
        gpus(8),
        [role("rollout", tuple(range(5))), role("train", 4)],
        {},
        "at least 9 devices, and there are 8",
    ),
    "a range leaves half a unit on each host": (
        gpus(4, 4),
        [role("rollout", (0, 1, 4, 5)), role("train", 4, 4)],
        {},
        r"train asks for 4 devices, 1 replica, each has 4 \(placement.train.per_replica\) on one "
        r"host: none of them fits on the 8 devices of 2 hosts .* beside rollout \(0-1,4-5\)",
    ),
    # a degree that crosses hosts
    "an engine larger than a host": (
        gpus(8, 8),
        [role("rollout", "all", 16)],
        {},
        r"each has 16 \(placement.rollout.per_engine\) on one host",
    ),
    "a replica larger than a host": (
        gpus(2, 2, 2),
        [role("train", 4, 4)],
        {},
        "train asks for 4 devices, 1 replica, each has 4",
    ),
    "a range over the edge": (
        gpus(8, 8),
        [role("rollout", (6, 7, 8, 9), 4)],
        {},
        r"rollout asks for 4 devices \(6-9\), 1 engine, each has 4 .* on one host: none of them",
    ),
    "half of an engine on each": (
        cores(3, 3),
        [role("rollout", 6, 2)],
        {},
        "rollout asks for 6 devices, 3 engines, each has 2",
    ),
    "threes beside twos": (
        gpus(4, 4),
        [role("rollout", 2, 2), role("train", 6, 3)],
        {},
        r"train asks for 6 devices, 2 replicas, .*: only 1 of them fit .* beside rollout \(0-1\)",
    ),
    "threes and fives": (
        gpus(8, 8, 8),
        [role("rollout", 18, 3), role("train", 5, 5)],
        {},
        r"train asks for 5 devices, 1 replica, .* none of them fits on the 24 devices",
    ),
    "no whole number": (gpus(8), [role("rollout", 7, 2)], {}, "is 7 devices, which are no whole"),
    # memory
    "an engine too large": (
        gpus(8, memory=24 << 30),
        [sharded("rollout", 4, 40 << 30), role("train", 4, 1, 10 << 30)],
        {},
        "device 0 on h0 has 24.0 GiB, while what would be there takes 40.0 GiB .rollout takes",
    ),
    "too large together": (
        gpus(8, memory=80 << 30),
        [role("rollout", 4, 1, 50 << 30), role("train", 4, 1, 20 << 30, 20 << 30)],
        {"colocate": TURNS},
        "device 0 on h0 has 80.0 GiB, while what would be there takes 90.0 GiB .rollout takes 50.0 "
        "GiB on each device; train takes 40.0 GiB on each device, 20.0 GiB of it while it works",
    ),
    "too large together, by all": (
        gpus(8, memory=80 << 30),
        [role("rollout", "all", 1, 50 << 30), role("train", "all", 1, 40 << 30)],
        {"colocate": TURNS},
        "device 0 on h0 has 80.0 GiB, while what would be there takes 90.0 GiB",
    ),
    "too few large GPUs": (
        [*gpus(4, memory=24 << 30), *gpus(2, memory=80 << 30)],
        [role("rollout", 4, 1, 40 << 30)],
        {},
        "rollout asks for 4 devices, 4 engines, and device 0 on h0 has 24.0 GiB, while",
    ),
    "a range on small GPUs": (
        [*gpus(4, memory=24 << 30), *gpus(4, memory=80 << 30)],
        [role("rollout", (2, 3, 4, 5), 1, 40 << 30)],
        {},
        r"device 2 on h0 has 24.0 GiB, while what would be there takes 40.0 GiB",
    ),
    "a range on which both do not fit": (
        gpus(4, memory=80 << 30),
        [role("rollout", (0, 1), 1, 50 << 30), role("train", (1, 2), 1, 40 << 30)],
        {"colocate": TURNS},
        "device 1 on h0 has 80.0 GiB, while what would be there takes 90.0 GiB",
    ),
    "a host's memory": (
        cores(8, memory=24 << 30),
        [role("rollout", 4, 1, 4 << 30), role("train", 4, 1, 3 << 30)],
        {},
        "train asks for 4 devices, 4 replicas, and h0 has 24.0 GiB, while what .* takes 25.0 GiB",
    ),
    "a host's memory, for engines alone": (
        cores(8, 8, memory=24 << 30),
        [role("rollout", 16, 2, 4 << 30)],
        {},
        r"h0 has 24.0 GiB, while what would be there takes 32.0 GiB \(rollout takes 4.0 GiB on",
    ),
    "a host's memory, by turns": (
        cores(2, memory=24 << 30),
        [role("rollout", 2, 1, 2 << 30, 6 << 30), role("train", 2, 1, 6 << 30, 6 << 30)],
        {"colocate": TURNS},
        "6.0 GiB of it while it works",
    ),
    "a range over a host's memory": (
        cores(4, 4, memory=24 << 30),
        [role("rollout", (0, 1, 2, 3), 1, 7 << 30)],
        {},
        "h0 has 24.0 GiB, while what would be there takes 28.0 GiB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_is_impossible_names_its_shortage(name: str) -> None:
    hosts, roles, turns, told = IMPOSSIBLE[name]
    kind = "cuda" if hosts[0].gpu_bytes else "cpu"
    asked = request(*roles, kind=kind, **turns)
    with pytest.raises(PlacementError, match=told):
        plan_placement(hosts, asked)


def test_a_device_that_is_too_small_is_named() -> None:
    large = request(role("rollout", 1, 1, 90 << 30), kind="cuda")
    told = (
        "rollout asks for 1 device, 1 engine, and device 0 on h0 has 80.0 GiB, while what would be "
        r"there takes 90.0 GiB \(rollout takes 90.0 GiB on each device\)"
    )
    with pytest.raises(PlacementError, match=told):
        plan_placement(gpus(2, memory=80 << 30), large)
    with pytest.raises(PlacementError, match="there is no CUDA device on h0"):
        plan_placement(cores(4), large)


def test_host_memory_that_is_too_small_names_its_largest_parts() -> None:
    parts = (("optimizer", 90), ("weights", 45), ("gradients", 40), ("master", 1))
    train = with_(
        role("train", 6), needs=lambda per_unit: Need(0, 80, parts=parts, host_parts=parts)
    )
    with pytest.raises(
        PlacementError,
        match=r"h0 has .* \(train keeps .* of host memory for each device\); the largest parts are "
        r"optimizer of train .*, weights of train .*, gradients of train [^,]*$",
    ):
        plan_placement(gpus(8), request(train, kind="cuda"))
    with pytest.raises(PlacementError, match=r"device 0 on h0 has .*; the largest parts are opt"):
        plan_placement(gpus(8, memory=79), request(train, kind="cuda"))
    assert plan_placement(gpus(8), request(with_(train, devices=5), kind="cuda"))


def test_what_first_fit_does_not_find_is_placed_by_lines() -> None:
    """Two engines on the small GPUs would leave the large ones to the trainer."""
    hosts = [*gpus(2, memory=80), *gpus(2, memory=24)]
    rollout, train = role("rollout", 2, 1, 20), role("train", 2, 1, 60)
    with pytest.raises(PlacementError, match="train asks for 2 devices"):
        plan_placement(hosts, request(rollout, train, kind="cuda"))
    plan = plan_placement(hosts, request(with_(rollout, devices=(2, 3)), train, kind="cuda"))
    assert devices_of(plan, "train") == [(0,), (1,)]


# -- plans as a user expects them ------------------------------------------------------------


def test_the_first_roles_have_the_first_devices() -> None:
    asked = request(role("rollout", 4, 2), role("train", 3), role("judge", 1), kind="cuda")
    plan = plan_placement(gpus(8), asked)
    assert devices_of(plan, "rollout") == [(0, 1), (2, 3)]
    assert devices_of(plan, "train") == [(4,), (5,), (6,)]
    assert devices_of(plan, "judge") == [(7,)]
    assert [unit.name for unit in plan.of("train")] == ["replica 0", "replica 1", "replica 2"]


def test_roles_that_take_turns_share_and_a_judge_has_its_own() -> None:
    asked = request(
        role("rollout", "all", 2, 30, 10),
        role("train", "all", 4, 20, 30),
        role("judge", 1),
        colocate=TURNS,
        kind="cuda",
    )
    plan = plan_placement(gpus(8, 8), asked)
    assert [len(plan.of(name)) for name in ("rollout", "train", "judge")] == [7, 3, 1]
    assert plan.devices[0].units == ("engine 0", "replica 0")
    assert plan.devices[0].used_bytes == 30 + 20 + 30  # what stays of both, and the larger turn
    [(judge,)] = devices_of(plan, "judge")
    assert plan.devices[judge].units == ("judge 0",)


def test_a_role_asked_for_on_as_many_devices_is_on_the_same() -> None:
    asked = request(role("rollout", 4), role("train", 4, 2), colocate=TURNS, kind="cuda")
    plan = plan_placement(gpus(8, 8), asked)
    assert devices_of(plan, "rollout") == [(0,), (1,), (2,), (3,)]
    assert devices_of(plan, "train") == [(0, 1), (2, 3)]


def test_ranges_may_overlap_in_part() -> None:
    asked = request(
        *(role("rollout", (0, 1, 2, 3), 2), role("train", (2, 3, 4, 5))),
        colocate=TURNS,
        kind="cuda",
    )
    plan = plan_placement(gpus(8), asked)
    units = [device.units for device in plan.devices]
    assert units[1:5] == [("engine 0",), ("engine 1", "replica 0"), ("engine 1", "replica 1"),
                          ("replica 2",)]  # fmt: skip
    assert units[6:] == [(), ()]


def test_a_unit_is_on_two_hosts_where_it_may_and_only_then() -> None:
    wide = request(role("train", "all", 4, across_hosts=True), kind="cuda")
    plan = plan_placement(gpus(6, 6), wide)
    assert devices_of(plan, "train") == [(0, 1, 2, 3), (4, 5, 10, 11), (6, 7, 8, 9)]
    eight = request(role("train", 8, 4, across_hosts=True), kind="cuda")
    plan = plan_placement(gpus(6, 6), eight)
    assert devices_of(plan, "train") == [(0, 1, 2, 3), (6, 7, 8, 9)]


def test_cores_share_their_hosts_memory() -> None:
    asked = request(role("rollout", 3, 1, 10), role("train", 1, 1, 60))
    plan = plan_placement(cores(2, 2, memory=70), asked)
    assert [host.used_bytes for host in plan.hosts] == [20, 70]


def test_what_a_range_takes_is_missing_from_its_hosts_memory() -> None:
    asked = request(role("rollout", (0,), 1, 60), role("train", 1, 1, 60))
    plan = plan_placement(cores(2, 2, memory=100), asked)
    assert devices_of(plan, "train") == [(2,)]
    with pytest.raises(PlacementError, match=r"train asks for 1 device, .* and h0 has"):
        plan_placement(cores(4, memory=100), asked)


def test_what_others_hold_is_missing_from_it_too() -> None:
    asked = request(role("rollout", 1, 1, 60))
    hosts = [replace(host, held_bytes=50) for host in cores(2, memory=100)]
    with pytest.raises(PlacementError, match=r"h0 has 0.0 KiB beside the 0.0 KiB of the run's own"):
        plan_placement(hosts, asked)
    plan = plan_placement([*hosts, *cores(1, memory=100)], asked)
    assert devices_of(plan, "rollout") == [(2,)]
    assert [(host.used_bytes, host.held_bytes) for host in plan.hosts] == [(0, 50), (60, 0)]


def test_what_is_not_known_is_said() -> None:
    judge = with_(role("judge", 1), needs=lambda per_unit: None)
    assert plan_placement(cores(2), request(role("rollout", 1), judge)).unknown == ("judge",)


def test_a_hundred_hosts_of_eight() -> None:
    """The judge has the last 100 devices, so that of the 13 last hosts one is left in half."""
    hosts = gpus(*[8] * 100)
    asked = request(
        role("rollout", "all", 3, 40, 10),
        role("train", "all", 5, 10, 20),
        role("judge", 100),
        colocate=TURNS,
        kind="cuda",
    )
    plan = plan_placement(hosts, asked)
    check(hosts, asked, plan)
    assert [len(plan.of(name)) for name in ("rollout", "train", "judge")] == [175, 87, 100]


def test_there_are_thirty_impossible_requests() -> None:
    assert len(IMPOSSIBLE) >= 30
