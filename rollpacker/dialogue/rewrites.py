"""Finds chat templates that write earlier messages differently once later ones follow.

A growing dialogue (tokens are only ever added at its end) then differs from what the template makes
of the same messages: the model might see its own thinking, for example, where it was trained
without. Short dialogues for the usual cases (thinking dropped from history, rules for the last
user's message, tools described in the newest message) are made in both ways and compared."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.dialogue.encoding import num_alike
from rollpacker.dialogue.template import DialogueTemplate, TemplateError, stand_in_calls
from rollpacker.dialogue.trajectory import Message

_EXCERPT = 40


@dataclass(frozen=True, slots=True)
class Change:
    """The first place where a template's text of a dialogue differs from the growing dialogue's, to
    which text is only ever added at the end."""

    what: str
    """Part of the dialogue in which the texts first differ: "prompt", "turn" (a message of the
    model) or "answer" (what was given after a turn)."""
    index: int
    """Number of the turn or answer among those of the dialogue, from 1."""
    num_turns: int
    """Number of the model's turns before the message that caused the change."""
    follows: str
    """Role of the message whose addition caused the change: "user", "tool" or "assistant" (the
    model's own message, which does not begin with the generation prompt)."""
    grown: str
    rendered: str
    """First characters of the template's text from the place of the change on; `grown` has those
    of the growing dialogue."""


@dataclass(frozen=True, slots=True)
class Rewrites:
    """The ways in which a chat template rewrites earlier messages. A run with such a template
    trains on each turn as a sample of its own, whose prompt is `DialogueTemplate.prompt` of all
    messages before it, or it refuses to start."""

    changes: tuple[tuple[str, Change], ...]
    """The first change of each kind, each with the name of the short dialogue that showed it."""

    @property
    def sentence(self) -> str:
        """A sentence that lists the changes and the messages that cause them."""
        parts = []
        for dialogue, change in self.changes:
            what = "the prompt" if change.what == "prompt" else f"{change.what} {change.index}"
            when = (
                "once the turn is over"
                if change.follows == "assistant"
                else f"once a message of role {change.follows} follows"
            )
            parts.append(
                f"{what} {when}, in {dialogue} ({change.grown!r} becomes {change.rendered!r})"
            )
        return f"the chat template rewrites what came before: {'; '.join(parts)}."


def find_rewrites(template: DialogueTemplate) -> Rewrites | None:
    """Find how a template rewrites earlier messages, by rendering short dialogues. Dialogues that
    the template refuses (such as several calls at once) are skipped. None: no rewriting."""
    found: dict[tuple[str, str], tuple[str, Change]] = {}
    for name, messages in probes(template):
        try:
            change = first_change(template, messages)
        except TemplateError:
            continue
        if change is not None:
            found.setdefault((change.what, change.follows), (name, change))
    return Rewrites(tuple(found.values())) if found else None


def first_change(template: DialogueTemplate, messages: Sequence[Message]) -> Change | None:
    """Render a dialogue whole before each of the model's turns, and return the first place where it
    differs from the growing dialogue (text only added at its end). None: there is no difference.
    Raises `TemplateError` if the template refuses the dialogue."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return None
    pieces = [("prompt", 1, template.render(messages[: turns[0]], to_go_on=True))]
    for number, turn in enumerate(turns, start=1):
        text = template.turn_text(messages[: turn + 1])
        if text is None:
            grown = "".join(piece for _, _, piece in pieces)
            rendered = template.render(messages[: turn + 1])
            return _change(pieces, grown, rendered, number - 1, "assistant")
        following = turns[number] if number < len(turns) else len(messages)
        new = messages[turn + 1 : following]
        pieces.append(("turn", number, text))
        pieces.append(("answer", number, template.behind_turn(new)))
        grown = "".join(piece for _, _, piece in pieces)
        rendered = template.render(messages[:following], to_go_on=True)
        if new and grown != rendered:
            return _change(pieces, grown, rendered, number, str(new[0]["role"]))
    return None


def _change(
    pieces: Sequence[tuple[str, int, str]], grown: str, rendered: str, num_turns: int, follows: str
) -> Change:
    at = num_alike(grown, rendered)
    ends = list(itertools.accumulate(len(piece) for _, _, piece in pieces))
    place = min(bisect.bisect_right(ends, at), len(pieces) - 1)
    what, index, _ = pieces[place]
    return Change(
        what=what,
        index=index,
        num_turns=num_turns,
        follows=follows,
        grown=grown[at : at + _EXCERPT],
        rendered=rendered[at : at + _EXCERPT],
    )


def writes_today(template: DialogueTemplate) -> bool:
    """Whether the template writes the present date into prompts, so that a run resumed on another
    day has other prompts. This is found by rendering with a clock that fails when it is called."""
    question = [{"role": "user", "content": "question"}]
    arguments: dict[str, Any] = {"tools": list(template.tools)} if template.tools else {}
    try:
        template.tokenizer.apply_chat_template(
            question, tokenize=False, **arguments, **template.kwargs, strftime_now="no function"
        )
    except Exception:  # the template called it
        return True
    return False


def probes(template: DialogueTemplate) -> Iterator[tuple[str, list[Message]]]:
    """Yield short dialogues to try a template with, each with a name for error messages. Thinking
    is a separate key of a message if the template knows that key, else it is part of the text."""

    def user(text: str) -> Message:
        return {"role": "user", "content": text}

    def turn(text: str, **more: Any) -> Message:
        return {"role": "assistant", "content": text, **more}

    yield (
        "a plain dialogue",
        [user("one"), turn("first"), user("two"), turn("second"), user("three")],
    )
    yield "a dialogue with empty messages", [user("one"), turn("first"), user(""), turn("second")]
    yield (
        "a dialogue of other scripts",
        [user("\u00e9\u4f60\U0001f642"), turn("\u00e9\u4f60\U0001f642 \u0627"), user("\u2028 \t")],
    )
    key = {"reasoning_content": "thought"}
    knows_key = "thought" in template.render([user("one"), turn("first", **key)])
    thought = key if knows_key else {}
    written = "" if knows_key else "<think>\nthought\n</think>\n\n"
    first, second = turn(f"{written}first", **thought), turn(f"{written}second", **thought)
    yield "a dialogue with thinking", [user("one"), first, user("two"), second, user("three")]
    tools = template.tools
    if not tools:
        return
    name = str(tools[0]["function"]["name"])

    def result(number: int, text: str = "result") -> Message:
        identity = f"call{number:05d}"
        return {"role": "tool", "name": name, "tool_call_id": identity, "content": text}

    def calls(*results: Message, **more: Any) -> Message:
        return {**stand_in_calls(results), **more}

    one, two, three = result(1), result(2, "\u00e9 {}"), result(3, "")
    question, answer = user("one"), turn("first")
    yield (
        "a dialogue with tool calls",
        [question, calls(one), one, calls(two), two, answer, user("two")],
    )
    yield (
        "a dialogue with several tool calls at once",
        [question, calls(one, two), one, two, calls(three), three, answer, user("two")],
    )
    yield (
        "a dialogue with thinking and tool calls",
        [
            *[question, calls(one, **thought), one, calls(two, **thought), two],
            *[first, user("two")],
        ],
    )
