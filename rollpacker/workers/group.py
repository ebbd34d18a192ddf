"""Processes that are called together, in a thread that waits for their answers. If one is lost, all
are, since the others may wait for it in a joint call for ever.

    say(members, calls, during): send each member its call.
    replies(members, during): wait for the answers; `MemberLost` if one ends or stays stopped.
    Member.end(), close(members): end the members, and wait until they have ended.

Each member answers one call at a time (`program.answer_calls`). A member that a signal has stopped
is waited for a while, since a user may let it go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollpacker.workers.child import BY_SIGNAL
from rollpacker.workers.host import Process
from rollpacker.workers.kinds import CALL, ERROR
from rollpacker.workers.line import Line, LineEnded, ready

END_S = 5.0
"""Seconds that a member process which was told to end is given before it is killed."""
GRACE_S = 30.0
"""Seconds for which the other members' replies are awaited once one member has failed: they may
hang, waiting for it in a collective call."""
LOOK_S = 5.0
"""Seconds between two checks whether a signal has stopped a member whose reply is awaited."""
STOPPED_S = 60.0
"""Seconds after which a member process that a signal has stopped during a call counts as lost. One
that a debugger holds does not."""

logger = logging.getLogger(__name__)


class MemberLost(Exception):
    """Raised if a member process has ended, or stays stopped by a signal; the message tells how."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of a group, such as a trainer's rank, that is called together with the others."""

    name: str
    number: int
    pid: int
    line: Line
    child: Process | None
    """The started process. None if this process did not start it."""

    def how_it_ended(self) -> str:
        """Return in words how the member process ended, once its line (socket) has ended."""
        if self.child is None:
            return "hung up"
        how = self.child.how_ended(END_S)
        return "hung up, but lives" if how is None else f"ended by itself ({how})"

    def is_stopped(self) -> bool:
        return self.child is not None and self.child.is_stopped()

    def end(self) -> None:
        """Kill the member process; if this process did not start it, close the line to it."""
        if self.child is not None:
            self.child.kill()
        else:
            self.line.hang_up()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def say(members: Sequence[Member], calls: Sequence[bytes], during: str) -> None:
    """Send each member process its call, whose name in errors is `during`. Raises `MemberLost`."""
    for member, call in zip(members, calls, strict=True):
        try:
            member.line.send(CALL, payload=call)
        except LineEnded:
            raise _ended(member, during) from None


def replies(members: Sequence[Member], during: str) -> dict[int, tuple[int, bytes]]:
    """Wait for the members' replies to a call, whose name in errors is `during`. Returns by member
    number the reply's kind of message and content. Some are missing if a member failed and others
    took longer than `GRACE_S`. Raises `MemberLost`."""
    found: dict[int, tuple[int, bytes]] = {}
    waiting = {member.line: member for member in members}
    stopped: dict[int, float] = {}
    heard_at = time.monotonic()
    while waiting:
        for line in ready(waiting, min(LOOK_S, GRACE_S)):
            heard_at = time.monotonic()
            try:
                messages = line.read()
            except LineEnded:
                raise _ended(waiting[line], during) from None
            for message in messages:
                found[waiting.pop(line).number] = message.kind, message.payload
        failed = any(kind == ERROR for kind, _ in found.values())
        if failed and waiting and time.monotonic() - heard_at >= GRACE_S:
            break
        _look_for_stopped(waiting.values(), stopped, during)
    return dict(sorted(found.items()))


def _look_for_stopped(waiting: Iterable[Member], stopped: dict[int, float], during: str) -> None:
    """Raise `MemberLost` for a member that has been stopped for more than `STOPPED_S` seconds.
    `stopped`: by member number, the `time.monotonic` since when; this function fills it in."""
    for member in waiting:
        if not member.is_stopped():
            stopped.pop(member.number, None)
        elif member.number not in stopped:
            stopped[member.number] = time.monotonic()
            logger.warning("%s %s; the run waits (kill -CONT %d)", member, BY_SIGNAL, member.pid)
        elif time.monotonic() - stopped[member.number] > STOPPED_S:
            raise MemberLost(f"{member} {BY_SIGNAL} during {during!r}, and stayed so")


def _ended(member: Member, during: str) -> MemberLost:
    return MemberLost(f"{member} {member.how_it_ended()} during {during!r}")


def close(started: Sequence[Member]) -> None:
    """Wait until these members, which this process has started, have ended, and kill those that
    take longer than `END_S` seconds."""
    until = time.monotonic() + END_S
    for member in started:
        assert member.child is not None
        if member.child.how_ended(max(until - time.monotonic(), 0)) is None:
            member.child.kill()
        member.child.close()
