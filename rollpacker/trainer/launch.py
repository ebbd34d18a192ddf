"""Starts the trainer's ranks (processes), and makes calls to them.

Without torchrun, the run's own process starts all ranks, on another host through an agent there.
Each rank inherits a connection to the run's process. Under torchrun, the process of torchrun's rank
0 is the run's own, and starts the trainer's rank 0 as a child; torchrun's other processes become
the other ranks. They connect to the run's process by the address and token that it puts into
torchrun's key-value store.

A call is made on all ranks at once, or on some; a rank serves one call at a time. If a rank ends,
all ranks are ended, since others may wait for it in a collective. New ranks can then be started
(`RanksLost`), but not under torchrun, where the run ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rollpacker.trainer.trainer import RanksLost, TrainerProcessError
from rollpacker.workers import group
from rollpacker.workers.group import Member, MemberLost
from rollpacker.workers.host import Host, Process, ThisHost
from rollpacker.workers.kinds import ERROR, HELLO, SETUP
from rollpacker.workers.line import LINE_FD, Line, LineEnded, inherited_line, ready
from rollpacker.workers.listener import Listener, connect
from rollpacker.workers.loopback import LOOPBACK, gloo_at, unless_chosen
from rollpacker.workers.served import START_S

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub hides it

    from rollpacker.weights.buffer import BufferLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """What torchrun tells this process of the job that it started: ranks,
    addresses and restarts."""

    rank: int
    world_size: int
    local_world_size: int
    """Number of the job's processes that run on this machine."""
    master: tuple[str, int]
    has_store: bool
    """Whether torchrun's agent serves the job's key-value store. If not, the process of
    torchrun's rank 0 serves it."""
    restart: str = "0"
    """How often torchrun has restarted the job, as text. The job's store outlives a restart."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """Read the record from the environment variables that torchrun sets. None: torchrun did
        not start this process."""
        names = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names) or LINE_FD in environment:
            return None
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "0")),
            master=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def store_key(self) -> str:
        """Key in the job's store under which rank 0 puts its address for the other ranks."""
        return f"rollpacker/trainer/{self.restart}"

    def store(self) -> TCPStore:
        host, port = self.master
        return store_of(host, port, is_master=self.rank == 0 and not self.has_store)

    def listener(self) -> Listener:
        """Listen at an address of this machine that the other ranks can reach. Raises `ValueError`
        if there is no such address."""
        if self.local_world_size == self.world_size:
            return Listener(LOOPBACK)
        host = self.master[0]
        for address in (*_addresses(host), *_own_address()):
            with contextlib.suppress(OSError):  # not one of this machine's: a proxy's, say
                return Listener(address)
        raise ValueError(
            f"MASTER_ADDR is {host}, where processes on other machines cannot reach this one: "
            "start torchrun with --master-addr, or --rdzv-endpoint, as they know this machine"
        )


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host that other machines can reach; empty: its name is unknown."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return []
    return sorted(address for address in found if not address.startswith(("127.", "::1")))


def _own_address() -> list[str]:
    """Return the address from which this machine reaches others; empty: none. Sends no data."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # RFC 5737: nobody's
        return [str(probe.getsockname()[0])]
    return []


class RankPlace(NamedTuple):
    """Where a rank is started: its host, its number there, and further environment variables."""

    local_rank: int
    """The rank's number on its host, which is also the number of its device there."""
    host: Host
    environment: Mapping[str, str]
    """Environment variables that are set for the rank in addition to its host's own."""


