"""What attacks are after, and whether any of it was read, changed, reached or hurt. All of it lies
outside of the sandbox and is looked at from there."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rollpacker.sandbox.syscalls import CHECKED, FORK, PLAIN, SESSION

VARIABLE = "ROLLPACKER_ATTACK_SECRET_"
_IPC_CREAT, _IPC_RMID = 0o1000, 0


class Bait:
    """Made before the box is opened, so that the box could inherit all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = "s3cret-" + secrets.token_hex(12)
        self.mark = "rp" + secrets.token_hex(5)
        """Name of every process and file that attacks make; the kernel keeps 15 characters."""
        self.home, self.temp = folder / "home", folder / "temp"
        for made in (self.home, self.temp, self.home / ".ssh"):
            made.mkdir()
        self.secret_file = folder / "bait-secret.txt"
        self.source = folder / "source.py"
        for path in (self.secret_file, self.home / ".netrc", self.home / ".ssh" / "id_rsa"):
            path.write_text(self.secret)
        self.source.write_text(f"KEY = {self.secret!r}\n")
        self.descriptor = os.open(self.secret_file, os.O_RDWR)
        os.set_inheritable(self.descriptor, True)
        self.variable = VARIABLE + self.mark
        os.environ[self.variable] = self.secret
        self.shm = Path("/dev/shm", f"rollpacker-{self.mark}")
        self.shm.write_text(self.secret)
        self._segment, self.key = self._make_segment()
        self.listeners = Listeners(folder)
        self.bystander = self.start_bystander()
        self.before = self.snapshot()

    def _make_segment(self) -> tuple[int, int]:
        libc, key = ctypes.CDLL(None), secrets.randbelow(1 << 30) + 1
        segment = libc.shmget(key, 4096, _IPC_CREAT | 0o666)
        assert segment >= 0
        libc.shmat.restype = ctypes.c_void_p
        address = libc.shmat(segment, None, 0)
        ctypes.memmove(address, self.secret.encode(), len(self.secret))
        libc.shmdt(ctypes.c_void_p(address))
        return segment, key

    def start_bystander(self) -> subprocess.Popen[bytes]:
        """A process of the same user, with the secret on its command line."""
        command = [sys.executable, "-S", "-c", "import time; time.sleep(3600)", self.secret]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def described(self) -> dict[str, object]:
        """For the program. Not the secret itself."""
        machine = platform.machine()
        calls = [table.get(machine, {}).values() for table in (PLAIN, CHECKED, FORK, SESSION)]
        return {
            "folder": str(self.folder),
            "home": str(self.home),
            "temp": str(self.temp),
            "secret_file": str(self.secret_file),
            "source": str(self.source),
            "variable": self.variable,
            "shm": self.shm.name,
            "key": self.key,
            "bystander": self.bystander.pid,
            "host_pid": os.getpid(),
            "mark": self.mark,
            "often": 60,
            "allowed_calls": sorted(number for numbers in calls for number in numbers),
            **self.listeners.addresses,
        }

    def snapshot(self) -> dict[str, tuple[int, int, int, str]]:
        """Everything in the folder: mode, owner, time of change, contents."""
        found = {}
        for path in [self.folder, *sorted(self.folder.rglob("*"))]:
            info = path.lstat()
            is_file = path.is_file() and not path.is_symlink()
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
            changed = info.st_mtime_ns if is_file else 0
            found[str(path)] = (info.st_mode, info.st_uid, changed, digest)
        return found

    def marked(self) -> list[int]:
        """Processes of this machine that an attack made."""
        found = []
        for comm in (process / "comm" for process in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if comm.read_text().strip() == self.mark:
                    found.append(int(comm.parent.name))
        return found

    def problems(self, *, patience_s: float = 3.0) -> list[str]:
        """What an attack has done, seen from here. Processes may take so long to be gone."""
        found = [f"{name} was reached" for name in self.listeners.reached()]
        now = self.snapshot()
        found += [
            f"{path} changed"
            for path in {*now, *self.before}
            if now.get(path) != self.before.get(path)
        ]
        folders = (
            "/",
            "/tmp",
            "/var/tmp",
            "/usr",
            "/etc",
            "/dev/shm",
            str(Path.home()),
            os.getcwd(),
        )
        for folder in (*folders, *sys.path):
            for suffix in ("", ".d", ".l", ".py", ".pth"):
                path = Path(folder or ".", self.mark + suffix)
                if path.is_symlink() or path.exists():
                    found.append(f"{path} was made")
        if self.bystander.poll() is not None:
            found.append("the bystander was killed")
        elif _state(self.bystander.pid) in "Tt":
            found.append("the bystander was stopped")
        found += [f"process {pid} is left" for pid in self._left(patience_s)]
        return found

    def _left(self, patience_s: float) -> list[int]:
        until = time.monotonic() + patience_s
        while (left := self.marked()) and time.monotonic() < until:
            time.sleep(0.01)
        return left

    def repair(self) -> None:
        """After an escape: so that the next attack finds all in order. Ends what is left."""
        for pid in self.marked():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.bystander.poll() is None:
            self.bystander.send_signal(signal.SIGCONT)
        else:
            self.bystander = self.start_bystander()
        self.listeners.reached()

    def close(self) -> None:
        self.repair()
        self.bystander.kill()
        self.bystander.wait()
        self.listeners.close()
        os.close(self.descriptor)
        self.shm.unlink(missing_ok=True)
        ctypes.CDLL(None).shmctl(self._segment, _IPC_RMID, None)
        os.environ.pop(self.variable, None)


@contextlib.contextmanager
def laid_out() -> Iterator[Bait]:
    """The bait, for as long as a box is open."""
    with tempfile.TemporaryDirectory(prefix="bait-") as folder:
        bait = Bait(Path(folder))
        try:
            yield bait
        finally:
            bait.close()


class Listeners:
    """Sockets of the host. A thread takes down who was reached."""

    def __init__(self, folder: Path) -> None:
        unique = secrets.token_hex(4)
        unix, stream, datagram = socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM
        self._sockets = {
            "tcp": self._bound(socket.AF_INET, stream, ("0.0.0.0", 0)),
            "udp": self._bound(socket.AF_INET, datagram, ("0.0.0.0", 0)),
            "path_socket": self._bound(unix, stream, str(folder / "socket")),
            "abstract": self._bound(unix, stream, f"\0rp-bait-abstract-{unique}"),
            "datagram": self._bound(unix, datagram, f"\0rp-bait-abstract-d-{unique}"),
        }
        with contextlib.suppress(OSError):
            self._sockets["tcp6"] = self._bound(socket.AF_INET6, stream, ("::1", 0))
        self.addresses: dict[str, object] = {"tcp6": 9, "address": _own_address()}
        for name, listener in self._sockets.items():
            address = listener.getsockname()
            if isinstance(address, bytes):
                address = address.decode()
            self.addresses[name] = address[1] if isinstance(address, tuple) else address
        self._reached: list[str] = []
        self._stop, stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, args=(stopped,), daemon=True)
        self._thread.start()

    @staticmethod
    def _bound(family: int, kind: int, address: object) -> socket.socket:
        listener = socket.socket(family, kind)
        listener.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            listener.listen(32)
        listener.setblocking(False)
        return listener

    def _listen(self, stopped: socket.socket) -> None:
        selector = selectors.DefaultSelector()
        selector.register(stopped, selectors.EVENT_READ)
        for name, listener in self._sockets.items():
            selector.register(listener, selectors.EVENT_READ, name)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return selector.close()
                listener = self._sockets[key.data]
                with contextlib.suppress(OSError):
                    if listener.type == socket.SOCK_STREAM:
                        listener.accept()[0].close()
                    else:
                        listener.recv(1 << 16)
                    self._reached.append(key.data)

    def reached(self) -> list[str]:
        """Names of those who were, since the last call."""
        time.sleep(0.002)  # for the thread
        found, self._reached[:] = sorted(set(self._reached)), []
        return found

    def close(self) -> None:
        self._stop.send(b"x")
        self._thread.join()
        for listener in self._sockets.values():
            listener.close()
        self._stop.close()


def _own_address() -> str:
    """Of this machine on its network, without sending anything."""
    with socket.socket(type=socket.SOCK_DGRAM) as it, contextlib.suppress(OSError):
        it.connect(("192.0.2.1", 9))
        return it.getsockname()[0]
    return "127.0.0.1"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def resident_bytes(pids: list[int]) -> int:
    """Memory of processes that is no file's; what they share is counted once between them."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            shares = [line.split() for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem"))]
            total += sum(int(words[1]) << 10 for words in shares)
    return total
