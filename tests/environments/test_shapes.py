"""Environments of every shape, and the mistakes in them."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollpacker.environments.environment import (
    Answered,
    Begun,
    EnvironmentConfig,
    EnvironmentSetupError,
    Lost,
)
from rollpacker.environments.shapes import reset_arguments, stepped
from rollpacker.environments.supervised import SupervisedEnvironments
from tests.environments.playing import (
    answered,
    begun,
    calling,
    episode,
    lost_by,
    of_class,
    played,
    said,
)

GUESS = """
    import random

    class Env:
        deterministic = True

        def __init__(self, most=10):
            self.most = most

        def reset(self, row):
            self.number = random.Random(row["seed"]).randint(1, self.most)
            return [{"role": "user", "content": f"1 to {self.most}, from {row.get('by')}"}]

        def step(self, message):
            guess = int(message["content"])
            if guess == self.number:
                return [], 1.0, True
            return "higher" if guess < self.number else "lower", 0, False
"""
ASYNC = GUESS.replace("    def reset", "    async def reset").replace(
    "    def step", "    async def step"
)
GYMNASIUM = """
    class Env:
        def reset(self, *, seed=None, options=None):
            self.left = 2
            return f"seed {seed} of {options['by']}", {}

        def step(self, action):
            self.left -= 1
            return f"you said {action}", 0.5, False, self.left == 0, {"left": self.left}
"""
TRL = '''
    class Env:
        def reset(self, **kwargs):
            self.counter = kwargs["start"]
            return f" The counter is {self.counter}."

        def increment(self, step: int) -> int:
            """Count.

            Args:
                step: By how much.
            """
            self.counter += step
            return self.counter

        async def look(self) -> int:
            """Look at the counter."""
            return self.counter

        def get_reward(self):
            return self.counter / 10

        def _private(self): ...
'''


async def won(those: SupervisedEnvironments) -> list[Answered]:
    await begun(those)
    found = []
    for guess in range(1, 11):
        found.append(await answered(those, guess, said(str(guess))))
        if found[-1].done:
            break
    return found


@pytest.mark.parametrize("source", [GUESS, ASYNC])
def test_an_environment_of_ours(tmp_path: Path, source: str) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        assert those.begins
        assert those.is_deterministic
        assert those.tools == ()
        first = await those.begin(episode(), {"by": "me"}, seed=7)
        assert isinstance(first, Begun)
        assert first.messages == ({"role": "user", "content": "1 to 10, from me"},)
        turns = await won(those)
        *wrong, right = turns
        assert [one.messages[0]["content"] for one in wrong] == ["higher"] * len(wrong)
        assert all(one.reward == 0 and not one.done for one in wrong)
        assert (right.reward, right.done, right.messages) == (1.0, True, ())
        assert [one.reward for one in await again(those, 7)] == [one.reward for one in turns]
        lengths = {len(await again(those, seed)) for seed in range(20)}
        assert len(lengths) > 1

    async def again(those: SupervisedEnvironments, seed: int) -> list[Answered]:
        those.end(episode())
        await those.begin(episode(), {}, seed=seed)
        return await won(those)

    played(of_class(tmp_path, source), play)


def test_the_seed_of_a_row_is_its_own(tmp_path: Path) -> None:
    source = """
        class Env:
            def reset(self, row):
                return str(row["seed"])
            def step(self, message):
                return "", None, True
    """

    async def play(those: SupervisedEnvironments) -> list[Any]:
        one, two = await begun(those, 1), await begun(those, 2, seed=9)
        return [begin.messages[0]["content"] for begin in (one, two) if begin.messages]

    assert played(of_class(tmp_path, source), play) == ["7", "9"]


def test_an_environment_of_gymnasium(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        begin = await begun(those, by="me")
        assert begin.messages == ({"role": "user", "content": "seed 7 of me"},)
        first = await answered(those, 1, said("left"))
        assert first.messages == ({"role": "user", "content": "you said left"},)
        assert (first.reward, first.done) == (0.5, False)
        second = await answered(those, 2, said("right"))
        assert (second.done, second.truncated) == (True, True)

    played(of_class(tmp_path, GYMNASIUM), play)


def test_an_environment_of_trl(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        names = [tool["function"]["name"] for tool in those.tools]
        assert sorted(names) == ["increment", "look"]
        prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Count!"}]
        begin = await begun(those, start=3, prompt=prompt)
        assert begin.messages == (
            prompt[0],
            {"role": "user", "content": "Count! The counter is 3."},
        )
        assert begin.tools is None  # those that the model was told of before
        calls = calling(("increment", {"step": 4}), ("look", {}))
        answer = await answered(those, 1, calls)
        assert [one["content"] for one in answer.messages] == ["7", "7"]
        last = await answered(those, 2, said("7"))
        assert (last.done, last.reward) == (True, 0.7)

    played(of_class(tmp_path, TRL), play)


def test_an_environment_of_trl_that_leaves_the_prompt_to_the_row(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        begin = await begun(those, start=3, prompt="Count!")
        assert begin.messages is None and begin.tools is None

    source = TRL.replace('return f" The counter is {self.counter}."', "return None")
    assert source != TRL
    played(of_class(tmp_path, source), play)


TOLD = """
    class Env:
        def __init__(self):
            self.tools = []

        def reset(self, row):
            self.tools.append({"type": "function", "function": {"name": "f"}})
            return "Begin."

        def step(self, message):
            return [], 1.0, True
