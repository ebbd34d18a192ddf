"""Grades programs: `grade` for one answer, `CodeReward` for a run. Policy: docs/rewards-code.md.

The verdict is computed here, outside the sandbox, from the bytes that a run printed. What a test
expects never enters a sandbox that the program runs in, and how the program exits is no
evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.rewards.code.cases import AssertTest, BadTests, CallTest, IoTest, Test, read_tests
from rollpacker.rewards.code.runs import Outcome, run_test
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.sandbox.sandbox import Limits, Sandbox

if TYPE_CHECKING:
    from rollpacker.rewards.shared import Shared

logger = logging.getLogger(__name__)

MAX_PROGRAM_BYTES = 200_000
MAX_COMPLETION_CHARACTERS = 4_000_000
PYTHON = frozenset({"python", "python3", "py", "py3"})
_NAMED = 5
"""Most rows with bad tests that one error message names."""

_FENCE = re.compile(r" {0,3}(`{3,})([^`\n]*)")


def extract(completion: str) -> str | None:
    """The program in a completion; None if there is none. Only the text after the last `</think>`
    is looked at. The program is the last fenced block marked as Python, else the last fenced block,
    else the whole text. A block whose fence is not closed reaches to the end."""
    text = completion[-MAX_COMPLETION_CHARACTERS:].rpartition("</think>")[2]
    blocks = _blocks(text)
    marked = [block for language, block in blocks if language in PYTHON]
    if marked:
        program = marked[-1]
    elif blocks:
        program = blocks[-1][1]
    else:
        program = text
    program = program.removeprefix("\ufeff")
    if not program.strip() or "\0" in program:
        return None
    try:
        size = len(program.encode())
    except UnicodeEncodeError:
        return None
    return program if size <= MAX_PROGRAM_BYTES else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced code block. A fence begins its line, and is closed by a
    line of at least as many backquotes with nothing behind them."""
    blocks: list[tuple[str, str]] = []
    lines: list[str] = []
    language = fence = ""
    for line in text.split("\n"):
        found = _FENCE.fullmatch(line.rstrip())
        if not fence and found:
            fence, lines = found[1], []
            language = (found[2].split() or [""])[0].lower()
        elif fence and found and len(found[1]) >= len(fence) and not found[2].strip():
            blocks.append((language, "\n".join(lines) + "\n"))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        blocks.append((language, "\n".join(lines)))
    return blocks


async def grade(
    completion: str,
    tests: Any,
    box: Sandbox,
    *,
    limits: Limits | None = None,
    partial: bool = False,
    max_tests: int | None = None,
) -> Scored | Failed:
    """Judge the program in a completion by its tests (in any format that `cases.read_tests` knows).

    The value is 1.0 if the program passes all tests, else 0.0; running stops at the first test that
    fails. With `partial` it is the share of tests passed, and tests after one that ran out of time
    count as failed. `limits` (None: `Limits()`) apply to each single run; only the first
    `max_tests` tests are used (None: all). Nothing that the program does raises an error; for tests
    that cannot be used the result is a `Failed`.
    """
    if not isinstance(tests, _Read):
        try:
            tests = _Read(read_tests(tests))
        except BadTests as error:
            return Failed(reason=f"the tests cannot be used: {error}")
    program = extract(completion)
    if program is None:
        return Scored(value=0.0, seconds=0.0, correct=False)
    return await _graded(program, tests[:max_tests], box, limits or Limits(), partial)


class _Read(list[Test]):
    """Tests that `read_tests` has read already, so that `grade` takes them as they are."""


async def _graded(
    program: str, tests: Sequence[Test], box: Sandbox, limits: Limits, partial: bool
) -> Scored | Failed:
    passed, seconds, timed_out = 0, 0.0, False
    for number, test in enumerate(tests):
        outcome = await run_test(program, test, box, limits)
        if no_verdict := _no_verdict(outcome, number):
            return no_verdict
        passed += outcome.passed
        seconds = max(seconds, outcome.seconds)
        timed_out = outcome.timed_out
        if timed_out or not (outcome.passed or partial):
            break
    correct = passed == len(tests)
    value = passed / len(tests) if partial else float(correct)
    return Scored(value=value, seconds=seconds, correct=correct, timed_out=timed_out)


