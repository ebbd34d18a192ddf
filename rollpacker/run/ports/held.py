"""Engines, the samples that each engine has, and what a sample takes along to another engine."""

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
    """How often devices were shared out anew."""
    tensor_parallel: int
    """Number of devices of each engine."""


class KnownEnds(Protocol):
    """Protocol of what knows how some samples end before an engine is asked, as `Salvage` does."""

    def keep_back(
        self, handle: Handle, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationRequest]: ...

    def stop(self, samples: Sequence[SampleId]) -> Sequence[SampleId]: ...


@dataclass(eq=False, slots=True)
class Handle:
    """One incarnation of an engine, from its start to its loss, and what the run knows of it."""

    number: int
    incarnation: int
    engine: Engine
    lives: bool = True
    num_steps: int = -1
    """Number of the engine's decode steps at the last look; -1 before the first look."""
    progress_s: float = 0.0
    """The last time at which the decode steps had grown or the engine had nothing to do, in seconds
    of the run's clock."""
    is_away: bool = False
    """Whether the engine has let go of its device's memory, or is about to."""
    told: list[Callable[[], None]] = field(default_factory=list)
    """Calls that came while the engine was away, to be made when it is back."""
    version: int | None = None
    """Version of the weights that the engine was brought to. None if it was not brought to any
    yet."""
    salvage: KnownEnds | None = None
    """Knows how some of the engine's samples end, from an earlier session. None: knows none."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Give the engine the requests whose end is not known, at once or when the engine is
        back."""
        if self.salvage is not None:
            requests = self.salvage.keep_back(self, requests)
        if requests:
            self._tell(partial(self.engine.submit, requests))

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop the samples whose end is not known, at once or when the engine is back."""
        if self.salvage is not None:
            samples = self.salvage.stop(samples)
        if samples:
            self._tell(partial(self.engine.abort, samples))

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Have the engine discard its caches of these samples; later, if the engine is away."""
        self._tell(partial(self.engine.let_go, samples))

    def come_back(self) -> None:
        """Make the calls that came while the engine was away."""
        told, self.told, self.is_away = self.told, [], False
        for call in told:
            call()

    def _tell(self, call: Callable[[], None]) -> None:
        if self.is_away:
            self.told.append(call)
        else:
            call()


class Ending:
    """Closes engines in threads that nobody waits for."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def is_over(self) -> bool:
        """Whether all engines that were closed here have released their devices."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, engine: Engine) -> None:
        """Close an engine that is lost or not needed, in the background. Its errors are ignored."""

        def close() -> None:
            with contextlib.suppress(Exception):  # whatever it says
                asyncio.run(engine.close())

        self.do(close, "rollpacker-lost-engine")

    def do(self, work: Callable[[], None], name: str) -> None:
        """Do work that closes engines, in a thread of this name."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]


@dataclass(eq=False, slots=True)
class AssignedSample:
    """A sample that was given to an engine and has not ended."""

    request: GenerationRequest
    """The request that the core's launch (its submission of the sample) made."""
    at: Handle | None
    """The engine that has the sample. None if that engine is lost."""
    moves_to: int | None = None
    """Number of the engine in which the sample is to go on, once the engine that has it has stopped
    it. None if it stays."""
    anew: bool = False
    """Whether the sample starts in the other engine from what its launch gave it, instead of from
    the tokens that it has by now."""
    is_unwanted: bool = False
    """Whether the core has aborted the sample since it told the sample to move, so that it does not
    start in the other engine."""
    num_kept: int | None = None
    """Number of carried tokens, from an earlier launch, that an engine which the sample has left
    found valid. None if no such engine has looked at them."""
    preemptions: int = 0
    """Number of times that engines which the sample has left had preempted it."""


def stamped(event: EngineEnd, handle: Handle) -> EngineEnd:
    """Returns the event with the number and incarnation of the engine that reported it. Both are 0,
    the default, for the first engine of a run."""
    if not (handle.number or handle.incarnation):
        return event
    return structs.replace(event, engine=handle.number, incarnation=handle.incarnation)


def with_earlier(event: EngineEnd, held: AssignedSample) -> EngineEnd:
    """Returns the event with the preemptions and kept tokens of engines that the sample left."""
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
    """Returns the request from which another engine goes on, with the tokens so far, which stay
    valid together with their log-probs.

    It is the launch's own request, so that the sample starts again, if no engine has looked at its
    carried tokens yet, or if an end of the response may have been refused: how often it was refused
    is known to the old engine alone.
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
    """The event that the sample goes on in engine `to` with so many tokens."""
    return SampleMoved(
        time_s=0.0,
        sample=sample,
        engine=to.number,
        incarnation=to.incarnation,
        num_tokens=num_tokens,
    )
