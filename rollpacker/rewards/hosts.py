"""All rewards of a run, judged by processes on its hosts ("reward hosts").

    HostedReward --Check--> host_worker.py: RewardHost --> WeightedReward, its workers and sandbox
                 <-Judged--

One thread carries the checks to the hosts and what these say back. Who is asked, and when one is
given up, `core/reward_hosts.py` decides. What was under way on a host that is lost gets no verdict
with the cause `infrastructure`: the core asks again, once, and another one is there to judge it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollpacker.core.reward_hosts import RewardHosts
from rollpacker.imports import is_given
from rollpacker.rewards.host_messages import (
    BEAT,
    CANCEL,
    CHECK,
    FAILED,
    HELLO,
    JUDGED,
    LOGGED,
    READY,
    REFUSED,
    SETUP,
    Check,
    RewardSetup,
    Status,
    codec,
)
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardError,
    RewardInput,
    Scored,
)
from rollpacker.sandbox.sandbox import SandboxConfig
from rollpacker.workers.frames import Message
from rollpacker.workers.host import Host, Process
from rollpacker.workers.line import Line

logger = logging.getLogger(__name__)

T = TypeVar("T")
Verdict = Scored | Failed

START_S = 600.0
"""How long a reward host may take until it can judge."""
HEARTBEAT_S = 5.0
ENDED_S = 0.4
"""How long it may take to learn how a process ended that has hung up."""
BEATS = 5
"""Signs of life in the time after which a silent one is lost."""


class RewardHostsLost(RuntimeError):
    """There is no reward host any more."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no reward host is left: {why}. Mend that, then go on with --resume")


class _Lost(Exception):
    """Of a check: its host is lost."""


def refuse_bound(rewards: Sequence[RewardConfig]) -> None:
    """Raise `RewardError` for rewards that only the run's own process has."""
    bound = [
        f"{one.name or one.function} (an object of this Python program: name a function in a file, "
        '"path/to/file.py:function")'
        for one in rewards
        if is_given(one.function)
    ]
    bound += [
        f"{one.name or one.function} (model_path runs on an engine of this process: name an "
        "endpoint with url and model)"
        for one in rewards
        if one.function == "judge" and one.arguments.get("model_path") is not None
    ]
    if bound:
        raise RewardError(
            f"rewards_hosts: other hosts cannot have the reward {'; nor '.join(bound)}; or leave "
            "rewards_hosts out."
        )


def reward_setup(
    rewards: Sequence[RewardConfig], sandbox: SandboxConfig, *, heartbeat_s: float
) -> RewardSetup:
    """For hosts that find what this process finds."""
    refuse_bound(rewards)
    return RewardSetup(
        rewards=tuple(rewards),
        sandbox=sandbox,
        beat_s=heartbeat_s / BEATS,
        log_level=logging.getLogger("rollpacker").getEffectiveLevel(),
        folder=os.getcwd(),
        paths=tuple(os.path.abspath(path) for path in sys.path),
    )


