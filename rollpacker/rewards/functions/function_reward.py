"""Rewards that are plain functions: called in worker processes, judged by what they return.

A function gets only the arguments that its signature has. If it returns None for a sample, the
reward does not apply to it; any error means "no verdict" for the samples concerned, with a reason
that names function and cause. Neither is ever counted as zero. This process does not even import
the function.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.imports import ImportSpecError, is_given, pickled_given
from rollpacker.rewards.functions.logged import read
from rollpacker.rewards.functions.printed import Printed
from rollpacker.rewards.functions.returned import Value, shortened
from rollpacker.rewards.functions.shapes import Binding, Signature
from rollpacker.rewards.functions.trying import finding_of, made_up
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.workers.output import OutputQuota
from rollpacker.workers.pool import NoWorker, Overran, WorkerLost, WorkerPool
from rollpacker.workers.served import START_S
from rollpacker.workers.worker import WorkerEnded, WorkerProcess

logger = logging.getLogger(__name__)

Check = Callable[[Sequence[Mapping[str, Any]]], None]
PROGRAM = "rollpacker.rewards.functions.worker_program"
_MAX_REASON = 400
"""Most characters of the reason why a sample has no verdict."""

Verdict = Scored | Failed | None


class RewardFunction:
    """A reward made of one function, called in worker processes of its own. An error in a call
    becomes a `Failed` verdict with a reason. Meets the protocol `RewardPart`."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        factory: str | None = None,
        check: Check | None = None,
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Starts a worker to inspect the function. Raises `RewardError` if the function cannot be
        used. `factory` (`module:name`): makes a built-in reward's function when called with the
        config's arguments; None for a user's own, which `config.function` names. `check`: a further
        check of a dataset's rows, or None. `environments`: for each device of the workers, all
        environment variables of a worker on it; empty: workers have those of this process."""
        self._config = config if factory is None else dataclasses.replace(config, arguments={})
        self._own_check = check
        self._is_built_in = factory is not None
        self._cwd = str(Path.cwd())
        spec = _sent(config.function) if is_given(config.function) else config.function
        self._load = pickle.dumps((factory or spec, factory is not None, dict(config.arguments)))
        self._quota = OutputQuota()
        self._printed = Printed()
        self._environments = environments
        self._on: list[list[WorkerProcess]] = [[] for _ in environments]
        """Workers that were started on each device."""
        self._spares = [self._start(f"{config.name or 'reward'}-1")]
        hello = self._greeted(self._spares[0])
        # An instance or a partial has no name of its own, but is found under one.
        self.name: str = config.name or hello["name"] or config.function.rpartition(":")[2]
        self._spares[0].rename(f"{self.name}-1")
        self._is_async: bool = hello["is_async"]
        self.source: str | None = None if factory is not None else hello.get("file")
        """The file that the function is defined in. None: unknown, or the reward is built in."""
        try:
            self._binding = Binding(self._config, Signature.of(hello["parameters"]))
        except RewardError:
            self._spares.pop().close()
            raise
        self._pools: dict[asyncio.AbstractEventLoop, WorkerPool] = {}
        self._reported: set[str] = set()
        self._told_shape = False
        self._patience = Patience(self.name, config.max_failed_calls)

    def _start(self, name: str) -> WorkerProcess:
        start = partial(WorkerProcess, name, self._load, self._cwd, self._quota, program=PROGRAM)
        if not self._on:
            return start()
        for there in self._on:
            there[:] = [one for one in there if one.child.how_ended() is None]
        device = min(range(len(self._on)), key=lambda number: len(self._on[number]))
        self._on[device].append(start(environment=self._environments[device]))
        return self._on[device][-1]

    def _greeted(self, process: WorkerProcess) -> dict[str, Any]:
        function = self._config.function
        try:
            hello = process.greet()
        except WorkerEnded as error:
            why = f'"{function}": importing it ended the worker ({error}).'
        except TimeoutError:
            why = f'"{function}": importing it took longer than {START_S:g} s.'
        else:
            if "refused" not in hello:
                return hello
            why = hello["refused"]
            if hello.get("complete"):
                process.close()
                raise RewardError(why)
        process.close()
        raise RewardError(f"reward {why}")

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RewardError` if a row lacks a column that the function needs."""
        rows = list(rows)
        of_its_own = "" if self._config.tasks is None else " of those it judges"
        for number, row in enumerate(rows):
            name = self._binding.missing_column(row)
            if name is not None:
                hint = did_you_mean(name, row)
                raise RewardError(
                    f"reward {self.name} needs the column {name}; row {number}{of_its_own} has:"
                    f" {', '.join(map(str, row)) or 'none'}.{hint} Set answer_column, or give"
                    " the parameter a default."
                )
        if self._own_check is not None:
            self._own_check(rows)

    async def try_out(self, row: RewardInput) -> str | None:
        """Call the function once for a row, with made-up completions. Returns a warning if
        something may be wrong with the function, else None. Raises `RewardError` if no response
        could get a verdict."""
        self.check([row.columns])
        limit = _Limit.of(self._config.timeout_s, None)
        samples, replies = made_up(row), []
        try:
            if not self._binding.per_sample:
                replies = [await self._called(samples, limit)]
            if self._binding.per_sample or "error" in replies[0]:
                replies = [await self._called([sample], limit) for sample in samples]
        except Overran:
            why = f"did not answer a test completion within {limit.name}"
            raise RewardError(f"reward {self.name} {why}.") from None
        except (WorkerLost, NoWorker) as error:
            why = f"could not judge a test completion: {shortened(str(error))}"
            raise RewardError(f"reward {self.name} {why}.") from None
        found = finding_of(replies, row, self._binding.all_columns)
        if found is None:
            return None
        if found.certain:
            raise RewardError(f"reward {self.name} {found.text}")
        return f"reward {self.name} {found.text}\nResponses that fare so get no verdict"

    async def _called(self, samples: Sequence[RewardInput], limit: _Limit) -> dict[str, Any]:
        return await self._pool().call(self._payload(samples), limit.seconds, alone=True)

    # -- workers ----------------------------------------------------------------------------

    async def open(self) -> None:
        """Make the pool of workers for the running event loop. A worker that exists already is
        used; others are started when calls come."""
        self._pool()

    def _pool(self) -> WorkerPool:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            for other in [loop for loop in self._pools if loop.is_closed()]:
                self._spares += self._pools.pop(other).give_idle()
            spares, self._spares = self._spares, []
            self._pools[loop] = WorkerPool(
                self.name,
                self._start,
                said=lambda line: self._printed.line(self.name, line),
                is_async=self._is_async,
                max_workers=self._max_workers(),
                workers=spares,
            )
        return self._pools[loop]

    def _max_workers(self) -> int:
        if self._config.workers != "auto":
            return self._config.workers
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def outage(self) -> str | None:
        return None

    def broken(self) -> str | None:
        """The reason why the function is not called any more. None: it still is."""
        return self._patience.ended

    async def close(self) -> None:
        """End all workers. Scoring again starts new ones."""
        for loop, pool in list(self._pools.items()):
            if loop.is_closed():
                self._spares += pool.give_idle()
                del self._pools[loop]
        while self._spares:
            self._spares.pop().close()
        loop = asyncio.get_running_loop()
        if loop in self._pools:
            await self._pools.pop(loop).close()
        self._printed.close(self.name)

    # -- verdicts ---------------------------------------------------------------------------

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Verdict]:
        """Return one verdict per sample, in their order, by calling the function. If a call for
        several samples fails, the function is called again for each of them alone."""
        if not samples:
            return []
        limit = _Limit.of(self._config.timeout_s, timeout_s)
        if self._binding.per_sample and len(samples) > 1:
            return await self._one_by_one(samples, limit, alone=False)
        return await self._judge(samples, limit)

    async def _one_by_one(
        self, samples: Sequence[RewardInput], limit: _Limit, *, alone: bool
    ) -> list[Verdict]:
        calls = (self._judge([sample], limit, alone=alone) for sample in samples)
        return [verdict for (verdict,) in await asyncio.gather(*calls)]

    async def _judge(
        self, samples: Sequence[RewardInput], limit: _Limit, *, alone: bool = False
    ) -> list[Verdict]:
        if (why := self._patience.ended) is not None:
            return [Failed(reason=why)] * len(samples)
        try:
            payload = self._payload(samples)
        except Exception as error:
            if len(samples) > 1:
                return await self._one_by_one(samples, limit, alone=False)
            return [self._failed(f"cannot be called: {_said(error)}", _said(error))]
        try:
            reply = await self._pool().call(payload, limit.seconds, alone=alone)
        except NoWorker as error:
            why = f"no worker: {shortened(str(error))}"
            failed = self._failed(why, why, Cause.INFRASTRUCTURE)
            self._count([failed], even_so=True)
            return [failed] * len(samples)
        except (Overran, WorkerLost) as error:
            if len(samples) > 1:
                return await self._one_by_one(samples, limit, alone=True)
            return self._count(
                [await self._second_chance(samples[0], payload, limit, error, alone)]
            )
        if "error" in reply and len(samples) > 1:
            self._raised(reply)
            return await self._one_by_one(samples, limit, alone=False)
        return self._count(self._verdicts(reply, len(samples)))

    def _count(self, verdicts: list[Verdict], *, even_so: bool = False) -> list[Verdict]:
        """Count the verdicts of a call, and return them. After too many calls in a row without a
        verdict the function is not called again. `even_so`: whether a call that failed for lack of
        a worker counts among these."""
        if self._patience.saw(verdicts, even_so=even_so) and self._patience.ended is not None:
            for pool in self._pools.values():
                pool.give_up_waiting(self._patience.ended)
        return verdicts

    def _payload(self, samples: Sequence[RewardInput]) -> bytes:
        if self._is_built_in:
            samples = [dataclasses.replace(sample, prompt=sample.asked) for sample in samples]
        args, named = self._binding.bind(samples)
        progress = tuple(max(sample.progress for sample in samples))
        return pickle.dumps((self._binding.shape, len(samples), args, named, progress))

    async def _second_chance(
        self,
        sample: RewardInput,
        payload: bytes,
        limit: _Limit,
        error: Overran | WorkerLost,
        alone: bool,
    ) -> Verdict:
        """Return the verdict on a sample whose call failed with `error` (out of time, or its worker
        ended). If other samples in that worker may be to blame and time is left, the sample is
        judged once more, in a worker of its own."""
        left_s = limit.seconds
        if isinstance(error, WorkerLost):
            left_s = error.left_s
            if error.stopped or left_s < limit.seconds / 2:
                return self._lost(str(error))
        elif alone or not error.shared:
            return self._overran(limit)
        try:
            reply = await self._pool().call(payload, left_s, alone=True)
        except Overran:
            if isinstance(error, WorkerLost):
                return self._lost(f"{error}; another ran out of time")
            return self._overran(limit)
        except WorkerLost as again:
            if again.stopped:
                return self._lost(str(again))
            how = f"ended its worker twice, {again.how}"
            return self._failed(how, how)
        except NoWorker as none:
            return self._lost(f"{error}; no other worker: {none}")
        return self._verdicts(reply, 1)[0]

    def _overran(self, limit: _Limit) -> Failed:
        kind = f"took longer than {limit.name}"
        return self._failed(kind, kind, Cause.DEADLINE)

    def _lost(self, why: str) -> Failed:
        return self._failed(shortened(why), "a worker was lost", Cause.INFRASTRUCTURE)

    def _raised(self, reply: Mapping[str, Any]) -> Failed:
        """Return the `Failed` for an error that the function raised, as a worker's reply reports
        it. The traceback is logged once per kind of error."""
        kind, said = reply["error"], reply["said"]
        self._report(kind, reply["where"])
        return Failed(reason=f"{self.name} raised {kind}: {said}")

    def _failed(self, why: str, kind: str, cause: Cause = Cause.SAMPLE) -> Failed:
        self._report(kind)
        return Failed(reason=f"{self.name} {why}", cause=cause)

    def _report(self, kind: str, where: str = "") -> None:
        if self._patience.ended is None and kind not in self._reported:
            self._reported.add(kind)
            logger.warning("reward %s: no verdict: %s%s", self.name, kind, where)

    def _verdicts(self, reply: Mapping[str, Any], count: int) -> list[Verdict]:
        """Return the verdicts on the `count` samples of a call from its `reply`: each is
        a `Failed` with the call's reason, if the call failed."""
        if "error" in reply:
            return [self._raised(reply)] * count
        if "wrong" in reply:
            why = shortened(reply["wrong"], _MAX_REASON)
            if not self._told_shape:
                self._told_shape = True
                self._report(why)
            return [Failed(reason=f"{self.name} {why}")] * count
        seconds = None if self._config.deadline is None else reply["seconds"]
        logged = read(reply, count)
        return [
            self._verdict(value, seconds, *told)
            for value, told in zip(reply["values"], logged, strict=True)
        ]

    def _verdict(
        self,
        value: Value,
        seconds: float | None,
        metrics: Mapping[str, float],
        extras: Mapping[str, Any],
    ) -> Verdict:
        if value is None:
            return None
        if isinstance(value, dict):
            self._report(shortened(value["kind"]))
            why = shortened(value["why"], _MAX_REASON)
            return Failed(reason=f"{self.name} {why}", seconds=seconds)
        return Scored(value=value, seconds=seconds, metrics=metrics, extras=extras)


