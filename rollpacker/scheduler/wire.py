"""One request to an inference server: what vLLM's completions and SGLang's /generate are sent, and
how the answer is read. What a server sends is data, and untrusted: its size is bounded, its types
are checked, and redirects and compressed answers are refused."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rollpacker.endpoints.http import (
    CompressedAnswer,
    http_library,
    one_line,
    read_bounded,
    refuse_compressed,
    token_from,
)

Kind = Literal["vllm", "sglang"]

CONNECT_S = 10.0
REFUSED = (400, 413, 422)
"""HTTP statuses by which a server says that the request itself is wrong."""
NOT_TAKEN = (429, 502, 503, 504)
"""HTTP statuses of a server, or a gateway before it, that has not begun with the request."""
MAX_ERROR_BYTES = 2000
BYTES_A_TOKEN, BYTES_A_PROMPT_TOKEN, BYTES_BESIDE = 16_384, 4096, 1 << 16
"""An answer has at most so many bytes for each token, and for all else. Of a token SGLang may send
the experts of all layers, for the prompt too, and all tokens that top-p kept."""


class Lost(Exception):
    """A server did not answer, failed, or broke off in the middle of an answer."""

    def __init__(self, why: str, *, was_taken: bool = True) -> None:
        super().__init__(one_line(why)[:300])
        self.was_taken = was_taken
        """Whether the server may have begun with the request."""


class Cut(Lost):
    """A connection ended, or was silent, before the answer was whole: the server may have died, and
    have been started anew."""


@dataclass(slots=True, eq=False)
class Draw:
    """A response to draw, and what of it has come."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    vocab_size: int
    id: str = ""
    """What SGLang knows it by; another for each server that is asked."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: str = ""
    """Why the server ended it: "stop", "length", "abort". Empty: it did not."""
    reply: bytes = b""
    """SGLang's answer as it came. It has more than is read here, such as the text."""

    @property
    def is_whole(self) -> bool:
        return self.finish in ("stop", "length")

    @property
    def max_bytes(self) -> int:
        prompt = BYTES_A_PROMPT_TOKEN * len(self.prompt)
        return BYTES_BESIDE + prompt + BYTES_A_TOKEN * self.max_tokens

    def add(self, tokens: Sequence[int], log_probs: Sequence[float | None]) -> None:
        """Append tokens as a server sent them. Raises `ValueError` if they cannot be right."""
        if len(tokens) != len(log_probs):
            raise ValueError(f"it sent {len(tokens)} tokens, and {len(log_probs)} log-probs")
        if len(self.tokens) + len(tokens) > self.max_tokens:
            raise ValueError(f"it sent more than {self.max_tokens} tokens")
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"it sent token {token}, of a vocabulary of {self.vocab_size}")
            if log_prob is None or not (math.isfinite(log_prob) and log_prob < 0.01):
                raise ValueError(f"it sent {log_prob} as the logarithm of a probability")
            self.tokens.append(token)
            self.log_probs.append(log_prob)


