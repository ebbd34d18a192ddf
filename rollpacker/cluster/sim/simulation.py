"""Simulates jobs on shared pools in virtual time; the core's `Cluster` decides.

A job is submitted, started (cold) on its nodes, and does one iteration after another: it asks for
rollout nodes, leaves them, waits for rewards, asks for training nodes, leaves them, and commits. A
job's n-th iteration takes the same under every policy: only waits, switches and nodes differ.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import (
    Asked,
    Close,
    Command,
    Committed,
    Ended,
    Event,
    Grant,
    Left,
    Open,
    Start,
    Stop,
    Submitted,
)
from rollpacker.cluster.decide.group import Sharing
from rollpacker.cluster.decide.job import ClusterJob, Phase, Times
from rollpacker.cluster.decide.nodes import Node, Pool
from rollpacker.cluster.decide.placement import Policy
from rollpacker.cluster.sim.jobs import Arrival
from rollpacker.cluster.sim.policies import NO_TURNS, policy
from rollpacker.cluster.sim.result import Bill, JobResult, PolicyResult
from rollpacker.cluster.sim.spec import ClusterSpec, seconds_scale

Told = Callable[[int], None]
"""Function that shows progress: it is called at each job's end with the number of ended jobs."""


@dataclass(slots=True)
class _Life:
    """The simulation's record of a job that was submitted and has not ended."""

    job: ClusterJob
    submitted_s: float
    rng: random.Random
    rollout_nodes: tuple[Node, ...] = ()
    num_train_nodes: int = 0
    train_pool: str = ""
    times: Times = field(default_factory=lambda: Times(0, 0, 0, 0))
    sharing: Sharing = field(default_factory=Sharing)
    """How the job's times change because it shares nodes, fixed when its present rollout begins."""
    token: int = 0
    phase: Phase = "rollout"
    asked_s: float = 0.0
    steps: int = 0
    waited_s: float = 0.0
    seen: Times = field(default_factory=lambda: Times(0, 0, 0, 0))
    """Seconds of the present iteration by phase, less waits and moves onto devices and off."""
    has_moved: bool = False
    """Whether the cluster moved or stopped the job at its last commit: no rollout follows yet."""
    stopped_s: float | None = None
    """Time in seconds when the cluster stopped the job, to wait for nodes. None if it has nodes."""


