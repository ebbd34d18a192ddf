"""Rewards: what a function returns or does wrong reaches exactly the samples it concerns."""

import asyncio
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rewards import calls
from rollpacker.rewards.base import Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.rewards.functions import RewardFunction, WeightedReward, build_reward


def sample(completion: str = "ok", prompt: Any = "p", **columns: Any) -> RewardInput:
    return RewardInput(
        prompt=prompt,
        completion=completion,
        completion_tokens=(1, 2),
        finish_reason="stop",
        columns=columns,
    )


def reward(*functions: Callable[..., Any], **settings: Any) -> WeightedReward:
    settings = {"timeout_s": 5.0} | settings
    return WeightedReward(
        [RewardFunction(RewardConfig(function="m:f", **settings), f.__name__, f) for f in functions]
    )


def scored(one: WeightedReward, samples: Sequence[RewardInput]) -> list[Scored | Failed]:
    return asyncio.run(one.score(samples))


def values(one: WeightedReward, samples: Sequence[RewardInput]) -> list[float | str]:
    return [v.value if isinstance(v, Scored) else v.reason for v in scored(one, samples)]


def test_a_function_gets_what_its_signature_takes() -> None:
    seen: dict[str, Any] = {}

    def narrow(completions: list[str], answer: list[str]) -> list[float]:
        seen["narrow"] = (completions, answer)
        return [1.0] * len(completions)

    def wide(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen["wide"] = (prompts, completions, columns)
        return [1.0] * len(completions)

    samples = [sample("a", answer="x", level=1), sample("b", answer="y")]
    assert values(reward(narrow, wide), samples) == [2.0, 2.0]
    assert seen["narrow"] == (["a", "b"], ["x", "y"])
    prompts, completions, columns = seen["wide"]
    assert (prompts, completions) == (["p", "p"], ["a", "b"])
    assert columns == {
        "answer": ["x", "y"],
        "level": [1, None],
        "completion_ids": [[1, 2], [1, 2]],
        "finish_reasons": ["stop", "stop"],
    }


def test_chat_prompts_make_chat_completions() -> None:
    def check(completions: Any) -> list[float]:
        assert completions == [[{"role": "assistant", "content": "hello"}], "plain"]
        return [1.0, 2.0]

    chat = [{"role": "user", "content": "hi"}]
    assert values(reward(check), [sample("hello", prompt=chat), sample("plain")]) == [1.0, 2.0]


def test_configured_arguments_go_before_columns() -> None:
    def f(completions: list[str], level: Any, scale: float = 1.0) -> list[float]:
        return [level * scale] * len(completions)

    assert values(reward(f, arguments={"level": 3, "scale": 0.5}), [sample(level=7)]) == [1.5]


def test_weights_parts_and_not_applicable() -> None:
    def a(completions: list[str]) -> list[float | None]:
        return [1.0 if c != "none" else None for c in completions]

    def b(completions: list[str]) -> list[float | None]:
        return [None] * len(completions)

    def c(completions: list[str]) -> list[float]:
        return [float(len(x)) for x in completions]

    one = WeightedReward(
        [
            RewardFunction(RewardConfig(function="m:f", weight=w), f.__name__, f)
            for f, w in [(a, 2.0), (b, 5.0), (c, 0.5)]
        ]
    )
    assert one.names == ("a", "b", "c")
    assert scored(one, [sample("four"), sample("none")]) == [
        Scored(value=4.0, parts={"a": 1.0, "b": None, "c": 4.0}),
        Scored(value=2.0, parts={"a": None, "b": None, "c": 4.0}),
    ]
    only_b = reward(b)
    assert scored(only_b, [sample()]) == [
        Failed(reason="no verdict: b returned None", parts={"b": None})
    ]


def test_one_bad_sample_takes_no_other_down(caplog: pytest.LogCaptureFixture) -> None:
    def fragile(completions: list[str]) -> list[float]:
        return [1 / int(c) for c in completions]

    def solid(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    samples = [sample("1"), sample("0"), sample("2"), sample("x")]
    with caplog.at_level(logging.WARNING):
        verdicts = scored(reward(fragile, solid), samples)
    assert [v.value if isinstance(v, Scored) else None for v in verdicts] == [2.0, None, 1.5, None]
    assert verdicts[1] == Failed(
        reason="fragile raised ZeroDivisionError: division by zero",
        parts={"fragile": None, "solid": 1.0},
    )
    assert isinstance(verdicts[3], Failed)
    assert "fragile raised ValueError: invalid literal" in verdicts[3].reason
    again = len(caplog.records)
    assert again == 2, "each kind of error is logged once, with the user's own lines"
    assert all("in fragile" in record.getMessage() for record in caplog.records)
    assert not any("calls.py" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.0], "f returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "f returned 3 values for 2 completions"),
        (None, "f returned NoneType, not a list"),
        (1.0, "f returned float, not a list"),
        ("ab", "f returned str, not a list"),
        ({"a": 1, "b": 2}, "f returned dict, not a list"),
        ([math.nan, math.inf], "f returned nan, not a number"),
        (["1", "2"], "f returned '1', not a number"),
        ([[1], [2]], "f returned [1], not a number"),
        ([10**400, 1], "not a number"),
    ],
)
def test_what_is_no_list_of_numbers(returned: Any, expected: str) -> None:
    def f(completions: list[str]) -> Any:
        return returned

    assert expected in str(values(reward(f), [sample(), sample()])[0])


