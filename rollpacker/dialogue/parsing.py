"""Makes an assistant's message for the environment from the tokens that the model generated in one
turn.

The message serves the environment alone, which answers it. Training uses the generated tokens
themselves: a message is never encoded again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rollpacker.dialogue.call_formats import Found, call_of, format_of
from rollpacker.dialogue.rewrites import find_rewrites
from rollpacker.dialogue.template import DialogueTemplate, TemplateError, stand_in_calls
from rollpacker.dialogue.trajectory import Message

MAX_TOOL_SETS = 256
"""Largest number of cached `TemplateDialogue`s, one for each set of tools that `with_tools` was
asked for. A full cache is emptied."""
_THOUGHT, _WORDS = "stand-in-of-a-thought", "stand-in-of-words"


class TemplateDialogue:
    """Makes tokens and messages with a chat template, as the protocol `Dialogue` asks. The
    template's format of tool calls is found by rendering a call."""

    def __init__(self, template: DialogueTemplate) -> None:
        """Find out how `template` writes tool calls and thinking. Raises `TemplateError` if there
        are tools and the format of their calls is unknown."""
        self.template = template
        self._with_tools: dict[str, TemplateDialogue] = {}
        self._tools = {
            str(tool["function"]["name"]): tool["function"].get("parameters") or {}
            for tool in template.tools
        }
        self._format = None
        self._has_schema = getattr(template.tokenizer, "response_template", None) is not None
        if template.tools:
            call = self._call_text(next(iter(self._tools)))
            self._format = format_of(call)
            if self._format is None and not self._has_schema:
                raise TemplateError(
                    "the chat template writes tool calls in a way that is not known here"
                    f" ({call.strip()!r}). Set the tokenizer's response_template (transformers"
                    " then parses them), or use a model of another family."
                )
        self._opening, self._closing = self._marks_of_thought()
        self._thinks_at_once = False
        if self._closing:
            _, begins, behind = template.behind_turn([]).rpartition(self._opening)
            self._thinks_at_once = bool(begins) and self._closing not in behind

    def prompt(self, messages: Sequence[Message], *, most: int | None = None) -> tuple[int, ...]:
        """Return the tokens of these messages and the generation prompt. Raises `TooLong` if these
        surely are more than `most` tokens (None: no limit)."""
        return self.template.prompt(messages, most=most)

    def appended(
        self, messages: Sequence[Message], sampled: Sequence[int], *, most: int | None = None
    ) -> tuple[int, ...]:
        """Return the tokens to give the model after a turn whose tokens are `sampled`: the rest of
        the turn's ending, the new messages and the generation prompt; see
        `DialogueTemplate.appended`."""
        return self.template.appended(messages, sampled, most=most)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TemplateDialogue:
        """Return a dialogue with the same template that shows the model these tools."""
        key = json.dumps(tools, sort_keys=True)
        found = self._with_tools.get(key)
        if found is None:
            template = DialogueTemplate(
                self.template.tokenizer,
                tools=tools,
                chat_template_kwargs=self.template.kwargs,
                end_tokens=self.template.end_tokens,
            )
            if len(self._with_tools) >= MAX_TOOL_SETS:
                self._with_tools.clear()
            found = self._with_tools[key] = TemplateDialogue(template)
        return found

    def rewritten(self) -> str | None:
        """Return a sentence on how the template rewrites earlier messages. None: it does not."""
        return self._rewritten

    @cached_property
    def _rewritten(self) -> str | None:
        found = find_rewrites(self.template)
        return None if found is None else found.sentence

    def message(self, sampled: Sequence[int], turn: int = 1) -> dict[str, Any]:
        """Return the assistant's message in these tokens, which may break off anywhere: `role`,
        `content`; `reasoning_content` if there is thinking; `tool_calls` if there are calls (each
        with an `id`: the model's, or nine characters made of `turn` and the call's place); and
        `malformed_tool_calls`, a list of texts, if calls could not be read. Never raises."""
        text = self.template.text_of(sampled)
        if self._has_schema and self._format is None and self._tools:
            return self._by_schema(text, sampled, turn)
        thought, text = self._thought_of(text)
        found = Found(text) if self._format is None else self._format(text, self._tools)
        return _message(found, thought, turn)

    def _call_text(self, name: str) -> str:
        """Return the text of a call of the tool `name` as the template writes it."""
        question = {"role": "user", "content": "question"}
        calls = stand_in_calls([{"role": "tool", "name": name}])
        before = self.template.render([question])
        whole = self.template.render([question, calls])
        text = self.template.turn_text([question, calls]) or whole[len(before) :]
        return text.rpartition("</think>")[2]

    def _marks_of_thought(self) -> tuple[str, str]:
        """Return the markers that the template writes before and after an assistant's thinking. Two
        empty texts: it has none."""
        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": _WORDS, "reasoning_content": _THOUGHT}
        shown = self.template.render([question, answer])
        before, is_shown, behind = shown.partition(_THOUGHT)
        opening = re.search(r"(<[^<>]+>|\[[^\[\]]+\])\w*$", before.rstrip())
        closing, are_words, _ = behind.partition(_WORDS)
        if is_shown and are_words and opening and closing.strip():
            return opening.group(), closing.strip()
        if "</think>" in str(self.template.tokenizer.chat_template):
            return "<think>", "</think>"
        return "", ""

    def _thought_of(self, text: str) -> tuple[str | None, str]:
        """Split a turn's text into the thinking (None: there is none) and the rest. Thinking that
        was cut off takes the whole text."""
        if not self._closing:
            return None, text
        before, is_closed, behind = text.partition(self._closing)
        starts = text.lstrip().startswith(self._opening)
        if not is_closed and not starts and not self._thinks_at_once:
            return None, text
        thought = before.lstrip().removeprefix(self._opening).strip("\n")
        return thought, behind.lstrip("\n")

    def _by_schema(self, text: str, sampled: Sequence[int], turn: int) -> dict[str, Any]:
        """Return the message as transformers' parser reads it, for tokenizers with a response
        schema. That parser completes what is cut off, so calls in an unfinished turn count as
        malformed. `turn` is part of made-up ids."""
        tokenizer = self.template.tokenizer
        is_over = bool(sampled) and sampled[-1] in self.template.end_tokens
        try:
            parsed = tokenizer.parse_response(
                text + (tokenizer.decode([sampled[-1]]) if is_over else ""),
                prefix=self.template.behind_turn([]),
                tools=list(self.template.tools),
            )
            functions = [call["function"] for call in parsed.get("tool_calls") or ()]
            calls = [call_of(one) for one in functions]
            thought = parsed.get("reasoning_content") or parsed.get("thinking")
            words = str(parsed.get("content") or "")
        except Exception:  # whatever the schema's author wrote, and the model
            return _message(Found("", malformed=[text]), None, turn)
        whole = [call for call in calls if call is not None]
        if calls and (not is_over or len(whole) < len(calls)):
            return _message(Found("", malformed=[text]), None, turn)
        return _message(Found(words, whole), None if thought is None else str(thought), turn)


def _message(found: Found, thought: str | None, turn: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": found.content}
    if thought:
        message["reasoning_content"] = thought
    if found.calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call{turn % 1000:03d}{place % 100:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(found.calls)
        ]
    if found.malformed:
        message["malformed_tool_calls"] = found.malformed
    return message
