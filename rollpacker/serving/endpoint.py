"""A model behind OpenAI's chat completions: `/v1/models` and `/v1/chat/completions`."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rollpacker.engines.engine import Response, SamplingParams
from rollpacker.serving import chat, http
from rollpacker.serving.chat import ApiError, ChatRequest
from rollpacker.serving.policy import RequestFailed
from rollpacker.serving.sessions import Asked, Sessions

MAX_CONNECTIONS = 4096
HEAD_S = 60.0
"""Seconds for which a client may be silent before it has sent the head of a request."""
BODY_S = 300.0


class Draw(Protocol):
    async def __call__(
        self, prompt: Sequence[int], sampling: SamplingParams, *, n: int = 1, turn: int = 1
    ) -> list[Response]:
        """Returns `n` responses to one prompt, given as tokens; see `EnginePolicy.draw`."""
        ...


class Endpoint:
    """Answers requests for chat completions, and for the names of models, over HTTP."""

    def __init__(
        self,
        draw: Draw,
        sessions: Sessions,
        *,
        name: str,
        token: str,
        sampling: SamplingParams,
        max_context_tokens: int | None,
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        """`draw` generates responses. `name`: the model's, for clients. `token`: bearer token that
        clients must send. `sampling`: settings for what a request does not set.
        `max_context_tokens`: most tokens of prompt and response; None: no limit. `text_of` makes
        text of tokens."""
        self._draw = draw
        self._sessions = sessions
        self._name = name
        self._token = token
        self._sampling = sampling
        self._max_context_tokens = max_context_tokens
        self._text_of = text_of
        self._numbers = itertools.count(1)

    def server(self) -> http.Server:
        """Returns a server, not opened yet, for clients that send the endpoint's token."""
        routes = [
            http.Route("/v1/models", self._models),
            http.Route("/v1/models/", self._models),
            http.Route("/v1/models/{name:path}", self._one_model),
            http.Route("/v1/chat/completions", self._completed, methods=["POST"]),
            http.Route("/v1/chat/completions/", self._completed, methods=["POST"]),
        ]
        limits = http.Limits(
            connections=http.most_connections(MAX_CONNECTIONS), head_s=HEAD_S, body_s=BODY_S
        )
        return http.Server(http.api(routes), admit=self._refused, limits=limits)

    def _refused(self, head: http.Request) -> http.Response | None:
        if http.has_token(head, self._token):
            return None
        error = ApiError("this endpoint wants its token: Authorization: Bearer TOKEN", status=401)
        return http.in_json(error.body, error.status)

    async def _models(self, _: http.Request) -> http.Response:
        return http.in_json({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: http.Request) -> http.Response:
        name = request.path_params["name"].rstrip("/")
        if name != self._name:
            raise ApiError(f"there is no model {name} here, but {self._name}", status=404)
        return http.in_json(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "rollpacker"}

    async def _completed(self, request: http.Request) -> http.Response:
        wanted = chat.read_chat(await request.body(), request.headers)
        asked = self._sessions.asked(wanted)
        sampling = self._sampling_of(wanted, len(asked.tokens))
        identity = f"chatcmpl-{next(self._numbers)}"
        if wanted.stream:
            pieces = self._pieces(identity, wanted, asked, sampling)
            return http.StreamingResponse(pieces, media_type="text/event-stream")
        return http.in_json(await self._told(identity, wanted, asked, sampling))

    def _sampling_of(self, wanted: ChatRequest, num_prompt_tokens: int) -> SamplingParams:
        """The sampling settings of a request. Raises `ApiError` if the prompt fills the context."""
        most = wanted.max_tokens or self._sampling.max_response_tokens
        if self._max_context_tokens is not None:
            left = self._max_context_tokens - num_prompt_tokens
            if left < 1:
                raise ApiError(
                    f"the messages have {num_prompt_tokens} tokens, and the model's context is"
                    f" {self._max_context_tokens}",
                    param="messages",
                    code="context_length_exceeded",
                )
            most = min(most, left)
        usual = self._sampling
        return replace(
            usual,
            max_response_tokens=most,
            seed=secrets.randbits(31) if wanted.seed is None else wanted.seed & (2**63 - 1),
            temperature=usual.temperature if wanted.temperature is None else wanted.temperature,
            top_p=wanted.top_p or usual.top_p,
            top_k=usual.top_k if wanted.top_k is None else max(wanted.top_k, 0),
            stop=wanted.stop or usual.stop,
        )

    async def _told(
        self, identity: str, wanted: ChatRequest, asked: Asked, sampling: SamplingParams
    ) -> dict[str, Any]:
        try:
            responses = await self._draw(asked.tokens, sampling, n=wanted.n, turn=asked.turn)
        except RequestFailed as error:
            raise ApiError(f"the engine could not answer: {error}", status=500) from None
        choices = []
        for response in responses:
            message = asked.dialogue.message(response.tokens, asked.turn)
            wire = chat.on_wire(message, sampling.stop)
            self._sessions.answered(asked, response, wire)
            choices.append(
                chat.Choice(
                    message=wire,
                    reason="length" if response.is_cut_off else "stop",
                    logprobs=self._logprobs(response) if wanted.logprobs else None,
                    token_ids=response.tokens if wanted.return_token_ids else None,
                )
            )
        return chat.completion(
            identity,
            wanted.model or self._name,
            choices,
            usage=(len(asked.tokens), sum(len(one.tokens) for one in responses)),
            prompt_token_ids=asked.tokens if wanted.return_token_ids else None,
        )

    def _logprobs(self, response: Response) -> list[dict[str, Any]]:
        """The log-probability of each token of a response in the form of OpenAI's API. It includes
        temperature, top-p and top-k of the sampling."""
        found = []
        for token, value in zip(response.tokens, response.log_probs, strict=True):
            text = self._text_of([token])
            one = {"token": text, "logprob": value, "bytes": list(text.encode())}
            found.append({**one, "top_logprobs": []})
        return found

    async def _pieces(
        self, identity: str, wanted: ChatRequest, asked: Asked, sampling: SamplingParams
    ) -> AsyncIterator[bytes]:
        yield chat.opening(identity, wanted.model or self._name)
        try:
            told = await self._told(identity, wanted, asked, sampling)
        except ApiError as error:
            yield chat.event(error.body)
            return
        for piece in chat.stream(told, include_usage=wanted.include_usage):
            yield piece
