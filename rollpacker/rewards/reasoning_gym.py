"""The built-in reward `reasoning_gym`: each row is judged by the scorer of its own task.

Some tasks' scorers *evaluate* the answer as Python. A model's output must not be trusted with that,
so these tasks are refused unless the config allows them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.imports import require
from rollpacker.rewards.reward import RewardError

_EVALUATING = {"eval", "exec", "parse_expr", "sympify", "simplify"}
_SOUND = {"number_sorting"}
"""Tasks whose scorers call `eval` or the like, but on the row's right answer alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymConfig:
    """The reward `reasoning_gym`'s `arguments`. Raises `ValueError` for a wrong value."""

    answer_regex: str | None = None
    """Regular expression that finds the answer in the completion: its last match that is not empty,
    or this match's first group. Without a match the value is 0. None: it is the whole
    completion."""
    require_stop: bool = False
    """Whether a response that was cut off by a limit scores 0."""
    allow_evaluation: bool = False
    """Whether to accept tasks whose scorers run the model's answer as code."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.answer_regex or "")
        except (re.error, TypeError) as error:
            raise ValueError(
                f"answer_regex {self.answer_regex!r} is no regular expression: {error}."
            ) from None

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise `RewardError` for a row whose task cannot be scored."""
        scorer = ReasoningGymScorer(self)
        tasks = {(row["task"], json.dumps(row["task_options"], default=str)): row for row in rows}
        for row in tasks.values():
            scorer.of(row["task"], row["task_options"])


def make(**arguments: Any) -> ReasoningGymScorer:
    """Make the scorer from the reward's `arguments`. Called in the worker process."""
    return ReasoningGymScorer(ReasoningGymConfig(**arguments))


class ReasoningGymScorer:
    """Scores completions of rows from a data source of `kind: reasoning_gym`."""

    __name__ = "reasoning_gym"

    def __init__(self, config: ReasoningGymConfig) -> None:
        regex = config.answer_regex
        self._config = config
        self._pattern = None if regex is None else re.compile(regex)
        self._scorers: dict[tuple[str, str], Any] = {}

    def __call__(
        self,
        completions: Sequence[Any],
        finish_reasons: Sequence[str],
        question: Sequence[str],
        answer: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        task: Sequence[str],
        task_options: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        entries = [
            {"question": asked, "answer": right, "metadata": more}
            for asked, right, more in zip(question, answer, metadata, strict=True)
        ]
        scorers = map(self.of, task, task_options)
        rows = zip(scorers, completions, finish_reasons, entries, strict=True)
        return [self._score(*row) for row in rows]

    def _score(
        self, scorer: Any, completion: Any, finish_reason: str, entry: Mapping[str, Any]
    ) -> float:
        if self._config.require_stop and finish_reason != "stop":
            return 0.0
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = self._answer(text)
        return 0.0 if found is None else float(scorer.score_answer(found, entry))

    def _answer(self, text: str) -> str | None:
        if self._pattern is None:
            return text.strip()
        group = 1 if self._pattern.groups else 0
        found = [match.group(group) or "" for match in self._pattern.finditer(text)]
        return next((answer.strip() for answer in reversed(found) if answer.strip()), None)

    def of(self, task: str, options: Mapping[str, Any]) -> Any:
        """Return the scorer of a task with these options of the task (`task_options`). Raises
        `RewardError` if the scorer runs answers as code and `allow_evaluation` is False."""
        key = (task, json.dumps(options, sort_keys=True, default=str))
        if key not in self._scorers:
            require("reasoning_gym", extra="gym", what="the reward reasoning_gym")
            import reasoning_gym

            dataset = reasoning_gym.create_dataset(task, size=1, seed=0, **options)
            if not self._config.allow_evaluation and evaluates_answers(dataset, task):
                raise RewardError(
                    f"reasoning_gym: the scorer of task {task} runs the model's answer as Python"
                    " code, which can do anything that you can. Leave the task out, or accept that"
                    " with the reward's argument allow_evaluation=true."
                )
            self._scorers[key] = dataset
        return self._scorers[key]


def evaluates_answers(dataset: Any, task: str) -> bool:
    """Whether the source of the scorer of this task calls `eval` or another function that runs text
    as code. Tasks in `_SOUND` are excepted."""
    if task in _SOUND:
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(dataset).score_answer)))
    called = {
        node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    return bool(called & _EVALUATING)
