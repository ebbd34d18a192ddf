"""Environments in processes of their own, as the run's process uses them (`Environments`).

This process imports none of the user's code. Whatever goes wrong in an environment becomes a `Lost`
with its cause, and is never counted as zero.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollpacker.core.events import ToolCall
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.environments.environment import (
    Answered,
    Begun,
    EnvironmentConfig,
    EnvironmentSetupError,
    Lost,
    Message,
    ToolSchema,
)
from rollpacker.environments.episode_pool import EpisodePool, GivenUp
from rollpacker.imports import ImportSpecError, is_given, pickled_given
from rollpacker.rewards.functions.printed import Printed
from rollpacker.rewards.functions.returned import shortened
from rollpacker.sandbox.sandbox import SandboxConfig
from rollpacker.workers.host import Host, ThisHost
from rollpacker.workers.output import OutputQuota
from rollpacker.workers.pool import (
    NoWorker,
    Overran,
    PoolCall,
    PoolWorker,
    WorkerLost,
)
from rollpacker.workers.served import START_S
from rollpacker.workers.worker import WorkerEnded, WorkerProcess

logger = logging.getLogger(__name__)

PROGRAM = "rollpacker.environments.worker"
MAX_AUTO_WORKERS = 8


_CANCELLED = Lost(reason="nobody needs it", cause="cancelled")
Answer = TypeVar("Answer", Begun, Answered)


@dataclass(slots=True)
class _Life:
    """An episode from its beginning to its end or its loss. An episode that is begun again has
    another life."""

    number: int
    """Number that tells this life from the episode's other lives, in messages to its process."""
    prompt: PromptId
    worker: PoolWorker | None = None
    turn: int = 0
    """Number of the last turn that was answered. 0: the episode has only begun."""
    last: Begun | Answered | None = None
    """The environment's answer to the last turn, or to the beginning. None: there is none yet."""
    call: PoolCall | None = None
    """The call to the episode's process that is under way. None: no call is."""


@dataclass(slots=True)
class _Episode:
    life: _Life | None = None
    said: dict[int, Begun | Answered] = field(default_factory=dict)
    """By turn, the first answer that the episode got there, however often it was begun; turn 0 is
    the beginning. Later answers are compared with it if environments are deterministic."""