class Ranks:
    """All ranks (processes) of a trainer, as the run's own process starts and calls them."""

    def __init__(
        self,
        num_processes: int,
        places: Sequence[RankPlace] = (),
        address: str = LOOPBACK,
        *,
        start_s: float = START_S,
    ) -> None:
        """Start the ranks at `places`, or all on this machine if that is empty; call `connect`
        before the first call. `address` is where ranks on other hosts reach this machine. `start_s`
        is the number of seconds within which each rank must report."""
        self.num_processes, self._start_s = num_processes, start_s
        self._places = places or [RankPlace(rank, ThisHost(), {}) for rank in range(num_processes)]
        self._order = tuple(range(num_processes))
        self._address = address
        self.all: list[Member] = []
        self._started: list[Member] = []
        """The ranks that are this process's children: all, or under torchrun only rank 0."""
        self._calling = threading.Lock()
        self._starting = threading.Lock()
        self._is_closed = False
        self._why_lost: str | None = None
        self._listener: Listener | None = None
        self._store: TCPStore | None = None
        """The key-value store through which the ranks find each other. This process serves it
        unless torchrun does, so it must live as long as the ranks."""
        torchrun = Torchrun.from_environment()
        if torchrun is not None and torchrun.rank > 0:
            raise ValueError(
                f"this is rank {torchrun.rank} of torchrun, and only rank 0 drives the run: start "
                "it as `torchrun ... -m rollpacker.cli.main train CONFIG`, which makes the others "
                "workers"
            )
        try:
            if torchrun is None:
                self._start_all()
            else:
                self._listener = torchrun.listener()
                where = self._listener.host, self._listener.port, self._listener.token.hex()
                self._store = torchrun.store()
                self._store.set(torchrun.store_key, json.dumps(where))
                self._start(0, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        for rank in range(self.num_processes):
            self._start(rank, self._placed(rank))

    def _placed(self, rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for a rank."""
        place = self._places[self._order[rank]]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(self.num_processes),
            **place.environment,
        }

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """Reserve shared memory for the weights on rank 0's host, and return the layout (which
        tensor lies where) with that memory's name. Raises `OSError`, or `ValueError` if there is no
        room."""
        return self._places[0].host.hold(layout)

    @property
    def can_start_anew(self) -> bool:
        """Whether new ranks can replace these, which is not so for ranks that torchrun started."""
        return self._listener is None

    @property
    def order(self) -> tuple[int, ...]:
        """For each rank, the index of its place (host and device) among the places
        that the trainer was given."""
        return self._order

    def start_anew(self, order: Sequence[int] | None = None) -> None:
        """End the ranks that are left, and start new ones; `connect` must be called before the next
        call. `order` gives the index of each new rank's place, which is 0 for rank 0, whose host
        holds the weights' memory; None: the same places as before. Raises `TrainerProcessError` if
        `close` was called meanwhile."""
        assert self.can_start_anew, "torchrun starts its processes itself"
        if order is not None:
            assert sorted(order) == [*range(self.num_processes)] and order[0] == 0, order
        self._kill()
        self._order = self._order if order is None else tuple(order)
        self._why_lost = None
        with self._starting:
            if self._is_closed:
                raise TrainerProcessError("the run is over")
            for rank in self._started:
                assert rank.child is not None
                rank.child.close()
                rank.line.close()
            self.all, self._started = [], []
            self._start_all()

    def how_lost(self) -> str | None:
        """Return in words which rank has ended between two calls, and how. None if no rank that
        RollPacker has started has ended."""
        if not self.can_start_anew:
            return None
        if self._why_lost is not None:
            return self._why_lost
        if not self.all:
            return "the trainer's processes were started anew, and were lost on the way"
        for rank in self.all:
            if rank.child is not None and (how := rank.child.how_ended()) is not None:
                return f"{rank} ended by itself ({how}) between two calls"
        return None

    def _start(self, number: int, environment: Mapping[str, str]) -> None:
        child, line = self._places[self._order[number]].host.start(
            "rollpacker.trainer.worker",
            f"rank {number}",
            guarded=False,  # it ends with its line
            environment=environment,
        )
        self._started.append(_member(number, child.pid, line, child))

    def connect(self) -> None:
        """Wait for every rank's first message, and send environment variables by which the ranks
        find each other. Raises `TrainerProcessError` if a rank ends or its message is late."""
        environment = gloo_at(self._address if self._listener is None else self._listener.host)
        if self._listener is None:
            # Served here, so that no rank has to find a port that is still free when it binds it.
            self._store = store_at(self._address)
            environment |= served_at(self._address, self._store.port)
        found = self._greeted()
        for rank in found:
            with contextlib.suppress(LineEnded):  # the first call says so
                rank.line.send(SETUP, payload=json.dumps(environment).encode())
        self.all = found
        if self._listener is not None:
            self._listener.close()

    def _greeted(self) -> list[Member]:
        """Wait for the first message of every rank, and return the ranks by number."""
        found: dict[int, Member] = {}
        until = time.monotonic() + self._start_s
        while len(found) < self.num_processes:
            self._check_started()
            if time.monotonic() > until:
                missing = sorted(set(range(self.num_processes)) - set(found))
                raise self.lose(
                    f"processes {missing} of the trainer did not report within "
                    f"{self._start_s:.0f} s (deadlines.start_s)"
                )
            own = {rank.line: rank for rank in self._started if rank.number not in found}
            for line in ready(own, 0.0 if self._listener is not None else 0.2):
                with contextlib.suppress(LineEnded, TimeoutError):  # seen above
                    own[line].pid = int(line.receive(1.0).payload)
                    found[own[line].number] = own[line]
            if self._listener is not None:
                for line, hello in self._listener.accept(0.2):
                    number, pid = json.loads(hello)
                    found[number] = _member(number, pid, line, None)
        return [found[number] for number in range(self.num_processes)]

    def _check_started(self) -> None:
        for rank in self._started:
            assert rank.child is not None
            if (how := rank.child.how_ended()) is not None:
                raise self.lose(
                    f"process {rank.number} of the trainer ended before it was ready ({how}); its "
                    "messages stand above"
                )

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], numbers: Sequence[int] = ()
    ) -> list[Any]:
        """Call `method(*arguments[i])` on every rank, or on the ranks with these numbers. Returns
        the ranks' results, in order. Raises the same errors as `send`."""
        from rollpacker.trainer.calls import codec

        return self.send(method, [codec().encode((method, one)) for one in arguments], numbers)

    def send(self, method: str, calls: Sequence[bytes], numbers: Sequence[int] = ()) -> list[Any]:
        """Send calls that are already encoded, which may be sent again later, and return the ranks'
        results. If ranks raise errors, raises one of these, preferably one that names samples. If a
        rank ends meanwhile, or fails while others wait for it longer than `GRACE_S`, all ranks are
        ended, and `RanksLost` is raised (under torchrun `TrainerProcessError`)."""
        from rollpacker.trainer.calls import codec, error_of

        with self._calling:
            if not self.all:
                raise self.lose("the trainer's processes were started anew, and did not come")
            called = [self.all[number] for number in numbers] or self.all
            try:
                group.say(called, calls, method)
                replies = self._replies(method, called)
            except MemberLost as lost:
                raise self.lose(str(lost)) from None
            if len(replies) < len(called):
                self._kill()
        errors = [error_of(said) for kind, said in replies.values() if kind == ERROR]
        for error in errors:
            if isinstance(error, TrainerProcessError):  # to one that ended after it had answered
                raise self.lose(str(error).partition(".")[0])
        if errors:
            raise min(errors, key=lambda error: not _names_samples(error))
        return [codec().decode(replies[rank.number][1]) for rank in called]

    def _replies(self, method: str, called: Sequence[Member]) -> dict[int, tuple[int, bytes]]:
        return group.replies(called, method)

    def lose(self, reason: str) -> TrainerProcessError:
        """End all ranks because one was lost, and return the error that the caller is to raise.
        `reason` says in words which rank was lost, and how."""
        self._why_lost = reason
        self._kill()
        lost = RanksLost(reason)
        return lost if self._listener is None else TrainerProcessError(str(lost))

    def _kill(self) -> None:
        for rank in (*self._started, *self.all):
            rank.end()

    def close(self) -> None:
        """End all ranks. Idempotent."""
        with self._starting:
            self._is_closed = True
        if not self.all:  # they may still load their libraries
            self._kill()
        for rank in self.all:
            rank.line.hang_up()  # a worker ends when its line does
        group.close(self._started)
        if self._listener is not None:
            self._listener.close()
        with self._calling:  # a call in another thread has heard it by now
            for rank in (*self._started, *self.all):
                rank.line.close()


def _member(number: int, pid: int, line: Line, child: Process | None) -> Member:
    return Member(
        name=f"process {number} of the trainer", number=number, pid=pid, line=line, child=child
    )


def store_of(host: str, port: int, *, is_master: bool, listen_fd: int | None = None) -> TCPStore:
    """Serve torch's key-value store at this address if `is_master`, else connect to it. `listen_fd`
    is a socket that listens already; None: torch opens one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub hides it

    return TCPStore(
        host, port, is_master=is_master, wait_for_workers=False, master_listen_fd=listen_fd
    )


def store_at(address: str) -> TCPStore:
    """Serve a key-value store that can be reached at this address alone. By default torch would
    listen on every interface, whatever host it is given."""
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
        return store_of(address, port, is_master=True, listen_fd=listening.detach())


def served_at(address: str, port: int) -> dict[str, str]:
    """Return the environment variables by which torch finds the key-value store at this address."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def line_to_run() -> Line:
    """Connect a worker to the run's own process, and return the connection. Raises `OSError` or
    `LineEnded` if the run's process cannot be reached."""
    line = inherited_line()
    if line is not None:
        line.send(HELLO, payload=str(os.getpid()).encode())
    else:
        torchrun = Torchrun.from_environment()
        assert torchrun is not None, "neither RollPacker nor torchrun started this worker"
        host, port, token = json.loads(torchrun.store().get(torchrun.store_key))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is served already
        hello = json.dumps((torchrun.rank, os.getpid())).encode()
        line = connect(host, port, bytes.fromhex(token), hello)
    os.environ.update(unless_chosen(json.loads(line.receive().payload)))
    return line


def _names_samples(error: BaseException) -> bool:
    return "sample" in str(error) and not isinstance(error, TrainerProcessError | TypeError)
