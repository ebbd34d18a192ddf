"""Makes the description of a job that a cluster plans with (`ClusterJob`), from a run's folder.

The run's log gives the times of its iterations (`phase_times.py`), of which warm-up is left out.
The sizes of weights and trainer in its checkpoint give host memory and seconds of switches, and its
config the devices and steps. What is not there is assumed: `WAKE_GB_S`, `COLD_START_S`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollpacker.cluster.decide.job import ClusterJob, Iteration, Phase, RoundTimes, Times
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.profile.phase_times import PhaseTimes
from rollpacker.config.load import differences, load_config, to_plain
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Commit, Leave
from rollpacker.core.events import Entered
from rollpacker.core.ids import PoolName
from rollpacker.core.records import POOL_SWITCH, Entry, Note, Record
from rollpacker.report.log import EventLog, events_path

CONFIG_FILE = "config.yaml"
MIN_ITERATIONS = 3
MAX_ITERATIONS = 300
"""Most iterations that a profile uses, the latest, since responses change in length over a run."""
WARM_FACTOR = 1.5
MAX_WARM = 3
WAKE_GB_S: Mapping[Phase, float] = {"rollout": 25.0, "train": 10.0}
"""Rate of copying between host memory and a device, by phase, in 1e9 bytes per second, for parking
(leaving) and waking. Published warm starts (RollMux, arXiv 2512.11306): 18 to 39 for rollout and 8
to 12 for training."""
COLD_START_S = 60.0
GIB, GB = 2**30, 1e9
SHAPING = (
    *("model.path", "model.device", "model.dtype", "model.lora", "model.quantization"),
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_response_tokens"),
    *("rollout.dynamic_sampling", "environment"),
    *("rollout.engine.name", "rollout.engines", "train.processes", "train.pipeline.stages"),
)
"""Keys of a run's config that change how long phases take: a profile of one run holds for another
only if both have the same values of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProfile:
    """What a run's folder tells of the run: seconds of its iterations, and bytes of its weights."""

    folder: Path
    config: RunConfig
    rounds: tuple[RoundTimes, ...]
    num_iterations: int
    """Number of iterations that `rounds` were computed from."""
    switch_s: Mapping[PoolName, float]
    """Seconds to come onto a pool's devices and leave them, by pool. Empty if it shared none."""
    start_s: float | None
    """Seconds that the run's last start took. None if the log does not have them."""
    model_bytes: int
    """Bytes of the weights in the newest checkpoint. 0 if there is none."""
    trainer_bytes: int
    """Bytes of the trainer's state in the newest checkpoint, weights included. 0 without one."""


def job_of_run(
    folder: str | Path,
    *,
    name: str,
    slo: float,
    steps: int | None = None,
    config: RunConfig | None = None,
    on_gpus: bool = False,
    pools: Sequence[Pool] = (),
    **given: Any,
) -> ClusterJob:
    """Return the job that a run is, or will be, from the log of the run in `folder`.

    `steps`: number of steps; None: that of the config. `config`: config of the run to come, whose
    phases must take as long as the log's; None: the same run. `on_gpus`: whether pools have GPUs.
    `pools`: pools that the job may run on. `given`: fields of `ClusterJob` to set in place of those
    found. Raises `ValueError` if the folder has too few iterations, or a different run."""
    profile = read_profile(folder)
    if config is not None:
        check_profile(profile, config)
    check_device(profile, on_gpus=on_gpus)
    return ClusterJob(
        **{
            **run_needs(profile, pools),
            **given,
            "name": name,
            "slo": slo,
            "steps": steps_of(config or profile.config, steps, folder),
            "rounds": profile.rounds,
        }
    )


def steps_of(config: RunConfig, steps: int | None, folder: str | Path) -> int:
    """Return the job's number of steps: `steps`, or if None the config's. Raises `ValueError` if
    the config has only epochs; the message names `folder`."""
    steps = config.train.steps if steps is None else steps
    if steps is None:
        raise ValueError(
            f"profile {folder}: how many steps the job takes is not known, its config has "
            "train.epochs alone: give steps (train.steps=400)"
        )
    return steps


def run_needs(profile: RunProfile, pools: Sequence[Pool] = ()) -> dict[str, Any]:
    """Return devices, host memory, and seconds of a start and of moves onto and off devices, as
    fields of `ClusterJob`, mostly from bytes in the checkpoint. In a run on shared pools training
    times include sending the weights: `model_gb` (weights still to be sent) is 0 then."""
    needs = needs_of(
        model_bytes=profile.model_bytes,
        trainer_bytes=profile.trainer_bytes,
        devices=devices_of(profile.config),
        num_copies=profile.config.rollout.engines,
        pools=pools,
    )
    needs["cold_start_s"] = COLD_START_S if profile.start_s is None else profile.start_s
    if profile.switch_s:
        needs["model_gb"] = 0.0
    return needs | {f"{pool}_switch_s": seconds for pool, seconds in profile.switch_s.items()}


