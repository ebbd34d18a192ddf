"""The mailbox in a file, and the store of events."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollpacker.cluster.seats import mail_file
from rollpacker.cluster.seats.mail_file import FileMailbox, check_local, file_system, open_mailbox
from rollpacker.cluster.seats.mailbox import ALL, Letter
from rollpacker.cluster.service.store import Position, Store, StoredEvent

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:50 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 8:2 / /home/fast\\040disk rw - xfs /dev/sdb rw
32 22 0:51 / /scratch rw - fuse.sshfs me@host:/ rw
"""


@pytest.fixture
def mailbox(tmp_path: Path) -> FileMailbox:
    return FileMailbox(tmp_path / "mail")


def test_a_letter_comes_once_in_order_and_is_forgotten(mailbox: FileMailbox) -> None:
    for _ in range(2):
        mailbox.post("a", "me", "1", "ask", {"n": 1})
        mailbox.post("a", "me", "2", "left", {"n": 2})
    mailbox.post("b", "me", "1", "ask", {})
    mailbox.post("a", "you", "1", "ask", {"n": 3})
    letters = mailbox.read("a", 0, 0.0)
    assert [(one.sender, one.key, one.kind, one.facts) for one in letters] == [
        ("me", "1", "ask", {"n": 1}),
        ("me", "2", "left", {"n": 2}),
        ("you", "1", "ask", {"n": 3}),
    ]
    mailbox.forget("a", letters[1].number)
    mailbox.post("a", "me", "2", "left", {"n": 2})
    assert [one.sender for one in mailbox.read("a", 0, 0.0)] == ["you"]
    assert mailbox.read("a", letters[-1].number, 0.0) == []
    assert len(mailbox.read("b", 0, 0.0)) == 1


def test_who_waits_is_told_soon_by_another_process(
    mailbox: FileMailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    own = threading.get_ident()

    def nap(seconds: float) -> None:
        if threading.get_ident() == own:  # and not a thread that another test left
            naps.append(seconds)
            (tmp_path / "waits").touch()
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr(mail_file.time, "sleep", nap)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from rollpacker.cluster.seats import mail_file\n"
        "box = mail_file.open_mailbox(sys.argv[1])\n"
        "while not Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "time.sleep(0.3); box.post('a', 'other', '1', 'ask', {})"
    )
    with subprocess.Popen([sys.executable, "-c", code, mailbox.address, str(tmp_path / "waits")]):
        (letter,) = mailbox.read("a", 0, 120.0)
    assert 0.0 < max(naps) < 0.05, "so long a letter lies there at most"
    began_s = time.monotonic()
    assert mailbox.read("a", letter.number, 0.1) == []
    assert time.monotonic() - began_s >= 0.1


def test_who_is_stopped_while_it_writes_holds_up_nobody(mailbox: FileMailbox) -> None:
    """Writers are stopped for good at whatever moment; what others write comes through at once."""
    code = (
        "import sys; from rollpacker.cluster.seats import mail_file\n"
        "box = mail_file.open_mailbox(sys.argv[1]); number = 0\n"
        "while True: number += 1; box.post('a', sys.argv[2], str(number), 'ask', {'x': 'y' * 9000})"
    )
    after, rng = 0, random.Random(1)
    writers = []
    try:
        for name in map(str, range(8)):
            writer = subprocess.Popen([sys.executable, "-c", code, mailbox.address, name])
            writers.append(writer)
            while not any(one.sender == name for one in mailbox.read("a", after, 60.0)):
                pass
            time.sleep(rng.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGSTOP)
            mailbox.post("a", "me", name, "ask", {})
            letters = mailbox.read("a", after, 0.0)
            assert any((one.sender, one.key) == ("me", name) for one in letters)
            after = letters[-1].number
            mailbox.forget("a", after)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


def test_letters_of_many_writers_come_whole_and_in_their_order(mailbox: FileMailbox) -> None:
    code = (
        "import sys; from rollpacker.cluster.seats import mail_file\n"
        "box = mail_file.open_mailbox(sys.argv[1])\n"
        "for n in range(300): box.post('a', sys.argv[2], str(n), 'ask', {'x': 'y' * (n * 37)})"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, mailbox.address, str(name)])
        for name in range(4)
    ]
    found: dict[str, list[Letter]] = {str(name): [] for name in range(4)}
    after = num_forgotten = 0
    while sum(map(len, found.values())) < 1200:
        letters = mailbox.read("a", after, 30.0)
        assert letters, {name: len(ones) for name, ones in found.items()}
        for letter in letters:
            assert letter.number > after
            after = letter.number
            found[letter.sender].append(letter)
        if after > 2_000_000 > num_forgotten:
            num_forgotten = after
            mailbox.forget("a", after)
    assert [writer.wait() for writer in writers] == [0] * 4
    for letters in found.values():
        assert [int(one.key) for one in letters] == list(range(300))
        assert all(len(one.facts["x"]) == int(one.key) * 37 for one in letters)


