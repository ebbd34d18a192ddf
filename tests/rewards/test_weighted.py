"""Several rewards: who judges which sample, what comes of their verdicts, what the core is told."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardError,
    RewardInput,
    Scored,
)
from rollpacker.rewards.shared import Shared
from rollpacker.rewards.weighted import Weighted, WeightedReward
from rollpacker.sandbox.sandbox import SandboxConfig
from tests.rewards.plain import sample

FAST = AdaptiveDeadlineConfig(min_s=1, max_s=10)
SLOW = AdaptiveDeadlineConfig(min_s=1, max_s=30)


class Part:
    """Says the same of every sample, and remembers what it was asked."""

    def __init__(
        self,
        name: str,
        says: Any = 1.0,
        *,
        workers: int | None = None,
        deadline: AdaptiveDeadlineConfig | None = None,
        outage: str | None = None,
    ) -> None:
        self.name = name
        self.says = Scored(value=says) if isinstance(says, float) else says
        self.WORKERS = workers
        self.DEADLINE = deadline
        self.is_down = outage
        self.asked: list[str] = []
        self.rows: list[Mapping[str, Any]] = []
        self.timeout_s: float | None = None
        self.num_open = 0

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += rows

    async def open(self) -> None:
        self.num_open += 1

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Any]:
        self.timeout_s = timeout_s
        self.asked += [one.completion for one in samples]
        await asyncio.sleep(0)
        if isinstance(self.says, Exception):
            raise self.says
        return [self.says] * len(samples)

    def outage(self) -> str | None:
        return self.is_down

    async def close(self) -> None:
        self.num_open -= 1


def weighted(*parts: Part, **settings: dict[str, Any]) -> WeightedReward:
    """`settings`: of the config, by part."""
    configs = [RewardConfig(function="m:f", **settings.get(part.name, {})) for part in parts]
    both = [Weighted(part, config) for part, config in zip(parts, configs, strict=True)]
    return WeightedReward(both, Shared(SandboxConfig()))


def judged(one: WeightedReward, *samples: RewardInput) -> list[Scored | Failed]:
    return asyncio.run(one.score(samples))


def test_tasks_choose_their_rewards() -> None:
    code, math, form = Part("code", 1.0), Part("math", 2.0), Part("form", 0.5)
    one = weighted(code, math, form, code={"tasks": ("code",)}, math={"tasks": ("math", "logic")})
    verdicts = judged(one, *(sample(task or "-", task=task) for task in ("code", "math", None)))
    assert [verdict.parts for verdict in verdicts] == [
        {"code": 1.0, "math": None, "form": 0.5},
        {"code": None, "math": 2.0, "form": 0.5},
        {"code": None, "math": None, "form": 0.5},
    ]
    assert [getattr(verdict, "value", None) for verdict in verdicts] == [1.5, 2.5, 0.5]
    assert (code.asked, math.asked, form.asked) == (["code"], ["math"], ["code", "math", "-"])


def test_a_task_that_no_reward_names() -> None:
    code = Part("code")
    one = weighted(code, code={"tasks": ("code", "math")})
    rows = [("code", {}), ("cod", {"x": 1})]
    with pytest.raises(RewardError, match=r"^row 1: task 'cod' is named by no reward; did you"):
        one.check(rows)
    with pytest.raises(RewardError, match="row 0: task 'poem' is named by no reward; they name"):
        one.check([("poem", {})])
    with pytest.raises(RewardError, match=r"row 0: there is no task, .* \(code, math\); set"):
        one.check([(None, {})])
    good, bad = judged(one, sample("a", task="code"), sample("b", task="cod"))
    assert isinstance(good, Scored)
    assert isinstance(bad, Failed) and "task 'cod' is named by no reward" in bad.reason
    assert bad.parts == {"code": None} and code.asked == ["a"]


def test_rows_reach_the_rewards_that_apply(caplog: pytest.LogCaptureFixture) -> None:
    code, form = Part("code"), Part("form")
    one = weighted(code, form, code={"tasks": ("coding",)})
    with caplog.at_level(logging.WARNING):
        one.check([("codings", {"n": 1}), (None, {"n": 2})])
    assert "reward code names the task coding, which no row has; did you mean codings?" in (
        caplog.text
    )
    assert (code.rows, form.rows) == ([], [{"n": 1}, {"n": 2}])
    caplog.clear()
    one.check([("coding", {"n": 3}), ("prose", {"n": 4})])
    assert code.rows == [{"n": 3}] and not caplog.records


def test_sums() -> None:
    a, b, none = Part("a", 1.0), Part("b", 3.0), Part("none", None)
    one = weighted(a, b, none, a={"weight": 2.0}, b={"weight": -0.5}, none={"weight": 9.0})
    assert judged(one, sample()) == [Scored(value=0.5, parts={"a": 1.0, "b": 3.0, "none": None})]
    assert judged(weighted(none), sample()) == [
        Failed(reason="no verdict: none returned None", parts={"none": None})
    ]
    huge = weighted(Part("huge", 1e30), huge={"weight": 10.0})
    (verdict,) = judged(huge, sample())
    assert isinstance(verdict, Failed) and "weighted sum is larger than 1e+30" in verdict.reason


def test_failures_keep_the_others_values_and_the_gravest_cause() -> None:
    def failing(name: str, cause: Cause) -> Part:
        return Part(name, Failed(reason=f"{name} broke", cause=cause))

    fine = Part("fine", 1.0)
    own, late, infra = (failing(str(cause), cause) for cause in Cause)
    for parts, cause in [
        ((own, fine), Cause.SAMPLE),
        ((own, late), Cause.DEADLINE),
        ((late, infra, own), Cause.INFRASTRUCTURE),
    ]:
        (verdict,) = judged(weighted(fine, *(p for p in parts if p is not fine)), sample())
        assert isinstance(verdict, Failed)
        assert verdict.cause is cause
        assert verdict.parts["fine"] == 1.0
        assert all(part.name in verdict.reason for part in parts if part is not fine)


@pytest.mark.parametrize(
    ("says", "seconds", "correct"),
    [
        ([Scored(value=1.0)], None, None),
        ([Scored(value=1.0, seconds=2.0)], 2.0, True),
        ([Scored(value=0.0, seconds=2.0)], 2.0, False),
        ([Scored(value=0.0, seconds=2.0, correct=True)], 2.0, True),
        ([Scored(value=1.0, seconds=2.0, correct=False)], 2.0, False),
        ([Scored(value=1.0, seconds=2.0), Scored(value=1.0, seconds=3.0)], 3.0, True),
        ([Scored(value=0.0, seconds=2.0), Scored(value=1.0, seconds=3.0)], 3.0, False),
        ([Scored(value=1.0, seconds=2.0), Scored(value=-1.0)], 2.0, True),
    ],
)
def test_seconds_and_correct(says: list[Scored], seconds: float | None, correct: Any) -> None:
    parts = [Part(f"p{number}", one) for number, one in enumerate(says)]
    (verdict,) = judged(weighted(*parts), sample())
    assert isinstance(verdict, Scored)
    assert (verdict.seconds, verdict.correct, verdict.timed_out) == (seconds, correct, False)


def test_timed_out_and_seconds_of_failures() -> None:
    slow = Part("slow", Scored(value=0.0, seconds=9.0, timed_out=True))
    fine = Part("fine", 1.0)
    (verdict,) = judged(weighted(slow, fine), sample())
    assert verdict == Scored(
        value=1.0,
        parts={"slow": 0.0, "fine": 1.0},
        seconds=9.0,
        correct=False,
        timed_out=True,
    )
    (verdict,) = judged(weighted(slow, Part("bad", Failed(reason="bad"))), sample())
    assert verdict.seconds == 9.0 and isinstance(verdict, Failed)


def test_a_part_that_raises_is_no_verdict(caplog: pytest.LogCaptureFixture) -> None:
    broken = Part("broken", ValueError("a bug"))
    (verdict,) = judged(weighted(broken, Part("fine")), sample())
    assert verdict == Failed(
        reason="broken failed: ValueError: a bug", parts={"broken": None, "fine": 1.0}
    )
    assert "Traceback" in caplog.text


def test_kinds() -> None:
    code, judge, form = Part("code", workers=8, deadline=FAST), Part("judge", workers=16), Part("f")
    one = weighted(code, judge, form, code={"tasks": ("code",)}, judge={"tasks": ("code", "essay")})
    assert one.kinds() == {"code": (8, FAST), "essay": (16, None), None: (None, None)}
    own = {"deadline": SLOW, "workers": 2, "tasks": ("code",)}
    one = weighted(code, judge, code={"tasks": ("code",)}, judge=own)
    assert one.kinds() == {"code": (2, SLOW)}
    one = weighted(code, code={"deadline": SLOW})
    assert one.kinds() == {None: (8, SLOW)}, "the config's own deadline goes before the class's"


def test_open_close_outage_and_limits() -> None:
    a = Part("a", outage="the judge is down", deadline=AdaptiveDeadlineConfig(max_s=3.0))
    b = Part("b", outage="so is the sandbox")
    one = weighted(a, b)

    async def run() -> None:
        await one.open()
        assert (a.num_open, b.num_open) == (1, 1)
        await one.score([sample()], timeout_s=3.5)
        await one.close()

    asyncio.run(run())
    assert (a.num_open, b.num_open) == (0, 0)
    # Never longer than its own longest, and nothing for one that has no deadline of its own.
    assert (a.timeout_s, b.timeout_s) == (3.0, None)
    assert one.outage() == "the judge is down; so is the sandbox"
    assert weighted(Part("c")).outage() is None


def test_a_bonus_does_not_make_an_answer_that_was_wrong_without_a_check_right() -> None:
    """A math answer without a box is worth 0 without a check; its time says nothing."""
    code = Part("code", Scored(value=0.0), deadline=AdaptiveDeadlineConfig())
    style = Part("style", 0.1)
    (verdict,) = asyncio.run(weighted(code, style).score([sample()]))
    assert isinstance(verdict, Scored)
    assert (verdict.value, verdict.correct) == (0.1, False)


def test_the_largest_value_that_a_sample_can_get() -> None:
    def largest(*entries: dict[str, Any]) -> float | None:
        configs = [RewardConfig(**{"function": "math", **entry}) for entry in entries]
        parts = [Weighted(Part(name=str(n)), config) for n, config in enumerate(configs)]
        return WeightedReward(parts, Shared(SandboxConfig())).largest()

    assert largest({"weight": 0.5}) == 0.5
    assert largest({"tasks": ("a",), "weight": 0.5}, {"tasks": ("b",)}, {"weight": 0.25}) == 1.25
    assert largest({"weight": 1.0}, {"weight": -1.0}) == 1.0
    assert largest({}, {"function": "mine.py:f", "weight": 0.1}) is None
