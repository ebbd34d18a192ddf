"""Programs as environments, without any client's library: what they may do, and what comes of what
they do wrong."""

from __future__ import annotations

import asyncio
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rollpacker.environments.environment import (
    Answered,
    Begun,
    EnvironmentConfig,
    EnvironmentSetupError,
    Lost,
)
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.workers.child import state
from tests.environments.playing import answered, begun, episode, lost_by, played, said

HEAD = """
import json, os, sys, time, urllib.request

def post(path, body, **headers):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json", **headers}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)

def ask(messages, **more):
    found = post("/chat/completions", {"model": "m", "messages": messages, **more})
    return found["choices"][0]["message"]

row = json.loads(os.environ["ROLLPACKER_ROW"])
messages = [{"role": "user", "content": "begin"}]
"""


def program(folder: Path, body: str, **settings: Any) -> EnvironmentConfig:
    path = folder / f"agent_{len(list(folder.iterdir()))}.py"
    path.write_text(HEAD + textwrap.dedent(body))
    settings = {"timeout_s": 30.0, "workers": 1} | settings
    return EnvironmentConfig(function=f"program:python {path}", **settings)


def test_the_row_arrives_and_the_reward_comes_back(tmp_path: Path) -> None:
    config = program(
        tmp_path,
        """
        messages[0]["content"] = f"{row['question']} {row['seed']}"
        messages.append(ask(messages))
        post("/reward", {"reward": len(messages[-1]["content"])})
        print("x" * 200_000)
        """,
    )

    async def play(those: SupervisedEnvironments) -> tuple[Begun, Answered]:
        return await begun(those, question="why?"), await answered(those, 1, said("hallo"))

    first, last = played(config, play)
    assert first.messages == ({"role": "user", "content": "why? 7"},)
    assert first.tools is None
    assert last.done and last.reward == 5.0 and last.messages == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('no call')", "Program ended without a call of the model"),
        ("sys.exit('it is broken')", "Program ended with exit status 1: it is broken"),
        ("os.kill(os.getpid(), 9)", "Program ended with signal 9, SIGKILL"),
        ("ask(messages, n=2)", "n must be 1"),
    ],
)
def test_one_that_fails_before_it_begins(tmp_path: Path, body: str, reason: str) -> None:
    lost = lost_by(program(tmp_path, body))
    assert lost.cause == "environment" and reason in lost.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("ask(messages)\nraise OSError('nobody')", "exit status 1: "),
        ("ask(messages)\nask([{'role': 'user', 'content': 'other'}])", "dialogue was rewritten"),
        (
            "said = ask(messages)\nask([*messages, {**said, 'content': 'mine'}, *messages])",
            "messages[1] is not what it was",
        ),
        ("ask([*messages, ask(messages)])", "nothing was said since"),
        (
            "said = ask(messages)\n"
            "tool = {'type': 'function', 'function': {'name': 'new'}}\n"
            "ask([*messages, said, *messages], tools=[tool])",
            "the tools are others",
        ),
        (
            "import threading\n"
            "threading.Thread(target=ask, args=[messages]).start()\n"
            "time.sleep(0.5)\nask(messages)",
            "called again before it had answered",
        ),
        ("ask(messages)\nprint(json.dumps({'reward': 'much'}))", "a reward that is no number"),
    ],
)
def test_what_cannot_be_trained_on_is_a_lost_episode(
    tmp_path: Path, body: str, reason: str
) -> None:
    async def play(those: SupervisedEnvironments) -> Begun | Answered | Lost:
        await begun(those)
        await asyncio.sleep(1.5 if "threading" in body else 0.0)
        return await those.act(episode(), 1, said("hallo"))

    lost = played(program(tmp_path, body), play)
    assert isinstance(lost, Lost) and lost.cause == "environment"
    assert reason in lost.reason


def test_a_client_that_asks_again_has_the_same_answer(tmp_path: Path) -> None:
    """As OpenAI's clients do when they have waited for too long."""
    config = program(
        tmp_path,
        """
        import threading
        body = {"model": "m", "messages": messages}
        threading.Thread(target=post, args=["/chat/completions", body]).start()
        time.sleep(0.5)
        again = post("/chat/completions", body, **{"X-Stainless-Retry-Count": "1"})
        print(json.dumps({"reward": len(again["choices"][0]["message"]["content"])}))
        """,
    )

    async def play(those: SupervisedEnvironments) -> Answered:
        await begun(those)
        await asyncio.sleep(1.5)
        return await answered(those, 1, said("four"))

    assert played(config, play).reward == 4.0


def test_it_ends_with_its_episode_and_all_that_it_started(tmp_path: Path) -> None:
    config = program(
        tmp_path,
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        messages[0]["content"] = f"{os.getpid()} {child.pid}"
        ask(messages)
        time.sleep(600)
        """,
        timeout_s=3.0,
    )

    async def play(those: SupervisedEnvironments) -> tuple[list[str], Lost | Answered]:
        first = await begun(those, 0)
        hung = await begun(those, 1)
        those.end(episode(0))
        lost = await those.act(episode(1), 1, said())
        assert first.messages and hung.messages
        return [one["content"] for one in (first.messages[0], hung.messages[0])], lost

    told, lost = played(config, play)
    assert isinstance(lost, Lost) and lost.cause == "deadline"
    pids = [int(pid) for text in told for pid in text.split()]
    assert len(pids) == 4 and all(state(pid) == "" for pid in pids)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program x", "there is no program no-such-program"),
        ("python nowhere.py", "there is no file"),
        ("python 'unfinished", "is no command"),
    ],
)
def test_commands_that_cannot_be(command: str, message: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        SupervisedEnvironments(EnvironmentConfig(function=f"program:{command}", workers=1))


def test_a_row_too_large_for_a_variable_can_be_fetched(tmp_path: Path) -> None:
    config = program(tmp_path, "ask(messages)")
    source = Path(config.function.removeprefix("program:python ")) if config.function else tmp_path
    source.write_text(
        source.read_text().replace(
            'row = json.loads(os.environ["ROLLPACKER_ROW"])',
            'assert "ROLLPACKER_ROW" not in os.environ\n'
            'url = os.environ["OPENAI_BASE_URL"] + "/row"\n'
            'key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}\n'
            "row = json.load(urllib.request.urlopen(urllib.request.Request(url, headers=key)))\n"
            'assert len(row["text"]) == 300_000',
        )
    )
    assert "ROLLPACKER_ROW" not in os.environ

    async def play(those: SupervisedEnvironments) -> Begun:
        return await begun(those, text="x" * 300_000)

    assert played(config, play).messages