def needs_of(
    *,
    model_bytes: float,
    trainer_bytes: float,
    devices: Mapping[Phase, int],
    num_copies: int,
    pools: Sequence[Pool] = (),
) -> dict[str, Any]:
    """Return devices, host memory, and seconds of moves onto and off devices, as fields of
    `ClusterJob`. `num_copies`: copies of the weights that the engines hold together. `pools`: those
    that the job may run on; empty: unknown."""
    held = {"rollout": model_bytes * num_copies, "train": trainer_bytes}
    needs: dict[str, Any] = {"model_gb": model_bytes / GB}
    for phase, count in devices.items():
        needs[f"{phase}_devices"] = count
        needs[f"{phase}_memory_gib"] = held[phase] / fewest_nodes(phase, count, pools) / GIB
        needs[f"{phase}_switch_s"] = 2 * held[phase] / count / GB / WAKE_GB_S[phase]
    return needs


def fewest_nodes(phase: Phase, devices: int, pools: Sequence[Pool]) -> int:
    """Return the fewest nodes on which a pool of this phase has so many devices: a node's share of
    the job's memory is largest there. If no pool is large enough, a node counts as 8 devices."""
    counts = [
        pool.nodes_for(devices)
        for pool in pools
        if pool.phase == phase and pool.nodes_for(devices) <= pool.nodes
    ]
    return min(counts, default=math.ceil(devices / 8))


def devices_of(config: RunConfig) -> dict[Phase, int]:
    """Return the number of devices of a run's engines ("rollout") and of its trainer ("train")."""
    return {
        "rollout": config.rollout.engines * config.parallelism_planner.initial,
        "train": config.train.processes or 1,
    }


# -- reading a folder --------------------------------------------------------------


def read_profile(folder: str | Path) -> RunProfile:
    """Read the profile of the run in this folder. Raises `ValueError` if the folder has no run, its
    log is damaged, or the run has too few iterations."""
    events = events_path(folder)
    if not (events.parent / CONFIG_FILE).is_file():
        raise ValueError(
            f"profile {folder} holds no {CONFIG_FILE}, by which a run's devices are known: give "
            "the folder of a run, such as runs/quickstart"
        )
    config = load_config(events.parent / CONFIG_FILE, [], RunConfig)
    book = _Book()
    for entry in EventLog(events):
        book.feed(entry)
    iterations = without_last(book.iterations, book.last_step)
    kept = without_warm_up(iterations)
    num_whole = _num_whole(kept)
    if num_whole < MIN_ITERATIONS:
        warm = len(iterations) - len(kept)
        left_out = f" besides {warm} of warm-up" if warm else ""
        raise ValueError(
            f"profile {folder} has {num_whole} whole iterations{left_out}, and a profile takes "
            f"{MIN_ITERATIONS} or more: let it run for more steps (train.steps)"
        )
    newest = _newest_checkpoint(events.parent)
    return RunProfile(
        folder=events.parent,
        config=config,
        rounds=rounds_of(kept),
        num_iterations=len(kept),
        switch_s=book.switch_s(),
        start_s=book.start_s,
        model_bytes=0 if newest is None else _weight_bytes(newest / "model"),
        trainer_bytes=0 if newest is None else _weight_bytes(newest / "trainer"),
    )


def check_profile(profile: RunProfile, config: RunConfig) -> None:
    """Raises `ValueError` if the config differs from the profile's run in a key of `SHAPING`."""
    for key, theirs, ours in differences(to_plain(profile.config), to_plain(config)):
        if any(key == one or key.startswith(f"{one}.") for one in SHAPING):
            raise ValueError(
                f"profile {profile.folder} is of another run: it had {key}={_word(theirs)}, and "
                f"this one has {_word(ours)}, which changes how long its phases take. Run this one "
                f"alone for {MIN_ITERATIONS + MAX_WARM} steps, and give its folder"
            )


def check_device(profile: RunProfile, *, on_gpus: bool) -> None:
    """Raises `ValueError` if the run's times were measured on a CPU and the pools have GPUs."""
    if on_gpus and profile.config.model.device == "cpu":
        raise ValueError(
            f"profile {profile.folder} was made on a CPU (model.device=cpu), and the pools have "
            f"GPUs: make one of {MIN_ITERATIONS} steps or more on them"
        )


