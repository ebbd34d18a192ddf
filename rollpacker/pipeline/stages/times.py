"""Times that one rank of a pipeline measured in a step. Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.pipeline.plan.choosers import Kind
from rollpacker.pipeline.plan.work import Load

Messages = tuple[tuple[int, float], ...]
"""Bytes of each, and seconds from its posting on the other stage to its arrival here. The clocks
are two processes'; what one is ahead of the other cancels in a message there and one back."""

NUM_BYTES = 1 << 16
"""Bytes of a message by which the network between shards is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of all sweeps since the update before. `ops` and messages are those of sweeps with
    gradients alone: others have less to do."""

    stage: int
    num_layers: int
    """The policy's layers on this stage."""
    ops: Mapping[Kind, tuple[tuple[Load, float], ...]]
    """Load and seconds of each op, by kind, without time in which it waited or sent."""
    from_previous: Messages
    from_next: Messages
    direct_lost: bool = False
    """Whether a direct link was lost while it was not in use."""
    peak_live_tokens: int
    """The most tokens whose activations were kept at once."""
    busy_s: float
    """Seconds in which it ran ops, also of sweeps without gradients."""
    waiting_s: float
    """Seconds in which it had a sweep to go on with, and no op that was ready."""
    head_layers: float = 0.0
    """The work of the policy's output layer, in layers; the same on all stages."""
    round_trips: tuple[tuple[int, float], ...] = ()
    """Later shards of the stage, and seconds of a message of `NUM_BYTES` there and
    back."""
    shard_bytes: float = 0.0
    """Bytes that a step sends from one shard of the stage to another, about: weights, once for
    each of two sweeps, and gradients."""