class Simulation:
    """The simulation of all jobs under one policy, which places them. `run` returns the outcome."""

    def __init__(
        self,
        spec: ClusterSpec,
        arrivals: Sequence[Arrival],
        name: str,
        chosen: Policy | None = None,
    ) -> None:
        """`name`: the policy's; pools depend on it, too (`pools_of`). `chosen`: policy that places
        the jobs; None: the one of that name."""
        self._spec = spec
        self._arrivals = arrivals
        self._pools = pools_of(spec, name)
        self.cluster = Cluster(
            self._pools,
            chosen or policy(name, spec),
            link_gb_s=math.inf if name == "colocated" else spec.link_gb_s,
            max_group=1 if name in NO_TURNS else spec.max_group,
            quotas=spec.core_quotas(),
            ageing_s=spec.ageing_h * 3600,
        )
        self._colocated = name == "colocated"
        self._bill = Bill(self._pools)
        self._lives: dict[str, _Life] = {}
        self._results: list[JobResult] = []
        self._heap: list[tuple[float, int, str, object]] = []
        self._num_pushed = 0
        self.now_s = 0.0

    def run(self, told: Told = lambda done: None) -> PolicyResult:
        """Run until the last job has ended. Raises `ValueError` for a job that fits on no nodes."""
        for arrival in self._arrivals:
            self._push(arrival.at_s, "arrive", arrival)
        while self._heap:
            self.now_s, _, what, about = heapq.heappop(self._heap)
            self._happen(what, about)
            if what == "end":
                told(len(self._results))
        assert len(self._results) == len(self._arrivals), self.cluster.waiting
        self._bill.pass_until(self.now_s)
        result = self._bill.result(self._results, hours_alone(self._arrivals))
        return only_trained(result, self._pools) if self._colocated else result

    def _push(self, at_s: float, what: str, about: object) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_s, self._num_pushed, what, about))

    # -- what happens ------------------------------------------------------------------

    def _happen(self, what: str, about: object) -> None:
        now_s = self.now_s
        if isinstance(about, Arrival):
            job = about.job
            rng = random.Random(f"iterations/{self._spec.seed}/{job.name}")
            self._lives[job.name] = _Life(job, now_s, rng)
            self._tell(Submitted(now_s, job))
            return
        assert isinstance(about, str)
        life = self._lives[about]
        if what == "leave":
            self._leave(life)
        elif what == "ask rollout" or what == "ask train":
            life.phase, life.asked_s = "rollout" if what == "ask rollout" else "train", now_s
            self._tell(Asked(now_s, about, life.phase))
        elif what == "commit":
            self._commit(life)
        else:
            assert what == "end"
            self._end(life)

    def _leave(self, life: _Life) -> None:
        name, times = life.job.name, life.times
        self._tell(Left(self.now_s, name, life.phase, life.token))
        if life.phase == "rollout":
            life.waited_s += life.sharing.tail_move_s
            self._push(self.now_s + life.sharing.after_rollout_s(times), "ask train", name)
        else:
            self._push(self.now_s + times.after_s, "commit", name)

    def _commit(self, life: _Life) -> None:
        name = life.job.name
        life.steps += 1
        if life.steps == life.job.steps:
            self._push(self.now_s, "end", name)
            return
        life.has_moved = False
        self._tell(Committed(self.now_s, name, sum(life.seen), life.seen))
        if not life.has_moved:
            self._push(self.now_s, "ask rollout", name)

    def _end(self, life: _Life) -> None:
        name = life.job.name
        elapsed_s = self.now_s - life.submitted_s
        slowdown = elapsed_s / (elapsed_s - life.waited_s)
        self._results.append(JobResult(name, life.job.slo, slowdown))
        self._tell(Ended(self.now_s, name))
        del self._lives[name]

    # -- what the core says ------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for command in self.cluster.handle(event):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Open() | Close():
                self._bill.pass_until(self.now_s)
                for node in command.nodes:
                    self._bill.change(node.pool, 1 if isinstance(command, Open) else -1)
            case Start():
                life = self._lives[command.job]
                life.has_moved = True
                if life.steps == 0:
                    life.waited_s += self.now_s - life.submitted_s
                else:
                    since_s = self.now_s if life.stopped_s is None else life.stopped_s
                    life.waited_s += self.now_s - since_s + life.job.cold_start_s
                    life.stopped_s = None
                life.rollout_nodes = command.rollout_nodes
                life.train_pool = command.train_nodes[0].pool
                life.num_train_nodes = len(command.train_nodes)
                self._push(self.now_s + life.job.cold_start_s, "ask rollout", command.job)
            case Stop():  # at its commit: another job has its nodes
                life = self._lives[command.job]
                life.has_moved, life.stopped_s = True, self.now_s
            case Grant():
                self._granted(self._lives[command.job], command)

    def _granted(self, life: _Life, grant: Grant) -> None:
        assert life.phase == grant.phase
        life.token = grant.token
        life.sharing = sharing = self.cluster.sharing(life.job.name)
        if grant.phase == "rollout":
            life.times = self._times(life)
            life.seen = sharing.here(life.times)
            held_s = sharing.holds(life.times).rollout_s
            switch_s, pool = sharing.rollout_switch_s, life.rollout_nodes[0].pool
            count = len(life.rollout_nodes)
        else:
            times = life.times
            life.seen = life.seen._replace(train_s=sharing.here(times).train_s)
            held_s = sharing.holds(times).train_s
            switch_s, pool = sharing.train_switch_s, life.train_pool
            count = life.num_train_nodes
        life.waited_s += self.now_s - life.asked_s + switch_s
        self._bill.work(pool, (held_s - switch_s) * count)
        self._push(self.now_s + held_s, "leave", life.job.name)

    def _times(self, life: _Life) -> Times:
        """Draw the times of the job's next iteration."""
        times = life.job.draw(life.rng.random(), life.rng.random())
        grown = 1 + self._spec.jobs.growth * life.steps / life.job.steps
        return times.longer(grown)


def pools_of(spec: ClusterSpec, name: str) -> tuple[Pool, ...]:
    """Return the pools for the policy `name`. Under "colocated", jobs roll out on their training
    nodes: the rollout pool is the cheapest training pool again, at no price, at its GPU's speed."""
    pools = spec.core_pools()
    if name != "colocated":
        return pools
    rollout = next(pool for pool in spec.pools if pool.phase == "rollout")
    train = [pool for pool in spec.pools if pool.phase == "train"]
    cheapest = min(train, key=lambda pool: pool.price_per_device_h)
    own = next(pool for pool in pools if pool.name == cheapest.name)
    again = replace(
        own,
        name=f"{own.name} (rollout)",
        phase="rollout",
        price_per_device_h=0.0,
        host_memory_gib=math.inf,
        scale=seconds_scale("rollout", rollout.gpu, cheapest.gpu),
    )
    return (again, own)


def only_trained(result: PolicyResult, pools: Sequence[Pool]) -> PolicyResult:
    """Return the result of jobs that train and roll out on the same nodes, without the rollout
    pool, a stand-in for the training pool (`pools_of`): its busy share is added to the latter's."""
    again, own = pools
    busy = result.busy[again.name] + result.busy[own.name]
    return replace(
        result, peak_devices={own.name: result.peak_devices[own.name]}, busy={own.name: busy}
    )


def hours_alone(arrivals: Sequence[Arrival]) -> float:
    """Return the hours from the first arrival to the last job's end if no job had to wait."""
    ends = (one.at_s + one.job.cold_start_s + alone_s(one.job) for one in arrivals)
    return (max(ends) - arrivals[0].at_s) / 3600


def alone_s(job: ClusterJob) -> float:
    """Return the seconds of all iterations of a job, each of mean length."""
    return job.steps * math.fsum(job.mean)
