"""The engines of a run: which are alive, which samples each has, and what their outputs mean.

    Generation --submit, place, abort, move--> engine 0 | engine 1 | ...     under the bus's lock
    Generation <-------- outputs, errors ----- each from a thread of its own

Engines are numbered. An engine and those that replace it when it is lost share the number, and
differ in their *incarnation*. A lost engine is closed; what it still reports of samples that run
elsewhere is told to the core, to be counted, without tokens. When the number of devices per engine
changes, all engines are closed and made anew. A run with a single engine that cannot be replaced
ends with the error that ends the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rollpacker.core.commands import NOWHERE
from rollpacker.core.events import (
    EngineLost,
    EngineReady,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
)
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Response,
)
from rollpacker.run.ports.deliveries import Deliveries
from rollpacker.run.ports.held import (
    AssignedSample,
    Ending,
    EngineEnd,
    EngineLayout,
    Handle,
    moved,
    stamped,
    taken_along,
    with_earlier,
)
from rollpacker.trainer.trainer import HandOver

MakeEngine = Callable[[int, int, int], Engine]
"""Function that makes an engine, given its number, the count of engines before it with that number,
and its number of devices. The engine may still be loading, and lacks the run's weights."""

EngineEvent = SampleGenerated | SampleAborted | SampleFailed | SampleMoved

FleetEvent = EngineLost | EngineReady | SampleMoved


class Keepers:
    """Knows which engine keeps the KV cache of a sample while the sample's environment answers.
    Used under the bus's lock."""

    def __init__(self) -> None:
        self._handles: dict[SampleId, Handle] = {}

    def keeps(self, handle: Handle, request: GenerationRequest) -> None:
        """Note that this engine keeps its KV cache of the request's sample, if the request asks for
        that."""
        if request.keep:
            self._handles[request.sample] = handle

    def forget(self) -> None:
        """Forget which engines keep caches; new weights have made all caches useless."""
        self._handles.clear()

    def of(self, sample: SampleId) -> int | None:
        """Returns the number of the engine that keeps this sample's cache; None if no living engine
        does."""
        handle = self._handles.get(sample)
        return handle.number if handle is not None and handle.lives else None

    def leave(
        self, samples: Iterable[SampleId], to: Handle | None = None
    ) -> dict[Handle, list[SampleId]]:
        """Note that no engine but `to` (None: none at all) keeps its cache of these samples.
        Returns the living engines that the caller must tell to discard caches, with their
        samples."""
        told: dict[Handle, list[SampleId]] = {}
        for sample in samples:
            handle = self._handles.pop(sample, None)
            if handle is not None and handle is not to and handle.lives:
                told.setdefault(handle, []).append(sample)
        return told


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights with which engines sample, or will sample next."""

    version: int
    hand_over: HandOver | None
    """The trainer's weights for engines to copy. None if the trainer has not written them yet."""

    @property
    def is_delivered(self) -> bool:
        """Whether the weights went straight to the engines that lived, and nobody can read them."""
        return self.hand_over is not None and self.hand_over.is_delivered


