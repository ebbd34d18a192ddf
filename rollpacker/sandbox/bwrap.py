"""Builds bubblewrap's command line: an empty environment, new namespaces of every kind, and only
the interpreter's files, read-only. Inside, `zygote.py` forks each run."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import marshal
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from rollpacker.sandbox import kernel, program, zygote
from rollpacker.sandbox.sandbox import Profile, SandboxUnavailable

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def find_bwrap() -> str:
    """The path of the program bwrap. Raises SandboxUnavailable if it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable(why_unavailable("the program bwrap (bubblewrap) is not installed"))
    return path


def why_unavailable(missing: str) -> str:
    """The message for a machine that cannot isolate programs. `missing`: what it lacks."""
    return (
        f"no sandbox for untrusted programs on this machine: {missing}.\n"
        "Check it: `bwrap --version` and `unshare -Ur true` must both succeed.\n"
        "Cures, one of:\n"
        "  1. install the Debian package bubblewrap: apt-get install bubblewrap\n"
        "  2. allow user namespaces: an AppArmor profile for bwrap, or `sysctl -w\n"
        "     kernel.apparmor_restrict_unprivileged_userns=0`; in a container `--security-opt\n"
        "     seccomp=...` with a profile that allows unshare, clone, setns and mount\n"
        "  3. set sandbox.url to a SandboxFusion service on another machine\n"
        "To run programs without any isolation: sandbox.allow_unsandboxed_code (docs/sandbox.md)."
    )


