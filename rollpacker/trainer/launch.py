"""Starting the trainer's processes and talking to them.

The run's own process listens; every rank connects to it and then obeys, one call at a time. Started
by RollPacker itself, all ranks are its children on this machine. Under `torchrun` rank 0 is the
run's own process, which starts one child to be the trainer's rank 0, and the other ranks become
workers themselves; they learn from torchrun's store where to connect.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from rollpacker.trainer.base import TrainerProcessError

ADDRESS = "ROLLPACKER_TRAINER_ADDRESS"
"""host:port of the run's own process, in a worker's environment."""
KEY = "ROLLPACKER_TRAINER_KEY"
"""Secret that both sides of the connection prove to know, in hex."""
START_S = 300.0
"""How long all ranks may take to connect: they load torch first."""
END_S = 5.0
"""How long a rank may take to end by itself."""
GRACE_S = 30.0
"""How long the others may take once a rank has failed: they may wait for it in a joint call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """This process's place in a job that torchrun started."""

    rank: int
    world_size: int
    master: tuple[str, int]
    has_store: bool
    """torchrun's agent keeps the store; else rank 0 does."""
    restart: str = "0"
    """How often torchrun has started its processes anew; the store outlives them."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """None if torchrun did not start this process."""
        names = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names) or ADDRESS in environment:
            return None
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            master=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def store_key(self) -> str:
        """Where rank 0 says how it can be reached."""
        return f"rollpacker/trainer/{self.restart}"

    def store(self) -> Any:
        from torch.distributed import TCPStore

        host, port = self.master
        return TCPStore(host, port, is_master=self.rank == 0 and not self.has_store)


@dataclass(slots=True, kw_only=True)
class Rank:
    """One worker, as the run's own process sees it."""

    number: int
    pid: int
    connection: Connection
    process: subprocess.Popen[bytes] | None
    """None: torchrun's child, not ours."""

    def how_it_ended(self) -> str:
        """In words, once its connection is closed."""
        if self.process is None:
            return "closed its connection"
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection, but lives"
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"


