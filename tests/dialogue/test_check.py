"""What a run with turns says at its start."""

from __future__ import annotations

import pytest

from rollpacker.dialogue.check import dialogue_lines, remarks, scripted
from rollpacker.dialogue.rewrites import find_rewrites, writes_today
from rollpacker.dialogue.template import DialogueTemplate
from tests.dialogue.families import FAMILIES, TOOLS, template_of, tokenizer_with

USER = {"role": "user", "content": "2+2"}


def test_a_dialogue_is_shown_with_its_mask() -> None:
    template = template_of("llama", TOOLS)
    lines = dialogue_lines(template, find_rewrites(template), [USER])
    assert lines[0].startswith("a dialogue of three turns, ")
    marks = [line.split()[0] == ">" for line in lines[1:]]
    assert marks == [False, True, False, True, False, True]
    assert "2+2<|eot_id|>" in lines[1]
    assert lines[2].endswith(
        '{"name": "search", "parameters": {"query": "...", "limit": "..."}}<|eot_id|>'
    )
    assert lines[3].endswith(
        '<|start_header_id|>ipython<|end_header_id|>\\n\\n"A result."<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n"
    )
    counts = [int(line.removeprefix("  >").split()[0]) for line in lines[1:]]
    trajectory = scripted(template, [USER])
    assert counts[0] == len(trajectory.prompt) and sum(counts[1:]) == len(trajectory.tokens)
    assert f"of which {sum(counts[1::2])} would be trained" in lines[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tools", [False, True])
def test_every_family_has_one(name: str, tools: bool) -> None:
    if tools and not FAMILIES[name].tools:
        pytest.skip("its template knows no tools")
    lines = dialogue_lines(template_of(name, TOOLS if tools else ()), None)
    assert sum(line.startswith("  >") for line in lines) == 3 and len(lines) == 7


def test_what_rewrites_is_said() -> None:
    template = template_of("thinking")
    (said,) = remarks(template, find_rewrites(template))
    assert said.startswith("the chat template rewrites what came before")
    assert remarks(template_of("chatml"), None) == []


def test_a_turn_that_does_not_end_is_said() -> None:
    """As of base models that have their sibling's template."""
    tokenizer = tokenizer_with("chatml", template_of("chatml").tokenizer.chat_template)
    tokenizer.eos_token = "<pad>"
    (said,) = remarks(DialogueTemplate(tokenizer), None)
    assert "ends a turn with <|im_end|>, where this model's sampling does not stop" in said
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert remarks(DialogueTemplate(tokenizer, end_tokens=[end]), None) == []


def test_a_date_is_said() -> None:
    source = template_of("chatml").tokenizer.chat_template
    dated = "{% set today = date_string or strftime_now('%d %b %Y') %}{{ today }}" + source
    template = DialogueTemplate(tokenizer_with("chatml", dated))
    assert find_rewrites(template) is None and writes_today(template)
    (said,) = remarks(template, None)
    assert "today's date" in said and "date_string" in said
    kwargs = {"date_string": "1 May 2026"}
    fixed = DialogueTemplate(template.tokenizer, chat_template_kwargs=kwargs)
    assert not writes_today(fixed) and "1 May 2026" in fixed.render([USER])
