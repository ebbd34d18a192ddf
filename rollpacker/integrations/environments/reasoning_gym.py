"""Tasks of reasoning-gym in two turns: `reasoning-gym:chain_sum`. If the model's answer is wrong,
it gets a hint and answers again.

The reward comes at the end: the task's score of the first answer if that is right, else the score
of the second answer times `second_weight`. Arguments: `hint` (a text, in which `{answer}`,
`{first}` and `{length}` stand for the right answer, its first character and its number of
characters), `second_weight` (0.5), `right_at` (the score from which an answer is right: 1),
`answer_regex`, `allow_evaluation` (as in the reward `reasoning_gym`), `instructions` (after the
question), `system_prompt`, `num_rows`, `seed` of the rows, and the options of the task.

Rows of data of kind `reasoning_gym` can be used, too; each of them names its own task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.data.dataset import DatasetConfig, TaskConfig
from rollpacker.data.procedural import create_task, make_rows
from rollpacker.environments.environment import Message
from rollpacker.imports import require
from rollpacker.integrations.environments.messages import (
    AdapterError,
    OwnArguments,
    opening,
    said,
    text_of,
)
from rollpacker.rewards.reasoning_gym import ReasoningGymConfig, ReasoningGymScorer
from rollpacker.rewards.reward import RewardError

HINT = "That is not right. The answer has {length} characters and begins with {first}. Try again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The adapter's own arguments, which the module's docstring describes."""

    hint: str = HINT
    second_weight: float = 0.5
    right_at: float = 1.0
    instructions: str | None = None
    system_prompt: str | None = None

    def hint_for(self, answer: str) -> str:
        return self.hint.format(answer=answer, first=answer[:1], length=len(answer))


def factory(name: str, arguments: dict[str, Any]) -> Callable[[], ReasoningGymEnvironment]:
    settings, scoring, _, options = _split(name, arguments)
    create_task(name, options, 1, 0)
    scorer = ReasoningGymScorer(scoring)
    try:
        scorer.of(name, options)
    except RewardError as error:
        raise AdapterError(str(error)) from None
    return lambda: ReasoningGymEnvironment(scorer, settings)


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    _, _, (number, seed), options = _split(name, arguments)
    task = TaskConfig(task=name, options=options)
    config = DatasetConfig(kind="reasoning_gym", tasks=(task,), size=number, seed=seed)
    return [dict(row.columns) for row in make_rows(config, "train")]


class ReasoningGymEnvironment:
    """One episode: a question, and at most two answers to it."""

    deterministic = True

    def __init__(self, scorer: ReasoningGymScorer, settings: Settings) -> None:
        self._scorer = scorer
        self._settings = settings
        self._row: Mapping[str, Any] = {}
        self._is_second = False

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        self._row = row
        of = self._settings
        return opening(str(row["question"]), of.instructions, system_prompt=of.system_prompt)

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        columns = ("question", "answer", "metadata", "task", "task_options")
        one = {column: [self._row[column]] for column in columns}
        score = self._scorer([text_of(message)], ["stop"], **one)[0]
        if self._is_second:
            return [], self._settings.second_weight * score, True
        if score >= self._settings.right_at:
            return [], score, True
        self._is_second = True
        return said(self._settings.hint_for(str(self._row["answer"]))), None, False


def _split(
    name: str, arguments: dict[str, Any]
) -> tuple[Settings, ReasoningGymConfig, tuple[int, int], dict[str, Any]]:
    """Split the config's arguments. Returns the adapter's settings, the config of the reward that
    scores answers, the number and the seed of the rows, and the options of the task."""
    require("reasoning_gym", extra="gym", what="an environment of reasoning-gym")
    own = OwnArguments(f"reasoning-gym:{name}", arguments)
    settings = Settings(
        hint=own.take("hint", HINT, str),
        second_weight=float(own.take("second_weight", 0.5, int, float)),
        right_at=float(own.take("right_at", 1.0, int, float)),
        instructions=own.take("instructions", None, str),
        system_prompt=own.take("system_prompt", None, str),
    )
    scoring = ReasoningGymConfig(
        answer_regex=own.take("answer_regex", None, str),
        allow_evaluation=own.take("allow_evaluation", False, bool),
    )
    number, seed = own.take_num_rows(), own.take("seed", 0, int)
    try:
        settings.hint_for("7")
    except (KeyError, IndexError, ValueError) as error:
        raise AdapterError(
            f"reasoning-gym:{name}: hint has {error}, which stands for nothing; {{answer}},"
            " {first} and {length} do. Write {{ and }} for braces."
        ) from None
    return settings, scoring, (number, seed), arguments
