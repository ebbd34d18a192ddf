"""A job's side of the cluster (*seat*), which reaches the service by letters in a mailbox.

    ask:         from the job: it wants a pool; each request has a number
    grant:       from the service, with that number: the job holds the pool
    left:        from the job, with that number: it gives the pool back, or wants it no more
    beat:        from the job, once a second: it is alive; repeats its request, or that it has left
    committed:   from the job: an iteration is over
    stop:        from the service: the job is to end at its next commit

One thread sends beats and another one reads, each with a connection of its own, so that neither
waits for the other. Each letter has the incarnation (number of the job's start) of its process.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from rollpacker.cluster.seats.mailbox import SERVICE, Letter, Mailbox
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, START, Alone, Iteration, LeaseLost, Seat
from rollpacker.core.ids import PoolName

LEASE_S = 5.0
"""Seconds without a letter (message) from a job after which its grant of a pool ends (lease)."""
START_LEASE_S = 30.0
"""Seconds without a letter after which the grant of a pool ends while a run's parts start on it. A
process that loads a model sends letters late: other threads wait for Python's lock."""
BEAT_S = 1.0
UNHEARD_S = 60.0
"""Seconds out of reach of the mailbox after which a waiting `enter` raises `OSError`."""
_LOOK_S = 0.02
"""Most seconds until a waiting `enter` notices that its caller has given the pool up."""
_READ_S = 1.0
_END_S = 10.0
"""Most seconds for which `close` waits for the threads if the mailbox does not answer."""
_AGAIN_S = 0.1

Told = Callable[[str], None]


def lease_s(purpose: str) -> float:
    """Return the seconds without a letter (message) from a job after which its grant of a pool
    ends. `purpose`: what the job asked for the pool for; with `START`, the seconds are more."""
    return START_LEASE_S if purpose == START else LEASE_S


@dataclass(slots=True)
class _Ask:
    number: int
    pool: PoolName
    purpose: str
    is_granted: bool = False
    nodes: tuple[str, ...] = ()


