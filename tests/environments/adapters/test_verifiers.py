"""Environments written for verifiers, as its users write them, played without a network.

`sums_taskset`: one question, with a tool or without. `guess_taskset`: its own environment, whose
user is a program.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("verifiers")

from rollpacker.integrations import environments as adapters
from tests.environments.adapters.play import play

HERE = str(Path(__file__).parent)
WITHOUT_TOOL = {"task": {"with_tool": False}}


@pytest.fixture(autouse=True)
def _installed(monkeypatch) -> None:
    """The packages of this folder are found, in tool servers too."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))


def call(name: str, arguments) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


def halve(dialogue) -> str:
    low, high, guess = 1, 7, 4
    for message in dialogue[1:]:
        if message["role"] == "assistant":
            guess = int(message["content"])
        elif "lower" in message["content"]:
            high = guess - 1
        else:
            low = guess + 1
    return str((low + high) // 2)


def test_one_question_right_and_wrong() -> None:
    factory = adapters.load("verifiers:sums_taskset", WITHOUT_TOOL)
    row = adapters.rows("verifiers:sums_taskset", WITHOUT_TOOL)[1]
    dialogue, rewards = asyncio.run(play(factory(), {**row, "seed": 1}, lambda _: "4"))
    assert dialogue == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    assert rewards == [1.0]
    assert asyncio.run(play(factory(), row, lambda _: "5"))[1] == [0.0]


def test_tools_are_called_by_verifiers() -> None:
    """All kinds of calls in one episode: the tools' process takes seconds to start."""
    factory = adapters.load("verifiers:sums_taskset", {})
    row = adapters.rows("verifiers:sums_taskset", {})[2]
    says = iter(
        [
            call("add", {"a": 3, "b": 3}),
            call("sub", "{}"),
            call("add", "{a"),
            call("add", "[]"),
            "6",
        ]
    )

    async def episode():
        played = await play(factory(), row, lambda _: next(says))
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind
        return played

    tools = factory().tools  # known before any episode
    dialogue, rewards = asyncio.run(episode())
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert set(tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    answers = [message for message in dialogue if message["role"] == "tool"]
    assert answers[0] == {"role": "tool", "tool_call_id": "1", "name": "add", "content": "6"}
    assert "there is no tool sub; there are add" in answers[1]["content"]
    assert "are no JSON (" in answers[2]["content"] and "no JSON object" in answers[3]["content"]
    assert rewards == [None] * 4 + [1.25]


def test_tools_that_tasks_share_are_started_once_for_all_open_episodes() -> None:
    factory = adapters.load("verifiers:sums_taskset", {**WITHOUT_TOOL, "shares_tools": True})
    row = adapters.rows("verifiers:sums_taskset", {})[0]

    async def episodes():
        environments = [factory() for _ in range(6)]
        await asyncio.gather(*(environment.reset(row) for environment in environments))
        servers = _children()
        adds = (environment.step(call("add", {"a": 1, "b": 1})) for environment in environments)
        answers = [messages[0]["content"] for messages, _, _ in await asyncio.gather(*adds)]
        await asyncio.gather(*(environment.close() for environment in environments))
        return servers, answers

    servers, answers = asyncio.run(episodes())
    assert len(servers) == 1 and answers == ["2"] * 6
    assert _children() == []


def _children() -> list[str]:
    """Commands of this process's children that serve tools."""
    found = []
    for path in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_text()
        except OSError:  # it ended meanwhile
            continue
        if parent == os.getpid() and "sums_taskset" in command:
            found.append(command)
    return found


def test_an_environment_with_a_user_of_its_own() -> None:
    factory = adapters.load("verifiers:guess_taskset", {"num_rows": 7})
    rows = adapters.rows("verifiers:guess_taskset", {"num_rows": 7})
    assert [row["verifiers_task"]["number"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]

    async def episodes():
        return await asyncio.gather(*(play(factory(), row, halve) for row in rows))

    played = asyncio.run(episodes())
    assert [rewards[-1] for _, rewards in played] == [1.0] * 7
    assert [len(rewards) for _, rewards in played] == [3, 2, 3, 1, 3, 2, 3]
    assert played[0][0][2] == {"role": "user", "content": "It is lower."}
    assert asyncio.run(play(factory(), rows[6], lambda _: "1"))[1] == [None, None, None, 0.0]


def test_a_tasks_own_stop_ends_the_episode() -> None:
    factory = adapters.load("verifiers:guess_taskset", {})
    row = adapters.rows("verifiers:guess_taskset", {"num_rows": 1})[0]
    says = iter(["7", "I give up"])
    _, rewards = asyncio.run(play(factory(), row, lambda _: next(says)))
    assert rewards == [None, 0.0]


def test_an_environment_that_breaks_is_no_reward_of_zero() -> None:
    factory = adapters.load("verifiers:guess_taskset", {"breaks": True})
    row = adapters.rows("verifiers:guess_taskset", {"num_rows": 1})[0]
    with pytest.raises(RuntimeError, match=r"failed in verifiers: .*the board is broken"):
        asyncio.run(play(factory(), row, lambda _: "1"))


def test_an_episode_that_is_given_up_leaves_nothing() -> None:
    factory = adapters.load("verifiers:guess_taskset", {})
    row = adapters.rows("verifiers:guess_taskset", {"num_rows": 1})[0]

    async def given_up() -> int:
        environments = [factory() for _ in range(3)]
        for environment in environments:
            await environment.reset(row)
            await environment.close()
            await environment.close()
        await factory().close()
        return len(asyncio.all_tasks())

    assert asyncio.run(given_up()) == 1


def test_rows_are_the_tasks_and_json() -> None:
    rows = adapters.rows("verifiers:sums_taskset", {"largest": 5})
    assert len(rows) == 5 and json.loads(json.dumps(rows)) == rows
    assert len(adapters.rows("verifiers:sums_taskset", {"largest": 5, "num_rows": 2})) == 2


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("textarean", {}, 'no package of that name is installed. Did you mean "textarena"?'),
        ("sums_taskset", {"large": 3}, "sums_taskset: taskset.large: "),
        ("sums_taskset", {"largest": "x"}, "sums_taskset: taskset.largest: .* valid integer"),
        ("sums_taskset", {"env": "user-sim"}, "has the roles assistant, user; a run trains one"),
        ("sums_taskset", {"largest": 0}, "sums_taskset has no tasks"),
        ("json", {}, "verifiers:json cannot be had: .*exports no Taskset"),
    ],
)
def test_one_message_for_what_cannot_be(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        adapters.load(f"verifiers:{name}", arguments)


def test_rows_of_somebody_else() -> None:
    factory = adapters.load("verifiers:sums_taskset", WITHOUT_TOOL)
    with pytest.raises(ValueError, match="no column verifiers_task"):
        asyncio.run(factory().reset({"prompt": "1 + 1", "seed": 1}))
