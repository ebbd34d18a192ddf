"""Choosers of a pipeline, in virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.pipeline.plan.choosers import (
    FixedOrder,
    Op,
    ReadyFirst,
    StageState,
    check_caps,
    even_quotas,
)
from rollpacker.pipeline.plan.order import check_orders
from rollpacker.pipeline.plan.plan import (
    plan_1f1b,
    plan_adapted,
    plan_zero_bubble,
    ready_choosers,
)
from rollpacker.pipeline.plan.search import _Sweep, improve
from rollpacker.pipeline.plan.virtual_time import TOGETHER_S, replay, run
from rollpacker.pipeline.plan.work import Link, Work, constant
from tests.core.pipelines import kept_optima, planned_ms

seconds = st.one_of(st.just(0.0), st.integers(1, 40).map(float), st.floats(0.001, 40.0))


@st.composite
def sweeps(draw: st.DrawFn):
    """`(work, links that change at some second, caps)`."""
    stages, count = draw(st.integers(1, 5)), draw(st.integers(0, 7))

    def table():
        row = st.tuples(*[seconds] * count)
        return draw(st.tuples(*[row] * stages))

    tokens = draw(st.tuples(*[st.integers(1, 9)] * count))
    work = Work(
        f_s=table(),
        i_s=table(),
        w_s=table(),
        tokens=tokens,
        message_bytes=draw(st.tuples(*[st.integers(0, 9)] * count)),
    )
    link = st.builds(Link, seconds, st.sampled_from([math.inf, 0.3, 5.0]))
    before = draw(st.tuples(*[link] * (stages - 1)))
    after = draw(st.tuples(*[link] * (stages - 1)))
    change_s = draw(st.floats(0.0, 200.0))
    largest = max(tokens, default=1)
    cap = st.one_of(st.none(), st.integers(largest, 3 * largest))
    caps = draw(st.tuples(*[cap] * stages))
    return work, lambda number, now_s: (before if now_s < change_s else after)[number], caps


def check_timeline(timeline, work, *, caps=None):
    """It is a possible course of events."""
    check_orders(
        timeline.orders,
        num_stages=work.num_stages,
        num_micro_batches=work.num_micro_batches,
        tokens=work.tokens,
        caps=caps,
    )
    ends = {}
    for stage, spans in enumerate(timeline.spans):
        free_s = 0.0
        for op, start_s, end_s in spans:
            assert start_s >= free_s - TOGETHER_S
            assert end_s - start_s == pytest.approx(work.table(op.kind)[stage][op.micro_batch])
            ends[stage, op] = free_s = end_s
    starts = {
        (stage, span.op): span.start_s
        for stage, spans in enumerate(timeline.spans)
        for span in spans
    }
    assert len(timeline.messages) == 2 * (work.num_stages - 1) * work.num_micro_batches
    arrived = {}
    for m in timeline.messages:
        down = m.direction == "down"
        op = Op("F" if down else "I", m.micro_batch)
        sender, receiver = (m.link, m.link + 1) if down else (m.link + 1, m.link)
        assert ends[sender, op] == pytest.approx(m.posted_s)
        assert m.posted_s <= m.sent_s <= m.arrived_s
        assert starts[receiver, op] >= m.arrived_s - TOGETHER_S
        assert m.arrived_s >= arrived.get((m.link, down), 0.0), "messages overtake each other"
        arrived[m.link, down] = m.arrived_s


@settings(max_examples=100, deadline=None)
@given(
    sweeps(),
    st.data(),
    st.sampled_from(["free", "blocking", "paired"]),
    st.booleans(),
)
def test_ready_first_ends_under_any_links_quotas_and_caps(sweep, data, sends, streamed) -> None:
    work, links, caps = sweep
    quotas = data.draw(st.one_of(st.none(), st.tuples(*[st.integers(0, 9)] * work.num_stages)))
    added_s = None
    if streamed:
        count = work.num_micro_batches
        added_s = sorted(data.draw(st.lists(st.floats(0, 99), min_size=count, max_size=count)))
    choosers = ready_choosers(work.num_stages, quotas=quotas, caps=caps)
    timeline = run(choosers, work, links, sends=sends, added_s=added_s)
    check_timeline(timeline, work, caps=caps)
    for cap, peak in zip(caps, timeline.peak_live_tokens, strict=True):
        assert cap is None or peak <= cap
    if added_s is not None:
        for spans in timeline.spans:
            assert all(s.start_s >= added_s[s.op.micro_batch] - TOGETHER_S for s in spans)


@settings(max_examples=60, deadline=None)
@given(sweeps(), st.sampled_from(["free", "blocking", "paired"]))
def test_plans_can_be_run_whatever_links_do(sweep, sends) -> None:
    work, links, caps = sweep
    expected = [links(number, 0.0) for number in range(work.num_stages - 1)]
    plans = [
        (plan_1f1b(work.num_stages, work.num_micro_batches), None),
        (plan_zero_bubble(work, caps=caps), caps),
        (plan_adapted(work, expected, caps=caps, search_ops=500), caps),
    ]
    for orders, capped in plans:
        check_timeline(replay(orders, work, links, sends=sends), work, caps=capped)


@settings(max_examples=60, deadline=None)
@given(sweeps())
def test_a_search_never_makes_it_longer_and_times_as_the_replay_does(sweep) -> None:
    work, links, caps = sweep
    expected = [links(number, 0.0) for number in range(work.num_stages - 1)]
    before = run(ready_choosers(work.num_stages, caps=caps), work, constant(expected))
    length_s, chain = _Sweep(work, expected).longest_chain([list(o) for o in before.orders])
    assert length_s == pytest.approx(before.makespan_s)
    assert len(chain) >= 3 * min(work.num_micro_batches, 1)
    found = improve(before.orders, work, expected, caps=caps, budget_ops=1_000)
    after = replay(found, work, constant(expected))
    check_timeline(after, work, caps=caps)
    assert after.makespan_s <= before.makespan_s + 1e-6


def even_work(num_micro_batches: int, num_stages: int, seconds: float = 10.0) -> Work:
    times = [seconds] * num_stages
    return Work.even(num_micro_batches, f_s=times, i_s=times, w_s=times)


@pytest.mark.parametrize(
    ("delay", "static", "adapted"),
    [(0, 390, 390), (5, 395, 395), (10, 400, 400), (15, 410, 405), (20, 440, 410), (30, 500, 420)],
)
def test_the_papers_example_comes_out_exactly(delay: int, static: int, adapted: int) -> None:
    work = even_work(12, 4)
    links = [Link(float(delay)), Link(), Link()]
    zero_bubble = plan_zero_bubble(work)
    assert replay(zero_bubble, work, constant(links)).makespan_s == pytest.approx(static)
    assert replay(plan_adapted(work, links), work, constant(links)).makespan_s == pytest.approx(
        adapted
    )
    assert run(ready_choosers(4), work, constant(links)).makespan_s == pytest.approx(adapted)


@pytest.mark.parametrize("slack", [2, 3, 4, 5, 6])
def test_delays_cascade_from_the_threshold_on_at_the_slope_of_the_theorem(slack: int) -> None:
    count, t = 420, 10.0  # so many that every slack + 1 divides them
    work = even_work(count, 2, t)
    # A plan for this delay leads by just so many forwards.
    planned_s = (slack - 2) * t / 2
    orders = run(ready_choosers(2), work, constant([Link(planned_s)])).orders

    def makespan_s(delay_s: float) -> float:
        return replay(orders, work, constant([Link(delay_s)])).makespan_s

    threshold_s, step_s = (slack - 1) * t, 0.01 * t
    below = (makespan_s(threshold_s) - makespan_s(threshold_s - step_s)) / step_s
    just_above = (makespan_s(threshold_s + step_s) - makespan_s(threshold_s)) / step_s
    above = (makespan_s(threshold_s + 10 * t) - makespan_s(threshold_s)) / (10 * t)
    assert below == pytest.approx(1.0, rel=0.01)
    assert just_above == pytest.approx(2 * count / (slack + 1), rel=0.01)
    assert above == pytest.approx(2 * count / (slack + 1), rel=0.01)


def test_a_blocking_send_holds_up_the_compute_behind_it_in_both_directions() -> None:
    work = even_work(24, 2)
    orders = plan_zero_bubble(work)

    def makespan_s(delay_s: float) -> float:
        return replay(orders, work, constant([Link(delay_s)]), sends="blocking").makespan_s

    assert makespan_s(0.0) == replay(orders, work, constant([Link()])).makespan_s
    # One channel serves every message, twice as many as there are micro-batches.
    assert makespan_s(300.0) - makespan_s(200.0) == pytest.approx(2 * 24 * 100)


def test_a_link_is_serial_in_each_direction() -> None:
    work = Work(f_s=((1.0,) * 3, (1.0,) * 3), i_s=((0.0,) * 3,) * 2, w_s=((0.0,) * 3,) * 2,
                tokens=(1, 1, 1), message_bytes=(10, 10, 10))  # fmt: skip
    timeline = run(ready_choosers(2), work, constant([Link(2.0, 5.0)]))
    down = [m for m in timeline.messages if m.direction == "down"]
    # Posted at 1, 2, 3; each takes the link for 2 and arrives 2 after that.
    assert [(m.sent_s, m.arrived_s) for m in down] == [(1, 5), (3, 7), (5, 9)]


def test_initial_quotas_fall_evenly() -> None:
    assert even_quotas(4, 7) == [7, 5, 3, 1]
    assert even_quotas(8, 15) == [15, 13, 11, 9, 7, 5, 3, 1]
    assert even_quotas(4, 6) == [6, 4, 2, 1]
    assert even_quotas(1, 5) == [5]


def test_a_stage_waits_for_its_warm_up_and_no_longer_than_there_are_micro_batches() -> None:
    state = StageState(0, 2)
    chooser = ReadyFirst(0, quotas=[3, 1])
    state.add([5, 5])
    for number in range(2):
        assert chooser.choose(state) == Op("F", number)
        state.done(Op("F", number))
    state.arrive("I")
    assert chooser.choose(state) == Op("I", 0), "nothing that exists is left to wait for"
    state.add([5])
    state.close()
    assert chooser.choose(state) == Op("F", 2), "now the quota is within reach"
    state.done(Op("F", 2))
    assert chooser.choose(state) == Op("I", 0)


def test_a_stage_does_not_wait_for_more_than_fits_below_the_caps_before_it() -> None:
    chooser = ReadyFirst(1, quotas=[4, 4], caps=[10, None])
    state = StageState(1, 3)
    state.add([5, 5, 5, 5])
    for number in range(2):
        state.arrive("F")
        state.done(Op("F", number))
    state.arrive("I")
    assert chooser.choose(state) == Op("I", 0)


def test_a_fixed_order_waits_for_its_next_op_alone() -> None:
    chooser = FixedOrder([Op("F", 0), Op("F", 1), Op("I", 0)])
    state = StageState(1, 3)
    state.add([1, 1])
    assert chooser.choose(state) is None
    state.arrive("F")
    assert chooser.choose(state) == Op("F", 0)
    state.done(Op("F", 0))
    state.arrive("I")
    assert chooser.choose(state) is None, "I 0 is ready, but F 1 comes first"
    state.arrive("F")
    assert chooser.choose(state) == Op("F", 1)
    state.done(Op("F", 1))
    state.done(Op("I", 0))
    assert chooser.choose(state) is None, "the order is over"
    chooser.extend([Op("W", 0)])
    assert chooser.choose(state) == Op("W", 0)


def test_a_cap_below_a_micro_batch_is_refused() -> None:
    check_caps([10, None], [10, 3])
    with pytest.raises(ValueError, match=r"cap of 9 live tokens on stage 1 .* of 10"):
        check_caps([None, 9], [10, 3])
    with pytest.raises(ValueError, match="cap of 0 live tokens"):
        plan_adapted(even_work(2, 2), [Link()], caps=[0, None])


def test_choosers_that_wait_for_each_other_are_named() -> None:
    work = even_work(1, 2)
    with pytest.raises(ValueError, match=r"for ever: stage 0 \(of 1 micro-batches: 0 F.*stage 1"):
        replay([[], []], work, constant([Link()]))


def test_1f1b_keeps_as_many_micro_batches_as_stages_follow_and_one_more() -> None:
    work = even_work(6, 3)
    timeline = replay(plan_1f1b(3, 6), work, constant([Link(), Link()]))
    assert timeline.peak_live_tokens == (3, 2, 1)
    # The known makespan of equal stages, where a gradient goes up before W: an F and an I for each
    # stage but one, and all three for each micro-batch.
    assert timeline.makespan_s == pytest.approx(2 * 20 + 6 * 30)
    assert timeline.bubble_share == pytest.approx(40 / 220)


def test_quotas_yield_to_a_cap_of_one_micro_batch() -> None:
    work = even_work(4, 3)
    timeline = run(
        ready_choosers(3, quotas=[5, 3, 1], caps=[1, 1, 1]), work, constant([Link()] * 2)
    )
    assert timeline.peak_live_tokens == (1, 1, 1)


def test_plans_are_near_the_proven_optimum() -> None:
    kept = kept_optima()
    gaps = sorted(planned_ms(case) / least - 1 for case, least in kept)
    assert len(gaps) == 200
    assert gaps[0] >= -1e-9, "nothing beats an optimum"
    assert sum(gaps) / len(gaps) <= 0.015
    assert gaps[189] <= 0.05
