"""Deadlines: whatever the run waits for must show progress in time, or the run ends in an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rollpacker.bus import Bus
from rollpacker.config.running import DeadlineConfig
from rollpacker.core.job.pooled_job import waits_for_pool
from rollpacker.core.records import Entry, Record
from rollpacker.rewards.reward import Reward
from rollpacker.run.errors import DeadlineExceeded, RewardsFailed
from rollpacker.run.ports.engines import Engines

T = TypeVar("T")

CHECK_S = 0.5
STANDSTILL_HEARTBEATS = 12
"""An engine is lost if it makes no progress for this many times `deadlines.heartbeat_s` (time
enough to process all prompts of a batch) while others do."""


@dataclass(eq=False, slots=True)
class Watch:
    """Checks deadlines on the event loop. Any event that reaches the core counts as progress."""

    bus: Bus
    deadlines: DeadlineConfig
    engines: Engines
    reward: Reward
    num_worth: int = field(default=0, init=False)
    """Number of environments that are being asked for a final reward. While there are any, the run
    may stand still for `deadlines.generation_s` seconds, instead of `reward_s`."""
    _last_sign: float = field(init=False)
    _last_decode_steps: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.sign()
        self.bus.add_sink(self._saw)

    def sign(self) -> None:
        """Note progress now: the deadlines of generation and rewards start again."""
        self._last_sign = self.bus.clock.now()

    def check_rollout(self) -> None:
        """Check that generation makes progress: events come, engines decode, rewards wait for a
        service that is down, or other jobs have the devices. Raises `DeadlineExceeded`, or
        `RewardsFailed` once the rewards have given up."""
        self.check_rewards()
        self.check_engines()
        if self.engine_works() or self.rewards_wait() or self.pool_is_awaited():
            return
        with self.bus.lock:
            what = self.bus.job.waiting_for()
            rewards = self.bus.job.waits_for_rewards and not self.num_worth
        key = "reward_s" if rewards else "generation_s"
        limit = self._limit(key)
        if self.bus.clock.now() - self._last_sign > limit:
            raise DeadlineExceeded(what, limit, f"deadlines.{key}")

    async def check_engines_always(self) -> None:
        """Call `check_engines` every half second until cancelled, as in an evaluation."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check_engines()

    def check_engines(self) -> None:
        """Mark engines as lost that make no progress for `STANDSTILL_HEARTBEATS` heartbeats while
        others do."""
        with self.bus.lock:
            limit_s = STANDSTILL_HEARTBEATS * self.deadlines.heartbeat_s
            self.engines.check_progress(self.bus.clock.now(), limit_s)

    def check_rewards(self) -> None:
        """Raise `RewardsFailed` if the rewards will give no more verdicts."""
        if (why := self.reward.broken()) is not None:
            raise RewardsFailed(
                f"{why}. Mend it under the same name, then go on with --resume"
                " (rewards[].max_failed_calls says after how many)"
            )

    def rewards_wait(self) -> bool:
        """Whether the rewards wait for an outside service that is down. If so, that counts as
        progress."""
        if self.reward.outage() is None:
            return False
        self.sign()
        return True

    def pool_is_awaited(self) -> bool:
        """Whether the run waits for devices that other jobs have. If so, that counts as
        progress."""
        if not waits_for_pool(self.bus.job):
            return False
        self.sign()
        return True

    def engine_works(self) -> bool:
        """Whether engines decoded since the last call. If so, that counts as progress."""
        steps = self.engines.status().decode_steps
        if steps == self._last_decode_steps:
            return False
        self._last_decode_steps = steps
        self.sign()
        return True

    async def by(
        self,
        key: str,
        awaitable: Awaitable[T],
        what: str | None = None,
        lives: Callable[[], bool] = lambda: False,
    ) -> T:
        """Await this, and return its result. Whenever the seconds of the deadline `key` have
        passed, `lives` is called, and `DeadlineExceeded` is raised unless it returns True (there is
        progress). `what`: what is awaited, for the error; None: the core is asked."""
        limit = self._limit(key)
        future = asyncio.ensure_future(awaitable)
        while True:
            done, _ = await asyncio.wait({future}, timeout=limit)
            if done:
                return future.result()
            if not lives():
                future.cancel()
                with self.bus.lock:
                    what = what or self.bus.job.waiting_for()
                raise DeadlineExceeded(what, limit, f"deadlines.{key}")

    def _limit(self, key: str) -> float:
        limit: float = getattr(self.deadlines, key)
        return limit

    def _saw(self, entry: Entry) -> None:
        if isinstance(entry, Record):
            self._last_sign = entry.time_s
