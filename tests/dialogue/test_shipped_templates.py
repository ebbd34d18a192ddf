"""The templates of real models that an installed package brings along, where there are some."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rollpacker.dialogue.check import scripted
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.rewrites import find_rewrites, first_change
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.dialogue.trajectory import Segment, Trajectory
from tests.dialogue.families import TOOLS, byte_backend

_FOUND = importlib.util.find_spec("trl")
FOLDER = Path(_FOUND.origin).parent / "chat_templates" if _FOUND and _FOUND.origin else None
pytestmark = pytest.mark.skipif(
    FOLDER is None or not FOLDER.exists(), reason="trl brings no chat templates along"
)
TURN = {"role": "assistant", "content": "Words."}
THOUGHT = {**TURN, "reasoning_content": "Thought."}
USER = {"role": "user", "content": "Question?"}


def shipped(name: str) -> PreTrainedTokenizerFast:
    """Of the template's own markers."""
    assert FOLDER is not None
    path = FOLDER / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"this trl has no {path.name}")
    source = path.read_text()
    marks = re.findall(r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>", source)
    made = PreTrainedTokenizerFast(tokenizer_object=byte_backend())
    made.add_tokens([AddedToken(mark, special=True) for mark in sorted(set(marks))])
    ends = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>")
    ends = (*ends, "<\uff5cend\u2581of\u2581sentence\uff5c>")
    end = next((end for end in ends if end in marks), "<end>")
    made.add_special_tokens({"bos_token": "<begin>", "eos_token": end})
    made.chat_template = source
    return made


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "llama3", "llama3_1", "llama3_2"),
        *("gemma", "gemma3", "phi3", "phi3_5", "lfm2", "cohere"),
    ],
)
def test_those_that_only_grow(name: str) -> None:
    template = DialogueTemplate(shipped(name))
    assert find_rewrites(template) is None
    tokens = scripted(template, [USER])
    turns = [{**TURN, "content": words} for words in ("A first answer.", "An answer.")]
    asked = [{**USER, "content": words} for words in ("And then?", "Another question.")]
    text = template.render([USER, turns[0], asked[0], turns[1], asked[1]], to_go_on=True)
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [*tokens.prompt, *tokens.tokens][: len(ids)] == ids


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano"])
def test_those_that_drop_thinking(name: str) -> None:
    template = DialogueTemplate(shipped(name))
    found = find_rewrites(template)
    assert found is not None and "role user follows" in found.sentence
    assert first_change(template, [USER, THOUGHT, USER]) is not None


def test_one_whose_thinking_stays_between_tools() -> None:
    template = DialogueTemplate(shipped("qwen3"), tools=TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {}}}
    result = {"role": "tool", "name": "search", "tool_call_id": "1", "content": "found"}
    turn = {**THOUGHT, "tool_calls": [call]}
    assert first_change(template, [USER, turn, result, turn, result]) is None


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_6", "glm4moe", "llama3_1", "llama3_2", "qwen3_vl"]
)
def test_a_call_as_the_template_writes_it(name: str) -> None:
    template = DialogueTemplate(shipped(name), tools=TOOLS)
    arguments = {"query": 'what "is" {this}?', "limit": 3}
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    text = template.turn_text(
        [USER, {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "call00100"}]}]
    )
    assert text is not None
    message = TemplateDialogue(template).message(template.canonical(text))
    assert message["tool_calls"] == [{**call, "id": "call00100"}] and message["content"] == ""


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_one_row_for_each_message_of_a_user(name: str) -> None:
    """Where thinking stays until a user speaks again, what is called in between extends the row."""
    template = DialogueTemplate(shipped(name), tools=TOOLS)
    dialogue = TemplateDialogue(template)
    call = {"name": "search", "arguments": {"query": "where?", "limit": 3}}
    calling = {**THOUGHT, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    result = {"role": "tool", "name": "search", "tool_call_id": "1", "content": "found"}
    messages = [USER]
    trajectory = Trajectory(dialogue.prompt(messages))
    for number, (turn, told) in enumerate(
        [(calling, result), (calling, result), (THOUGHT, USER), (calling, result), (THOUGHT, USER)]
    ):
        text = template.turn_text([*messages, turn])
        assert text is not None
        end = () if template.end_of_turn is None else (template.end_of_turn,)
        drawn = (*template.canonical(text), *end)
        trajectory = trajectory.and_then(Segment(drawn, (0.0,) * len(drawn)))
        messages += [dialogue.message(drawn, number), told]
        trajectory = trajectory.prompted(dialogue.prompt(messages))
    assert [sum(1 for _ in row.turns) for row in trajectory.rows] == [3, 2]
