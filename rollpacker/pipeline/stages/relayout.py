"""Looks for faster layouts of a pipeline (layers by stage, devices of ranks), in the run's own
process. They are logged, or the trainer switches to them. No torch is imported here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rollpacker.pipeline.plan.layout import Layout, MeasuredSweep, Proposal, Relayouts, ShardTimes
from rollpacker.pipeline.stages.overseer import Overseer
from rollpacker.pipeline.stages.times import NUM_BYTES, StageTimes
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.setup import LearnerSetup

logger = logging.getLogger(__name__)


class Relayout:
    """Looks for faster layouts (layers by stage, devices of ranks), and logs or returns them."""

    def __init__(
        self, *, does: bool, can_switch: bool, total_steps: int | None, updates: int
    ) -> None:
        """Begin the search. `does`: layouts are returned for a switch, not only logged.
        `can_switch`: whether the processes can be started anew. `total_steps`: training steps of
        the run; None: no end is set. `updates`: optimizer steps per training step."""
        self._does = does and can_switch
        self._can_switch = can_switch
        self._total_steps = total_steps
        self._updates = updates
        self._relayouts: Relayouts | None = None
        if does and not can_switch:
            logger.warning(
                "train.pipeline.relayout=do: processes that torchrun has started cannot be started "
                "anew in another layout, so that layouts are told and not taken"
            )

    @classmethod
    def of(cls, setup: LearnerSetup, *, can_switch: bool) -> Relayout | None:
        """Return what looks for faster layouts of this trainer's stages. None: it has one stage, or
        `train.pipeline.relayout` is never. `can_switch`: whether processes can be started anew."""
        pipeline = setup.train.pipeline
        if pipeline.relayout == "never" or pipeline.stages == 1:
            return None
        does = pipeline.relayout == "do"
        return cls(
            does=does,
            can_switch=can_switch,
            total_steps=setup.total_steps,
            updates=setup.train.updates_per_round,
        )

    def observe(
        self,
        version: int,
        outcomes: Sequence[StepOutcome],
        *,
        overseer: Overseer,
        places: tuple[int, ...],
        switch_s: float,
    ) -> Layout | None:
        """Judge a step by its ranks' outcomes, after the overseer. Returns a layout to switch to,
        or None. `version`: steps so far. `places`: each rank's device. `switch_s`: its seconds."""
        times = [one.stage_times for one in outcomes if one.stage_times is not None]
        size = sum(one.stage == 0 for one in times)
        layout = Layout(layers=tuple(one.num_layers for one in times[::size]), places=places)
        if self._relayouts is None:
            self._relayouts = Relayouts(layout, head_layers=times[0].head_layers)
        elif self._relayouts.layout != layout:
            self._relayouts.switched(layout)
        # How long a run without an end goes on: as long again as it has.
        left = version if self._total_steps is None else self._total_steps - version
        found = self._relayouts.observe(
            sweep=_sweep(overseer, times[-1]),
            shards=_shard_times(times, places, max(one.sums.seconds for one in outcomes)),
            slow_links={
                _sorted(places[number * size + shard], places[(number + 1) * size + shard])
                for shard, number in overseer.slow_links_of_shards
            },
            left_steps=left * self._updates,
            switch_s=switch_s,
        )
        if found is None:
            return None
        self._tell(found, layout, version, switch_s)
        return found.layout if self._does else None

    def _tell(self, found: Proposal, layout: Layout, version: int, switch_s: float) -> None:
        if self._does:
            what = "the trainer's processes start anew so"
        elif self._can_switch:
            what = "train.pipeline.relayout=do has that done between two steps"
        elif found.layout.layers != layout.layers:
            what = f"stop the run, and --resume it with train.pipeline.layers={_of(found.layout)}"
        else:
            what = "stop the run, and let torchrun start its processes in that order"
        logger.warning(
            "after step %d: %s. That saves some %.2f s of a step and takes some %.0f s: %s",
            version,
            found.why,
            found.saved_s * self._updates,
            switch_s,
            what,
        )


def _sweep(overseer: Overseer, last: StageTimes) -> MeasuredSweep | None:
    measured = overseer.arrangement.measured
    if measured is None:
        return None
    return MeasuredSweep(
        costs=measured.stages,
        loads=[load for load, _ in last.ops["F"]],
        links=measured.links,
        bytes_per_token=measured.bytes_per_token,
    )


def _shard_times(
    times: Sequence[StageTimes], places: Sequence[int], step_s: float
) -> ShardTimes | None:
    """Return times of messages between a stage's shards (processes). None: it has only one."""
    size = sum(one.stage == 0 for one in times)
    found = {
        _sorted(places[rank], places[one.stage * size + other]): seconds
        for rank, one in enumerate(times)
        for other, seconds in one.round_trips
    }
    if not found:
        return None
    return ShardTimes(
        there_and_back_s=found,
        message_bytes=NUM_BYTES,
        step_bytes=max(one.shard_bytes for one in times),
        step_s=step_s,
    )


def _sorted(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _of(layout: Layout) -> str:
    return str(list(layout.layers)).replace(" ", "")
