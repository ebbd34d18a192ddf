"""The cluster's service: turns messages (letters) of jobs and people into events, has the core
(`decide/`) decide on them, and carries out its commands.

Letters, ends of processes, and jobs' silence become events. The core (`decide/cluster.py`) answers
each with commands. Events are stored first; then letters are sent, and jobs started.

The service may die at any moment. A new one replays the events and has the same state; the runner
knows which processes run; letters wait; grants stay valid. The only decision made here is when a
job is lost: its processes are gone, or it was silent for too long, and then its processes are
killed before the core is told. So no two jobs are ever on one device.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rollpacker.cluster.decide import events
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Command, Event
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.seats.mailbox import ALL, SERVICE, Letter, Mailbox
from rollpacker.cluster.seats.mailbox_seat import LEASE_S
from rollpacker.cluster.service.book import JobRecord, committed, node_name, node_of, order_of
from rollpacker.cluster.service.past import Past, Replayed
from rollpacker.cluster.service.runner import NoHost, Runner
from rollpacker.cluster.service.starts_alive import Alive, why_ended
from rollpacker.cluster.service.status import Status
from rollpacker.cluster.service.store import Position, StoredEvent, entry_of
from rollpacker.codec import from_plain
from rollpacker.core.ids import PoolName

FORGET_S = 1.0
ANSWER_S = 86_400.0
"""Seconds after an answer to a command for which the box with it is kept, to be read late."""


class Forgetting:
    """Removes letters that need no more work from the mailbox, and boxes that nobody reads any
    more: those of ended jobs, and of commands that were answered."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._forgot_s = -math.inf
        self._answered_s: dict[str, float] = {}
        """For each command's box, the time in seconds of the last answer to it."""
        self._emptied: set[str] = set()
        """Names of the ended jobs whose boxes of letters (messages) were removed."""

    def answered(self, box: str) -> None:
        self._answered_s[box] = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._forgot_s > FORGET_S

    def forget(self, upto: int, ended: Iterable[str]) -> None:
        """Remove the letters to the service up to number `upto`, and boxes that nobody reads any
        more. `ended`: jobs that have no processes left. Raises `OSError` if that fails."""
        now_s = time.monotonic()
        self._mailbox.forget(SERVICE, upto)
        names = set(ended)
        self._emptied &= names  # the others were submitted once more
        for name in sorted(names - self._emptied):
            self._mailbox.forget(name, ALL)
            self._emptied.add(name)
        for box in [box for box, at_s in self._answered_s.items() if now_s - at_s > ANSWER_S]:
            self._mailbox.forget(box, ALL)
            del self._answered_s[box]
        self._forgot_s = now_s


LOOK_S = 0.1
"""Seconds between two checks whether processes have ended."""
AWAY_S = LEASE_S / 2
"""Seconds between two rounds of the service above which jobs do not count as silent in that time:
the service was stopped, or nobody could write to the mailbox."""
HOPELESS = (2, 3)
"""Exit codes of `rollpacker train` after which a restart is no use: 2 for bad input, 3 for NaN."""
BUSY = 75
"""Exit code of `rollpacker train` while another process works in the run's folder."""
Facts = Mapping[str, Any]


