"""Tools: what the model is told of them, and what comes of its calls."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rollpacker.environments.environment import EnvironmentConfig, EnvironmentSetupError
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.imports import giving
from tests.environments.playing import answers, calling, content, of_tools, played, said

SUMS = '''
    import asyncio

    def add(a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    async def add_later(a: int) -> dict:
        """Add one, later.

        Args:
            a: The number.
        """
        await asyncio.sleep(0.01)
        return {"sum": a + 1, "of": [a, "ä"]}

    def fails(why: str) -> str:
        """Fail.

        Args:
            why: What is said.
        """
        raise ValueError(why)

    def leaves() -> str:
        """Leave."""
        raise SystemExit(3)

    def says(count: int) -> str:
        """Say much.

        Args:
            count: How many characters.
        """
        print("so many:", count)
        return "x" * count
'''


def test_schemas_are_made_of_hints_and_docstrings(tmp_path: Path) -> None:
    config = of_tools(tmp_path, SUMS, "add", "add_later")

    async def look(those: SupervisedEnvironments) -> Any:
        assert not those.begins
        assert not those.is_deterministic
        return those.tools

    add, later = played(config, look)
    assert add["type"] == "function"
    assert add["function"]["name"] == "add"
    assert add["function"]["description"] == "Add two numbers."
    parameters = add["function"]["parameters"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert parameters["required"] == ["a"]
    assert later["function"]["name"] == "add_later"


def test_each_call_of_a_message_is_answered_in_order(tmp_path: Path) -> None:
    config = of_tools(tmp_path, SUMS, "add", "add_later")
    message = calling(("add", {"a": 2, "b": 3}), ("add_later", '{"a": 4}'), ("add", {"a": 1}))
    answer = answers(config, message)
    assert answer.messages == (
        {"role": "tool", "name": "add", "tool_call_id": "call0", "content": "5"},
        {
            **{"role": "tool", "name": "add_later", "tool_call_id": "call1"},
            "content": '{"sum": 5, "of": [4, "ä"]}',
        },
        {"role": "tool", "name": "add", "tool_call_id": "call2", "content": "2"},
    )
    assert [(call.tool, call.is_well) for call in answer.calls] == [
        ("add", True),
        ("add_later", True),
        ("add", True),
    ]
    assert answer.calls[1].seconds is not None and answer.calls[1].seconds >= 0.01
    assert not answer.done
    assert answer.reward is None
    assert answer.metrics == {"tools/calls": 3, "tools/failed": 0, "tools/malformed": 0}


def test_a_message_without_calls_ends_the_episode(tmp_path: Path) -> None:
    answer = answers(of_tools(tmp_path, SUMS, "add"), said("5"))
    assert answer.done
    assert answer.messages == ()


@pytest.mark.parametrize(
    ("name", "arguments", "told", "ran"),
    [
        ("fails", {"why": "no such page"}, "Error: ValueError: no such page", True),
        ("leaves", {}, "Error: Exited: SystemExit: 3", True),
        ("ad", {"a": 1}, 'Error: there is no tool "ad"; there are: add, fails, leaves.', False),
        ("add", {"x": 1}, "Error: add: missing a required argument: 'a'; it takes a, b.", False),
        ("add", {"a": 1, "x": 1}, "Error: add: got an unexpected keyword argument 'x'", False),
        ("add", [1], "Error: the arguments of add must be a JSON object.", False),
        ("add", "{'a'", "Error: the arguments of add are not JSON", False),
        ("add", {"a": "1"}, "Error: TypeError: ", True),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_counted(
    tmp_path: Path, name: str, arguments: Any, told: str, ran: bool
) -> None:
    config = of_tools(tmp_path, SUMS, "add", "fails", "leaves")
    answer = answers(config, calling((name, arguments), ("add", {"a": 1})))
    assert answer.messages[0]["content"].startswith(told)
    assert answer.messages[1]["content"] == "2"
    assert answer.metrics == {"tools/calls": 2, "tools/failed": 1, "tools/malformed": 0}
    wrong, _ = answer.calls
    assert wrong.tool == ("" if name == "ad" else name)
    assert not wrong.is_well and (wrong.seconds is not None) == ran


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_call_that_raises_counts_its_seconds(tmp_path: Path, word: str) -> None:
    """Those of the answer are the sum of what its calls took, whether they raised or not."""
    source = f'''
    import time

    {word} looks(ok: bool) -> str:
        """Look.

        Args:
            ok: Whether there is something.
        """
        time.sleep(0.15)
        if not ok:
            raise ValueError("nothing")
        return "it"
    '''
    calls = (("looks", {"ok": True}), ("looks", {"ok": False}))
    answer = answers(of_tools(tmp_path, source, "looks"), calling(*calls))
    of_tool = [call.seconds or 0.0 for call in answer.calls]
    assert [call.is_well for call in answer.calls] == [True, False] and min(of_tool) >= 0.15
    assert 0.3 <= answer.seconds <= sum(of_tool)


ODD = '''
    import asyncio
    import numpy as np

    def counts() -> dict:
        """Count."""
        return {"n": np.int64(3), "all": np.arange(3)}

    def pairs() -> dict:
        """Pair."""
        return {(1, 2): "a"}

    async def gives_up() -> str:
        """Give up."""
        raise asyncio.CancelledError("no time")
'''


@pytest.mark.parametrize(
    ("name", "told", "is_well"),
    [
        ("counts", {"n": 3, "all": [0, 1, 2]}, True),
        ("pairs", "{(1, 2): 'a'}", True),
        ("gives_up", "Error: CancelledError: no time", False),
    ],
)
def test_what_a_tool_returns_is_told_as_plain_values(
    tmp_path: Path, name: str, told: Any, is_well: bool
) -> None:
    answer = answers(of_tools(tmp_path, ODD, name), calling((name, {})))
    assert content(answer) == told
    assert answer.calls[0].is_well is is_well


def test_a_call_without_a_name_is_told(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": ["add", {"function": None}]}
    answer = answers(of_tools(tmp_path, SUMS, "add"), message)
    assert [one["content"][:22] for one in answer.messages] == ["Error: there is no too"] * 2
    assert answer.metrics["tools/failed"] == 2


def test_malformed_calls_are_told_and_counted(tmp_path: Path) -> None:
    config = of_tools(tmp_path, SUMS, "add")
    (alone,) = (found := answers(config, calling(malformed=("{add",)))).messages
    assert alone["role"] == "user"  # no call is there that a tool's message could belong to
    assert alone["content"].startswith("Error: this tool call cannot be read: {add.")
    assert not found.done
    assert found.metrics == {"tools/calls": 0, "tools/failed": 0, "tools/malformed": 1}
    beside = answers(config, calling(("add", {"a": 1}), malformed=("x" * 9999,)))
    (both,) = beside.messages
    assert both["content"].startswith("2\nError: this tool call cannot be read: xxx")
    assert len(both["content"]) < 500


def test_long_results_are_cut_with_a_note(tmp_path: Path) -> None:
    config = of_tools(tmp_path, SUMS, "says", max_result_chars=1000)
    answer = answers(config, calling(("says", {"count": 50_000_000})))
    text = content(answer)
    assert text == "x" * 1000 + "\n[cut here: 49999000 more characters]"


def test_prints_of_tools_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        answers(of_tools(tmp_path, SUMS, "says"), calling(("says", {"count": 3})))
    assert "environment says: so many: 3" in [one.getMessage() for one in caplog.records]


# -- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('def f(a):\n    """Do."""', 'its parameter "a" has no type hint'),
        ("def f(a: int): ...", "has no docstring"),
        ("def f(): ...", "has no docstring"),
        ('def f(*a: int):\n    """Do."""', "takes *a; a model gives every argument by its name"),
        ('def f(**a: int):\n    """Do."""', "takes **a; a model"),
        ('def f(a: int, /):\n    """Do."""', "takes a by position only"),
        ('def f(a: int):\n    """Do."""', 'its docstring does not say what "a" is'),
        ('def f(a: "Nope"):\n    """Do.\n\n    Args:\n        a: It.\n    """', "type hints"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass P:\n    a: int\n"
            'def f(a: P):\n    """Do.\n\n    Args:\n        a: It.\n    """',
            "in place of a dataclass or TypedDict a dict",
        ),
        (
            'import enum\nclass C(enum.Enum):\n    R = "red"\n'
            'def f(a: list[C] | None):\n    """Do.\n\n    Args:\n        a: It.\n    """',
            "is the Enum C, and a model gives plain values. Write Literal['red']",
        ),
        ('def f():\n    """Do."""\n    yield 1', "is a generator; return a list"),
        ("class f: ...", "is a type, not a function"),
        ("g = 1", "has no f"),
        ("f = 1", "is a int, not a function"),
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os._exit(3)", "importing it ended its process (exit status 3)"),
    ],
)
def test_a_mistake_is_one_message(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(EnvironmentSetupError) as raised:
        SupervisedEnvironments(of_tools(tmp_path, source, "f"))
    assert message in str(raised.value)
    assert str(raised.value).count("\n") == 0


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    first = of_tools(tmp_path, SUMS, "add").tools
    second = of_tools(tmp_path, SUMS, "add").tools
    with pytest.raises(EnvironmentSetupError, match='two tools are called "add"'):
        SupervisedEnvironments(EnvironmentConfig(tools=(*first, *second)))
    with pytest.raises(EnvironmentSetupError, match="names a tool twice"):
        SupervisedEnvironments(EnvironmentConfig(tools=(*first, *first)))


def test_a_tool_of_a_program_is_sent_and_one_that_cannot_be_is_refused() -> None:
    import threading

    offset, lock = 40, threading.Lock()

    def add(a: int) -> int:
        """Add.

        Args:
            a: What to add to.
        """
        return a + offset

    def locked() -> None:
        """Hold it."""
        with lock:
            pass

    with giving({"add": add, "locked": locked}):
        answer = answers(EnvironmentConfig(tools=("<python>:add",)), calling(("add", {"a": 2})))
        assert content(answer) == 42
        with pytest.raises(EnvironmentSetupError, match="locked cannot be sent to the processes"):
            SupervisedEnvironments(EnvironmentConfig(tools=("<python>:locked",)))
    with pytest.raises(EnvironmentSetupError, match="which only that program has"):
        SupervisedEnvironments(EnvironmentConfig(tools=("<python>:add",)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": ("a:b",), "function": "a:b"}, "cannot both be set"),
        ({"arguments": {"a": 1}}, "function, which is not set"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"max_trajectory_tokens": 0}, "max_trajectory_tokens must be at least 1"),
        ({"memory_mb": 0}, "memory_mb must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s must be more than 0"),
        ({"max_environment_s": float("nan")}, "max_environment_s must be more than 0"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"max_result_chars": 0}, "max_result_chars must be at least 100"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig(**settings)


def test_no_environment_is_one_message() -> None:
    with pytest.raises(EnvironmentSetupError, match=r"set environment\.tools or environment\.f"):
        SupervisedEnvironments(EnvironmentConfig())
