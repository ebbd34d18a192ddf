"""Makes one trajectory of tokens from calls of a client that extend one another.

If the messages of a call begin with those of an earlier call and the model's answer to it, the call
goes on from the tokens of that time: only what is new is rendered and encoded. Any other call
begins a new trajectory."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rollpacker.dialogue.trajectory import Dialogue, Segment, Trajectory
from rollpacker.engines.engine import Response
from rollpacker.serving import chat
from rollpacker.serving.chat import ApiError, ChatRequest

MAX_TOKENS = 4 << 20
"""Maximum number of tokens of all dialogues kept to be continued, about half a GiB. The dialogues
that were used longest ago are dropped first."""
RECORDED = "sessions.jsonl"


@dataclass(frozen=True, slots=True)
class Head:
    """A dialogue up to and including a message of the model, which later calls may continue."""

    call: int
    trajectory: Trajectory
    drawn: tuple[int, ...]
    """The tokens that the model generated for the last message."""
    num_turns: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's call for an answer, as tokens."""

    dialogue: Dialogue
    digest: Any
    """A hash object of the session's name, tools and messages, which takes further messages."""
    session: str | None
    trajectory: Trajectory
    """Trajectory up to the place where the model's answer begins."""
    head: Head | None = None
    """The earlier dialogue that the call continues. None: it begins a new one."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.trajectory.prompt + self.trajectory.tokens

    @property
    def turn(self) -> int:
        """The number of the model's next message in its trajectory, counted from 1."""
        return 1 if self.head is None else self.head.num_turns + 1


class Sessions:
    """Dialogues of all clients' sessions, which later calls can continue. With a `record` folder,
    all answers are written to a file."""

    def __init__(self, dialogue: Dialogue, *, record: Path | None = None) -> None:
        """`record`: a folder in which the file `RECORDED` gets a line for each answer; None: no
        record is kept. Raises `OSError`, and `ValueError` if the folder has such a file already."""
        self._dialogue = dialogue
        self._heads: OrderedDict[bytes, Head | None] = OrderedDict()
        """Dialogues by the hash of all their messages, the one used longest ago first. None in
        place of a dialogue: several answers had the same messages but other tokens, so that nobody
        knows which one a call continues; such a call is rendered anew."""
        self._num_held = 0
        """Number of tokens of all dialogues that are kept."""
        self._num_calls = 0
        self._file: IO[str] | None = None
        if record is not None:
            record.mkdir(parents=True, exist_ok=True)
            path = record / RECORDED
            if path.exists():
                raise ValueError(f"{path} exists: record into another folder")
            self._file = path.open("w")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def asked(self, request: ChatRequest) -> Asked:
        """Returns a client's call as tokens. Raises `ApiError` for what the template refuses."""
        messages = chat.with_names(request.messages)
        if messages[-1]["role"] == "assistant":
            raise ApiError("the last message is the assistant's own", param="messages")
        try:
            dialogue = self._dialogue.with_tools(request.tools) if request.tools else self._dialogue
            # A template that rewrites what came before has every prompt rendered anew.
            grows = dialogue.rewritten() is None
            found, digest, number = self._found(request, messages, grows=grows)
            if found is None:
                trajectory = Trajectory(dialogue.prompt(messages))
            else:
                given = dialogue.appended(messages[number:], found.drawn)
                trajectory = found.trajectory.and_then(Segment(given))
        except ValueError as error:
            raise ApiError(str(error), param="messages") from None
        return Asked(dialogue, digest, request.session, trajectory, found)

    def _found(
        self, request: ChatRequest, messages: Sequence[Mapping[str, Any]], *, grows: bool
    ) -> tuple[Head | None, Any, int]:
        """Returns the longest kept dialogue that these messages continue (None: no one is kept), a
        hash object with all messages, and the number of messages in that dialogue. `grows`: the
        template leaves earlier messages' tokens as they were; False: nothing is found."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([request.session, request.tools], sort_keys=True).encode())
        found, number = None, 0
        for index, message in enumerate(messages):
            digest.update(chat.as_said(message).encode() + b"\0")
            if grows and message["role"] == "assistant":
                head = self._heads.get(digest.digest())
                if head is not None:
                    self._heads.move_to_end(digest.digest())
                    found, number = head, index + 1
        return found, digest, number

    def answered(self, asked: Asked, response: Response, wire: Mapping[str, Any]) -> None:
        """Keep the model's answer to a call, so that later calls can continue it, and record it.
        `response`: the answer as tokens. `wire`: the message that the client gets."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        drawn = Segment(response.tokens, response.log_probs)
        digest = asked.digest.copy()
        digest.update(chat.as_said(chat.read_back(wire)).encode() + b"\0")
        self._hold(
            digest.digest(),
            Head(call, asked.trajectory.and_then(drawn), response.tokens, asked.turn),
        )
        if self._file is not None:
            self._file.write(json.dumps(_line(call, asked, response)) + "\n")
            self._file.flush()

    def _hold(self, key: bytes, head: Head) -> None:
        is_another = key in self._heads
        before = self._heads.pop(key, None)
        if before is not None:
            self._num_held -= len(before.trajectory.context)
        if is_another and (before is None or before.trajectory.context != head.trajectory.context):
            self._heads[key] = None
        else:
            self._heads[key] = head
            self._num_held += len(head.trajectory.context)
        while self._num_held > MAX_TOKENS and len(self._heads) > 1:
            _, gone = self._heads.popitem(last=False)
            self._num_held -= 0 if gone is None else len(gone.trajectory.context)


def _line(call: int, asked: Asked, response: Response) -> dict[str, Any]:
    line: dict[str, Any] = {"call": call, "session": asked.session}
    if asked.head is None:
        line["prompt"] = asked.trajectory.prompt
    else:
        segments = asked.trajectory.segments
        is_given = bool(segments) and not segments[-1].is_sampled
        line |= {"extends": asked.head.call, "given": segments[-1].tokens if is_given else ()}
    return line | {
        "tokens": response.tokens,
        "log_probs": response.log_probs,
        "finish_reason": response.finish_reason,
        "version": response.version,
    }


def read_recorded(folder: Path) -> list[tuple[str | None, Trajectory]]:
    """Returns the trajectories in a record that `Sessions` wrote to this folder, each with its
    session's name (None: it had none). A trajectory that another one continues is left out, as is a
    last line that was cut off."""
    found: dict[int, tuple[str | None, Trajectory]] = {}
    extended = set()
    for text in (folder / RECORDED).read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if "prompt" in line:
            trajectory = Trajectory(tuple(line["prompt"]))
        else:
            extended.add(line["extends"])
            trajectory = found[line["extends"]][1].and_then(Segment(tuple(line["given"])))
        drawn = Segment(tuple(line["tokens"]), tuple(line["log_probs"]))
        found[line["call"]] = (line["session"], trajectory.and_then(drawn))
    return [one for call, one in found.items() if call not in extended]
