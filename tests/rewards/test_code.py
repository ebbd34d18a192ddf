"""Grading programs: extraction, shapes of tests, what a verdict says, and the built-in `code`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest

from rollpacker.rewards.build import build_reward
from rollpacker.rewards.code.cases import BadTests, read_tests
from rollpacker.rewards.code.grading import CodeConfig, CodeReward, extract, grade
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardError,
    RewardInput,
    Scored,
)
from rollpacker.rewards.shared import logged_progress
from rollpacker.sandbox import Limits, RunResult, Status
from rollpacker.sandbox.sandbox import SandboxConfig
from tests.rewards.code_box import Box, opened
from tests.rewards.code_corpus.honest import call, io

DOUBLE = "def f(x):\n    return 2 * x\n"


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with opened() as box:
        yield box


# -- extraction ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```python\nx = 1\n```\nb\n```PY\nx = 2\n```\nc", "x = 2\n"),
        ("```python\nx = 1\n```\n```\nout\n```", "x = 1\n"),
        ("```\nx = 1\n```\n```text\nout\n```", "out\n"),
        ("```python\nx = 1", "x = 1"),
        ("````python\n```\n````", "```\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("```python title=a.py\nx = 1\n```", "x = 1\n"),
        ("text ```python\nx = 1\n```", ""),
        ("<think>```python\nx = 0\n```</think>\nx = 1", "\nx = 1"),
        ("\ufeffx = 1", "x = 1"),
        ("", None),
        (" \n\t", None),
        ("```python\n\n```", None),
        ("x = '\0'", None),
        ("x = '\ud800'", None),
        ("#" * 300_000, None),
    ],
)
def test_extract(completion: str, program: str | None) -> None:
    assert extract(completion) == program or (program == "" and extract(completion) is None)


def test_extraction_of_a_huge_completion_is_quick() -> None:
    began = time.thread_time()
    for hostile in ("```\n" * 300_000, "`" * 2_000_000, "<think>" * 300_000, " " * 2_000_000):
        extract(hostile)
    assert time.thread_time() - began < 5


# -- tests that cannot be used ---------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([], "there is no test"),
        ("[", "no JSON"),
        (None, "a NoneType, not a list of tests"),
        ([3], "test 0: a int, not a mapping"),
        ([{}], "test 0: no type, and no known shape: it has nothing"),
        ([{"type": "shell"}], "test 0: the type shell is unknown"),
        ([io("", ""), {"type": "io", "stdin": "1"}], "test 1: it has no stdout"),
        ([{"type": "io", "stdin": 1, "stdout": ""}], "stdin must be text, not a int"),
        ([{"type": "call", "function": "f", "args": []}], "it has no expected"),
        (
            [io("1", "2"), {"type": "io", "stdn": "1", "stdout": "2"}],
            'test 1: stdn is no key of a test of type io. Did you mean "stdin"?',
        ),
        ([{"type": "io", "stdin": "1", "stdot": "2"}], 'Did you mean "stdout"?'),
        ([{"type": "call", "function": "f", "arg": [1], "expected": 1}], 'Did you mean "args"?'),
        ([{"type": "assert", "code": "assert f(1)", "setp": "x"}], 'Did you mean "setup"?'),
        (
            [call(1, gives=2), {"type": "call", "function": "f", "arg": [1], "expected": 1}],
            'test 1: arg is no key of a test of type call. Did you mean "args"?',
        ),
        (
            [{"type": "call", "function": "f", "args": [], "kwarg": {"x": 1}, "expected": 1}],
            'test 0: kwarg is no key of a test of type call. Did you mean "kwargs"?',
        ),
        ([{"type": "io", "stdn": "1", "stdout": "2", "input": ""}], 'Did you mean "stdin"?'),
        (
            [{"type": "call", "function": "f", "args": [1], "args_litral": "[1]", "expected": 1}],
            'Did you mean "args_literal"?',
        ),
        ([{"type": "io", "stdout": "2", "tolerance": 0.1}], "tolerance is no key of a test of"),
        (
            [{"input": "1", "output": "2", "testype": "functional", "fn_name": "f"}],
            'test 0: testype is no key of a test with input. Did you mean "testtype"?',
        ),
        ([{"input": "1", "output": "2", "fn_name": "f"}], "fn_name is no key of a test with input"),
        (
            [{"testtype": "functional", "input": "1", "output": "2", "fn_name": "f", "setp": ""}],
            "setp is no key of a test of type functional",
        ),
        ({"inputs": ["1"], "outputs": ["2"], "fn_nam": "f"}, 'Did you mean "fn_name"?'),
        (
            {"test_list": ["assert f(1) == 2"], "test_setup_cod": "x = 1"},
            'test_setup_cod is no key of a test with test_list. Did you mean "test_setup_code"?',
        ),
        ([{"type": []}], "the type [] is unknown"),
        ([{"type": "call", "function": "f(", "args": [], "expected": 1}], "must be a name"),
        ([{"type": "call", "function": "f", "args": 3, "expected": 1}], "args must be a list"),
        ([call(1, gives=float("nan"))], "nan is expected, which nothing equals"),
        ([{"type": "call", "function": "f", "expected_literal": "f()"}], "no Python literal"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs, but 0 outputs"),
        (["f(1) == 2"], "test 0: its code asserts nothing"),
        (["assert f(1"], "test 0: its code is no Python"),
        (["assert 1 == 1"], "its code uses nothing of the program"),
        (["assert eval(f(1)) == 2"], "its code uses eval, which could run what a program returned"),
        (["import pickle\nassert pickle.loads(f(1)) == 2"], "its code uses pickle"),
        ([{"test": "def check(candidate): assert candidate()"}], "it has no entry_point"),
    ],
)
def test_bad_tests_are_named(tests: Any, says: str) -> None:
    with pytest.raises(BadTests) as caught:
        read_tests(tests)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "tests",
    [
        [
            {"type": "io", "input": "1", "output": "2", "output_type": "text", "outputs": ["2"]}
            | {"id": 3, "weight": 1.0, "_checked": True}
        ],
        [{"type": "stdin_stdout", "language": "python", "fn_name": "", "input": "", "output": ""}],
        [{"input": "1", "output": "2", "testtype": "stdin", "metadata": {"func_name": "f"}}],
        {"inputs": ["1"], "outputs": ["2"], "call_type": "std"},
        {"task_id": 2, "text": "Write f.", "code": "def f(x): ...", "challenge_test_list": []}
        | {"test_list": ["assert f(1) == 2"], "test_setup_code": "", "test_imports": []},
        {"task_id": "HumanEval/0", "prompt": "def f(x):", "canonical_solution": "    return x"}
        | {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}
        | {"base_input": [[1]], "plus_input": [[2]], "atol": 0, "contract": ""},
    ],
)
def test_what_data_sets_carry_beside_a_test_does_no_harm(tests: Any) -> None:
    assert len(read_tests(tests)) == 1


# -- verdicts --------------------------------------------------------------------------


def test_bad_tests_are_no_verdict(box: Box) -> None:
    verdict = box.grade(DOUBLE, [{"type": "shell"}])
    assert isinstance(verdict, Failed) and verdict.cause is Cause.SAMPLE
    verdict = box.grade(DOUBLE, ["assert callable(f)"])
    assert isinstance(verdict, Failed) and "passes without calling the program" in verdict.reason
    verdict = box.grade(DOUBLE, ["assert f(lambda x: x)"])
    assert isinstance(verdict, Failed) and "test 0 cannot be used" in verdict.reason


def test_no_program_is_zero_without_a_run() -> None:
    verdict = asyncio.run(grade("```python\n```", [io("", "1")], None))  # type: ignore[arg-type]
    assert verdict == Scored(value=0.0, seconds=0.0, correct=False)


def test_partial_is_the_share_of_tests_passed(box: Box) -> None:
    tests = [call(1, gives=2), call(1, gives=3), call(2, gives=4), "assert f(4) == 8"]
    assert box.grade(DOUBLE, tests).value == 0.0
    verdict = box.grade(DOUBLE, tests, partial=True)
    assert isinstance(verdict, Scored) and verdict.value == 0.75 and verdict.correct is False
    assert box.grade(DOUBLE, tests, max_tests=1) == box.grade(DOUBLE, tests[:1]) or (
        box.grade(DOUBLE, tests, max_tests=1).value == 1.0
    )


@pytest.mark.parametrize("test", [io("", "1"), call(1, gives=1), "assert f(1) == 1"])
def test_an_endless_program_is_zero_and_timed_out(box: Box, test: Any) -> None:
    began = time.perf_counter()
    verdict = box.grade("while True: pass", [test] * 100, wall_s=0.5, partial=True)
    assert isinstance(verdict, Scored)
    assert verdict.value == 0.0 and verdict.timed_out and verdict.correct is False
    assert verdict.seconds is not None and 0.5 <= verdict.seconds < 20
    assert time.perf_counter() - began < 40, "tests after one that ran out of time are not run"


def test_sleeping_until_just_before_the_limit_costs_one_limit_a_test(box: Box) -> None:
    sleepy = f"import time\ntime.sleep(0.3)\n{DOUBLE}"
    verdict = box.grade(sleepy, [call(1, gives=2), call(1, gives=3), call(2, gives=4)], wall_s=30.0)
    assert isinstance(verdict, Scored) and verdict.value == 0.0
    assert verdict.seconds is not None and 0.3 <= verdict.seconds < 30


def test_seconds_are_those_of_the_slowest_test(box: Box) -> None:
    sleepy = "import time\ndef f(x):\n  time.sleep(x)\n  return x"
    verdict = box.grade(sleepy, [call(0.4, gives=0.4), call(0, gives=0)], wall_s=30.0)
    assert isinstance(verdict, Scored) and verdict.correct and not verdict.timed_out
    assert verdict.seconds is not None and 0.4 <= verdict.seconds < 30


def test_right_output_after_a_limit_is_not_right(box: Box) -> None:
    assert box.grade("print(1, flush=True)\nwhile True: pass", [io("", "1")], wall_s=0.5).value == 0
    flood = "print(1, flush=True)\nwhile True: print('x' * 10000)"
    assert box.grade(flood, [io("", "1")], wall_s=5).value == 0


class OneResult:
    """A sandbox that answers the same to everything."""

    def __init__(self, result: RunResult) -> None:
        self.result = result

    async def run(self, program: str, **arguments: Any) -> RunResult:
        return self.result


@pytest.mark.parametrize("test", [io("", "1"), call(1, gives=1), "assert f(1) == 1"])
def test_a_failed_sandbox_is_never_a_zero(test: Any) -> None:
    box = OneResult(RunResult(status=Status.SANDBOX_ERROR, detail="worker python-1 died"))
    verdict = asyncio.run(grade(DOUBLE, [test], box))  # type: ignore[arg-type]
    assert isinstance(verdict, Failed) and verdict.cause is Cause.INFRASTRUCTURE
    assert "worker python-1 died" in verdict.reason


@pytest.mark.parametrize("status", [Status.OK, Status.NONZERO, Status.KILLED])
def test_the_exit_status_is_no_evidence(status: Status) -> None:
    for stdout, value in ((b"1\n", 1.0), (b"", 0.0), (b"2\n", 0.0)):
        box = OneResult(RunResult(status=status, stdout=stdout))
        verdict = asyncio.run(grade("x", [io("", "1")], box))  # type: ignore[arg-type]
        assert isinstance(verdict, Scored) and verdict.value == value
    forged = OneResult(RunResult(status=status, stdout=b'["passed"]'))
    verdict = asyncio.run(grade("x", ["assert f(1) == 1"], forged))  # type: ignore[arg-type]
    assert isinstance(verdict, Scored) and verdict.value == 0.0


class Recording:
    """Passes runs on, and keeps what went in."""

    def __init__(self, box: Any) -> None:
        self.box = box
        self.seen: list[str] = []

    async def run(
        self,
        program: str,
        *,
        stdin: bytes = b"",
        files: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> RunResult:
        self.seen.append(f"{program}\n{stdin!r}\n{files!r}")
        return await self.box.run(program, stdin=stdin, files=files, **more)


@pytest.mark.parametrize(
    "tests",
    [
        [io("7\n", "secret-14\n")],
        [call(7, gives="secret-14")],
        ["assert f(7) == 'secret-14'"],
        [{"test": "def check(g):\n    assert g(7) in {'secret-14'}", "entry_point": "f"}],
        ["assert C(7).text == 'secret-14'"],
    ],
)
def test_what_is_expected_never_enters_a_sandbox_with_the_program(box: Box, tests: Any) -> None:
    program = (
        "# the program\ndef f(x): return f'secret-{2 * x}'\nclass C:\n"
        "  def __init__(self, x): self.text = f(x)\n"
        "if __name__ == '__main__': print(f(int(input())))"
    )
    recording = Recording(box.sandbox)
    verdict = box.run(grade(program, tests, recording))  # type: ignore[arg-type]
    assert verdict.value == 1.0
    with_program = [text for text in recording.seen if "# the program" in text]
    assert with_program and not [text for text in with_program if "secret-14" in text]


LOOK = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
out, into = os.pipe()
wanted = "".join(map(chr, NEEDLE)).encode()
found = pages = 0
top = libc.sbrk(0)
for page in range(top - (32 << 20) & ~4095, top, 4096):
    if libc.write(into, page, 4096) == 4096:  # an error, not a crash, where nothing is mapped
        pages += 1
        found += wanted in os.read(out, 4096)
print(pages > 10, found)
"""


