"""A seat over letters: what it says, and what it makes of what it hears."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cluster.seats import mailbox_seat
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.seats.mailbox import SERVICE, Letter
from rollpacker.cluster.seats.mailbox_seat import MailboxSeat, open_seat
from rollpacker.cluster.seats.seat import (
    SEAT_VARIABLE,
    START,
    Alone,
    Iteration,
    LeaseLost,
    seat_variable,
)

NEVER = threading.Event()
WAIT_S = 60.0
"""For what comes at once where the machine lets it."""


class Other:
    """Who reads what the seat writes."""

    def __init__(self, mailbox: FileMailbox) -> None:
        self.mailbox = mailbox
        self.after = 0
        self.letters: list[Letter] = []

    def next(self, kind: str) -> dict[str, Any]:
        """The next letter of this kind, others are passed over."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            self.letters += self.mailbox.read(SERVICE, self.after, 0.1)
            while self.letters:
                letter = self.letters.pop(0)
                self.after = letter.number
                if letter.kind == kind:
                    return dict(letter.facts)
        raise AssertionError(f"no letter of kind {kind}")

    def say(self, kind: str, key: str, incarnation: int = 1, **facts: Any) -> None:
        facts = {**facts, "incarnation": incarnation}
        self.mailbox.post("job", SERVICE, key, kind, facts)


class Breakable(FileMailbox):
    broken = False
    num_refused = 0

    def post(self, *letter: Any) -> None:
        if self.broken:
            self.num_refused += 1
            raise OSError("broken")
        super().post(*letter)


@pytest.fixture
def mailbox(tmp_path: Path) -> Breakable:
    return Breakable(tmp_path / "mail")


@pytest.fixture
def other(mailbox: FileMailbox) -> Other:
    return Other(mailbox)


