"""Displays a dialogue as the model would get it, with the tokens that would be trained on marked,
at the start of a run with dialogues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.data.chat import shown_prompt, visible
from rollpacker.dialogue.rewrites import Rewrites, writes_today
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.dialogue.trajectory import Message, Segment, Trajectory

_QUESTION: Message = {"role": "user", "content": "A question."}


def dialogue_lines(
    template: DialogueTemplate, rewrites: Rewrites | None, prompt: Sequence[Message] | None = None
) -> list[str]:
    """Return lines for the terminal: three scripted turns of the model after `prompt` (None: a
    question), the first with a tool call if there are tools, with `>` before tokens that would be
    trained on; then remarks on the template. `rewrites` is the result of `find_rewrites`; if it is
    not None, turns that have another prompt are shown with that prompt."""
    trajectory = scripted(template, prompt or [_QUESTION], rewrites=rewrites is not None)
    rows = trajectory.rows if rewrites is not None else [trajectory]
    lines = [
        f"a dialogue of three turns, {len(trajectory.prompt)} tokens of prompt and"
        f" {len(trajectory.tokens)} behind it, of which {trajectory.num_sampled} would be trained"
        f" on (>){f' in {len(rows)} rows' if len(rows) > 1 else ''}:",
    ]
    for row in rows:
        lines.append(_line(" ", row.prompt, template))
        lines += [
            _line(">" if one.is_sampled else " ", one.tokens, template) for one in row.segments
        ]
    return lines + remarks(template, rewrites)


def remarks(template: DialogueTemplate, rewrites: Rewrites | None) -> list[str]:
    """Return sentences about the chat template that a user should know: it rewrites messages, ends
    turns at a token where sampling does not stop, or writes the date. Often empty."""
    told = []
    if rewrites is not None:
        told.append(
            f"{rewrites.sentence} A dialogue that only grows is not what the template makes of it."
        )
    end = template.end_of_turn
    if end is not None and end not in template.end_tokens:
        shown = visible(str(template.tokenizer.convert_ids_to_tokens(end)))
        told.append(
            f"the chat template ends a turn with {shown}, where this model's sampling does not"
            " stop, so that turns go on to their limit. Use an instruct model, or add the token to"
            " the end tokens."
        )
    if writes_today(template):
        told.append(
            "the chat template writes today's date into the prompt: a run that goes on another day"
            " has other prompts. Most such templates take a fixed one in"
            " model.chat_template_kwargs (date_string)."
        )
    return told


def scripted(
    template: DialogueTemplate, prompt: Sequence[Message], *, rewrites: bool = False
) -> Trajectory:
    """Return a dialogue with three turns of the model, written as the template writes them, each
    with the template's end token if sampling stops there. With `rewrites`, each turn's prompt is
    rendered anew from all messages before it."""
    messages = list(prompt)
    trajectory = Trajectory(template.prompt(messages))
    for turn, answers in _script(template.tools):
        messages.append(turn)
        text = template.turn_text(messages)
        words = str(turn["content"]) if text is None else text
        sampled = template.canonical(words)
        if template.end_of_turn in template.end_tokens:
            sampled = (*sampled, template.end_of_turn)
        trajectory = trajectory.and_then(Segment(sampled, (0.0,) * len(sampled)))
        messages += answers
        if answers and rewrites:
            trajectory = trajectory.prompted(template.prompt(messages))
        elif answers:
            trajectory = trajectory.and_then(Segment(template.appended(answers, sampled)))
    return trajectory


def _script(tools: Sequence[Mapping[str, Any]]) -> list[tuple[Message, list[Message]]]:
    last: tuple[Message, list[Message]] = ({"role": "assistant", "content": "The end."}, [])
    second: tuple[Message, list[Message]] = (
        {"role": "assistant", "content": "An answer."},
        [{"role": "user", "content": "Another question."}],
    )
    first: tuple[Message, list[Message]] = (
        {"role": "assistant", "content": "A first answer."},
        [{"role": "user", "content": "And then?"}],
    )
    if tools:
        function = tools[0]["function"]
        properties = (function.get("parameters") or {}).get("properties") or {}
        call = {"name": function["name"], "arguments": dict.fromkeys(properties, "...")}
        told = {"id": "call00100", "type": "function", "function": call}
        result = {"role": "tool", "name": function["name"], "tool_call_id": "call00100"}
        first = (
            {"role": "assistant", "content": "", "tool_calls": [told]},
            [{**result, "content": "A result."}],
        )
    return [first, second, last]


def _line(mark: str, tokens: Sequence[int], template: DialogueTemplate) -> str:
    return f"  {mark} {len(tokens):>5}  {shown_prompt(tokens, template.tokenizer)}"
