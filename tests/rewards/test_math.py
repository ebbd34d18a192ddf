"""The math reward: what is found, what is bounded, what is right, and what never runs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from examples.math.tasks import KINDS, math_tasks
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.math.extract import Caps, extract, restates, same_text
from rollpacker.rewards.math.math_reward import (
    PROFILE,
    PROGRAM,
    MathConfig,
    MathReward,
    checker,
    parse_reply,
)
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardError,
    RewardInput,
    Scored,
)
from rollpacker.rewards.shared import Shared
from rollpacker.sandbox.program import WORK
from rollpacker.sandbox.sandbox import Profile, RunResult, SandboxConfig, SandboxUnavailable, Status
from tests.rewards.math_corpus import RIGHT, WRONG
from tests.rewards.math_formats import pairs
from tests.rewards.math_strings import fuzzed, may_be_right

CAPS = Caps(chars=4096, nesting=32, digits=400, exponent=10_000, elements=200, boxes=100)
OPTIONS = {"form": "evaluated", "percent": "lenient", "min_digits": 6}
FIND = ("boxed", "hashes", "answer_is")


def sample(completion: str, answer: Any = "3", prompt: Any = "?") -> RewardInput:
    return RewardInput(
        prompt=prompt,
        completion=completion,
        completion_tokens=(),
        finish_reason="stop",
        columns={"answer": answer},
    )


def boxed(answer: str) -> str:
    return rf"So it is \boxed{{{answer}}}."


def reward(shared: Any, **arguments: Any) -> MathReward:
    entry = RewardConfig(function="math")
    return MathReward(MathConfig(**arguments), entry=entry, name="math", shared=shared)


class OneLoop(Shared):
    """Keeps its loop, and so its sandbox, from one `run` to the next."""

    def __init__(self) -> None:
        super().__init__(SandboxConfig())
        self.runner = asyncio.Runner()

    def run(self, coroutine_function: Any) -> Any:
        return self.runner.run(coroutine_function())


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """A real sandbox, or a loud skip."""
    found = OneLoop()
    try:
        found.check_sandbox()
        result = found.run(lambda: _one_run(found, "print(1)"))
        if result.status is not Status.OK:
            pytest.skip(f"NO SANDBOX PROFILE math, math verdicts not tested: {result.detail}")
        yield found
    except SandboxUnavailable as error:
        pytest.skip(f"NO SANDBOX, math verdicts not tested: {str(error).splitlines()[0]}")
    finally:
        found.run(found.close)
        found.runner.close()


async def _one_run(shared: Shared, program: str) -> RunResult:
    box = await shared.sandbox()
    return await box.run(program, profile=PROFILE)


def judge(
    shared: Shared, pairs: Sequence[tuple[str, str]], prompt: str = "?", **arguments: Any
) -> list[float | str]:
    """The reward's value for each pair (right answer, answer in a box), or why there is none.

    What needs the sandbox goes there in one run: these texts are ours.
    """
    samples = [sample(boxed(answer), gold, prompt) for gold, answer in pairs]
    return verdicts(shared, samples, **arguments)


def verdicts(shared: Shared, samples: Sequence[RewardInput], **arguments: Any) -> list[float | str]:
    """As `judge`, for whole responses."""
    made = reward(shared, **arguments)
    decided = [made.decide(one) for one in samples]
    left = [one for one in decided if isinstance(one, tuple)]

    async def compare() -> list[Any]:
        verdicts, problem = await made._run(await shared.sandbox(), left, 60.0)
        assert verdicts is not None, problem
        return verdicts

    compared = iter(shared.run(compare) if left else [])
    found: list[float | str] = []
    for one in decided:
        if isinstance(one, Scored):
            found.append(one.value)
        elif isinstance(one, Failed):
            found.append(one.reason)
        else:
            verdict, why = next(compared)
            found.append({"right": 1.0, "wrong": 0.0}.get(verdict, why))
    return found


def scores(shared: Shared, samples: list[RewardInput], **options: Any) -> list[Any]:
    return shared.run(lambda: reward(shared).score(samples, **options))


# -- finding the answer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3}", "3"),
        (
            r"\boxed{1}; after some more thought I find that it is \boxed{\frac{1}{2}}.",
            r"\frac{1}{2}",
        ),
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"\boxed{1} \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2"),
        (r"\boxed{2} \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{4}", "4"),
        (r"a { \boxed{5} b", "5"),
        (r"\boxed{a}}\boxed{7}", "7"),
        (r"\boxed{3", None),
        (r"\boxed{3\}", None),
        (r"\boxed{1} and then it is \boxed{3", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"The answer is 5, so \boxed{}", None),
        (r"#### 4 but \boxed{3}", "3"),
        ("#### 12\n", "12"),
        ("The answer is 1. No: the answer is 1.5.", "1.5"),
        ("The answer is: **7**", "7"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_answer_is_found(text: str, answer: str | None) -> None:
    assert extract(text, FIND, CAPS)[0] == answer


def test_other_methods_in_the_order_given() -> None:
    assert extract("#### 4\n\\boxed{3}", ("hashes", "boxed"), CAPS) == ("4", "hashes")
    assert extract("first\n12 ", ("boxed", "last_line"), CAPS) == ("12", "last_line")
    assert extract("#### 4", ("boxed",), CAPS) == (None, "")


LONG = {
    "20,000 unclosed boxes": "\\boxed{" * 20_000,
    "20,000 nested boxes": "\\boxed{" * 20_000 + "}" * 20_000,
    "20,000 different boxes": "".join(f"\\boxed{{{i}}}" for i in range(20_000)),
    "boxes with words between": ("\\boxed{1}" + " and " * 7) * 10_000,
    "50,000 spaces": "\\boxed{" + " " * 50_000 + "3}",
    "2 MB": "x" * 10**6 + "\\boxed{3}" + "y " * 500_000,
    "a million braces": "{" * 10**6,
    "carets": "\\boxed{" + "^" * 4000 + "}",
    "factorials": "\\boxed{" + "1!" * 2000 + "}",
    "answer is": "answer is " * 200_000,
    "hashes": "#" * 10**6,
}


@pytest.mark.parametrize("name", LONG)
def test_long_text_takes_linear_time(name: str) -> None:
    began = time.process_time()
    answer, _ = extract(LONG[name], FIND, CAPS)
    if answer is not None:
        CAPS.problem(answer)
    assert time.process_time() - began < 2.0
    if name in ("50,000 spaces", "2 MB"):
        assert answer == "3"


@pytest.mark.parametrize(
    "answer",
    [
        *("9^{9^{9^9}}", "9^9^9", "9**9**9", "2^{99999}", "2^99999", "10^{20!}", "x^{9999!}"),
        *("((20!)!)!", "100000!", "(10!)!", "3^{9}!", r"\binom{100000}{2}", "1" * 401, "1" * 5000),
        *("(" * 33 + "1" + ")" * 33, r"\frac{1}{1+" * 300 + "1" + "}" * 300, "1," * 30_000),
        *(",".join(map(str, range(4000))), "1 & 2 " * 500, r"\def\a{1}\a", r"\input{/etc/passwd}"),
        *("3\x00", "3\ud800", "\x1b[31m3", "x" * 5000),
    ],
)
def test_beyond_a_cap_is_worth_nothing_and_is_never_sent(answer: str) -> None:
    assert CAPS.problem(answer) is not None
    assert reward(FakeShared()).decide(sample(boxed(answer), "3")) == Scored(
        value=0.0, correct=False
    )


@pytest.mark.parametrize(
    "answer",
    [
        *("2^{10}", "10!", "e^{x^{2}}", r"x^{-\frac{1}{12}}", "e^{-0.6931471}", r"\binom{10}{3}"),
        *("1" * 100, "2^{2^{n}}", "x^{3}+" * 40 + "1", "x^2+" * 40 + "1", "1,2,3,4,5,6,7,8"),
    ],
)
def test_honest_answers_are_within_the_caps(answer: str) -> None:
    assert CAPS.problem(answer) is None


# -- verdicts ------------------------------------------------------------------------------------


def test_honest_pairs_are_accepted(
    shared: Shared, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = judge(shared, RIGHT)
    rejected = [(pair, one) for pair, one in zip(RIGHT, found, strict=True) if one != 1.0]
    with capsys.disabled():
        print(
            f" [math: {len(RIGHT) - len(rejected)} of {len(RIGHT)} right pairs accepted] ", end=""
        )
    assert len(RIGHT) >= 150
    assert rejected == []


def test_answers_in_public_formats(shared: Shared) -> None:
    """As whole responses: where the answer stands is part of the format."""
    found = verdicts(shared, [sample(pair.response, pair.gold) for pair in pairs()])
    missed = [
        (pair, one) for pair, one in zip(pairs(), found, strict=True) if one != float(pair.is_right)
    ]
    assert len(found) >= 500
    assert missed == []


def test_wrong_pairs_and_hacks_are_not(shared: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    found = judge(shared, WRONG)
    rewarded = [(pair, one) for pair, one in zip(WRONG, found, strict=True) if one != 0.0]
    with capsys.disabled():
        print(f" [math: {len(WRONG) - len(rewarded)} of {len(WRONG)} wrong pairs refused] ", end="")
    assert len(WRONG) >= 150
    assert rewarded == []


def test_each_sample_gets_its_own_verdict_and_time(shared: Shared) -> None:
    found = scores(
        shared,
        [
            sample(boxed(r"\frac{6}{2}")),
            sample(boxed("4")),
            sample(boxed("3")),
            sample("no idea"),
            sample(boxed("9^{9^{9^9}}")),
            sample(boxed("3"), answer=None),
        ],
    )
    assert [getattr(one, "value", None) for one in found] == [1.0, 0.0, 1.0, 0.0, 0.0, None]
    assert [one.correct for one in found[:5]] == [True, False, True, False, False]
    assert found[0].seconds > 0 and found[1].seconds > 0


def test_a_slow_comparison_is_no_verdict(shared: Shared) -> None:
    """Within the caps, and still too much for the parser."""
    slow = "(" * 28 + "x" + ")" * 28 + "+" + "{" * 28 + "y" + "}" * 28
    (verdict,) = scores(shared, [sample(boxed(slow), "x+z")], timeout_s=0.3)
    assert isinstance(verdict, Failed)
    assert (verdict.cause, verdict.seconds is not None) == (Cause.DEADLINE, True)
    assert 0.2 < verdict.seconds < 20 and "longer than 0.3 s" in verdict.reason


def test_a_restated_expression_of_the_prompt_is_refused(shared: Shared) -> None:
    prompt = r"Expand $(x+1)^2$, or simplify $\sqrt{12}$, or find $2^{10}$ or 1/2."
    pairs = [("x^2+2x+1", "(x+1)^2"), (r"2\sqrt{3}", r"\sqrt{12}"), ("1024", "2^{10}")]
    assert judge(shared, pairs, prompt) == [0.0, 0.0, 0.0]
    assert judge(shared, pairs, "?") == [1.0, 1.0, 1.0]
    assert judge(shared, pairs, prompt, form="any") == [1.0, 1.0, 1.0]
    assert judge(shared, [("0.5", "1/2"), ("(x+1)^2", "(x+1)^2")], prompt) == [1.0, 1.0]
    assert restates("(x+1)^2", [{"role": "user", "content": prompt}], "x^2+2x+1")


@pytest.mark.parametrize(
    ("answer", "prompt", "restated"),
    [
        ("5+7", "What is 5 + 7?", True),
        ("5 + 7", "What is $5+7$?", True),
        (r"3 \cdot 4", r"Compute $3\cdot 4$.", True),
        ("5+7", "What is 5 + 7 + 3?", False),
        ("5+7", "What is 15+7?", False),
        ("x+1", "Divide by $2x+1$.", False),
        (r"\sqrt{6}", r"Rationalise $\frac{6}{\sqrt{6}}$.", False),
        (r"18^\circ", r"Angles of $118^\circ$ and $18^\circ$.", False),
        (r"\frac{1}{2}", r"Is it $\frac{1}{2}$ or $\frac{1}{3}$?", False),
        ("12", "Is it 12?", False),
        ("a+b", [{"role": "user", "content": "Is it a+b?"}], True),
        ("a+b", "", False),
    ],
)
def test_what_counts_as_restated(answer: str, prompt: Any, restated: bool) -> None:
    assert restates(answer, prompt, "0") is restated


def test_policies_can_be_chosen(shared: Shared) -> None:
    pairs = [("50\\%", "0.5"), ("50\\%", "50"), ("50", "50\\%")]
    assert judge(shared, pairs) == [1.0, 1.0, 1.0]
    assert judge(shared, pairs, percent="value") == [1.0, 0.0, 0.0]
    assert judge(shared, [("12", "5+7"), ("15", r"\sum_{k=1}^{5} k")], form="any") == [1.0, 1.0]
    assert judge(shared, [(r"\frac{1}{3}", "0.333"), (r"\pi", "3.14")], min_digits=3) == [1.0, 1.0]


def test_nothing_equals_nan_not_even_as_text() -> None:
    for text in ("nan", "NaN", r"\text{nan}", "0^0", "1/0", r"\frac{0}{0}"):
        assert not same_text(text, text)
    assert same_text(r"\left( 1, 2 \right)", "(1,2)")


# -- nothing runs --------------------------------------------------------------------------------

PAYLOAD = "__import__('os').system('echo PWNED; echo PWNED > {0}; touch {0}')"
PLACES = (
    "{}",
    r"\text{{{}}}",
    r"\pi {}",
    r"\begin{{pmatrix}} {} & 1 \\ 2 & 3 \end{{pmatrix}}",
    r"\frac{{{}}}{{2}}",
    r"\sqrt{{{}}}",
    r"x_{{{}}}",
    "{}+1",
    "({},1)",
    r"\operatorname{{{}}}(3)",
    "x={}",
    r"\{{{}\}}",
    r"f({})",
    r"2^{{{}}}",
)
OTHERS = (
    "exec('raise SystemExit')",
    "().__class__.__bases__[0].__subclasses__()",
    "lambda: 3",
    "sympify('3')",
    "Symbol('x').__class__",
    "eval('3')",
    "open('/etc/passwd').read()",
    "{%raw%}",
    "`id`",
    "; id ;",
)


def test_no_text_is_ever_run(shared: Shared, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    inside = PAYLOAD.format(f"{WORK}/canary")
    made = reward(shared)
    pairs = [("3", place.format(PAYLOAD.format(canary))) for place in PLACES]
    pairs += [("x+1", place.format(inside)) for place in PLACES]
    pairs += [("3", other) for other in OTHERS]

    async def run() -> list[RunResult]:
        box = await shared.sandbox()
        watched = WatchingBox(box)
        for pair in pairs:
            await made._run(watched, [pair], 10.0)
        return watched.results

    results = shared.run(run)
    assert len(results) == len(pairs)
    for pair, result in zip(pairs, results, strict=True):
        assert b"PWNED" not in result.stdout + result.stderr, pair
        assert b"\n---False---" in result.stderr, pair  # the file it would have left inside
        assert result.status is Status.OK, (pair, result)
        assert json.loads(result.stdout)["verdicts"][0][0] != "right", pair
    assert not canary.exists()


def test_evaluation_is_disarmed_inside_as_well(shared: Shared) -> None:
    """Should anything in there hand text to sympy after all."""
    request = {"nonce": "n", "pairs": [], "options": {**OPTIONS, "strict": False}}
    program = PROGRAM + "\nimport sympy\nprint('EVALUATED', sympy.sympify('7*6'))"

    async def run() -> RunResult:
        box = await shared.sandbox()
        files = {"checker.py": checker()}
        stdin = json.dumps(request)
        return await box.run(program, stdin=stdin, files=files, profile=PROFILE)

    result = shared.run(run)
    assert result.status is Status.NONZERO
    assert b"EVALUATED" not in result.stdout and b"never evaluated" in result.stderr


def test_the_warm_checker_can_be_imported() -> None:
    """What a warm interpreter loads before it forks; everything in it is of this package."""
    code = "import rollpacker.rewards.math.checker.warm as warm; print(len(warm.PAIRS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and int(done.stdout) > 10, done.stderr


class WatchingBox:
    """Adds to each run a last line on stderr: whether the payload's file was made inside."""

    def __init__(self, box: Any) -> None:
        self.box = box
        self.results: list[RunResult] = []

    async def run(self, program: str, **options: Any) -> RunResult:
        program += (
            "\nimport os, sys"
            f"\nprint('\\n---' + str(os.path.exists('{WORK}/canary')) + '---', file=sys.stderr)"
        )
        self.results.append(await self.box.run(program, **options))
        return self.results[-1]


