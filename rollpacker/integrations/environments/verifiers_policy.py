"""The two parts through which verifiers plays an episode here: the program that holds the dialogue
(a *harness*) and the model that it calls (a *client*).

Verifiers' own programs are run by `uv`, in a process each, which downloads packages. This program
is a loop in this process with the same protocol: every call of the model goes through verifiers'
own server on the loopback address, which keeps the trace, the limits and the hooks of a task.
Verifiers imports a harness as the module `HARNESS_ID`, so this module has that name, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
from verifiers.v1.clients import Client
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessSession
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["PolicyHarness"]  # of these, verifiers takes the harness

HARNESS_ID = "rollpacker-policy"
sys.modules.setdefault(HARNESS_ID.replace("-", "_"), sys.modules[__name__])


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model by verifiers, which waits for its answer."""

    messages: list[dict[str, Any]]
    """The whole dialogue so far, as messages of OpenAI's API."""
    tools: tuple[dict[str, Any], ...]
    answer: asyncio.Future[Mapping[str, Any]]
    """The future that must get the model's next message."""


class PolicyHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """A harness (verifiers' program that holds a dialogue) which calls the model and its tools by
    turns, until a message of the model has no tool calls."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *arguments: Any, **more: Any) -> HarnessSession:
        return _PolicySession(self, *arguments, **more)

    async def launch(self, *_: Any, **__: Any) -> ProgramResult:
        raise NotImplementedError  # the session is all that is asked for


class _PolicySession(HarnessSession):  # type: ignore[misc]
    """One dialogue with the model, over all turns of its user, whom verifiers may simulate."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._stack = AsyncExitStack()
        self._messages: list[dict[str, Any]] = []
        self._http: aiohttp.ClientSession | None = None
        self._tools: list[dict[str, Any]] = []
        self._servers: tuple[Any, Any] = ({}, {})

    async def close(self) -> None:
        if not self._closed:
            await super().close()
            await self._stack.aclose()

    async def _run(self, messages: Sequence[Any] | None) -> ProgramResult:
        if self._http is None:
            await self._begin(with_prompt=messages is None)
        self._messages += [message_to_wire(message) for message in messages or ()]
        while (answer := await self._ask()) is not None:
            self._messages.append(answer)
            calls = answer.get("tool_calls") or ()
            if not calls:
                break
            for call in calls:
                content = await self._call(call["function"])
                self._messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": call["id"],
                        "name": call["function"]["name"],
                        "content": content,
                    }
                )
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _begin(self, *, with_prompt: bool) -> None:
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.secret}"})
        )
        system, prompt = self.harness.resolve_prompt(self.data)
        if system:
            self._messages.append({"role": "system", "content": system})
        if with_prompt and isinstance(prompt, str):
            self._messages.append({"role": "user", "content": prompt})
        elif with_prompt:
            self._messages += [message_to_wire(message) for message in prompt or ()]
        specs = {name: {"url": url} for name, url in self.mcp_urls.items()}
        if specs:
            self._tools, *found = await connect_mcp({"mcpServers": specs}, self._stack)
            self._servers = (found[0], found[1])

    async def _ask(self) -> dict[str, Any] | None:
        """Call the model and return its message. None: the task, a limit or an error has ended the
        dialogue, as verifiers' trace says."""
        assert self._http is not None
        body: dict[str, Any] = {"model": self.ctx.model, "messages": self._messages}
        if self._tools:
            body["tools"] = self._tools
        async with self._http.post(f"{self.endpoint}/chat/completions", json=body) as response:
            if response.status == 200:
                message: dict[str, Any] = (await response.json())["choices"][0]["message"]
                return message
            if self.trace.stop_condition is not None:
                return None
            raise RuntimeError(f"a call of the model failed: {await response.text()}")

    async def _call(self, function: Mapping[str, str]) -> Any:
        """Call a tool and return its result, or a text for the model that says what is wrong with
        the call."""
        dispatch, servers = self._servers
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are no JSON ({error})"
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object"
        if function["name"] not in dispatch:
            return f"error: there is no tool {function['name']}; there are {', '.join(dispatch)}"
        return await call_mcp(servers, dispatch, function["name"], arguments)


class PolicyClient(Client):  # type: ignore[misc]
    """The model, as verifiers calls it: a call waits until its `Call.answer` is set."""

    def __init__(self) -> None:
        self.called: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        """Future that is done when verifiers calls the model; its result is the call. `step` of the
        environment then puts a new future here."""

    async def get_response(self, dialect: Any, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        if self.called.done():
            raise RuntimeError("verifiers holds several dialogues with the model at once")
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.called.set_result(Call(body["messages"], tuple(body.get("tools") or ()), answer))
        message = await answer
        calls = message.get("tool_calls") or ()
        raw = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "tool_calls" if calls else "stop",
                    "message": _as_on_the_wire(message, calls),
                }
            ],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _as_on_the_wire(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An assistant's message in the form of OpenAI's API: arguments of calls are text, and calls
    have ids."""
    wire: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        wire["reasoning_content"] = message["reasoning_content"]
    if calls:
        wire["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{index}_{uuid.uuid4().hex[:8]}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _as_text(call["function"].get("arguments")),
                },
            }
            for index, call in enumerate(calls)
        ]
    return wire


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
