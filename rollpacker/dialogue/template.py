"""A chat template for dialogues whose tokens only grow: a prompt, and the text after each generated
turn (message of the model).

Nothing here depends on a family of models. What a template writes after an assistant's message is
found by rendering a short dialogue with a placeholder for that message: the text after the
placeholder is given to the model next. So each message is rendered once, and generated tokens are
never rendered, decoded and encoded again."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rollpacker.chat_template import end_of_turn
from rollpacker.dialogue.encoding import Encoder, held, num_alike, whole_marker
from rollpacker.dialogue.trajectory import Message

STAND_IN = "stand-in-of-a-turn"
_QUESTION: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": STAND_IN}


class TemplateError(ValueError):
    """The chat template cannot do what is needed; the message says what the user can do."""


class DialogueTemplate:
    """A tokenizer's chat template, for dialogues that grow with each message of the model."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        end_tokens: Collection[int] = (),
    ) -> None:
        """Try out the tokenizer's chat template. `tools` are JSON schemas of the tools to show to
        the model. `end_tokens` are tokens at which sampling stops, besides the tokenizer's own
        end token. Raises `TemplateError` if there is no template, or if it refuses a plain
        dialogue or does not show tools."""
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "a dialogue needs a chat template, and the tokenizer has none. Use an instruct"
                " model, or set the tokenizer's chat_template."
            )
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.kwargs = dict(chat_template_kwargs or {})
        self._arguments_are_text = False
        eos = tokenizer.eos_token_id
        self.end_tokens = frozenset(end_tokens) | (frozenset() if eos is None else {int(eos)})
        last = self.render([_QUESTION, _ANSWER])
        followed = self.render([_QUESTION, _ANSWER, _QUESTION], to_go_on=True)
        if STAND_IN not in last or STAND_IN not in followed:
            raise TemplateError(
                "the chat template does not show an assistant's message as it is: it leaves it out,"
                " or rewrites it (cuts it short, say), so that what the model drew would not be"
                " what it sees. Use a template that shows it whole."
            )
        self._last_ending = last.partition(STAND_IN)[2]
        self._encoder = Encoder(tokenizer, [last, followed])
        if self.tools:
            self._find_tools(last, followed)
        self.ending = self._ending_of(followed.partition(STAND_IN)[2])

    @property
    def marker_ids(self) -> frozenset[int]:
        """Ids of the special tokens, such as the end of a turn. Words of tools and users never
        become these."""
        return self._encoder.marker_ids

    @property
    def end_of_turn(self) -> int | None:
        """The token that the template puts after an assistant's message. None: it puts none there,
        and the next message's first token marks the end."""
        return end_of_turn(self.tokenizer, self.kwargs)

    def prompt(self, messages: Sequence[Message], *, most: int | None = None) -> tuple[int, ...]:
        """Return the tokens of these messages and the generation prompt. Messages of the model
        among them are rendered too, for templates that rewrite earlier messages. Raises `TooLong`,
        without encoding, if the text surely has more than `most` tokens (None: no limit)."""
        changed, words = held(messages, self._encoder.markers)
        text = self.render(changed, to_go_on=True)
        self._encoder.check_room(text, words, most)
        return tuple(self._encoder.encode(text, words))

    def appended(
        self, messages: Sequence[Message], sampled: Sequence[int], *, most: int | None = None
    ) -> tuple[int, ...]:
        """Return the tokens to give the model after a turn of these `sampled` tokens: what is
        missing of the turn's ending (all of it if the turn was cut off), the new messages (tools'
        results or a user's message; may be empty), and the generation prompt. Raises
        `TemplateError` if the template refuses the messages, and `TooLong` like `prompt`."""
        changed, words = held(messages, self._encoder.markers)
        end = sampled[-1] if sampled and sampled[-1] in self.end_tokens else None
        text = self._without(end, self.behind_turn(changed))
        self._encoder.check_room(text, words, most)
        return tuple(self._encoder.encode(text, words, behind=end))

    def canonical(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a turn that the model did not generate, such as a scripted one."""
        return tuple(self._encoder.encode(text, behind=self.tokenizer.eos_token_id))

    def text_of(self, sampled: Sequence[int]) -> str:
        """Return the text of a generated turn, with special tokens but without its end token."""
        if sampled and sampled[-1] in self.end_tokens:
            sampled = sampled[:-1]
        return self._encoder.decode(sampled)

    def render(
        self, messages: Sequence[Message], *, to_go_on: bool = False, with_tools: bool = True
    ) -> str:
        """Return the template's text for these messages, with the generation prompt if `to_go_on`,
        and with the tools' schemas unless `with_tools` is False. Raises `TemplateError` if the
        template refuses the messages."""
        tools: dict[str, Any] = {}
        if self.tools and with_tools:
            tools["tools"] = list(self.tools)
        shown = [shown_again(message, self._arguments_are_text) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    shown,
                    tokenize=False,
                    add_generation_prompt=to_go_on,
                    **tools,
                    **self.kwargs,
                )
            )
        except Exception as error:  # whatever a template's author wrote
            raise TemplateError(f"the chat template refuses the messages: {error}") from None

    def turn_text(self, messages: Sequence[Message]) -> str | None:
        """Return the template's text of the last message, which must be the assistant's, as a model
        would generate it: without generation prompt and ending. None: the template does not begin
        this message with the generation prompt."""
        before = self.render(messages[:-1], to_go_on=True)
        whole = self.render(messages)
        if not whole.startswith(before):
            return None
        return whole[len(before) :].removesuffix(self._last_ending)

    def behind_turn(self, messages: Sequence[Message]) -> str:
        """Return the text to give the model after its turn: the turn's ending, the new `messages`
        rendered, and the generation prompt."""
        results = []
        for message in messages:
            if message.get("role") != "tool":
                break
            results.append(message)
        if not results:
            whole = self.render([_QUESTION, _ANSWER, *messages], to_go_on=True)
            return whole.partition(STAND_IN)[2]
        try:
            return self._behind_calls(stand_in_calls(results), messages)
        except TemplateError:
            if len(results) == 1:
                raise
            return self._behind_calls(stand_in_calls(results[:1]), messages)

    def _behind_calls(self, calls: Message, messages: Sequence[Message]) -> str:
        last = self.render([_QUESTION, calls]).partition(STAND_IN)[2]
        close = last.removesuffix(self._last_ending)
        whole = self.render([_QUESTION, calls, *messages], to_go_on=True)
        text = whole.partition(STAND_IN)[2]
        if not text.startswith(close):
            raise TemplateError(
                "the chat template writes a tool call otherwise once its result follows."
            )
        return text[len(close) :]

    def _without(self, end: int | None, text: str) -> str:
        """Return `text` (the text to give after a turn) without its beginning up to the token
        `end`, with which the model has ended the turn itself. None: the turn was cut off, and
        all of `text` is needed."""
        if end is None:
            return text
        mark = self._encoder.text_of(end)
        at = self.ending.find(mark)
        if at >= 0 and text.startswith(self.ending):
            return text[at + len(mark) :]
        return text.removeprefix(mark)

    def _ending_of(self, followed: str) -> str:
        """Return the text that ends a turn whether or not messages follow. `followed` is the text
        after a turn with messages behind it. Some templates add text after the last message."""
        length = num_alike(self._last_ending, followed)
        return followed[: whole_marker(followed, length, self._encoder.markers)]

    def _find_tools(self, last: str, followed: str) -> None:
        """Find out whether the template needs the arguments of tool calls as text. Raises
        `TemplateError` unless it shows tools, calls and results. `last` and `followed` are
        renderings without tool calls: of a dialogue that ends with the model's message, and of
        one that goes on after it."""
        name = str(self.tools[0].get("function", {}).get("name", ""))
        result: Message = {
            "role": "tool",
            "name": name,
            "tool_call_id": "call00001",
            "content": "result-of-a-tool",
        }
        exchange = [_QUESTION, stand_in_calls([result]), result]
        shown, reason = "", ""
        for arguments_are_text in (False, True):
            self._arguments_are_text = arguments_are_text
            try:
                shown, reason = self.render(exchange, to_go_on=True), ""
                break
            except TemplateError as error:
                reason = f" ({error})"
        told, untold = (self.render([_QUESTION], with_tools=told) for told in (True, False))
        missing = [
            what
            for what, is_shown in (
                ("the tools", told.count(name) > untold.count(name)),
                ("calls of them", STAND_IN in shown),
                ("their results", "result-of-a-tool" in shown),
            )
            if not is_shown
        ]
        if missing:
            raise TemplateError(
                f"there are tools, but the chat template does not show {' and '.join(missing)} to"
                f" the model{reason}. Use a model whose template knows tools, or an environment of"
                " your own that says in plain messages how to call them."
            )
        self._encoder = Encoder(self.tokenizer, [last, followed, shown])


def stand_in_calls(results: Sequence[Message]) -> Message:
    """Return an assistant's message that calls a tool once for each of `results` (messages with
    tools' results). An argument of the last call is the placeholder `STAND_IN`."""
    calls = []
    for index, result in enumerate(results):
        it = STAND_IN if index == len(results) - 1 else "one before"
        name = str(result.get("name") or "tool").replace(STAND_IN, "tool")
        function = {"name": name, "arguments": {"it": it}}
        identity = str(result.get("tool_call_id") or f"call{index:05d}")
        calls.append({"id": identity, "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def shown_again(message: Message, arguments_are_text: bool) -> dict[str, Any]:
    """Return a message as templates expect it: malformed calls are part of its content, and with
    `arguments_are_text` the arguments of calls are JSON text."""
    shown = dict(message)
    malformed = shown.pop("malformed_tool_calls", None)
    if malformed:
        shown["content"] = "\n".join(filter(None, [shown.get("content"), *malformed]))
    calls = shown.get("tool_calls")
    if calls and arguments_are_text:
        shown["tool_calls"] = [
            {**call, "function": {**f, "arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
            for call in calls
            for f in (call["function"],)
        ]
    return shown
