"""Hosts, roles (engines, training replicas, a judge) and finished plans, for `placement.py` beside
it.

Devices are numbered over all hosts, in the hosts' order. They are GPUs, each with memory of its
own, or on a CPU cores, which share their host's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

DeviceKind = Literal["cpu", "cuda"]


class PlacementError(ValueError):
    """Raised if the hosts cannot hold the roles as configured. The message names what is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine, with the devices and the memory that placement needs to know."""

    name: str
    cores: int
    memory_bytes: int
    gpu_bytes: tuple[int, ...] = ()
    """Bytes of memory of each GPU. Empty: there is none."""
    address: str = ""
    """Address of the host for other hosts. Empty: it is this host."""
    shm_bytes: int | None = None
    """Bytes of the host's `/dev/shm`. None: not known."""
    held_bytes: int = 0
    """Bytes of the host's memory that other processes hold, such as the run's own on a CPU."""

    @property
    def left_bytes(self) -> int:
        return max(self.memory_bytes - self.held_bytes, 0)

    def num_devices(self, kind: DeviceKind) -> int:
        return self.cores if kind == "cpu" else len(self.gpu_bytes)


class Need(NamedTuple):
    """Bytes of memory that a role takes on each device. Roles on one device may work by turns:
    `stays` is taken always, `turn` only while the role works."""

    stays: int
    """Bytes held all the time, also while another role on the device works."""
    turn: int
    """Bytes held besides while the role works. Of roles on one device only one works at a time."""
    of: str = ""
    """Name of the part of the role, such as "stage 1", that takes this much, the most of all parts.
    Empty: all parts take the same."""

    parts: tuple[tuple[str, int], ...] = ()
    """Names and bytes of the parts that make up what is held on a device. Empty: not known."""
    host_parts: tuple[tuple[str, int], ...] = ()
    """Names and bytes of what the role keeps in page-locked memory of the host for each of its
    GPUs, such as weights that wait there for their turn on the device."""

    @property
    def most(self) -> int:
        return self.stays + self.turn

    @property
    def on_host(self) -> int:
        """Bytes of `host_parts` together."""
        return sum(size for _, size in self.host_parts)


NOTHING = Need(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role that devices can have (engine, training replica or judge). What is placed are units,
    such as one engine, each of `per_unit` devices."""

    name: str
    """Name of the role, which is also its key in the `placement` part of the configuration."""
    unit: str
    """Word for one unit of the role, such as engine or replica."""
    devices: Literal["all"] | int | tuple[int, ...]
    """What the role asks for. "all": as many units as fit beside the other roles. A number: so many
    devices. A tuple: the devices with these numbers."""
    per_unit: int = 1
    """Number of devices of one unit."""
    per_key: str | None = None
    """Name of the config key that sets `per_unit`, for messages. None: no key sets it."""
    needs: Callable[[int], Need | None] = field(default=lambda per_unit: None, compare=False)
    """Function from a unit's number of devices to its bytes on each device. None: not known."""
    across_hosts: bool = False
    """True if one unit may have devices on several hosts."""

    @property
    def need(self) -> Need:
        """Memory that the role takes on each of its devices; all 0 if it is not known."""
        return self.needs(self.per_unit) or NOTHING

    @property
    def count(self) -> int | None:
        """Number of devices that the role asks for. None: as many as there are."""
        if self.devices == "all":
            return None
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def pinned(self) -> tuple[int, ...]:
        """Numbers of the devices that the role's config line names; empty if it names none."""
        return self.devices if isinstance(self.devices, tuple) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The roles to be placed, and which of them may share devices by taking turns."""

    roles: tuple[Role, ...]
    colocate: frozenset[str] = frozenset()
    """Names of roles that may share devices, since only one of them works at a time. Each other
    role has its devices for itself."""
    kind: DeviceKind = "cpu"

    def shares(self, one: Role, other: Role) -> bool:
        return one.name == other.name or {one.name, other.name} <= self.colocate

    def load(self, counts: Mapping[str, int]) -> int:
        """Bytes of memory that roles need together in one device or host, where `counts` has each
        role's number of devices. It is the sum of what stays, of what roles with devices of their
        own take while they work, and of the largest that a role takes in its turn."""
        total = most = 0
        for role in self.roles:
            count, need = counts.get(role.name, 0), role.need
            total += need.stays * count
            if role.name in self.colocate:
                most = max(most, need.turn * count)
            else:
                total += need.turn * count
        return total + most

    def host_load(self, counts: Mapping[str, int]) -> int:
        """Bytes of page-locked memory of a host that roles keep for its GPUs, where `counts` has
        each role's number of them."""
        return sum(role.need.on_host * counts.get(role.name, 0) for role in self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One placed engine, training replica or judge, and its devices."""

    role: str
    name: str
    """Name of the unit, such as "engine 0" or "replica 1"."""
    devices: tuple[int, ...]
    """Numbers of the unit's devices, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDevice:
    """One device, the units that use it, and its memory."""

    number: int
    host: str
    local: int
    """Number of the device on its own host, from 0."""
    units: tuple[str, ...]
    """Names of the units that the device is part of."""
    used_bytes: int
    """Bytes of memory that the device's units take at their peak, as far as this is known."""
    memory_bytes: int | None
    """Bytes of the device's own memory. None: it is a core, which shares its host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedHost:
    """One host, and how much of its own memory the units of its devices take together."""

    name: str
    used_bytes: int
    """Bytes that units on CPU cores take, or that those on GPUs keep page-locked."""
    held_bytes: int
    """Bytes of the host's memory that other processes hold."""
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The finished plan: every unit's devices, and every device's units."""

    kind: DeviceKind
    units: tuple[Unit, ...]
    devices: tuple[PlacedDevice, ...]
    hosts: tuple[PlacedHost, ...]
    unknown: tuple[str, ...]
    """Names of roles whose use of memory is not known, so that the plan counts 0 bytes for each."""
    needs: tuple[tuple[str, Need], ...] = ()
    """Each role's name, and the memory that it takes on each of its devices."""

    def of(self, role: str) -> tuple[Unit, ...]:
        """Units of the role with this name, in the order of their first devices."""
        return tuple(unit for unit in self.units if unit.role == role)

    def num_devices(self, role: str) -> int:
        return sum(len(unit.devices) for unit in self.of(role))

    def host_of(self, device: int) -> str:
        return self.devices[device].host


def as_ranges(devices: Sequence[int]) -> str:
    """Text of ascending device numbers, with ranges, such as `0-3,6`."""
    parts: list[list[int]] = []
    for number in devices:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(str(end) for end in part) for part in parts)


def as_line(devices: Literal["all"] | int | Sequence[int]) -> str:
    """Text of a role's devices as in its config line: `all`, a number of devices, or ranges of
    device numbers. A single device number is `3-3`, since `3` would be a number of devices."""
    if isinstance(devices, str | int):
        return str(devices)
    return f"{devices[0]}-{devices[0]}" if len(devices) == 1 else as_ranges(devices)


def text_of_bytes(size_bytes: int) -> str:
    """Text of a number of bytes, in the largest unit of KiB, MiB and GiB that fits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes / 1024:.1f} KiB"
