"""What is put into a pattern is what the template would have said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import pytest

from rollpacker.dialogue.patterns import CHECK_EACH, CHECK_FIRST, Patterns
from rollpacker.dialogue.template import TemplateError
from tests.dialogue.families import FAMILIES, TOOLS, template_of

WORDS = (
    *("Go on, please.", " with space around ", "", "user", "0", "na\u00efve\n\n\u4f60 {x: [1]}"),
    *("<|im_end|>", "</think> thought", "'quoted' \"twice\" \\n", "<tool_response>", "\ttab", "a"),
)


class Counting:
    """Renders, and counts how often."""

    def __init__(self, template: str) -> None:
        self.num = 0
        self._template = jinja2.Environment().from_string(template)

    def __call__(self, messages: Sequence[Any]) -> str:
        self.num += 1
        return self._template.render(messages=messages)


def said(render: Callable[[Sequence[Any]], str], messages: Sequence[Any]) -> str | None:
    """None: the template refuses them."""
    try:
        return render(messages)
    except TemplateError:
        return None


@pytest.mark.parametrize(
    ("family", "tools"),
    [
        (name, tools)
        for name, one in FAMILIES.items()
        for tools in ((), TOOLS)
        if one.tools or not tools
    ],
)
def test_families_say_what_they_would_have_said(family: str, tools: tuple[Any, ...]) -> None:
    template = template_of(family, tools=tools)
    asked = []

    def render(messages: Sequence[Any]) -> str:
        asked.append(messages)
        return template._behind_turn(messages)

    patterns = Patterns(render, template.tokenizer.chat_template)
    shapes: list[dict[str, Any]] = [{"role": "user"}]
    if tools:
        shapes.append({"role": "tool", "name": "search", "tool_call_id": "call00100"})
    for shape in shapes:
        for _ in range(CHECK_FIRST):
            patterns([{**shape, "content": "Go on please"}])
        for words in WORDS:
            messages = [{**shape, "content": words}]
            for several in (messages, messages * 2):
                assert said(patterns, several) == said(template._behind_turn, several)
        before = len(asked)
        patterns([{**shape, "content": "Go on please"}])
        if family not in ("llama", "mistral") or shape["role"] == "user":  # they quote tools
            assert len(asked) == before, "each was rendered"


@pytest.mark.parametrize(
    ("template", "words", "is_rendered"),
    [
        ("{{ messages[0].content + '!' }}", "plain", False),
        ("{{ messages[0].content + '!' }}", "plain!", True),
        ("{{ messages[0].content | trim }}", "plain", False),
        ("{{ messages[0].content | trim }}", "not plain ", True),
        ("{{ messages[0].content | tojson }}", "plain", True),
        ("{{ messages[0].content.split('</x>')[-1] }}", "a</x>b", True),
        ("{% if messages[0].content in 'abc' %}x{% endif %}{{ messages[0].content }}", "b", True),
    ],
)
def test_who_is_rendered(template: str, words: str, is_rendered: bool) -> None:
    render = Counting(template)
    patterns = Patterns(render, template)
    for _ in range(CHECK_FIRST):
        patterns([{"role": "user", "content": "other"}])
    before = render.num
    messages = [{"role": "user", "content": words}]
    assert patterns(messages) == Counting(template)(messages)
    assert (render.num > before) == is_rendered


def test_values_that_are_no_text_are_the_templates() -> None:
    template = "{{ messages[0].extra }}{{ messages[0].content }}"
    patterns = Patterns(Counting(template), template)
    for extra in ([1], True, 1, None):
        message = {"role": "user", "content": "a word", "extra": extra}
        assert patterns([message]) == Counting(template)([message])


def test_a_template_that_counts_letters_is_found_out() -> None:
    template = "{% if messages[0].content|length == 9 %}long {% endif %}{{ messages[0].content }}"
    patterns = Patterns(Counting(template), template)
    said = [patterns([{"role": "user", "content": "nine char"}]) for _ in range(CHECK_EACH)]
    assert set(said) == {"long nine char"}