def _no_verdict(outcome: Outcome, number: int) -> Failed | None:
    if outcome.sandbox_error is not None:
        reason = f"the sandbox failed: {outcome.sandbox_error}"
        return Failed(reason=reason, cause=Cause.INFRASTRUCTURE)
    if outcome.unfit is not None:
        return Failed(reason=f"test {number} cannot be used: {outcome.unfit}")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """The `arguments` of the built-in reward `code`. Raises `ValueError` for a wrong value."""

    tests_column: str = "tests"
    """The column with the tests of the row."""
    language: str = "python"
    """Language of the programs. Only python is supported."""
    partial: bool = False
    """Whether the value is the share of tests passed. False: 1 if all tests pass, else 0."""
    reference_column: str | None = "reference_solution"
    """The column with a correct solution, for rows that have one. The solutions are run before
    training, to check the tests. None: they are not run."""
    allow_bad_tests: float = 0.0
    """Share of the reference solutions, 0 to 1, that may fail their tests."""
    max_tests: int | None = None
    """Most tests of a row that are run, from the first on. None: all."""
    memory_mb: int | None = None
    """Memory of one run in MiB. None: the sandbox's own setting."""

    def __post_init__(self) -> None:
        if self.language != "python":
            raise ValueError(f'language "{self.language}" is unknown; there is python.')
        if self.max_tests is not None and self.max_tests < 1:
            raise ValueError(f"max_tests must be at least 1, not {self.max_tests}.")
        if not 0 <= self.allow_bad_tests <= 1:
            raise ValueError("allow_bad_tests is a share of the rows, 0 to 1.")


