"""What the run's process makes of the times of its trainer's ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection

import pytest

from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.link_choice import PATIENCE
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.overseer import Arrangement, Overseer, first_arrangement
from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.calls import codec
from rollpacker.trainer.trainer import PipelineConfig

LOADS = [Load.of([200 * n]) for n in range(1, 9)]
OP_S, BYTES = 1e-4, 64
"""Seconds and bytes per token; a link takes 1 ms and 1 us per byte / 64."""

Place = tuple[int, int]
"""Of a rank, or of a link by the stage before it: stage or link, and shard."""


def ranks_times(
    stages: int = 3,
    shards: int = 1,
    slow_links: Collection[Place] = (),
    slow_stages: Collection[Place] = (),
) -> list[StageTimes]:
    """By rank. What is slow takes four times as long."""

    def messages(link: int, shard: int) -> tuple[tuple[int, float], ...]:
        if not 0 <= link < stages - 1:
            return ()
        factor = 40.0 if (link, shard) in slow_links else 1.0
        return tuple((x.tokens * BYTES, factor * (1e-3 + x.tokens * 1e-6)) for x in LOADS)

    def times(stage: int, shard: int) -> StageTimes:
        factor = 4.0 if (stage, shard) in slow_stages else 1.0
        seconds = {"F": OP_S, "I": OP_S, "W": 2 * OP_S}
        return StageTimes(
            stage=stage,
            num_layers=stage + 1,
            ops={k: tuple((x, factor * seconds[k] * x.tokens) for x in LOADS) for k in KINDS},
            from_previous=messages(stage - 1, shard),
            from_next=messages(stage, shard),
            peak_live_tokens=1000 * (stages - stage),
            busy_s=3.0,
            waiting_s=1.0 + stage,
        )

    return [times(stage, shard) for stage in range(stages) for shard in range(shards)]


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    found = [(one.levelno, one.getMessage()) for one in caplog.records]
    caplog.clear()
    return found


def test_auto_goes_to_host_links_once_one_is_slow_and_back(caplog):
    caplog.set_level(logging.INFO)
    overseer = Overseer(PipelineConfig(stages=3), num_shards=1)
    assert overseer.arrangement == Arrangement(links="direct", measured=None)
    for version in range(1, 6):
        overseer.observe(version, ranks_times())
    assert overseer.arrangement.links == "direct" and told(caplog) == []
    kinds = []
    for version in range(6, 9):
        metrics = overseer.observe(version, ranks_times(slow_links=[(1, 0)]))
        kinds.append((metrics["perf/pipeline/host_links"], overseer.arrangement.links))
    assert kinds == [(0.0, "direct"), (0.0, "host"), (1.0, "host")]
    assert metrics["perf/pipeline/link_1/slow"] == 1 and metrics["perf/pipeline/link_0/slow"] == 0
    (level, finding), (_, switch) = told(caplog)
    assert level == logging.WARNING
    assert finding.startswith("after step 7: pipeline link 1-2 is slow: ")
    assert finding.endswith(", 40.00 times the usual")
    assert switch == "from the next step on, pipeline stages use host links: one is slow"
    kinds = []
    for version in range(9, 9 + PATIENCE + 2):
        overseer.observe(version, ranks_times())
        kinds.append(overseer.arrangement.links)
    assert kinds == ["host"] * PATIENCE + ["direct"] * 2  # two steps until it counts as well
    (level, finding), (_, switch) = told(caplog)
    assert level == logging.INFO and "pipeline link 1-2 is well again" in finding
    assert "direct links: all have been well" in switch
    assert [(one.version, one.finding.slow) for one in overseer.found] == [(7, True), (10, False)]


@pytest.mark.parametrize("same_places", [True, False])
def test_another_layout_keeps_the_links_in_use(same_places):
    """And, between the same places, what is usual of them: a slow one is so still."""
    config = PipelineConfig(stages=3)
    overseer = Overseer(config, num_shards=1)
    for version in range(1, 9):
        overseer.observe(version, ranks_times(slow_links=[(1, 0)] if version > 5 else []))
    after = overseer.of_layout(config, same_places=same_places)
    assert after.arrangement == Arrangement(links="host", measured=None)
    assert after.slow_links == ({1} if same_places else set()) and after.found == overseer.found
    for version in range(9, 12):
        after.observe(version, ranks_times(slow_links=[(1, 0)]))
    assert after.arrangement.links == "host"


@pytest.mark.parametrize("kind", ["host", "direct"])
def test_links_that_were_chosen_stay_and_what_is_slow_is_named(kind, caplog):
    """A stage here."""
    overseer = Overseer(PipelineConfig(stages=3, links=kind), num_shards=1)
    for version in range(1, 9):
        slow = {"slow_stages": [(2, 0)], "slow_links": [(0, 0)]} if version > 5 else {}
        overseer.observe(version, ranks_times(**slow))
        assert overseer.arrangement.links == kind
    assert overseer.slow_stages == {2} and overseer.slow_links == {0}
    first, second = (message for _, message in told(caplog))
    assert "stage 2 is slow" in first and "4.00 times the usual" in first
    assert "link 0-1 is slow" in second


def test_one_slow_shard_among_four_is_enough(caplog):
    overseer = Overseer(PipelineConfig(stages=2), num_shards=4)
    for version in range(1, 9):
        slow = [(0, 2)] if version > 5 else []
        overseer.observe(version, ranks_times(2, 4, slow_links=slow))
    finding, switch = (message for _, message in told(caplog))
    assert "after step 7, shard 2: pipeline link 0-1 is slow" in finding and "host links" in switch
    assert overseer.arrangement.links == "host"


def test_what_was_measured_is_what_stages_and_links_cost_and_crosses_to_ranks():
    overseer = Overseer(PipelineConfig(stages=3), num_shards=2)
    overseer.observe(1, ranks_times(3, 2))
    measured = overseer.arrangement.measured
    assert measured is not None and len(measured.stages) == 3 and len(measured.links) == 2
    load = Load.of([777])
    for cost in measured.stages:
        assert [cost.of(kind)(load) for kind in KINDS] == pytest.approx([0.0777, 0.0777, 0.1554])
    assert measured.bytes_per_token == pytest.approx(BYTES)
    assert measured.links[0].seconds(900 * BYTES) == pytest.approx(1.9e-3)
    overseer.observe(2, ranks_times(3, 2, slow_stages=[(1, 0), (1, 1)]))
    again = overseer.arrangement
    assert again.measured.stages[1].f(load) == pytest.approx(4 * 0.0777)
    assert codec().decode(codec().encode(again)) == again
    times = ranks_times()
    assert codec().decode(codec().encode(times)) == times


def test_metrics_of_a_step():
    """Two shards of three stages: each stage of a shard is busy for 3 s, and waits for 1, 2, 3."""
    metrics = Overseer(PipelineConfig(stages=3), num_shards=2).observe(1, ranks_times(3, 2))
    assert metrics["perf/pipeline/bubble_ratio"] == pytest.approx(6 / 15)
    assert metrics["perf/pipeline/stage_1/layers"] == 2
    assert metrics["perf/pipeline/stage_1/busy_s"] == pytest.approx(3.0)
    assert metrics["perf/pipeline/stage_1/busy_ratio"] == pytest.approx(3 / 5)
    assert metrics["perf/pipeline/stage_0/live_tokens/max"] == 3000
    assert metrics["perf/pipeline/link_0/message_s"] == pytest.approx(1.9e-3)
    assert metrics["perf/pipeline/host_links"] == 0
    assert "perf/pipeline/link_2/slow" not in metrics


def test_a_step_that_lacks_times_keeps_what_was_measured():
    """Its only micro-batch may have had no message yet."""
    overseer = Overseer(PipelineConfig(stages=2), num_shards=1)
    overseer.observe(1, ranks_times(2))
    before = overseer.arrangement
    nothing = [
        StageTimes(
            stage=stage,
            num_layers=1,
            ops=dict.fromkeys(KINDS, ()),
            from_previous=(),
            from_next=(),
            peak_live_tokens=0,
            busy_s=0.0,
            waiting_s=0.0,
        )
        for stage in range(2)
    ]
    metrics = overseer.observe(2, nothing)
    assert overseer.arrangement == before
    assert "perf/pipeline/bubble_ratio" not in metrics
    assert "perf/pipeline/link_0/message_s" not in metrics


def test_ranks_begin_as_the_overseer_thinks():
    for links, first in (("auto", "direct"), ("direct", "direct"), ("host", "host")):
        config = PipelineConfig(stages=2, links=links)
        assert Overseer(config, num_shards=1).arrangement == first_arrangement(config)
        assert first_arrangement(config).links == first
