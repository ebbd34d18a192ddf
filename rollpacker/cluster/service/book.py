"""What the service knows of its jobs besides what decisions need, computed from events and
commands.

When a service starts, the same code computes it anew from the stored events.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollpacker.cluster.decide.cluster_turns import LOSSES_S
from rollpacker.cluster.decide.events import (
    Asked,
    Cancelled,
    Command,
    Committed,
    Drained,
    Ended,
    Event,
    GiveUp,
    Grant,
    Grown,
    Left,
    Lost,
    Restored,
    Start,
    StayedAway,
    Stop,
    Submitted,
    Withdrew,
)
from rollpacker.cluster.decide.job import ClusterJob, Phase, Times
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.seats.mailbox import SERVICE
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, seat_variable
from rollpacker.cluster.service.runner import JobOrder

Facts = Mapping[str, Any]
NUM_NOTES = 200
NUM_LAST = 8
PAUSES_S = (0.0, 10.0, 60.0)
"""Seconds to wait before a job's restart after its first, second and each further loss since its
last commit (finished iteration): what ended the job may need time to pass."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Pattern for the name of a job, or of a cluster, whose folder has the same name."""


class Note(NamedTuple):
    """A line about what has happened, for people who watch the cluster."""

    at_s: float
    text: str


class Turn(msgspec.Struct):
    """The last request for a pool by a job's present start, and its grant if there is one."""

    ask: int = 0
    """Number of the request, as the job counts. 0 if this start has not asked yet."""
    phase: Phase | None = None
    """The phase whose pool the job waits for or holds. None if it does neither."""
    token: int = 0
    """Number (token) of the job's present grant. 0 if the job holds no pool."""
    since_s: float = 0.0
    """Time in seconds since when the job waits for the pool, or holds it."""
    purpose: str = ""
    """Why the job asked for the pool, in a word: round, step or start."""


class JobRecord(msgspec.Struct):
    """All that the service knows of one job since it was submitted."""

    job: ClusterJob
    facts: Facts
    """Values that came with the job when it was submitted, by name: command, folder and others."""
    submitted_s: float
    starts: list[Start]
    """All starts of the job so far; the n-th has the incarnation n, from 1."""
    num_before: int = 0
    """How many of `starts`, the first ones, were those of earlier, ended jobs of this name."""
    is_placed: bool = False
    """Whether the job has nodes, which are those of its last start."""
    turn: Turn = msgspec.field(default_factory=Turn)
    steps: int = 0
    work_s: float = 0.0
    waited_s: float = 0.0
    """Seconds for which the job waited for pools, for nodes, and for restarts of its processes."""
    waits_since_s: float = 0.0
    """Time in seconds since when the job waits for nodes, or for its start on the nodes it has."""
    lost_s: tuple[float, ...] = ()
    """Times in seconds when all the job's processes were lost, since its last iteration."""
    is_cancelled: bool = False
    outcome: str = ""
    """How the job ended: done, failed or cancelled. Empty if it has not ended."""
    ended_s: float = 0.0
    told: Facts = msgspec.field(default_factory=dict)
    """Values on how the job ended or was lost last, by name: exit code, last lines, reason."""

    @property
    def incarnation(self) -> int:
        return len(self.starts)

    @property
    def starts_from_s(self) -> float:
        """Time in seconds from which a lost job may start again (`PAUSES_S`); else 0."""
        num_lost = len(self.lost_s)
        return self.lost_s[-1] + PAUSES_S[min(num_lost, len(PAUSES_S)) - 1] if num_lost else 0.0

    def nodes(self, incarnation: int) -> frozenset[Node]:
        start = self.starts[incarnation - 1]
        return frozenset((*start.rollout_nodes, *start.train_nodes))