class HostedReward:
    """Meets the `Reward` protocol. Its methods may be called in any event loop."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        sandbox: SandboxConfig,
        places: Sequence[Host],
        *,
        names: Sequence[str],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Starts one process for each of `places`; `ready` waits for them. `names`: of the parts.

        Raises `RewardError` for rewards that cannot be sent, and `OSError`.
        """
        self.names = tuple(names)
        self._places, self._heartbeat_s = tuple(places), heartbeat_s
        setup = reward_setup(rewards, sandbox, heartbeat_s=heartbeat_s)
        try:
            self._setup = codec().encode(setup)
        except TypeError as error:
            raise RewardError(f"rewards_hosts: arguments of rewards: {error}.") from None
        self.book = RewardHosts(len(self._places))
        self._living: dict[int, _Process] = {}
        self._counts: dict[str, float] = {}
        """Of reward hosts that are gone; see `metrics`."""
        self._unsandboxed = False
        self._changed = asyncio.Event()
        self._ending: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self._loop = asyncio.SelectorEventLoop()
        try:
            for number in range(len(self._places)):
                self._begin(number)
        except BaseException:
            for process in self._living.values():
                process.close()
            self._loop.close()
            raise
        self._loop.call_soon(self._look, time.monotonic())
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollpacker-reward-hosts", daemon=True
        )
        self._thread.start()

    # -- the protocol ------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until all can judge. Raises `RewardError` if one cannot."""
        await self._there(self._settled())

    async def open(self) -> None:
        """See `Reward`: they are open."""

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Verdict]:
        """See `Reward`. A batch is shared out between the hosts. Raises `RewardHostsLost`."""
        if not samples:
            return []
        return await self._there(self._score(samples, timeout_s))

    def outage(self) -> str | None:
        """See `Reward`."""
        return self._first(lambda status: status.outage)

    def broken(self) -> str | None:
        """See `Reward`."""
        return self._first(lambda status: status.broken)

    def metrics(self) -> dict[str, float]:
        """See `Reward`. `reward_hosts/lost` is the number of losses so far."""
        counts = {**self._counts, "reward_hosts/lost": float(self.book.num_lost)}
        for process in list(self._living.values()):
            for name, count in process.status.metrics.items():
                counts[name] = counts.get(name, 0.0) + count
        return counts

    @property
    def unsandboxed(self) -> bool:
        """On one of the hosts nothing isolates what runs in its sandbox."""
        return self._unsandboxed

    @property
    def pids(self) -> dict[int, int]:
        """Of the living, by their places."""
        return {number: one.child.pid for number, one in list(self._living.items())}

    async def close(self) -> None:
        """See `Reward`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it comes to in the thread's loop. Who cancels this cancels that."""
        assert not self._is_closed
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _first(self, asks: Callable[[Status], str | None]) -> str | None:
        for process in list(self._living.values()):
            if (said := asks(process.status)) is not None:
                return f"{process.name}: {said}" if len(self._places) > 1 else said
        return None

    # -- checks, in the thread ---------------------------------------------------------------------

    async def _settled(self) -> None:
        while not self.book.is_settled() and not self.book.given_up:
            await self._changed.wait()
        if self.book.given_up:
            raise RewardError(self._why())

    def _why(self) -> str:
        return "; ".join(f"{self._name(n)}: {why}" for n, why in self.book.given_up.items())

    async def _score(
        self, samples: Sequence[RewardInput], timeout_s: float | None
    ) -> list[Verdict]:
        size = math.ceil(len(samples) / max(self.book.num_ready, 1))
        shares = [samples[start : start + size] for start in range(0, len(samples), size)]
        found = await asyncio.gather(*(self._judge(share, timeout_s) for share in shares))
        return [verdict for share in found for verdict in share]

    async def _judge(
        self, samples: Sequence[RewardInput], timeout_s: float | None
    ) -> Sequence[Verdict]:
        try:
            payload = codec().encode(Check(tuple(samples), timeout_s))
        except TypeError as error:
            if len(samples) > 1:  # one row may have what others do not
                alone = (self._judge([one], timeout_s) for one in samples)
                return [verdict for (verdict,) in await asyncio.gather(*alone)]
            return [Failed(reason=f"a reward host cannot have its columns: {error}")]
        while (number := self.book.deal(len(samples))) is None:
            if self.book.all_given_up:
                raise RewardHostsLost(self._why())
            await self._changed.wait()
        judged = False
        try:
            verdicts = await self._living[number].ask(payload)
            judged = True
            return verdicts
        except _Lost as lost:
            return [Failed(reason=str(lost), cause=Cause.INFRASTRUCTURE)] * len(samples)
        finally:
            self.book.ended(number, len(samples), judged=judged)

    # -- processes, in the thread ------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return f"reward host {number} on {self._places[number].name}"

    def _begin(self, number: int) -> None:
        name = self._name(number)
        child, line = self._places[number].start(
            "rollpacker.rewards.host_worker", name, guarded=True, environment={}
        )
        process = self._living[number] = _Process(number, name, child, line)
        line.attach(
            self._loop,
            lambda message: self._heard(process, message),
            lambda: self._hung_up(process),
        )
        line.post(SETUP, payload=self._setup)
        self._loop.call_later(START_S, self._must_be_ready, process)

    def _heard(self, process: _Process, message: Message) -> None:
        process.heard_s = time.monotonic()
        kind = message.kind
        said = codec().decode(message.payload)
        if kind == HELLO:
            process.child.pid = said
        elif kind == READY:
            process.is_ready = True
            self._unsandboxed |= said
            self.book.ready(process.number)
            self._tell()
        elif kind == JUDGED:
            process.status = said.status
            process.answer(message.number, said.verdicts)
        elif kind == BEAT:
            process.status = said
        elif kind == LOGGED:
            logging.getLogger(said.logger).log(said.level, "%s: %s", process.name, said.text)
        elif kind == REFUSED:
            self._lose(process, said, for_good=True)
        else:
            assert kind == FAILED, kind
            self._lose(process, said)

    def _look(self, looked_s: float) -> None:
        """See now and then who is silent. `looked_s`: when that was seen last."""
        now, every_s = time.monotonic(), self._heartbeat_s / 10
        was_held = now - looked_s > 2 * every_s + 1.0  # this process
        for process in list(self._living.values()):
            is_stopped = process.child.is_stopped()
            loads = not process.is_ready and not is_stopped
            if was_held or loads or process.child.is_cut_off():
                process.heard_s = now
            silent_s = now - process.heard_s
            if silent_s > self._heartbeat_s:
                why = "a signal has stopped it" if is_stopped else "it may hang"
                self._lose(process, f"no sign of life for {silent_s:.1f} s: {why}")
        self._loop.call_later(every_s, self._look, now)

    def _must_be_ready(self, process: _Process) -> None:
        if not process.is_ready:
            self._lose(process, f"it was not ready within {START_S:g} s")

    def _hung_up(self, process: _Process) -> None:
        self.book.hold(process.number)
        self._soon(self._find_out(process))

    async def _find_out(self, process: _Process) -> None:
        how = await asyncio.to_thread(process.child.how_ended, ENDED_S)
        self._lose(process, f"it ended by itself ({how or 'it hung up'})")

    def _lose(self, process: _Process, why: str, *, for_good: bool = False) -> None:
        number = process.number
        if self._living.get(number) is not process:
            return
        del self._living[number]
        for name, count in process.status.metrics.items():
            self._counts[name] = self._counts.get(name, 0.0) + count
        process.forget(f"{process.child} was lost: {why}")
        self._soon(asyncio.to_thread(process.close))
        if for_good:
            self.book.give_up(number, why)
        elif self.book.lost(number, why):
            logger.warning("%s is lost and begins anew: %s", process.child, why)
            try:
                self._begin(number)
            except OSError as error:
                self.book.give_up(number, str(error))
        if number in self.book.given_up:
            logger.warning("%s judges no more: %s", process.name, self.book.given_up[number])
        self._tell()

    def _tell(self) -> None:
        """Let all look again who wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _soon(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self) -> None:
        living = list(self._living.values())
        self._living.clear()
        for process in living:
            process.forget("the run ends")
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in living))
        await asyncio.gather(*self._ending, return_exceptions=True)


class _Process:
    """One reward host, from its start to its loss."""

    def __init__(self, number: int, name: str, child: Process, line: Line) -> None:
        self.number, self.name, self.child = number, name, child
        self.is_ready = False
        self.heard_s = time.monotonic()
        self.status = Status()
        self._line = line
        self._calls: dict[int, asyncio.Future[Sequence[Verdict]]] = {}
        self._num_calls = 0

    async def ask(self, payload: bytes) -> Sequence[Verdict]:
        """The verdicts of a check. Raises `_Lost`. Who cancels it ends the check."""
        self._num_calls += 1
        number = self._num_calls
        future: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._line.post(CHECK, number, payload)
        try:
            return await future
        except asyncio.CancelledError:
            self._line.post(CANCEL, number)
            raise
        finally:
            self._calls.pop(number, None)

    def answer(self, number: int, verdicts: Sequence[Verdict]) -> None:
        future = self._calls.get(number)
        if future is not None and not future.done():
            future.set_result(verdicts)

    def forget(self, why: str) -> None:
        """Have it ended and hear no more of it; what it was asked gets no verdict."""
        self._line.detach()
        self.child.kill()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(_Lost(why))

    def close(self) -> None:
        """Wait for its end. In any thread."""
        self.child.close()
        self._line.close()