class SupervisedEnvironments:
    """All environments of a run, in processes of their own. Meets the protocol `Environments`."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        sandbox: SandboxConfig | None = None,
        brings_rows: bool = False,
        num_rows: int | None = None,
    ) -> None:
        """Start a process that examines the tools or the environment; must be called outside of an
        event loop. `sandbox`: for the tools that run the model's code. `brings_rows`: ask the
        environment for the data set's rows. `num_rows`: number of rows if it has none of its own.
        Raises `EnvironmentSetupError` if something cannot be used."""
        if not config.tools and config.function is None:
            raise EnvironmentSetupError(
                "no environment is set; set environment.tools or environment.function."
            )
        self._config = config
        self._cwd = str(Path.cwd())
        self._load = _load(config, sandbox or SandboxConfig(), describe=False)
        self._quota = OutputQuota()
        self._printed = Printed("environment")
        load = _load(
            config,
            sandbox or SandboxConfig(),
            describe=True,
            rows=brings_rows,
            num_rows=num_rows,
        )
        first = WorkerProcess("environment-1", load, self._cwd, self._quota, program=PROGRAM)
        self._spares = [first]
        hello = self._hello = self._greeted(self._spares[0])
        self.tools: tuple[ToolSchema, ...] = tuple(hello["tools"])
        self.begins: bool = hello["begins"]
        self.scores_at_end: bool = hello["scores_at_end"]
        said = hello["is_deterministic"]
        self.is_deterministic: bool = said if config.deterministic is None else config.deterministic
        self._pool: EpisodePool | None = None
        self._places: deque[Host] = deque()
        """Hosts of the processes; the next process is started on the first of them. Empty: all are
        started beside this process."""
        self._numbers = itertools.count(1)
        self._episodes: dict[SampleId, _Episode] = {}
        self._told: set[str] = set()

    @property
    def name(self) -> str:
        return self._hello["name"]  # type: ignore[no-any-return]

    @property
    def gives_rewards(self) -> bool:
        return self._hello["gives_rewards"]  # type: ignore[no-any-return]

    @property
    def rows(self) -> tuple[dict[str, Any], ...] | None:
        """The rows that the environment provided. None: it was not asked for rows."""
        return tuple(self._hello["rows"]) if "rows" in self._hello else None

    # -- processes --------------------------------------------------------------------------

    def be_on(self, places: Sequence[Host]) -> None:
        """Have one environment process on each of these hosts alone. Call before `open`."""
        assert self._pool is None, "open already"
        self._places.extend(places)
        while self._spares:
            self._spares.pop().close()

    def _start(self, name: str) -> WorkerProcess:
        """Start an environment process on the next host, or here if there are none. Hosts take
        turns, so that one which replaces a lost process is elsewhere: its host may be lost, too."""
        place = self._places[0] if self._places else None
        self._places.rotate(-1)
        host = None if isinstance(place, ThisHost) else place
        return WorkerProcess(name, self._load, self._cwd, self._quota, program=PROGRAM, host=host)

    def _greeted(self, process: WorkerProcess) -> dict[str, Any]:
        what = self._config.function or ", ".join(self._config.tools)
        try:
            hello = process.greet()
        except WorkerEnded as error:
            why = f"{what}: importing it ended its process ({error})."
        except TimeoutError:
            why = f"{what}: importing it took longer than {START_S:g} s."
        except BaseException:
            process.close()
            raise
        else:
            if "refused" not in hello:
                return hello
            why = hello["refused"]
        process.close()
        raise EnvironmentSetupError(why)

    async def open(self) -> None:
        """Start the environment processes, in the running event loop."""
        if self._pool is not None:
            return
        spares, self._spares = self._spares, []
        self._pool = EpisodePool(
            self.name,
            self._start,
            said=lambda line: self._printed.line(self.name, line),
            is_async=True,
            max_workers=self._num_workers(),
            workers=spares,
        )
        self._pool.start()

    def _num_workers(self) -> int:
        if self._places:
            return len(self._places)
        if self._config.workers != "auto":
            return self._config.workers
        has_affinity = hasattr(os, "sched_getaffinity")
        num = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        return min(num, MAX_AUTO_WORKERS)

    async def close(self) -> None:
        """End the environment processes, and forget all episodes."""
        while self._spares:
            self._spares.pop().close()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        self._episodes.clear()
        self._printed.close(self.name)

    # -- episodes ---------------------------------------------------------------------------

    async def begin(
        self,
        episode: SampleId,
        row: Mapping[str, Any],
        *,
        seed: int,
        timeout_s: float | None = None,
    ) -> Begun | Lost:
        """Begin an episode with the dataset row of its prompt (`Environments.begin`)."""
        known = self._episodes.setdefault(episode, _Episode())
        if known.life is not None and known.life.turn == 0 and isinstance(known.life.last, Begun):
            return known.life.last
        self._give_up(known)
        life = known.life = _Life(next(self._numbers), episode.prompt)
        reply = await self._asked(known, life, ({"seed": seed, **row}, None), timeout_s)
        if isinstance(reply, Lost):
            return reply
        messages, tools = reply["messages"], reply.get("tools")
        begun = Begun(
            messages=None if messages is None else tuple(messages),
            tools=None if tools is None or tuple(tools) == self.tools else tuple(tools),
            seconds=reply["seconds"],
        )
        return self._settled(known, life, begun)

    async def act(
        self, episode: SampleId, turn: int, message: Message, *, timeout_s: float | None = None
    ) -> Answered | Lost:
        """Give an episode the message of this turn, and return the answer (`Environments.act`)."""
        known = self._episodes.setdefault(episode, _Episode())
        life = known.life
        if life is not None and life.turn == turn and isinstance(life.last, Answered):
            return life.last
        if life is None and not self.begins and turn == 1:
            life = known.life = _Life(next(self._numbers), episode.prompt)
        if life is None:
            return self._lost("the episode was lost before and has not begun anew")
        assert turn == life.turn + 1, f"turn {turn} of an episode that is at turn {life.turn}"
        reply = await self._asked(known, life, (None, dict(message)), timeout_s)
        if isinstance(reply, Lost):
            return reply
        answered = Answered(
            messages=tuple(reply["messages"]),
            reward=reply.get("reward"),
            done=reply["done"],
            truncated=reply.get("truncated", False),
            seconds=reply["seconds"],
            metrics=reply.get("metrics", {}),
            calls=_calls_in(reply),
        )
        life.turn = turn
        return self._settled(known, life, answered)

    async def finish(
        self, episode: SampleId, *, timeout_s: float | None = None
    ) -> float | Lost | None:
        """Return an episode's reward at its end, None without one (`Environments.finish`)."""
        known = self._episodes.setdefault(episode, _Episode())
        if known.life is None:
            return self._lost("the episode was lost before and has not begun anew")
        reply = await self._asked(known, known.life, (None, None), timeout_s)
        return reply if isinstance(reply, Lost) else reply.get("reward")

    def end(self, episode: SampleId) -> None:
        """Forget an episode. A call that still waits for an answer gets `Lost`."""
        known = self._episodes.pop(episode, None)
        if known is not None:
            self._give_up(known)

    def _give_up(self, known: _Episode) -> None:
        life, known.life = known.life, None
        pool = self._pool
        if life is None or pool is None:
            return
        if life.call is not None:
            pool.give_up(life.call)
            if life.worker is None and life.call.worker is not None:
                pool.forget(life.call.worker, life.number)
        if life.worker is not None:
            pool.release(life.worker, life.number, life.prompt)

    # -- calls ------------------------------------------------------------------------------

    async def _asked(
        self, known: _Episode, life: _Life, what: tuple[Any, Any], timeout_s: float | None
    ) -> dict[str, Any] | Lost:
        """Make a call in the episode's process and return the reply. `what`: the row (to begin) and
        the model's message (of a turn); two None: the last reward. Without a reply, or if that
        reports a failure, the episode is lost: returns a `Lost`."""
        pool = self._pool
        if pool is None:  # the run closes, and somebody plays an episode to its end
            return self._ended(known, life, _CANCELLED)
        limit_s = min(self._config.timeout_s, timeout_s or self._config.timeout_s)
        began = pool.loop.time()
        try:
            payload = pickle.dumps((life.number, *what))
        except Exception as error:  # whatever the columns of a row say of being copied
            why = f"its columns cannot be sent to a process: {type(error).__name__}: {error}"
            return self._ended(known, life, self._lost(shortened(why), "environment"))
        try:
            if life.worker is None:
                life.call = pool.begin(payload, limit_s, life.prompt)
            else:
                life.call = pool.act(payload, limit_s, life.worker, life.prompt)
            reply = await pool.answer(life.call)
        except asyncio.CancelledError:
            self._ended(known, life, _CANCELLED)
            raise
        except GivenUp:
            return _CANCELLED
        except Overran as error:
            lost = self._overran(error, limit_s)
        except (WorkerLost, NoWorker) as error:
            lost = self._lost(shortened(str(error)), seconds=pool.loop.time() - began)
        else:
            if life.worker is None:
                life.worker = life.call.worker
                assert life.worker is not None
                pool.keep(life.worker)
            life.call = None
            failed = self._failed(reply)
            return reply if failed is None else self._ended(known, life, failed)
        return self._ended(known, life, lost)

    def _ended(self, known: _Episode, life: _Life, lost: Lost) -> Lost:
        if known.life is life:
            self._give_up(known)
        return lost

    def _settled(self, known: _Episode, life: _Life, answer: Answer) -> Answer | Lost:
        """Return the answer. If environments are deterministic and the answer differs from the
        first that the episode got at this turn, return a `Lost` instead."""
        life.last = answer
        if not self.is_deterministic:
            return answer
        first = known.said.setdefault(life.turn, answer)
        if first is not answer and _compared(first) != _compared(answer):
            why = (
                f"{self.name} is said to be deterministic, but when an episode was played again"
                f" with the same messages, it answered otherwise at turn {life.turn}"
            )
            self._report(why, ". Set environment.deterministic=false, or draw from the row's seed.")
            return self._ended(known, life, Lost(reason=why, cause="environment"))
        return answer

    # -- losses -----------------------------------------------------------------------------

    def _failed(self, reply: Mapping[str, Any]) -> Lost | None:
        """Return the loss if a reply reports that the environment itself failed or was too slow.
        None: it reports no failure."""
        seconds = reply.get("seconds", 0.0)
        if "lost" in reply:
            return self._lost(shortened(reply["lost"]), seconds=seconds)
        if "wrong" in reply:
            why = f"{self.name} {reply['wrong']}"
            self._report(why)
            return Lost(reason=why, cause="environment", seconds=seconds)
        if "error" in reply:
            self._report(f"{self.name} raised {reply['error']}", reply["where"])
            why = f"{self.name} raised {reply['error']}: {reply['said']}"
            return Lost(reason=why, cause="environment", seconds=seconds)
        return None

    def _overran(self, error: Overran, limit_s: float) -> Lost:
        if not error.own:
            return self._lost("another episode held up its process for too long")
        calls = _calls_in(error.told)
        at = f" (in a call of {calls[-1].tool})" if calls else ""
        why = f"{self.name} took longer than {limit_s:.3g} s{at}"
        self._report(f"{self.name} took longer than its limit{at}")
        return Lost(reason=why, cause="deadline", seconds=limit_s, calls=calls)

    def _lost(self, why: str, cause: str = "infrastructure", seconds: float = 0.0) -> Lost:
        return Lost(reason=why, cause=cause, seconds=seconds)

    def _report(self, kind: str, more: str = "") -> None:
        """Log the warning `kind + more`, unless one with the same `kind` was logged before."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("environment %s%s", kind, more)


def _calls_in(reply: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(*call) for call in reply.get("calls", ()))


def _compared(answer: Begun | Answered) -> str:
    """The parts of an answer, as text, that must be the same whenever its episode is played."""
    values: list[Any] = [answer.messages]
    if isinstance(answer, Answered):
        values += [answer.reward, answer.done, answer.truncated]
    elif answer.tools is not None:
        values.append(answer.tools)
    return json.dumps(values, sort_keys=True)


def _load(
    config: EnvironmentConfig,
    sandbox: SandboxConfig,
    *,
    describe: bool,
    rows: bool = False,
    num_rows: int | None = None,
) -> bytes:
    """Return the message that tells an environment process what to load. `describe`: the process
    returns the tools' schemas, too. `rows`: it returns the environment's dataset rows, or
    `num_rows` numbered ones. Raises `EnvironmentSetupError`."""
    if len(set(config.tools)) < len(config.tools):
        raise EnvironmentSetupError("environment.tools names a tool twice.")
    request = {
        "tools": {spec: _sent(spec) for spec in config.tools},
        "function": config.function,
        "sent": None if config.function is None else _sent(config.function),
        "arguments": dict(config.arguments),
        "memory_mb": config.memory_mb,
        "describe": describe,
        "rows": rows,
        "num_rows": num_rows,
        "max_result_chars": config.max_result_chars,
        "sandbox": sandbox,
    }
    return pickle.dumps(request)


def _sent(spec: str) -> bytes | None:
    """An object of the run's program, pickled for an environment process. None for an object that
    the process can import. Raises `EnvironmentSetupError`."""
    if not is_given(spec):
        return None
    try:
        return pickled_given(spec, "the processes of environments")
    except ImportSpecError as error:
        raise EnvironmentSetupError(str(error)) from error
