"""The phases of a program of any framework, which takes turns on pools with other jobs.

    import rollpacker.cluster as cluster

    park, wake = cluster.parking(model, optimizer)
    for step in range(first, last):
        with cluster.phase("rollout", park=engine.sleep, wake=engine.wake_up):
            ...                        # generate
        ...                            # judge: no pool is held
        with cluster.phase("train", park=park, wake=wake):
            ...                        # update the weights, save a checkpoint
        cluster.committed(step)

A variable of the environment makes the process a job of a cluster (`seat.py`). Without it, nothing
waits and no hook (`park`, `wake`) is called. See docs/many-jobs.md.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, get_args

from rollpacker.cluster.seats.mailbox_seat import open_seat
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, Iteration, LeaseLost, Seat
from rollpacker.core.ids import PoolName
from rollpacker.warn_once import WarnOnce
from rollpacker.workers.loopback import gloo_on_loopback

Answer = TypeVar("Answer")

_LOST = 6
"""Exit code of a process whose pool was given to another job: the job can be resumed."""
UNTOLD_ITERATIONS = 3
"""Iterations without a call of `committed` after which a warning that it is needed is logged."""
_PURPOSES: dict[PoolName, str] = {"rollout": "round", "train": "step"}

_logger = logging.getLogger(__name__)


class Stopped(SystemExit):
    """Raised when the cluster wants the program to end here: it is to go on elsewhere or later, or
    was cancelled. Unless it is caught, the process ends with exit code 130, as `rollpacker train`
    does, which means that the job is not done."""

    def __init__(self, code: int = 130) -> None:
        super().__init__(code)


@dataclass(frozen=True, slots=True)
class Turn:
    """How long the begin of a phase took, in seconds. Outside of a cluster both values are 0."""

    waited_s: float
    """Seconds for which the phase waited for its pool."""
    wake_s: float
    """Seconds for which the program's function `wake` ran."""


@contextlib.contextmanager
def phase(
    pool: PoolName,
    *,
    park: Callable[[], object] | None = None,
    wake: Callable[[], object] | None = None,
) -> Iterator[Turn]:
    """Hold a pool in a `with` block: "rollout" to generate, "train" to update the weights.

    At its begin the block waits until the job has the pool, calls `wake` (to bring to the device
    what the phase needs), and yields the `Turn`. At its end, also by an exception, it waits for the
    device, calls `park` (to leave nothing on it) and gives the pool to others.

    If the program has several ranks, every rank calls this, once `torch.distributed` is
    initialised. Rank 0 asks for the pool. All ranks enter together, call `wake` and `park` each for
    itself, and leave when the last one is ready.

    A process can be in one phase at a time: a second one, in any thread, raises `ValueError`. After
    an exception in `wake` or `park`, or on one of several ranks, it is unknown what is on the
    devices: the pool is kept until the process ends, and every later phase raises `ValueError`.

    Raises `Stopped` in place of waiting if the program is to end, by wish of the cluster or by a
    SIGTERM that it does not handle itself (a second SIGTERM ends it at once). Raises `OSError` if
    the cluster cannot be reached for long, and `LeaseLost` if it gave the job's pool to another
    job. If the pool is lost inside the block, the process ends at once, with exit code 6 and a line
    on stderr: no Python exception stops what a device computes already."""
    program = _opened()
    turn = program.enter(pool, wake)
    try:
        yield turn
    except BaseException:
        program.leave(park, failed=True)
        raise
    program.leave(park)


def committed(step: int, *, kind: str = "plain") -> None:
    """Report that the iteration `step` is over and saved, so that a restarted program would go on
    after it. Call this after the iteration's phases, on every rank. The cluster learns from it how
    long iterations take (give those that differ in length another `kind`), and moves jobs only
    here. What comes before a program's first rollout phase belongs to no iteration. Raises
    `LeaseLost`, and `ValueError` for a step that is no whole number."""
    try:
        step = operator.index(step)
    except TypeError:
        raise ValueError(f"committed({step!r}): say which step it was, a whole number") from None
    _opened().committed(step, kind)


