r"""The built-in reward `math`: is the final answer equal to the right one?

The answer is cut out of the response here, and its size is checked, by scanning text. What it means
is decided inside the sandbox, by `check.py`: nothing on this side parses mathematics, imports
sympy or evaluates anything. Policy, with reasons: docs/rewards-math.md.

    response -> extract -> limits -> same text? 1 : sandbox, profile "math" -> right 1, wrong 0
                no answer, beyond a limit: 0                              -> no verdict: Failed
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.imports import require
from rollpacker.rewards.math.extract import METHODS, Caps, extract, restates, same_text
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.sandbox.sandbox import Limits, Profile, RunResult, Sandbox, Status

if TYPE_CHECKING:
    from rollpacker.rewards.shared import Shared

_CHECKER = Path(__file__).with_name("checker")
_PARTS = ("text.py", "structure.py", "expressions.py", "check.py")
PROFILE = Profile(
    name="math",
    packages=("sympy", "mpmath", "latex2sympy2_extended", "math_verify", "antlr4"),
    distributions=("antlr4-python3-runtime",),
    folders=(("rollpacker.rewards.math.checker", str(_CHECKER)),),
    warm=(
        *("fcntl", "resource", "sympy", "latex2sympy2_extended", "math_verify"),
        "rollpacker.rewards.math.checker.warm",
    ),
)
"""The sandbox's profile for the checker. Interpreters of this profile have sympy, math-verify and
our own code imported already."""
_MEMORY_BYTES = 512 << 20
_OUTPUT_BYTES = 1 << 20
_BATCH = 200
"""Number of right answers that are checked in one run of the sandbox before training."""
_BATCH_S = 60.0
_SHOWN = 5

Verdict = tuple[Literal["right", "wrong", "unknown"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MathConfig:
    """The `arguments` of the built-in reward `math`. Raises `ValueError` for a wrong value."""

    answer_column: str = "answer"
    """The column with the right answer, or with a solution that ends in it."""
    extraction: Sequence[str] = ("boxed", "hashes", "answer_is")
    """Methods that look for the answer, in this order: boxed (the last `\\boxed{}`), hashes (after
    the last `####`), answer_is (after the last "answer is"), last_line."""
    form: Literal["evaluated", "any"] = "evaluated"
    """"evaluated" refuses answers that leave work which the right answer has done (an integral, a
    sum of numbers), or repeat an expression of the prompt; "any" accepts whatever is equal."""
    percent: Literal["lenient", "value"] = "lenient"
    """"lenient" accepts a missing percent sign on either side where the number is above 1; "value"
    accepts 50\\% only for 0.5."""
    min_digits: int = 6
    """Least number of significant digits with which a decimal may stand for a value that has no
    exact decimal, such as 1/3."""
    max_answer_chars: int = 4096
    """Most characters of an answer. An answer beyond this or another limit is worth 0."""
    max_nesting: int = 32
    """Largest depth of brackets in brackets, and of powers of powers."""
    max_digits: int = 400
    """Most digits of one number."""
    max_exponent: int = 10_000
    """Largest whole number in an exponent, a factorial or a binomial coefficient."""
    max_elements: int = 200
    """Most elements of a list, set or matrix."""
    max_boxes: int = 100
    """Most different boxes in a response."""
    max_failing: float = 0.0
    """Share of rows, 0 to 1, that may lack a right answer or have one that the reward cannot
    compare. With more, the run does not begin."""

    def __post_init__(self) -> None:
        unknown = [method for method in self.extraction if method not in METHODS]
        if unknown or not self.extraction:
            raise ValueError(
                f"extraction has {unknown[0] if unknown else 'nothing'};"
                f" it may have {', '.join(METHODS)}."
            )
        for key, allowed in (("form", ("evaluated", "any")), ("percent", ("lenient", "value"))):
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"{key} must be {' or '.join(allowed)}, not {getattr(self, key)!r}."
                )
        for key in ("min_digits", *(f"max_{name}" for name in _CAPS)):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{key} must be at least 1, not {value!r}.")
        if not 0 <= self.max_failing <= 1:
            raise ValueError(f"max_failing must be between 0 and 1, not {self.max_failing}.")

    @property
    def caps(self) -> Caps:
        return Caps(
            chars=self.max_answer_chars,
            nesting=self.max_nesting,
            digits=self.max_digits,
            exponent=self.max_exponent,
            elements=self.max_elements,
            boxes=self.max_boxes,
        )


_CAPS = ("answer_chars", "nesting", "digits", "exponent", "elements", "boxes")


class MathReward:
    """The built-in reward `math` (a `RewardPart`): 1 for an answer equal to the right one, else
    0."""

    DEADLINE = AdaptiveDeadlineConfig(min_s=2.0, factor=1.5, max_s=5.0)
    """Limit of one comparison, in seconds. It takes milliseconds if the answer is ordinary; the
    minimum is for a busy machine, the maximum for an answer that keeps the parser busy."""
    WORKERS: int | None = os.cpu_count() or 1

    def __init__(
        self, config: MathConfig, *, entry: RewardConfig, name: str, shared: Shared
    ) -> None:
        """`entry`: the reward's config. `shared`: holds the sandbox that compares answers."""
        self.name = name
        self._config = config
        self._caps = config.caps
        self._shared = shared
        self._timeout_s = (entry.deadline or self.DEADLINE).max_s

    # -- before training -----------------------------------------------------------------

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RewardError` if more than `max_failing` of the rows have no right answer, or one
        that exceeds a size limit or that the checker does not find equal to itself."""
        self._shared.check_sandbox()
        problems: dict[int, str] = {}
        readable: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            gold, problem = self._gold(row)
            if problem is not None:
                problems[index] = problem
            else:
                readable.setdefault(gold, []).append(index)
        if readable:
            for gold, problem in self._shared.run(lambda: self._unusable(list(readable))):
                problems.update(dict.fromkeys(readable[gold], problem))
        if len(problems) > self._config.max_failing * len(rows):
            raise RewardError(self._report(problems, rows))

    def _gold(self, row: Mapping[str, Any]) -> tuple[str, str | None]:
        """The right answer of a row, and a problem with it in words (None: there is none)."""
        if self._config.answer_column not in row:
            columns = ", ".join(map(str, row)) or "none"
            return "", f"no column {self._config.answer_column} (there are: {columns})"
        value = row[self._config.answer_column]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return "", f"{self._config.answer_column} is {type(value).__name__}, not text"
        gold = self._expected(row)
        if not gold:
            return "", "no right answer"
        return gold, self._caps.problem(gold)

    def _expected(self, columns: Mapping[str, Any]) -> str:
        value = columns.get(self._config.answer_column)
        text = "" if value is None else str(value)
        found, _ = extract(text, ("boxed", "hashes"), self._caps)
        return text.strip() if found is None else found

    async def _unusable(self, golds: list[str]) -> list[tuple[str, str]]:
        """The right answers that the checker does not find equal to themselves, each with the
        reason. Raises `RewardError` if the checker does not work at all."""
        box = await self._sandbox()
        verdicts, problem = await self._run(box, [("x+1", "1+x")], _BATCH_S)
        if verdicts is None:
            raise RewardError(
                f"reward {self.name}: no right answer was checked, since the sandbox cannot compare"
                f" x+1 with 1+x: {problem.reason}."
            )
        batches = [golds[i : i + _BATCH] for i in range(0, len(golds), _BATCH)]
        found = await asyncio.gather(*(self._judge_golds(box, batch) for batch in batches))
        return [problem for batch in found for problem in batch]

    async def _judge_golds(self, box: Sandbox, golds: list[str]) -> list[tuple[str, str]]:
        """Check right answers in one run of the sandbox, which is safe since they are trusted.
        Returns those that the checker does not find equal to themselves, each with the reason. If
        the run fails, each half is checked alone, to find the culprit."""
        verdicts, problem = await self._run(
            box, [(gold, gold) for gold in golds], _BATCH_S, strict=True
        )
        if verdicts is not None:
            return [
                (gold, f"{gold[:60]!r} does not equal itself: {why}")
                for gold, (verdict, why) in zip(golds, verdicts, strict=True)
                if verdict != "right"
            ]
        if problem.cause is Cause.INFRASTRUCTURE:
            raise RewardError(f"reward {self.name}: right answers not checked: {problem.reason}")
        if len(golds) == 1:
            return [(golds[0], f"{golds[0][:60]!r}: {problem.reason}")]
        half = len(golds) // 2
        return [
            *await self._judge_golds(box, golds[:half]),
            *await self._judge_golds(box, golds[half:]),
        ]

    def _report(self, problems: Mapping[int, str], rows: Sequence[Mapping[str, Any]]) -> str:
        shown = [f"  row {index}: {problems[index]}" for index in sorted(problems)[:_SHOWN]]
        if len(problems) > _SHOWN:
            shown.append(f"  and {len(problems) - _SHOWN} more")
        return (
            f"reward {self.name}: {len(problems)} of {len(rows)} rows have no right answer that can"
            " be checked:\n" + "\n".join(shown) + "\nCorrect or drop these rows, name the column"
            " with answer_column, or allow a share of them with max_failing."
        )

    # -- scoring -------------------------------------------------------------------------

    async def open(self) -> None:
        await self._sandbox()

    async def _sandbox(self) -> Sandbox:
        """The sandbox, checked to be able to compare answers. Raises `RewardError` if it is not."""
        box = await self._shared.sandbox()
        if lacking := await box.lacks(PROFILE):
            if self._shared.config.url is None:  # the sandbox has this interpreter's packages
                require("math_verify", extra="math", what=f"the reward {self.name}")
            raise RewardError(f"reward {self.name}: {lacking}.")
        return box

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        limit = self._timeout_s if timeout_s is None else timeout_s
        return list(await asyncio.gather(*(self._score_one(sample, limit) for sample in samples)))

    async def _score_one(self, sample: RewardInput, timeout_s: float) -> Scored | Failed:
        decided = self.decide(sample)
        return await self._ask(*decided, timeout_s) if isinstance(decided, tuple) else decided

    def decide(self, sample: RewardInput) -> Scored | Failed | tuple[str, str]:
        """Return the verdict on a sample where text alone decides it; else the pair (right answer,
        the sample's answer), which the checker must compare."""
        gold = self._expected(sample.columns)
        if not gold or self._caps.problem(gold):
            return Failed(reason=f"{self.name}: the row has no right answer that can be checked")
        answer, _ = extract(sample.completion, self._config.extraction, self._caps)
        if answer is None or self._caps.problem(answer):
            return _scored(False, None)
        if same_text(gold, answer):
            return _scored(True, 0.0)
        if self._config.form == "evaluated" and restates(answer, sample.prompt, gold):
            return _scored(False, None)
        return gold, answer

    async def _ask(self, gold: str, answer: str, timeout_s: float) -> Scored | Failed:
        """Compare one answer in a run of its own, so that it cannot affect another verdict."""
        box = await self._shared.sandbox()
        verdicts, problem = await self._run(box, [(gold, answer)], timeout_s)
        if verdicts is None:
            return problem
        verdict, why = verdicts[0]
        if verdict == "unknown":
            return Failed(reason=f"{self.name}: {why}", seconds=problem.seconds)
        return _scored(verdict == "right", problem.seconds)

    async def _run(
        self, box: Sandbox, pairs: list[tuple[str, str]], timeout_s: float, *, strict: bool = False
    ) -> tuple[list[Verdict] | None, Failed]:
        """Run the checker on these pairs of right answer and answer. Returns the verdicts, or None
        if there are none; and a `Failed` with the reason for that (else empty) and the run's
        duration. `strict`: see `Comparison`."""
        nonce = secrets.token_hex(16)
        options = {
            "form": self._config.form,
            "percent": self._config.percent,
            "min_digits": self._config.min_digits,
            "strict": strict,
        }
        request = {"nonce": nonce, "pairs": pairs, "options": options}
        limits = Limits(
            wall_s=timeout_s,
            memory_bytes=_MEMORY_BYTES,
            output_bytes=_OUTPUT_BYTES,
            disk_bytes=1 << 20,
            max_files=16,
        )
        stdin = json.dumps(request).encode()
        files = {"checker.py": checker()}
        result = await box.run(PROGRAM, stdin=stdin, files=files, limits=limits, profile=PROFILE)
        if result.status is Status.OK:
            verdicts = parse_reply(result.stdout, nonce, len(pairs))
            if verdicts is not None:
                return verdicts, Failed(reason="", seconds=result.wall_s)
        return None, self._failure(result, timeout_s)

    def _failure(self, result: RunResult, timeout_s: float) -> Failed:
        """The failure of a run of the checker that gave no readable reply. An answer is never wrong
        for how the run ended, since the program is ours."""
        match result.status:
            case Status.SANDBOX_ERROR:
                cause, why = Cause.INFRASTRUCTURE, f"the sandbox failed: {result.detail}"
            case Status.TIMEOUT:
                cause, why = Cause.DEADLINE, f"took longer than {timeout_s:g} s"
            case Status.MEMORY:
                cause, why = Cause.SAMPLE, f"needed more than {_MEMORY_BYTES >> 20} MB"
            case _:
                said = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
                why = f"the checker ended without a verdict ({result.status}) {_printable(said)}"
                cause = Cause.SAMPLE
        return Failed(reason=f"{self.name}: {why}", cause=cause, seconds=result.wall_s)

    def outage(self) -> str | None:
        return self._shared.outage()

    async def close(self) -> None:
        """Do nothing: the sandbox is shared with other rewards, and closed by its owner."""


def _scored(right: bool, seconds: float | None) -> Scored:
    return Scored(value=float(right), seconds=seconds, correct=right)


PROGRAM = """\
try:
    from rollpacker.rewards.math.checker.check import main
except ImportError:
    with open("checker.py", encoding="utf-8") as file:
        exec(compile(file.read(), "checker.py", "exec"))
main()
"""
"""The program that runs in the sandbox. An interpreter that was started in advance has the checker
imported already; any other executes the checker's file, which is put beside the program."""


@cache
def checker() -> str:
    """The source of the checker program as one file, to be sent into the sandbox: its modules
    joined, without imports of each other."""
    text = "\n\n".join((_CHECKER / part).read_text(encoding="utf-8") for part in _PARTS)
    text = re.sub(r"^from rollpacker\.[^\n]*import (?:\([^)]*\)|[^\n(]*)\n", "", text, flags=re.M)
    future = "from __future__ import annotations\n"
    return future + text.replace(future, "")


def parse_reply(stdout: bytes, nonce: str, count: int) -> list[Verdict] | None:
    """The verdicts in the checker's reply. None for anything but exactly the object that it writes.
    The checker repeats the nonce that it got by stdin, so that no other output is taken for its
    reply. Code that ran inside the checker could read the nonce; but nothing there evaluates
    text."""
    try:
        reply = json.loads(stdout.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or set(reply) != {"nonce", "verdicts"}:
        return None
    verdicts = reply["verdicts"]
    if reply["nonce"] != nonce or not isinstance(verdicts, list) or len(verdicts) != count:
        return None
    if not all(_is_verdict(verdict) for verdict in verdicts):
        return None
    return [(verdict, _printable(why)) for verdict, why in verdicts]


def _is_verdict(verdict: Any) -> bool:
    return (
        isinstance(verdict, list)
        and len(verdict) == 2
        and verdict[0] in ("right", "wrong", "unknown")
        and isinstance(verdict[1], str)
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[:200])
