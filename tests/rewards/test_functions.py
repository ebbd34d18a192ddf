"""Rewards: what a function returns or does wrong reaches exactly the samples it concerns."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError, Scored
from tests.rewards.plain import reward, sample, scored, values, write


def test_a_function_gets_what_its_signature_takes(tmp_path: Path) -> None:
    source = f"""
        import json, pathlib
        def keep(name, *what):
            pathlib.Path({str(tmp_path)!r}, name).write_text(json.dumps(what))
        def narrow(completions, answer):
            keep("narrow.json", completions, answer)
            return [1.0] * len(completions)
        def wide(prompts, completions, **columns):
            for name in ("log_metric", "log_extra", "trainer_state"):
                del columns[name]  # as in TRL they are between them
            keep("wide.json", prompts, completions, columns)
            return [1.0] * len(completions)
    """
    samples = [sample("a", answer="x", level=1), sample("b", answer="y")]
    assert values(reward(tmp_path, source, "narrow", "wide"), samples) == [2.0, 2.0]
    assert json.loads((tmp_path / "narrow.json").read_text()) == [["a", "b"], ["x", "y"]]
    prompts, completions, columns = json.loads((tmp_path / "wide.json").read_text())
    assert (prompts, completions) == (["p", "p"], ["a", "b"])
    assert columns == {
        "answer": ["x", "y"],
        "level": [1, None],
        "completion_ids": [[1, 2], [1, 2]],
        "finish_reasons": ["stop", "stop"],
    }


def test_what_has_no_name_of_its_own_is_called_as_the_config_calls_it(tmp_path: Path) -> None:
    source = """
        import functools
        class Length:
            def __call__(self, completions):
                return [float(len(one)) for one in completions]
        def scaled(completions, by):
            return [by * len(one) for one in completions]
        short = Length()
        twice = functools.partial(scaled, by=2.0)
    """
    both = reward(tmp_path, source, "short", "twice")
    assert both.names == ("short", "twice")
    assert values(both, [sample("ab")]) == [6.0]


def test_chat_prompts_make_chat_completions(tmp_path: Path) -> None:
    source = """
        def f(completions):
            assert completions == [[{"role": "assistant", "content": "hello"}], "plain"]
            return [1.0, 2.0]
    """
    chat = [{"role": "user", "content": "hi"}]
    samples = [sample("hello", prompt=chat), sample("plain")]
    assert values(reward(tmp_path, source), samples) == [1.0, 2.0]


def test_configured_arguments_go_before_columns(tmp_path: Path) -> None:
    source = """
        def f(completions, level, scale=1.0):
            return [level * scale] * len(completions)
    """
    one = reward(tmp_path, source, arguments={"level": 3, "scale": 0.5})
    assert values(one, [sample(level=7)]) == [1.5]


def test_weights_parts_and_not_applicable(tmp_path: Path) -> None:
    source = """
        def a(completions):
            return [1.0 if c != "none" else None for c in completions]
        def b(completions):
            return [None] * len(completions)
        def c(completions):
            return [float(len(x)) for x in completions]
    """
    path = write(tmp_path, source)
    weights = [("a", 2.0), ("b", 5.0), ("c", 0.5)]
    one = build_reward([RewardConfig(function=f"{path}:{n}", weight=w) for n, w in weights])
    assert one.names == ("a", "b", "c")
    assert scored(one, [sample("four"), sample("none")]) == [
        Scored(value=4.0, parts={"a": 1.0, "b": None, "c": 4.0}),
        Scored(value=2.0, parts={"a": None, "b": None, "c": 4.0}),
    ]
    assert scored(reward(tmp_path, source, "b"), [sample()]) == [
        Failed(reason="no verdict: b returned None", parts={"b": None})
    ]


def test_one_bad_sample_takes_no_other_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        def fragile(completions):
            return [1 / int(c) for c in completions]
        def solid(completions):
            return [1.0] * len(completions)
    """
    samples = [sample("1"), sample("0"), sample("2"), sample("x")]
    with caplog.at_level(logging.WARNING):
        verdicts = scored(reward(tmp_path, source, "fragile", "solid"), samples)
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
    assert not any("worker.py" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[1.0]", "f returned 1 values for 2 completions"),
        ("[1.0, 2.0, 3.0]", "f returned 3 values for 2 completions"),
        ("None", "f returned NoneType, not a list"),
        ("1.0", "f returned float, not a list"),
        ("'ab'", "f returned str, not a list"),
        ("{'a': 1, 'b': 2}", "f returned dict, not a list"),
        ("[math.nan, math.inf]", "f returned nan, not a number"),
        ("[math.inf, 1.0]", "f returned inf, not a number"),
        ("['1', '2']", "f returned '1', not a number"),
        ("[[1], [2]]", "f returned [1], not a number"),
        ("[10**400, 1]", "not a number"),
        ("[10**5000, 1]", "f returned a int, not a number"),
        ("[1e31, 1]", "f returned 1e+31, larger than 1e+30"),
        ("(x for x in (1, 2))", "f returned generator, not a list"),
        ("[1j, 2]", "f returned 1j, not a number"),
    ],
)
def test_what_is_no_list_of_numbers(tmp_path: Path, returned: str, expected: str) -> None:
    source = f"import math\ndef f(completions):\n    return {returned}\n"
    assert expected in str(values(reward(tmp_path, source), [sample(), sample()])[0])


