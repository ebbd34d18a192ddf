"""However often a model repeats itself, its turn is read in linear time: `re` lets no other thread
run meanwhile, and the run's event loop stands still."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollpacker.dialogue.call_formats import (
    bare_json,
    deepseek,
    glm_call,
    json_call,
    mistral,
    qwen_coder_call,
    tagged,
)

ROOT = Path(__file__).parents[2]
LENGTH = 60_000
LIMIT_S = 2.0
"""Seconds of processor time that may be spent on one text. The slowest takes 0.05 s; blanks in
Mistral's format took 8 s and more as long as their time grew with the square."""

D = "<\uff5ctool\u2581{}\uff5c>"
FORMATS = {
    "mistral": mistral,
    "deepseek": deepseek,
    "bare": bare_json,
    "qwen": tagged(qwen_coder_call),
    "glm": tagged(glm_call),
    "json": tagged(json_call),
}
BEGINNINGS = {
    "mistral": ["", "[TOOL_CALLS]", "[TOOL_CALLS]a", "[TOOL_CALLS]a[CALL_ID]", "[TOOL_CALLS]a{"],
    "deepseek": ["", D.format("call\u2581begin") + "f" + D.format("sep")],
    "bare": ["", '{"name": ', '<|python_tag|>{"name": "a", "arguments": {}}'],
    "qwen": ["", "<tool_call>", "<tool_call><function=a>", "<tool_call><function=a><parameter=a>"],
    "glm": ["", "<tool_call>", "<tool_call>a", "<tool_call>a<arg_key>a</arg_key><arg_value>"],
    "json": ["", "<tool_call>", '<tool_call>{"name": "a", "arguments": {"a": "'],
}
UNITS = {
    "mistral": [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]a",
        "[CALL_ID] ",
        "{}",
        "[]",
        "} ",
        "[TOOL_CALLS]a{}",
    ],
    "deepseek": ["\n```json\n", "\n```", D.format("call\u2581end"), D.format("sep"), "a\n"],
    "bare": ['{"name":"a","arguments":{}};', '{"name":', "; "],
    "qwen": ["<parameter=a>", "</parameter>", "\n</parameter>", "</function>", "</tool_call>"],
    "glm": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "json": ["<tool_call>", "</tool_call>", "{}", '"}</tool_call>'],
}
EVERYWHERE = [" ", "\n", "a", " a", "{", "}", "[", '"', "\\", "0"]
ENDS = {
    "mistral": ["", "x", "}"],
    "deepseek": ["", D.format("call\u2581end")],
    "bare": ["", "x", "}"],
    "qwen": ["x", "</function></tool_call>", "</parameter></function>\n</tool_call>"],
    "glm": ["x", "</tool_call>", "</arg_value></tool_call>"],
    "json": ["x", "</tool_call>", '"}}</tool_call>'],
}
CASES = [
    (name, beginning, unit, end)
    for name in FORMATS
    for beginning in BEGINNINGS[name]
    for unit in [*UNITS[name], *EVERYWHERE]
    for end in ENDS[name]
]


def slowest(name: str) -> tuple[float, tuple[str, str, str, str]]:
    """Seconds of this thread's processor time, and the text that took them."""
    found = []
    for case in CASES:
        if case[0] == name:
            _, beginning, unit, end = case
            text = beginning + unit * (LENGTH // len(unit)) + end
            began = time.thread_time()
            FORMATS[name](text, {})
            found.append((time.thread_time() - began, case))
    return max(found)


@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_that_repeats_itself_is_read_in_linear_time(name: str) -> None:
    """In a process of its own: nothing else can end an expression that goes on for minutes."""
    program = f"from tests.dialogue.test_call_formats import slowest; print(*slowest({name!r}))"
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert said.returncode == 0, said.stderr
    seconds, _, case = said.stdout.partition(" ")
    assert float(seconds) < LIMIT_S, case


@pytest.mark.parametrize(
    ("text", "identity"),
    [
        (' search \n [ARGS] {"a": {"b": "}"}} \n', None),
        ('search{"a": {"b": "}"}}', None),
        ('search[CALL_ID] c1 [ARGS]{"a": {"b": "}"}}', "c1"),
    ],
)
def test_calls_of_mistral_with_blanks_are_read_as_before(text: str, identity: str | None) -> None:
    (call,) = mistral("[TOOL_CALLS]" + text, {}).calls
    assert (call.name, call.arguments, call.id) == ("search", {"a": {"b": "}"}}, identity)


def test_several_calls_of_llama_are_read_as_before() -> None:
    one = '{"name": "a", "arguments": {"x": 1}}'
    found = bare_json(f"{one} ; {one};\n\t{one} ;", {})
    assert [call.name for call in found.calls] == ["a"] * 3 and not found.malformed
    assert bare_json(f"{one} x", {}).malformed == [f"{one} x"]
