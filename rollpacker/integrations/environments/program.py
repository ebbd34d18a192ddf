"""A user's program as an environment: `program:python my_agent.py`, started for each episode.

The program uses the policy as any program uses OpenAI's API, at `OPENAI_BASE_URL` with
`OPENAI_API_KEY`. Its first call is the prompt, with its tools; what its next call adds behind the
model's message is what `step` returns; the episode is over when the program ends. The row is in
`ROLLPACKER_ROW`, as JSON (a row of more than 96 KiB only at `GET OPENAI_BASE_URL/row`). The reward
is what the program posted, or the last line that it printed, if that is {"reward": NUMBER}; there
may be none. The program is ended with its episode, with all processes that it started; if it fails,
the episode is lost.

Sampling is the run's own, whatever a call asks for, and tokens are not counted (`usage` is 0).
Argument: `variables`, further environment variables of the program.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.environments.environment import Message, ToolSchema
from rollpacker.environments.shapes import WrongReturn
from rollpacker.integrations.environments.messages import AdapterError, OwnArguments
from rollpacker.integrations.environments.program_endpoint import (
    ProgramEndpoint,
    ProgramError,
    Session,
)
from rollpacker.serving.http import LOOPBACK
from rollpacker.workers.child import Child

MAX_ROW_BYTES = 96 << 10
"""Most bytes of a row for which the program gets the row in an environment variable. Operating
systems allow a little more for one variable."""
MAX_LINE_BYTES = 64 << 10
"""Number of bytes that are kept of the end of a program's output, and of its error output."""
MAX_ERROR_CHARS = 600
_LOOK_S = 0.005


def factory(name: str, arguments: dict[str, Any]) -> Programs:
    own = OwnArguments(f"program:{name}", arguments)
    variables = own.take("variables", {}, Mapping)
    own.check_nothing_left()
    return Programs(_command(name), {str(key): str(value) for key, value in variables.items()})


def rows(name: str, arguments: dict[str, Any]) -> None:
    """Return None: a program provides no rows."""


class Programs:
    """Makes an episode's environment for one program when it is called. All these episodes share
    the program's command and the endpoint at which programs call the model."""

    is_quick = True

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self.command = command
        self.variables = variables
        self.endpoint = ProgramEndpoint()

    def __call__(self) -> Program:
        return Program(self)


class Program:
    """One episode with a program. All of its methods are called in one event loop."""

    deterministic = False

    def __init__(self, programs: Programs) -> None:
        self.tools: tuple[ToolSchema, ...] = ()
        self._programs = programs
        self._session: Session | None = None
        self._process: _Process | None = None

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        endpoint = self._programs.endpoint
        self._session, url = await endpoint.enter(row)
        variables = self._variables(self._session, url)
        self._process = _Process(self._programs.command, variables)
        messages, _, is_over = await self._until_called()
        if is_over:
            raise WrongReturn("ended without a call of the model")
        return messages

    async def step(self, message: Message) -> tuple[Sequence[Message], Any, bool]:
        assert self._session is not None, "reset begins an episode"
        self._session.answer(message)
        return await self._until_called()

    async def close(self) -> None:
        """End the program and all processes that it started."""
        process, self._process = self._process, None
        session, self._session = self._session, None
        try:
            if process is not None:
                await process.close()
        finally:
            if session is not None:
                await self._programs.endpoint.leave(session)

    def _variables(self, session: Session, url: str) -> dict[str, str]:
        around = ",".join(filter(None, [os.environ.get("NO_PROXY"), LOOPBACK]))
        known = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": session.token,
            "NO_PROXY": around,
            "no_proxy": around,
        }
        if len(session.row.encode()) <= MAX_ROW_BYTES:
            known["ROLLPACKER_ROW"] = session.row
        return {**os.environ, **known, **self._programs.variables}

    async def _until_called(self) -> tuple[Sequence[Message], Any, bool]:
        """Wait until the program calls the model again or has ended, and return the result of
        `step`: new messages, the reward or None, and whether the episode is over."""
        session, process = self._session, self._process
        assert session is not None and process is not None
        called = session.called
        either: set[asyncio.Future[Any]] = {called, process.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if called.done():
            try:
                call = called.result()
            except ProgramError as error:
                raise WrongReturn(f"cannot go on: {error}") from None
            self.tools = call.tools
            return call.messages, None, False
        how = process.ended.result()
        if how != "exit status 0":
            raise WrongReturn(f"ended with {how}{process.last_words()}")
        reward = session.reward
        return [], process.reward() if reward is None else reward, True


class _Process:
    """The running program of one episode. Keeps the end of its output, and reports how it ended."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the program with these environment variables. Raises `OSError`
        if it cannot be started."""
        output, errors = _Tail(), _Tail()
        try:
            self._child = Child.start(
                command,
                "program",
                guarded=True,
                env=variables,
                output=output.writer,
                error_output=errors.writer,
            )
        except BaseException:
            output.close()
            errors.close()
            raise
        finally:
            os.close(output.writer)
            os.close(errors.writer)
        self._output, self._errors = output, errors
        self.ended: asyncio.Future[str] = asyncio.ensure_future(self._end())
        """Future that is done when the program has ended and all its output was read. Its result
        says how, such as "exit status 0"."""

    def reward(self) -> Any:
        """The reward in the program's last line of output, a JSON object with `reward`. None:
        that line has no reward."""
        try:
            told = json.loads(self._output.last_line())
        except (ValueError, RecursionError):
            return None
        return told.get("reward") if isinstance(told, dict) else None

    def last_words(self) -> str:
        lines = self._errors.text.strip().splitlines()[-3:]
        said = " | ".join(line.strip() for line in lines)[-MAX_ERROR_CHARS:]
        return f": {said}" if said else ""

    async def close(self) -> None:
        self._child.kill()
        await self._child.gone()
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)
        self._child.close()
        self._output.close()
        self._errors.close()

    async def _end(self) -> str:
        await asyncio.gather(self._output.over, self._errors.over)
        while (how := self._child.how_ended()) is None:
            await asyncio.sleep(_LOOK_S)
        return how


class _Tail:
    """Keeps the end of what is written to a pipe, and drops everything before."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._kept = b""
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Future that is done when no process can write to the pipe any more."""
        self._loop.add_reader(self._reader, self._read)

    @property
    def text(self) -> str:
        return self._kept.decode(errors="backslashreplace")

    def last_line(self) -> str:
        return self.text.strip().rpartition("\n")[2]

    def _read(self) -> None:
        try:
            data = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return
        self._kept = (self._kept + data)[-MAX_LINE_BYTES:]
        if not data:
            self._loop.remove_reader(self._reader)
            if not self.over.done():
                self.over.set_result(None)

    def close(self) -> None:
        """Stop reading, and close the pipe. Idempotent."""
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
            self.over.cancel()


def _command(name: str) -> list[str]:
    """Split a command into words, the first of which becomes the path of its program. Raises
    `AdapterError` if that is not possible."""
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise AdapterError(f"program:{name} is no command: {error}.") from None
    if not words:
        raise AdapterError('program: names no command; write "program:python my_agent.py".')
    if words[0] in ("python", "python3"):
        found: str | None = sys.executable
    else:
        found = shutil.which(words[0])
    if found is None:
        raise AdapterError(
            f"program:{name}: there is no program {words[0]} on the PATH; name it by its path."
        )
    for word in words[1:2]:
        if words[0].startswith("python") and word.endswith(".py") and not os.path.isfile(word):
            raise AdapterError(f"program:{name}: there is no file {os.path.abspath(word)}.")
    return [os.path.abspath(found), *words[1:]]