"""


def test_tools_that_reset_adds_are_told_of_and_others_are_a_lost_episode(tmp_path: Path) -> None:
    async def told(those: SupervisedEnvironments) -> None:
        assert [one["function"]["name"] for one in (await begun(those)).tools or ()] == ["f"]

    played(of_class(tmp_path, TOLD), told)

    async def refused(those: SupervisedEnvironments) -> None:
        lost = await those.begin(episode(), {}, seed=7)
        assert isinstance(lost, Lost) and "has tools of another shape" in lost.reason

    other = TOLD.replace('"function": {"name": "f"}', '"name": "f"')
    assert other != TOLD
    played(of_class(tmp_path, other), refused)


def test_an_environment_with_schemas_and_arguments_of_a_factory(tmp_path: Path) -> None:
    source = """
        class Guess:
            def __init__(self, most):
                self.most = most
                self.tools = [{"type": "function", "function": {"name": "guess"}}]
            def reset(self):
                return None
            def step(self, message):
                return {"role": "tool", "content": str(self.most)}, None, False
            def close(self):
                print("closed")

        def make(most=3):
            return Guess(most)
    """
    config = of_class(tmp_path, source, "make", arguments={"most": 5})

    async def play(those: SupervisedEnvironments) -> None:
        assert those.tools[0]["function"]["name"] == "guess"
        assert (await begun(those)).messages is None
        answer = await answered(those, 1, said("x"))
        assert answer.messages == ({"role": "tool", "content": "5"},)
        assert answer.reward is None

    played(config, play)


CLASS = """
    class Env:
        def reset(self, row):
            {reset}
        def step(self, message):
            {step}
