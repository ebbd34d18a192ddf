"""Engines, who has a sample that was launched, and what it takes along from engine to engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from msgspec import structs

from rollpacker.core.events import (
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
)
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import Carried, Engine, GenerationRequest, Response

EngineEnd = SampleGenerated | SampleAborted | SampleFailed


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The way in which devices are shared out among engines."""

    number: int
    """Number of times that devices were shared out anew."""
    tensor_parallel: int
    """Devices of each engine."""


class KnownEnds(Protocol):
    """Knows how some samples end before an engine is asked, as `Salvage` does."""

    def keep_back(
        self, handle: Handle, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationRequest]: ...

    def stop(self, samples: Sequence[SampleId]) -> Sequence[SampleId]: ...


@dataclass(eq=False, slots=True)
class Handle:
    """One incarnation of an engine, and what the run knows of it."""

    number: int
    incarnation: int
    engine: Engine
    lives: bool = True
    num_steps: int = -1
    """The engine's decode steps when they were last looked at."""
    progress_s: float = 0.0
    """When the decode steps had last grown, or the engine had nothing to do, in seconds of the
    run's clock."""
    is_away: bool = False
    """Whether the engine has let go of its device's memory, or is about to."""
    told: list[Callable[[], None]] = field(default_factory=list)
    """Calls that came while the engine was away, to be made when it is back."""
    version: int | None = None
    """Version of the weights that the engine was brought to. None if it was not brought to any
    yet."""
    salvage: KnownEnds | None = None
    """Knows how some of the engine's samples end. None if nothing is known."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `Engine`."""
        if self.salvage is not None:
            requests = self.salvage.keep_back(self, requests)
        if requests:
            self._tell(partial(self.engine.submit, requests))

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `Engine`."""
        if self.salvage is not None:
            samples = self.salvage.stop(samples)
        if samples:
            self._tell(partial(self.engine.abort, samples))

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """See `Engine`."""
        self._tell(partial(self.engine.let_go, samples))

    def come_back(self) -> None:
        """Tell it what waits."""
        told, self.told, self.is_away = self.told, [], False
        for call in told:
            call()

    def _tell(self, call: Callable[[], None]) -> None:
        if self.is_away:
            self.told.append(call)
        else:
            call()


class Ending:
    """Engines that are closed while nobody waits for that."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def is_over(self) -> bool:
        """None of them has a device any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, engine: Engine) -> None:
        """Close an engine that is lost, or that nobody needs."""

        def close() -> None:
            with contextlib.suppress(Exception):  # whatever it says
                asyncio.run(engine.close())

        self.do(close, "rollpacker-lost-engine")

    def do(self, work: Callable[[], None], name: str) -> None:
        """Do work that closes engines in a thread of its own, of this name."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]


@dataclass(eq=False, slots=True)
class AssignedSample:
    """A sample that was given to an engine and has not ended."""

    request: GenerationRequest
    """The request that its launch gave it."""
    at: Handle | None
    """The engine that has the sample. None if that engine is lost."""
    moves_to: int | None = None
    """Number of the engine in which the sample is to go on, once the engine that has it has stopped
    it. None if it stays."""
    anew: bool = False
    """Whether the sample starts in the other engine from what its launch gave it, instead of from
    the tokens that it has by now."""
    is_unwanted: bool = False
    """Whether the sample was aborted since it was told to move, so that it does not start in the
    other engine."""
    num_kept: int | None = None
    """Number of carried tokens that an engine which has looked at them kept, and which the sample
    has left since. None if no engine has looked at them."""
    preemptions: int = 0
    """Number of times that engines which the sample has left had put it back."""


def stamped(event: EngineEnd, handle: Handle) -> EngineEnd:
    """The event with the engine that says it. The first engine of a run is meant where no engine is
    named."""
    if not (handle.number or handle.incarnation):
        return event
    return structs.replace(event, engine=handle.number, incarnation=handle.incarnation)


def with_earlier(event: EngineEnd, held: AssignedSample) -> EngineEnd:
    """The event with what happened to the sample in the engines that it has left."""
    if isinstance(event, SampleFailed):
        return event
    if held.num_kept is None and not held.preemptions:
        return event
    num_kept = held.num_kept if event.num_kept is None else event.num_kept
    return structs.replace(
        event, num_kept=num_kept, preemptions=event.preemptions + held.preemptions
    )


def taken_along(
    held: AssignedSample, event: SampleAborted, response: Response | None
) -> GenerationRequest:
    """The request from which another engine goes on: with the tokens so far, which stay as they
    are, as their weights do.

    What was carried into the launch and not looked at is still to be looked at; and where an end of
    the response may be refused, how often it was is known to the engine alone, so that it starts
    again.
    """
    carried = held.request.carried
    unseen = carried is not None and carried.verify and event.num_kept is None
    unseen = unseen and held.num_kept is None
    held.preemptions += event.preemptions
    may_redraw = carried is not None and (carried.floor or carried.ceiling is not None)
    if response is None or unseen or may_redraw or response.redraws:
        return held.request
    held.num_kept = event.num_kept if held.num_kept is None else held.num_kept
    return replace(
        held.request,
        carried=Carried(tokens=response.tokens, log_probs=response.log_probs, verify=False),
    )


def moved(sample: SampleId, to: Handle, num_tokens: int) -> SampleMoved:
    """The event that the sample goes on in this engine, with so many tokens."""
    return SampleMoved(
        time_s=0.0,
        sample=sample,
        engine=to.number,
        incarnation=to.incarnation,
        num_tokens=num_tokens,
    )