@pytest.mark.parametrize("part", [b'\n{"sender": "he', b"\n", b'\n{"sender": "he"}', b"\0\0"])
def test_a_part_of_a_letter_is_none_and_hides_none(mailbox: FileMailbox, part: bytes) -> None:
    mailbox.post("a", "me", "1", "ask", {})
    with (mailbox.folder / "a.letters").open("ab") as file:
        file.write(part)  # its writer is killed here
    assert [one.key for one in mailbox.read("a", 0, 0.0)] == ["1"]
    mailbox.post("a", "me", "2", "ask", {})
    letters = mailbox.read("a", 0, 0.0)
    assert [one.key for one in letters] == ["1", "2"]
    assert [one.key for one in mailbox.read("a", letters[0].number, 0.0)] == ["2"]
    assert [one.key for one in mailbox.read("a", letters[1].number - 1, 0.0)] == ["2"]
    mailbox.forget("a", letters[0].number)
    assert [one.key for one in FileMailbox(mailbox.folder).read("a", 0, 0.0)] == ["2"]


@pytest.mark.parametrize("knows_holes", [True, False])
def test_what_was_dealt_with_takes_no_room_and_does_not_come_again(
    mailbox: FileMailbox, knows_holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_holes:
        monkeypatch.setattr(mail_file, "_PUNCH_HOLE", 0x80)  # no such mode
    for number in range(200):
        mailbox.post("a", "me", f"{number}", "ask", {"x": "y" * 5000})
    letters = mailbox.read("a", 0, 0.0)
    mailbox.forget("a", letters[-2].number)
    again = FileMailbox(mailbox.folder)
    assert [one.key for one in again.read("a", 0, 0.0)] == ["199"]
    used = (mailbox.folder / "a.letters").stat().st_blocks * 512
    assert (used < 100_000) == knows_holes
    mailbox.post("a", "me", "200", "ask", {})
    assert [one.key for one in again.read("a", letters[-1].number, 0.0)] == ["200"]


def test_a_box_that_nobody_reads_any_more_is_gone_and_may_come_anew(mailbox: FileMailbox) -> None:
    mailbox.forget("a", ALL)  # there is none
    mailbox.post("a", "me", "1", "ask", {"x": "y" * 1000})
    (letter,) = mailbox.read("a", 0, 0.0)
    mailbox.forget("a", ALL)
    assert not list(mailbox.folder.glob("*.letters"))
    assert mailbox.read("a", letter.number, 0.0) == []
    mailbox.post("a", "me", "2", "ask", {})
    assert [one.key for one in FileMailbox(mailbox.folder).read("a", 5000, 0.0)] == ["2"]


def test_a_full_disk_is_an_error_and_the_letter_is_none(
    mailbox: FileMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
    with pytest.raises(OSError, match="No space left"):
        mailbox.post("a", "me", "1", "ask", {})
    monkeypatch.undo()
    mailbox.post("a", "me", "1", "ask", {})
    assert [one.key for one in mailbox.read("a", 0, 0.0)] == ["1"]


def test_its_address_leads_to_it_and_its_epoch_is_that_of_its_letters(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path / "mail")
    again = open_mailbox(mailbox.address)
    assert again.epoch == mailbox.epoch
    with pytest.raises(OSError, match="there is no mailbox"):
        open_mailbox(f"file:{tmp_path}/none")
    assert FileMailbox(tmp_path / "other").epoch != mailbox.epoch


@pytest.mark.parametrize(
    ("place", "kind"),
    [("/home/me/runs", "nfs4"), ("/home/fast disk/runs", "xfs"), ("/scratch", "fuse.sshfs")],
)
def test_file_systems_that_lie_elsewhere_are_refused(tmp_path: Path, place: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system(Path(place), mounts) == kind
    if kind == "xfs":
        check_local(Path(place), mounts)
        return
    with pytest.raises(ValueError, match=rf"{place} is on a network file system \({kind}\)"):
        check_local(Path(place), mounts)


def test_here_is_a_disk_of_this_machine(tmp_path: Path) -> None:
    assert file_system(tmp_path) != ""
    check_local(tmp_path)
    check_local(tmp_path / "not there" / "yet")


def test_events_come_back_with_the_position_of_letters(tmp_path: Path) -> None:
    store = Store(tmp_path / "events.db")
    assert store.position == Position("", 0)
    assert store.began_s(5.0) == 5.0
    store.write([StoredEvent({"kind": "A"}, 1), StoredEvent({"kind": "B"}, 2)], Position("e", 7))
    store.write([], Position("e", 8))
    store.close()
    again = Store(tmp_path / "events.db")
    assert again.id == store.id
    assert again.began_s(6.0) == 5.0
    assert [(one.event["kind"], one.checksum) for one in again.entries()] == [("A", 1), ("B", 2)]
    assert again.position == Position("e", 8)


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "events.db").close()
    with sqlite3.connect(tmp_path / "events.db") as base:
        base.execute("UPDATE facts SET value = '99' WHERE name = 'format'")
    with pytest.raises(ValueError, match=r"newer version \(format 99, known: 3\): update rollpack"):
        Store(tmp_path / "events.db")