def _word(value: object) -> str:
    if isinstance(value, Mapping):  # a whole part of the config, which the other has not
        return "one"
    return "nothing" if value is None else str(value)


@dataclass(slots=True)
class _Book:
    """Collects from a run's log, in one pass, iterations and seconds of starts and switches."""

    iterations: list[Iteration] = field(default_factory=list)
    start_s: float | None = None
    last_step: int | None = None
    """Number of the run's last step. None if the run has not come to it."""
    _times: PhaseTimes = field(default_factory=PhaseTimes)
    _woke_s: dict[PoolName, list[float]] = field(default_factory=dict)
    _parked_s: dict[PoolName, list[float]] = field(default_factory=dict)
    _left: PoolName | None = None

    def feed(self, entry: Entry) -> None:
        done = self._times.feed(entry)
        if done is not None:
            self.iterations.append(done)
        if isinstance(entry, Record):
            if isinstance(entry.event, Entered):
                self._woke_s.setdefault(entry.event.pool, []).append(entry.event.switch_s)
            for command in entry.commands:
                if isinstance(command, Leave):
                    self._left = command.pool
                elif isinstance(command, Commit):
                    self.last_step = command.step if command.last else None
        elif isinstance(entry, Note) and entry.name == "startup":
            self.start_s = entry.seconds
        elif isinstance(entry, Note) and entry.name == POOL_SWITCH and self._left is not None:
            self._parked_s.setdefault(self._left, []).append(entry.seconds)

    def switch_s(self) -> dict[PoolName, float]:
        """Return by pool the median seconds of coming onto it and leaving it; unshared: empty."""
        return {
            pool: statistics.median(woke) + statistics.median(self._parked_s.get(pool, [0.0]))
            for pool, woke in self._woke_s.items()
            if any(woke)
        }


def saved_step(folder: Path) -> int:
    """Return the step of the run's newest checkpoint, from which it would resume; 0 without one."""
    newest = _newest_checkpoint(folder)
    return 0 if newest is None else int(newest.name[5:])


def _newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint that is complete (by its name), or None."""
    there = [p for p in (folder / "checkpoints").glob("step_*") if p.name[5:].isdigit()]
    return max(there, key=lambda path: int(path.name[5:]), default=None)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


# -- iterations --------------------------------------------------------------------


def without_last(iterations: Sequence[Iteration], last_step: int | None) -> Sequence[Iteration]:
    """Return the iterations without the run's last one, which always evaluates and saves a
    checkpoint. If fewer than `MIN_ITERATIONS` would be left, return all."""
    rest = [one for one in iterations if one.step != last_step]
    return rest if _num_whole(rest) >= MIN_ITERATIONS else iterations


def _num_whole(iterations: Iterable[Iteration]) -> int:
    return sum(not one.is_empty for one in iterations)


def without_warm_up(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Return the latest `MAX_ITERATIONS` iterations, without the run's warm-up (compiling of
    kernels, filling of caches). Warm-up is at most the first `MAX_WARM` iterations, as long as
    rollout or training takes more than `WARM_FACTOR` times the median of at least two later
    iterations of the same kind; empty iterations before such a one count as well."""
    first = 0
    for number, one in enumerate(iterations[:MAX_WARM]):
        if _is_warm_up(iterations, number):
            first = number + 1
        elif not one.is_empty:
            break
    return [*iterations[first:]][-MAX_ITERATIONS:]


def _is_warm_up(iterations: Sequence[Iteration], first: int) -> bool:
    one = iterations[first]
    later = [other for other in iterations[first + 1 :] if other.kind == one.kind]
    return len(later) > 1 and (
        one.rollout_s > WARM_FACTOR * statistics.median(other.rollout_s for other in later)
        or one.train_s > WARM_FACTOR * statistics.median(other.train_s for other in later)
    )


def rounds_of(iterations: Sequence[Iteration]) -> tuple[RoundTimes, ...]:
    """Return the kinds of round of these iterations, each with its share and its times."""
    by_kind: dict[str, list[Times]] = {}
    for one in iterations:
        by_kind.setdefault(one.kind, []).append(one.times)
    return tuple(
        RoundTimes(
            kind=kind,
            share=len(own) / len(iterations),
            rollout_s=tuple(one.rollout_s for one in own),
            train_s=tuple(one.train_s for one in own),
            between_s=statistics.fmean(one.between_s for one in own),
            after_s=statistics.fmean(one.after_s for one in own),
        )
        for kind, own in sorted(by_kind.items(), key=lambda item: -len(item[1]))
    )
