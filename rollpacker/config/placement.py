"""The devices of each role (`placement.*`), and keys that follow from them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rollpacker.bounds import check_at_least
from rollpacker.config.rollout import RolloutConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.trainer.trainer import TrainConfig

RoleName = Literal["rollout", "train", "judge", "reward"]
MAX_DEVICE = 99_999
"""Largest device number that `placement` may name; a larger one is taken for a slip."""
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlacement:
    """Which devices the engines have (`placement.rollout.*`)."""

    devices: int | str = "all"
    """Devices of the engines. all: every device but those of roles that share none with the engines
    (`placement.colocate`). A number: so many devices. Ranges over all hosts, such as `0-7` or
    `0-3,6`: the devices of these numbers; a single device is `3-3`."""
    per_engine: int = 1
    """Number of devices of one engine, all on one host. More than one with vLLM only."""
    memory_gib: float | None = None
    """GiB of memory that an engine takes on each of its devices. None: estimated from the model."""

    def __post_init__(self) -> None:
        _check_line(self.devices, self.per_engine, "per_engine")
        _check_memory(self.memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlacement:
    """Which devices the trainer has (`placement.train.*`); it has one process on each device."""

    devices: int | str = "all"
    """Devices of the trainer, written as those of the engines (`placement.rollout.devices`)."""
    per_replica: int = 1
    """Number of devices over which one whole copy of the model is sharded, all on one host."""
    memory_gib: float | None = None
    """GiB of memory that each process of the trainer takes. None: estimated from the model."""

    def __post_init__(self) -> None:
        _check_line(self.devices, self.per_replica, "per_replica")
        _check_memory(self.memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlacement:
    """Devices left free for a judge model's server, which no run starts (`placement.judge.*`)."""

    devices: int | str = 1
    """Devices of the judge, written as those of the engines (`placement.rollout.devices`)."""
    memory_gib: float | None = None
    """GiB of memory that the judge takes on each of its devices. None: unknown and not counted."""

    def __post_init__(self) -> None:
        _check_line(self.devices, 1, "")
        _check_memory(self.memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlacement:
    """Devices of the rewards `reward_model`, whose workers share them (`placement.reward.*`)."""

    devices: int | str = 1
    """Devices of the reward models, written as those of the engines (`placement.rollout.devices`).
    Each worker of a reward model is on one of them."""
    memory_gib: float | None = None
    """GiB of memory that reward models take on each of their devices. None: the weights of the
    workers that share a device."""

    def __post_init__(self) -> None:
        _check_line(self.devices, 1, "")
        _check_memory(self.memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Which devices engines and trainer have (`placement.*`). Devices are numbered over all hosts;
    on a CPU a device is a core, and cores share their host's memory. The number of engines, the
    trainer's processes and replicas, `train.colocate` and `parallelism_planner.initial` follow from
    this section. If they are set as well, they must agree with it."""

    rollout: RolloutPlacement = field(default_factory=RolloutPlacement)
    train: TrainPlacement = field(default_factory=TrainPlacement)
    judge: JudgePlacement | None = None
    reward: RewardPlacement | None = None
    """None: a reward model on CUDA is on the first device that the run may use, and not counted."""
    reference: Literal["train"] = "train"
    """Whose devices the reference model has. train: each process of the trainer has a share of it
    beside its share of the policy. Devices of its own are not possible yet."""
    critic: Literal["train"] = "train"
    """Whose devices the critic has: the trainer's, as those of the reference model."""
    teacher: Literal["train"] = "train"
    """Whose devices the teacher has: the trainer's, as those of the reference model."""
    colocate: tuple[RoleName, ...] = ()
    """Roles (rollout, train, judge, reward) that use the same devices in turn. Others share
    none."""
    across_hosts: tuple[RoleName, ...] = ()
    """Roles (rollout, train) of which one engine or replica may span several hosts."""

    def __post_init__(self) -> None:
        for name in ("colocate", "across_hosts"):
            roles: tuple[str, ...] = getattr(self, name)
            if len(set(roles)) < len(roles):
                raise ValueError(f"{name} names a role twice: {list(roles)}")
            for role in ("judge", "reward"):
                if role in roles and getattr(self, role) is None:
                    raise ValueError(
                        f"{name} names {role}, which has no devices: set placement.{role}"
                    )
        if len(self.colocate) == 1:
            raise ValueError(
                f"colocate names {self.colocate[0]} alone: roles take turns with another one"
            )

    @property
    def turns(self) -> bool:
        """Whether engines and trainer take turns on the same devices."""
        return {"rollout", "train"} <= set(self.colocate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardHostsConfig:
    """Processes that run rewards on all hosts (`rewards_hosts.*`), for `runtime=ray` only."""

    per_host: int = 1
    """Number of processes on each host that check responses, with all rewards and sandboxes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "per_host")


def devices_of(line: int | str) -> Literal["all"] | int | tuple[int, ...]:
    """Returns what a `devices` value of `placement` means: "all", a number of devices, or the
    numbers of devices. Raises `ValueError` for any other value."""
    if isinstance(line, int):
        if line < 1:
            raise ValueError(f"devices must be at least 1, not {line}")
        return line
    if line == "all":
        return "all"
    if not _RANGES.fullmatch(line):
        raise ValueError(
            f"devices must be all, a number, or ranges such as 0-7 or 0-3,6, not {line!r}"
        )
    numbers: list[int] = []
    for part in line.split(","):
        first, _, last = part.partition("-")
        if max(len(first), len(last)) > len(str(MAX_DEVICE)):
            raise ValueError(f"devices {part}: there are no so many devices")
        if int(last or first) < int(first):
            raise ValueError(f"devices {part} ends before it begins: did you mean {last}-{first}?")
        numbers += range(int(first), int(last or first) + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"devices {line} names one twice")
    return tuple(sorted(numbers))


def num_devices(line: int | str) -> int | None:
    """Number of devices that a `devices` value of `placement` asks for. None: all."""
    devices = devices_of(line)
    if devices == "all":
        return None
    return devices if isinstance(devices, int) else len(devices)


def check_placement(
    placement: PlacementConfig,
    rollout: RolloutConfig,
    train: TrainConfig,
    planner: ParallelismConfig,
) -> None:
    """Raises `ValueError` if a key that follows from `placement` (see `derived`) is set to another
    value, or if the placement does not go with the engine or the planner."""
    sections = {"rollout": rollout, "train": train, "parallelism_planner": planner}
    per_engine, engine = placement.rollout.per_engine, rollout.engine
    if per_engine > 1 and not engine.is_tensor_parallel:
        raise ValueError(
            f"placement.rollout.per_engine={per_engine} does not go with rollout.engine.name="
            f"{engine.name}, which runs on one device: set rollout.engine.name=vllm, or "
            "per_engine=1"
        )
    if planner.enabled and planner.initial != per_engine:
        raise ValueError(
            f"parallelism_planner.initial={planner.initial}, but placement.rollout.per_engine="
            f"{per_engine}: with the planner set both to the degree to begin with"
        )
    for one in derived(placement):
        part, name = one.key.split(".")
        value = getattr(sections[part], name)
        if one.value is not None and value not in (one.unset, one.value):
            raise ValueError(
                f"{one.key}={_word(value)}, but {one.lines} makes it {_word(one.value)}: placement "
                f"rules, so leave {one.key} out, or change placement"
            )


class Derived(NamedTuple):
    """A config key whose value follows from `placement`."""

    key: str
    unset: object
    """Default of the key, with which a config counts as not setting the key."""
    value: object
    """Value of the key that follows from `placement`. None: it depends on the hosts' devices."""
    lines: str
    """The settings of `placement` that the value follows from, as `key=value` for messages."""


def derived(
    placement: PlacementConfig, engines: int | None = None, processes: int | None = None
) -> list[Derived]:
    """All keys whose values follow from `placement`. `engines` and `processes` (of the trainer) are
    the numbers for which the hosts have devices; None: only `placement` is known."""
    rollout, train = placement.rollout, placement.train
    of_engines, of_train = num_devices(rollout.devices), num_devices(train.devices)
    if engines is None and of_engines is not None:
        engines = of_engines // rollout.per_engine
    processes = of_train if processes is None else processes
    replicas = None if processes is None else processes // train.per_replica
    per_engine = f"placement.rollout.per_engine={rollout.per_engine}"
    lines = f"placement.train.devices={train.devices}"
    return [
        Derived(
            "rollout.engines",
            1,
            engines,
            f"placement.rollout.devices={rollout.devices} with per_engine={rollout.per_engine}",
        ),
        Derived("train.processes", None, processes, lines),
        Derived("train.replicas", 1, replicas, f"{lines} with per_replica={train.per_replica}"),
        Derived(
            "train.colocate",
            False,
            placement.turns,
            f"placement.colocate=[{','.join(placement.colocate)}]",
        ),
        Derived("parallelism_planner.initial", 1, rollout.per_engine, per_engine),
    ]


def _word(value: object) -> str:
    return str(value).lower()


def _check_line(devices: int | str, per_unit: int, key: str) -> None:
    if per_unit < 1:
        raise ValueError(f"{key} must be at least 1, not {per_unit}")
    count = num_devices(devices)
    if count is not None and count % per_unit:
        fits = [str(n) for n in (count // per_unit * per_unit, -(-count // per_unit) * per_unit)]
        raise ValueError(
            f"devices={devices} is {count}, which {key}={per_unit} does not divide: make it "
            f"{' or '.join(n for n in fits if n != '0')}"
        )


def _check_memory(memory_gib: float | None) -> None:
    if memory_gib is not None and not (math.isfinite(memory_gib) and memory_gib >= 0):
        raise ValueError(f"memory_gib must be a number from 0 on, not {memory_gib}")
