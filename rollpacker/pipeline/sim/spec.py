"""A scenario's trainer in pipeline stages (`train.pipeline.*`), and the orders and links that
`--compare` knows by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.pipeline.plan.choosers import check_order_name
from rollpacker.sim.scenario_checks import at_least_one, check_seconds

LinkKind = Literal["auto", "direct", "host"]
PIPELINES: Mapping[str, tuple[str, LinkKind]] = {
    "1f1b": ("1f1b", "direct"),
    "zero-bubble": ("zero-bubble", "direct"),
    "host": ("zero-bubble", "host"),
    "adapted": ("adapted", "host"),
    "ready": ("ready", "host"),
}
"""Names for `simulate --compare`: `train.pipeline.order` and `links` of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Seconds of a micro-batch's ops on each stage, measured (`train.pipeline.op_times.*`)."""

    f_s: tuple[float, ...]
    """Forward, by stage."""
    i_s: tuple[float, ...]
    """Backward for inputs, by stage."""
    w_s: tuple[float, ...]
    """Backward for weights, by stage."""
    tokens: int | None = None
    """Tokens of the micro-batch that was timed: others take as much more or less as they have
    tokens. None: every micro-batch takes the same."""

    def __post_init__(self) -> None:
        for name in ("f_s", "i_s", "w_s"):
            for seconds in getattr(self, name):
                check_seconds(name, seconds)
        if self.tokens is not None:
            at_least_one(self, "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnDelays:
    """Delays that change while the trainer works (`train.pipeline.drawn_delays.*`), drawn by the
    scenario's seed."""

    mean_s: float
    """Mean of a normal law, in seconds; draws below 0 are cut off at 0."""
    sd_s: float
    """Standard deviation of the law, in seconds."""
    hold_s: tuple[float, float]
    """A delay stays for a time between these, all alike; then the next is drawn."""
    links: tuple[int, ...] | None = None
    """Links that have drawn delays, from 0. None: all links."""

    def __post_init__(self) -> None:
        check_seconds("mean_s", self.mean_s)
        check_seconds("sd_s", self.sd_s)
        low, high = self.hold_s
        if not 0 < low <= high:
            raise ValueError(f"hold_s must be two rising numbers above 0, not {low:g} and {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The trainer's layers cut into stages (`train.pipeline.*`), each of
    `tensor_parallel x context_parallel` GPUs. More keys than a run's, which has no `order`."""

    stages: int
    """Link n is between stages n and n + 1, both from 0."""
    layers: Literal["auto"] | tuple[int, ...] = "auto"
    """Layers of each stage; auto: split so that the slowest has as little to do as can be."""
    order: str = "ready"
    """The order of a stage's ops. 1f1b: one forward, one backward by turns. zero-bubble:
    backwards for weights fill in, planned as if every op took as long and links nothing.
    adapted: planned before each sweep for the delays of the sweep before. ready: the first ready
    op, backwards for inputs first. Else a CSV of torch's format, such as `rollpacker plan --csv`
    writes."""
    live_tokens: Literal["auto"] | int | None = "auto"
    """A stage keeps activations of so many tokens at most. auto: what its GPUs have room for beside
    what is trained, at 34 bytes a token, layer and unit of hidden size (bfloat16, nothing computed
    again); null: no limit."""
    links: LinkKind = "auto"
    """direct: a stage waits until a slow link has taken its message. host: messages wait in host
    memory. auto: host while over some link a message and its answer take longer than a
    micro-batch's F and I, which is Eq. 1 of ADAPTRA for a slack of 2."""
    relayout: Literal["propose", "never", "do"] = "propose"
    """With `slow_stages`: another split of the layers is told, or not, or taken."""
    micro_batch_tokens: int = 16_384
    """Responses with their prompts are packed up to so many tokens; a longer one has a micro-batch
    of its own."""
    micro_batches: int | None = None
    """Instead: so many of a replica's sweep, all about as large."""
    op_times: OpTimes | None = None
    """None: the training cost of the scenario, shared out by layers."""
    head_layers: float = 2.5
    """The head, on the last stage, has the work of so many layers."""
    link_gb_s: float = 50.0
    """Rate of a link in each direction, 1e9 bytes per second; per GPU of a stage."""
    slow_links_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds that a message takes besides, one way, by link."""
    slow_links_gb_s: Mapping[int, float] = field(default_factory=dict)
    """Rates of links that have another one."""
    drawn_delays: DrawnDelays | None = None
    """On top of all that."""
    slow_stages: Mapping[int, float] = field(default_factory=dict)
    """So many times as long take the ops of these stages, from 0."""
    direct_fixed_s: float = 0.0
    """Seconds of a sweep with gradients over direct links, beside its ops."""
    host_fixed_s: float = 0.0
    """Seconds of a sweep with gradients over host links, beside its ops."""

    def __post_init__(self) -> None:
        at_least_one(self, "stages", "micro_batch_tokens")
        if self.micro_batches is not None:
            at_least_one(self, "micro_batches")
        for name in ("head_layers", "direct_fixed_s", "host_fixed_s"):
            check_seconds(name, getattr(self, name))
        self._check_layers()
        self._check_op_times()
        self._check_links()
        for stage, slower in self.slow_stages.items():
            if not 0 <= stage < self.stages:
                raise ValueError(f"slow_stages has stage {stage}: there are 0 to {self.stages - 1}")
            if not (math.isfinite(slower) and slower > 0):
                raise ValueError(f"slow_stages.{stage} must be more than 0, not {slower}")
        check_order_name(self.order)
        if isinstance(self.live_tokens, int):
            at_least_one(self, "live_tokens")

    def _check_layers(self) -> None:
        if self.layers == "auto":
            return
        if self.op_times is not None:
            raise ValueError("layers and op_times exclude each other: the times say it all")
        if self.relayout == "do":
            raise ValueError("relayout is do, but layers are fixed: set layers=auto")

    def _check_op_times(self) -> None:
        if self.op_times is None:
            return
        for name in ("f_s", "i_s", "w_s"):
            count = len(getattr(self.op_times, name))
            if count != self.stages:
                raise ValueError(f"op_times.{name} has {count} numbers for {self.stages} stages")

    def _check_links(self) -> None:
        for rate in (self.link_gb_s, *self.slow_links_gb_s.values()):
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"a link's gb_s must be more than 0, not {rate}")
        for seconds in self.slow_links_s.values():
            check_seconds("slow_links_s", seconds)
        drawn = self.drawn_delays
        listed = [] if drawn is None or drawn.links is None else drawn.links
        for link in (*self.slow_links_s, *self.slow_links_gb_s, *listed):
            if not 0 <= link < self.stages - 1:
                raise ValueError(
                    f"there is no link {link}: {self.stages} stages have the links 0 to "
                    f"{self.stages - 2}"
                )