class Book:
    """All jobs that the service knows, by name, and notes on what has happened of late."""

    def __init__(self) -> None:
        self.records: dict[str, JobRecord] = {}
        self.notes: deque[Note] = deque(maxlen=NUM_NOTES)
        self.drained: set[Node] = set()
        self.hostless: set[Node] = set()
        """Nodes drained (closed to jobs) for want of a host (machine), until they have one."""

    def placed(self) -> Sequence[JobRecord]:
        """Return the records of all jobs that have nodes."""
        return [one for one in self.records.values() if one.is_placed]

    def write(self, event: Event, facts: Facts, commands: Sequence[Command]) -> None:
        """Record an event, and the commands that the cluster gave for it. `facts`: further values
        about the event that the cluster's decisions do not need."""
        at_s = event.at_s
        match event:
            case Submitted():
                self._submitted(event, facts)
            case Drained() | Restored():
                self._node(event, facts)
            case Grown():
                self.note(at_s, f"pool {event.pool} has {event.nodes} nodes now")
            case _ if event.job in self.records:
                self._of_job(self.records[event.job], event, facts)
        for command in commands:
            self._command(command, at_s)
        if isinstance(event, Cancelled):
            self._cancelled(self.records[event.job], at_s)

    def check_new(self, job: ClusterJob, facts: Facts) -> None:
        """Raises `ValueError` if the job's name is wrong, or another job has its run's folder."""
        if not NAME.fullmatch(job.name) or job.name == SERVICE:
            raise ValueError(
                f"{job.name!r} is no name for a job: a hundred letters, digits, -, _ and . at most"
            )
        for one in self.records.values():
            if not one.outcome and one.job.name != job.name and one.facts["run"] == facts["run"]:
                raise ValueError(
                    f"run {facts['run']} is here already, as job {one.job.name}: cancel that one, "
                    "or give this one another name=..."
                )

    def known(self, name: str) -> JobRecord:
        """Return the job's record. Raises `ValueError` if there is no job of this name."""
        record = self.records.get(name)
        if record is None:
            known = ", ".join(self.records) or "none"
            raise ValueError(f"there is no job {name}; there are {known}")
        return record

    def note(self, at_s: float, text: str) -> None:
        self.notes.append(Note(at_s, text))

    def has_told(self, text: str) -> bool:
        """Whether one of the last `NUM_LAST` notes (lines for people) says the same."""
        return text in [note.text for note in self.notes][-NUM_LAST:]

    # -- events ------------------------------------------------------------------------

    def _submitted(self, event: Submitted, facts: Facts) -> None:
        name = event.job.name
        before = self.records.pop(name, None)  # an ended one: starts are counted on
        starts = [] if before is None else before.starts
        self.records[name] = JobRecord(
            event.job,
            facts,
            event.at_s,
            starts,
            num_before=len(starts),
            steps=event.job.steps_before,
            waits_since_s=event.at_s,
        )
        self.note(event.at_s, f"{name} was submitted")

    def _of_job(self, record: JobRecord, event: Event, facts: Facts) -> None:
        at_s, turn, name = event.at_s, record.turn, record.job.name
        match event:
            case Asked():
                if turn.ask == 0:
                    record.waited_s += self._start_waited_s(record, at_s)
                record.turn = Turn(facts["ask"], event.phase, 0, at_s, facts["purpose"])
            case Left() | Withdrew():
                record.waited_s += self._awaits_s(record, at_s)
                record.turn = Turn(turn.ask)
            case Committed():
                last = _last_of(record)
                if event.numbers_otherwise and record.steps <= last:
                    told = f"has committed step {facts['step']}, and was submitted with {last}"
                    self.note(at_s, f"{name} {told}: its commits are counted as they come")
                record.steps, record.lost_s = int(facts["step"]), ()
                record.work_s += event.work_s
            case StayedAway():
                told = "is away for longer than it said: it is passed over until it asks again"
                self.note(at_s, f"{name} {told}")
            case Lost():
                self.note(at_s, f"{name} was lost: {facts['why']}")
                recent = (one for one in record.lost_s if at_s - one < LOSSES_S)
                record.told, record.lost_s = facts, (*recent, at_s)
                record.waited_s += self._awaits_s(record, at_s)
                record.turn, record.waits_since_s = Turn(), at_s
            case Ended():
                self._end(record, at_s, facts)

    def _start_waited_s(self, record: JobRecord, at_s: float) -> float:
        """Return the seconds from the job's start to its first request, which count as waiting. 0
        for a job that has neither done a step nor been lost before."""
        is_first = not record.told and record.steps == record.job.steps_before
        return 0.0 if is_first else at_s - record.waits_since_s

    def _awaits_s(self, record: JobRecord, at_s: float) -> float:
        """Return the seconds for which the job has been waiting for a pool or nodes so far."""
        if not record.is_placed:
            return at_s - record.waits_since_s
        return at_s - record.turn.since_s if record.turn.phase and not record.turn.token else 0.0

    def _end(self, record: JobRecord, at_s: float, facts: Facts) -> None:
        record.waited_s += self._awaits_s(record, at_s)
        record.outcome, record.told = str(facts["outcome"]), facts
        record.is_placed, record.turn, record.ended_s = False, Turn(), at_s
        why = f": {facts['why']}" if facts.get("why") else ""
        self.note(at_s, f"{record.job.name} {_ENDED[record.outcome]}{why}")

    def _cancelled(self, record: JobRecord, at_s: float) -> None:
        """Mark the job as cancelled. Without nodes it has ended; else it is to be stopped."""
        record.is_cancelled = True
        if not record.is_placed and not record.outcome:
            self._end(record, at_s, {"outcome": "cancelled"})

    def _node(self, event: Drained | Restored, facts: Facts) -> None:
        node = event.node
        self.hostless.discard(node)
        if isinstance(event, Drained):
            self.drained.add(node)
            if facts.get("until_it_has_a_host"):
                self.hostless.add(node)
        else:
            self.drained.discard(node)
        what = "gets no more jobs" if isinstance(event, Drained) else "may have jobs again"
        if node in self.hostless:
            what = "has no host, and gets no more jobs until it does"
        self.note(event.at_s, f"node {node_name(node)} {what}")

    # -- commands ----------------------------------------------------------------------

    def _command(self, command: Command, at_s: float) -> None:
        match command:
            case Start():
                self._start(self.records[command.job], command, at_s)
            case Grant():
                record = self.records[command.job]
                record.waited_s += at_s - record.turn.since_s
                record.turn.token, record.turn.since_s = command.token, at_s
            case Stop():
                record = self.records[command.job]
                if not command.of_cancelled:
                    record.is_placed, record.turn, record.waits_since_s = False, Turn(), at_s
                self.note(at_s, f"{command.job} is to stop: {command.reason}")
            case GiveUp():
                record = self.records[command.job]
                why = f"{record.told['why']}, once too often"
                if lines := str(record.told.get("last_lines", "")).strip().splitlines():
                    why += f". The last line that it printed: {lines[-1].strip()}"
                self._end(record, at_s, {**record.told, "outcome": "failed", "why": why})

    def _start(self, record: JobRecord, start: Start, at_s: float) -> None:
        if not record.is_placed:
            record.waited_s += at_s - record.waits_since_s
        record.starts.append(start)
        record.is_placed, record.turn, record.waits_since_s = True, Turn(), at_s
        nodes = " ".join(map(node_name, (*start.rollout_nodes, *start.train_nodes)))
        self.note(at_s, f"{record.job.name} starts on {nodes}")


