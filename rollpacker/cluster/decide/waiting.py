"""Orders the jobs that wait for nodes: which is next, and which a quota keeps waiting.

    place in the queue = time of submission - ageing x priority + ageing x share

The lowest comes first. One unit of priority is worth `ageing` seconds of waiting: a head start and
no rank, so that a job is overtaken only by jobs that come soon after it, and none starves. `share`
(0 to 1) is how much of the owner's quota its running jobs use, in the phase where that is more; an
owner without a quota counts as one whose quota is all devices.

A quota bounds the devices that an owner's running jobs asked for, shared or not. A job beyond it
waits and holds up no other job. A job within it that fits on no nodes holds up all jobs after it: a
smaller job that overtook it would keep nodes from being free for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rollpacker.cluster.decide.job import ClusterJob, Phase
from rollpacker.cluster.decide.nodes import FEWER, Pool

AGEING_H = 4.0
"""Hours of waiting that one unit of priority is worth."""
PHASES: tuple[Phase, ...] = ("rollout", "train")
Devices = Mapping[Phase, int]
"""Numbers of devices, by phase."""


class Waiting:
    """The jobs that wait for nodes, and the order in which they start."""

    def __init__(
        self,
        pools: Sequence[Pool],
        quotas: Mapping[str, Devices] | None = None,
        ageing_s: float = AGEING_H * 3600,
    ) -> None:
        """`quotas`: most devices by owner and phase; no bound where one is absent. `ageing_s`:
        seconds of waiting that a unit of priority is worth."""
        assert math.isfinite(ageing_s) and ageing_s >= 0, ageing_s
        self.grow(pools)
        self._quotas = quotas or {}
        self._ageing_s = ageing_s
        self._jobs: dict[str, tuple[ClusterJob, float]] = {}
        """The waiting jobs by name, the first to come first, each with the time when it came."""

    def grow(self, pools: Sequence[Pool]) -> None:
        """Record the pools' present sizes, of which an owner without a quota may use all."""
        self._all = {
            phase: sum(pool.nodes * pool.devices_per_node for pool in pools if pool.phase == phase)
            for phase in PHASES
        }

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[ClusterJob]:
        """Iterate over the waiting jobs in the order in which they came."""
        return iter([job for job, _ in self._jobs.values()])

    def add(self, job: ClusterJob, at_s: float) -> None:
        """Add a job that came at `at_s`. Raises `ValueError` if it needs more than its quota."""
        check_quota(job, self._quotas)
        self._jobs[job.name] = (job, at_s)

    def remove(self, name: str) -> None:
        """Remove the waiting job of this name, if there is one."""
        self._jobs.pop(name, None)

    def take(self, name: str) -> float:
        """Remove a waiting job that was given nodes. Returns the time in seconds when it came."""
        return self._jobs.pop(name)[1]

    def behind(self, job: ClusterJob, running: Sequence[tuple[ClusterJob, float]]) -> list[str]:
        """Return the running jobs of lower priority that would start after the waiting `job` if
        they waited too, the last first. `running`: running jobs with the times when they came."""
        used = _used(one for one, _ in running)
        behind: list[tuple[float, str]] = []
        for one, at_s in running:
            if one.priority < job.priority:
                without = {**used, one.owner: _less(used[one.owner], one)}
                came_s = self._came_s(self._jobs[job.name], without)
                behind_s = self._came_s((one, at_s), without) - came_s
                if behind_s > 0:
                    behind.append((behind_s, one.name))
        return [name for _, name in sorted(behind, reverse=True)]

    def in_order(self, running: Iterable[ClusterJob]) -> list[ClusterJob]:
        """Return all waiting jobs, the next to start first. `running`: the running jobs, by which
        it is known how much of its quota each owner uses."""
        return self._in_order(_used(running)) if self._jobs else []

    def next(self, running: Iterable[ClusterJob]) -> ClusterJob | None:
        """Return the first waiting job that its owner's quota lets start; None if no job may."""
        if not self._jobs:
            return None
        used = _used(running)
        return next((job for job in self._in_order(used) if self._is_within(job, used)), None)

    def why_not_next(self, name: str, running: Iterable[ClusterJob]) -> str:
        """Return in words why a waiting job would get no nodes even if some were free. Empty if it
        would get them."""
        if name not in self._jobs:
            return ""
        running = list(running)
        used, (job, _) = _used(running), self._jobs[name]
        for phase, most in self._quotas.get(job.owner, {}).items():
            has, more = used.get(job.owner, {}).get(phase, 0), devices(job, phase)
            if has + more > most:
                return (
                    f"{job.owner}'s running jobs have {has} of the {most} {phase} devices of "
                    f"quotas.{job.owner}, and it needs {more}"
                )
        first = self.next(running)
        if first is None or first.name == name:
            return ""
        return f"{first.name} comes first, which fits nowhere now, and nobody overtakes it"

    def _came_s(self, entry: tuple[ClusterJob, float], used: Mapping[str, Devices]) -> float:
        job, at_s = entry
        return at_s - self._ageing_s * (job.priority - self._share(job.owner, used))

    def _in_order(self, used: Mapping[str, Devices]) -> list[ClusterJob]:
        entries = sorted(self._jobs.values(), key=lambda entry: self._came_s(entry, used))
        return [job for job, _ in entries]

    def _share(self, owner: str, used: Mapping[str, Devices]) -> float:
        """Return the share of its quota that an owner uses, 0 to 1. `used`: devices by owner."""
        if owner not in used:
            return 0.0
        most = {**self._all, **self._quotas.get(owner, {})}
        return min(max(used[owner][phase] / most[phase] for phase in PHASES), 1.0)

    def _is_within(self, job: ClusterJob, used: Mapping[str, Devices]) -> bool:
        has = used.get(job.owner, {})
        return all(
            has.get(phase, 0) + devices(job, phase) <= most
            for phase, most in self._quotas.get(job.owner, {}).items()
        )


def check_quota(job: ClusterJob, quotas: Mapping[str, Devices]) -> None:
    """Raises `ValueError` for a job that asks for more than its owner's whole quota."""
    for phase, most in quotas.get(job.owner, {}).items():
        if devices(job, phase) > most:
            raise ValueError(
                f"job {job.name} needs {devices(job, phase)} {phase} devices, and {job.owner} may "
                f"have {most}: lower its {FEWER[phase]} or raise quotas.{job.owner}.{phase}"
            )


def devices(job: ClusterJob, phase: Phase) -> int:
    """Return the number of devices of this phase that the job asks for."""
    return job.rollout_devices if phase == "rollout" else job.train_devices


def _used(running: Iterable[ClusterJob]) -> dict[str, dict[Phase, int]]:
    """Return the numbers of devices that running jobs have asked for, by owner and phase."""
    used: dict[str, dict[Phase, int]] = {}
    for job in running:
        has = used.setdefault(job.owner, dict.fromkeys(PHASES, 0))
        for phase in PHASES:
            has[phase] += devices(job, phase)
    return used


def _less(has: Devices, job: ClusterJob) -> dict[Phase, int]:
    return {phase: has[phase] - devices(job, phase) for phase in PHASES}
