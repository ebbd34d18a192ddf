"""The turns on the nodes of one group (jobs that share nodes): jobs ask for a phase's nodes, are
granted all of them at once, and leave them.

A job holds the nodes of one phase at most, so no job that holds nodes waits for any: there is no
circular wait. There are three orders of turns:

    round_robin:  Each job has one turn after the other, in one fixed order on every node; a job
                  that has not come yet is waited for (`awaited`). `group.period_s` computes the
                  seconds in which each has a turn. What a job asks for outside of its turn (a
                  second rollout before its training, for a refill or an evaluation; a training
                  before its rollout) is granted first come, first served, and counts as no turn.
    first_come:   The job that asked first comes first. Nobody overtakes on a node that an earlier
                  job waits for, so that a job of many nodes does not starve.
    least_slack:  As first_come, but the job that is closest to breaking its SLO comes first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.cluster.decide.job import Phase

Order = Literal["round_robin", "first_come", "least_slack"]
ORDERS: tuple[Order, ...] = ("round_robin", "first_come", "least_slack")

TRAINING = "training"
"""Name that stands for all training nodes of a group together: the job that trains holds all."""

Node = Hashable


@dataclass(slots=True)
class _Member:
    rank: tuple[int, int]
    """Place of the job in the cyclic order of turns, the lowest first: minus its number of rollout
    nodes, then its number among all that have joined."""
    nodes: Mapping[Phase, tuple[Node, ...]]
    slo: float
    turns: dict[Phase, int]
    """Number of turns that the job has had, by phase. A new job begins with the highest number of
    the others: it must not have many turns in a row."""
    waits_for: Phase | None = None
    is_extra: bool = False
    """Whether the phase that the job asks for is outside of its turn, such as a further rollout."""
    holds: Phase | None = None
    asked: int = 0
    """Number of the job's last ask for nodes among all asks of its group. 0: none so far."""
    asked_s: float = 0.0
    since_s: float = 0.0
    """Time in seconds of the job's first ask for nodes."""
    away_since_s: float = 0.0
    """Time in seconds when the job last left nodes, or stopped waiting for some."""
    waited_s: float = 0.0


@dataclass(slots=True)
class _Seat:
    """A rollout node, or all training nodes together, for which jobs take turns."""

    members: list[_Member] = field(default_factory=list)
    """The jobs that take turns on the node, whether they hold it or not."""
    holder: str | None = None

    def due(self, phase: Phase) -> _Member:
        """Return the job whose turn it is in round robin: of those on this node, the one that has
        had the fewest turns of the phase."""
        return min(self.members, key=lambda one: (one.turns[phase], one.rank))