def test_numbers_of_all_kinds() -> None:
    import numpy as np

    for returned in ([True, 0], np.array([1.0, 0.0], dtype=np.float32), (1, False)):

        def f(completions: list[str], returned: Any = returned) -> Any:
            return returned

        assert values(reward(f), [sample(), sample()]) == [1.0, 0.0]


def test_async_functions_and_errors_in_them() -> None:
    async def f(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        if "bad" in completions:
            raise LookupError("no such thing")
        return [1.0] * len(completions)

    verdicts = values(reward(f), [sample(), sample("bad")])
    assert verdicts == [1.0, "f raised LookupError: no such thing"]


def test_a_sync_function_that_returns_an_awaitable() -> None:
    def f(completions: list[str]) -> Coroutine[Any, Any, list[float]]:
        async def later() -> list[float]:
            return [3.0] * len(completions)

        return later()

    assert values(reward(f), [sample()]) == [3.0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), EOFError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_nothing_that_a_function_raises_ends_the_run(error: BaseException, is_async: bool) -> None:
    def f(completions: list[str]) -> list[float]:
        raise error

    async def g(completions: list[str]) -> list[float]:
        raise error

    (verdict,) = values(reward(g if is_async else f), [sample()])
    assert type(error).__name__ in str(verdict)


def test_deadline_spares_the_samples_that_are_quick() -> None:
    stop = threading.Event()

    def f(completions: list[str]) -> list[float]:
        if "slow" in completions:
            stop.wait(20)
        return [1.0] * len(completions)

    started = time.monotonic()
    verdicts = values(reward(f, timeout_s=0.2), [sample(), sample("slow"), sample()])
    stop.set()
    assert verdicts == [1.0, "f took longer than timeout_s=0.2", 1.0]
    assert time.monotonic() - started < 5


def test_async_deadline_even_if_it_ignores_being_cancelled() -> None:
    async def f(completions: list[str]) -> list[float]:
        for _ in range(6):
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        return [1.0]

    assert values(reward(f, timeout_s=0.05), [sample()]) == ["f took longer than timeout_s=0.05"]


def test_the_loop_stays_free_while_a_function_blocks() -> None:
    def f(completions: list[str]) -> list[float]:
        time.sleep(0.3)
        return [1.0]

    async def run() -> int:
        task = asyncio.ensure_future(reward(f).score([sample()]))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 10


def test_calls_run_side_by_side() -> None:
    barrier = threading.Barrier(8, timeout=10)

    def f(completions: list[str]) -> list[float]:
        barrier.wait()
        return [1.0]

    async def run() -> list[list[Scored | Failed]]:
        one = reward(f)
        return await asyncio.gather(*(one.score([sample()]) for _ in range(8)))

    assert asyncio.run(run()) == [[Scored(value=1.0, parts={"f": 1.0})]] * 8


def test_a_function_that_always_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    monkeypatch.setattr(calls, "MAX_STUCK", 3)
    stop = threading.Event()
    num_calls = 0

    def f(completions: list[str]) -> list[float]:
        nonlocal num_calls
        num_calls += 1
        stop.wait(20)
        return [1.0]

    async def run() -> tuple[list[Any], list[Any]]:
        one = reward(f, timeout_s=0.02)
        stuck = [(await one.score([sample()]))[0].reason for _ in range(10)]  # type: ignore[union-attr]
        stop.set()
        await asyncio.sleep(0.1)
        return stuck, await one.score([sample()])

    stuck, after = asyncio.run(run())
    assert stuck[:5] == ["f took longer than timeout_s=0.02"] * 5
    assert "5 earlier calls hang past their deadline" in stuck[5]
    assert num_calls == 6
    assert isinstance(after[0], Scored), "it is called again once they have returned"


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, time\n"
        "from rollpacker.rewards.base import RewardConfig, RewardInput\n"
        "from rollpacker.rewards.functions import RewardFunction\n"
        "def f(completions): time.sleep(60)\n"
        "one = RewardFunction(RewardConfig(function='m:f', timeout_s=0.1), 'f', f)\n"
        "s = RewardInput(prompt='', completion='', completion_tokens=(), finish_reason='stop',"
        " columns={})\n"
        "print(asyncio.run(one.values([s])))\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "took longer" in done.stdout
    assert time.monotonic() - started < 20


def test_one_reward_in_several_loops() -> None:
    def f(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    one = reward(f)
    assert values(one, [sample()]) == values(one, [sample()]) == [1.0]
    assert scored(one, []) == []


def test_built_from_files_and_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(completions, **columns):\n    return [len(c) for c in completions]\n"
        "number = 3\n"
        "def only(answer, /):\n    return []\n"
        "def tight(completions, scale=1):\n    return []\n"
    )
    file = f"{tmp_path}/mine.py"
    one = build_reward([RewardConfig(function=f"{file}:score", name="length")])
    assert scored(one, [sample("abc")]) == [Scored(value=3.0, parts={"length": 3.0})]
    for config, expected in [
        (RewardConfig(function=f"{file}:scor"), 'Did you mean "score"?'),
        (RewardConfig(function=f"{file}:number"), "is a int, not a function"),
        (RewardConfig(function=f"{file}:only"), "cannot be passed by name"),
        (RewardConfig(function=f"{file}:tight", arguments={"scal": 2}), 'Did you mean "scale"?'),
        (RewardConfig(function="reasoning-gym"), 'Did you mean "reasoning_gym"?'),
        (RewardConfig(function="reasoning_gym", arguments={"regex": "x"}), "answer_regex"),
        (RewardConfig(function="reasoning_gym", arguments={"answer_regex": "("}), "expression"),
        (RewardConfig(function="no.such.module:f"), "there is no module no"),
    ]:
        with pytest.raises(RewardError) as caught:
            build_reward([config])
        assert expected in str(caught.value)
    with pytest.raises(RewardError, match='two rewards are called "score"'):
        build_reward([RewardConfig(function=f"{file}:score")] * 2)


def test_a_missing_column_is_found_before_the_run() -> None:
    def f(completions: list[str], answer: list[str], level: Any = None) -> list[float]:
        return [1.0] * len(completions)

    reward(f).check([{"answer": "x"}])
    with pytest.raises(RewardError, match=r"needs the column answer; row 1 has: answr\. Did you"):
        reward(f).check([{"answer": "x"}, {"answr": "y"}])
    (verdict,) = values(reward(f), [sample(answr="y")])
    assert "f raised TypeError" in str(verdict)
