"""Settings of a simulated trainer's pipeline stages (`train.pipeline.*`), and the names by which
`rollpacker simulate --compare` knows an order of ops with a kind of links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.bounds import check_at_least
from rollpacker.pipeline.plan.choosers import check_order_name
from rollpacker.sim.scenario_checks import check_seconds

LinkKind = Literal["auto", "direct", "host"]
PIPELINES: Mapping[str, tuple[str, LinkKind]] = {
    "1f1b": ("1f1b", "direct"),
    "zero-bubble": ("zero-bubble", "direct"),
    "host": ("zero-bubble", "host"),
    "adapted": ("adapted", "host"),
    "ready": ("ready", "host"),
}
"""Names that `simulate --compare` takes, each with its `train.pipeline.order` and `links`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Measured seconds of a micro-batch's ops, by stage (`train.pipeline.op_times.*`)."""

    f_s: tuple[float, ...]
    """Seconds of the forward pass, by stage."""
    i_s: tuple[float, ...]
    """Seconds of the backward pass for inputs, by stage."""
    w_s: tuple[float, ...]
    """Seconds of the backward pass for weights, by stage."""
    tokens: int | None = None
    """Number of tokens of the measured micro-batch: the times of others are in proportion to their
    tokens. None: every micro-batch takes the same time."""

    def __post_init__(self) -> None:
        for name in ("f_s", "i_s", "w_s"):
            for seconds in getattr(self, name):
                check_seconds(name, seconds)
        check_at_least(self, 1, "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnDelays:
    """Random delays of messages between stages, which change now and then while the trainer works
    (`train.pipeline.drawn_delays.*`). The scenario's seed decides them."""

    mean_s: float
    """Mean of the normal distribution of delays, in seconds; draws below 0 count as 0."""
    sd_s: float
    """Standard deviation of the delays, in seconds."""
    hold_s: tuple[float, float]
    """Least and most seconds for which a delay stays, drawn evenly, before the next is drawn."""
    links: tuple[int, ...] | None = None
    """Numbers of links that have drawn delays, from 0. None: all links."""

    def __post_init__(self) -> None:
        check_seconds("mean_s", self.mean_s)
        check_seconds("sd_s", self.sd_s)
        low, high = self.hold_s
        if not 0 < low <= high:
            raise ValueError(f"hold_s must be two rising numbers above 0, not {low:g} and {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The trainer's layers split into stages (`train.pipeline.*`), each of `tensor_parallel x
    context_parallel` GPUs. A simulation has more keys here than a run."""

    stages: int
    """Number of pipeline stages. Link n is between stages n and n + 1, both from 0."""
    layers: Literal["auto"] | tuple[int, ...] = "auto"
    """Number of layers of each stage. auto: the split whose slowest stage has the least to do."""
    order: str = "ready"
    """The order of a stage's ops. 1f1b: a forward and a backward by turns. zero-bubble: backwards
    for weights fill the waits, planned as if every op took the same time and messages none.
    adapted: planned before each sweep for the delays of the sweep before. ready: whichever op has
    its input, backwards for inputs before others. Else a CSV file in torch's format, such as
    `rollpacker plan --csv` writes."""
    live_tokens: Literal["auto"] | int | None = "auto"
    """The most tokens whose activations a stage keeps. auto: what its GPUs have room for beside
    weights and optimizer state, at 34 bytes a token, layer and unit of hidden size (bfloat16,
    nothing computed again); null: no limit."""
    links: LinkKind = "auto"
    """How stages send to each other. direct: a stage waits until a slow link has taken its message.
    host: messages wait in host memory. auto: host while over some link a message and its answer
    take longer than a micro-batch's forward and backward for inputs (Eq. 1 of ADAPTRA, slack 2)."""
    relayout: Literal["propose", "never", "do"] = "propose"
    """What is done with a faster split of the layers, if some stages are slow. propose: it is
    shown. do: it is used. never: nothing."""
    micro_batch_tokens: int = 16_384
    """The most tokens of a micro-batch, into which responses with their prompts are packed. A
    longer response has a micro-batch of its own."""
    micro_batches: int | None = None
    """Number of micro-batches of about equal size into which a replica packs its responses of a
    step. None: `micro_batch_tokens` decides."""
    op_times: OpTimes | None = None
    """Measured times of ops. None: the scenario's training cost is shared out by layers."""
    head_layers: float = 2.5
    """Work of the output layer, which the last stage has, as a number of layers."""
    link_gb_s: float = 50.0
    """Rate of a link in each direction, in 1e9 bytes per second for each GPU of a stage."""
    slow_links_s: Mapping[int, float] = field(default_factory=dict)
    """By number of the link, seconds that a message takes one way besides its bytes' time."""
    slow_links_gb_s: Mapping[int, float] = field(default_factory=dict)
    """By number of the link, rates in 1e9 bytes per second that differ from `link_gb_s`."""
    drawn_delays: DrawnDelays | None = None
    """Random delays of messages, besides the fixed times above. None: there are none."""
    slow_stages: Mapping[int, float] = field(default_factory=dict)
    """By number of the stage from 0, how many times longer than usual its ops take."""
    direct_fixed_s: float = 0.0
    """Seconds that a step with direct links takes besides its ops and messages."""
    host_fixed_s: float = 0.0
    """Seconds that a step with host links takes besides its ops and messages."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "stages", "micro_batch_tokens", "micro_batches", "live_tokens")
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