class _Ranks:
    """The processes (ranks) of one program, which enter and leave phases together."""

    def __init__(self) -> None:
        self.rank = 0
        self._group: Any = None
        distributed = sys.modules.get("torch.distributed")
        if not (distributed and distributed.is_available() and distributed.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError(
                    "rollpacker.cluster: this is one of several ranks (WORLD_SIZE), and "
                    "torch.distributed is not initialised: do that before the first phase"
                )
        elif distributed.get_world_size() > 1:
            from datetime import timedelta

            self.rank = distributed.get_rank()
            # A group of its own, since turns may be longer than the others' patience; and by way of
            # the host, since nothing may be on the devices.
            all_here = os.environ.get("LOCAL_WORLD_SIZE") == str(distributed.get_world_size())
            with gloo_on_loopback() if all_here else contextlib.nullcontext():
                self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=365))
            atexit.register(self._end)

    @property
    def are_several(self) -> bool:
        return self._group is not None

    def meet(self) -> None:
        if self.are_several:
            sys.modules["torch.distributed"].barrier(group=self._group)

    def ask_first(self, question: Callable[[], Answer]) -> Answer:
        """Call `question` on rank 0, and return or raise on all ranks what it returns or raises."""
        if not self.are_several:
            return question()
        said: list[Any] = [None, None]
        if self.rank == 0:
            try:
                said = [question(), None]
            except (LeaseLost, OSError, Stopped, ValueError) as error:
                said = [None, error]
        sys.modules["torch.distributed"].broadcast_object_list(said, src=0, group=self._group)
        answer, problem = said
        if problem is not None:
            raise problem
        return answer  # type: ignore[no-any-return]

    def _end(self) -> None:
        # A thread of gloo may still be letting go of what was sent last. If it does so while Python
        # ends, the process aborts; the group's end waits for its threads.
        distributed = sys.modules["torch.distributed"]
        if distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None


