"""The policy of RollMux (arXiv 2512.11306), Algorithm 1, as it was published."""

from __future__ import annotations

from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.layout import Layout
from rollpacker.cluster.decide.placement import Choice, Rest, State, Stays


class AsPublished(Stays):
    """Algorithm 1 of RollMux, for the longest iterations, by price per hour; saturated groups are
    left alone, and none is made over-saturated (its Fig. 6)."""

    tail_release = True

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        best: tuple[float, Choice] | None = None
        for number, standing in state.groups.items():
            if not may_share(standing.layout, job):
                continue
            cycle, load, _ = standing.layout.bound()
            if load >= cycle:
                continue
            before = standing.layout.price_per_h
            for choice in state.in_group(number, job):
                delta = choice.layout.price_per_h - before
                if (best is None or delta < best[0]) and self._is_feasible(choice.layout):
                    best = (delta, choice)
        for choice in state.alone(job):
            delta = choice.layout.price_per_h
            if best is None or delta < best[0]:
                best = (delta, choice)
        return None if best is None else best[1]

    def _is_feasible(self, layout: Layout) -> bool:
        cycle, load, alone_s = layout.bound()
        return load <= cycle and all(
            max(cycle, load) <= job.slo * seconds
            for job, seconds in zip(layout.jobs, alone_s, strict=True)
        )


def may_share(layout: Layout, job: ClusterJob) -> bool:
    """Quickly: whether the longest iteration is within the SLO of the shortest, both ways, of the
    longest iterations and in round robin. Seconds of the profile: pools of other GPUs have another
    scale for all of a group."""
    seconds = job.worst.rollout_s + job.worst.train_s
    limit = job.slo * seconds
    rollout, train = layout.rollout_pool.scale, layout.train_pool.scale
    lowest = min(rollout, train) * _dilution(layout, job)
    highest = max(rollout, train)
    for one in layout.jobs:
        other = one.worst.rollout_s + one.worst.train_s
        if other * lowest > limit * highest or seconds * lowest > one.slo * other * highest:
            return False
    return True


def _dilution(layout: Layout, job: ClusterJob) -> float:
    """How much faster one of them may train here than with the devices that it asked for."""
    devices = layout.num_train_nodes * layout.train_pool.devices_per_node
    return min(one.train_devices for one in (*layout.jobs, job)) / devices
