"""A job as the cluster knows it: how long its phases take, what it needs, what it is promised.

rollout (holds the rollout pool) -> between (verdicts; holds nothing)
  -> train (holds the training pool, until the weights are published) -> after (commit) -> again
"""

from __future__ import annotations

import bisect
import itertools
import math
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import force_setattr

from rollpacker.codec import Omitted

Phase = Literal["rollout", "train"]


class Times(NamedTuple):
    """Seconds of one iteration, as a job alone would take them on devices that are always its."""

    rollout_s: float
    between_s: float
    train_s: float
    after_s: float

    def longer(self, factor: float) -> Times:
        """Return the times with both phases so many times as long."""
        return self._replace(rollout_s=self.rollout_s * factor, train_s=self.train_s * factor)

    def positive(self) -> Times:
        """Return the times with at least a microsecond for each phase, also for one that took no
        time by the clock or had nothing to train on."""
        rollout_s, between_s, train_s, after_s = self
        return Times(max(rollout_s, 1e-6), max(between_s, 0), max(train_s, 1e-6), max(after_s, 0))


class RoundTimes(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """One kind of round, as a distribution: equally likely iterations, from short to long.

    Training is linear in the tokens of the rollout, so that the n-th shortest rollout is taken to
    come with the n-th shortest training. Raises `ValueError` for what cannot be seconds."""

    kind: str = "plain"
    share: float = 1.0
    """Share of the job's iterations that are of this kind."""
    rollout_s: tuple[float, ...]
    train_s: tuple[float, ...]
    """Seconds of training, as many as in `rollout_s`, or one."""
    between_s: float = 0.0
    """Seconds from the end of generation to the begin of training, for verdicts."""
    after_s: float = 0.0
    """Seconds from the end of training to the next rollout, for commit and checkpoint."""

    def __post_init__(self) -> None:
        if not self.rollout_s or not self.train_s:
            raise ValueError("rollout_s and train_s must have at least one number each")
        for name in ("rollout_s", "train_s"):
            for seconds in getattr(self, name):
                if not (math.isfinite(seconds) and seconds > 0):
                    raise ValueError(f"{name} must be more than 0 seconds, not {seconds}")
            force_setattr(self, name, tuple(sorted(getattr(self, name))))
        for name in ("between_s", "after_s"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {self.share}")

    def at(self, quantile: float) -> Times:
        """The iteration at this quantile, from 0 to below 1."""
        rollout, train = self.rollout_s, self.train_s
        return Times(
            rollout[int(quantile * len(rollout))],
            self.between_s,
            train[int(quantile * len(train))],
            self.after_s,
        )

    @cached_property
    def mean(self) -> Times:
        return Times(
            math.fsum(self.rollout_s) / len(self.rollout_s),
            self.between_s,
            math.fsum(self.train_s) / len(self.train_s),
            self.after_s,
        )

    @property
    def worst(self) -> Times:
        return Times(self.rollout_s[-1], self.between_s, self.train_s[-1], self.after_s)


SHARE_TOLERANCE = 1e-6


class ClusterJob(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """One job, as it was submitted. Raises `ValueError` for what cannot be."""

    name: str
    rounds: tuple[RoundTimes, ...]
    """Kinds of round; their shares add up to 1."""
    steps: int
    """Number of iterations until it ends."""
    steps_before: Omitted[int] = 0
    """Iterations in the checkpoint of a run that goes on. They are no part of `steps`."""
    slo: float
    """Bound of the job's elapsed time over what that would be without waits for pools."""
    priority: int = 0
    """Head start among jobs that wait for nodes (`waiting.py`)."""
    owner: str = ""
    """The owner of the quota that the job counts against."""
    rollout_devices: int = 8
    train_devices: int = 8
    """Smallest number of devices that it trains on. In a group with a larger training pool its
    training is spread over all of it."""
    rollout_memory_gib: float = 0.0
    """Host memory that its parked rollout keeps on each of its nodes."""
    train_memory_gib: float = 0.0
    """Host memory that its parked trainer keeps on each training node of its group."""
    model_gb: float = 0.0
    """Weights that cross the link with each hand-over, 1e9 bytes."""
    rollout_switch_s: float = 0.0
    """Seconds to park on a rollout node and to wake there, together."""
    train_switch_s: float = 0.0
    cold_start_s: float = 0.0
    """Seconds before its first iteration, and after each move."""
    tail_share: float = 0.0
    """The last part of a rollout that runs on few devices, while another job has the rest."""
    tail_devices_share: float = 0.125
    """Share of the devices that keep the tail."""

    def __post_init__(self) -> None:
        if not self.rounds:
            raise ValueError("rounds must have at least one kind of round")
        total = math.fsum(kind.share for kind in self.rounds)
        if abs(total - 1) > SHARE_TOLERANCE:
            raise ValueError(f"the shares of rounds add up to {total:g}, not to 1")
        if not (math.isfinite(self.slo) and self.slo >= 1):
            raise ValueError(
                f"slo is {self.slo:g}: alone a job has a slowdown of 1, and sharing makes no job "
                "faster; give 1 or more"
            )
        for name in ("steps", "rollout_devices", "train_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            *("rollout_memory_gib", "train_memory_gib", "model_gb", "rollout_switch_s"),
            *("train_switch_s", "cold_start_s", "steps_before"),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more, not {value}")
        for name in ("tail_share", "tail_devices_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be 0 or more and below 1, not {getattr(self, name)}")

    @cached_property
    def mean(self) -> Times:
        """The mean over all kinds of round, by their shares."""
        sums = (
            math.fsum(one.share * seconds[part] for one, seconds in pairs)
            for pairs in [[(one, one.mean) for one in self.rounds]]
            for part in range(4)
        )
        return Times(*sums)

    @cached_property
    def worst(self) -> Times:
        """The times of an iteration in which every response runs to its limit."""
        return Times(*map(max, zip(*(one.worst for one in self.rounds), strict=True)))

    @cached_property
    def _ends(self) -> list[float]:
        return list(itertools.accumulate(one.share for one in self.rounds))

    def draw(self, which: float, quantile: float) -> Times:
        """An iteration for two numbers from 0 to below 1: which kind of round, how long of it."""
        return self.round_at(which).at(quantile)

    def round_at(self, which: float) -> RoundTimes:
        """The kind of round for a number from 0 to below 1."""
        if len(self.rounds) == 1:
            return self.rounds[0]
        return self.rounds[min(bisect.bisect_right(self._ends, which), len(self.rounds) - 1)]


EMPTY = "empty"
"""The kind of an iteration in which nothing was trained on."""
EVALUATED = "+evaluation"
"""The end of the kind of an iteration with an evaluation."""


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One step, in seconds, without waits for pools and switches."""

    step: int
    kind: str
    """Kind of the step's longest round (a step that is refilled has several), or `EMPTY`, with
    `EVALUATED` behind it if the step ended with an evaluation. An evaluation's generation takes as
    long at the first step as at the last."""
    rollout_s: float
    """Seconds in which the rollout pool is held: from the commit before to the end of the last
    sample, the same for refills from their launch on, and the generation of an evaluation. Fetching
    prompts is part of them."""
    between_s: float
    """Seconds in which verdicts, or the prompts of a refill, are awaited after generation. No pool
    is held."""
    train_s: float
    """Seconds in which the training pool is held: until the weights are published or handed over,
    with gradients that were begun before. 0 in a step that had nothing to train on."""
    after_s: float
    """Seconds of commit, checkpoint, verdicts of an evaluation and callbacks."""
    last: bool | None = None
    """Whether the process begins no other step after it. None if nobody says."""

    @property
    def is_empty(self) -> bool:
        """Nothing was trained on."""
        return self.kind.startswith(EMPTY)

    @property
    def times(self) -> Times:
        """The step's times as the cluster counts them: each phase took some time
        (`Times.positive`)."""
        return Times(self.rollout_s, self.between_s, self.train_s, self.after_s).positive()
