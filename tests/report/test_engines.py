"""What a log tells of several engines: who worked, who idled, who was lost and for how long."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Launch,
    Move,
    Place,
    Release,
    Replace,
    Resize,
    RoundKind,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    EngineLost,
    EngineReady,
    Event,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleGenerated,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record, Session
from rollpacker.report.summary import summarize_entries
from rollpacker.report.summary_table import render

SAMPLES = tuple(SampleId(PromptId("train", 0, 0), n, 0) for n in range(4))


def launch(*engines: int) -> Launch:
    return Launch(round=1, kind=RoundKind.PLAIN, samples=SAMPLES, version=0, engines=engines)


def ended(time_s: float, number: int, engine: int, incarnation: int = 0) -> SampleGenerated:
    return SampleGenerated(
        time_s=time_s,
        sample=SAMPLES[number],
        num_tokens=10,
        finish_reason="stop",
        version=0,
        engine=engine,
        incarnation=incarnation,
    )


def summary(*records: tuple[Event, tuple[Any, ...]]) -> dict[str, Any]:
    """Of a step that fetches at second 0, has these events, and is committed at once."""
    job = {"fleet": {"num_engines": 2, "routing": "spread", "max_losses": 3, "moves": True}}
    end = records[-1][0].time_s
    groups = (SAMPLES,)
    all_records = [
        (RunStarted(time_s=0.0), ()),
        *records,
        (Trained(time_s=end, step=1, version=1), ()),
        (WeightsSynced(time_s=end, version=1), ()),
        (Committed(time_s=end, step=1), ()),
    ]
    all_records[-4] = (all_records[-4][0], (TrainOn(step=1, groups=groups),))
    entries = [
        Session(started_at="", time_s=0.0, step=0, job=job, slots=None),
        *(Record(time_s=e.time_s, event=e, commands=tuple(c), cost_s=0.0) for e, c in all_records),
    ]
    return summarize_entries(entries)


FETCHED = PromptsFetched(time_s=0.0, prompts=(SAMPLES[0].prompt,), epoch_ended=False)


def test_an_engine_that_has_nothing_while_the_other_works_is_imbalance() -> None:
    told = summary(
        (FETCHED, (launch(0, 0, 1, 1),)),
        (ended(1.0, 0, 0), ()),
        (ended(2.0, 1, 0), ()),
        (ended(4.0, 2, 1), ()),
        (ended(6.0, 3, 1), ()),
    )
    seconds = told["seconds"]
    # live: 4, 3, 2, 2, 1, 1 of 4; engine 0 idles for the last 4 seconds.
    assert seconds["decode"] == pytest.approx((4 + 3 + 2 + 2 + 1 + 1) / 4)
    assert seconds["imbalance"] == pytest.approx(4 / 2)
    assert seconds["tail_idle"] == pytest.approx(6 - 13 / 4 - 2)
    first, second = told["engines"]
    assert first["busy_share"] == pytest.approx(2 / 6) and second["busy_share"] == 1.0
    assert (first["samples"], first["tokens"], first["losses"]) == (2, 20, 0)
    assert first["mean_away_s"] is None


def test_a_lost_engine_is_counted_until_another_is_there() -> None:
    told = summary(
        (FETCHED, (launch(0, 0, 1, 1),)),
        (
            EngineLost(time_s=1.0, engine=1, incarnation=0, reason="gone"),
            (
                Replace(engine=1, incarnation=1, version=0),
                Place(samples=SAMPLES[2:], engines=(0, 0)),
            ),
        ),
        (ended(1.5, 2, 1), ()),  # of the lost one: nobody heeds it
        (ended(2.0, 0, 0), ()),
        (
            EngineReady(time_s=3.0, engine=1, incarnation=1, version=0),
            (Move(samples=SAMPLES[3:], engine=1),),
        ),
        (ended(4.0, 1, 0), ()),
        (ended(5.0, 2, 0), ()),
        (ended(6.0, 3, 1, incarnation=1), ()),
    )
    first, second = told["engines"]
    assert (first["samples"], second["samples"]) == (3, 1)
    assert (second["losses"], second["mean_away_s"]) == (1, 2.0)
    assert second["busy_share"] == pytest.approx((1 + 3) / 6)
    assert told["samples"]["trained"] == 4 and told["tokens"]["generated"] == 40
    assert render({"run": "x", **told}) is not None


def test_with_no_engine_left_nothing_is_generated_until_one_comes() -> None:
    told = summary(
        (FETCHED, (launch(0, 0, 0, NOWHERE),)),
        (
            EngineLost(time_s=1.0, engine=0, incarnation=0, reason="gone"),
            (Replace(engine=0, incarnation=1, version=0),),
        ),
        (
            EngineReady(time_s=3.0, engine=0, incarnation=1, version=0),
            (Place(samples=SAMPLES, engines=(0,) * 4),),
        ),
        *((ended(5.0, n, 0, incarnation=1), ()) for n in range(4)),
    )
    (first, second), seconds = told["engines"], told["seconds"]
    assert first["busy_share"] == pytest.approx(3 / 5) and second["busy_share"] == 0.0
    assert seconds["decode"] == pytest.approx((3 + 2 * 4) / 4)
    assert sum(seconds.values()) == pytest.approx(told["wall_s"])


def test_a_sample_that_was_aborted_where_an_engine_was_lost_is_over() -> None:
    told = summary(
        (FETCHED, (launch(0, 0, 1, 1),)),
        (ended(1.0, 0, 0), (Abort(samples=SAMPLES[2:]),)),
        (
            EngineLost(time_s=2.0, engine=1, incarnation=0, reason="gone"),
            (Replace(engine=1, incarnation=1, version=0),),
        ),
        (SampleAborted(time_s=2.5, sample=SAMPLES[2], num_tokens=3, engine=1), ()),
        (ended(4.0, 1, 0), ()),
    )
    first, second = told["engines"]
    assert (first["samples"], second["samples"]) == (2, 0)
    assert second["busy_share"] == pytest.approx(2 / 4)


def test_a_switch_lasts_until_the_last_of_the_new_engines_is_there() -> None:
    """Also if that is one that took the place of a lost one."""
    told = summary(
        (
            FETCHED,
            (
                Resize(tensor_parallel=2, incarnations=(1, 1), version=0),
                launch(NOWHERE, NOWHERE, NOWHERE, NOWHERE),
            ),
        ),
        (ended(0.5, 0, 0), ()),  # of an engine that is no more: nobody heeds it
        (EngineReady(time_s=2.0, engine=0, incarnation=1, version=0), ()),
        (
            EngineLost(time_s=3.0, engine=1, incarnation=1, reason="gone"),
            (
                Replace(engine=1, incarnation=2, version=0),
                Place(samples=SAMPLES, engines=(0, 0, 0, 0)),
            ),
        ),
        (EngineReady(time_s=7.5, engine=1, incarnation=2, version=0), ()),
        *((ended(8.0, n, 0, incarnation=1), ()) for n in range(4)),
    )
    assert told["switches"] == [{"before_step": 1, "tensor_parallel": 2, "seconds": 7.5}]
    first, second = told["engines"]
    assert (first["samples"], first["losses"]) == (4, 0)
    assert (second["losses"], second["mean_away_s"]) == (1, 4.5)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as shown:
        console.print(render({"run": "x", **told}))
    (row,) = (line.split() for line in shown.get().splitlines() if "2 each" in line)
    assert row == ["2", "each", "1", "7.5"]
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"])


def test_released_devices_are_not_idle() -> None:
    told = summary(
        (FETCHED, (launch(0, 0, 1, 1),)),
        (
            ended(1.0, 0, 0),
            (Release(devices=(1,)), Move(samples=SAMPLES[2:], engine=0)),
        ),
        (ended(3.0, 1, 0), ()),
        (ended(4.0, 2, 0), ()),
        (ended(6.0, 3, 0), ()),
    )
    seconds = told["seconds"]
    assert "imbalance" not in seconds
    assert seconds["decode"] == pytest.approx((4 + 2 * 3 + 2 + 2 * 1) / 4)


def test_one_engine_has_no_row() -> None:
    entries = [
        Session(started_at="", time_s=0.0, step=0, job={}, slots=None),
        Record(time_s=0.0, event=FETCHED, commands=(launch(),), cost_s=0.0),
        Record(time_s=1.0, event=ended(1.0, 0, 0), commands=(), cost_s=0.0),
    ]
    told = summarize_entries(entries)
    assert "engines" not in told and "imbalance" not in told["seconds"]