def test_the_trusted_side_has_no_parser_and_evaluates_nothing() -> None:
    code = (
        "import sys, rollpacker.rewards.math.math_reward, rollpacker.rewards.math.extract\n"
        "print(sorted({'sympy', 'math_verify', 'latex2sympy2_extended'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    folder = Path(sys.modules[MathReward.__module__].__file__ or "").parent
    for name in ("math_reward.py", "extract.py", "checker/text.py", "checker/structure.py"):
        text = (folder / name).read_text()
        for word in ("sympify(", "parse_expr(", " eval(", "literal_eval", "pickle"):
            assert word not in text, (name, word)


# -- replies and failures ------------------------------------------------------------------------


class FakeBox:
    def __init__(self, result: RunResult) -> None:
        self.result = result

    async def run(self, program: str, **options: Any) -> RunResult:
        return self.result

    async def lacks(self, profile: Profile) -> str:
        return ""


class FakeShared:
    """Returns one result whatever is run."""

    def __init__(self, result: RunResult | None = None) -> None:
        self.box = FakeBox(result or RunResult(status=Status.OK))

    async def sandbox(self) -> FakeBox:
        return self.box

    def check_sandbox(self) -> None: ...

    def run(self, function: Any) -> Any:
        return asyncio.run(function())


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (Status.SANDBOX_ERROR, Cause.INFRASTRUCTURE),
        (Status.TIMEOUT, Cause.DEADLINE),
        (Status.MEMORY, Cause.SAMPLE),
        (Status.OUTPUT, Cause.SAMPLE),
        (Status.KILLED, Cause.SAMPLE),
        (Status.NONZERO, Cause.SAMPLE),
        (Status.OK, Cause.SAMPLE),
    ],
)
def test_however_the_checker_ends_it_is_no_zero(status: Status, cause: Cause) -> None:
    result = RunResult(status=status, wall_s=0.25, stdout=b"right", detail="worker 3 died")
    fake = FakeShared(result)
    (verdict,) = asyncio.run(reward(fake).score([sample(boxed("4"))]))
    assert isinstance(verdict, Failed)
    assert verdict.cause is cause
    assert verdict.seconds == 0.25


