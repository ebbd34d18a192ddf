"""Hosts on one machine: network namespaces on a switch, each with a ray of its own.

    with Network(3) as network: network.start_ray(); network.run(0, [...])

Addresses are 10.77.N.1 and so on, N drawn for each network. Linux, as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PORT = 6399
START_S = 90.0
RETRY = "net/ipv4/tcp_rto_max_ms"


def why_impossible() -> str | None:
    """Why this machine can have no such network; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux, and root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian, Ubuntu: apt-get install iproute2)"
    tried = subprocess.run(
        ["unshare", "-nm", "ip", "link", "add", "name", "t0", "type", "veth", "peer", "name", "t1"],
        capture_output=True,
        text=True,
    )
    return f"network namespaces are not allowed here: {tried.stderr}" if tried.returncode else None


class Network:
    """So many hosts on one switch."""

    def __init__(
        self,
        size: int,
        *,
        cores: int = 2,
        retry_s: int | None = None,
        apart: bool = False,
        lost_s: float | None = None,
    ) -> None:
        """`cores`: of each, as ray is told. `retry_s`: TCP sends what was lost again after so many
        seconds at most, where the system can be told (Linux 6.15); else each pause is twice as long
        as the one before. `apart`: no host sees another one's processes, and each may have folders
        of its own (`own_folder`). `lost_s`: ray gives a host up that does not answer for about so
        long; None: as it does by itself."""
        number = random.SystemRandom().randrange(1, 250)
        self._prefix = f"rp{number}"
        self.addresses = [f"10.77.{number}.{host + 1}" for host in range(size)]
        self._cores, self._retry_s, self._apart, self._lost_s = cores, retry_s, apart, lost_s
        self._first: list[subprocess.Popen[bytes]] = []
        """Of each host that is apart."""
        self.folder = Path(tempfile.mkdtemp(prefix="rollpacker-cluster-"))
        self.token = self.folder / "token"
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Network:
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        switch = self.switch
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for host, address in enumerate(self.addresses):
                name, port = self._name(host), f"p{host}"
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                pair = ("type", "veth", "peer", "name", port, "netns", switch)
                _ip("-n", name, "link", "add", "name", "eth0", *pair)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", switch, "link", "set", port, "master", "br0", "up")
                if self._retry_s is not None and Path(f"/proc/sys/{RETRY}").exists():
                    setting = f"{RETRY.replace('/', '.')}={1000 * self._retry_s}"
                    _ip("netns", "exec", name, "sysctl", "-q", "-w", setting)
                if self._apart:
                    self._first.append(_first_process(name))
                    ray = self.folder / "ray"  # where sockets are named by what is there
                    ray.mkdir(exist_ok=True)
                    self.own_folder(host, ray)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(len(self.addresses)):
            self.kill_all(host)
        for first in self._first:
            first.kill()
            first.wait()
        for name in (*map(self._name, range(len(self.addresses))), self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _name(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    @property
    def switch(self) -> str:
        """The namespace to which all are connected, by ports p0, p1, ..."""
        return f"{self._prefix}sw"

    @property
    def environment(self) -> dict[str, str]:
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        lost = {}
        if self._lost_s is not None:
            lost["RAY_health_check_initial_delay_ms"] = "0"
            lost["RAY_health_check_period_ms"] = lost["RAY_health_check_timeout_ms"] = "1000"
            lost["RAY_health_check_failure_threshold"] = str(round(self._lost_s))
        return {
            **os.environ,
            **own,
            "RAY_ADDRESS": f"{self.addresses[0]}:{PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": f"{START_S / 2:.0f}",
            **lost,
        }

    def own_folder(self, host: int, path: Path) -> None:
        """What this host has at the path is its own from now on, and empty. It is apart."""
        own = self.folder / "own" / self._name(host) / path.relative_to("/")
        own.mkdir(parents=True)
        self.run(host, ["mount", "--bind", str(own), str(path)])

    # -- what runs there ---------------------------------------------------------------------------

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        options.setdefault("env", self.environment)
        enter = ["ip", "netns", "exec", self._name(host)]
        if self._apart:
            enter = ["nsenter", f"--target={_child(self._first[host].pid)}", "-n", "-m", "-p"]
            if "cwd" in options:
                enter.append(f"--wd={options['cwd']}")
        return subprocess.Popen([*enter, *command], start_new_session=True, **options)

    def run(
        self, host: int, command: Sequence[str], timeout_s: float = 600.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        process = self.popen(
            host, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, said, "")

    def start_ray(
        self, hosts: Sequence[int] | None = None, resources: Mapping[str, float] | None = None
    ) -> None:
        """Ray's head on host 0, and nodes of it on the others, with these resources each."""
        for host in range(len(self.addresses)) if hosts is None else hosts:
            where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            if host:
                where = [f"--address={self.addresses[0]}:{PORT}"]
            environment = self.environment
            del environment["RAY_ADDRESS"]
            started = self.run(
                host,
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", *where),
                    f"--node-ip-address={self.addresses[host]}",
                    f"--num-cpus={self._cores}",
                    f"--object-store-memory={128 << 20}",
                    f"--resources={json.dumps(dict(resources or {}))}",
                    *((f"--temp-dir={self.folder / 'ray'}",) if host == 0 else ()),
                ],
                env=environment,
                timeout_s=START_S,
            )
            assert started.returncode == 0, started.stdout

    # -- what goes wrong ---------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Nothing gets to this host or from it any more."""
        _ip("-n", self.switch, "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", self.switch, "link", "set", f"p{host}", "up")

    def slow(self, host: int, mbit: float) -> None:
        """What goes to this host is held to so many Mbit/s."""
        held = ("tbf", "rate", f"{1000 * mbit:.0f}kbit", "burst", "64kbit", "latency", "400ms")
        subprocess.run(
            ["tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{host}", "root", *held],
            check=True,
        )

    def fast(self, host: int) -> None:
        """Take that back."""
        subprocess.run(
            ["tc", "-n", self.switch, "qdisc", "del", "dev", f"p{host}", "root"], check=True
        )

    def pids(self, host: int) -> list[int]:
        """Of all processes there, as they are known outside."""
        said = subprocess.run(
            ["ip", "netns", "pids", self._name(host)], capture_output=True, text=True, check=False
        )
        own = {pid for one in self._first for pid in (one.pid, _child(one.pid))}
        return [pid for word in said.stdout.split() if (pid := int(word)) not in own]

    def named(self, host: int, part: str) -> list[int]:
        """Of those whose command line has this part."""
        found = []
        for pid in self.pids(host):
            with contextlib.suppress(OSError):
                if part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def kill_all(self, host: int) -> None:
        """End everything there."""
        until = time.monotonic() + 10
        while (pids := self.pids(host)) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _first_process(namespace: str) -> subprocess.Popen[bytes]:
    """Begin process and mount namespaces inside of a network's. Their first process buries whoever
    is left there, and all others end with it."""
    apart = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]
    buries = ["sh", "-c", "trap '' CHLD; exec sleep infinity"]
    first = subprocess.Popen(["ip", "netns", "exec", namespace, *apart, *buries])
    until = time.monotonic() + 10
    while not (child := _child(first.pid)) or "sleep" not in _command(child):
        assert time.monotonic() < until, "no namespace has begun"
        time.sleep(0.01)
    return first


def _child(pid: int) -> int:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else 0


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
