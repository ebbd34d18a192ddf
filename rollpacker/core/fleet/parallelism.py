"""The parallelism planner: how many devices share one engine, for each kind of round.

A higher tensor-parallel degree leaves more memory for the key-value cache and so fewer preemptions;
a lower one decodes more tokens a second while the cache suffices. Short rounds launch more than
long ones, so each kind of round has its own degree. It goes up to the next when preemptions of a
round rose, and down to the next after `calm_rounds` rounds in a row without any, unless that degree
failed before (see below).

Counts are per launched sample, so that rounds of different sizes compare. A round is compared with
the last one of its kind, whatever degree that had: after a step up, preemptions that merely stay
are no reason for another; after a step down, any are. The first round of a kind is compared with
the last round of another kind at that degree; if there was none, any preemption is a rise. A
difference of less than `FLOOR` is never a rise.

A degree that had to be left for a higher one *failed*. It is tried again only after
`RETRY_FACTOR * calm_rounds` calm rounds, twice as many after each further failure, and never again
after `MAX_FAILURES`. A workload that does not change thus sees a finite number of changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollpacker.bounds import check_at_least
from rollpacker.codec import from_plain, to_plain
from rollpacker.core.commands import RoundKind

FLOOR = 0.01
"""Least difference in preemptions per launched sample that is a rise; less counts as chance."""
RETRY_FACTOR = 4
MAX_FAILURES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismConfig:
    """Settings of the planner that chooses the number of devices per engine
    (`parallelism_planner.*`). Engines of another degree are new ones, on the same devices."""

    enabled: bool = False
    """Whether the number of devices per engine is chosen. False: it is always `initial`."""
    degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees to choose from, ascending. Each must divide the number of devices,
    `rollout.engines` times `initial`, and the model's attention heads."""
    initial: int = 1
    """Number of devices per engine to begin with: the one that is best where every round waits for
    all of its samples. Without the planner all rounds have it."""
    rise: float = 1.05
    """A round whose preemptions per sample are more than this many times those of the last round of
    its kind calls for more devices per engine: the next higher of `degrees`."""
    calm_rounds: int = 4
    """Number of rounds of a kind (short, long, ...) in a row without preemption that call for the
    next lower number of devices per engine."""

    def __post_init__(self) -> None:
        if not self.degrees or min(self.degrees) < 1:
            raise ValueError(f"degrees must be whole numbers from 1 on, not {self.degrees}")
        if list(self.degrees) != sorted(set(self.degrees)):
            raise ValueError(f"degrees must ascend, not {self.degrees}")
        if self.initial not in self.degrees:
            raise ValueError(f"initial must be one of degrees {self.degrees}, not {self.initial}")
        check_at_least(self, 1, "rise", "calm_rounds")

    @property
    def of_several(self) -> bool:
        """Whether an engine has, or may be given, more than one device (tensor parallelism)."""
        return self.enabled or self.initial > 1

    @property
    def reachable(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that engines may have under these settings."""
        return self.degrees if self.enabled else (self.initial,)


class KnownKind(msgspec.Struct, forbid_unknown_fields=True):
    """Number of devices per engine (`degree`) in rounds of one kind (short, long, ...), and the
    preemptions in its last rounds, which decide about the next number."""

    degree: int
    last_rate: float | None = None
    """Preemptions per launched sample in the last round of this kind. None before the first."""
    num_calm: int = 0
    """Number of the last rounds of this kind, in a row, without preemption at this `degree`."""
    num_failures: dict[int, int] = msgspec.field(default_factory=dict)
    """How often this kind of round had to go from each tensor-parallel degree to a higher one."""


class KnownDegrees(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a `ParallelismPlanner` knows of past rounds, as it stands in a checkpoint."""

    num_changes: int = 0
    rates: dict[int, float] = msgspec.field(default_factory=dict)
    """Preemptions per launched sample in the last round of any kind, by tensor-parallel degree."""
    kinds: dict[str, KnownKind] = msgspec.field(default_factory=dict)


class ParallelismPlanner:
    """Chooses the tensor-parallel degree of rounds. Ask `degree` when a round starts, and report
    the round to `observe` when it is over."""

    def __init__(self, config: ParallelismConfig) -> None:
        self.config = config
        self._known = KnownDegrees()

    @property
    def num_changes(self) -> int:
        """Number of changes of the tensor-parallel degree so far, over all kinds of round."""
        return self._known.num_changes

    def degree(self, kind: RoundKind) -> int:
        """Number of devices per engine in the next round of this kind (short, long, and so on)."""
        known = self._known.kinds.get(kind.value)
        return self.config.initial if known is None else known.degree

    def observe(self, kind: RoundKind, *, preemptions: int, num_samples: int) -> None:
        """Records that a round of this kind is over: `num_samples` were launched, and engines put
        samples back into their queues `preemptions` times."""
        assert preemptions >= 0 and num_samples >= 1
        if not self.config.enabled:
            return
        state = self._known.kinds.setdefault(kind.value, KnownKind(self.config.initial))
        rate = preemptions / num_samples
        reference = state.last_rate
        if reference is None:
            reference = self._known.rates.get(state.degree, 0.0)
        state.last_rate = self._known.rates[state.degree] = rate
        state.num_calm = 0 if preemptions else state.num_calm + 1
        if rate > self.config.rise * reference + FLOOR:
            self._step_up(state)
        elif state.num_calm:
            self._step_down(state)

    def _step_up(self, state: KnownKind) -> None:
        higher = [degree for degree in self.config.degrees if degree > state.degree]
        if higher:
            state.num_failures[state.degree] = state.num_failures.get(state.degree, 0) + 1
            self._change(state, higher[0])

    def _step_down(self, state: KnownKind) -> None:
        lower = [degree for degree in self.config.degrees if degree < state.degree]
        if not lower:
            return
        failures = state.num_failures.get(lower[-1], 0)
        needed = self.config.calm_rounds
        if failures:
            needed *= RETRY_FACTOR * 2 ** (failures - 1)
        if failures < MAX_FAILURES and state.num_calm >= needed:
            self._change(state, lower[-1])

    def _change(self, state: KnownKind, degree: int) -> None:
        state.degree = degree
        state.num_calm = 0
        self._known.num_changes += 1

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return to_plain(self._known)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what an earlier planner had learnt. A kind of round whose tensor-parallel degree
        is no longer configured starts anew."""
        known = from_plain(KnownDegrees, state)
        kinds, degrees = known.kinds, self.config.degrees
        known.kinds = {kind: one for kind, one in kinds.items() if one.degree in degrees}
        self._known = known