REPLY = {"nonce": "n", "verdicts": [["right", ""]]}


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"right",
        b"1",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"nonce": "n"}',
        json.dumps({**REPLY, "nonce": "m"}).encode(),
        json.dumps({**REPLY, "extra": 1}).encode(),
        json.dumps({**REPLY, "verdicts": []}).encode(),
        json.dumps({**REPLY, "verdicts": [["right", ""]] * 2}).encode(),
        json.dumps({**REPLY, "verdicts": [["Right", ""]]}).encode(),
        json.dumps({**REPLY, "verdicts": [[True, ""]]}).encode(),
        json.dumps({**REPLY, "verdicts": ["right"]}).encode(),
        json.dumps({**REPLY, "verdicts": {"0": "right"}}).encode(),
        json.dumps(REPLY).encode() + b"x",
        json.dumps(REPLY).encode() * 2,
        b"PWNED\n" + json.dumps(REPLY).encode(),
    ],
)
def test_any_other_reply_is_none(reply: bytes) -> None:
    assert parse_reply(reply, "n", 1) is None
    assert parse_reply(json.dumps(REPLY).encode(), "n", 1) == [("right", "")]


def test_the_checker_is_one_text_that_needs_nothing_of_the_package() -> None:
    text = checker()
    compile(text, "checker.py", "exec")
    assert "rollpacker" not in text.replace("docs/rewards-math.md", "")


