"""The engines of a run: which of them live, which has which sample, and what an output means.

    Generation --submit, place, abort, move--> engine 0 | engine 1 | ...     under the bus's lock
    Generation <-------- outputs, errors ----- each from a thread of its own

Engines have numbered slots. The object that fills a slot is one *incarnation* of that engine, a
`Handle`. An engine that is lost is closed; what it still reports of samples that run elsewhere goes
to the core, to be counted, without the tokens. When the number of devices per engine changes, all
engines are closed and new ones fill the slots. A run with a single engine that cannot be replaced
ends with whatever error ends that engine.
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
"""Function that makes a new engine from its number, its incarnation and its number of devices. The
engine does not have the run's weights yet, and may still be loading."""

EngineEvent = SampleGenerated | SampleAborted | SampleFailed | SampleMoved

FleetEvent = EngineLost | EngineReady | SampleMoved


class Keepers:
    """Knows which engine keeps what it computed of a sample (its cache) while the sample's
    environment has the turn. Used under the bus's lock alone."""

    def __init__(self) -> None:
        self._handles: dict[SampleId, Handle] = {}

    def keeps(self, handle: Handle, request: GenerationRequest) -> None:
        """Note that this engine keeps its cache of the request's sample, if it was asked to."""
        if request.keep:
            self._handles[request.sample] = handle

    def forget(self) -> None:
        """Forget which engines keep caches, as new weights make these useless."""
        self._handles.clear()

    def of(self, sample: SampleId) -> int | None:
        """Number of the engine that keeps the cache of this sample. None if no living engine
        does."""
        handle = self._handles.get(sample)
        return handle.number if handle is not None and handle.lives else None

    def leave(
        self, samples: Iterable[SampleId], to: Handle | None = None
    ) -> dict[Handle, list[SampleId]]:
        """Note that no engine but `to`, where the samples go on, keeps a cache of these samples.
        Returns the living engines that have to discard caches, with the samples concerned."""
        told: dict[Handle, list[SampleId]] = {}
        for sample in samples:
            handle = self._handles.pop(sample, None)
            if handle is not None and handle is not to and handle.lives:
                told.setdefault(handle, []).append(sample)
        return told


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that engines sample from, or will sample from next."""

    version: int
    hand_over: HandOver | None
    """How engines get the weights. None if the trainer has not written them yet."""


class Engines:
    """The engines of a run by slot, and the samples that were given to them. All methods but
    `close` are called under the bus's lock."""

    def __init__(
        self, engines: Sequence[Engine], make: MakeEngine | None = None, tensor_parallel: int = 1
    ) -> None:
        """`make`: makes an engine in place of one that is lost; None if lost engines are not
        replaced, and the run ends. `tensor_parallel`: number of devices of each engine."""
        self.make = make
        self.handles = {number: Handle(number, 0, engine) for number, engine in enumerate(engines)}
        """The latest engine of each slot, alive or lost, by the slot's number."""
        self.layout = EngineLayout(0, tensor_parallel)
        self.ending = Ending()
        self._coming: dict[int, Engine] = {}
        """The engine that is loading for each slot, or failed to, by the slot's number."""
        self.weights = Weights(0, None)
        self.is_closed = False
        self._held: dict[SampleId, AssignedSample] = {}
        self._keepers = Keepers()
        self._not_numbers: set[Handle] = set()
        """Engines that reported a NaN in their logits with the current weights."""
        self._listen: Callable[[Handle], None] = lambda handle: None
        self._tell: Callable[[FleetEvent], None] = lambda event: None

    def start(
        self,
        on_outputs: Callable[[Handle, Sequence[EngineOutput]], None],
        on_error: Callable[[Handle, BaseException], None],
        tell: Callable[[FleetEvent], None],
    ) -> None:
        """Listen to all engines from now on, also later ones. `on_outputs` and `on_error` get the
        engine, too; `tell` gets the events of engines that come and go, and of moves."""

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
        """The living engine of this slot. None if the slot's engine is lost."""
        handle = self.handles.get(number)
        return handle if handle is not None and handle.lives else None

    # -- what the core wants -----------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest], where: Sequence[int] = ()) -> None:
        """Give each request to the engine whose number `where` has at the same place (empty: engine
        0). If an engine is lost meanwhile, the core hears of that and places its samples again."""
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
        """Start these samples again, from their launch's requests, in the engines numbered `where`.
        A sample that a living engine still has starts once it has been stopped there."""
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
        """Stop these samples. No output follows for samples that no engine has; the core expects
        none."""
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
        """Stop these samples, to go on in engine `number` (see `heard`), whatever was chosen
        before. A sample whose engine was lost at that moment starts there from its launch."""
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
        """Tell engines to discard their caches of these samples, whose environments have the turn.
        The engine `to`, where the samples go on, is not told, nor is a lost one."""
        for handle, part in self._keepers.leave(samples, to).items():
            with contextlib.suppress(EngineError), self._losing(handle):
                handle.let_go(part)

    def _stop(self, samples: Sequence[SampleId]) -> None:
        """Abort the samples that an engine has; engines ignore samples that have just ended."""
        parts: dict[Handle, list[SampleId]] = {}
        for sample in samples:
            held = self._held.get(sample)
            if held is not None and held.at is not None:
                parts.setdefault(held.at, []).append(sample)
        for handle, part in parts.items():
            with self._losing(handle):
                handle.abort(part)

    def forget(self) -> None:
        """Forget all samples, when nothing is under way: those still listed were aborted, and their
        engine was lost before it could answer."""
        self._held.clear()

    # -- for what the core does not route ----------------------------------------------------------

    def submit_anywhere(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit requests that the core does not route. Samples of one prompt go to one engine,
        prompts take the engines in turn, and a sample of which an engine keeps something goes to
        that engine. With no engine alive they wait for `place_anywhere`."""
        living = [handle.number for handle in self.living] or [NOWHERE]
        turns: dict[tuple[int, ...], int] = {}
        for request in requests:
            turns.setdefault(request.prompt_tokens, len(turns))
        where = [living[turns[one.prompt_tokens] % len(living)] for one in requests]
        kept = [self._keepers.of(one.sample) for one in requests]
        pairs = zip(where, kept, strict=True)
        self.submit(requests, [number if at is None else at for number, at in pairs])

    def place_anywhere(self) -> None:
        """Submit again all requests that no engine has, if an engine lives."""
        if self.living:
            nowhere = [held.request for held in self._held.values() if held.at is None]
            self.submit_anywhere(nowhere)

    # -- what engines say --------------------------------------------------------------------------

    def has(self, handle: Handle, sample: SampleId) -> bool:
        """Whether that engine has the sample now."""
        held = self._held.get(sample)
        return held is not None and held.at is handle

    def heard(
        self, handle: Handle, output: EngineOutput
    ) -> tuple[EngineEvent | None, Response | None]:
        """Turn an engine's output into the event for the core and the response that comes with it.

        The event is None if the core need not hear of the output, and the response if no tokens are
        to be kept. A sample that was stopped in order to move is given to its next engine here.
        """
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
        """Why an engine that works could not have reported this output. None if it could."""
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
        """Give a stopped sample to the engine that it was to move to. Returns the event of the
        move; None if that engine is lost by now, so that the core will place the sample again."""
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
        """Start a sample again in its next engine, since the engine that had it has let go of it;
        an unwanted sample is ended instead. Returns the event of that end, or None."""
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
        """Number of samples that these engines have, also of samples that are still to leave."""
        where = (held.at for held in self._held.values())
        return sum(handle is not None and handle.number in numbers for handle in where)

    def blame(self, handle: Handle) -> bool:
        """Note that this engine's logits held a NaN. Returns whether the policy is to blame: it is
        if another engine reported that too, or if there is no other engine."""
        self._not_numbers.add(handle)
        return self.make is None or len(self._not_numbers) > 1

    # -- who lives ---------------------------------------------------------------------------------

    def lose(self, handle: Handle, reason: str) -> None:
        """Mark the engine as lost, close it in the background and tell the core, once."""
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
        """Give each engine this many devices from now on. Returns the engines that lived or were
        loading, which the caller has to close; whatever they still report is ignored."""
        gone = [*(handle.engine for handle in self.living), *self._coming.values()]
        for handle in self.living:
            handle.lives = False
        self._coming.clear()
        self.forget()
        self.layout = EngineLayout(self.layout.number + 1, tensor_parallel)
        return gone

    def awaits(self, number: int, engine: Engine, layout: EngineLayout) -> None:
        """Note that this engine is loading, to fill slot `number`. Raises `EngineError` if devices
        were shared out anew since `layout` was made."""
        if layout is not self.layout:
            raise EngineError("the devices were shared out anew")
        self._coming[number] = engine

    def join(self, handle: Handle) -> None:
        """Put an engine that has the current weights into its slot. Raises `EngineError` if it has
        died, or if devices were shared out anew meanwhile."""
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
        """Tell the core why no engine took this slot, if the run goes on with this layout."""
        reason = f"it could not take its place: {error}"
        if not self.is_closed and layout is self.layout:
            self._tell(
                EngineLost(time_s=0.0, engine=number, incarnation=incarnation, reason=reason)
            )

    def expect(self, weights: Weights) -> list[Handle]:
        """Make these the current weights, and forget all samples if the version is new. Returns the
        living engines, which the caller has to bring to these weights."""
        if weights.version != self.weights.version:
            self._not_numbers.clear()
            self._keepers.forget()
            self.forget()
        self.weights = weights
        return self.living

    def check_progress(self, now_s: float, limit_s: float) -> None:
        """Lose the engines that have samples and have made no progress for `limit_s` seconds while
        other engines made some. Does nothing where engines are not replaced."""
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
        """The statuses of all living engines, added up. Raises `EngineError` if the only engine is
        dead."""
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
        """Close all engines, also those that are still loading. Further calls do nothing."""
        if not self.is_closed:
            self.is_closed = True
            living = [handle.engine for handle in self.living]
            await asyncio.gather(*(one.close() for one in [*living, *self._coming.values()]))

    def _give(self, handle: Handle, requests: Sequence[GenerationRequest]) -> None:
        with self._losing(handle):
            handle.submit(requests)

    @contextlib.contextmanager
    def _losing(self, handle: Handle) -> Iterator[None]:
        """A context in which an `EngineError` loses the engine, or is raised if none can replace
        it."""
        try:
            yield
        except EngineError as error:
            if self.make is None:
                raise
            self.lose(handle, str(error))