class Ranks:
    """All workers of a trainer. Calls are made on all of them at once."""

    def __init__(self, num_processes: int) -> None:
        """Start them; `connect` before the first call."""
        self._key = secrets.token_bytes(32)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._store: Any = None
        """Kept alive: this process serves it, unless torchrun does."""
        self.num_processes = num_processes
        self.all: list[Rank] = []
        torchrun = Torchrun.from_environment()
        self._is_torchrun = torchrun is not None
        if torchrun is not None and torchrun.rank > 0:
            raise ValueError(
                f"this is rank {torchrun.rank} of torchrun, and only rank 0 drives the run: start "
                "it as `torchrun ... -m rollpacker.cli.main train CONFIG`, which makes the others "
                "workers"
            )
        host = "127.0.0.1" if torchrun is None else "0.0.0.0"
        self._listener = Listener((host, 0), backlog=num_processes, authkey=self._key)
        port = self._listener.address[1]
        try:
            if torchrun is None:
                for rank in range(num_processes):
                    self._start(rank, f"127.0.0.1:{port}", _local(rank, num_processes))
            else:
                self._store = torchrun.store()
                address = f"{torchrun.master[0]}:{port}"
                self._store.set(torchrun.store_key, f"{address} {self._key.hex()}")
                self._start(0, f"127.0.0.1:{port}", {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        except BaseException:
            self.close()
            raise

    def connect(self) -> None:
        """Wait until all are there. Raises `TrainerProcessError` if one ends before."""
        if not self._is_torchrun:
            from torch.distributed import TCPStore

            # Served here, so that no rank has to find a port that is still free when it binds it.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.all = self._accepted(self.num_processes)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`method(*arguments[rank])` on every rank; their results, in order.

        Raises what a rank raised: the first that names samples if there is one. A rank that ends
        meanwhile ends all: `TrainerProcessError`. So does an error of one rank that others wait
        for longer than `GRACE_S`.
        """
        for rank, values in zip(self.all, arguments, strict=True):
            try:
                rank.connection.send((method, values))
            except OSError:
                self._ended(rank, method)
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        waiting = {rank.connection: rank for rank in self.all}
        while waiting:
            ready = wait(list(waiting), timeout=GRACE_S if errors else None)
            if not ready:
                self._kill()
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, OSError):
                    self._ended(rank, method)
                (results if succeeded else errors)[rank.number] = value
        if errors:
            raise min(errors.items(), key=lambda item: (not _names_samples(item[1]), item[0]))[1]
        return [results[rank.number] for rank in self.all]

    def close(self) -> None:
        """End all of them. Idempotent."""
        if not self.all:  # they may still load their libraries
            self._kill()
        for rank in self.all:
            _hang_up(rank.connection)  # a worker ends when its connection does
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._listener.close()

    def _ended(self, rank: Rank, method: str) -> None:
        """The others would wait for it in a collective call for ever."""
        how = rank.how_it_ended()
        self._kill()
        raise TrainerProcessError(
            f"process {rank.number} of the trainer (pid {rank.pid}) {how} during {method!r}. No "
            "update of this step was kept; --resume goes on from the last checkpoint"
        )

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for rank in self.all:
            if rank.process is None:
                _hang_up(rank.connection)

    def _start(self, rank: int, address: str, environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollpacker.trainer.worker"],
            env={**os.environ, **environment, ADDRESS: address, KEY: self._key.hex()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the run's own process
        )
        self._processes.append(process)

    def _accepted(self, count: int) -> list[Rank]:
        found: dict[int, Rank] = {}
        deadline = time.monotonic() + START_S
        socket_ = self._listener._listener._socket  # type: ignore[attr-defined]
        socket_.settimeout(0.5)
        while len(found) < count:
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    raise TrainerProcessError(
                        f"process {rank} of the trainer ended before it was ready (exit code "
                        f"{process.returncode}); its messages stand above"
                    )
            if time.monotonic() > deadline:
                missing = sorted(set(range(count)) - set(found))
                raise TrainerProcessError(
                    f"processes {missing} of the trainer did not connect within {START_S:.0f} s"
                )
            # Anybody may knock at the port, and a rank that dies while it does is seen above.
            with contextlib.suppress(TimeoutError, AuthenticationError, EOFError, ConnectionError):
                connection = self._listener.accept()
                number, pid = connection.recv()
                connection.send(None if self._is_torchrun else _served_at(self._store.port))
                ours = [p for p in self._processes if p.pid == pid]
                found[number] = Rank(
                    number=number,
                    pid=pid,
                    connection=connection,
                    process=ours[0] if ours else None,
                )
        return [found[number] for number in range(count)]


def connect_to_run() -> Connection:
    """A worker's side: the connection to the run's own process."""
    if ADDRESS in os.environ:
        address, key = os.environ[ADDRESS], os.environ.pop(KEY)
    else:
        torchrun = Torchrun.from_environment()
        assert torchrun is not None, "neither RollPacker nor torchrun started this worker"
        address, key = torchrun.store().get(torchrun.store_key).decode().split()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is served already
    host, _, port = address.rpartition(":")
    connection = Client((host, int(port)), authkey=bytes.fromhex(key))
    connection.send((int(os.environ["RANK"]), os.getpid()))
    os.environ.update(connection.recv() or {})
    return connection


def _local(rank: int, size: int) -> dict[str, str]:
    """What torchrun would say."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}


def _served_at(port: int) -> dict[str, str]:
    """What torchrun would say of a store of its own."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _hang_up(connection: Connection) -> None:
    """Both sides see its end, and so does a thread of ours that waits for it. Idempotent."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def _names_samples(error: BaseException) -> bool:
    return "sample" in str(error) and not isinstance(error, TrainerProcessError | TypeError)
