"""Lets a person type the model's messages: lines of input become tokens, as if generated."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.engines.engine import GenerationRequest, Response

if TYPE_CHECKING:
    from rich.console import Console

    from rollpacker.dialogue.template import DialogueTemplate


class StoppedByHand(Exception):
    """Raised when standard input has ended, so that nobody types any more."""


class ByHand:
    """Takes an engine's place: a person types the model's messages. Used on one event loop."""

    def __init__(self, template: DialogueTemplate, console: Console) -> None:
        self._template = template
        self._console = console
        self._lines = _Lines()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Response]:
        """Returns a response with the tokens that a person typed as the next message. `requests`
        has one request, as there is one episode. Raises `StoppedByHand` when the input ends."""
        (request,) = requests
        tokens = await self._asked()
        most = request.sampling.max_response_tokens
        reason = "stop" if len(tokens) <= most else "length"
        tokens = tokens[:most]
        return [
            Response(
                sample=request.sample,
                prompt_tokens=request.prompt_tokens,
                tokens=tokens,
                log_probs=(0.0,) * len(tokens),
                finish_reason=reason,
                version=0,
            )
        ]

    async def _asked(self) -> tuple[int, ...]:
        """Ask the person for messages until the chat template can write one. Returns its tokens."""
        from rich.text import Text

        from rollpacker.data.chat import visible
        from rollpacker.dialogue.template import TemplateError

        while True:
            try:
                return self._tokens(await self._typed())
            except TemplateError as error:
                told = f"- this is no call that the model could make: {visible(str(error))}"
                self._console.print(Text(told, style="yellow"), soft_wrap=True)

    async def _typed(self) -> str:
        """Read a message. A line that ends in a backslash goes on in the next line."""
        lines: list[str] = []
        while True:
            if self._lines.are_typed:
                self._console.print("... " if lines else "your turn: ", end="", style="bold")
            line = await self._lines.next()
            if line is None:
                if lines:
                    return "\n".join(lines)
                raise StoppedByHand
            goes_on = line.endswith("\\")
            lines.append(line[:-1] if goes_on else line)
            if not goes_on:
                return "\n".join(lines)

    def _tokens(self, typed: str) -> tuple[int, ...]:
        text = self._called(typed)
        tokens = self._template.canonical(text)
        end = self._template.end_of_turn
        return (*tokens, end) if end is not None and end in self._template.end_tokens else tokens

    def _called(self, typed: str) -> str:
        """Returns a tool call, typed as JSON, in the model's own notation; other text unchanged."""
        if not self._template.tools or not typed.lstrip().startswith(("{", "[")):
            return typed
        try:
            found = json.loads(typed)
        except ValueError:
            return typed
        calls = found if isinstance(found, list) else [found]
        if not calls or not all(_is_call(call) for call in calls):
            return typed
        question: dict[str, Any] = {"role": "user", "content": "question"}
        asked = [
            {
                "id": f"call001{place % 100:02d}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call.get("arguments", {})},
            }
            for place, call in enumerate(calls)
        ]
        message = {"role": "assistant", "content": "", "tool_calls": asked}
        text = self._template.turn_text([question, message])
        return typed if text is None else text


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments", {}), Mapping)
    )


class _Lines:
    """Reads lines of standard input while the event loop goes on. No thread waits for a line, since
    such a thread could not be ended."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._buffer = b""
        self.are_typed = sys.stdin.isatty()

    async def next(self) -> str | None:
        """The next line of standard input. None if there are no more lines."""
        while b"\n" not in self._buffer:
            read = await self._read()
            if not read:
                rest, self._buffer = self._buffer, b""
                return rest.decode("utf-8", "replace") if rest else None
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")

    async def _read(self) -> bytes:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._fd, ready.set)
        except PermissionError:  # a file, which can always be read
            return os.read(self._fd, 65536)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._fd)
        return os.read(self._fd, 65536)