class Service:
    """Serves a cluster: deals with letters (messages), decides, starts and ends jobs. Only one
    service at a time may use a folder; the caller sees to that."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        name: str,
        folder: Path,
        mailbox: Mailbox,
        runner: Runner,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`cluster`: a new one, on which the folder's events are replayed. `tell`: called with each
        line for the person who runs the service.

        Raises `ValueError` if the folder is on a network file system, or was written by another
        version or for other pools, and `OSError` if a file or the mailbox cannot be used."""
        self._name = name
        self._mailbox = mailbox
        self._forgetting = Forgetting(mailbox)
        self._runner = runner
        self._tell = tell
        self._past = Past(folder, cluster)
        self._began_s = self._past.store.began_s(time.time())
        self._position = self._past.store.position
        self._written: list[StoredEvent] = []
        self._commands: list[Command] = []
        self._answers: list[tuple[Letter, str, Callable[[], Facts]]] = []
        self._looked_s = time.monotonic()
        self._cluster, self._book, last_s = self._past.replay()
        self._zero_s = max(last_s, time.time() - self._began_s) - time.monotonic()
        """Seconds to add to the monotonic clock to get the seconds since the folder was first used.
        The wall clock is read once, here: it may be set later."""
        self._alive = Alive(self._book, runner)
        self._say_again()  # grants stand, and every job has a whole lease to be heard in
        self._want()

    def close(self) -> None:
        self._past.store.close()

    def run(self, is_over: Callable[[], bool]) -> None:
        """Serve until `is_over` returns true. It is called every `LOOK_S` seconds."""
        while not is_over():
            self.step(LOOK_S)

    def step(self, within_s: float) -> None:
        """Deal with letters (messages), awaited `within_s` seconds at most, and with ended jobs."""
        for work in (partial(self._receive, within_s), self._look, self._send):
            try:
                work()
            except OSError as error:  # of the mailbox or the runner: it is asked again
                self._say(f"{error}")
                time.sleep(within_s)

    def _say_again(self) -> None:
        """Post all grants and requests to stop once more, in case that such a letter was lost."""
        for record in self._book.placed():
            if record.turn.token:
                self._post_grant(record)
            if record.is_cancelled:
                self._post_stop(record, record.incarnation, "it was cancelled")
        for name, incarnation in self._alive.leaving():
            self._post_stop(self._book.records[name], incarnation, "it moves")

    # -- events ------------------------------------------------------------------------

    @property
    def _now_s(self) -> float:
        """Seconds since the cluster's folder was first used, independent of the wall clock."""
        return self._zero_s + time.monotonic()

    def _happen(self, event: Event, facts: Facts | None = None) -> None:
        """Have the cluster decide on an event; `_flush` stores the event and obeys the commands.
        `facts`: values to store with the event, which decisions do not need. Raises `ValueError`,
        and changes nothing, if the event is impossible."""
        commands = self._cluster.handle(event)
        facts = facts or {}
        self._written.append(entry_of(event, facts, commands))
        before = len(self._book.notes) and self._book.notes[-1]
        self._book.write(event, facts, commands)
        self._commands += commands
        self._tell_since(before)

    def _tell_since(self, before: object) -> None:
        new = []
        for note in reversed(self._book.notes):
            if note is before:
                break
            new.append(note.text)
        for text in reversed(new):
            self._tell(text)

    def _say(self, text: str) -> None:
        """Note and print a line that is no event, unless one of the last few notes is the same."""
        if not self._book.has_told(text):
            self._book.note(self._now_s, text)
            self._tell(text)

    def _flush(self) -> None:
        """Store the new events, then carry out the commands that came of them."""
        changes_nodes = bool(self._written and self._book.hostless)
        if self._written:
            state = Replayed(self._cluster, self._book, self._now_s)
            self._past.write(self._written, self._dealt_with(), state)
            self._written.clear()
        while self._commands:
            self._obey(self._commands[0])
            changes_nodes |= isinstance(self._commands.pop(0), events.Open | events.Close)
        if changes_nodes:
            self._want()

    def _dealt_with(self) -> Position:
        """Return the position of the last letter (message) that a new service need not read again:
        the one before the first unanswered question, if there is any."""
        if not self._answers:
            return self._position
        return Position(self._position.epoch, self._answers[0][0].number - 1)

    # -- letters -----------------------------------------------------------------------

    def _receive(self, within_s: float) -> None:
        """Read the letters (messages) that come within `within_s` seconds, and act on each. Raises
        `OSError` if the mailbox is out of reach."""
        epoch = self._mailbox.epoch
        if epoch != self._position.epoch:
            self._position = Position(epoch, 0)
            self._say_again()
        for letter in self._mailbox.read(SERVICE, self._position.number, within_s):
            self._position = Position(epoch, letter.number)
            if self._position in self._past.store.left_out:
                continue
            try:
                if (answer := self._take(letter)) is not None:
                    self._answers.append((letter, letter.kind, answer))
            except (ValueError, TypeError, KeyError) as error:
                why = {"why": str(error) if isinstance(error, ValueError) else repr(error)}
                self._answers.append((letter, "refused", partial(dict, why)))
            except Exception as error:
                self._give_up(letter, error)
                raise

    def _give_up(self, letter: Letter, error: Exception) -> None:
        """Leave out a letter after a bug in the service. The service's state may be half changed,
        so it ends. The next one begins from the stored events and skips this letter (message)."""
        why = f"{letter.kind} of {letter.sender} is left out: an error of the service's, {error!r}"
        self._say(f"{why}. It ends; serve again, and please report it")
        self._past.store.leave_out(self._position)
        self._past.store.write(self._written, self._dealt_with())
        self._written.clear()
        told = {"why": why, "about": letter.key}
        with contextlib.suppress(OSError):
            self._mailbox.post(letter.sender, SERVICE, f"re {letter.key}", "refused", told)

    def _send(self) -> None:
        """Store new events, obey their commands, start jobs whose nodes are free, and post answers
        to commands. After an `OSError` the next call takes up what is left."""
        self._flush()
        self._start_due()
        while self._answers:
            letter, kind, answer = self._answers[0]
            try:
                told = {**answer(), "about": letter.key}
            except OSError:
                raise
            except Exception as error:  # of ours; nothing is decided by an answer
                why = f"{letter.kind} of {letter.sender} is not answered: an error of the service's"
                kind, told = "refused", {"why": f"{why}, {error!r}", "about": letter.key}
                self._say(f"{told['why']}. Please report it")
            self._mailbox.post(letter.sender, SERVICE, f"re {letter.key}", kind, told)
            self._forgetting.answered(letter.sender)
            self._answers.pop(0)
        if self._forgetting.is_due():
            ended = {one.job.name for one in self._book.records.values() if one.outcome}
            left = {name for name, _ in self._alive.incarnations}
            self._forgetting.forget(self._position.number, ended - left)

    def _take(self, letter: Letter) -> Callable[[], Facts] | None:
        """Act on a letter (message). Returns a function that makes the answer, if one is due."""
        facts = letter.facts
        match letter.kind:
            case "submit":
                return self._submit(letter)
            case "cancel":
                return self._cancel(str(facts["job"]), now=bool(facts.get("now")))
            case "drain":
                return self._drain(str(facts["node"]), restore=bool(facts.get("restore")))
            case "status":
                return self._status
        record = self._book.records.get(letter.sender)
        if record is None or record.incarnation != facts["incarnation"] or not record.is_placed:
            return None
        self._alive.heard(letter.sender)
        match letter.kind:
            case "ask":
                self._asked(record, facts)
            case "left":
                self._left(record, facts["ask"])
            case "beat":
                self._left(record, facts["left"])
                if "ask" in facts:
                    self._asked(record, facts)
            case "committed":
                if (event := committed(self._now_s, record, facts)) is not None:
                    self._happen(event, facts)
        return None

    def _asked(self, record: JobRecord, facts: Facts) -> None:
        """Act on a job's request for a pool; its `facts` have number, pool and purpose. A repeated
        request changes nothing. A new one ends the earlier requests of the job."""
        number = facts["ask"]
        if facts["pool"] not in get_args(PoolName):
            raise ValueError(f"there is no pool {facts['pool']!r}")
        if number > record.turn.ask:
            self._left(record, number - 1)
            event = events.Asked(self._now_s, record.job.name, facts["pool"])
            self._happen(event, {"ask": number, "purpose": facts["purpose"]})

    def _left(self, record: JobRecord, upto: int) -> None:
        """Act on a job's notice that its requests up to number `upto` are over: it gives the pool
        back, or waits for it no more."""
        turn, name = record.turn, record.job.name
        if turn.phase is None or turn.ask > upto:
            return
        if turn.token:
            self._happen(events.Left(self._now_s, name, turn.phase, turn.token))
        else:
            self._happen(events.Withdrew(self._now_s, name, turn.phase))

    # -- questions ---------------------------------------------------------------------

    def _submit(self, letter: Letter) -> Callable[[], Facts]:
        facts = letter.facts
        job = from_plain(ClusterJob, facts["job"])
        self._book.check_new(job, facts)
        sent = [letter.sender, letter.key]
        known = self._book.records.get(job.name)
        if known is None or known.facts["sent"] != sent:
            kept = {name: value for name, value in facts.items() if name != "job"}
            self._happen(events.Submitted(self._now_s, job), {**kept, "sent": sent})
        return lambda: self._job(job.name)

    def _cancel(self, name: str, *, now: bool) -> Callable[[], Facts]:
        record = self._book.known(name)
        if not record.outcome and not record.is_cancelled:
            self._happen(events.Cancelled(self._now_s, name))

        def answer() -> Facts:  # it is written first
            if now and record.is_placed:
                self._alive.kill((name, record.incarnation), self._say)
            return self._job(name)

        return answer

    def _drain(self, name: str, *, restore: bool) -> Callable[[], Facts]:
        node = node_of(name)
        if restore:
            self._happen(events.Restored(self._now_s, node))
        elif node not in self._book.drained - self._book.hostless:
            has_host = node not in self._alive.hostless.nodes
            self._happen(events.Drained(self._now_s, node, has_host))
        there = [one for one in self._book.placed() if node in one.nodes(one.incarnation)]
        return lambda: {"node": node_name(node), "jobs": [one.job.name for one in there]}

    def _status(self) -> Facts:
        return Status(self._cluster, self._book, self._alive, self._now_s).whole(
            self._name, self._began_s
        )

    def _job(self, name: str) -> Facts:
        status = Status(self._cluster, self._book, self._alive, self._now_s)
        return status.of_job(self._book.records[name])

    def grow(self, num_nodes: Mapping[str, int]) -> None:
        """Enlarge pools to these numbers of nodes, by pool. Raises `ValueError` for fewer nodes."""
        for pool in self._cluster.pools:
            if num_nodes[pool.name] != pool.nodes:
                self._happen(events.Grown(self._now_s, pool.name, num_nodes[pool.name]))
        self._flush()

    # -- commands ----------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        match command:
            case events.Grant():
                record = self._book.records[command.job]
                if record.turn.token == command.token:  # it may be over since, or lost
                    self._post_grant(record)
            case events.Start():
                self._leave(command.job, "it moves")
            case events.Stop():
                self._leave(command.job, command.reason)

    def _leave(self, name: str, reason: str) -> None:
        """Ask starts of the job that should not run any more to stop: all earlier ones, and the
        last one if the job was cancelled or has no nodes."""
        record = self._book.records[name]
        for incarnation in self._alive.of(name):
            if incarnation < record.incarnation or not record.is_placed or record.is_cancelled:
                self._post_stop(record, incarnation, reason)

    def _post_grant(self, record: JobRecord) -> None:
        turn, name = record.turn, record.job.name
        facts = {"ask": turn.ask, "pool": turn.phase, "token": turn.token}
        self._post(record, record.incarnation, f"grant {name} {turn.token}", "grant", facts)

    def _post_stop(self, record: JobRecord, incarnation: int, reason: str) -> None:
        key = f"stop {record.job.name} {incarnation}"
        self._post(record, incarnation, key, "stop", {"reason": reason})

    def _post(self, record: JobRecord, incarnation: int, key: str, kind: str, facts: Facts) -> None:
        facts = {**facts, "incarnation": incarnation}
        self._mailbox.post(record.job.name, SERVICE, f"{self._past.store.id} {key}", kind, facts)

    # -- processes ---------------------------------------------------------------------

    def _look(self) -> None:
        """Find out which jobs have ended, are silent or stay away, and act on that. Letters that
        they sent before are read first."""
        away_s = time.monotonic() - self._looked_s
        if away_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        self._alive.excuse(away_s, AWAY_S)
        gone = self._alive.gone()
        if gone or self._alive.silent():
            self._receive(0.0)
        for name, incarnation, code in gone:
            self._gone(name, incarnation, code)
        for name, why in self._alive.silent():
            record = self._book.records[name]
            # A host that is cut off keeps nobody else waiting.
            if self._alive.kill((name, record.incarnation), self._say):
                self._alive.forget(name, record.incarnation)
                self._lost(record, why, None)
        for record in self._book.placed():
            if record.is_cancelled and not self._alive.of(record.job.name):
                self._end(record, "cancelled", None)
        for name in self._cluster.overdue(self._now_s):
            self._happen(events.StayedAway(self._now_s, name))
        for node in self._alive.hostless.overdue():
            if node not in self._book.drained:
                self._happen(
                    events.Drained(self._now_s, node, False), {"until_it_has_a_host": True}
                )
        for node in self._alive.with_host_again(self._book.hostless):
            self._happen(events.Restored(self._now_s, node))
        self._alive.press()

    def _gone(self, name: str, incarnation: int, code: int) -> None:
        self._alive.forget(name, incarnation)
        record = self._book.records[name]
        is_current = record.is_placed and incarnation == record.incarnation
        is_before = incarnation <= record.num_before
        if record.outcome or is_before or (not is_current and code != 0):
            return
        if code == 0 or record.is_cancelled or code in HOPELESS:
            outcome = "cancelled" if code else "done"
            if code in HOPELESS and not record.is_cancelled:
                outcome = "failed"
            self._end(record, outcome, code)
        else:
            self._lost(record, why_ended(code), code)

    def _lost(self, record: JobRecord, why: str, code: int | None) -> None:
        name = record.job.name
        last_lines = self._runner.last_lines(name)
        facts = {"why": why, "exit_code": code, "last_lines": last_lines}
        self._happen(events.Lost(self._now_s, name, counts=code != BUSY), facts)

    def _end(self, record: JobRecord, outcome: str, code: int | None) -> None:
        facts: dict[str, Any] = {"outcome": outcome, "exit_code": code}
        if outcome == "failed" and code is not None:
            lines = self._runner.last_lines(record.job.name)
            facts |= {"why": why_ended(code), "last_lines": lines}
        self._happen(events.Ended(self._now_s, record.job.name), facts)

    def _start_due(self) -> None:
        """Start the jobs that are due (`Alive.due`): no earlier start is left on their nodes."""
        failed = set[Node]()
        for record in list(self._alive.due(self._now_s)):
            name, incarnation = record.job.name, record.incarnation
            try:
                self._runner.start(order_of(record, self._mailbox.address))
            except OSError as error:
                if isinstance(error, NoHost):
                    failed.add(error.node)
                self._say(f"{name} cannot be started yet: {error}")
                self._alive.attempted(name, incarnation)
            else:
                self._alive.started(name, incarnation)
        self._alive.hostless.tried(failed, self._alive.not_started())

    def _want(self) -> None:
        nodes = {one for record in self._book.placed() for one in record.nodes(record.incarnation)}
        nodes |= self._alive.nodes_of_leaving()
        if self._cluster.waiting:
            nodes |= self._book.hostless
        num_nodes = {pool.name: 0 for pool in self._cluster.pools}
        for node in nodes:
            num_nodes[node.pool] += 1
        with contextlib.suppress(OSError):
            self._runner.want(num_nodes)