@pytest.mark.parametrize("text", ["#{}\nx = {!r}", "print({!r} + 20 * {!r})"])
def test_nothing_of_an_earlier_run_is_left_in_memory(box: Box, text: str) -> None:
    """The code of a test, and what other programs answered, pass through the same worker."""
    secret = "expected-result-4711"
    look = LOOK.replace("NEEDLE", str(list(secret.encode())))

    async def found() -> set[bytes]:
        outputs = set()
        for size in (1_000, 30_000, 70_000, 300_000):
            for _ in range(2):
                await box.sandbox.run(text.format("y" * size, secret), stdin=secret * 5)
            outputs |= {(await box.sandbox.run(look)).stdout for _ in range(2)}
        return outputs

    assert box.run(found()) == {b"True 0\n"}


def test_cancelling_ends_the_run(box: Box) -> None:
    async def cancelled() -> Scored | Failed:
        limits = Limits(wall_s=60)
        task = asyncio.ensure_future(
            grade("while True: pass", [io("", "1")], box.sandbox, limits=limits)
        )
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await grade(DOUBLE, [call(1, gives=2)], box.sandbox, limits=limits)

    began = time.perf_counter()
    assert box.run(cancelled()).value == 1.0
    assert time.perf_counter() - began < 50


# -- the built-in reward ---------------------------------------------------------------


