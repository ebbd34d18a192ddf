"""Checks, kind by kind, from records whose numbers are known."""

from __future__ import annotations

from rollpacker.core.commands import Command, Score
from rollpacker.core.events import Committed, Event, SampleGenerated, SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record
from rollpacker.report.checks import KindChecks, add_up, check_metrics, step_checks
from rollpacker.report.history import History


def sample(row: int, kind: str = "code") -> SampleId:
    return SampleId(PromptId(kind, 0, row), 0, 0)


def record(time_s: float, event: Event, *commands: Command) -> Record:
    return Record(time_s=time_s, event=event, commands=commands, cost_s=0.0)


def generated(time_s: float, which: SampleId, *commands: Command) -> Record:
    event = SampleGenerated(
        time_s=time_s, sample=which, num_tokens=5, finish_reason="stop", version=0
    )
    return record(time_s, event, *commands)


def scored(time_s: float, which: SampleId, *commands: Command, **values: object) -> Record:
    event = SampleScored(time_s=time_s, sample=which, **{"value": 1.0, **values})  # type: ignore[arg-type]
    return record(time_s, event, *commands)


def fold() -> History:
    one = History()
    a, b, c, d = (sample(row) for row in range(4))
    m = sample(9, "math")
    for entry in (
        generated(1.0, a, Score(sample=a, timeout_s=30.0)),
        generated(2.0, b),
        generated(2.0, m, Score(sample=m)),
        scored(4.0, a, Score(sample=b, timeout_s=6.0), seconds=2.5),
        scored(5.0, m, seconds=0.25),
        scored(10.0, b, seconds=6.0, value=0.0, timed_out=True),
        generated(11.0, c, Score(sample=c, timeout_s=6.0)),
        scored(
            12.0,
            c,
            Score(sample=c, timeout_s=6.0, retry=1),
            value=None,
            cause="infrastructure",
            seconds=1.0,
        ),
        scored(13.0, c, seconds=0.5),
        generated(14.0, d, Score(sample=d, timeout_s=6.0)),
        scored(14.5, d, value=None, cause="cancelled"),
    ):
        one.feed(entry)
    return one


def kinds_of(history: History) -> dict[str, KindChecks]:
    return step_checks(history.step.checks)


def test_every_number_of_a_kind() -> None:
    kinds = kinds_of(fold())
    assert list(kinds) == ["code", "math"]
    code = kinds["code"]
    assert (code.num_checks, code.num_cancelled, code.num_retries) == (4, 1, 1)
    assert (code.total_s, code.longest_s) == (10.0, 6.0)
    assert (code.queue_s, code.longest_queue_s) == (2.0, 2.0)  # b waited from 2 to 4
    assert (code.deadline_s, code.num_timed_out) == (6.0, 1)
    assert code.failed == {"infrastructure": 1}
    assert code.slowest[0] == (6.0, "code/0/1#0.0")
    assert kinds["math"].deadline_s is None and kinds["math"].mean_s == 0.25


def test_a_step_does_not_have_the_checks_of_the_one_before() -> None:
    one = fold()
    one.feed(record(20.0, Committed(time_s=20.0, step=1)))
    assert kinds_of(one) == {}


def test_metrics_name_the_slowest() -> None:
    metrics = check_metrics(kinds_of(fold()))
    assert metrics["perf/checks/code/time_s/mean"] == 2.5
    assert metrics["perf/checks/code/failed/infrastructure"] == 1
    assert str(metrics["perf/checks/slowest"]).startswith("code/0/1#0.0 6.000 s; code/0/0#0.0")


def test_steps_add_up() -> None:
    total = add_up([kinds_of(fold()), kinds_of(fold())])
    assert total["code"].num_checks == 8
    assert total["code"].mean_s == 2.5
    assert len(total["code"].slowest) == 8
    assert total["code"].plain()["failed"] == {"infrastructure": 2}
