"""The mailbox in a file, and the store of events."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollpacker.cluster import mail_file
from rollpacker.cluster.local_disk import check_local, file_system
from rollpacker.cluster.mail_file import FileMailbox, open_mailbox
from rollpacker.cluster.store import Entry, Position, Store

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:50 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 8:2 / /home/fast\\040disk rw - xfs /dev/sdb rw
32 22 0:51 / /scratch rw - fuse.sshfs me@host:/ rw
"""


@pytest.fixture
def mailbox(tmp_path: Path) -> FileMailbox:
    return FileMailbox(tmp_path / "mail.db")


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


def test_who_waits_is_told_soon_by_another_process(mailbox: FileMailbox) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rollpacker.cluster import mail_file\n"
        "box = mail_file.open_mailbox(sys.argv[1]); time.sleep(0.3)\n"
        "box.post('a', 'other', '1', 'ask', {'at_s': time.time()})"
    )
    with subprocess.Popen([sys.executable, "-c", code, mailbox.address]):
        (letter,) = mailbox.read("a", 0, 30.0)
        assert time.time() - letter.facts["at_s"] < 1.0
    began_s = time.monotonic()
    assert mailbox.read("a", letter.number, 0.1) == []
    assert time.monotonic() - began_s >= 0.1


def test_a_locked_file_is_waited_for_and_then_an_error(
    mailbox: FileMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sqlite3.connect(mailbox.path, isolation_level=None, check_same_thread=False)
    base.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(0.3, base.execute, ["ROLLBACK"])
    release.start()
    mailbox.post("a", "me", "1", "ask", {})
    release.join()
    base.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(mail_file, "BUSY_S", 0.1)
    with pytest.raises(OSError, match="locked"):
        FileMailbox(mailbox.path).post("a", "me", "2", "ask", {})
    base.execute("ROLLBACK")
    mailbox.post("a", "me", "2", "ask", {})
    assert len(mailbox.read("a", 0, 0.0)) == 2


def test_a_broken_file_is_an_error_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "mail.db").write_bytes(b"no database" * 100)
    with pytest.raises(OSError, match="Remove it, if the host has crashed"):
        FileMailbox(tmp_path / "mail.db")


def test_its_address_leads_to_it_and_its_epoch_is_that_of_its_letters(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path / "mail.db")
    again = open_mailbox(mailbox.address)
    assert again.epoch == mailbox.epoch
    with pytest.raises(OSError, match="there is no mailbox"):
        open_mailbox(f"file:{tmp_path}/none.db")
    assert FileMailbox(tmp_path / "other.db").epoch != mailbox.epoch


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
    store.write([Entry({"kind": "A"}, 1), Entry({"kind": "B"}, 2)], Position("e", 7))
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
    with pytest.raises(ValueError, match=r"newer version \(format 99, known: 1\): update rollpack"):
        Store(tmp_path / "events.db")
