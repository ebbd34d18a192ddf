"""Plans which devices engines, trainer, judge and reward models get, from the config, the hosts,
and the memory that each needs; and shows the plan as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from rollpacker.core.placement.roles import as_ranges, text_of_bytes
from rollpacker.run.parts.this_host import this_host

if TYPE_CHECKING:
    from rollpacker.config.placement import JudgePlacement, PlacementConfig, RewardPlacement
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.placement.roles import (
        DeviceKind,
        Host,
        Need,
        PlacedDevice,
        Placement,
        PlacementRequest,
        Role,
    )
    from rollpacker.trainer.training_memory import Memory


def hosts_of(config: RunConfig) -> list[Host]:
    """Returns the hosts that the run may use: this machine, or those of the ray cluster. Raises
    `ValueError` if the cluster cannot be used."""
    if config.runtime == "ray":
        from rollpacker.run.parts.cluster_facts import rooms

        return rooms()
    return [this_host(device_kind(config))]


def device_kind(config: RunConfig) -> DeviceKind:
    """Returns "cuda" or "cpu". Torch is asked only if the config does not say."""
    from rollpacker.trainer.estimate import estimate

    return "cuda" if estimate(config).device == "cuda" else "cpu"


def lines_of_keys(config: RunConfig) -> PlacementConfig:
    """Returns the `placement` that is equal to `rollout.engines`, `train.processes` and such keys.
    An engine or a trainer in the run's own process counts as one on a device. Raises `ValueError`
    for a ray cluster if the trainer has no processes of its own."""
    from rollpacker.config.placement import PlacementConfig, RolloutPlacement, TrainPlacement

    processes, degree = config.train.processes, config.parallelism_planner.initial
    if processes is None and config.runtime == "ray":
        raise ValueError(
            "the trainer has no processes of its own to be placed: set train.processes, or "
            "placement"
        )
    return PlacementConfig(
        rollout=RolloutPlacement(devices=config.rollout.engines * degree, per_engine=degree),
        train=TrainPlacement(
            devices=processes or 1, per_replica=(processes or 1) // config.train.replicas
        ),
        colocate=("rollout", "train") if config.train.colocate else (),
    )


def request_of(
    config: RunConfig, kind: DeviceKind, *, train_first: bool = False
) -> PlacementRequest:
    """Returns what is to be placed (engines, trainer, judge, reward models), with the devices and
    memory that each needs. `train_first`: the trainer gets the first devices, as it always does
    with ray. Raises `ValueError` if the config cannot be placed."""
    from rollpacker.config.placement import devices_of
    from rollpacker.core.placement.roles import PlacementRequest, Role

    lines = lines_of_keys(config) if config.placement is None else config.placement
    roles = [
        Role(
            name="rollout",
            unit="engine",
            devices=devices_of(lines.rollout.devices),
            per_unit=lines.rollout.per_engine,
            per_key="per_engine",
            needs=cache(lambda devices: _engine_need(config, lines, devices, kind)),
        ),
        Role(
            name="train",
            unit="replica",
            devices=devices_of(lines.train.devices),
            per_unit=lines.train.per_replica,
            per_key="per_replica",
            needs=cache(lambda devices: _rank_need(config, lines, devices, kind)),
        ),
    ]
    if lines.judge is not None:
        roles.append(_of_single_devices("judge", lines.judge, _given(lines.judge.memory_gib)))
    if lines.reward is not None:
        roles.append(
            _of_single_devices("reward", lines.reward, _reward_need(config, lines.reward, kind))
        )
    if config.runtime == "ray" or train_first:
        # On the run's host, the first, if it has room.
        roles.sort(key=lambda role: role.name != "train")
    across = set(lines.across_hosts)
    return PlacementRequest(
        roles=tuple(replace(role, across_hosts=role.name in across) for role in roles),
        colocate=frozenset(lines.colocate),
        kind=kind,
    )


def _of_single_devices(
    name: Literal["judge", "reward"], line: JudgePlacement | RewardPlacement, need: Need | None
) -> Role:
    """Returns the role `name`, each unit of which has one device and takes `need` there."""
    from rollpacker.config.placement import devices_of
    from rollpacker.core.placement.roles import Role

    unit = {"judge": "judge", "reward": "reward model"}[name]
    return Role(name=name, unit=unit, devices=devices_of(line.devices), needs=lambda _: need)


def _given(memory_gib: float | None) -> Need | None:
    from rollpacker.core.placement.roles import Need

    return None if memory_gib is None else Need(int(memory_gib * (1 << 30)), 0)


def _engine_need(
    config: RunConfig, lines: PlacementConfig, devices: int, kind: DeviceKind
) -> Need | None:
    from rollpacker.trainer.training_memory import engine_memory

    if lines.rollout.memory_gib is not None:
        return _given(lines.rollout.memory_gib)
    memory = engine_memory(config, devices, on_cuda=kind == "cuda")
    # vLLM drops what it gets anew for its next turn, which is everything but a base of adapters.
    comes_anew = config.rollout.engine.name == "vllm" and config.model.lora is None
    kept = () if comes_anew else ("weights", "adapters")
    return _need(memory, kind, turns=lines.turns, waiting=kept if lines.turns else ())


def _rank_need(
    config: RunConfig, lines: PlacementConfig, devices: int, kind: DeviceKind
) -> Need | None:
    """Returns the memory that one trainer process needs if each replica of the model has `devices`
    devices; None if unknown. Counted as for two replicas, unless the placement has devices for just
    one."""
    from rollpacker.config.placement import num_devices
    from rollpacker.trainer.training_memory import OF_A_TURN, OFFLOADED, rank_memory

    if lines.train.memory_gib is not None:
        return _given(lines.train.memory_gib)
    replicas = 1 if num_devices(lines.train.devices) == devices else 2
    train = replace(config.train, processes=devices * replicas, replicas=replicas, colocate=False)
    memory = rank_memory(replace(config, train=train, placement=None), on_cuda=kind == "cuda")
    waiting: tuple[str, ...] = OFFLOADED if config.train.offload else ()
    if memory is not None and lines.turns:
        # A streamed gradient may have to wait until the engines have had another turn.
        kept = ("gradients", "critic gradients") if config.stream_trainer.enabled else ()
        waiting = tuple(one.name for one in memory.parts if one.name not in OF_A_TURN) + kept
    return _need(memory, kind, turns=lines.turns, waiting=waiting)


def _reward_need(config: RunConfig, lines: RewardPlacement, kind: DeviceKind) -> Need | None:
    """Returns the memory that workers of reward models take on each of their devices, over which
    they are spread; None if the size of a model is not known."""
    from rollpacker.config.placement import num_devices
    from rollpacker.core.placement.roles import Need
    from rollpacker.trainer.model_shape import model_folder, num_parameters

    if lines.memory_gib is not None:
        return _given(lines.memory_gib)
    count = num_devices(lines.devices) or 1
    parts = []
    for one in [reward for reward in config.rewards if reward.takes_device]:
        path, dtype = str(one.arguments.get("model_path")), one.arguments.get("dtype", "auto")
        parameters = num_parameters(model_folder(path), path, [])
        if parameters is None:
            return None
        element = 2 if dtype == "bfloat16" or (dtype == "auto" and kind == "cuda") else 4
        workers = 1 if one.workers == "auto" else math.ceil(one.workers / count)
        parts.append((f"weights of {one.name or path}", workers * parameters * element))
    return Need(sum(size for _, size in parts), 0, parts=tuple(parts))


def _need(
    memory: Memory | None, kind: DeviceKind, *, turns: bool, waiting: Sequence[str]
) -> Need | None:
    """Returns what this memory is for a plan. `turns`: engines and trainer use the same devices
    alternately, so that on CUDA each leaves them. `waiting`: names of the parts that then wait in
    host memory."""
    from rollpacker.core.placement.roles import Need

    if memory is None:
        return None
    parts = tuple((one.name, one.size_bytes) for one in memory.parts)
    if kind == "cpu":
        return Need(memory.stays_bytes, memory.turn_bytes, memory.name, parts)
    stays = 0 if turns else memory.stays_bytes
    host = tuple(part for part in parts if part[0] in waiting)
    return Need(stays, memory.size_bytes - stays, memory.name, parts, host)


def plan_of(config: RunConfig, hosts: Sequence[Host], *, train_first: bool = False) -> Placement:
    """Returns the plan of devices on these hosts; the run's own process is on the first host.
    `train_first`: as in `request_of`. Raises `PlacementError` (a `ValueError`) if something does
    not fit."""
    from rollpacker.core.placement.placement import plan_placement
    from rollpacker.trainer.training_memory import run_memory

    kind = device_kind(config)
    first, *others = hosts
    first = replace(first, held_bytes=run_memory(config, on_cuda=kind == "cuda"))
    return plan_placement([first, *others], request_of(config, kind, train_first=train_first))


def on_nodes(
    config: RunConfig, hosts: Sequence[Host], nodes: Mapping[str, Sequence[str]]
) -> RunConfig:
    """Returns the config with a `placement` on hosts that a cluster gave to the run; it takes their
    devices from the first on. `nodes`: names of these hosts, by "rollout" (engines) and "train".
    Raises `ValueError` if these hosts have too few devices."""
    from rollpacker.config.placement import num_devices
    from rollpacker.core.placement.roles import as_line

    lines = lines_of_keys(config) if config.placement is None else config.placement
    kind = device_kind(config)
    ends = list(accumulate((host.num_devices(kind) for host in hosts), initial=0))
    for role, names in nodes.items():
        line = getattr(lines, role)
        there = [
            device
            for number, host in enumerate(hosts)
            if host.name in names
            for device in range(ends[number], ends[number + 1])
        ]
        wanted = num_devices(line.devices) or len(there)
        if wanted > len(there):
            raise ValueError(
                f"placement.{role} has {wanted} devices, and the cluster's nodes for it, "
                f"{', '.join(names)}, have {len(there)}: is devices_per_node of the pool right?"
            )
        lines = replace(lines, **{role: replace(line, devices=as_line(there[:wanted]))})
    return replace(config, placement=lines)


def on_this_host(config: RunConfig) -> tuple[RunConfig, Placement | None]:
    """Returns the config with the keys that its `placement` implies on this machine, such as
    `rollout.engines`, and the plan. The plan is None if there is nothing to place: on a CPU without
    `placement`, where any process may use any core, and where the run's own process generates and
    trains. Raises `ValueError` if devices or their memory are short."""
    kind = device_kind(config)
    alone = not config.engines_are_apart and config.train.processes is None
    if config.placement is None and (kind == "cpu" or alone):
        if kind == "cuda":
            _check_alone(config)
        return config, None
    torchrun = _is_under_torchrun()
    plan = plan_of(config, hosts_of(config), train_first=torchrun)
    if torchrun:
        _check_torchrun(plan)
    return placed(config, plan), plan


def _check_alone(config: RunConfig) -> None:
    """Raise `PlacementError` if a run that generates and trains in one process takes more than its
    GPU, the first, has. Nothing is raised if there is no GPU, or the memory is not known."""
    from rollpacker.core.placement.roles import PlacementError
    from rollpacker.trainer.estimate import estimate

    sizes, known = this_host("cuda").gpu_bytes, estimate(config, has_cuda=True)
    if not sizes or known.total_bytes is None or known.total_bytes <= sizes[0]:
        return
    parts = sorted(known.memory.parts, key=lambda part: -part.size_bytes)[:3]
    raise PlacementError(
        f"the run takes {text_of_bytes(known.total_bytes)} of its GPU, which has "
        f"{text_of_bytes(sizes[0])}; the largest parts are "
        f"{_parts([(part.name, part.size_bytes) for part in parts])}: docs/one-gpu.md says what "
        "takes less"
    )


def _check_torchrun(plan: Placement) -> None:
    """Raise `ValueError` for a plan that torchrun does not keep to: it starts the trainer's
    processes itself, on GPUs 0, 1, 2 and so on."""
    devices = [device for unit in plan.of("train") for device in unit.devices]
    if plan.kind == "cuda" and devices != list(range(len(devices))):
        raise ValueError(
            f"placement.train has devices {as_ranges(devices)}, and torchrun puts the trainer's "
            "processes on the first GPUs: leave placement.train.devices a number, or start the run "
            "without torchrun"
        )


def _is_under_torchrun() -> bool:
    from rollpacker.trainer.launch import Torchrun

    return Torchrun.from_environment() is not None


def placed(config: RunConfig, plan: Placement) -> RunConfig:
    """Returns the config with the keys filled in that this plan implies, such as `rollout.engines`.
    Raises `ValueError` if such a key is set to something else."""
    from rollpacker.config.placement import derived

    lines = config.placement
    if lines is None:  # its keys say it already
        return config
    _check_turns(lines, plan)
    found = derived(lines, engines=len(plan.of("rollout")), processes=plan.num_devices("train"))
    for one in found:
        part, name = one.key.split(".")
        value = getattr(getattr(config, part), name)
        if value not in (one.unset, one.value):
            raise ValueError(
                f"{one.key}={value}, but {one.lines} makes it {one.value} on these hosts: "
                f"placement rules, so leave {one.key} out, or change placement"
            )
    processes = plan.num_devices("train")
    train = replace(
        config.train,
        processes=processes,
        replicas=processes // lines.train.per_replica,
        colocate=lines.turns,
    )
    planner, degree = config.parallelism_planner, lines.rollout.per_engine
    if not planner.enabled:
        planner = replace(planner, initial=degree, degrees=(degree,))
    rollout = replace(config.rollout, engines=len(plan.of("rollout")))
    return replace(config, rollout=rollout, train=train, parallelism_planner=planner)


def _check_turns(lines: PlacementConfig, plan: Placement) -> None:
    """Raise `ValueError` if engines and trainer are to use the same devices alternately
    (`placement.colocate`), but are planned on different ones."""
    if not lines.turns:
        return
    of = {
        role: sorted(d for unit in plan.of(role) for d in unit.devices)
        for role in ("rollout", "train")
    }
    if of["rollout"] != of["train"]:
        raise ValueError(
            f"placement.colocate: engines are on devices {as_ranges(of['rollout'])}, the trainer on"
            f" {as_ranges(of['train'])}, and where they take turns a run needs both on the same: "
            "give placement.rollout and placement.train the same devices"
        )


def table(plan: Placement) -> list[str]:
    """Returns the lines of a table of the plan. Neighbouring devices with the same content share a
    line, and each host has a line with its used memory."""
    rows = []
    for run in _runs(plan.devices):
        first, last = run[0], run[-1]
        rows.append((_numbers(first.number, last.number), first.host, first.units, _memory(first)))
    lines = _rows(rows)
    for host in plan.hosts:
        own = f", {text_of_bytes(host.held_bytes)} of it the run's own" if host.held_bytes else ""
        used = text_of_bytes(host.used_bytes + host.held_bytes)
        what = "" if plan.kind == "cpu" else "host memory "
        lines.append(f"{host.name}: {what}{used} of {text_of_bytes(host.memory_bytes)}{own}")
    for name, need in plan.needs:
        if need.parts:
            line = f"{name} takes on each device: {_parts(need.parts)}"
            if need.on_host:
                line += f"; of it waits in host memory: {_parts(need.host_parts)}"
            lines.append(line)
    if plan.unknown:
        names = ", ".join(plan.unknown)
        lines.append(
            f"note: what {names} takes is not known, and not counted: "
            f"placement.{plan.unknown[0]}.memory_gib says it"
        )
    return lines


def table_without(config: RunConfig, host: Host, kind: DeviceKind) -> list[str]:
    """Returns the table of a run on this machine where nothing is placed: on a CPU any process may
    use any core, and on a GPU the run's own process has the first one for itself."""
    from rollpacker.trainer.estimate import estimate
    from rollpacker.trainer.training_memory import engine_memory

    known = estimate(config)
    own = known.memory.size_bytes
    if kind == "cuda":
        has = ", and there is no such device here"
        if host.gpu_bytes:
            has = f" of {text_of_bytes(host.gpu_bytes[0])}"
        size = text_of_bytes(own) if known.whole else "not known"
        others = [(str(n), host.name, (), f"- of {text_of_bytes(host.gpu_bytes[n])}")
                  for n in range(1, len(host.gpu_bytes))]  # fmt: skip
        return _rows([("0", host.name, ("run",), f"{size}{has}"), *others])
    engines = config.rollout.engines if config.engines_are_apart else 0
    degree = config.parallelism_planner.initial
    one = engine_memory(config, degree, on_cuda=False)
    each = 0 if one is None else degree * (one.stays_bytes + one.turn_bytes)
    names, total = ["run"], own + engines * each
    for number in range(max(engines, known.processes)):
        if number < engines:
            names.append(f"engine {number}")
        if number < known.processes:
            rank = known.rank(number)
            names.append(f"trainer's process {number}{rank.name and f' ({rank.name})'}")
            total += rank.size_bytes
    memory = f"{text_of_bytes(total)} together" if known.whole else "not known"
    row = (_numbers(0, host.cores - 1), host.name, tuple(names), memory)
    told = f"{host.name}: {text_of_bytes(total)} of {text_of_bytes(host.memory_bytes)}"
    return [*_rows([row]), *([told] if known.whole else [])]


def _parts(parts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {text_of_bytes(size)}" for name, size in parts)


def _rows(rows: Sequence[tuple[str, str, tuple[str, ...], str]]) -> list[str]:
    from rollpacker.report.table import lines

    cells = [("device", "host", "roles", "memory of each")]
    cells += [(numbers, host, ", ".join(units) or "-", m) for numbers, host, units, m in rows]
    return lines(cells, numbers=False, rule=False, gap=2)


def _numbers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _runs(devices: Sequence[PlacedDevice]) -> list[list[PlacedDevice]]:
    runs: list[list[PlacedDevice]] = []
    for device in devices:
        last = runs[-1][-1] if runs else None
        if last and _shown(last) == _shown(device):
            runs[-1].append(device)
        else:
            runs.append([device])
    return runs


def _shown(device: PlacedDevice) -> tuple[object, ...]:
    return device.host, device.units, device.used_bytes, device.memory_bytes


def _memory(device: PlacedDevice) -> str:
    used = text_of_bytes(device.used_bytes) if device.units else "-"
    return (
        used if device.memory_bytes is None else f"{used} of {text_of_bytes(device.memory_bytes)}"
    )
