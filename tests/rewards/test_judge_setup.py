"""The judge around its scoring: what is told before the run, outages, an engine of its own."""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollpacker.imports import MissingPackageError
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.judge.endpoint import EndpointCompleter
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError
from tests.rewards.judge_attacks import RIGHT
from tests.rewards.judge_run import FakeShared, judge, sample, scored
from tests.rewards.judge_stub import Answer, Asked, gullible_judge, serve

# -- before the run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"url": None}, "either url"),
        ({"model_path": "x"}, "either url"),
        ({"model": None}, "url needs model"),
        ({"url": "localhost:8000"}, "no address"),
        ({"url": "http://user:pw@host/v1"}, "password"),
        ({"url": "http://host/v1/chat/completions"}, "before /chat/completions"),
        ({"scale": (5, 5)}, "scale is"),
        ({"scale": "yes"}, "scale is"),
        ({"scale": 10}, "scale is"),
        ({"rubric": " "}, "rubric is empty"),
        ({"canary_rate": 2}, "canary_rate"),
        ({"max_answer_chars": 3}, "max_answer_chars"),
        ({"votes": 0}, "votes"),
        ({"outage_s": 0}, "outage_s"),
        ({"request": {"model": "x"}}, "request must not set model"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(RewardError, match=told):
        judge(**{"url": "http://localhost/v1"} | arguments)


def test_rows_without_the_reference() -> None:
    part = judge("http://localhost:1/v1", probe=False)
    part.check([{"answer": "4"}])
    with pytest.raises(RewardError, match=r"row 1 has no answer.*Did you mean \"anwser\""):
        part.check([{"answer": "4"}, {"anwser": "4"}])
    with pytest.raises(RewardError, match="reference_column"):
        part.check([{"answer": None}])
    judge("http://localhost:1/v1", probe=False, reference_column=None).check([{}])


def test_a_url_without_httpx2_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up here: transformers' hub client of today needs httpx2 too, so no run lacks it."""
    find = importlib.util.find_spec
    lacks = {"httpx2": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: lacks.get(name, find(name)))
    part = judge("http://localhost:1/v1", probe=False)
    with pytest.raises(
        MissingPackageError, match=r"the reward judge with a url needs httpx2.*judge"
    ):
        part.check([{"answer": "4"}])


def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(RewardError, match="JUDGE_KEY"):
        judge("http://localhost:1/v1", token_env="JUDGE_KEY").check([])


def probed(respond: Callable[[Asked], Answer | str]) -> None:
    async def run() -> None:
        async with serve(respond) as stub:
            part = judge(stub.url)
            await asyncio.to_thread(part.check, [{"answer": "4"}])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "told"),
    [(401, "token_env"), (403, "token_env"), (404, "Correct model or url"), (400, "refuses")],
)
def test_a_wrong_set_up_is_told_before_the_run(status: int, told: str) -> None:
    with pytest.raises(RewardError, match=told):
        probed(lambda asked: Answer("no such thing", status=status))


def test_a_judge_that_is_down_at_the_start() -> None:
    with pytest.raises(RewardError, match=r"503.*set probe to false"):
        probed(lambda asked: Answer("", status=503))
    with pytest.raises(RewardError, match=r"Connect.*set probe to false"):
        judge("http://127.0.0.1:9/v1").check([{"answer": "4"}])


def test_a_judge_that_is_odd_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    probed(lambda asked: asked.verdict(10))
    assert not caplog.records
    probed(lambda asked: "Hello!")
    assert "could not be read" in caplog.text


# -- outages ---------------------------------------------------------------------------------------


def test_half_an_hour_of_outage_scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 s of errors stand for the half hour: no sample lost, none defaulted, no pile-up."""
    quick = partial(EndpointCompleter, probe_every_s=0.05, first_backoff_s=0.01)
    monkeypatch.setattr("rollpacker.rewards.judge.judge_reward.EndpointCompleter", quick)
    trouble = (
        Answer("busy", status=429, headers={"Retry-After": "0.1"}),
        Answer("down", status=503),
        Answer("hangs", delay_s=30),
    )
    began: list[float] = []

    def respond(asked: Asked) -> Answer:
        began.append(time.monotonic())
        if began[-1] < began[0] + 1.5 or asked.number < len(trouble):
            return trouble[asked.number % len(trouble)]
        return Answer(asked.verdict(7))

    samples = [sample(f"{number} legs") for number in range(100)]
    verdicts, stub, part = scored(respond, *samples, timeout_s=0.3)
    assert [verdict.value for verdict in verdicts] == [0.7] * 100
    assert stub.max_open <= 16
    assert part.metrics()["retries"] > 0
    assert part.metrics()["waited_s"] > 1.0


def test_an_outage_is_named_and_ends_without_a_verdict() -> None:
    async def run() -> tuple[str | None, list[Any]]:
        async with serve(lambda asked: Answer("overloaded", status=503)) as stub:
            part = judge(stub.url, outage_s=1.0, max_retries=0)
            scoring = asyncio.create_task(part.score([sample()] * 8))
            while part.outage() is None:
                await asyncio.sleep(0.01)
            told, verdicts = part.outage(), await scoring
            await part.close()
            assert part.outage() is None
            return told, verdicts

    told, verdicts = asyncio.run(run())
    assert told is not None
    assert "the judge at http://127.0.0.1" in told
    assert "overloaded" in told
    assert {verdict.cause for verdict in verdicts} == {Cause.INFRASTRUCTURE}


def test_as_a_built_in_of_a_run() -> None:
    async def run() -> list[Any]:
        async with serve(lambda asked: gullible_judge(asked, {})) as stub:
            arguments = {"url": stub.url, "model": "stub", "canary_rate": 0.0}
            reward = build_reward([RewardConfig(function="judge", weight=2.0, arguments=arguments)])
            await asyncio.to_thread(reward.check, [(None, {"answer": RIGHT})])
            try:
                return await reward.score([sample("24 legs"), sample("8"), sample(":")])
            finally:
                await reward.close()

    verdicts = asyncio.run(run())
    assert [verdict.value for verdict in verdicts] == [2.0, 0.0, 0.0]
    assert [verdict.parts["judge"] for verdict in verdicts] == [1.0, 0.0, 0.0]
    with pytest.raises(RewardError, match=r"rubrik.*Did you mean \"rubric\""):
        build_reward([RewardConfig(function="judge", arguments={"rubrik": "x"})])


# -- the own engine --------------------------------------------------------------------------------


class FakeEngine:
    """A completer that is no endpoint."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply
        self.closed = False

    async def complete(self, messages: Any, *, timeout_s: float) -> str:
        return self.reply(messages[-1]["content"])

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("too long"), Cause.SAMPLE),
        (TimeoutError(), Cause.DEADLINE),
        (RuntimeError("the engine died"), Cause.INFRASTRUCTURE),
    ],
)
def test_what_an_engine_raises(
    error: Exception, cause: Cause, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(user: str) -> str:
        raise error

    engine = FakeEngine(fails)

    async def run() -> Any:
        part = judge(None, FakeShared(lambda path, **_: engine), model_path="m", model=None)
        try:
            return await part.score([sample()])
        finally:
            await part.close()

    (verdict,) = asyncio.run(run())
    assert isinstance(verdict, Failed)
    assert verdict.cause is cause
    assert engine.closed


def test_a_model_folder_is_checked(tmp_path: Any) -> None:
    part = judge(None, model_path=str(tmp_path), model=None)
    with pytest.raises(RewardError, match=r"no config\.json"):
        part.check([])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardError, match="no engine"):
        part.check([])