# -- set up --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"extraction": ("box",)},
        {"extraction": ()},
        {"form": "loose"},
        {"percent": "yes"},
        {"min_digits": 0},
        {"max_digits": 0},
        {"max_failing": 2},
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=f"^reward math: {next(iter(arguments))} "):
        build_reward([RewardConfig(function="math", arguments=arguments)])


def test_right_answers_are_checked_before_training(shared: Shared) -> None:
    good = [{"answer": row["answer"]} for row in math_tasks(300, 7)]
    good += [
        {"answer": 3},
        {"answer": 2.5},
        {"answer": "work\n#### 1,234"},
        {"answer": r"\boxed{7}"},
    ]
    reward(shared).check(good)
    bad = [
        *({"answer": ""}, {"answer": None}, {"answer": "nan"}, {"answer": "9^{9^{9^9}}"}),
        *({"answer": r"\frac{1}{0}"}, {"answer": r"\frac{3}"}, {"question": "?"}),
    ]
    with pytest.raises(RewardError) as raised:
        reward(shared).check([*good, *bad])
    said = str(raised.value)
    first = len(good)
    assert f"{len(bad)} of {first + len(bad)} rows" in said
    assert all(f"row {first + i}:" in said for i in range(5)) and "and 2 more" in said
    reward(shared, max_failing=0.1).check([*good, *bad])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (RunResult(status=Status.SANDBOX_ERROR, detail="no workers"), "no workers"),
        (
            RunResult(status=Status.NONZERO, stderr=b"no module named math_verify"),
            "no module named",
        ),
    ],
)
def test_a_broken_sandbox_stops_the_check_rather_than_the_rows(
    result: RunResult, said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        reward(FakeShared(result)).check([{"answer": "3"}])


# -- tasks ---------------------------------------------------------------------------------------


def test_tasks_are_of_many_kinds_and_come_from_the_seed() -> None:
    rows = list(math_tasks(500, 3))
    assert rows == list(math_tasks(500, 3))
    assert rows != list(math_tasks(500, 4))
    assert len({row["prompt"] for row in rows}) == 500
    assert {row["kind"] for row in rows} == set(KINDS) and len(KINDS) >= 25
    assert {row["task"] for row in rows} == {"math"}
    assert not any(restates(row["answer"], row["prompt"], "") for row in rows)


@pytest.mark.parametrize("kind", ["arithmetic", "remainder", "choosing", "percentage"])
def test_answers_of_tasks_are_right_when_worked_out_again(kind: str) -> None:
    import math
    import re

    for row in math_tasks(400, 11):
        if row["kind"] != kind:
            continue
        numbers = [int(n) for n in re.findall(r"\d+", row["prompt"])]
        expected = {
            "arithmetic": lambda a, b, c: a * b - c,
            "remainder": lambda a, b: a % b,
            "choosing": lambda k, n: math.comb(n, k),
            "percentage": lambda p, w: Fraction(p * w, 100),
        }[kind](*numbers)
        assert Fraction(row["answer"].replace(r"\frac", "") or 0) == expected


# -- fuzz ----------------------------------------------------------------------------------------


def test_fuzzed_answers(shared: Shared) -> None:
    """A small share of the answers behind benchmarks/results/math_fuzz.json."""
    made = reward(shared)
    texts = list(fuzzed(300, seed=5))

    async def run() -> list[Any]:
        return await made.score([sample(text, gold) for gold, text in texts], timeout_s=1.0)

    found = shared.run(run)
    for (gold, text), verdict in zip(texts, found, strict=True):
        if isinstance(verdict, Failed):
            assert verdict.cause is not Cause.INFRASTRUCTURE, (gold, text, verdict)
            assert verdict.seconds is not None and verdict.seconds < 30.0
        elif verdict.value > 0:
            assert may_be_right(gold, text), (gold, text)
