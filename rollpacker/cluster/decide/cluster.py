"""The cluster's decisions: which nodes each job gets, and whose turn it is on shared ones.

`Cluster.handle` takes in an event and returns commands:

    Submitted:   Start on nodes that the policy chose (Open, if some were free), or the job waits.
    Asked:       Grant of a phase's nodes to the job, now or when its turn comes.
    Left:        Grant of the nodes to the next job.
    Committed:   An iteration is counted; the job may Start elsewhere, or Stop for a waiting job.
                 After its last iteration it takes no part in the turns.
    Ended:       Close of nodes that no job needs, and Start of jobs that waited for nodes.
    StayedAway:  The job, for which others wait, takes no part in the turns until it asks again.
    Lost:        Start once more, or GiveUp after too many losses.
    Drained:     Its jobs leave the node at their next commit, or at once if they have still to be
                 started there and it has no host: Start elsewhere, or Stop, and the job waits.
    Restored, Grown:  Start of jobs that waited for nodes.
    Cancelled:   Stop; the job's nodes are free once it has ended.

Jobs that share nodes are a group. In a group `turns.py` decides which job is next, and a policy
chooses where a job goes (`placement.py`). The caller that carries out the commands (a simulation, a
service) has the clock, and gives each event its time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollpacker.cluster.decide.cluster_turns import ClusterTurns, Running
from rollpacker.cluster.decide.events import (
    Asked,
    Cancelled,
    Close,
    Command,
    Committed,
    Drained,
    Ended,
    Event,
    GiveUp,
    Grown,
    Left,
    Lost,
    Open,
    Restored,
    Start,
    StayedAway,
    Stop,
    Submitted,
    Withdrew,
    leaving_first,
)
from rollpacker.cluster.decide.forecast import Rest
from rollpacker.cluster.decide.group import Sharing
from rollpacker.cluster.decide.job import ClusterJob, Times
from rollpacker.cluster.decide.learned import LearnedTimes
from rollpacker.cluster.decide.nodes import Nodes, Pool, check_job
from rollpacker.cluster.decide.placement import Choice, Policy, State
from rollpacker.cluster.decide.room import (
    Late,
    bearable,
    by_moving,
    by_stopping,
    pays,
    restarted,
)
from rollpacker.cluster.decide.waiting import AGEING_H, Devices, Waiting


class Cluster:
    """All jobs of a cluster: decides which nodes they get, and whose turn it is on them."""

    def __init__(
        self,
        pools: Sequence[Pool],
        policy: Policy,
        *,
        link_gb_s: float = math.inf,
        max_group: int = 5,
        quotas: Mapping[str, Devices] | None = None,
        ageing_s: float = AGEING_H * 3600,
    ) -> None:
        """`link_gb_s`: 1e9 bytes/s of the link between pools, per device. `max_group`: most jobs
        that share nodes. `quotas`: most devices, by owner and phase; None: no bounds. `ageing_s`:
        seconds of waiting that one unit of a job's priority is worth."""
        self.state = State(nodes=Nodes(pools), link_gb_s=link_gb_s, max_group=max_group)
        self._policy = policy
        self._running: dict[str, Running] = {}
        self._turns = ClusterTurns(self._running)
        self._waiting = Waiting(pools, quotas, ageing_s)
        self._paused: dict[str, Running] = {}
        """Records of the jobs that ran, were stopped and wait for nodes again, by job name."""
        self._since_s: dict[str, float] = {}
        """Times in seconds since when jobs have waited for nodes, by the job's name. A job's entry
        goes when the job, on nodes again, asks for its first turn."""
        self._num_changes = 0
        """Number of changes of jobs or their nodes so far. A change makes earlier results old."""
        self._obstacle = ("", 0, "")
        """Last answer of `awaits`, to be used again until the cluster changes: the job, the number
        of changes at that time, and the text."""

    @property
    def pools(self) -> Sequence[Pool]:
        return [*self.state.nodes.pools.values()]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> Sequence[str]:
        """Names of the jobs that wait for nodes, the next one to start first."""
        return [job.name for job in self._waiting.in_order(self._running_jobs())]

    def sharing(self, job: str) -> Sharing:
        """Return what sharing its nodes costs a job at present: by how much its times grow."""
        layout = self.state.groups[self._running[job].group].layout
        number = next(n for n, one in enumerate(layout.jobs) if one.name == job)
        return layout.sharings[number]

    def overdue(self, at_s: float) -> list[str]:
        """Return the jobs that have been away between phases for too long while other jobs wait for
        them. The caller, which has the clock, reports each as `StayedAway`."""
        return self._turns.overdue(at_s)

    def kept_for(self, job: str) -> str | None:
        """Return another job whose turn it is on the nodes that this job waits for, if all are
        free. None if a job holds some of these nodes, or if it is no other job's turn."""
        return self._turns.kept_for(job)

    def awaits(self, job: str, at_s: float) -> str:
        """Return in words why a job that waits for nodes has none. Empty if the reason is unknown.
        Slowdowns in the text are those at the cluster's last change."""
        told = self._waiting.why_not_next(job, self._running_jobs())
        if told or self._obstacle[:2] == (job, self._num_changes):
            return told or self._obstacle[2]
        late = self._next_waiting(at_s)
        if late is not None and late.job.name == job:
            told = self._policy.obstacle(self.state, late.job, rest=late.rest)
            self._obstacle = (job, self._num_changes, told)
        return told

    def handle(self, event: Event) -> list[Command]:
        """Take in an event and return the commands that follow. Raises `ValueError` for a job that
        no nodes of the cluster can take."""
        match event:
            case Submitted():
                return self._submitted(event)
            case Asked():
                return self._turns.asked(event, self._since_s.pop(event.job, None))
            case Left():
                return self._turns.left(event)
            case Committed():
                return self._committed(event)
            case Ended():
                return self._ended(event)
            case Withdrew():
                return self._turns.withdrew(event)
            case StayedAway():
                return self._turns.stayed_away(event)
            case Lost():
                return self._lost(event)
            case Cancelled():
                return self._cancelled(event)
            case Drained():
                return self._drained(event)
            case Restored():
                self.state.nodes.restore(event.node)
                return self._start_waiting(event.at_s)
            case Grown():
                return self._grown(event)

    # -- coming and going --------------------------------------------------------------

    def _submitted(self, event: Submitted) -> list[Command]:
        job = event.job
        if job.name in self._running or any(one.name == job.name for one in self._waiting):
            raise ValueError(f"job {job.name} is here already: give each job a name of its own")
        check_job(job, self.pools)
        self._waiting.add(job, event.at_s)
        commands = self._start_waiting(event.at_s)
        if job.name not in self._running:
            self._since_s[job.name] = event.at_s
            self._num_changes += 1  # all look whether they can make room
        return commands

    def _wait_no_more(self, name: str) -> bool:
        found = any(one.name == name for one in self._waiting)
        self._waiting.remove(name)
        self._paused.pop(name, None)
        self._since_s.pop(name, None)
        return found

    def _start_waiting(self, at_s: float) -> list[Command]:
        """Start the waiting jobs in their order. At the first job that fits on no nodes this ends,
        since no other job overtakes it. Returns the commands."""
        commands: list[Command] = []
        while self._waiting:
            late = self._next_waiting(at_s)
            choice = late and self._policy.place(self.state, late.job, rest=late.rest)
            if late is None or choice is None:
                break
            commands += self._start(late, choice)
        return commands

    def _next_waiting(self, at_s: float) -> Late | None:
        """Return the next waiting job, with the iterations that it has left and the seconds that
        its SLO still lets it wait. None if no job may start."""
        job = self._waiting.next(self._running_jobs())
        if job is None:
            return None
        paused = self._paused.get(job.name)
        rest = None if paused is None else self._moved(paused).rest
        waited_s = at_s - self._since_s.get(job.name, at_s)
        if self._policy.makes_room and waited_s > 0:
            rest = rest or Rest(0.0, job.steps)
            rest = bearable(job, rest._replace(spare_s=rest.spare_s - waited_s))
        return Late(job, rest)

    def _running_jobs(self) -> list[ClusterJob]:
        return [one.job for one in self._running.values()]

    def _start(self, late: Late, choice: Choice) -> list[Command]:
        """Start a job, which was waiting or moves, on the chosen nodes. Returns the commands."""
        job, name = late.job, late.job.name
        settled = self.state.settle(
            job, choice, tail_release=self._policy.tail_release, rest=late.rest
        )
        self._turns.set_order(settled.group, choice.order)
        if name not in self._running:
            came_s = self._waiting.take(name)
            paused = self._paused.pop(name, None)
            self._running[name] = paused or Running(job, came_s)
            self._running[name].has_waited |= late.rest is not None
        running = self._running[name]
        running.group, running.rollout_nodes, running.joined = *settled[:2], False
        running.rest = late.rest
        self._num_changes += 1
        start = Start(name, *settled[:3])
        return [Open(settled.opened), start] if settled.opened else [start]

    def _ended(self, event: Ended) -> list[Command]:
        commands = self._let_go(event.job, event.at_s)
        return commands + self._start_waiting(event.at_s)

    def _let_go(self, job: str, at_s: float) -> list[Command]:
        """Remove a job, running or waiting, from the cluster. Returns the commands that follow."""
        running = self._running.get(job)
        if running is None:
            self._wait_no_more(job)
            return []
        commands = self._detach(running, at_s)
        del self._running[job]
        self._since_s.pop(job, None)
        return commands

    def _detach(self, running: Running, at_s: float) -> list[Command]:
        """Take a job off its group, its nodes and its turns. Returns the commands that follow."""
        job = running.job.name
        commands = self._turns.take_out(running, at_s)
        closed = self.state.unsettle(job, running.group)
        self._num_changes += 1
        if running.group not in self.state.groups:
            self._turns.end(running.group)
        return [*commands, Close(closed)] if closed else commands

    # -- losses, cancellations, nodes that go ------------------------------------------

    def _lost(self, event: Lost) -> list[Command]:
        running = self._running.get(event.job)
        if running is None:
            return []
        at_s = event.at_s
        if (event.counts and running.loses(at_s)) or running.is_cancelled:
            told: list[Command] = [] if running.is_cancelled else [GiveUp(event.job)]
            return told + self._let_go(event.job, at_s) + self._start_waiting(at_s)
        commands = self._turns.take_out(running, at_s)
        if self._is_drained(running):
            return commands + self._displace(running, at_s)
        standing = self.state.groups[running.group]
        return [
            *commands,
            Start(event.job, running.group, running.rollout_nodes, standing.train_nodes),
        ]

    def _cancelled(self, event: Cancelled) -> list[Command]:
        if self._wait_no_more(event.job):
            return self._start_waiting(event.at_s)
        running = self._running.get(event.job)
        if running is None or running.is_cancelled:
            return []
        running.is_cancelled = True
        return [Stop(event.job, "it was cancelled", of_cancelled=True)]

    def _drained(self, event: Drained) -> list[Command]:
        self.state.nodes.drain(event.node)
        for standing in self.state.groups.values():
            standing.changed()
        self._num_changes += 1
        commands: list[Command] = []
        for running in [*self._running.values()]:
            is_to_start = not (running.joined or running.is_cancelled)
            if not event.has_host and is_to_start and self._is_drained(running):
                commands += self._displace(running, event.at_s)
        return commands

    def _grown(self, event: Grown) -> list[Command]:
        self.state.nodes.grow(event.pool, event.nodes)
        self._waiting.grow(self.pools)
        self._num_changes += 1
        return self._start_waiting(event.at_s)

    def _is_drained(self, running: Running) -> bool:
        nodes = self.state.nodes
        train_nodes = self.state.groups[running.group].train_nodes
        return any(map(nodes.is_drained, (*running.rollout_nodes, *train_nodes)))

    def _displace(self, running: Running, at_s: float) -> list[Command]:
        """Take a job off drained nodes (closed to jobs), and start it on others or let it wait."""
        commands = self._detach(running, at_s)
        return commands + self._elsewhere(running, at_s, "its nodes are drained", at_s)

    def _elsewhere(self, running: Running, at_s: float, why: str, came_s: float) -> list[Command]:
        """Start a job that has left its nodes on other nodes. If none fit, stop it for the reason
        `why` and let it wait, as a job that came at `came_s` seconds."""
        job, late = running.job, self._moved(running)
        choice = self._policy.place(self.state, job, rest=late.rest)
        if choice is not None:
            return self._start(late, choice) + self._start_waiting(at_s)
        self._paused[job.name] = self._running.pop(job.name)
        self._waiting.add(job, came_s)
        self._since_s[job.name] = at_s
        return [Stop(job.name, why), *self._start_waiting(at_s)]

    @staticmethod
    def _moved(running: Running) -> Late:
        """Return the moved job, to be started, with the seconds that its SLO still lets it wait."""
        return Late(running.job, running.rest and restarted(running.job, running.rest))

    # -- iterations --------------------------------------------------------------------

    def _committed(self, event: Committed) -> list[Command]:
        running = self._running[event.job]
        iterations = running.commits(event)
        if iterations <= 0:
            # Until its process ends it holds nothing and wants nothing: nobody waits for its turn.
            # Where no step is said (by an earlier version, of which this is replayed) all did.
            is_away = event.step > 0 and not running.token
            return self._turns.take_out(running, event.at_s) if is_away else []
        if event.times is not None and self._policy.learns:
            self._learn(running, event.kind, event.times)
        standing = self.state.groups[running.group]
        elapsed_s = event.at_s - running.began_s
        rest = Rest(running.job.slo * running.work_s - elapsed_s, iterations)
        if running.has_waited:
            rest = bearable(running.job, rest)
        running.rest = standing.rest[event.job] = rest
        if running.is_cancelled or running.token:  # who holds nodes stays on them
            return []
        if self._is_drained(running):
            return self._displace(running, event.at_s)
        return self._look_around(running, rest, event.at_s)

    def _look_around(self, running: Running, rest: Rest, at_s: float) -> list[Command]:
        """At a job's commit (end of an iteration), find out whether room can be made for a waiting
        job, and whether this job is better elsewhere; return the commands. This is done once after
        each change of the cluster, and at every commit while an SLO of the group is in danger."""
        standing = self.state.groups[running.group]
        has_looked = running.looked == self._num_changes
        is_endangered = self._policy.is_endangered(standing)
        if has_looked and not is_endangered:
            return []
        running.looked = self._num_changes
        late = self._next_waiting(at_s) if self._policy.makes_room else None
        if late is not None and not has_looked:
            commands = self._make_room(running, rest, late, at_s)
            if commands:
                return commands
        choice = self._policy.move(self.state, running.group, running.job, rest=rest)
        if choice is None:
            return []
        if choice.group == running.group:
            self._turns.set_order(running.group, choice.order)
            standing.order = choice.order
            standing.changed()
            return []
        if late is not None and choice.takes_nodes and not is_endangered:
            return []  # a job waits for those
        commands = self._detach(running, at_s)
        return commands + self._start(self._moved(running), choice) + self._start_waiting(at_s)

    def _make_room(self, running: Running, rest: Rest, late: Late, at_s: float) -> list[Command]:
        """Make room for a waiting job (`late`) by moving or stopping this job, if that saves more
        than it costs. Returns the commands for that, or none."""
        state, job, number = self.state, running.job, running.group
        if pays(state, number, job, late.job, restarts=1):
            found = by_moving(self._policy, state, number, job, rest, late)
            if found:
                commands = self._detach(running, at_s)
                for one, choice in found:
                    commands += self._start(one, choice)
                return leaving_first(commands + self._start_waiting(at_s), job.name)
        there = [(one.job, one.came_s) for one in self._running.values() if not one.is_cancelled]
        behind = self._waiting.behind(late.job, there)
        if job.name in behind and pays(state, number, job, late.job, restarts=2):
            groups = {name: self._running[name].group for name in behind}
            stopped = by_stopping(self._policy, state, groups, late)
            if stopped is not None and stopped[0] == job.name:
                commands = self._detach(running, at_s) + self._start(late, stopped[1])
                why = f"{late.job.name} has a higher priority"
                commands += self._elsewhere(running, at_s, why, running.came_s)
                return leaving_first(commands, job.name)
        return []

    def _learn(self, running: Running, kind: str, times: Times) -> None:
        """Let an iteration's times correct the job's; if these change, its group is examined anew.
        `kind`: kind of the iteration's round (batch of generation), such as short or long."""
        if running.learned is None:
            running.learned = LearnedTimes(running.job)
        changed = running.learned.saw(kind, self.sharing(running.job.name).alone(times))
        if changed is not None:
            running.job = changed
            standing = self.state.groups[running.group]
            standing.layout = standing.layout.with_times(changed)
            standing.changed()
            for job in standing.layout.jobs:
                self._running[job.name].looked = -1
