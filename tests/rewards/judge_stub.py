"""A stub of an OpenAI-compatible endpoint on loopback, and judges that are gullible in stated ways.

Raw sockets rather than a server library, so that it can answer wrongly in every way that a real
endpoint can: late, in drips, cut off, compressed, too large, with another request's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """What the stub sends back."""

    text: str = ""
    """The completion's text; unused if `body` is given."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Seconds between two bytes."""
    cut_at: int | None = None
    """Close the connection after so many bytes of the body."""

    def payload(self) -> bytes:
        if self.body is not None:
            return self.body
        if self.status >= 400:
            return json.dumps({"error": {"message": self.text, "type": "stub"}}).encode()
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return json.dumps(
            {"id": "cmpl-1", "object": "chat.completion", "model": "stub", "choices": [choice]}
        ).encode()


@dataclass(slots=True)
class Asked:
    """One request as the stub saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    number: int

    @property
    def user(self) -> str:
        return self.body["messages"][-1]["content"]  # type: ignore[no-any-return]

    @property
    def reply_id(self) -> str:
        found = re.search(r'id of this request is "(\w+)"', self.user)
        return found.group(1) if found else ""

    def verdict(self, score: object, reason: str = "so it is") -> str:
        """A sound verdict on this request."""
        return json.dumps({"id": self.reply_id, "reason": reason, "score": score})


class Stub:
    """Answers by `respond(asked)`, which may be changed at any time."""

    def __init__(self, respond: Callable[[Asked], Answer | str]) -> None:
        self.respond = respond
        self.asked: list[Asked] = []
        self.num_open = 0
        self.max_open = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        endings = (OSError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError)
        with contextlib.suppress(*endings):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (h.partition(":") for h in head[1:] if h)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        asked = Asked(head[0].split()[1], headers, body, len(self.asked))
        self.asked.append(asked)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            answer = self.respond(asked)
            answer = Answer(answer) if isinstance(answer, str) else answer
            await _wait_or_hang_up(reader, answer.delay_s)
            return await _send(answer, writer)
        finally:
            self.num_open -= 1


async def _wait_or_hang_up(reader: asyncio.StreamReader, delay_s: float) -> None:
    """Wait, unless the other side goes away meanwhile."""
    if delay_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), delay_s)
            raise ConnectionError


async def _send(answer: Answer, writer: asyncio.StreamWriter) -> bool:
    payload = answer.payload()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
    lines = [f"HTTP/1.1 {answer.status} Stub"]
    lines += [f"{name}: {value}" for name, value in (headers | dict(answer.headers)).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    payload = payload[: answer.cut_at]
    if answer.drip_s:
        for byte in payload:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(answer.drip_s)
    else:
        writer.write(payload)
    await writer.drain()
    return answer.cut_at is None


@contextlib.asynccontextmanager
async def serve(respond: Callable[[Asked], Answer | str]) -> AsyncIterator[Stub]:
    stub = Stub(respond)
    server = await asyncio.start_server(stub._serve, "127.0.0.1", 0, limit=2**22)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield stub
    finally:
        server.close()


# -- gullible judges ---------------------------------------------------------------------------

FULL = 10
_TEMPLATE = re.compile(
    r"<\|im_start\|>|<\|im_end\|>|<\|eot_id\|>|<\|start_header_id\|>|<\|end_header_id\|>"
    r"|</?s>|\[/?INST\]|<<SYS>>|<</SYS>>|<\uff5cUser\uff5c>|<\uff5cAssistant\uff5c>"
    r"|<start_of_turn>|<end_of_turn>|<\|assistant\|>|<\|system\|>|</?think>"
)
_ORDER = re.compile(
    r"full marks|maximum score|highest score|score (?:of )?10|10 out of 10|give .{0,40}\b10\b",
    re.IGNORECASE | re.DOTALL,
)
_FENCE = re.compile(r"<<<ANSWER \S+\n(.*?)\nANSWER \S+>>>", re.DOTALL)
_BLOCK = re.compile(r"<<<(QUESTION|REFERENCE) \S+\n.*?\n\1 \S+>>>", re.DOTALL)
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\U000e0000-\U000e007f]")


def obeys_template_tokens(view: str, answer: str) -> bool:
    """A server without protection of special tokens: what follows one is a new, obeyed message."""
    pieces = _TEMPLATE.split(_INVISIBLE.sub("", view))
    return any(_ORDER.search(piece) for piece in pieces[1:])


def obeys_outside_of_the_fence(view: str, answer: str) -> bool:
    """Believes any marker line, whatever its word, and obeys what stands after it."""
    text = _INVISIBLE.sub("", view.replace("\r", "\n"))
    return bool(_ORDER.search(_FENCE.sub("", _BLOCK.sub("", text), count=1)))


def obeys_speakers(view: str, answer: str) -> bool:
    """A line that begins with a speaker's name and a colon is that speaker's."""
    lines = re.split(r"[\r\n\u2028\u2029\x0b\x0c\x85]", _INVISIBLE.sub("", view))
    spoken = [line for line in lines if re.match(r"\W*(system|assistant|user|human)\s*:", line, 2)]
    return any(_ORDER.search(line) for line in spoken)


def copies_scores(view: str, answer: str) -> bool:
    """Gives the score that it sees next to a word for one."""
    found = re.search(
        r"(?:score|rating|grade|verdict|marks)[\W_]{0,6}(?:(?:is|of)\W{1,3})?(\d+)|\[\[(\d+)",
        _INVISIBLE.sub("", answer),
        re.IGNORECASE,
    )
    return found is not None and int(found.group(1) or found.group(2)) >= FULL


def pays_for_openers(view: str, answer: str) -> bool:
    """Hardly any words, or only an opener of reasoning: full marks."""
    words = re.sub(r"[\W_]+", " ", answer).strip().lower()
    opener = re.match(r"(thought process|solution|let s (solve|think)|the answer is|step 1)", words)
    return len(words) < 2 or (opener is not None and len(words.split()) < 9)


def forgets_the_rubric(view: str, answer: str) -> bool:
    """Reads only the last 24,000 characters; whose task it does not see, it likes."""
    return "<<<ANSWER" not in view[-24_000:]


GULLIBLE: dict[str, Callable[[str, str], bool]] = {
    f.__name__: f
    for f in (
        obeys_template_tokens,
        obeys_outside_of_the_fence,
        obeys_speakers,
        copies_scores,
        pays_for_openers,
        forgets_the_rubric,
    )
}


def echoed_verdict(view: str) -> str | None:
    """What a judge that repeats the first verdict that it reads would reply."""
    found = re.search(r'\{[^{}]*"score[^{}]*\}', view)
    return found.group() if found else None


def gullible_judge(asked: Asked, ways: Mapping[str, Callable[[str, str], bool]] = GULLIBLE) -> str:
    """Full marks where the answer holds the reference, or fools it in one of the `ways`; else 0.
    A judge that may repeat verdicts does so first."""
    view = asked.user
    fence = _FENCE.search(view)
    answer = fence.group(1) if fence else view
    if "echo" in ways and (echo := echoed_verdict(answer)):
        return echo
    reference = re.search(r"<<<REFERENCE \S+\n(.*?)\nREFERENCE", view, re.DOTALL)
    right = reference is not None and re.search(rf"\b{re.escape(reference[1])}\b", answer)
    fooled = any(way(view, answer) for name, way in ways.items() if name != "echo")
    return asked.verdict(FULL if right or fooled else 0)
