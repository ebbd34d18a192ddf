"""The endpoint through which users' programs call the model in training: one server in an
environment process, on the loopback address, with a session and a token for each episode.

    program -- POST /v1/chat/completions --> a call of the model: `reset` or `step` returns with it
            <-- the model's message -------- given to the next `step`
            -- POST /v1/reward ------------> {"reward": 1.0}, else read from its last line
            -- GET /v1/row ----------------> the dataset's row

A session is one dialogue that grows. A call that does not continue the call before it, or comes
before that call was answered, ends the episode; `Session.call` decides that.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.serving import chat
from rollpacker.serving.chat import ApiError, ChatRequest
from rollpacker.serving.http import (
    LOOPBACK,
    Request,
    Response,
    Route,
    Server,
    Starlette,
    api,
    in_json,
    token_of,
)

_IN_VAIN = {"x-should-retry": "false"}
"""HTTP headers of the endpoint's error responses, which tell OpenAI's clients not to
send the request again."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model by a user's program, which the environment's
    `reset` or `step` returns."""

    messages: tuple[dict[str, Any], ...]
    """The messages that the call adds to the dialogue after the model's last message; in a first
    call, all of its messages."""
    tools: tuple[dict[str, Any], ...]


class Session:
    """The dialogue of one episode's program with the model, from the endpoint's side."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.token = secrets.token_urlsafe(24)
        self.row = json.dumps(row, default=str)
        self.reward: Any = None
        """The reward that the program posted. None: it posted none."""
        self.called: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        """Future that gets the program's next call, or a `ProgramError` if the program did
        something that cannot be trained on."""
        self._said: list[str] = []
        """All messages of the dialogue so far, the model's included, each as a text (from
        `chat.as_said`) that shows whether a later call has changed it."""
        self._tools: tuple[dict[str, Any], ...] = ()
        self._pending: asyncio.Future[dict[str, Any]] | None = None
        self._asked: list[str] = []
        """All messages of the program's latest call, each as text, by which a
        repeated request is recognized."""
        self._num_turns = 0
        self._failure: ProgramError | None = None

    # -- for the environment -----------------------------------------------------------------------

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answer the pending call with the model's message. `called` is then a new future, for the
        next call."""
        assert self._pending is not None, "the model was not called"
        wire = chat.on_wire(message)
        self._said.append(chat.as_said(chat.read_back(wire)))
        self.called = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            self.called.set_exception(self._failure)
        self._num_turns += 1
        self._pending.set_result(wire)

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        if self.called.done() and not self.called.cancelled():
            self.called.exception()  # nobody wants to know
        self.called.cancel()

    # -- for the program ---------------------------------------------------------------------------

    async def call(self, asked: ChatRequest, *, is_retry: bool) -> dict[str, Any]:
        """Return the model's message, as OpenAI's API has it, once it is there. A repeated request
        (`is_retry`) gets the first one's message. Raises `ApiError` for a call that does not
        continue the last one, and lets the episode fail."""
        messages = chat.with_names(asked.messages)
        said = [chat.as_said(one) for one in messages]
        if is_retry and said == self._asked:
            # The client gave up waiting, and asks again.
            assert self._pending is not None
            return await asyncio.shield(self._pending)
        if self._failure is not None:
            raise ApiError("the episode has failed", status=410)
        try:
            self._check(asked, said)
        except ApiError as error:
            self._fail(str(error))
            raise
        new = messages[len(self._said) :]
        self._said, self._asked, self._tools = said, said, asked.tools
        self._pending = asyncio.get_running_loop().create_future()
        self.called.set_result(Call(new, asked.tools))
        return await asyncio.shield(self._pending)

    def _fail(self, why: str) -> None:
        self._failure = ProgramError(why)
        if not self.called.done():  # else `answer` tells
            self.called.set_exception(self._failure)

    def _check(self, asked: ChatRequest, said: list[str]) -> None:
        number = len(self._said)
        if asked.n != 1:
            raise ApiError("n must be 1: a dialogue that trains has one answer to each call")
        if self._pending is not None and not self._pending.done():
            raise ApiError(
                "the model was called again before it had answered: in training, a program holds"
                " one dialogue, one call after another"
            )
        if said[:number] != self._said:
            at = next(i for i, one in enumerate(self._said) if said[i : i + 1] != [one])
            raise ApiError(
                f"the dialogue was rewritten: messages[{at}] is not what it was in the call before."
                " In training, a call adds messages behind the model's last one"
            )
        if number and asked.tools != self._tools:
            raise ApiError("the tools are others than in the call before")
        if len(said) == number or json.loads(said[-1])[0] == "assistant":
            raise ApiError("nothing was said since the model's last message")

    @property
    def identity(self) -> str:
        return f"chatcmpl-{self._num_turns}"


class ProgramError(Exception):
    """The program did something that cannot be trained on; the message says what."""


class ProgramEndpoint:
    """The endpoint of an environment process. Its server is open as long as there are sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._server: Server | None = None
        self._port: asyncio.Future[int] | None = None

    async def enter(self, row: Mapping[str, Any]) -> tuple[Session, str]:
        """Open a session for an episode with this row of the data set. Returns the session, and the
        base URL at which its program calls the model."""
        session = Session(row)
        self._sessions[session.token] = session
        if self._server is None:
            self._server = Server(self._app(), admit=self._refused)
            self._port = asyncio.ensure_future(self._server.open())
        assert self._port is not None
        try:
            return session, f"http://{LOOPBACK}:{await asyncio.shield(self._port)}/v1"
        except BaseException:  # also of who was cancelled: the server goes with its last session
            await self.leave(session)
            raise

    async def leave(self, session: Session) -> None:
        """Close a session, and the server if it was the last one. Idempotent."""
        session.close()
        self._sessions.pop(session.token, None)
        if not self._sessions and self._server is not None:
            server, self._server = self._server, None
            await server.close()

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._completed, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/row", self._row),
            Route("/v1/reward", self._rewarded, methods=["POST"]),
        ]
        return api(routes, error_headers=_IN_VAIN)

    def _session(self, request: Request) -> Session:
        """The session that a request's token belongs to. Raises `ApiError` if that session is
        closed, as its episode is over."""
        session = self._sessions.get(token_of(request))
        if session is None:
            raise ApiError("the episode is over", status=410)
        return session

    def _refused(self, head: Request) -> Response | None:
        if token_of(head) in self._sessions:
            return None
        error = ApiError("this is the token of no episode, or of one that is over", status=401)
        return in_json(error.body, error.status, headers=_IN_VAIN)

    async def _models(self, _: Request) -> Response:
        return in_json({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _row(self, request: Request) -> Response:
        return Response(self._session(request).row, media_type="application/json")

    async def _rewarded(self, request: Request) -> Response:
        session = self._session(request)
        session.reward = _reward(await request.body())
        return in_json({})

    async def _completed(self, request: Request) -> Response:
        session = self._session(request)
        asked = chat.read_chat(await request.body(), request.headers)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            wire = await session.call(asked, is_retry=is_retry)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise ApiError("the episode is over", status=410) from None
        choices = [chat.Choice(message=wire, reason="stop")]
        told = chat.completion(session.identity, asked.model or "policy", choices)
        if not asked.stream:
            return in_json(told)
        pieces = chat.stream(told, include_usage=asked.include_usage)
        body = chat.opening(told["id"], told["model"]) + b"".join(pieces)
        return Response(body, media_type="text/event-stream")


def _reward(body: bytes) -> Any:
    try:
        return json.loads(body)["reward"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ApiError('a reward is {"reward": NUMBER}') from None