class MailboxSeat:
    """A `Seat` (a job's side of the cluster) that reaches the service by a mailbox."""

    def __init__(self, mailbox: Mailbox, job: str, incarnation: int) -> None:
        """`incarnation`: number of this start of the job. Raises `OSError` if the mailbox is
        lost."""
        self._mailbox = mailbox
        self._job = job
        self._incarnation = incarnation
        self._changed = threading.Condition()
        self._ask: _Ask | None = None
        """The job's request for the pool that it waits for or holds. None if it does neither."""
        self._untold: list[Iteration] = []
        """Iterations that ended while a pool was held; they are reported to the service after
        it."""
        self._num_asked = 0
        self._num_posted = 0
        self._beaten_s = time.monotonic()
        """Time in seconds when the last beat (sign of life) that reached the mailbox was posted."""
        self._lost: str | None = None
        self._wants_stop: str | None = None
        self._watchers: list[tuple[Told, Told]] = []
        self._closed = threading.Event()
        self._beat()
        self._threads = [
            threading.Thread(target=work, name=f"seat of {job}", daemon=True)
            for work in (self._beat_on, self._read_on)
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, pool: PoolName, purpose: str, *, given_up: threading.Event) -> bool:
        with self._changed:
            assert self._ask is None, (self._ask, pool)
            self._check()
            self._num_asked += 1
            ask = self._ask = _Ask(self._num_asked, pool, purpose)
        self._try_to_post("ask", self._about(ask))
        with self._changed:
            while not (ask.is_granted or given_up.is_set() or self._is_unheard()):
                self._changed.wait(_LOOK_S)
            if ask.is_granted and not given_up.is_set():
                return True
            self._ask = None
        self._try_to_post("left", {"ask": ask.number})
        if given_up.is_set():
            return False
        raise OSError(f"the cluster's mailbox has not been reached for {UNHEARD_S:g} s")

    def leave(self, pool: PoolName) -> None:
        with self._changed:
            ask = self._ask
            if ask is None or ask.pool != pool or not ask.is_granted:
                return
            self._ask = None
            untold, self._untold = self._untold, []
        self._try_to_post("left", {"ask": ask.number})
        for iteration in untold:
            self.committed(iteration)

    def committed(self, iteration: Iteration) -> None:
        """Report an iteration (if a pool is held, after `leave`): the service may move the job."""
        with self._changed:
            if self._ask is not None and self._ask.is_granted:
                self._untold.append(iteration)
                return
        self._try_to_post("committed", structs.asdict(iteration), tries=3)

    def watch(self, lost: Told, stop: Told) -> None:
        with self._changed:
            self._watchers.append((lost, stop))
            was_lost, wants_stop = self._lost, self._wants_stop
        if was_lost:
            lost(was_lost)
        if wants_stop:
            stop(wants_stop)

    def close(self) -> None:
        if not self._closed.is_set():
            with self._changed:
                ask = self._ask
            if ask is not None:
                self.leave(ask.pool)
            self._closed.set()
            self._end_threads()

    def _end_threads(self) -> None:
        """End both threads while Python still runs: a thread that calls ray during Python's end
        would abort the process or change its exit code."""
        with contextlib.suppress(OSError):  # so that who reads need not wait for a letter
            self._mailbox.post(self._job, self._job, f"{self._incarnation}/close", "close", {})
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    # -- letters -----------------------------------------------------------------------

    def _post(self, kind: str, facts: dict[str, Any], tries: int = 1) -> None:
        with self._changed:
            self._num_posted += 1
            key = f"{self._incarnation}/{self._num_posted}"
        facts = {**facts, "incarnation": self._incarnation}
        for left in reversed(range(tries)):
            try:
                return self._mailbox.post(SERVICE, self._job, key, kind, facts)
            except OSError:
                if not left:
                    raise

    def _try_to_post(self, kind: str, facts: dict[str, Any], tries: int = 1) -> None:
        """Post a letter (message), in up to `tries` attempts. Failure is no error."""
        with contextlib.suppress(OSError):
            self._post(kind, facts, tries)

    def _about(self, ask: _Ask) -> dict[str, Any]:
        return {"ask": ask.number, "pool": ask.pool, "purpose": ask.purpose}

    def _beat(self) -> None:
        began_s = time.monotonic()
        with self._changed:
            ask = self._ask
            facts: dict[str, Any] = {"left": self._num_asked - (ask is not None)}
        self._post("beat", {**facts, **({} if ask is None else self._about(ask))})
        self._beaten_s = began_s

    # -- threads -----------------------------------------------------------------------

    def _beat_on(self) -> None:
        wait_s = BEAT_S
        while not self._closed.wait(wait_s):
            self._lose_if_silent(time.monotonic() - self._beaten_s)
            try:
                self._beat()
                wait_s = BEAT_S
            except OSError:
                wait_s = _AGAIN_S

    def _read_on(self) -> None:
        after, epoch, box = 0, "", self._job
        while not self._closed.is_set():
            try:
                if (now := self._mailbox.epoch) != epoch:
                    after, epoch = 0, now
                for letter in self._mailbox.read(box, after, _READ_S):
                    after = letter.number
                    self._take(letter)
                    self._mailbox.forget(box, after)
            except OSError:
                self._closed.wait(0.1)

    def _take(self, letter: Letter) -> None:
        facts = letter.facts
        if facts.get("incarnation") != self._incarnation:
            return
        if letter.kind == "grant":
            with self._changed:
                ask = self._ask
                if ask is not None and ask.number == facts["ask"]:
                    ask.is_granted = True
                    self._changed.notify_all()
        elif letter.kind == "stop":
            self._want_stop(str(facts["reason"]))

    def _lose_if_silent(self, silent_s: float) -> None:
        with self._changed:
            ask = self._ask
            if self._lost or ask is None or not ask.is_granted or silent_s <= lease_s(ask.purpose):
                return
            reason = f"the cluster's service has not heard of this job for {silent_s:.1f} s"
            self._lost = reason
            self._changed.notify_all()
            watchers = [lost for lost, _ in self._watchers]
        for told in watchers:
            told(reason)

    def _want_stop(self, reason: str) -> None:
        with self._changed:
            if self._wants_stop:
                return
            self._wants_stop = reason
            watchers = [stop for _, stop in self._watchers]
        for told in watchers:
            told(reason)

    def _is_unheard(self) -> bool:
        return time.monotonic() - self._beaten_s > UNHEARD_S

    def _check(self) -> None:
        if self._lost:
            raise LeaseLost(self._lost)


MAILBOXES = {"file": "rollpacker.cluster.seats.mail_file", "ray": "rollpacker.cluster.on_ray.mail"}
"""Modules with a function `open_mailbox`, by the first part of a mailbox's address. A module is
imported only when it is needed, since the one for ray belongs to another package."""


def open_seat(environ: Mapping[str, str]) -> Seat | None:
    """Return the seat (a job's side of the cluster) that the environment variable `SEAT_VARIABLE`
    names; None if it is not set. Raises `ValueError` for a wrong name, `OSError` if the mailbox is
    out of reach."""
    where = environ.get(SEAT_VARIABLE)
    if where is None:
        return None
    if where == "alone":
        return Alone()
    address, _, incarnation = where.rpartition("#")
    address, _, job = address.rpartition("#")
    scheme = address.partition(":")[0]
    if not (job and incarnation.isdecimal() and scheme in MAILBOXES):
        raise ValueError(
            f"{SEAT_VARIABLE}={where}: no such seat; it is set by `rollpacker cluster`. Unset it "
            "to run alone"
        )
    mailbox = importlib.import_module(MAILBOXES[scheme]).open_mailbox(address)
    return MailboxSeat(mailbox, job, int(incarnation))
