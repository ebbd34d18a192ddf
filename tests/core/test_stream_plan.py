"""The stream plan: when devices are released, which, and what is streamed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.commands import RoundKind
from rollpacker.core.fleet.stream_plan import (
    MAX_HISTORY,
    DeviceLayout,
    StreamConfig,
    StreamPlan,
    _peak_demand,
)

SHORT, LONG = RoundKind.SHORT, RoundKind.LONG


def plan_of(layout: DeviceLayout | None = None, *, cap: int | None = None, **config) -> StreamPlan:
    layout = DeviceLayout(gpus=8) if layout is None else layout
    return StreamPlan(StreamConfig(enabled=True, **config), layout, max_response_tokens=cap)


def play(plan: StreamPlan, lengths, kind=LONG, **begin) -> list[tuple[int, tuple[int, ...]]]:
    """One round whose samples finish in the order of length: `(how many had finished, devices)` of
    every release."""
    plan.begin(kind, num_samples=len(lengths), num_to_train=len(lengths), **begin)
    releases = []
    for count, length in enumerate(sorted(lengths), start=1):
        devices = plan.on_finished(length)
        if devices is not None:
            releases.append((count, devices))
    return releases


def test_without_a_limit_the_upper_half_goes_at_twenty_percent():
    assert play(plan_of(), range(1, 101)) == [(20, (4, 5, 6, 7))]


def test_only_in_the_kinds_named_and_only_if_enabled():
    plan = plan_of()
    assert play(plan, range(100), kind=SHORT) == []
    assert plan.num_tries == 0
    assert play(StreamPlan(StreamConfig(), DeviceLayout(gpus=8)), range(100)) == []


def test_again_in_the_next_round():
    plan = plan_of()
    assert [len(play(plan, range(50))) for _ in range(3)] == [1, 1, 1]
    assert (plan.num_tries, plan.num_releases) == (3, 3)


def test_it_tries_every_five_percent_up_to_one_half():
    plan = plan_of(DeviceLayout(gpus=8, kv_tokens=1), cap=1000)
    assert play(plan, range(1, 101)) == []
    assert plan.num_tries == plan.num_refused_kv == 7
    rare = plan_of(DeviceLayout(gpus=8, kv_tokens=1), cap=1000, min_new_share=0.1)
    assert play(rare, range(1, 101)) == []
    assert rare.num_tries == 4


# -- the cache -----------------------------------------------------------------------


def test_demand_that_is_met_only_later_is_released_later():
    """80 samples run to 1000 tokens each; the survivors hold 4 x 13,000 tokens. That is enough for
    52 of them, so at 50 finished of 100 and not before."""
    layout = DeviceLayout(gpus=8, kv_tokens=13_000)
    assert play(plan_of(layout, cap=1000), [*range(1, 51), *[1000] * 50]) == [(50, (4, 5, 6, 7))]


def test_the_peak_counts_and_not_the_present():
    """At 20 finished the others hold 80 x 20 tokens, which is nothing; but earlier rounds went on
    to 1000, so an engine will hold 20 x 1000."""
    lengths = [*range(1, 21), *[1000] * 80]
    for kv_tokens, released in ((19_999, 0), (20_000, 1)):
        plan = plan_of(DeviceLayout(gpus=8, kv_tokens=kv_tokens), window=(0.2, 0.2))
        assert len(play(plan, lengths)) == 0  # no history, no limit: nothing is known
        assert len(play(plan, lengths)) == released


def test_a_history_of_short_responses_allows_what_the_cap_alone_does_not():
    plan = plan_of(DeviceLayout(gpus=2, kv_tokens=40_000), cap=16_384)
    lengths = [10 * i for i in range(1, 101)]
    assert play(plan, lengths) == []
    for _ in range(9):
        play(plan, lengths)
    assert plan.num_releases > 0


def test_races_and_rounds_that_wait_for_all_have_their_own_history():
    """Short rounds stop their slow samples: their lengths must not vouch for a long round."""
    plan = plan_of(DeviceLayout(gpus=8, kv_tokens=50_000), kinds=("short", "long"))
    assert [len(play(plan, range(1, 101), kind=SHORT)) for _ in range(3)] == [0, 1, 1]
    assert play(plan, [*range(1, 21), *[10_000] * 80]) == []
    assert play(plan, [*range(1, 21), *[10_000] * 80]) == []
    assert plan.num_releases == 2


def test_an_engine_must_hold_more_than_the_expected_demand():
    """Of 100 live samples half run to 1000 tokens, but it may well be 60 of them: two standard
    deviations more. No more than all of them, though."""
    lengths = np.array([100, 1000])
    assert _peak_demand(lengths, 100, 0.0) == pytest.approx(60 * 1000)
    assert _peak_demand(lengths, 1, 10.0) == pytest.approx(1010)


def test_prompts_take_cache_too():
    lengths = [*range(1, 21), *[100] * 80]
    layout = DeviceLayout(gpus=8, kv_tokens=20 * 150)
    assert len(play(plan_of(layout, cap=100), lengths, prompt_tokens=50)) == 1
    late = play(plan_of(layout, cap=100), lengths, prompt_tokens=60)
    assert late and late[0][0] > 20


def test_stopped_samples_need_no_cache():
    plan = plan_of(DeviceLayout(gpus=2, kv_tokens=1000), cap=100)
    plan.begin(LONG, num_samples=20, num_to_train=20)
    for _ in range(6):
        plan.on_stopped(1)
    assert [plan.on_finished(i) for i in range(1, 5)] == [None, None, None, (1,)]


def test_degree_of_the_round():
    """With engines of four devices, half of eight is one engine; of eight, none can go."""
    plan = plan_of()
    wide = DeviceLayout(gpus=8, tensor_parallel=4)
    assert play(plan, range(50), layout=wide) == [(10, (4, 5, 6, 7))]
    assert play(plan, range(50), layout=DeviceLayout(gpus=8, tensor_parallel=8)) == []
    assert plan.num_refused_layout == 7


# -- the devices ---------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.sampled_from((1, 2, 3, 4, 8)),
    st.sampled_from((1, 2, 3, 4, 8)),
    st.floats(0.01, 0.99),
)
def test_nothing_is_split_and_an_engine_stays(multiple, degree, train_group, share):
    gpus = multiple * degree * train_group
    layout = DeviceLayout(
        gpus=gpus, gpus_per_node=gpus, tensor_parallel=degree, train_group=train_group
    )
    released = set(layout.releasable(share))
    assert released == set(range(gpus - len(released), gpus))
    assert len(released) <= share * gpus + 1e-6
    assert gpus - len(released) >= degree
    for size in (degree, train_group):
        for first in range(0, gpus, size):
            group = set(range(first, first + size))
            assert group <= released or not group & released


@pytest.mark.parametrize(
    ("layout", "num_released"),
    [
        (DeviceLayout(gpus=1), 0),
        (DeviceLayout(gpus=2), 1),
        (DeviceLayout(gpus=8), 4),
        (DeviceLayout(gpus=8, train_group=8), 0),
        (DeviceLayout(gpus=12, gpus_per_node=4, tensor_parallel=4), 4),
        (DeviceLayout(gpus=16, tensor_parallel=2, train_group=8), 8),
        (DeviceLayout(gpus=6, gpus_per_node=6, tensor_parallel=2, train_group=3), 0),
    ],
)
def test_half_of_the_devices(layout, num_released):
    assert len(layout.releasable(0.5)) == num_released


@given(
    st.lists(st.lists(st.integers(1, 2000), min_size=1, max_size=60), min_size=1, max_size=4),
    st.integers(1, 40_000),
    st.booleans(),
)
def test_at_most_once_a_round_and_never_beyond_the_cache(rounds, kv_tokens, has_cap):
    plan = plan_of(
        DeviceLayout(gpus=4, kv_tokens=kv_tokens), cap=2000 if has_cap else None, window=(0.2, 1.0)
    )
    for lengths in rounds:
        lengths = sorted(lengths)
        releases = play(plan, lengths)
        assert len(releases) <= 1
        for count, devices in releases:
            assert devices == (2, 3)
            assert count >= 0.2 * len(lengths)
    assert plan.num_tries == plan.num_releases + plan.num_refused_kv + plan.num_refused_layout


@given(st.lists(st.integers(1, 2000), min_size=10, max_size=60), st.integers(1, 60_000))
def test_with_the_same_lengths_as_before_the_survivors_do_not_run_out(lengths, kv_tokens):
    """The projection from an identical round bounds what the remaining samples come to hold if they
    are spread evenly and in lockstep."""
    plan = plan_of(DeviceLayout(gpus=2, kv_tokens=kv_tokens), window=(0.2, 1.0))
    play(plan, lengths)
    lengths = sorted(lengths)
    for count, _ in play(plan, lengths):
        rest = lengths[count:]
        # Both in lockstep on the one survivor; ties with the longest finished one count as ended.
        rest = [length for length in rest if length > lengths[count - 1]]
        peak = max((len(rest) - i) * length for i, length in enumerate(rest)) if rest else 0
        assert peak <= kv_tokens


# -- the groups ----------------------------------------------------------------------

GROUPS = [(f"{name}0", f"{name}1") for name in "abcdef"]


def test_groups_are_streamed_after_the_release_in_order():
    plan = plan_of()
    plan.begin(LONG, num_samples=12, num_to_train=12)
    plan.on_finished(1)
    assert plan.groups_to_stream(GROUPS[:1], engine_empty=False) == ()
    plan.on_finished(2)
    assert not plan.released
    assert plan.on_finished(3) == (4, 5, 6, 7)
    assert plan.released
    assert plan.groups_to_stream(GROUPS[:2], engine_empty=False) == tuple(GROUPS[:2])
    assert plan.groups_to_stream(GROUPS[2:], engine_empty=False) == tuple(GROUPS[2:])
    plan.begin(LONG, num_samples=12, num_to_train=12)
    assert plan.groups_to_stream(GROUPS, engine_empty=True) == ()


def test_only_the_given_share_is_streamed():
    plan = plan_of(reward_wait=True, max_share=0.5)
    plan.begin(SHORT, num_samples=20, num_to_train=12)
    assert plan.groups_to_stream(GROUPS[:2], engine_empty=True) == tuple(GROUPS[:2])
    assert plan.groups_to_stream(GROUPS[2:], engine_empty=True) == (GROUPS[2],)
    assert plan.groups_to_stream(GROUPS[3:], engine_empty=True) == ()


def test_the_reward_wait_needs_an_empty_engine():
    plan = plan_of(reward_wait=True)
    plan.begin(SHORT, num_samples=12, num_to_train=12)
    assert plan.groups_to_stream(GROUPS, engine_empty=False) == ()
    assert plan.groups_to_stream(GROUPS, engine_empty=True) == tuple(GROUPS)
    off = StreamPlan(StreamConfig(reward_wait=True), DeviceLayout())
    off.begin(SHORT, num_samples=12, num_to_train=12)
    assert off.groups_to_stream(GROUPS, engine_empty=True) == ()


# -- state ---------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=30), max_size=4),
    st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=30), min_size=1, max_size=4),
)
def test_a_restored_plan_goes_on_alike(before, after):
    plan = plan_of(DeviceLayout(gpus=4, kv_tokens=2000))
    for lengths in before:
        play(plan, lengths)
    other = plan_of(DeviceLayout(gpus=4, kv_tokens=2000))
    other.restore(json.loads(json.dumps(plan.state())))
    for lengths in after:
        assert play(plan, lengths) == play(other, lengths)
    assert plan.state() == other.state()


def test_a_trainer_apart_needs_no_release_and_no_empty_engine():
    plan = StreamPlan(StreamConfig(enabled=True), DeviceLayout(gpus=8), trainer_apart=True)
    assert play(plan, range(1, 101), kind=SHORT) == []
    assert plan.streamed() == (0, "no group was complete before the whole step was due")
    groups = [(1, 2), (3, 4)]
    assert plan.groups_to_stream(groups, engine_empty=False) == tuple(groups)
    assert plan.streamed() == (4, "")
    assert play(plan, range(1, 101), kind=LONG) == [] and plan.num_tries == 0
    off = StreamPlan(StreamConfig(), DeviceLayout(), trainer_apart=True)
    off.begin(LONG, num_samples=4, num_to_train=4)
    assert off.groups_to_stream(groups, engine_empty=True) == ()


@pytest.mark.parametrize(
    "layout, kind, lengths, reason",
    [
        (DeviceLayout(gpus=8), SHORT, [5] * 20, "nothing is released in a short round"),
        (DeviceLayout(gpus=1), LONG, [5] * 20, "an engine or a training replica would be split"),
        (
            DeviceLayout(gpus=8, kv_tokens=1),
            LONG,
            [5] * 20,
            "the other engines would run out of key-value cache",
        ),
        (DeviceLayout(gpus=8), LONG, [5] * 20, "no group was complete after the release"),
        (DeviceLayout(gpus=8), LONG, [], "the round was over before a release could be tried"),
    ],
)
def test_it_says_why_nothing_was_streamed(layout, kind, lengths, reason):
    plan = StreamPlan(StreamConfig(enabled=True), layout, max_response_tokens=9)
    plan.begin(kind, num_samples=20, num_to_train=20)
    for length in lengths:
        plan.on_finished(length)
    assert plan.streamed() == (0, reason)


def test_the_history_is_bounded():
    plan = plan_of()
    for _ in range(3):
        play(plan, range(MAX_HISTORY))
    assert [len(lengths) for lengths in plan.state()["histories"].values()] == [MAX_HISTORY]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("lang",)}, "lang"),
        ({"window": (0.5, 0.2)}, "window"),
        ({"window": (0.0, 0.2)}, "window"),
        ({"every": 0.0}, "every"),
        ({"released_share": 1.0}, "released_share"),
        ({"max_share": 1.5}, "max_share"),
        ({"min_new_share": -0.1}, "min_new_share"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StreamConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 0}, "gpus"),
        ({"gpus": 8, "tensor_parallel": 3}, "tensor_parallel"),
        ({"gpus": 12, "tensor_parallel": 12}, "node"),
        ({"gpus": 8, "train_group": 3}, "train_group"),
        ({"kv_tokens": 0}, "kv_tokens"),
    ],
)
def test_bad_layouts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DeviceLayout(**settings)