class _Program:
    """What this process knows of its part in a cluster: phases, ranks and, on rank 0, the seat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase: PoolName | None = None
        """The pool that a thread of this process holds or waits for. None outside of phases."""
        self._holds = False
        """Whether this process holds the phase's pool. Only rank 0 does, which has the seat."""
        self._unknown: str | None = None
        """Why it is unknown what is on the devices, such as a failed `park`; None if known."""
        self._lost: str | None = None
        self._wish = threading.Event()
        """Event that is set once the cluster, or a SIGTERM, asks the program to end."""
        self._seconds = _Seconds()
        self._ranks: _Ranks | None = None
        """The program's ranks, of which this process is one. None outside of a cluster."""
        self._seat: Seat | None = None
        if SEAT_VARIABLE in os.environ:
            self._ranks = _Ranks()
            self._ranks.ask_first(self._open)
            self._heed_sigterm()

    def _open(self) -> None:
        self._seat = open_seat(os.environ)
        if self._seat is not None:
            self._seat.watch(self._on_lost, lambda reason: self._wish.set())
            atexit.register(self._close)

    def enter(self, pool: PoolName, wake: Callable[[], object] | None) -> Turn:
        """Wait for the pool, call `wake`, and return how many seconds each of the two took."""
        with self._lock:
            self._check(pool)
            self._phase = pool
        if self._ranks is None:
            return Turn(0.0, 0.0)
        asked_s = self._seconds.asks(pool)
        try:
            self._ranks.ask_first(lambda: self._take(pool))
        except BaseException:
            self._phase = None
            raise
        entered_s = time.monotonic()
        if wake is not None:
            with self._hook("wake"):
                wake()
        return Turn(entered_s - asked_s, self._seconds.begins() - entered_s)

    def leave(self, park: Callable[[], object] | None, *, failed: bool = False) -> None:
        """Wait for the device, call `park`, and give the pool back. `failed`: an exception ended
        the phase; with several ranks the pool is kept then, since others may still work on it."""
        if self._ranks is None:
            self._phase = None
            return
        pool = self._phase
        assert pool is not None
        with self._hook("park"):
            _settle()
            self._seconds.ends(pool)
            if park is not None:
                park()
        if failed and self._ranks.are_several:
            # The others may be at work still, and perhaps will never come here.
            self._unknown = f"an exception ended phase({pool!r}) on one of several ranks"
            return
        self._ranks.meet()
        try:
            self._ranks.ask_first(lambda: self._give(pool))
        finally:
            self._phase = None
            self._seconds.left()

    def committed(self, step: int, kind: str) -> None:
        """Report an iteration to the cluster by rank 0's seat; each rank calls this. Does nothing
        outside of a cluster. Raises `ValueError` inside a phase."""
        if self._phase is not None:
            raise ValueError(
                f"committed({step}) inside phase({self._phase!r}): call it after the phases of "
                "the iteration"
            )
        if self._ranks is None:
            return
        iteration = self._seconds.iteration(step, kind)
        if iteration is not None:
            self._ranks.ask_first(lambda: self._tell(iteration))

    def _check(self, pool: str) -> None:
        if pool not in get_args(PoolName):
            raise ValueError(f"phase({pool!r}): there are 'rollout' and 'train'")
        if self._unknown is not None:
            raise ValueError(f"phase({pool!r}): {self._unknown}; end the process")
        if self._phase is not None:
            raise ValueError(
                f"phase({pool!r}) inside phase({self._phase!r}): a process is in one phase at a "
                "time, whatever its threads; let that one end first"
            )

    # -- what rank 0 does with the seat -------------------------------------------------

    def _take(self, pool: PoolName) -> None:
        if self._seat is None:
            return
        self._raise_if_lost()
        if self._wish.is_set() or not self._seat.enter(pool, _PURPOSES[pool], given_up=self._wish):
            raise Stopped
        with self._lock:
            self._raise_if_lost()
            self._holds = True

    def _give(self, pool: PoolName) -> None:
        with self._lock:
            self._holds = False
        if self._seat is not None:
            self._raise_if_lost()
            self._seat.leave(pool)

    def _tell(self, iteration: Iteration) -> None:
        self._raise_if_lost()
        if self._seat is not None:
            self._seat.committed(iteration)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise LeaseLost(self._lost)

    def _on_lost(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            if self._holds:
                _end_at_once(f"the {self._phase} pool is another job's now: {reason}")

    def _close(self) -> None:
        # A pool that is held is free when the process is gone, and not before.
        if self._seat is not None and not self._holds:
            self._seat.close()

    # -- the rest -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _hook(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._unknown = f"{name} failed in phase({self._phase!r}) ({error!r})"
            raise

    def _heed_sigterm(self) -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != _pid:  # a child that was forked meanwhile: it ends as it ever did
            os.kill(os.getpid(), number)
            return
        self._wish.set()


class _Seconds:
    """Measures an iteration's seconds by phase, without waits for pools and without switches."""

    def __init__(self) -> None:
        self._counts = False
        self._since_s = 0.0
        """Time in seconds of the last change between work and waiting; all before it is counted."""
        self._told = False
        self._num_untold = 0
        self._warn_once = WarnOnce(_logger)
        self._new()

    def _new(self) -> None:
        self._last: PoolName | None = None
        self._spent = dict.fromkeys(("rollout", "between", "train", "after"), 0.0)

    def _lap(self, what: str) -> float:
        now_s = time.monotonic()
        if self._counts:
            self._spent[what] += now_s - self._since_s
        self._since_s = now_s
        return now_s

    def asks(self, pool: PoolName) -> float:
        """Record that the program now asks for a pool. Returns the present time in seconds."""
        now_s = self._lap("between" if self._last == "rollout" else "after")
        if pool == "rollout":
            self._counts = True
            self._num_untold += self._last == "train"
            if self._num_untold == UNTOLD_ITERATIONS and not self._told:
                self._warn_once(
                    "rollpacker.cluster: %d iterations, and no call of "
                    "rollpacker.cluster.committed(step): without it the cluster cannot tell how "
                    "long they take, nor move the job",
                    self._num_untold,
                )
        self._last = pool
        return now_s

    def begins(self) -> float:
        """Record that the phase's work begins now. Returns the present time in seconds."""
        self._since_s = time.monotonic()
        return self._since_s

    def ends(self, pool: PoolName) -> None:
        self._lap(pool)

    def left(self) -> None:
        """Record that a pool was left now. Parking and leaving do not count as work."""
        self._since_s = time.monotonic()

    def iteration(self, step: int, kind: str) -> Iteration | None:
        """Return the iteration that is over now, with its seconds. None if no rollout was in it."""
        self._lap("between" if self._last == "rollout" else "after")
        counted, spent = self._counts, self._spent
        self._told = True
        self._new()
        if not counted:
            return None
        return Iteration(
            step=step,
            kind=kind,
            rollout_s=spent["rollout"],
            between_s=spent["between"],
            train_s=spent["train"],
            after_s=spent["after"],
        )


def _settle() -> None:
    """Wait until the device has done what was begun on it, before another job gets the pool."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _end_at_once(why: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"rollpacker.cluster: {why}. The process ends at once.\n".encode())
    os._exit(_LOST)


_program: _Program | None = None
_pid = os.getpid()
_opening = threading.Lock()


def _opened() -> _Program:
    """Return the object for this process's part in the cluster; the first call makes it."""
    global _program, _pid
    with _opening:
        if _program is None:
            _program, _pid = _Program(), os.getpid()
        return _program
