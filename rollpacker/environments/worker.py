"""The program of an environment process: many episodes, each with an environment of its own.

controller -- requests, pickled --> process: SETUP once, then CALLs that begin an episode, give it
                                             a message or ask for its last reward,
                                             CANCELs of these, ENDs of episodes
controller <-- replies, JSON ------ process: what the environment answered, or why it did not

The event loop receives requests and runs async environments; blocking ones have threads
(`calls.py`). Imports no more than it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.events import ToolCall
from rollpacker.environments.calls import MEMORY, Calls
from rollpacker.environments.loading import Loaded, load
from rollpacker.environments.played import Played
from rollpacker.environments.shapes import WrongReturn
from rollpacker.environments.tools import ToolUnavailable
from rollpacker.rewards.functions.returned import error_of
from rollpacker.workers import kinds
from rollpacker.workers.answering import Controller, connected
from rollpacker.workers.frames import Message
from rollpacker.workers.line import Line

MAX_REPLY_BYTES = 4 << 20
"""Most bytes of a reply. An environment that returns more has failed; tools' results are cut long
before."""
_SAID_IN_FULL = (
    *("ImportSpecError", "MissingPackageError", "EnvironmentSetupError", "SandboxUnavailable"),
    *("AdapterError", "DataError"),
)
"""Names of error classes of which the user is shown the message alone, without a traceback."""


def main(line: int | Line) -> None:
    """Answer the run's requests until it hangs up. `line`: the connection, or its descriptor."""
    asyncio.run(_serve(connected(line)))


async def _serve(controller: Controller) -> None:
    async with AsyncExitStack() as stack:
        request = pickle.loads(controller.request().payload)
        try:
            loaded = await load(request, stack)
        except BaseException as error:  # whatever the user's module does: it is theirs to be told
            if type(error).__name__ in _SAID_IN_FULL:
                controller.reply(0, {"refused": str(error)}, kinds.REFUSED)
                return
            told = error_of(error)
            why = f"{told['error']}: {told['said']}{told['where']}"
            controller.reply(0, {"refused": why}, kinds.REFUSED)
            return
        controller.reply(0, loaded.hello, kinds.READY)
        if request["memory_mb"] is not None:
            MEMORY.limit(request["memory_mb"] << 20)
        controller.send = controller.line.post
        server = _Server(controller, loaded)
        controller.line.attach(asyncio.get_running_loop(), server.heard, lambda: os._exit(0))
        await asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Episode:
    played: Played
    calls: Calls
    running: set[int] = field(default_factory=set)
    """Numbers of the run's requests about this episode that are not answered yet."""
    is_over: bool = False
    """Whether the run has ended the episode, which is closed once no request runs."""


class _Server:
    """Plays the episodes of this process, as the requests of the run's process say."""

    def __init__(self, controller: Controller, loaded: Loaded) -> None:
        self._controller = controller
        self._loaded = loaded
        self._loop = asyncio.get_running_loop()
        self._episodes: dict[int, _Episode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def heard(self, request: Message) -> None:
        match request.kind:
            case kinds.CALL:
                task = self._loop.create_task(self._answer(request.number, request.payload))
                self._tasks[request.number] = task
            case kinds.CANCEL:
                if request.number in self._tasks:
                    self._tasks[request.number].cancel()
                told = {"calls": self._under_way(request.number)}
                self._controller.reply(request.number, told, kinds.STOPPED)
            case _:  # END: the episode is over, which is not answered
                self._end(request.number)

    def _under_way(self, call: int) -> tuple[ToolCall, ...]:
        """The tool calls so far in request `call`; the last one runs. Empty: none runs."""
        episodes = self._episodes.values()
        episode = next((one for one in episodes if call in one.running), None)
        return () if episode is None else episode.played.under_way()

    async def _answer(self, call: int, payload: bytes) -> None:
        number, row, message = pickle.loads(payload)
        if row is not None or number not in self._episodes:
            calls = Calls()
            self._episodes[number] = _Episode(self._loaded.make(calls), calls)
        episode = self._episodes[number]
        episode.running.add(call)
        before_s = episode.calls.seconds
        try:
            if row is not None:
                reply = await episode.played.begin(row)
            elif message is not None:
                reply = await episode.played.act(message)
            else:
                reply = await episode.played.finish()
        except asyncio.CancelledError:
            reply = {"wrong": "was cancelled"}
        except ToolUnavailable as error:
            reply = {"lost": str(error)}
        except WrongReturn as error:
            reply = {"wrong": str(error)}
        except BaseException as error:  # an exit would end the process
            reply = dict(error_of(error))
        finally:
            episode.running.discard(call)
            del self._tasks[call]
        reply["seconds"] = episode.calls.seconds - before_s
        self._controller.say(call, _encoded(reply))
        if episode.is_over:
            self._close(episode)

    def _end(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        episode.is_over = True
        if not episode.running:
            self._close(episode)

    def _close(self, episode: _Episode) -> None:
        task = self._loop.create_task(_closed(episode))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _closed(episode: _Episode) -> None:
    try:
        with contextlib.suppress(Exception):  # nobody is left to be told
            await episode.played.close()
    finally:
        episode.calls.end()


def _encoded(reply: Mapping[str, Any]) -> bytes:
    try:
        payload = json.dumps(reply, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        wrong = f"said what is not plain values: {type(error).__name__}: {str(error)[:200]}"
    else:
        if len(payload) <= MAX_REPLY_BYTES:
            return payload
        wrong = f"said {len(payload)} bytes at once; at most {MAX_REPLY_BYTES} are taken"
    return json.dumps({"wrong": wrong, "seconds": reply["seconds"]}).encode()
