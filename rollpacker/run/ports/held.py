"""What the run knows of an engine and its samples, and what a sample takes to another engine."""

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
    """How the run's devices are distributed among its engines."""

    number: int
    """Number of times that devices were redistributed so far."""
    tensor_parallel: int
    """Number of devices of each engine."""


class KnownEnds(Protocol):
    """Protocol of an object, such as `Salvage`, that has recorded how samples ended before a
    resume. Its methods return the requests and samples for which an engine is still needed."""

    def keep_back(
        self, handle: Handle, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationRequest]: ...

    def stop(self, samples: Sequence[SampleId]) -> Sequence[SampleId]: ...


@dataclass(eq=False, slots=True)
class Handle:
    """One engine from its start to its loss, and what the run knows of it. The engine that replaces
    it has the same number; `incarnation` counts the earlier engines with this number."""

    number: int
    incarnation: int
    engine: Engine
    lives: bool = True
    num_steps: int = -1
    """The engine's count of decode steps when last looked at; -1 before the first look."""
    progress_s: float = 0.0
    """When the engine last was seen to have done a decode step, or to have nothing to do; in
    seconds of the run's clock."""
    is_away: bool = False
    """Whether the engine has released its device's memory, or is about to."""
    told: list[Callable[[], None]] = field(default_factory=list)
    """Calls of the engine (submit, abort, let_go) that wait until it has its device again."""
    version: int | None = None
    """Version of the weights that the engine got last. None before it got any."""
    salvage: KnownEnds | None = None
    """Has recorded how samples ended before a resume, which this engine need not generate then.
    None: no records."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Give the engine these requests at once, or when it has its device again; except for those
        whose result is known from before a resume."""
        if self.salvage is not None:
            requests = self.salvage.keep_back(self, requests)
        if requests:
            self._tell(partial(self.engine.submit, requests))

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop these samples at once, or when the engine has its device again; except for those
        whose result is known from before a resume."""
        if self.salvage is not None:
            samples = self.salvage.stop(samples)
        if samples:
            self._tell(partial(self.engine.abort, samples))

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Have the engine discard its caches of these samples: at once, or when it has its device
        again."""
        self._tell(partial(self.engine.let_go, samples))

    def come_back(self) -> None:
        """Note that the engine has its device again, and make the calls that waited for that."""
        told, self.told, self.is_away = self.told, [], False
        for call in told:
            call()

    def _tell(self, call: Callable[[], None]) -> None:
        if self.is_away:
            self.told.append(call)
        else:
            call()


class Ending:
    """Closes engines in background threads."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def is_over(self) -> bool:
        """Whether all engines that were closed here have released their devices."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, engine: Engine) -> None:
        """Close a lost or unneeded engine in the background. Its errors are ignored."""

        def close() -> None:
            with contextlib.suppress(Exception):  # whatever it says
                asyncio.run(engine.close())

        self.do(close, "rollpacker-lost-engine")

    def do(self, work: Callable[[], None], name: str) -> None:
        """Run a function that closes engines in a thread of this name."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]


@dataclass(eq=False, slots=True)
class AssignedSample:
    """A sample that is assigned to an engine and has not ended."""

    request: GenerationRequest
    """The request with which the core submitted the sample."""
    at: Handle | None
    """The engine that has the sample. None if that engine is lost."""
    moves_to: int | None = None
    """Number of the engine in which the sample goes on once its present engine has stopped it. None
    if it is not to move."""
    anew: bool = False
    """Whether a sample that moves starts again from its original request, without the tokens
    generated since."""
    is_unwanted: bool = False
    """Whether the core has aborted the sample while it was to move, so that it ends instead."""
    num_kept: int | None = None
    """Number of tokens kept from an earlier step that came out the same again in an engine which
    the sample has left since. None if no engine has drawn them again."""
    preemptions: int = 0
    """Number of times that this sample was preempted in engines that it has left."""


def stamped(event: EngineEnd, handle: Handle) -> EngineEnd:
    """Returns the event with the number of the engine that reported it, and its incarnation (how
    many engines had this number before). Both are 0, the default, for the first engine of a run."""
    if not (handle.number or handle.incarnation):
        return event
    return structs.replace(event, engine=handle.number, incarnation=handle.incarnation)


def with_earlier(event: EngineEnd, held: AssignedSample) -> EngineEnd:
    """Returns the event, to whose counts those of engines that the sample has left are added:
    preemptions, and tokens kept from an earlier step that came out the same again."""
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
    """Returns the request for the sample's next engine, with the tokens generated so far and their
    log-probs. It is the original request, so that the sample starts again, if no engine has checked
    the tokens of an earlier step yet, or if some tokens may have been drawn repeatedly, since only
    the old engine knows how often."""
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
    """Returns the event that a sample goes on in engine `to`, where it has `num_tokens` tokens."""
    return SampleMoved(
        time_s=0.0,
        sample=sample,
        engine=to.number,
        incarnation=to.incarnation,
        num_tokens=num_tokens,
    )
