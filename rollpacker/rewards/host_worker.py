"""A reward host: a process with all rewards of a run, with their workers and sandbox. It judges
samples that the run's process sends over an inherited connection.

It ends when the connection does, and its workers end with it. Nothing heavy is imported before
the set-up has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from rollpacker.rewards.host_messages import Judged, LogLine, RewardSetup, Status, codec
from rollpacker.workers.frames import Message
from rollpacker.workers.kinds import ANSWER, BEAT, CALL, CANCEL, FAILED, LOGGED, READY
from rollpacker.workers.line import Line, LineEnded
from rollpacker.workers.program import Program

if TYPE_CHECKING:
    from rollpacker.rewards.weighted import WeightedReward


class _Logged(logging.Handler):
    """Sends everything that is logged in this process to the run, from any thread."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that owns the connection to the run. None: it does not run yet."""
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        line = codec().encode(LogLine(record.levelno, record.name, self.format(record)))
        with contextlib.suppress(LineEnded, RuntimeError):  # the run or the loop is gone
            if self.loop is None:
                self._line.send(LOGGED, 0, line)
            else:
                self.loop.call_soon_threadsafe(self._line.post, LOGGED, 0, line)


class RewardHost:
    """Judges samples for the run with the rewards of this process, in one event loop."""

    def __init__(self, reward: WeightedReward, line: Line, beat_s: float) -> None:
        self._reward, self._line, self._beat_s = reward, line, beat_s
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> NoReturn:
        """Judge samples until the connection to the run ends, then end the process."""
        loop = asyncio.get_running_loop()
        self._line.attach(loop, self._heard, lambda: os._exit(0))
        self._line.post(READY, 0, codec().encode(self._reward.shared.unsandboxed))
        while True:
            await asyncio.sleep(self._beat_s)
            self._line.post(BEAT, 0, codec().encode(self._status()))

    def _heard(self, message: Message) -> None:
        if message.kind == CALL:
            task = asyncio.ensure_future(self._judge(message.number, message.payload))
            self._tasks[message.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.number))
        else:
            assert message.kind == CANCEL, message.kind
            if (cancelled := self._tasks.get(message.number)) is not None:
                cancelled.cancel()

    async def _judge(self, number: int, payload: bytes) -> None:
        try:
            check = codec().decode(payload)
            verdicts = await self._reward.score(check.samples, timeout_s=check.timeout_s)
            answer = codec().encode(Judged(tuple(verdicts), self._status()))
        except Exception as error:  # ours: a reward's own are verdicts
            traceback.print_exception(error)
            self._line.post(FAILED, 0, codec().encode(f"a check raised {error!r}"))
            return
        self._line.post(ANSWER, number, answer)

    def _status(self) -> Status:
        reward = self._reward
        return Status(reward.outage(), reward.broken(), reward.metrics())


def make(setup: RewardSetup) -> WeightedReward:
    """Make the rewards of `setup` in this process, and check what needs no rows: the sandbox, an
    endpoint. Raises the errors of `build_reward` and `WeightedReward.check`."""
    from rollpacker.rewards.build import build_reward

    own = [path for path in sys.path if path != os.getcwd()]  # which `-m` has put in front
    sys.path[:] = dict.fromkeys([*setup.paths, *own])
    with contextlib.suppress(OSError):
        os.chdir(setup.folder)
    reward = build_reward(setup.rewards, sandbox=setup.sandbox)
    reward.check([])
    return reward


def main() -> None:
    from rollpacker.rewards.reward import RewardError
    from rollpacker.sandbox.sandbox import SandboxUnavailable

    program = Program(codec())
    logged = _Logged(program.line)
    logging.getLogger().addHandler(logged)
    setup = program.setup()
    logging.getLogger("rollpacker").setLevel(setup.log_level)

    async def serve() -> NoReturn:
        await reward.open()
        logged.loop = asyncio.get_running_loop()
        await RewardHost(reward, program.line, setup.beat_s).serve()

    with program.telling(RewardError, SandboxUnavailable, ValueError):
        reward = make(setup)
        asyncio.run(serve())


if __name__ == "__main__":
    main()
