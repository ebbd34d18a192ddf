"""A job as the cluster plans with it: the seconds of its phases, its needs, and its SLO.

An iteration has four parts: the rollout, which holds the rollout pool; the wait for rewards
(`between_s`), which holds no pool; training, which holds the training pool until the weights are
handed over; and the time for commit and checkpoint (`after_s`), which holds no pool.
"""

from __future__ import annotations

import bisect
import itertools
import math
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import force_setattr

from rollpacker.bounds import check_at_least, check_within
from rollpacker.codec import Omitted

Phase = Literal["rollout", "train"]


class Times(NamedTuple):
    """Seconds of the parts of a job's iteration, with its devices to itself: rollout, the wait for
    rewards (`between_s`), training, and the time until the next rollout (`after_s`)."""

    rollout_s: float
    between_s: float
    train_s: float
    after_s: float

    def longer(self, factor: float) -> Times:
        """Return these times with rollout and training multiplied by this factor."""
        return self._replace(rollout_s=self.rollout_s * factor, train_s=self.train_s * factor)

    def positive(self) -> Times:
        """Return these times without the zeros that planning cannot take: at least a microsecond of
        rollout and of training, and nothing below 0."""
        rollout_s, between_s, train_s, after_s = self
        return Times(max(rollout_s, 1e-6), max(between_s, 0), max(train_s, 1e-6), max(after_s, 0))


class RoundTimes(msgspec.Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """Times of one kind of round, as a distribution: equally likely iterations, from short to long.

    Training is linear in the tokens of the rollout, so that the n-th shortest rollout is taken to
    come with the n-th shortest training. Raises `ValueError` for wrong seconds."""

    kind: str = "plain"
    share: float = 1.0
    """Share of iterations whose round (batch of generation) is of this kind, above 0 to 1."""
    rollout_s: tuple[float, ...]
    train_s: tuple[float, ...]
    """Seconds of training in these iterations: as many numbers as in `rollout_s`, or one."""
    between_s: float = 0.0
    """Seconds from the end of generation to the begin of training, for computing rewards."""
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
        check_at_least(self, 0, "between_s", "after_s")
        check_within(self, "(0, 1]", "share")

    def at(self, quantile: float) -> Times:
        """Return the times of the iteration at this quantile of length: 0 (shortest) to below 1."""
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
    """One job as it was submitted. Raises `ValueError` for values that are not possible."""

    name: str
    rounds: tuple[RoundTimes, ...]
    """Kinds of the job's rounds (batches of generation): plain, short, long. Shares add up to 1."""
    steps: int
    """Number of iterations that the job had left to do when it was submitted."""
    steps_before: Omitted[int] = 0
    """Iterations in the checkpoint that a resumed run goes on from. They are no part of `steps`."""
    slo: float
    """Highest slowdown promised: elapsed time over time without waits for pools, 1 or more."""
    priority: int = 0
    """Priority among jobs that wait for nodes (`waiting.py`): a higher one gives a head start."""
    owner: str = ""
    """Name of the owner whose quota the job counts against. Empty if unknown."""
    rollout_devices: int = 8
    train_devices: int = 8
    """Fewest devices that the job trains on. In a group it trains on all of the group's."""
    rollout_memory_gib: float = 0.0
    """GiB of host memory on each rollout node for the job's rollout while off the devices."""
    train_memory_gib: float = 0.0
    """GiB of host memory on each training node for the job's trainer while off the devices."""
    model_gb: float = 0.0
    """Size of the weights that are sent to the rollout nodes after each training, in 1e9 bytes."""
    rollout_switch_s: float = 0.0
    """Seconds to move the job off a rollout node's devices (park) and back (wake), together."""
    train_switch_s: float = 0.0
    cold_start_s: float = 0.0
    """Seconds from a start of the job's processes to its first iteration, also after a move."""
    tail_share: float = 0.0
    """Share of a rollout's seconds, its end (tail), for which it needs few of its devices."""
    tail_devices_share: float = 0.125
    """Share of the rollout's devices that run its tail (`tail_share`); others may use the rest."""

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
        check_at_least(self, 1, "steps", "rollout_devices", "train_devices")
        check_at_least(self, 0, "rollout_memory_gib", "train_memory_gib", "model_gb")
        check_at_least(self, 0, "rollout_switch_s", "train_switch_s", "cold_start_s")
        check_at_least(self, 0, "steps_before")
        check_within(self, "[0, 1)", "tail_share", "tail_devices_share")

    @cached_property
    def mean(self) -> Times:
        """Mean seconds of each part of an iteration, over all kinds of round by their shares."""
        sums = (
            math.fsum(one.share * seconds[part] for one, seconds in pairs)
            for pairs in [[(one, one.mean) for one in self.rounds]]
            for part in range(4)
        )
        return Times(*sums)

    @cached_property
    def worst(self) -> Times:
        """Longest seconds of each part of the job's iterations, over all kinds of round."""
        return Times(*map(max, zip(*(one.worst for one in self.rounds), strict=True)))

    @cached_property
    def _ends(self) -> list[float]:
        return list(itertools.accumulate(one.share for one in self.rounds))

    def draw(self, which: float, quantile: float) -> Times:
        """Return an iteration's times, chosen by two numbers from 0 to below 1: `which` the kind of
        round, `quantile` its length."""
        return self.round_at(which).at(quantile)

    def round_at(self, which: float) -> RoundTimes:
        """Return the kind of round chosen by a number from 0 to below 1, by the kinds' shares."""
        if len(self.rounds) == 1:
            return self.rounds[0]
        return self.rounds[min(bisect.bisect_right(self._ends, which), len(self.rounds) - 1)]


EMPTY = "empty"
"""Kind of an iteration in which there was nothing to train on."""
EVALUATED = "+evaluation"
"""Suffix of the kind of an iteration that ended with an evaluation."""


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step of a job; waits for pools, and moves onto and off devices, do not count."""

    step: int
    kind: str
    """Kind of the step's longest round of generation (plain, short or long), or `EMPTY`. The suffix
    `EVALUATED` is added if the step ended with an evaluation."""
    rollout_s: float
    """Seconds for which the rollout pool is held: from the end of the step before (or the begin of
    a refill, a further round for missing samples) until the last sample has ended, fetching of
    prompts included; and the seconds of an evaluation's generation."""
    between_s: float
    """Seconds of the step when generation was over and no pool held: rewards were awaited, or
    prompts for a refill (a further round for missing samples)."""
    train_s: float
    """Seconds for which the training pool is held, until the weights are handed over, and seconds
    of gradients computed earlier in the step. 0 in a step that had nothing to train on."""
    after_s: float
    """Seconds at the step's end for commit, checkpoint, rewards of an evaluation and callbacks."""
    last: bool | None = None
    """Whether the job's process ends after this step. None if the process does not report that."""

    @property
    def is_empty(self) -> bool:
        """Whether the step trained on nothing."""
        return self.kind.startswith(EMPTY)

    @property
    def times(self) -> Times:
        """The step's seconds by part; those of rollout and training are more than 0."""
        return Times(self.rollout_s, self.between_s, self.train_s, self.after_s).positive()