class Wire:
    """Connections to servers of one kind."""

    def __init__(
        self,
        kind: Kind,
        sampling: Mapping[str, Any],
        token_env: str | None,
        silence_s: float,
        extra: Mapping[str, Any],
    ) -> None:
        self.kind, self._sampling, self._extra = kind, dict(sampling), extra
        http = http_library("rollpacker.scheduler.servers")
        self._errors = (http.HTTPError, http.StreamError, OSError)
        self._not_taken = (http.ConnectError, http.ConnectTimeout)
        token = token_from(token_env)
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._client = http.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {token}"} if token else {}),
            timeout=http.Timeout(silence_s, connect=CONNECT_S, pool=None),
            # An idle connection saves little, and breaks when the server closes it just then.
            limits=http.Limits(max_connections=None, max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=False,  # no proxy and no password file of this machine's user
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def status(self, method: str, url: str, content: object = None) -> int:
        """Return the HTTP status of an answer whose body does not matter; 0: there was none."""
        body = b"" if content is None else msgspec.json.encode(content)
        try:
            async with self._client.stream(method, url, content=body, timeout=CONNECT_S) as answer:
                return int(answer.status_code)
        except self._errors:
            return 0

    async def ask(self, url: str, draw: Draw, **sampling: Any) -> None:
        """Have a server draw a response, up to its end, or until it aborts it. Raises `Lost`, or
        `ValueError` if it refuses, or sends what cannot be right."""
        # SGLang aborts all whose ids begin with the one given: none is the beginning of another.
        draw.id = uuid.uuid4().hex
        draw.tokens, draw.log_probs, draw.finish = [], [], ""
        ask, read = (_vllm, _read_stream) if self.kind == "vllm" else (_sglang, _read_reply)
        path, body = ask(draw, {**self._sampling, **sampling})
        content = msgspec.json.encode({**self._extra, **body})
        try:
            async with self._client.stream("POST", url + path, content=content) as answer:
                if answer.status_code in REFUSED:
                    text, _ = await read_bounded(answer, MAX_ERROR_BYTES)
                    raise ValueError(f"it refuses: {text.decode(errors='replace')}")
                if answer.status_code != 200:
                    was_taken = answer.status_code not in NOT_TAKEN
                    raise Lost(f"it answered {answer.status_code}", was_taken=was_taken)
                refuse_compressed(answer)
                await read(answer, draw)
        except self._errors as error:
            why = f"it cannot be reached ({str(error) or type(error).__name__})"
            if isinstance(error, self._not_taken):
                raise Lost(why, was_taken=False) from None
            raise Cut(why) from None
        except CompressedAnswer as error:
            raise ValueError(f"it sent {error}") from None
        if not draw.finish:
            raise Cut("it broke off an answer")
        if draw.is_whole and not draw.tokens:
            raise ValueError("it sent a response without tokens")


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


def _vllm(draw: Draw, sampling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    wanted = {"n": 1, "echo": False, "stream": True, "return_token_ids": True, "logprobs": 0}
    own = {"prompt": draw.prompt, "seed": draw.seed, "max_tokens": draw.max_tokens}
    return "/v1/completions", {**sampling, **own, **wanted}


async def _read_stream(answer: Any, draw: Draw) -> None:
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        raise ValueError("it does not stream, so that a response cannot be stopped")
    async for line in _lines(answer, draw.max_bytes):
        if line == b"[DONE]":
            continue
        chunk = msgspec.json.decode(line, type=_Chunk)
        if chunk.error is not None:
            raise Lost(f"it failed: {chunk.error}")
        for choice in chunk.choices:
            if choice.token_ids is None:
                raise ValueError("it sent no token ids (return_token_ids)")
            draw.add(choice.token_ids, choice.logprobs.token_logprobs if choice.logprobs else [])
            draw.finish = choice.finish_reason or draw.finish


async def _lines(answer: Any, max_bytes: int) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest, size = b"", 0
    async for part in answer.aiter_raw():
        size += len(part)
        if size > max_bytes:
            raise ValueError(f"it sent more than {max_bytes} bytes")
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _sglang(draw: Draw, sampling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    own = {"sampling_seed": draw.seed, "max_new_tokens": draw.max_tokens}
    wanted = {"rid": draw.id, "input_ids": draw.prompt, "return_logprob": True}
    return "/generate", {**wanted, "sampling_params": {**sampling, **own}}


async def _read_reply(answer: Any, draw: Draw) -> None:
    """Read an answer at its end: in a stream, SGLang sends all tokens so far with each token."""
    body, is_whole = await read_bounded(answer, draw.max_bytes)
    if not is_whole:
        raise ValueError(f"it sent more than {draw.max_bytes} bytes")
    meta, draw.reply = msgspec.json.decode(body, type=_Reply).meta_info, body
    pairs = meta.output_token_logprobs
    if pairs is None and meta.finish_reason.type != "abort":
        raise ValueError("it sent no log-probs (output_token_logprobs)")
    draw.add([token for _, token, _ in pairs or ()], [log_prob for log_prob, _, _ in pairs or ()])
    draw.finish = meta.finish_reason.type