class Patience:
    """Counts the calls in a row that gave no sample a verdict, and says when to call no more."""

    def __init__(self, name: str, most: int | None) -> None:
        """`name`: the reward's, for messages. `most`: number of failed calls in a row after which
        the function is not called any more; None: no limit."""
        self.ended: str | None = None
        """The reason why the function is not called any more. None: it is still called."""
        self._name = name
        self._most = most
        self._num_failed = 0

    def saw(self, verdicts: Sequence[Scored | Failed | None], *, even_so: bool = False) -> bool:
        """Count the verdicts of one call. Returns True if with this call the function is given up.
        A call that failed because of a worker, not of the function, counts only with `even_so`."""
        failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
        if len(failed) < len(verdicts):
            self._num_failed = 0
        elif even_so or failed[0].cause is not Cause.INFRASTRUCTURE:
            self._num_failed += 1
        if self._most is None or self._num_failed < self._most or self.ended is not None:
            return False
        self.ended = (
            f"reward {self._name} gave no verdict in {self._most} calls in a row, at last:"
            f" {failed[0].reason}"
        )
        return True


def _sent(spec: str) -> bytes:
    """The function of this program named by `spec`, pickled for a worker. Raises `RewardError`."""
    try:
        return pickled_given(spec, "its worker processes")
    except ImportSpecError as error:
        raise RewardError(f"reward {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Limit:
    """The seconds that one call may take, and the limit's name in messages."""

    seconds: float
    name: str

    @classmethod
    def of(cls, own_s: float, asked_s: float | None) -> _Limit:
        if asked_s is None or own_s <= asked_s:
            return cls(own_s, f"timeout_s={own_s:g}")
        return cls(asked_s, f"its deadline of {asked_s:.3g} s")


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it needs the column {error.args[0]}"
    return shortened(f"its columns cannot be sent to a worker: {type(error).__name__}: {error}")