@pytest.fixture
def seat(mailbox: FileMailbox) -> Iterator[MailboxSeat]:
    seat = MailboxSeat(mailbox, "job", 1)
    yield seat
    seat.close()


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def begin(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    answers: list[object] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, answers


def hold(seat: MailboxSeat, other: Other, purpose: str = "round") -> None:
    """Its first ask is granted."""
    entering, answers = begin(lambda: seat.enter("rollout", purpose, given_up=NEVER))
    other.next("ask")
    other.say("grant", "g", ask=1)
    entering.join(WAIT_S)
    assert answers == [True]


def test_it_asks_waits_for_its_grant_and_leaves(seat: MailboxSeat, other: Other) -> None:
    entering, answers = begin(lambda: seat.enter("rollout", "round", given_up=NEVER))
    asked = other.next("ask")
    assert (asked["ask"], asked["pool"], asked["purpose"]) == (1, "rollout", "round")
    other.say("grant", "of an earlier start", incarnation=0, ask=1)
    other.say("grant", "of another ask", ask=7)
    time.sleep(0.1)
    assert entering.is_alive()
    other.say("grant", "g", ask=1)
    entering.join(WAIT_S)
    assert answers == [True]
    while "ask" not in (beat := other.next("beat")):  # one that began before it asked
        pass
    assert beat["ask"] == 1, "what it holds is said once more"
    seat.leave("train")  # not held
    seat.leave("rollout")
    assert other.next("left")["ask"] == 1
    while "ask" in (beat := other.next("beat")):  # one that began before it left
        pass
    assert beat["left"] == 1
    seat.leave("rollout")
    seat.committed(
        Iteration(step=3, kind="plain", rollout_s=1.0, between_s=2.0, train_s=3.0, after_s=4.0)
    )
    assert other.next("committed")["train_s"] == 3.0


def test_an_iteration_that_ends_before_its_pool_is_left_is_told_after_that(
    seat: MailboxSeat, other: Other
) -> None:
    """A trainer parks while the step is committed, and the cluster moves nobody who holds nodes."""
    thread, _ = begin(lambda: seat.enter("train", "step", given_up=NEVER))
    asked = other.next("ask")
    other.say("grant", "grant 1", ask=asked["ask"])
    thread.join(WAIT_S)
    seat.committed(
        Iteration(step=1, kind="plain", rollout_s=1.0, between_s=0.0, train_s=1.0, after_s=0.0)
    )
    seat.leave("train")
    letters = other.mailbox.read(SERVICE, other.after, 1.0)
    kinds = [letter.kind for letter in letters if letter.kind != "beat"]
    assert kinds == ["left", "committed"]


def test_a_wait_that_is_given_up_ends_and_is_told(seat: MailboxSeat, other: Other) -> None:
    given_up = threading.Event()
    entering, answers = begin(lambda: seat.enter("train", "step", given_up=given_up))
    other.next("ask")
    given_up.set()
    entering.join(WAIT_S)
    assert answers == [False]
    assert other.next("left")["ask"] == 1
    other.say("grant", "g", ask=1)  # comes too late
    entering, answers = begin(lambda: seat.enter("train", "step", given_up=NEVER))
    assert other.next("ask")["ask"] == 2
    time.sleep(0.1)
    assert entering.is_alive()
    other.say("grant", "h", ask=2)
    entering.join(WAIT_S)
    assert answers == [True]


def test_letters_that_are_lost_are_said_by_the_next_beat(
    seat: MailboxSeat, other: Other, mailbox: Breakable
) -> None:
    mailbox.broken = True
    begin(lambda: seat.enter("rollout", "round", given_up=NEVER))
    time.sleep(0.1)
    mailbox.broken = False
    while "ask" not in (beat := other.next("beat")):
        pass
    assert (beat["ask"], beat["pool"], beat["left"]) == (1, "rollout", 0)


def test_a_lease_that_cannot_be_renewed_is_lost(
    seat: MailboxSeat, other: Other, mailbox: Breakable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_seat, "LEASE_S", 600.0)  # nothing is lost before it is broken
    told: list[str] = []
    seat.watch(told.append, told.append)
    hold(seat, other)
    mailbox.broken = True
    wait_until(lambda: mailbox.num_refused >= 3)
    assert told == []
    monkeypatch.setattr(mailbox_seat, "LEASE_S", 0.1)
    wait_until(lambda: told)
    assert "has not heard of this job for" in told[0]
    seat.leave("rollout")
    with pytest.raises(LeaseLost):
        seat.enter("rollout", "round", given_up=NEVER)
    late: list[str] = []
    seat.watch(late.append, late.append)
    assert late == told, "who watches later hears it, too"


def test_the_lease_is_longer_while_parts_begin(
    seat: MailboxSeat, other: Other, mailbox: Breakable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_seat, "LEASE_S", 0.1)
    monkeypatch.setattr(mailbox_seat, "START_LEASE_S", 600.0)
    told: list[str] = []
    seat.watch(told.append, told.append)
    hold(seat, other, START)
    mailbox.broken = True
    wait_until(lambda: mailbox.num_refused >= 3)  # the lease of a round would be over
    assert told == []
    monkeypatch.setattr(mailbox_seat, "START_LEASE_S", 0.1)
    wait_until(lambda: told)
    assert "has not heard of this job for" in told[0]


def test_who_holds_nothing_loses_nothing(
    seat: MailboxSeat, mailbox: Breakable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_seat, "LEASE_S", 0.5)
    monkeypatch.setattr(mailbox_seat, "UNHEARD_S", 2.0)
    told: list[str] = []
    seat.watch(told.append, told.append)
    mailbox.broken = True
    with pytest.raises(OSError, match="has not been reached for 2 s"):
        seat.enter("rollout", "round", given_up=NEVER)
    assert told == []


def test_a_wish_to_stop_is_told_once(seat: MailboxSeat, other: Other) -> None:
    told: list[str] = []
    seat.watch(told.append, told.append)
    other.say("stop", "1", incarnation=2, reason="of another start")
    other.say("stop", "2", reason="it was cancelled")
    other.say("stop", "3", reason="it moves")
    wait_until(lambda: told)
    time.sleep(0.1)
    assert told == ["it was cancelled"]


def test_closing_gives_up_what_is_held(mailbox: FileMailbox, other: Other) -> None:
    seat = MailboxSeat(mailbox, "job", 1)
    hold(seat, other)
    seat.close()
    seat.close()
    assert other.next("left")["ask"] == 1


def test_a_closed_seat_has_no_threads(
    mailbox: FileMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is inside a call of ray while Python ends would end the process otherwise than its
    program did."""
    monkeypatch.setattr(mailbox_seat, "_READ_S", 600.0)  # only a letter ends that wait
    monkeypatch.setattr(mailbox_seat, "_END_S", WAIT_S)
    before = set(threading.enumerate())
    seat = MailboxSeat(mailbox, "job", 1)
    began = set(threading.enumerate()) - before
    time.sleep(0.1)  # one waits for letters
    seat.close()
    assert began and not any(thread.is_alive() for thread in began)


def test_the_environment_names_a_seat(mailbox: FileMailbox, other: Other) -> None:
    assert open_seat({}) is None
    assert isinstance(open_seat({SEAT_VARIABLE: "alone"}), Alone)
    seat = open_seat({SEAT_VARIABLE: seat_variable(mailbox.address, "job", 4)})
    assert isinstance(seat, MailboxSeat)
    assert other.next("beat")["incarnation"] == 4
    seat.close()


@pytest.mark.parametrize(
    "value", ["", "yes", "file:/x", "file:/x#job", "disk:/x#job#1", "file:/x##1"]
)
def test_what_names_no_seat_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="no such seat; it is set by `rollpacker cluster`"):
        open_seat({SEAT_VARIABLE: value})


def test_a_mailbox_that_is_gone_is_an_error(tmp_path: Path) -> None:
    where = seat_variable(f"file:{tmp_path}/mail", "job", 1)
    with pytest.raises(OSError, match="there is no mailbox"):
        open_seat({SEAT_VARIABLE: where})
