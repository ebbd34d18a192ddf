"""A slow link is told from a slow stage, by noisy times of micro-batches of all sizes."""

from __future__ import annotations

import pytest

from rollpacker.pipeline.plan.link_choice import LinkKind
from rollpacker.pipeline.plan.watch import PipelineWatch, SweepTimes, link_of
from rollpacker.pipeline.plan.work import KINDS, Link, Load
from tests.core.pipelines import WatchedPipeline, episode
from tests.number import number_of


def test_episodes_are_told_apart() -> None:
    wrong = [
        (seed, *found) for seed in range(number_of(15)) if (found := episode(seed))[0] != found[1]
    ]
    assert wrong == []


def test_nothing_is_said_of_healthy_steps() -> None:
    pipeline = WatchedPipeline(77)
    watch = PipelineWatch(pipeline.stages)
    assert [watch.observe(pipeline.step()) for _ in range(150)] == [[]] * 150


def test_slow_is_named_within_three_steps_and_well_again_when_it_is_over() -> None:
    pipeline = WatchedPipeline(3)
    watch = PipelineWatch(pipeline.stages)
    for _ in range(10):
        assert watch.observe(pipeline.step()) == []
    usual = pipeline.links[0]
    slow = Link(usual.latency_s + pipeline.typical_s(), usual.bytes_per_s)
    pipeline.slow_link = (0, slow)
    found = [finding for _ in range(3) for finding in watch.observe(pipeline.step())]
    assert [(f.what, f.number, f.slow) for f in found] == [("link", 0, True)]
    assert found[0].factor is not None and found[0].factor > 2
    assert str(found[0]).startswith("link 0-1 is slow: ")
    times = pipeline.step()
    measured = link_of(times.down[0], times.up[0])
    size = pipeline.budget * 8192
    assert measured.seconds(size) == pytest.approx(slow.seconds(size), rel=0.3)
    pipeline.slow_link, pipeline.slow_stage = None, (1, 2.0)
    found = [finding for _ in range(3) for finding in watch.observe(pipeline.step())]
    assert sorted((f.what, f.number, f.slow) for f in found) == [
        ("link", 0, False),
        ("stage", 1, True),
    ]
    assert watch.slow_stages == [1] and watch.slow_links == []


def times(
    op_s: float, message_s: float, *, count: int = 8, over: LinkKind = "direct"
) -> SweepTimes:
    """Two stages, no noise."""
    load = Load.of([1000])
    ops = {kind: [(load, op_s)] * count for kind in KINDS}
    messages = [(1000, message_s)] * count
    return SweepTimes(ops=[ops, ops], down=[messages], up=[messages], over=over)


def test_a_link_that_is_slow_from_the_beginning_is_named_too() -> None:
    watch = PipelineWatch(2)
    assert watch.observe(times(0.01, 0.02)) == []
    (finding,) = watch.observe(times(0.01, 0.02))
    assert str(finding) == "link 0-1 is slow: 40.0 ms for a message there and one back"


def test_a_slow_link_that_delays_nobody_is_no_finding() -> None:
    watch = PipelineWatch(2)
    for _ in range(5):
        watch.observe(times(0.1, 0.0001))
    # Twenty times slower, and still a fiftieth of an op.
    assert [watch.observe(times(0.1, 0.002)) for _ in range(5)] == [[]] * 5


def test_between_the_marks_nothing_changes() -> None:
    watch = PipelineWatch(2)
    for _ in range(5):
        watch.observe(times(0.01, 0.0))
    found = [f for _ in range(3) for f in watch.observe(times(0.013, 0.0))]
    assert {(f.what, f.slow) for f in found} == {("stage", True)}
    assert watch.slow_stages == [0, 1]
    # 1.22 is below the mark of 1.25, but not clearly.
    assert [watch.observe(times(0.0122, 0.0)) for _ in range(4)] == [[]] * 4
    found = [f for _ in range(3) for f in watch.observe(times(0.0115, 0.0))]
    assert {(f.what, f.slow) for f in found} == {("stage", False)}


def test_one_bad_step_is_no_finding() -> None:
    watch = PipelineWatch(2)
    for step in range(12):
        assert watch.observe(times(0.03 if step % 4 == 3 else 0.01, 0.0)) == []


def test_a_step_without_micro_batches_says_nothing() -> None:
    watch = PipelineWatch(2)
    for _ in range(4):
        watch.observe(times(0.01, 0.001))
    assert watch.observe(times(0.01, 0.001, count=0)) == []


def test_what_is_usual_is_so_over_one_kind_of_link() -> None:
    """Host links take 4 ms here, and would count as slow if they were direct ones."""
    watch = PipelineWatch(2)
    for over, usual_s in (("direct", 0.001), ("host", 0.004)):
        assert [watch.observe(times(0.01, usual_s, over=over)) for _ in range(5)] == [[]] * 5
    found = [watch.observe(times(0.01, 0.008, over="host")) for _ in range(2)]
    assert [[one.factor for one in step] for step in found] == [[], [pytest.approx(2.0)]]
    assert [watch.observe(times(0.01, 0.001, over="direct")) for _ in range(2)][1][0].slow is False


def test_a_slow_link_over_a_kind_that_is_new_is_compared_with_the_other() -> None:
    watch = PipelineWatch(2)
    slow_s = 0.01
    for seconds in (0.001, 0.001, 0.001, 0.001, slow_s, slow_s):
        watch.observe(times(0.01, seconds))
    assert watch.slow_links == [0]
    for _ in range(5):
        assert watch.observe(times(0.01, slow_s, over="host")) == []
    found = [watch.observe(times(0.01, 0.0015, over="host")) for _ in range(2)]
    assert found[0] == [] and found[1][0].slow is False