"""


@pytest.mark.parametrize(
    ("reset", "step", "reason"),
    [
        ("raise ValueError('no board')", "", "Env raised ValueError: no board"),
        ("raise SystemExit(2)", "", "Env raised Exited: SystemExit: 2"),
        ("return 5", "", "Env said int, which is neither text nor messages"),
        ("return []", "", "Env returned no message; None means"),
        ("return [{'content': 'x'}]", "", "Env said a dict where a message with a role belongs"),
        ("return [{'role': 'user', 'content': 5}]", "", "Env said a message whose content is int"),
        ("return [{'role': 'user', 'x': {1}}]", "", "Env said what is not plain values: TypeError"),
        ("return 'x' * 5_000_000", "", "Env said 5000"),
        ("return 'x'", "raise KeyError('k')", "Env raised KeyError: 'k'"),
        ("return 'x'", "return 1.0", "Env returned float, not (messages, reward, done)"),
        ("return 'x'", "return 'y', 1.0", "Env returned a tuple of 2, not (messages"),
        ("return 'x'", "return 'y', 'z', False", "Env returned a reward that is no number: str"),
        ("return 'x'", "return 'y', float('nan'), False", "Env returned a reward that is no numb"),
        ("return 'x'", "return [], 1.0, False", "Env returned no message although the episode"),
        ("return 'x'", "return 'y', True, 0.25", "Env returned 0.25 for done, which is neither"),
        ("return 'x'", "return 'y', 0.5, {}", "Env returned dict for done, which is neither True"),
        ("return 'x'", "return 'y', 0.5, 'False'", "Env returned 'False' for done, which is"),
        ("return 'x'", "return 'y', True, 1", "Env returned True for the reward and 1 for done"),
        ("return 'x'", "return 'y', 0.5, True, {}, {}", "Env returned dict for truncated, which"),
        ("return 'x'", "return 'y', 0.5, 2, True, {}", "Env returned 2 for terminated, which is"),
        ("return 'x'", "raise StopIteration(1)", "Env raised RuntimeError: StopIteration: 1"),
    ],
)
def test_what_an_environment_does_wrong_is_no_zero(
    tmp_path: Path, reset: str, step: str, reason: str
) -> None:
    source = CLASS.format(reset=reset, step=step or "pass")
    for text in (
        source,
        source.replace("def reset", "async def reset").replace("def step", "async def step"),
    ):
        lost = lost_by(of_class(tmp_path, text))
        assert lost.cause == "environment"
        if "StopIteration" not in text:  # which Python itself renames in a coroutine
            assert lost.reason.startswith(reason)


@pytest.mark.parametrize(
    ("returned", "reward", "done"),
    [
        (("y", 1, 0), 1.0, False),
        (("y", True, False), 1.0, False),
        (("y", np.float32(0.5), np.bool_(True)), 0.5, True),
        (("y", np.bool_(True), np.True_), 1.0, True),
        (("y", 0.5, np.int64(1)), 0.5, True),
        (("y", None, False, np.bool_(True), {}), None, True),
    ],
)
def test_what_counts_as_over(returned: tuple[Any, ...], reward: float | None, done: bool) -> None:
    found = stepped(returned)
    assert (found.reward, found.done) == (reward, done)


def test_a_column_that_reset_names_must_be_there(tmp_path: Path) -> None:
    source = CLASS.format(reset="return 'x'", step="return '', 0, True")
    config = of_class(tmp_path, source.replace("self, row", "self, question, level=1"))
    lost = lost_by(config, answer=3)
    assert lost.cause == "environment"
    assert lost.reason == "Env needs the column question; the row has: seed, answer"


def test_a_package_without_a_name_is_told_as_one() -> None:
    with pytest.raises(EnvironmentSetupError, match='"program:" names no command'):
        SupervisedEnvironments(EnvironmentConfig(function="program:"))


def test_a_column_called_options_is_a_column() -> None:
    def reset(options: Any) -> None: ...
    def gymnasium(*, seed: Any = None, options: Any = None) -> None: ...

    row = {"seed": 7, "options": ["a", "b"]}
    assert reset_arguments(reset, row) == ((), {"options": ["a", "b"]})
    assert reset_arguments(reset, {"seed": 7}) == ((), {"options": {"seed": 7}})
    assert reset_arguments(gymnasium, row) == ((), {"seed": 7, "options": row})


def test_what_is_wrong_is_told_once_with_the_users_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = CLASS.format(reset="raise ValueError(str(row['seed']))", step="pass")

    async def play(those: SupervisedEnvironments) -> None:
        for number in range(3):
            assert isinstance(await those.begin(episode(number), {}, seed=number), Lost)

    with caplog.at_level(logging.WARNING):
        played(of_class(tmp_path, source), play)
    (record,) = (one for one in caplog.records if "raised ValueError" in one.getMessage())
    assert "raise ValueError(str(row['seed']))" in record.getMessage()
    assert "rollpacker/environments" not in record.getMessage()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Env: ...", "a Env has no method reset"),
        ("class Env:\n    def reset(self): ...", "neither a method step nor any that could be"),
        (
            "class Env:\n    def reset(self): ...\n    def step(self): ...",
            "its step takes nothing, not one message",
        ),
        (
            "class Env:\n    def reset(self): ...\n    def step(self, a, b): ...",
            "its step takes a, b, not one message",
        ),
        (
            "class Env:\n    def __init__(self, size): ...\n    def reset(self): ...",
            "making one raised TypeError: ",
        ),
        (
            "class Env:\n    def __init__(self): 1 / 0\n    def reset(self): ...",
            "making one raised ZeroDivisionError",
        ),
        (
            'class Env:\n    def reset(self): ...\n    def go(self, x):\n        """Go."""',
            'go: its parameter "x" has no type hint',
        ),
        ("class Other: ...", "has no Env."),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as raised:
        SupervisedEnvironments(of_class(tmp_path, source))
    assert message in str(raised.value)
    assert str(raised.value).count("\n") == 0
