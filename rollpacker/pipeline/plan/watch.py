"""Tells a slow link from a slow stage by the times of ops and messages.

Micro-batches differ in size, so each time is compared with what is expected for its size: a line
fitted to the last healthy steps, robustly, since single times are noisy. Of a step's comparisons
only the median counts. A link or stage counts as slow after it was so beyond chance in
`confirm_steps` steps running, and as well again only clearly below the mark (hysteresis).

A message is timed from its posting on one stage to its arrival on another, whose clock may differ.
Both directions of a link are therefore taken together: the difference cancels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.portable import exp, logs
from rollpacker.pipeline.plan.choosers import KINDS, Kind
from rollpacker.pipeline.plan.link_choice import LinkKind
from rollpacker.pipeline.plan.work import Link, Load, OpCost, fit_op_cost

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Limits above which a link or a stage of a pipeline counts as slow."""

    confirm_steps: int = 2
    """Number of steps in a row in which a link or stage must be slow before it counts as slow."""
    stage_factor: float = 1.25
    """A stage is slow if its ops take more than this many times as long as usual."""
    link_share: float = 0.15
    """A link is slow if a message there and one back take longer than usual by more than this share
    of a micro-batch's three ops on the slower of the two stages."""
    link_share_at_once: float = 1.0
    """A link is also slow, from the first step on, if a message there and one back take more than
    this share of a micro-batch's three ops, even if they always did."""
    num_sds: float = 4.0
    """To be slow, times must also exceed the usual by this many standard deviations of noise."""
    clear: float = 0.8
    """Share of the limit for slow below which a slow link or stage counts as well again."""
    healthy_steps: int = 8
    """Usual times are those of this many last steps in which the link or stage was not slow."""
    first_steps: int = 3
    """Number of healthy steps that must be measured before another is compared with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTimes:
    """Times of ops and messages that were measured in one step."""

    ops: Sequence[Mapping[Kind, Sequence[tuple[Load, float]]]]
    """By stage and kind of op, each op's load (size of the micro-batch) and seconds without
    waits."""
    down: Sequence[Sequence[tuple[int, float]]]
    """By link, the bytes of each message to the next stage, and the seconds from its sending to its
    arrival."""
    up: Sequence[Sequence[tuple[int, float]]]
    over: LinkKind = "direct"
    """The kind of link that the messages took, direct or host: each has its own usual times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding that a link or a stage turned slow, or is well again."""

    what: Literal["link", "stage"]
    number: int
    slow: bool
    factor: float | None
    """How many times longer than usual the link or stage takes. None: it always was slow."""
    seconds: float
    """Seconds of a message there and one back (link), or of a micro-batch's three ops (stage)."""

    def __str__(self) -> str:
        place, unit = f"stage {self.number}", "F, I and W of a micro-batch"
        if self.what == "link":
            place = f"link {self.number}-{self.number + 1}"
            unit = "a message there and one back"
        state = "is slow" if self.slow else "is well again"
        usual = "" if self.factor is None else f", {self.factor:.2f} times the usual"
        return f"{place} {state}: {self.seconds * 1e3:.1f} ms for {unit}{usual}"


class PipelineWatch:
    """Finds links and stages of one pipeline that turn slow or well again, step by step."""

    def __init__(self, num_stages: int, config: WatchConfig | None = None) -> None:
        self.config = WatchConfig() if config is None else config
        self._stages = [_StageWatch(self.config) for _ in range(num_stages)]
        self._links = [LinkWatch(self.config) for _ in range(num_stages - 1)]

    def take_links(self, before: PipelineWatch) -> None:
        """Take over the links' usual times and state from another watch of the same links."""
        self._links = before._links

    @property
    def slow_stages(self) -> list[int]:
        return [number for number, stage in enumerate(self._stages) if stage.mark.slow]

    @property
    def slow_links(self) -> list[int]:
        return [number for number, link in enumerate(self._links) if link.mark.slow]

    def observe(self, times: SweepTimes) -> list[Finding]:
        """Judge a step. Returns the links and stages that turned slow or well in it, if any."""
        findings = []
        whole_s = []
        for number, (stage, ops) in enumerate(zip(self._stages, times.ops, strict=True)):
            whole_s.append(math.fsum(_median_s(ops[kind]) for kind in KINDS))
            changed, factor = stage.observe(ops)
            if changed:
                slow = stage.mark.slow
                findings.append(_found("stage", number, slow, factor, whole_s[number]))
        for number, link in enumerate(self._links):
            both = (times.down[number], times.up[number])
            whole = max(whole_s[number : number + 2])
            changed, factor = link.observe(both, whole, times.over)
            if changed:
                seconds = math.fsum(map(_median_s, both))
                findings.append(_found("link", number, link.mark.slow, factor, seconds))
        return findings