class CodeReward:
    """The built-in reward `code` (a `RewardPart`): judges programs by the tests of their row."""

    DEADLINE = AdaptiveDeadlineConfig()
    WORKERS = os.cpu_count()

    def __init__(
        self, config: CodeConfig, *, entry: RewardConfig, name: str, shared: Shared
    ) -> None:
        """`entry`: the reward's entry in the config. `shared`: has the sandbox for the programs."""
        self.name = name
        self._config = config
        self._entry = entry
        self._shared = shared
        self._box: Sandbox | None = None
        self._has_references = False
        """Whether an earlier `check` found rows with reference solutions. Later checks, such as of
        an evaluation's rows, then accept a `reference_column` that no row has."""

    # -- before the run ----------------------------------------------------------------

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RewardError` if a row's tests cannot be used or fail the row's own reference
        solution, and `SandboxUnavailable` if this machine has no means to isolate programs."""
        self._shared.check_sandbox()
        tests, bad = {}, {}
        for number, row in enumerate(rows):
            try:
                tests[number] = self._tests_of(row)
            except BadTests as error:
                bad[number] = str(error)
        if bad:
            raise RewardError(
                f"reward {self.name}: the tests of {_counted(len(bad), len(rows))} cannot be used:"
                f" {_listed(bad)}. Mend or remove them."
            )
        column = self._config.reference_column
        known = [(n, row[column]) for n, row in enumerate(rows) if column and row.get(column)]
        asked_for = "reference_column" in self._entry.arguments
        if rows and column and asked_for and not (known or self._has_references):
            self._refuse_reference_column(column, rows)
        if known:
            self._has_references = True
            self._check_references([(n, str(solution), tests[n]) for n, solution in known])

    def _refuse_reference_column(self, column: str, rows: Sequence[Mapping[str, Any]]) -> None:
        has = list(dict.fromkeys(str(name) for row in rows for name in row))
        close = difflib.get_close_matches(column, has, n=1, cutoff=0.5)
        hint = f' Did you mean "{close[0]}"?' if close and close[0] != column else ""
        raise RewardError(
            f"reward {self.name}: no row has a reference solution in {column} (there are:"
            f" {', '.join(has) or 'none'}).{hint} Correct reference_column, or set it to null."
        )

    def _tests_of(self, row: Mapping[str, Any]) -> _Read:
        column = self._config.tests_column
        if column not in row:
            has = ", ".join(map(str, row)) or "none"
            raise BadTests(
                f"no column {self._config.tests_column} (it has: {has}); set tests_column"
            )
        tests = row[self._config.tests_column]
        if not isinstance(tests, str):
            with contextlib.suppress(TypeError, ValueError):
                tests = json.dumps(tests)  # text is read once for all responses to a prompt
        return _Read(read_tests(tests))

    def _check_references(self, known: Sequence[tuple[int, str, _Read]]) -> None:
        bad = self._shared.run(lambda: self._failing(known))
        if not bad:
            return
        what = f"the tests of {_counted(len(bad), len(known))} fail their own reference solution"
        if len(bad) <= self._config.allow_bad_tests * len(known):
            logger.warning("reward %s: %s: %s", self.name, what, _listed(bad))
            return
        raise RewardError(
            f"reward {self.name}: {what}: {_listed(bad)}. Mend or remove these rows, or set"
            f" allow_bad_tests to at least {len(bad) / len(known):.3f}."
        )

    async def _failing(self, known: Sequence[tuple[int, str, _Read]]) -> dict[int, str]:
        """Return the numbers of the rows whose reference solution fails their tests, each with the
        reason. `known`: for each row its number, the solution, and the tests."""
        box = await self._shared.sandbox()
        limits = self._limits(self._longest_s())
        left = list(reversed(known))
        bad: dict[int, str] = {}
        num_done = 0

        async def work(tell: Callable[[int], None]) -> None:
            nonlocal num_done
            while left:
                number, solution, tests = left.pop()
                if reason := await _why_wrong(
                    solution, tests[: self._config.max_tests], box, limits
                ):
                    bad[number] = reason
                num_done += 1
                tell(num_done)

        what = f"reward {self.name}: reference solutions checked"
        with self._shared.progress(what, len(known)) as tell:
            await asyncio.gather(*(work(tell) for _ in range(self._num_workers())))
        return dict(sorted(bad.items()))

    def _num_workers(self) -> int:
        workers = self._entry.workers
        return (os.cpu_count() or 1) if workers == "auto" else workers

    def _longest_s(self) -> float:
        return (self._entry.deadline or self.DEADLINE).max_s

    # -- in the run --------------------------------------------------------------------

    async def open(self) -> None:
        self._box = await self._shared.sandbox()

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        """Return one verdict for each sample. `timeout_s` limits every run of a program, in
        seconds. None: the limit is `max_s` of the reward's `deadline` setting."""
        await self.open()
        limits = self._limits(timeout_s or self._longest_s())
        return list(await asyncio.gather(*(self._score(sample, limits) for sample in samples)))

    async def _score(self, sample: RewardInput, limits: Limits) -> Scored | Failed:
        assert self._box is not None
        try:
            tests = self._tests_of(sample.columns)
        except BadTests as error:
            return Failed(reason=f"{self.name}: the tests cannot be used: {error}")
        return await grade(
            sample.completion,
            tests,
            self._box,
            limits=limits,
            partial=self._config.partial,
            max_tests=self._config.max_tests,
        )

    def _limits(self, wall_s: float) -> Limits:
        sandbox = self._shared.config
        return Limits(
            wall_s=wall_s,
            memory_bytes=(self._config.memory_mb or sandbox.memory_mb) << 20,
            disk_bytes=sandbox.disk_mb << 20,
            output_bytes=sandbox.output_kb << 10,
        )

    def outage(self) -> str | None:
        return self._shared.outage()

    async def close(self) -> None:
        """Do not use the sandbox any more. It stays open, since other rewards share it."""
        self._box = None


async def _why_wrong(
    solution: str, tests: Sequence[Test], box: Sandbox, limits: Limits
) -> str | None:
    """The reason why a reference solution fails its tests. None: it passes all."""
    program = extract(solution)
    if program is None:
        return "the reference solution is no program"
    for number, test in enumerate(tests):
        outcome = await run_test(program, test, box, limits)
        if outcome.sandbox_error is not None:
            outcome = await run_test(program, test, box, limits)
        if outcome.sandbox_error is not None:
            raise RewardError(f"the sandbox failed twice: {outcome.sandbox_error}")
        if outcome.unfit is not None:
            return f"test {number} ({_kind(test)}) cannot be used: {outcome.unfit}"
        if not outcome.passed:
            why = f"took longer than {limits.wall_s:g} s" if outcome.timed_out else "fails"
            return f"test {number} ({_kind(test)}) {why}"
    return None


def _kind(test: Test) -> str:
    return {IoTest: "io", CallTest: "call", AssertTest: "assert"}[type(test)]


def _counted(bad: int, total: int) -> str:
    return f"{bad:,} of {total:,} rows"


def _listed(bad: Mapping[int, str]) -> str:
    """Text that names the first rows of `bad` (row number to reason), grouped by reason."""
    rows: dict[str, list[str]] = {}
    for number, reason in list(bad.items())[:_NAMED]:
        rows.setdefault(reason, []).append(str(number))
    named = [
        f"{'row' if len(numbers) == 1 else 'rows'} {', '.join(numbers)}: {reason}"
        for reason, numbers in rows.items()
    ]
    more = f"; and {len(bad) - _NAMED:,} more" if len(bad) > _NAMED else ""
    return "; ".join(named) + more