class Turns:
    """The turns of one group of jobs that share nodes, as jobs ask for nodes and leave them."""

    def __init__(self, order: Order = "round_robin") -> None:
        self._order: Order = order
        self._members: dict[str, _Member] = {}
        self._seats: dict[Node, _Seat] = {TRAINING: _Seat()}
        self._waiting: dict[str, _Member] = {}
        self._num_asked = 0
        self._num_joined = 0

    @property
    def order(self) -> Order:
        return self._order

    @order.setter
    def order(self, order: Order) -> None:
        """Set the order of turns. A change to round robin begins with equal counts for all jobs."""
        if order == "round_robin" != self._order:
            for one in self._members.values():
                is_between = one.turns["rollout"] > one.turns["train"]
                one.turns = {"rollout": 1, "train": 0 if is_between else 1}
        self._order = order

    @property
    def jobs(self) -> Sequence[str]:
        return list(self._members)

    def holder(self, node: Node) -> str | None:
        """Return the name of the job that holds this node, or None if the node is free."""
        seat = self._seats.get(node)
        return None if seat is None else seat.holder

    def join(self, job: str, rollout_nodes: Sequence[Node], slo: float) -> None:
        """Let the job take part in the turns, first with a rollout. In the cyclic order jobs of
        more rollout nodes come earlier. The job's first turn is one that no other job has begun."""
        assert job not in self._members and rollout_nodes
        self._num_joined += 1
        rank = (-len(rollout_nodes), self._num_joined)
        nodes: dict[Phase, tuple[Node, ...]] = {
            "rollout": tuple(rollout_nodes),
            "train": (TRAINING,),
        }
        begun = max((one.turns["rollout"] for one in self._members.values()), default=0)
        member = _Member(rank=rank, nodes=nodes, slo=slo, turns={"rollout": begun, "train": begun})
        self._members[job] = member
        for node in (*rollout_nodes, TRAINING):
            self._seats.setdefault(node, _Seat()).members.append(member)

    def remove(self, job: str, now_s: float) -> list[tuple[str, Phase]]:
        """Take the job out of the turns, whatever it waits for or holds. Returns the grants to
        others, as pairs of job and phase."""
        member = self._members.pop(job)
        self._waiting.pop(job, None)
        for node in (*member.nodes["rollout"], TRAINING):
            seat = self._seats[node]
            seat.members = [one for one in seat.members if one is not member]
            if seat.holder == job:
                seat.holder = None
            if not seat.members and node != TRAINING:
                del self._seats[node]
        return self._grant(now_s)

    def ask(self, job: str, phase: Phase, now_s: float) -> list[tuple[str, Phase]]:
        """Record that the job wants a phase's nodes. Returns the grants: pairs of job and phase."""
        member = self._members[job]
        assert member.waits_for is None and member.holds is None, job
        if member.asked == 0:
            member.since_s = now_s
        self._num_asked += 1
        self._waiting[job] = member
        has_rolled_out = member.turns["rollout"] > member.turns["train"]
        member.is_extra = (phase == "rollout") == has_rolled_out
        member.waits_for, member.asked, member.asked_s = phase, self._num_asked, now_s
        return self._grant(now_s)

    def withdraw(self, job: str, now_s: float) -> list[tuple[str, Phase]]:
        """Record that the job wants no nodes now. Returns the grants: pairs of job and phase."""
        if self._waiting.pop(job, None) is not None:
            self._members[job].waits_for = None
            self._members[job].away_since_s = now_s
        return self._grant(now_s)

    def leave(self, job: str, phase: Phase, now_s: float) -> list[tuple[str, Phase]]:
        """Record that the job has left its nodes. Returns the grants: pairs of job and phase."""
        member = self._members[job]
        assert member.holds == phase, (job, phase, member.holds)
        member.holds, member.away_since_s = None, now_s
        for node in member.nodes[phase]:
            self._seats[node].holder = None
        return self._grant(now_s)

    def awaited(self, now_s: float) -> dict[str, float]:
        """Return the jobs whose turn it is on free nodes, but which have not come while others wait
        for these nodes, with the seconds since each last held or wanted nodes."""
        if self._order != "round_robin":
            return {}
        away = {
            id(one): job
            for job, one in self._members.items()
            if one.holds is None and one.waits_for is None
        }
        found = dict[str, float]()
        for member in self._waiting.values():
            phase = member.waits_for
            assert phase is not None
            for node in () if member.is_extra else member.nodes[phase]:
                due = self._seats[node].due(phase)
                if self._seats[node].holder is None and id(due) in away:
                    found[away[id(due)]] = now_s - due.away_since_s
        return found

    def kept_for(self, job: str) -> str | None:
        """Return another job whose turn it is on the nodes that this job waits for, if all are
        free. None if it is this job's own turn, or if this job waits for nothing."""
        member = self._waiting.get(job)
        if member is None or member.waits_for is None or member.is_extra:
            return None
        phase = member.waits_for
        seats = [self._seats[node] for node in member.nodes[phase]]
        if self._order != "round_robin" or any(seat.holder for seat in seats):
            return None
        due = [seat.due(phase) for seat in seats]
        others = (name for one in due for name, who in self._members.items() if who is one)
        return next((name for name in others if name != job), None)

    # -- who is next -------------------------------------------------------------------

    def _grant(self, now_s: float) -> list[tuple[str, Phase]]:
        if not self._waiting:
            return []
        if len(self._waiting) == 1:  # in all orders the same, and most often so
            ((job, member),) = self._waiting.items()
            return [self._give(job, member, now_s)] if self._is_due(member) else []
        waiting = [*self._waiting.items()]
        if self._order == "round_robin":
            return self._grant_round_robin(waiting, now_s)
        if self._order == "first_come":
            waiting.sort(key=lambda pair: pair[1].asked)
        elif len(waiting) > 1:
            waiting.sort(key=lambda pair: (_slack(pair[1], now_s), pair[1].asked))
        granted, blocked = [], set[Node]()
        for job, member in waiting:
            assert member.waits_for is not None
            nodes = member.nodes[member.waits_for]
            if any(node in blocked or self._seats[node].holder for node in nodes):
                blocked.update(nodes)
            else:
                granted.append(self._give(job, member, now_s))
        return granted

    def _is_due(self, member: _Member) -> bool:
        """Whether the job may have the nodes that it waits for now: they are free and, in round
        robin, it is its turn on them."""
        phase = member.waits_for
        assert phase is not None
        is_in_turn = self._order == "round_robin" and not member.is_extra
        for node in member.nodes[phase]:
            seat = self._seats[node]
            if seat.holder is not None or (is_in_turn and seat.due(phase) is not member):
                return False
        return True

    def _grant_round_robin(
        self, waiting: Sequence[tuple[str, _Member]], now_s: float
    ) -> list[tuple[str, Phase]]:
        granted, blocked = [], set[Node]()
        for job, member in waiting:
            assert member.waits_for is not None
            nodes, phase = member.nodes[member.waits_for], member.waits_for
            seats = [self._seats[node] for node in nodes]
            if not (member.is_extra or all(seat.due(phase) is member for seat in seats)):
                continue
            if blocked.isdisjoint(nodes) and all(seat.holder is None for seat in seats):
                granted.append(self._give(job, member, now_s))
            else:
                blocked.update(nodes)
        return granted

    def _give(self, job: str, member: _Member, now_s: float) -> tuple[str, Phase]:
        phase = member.waits_for
        assert phase is not None
        for node in member.nodes[phase]:
            seat = self._seats[node]
            assert seat.holder is None, (node, seat.holder)
            seat.holder = job
        del self._waiting[job]
        member.waits_for, member.holds = None, phase
        member.turns[phase] += not member.is_extra
        member.waited_s += max(now_s - member.asked_s, 0.0)
        return job, phase


def _slack(member: _Member, now_s: float) -> float:
    """Return the seconds for which the job's SLO still lets it wait; below 0: it is broken."""
    elapsed_s = now_s - member.since_s
    waited_s = member.waited_s + now_s - member.asked_s
    return (member.slo - 1) * (elapsed_s - waited_s) - waited_s
