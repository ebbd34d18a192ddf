"""Reads requests for chat completions, and writes answers, in the form of OpenAI's API. Imports
little, since the processes of environments use it too."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CHOICES = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of messages in OpenAI's API. A message with another role is refused, since a chat template
would render it as if it meant something."""

_KNOWN = {
    *("messages", "model", "tools", "n", "stream", "stream_options", "temperature", "top_p"),
    *("top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs"),
    *("return_token_ids", "user", "metadata"),
}
_WITHOUT_EFFECT = {
    *("store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"),
    *("tool_choice", "response_format", "frequency_penalty", "presence_penalty"),
    *("top_logprobs", "logit_bias"),
}
"""Names of request parameters without effect, accepted only with a value that asks for nothing."""
_MEANS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
}


class ApiError(Exception):
    """A request is refused. The response has `status` and `body`, in the form of OpenAI's API."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 404: "not_found_error"}.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }
        """The body of the HTTP response, as an object that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for chat completions. A field is None if the request does not set it."""

    messages: tuple[dict[str, Any], ...]
    """Messages in the form that chat templates take: the content of each is a text, and the
    arguments of a tool call are an object (not JSON text)."""
    tools: tuple[dict[str, Any], ...] = ()
    model: str = ""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    session: str | None = None
    """Name of the session (calls of one client, of which each may continue the one before): the
    header `X-Session-Id`, `metadata.session_id` or `user`, the first of these that is given."""


def read_chat(body: bytes, headers: Mapping[str, str] | None = None) -> ChatRequest:
    """Read a request from its body and headers. Raises `ApiError` for a request that is wrong."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the body is no JSON") from None
    if not isinstance(asked, dict):
        raise ApiError("the body is no JSON object")
    _check_known(asked)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list with a message or more", param="messages")
    most = asked.get("max_completion_tokens")
    options = asked.get("stream_options")
    return ChatRequest(
        messages=tuple(_message(one, f"messages[{i}]") for i, one in enumerate(messages)),
        tools=() if asked.get("tool_choice") == "none" else _tools(asked.get("tools")),
        model=str(asked.get("model") or ""),
        n=_number(asked, "n", int, 1, MAX_CHOICES) or 1,
        stream=asked.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        temperature=_number(asked, "temperature", float, 0, 100),
        top_p=_number(asked, "top_p", float, 0, 1),
        top_k=_number(asked, "top_k", int, -1, 1 << 31),
        max_tokens=_number(
            asked, "max_tokens" if most is None else "max_completion_tokens", int, 1, 1 << 31
        ),
        stop=_stops(asked.get("stop")),
        seed=_number(asked, "seed", int, -(1 << 63), 1 << 63),
        logprobs=asked.get("logprobs") is True,
        return_token_ids=asked.get("return_token_ids") is True,
        session=_session(asked, headers or {}),
    )


def _check_known(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name in _KNOWN or value is None:
            continue
        if name not in _WITHOUT_EFFECT:
            raise ApiError(f"{name} is not supported here", param=name, code="unsupported")
        if name in _MEANS_NOTHING and value not in _MEANS_NOTHING[name]:
            shown = json.dumps(value)[:100]
            raise ApiError(f"{name}={shown} is not supported here", param=name, code="unsupported")


def _number(asked: Mapping[str, Any], name: str, kind: type, least: float, most: float) -> Any:
    value = asked.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):
        is_number = False
    if not is_number or (kind is int and value != int(value)):
        raise ApiError(f"{name} must be a number", param=name)
    if not least <= value <= most:
        raise ApiError(f"{name} must lie between {least} and {most}", param=name)
    return kind(value)


