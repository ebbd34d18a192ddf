"""All rewards of a run, judged by processes on its hosts ("reward hosts").

    HostedReward --Check--> host_worker.py: RewardHost --> WeightedReward, its workers and sandbox
                 <-Judged--

One event loop for the connections to all hosts (`workers/loop.py`) carries the checks to the hosts
and their verdicts back. `core/checks/reward_hosts.py` decides which host is
asked, and when a host is given up. The samples being judged on a host that is lost get no verdict,
with the cause `infrastructure`: they are then sent once more, and another host judges them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollpacker.core.checks.reward_hosts import RewardHosts
from rollpacker.imports import is_given
from rollpacker.rewards.host_messages import Check, RewardSetup, Status, codec
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardError,
    RewardInput,
    Scored,
)
from rollpacker.sandbox.sandbox import SandboxConfig
from rollpacker.workers.host import Host
from rollpacker.workers.kinds import BEAT, LOGGED
from rollpacker.workers.loop import LoopUse
from rollpacker.workers.served import HEARTBEAT_S, Loss, Owner, ProcessLost, Served

logger = logging.getLogger(__name__)

T = TypeVar("T")
Verdict = Scored | Failed

PROGRAM = "rollpacker.rewards.host_worker"
BEATS = 5
"""Number of reports that a host is to send within `heartbeat_s`, the silence that makes it lost."""


class RewardHostsLost(RuntimeError):
    """All reward hosts are lost or given up."""

    def __init__(self, why: str) -> None:
        super().__init__(f"no reward host is left: {why}. Mend that, then go on with --resume")


def refuse_bound(rewards: Sequence[RewardConfig]) -> None:
    """Raise `RewardError` if one of the `rewards` depends on an object or an engine of this
    process, so that no other host can have it."""
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
    """Return the setup for reward hosts, with this process's folder and module paths. A host that
    is silent for `heartbeat_s` seconds is lost. Raises `RewardError` as `refuse_bound` does."""
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
    """The rewards of a run, judged by processes on its hosts. Meets the protocol `Reward`. Its
    methods may be called in any event loop."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        sandbox: SandboxConfig,
        places: Sequence[Host],
        *,
        names: Sequence[str],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Starts one process at each of `places` (hosts); `ready` waits for them. `names`: the
        rewards' names, in order. `heartbeat_s`: seconds of silence after which one is lost. Raises
        `RewardError` for rewards that cannot be sent, and `OSError` if no process can be
        started."""
        self.names = tuple(names)
        self._places, self._heartbeat_s = tuple(places), heartbeat_s
        setup = reward_setup(rewards, sandbox, heartbeat_s=heartbeat_s)
        try:
            self._setup = codec().encode(setup)
        except TypeError as error:
            raise RewardError(f"rewards_hosts: arguments of rewards: {error}.") from None
        self.book = RewardHosts(len(self._places))
        self._living: dict[int, _HostProcess] = {}
        self._counts: dict[str, float] = {}
        """Sums of the metrics of lost reward hosts. `metrics` adds those of the living hosts."""
        self._unsandboxed = False
        self._changed = asyncio.Event()
        self._ending: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self._use = LoopUse()
        try:
            for number in range(len(self._places)):
                self._living[number] = _HostProcess(self, number)
        except BaseException:
            for process in self._living.values():
                process.served.end("not all could begin")
                process.served.close()
            self._use.end()
            raise
        for process in self._living.values():
            process.served.begin(self._setup)

    # -- the protocol ------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until all hosts can judge. Raises `RewardError` if a host cannot."""
        await self._there(self._settled())

    async def open(self) -> None:
        """Do nothing, since the hosts open their rewards; see `Reward.open`."""

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Verdict]:
        """Judge samples, divided among the hosts; see `Reward.score`. Raises `RewardHostsLost`."""
        if not samples:
            return []
        return await self._there(self._score(samples, timeout_s))

    def outage(self) -> str | None:
        """Return the first outage that a host reports, else None; see `Reward.outage`."""
        return self._first(lambda status: status.outage)

    def broken(self) -> str | None:
        """Return the first host's reason why there will be no verdicts, else None; see
        `Reward.broken`."""
        return self._first(lambda status: status.broken)

    def metrics(self) -> dict[str, float]:
        """Return each metric of the rewards (a count such as of retries), summed over all hosts;
        see `Reward.metrics`. `reward_hosts/lost` is the number of hosts lost so far."""
        counts = {**self._counts, "reward_hosts/lost": float(self.book.num_lost)}
        for process in list(self._living.values()):
            for name, count in process.status.metrics.items():
                counts[name] = counts.get(name, 0.0) + count
        return counts

    @property
    def unsandboxed(self) -> bool:
        """Whether there is a host on which nothing isolates the programs that rewards run."""
        return self._unsandboxed

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the living reward hosts, each by its index in the list of hosts."""
        return {number: one.served.child.pid for number, one in list(self._living.items())}

    async def close(self) -> None:
        """End the processes of all reward hosts; see `Reward.close`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._use.loop))
        await asyncio.to_thread(self._use.end)

    async def _there(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the event loop of all hosts' connections, and return its result.
        Cancelling this call cancels the coroutine."""
        assert not self._is_closed
        there = asyncio.run_coroutine_threadsafe(coroutine, self._use.loop)
        return await asyncio.wrap_future(there)

    def _first(self, asks: Callable[[Status], str | None]) -> str | None:
        for process in list(self._living.values()):
            if (said := asks(process.status)) is not None:
                return f"{process.served.name}: {said}" if len(self._places) > 1 else said
        return None

    # -- checks, in that loop --------------------------------------------------------------------

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
            verdicts = await self._living[number].judge(payload)
            judged = True
            return verdicts
        except ProcessLost as lost:
            return [Failed(reason=str(lost), cause=Cause.INFRASTRUCTURE)] * len(samples)
        finally:
            self.book.ended(number, len(samples), judged=judged)

    # -- processes, in that loop -------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return f"reward host {number} on {self._places[number].name}"

    def start(self, owner: Owner, number: int) -> Served:
        """Start the process of the reward host with this index. Raises `OSError`."""
        return Served(
            self._use,
            self._places[number],
            PROGRAM,
            self._name(number),
            codec=codec(),
            owner=owner,
            heartbeat_s=self._heartbeat_s,
        )

    def begun(self, process: _HostProcess, unsandboxed: bool) -> None:
        """Note that this process can judge, so that samples are sent to it from now on.
        `unsandboxed`: whether its host has nothing to isolate programs with."""
        self._unsandboxed |= unsandboxed
        self.book.ready(process.number)
        self._tell()

    def lost(self, process: _HostProcess, loss: Loss) -> None:
        """Start another process on the host of a lost one, or judge nothing there any more if its
        start was refused or processes were lost too often."""
        number, why = process.number, loss.reason
        del self._living[number]
        for name, count in process.status.metrics.items():
            self._counts[name] = self._counts.get(name, 0.0) + count
        self._soon(process.served.gone())
        if loss.is_refused:
            self.book.give_up(number, why)
        elif self.book.lost(number, why):
            logger.warning("%s is lost and begins anew: %s", loss.process, why)
            try:
                self._living[number] = _HostProcess(self, number)
                self._living[number].served.begin(self._setup)
            except OSError as error:
                self.book.give_up(number, str(error))
        if number in self.book.given_up:
            name, why = process.served.name, self.book.given_up[number]
            logger.warning("%s judges no more: %s", name, why)
        self._tell()

    def _tell(self) -> None:
        """Wake up all tasks that wait for a change of the hosts."""
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
            process.served.end("the run ends")
        await asyncio.gather(*(process.served.gone() for process in living))
        await asyncio.gather(*self._ending, return_exceptions=True)


class _HostProcess:
    """The process of one reward host, from its start to its loss. Meets the protocol `Owner`."""

    def __init__(self, hosted: HostedReward, number: int) -> None:
        """Starts the process of the host with the index `number`. Raises `OSError`."""
        self.number = number
        self.status = Status()
        self._hosted = hosted
        self.served = hosted.start(self, number)

    async def judge(self, payload: bytes) -> Sequence[Verdict]:
        """Have the host judge the samples of a packed `Check`, and return the verdicts. Raises
        `ProcessLost` if the host is lost. Cancelling this call ends the check."""
        judged = await self.served.call(payload)
        self.status = judged.status
        verdicts: Sequence[Verdict] = judged.verdicts
        return verdicts

    def on_ready(self, said: bool) -> None:
        self._hosted.begun(self, said)

    def on_message(self, kind: int, number: int, said: Any) -> None:
        if kind == BEAT:
            self.status = said
        elif kind == LOGGED:
            log = logging.getLogger(said.logger)
            log.log(said.level, "%s: %s", self.served.name, said.text)

    def on_hang_up(self) -> None:
        self._hosted.book.hold(self.number)

    def on_lost(self, loss: Loss) -> None:
        self._hosted.lost(self, loss)
