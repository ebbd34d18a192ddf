"""Knows which starts of jobs (runs of their processes) are alive, from the runner and from letters.
None of that is kept on disk."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.seats.mailbox_seat import lease_s
from rollpacker.cluster.service.book import Book, JobRecord, node_name
from rollpacker.cluster.service.runner import Runner

HOSTLESS_S = 300.0
"""Seconds for which jobs wait for their node to have a host (machine), before they get others."""
_LOOK_S = 1.0
"""Seconds between two checks whether nodes closed for want of a host (machine) have one."""
SILENT_S = 60.0
"""Seconds without a letter (message) after which a job that holds no pool counts as lost."""
PRESS_S = 30.0
"""Seconds after which processes that were asked to end, and have not, get a signal to stop."""
KILL_S = 300.0
"""Seconds, besides the job's longest iteration, after which processes that have to end are killed:
they may still be in an iteration or save it."""

Start = tuple[str, int]
"""Name of a job, and the number (incarnation) of its start."""


class Hostless:
    """Nodes without a host, so that jobs cannot be started there. After `HOSTLESS_S` such a node is
    drained: its jobs go elsewhere, or wait. Once the node has a host, it is restored."""

    def __init__(self) -> None:
        self._since_s: dict[Node, float] = {}
        self._failed = set[Node]()
        """Nodes that had no host (machine) when jobs were last to be started on them."""

    def tried(self, failed: Iterable[Node], unknown: Collection[Node]) -> None:
        """Record an attempt to start all jobs whose nodes are free. `failed`: nodes that had no
        host. `unknown`: nodes of jobs not started yet; other nodes are forgotten."""
        now_s = time.monotonic()
        before = self._since_s
        self._since_s = {node: before[node] for node in before if node in unknown}
        self._failed = set(failed)
        self._since_s |= {node: before.get(node, now_s) for node in self._failed}

    @property
    def nodes(self) -> Collection[Node]:
        """Nodes on which jobs have to be started but cannot, for want of a host."""
        return self._since_s.keys()

    def overdue(self) -> list[Node]:
        """Return the nodes that have been without a host for more than `HOSTLESS_S` seconds."""
        now_s = time.monotonic()
        return [node for node in self._failed if now_s - self._since_s[node] > HOSTLESS_S]


class Alive:
    """The starts of jobs (runs of their processes) that may still have processes."""

    def __init__(self, book: Book, runner: Runner) -> None:
        """`book`: the records of all jobs. The runner is asked about each of their starts."""
        self._book = book
        self._runner = runner
        self.hostless = Hostless()
        self._looked_s = 0.0
        """Time in seconds of the last check whether nodes have a host again."""
        self.incarnations: set[Start] = set()
        self.ever_heard: set[str] = set()
        """Names of the jobs whose present processes have sent a letter (message) so far."""
        self._heard_s: dict[str, float] = {}
        self._leaves_since_s: dict[Start, float] = {}
        self._pressed: set[Start] = set()
        self._attempted: set[Start] = set()
        self._in_vain_s = 0.0
        """Seconds spent on calls of the runner that failed, since the last call of `excuse`."""
        now_s = time.monotonic()
        for name, record in book.records.items():
            for incarnation in range(1, record.incarnation + 1):
                try:
                    if self._ended((name, incarnation)) is None:
                        self.incarnations.add((name, incarnation))
                except OSError:  # of processes that do not end, for example: it is asked again
                    self.attempted(name, incarnation)
            if record.turn.ask:
                self.ever_heard.add(name)
                self._heard_s[name] = now_s

    def of(self, name: str) -> list[int]:
        return [incarnation for one, incarnation in self.incarnations if one == name]

    def started(self, name: str, incarnation: int) -> None:
        self.incarnations.add((name, incarnation))
        self._attempted.discard((name, incarnation))
        self._is_new(name)

    def attempted(self, name: str, incarnation: int) -> None:
        """Record an attempt to start a job that raised an error. It is repeated; the failed one may
        have started processes nevertheless."""
        if (name, incarnation) not in self.incarnations:
            self._is_new(name)
        self.incarnations.add((name, incarnation))
        self._attempted.add((name, incarnation))

    def _is_new(self, name: str) -> None:
        """Forget when the job's earlier start was last heard: a new start has begun."""
        self.ever_heard.discard(name)
        self._heard_s.pop(name, None)

    def heard(self, name: str) -> None:
        """Record that a letter (message) from the job's present start has come now: it is alive."""
        self.ever_heard.add(name)
        self._heard_s[name] = time.monotonic()

    def excuse(self, away_s: float, longest_s: float) -> None:
        """Do not count the last `away_s` seconds as silence of jobs if they are over `longest_s`:
        letters could not be read or posted. Time in failed calls of the runner is not excused:
        letters could be posted in it."""
        seconds, self._in_vain_s = away_s - self._in_vain_s, 0.0
        if seconds <= longest_s:
            return
        now_s = time.monotonic()
        for name in self._heard_s:
            self._heard_s[name] = min(self._heard_s[name] + seconds, now_s)

    def forget(self, name: str, incarnation: int) -> None:
        """Forget a start of a job whose processes are gone."""
        start = (name, incarnation)
        self.incarnations.discard(start)
        self._leaves_since_s.pop(start, None)
        self._pressed.discard(start)
        self._attempted.discard(start)

    def is_present(self, start: Start) -> bool:
        """Whether this is the last start of a job that has nodes."""
        record = self._book.records[start[0]]
        return record.is_placed and record.incarnation == start[1]

    def leaving(self) -> list[Start]:
        """Return the starts whose processes have to end: their jobs have other nodes, or none."""
        return [one for one in sorted(self.incarnations) if not self.is_present(one)]

    def nodes_of_leaving(self) -> set[Node]:
        records = self._book.records
        return {node for name, n in self.leaving() for node in records[name].nodes(n)}

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        except OSError:
            self._in_vain_s += time.monotonic() - began_s
            raise

    def _ended(self, start: Start) -> int | None:
        with self._trying():
            return self._runner.ended(*start)

    def _kill(self, start: Start) -> None:
        with self._trying():
            self._runner.kill(*start)

    def gone(self) -> list[tuple[str, int, int]]:
        """Return the starts whose processes are gone: job, incarnation (number of the start) and
        exit code. Starts of unknown state are left out."""
        found = []
        for start in sorted(self.incarnations):
            with contextlib.suppress(OSError):
                code = self._ended(start)
                if code is None:
                    self._attempted.discard(start)
                elif code != -1 or start not in self._attempted:
                    found.append((*start, code))
                elif not self._is_wanted(start):
                    self._kill(start)  # so that it does not begin late
                    found.append((*start, code))
        return found

    def _is_wanted(self, start: Start) -> bool:
        return self.is_present(start) and not self._book.records[start[0]].is_cancelled

    def silent(self) -> list[tuple[str, str]]:
        """Return the jobs that were silent for too long, each with words on for how long."""
        now_s, found = time.monotonic(), []
        for record in self._book.placed():
            name = record.job.name
            if (name, record.incarnation) not in self.incarnations:
                continue
            turn = record.turn
            if turn.ask:  # this start was heard once, whoever was asked to make it again since
                self._heard_s.setdefault(name, now_s)
            silent_s = now_s - self._heard_s.get(name, now_s)
            if silent_s > (lease_s(turn.purpose) if turn.token else SILENT_S):
                found.append((name, f"it was silent for {silent_s:.1f} s"))
        return found

    def kill(self, start: Start, tell: Callable[[str], None]) -> bool:
        """Kill all processes of a job's start. Returns whether none is left; `tell` gets errors."""
        try:
            self._kill(start)
        except OSError as error:
            tell(f"{start[0]} cannot be ended yet: {error}")
            return False
        return True

    def press(self) -> None:
        """Send a stop signal to processes that have not ended `PRESS_S` after they were asked to,
        and kill them after `KILL_S` and an iteration. Raises `OSError` if that fails."""
        now_s = time.monotonic()
        for start in self.leaving():
            since_s = self._leaves_since_s.setdefault(start, now_s)
            longest_s = math.fsum(self._book.records[start[0]].job.worst)
            if now_s - since_s > KILL_S + longest_s:
                self._kill(start)
            elif now_s - since_s > PRESS_S and start not in self._pressed:
                self._pressed.add(start)
                self._runner.stop(*start)

    def due(self, now_s: float) -> Iterator[JobRecord]:
        """Yield the jobs to start now: their own earlier processes are gone, no processes that have
        to end are on their nodes, and their pause after a loss is over."""
        crowded = self.nodes_of_leaving()
        for record in self._book.placed():
            name, incarnation = record.job.name, record.incarnation
            there = {(name, one) for one in self.of(name)}
            if record.is_cancelled or there - (self._attempted & {(name, incarnation)}):
                continue
            is_time = now_s >= record.starts_from_s
            if is_time and crowded.isdisjoint(record.nodes(incarnation)):
                yield record

    def not_started(self) -> set[Node]:
        """Return the nodes of all jobs that are not started yet, or whose start may have failed."""
        return {
            node
            for record in self._book.placed()
            if not self.is_started(record) or self._is_attempted(record)
            for node in record.nodes(record.incarnation)
        }

    def in_the_way(self, record: JobRecord) -> str:
        """Return in words what must end before a job with nodes can start. Empty if nothing."""
        name = record.job.name
        if self.is_started(record):
            return ""
        if any(one < record.incarnation for one in self.of(name)):
            return "its start before has ended"
        for other, incarnation in self.leaving():
            for node in sorted(self._book.records[other].nodes(incarnation)):
                if node in record.nodes(record.incarnation):
                    return f"{other} has left {node_name(node)}"
        return ""

    def with_host_again(self, nodes: Collection[Node]) -> list[Node]:
        """Return those of these nodes that have a host again; none within `_LOOK_S` of a check."""
        if not nodes or time.monotonic() - self._looked_s < _LOOK_S:
            return []
        self._looked_s = time.monotonic()
        with contextlib.suppress(OSError):
            return [node for node in sorted(nodes) if self._runner.has_host(node)]
        return []

    def _is_attempted(self, record: JobRecord) -> bool:
        return (record.job.name, record.incarnation) in self._attempted

    def is_started(self, record: JobRecord) -> bool:
        return (record.job.name, record.incarnation) in self.incarnations


def why_ended(code: int) -> str:
    """Return in words how a process ended, from its exit code."""
    if code == -1:
        return "its processes are gone"
    return f"its process ended with exit code {code}" if code >= 0 else f"signal {-code} ended it"