def _stops(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ApiError("stop must be a text, or a list of texts", param="stop")
    return tuple(found)


def _session(asked: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    metadata = asked.get("metadata")
    of_metadata = metadata.get("session_id") if isinstance(metadata, dict) else None
    found = headers.get("x-session-id") or of_metadata or asked.get("user")
    return None if found is None else str(found)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    found = value or []
    for one in found if isinstance(found, list) else [None]:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                'tools must be a list of {"type": "function", "function": {"name": ...}}',
                param="tools",
            )
    return tuple(found)


def _message(value: Any, where: str) -> dict[str, Any]:
    """Returns a message of a request in the form that chat templates take. Raises `ApiError` if
    `value` is no such message."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ApiError(f"{where} is no message with a role", param=where)
    if value["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise ApiError(f"{where}.role is {value['role'][:40]!r}, not one of {known}", param=where)
    role = "system" if value["role"] == "developer" else value["role"]
    message: dict[str, Any] = {"role": role, "content": _text(value.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    calls = value.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise ApiError(f"{where}.tool_calls is no list", param=where)
        message["tool_calls"] = [_call(one, where) for one in calls]
    return message


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ApiError(f"{where}.content has parts that are no text", param=where)
        texts.append(part["text"])
    return "".join(texts)


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where} has a tool call without a function's name", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ApiError(f"{where} has a tool call whose arguments are no JSON") from None
    called = {"name": function["name"], "arguments": arguments}
    return {"id": str(value.get("id") or ""), "type": "function", "function": called}


def with_names(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Returns the messages, with the tool's name added to each tool's result whose tool call is
    among the messages. Chat templates may need the name, but OpenAI's API does not ask for it."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    found = []
    for message in messages:
        name = names.get(message.get("tool_call_id"))
        is_nameless = message["role"] == "tool" and "name" not in message and name is not None
        found.append({**message, "name": name} if is_nameless else dict(message))
    return tuple(found)


def read_back(wire: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message that `on_wire` made and a client sent back, as chat templates take it."""
    return _message(dict(wire), "message")


def as_said(message: Mapping[str, Any]) -> str:
    """Returns a text by which a message that a client sends back is recognized: messages with the
    same text count as equal. Thinking and tools' names are no part of it, since clients drop them,
    nor is white space at the ends of the content, which some clients strip."""
    calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    content = str(message.get("content") or "").strip()
    known = [message["role"], content, calls, message.get("tool_call_id")]
    return json.dumps(known, sort_keys=True)


# -- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the model's answers to a request."""

    message: Mapping[str, Any]
    """The model's message in the form of OpenAI's API, as `on_wire` makes it."""
    reason: str
    """Why the answer ended: "stop" (the model ended it, or a stop text came) or "length" (it
    reached its maximum number of tokens)."""
    logprobs: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None


def on_wire(message: Mapping[str, Any], stops: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the model's message in the form of OpenAI's API: arguments of tool calls are texts,
    and tool calls that could not be read become part of the content. The content ends before the
    first of the texts `stops`."""
    content = "\n".join(
        filter(None, [message.get("content"), *message.get("malformed_tool_calls", ())])
    )
    ends = [at for stop in stops if (at := content.find(stop)) >= 0]
    content = content[: min(ends)] if ends else content
    calls = message.get("tool_calls") or ()
    wire: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if message.get("reasoning_content"):
        wire["reasoning_content"] = message["reasoning_content"]
    if calls:
        wire["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return wire


def completion(
    identity: str,
    model: str,
    choices: Sequence[Choice],
    *,
    usage: tuple[int, int] = (0, 0),
    prompt_token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns the body of the answer to a request. `usage`: number of tokens of the prompt, and of
    all `choices` together. `prompt_token_ids`: the prompt's tokens, or None to leave these out."""
    told: dict[str, Any] = {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, one) for index, one in enumerate(choices)],
        "usage": {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        },
    }
    if prompt_token_ids is not None:
        told["prompt_token_ids"] = list(prompt_token_ids)
    return told


def _choice(index: int, choice: Choice) -> dict[str, Any]:
    called = bool(choice.message.get("tool_calls"))
    told: dict[str, Any] = {
        "index": index,
        "message": dict(choice.message),
        "finish_reason": "tool_calls" if called and choice.reason == "stop" else choice.reason,
        "logprobs": None if choice.logprobs is None else {"content": list(choice.logprobs)},
    }
    if choice.token_ids is not None:
        told["token_ids"] = list(choice.token_ids)
    return told


def event(told: Mapping[str, Any] | str) -> bytes:
    """Returns a server-sent event with the data `told`, as bytes."""
    text = told if isinstance(told, str) else json.dumps(told)
    return f"data: {text}\n\n".encode()


def opening(identity: str, model: str) -> bytes:
    """Returns the first event of a streamed answer, sent before anything is generated."""
    head = {"id": identity, "object": "chat.completion.chunk", "created": int(time.time())}
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return event({**head, "model": model, "choices": [choice]})


def stream(told: Mapping[str, Any], *, include_usage: bool) -> Iterator[bytes]:
    """Yields the events of a streamed answer after the first. `told` is the result of `completion`.
    A choice's text is one event, since engines give a message as a whole."""
    head = {
        "id": told["id"],
        "object": "chat.completion.chunk",
        "created": told["created"],
        "model": told["model"],
    }
    if "prompt_token_ids" in told:
        head["prompt_token_ids"] = told["prompt_token_ids"]
    for choice in told["choices"]:
        delta = {**choice["message"]}
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(delta["tool_calls"])
            ]
        said = {"index": choice["index"], "delta": delta, "finish_reason": None}
        more = {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
        yield event({**head, "choices": [{**said, **more}]})
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield event({**head, "choices": [end]})
    if include_usage:
        yield event({**head, "choices": [], "usage": told["usage"]})
    yield event("[DONE]")
