"""A run's seat: its connection to a cluster's scheduler, for runs that share devices with other
jobs. Environment variables name it; it is opened before anything starts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rollpacker.run.driving import INTERRUPTED

if TYPE_CHECKING:
    from rollpacker.cluster.seats.seat import Seat
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.ids import PoolName
    from rollpacker.core.records import Entry, Observer
    from rollpacker.run.driver import Controller

logger = logging.getLogger(__name__)


class RunSeat:
    """The seat of this process: its connection to the scheduler of devices shared with other jobs.
    Without one (`seat` is None), the methods do nothing."""

    def __init__(self, seat: Seat | None = None) -> None:
        self.seat = seat
        self._controller: Controller | None = None
        self._lost: str | None = None
        self._stop: str | None = None
        self._given_up = threading.Event()
        self.waited_s = 0.0
        """Seconds that the run waited for shared devices while it started up."""
        if seat is not None:
            seat.watch(self._on_lost, self._on_stop)

    @property
    def shares_pools(self) -> bool:
        return self.seat is not None

    def load_libraries(self) -> None:
        """Import slow libraries before the run holds devices that other jobs wait for. Most of
        `transformers` is loaded only when the names imported here are first used."""
        if self.seat is not None:
            from transformers import (  # noqa: F401
                GenerationMixin,
                PreTrainedModel,
                get_scheduler,
            )

    @contextlib.contextmanager
    def holding(self, pool: PoolName) -> Iterator[None]:
        """A context in which the run holds a pool (group of devices shared with other jobs). Parts
        may load on its devices, and must have released them at the end. Raises `LeaseLost`,
        `HostsLost`, and `KeyboardInterrupt` if the scheduler wants the run to end."""
        if self.seat is None:
            yield
            return
        from rollpacker.cluster.seats.seat import START
        from rollpacker.run.errors import reaching_the_cluster

        began = time.perf_counter()
        with reaching_the_cluster():
            is_there = self.seat.enter(pool, START, given_up=self._given_up)
        self.waited_s += time.perf_counter() - began
        if not is_there:
            raise KeyboardInterrupt(f"the cluster wants the run to end: {self._stop}")
        yield
        if self._lost is not None:
            raise _lease_lost(self._lost)
        self.seat.leave(pool)

    def watch_over(self, controller: Controller) -> None:
        """Have `controller` end its run when the scheduler asks for that, or has asked already."""
        self._controller = controller
        if self._lost is not None:
            self._on_lost(self._lost)
        if self._stop is not None:
            self._on_stop(self._stop)

    def observers(self) -> list[Observer]:
        """The observers that report steps to the scheduler: one, or none without shared devices."""
        return [] if self.seat is None else [_Telling(self.seat)]

    def _on_lost(self, why: str) -> None:
        self._lost = why
        if self._controller is not None:
            self._controller.end_at_once(_lease_lost(why))

    def _on_stop(self, why: str) -> None:
        self._stop = why
        if self._controller is None:
            self._given_up.set()
        else:
            logger.warning("the cluster wants the run to end after this step, saved: %s", why)
            self._controller.request_stop(INTERRUPTED)


class _Telling:
    """Tells the scheduler how long generation, training and other parts of each step took."""

    def __init__(self, seat: Seat) -> None:
        from rollpacker.cluster.profile.phase_times import PhaseTimes

        self._seat, self._times = seat, PhaseTimes()

    def feed(self, entry: Entry) -> None:
        iteration = self._times.feed(entry)
        if iteration is None:
            return
        try:
            self._seat.committed(iteration)
        except OSError as error:  # it is told of the next one
            logger.warning("the cluster was not told what step %d took: %s", iteration.step, error)

    def close(self) -> None:
        pass


def _lease_lost(why: str) -> Exception:
    from rollpacker.cluster.seats.seat import LeaseLost

    return LeaseLost(
        f"{why}. Nothing more is done on devices that may be another job's; the run goes on from "
        "its last checkpoint with --resume"
    )


def take_seat(config: RunConfig, environ: Mapping[str, str], stack: ExitStack) -> RunSeat:
    """Returns the seat (connection to a scheduler) that environment variables name, else one
    without connection; `stack` closes it. Raises `ValueError` if the config cannot share
    devices."""
    from rollpacker.cluster.seats.mailbox_seat import open_seat
    from rollpacker.cluster.seats.seat import SEAT_VARIABLE
    from rollpacker.run.errors import reaching_the_cluster

    if SEAT_VARIABLE in environ:
        check_shares(config)
    with reaching_the_cluster():
        seat = open_seat(environ)
    if seat is not None:
        stack.callback(seat.close)
    return RunSeat(seat)


def check_shares(config: RunConfig) -> None:
    """Raise `ValueError` if the config has a part that cannot share devices with other jobs in
    turn."""
    lines = config.placement
    if config.train.processes is None and lines is None:
        raise ValueError(
            "a job of a cluster takes turns on the devices of its trainer and of its engines, but "
            "without train.processes the trainer works on the engine's own weights: set "
            "train.processes"
        )
    if config.train.colocate or (lines is not None and lines.turns):
        key = "train.colocate" if lines is None else "placement.colocate"
        raise ValueError(
            f"{key} does not go with a job of a cluster, whose engines and trainer are on devices "
            f"of two pools: leave {key} out"
        )
    if lines is not None and {"judge", "rollout"} <= set(lines.colocate):
        raise ValueError(
            "placement.colocate puts a judge on the devices of the engines, which a job of a "
            "cluster gives to other jobs while verdicts are awaited: give placement.judge devices "
            "of its own"
        )
    if config.model.quantization is not None:
        raise ValueError(
            "a checkpoint of a job of a cluster is written while others have the device, without "
            f"which model.quantization={config.model.quantization} cannot be merged: leave it out"
        )
    on_cpu = config.model.device == "cpu"
    for number, reward in enumerate(config.rewards):
        name, arguments = f"rewards.{number}", reward.arguments
        if reward.function == "judge" and "model_path" in arguments:
            raise ValueError(
                f"{name}: the judge's model is on an engine beside the policy's, and a job of a "
                "cluster gives the policy's devices to other jobs while verdicts are awaited: name "
                f"the judge's own server, {name}.arguments.url, in place of model_path"
            )
        if reward.function == "reward_model" and not on_cpu and arguments.get("device") != "cpu":
            raise ValueError(
                f"{name}: a reward model is on a device of the run's, and a job of a cluster gives "
                f"these to other jobs while verdicts are awaited: set {name}.arguments.device=cpu"
            )