class SharedBox:
    """What rewards have in common, with the sandbox of this module."""

    config = SandboxConfig()
    progress = staticmethod(logged_progress)

    def __init__(self, box: Box | None) -> None:
        self.box = box

    def check_sandbox(self) -> None:
        assert self.box is not None

    def run(self, coroutine_function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        assert self.box is not None
        return self.box.run(coroutine_function())

    async def sandbox(self) -> Any:
        assert self.box is not None
        return self.box.sandbox


def reward(box: Box | None, **arguments: Any) -> CodeReward:
    config = RewardConfig(function="code", timeout_s=5.0, workers=2)
    shared: Any = SharedBox(box)
    return CodeReward(CodeConfig(**arguments), entry=config, name="code", shared=shared)


GOOD = {"tests": [call(1, gives=2)], "reference_solution": DOUBLE}
BAD = {"tests": ["assert f(1) == 2", call(1, gives=3)], "reference_solution": DOUBLE}


def test_good_rows_pass_the_check(box: Box) -> None:
    reward(box).check([GOOD, {"tests": json.dumps(GOOD["tests"])}, {**GOOD, "extra": None}])


def test_rows_with_bad_tests_are_located(box: Box) -> None:
    with pytest.raises(RewardError) as caught:
        reward(box).check([GOOD, {"tests": [{"type": "shell"}]}, {"test": []}])
    text = str(caught.value)
    assert "the tests of 2 of 3 rows cannot be used" in text
    assert "row 1: test 0: the type shell is unknown" in text
    assert "row 2: no column tests (it has: test); set tests_column" in text


def test_tests_that_fail_their_own_reference_are_located_and_counted(box: Box) -> None:
    rows = [GOOD] * 3 + [BAD] + [{"tests": GOOD["tests"], "reference_solution": "no program("}]
    with pytest.raises(RewardError) as caught:
        reward(box).check(rows)
    assert str(caught.value) == (
        "reward code: the tests of 2 of 5 rows fail their own reference solution: row 3: test 1"
        " (call) fails; row 4: test 0 (call) fails. Mend or remove these rows, or set"
        " allow_bad_tests to at least 0.400."
    )
    reward(box, allow_bad_tests=0.4).check(rows)
    reward(box, reference_column=None).check(rows)


def test_many_bad_rows_are_one_short_message(box: Box) -> None:
    with pytest.raises(RewardError) as caught:
        reward(box).check([BAD] * 20)
    assert "20 of 20 rows" in str(caught.value) and "and 15 more" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_progress_is_told_when_the_check_takes_long(
    box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollpacker.rewards.shared._LOGGED_EVERY_S", 0.0)
    with caplog.at_level("INFO"):
        reward(box).check([GOOD] * 3)
    assert "reward code: reference solutions checked: 3 of 3" in caplog.text


@pytest.mark.parametrize(
    "arguments", [{"language": "cobol"}, {"max_tests": 0}, {"allow_bad_tests": 2}]
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"^reward code: (language|max_tests|allow_bad)"):
        build_reward([RewardConfig(function="code", arguments=arguments)])


def sample(completion: str, columns: Mapping[str, Any]) -> RewardInput:
    return RewardInput(
        prompt="p",
        completion=completion,
        completion_tokens=(1,),
        finish_reason="stop",
        columns=columns,
    )


def had_no_time(verdict: Scored | Failed) -> bool:
    return isinstance(verdict, Scored) and verdict.timed_out


def test_scores_a_batch_in_order(box: Box) -> None:
    samples = [
        sample(DOUBLE, GOOD),
        sample("def f(x): return x", GOOD),
        sample("while True: pass", GOOD),
        sample(DOUBLE, {"other": 1}),
    ]
    for timeout_s in (1.0, 5.0, 25.0):  # a machine that stands still takes as long
        found = box.run(reward(box).score(samples, timeout_s=timeout_s))
        if not any(had_no_time(verdict) for verdict in found[:2]) and had_no_time(found[2]):
            break
    right, wrong, endless, unknown = found
    assert isinstance(right, Scored) and right.value == 1.0 and right.correct
    assert isinstance(wrong, Scored) and wrong.value == 0.0 and not wrong.timed_out
    assert isinstance(endless, Scored) and endless.value == 0.0 and endless.timed_out
    assert isinstance(unknown, Failed) and "no column tests" in unknown.reason