def test_objects_that_lie_or_break(tmp_path: Path) -> None:
    source = """
        class Mute:
            def __repr__(self): raise OSError("no")
            def __float__(self): raise TypeError
        class Rude(Exception):
            def __str__(self): raise OSError("no")
        def f(completions):
            return [Mute()]
        def g(completions):
            raise Rude
    """
    assert values(reward(tmp_path, source), [sample()]) == ["f returned a Mute, not a number"]
    (said,) = values(reward(tmp_path, source, "g"), [sample()])
    assert said == "g raised Rude: (its message cannot be shown)"


@pytest.mark.parametrize(
    "returned", ["[True, 0]", "np.array([1.0, 0.0], dtype=np.float32)", "(1, False)"]
)
def test_numbers_of_all_kinds(tmp_path: Path, returned: str) -> None:
    head = "import numpy as np\n" if "np." in returned else ""
    source = f"{head}def f(completions):\n    return {returned}\n"
    assert values(reward(tmp_path, source), [sample(), sample()]) == [1.0, 0.0]


def test_async_functions_and_errors_in_them(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def f(completions):
            await asyncio.sleep(0)
            if "bad" in completions:
                raise LookupError("no such thing")
            return [1.0] * len(completions)
    """
    verdicts = values(reward(tmp_path, source), [sample(), sample("bad")])
    assert verdicts == [1.0, "f raised LookupError: no such thing"]


def test_a_sync_function_that_returns_an_awaitable(tmp_path: Path) -> None:
    source = """
        def f(completions):
            async def later():
                return [3.0] * len(completions)
            return later()
    """
    assert values(reward(tmp_path, source), [sample()]) == [3.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_nothing_that_a_function_raises_ends_the_run(tmp_path: Path, kind: str) -> None:
    source = f"""
        errors = [SystemExit(3), KeyboardInterrupt(), StopIteration(), EOFError(), MemoryError()]
        {kind} f(completions):
            raise {{type(e).__name__: e for e in errors}}[completions[0]]
    """
    names = ["SystemExit", "KeyboardInterrupt", "StopIteration", "EOFError", "MemoryError"]
    verdicts = values(reward(tmp_path, source), [sample(name) for name in names])
    for name, verdict in zip(names, verdicts, strict=True):
        if kind == "async def" and name == "StopIteration":
            name = "RuntimeError: coroutine raised StopIteration"
        assert name in str(verdict)


def test_deadline_spares_the_samples_that_are_quick(tmp_path: Path) -> None:
    source = """
        import time
        def f(completions):
            if "slow" in completions:
                time.sleep(600)
            return [1.0] * len(completions)
    """
    for timeout_s in (1.5, 6.0, 24.0):  # a machine that stands still takes as long
        one = reward(tmp_path, source, timeout_s=timeout_s)
        verdicts = scored(one, [sample(), sample("slow"), sample()])
        if all(isinstance(verdict, Scored) for verdict in (verdicts[0], verdicts[2])):
            break
    assert [getattr(v, "value", None) for v in verdicts] == [1.0, None, 1.0]
    assert verdicts[1] == Failed(
        reason=f"f took longer than timeout_s={timeout_s:g}",
        parts={"f": None},
        cause=Cause.DEADLINE,
    )


def test_a_shorter_deadline_may_be_asked_for(tmp_path: Path) -> None:
    source = "import time\ndef f(completions):\n    time.sleep(20)\n"
    one = reward(tmp_path, source, deadline=AdaptiveDeadlineConfig())

    async def run() -> list[Scored | Failed]:
        return await one.score([sample()], timeout_s=0.1)

    (verdict,) = asyncio.run(run())
    assert isinstance(verdict, Failed)
    assert verdict.reason == "f took longer than its deadline of 0.1 s"
    assert verdict.cause is Cause.DEADLINE


def test_async_deadline_even_if_it_ignores_being_cancelled(tmp_path: Path) -> None:
    source = """
        import asyncio
        async def f(completions):
            for _ in range(6):
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
            return [1.0]
    """
    one = reward(tmp_path, source, timeout_s=0.05)
    assert values(one, [sample()]) == ["f took longer than timeout_s=0.05"]


def test_the_loop_stays_free_while_a_function_blocks(tmp_path: Path) -> None:
    one = reward(tmp_path, "import time\ndef f(completions):\n    time.sleep(2)\n    return [1]\n")

    async def run() -> int:
        task = asyncio.ensure_future(one.score([sample()]))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await one.close()
        return ticks

    assert asyncio.run(run()) > 10


@pytest.mark.parametrize("num_workers", [1, 4])
def test_calls_run_side_by_side(tmp_path: Path, num_workers: int) -> None:
    """Each waits until as many run as there are workers, or eight in one worker's loop."""
    width = 8 if num_workers == 1 else num_workers
    pause = "await asyncio.sleep(0.01)" if num_workers == 1 else "time.sleep(0.01)"
    source = f"""
        import asyncio, pathlib, time
        {"async " if num_workers == 1 else ""}def f(completions):
            here = pathlib.Path({str(tmp_path)!r})
            (here / f"call-{{completions[0]}}").touch()
            until = time.monotonic() + 100
            while len(list(here.glob("call-*"))) < {width}:
                if time.monotonic() > until:
                    return [0.0]
                {pause}
            return [1.0]
    """
    one = reward(tmp_path, source, workers=num_workers, timeout_s=200)

    async def run() -> list[list[Scored | Failed]]:
        try:
            return await asyncio.gather(*(one.score([sample(str(i))]) for i in range(width)))
        finally:
            await one.close()

    assert asyncio.run(run()) == [[Scored(value=1.0, parts={"f": 1.0})]] * width


def test_a_function_that_always_hangs_takes_no_more_than_its_workers(tmp_path: Path) -> None:
    """Calls that hang do not pile up, and the function is called again once it does not."""
    stop = tmp_path / "stop"
    source = f"""
        import os, pathlib, time
        here = pathlib.Path({str(tmp_path)!r})
        def f(completions):
            (here / f"pid-{{os.getpid()}}").touch()
            if not (here / "stop").exists():
                time.sleep(600)
            return [1.0]
    """
    one = reward(tmp_path, source, timeout_s=0.7)

    async def run() -> tuple[list[Any], list[int], list[Any]]:
        stuck = [(await one.score([sample()]))[0].reason for _ in range(5)]  # type: ignore[union-attr]
        pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        until = time.monotonic() + 15.0  # none of them sleeps for so long any more
        alive = pids
        while alive and time.monotonic() < until:
            await asyncio.sleep(0.05)
            alive = [pid for pid in alive if Path(f"/proc/{pid}").exists()]
        stop.touch()
        for _ in range(5):
            after = await one.score([sample()])
            if isinstance(after[0], Scored):
                break
        await one.close()
        return stuck, alive, after

    stuck, alive, after = asyncio.run(run())
    assert stuck == ["f took longer than timeout_s=0.7"] * 5
    assert alive == []
    assert isinstance(after[0], Scored), "it is called again once it returns"


def test_a_stuck_function_does_not_keep_the_process(tmp_path: Path) -> None:
    path = write(tmp_path, "import time\ndef f(completions):\n    time.sleep(60)\n")
    code = (
        "import asyncio\n"
        "from rollpacker.rewards.reward import RewardConfig, RewardInput\n"
        "from rollpacker.rewards.functions.function_reward import RewardFunction\n"
        f"one = RewardFunction(RewardConfig(function={f'{path}:f'!r}, timeout_s=0.1))\n"
        "s = RewardInput(prompt='', completion='', completion_tokens=(), finish_reason='stop',"
        " columns={})\n"
        "print(asyncio.run(one.score([s])))\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55)
    assert "took longer" in done.stdout
    assert done.stderr.count("Traceback") == 0, done.stderr
    assert time.monotonic() - started < 50


def test_one_reward_in_several_loops(tmp_path: Path) -> None:
    source = "import os\ndef f(completions):\n    return [os.getpid()] * len(completions)\n"
    one = reward(tmp_path, source)
    (first,) = asyncio.run(one.score([sample()]))
    (second,) = asyncio.run(one.score([sample()]))
    assert isinstance(first, Scored)
    assert first == second, "an idle worker goes on in the next loop"
    (third,) = values(one, [sample()])
    (fourth,) = values(one, [sample()])
    assert third == first.value
    assert isinstance(fourth, float) and fourth != third, "closing ends it, scoring reopens"
    assert scored(one, []) == []


def test_built_from_files_and_modules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(completions, **columns):\n    return [len(c) for c in completions]\n"
        "number = 3\n"
        "def only(answer, /):\n    return []\n"
        "def tight(completions, scale=1):\n    return []\n"
        "def nothing():\n    return []\n"
    )
    file = f"{tmp_path}/mine.py"
    one = build_reward([RewardConfig(function=f"{file}:score", name="length")])
    assert scored(one, [sample("abc")]) == [Scored(value=3.0, parts={"length": 3.0})]
    for config, expected in [
        (RewardConfig(function=f"{file}:scor"), 'Did you mean "score"?'),
        (RewardConfig(function=f"{file}:number"), "is a int, not a function"),
        (RewardConfig(function=f"{file}:only"), "cannot be passed by name"),
        (RewardConfig(function=f"{file}:nothing"), "takes no parameter; it must look like f(pro"),
        (RewardConfig(function=f"{file}:tight", arguments={"scal": 2}), 'Did you mean "scale"?'),
        (
            RewardConfig(function=f"{file}:score", arguments={"prompts": 2}),
            "the run itself passes prompts",
        ),
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


def test_what_a_module_raises_is_told_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1\n\ny = x / 0\n")
    with pytest.raises(RewardError, match=rf"ZeroDivisionError: division by zero \({path}, line 3"):
        build_reward([RewardConfig(function=f"{path}:f")])


def test_a_missing_column_is_found_before_the_run(tmp_path: Path) -> None:
    source = """
        def f(completions, answer, level=None):
            return [1.0] * len(completions)
    """
    reward(tmp_path, source).check([(None, {"answer": "x"})])
    with pytest.raises(RewardError, match=r"needs the column answer; row 1 has: answr\. Did you"):
        reward(tmp_path, source).check([(None, {"answer": "x"}), (None, {"answr": "y"})])
    (verdict,) = values(reward(tmp_path, source), [sample(answr="y")])
    assert "f raised TypeError" in str(verdict)


def test_columns_that_no_worker_can_get(tmp_path: Path) -> None:
    source = """
        def f(completions, answer):
            return [1.0] * len(completions)
    """
    verdicts = values(reward(tmp_path, source), [sample(answer=1), sample(answer=lambda: 1)])
    assert verdicts[0] == 1.0
    assert "f cannot be called: its columns cannot be sent to a worker" in str(verdicts[1])


def test_what_a_function_raises_steers_no_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = r"""
        def f(completions):
            raise ValueError("bad\x1b[2J one")
    """
    scored(reward(tmp_path, source), [sample()])
    told = next(line for line in caplog.messages if "f: no verdict: ValueError" in line)
    assert r"bad\x1b[2J one" in told and "\x1b" not in told
    assert "\n" in told and "raise ValueError" in told  # its lines stay lines
