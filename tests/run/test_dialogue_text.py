"""What samples keep of a trajectory: every token with its origin, every message, bounded."""

from __future__ import annotations

import json
from typing import Any

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.environments.environment import Episode
from rollpacker.run.ports.dialogue_text import (
    MAX_PART_CHARS,
    MAX_TEXT_CHARS,
    dialogue_text,
)


def response(tokens: int, given: tuple[tuple[int, int], ...]) -> Response:
    return Response(
        sample=SampleId(PromptId("train", 0, 0), 0, 0),
        prompt_tokens=(1,),
        tokens=tuple(range(tokens)),
        log_probs=(0.0,) * (tokens - sum(end - start for start, end in given)),
        finish_reason="done",
        version=0,
        given=given,
    )


def episode(turns: int, said: str = "an answer", **more: Any) -> Episode:
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "assistant", "content": f"message {turn}", **more})
        messages.append({"role": "user", "content": said})
    return Episode(
        messages=tuple(messages[:-1]),  # the last turn was not answered
        rewards=(0.5,) * (turns - 1),
        answer_s=(0.25,) * (turns - 1),
        policy_s=(2.0,) * turns,
    )


def render(tokens: Any) -> str:
    return " ".join(map(str, tokens))


def test_each_token_stands_in_it_with_its_origin_and_each_turn_with_what_it_brought() -> None:
    told = json.loads(dialogue_text(response(6, ((2, 5),)), episode(2), render))
    assert told["tokens"] == [[True, 2, "0 1"], [False, 3, "2 3 4"], [True, 1, "5"]]
    assert told["begin"] is None
    first, last = told["turns"]
    assert first == {
        "message": {"role": "assistant", "content": "message 0"},
        "answers": [{"role": "user", "content": "an answer"}],
        "reward": 0.5,
        "policy_s": 2.0,
        "environment_s": 0.25,
    }
    assert last["message"]["content"] == "message 1"
    assert (last["answers"], last["reward"], last["environment_s"]) == ([], None, None)


def test_a_long_one_lacks_its_middle_and_says_how_much() -> None:
    turns = 1000
    spans = tuple((3 * n + 1, 3 * n + 3) for n in range(turns))
    told = json.loads(
        dialogue_text(response(3 * turns, spans), episode(turns), lambda _: "x" * 500)
    )
    for part, whole in (("turns", turns), ("tokens", 2 * turns)):
        (left_out,) = [one for one in told[part] if isinstance(one, int)]
        assert left_out + len(told[part]) - 1 == whole and left_out > 0
        assert isinstance(told[part][0], dict | list) and isinstance(told[part][-1], dict | list)
    assert told["turns"][-1]["message"]["content"] == f"message {turns - 1}"


def test_it_is_bounded_whatever_was_said() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    said = episode(3, "y" * 10_000_000, tool_calls=[{"function": {"arguments": deep}}])
    text = dialogue_text(response(4, ((1, 3),)), said, lambda _: "\x1b[31m" * 1_000_000)
    assert len(text) < 8 * MAX_PART_CHARS
    told = json.loads(text)
    assert f"({10_000_000} characters)" in told["turns"][0]["answers"][0]["content"]
    assert len(told["tokens"][0][2]) < MAX_TEXT_CHARS + 100