def _found(
    what: Literal["link", "stage"], number: int, slow: bool, factor: float | None, seconds: float
) -> Finding:
    return Finding(what=what, number=number, slow=slow, factor=factor, seconds=seconds)


def _median_s(timed: Sequence[tuple[Load, float]] | Sequence[tuple[int, float]]) -> float:
    return float(np.median([seconds for _, seconds in timed])) if timed else 0.0


class _Mark:
    """Whether a link or stage counts as slow, which changes after some steps that contradict it."""

    def __init__(self, config: WatchConfig) -> None:
        self.slow = False
        self.num_against = 0
        """Number of last steps in a row that contradict the present state, slow or well."""
        self._config = config

    def observe(self, level: float, *, beyond_chance: bool) -> bool:
        """Judge a step by its slowness over the limit (slow above 1, if `beyond_chance`). Returns
        whether `slow` changed, as it does after `confirm_steps` steps against it."""
        against = level < self._config.clear if self.slow else level > 1 and beyond_chance
        self.num_against = self.num_against + 1 if against else 0
        if self.num_against < self._config.confirm_steps:
            return False
        self.slow = not self.slow
        self.num_against = 0
        return True

    @property
    def healthy(self) -> bool:
        """Whether the link or stage is not slow, and the last step did not suggest that it is."""
        return not self.slow and self.num_against == 0


Step = TypeVar("Step")


class _Healthy(Generic[Step]):
    """The last steps in which a link or stage was not slow, from which usual times are computed."""

    def __init__(self, config: WatchConfig) -> None:
        self.steps: deque[Step] = deque(maxlen=config.healthy_steps)
        self._config = config
        self._num_unused = 0

    def add(self, step: Step) -> bool:
        """Add a step in which nothing was slow. Returns whether to compute usual times anew: always
        at first, then when half of the steps kept are new, since it takes milliseconds."""
        full = len(self.steps) == self._config.healthy_steps
        self.steps.append(step)
        self._num_unused += 1
        if full and self._num_unused < self._config.healthy_steps // 2:
            return False
        self._num_unused = 0
        return len(self.steps) >= self._config.first_steps


Ops = Mapping[Kind, Sequence[tuple[Load, float]]]
"""By kind of op, the load (size of the micro-batch) and the seconds of each op of a stage."""


class _StageWatch:
    """Watches whether one stage's ops take longer than is usual for micro-batches of their size."""

    def __init__(self, config: WatchConfig) -> None:
        self.mark = _Mark(config)
        self._config = config
        self._healthy = _Healthy[Ops](config)
        self._costs: dict[Kind, OpCost] = {}
        self._usual: Floats = np.empty(0)
        """Logarithms of measured over expected seconds of ops in healthy steps; median about 0."""

    def observe(self, ops: Ops) -> tuple[bool, float | None]:
        """Judge a step's ops. Returns whether the stage turned slow or well, and how many times
        longer than usual its ops take (None: not known yet)."""
        factor, changed = None, False
        now = self._logs(ops)
        if len(now) and len(self._usual):
            rise = float(np.median(now) - np.median(self._usual))
            chance = _spread(self._usual) * _error(len(now), len(self._usual))
            factor = exp(rise)
            level = (factor - 1) / (self._config.stage_factor - 1)
            beyond = rise > self._config.num_sds * chance
            changed = self.mark.observe(level, beyond_chance=beyond)
        if self.mark.healthy and self._healthy.add(ops):
            for kind in KINDS:
                pairs = [pair for step in self._healthy.steps for pair in step[kind]]
                if pairs:
                    self._costs[kind] = fit_op_cost(*zip(*pairs, strict=True))
            self._usual = np.concatenate([self._logs(step) for step in self._healthy.steps])
        return changed, factor

    def _logs(self, ops: Ops) -> Floats:
        """Return the logarithm of measured over expected seconds of each of these ops."""
        ratios = [
            seconds / expected
            for kind, cost in self._costs.items()
            for load, seconds in ops[kind]
            if seconds > 0 and (expected := cost(load)) > 0
        ]
        return logs(np.array(ratios, dtype=np.float64))


Messages = Sequence[tuple[int, float]]
"""Bytes of each message between two stages, and the seconds that it took."""
_MOST_FITTED = 128
"""The most messages to which a line is fitted, since all pairs of them are compared."""


