"""A mailbox of files, for jobs and a service on one host: one file for each box of letters.

A letter (message) is a JSON object between two line ends, which one write adds to the file. The
kernel makes a write whole and puts one behind the other, so there is no lock: a process that is
stopped or killed, at whatever moment, holds up no other. A letter that was written only in part (by
a killed writer, on a full disk) is ignored.

A letter's number is its place in the file. Letters that were dealt with become a hole in the file:
zeros that take no room. A reader looks every few milliseconds whether the file has grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollpacker.cluster.seats.mailbox import ALL, Letter

_ELSEWHERE = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p"),
        *("glusterfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "wekafs", "fuse.sshfs", "fuse.rclone"),
        *("fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"),
    )
)
MOUNTS = Path("/proc/self/mountinfo")


def check_local(folder: Path, mounts: Path = MOUNTS) -> None:
    """Raises `ValueError` if the folder, which may not exist yet, is on a network file system.
    `mounts`: file with the host's mounts."""
    kind = file_system(folder, mounts)
    if kind in _ELSEWHERE:
        raise ValueError(
            f"{folder} is on a network file system ({kind}), where SQLite's locks do not hold: "
            "choose a folder on a disk of this machine"
        )


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the folder's file system, such as ext4 or nfs, by the file `mounts` of the
    host's mounts. Empty if it is unknown."""
    place = str(folder.resolve())
    found, kind = "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _plain(before.split()[4])
        is_above = place == point or place.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(found):  # of several in one place, the last is seen
            found, kind = point, after.split()[0]
    return kind


def _plain(point: str) -> str:
    """Return a mount point's path with the blanks that the kernel lists as octal codes restored."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, letter)
    return point


SCHEME = "file:"
LOOK_S = 0.004
NUM_KEYS = 100_000
"""Number of keys of read letters (messages) that are remembered, so that a letter that its sender
posts again within seconds is not returned twice."""
_EPOCH = "epoch"
_PUNCH_HOLE = 0x01 | 0x02
"""Mode of `fallocate` that turns a part of a file into a hole and keeps the file's size."""


class FileMailbox:
    """A `Mailbox` with a file for each box. A letter (message) posted twice is read only once."""

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` if the folder is on a network file system: writes might be mixed."""
        check_local(folder)
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._known: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        """Numbers of the letters read so far, by box, sender and key, to know repeated ones."""
        own = self.folder / f"{_EPOCH}.{uuid.uuid4().hex}"
        try:
            own.write_text(uuid.uuid4().hex)
            with contextlib.suppress(FileExistsError):
                os.link(own, self.folder / _EPOCH)
        finally:  # also on a full disk
            own.unlink(missing_ok=True)

    @property
    def address(self) -> str:
        return f"{SCHEME}{self.folder}"

    @property
    def epoch(self) -> str:
        return (self.folder / _EPOCH).read_text()

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        letter = {"sender": sender, "key": key, "kind": kind, "facts": facts}
        line = f"\n{json.dumps(letter, allow_nan=False)}\n".encode()
        path = self._path(box)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(file)

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        path = self._path(box)
        until = time.monotonic() + within_s
        seen = -1
        while True:
            size = _size(path)
            found = [] if size in (0, seen) else self._letters(box, path, after)
            seen = size
            left_s = until - time.monotonic()
            if found or left_s <= 0:
                return found
            time.sleep(min(LOOK_S, left_s))

    def forget(self, box: str, upto: int) -> None:
        path = self._path(box)
        with contextlib.suppress(FileNotFoundError):
            if upto == ALL:
                path.unlink()
            else:
                _make_hole(path, upto)

    def _path(self, box: str) -> Path:
        return self.folder / f"{quote(box, safe='')}.letters"

    def _letters(self, box: str, path: Path, after: int) -> list[Letter]:
        """Return the complete letters (messages) in this file with numbers above `after`."""
        found = []
        for place, line in _lines(path, after):
            try:
                letter = Letter(number=place + 1, **json.loads(line))
            except (ValueError, TypeError):  # a part of one
                continue
            known = (box, letter.sender, letter.key)
            if self._known.setdefault(known, letter.number) == letter.number:
                found.append(letter)
            if len(self._known) > NUM_KEYS:
                self._known.popitem(last=False)
        return found


def open_mailbox(address: str) -> FileMailbox:
    """Open the mailbox at this address. Raises `OSError` if there is none."""
    folder = Path(address.removeprefix(SCHEME))
    if not (folder / _EPOCH).exists():
        raise OSError(f"there is no mailbox {folder}: is the cluster's folder still there?")
    return FileMailbox(folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _lines(path: Path, after: int) -> list[tuple[int, bytes]]:
    """Return the file's whole lines, each with the position of the line end before it, from
    position `after` on. A file shorter than that is a new one: then all its lines are returned."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        size = os.fstat(file).st_size
        first = _data(file, after if after <= size else 0)
        data = os.pread(file, size - first, first)
    finally:
        os.close(file)
    found = []
    begin = data.find(b"\n")
    while (end := data.find(b"\n", begin + 1)) > begin >= 0:
        if end > begin + 1:
            found.append((first + begin, data[begin + 1 : end]))
        begin = end
    return found


def _data(file: int, place: int) -> int:
    """Return the first position in the file, from `place` on, that is in no hole. If there is
    nothing but a hole, return the file's size."""
    try:
        return os.lseek(file, place, os.SEEK_DATA)
    except OSError as error:  # all of the rest is a hole, or this disk knows none
        return os.fstat(file).st_size if error.errno == errno.ENXIO else place


def _make_hole(path: Path, upto: int) -> None:
    """Free the first `upto` bytes of the file on disk. The file must exist."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        upto = min(upto, os.fstat(file).st_size)
        libc = ctypes.CDLL(None)
        lengths = (ctypes.c_int64(0), ctypes.c_int64(upto))
        if upto and libc.fallocate(file, _PUNCH_HOLE, *lengths):  # this disk knows no holes
            place = _data(file, 0)
            os.pwrite(file, bytes(max(0, upto - place)), place)
    finally:
        os.close(file)
