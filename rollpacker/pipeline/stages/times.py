"""Times of ops and messages that a pipeline's rank measured in a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.pipeline.plan.choosers import Kind
from rollpacker.pipeline.plan.work import Load

Messages = tuple[tuple[int, float], ...]
"""For each message its bytes, and the seconds from its sending on the other stage to its arrival
here. The clocks may differ: only the sum of a message there and one back is exact."""

NUM_BYTES = 1 << 16
"""Number of bytes of the message by which the network between two ranks is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One rank's times of all sweeps (all micro-batches once through the stages) since the last
    optimizer step. `ops` and messages are only those of sweeps with gradients."""

    stage: int
    num_layers: int
    """Number of the policy's layers on this stage."""
    ops: Mapping[Kind, tuple[tuple[Load, float], ...]]
    """By kind of op, the load (size of the micro-batch) and seconds of each op, waits left out."""
    from_previous: Messages
    from_next: Messages
    direct_lost: bool = False
    """Whether a direct link was lost while host links were in use."""
    peak_live_tokens: int
    """The most tokens whose activations this rank kept at once."""
    busy_s: float
    """Seconds in which the stage ran ops, both in sweeps with gradients and in those without."""
    waiting_s: float
    """Seconds in which the stage had ops left to run, but waited for messages."""
    head_layers: float = 0.0
    """Work of the policy's output layer, as a number of layers; the same on all stages."""
    round_trips: tuple[tuple[int, float], ...] = ()
    """Later shards (processes) of this stage, and seconds of `NUM_BYTES` there and back to each."""
    shard_bytes: float = 0.0
    """About how many bytes a step sends from one process of the stage to another: its weights in
    two sweeps, and its gradients."""