@dataclass(frozen=True, slots=True)
class _Direction:
    """Usual times of messages in one direction over a link between two stages."""

    latency_s: float
    """Seconds of an empty message; the difference of the two processes' clocks is included."""
    per_byte_s: float
    middle_s: float
    """Median of the seconds that messages take beyond those for latency and bytes; nearly 0."""
    spread_s: float
    count: int

    @classmethod
    def of(cls, messages: Messages) -> _Direction:
        latency_s, per_byte_s = _line(messages)
        over = _residuals(messages, latency_s, per_byte_s)
        return cls(latency_s, per_byte_s, float(np.median(over)), _spread(over), len(over))

    def excess(self, messages: Messages) -> tuple[float, float]:
        """Return the seconds by which these messages take longer than usual, and the standard
        deviation of these seconds by chance."""
        over = _residuals(messages, self.latency_s, self.per_byte_s)
        chance_s = self.spread_s * _error(len(over), self.count)
        return float(np.median(over)) - self.middle_s, chance_s


class LinkWatch:
    """Watches whether messages over one link take longer than is usual for their sizes."""

    def __init__(self, config: WatchConfig) -> None:
        self.mark = _Mark(config)
        self._config = config
        self._healthy: dict[LinkKind, _Healthy[tuple[Messages, Messages]]] = {}
        self._usual: dict[LinkKind, list[_Direction]] = {}

    def observe(
        self, both: tuple[Messages, Messages], whole_s: float, over: LinkKind
    ) -> tuple[bool, float | None]:
        """Judge a step's messages, down and up, over this kind of link. Returns whether it turned
        slow or well, and how many times longer than usual messages take (None: not known).
        `whole_s`: seconds of a micro-batch's three ops on the slower of the link's two stages."""
        if not all(both):
            return False, None
        total_s = math.fsum(map(_median_s, both))
        level = total_s / (self._config.link_share_at_once * max(whole_s, 1e-9))
        factor, beyond = None, level > 1
        usual = self._usual.get(over)
        if usual is None and self.mark.slow:  # it became so over the other kind
            usual = next(iter(self._usual.values()), None)
        if usual is not None:
            ways = [one.excess(found) for one, found in zip(usual, both, strict=True)]
            excess_s = math.fsum(excess for excess, _ in ways)
            factor = total_s / (total_s - excess_s) if total_s > excess_s else math.inf
            level = max(level, excess_s / (self._config.link_share * max(whole_s, 1e-9)))
            chance_s = math.sqrt(math.fsum(chance * chance for _, chance in ways))
            beyond = beyond or excess_s > self._config.num_sds * chance_s
        changed = self.mark.observe(level, beyond_chance=beyond)
        healthy = self._healthy.setdefault(over, _Healthy(self._config))
        if self.mark.healthy and healthy.add(both):
            self._usual[over] = [
                _Direction.of([message for step in healthy.steps for message in step[way]])
                for way in (0, 1)
            ]
        return changed, factor


def _residuals(messages: Messages, latency_s: float, per_byte_s: float) -> Floats:
    measured = np.array(messages, dtype=np.float64)
    return measured[:, 1] - latency_s - per_byte_s * measured[:, 0]


def _line(messages: Messages) -> tuple[float, float]:
    """Return the seconds of an empty message and the seconds per byte, by a line fitted to
    messages: the median slope between two of them (Theil and Sen), which outliers cannot move
    far."""
    every = max(math.ceil(len(messages) / _MOST_FITTED), 1)
    points = np.array(messages[::every], dtype=np.float64)
    sizes, seconds = points[:, 0], points[:, 1]
    first, second = np.triu_indices(len(points), 1)
    apart = sizes[second] - sizes[first]
    differ = apart != 0
    slope = 0.0
    if differ.any():
        slopes = (seconds[second] - seconds[first])[differ] / apart[differ]
        slope = max(float(np.median(slopes)), 0.0)
    return float(np.median(seconds - slope * sizes)), slope


def link_of(down: Messages, up: Messages) -> Link:
    """Return the link's latency and rate as these messages show them: the mean of both directions,
    exact for a message of median size."""
    both = (down, up)
    size = float(np.median([size for size, _ in (*down, *up)]))
    seconds = math.fsum(map(_median_s, both)) / 2
    per_byte_s = math.fsum(_line(messages)[1] for messages in both) / 2
    per_byte_s = min(per_byte_s, seconds / size) if size > 0 else 0.0
    rate = 1 / per_byte_s if per_byte_s > 0 else math.inf
    return Link(max(seconds - per_byte_s * size, 0.0), rate)


def _spread(values: Floats) -> float:
    """Return the values' standard deviation, estimated from their distances from the median."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _error(*counts: int) -> float:
    """Return the standard deviation of a difference of medians of samples of these sizes, as a
    multiple of the single values' own."""
    return 1.2533 * math.sqrt(math.fsum(1 / count for count in counts))
