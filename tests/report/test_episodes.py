"""What a log tells of episodes: seconds of both sides, ends, slowest answers, what was lost."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import pytest
from rich.console import Console

from rollpacker.core.commands import (
    Act,
    CancelAct,
    Command,
    Conclude,
    Continue,
    Drop,
    Enter,
    Launch,
    Leave,
    RoundKind,
    Score,
)
from rollpacker.core.events import (
    Acted,
    Entered,
    Event,
    RunStarted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    ToolCall,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record, decode, encode
from rollpacker.core.rounds.dynamic_sampling import NO_SIGNAL
from rollpacker.core.rounds.round import TOO_FEW_RESPONSES
from rollpacker.report.accounting import Accounting
from rollpacker.report.episodes import MAX_REASON, StepEpisodes, add_up
from rollpacker.report.history import History
from rollpacker.report.summary import summarize_entries
from rollpacker.report.summary_table import render
from rollpacker.report.tool_seconds import ToolSeconds

ONE, TWO, THREE, FOUR = (SampleId(PromptId("train", 0, row), 0, 0) for row in range(4))


def drawn(sample: SampleId, reason: str = "stop") -> SampleGenerated:
    return SampleGenerated(time_s=0.0, sample=sample, num_tokens=5, finish_reason=reason, version=0)


def act(sample: SampleId, turn: int, retry: int = 0) -> Act:
    return Act(sample=sample, turn=turn, timeout_s=None, retry=retry)


def acted(sample: SampleId, turn: int, seconds: float = 0.0, **more: Any) -> Acted:
    return Acted(time_s=0.0, sample=sample, turn=turn, seconds=seconds, **more)


def fold(*entries: tuple[float, Event, tuple[Command, ...]]) -> StepEpisodes:
    history = History()
    for now, event, commands in entries:
        history.take(now, event, commands)
    return history.step.episodes


def launch(*samples: SampleId) -> Launch:
    return Launch(round=1, kind=RoundKind.PLAIN, samples=samples, version=0, tensor_parallel=1)


def test_seconds_of_policy_and_environment_are_told_apart() -> None:
    found = fold(
        (0.0, RunStarted(time_s=0.0), (launch(ONE),)),
        (2.0, drawn(ONE), (act(ONE, 1),)),
        (5.0, acted(ONE, 1, 1.0), (Continue(samples=(ONE,), engines=()),)),
        (9.0, drawn(ONE), (act(ONE, 2),)),
        (10.0, acted(ONE, 2, 0.5), (Conclude(sample=ONE, reason="turns"), Score(sample=ONE))),
    )
    assert found.plain() == {
        "trajectories": 1,
        "ended": {"turns": 1},
        "mean_turns": 2.0,
        "most_turns": 2,
        "mean_policy_s": 6.0,
        "mean_environment_s": 1.5,
        "sources": {
            "train": {
                "answers": 2,
                "mean_s": 0.75,
                "longest_s": 1.0,
                "mean_waited_s": 1.25,
                "lost": {},
            }
        },
        "lost": [],
        "slowest": [
            {"sample": str(ONE), "turn": 1, "seconds": 1.0, "tool": "", "came": True},
            {"sample": str(ONE), "turn": 2, "seconds": 0.5, "tool": "", "came": True},
        ],
        "tools": {},
    }


@pytest.mark.parametrize("reason", ["length", "tokens"])
def test_a_message_that_was_cut_off_is_the_policys_and_was_given_to_nobody(reason: str) -> None:
    """Whether by the limit of a message or by what was left of the trajectory's."""
    found = fold(
        (0.0, RunStarted(time_s=0.0), (launch(ONE, TWO),)),
        (1.0, drawn(TWO), (act(TWO, 1),)),
        (3.0, drawn(ONE, "length"), (Conclude(sample=ONE, reason=reason),)),
        (4.0, acted(TWO, 1, 1.0), (Continue(samples=(TWO,), engines=()),)),
        (6.0, drawn(TWO, "length"), (Conclude(sample=TWO, reason=reason),)),
    )
    assert (found.num_turns, found.policy_s, found.environment_s) == (1 + 2, 3.0 + 1.0 + 2.0, 1.0)
    assert found.ended == {reason: 2} and found.answers["train"].num == 1


def test_a_limit_that_was_reached_with_the_answer_cuts_no_message_off() -> None:
    found = fold(
        (0.0, RunStarted(time_s=0.0), (launch(ONE),)),
        (2.0, drawn(ONE), (act(ONE, 1),)),
        (3.0, acted(ONE, 1, 1.0), (Conclude(sample=ONE, reason="tokens"),)),
    )
    assert (found.num_turns, found.policy_s) == (1, 2.0)