_ENDED = {"done": "is done", "failed": "failed", "cancelled": "was cancelled"}


def order_of(record: JobRecord, address: str) -> JobOrder:
    """Return the order for a job's last start. `address`: address of the cluster's mailbox."""
    start, facts = record.starts[-1], record.facts
    seat = seat_variable(address, record.job.name, record.incarnation)
    return JobOrder(
        job=record.job.name,
        incarnation=record.incarnation,
        command=[*facts["command"], *(facts["resume"] if record.incarnation > 1 else ())],
        environ={**facts["environ"], SEAT_VARIABLE: seat},
        folder=facts["folder"],
        rollout_nodes=start.rollout_nodes,
        train_nodes=start.train_nodes,
    )


def node_name(node: Node) -> str:
    return f"{node.pool}/{node.number}"


def node_of(name: str) -> Node:
    """Return the node that this text, POOL/NUMBER, names. Raises `ValueError` for another text."""
    pool, _, number = name.rpartition("/")
    if not pool or not number.isdecimal():
        raise ValueError(f"{name} is no node: POOL/NUMBER, such as cheap/0")
    return Node(pool, int(number))


def committed(at_s: float, record: JobRecord, facts: Facts) -> Committed | None:
    """Return the event for the iteration that a job reports in a letter's `facts`. None if that
    step was reported before. Raises `ValueError` for seconds below 0 or not finite."""
    times, step, last = times_of(facts), int(facts["step"]), facts.get("last")
    if step <= record.steps:
        return None
    return Committed(
        at_s,
        record.job.name,
        sum(times),
        times,
        str(facts["kind"]),
        step,
        None if last is None else bool(last),
        numbers_otherwise=last is None and step > _last_of(record),
    )


def _last_of(record: JobRecord) -> int:
    return record.job.steps_before + record.job.steps


def times_of(facts: Facts) -> Times:
    """Return a reported iteration's seconds by phase. Raises `ValueError` for impossible ones."""
    times = Times(*(float(facts[name]) for name in Times._fields))
    for name, seconds in zip(Times._fields, times, strict=True):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
    return times