class Engines:
    """The engines of a run by number, and the samples that the core has assigned to each. Methods
    are called under the bus's lock, except for `close`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        make: MakeEngine | None = None,
        tensor_parallel: int = 1,
        deliveries: Deliveries | None = None,
    ) -> None:
        """`make`: makes an engine to replace a lost one; None: lost engines are not replaced, and
        the run ends. `tensor_parallel`: number of devices of each engine. `deliveries`: brings
        weights straight to engines; None: these read them from host memory."""
        self.make, self.deliveries = make, deliveries
        self.handles = {number: Handle(number, 0, engine) for number, engine in enumerate(engines)}
        """The latest engine of each number, alive or lost."""
        self.layout = EngineLayout(0, tensor_parallel)
        self.ending = Ending()
        self._coming: dict[int, Engine] = {}
        """Engines that are being loaded, by the number that each will have."""
        self.weights = Weights(0, None)
        self.is_closed = False
        self._held: dict[SampleId, AssignedSample] = {}
        self._keepers = Keepers()
        self._not_numbers: set[Handle] = set()
        """Engines that computed a NaN in their logits with the current weights."""
        self._listen: Callable[[Handle], None] = lambda handle: None
        self._tell: Callable[[FleetEvent], None] = lambda event: None

    def start(
        self,
        on_outputs: Callable[[Handle, Sequence[EngineOutput]], None],
        on_error: Callable[[Handle, BaseException], None],
        tell: Callable[[FleetEvent], None],
    ) -> None:
        """Receive the outputs of all engines from now on, also of those added later. `on_outputs`
        and `on_error` get the engine and what came from it. `tell` gets events for the core:
        engines lost or added, samples moved to another engine."""

        def listen(handle: Handle) -> None:
            handle.engine.start(partial(on_outputs, handle), partial(on_error, handle))

        self._listen, self._tell = listen, tell
        for handle in self.handles.values():
            with self._losing(handle):
                listen(handle)

    @property
    def living(self) -> list[Handle]:
        return [handle for handle in self.handles.values() if handle.lives]

    def _living_at(self, number: int) -> Handle | None:
        """Returns the living engine of this number, or None if it is lost."""
        handle = self.handles.get(number)
        return handle if handle is not None and handle.lives else None

    # -- what the core wants -----------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest], where: Sequence[int] = ()) -> None:
        """Give each request to the engine whose number `where` has for it; if `where` is empty, to
        engine 0. If that engine is lost, the core is told and assigns its samples again."""
        parts: dict[int, list[GenerationRequest]] = {}
        for request, number in zip(requests, where or (0,) * len(requests), strict=True):
            parts.setdefault(number, []).append(request)
        for number, part in parts.items():
            handle = self._living_at(number)
            for request in part:
                self._held[request.sample] = AssignedSample(request, handle)
            self.let_go([request.sample for request in part], handle)
            if handle is not None:
                self._give(handle, part)

    def place(self, samples: Sequence[SampleId], where: Sequence[int]) -> None:
        """Start these samples from their original requests in the engines numbered `where`. A
        sample that another engine is working on is stopped there first."""
        gone, targets = [], []
        self._stop(samples)
        for sample, number in zip(samples, where, strict=True):
            held = self._held[sample]
            if held.at is None:
                gone.append(held.request)
                targets.append(number)
            else:
                held.moves_to, held.anew = number, True
        self.submit(gone, targets)

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop generating these samples. A sample that no engine has any more is dropped without an
        output."""
        for sample in samples:
            held = self._held.get(sample)
            if held is not None:
                if held.at is None:
                    del self._held[sample]
                elif held.anew:
                    held.is_unwanted = True
                else:
                    held.moves_to = None
        self._stop(samples)

    def move(self, samples: Sequence[SampleId], number: int) -> None:
        """Stop these samples, so that they go on in engine `number` once their engine has stopped
        them. A sample whose engine is lost starts there from its original request."""
        gone = []
        for sample in samples:
            held = self._held.get(sample)
            if held is not None:
                held.moves_to, held.anew = number, False
                if held.at is None:
                    gone.append(held)
        self._stop(samples)
        for held in gone:
            handle = self._living_at(number)
            held.at, held.moves_to = handle, None
            if handle is not None:
                self._tell(moved(held.request.sample, handle, 0))
                self._give(handle, [held.request])

    def let_go(self, samples: Sequence[SampleId], to: Handle | None = None) -> None:
        """Tell engines to discard their caches of these samples, except for engine `to`, where the
        samples go on (None: they do not go on)."""
        for handle, part in self._keepers.leave(samples, to).items():
            with contextlib.suppress(EngineError), self._losing(handle):
                handle.let_go(part)

    def _stop(self, samples: Sequence[SampleId]) -> None:
        """Ask the engines that have these samples to stop generating them. Of a sample that has
        just ended, an engine ignores the request."""
        parts: dict[Handle, list[SampleId]] = {}
        for sample in samples:
            held = self._held.get(sample)
            if held is not None and held.at is not None:
                parts.setdefault(held.at, []).append(sample)
        for handle, part in parts.items():
            with self._losing(handle):
                handle.abort(part)

    def forget(self) -> None:
        """Forget all samples, when no engine is generating. Any that are left were aborted in
        engines that were lost before they could answer."""
        self._held.clear()

    # -- for what the core does not route ----------------------------------------------------------

    def submit_anywhere(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit requests that do not come from the core, such as an evaluation's. Prompts are
        dealt out to the engines in turn, all samples of a prompt to one; but a sample goes to the
        engine that keeps its cache. If no engine lives, the requests wait for `place_anywhere`."""
        living = [handle.number for handle in self.living] or [NOWHERE]
        turns: dict[tuple[int, ...], int] = {}
        for request in requests:
            turns.setdefault(request.prompt_tokens, len(turns))
        where = [living[turns[one.prompt_tokens] % len(living)] for one in requests]
        kept = [self._keepers.of(one.sample) for one in requests]
        pairs = zip(where, kept, strict=True)
        self.submit(requests, [number if at is None else at for number, at in pairs])

    def place_anywhere(self) -> None:
        """Submit again all requests without an engine, if there is a living one."""
        if self.living:
            nowhere = [held.request for held in self._held.values() if held.at is None]
            self.submit_anywhere(nowhere)

    # -- what engines say --------------------------------------------------------------------------

    def has(self, handle: Handle, sample: SampleId) -> bool:
        """Whether this engine is working on the sample now."""
        held = self._held.get(sample)
        return held is not None and held.at is handle

    def heard(
        self, handle: Handle, output: EngineOutput
    ) -> tuple[EngineEvent | None, Response | None]:
        """Returns the core's event for an engine's output, and the response. The event is None if
        the output changes nothing for the core; the response is None if there are no tokens to
        keep. A sample that was stopped to be moved is submitted to its next engine here."""
        event, response = stamped(output.event, handle), output.response
        held = self._held.get(event.sample)
        if not handle.lives:
            counts = held is not None and not isinstance(event, SampleFailed)
            return (event if counts else None), None
        if self.make is not None:
            wrong = self._why_wrong(handle, held, event, response)
            if wrong is not None:
                self.lose(handle, wrong)
                return None, None
        if held is None:  # of the one engine; the core says what is wrong with that
            return event, response
        if held.anew:
            return self._start_anew(held), None
        if held.moves_to is not None and isinstance(event, SampleAborted):
            return self._go_on(held, event, response), None
        del self._held[event.sample]
        if isinstance(event, SampleGenerated) and event.finish_reason == "stop":
            self._keepers.keeps(handle, held.request)
        return with_earlier(event, held), response

    def _why_wrong(
        self,
        handle: Handle,
        held: AssignedSample | None,
        event: EngineEvent,
        response: Response | None,
    ) -> str | None:
        """Returns why only a broken engine can have reported this output, in words. None if it is
        plausible."""
        if held is None or held.at is not handle:
            return f"it spoke of {event.sample}, which it does not have"
        if isinstance(event, SampleGenerated):
            if self.weights.hand_over is not None and event.version != self.weights.version:
                return (
                    f"it made {event.sample} with version {event.version} of the weights instead "
                    f"of {self.weights.version}"
                )
            if response is None or not event.num_tokens:
                return f"its response for {event.sample} has no tokens"
        if response is not None and not isinstance(event, SampleMoved | SampleFailed):
            sizes = {len(response.tokens), len(response.log_probs), event.num_tokens}
            if response.sample != event.sample or len(sizes) > 1:
                return f"its response for {event.sample} is another's, or not whole"
        return None

    def _go_on(
        self, held: AssignedSample, event: SampleAborted, response: Response | None
    ) -> SampleMoved | None:
        """Submit a stopped sample to the engine to which it was to move. Returns the event of the
        move; None if that engine is lost by now, so that the core will assign the sample again."""
        assert held.moves_to is not None
        request = taken_along(held, event, response)
        held.at, held.moves_to = self._living_at(held.moves_to), None
        if held.at is None:
            return None
        to = held.at
        self._give(to, [request])
        if not to.lives:
            return None
        kept = request.carried
        return moved(event.sample, to, 0 if kept is None or kept.verify else len(kept.tokens))

    def _start_anew(self, held: AssignedSample) -> EngineEnd | None:
        """Start a sample again in its next engine, as the former one has stopped it. Returns None;
        for a sample that was aborted meanwhile, the event of its end."""
        assert held.moves_to is not None
        sample, to = held.request.sample, self._living_at(held.moves_to)
        if held.is_unwanted:
            del self._held[sample]
            if to is None:  # the core has answered itself
                return None
            carried = held.request.carried
            num_tokens = 0 if carried is None else len(carried.tokens)
            event = SampleAborted(time_s=0.0, sample=sample, num_tokens=num_tokens)
            return stamped(event, to)
        self._held[sample] = AssignedSample(held.request, to)
        if to is not None:
            self._give(to, [held.request])
        return None

    def num_at(self, numbers: Collection[int]) -> int:
        """Returns how many samples the engines of these numbers have, even if they are to move."""
        where = (held.at for held in self._held.values())
        return sum(handle is not None and handle.number in numbers for handle in where)

    def blame(self, handle: Handle) -> bool:
        """Note that this engine computed a NaN in its logits. Returns True if the weights must be
        the cause: another engine computed a NaN with them, too, or engines cannot be replaced."""
        self._not_numbers.add(handle)
        return self.make is None or len(self._not_numbers) > 1

    # -- who lives ---------------------------------------------------------------------------------

    def lose(self, handle: Handle, reason: str) -> None:
        """Mark the engine as lost, close it in the background, and tell the core, which assigns the
        engine's samples to others. Does nothing if the engine is lost already."""
        if not handle.lives or self.is_closed:
            return
        handle.lives = False
        for held in self._held.values():
            if held.at is handle:
                held.at = held.moves_to = None
            elif held.moves_to == handle.number:  # until the core says where else
                held.moves_to, held.anew = NOWHERE, True
        self.ending.close(handle.engine)
        self._tell(
            EngineLost(
                time_s=0.0, engine=handle.number, incarnation=handle.incarnation, reason=reason
            )
        )

    def lay_out(self, tensor_parallel: int) -> list[Engine]:
        """Change the number of devices per engine. Returns the engines that lived or were loading,
        which the caller has to close; their further reports are ignored."""
        gone = [*(handle.engine for handle in self.living), *self._coming.values()]
        for handle in self.living:
            handle.lives = False
        self._coming.clear()
        self.forget()
        self.layout = EngineLayout(self.layout.number + 1, tensor_parallel)
        return gone

    def awaits(self, number: int, engine: Engine, layout: EngineLayout) -> None:
        """Note that this engine is loading, to become engine `number`. Raises `EngineError` if
        devices were redistributed among engines after `layout` was made."""
        if layout is not self.layout:
            raise EngineError("the devices were shared out anew")
        self._coming[number] = engine

    def join(self, handle: Handle) -> None:
        """Add a new engine, which has the current weights. Raises `EngineError` if it has died, or
        if devices were redistributed among engines meanwhile."""
        if self._coming.get(handle.number) is not handle.engine:
            raise EngineError("the devices were shared out anew")
        assert self._living_at(handle.number) is None, f"engine {handle.number} is there"
        self._listen(handle)
        del self._coming[handle.number]
        handle.version = self.weights.version
        self.handles[handle.number] = handle
        self._tell(
            EngineReady(
                time_s=0.0,
                engine=handle.number,
                incarnation=handle.incarnation,
                version=self.weights.version,
            )
        )

    def failed_to_join(
        self, number: int, incarnation: int, layout: EngineLayout, error: BaseException
    ) -> None:
        """Tell the core that the new engine `number` failed, and why. Does nothing if the run is
        over, or if devices were redistributed among engines after `layout` was made."""
        reason = f"it could not take its place: {error}"
        if not self.is_closed and layout is self.layout:
            self._tell(
                EngineLost(time_s=0.0, engine=number, incarnation=incarnation, reason=reason)
            )

    def expect(self, weights: Weights) -> list[Handle]:
        """Make these the current weights; with a new version, forget all samples. Returns the
        living engines, to which the caller has to bring the weights."""
        if weights.version != self.weights.version:
            self._not_numbers.clear()
            self._keepers.forget()
            self.forget()
        self.weights = weights
        return self.living

    def check_progress(self, now_s: float, limit_s: float) -> None:
        """Treat engines as lost that have samples and made no progress for `limit_s` seconds while
        others did. Does nothing if engines cannot be replaced."""
        living = self.living if self.make is not None else []
        for handle in living:
            with self._losing(handle):
                status = handle.engine.status()
                is_idle = not (status.num_running or status.num_waiting)
                if is_idle or status.decode_steps != handle.num_steps:
                    handle.num_steps, handle.progress_s = status.decode_steps, now_s
        newest_s = max((handle.progress_s for handle in living), default=now_s)
        for handle in living:
            if newest_s - handle.progress_s > limit_s:
                self.lose(handle, f"no progress for {limit_s:g} s while others made some")

    def status(self) -> EngineStatus:
        """Returns the sums over the statuses of all living engines. Dead ones are left out; if
        engines cannot be replaced, an `EngineError` is raised for a dead one."""
        found = []
        for handle in self.living:
            with contextlib.suppress(*((EngineError,) if self.make is not None else ())):
                found.append(handle.engine.status())
        return EngineStatus(
            num_running=sum(one.num_running for one in found),
            num_waiting=sum(one.num_waiting for one in found),
            version=self.weights.version,
            generated_tokens=sum(one.generated_tokens for one in found),
            decode_steps=sum(one.decode_steps for one in found),
            drafted_tokens=sum(one.drafted_tokens for one in found),
            accepted_tokens=sum(one.accepted_tokens for one in found),
        )

    async def close(self) -> None:
        """Close all engines, those still loading included. Further calls do nothing."""
        if not self.is_closed:
            self.is_closed = True
            living = [handle.engine for handle in self.living]
            await asyncio.gather(*(one.close() for one in [*living, *self._coming.values()]))

    def _give(self, handle: Handle, requests: Sequence[GenerationRequest]) -> None:
        with self._losing(handle):
            handle.submit(requests)

    @contextlib.contextmanager
    def _losing(self, handle: Handle) -> Iterator[None]:
        """A context in which an `EngineError` marks the engine as lost. The error is raised if no
        engine can replace the lost one."""
        try:
            yield
        except EngineError as error:
            if self.make is None:
                raise
            self.lose(handle, str(error))