def test_what_is_lost_is_counted_by_its_cause_with_the_first_message() -> None:
    found = fold(
        (0.0, RunStarted(time_s=0.0), (launch(ONE, TWO, THREE, FOUR),)),
        (1.0, drawn(ONE), (act(ONE, 1),)),
        (1.0, drawn(TWO), (act(TWO, 1),)),
        (1.0, drawn(THREE), (act(THREE, 1),)),
        (1.0, drawn(FOUR), (act(FOUR, 1),)),
        (2.0, acted(ONE, 1, cause="environment", reason="first " + "x" * 9999), ()),
        (3.0, acted(TWO, 1, cause="environment", reason="second"), ()),
        (4.0, acted(THREE, 1, cause="infrastructure", reason="died"), (act(THREE, 1, retry=1),)),
        (5.0, acted(THREE, 1, 1.0), (Conclude(sample=THREE, reason="done"),)),
        (5.0, drawn(ONE), (CancelAct(samples=(FOUR,)),)),
        (5.0, acted(FOUR, 1, cause="cancelled", reason="nobody needs it"), ()),
    )
    told = found.plain()
    (first, second) = told["lost"]
    assert (first["cause"], first["count"]) == ("environment", 2)
    assert first["first"].startswith("first ") and len(first["first"]) == MAX_REASON
    assert second == {"cause": "infrastructure", "count": 1, "first": "died"}
    assert told["sources"]["train"]["answers"] == 1
    assert (told["trajectories"], told["mean_turns"]) == (1, 1.0)


def test_seconds_are_told_by_tool_and_the_slowest_answers_name_theirs() -> None:
    calls = (
        ToolCall("search", 0.5, is_well=True),
        ToolCall("look_up", 2.0, is_well=False),
        ToolCall("look_up", None, is_well=False),
        ToolCall("", None, is_well=False),
    )
    found = fold(
        (0.0, RunStarted(time_s=0.0), (launch(ONE),)),
        (1.0, drawn(ONE), (act(ONE, 1),)),
        (4.0, acted(ONE, 1, 2.5, calls=calls), (Continue(samples=(ONE,), engines=()),)),
        (5.0, drawn(ONE), (act(ONE, 2),)),
        (6.0, acted(ONE, 2, 1.0, calls=calls[:1]), (Conclude(sample=ONE, reason="turns"),)),
    )
    told = add_up([found, found]).plain()
    assert [(one["turn"], one["tool"]) for one in told["slowest"]] == [
        *((1, "look_up"),) * 2,
        *((2, "search"),) * 2,
    ]
    none, two, half = (
        {"hung": 0, "mean_s": seconds, "p99_s": seconds, "longest_s": seconds}
        for seconds in (None, 2.0, 0.5)
    )
    assert told["tools"] == {
        "": {"calls": 2, "failed": 2, **none},
        "look_up": {"calls": 4, "failed": 4, **two},
        "search": {"calls": 4, "failed": 0, **half},
    }


def test_a_call_that_hangs_stands_with_its_tool_among_the_slowest() -> None:
    """Those before it in the same message ended; of a loss of another cause none is told."""
    calls = (ToolCall("search", 0.5, is_well=True), ToolCall("look_up", 59.0, is_well=False))
    found = fold(
        (0.0, RunStarted(time_s=0.0), (launch(ONE, TWO),)),
        (1.0, drawn(ONE), (act(ONE, 1),)),
        (1.0, drawn(TWO), (act(TWO, 1),)),
        (61.0, acted(ONE, 1, 60.0, cause="deadline", reason="slow", calls=calls), ()),
        (62.0, acted(TWO, 1, 61.0, cause="infrastructure", reason="died"), ()),
    )
    told = found.plain()
    (slow,) = told["slowest"]
    assert (slow["sample"], slow["seconds"], slow["tool"]) == (str(ONE), 60.0, "look_up")
    assert (slow["turn"], slow["came"]) == (1, False)
    counted = {name: (one["calls"], one["hung"]) for name, one in told["tools"].items()}
    assert counted == {"search": (1, 0), "look_up": (1, 1)}
    assert told["tools"]["look_up"]["longest_s"] == 59.0
    assert add_up([found, found]).plain()["tools"]["look_up"]["hung"] == 2


def test_a_quantile_of_a_tools_seconds_is_right_to_its_class() -> None:
    """Zeros too, and whatever steps they came in."""
    rng = random.Random(0)
    values = [0.0, *(rng.lognormvariate(-3, 2) for _ in range(4999))]
    total = ToolSeconds()
    for start in range(0, len(values), 1000):
        step = ToolSeconds()
        for value in values[start : start + 1000]:
            step.take(ToolCall("any", value, is_well=True))
        total.add(step)
    values.sort()
    for share in (0.0002, 0.5, 0.99, 1.0):
        exact, told = max(values[math.ceil(share * len(values)) - 1], 1e-6), total.quantile(share)
        assert told is not None and exact <= told <= 1.0233 * exact
    assert total.quantile(1.0) == max(values)


def test_calls_stand_in_the_log_and_logs_without_them_are_read() -> None:
    event = acted(ONE, 1, 2.0, calls=(ToolCall("a", 0.25, True), ToolCall("", None, False)))
    record = Record(time_s=0.0, event=event, commands=(), cost_s=0.0)
    assert decode(encode(record)).event == event  # type: ignore[union-attr]
    without = encode(Record(time_s=0.0, event=acted(ONE, 1), commands=(), cost_s=0.0))
    assert "calls" not in without
    assert decode(without).event == acted(ONE, 1)  # type: ignore[union-attr]


