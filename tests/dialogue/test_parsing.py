"""Turns read as messages: calls in every format, and whatever else a model writes."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate, TemplateError
from tests.dialogue.families import FAMILIES, TOOLS, template_of, tokenizer_of, tokenizer_with

PARSERS = {
    name: TemplateDialogue(template_of(name, TOOLS))
    for name, family in FAMILIES.items()
    if family.tools
}
D = "<\uff5ctool\u2581{}\uff5c>"
CALL = '{"name": "search", "arguments": {"query": "a"}}'


def read(name: str, text: str, end: str | None = None) -> dict[str, Any]:
    template = template_of(name, TOOLS)
    tokens = list(template.canonical(text))
    if end is not None:
        tokens.append(template.tokenizer.convert_tokens_to_ids(end))
    return PARSERS[name].message(tokens)


def calls(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (one["function"]["name"], one["function"]["arguments"])
        for one in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("chatml", f"<tool_call>{CALL}</tool_call>"),
        ("chatml", '<tool_call>{"arguments":{"query":"a"},"name":"search"} </tool_call>'),
        ("llama", '{"name": "search", "parameters": {"query": "a"}}'),
        ("llama", '<|python_tag|>{"name": "search", "parameters": {"query": "a"}}'),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("mistral", f"[TOOL_CALLS] [{CALL}]"),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a"}'),
        ("mistral_newest_tools", '[TOOL_CALLS]search[ARGS]{"query": "a"}'),
        (
            "thinking",
            "</think><tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "glm",
            "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        ),
        (
            "deepseek",
            D.format("calls\u2581begin")
            + D.format("call\u2581begin")
            + "function"
            + D.format("sep")
            + 'search\n```json\n{"query": "a"}\n```'
            + D.format("call\u2581end")
            + D.format("calls\u2581end"),
        ),
        (  # as newer ones write it
            "deepseek",
            D.format("call\u2581begin")
            + "search"
            + D.format("sep")
            + '{"query": "a"}'
            + D.format("call\u2581end"),
        ),
    ],
)
def test_a_call(name: str, text: str) -> None:
    message = read(name, text, FAMILIES[name].end)
    assert calls(message) == [("search", {"query": "a"})]
    assert message["content"] == "" and "malformed_tool_calls" not in message
    assert message["tool_calls"][0]["type"] == "function"
    # Cut off anywhere, it is no call, and is told; before it begins it is words.
    tokens = template_of(name, TOOLS).canonical(text)
    for cut in range(len(tokens) - ("calls\u2581end" in text)):
        message = PARSERS[name].message(tokens[:cut])
        assert "tool_calls" not in message
    assert len(message["malformed_tool_calls"]) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<tool_call>{}</tool_call>"),
        ("chatml", "<tool_call></tool_call>"),
        ("chatml", "<tool_call>search(a)</tool_call>"),
        ("chatml", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("chatml", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>'),
        ("chatml", '<tool_call>{"name": "search"}</tool_call>'),
        ("chatml", '<tool_call>{"name": "search", "arguments": {"a": NaN}}</tool_call>'),
        ("chatml", '<tool_call>{"name": "search", "arguments": {"a": 1e999}}</tool_call>'),
        ("chatml", '<tool_call>{"name": "search", "arguments": {"a": "\\ud800"}}</tool_call>'),
        ("chatml", '<tool_call>{"name": "s", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
        ("chatml", '<tool_call>{"name": "s", "arguments": ' + '{"a":' * 9999 + "</tool_call>"),
        ("chatml", f"<tool_call>{CALL}"),
        ("llama", '{"name": "search", "parameters": '),
        ("llama", '{"name": "search"}'),
        ("llama", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", f"[TOOL_CALLS][{CALL}, 3]"),
        ("mistral", "[TOOL_CALLS]search[ARGS]{"),
        ("thinking", "</think><tool_call>\n<function=search>\n</tool_call>"),
        ("thinking", "</think><tool_call><function=f><parameter=a>1</function></tool_call>"),
        ("glm", "<tool_call>search\n<arg_key>query</arg_key>\n</tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("deepseek", D.format("call\u2581begin") + "x" + D.format("call\u2581end")),
    ],
)
def test_what_is_no_call_is_told_as_it_was_written(name: str, text: str) -> None:
    message = read(name, text, FAMILIES[name].end)
    assert "tool_calls" not in message
    assert message["malformed_tool_calls"] == [text.removeprefix("</think>")]
    assert message["content"] == ""


def test_words_calls_and_what_is_none() -> None:
    text = f"first <tool_call>{CALL}</tool_call> then\n<tool_call>x</tool_call>\n"
    message = read("chatml", f"{text}<tool_call>{CALL}</tool_call>", "<|im_end|>")
    assert message["content"] == "first\nthen"
    assert len(calls(message)) == 2
    assert message["malformed_tool_calls"] == ["<tool_call>x</tool_call>"]
    ids = [one["id"] for one in message["tool_calls"]]
    assert ids == ["call00100", "call00101"]  # as strict templates want them: nine characters


def test_an_argument_may_spell_the_marker() -> None:
    spelt = '<tool_call>{"name": "search", "arguments": {"query": "</tool_call>"}}</tool_call>'
    assert calls(read("chatml", spelt)) == [("search", {"query": "</tool_call>"})]


def test_ids_are_the_models_own_where_it_writes_them() -> None:
    text = '[TOOL_CALLS][{"name": "search", "arguments": {}, "id": "abcdefghi"}]'
    assert read("mistral", text)["tool_calls"][0]["id"] == "abcdefghi"


def test_arguments_that_are_text_are_taken_by_the_schema() -> None:
    text = (
        "</think><tool_call><function=search><parameter=query>\n7\n</parameter>"
        "<parameter=limit>7</parameter><parameter=other>[1]</parameter></function></tool_call>"
    )
    assert calls(read("thinking", text)) == [("search", {"query": "7", "limit": 7, "other": [1]})]


def test_json_that_is_an_answer() -> None:
    text = '{"answer": 3}'
    assert read("llama", text) == {"role": "assistant", "content": text}


def test_thinking() -> None:
    thought = read("thinking", "I wonder\n</think>\n\nYes.", "<|im_end|>")
    assert thought == {"role": "assistant", "content": "Yes.", "reasoning_content": "I wonder"}
    assert read("thinking", "I wonder")["reasoning_content"] == "I wonder"  # cut off
    assert read("thinking", "I wonder")["content"] == ""
    assert "reasoning_content" not in read("thinking", "</think>Yes.")
    # Where the generation prompt does not begin it, the model does.
    source = tokenizer_of("thinking").chat_template.replace(
        "'<|im_start|>assistant\\n<think>\\n'", "'<|im_start|>assistant\\n'"
    )
    parser = TemplateDialogue(DialogueTemplate(tokenizer_with("thinking", source)))
    canonical = template_of("thinking").canonical
    assert parser.message(canonical("<think>\nhm\n</think>\n\nYes."))["content"] == "Yes."
    assert parser.message(canonical("Yes.")) == {"role": "assistant", "content": "Yes."}
    assert parser.message(canonical("<think>\nhm"))["reasoning_content"] == "hm"


def test_without_tools_nothing_is_a_call() -> None:
    template = template_of("chatml")
    text = f"<tool_call>{CALL}</tool_call>"
    message = TemplateDialogue(template).message(template.canonical(text))
    assert message == {"role": "assistant", "content": text}


UNKNOWN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}@@{{ c.function.name }}("
    "{{ c.function.arguments | tojson }}){% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def test_a_format_that_nobody_knows() -> None:
    template = DialogueTemplate(tokenizer_with("chatml", UNKNOWN), tools=TOOLS)
    with pytest.raises(TemplateError, match=r"not known here .*@@search.* response_template"):
        TemplateDialogue(template)


def test_transformers_own_parser() -> None:
    tokenizer = tokenizer_with("chatml", UNKNOWN)
    if not hasattr(tokenizer, "response_template"):
        pytest.skip("this transformers has no response templates")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant",
        "fields": {
            "tool_calls": {
                "open_pattern": r"@@(?P<name>\w+)\(",
                "close": ")",
                "repeats": True,
                "content": "json",
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
        },
    }
    template = DialogueTemplate(tokenizer, tools=TOOLS)
    parser, end = TemplateDialogue(template), tokenizer.eos_token_id
    whole = template.canonical('words @@search({"query": "a"})')
    message = parser.message([*whole, end])
    assert calls(message) == [("search", {"query": "a"})]
    assert message["content"].strip() == "words"
    assert parser.message([*template.canonical("words"), end])["content"] == "words"
    for text, tokens in [
        ("@@search({no)", [*template.canonical("@@search({no)"), end]),
        ("@@search([1])", [*template.canonical("@@search([1])"), end]),
        ('words @@search({"query": "a"})', whole),  # cut off
    ]:
        message = parser.message(tokens)
        assert message["malformed_tool_calls"] == [text] and "tool_calls" not in message


@pytest.mark.parametrize("name", PARSERS)
def test_any_tokens(name: str) -> None:
    rng = random.Random(name)
    size = len(tokenizer_of(name))
    markers = sorted(template_of(name, TOOLS).marker_ids)
    for _ in range(300):
        tokens = rng.choices([*range(size + 5), *markers * 20], k=rng.randint(0, 40))
        message = PARSERS[name].message(tokens)
        assert message["role"] == "assistant" and isinstance(message["content"], str)


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<function=", "</function>", ">"),
    *("<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(D.format("call\u2581begin"), D.format("sep"), D.format("call\u2581end"), "</think>"),
    *("{", "}", '"', '"name"', ":", '"arguments"', ",", "[", "]", "\n", "```json", "search", "1"),
    CALL,
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_text_made_of_markers(name: str, parts: list[str]) -> None:
    message = read(name, "".join(parts))
    for one in message.get("tool_calls", ()):
        assert isinstance(one["function"]["arguments"], dict) and one["function"]["name"]
    assert all(isinstance(one, str) for one in message.get("malformed_tool_calls", ()))


@pytest.mark.parametrize("name", PARSERS)
def test_a_turn_that_repeats_itself_is_read_in_time(name: str) -> None:
    """As models do that have lost their way. Squares of 20,000 tokens would be minutes."""
    before = time.process_time()
    for part in PIECES:
        read(name, part * 2000)
        read(name, CALL[:10] + part * 2000 + "<tool_call>")
    assert time.process_time() - before < 20
