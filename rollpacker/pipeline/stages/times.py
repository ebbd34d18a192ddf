"""Times that one rank of a pipeline measured in a step. No torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.pipeline.plan.choosers import Kind
from rollpacker.pipeline.plan.work import Load

Messages = tuple[tuple[int, float], ...]
"""For each message its bytes, and the seconds from its posting on the other stage to its arrival
here. The two processes' clocks may differ; that cancels in a message there and one back."""

NUM_BYTES = 1 << 16
"""Bytes of the message by which the network between shards is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of all sweeps since the update before. `ops` and messages are only those of sweeps with
    gradients: other sweeps have less to do."""

    stage: int
    num_layers: int
    """Number of the policy's layers on this stage."""
    ops: Mapping[Kind, tuple[tuple[Load, float], ...]]
    """Load and seconds of each op, by kind, without time spent waiting or sending."""
    from_previous: Messages
    from_next: Messages
    direct_lost: bool = False
    """Whether a direct link was lost while it was not in use."""
    peak_live_tokens: int
    """The most tokens whose activations were kept at once."""
    busy_s: float
    """Seconds in which the stage ran ops, also of sweeps without gradients."""
    waiting_s: float
    """Seconds in which the stage had a sweep to go on with, but no op that was ready."""
    head_layers: float = 0.0
    """The work of the policy's output layer, in layers; the same on all stages."""
    round_trips: tuple[tuple[int, float], ...] = ()
    """Numbers of the stage's later shards, and seconds of `NUM_BYTES` there and back to each."""
    shard_bytes: float = 0.0
    """About how many bytes a step sends from one shard of the stage to another: weights, once for
    each of two sweeps, and gradients."""