def test_a_dropped_prompt_tells_what_its_last_loss_was() -> None:
    """The first such prompt of the run; one that is dropped for something else tells of none."""
    few, no_signal = TOO_FEW_RESPONSES[2], NO_SIGNAL
    other = SampleId(ONE.prompt, 1, 0)
    lost = acted(ONE, 1, cause="environment", reason="first")
    failed = SampleFailed(time_s=0.0, sample=TWO, reason="elsewhere")
    last = acted(other, 1, cause="deadline", reason="[bold]last\x1b[31m")
    without = SampleScored(time_s=0.0, sample=THREE, value=None, reason="no", cause="sample")
    entries: list[tuple[float, Event, tuple[Command, ...]]] = [
        (0.0, RunStarted(time_s=0.0), (launch(ONE, other, TWO, THREE),)),
        (1.0, drawn(ONE), (act(ONE, 1),)),
        (1.0, drawn(other), (act(other, 1),)),
        (1.0, lost, ()),
        (2.0, last, (Drop(prompt=ONE.prompt, reason=few),)),
        (3.0, failed, (Drop(prompt=TWO.prompt, reason=few),)),
        (4.0, without, (Drop(prompt=THREE.prompt, reason=no_signal),)),
    ]
    summary = summarize_entries(
        Record(time_s=now, event=event, commands=commands, cost_s=0.0)
        for now, event, commands in entries
    )
    assert summary["prompts"]["dropped"] == {few: 2, no_signal: 1}
    assert summary["prompts"]["dropped_after"] == {few: last.reason}
    file = io.StringIO()
    Console(file=file, width=80).print(render(summary))
    assert "the first of them after" in file.getvalue() and "[bold]last" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_steps_add_up_and_the_first_message_stays_the_first() -> None:
    one, two = StepEpisodes(), StepEpisodes()
    one.lose(acted(ONE, 1, cause="infrastructure", reason="of one"))
    two.lose(acted(ONE, 1, cause="infrastructure", reason="of two"))
    for number in range(30):
        two.answered(TWO, number, float(number), 0.0)
    two.conclude("done", 3, 1.0, 2.0)
    total = add_up([one, two])
    assert total.plain()["lost"] == [{"cause": "infrastructure", "count": 2, "first": "of one"}]
    assert [seconds for seconds, *_ in total.slowest] == [29.0 - n for n in range(10)]
    assert total.most_turns == 3 and not one.ended


def test_the_table_tells_it_as_text() -> None:
    summary = summarize_entries([])
    assert "episodes" not in summary
    one = StepEpisodes()
    one.lose(acted(ONE, 1, cause="environment", reason="\x1b[31m[bold]no"))
    hung = (ToolCall("look_up", 3.0, False),)
    one.lose(acted(ONE, 2, 3.5, cause="deadline", calls=hung))
    one.answered(ONE, 1, 2.0, 0.0, [ToolCall("search", 1.5, True), ToolCall("", None, False)])
    one.conclude("\x1b[2Jdone", 2, 1.0, 2.0)
    file = io.StringIO()
    Console(file=file, width=80).print(render({**summary, "episodes": one.plain()}))
    text = file.getvalue()
    assert "\x1b" not in text and "[bold]no" in text
    assert "lost answers, raised" in text and "turn 1, search" in text
    assert "there is no such tool" in text
    assert "3.500 s  " + f"{ONE}, turn 2, look_up (did not come)" in text


def test_on_shared_pools_the_seconds_add_up_to_the_wall_time() -> None:
    """An environment that begins while the pool is waited for takes no time of its own."""
    concluded = (Conclude(sample=ONE, reason="done"), Leave(pool="rollout"), Score(sample=ONE))
    wait, train = Enter(pool="rollout", purpose="rollout"), Enter(pool="train", purpose="training")
    entries: list[tuple[float, Event, tuple[Command, ...]]] = [
        (0.0, RunStarted(time_s=0.0), (act(ONE, 0), wait)),
        (1.0, acted(ONE, 0, 1.0), ()),
        (3.0, Entered(time_s=0.0, pool="rollout", switch_s=0.5), (launch(ONE),)),
        (5.0, drawn(ONE), (act(ONE, 1),)),
        (8.0, acted(ONE, 1, 3.0), (Continue(samples=(ONE,), engines=()),)),
        (9.0, drawn(ONE), (act(ONE, 2),)),
        (11.0, acted(ONE, 2, 2.0), concluded),
        (12.0, SampleScored(time_s=0.0, sample=ONE, value=1.0), (train,)),
        (14.0, Entered(time_s=0.0, pool="train", switch_s=0.5), ()),
    ]
    accounting = Accounting(slots=8)
    for now, event, commands in entries:
        accounting.feed(Record(time_s=now, event=event, commands=commands, cost_s=0.0))
    seconds = {cause: of for cause, of in accounting.seconds().items() if of}
    assert seconds == {
        "decode": 3.0,
        "environment": 5.0,
        "reward_wait": 1.0,
        "pool_wait": 4.0,
        "switch": 1.0,
    }
    assert sum(seconds.values()) == accounting.time.wall_s == 14.0