@functools.cache
def compiled(path: str) -> bytes:
    """The module at `path` as the bytes of a .pyc file, which loads without compiling."""
    source = Path(path).read_bytes()
    code = compile(source, os.path.basename(path), "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


@functools.cache
def interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def mounts(profile: Profile) -> tuple[str, ...]:
    """Bubblewrap's arguments for the file system: an interpreter, its libraries, four devices, and
    the packages and folders of modules that `profile` lets programs import."""
    multiarch = "/usr/lib/" + (sysconfig.get_config_var("MULTIARCH") or "none")
    libraries = multiarch if os.path.isdir(multiarch) else "/usr/lib"
    shown: list[str] = []
    for path in (libraries, "/usr/lib64", *_python_folders(), "/usr/share/zoneinfo"):
        if os.path.exists(path) and not any(path.startswith(f"{top}/") for top in shown):
            shown.append(path)
    above = {str(parent) for path in (*shown, *DEVICES) for parent in Path(path).parents} - {"/"}
    # Open to every user, unlike those that bubblewrap makes unasked.
    folders = sorted(above | {*_and_above(zygote.PROGRAM), *_site_folders(profile), zygote.SITE})
    arguments = [word for path in folders for word in ("--dir", path)]
    arguments += [word for path in shown for word in ("--ro-bind", path, path)]
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            arguments += ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            arguments += ("--ro-bind", folder, folder)
    for folder in _package_folders(shown):
        arguments += ("--tmpfs", folder, "--remount-ro", folder)
    for device in DEVICES:
        arguments += ("--dev-bind", device, device)
    arguments += ("--symlink", zygote.TEMP, "/dev/shm")  # for multiprocessing
    installed = (*map(_folder_of, profile.packages), *map(_metadata_of, profile.distributions))
    for folder in installed:
        arguments += ("--ro-bind", folder, f"{zygote.SITE}/{os.path.basename(folder)}")
    for name, folder in profile.folders:
        arguments += ("--ro-bind", folder, _site_folder(name))
    return (*arguments, "--dir", zygote.TEMP)


def _site_folder(package: str) -> str:
    return f"{zygote.SITE}/{package.replace('.', '/')}"


def _site_folders(profile: Profile) -> set[str]:
    """All parents of the profile's module folders in the sandbox, which must be made there."""
    return {folder for name, _ in profile.folders for folder in _and_above(_site_folder(name))}


def _and_above(path: str) -> set[str]:
    return {str(parent) for parent in Path(path).parents} - {"/"}


def _python_folders() -> list[str]:
    """Paths of the interpreter, its standard library, and the libraries that come with it."""
    prefix = os.path.realpath(sys.base_prefix)
    below = f"/{_python_name()}" if prefix == "/usr" else ""
    return [interpreter(), f"{prefix}/lib{below}", f"{prefix}/lib64{below}"]


def _package_folders(shown: Sequence[str]) -> list[str]:
    """Folders of installed packages below the folders `shown` to programs, which must be hidden."""
    above = ("", f"/{_python_name()}", "/python3")
    found = []
    for top in shown:
        for name in ("site-packages", "dist-packages"):
            found += [f"{top}{folder}/{name}" for folder in above]
    return [folder for folder in found if os.path.isdir(folder)]


def _python_name() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def lacks(profile: Profile) -> str:
    """A sentence that names packages of `profile` that are not installed here; empty if all are."""
    missing = [name for name in profile.packages if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    needed = ", ".join(missing)
    return f"the sandbox profile {profile.name!r} needs these packages installed here: {needed}"


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed"
    return next(iter(spec.submodule_search_locations))


def _metadata_of(distribution: str) -> str:
    """The folder with an installed distribution's metadata, where some packages find versions."""
    files = importlib.metadata.distribution(distribution).files or ()
    found = next(file for file in files if file.name == "METADATA")
    return str(Path(found.locate()).parent)


def command(
    bwrap: str,
    profile: Profile,
    own: Sequence[tuple[int, str]],
    fds: Sequence[int],
    users: Sequence[str],
) -> list[str]:
    """Return bubblewrap's whole command line. `own`: pairs of the descriptor of a file of this
    package and its path in the sandbox. `fds`: descriptors passed to the process inside, as
    arguments by their numbers. `users`: arguments for user and group."""
    ours = [
        word for fd, path in own for word in ("--perms", "0644", "--ro-bind-data", str(fd), path)
    ]
    return [
        *(bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", *users),
        *("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"),
        *("--setenv", program.FOR_THE_C_LIBRARY.decode(), "1"),
        *mounts(profile),
        *(*ours, "--remount-ro", "/", "--chdir", "/"),
        *("--", interpreter(), *zygote.FLAGS, "-c", zygote.START_CODE),
        *(profile.name, "cold" if profile.is_cold else "warm", ",".join(profile.warm)),
        *map(str, fds),
    ]


class Users:
    """User and group of all processes in bubblewrap. Normally they are those of the process that
    starts them, under other numbers inside. `others`: programs get a user that the starting process
    does not have. This is for the host's root, whose number of tasks the kernel does not limit:
    bubblewrap waits until `started` has written the tables of users and groups."""

    def __init__(self, *, others: bool) -> None:
        nobody = str(kernel.NOBODY)
        self.arguments = ["--uid", nobody, "--gid", nobody]
        self.fds: tuple[int, ...] = ()
        if others:
            waits, self._go = os.pipe()
            self._told, tells = os.pipe()
            self.fds = (waits, tells)
            self.arguments = [
                *("--uid", "0", "--gid", "0", "--userns-block-fd", str(waits)),
                *("--info-fd", str(tells), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
            ]

    def started(self) -> None:
        """Write the tables of users and groups, if there are any to write. Call this when
        bubblewrap has started. Raises OSError."""
        if not self.fds:
            return
        self._close_theirs()
        with open(self._told, "rb", closefd=False) as file:
            match = re.search(rb'"child-pid": *(\d+)', file.read())
        if match is None:
            raise OSError("bubblewrap did not say which process it started")
        for table in ("uid_map", "gid_map"):
            lines = f"0 0 1\n{kernel.NOBODY} {kernel.NOBODY} 1\n"
            Path(f"/proc/{int(match[1])}/{table}").write_text(lines)
        os.write(self._go, b"1")

    def _close_theirs(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def close(self) -> None:
        self._close_theirs()
        for name in ("_told", "_go"):
            if name in vars(self):
                os.close(vars(self).pop(name))


def is_host_root() -> bool:
    """Whether this process is the host's root, whose tasks the kernel does not limit."""
    try:
        first, outside, _ = Path("/proc/self/uid_map").read_text().split()[:3]
    except (OSError, ValueError):
        return os.getuid() == 0
    return os.getuid() == 0 and first == outside == "0"


def start(
    bwrap: str,
    profile: Profile,
    control: socket.socket,
    errors: int,
    entrances: Sequence[int],
    *,
    tasks_are_counted: bool,
) -> subprocess.Popen[bytes]:
    """Start a zygote (a process that forks the runs), which gets requests over the socket `control`
    and writes errors to the file `errors`. The runs enter control groups through the descriptors in
    `entrances`; `tasks_are_counted`: whether these limit the number of tasks.

    The zygote ends with the thread that calls this. Raises OSError.
    """
    fds = (control.fileno(), *entrances)
    with contextlib.ExitStack() as stack:
        own = []
        folder = os.path.dirname(zygote.PROGRAM)
        for name in zygote.MODULES:
            file = stack.enter_context(open(os.memfd_create("sandbox"), "wb"))
            file.write(compiled(str(Path(__file__).with_name(f"{name}.py"))))
            file.flush()
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            own.append((file.fileno(), f"{folder}/{name}.pyc"))
        users = Users(others=is_host_root() and not tasks_are_counted)
        stack.callback(users.close)
        process = subprocess.Popen(
            command(bwrap, profile, own, fds, users.arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(*fds, *users.fds, *(fd for fd, _ in own)),
            env={},
            cwd="/",
        )
        try:
            users.started()
        except OSError:
            process.kill()
            process.wait()
            raise
        return process
