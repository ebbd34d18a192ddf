"""Whether SQLite's locks can be relied on: not on a file system that lies elsewhere."""

from __future__ import annotations

from pathlib import Path

_ELSEWHERE = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "afs", "9p"),
        *("glusterfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "wekafs", "fuse.sshfs", "fuse.rclone"),
        *("fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs"),
    )
)
MOUNTS = Path("/proc/self/mountinfo")


def check_local(folder: Path, mounts: Path = MOUNTS) -> None:
    """Raises `ValueError` if the folder is on a network file system. It may not be there yet."""
    kind = file_system(folder, mounts)
    if kind in _ELSEWHERE:
        raise ValueError(
            f"{folder} is on a network file system ({kind}), where SQLite's locks do not hold: "
            "choose a folder on a disk of this machine"
        )


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Its kind, as the kernel calls it; "" where that is not known."""
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
    """The kernel writes blanks as octal numbers."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, letter)
    return point
