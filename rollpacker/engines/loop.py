"""The worker thread that all engines of this process share, and the outputs that all of them make.

One turn accepts what was submitted and aborted, or advances the live samples by one step; then it
reports, and waits for the listener before the next turn. So an abort or a request given inside that
call takes effect at the same decode step in every run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollpacker.core.events import SampleAborted, SampleFailed
from rollpacker.core.ids import SampleId
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import (
    EngineError,
    EngineOutput,
    GenerationRequest,
    Listener,
    Response,
)
from rollpacker.engines.inbox import Inbox
from rollpacker.weights.buffer import StaleWeightsError, WeightReader, WeightSource
from rollpacker.weights.delivery import Delivery, Member, UndeliveredError
from rollpacker.weights.host_store import HostStore
from rollpacker.weights.probe import weight_probe

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that `close` waits for the current decode step to end."""

Numbered = tuple[int, EngineOutput]
"""An engine's output, and its request's number, by which the outputs of one step are ordered."""


class LoopEngine(ABC):
    """The part of an engine (`Engine`, engines/engine.py) that handles its thread and its module's
    weights. Subclasses do the decoding."""

    _has_a_copy = False
    """Whether the engine decodes with a copy of its module's tensors. If so, an update must renew
    the copy even where the module was trained in place."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._reader = WeightReader()
        self._member = Member()
        self._host = HostStore()
        self._inbox = Inbox()
        self._thread: threading.Thread | None = None
        self._version = 0

    # -- the protocol ------------------------------------------------------------------------------

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """Begin to work, and report outputs and errors to these functions. Called again while no
        samples run, it replaces the functions."""
        self._inbox.tell(listener, on_error)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="rollpacker-engine", daemon=True
            )
            self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; see `Engine.submit`."""
        self._inbox.submit(requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop samples; see `Engine.abort`."""
        self._inbox.abort(samples)

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Allow the engine to drop the keys and values kept of samples; see `Engine.let_go`."""
        self._inbox.let_go(samples)

    async def update_weights(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | Delivery | None = None
    ) -> None:
        """Generate with new weights; see `Engine.update_weights`. Copying is done in a thread, so
        that the caller's deadline can end the wait."""
        self._inbox.begin_weights(version)
        self._forget_kept()
        if weights is not None or self._has_a_copy:
            await asyncio.to_thread(self._renew, version, weights)
        self._inbox.end_weights()
        self._version = version

    async def offload(self) -> None:
        """Free the device's memory; see `Engine.offload`. A failure makes the engine useless."""
        self._inbox.leave()
        self._forget_kept()
        await asyncio.to_thread(self._let_go)

    async def reload(self) -> None:
        """Take the device's memory again; see `Engine.reload`. Failure makes the engine useless."""
        await asyncio.to_thread(self._take_back)
        self._inbox.come_back()

    def weight_probe(self) -> str:
        """Return a hash of the weights; see `Engine.weight_probe`."""
        self._inbox.check_here()
        return weight_probe(self._trained().items())

    def compare(self, text: Sequence[int], log_probs: Sequence[float]) -> None:
        """Do nothing; see `Engine.compare`."""
        return

    async def close(self) -> None:
        """End the worker thread; see `Engine.close`."""
        self._inbox.close()
        if self._thread is not None:
            # The worker may be inside the listener, which may need this event loop to go on.
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():
                logger.error("the engine's worker hangs; it is left behind")

    def _renew(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | Delivery | None
    ) -> None:
        """Copy new weights into the module, while no samples run. `weights` None: the module has
        them already. Raises `EngineError` if they are another model's, or of another version."""
        if isinstance(weights, WeightSource):
            if weights.version != version:
                raise EngineError(f"weights of version {weights.version} were given for {version}")
            try:
                with self._reader.reading(weights) as found:
                    self._overwrite(found)
            except StaleWeightsError as error:
                raise EngineError(str(error)) from error
        elif isinstance(weights, Delivery):
            try:
                self._take_in(weights)
            except UndeliveredError as error:
                raise EngineError(str(error)) from error
        elif weights is not None:
            self._overwrite(weights)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that training changes, by name: the adapters' if there are any, else all."""
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def _overwrite(self, weights: Mapping[str, Tensor]) -> None:
        own = self._trained()
        self._check_shapes({name: value.shape for name, value in weights.items()})
        for name, value in weights.items():
            own[name].copy_(value)

    @torch.no_grad()
    def _take_in(self, delivery: Delivery) -> None:
        own = self._trained()
        with self._member.receiving(delivery, self._model.device) as (shapes, arriving):
            self._check_shapes(shapes)
            for name, _, start, values in arriving:
                own[name].view(-1)[start : start + len(values)].copy_(values)

    def _check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise `EngineError` if these are not the names and shapes of the trained parameters."""
        own = self._trained()
        if strange := sorted(own.keys() ^ shapes.keys()):
            raise EngineError(f"these are the weights of another model: {strange[0]} differs")
        for name, shape in shapes.items():
            if own[name].shape != tuple(shape):
                raise EngineError(
                    f"these are the weights of another model: {name} is {list(shape)}, "
                    f"not {list(own[name].shape)}"
                )

    def _forget_kept(self) -> None:
        """Drop what depends on the present weights, such as kept keys and values. No samples
        run."""
        return

    @property
    def _is_on_device(self) -> bool:
        """Whether the model is on a device that `offload` empties, which a CPU is not."""
        return self._model.device.type == self._host.source

    def _let_go(self) -> None:
        """Free the device's memory. Called while no samples run."""
        self._host.offload([*self._model.parameters(), *self._model.buffers()])

    def _take_back(self) -> None:
        """Put back on the device what `_let_go` moved away, or raise `EngineError`."""
        self._host.reload()

    # -- what a subclass does, in the worker's thread ----------------------------------------------

    @abstractmethod
    def _turn(self) -> list[Numbered]:
        """Accept what is in the inbox, or advance the live samples by one step. Returns the outputs
        of samples that ended with it."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the worker thread. Called once, before the first turn."""

    @abstractmethod
    def _rest(self) -> None:
        """Reset what the engine needs only while samples run. Called when none runs any more, and
        when the worker dies."""

    # -- the worker --------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._begin()
            with torch.inference_mode():
                while self._inbox.wait_for_work():
                    outputs = self._turn()
                    if outputs:
                        self._deliver(outputs)
        except Exception as error:
            logger.exception("the engine's worker died")
            on_error = self._inbox.die(error)
            self._rest()
            on_error(error)

    def _deliver(self, outputs: list[Numbered]) -> None:
        outputs.sort(key=lambda numbered: numbered[0])
        idle, listener = self._inbox.end(output.event.sample for _, output in outputs)
        if idle:
            self._rest()
        listener([output for _, output in outputs])


def failure(entry: Pending, reason: str) -> Numbered:
    event = SampleFailed(time_s=0.0, sample=entry.request.sample, reason=reason)
    return entry.sequence, EngineOutput(event)


def abortion(entry: Pending, response: Response, **facts: Any) -> Numbered:
    """The output for an aborted sample, with its response if it has any tokens. `facts`: further
    fields of the `SampleAborted` event."""
    event = SampleAborted(
        time_s=0.0, sample=response.sample, num_tokens=len(response.tokens), **facts
    )
    return entry.sequence, EngineOutput(event, response if response.tokens else None)


def untouched(entry: Pending, version: int) -> Response:
    """The response of a sample that is aborted before its row was made. Its tokens are those that
    the request carried (from an earlier abort), if any. `version`: that of the engine's weights."""
    request = entry.request
    return Response(
        sample=request.sample,
        prompt_tokens=request.prompt_tokens,
        tokens=request.carried.tokens if request.carried else (),
        log_probs=request.carried.log_probs if request.carried else (),
        finish_reason="aborted",
        version=version,
    )


def why_impossible(
    entry: Pending, *, vocabulary_size: int, max_positions: int | None, can_read: bool
) -> str | None:
    """The reason why no engine of this model could ever run the request. None: an engine may run
    it. `max_positions`: the model's context in tokens; None: unlimited. `can_read`: whether the
    engine has a tokenizer."""
    prompt, limit = entry.request.prompt_tokens, entry.limit
    if not prompt:
        return "the prompt has no tokens"
    if limit < 1:
        return f"a response of at most {limit} tokens was asked for"
    if max_positions is not None and len(prompt) + limit > max_positions:
        return (
            f"{len(prompt)} prompt tokens and up to {limit} response tokens do not fit the "
            f"model's context of {max_positions}"
        )
    if max(prompt) >= vocabulary_size or min(prompt) < 0:
        return "the prompt has a token that is not in the model's vocabulary"
    if entry.request.sampling.stop and not can_read:
        return "stop strings need a tokenizer"
    return _why_not_carried(entry, vocabulary_size)


def _why_not_carried(entry: Pending, vocabulary_size: int) -> str | None:
    carried = entry.request.carried
    if carried is None or not carried.tokens:
        return None
    if len(carried.tokens) > entry.limit:
        return (
            f"{len(carried.tokens)} carried tokens are more than the {entry.limit} that the "
            "response may have"
        )
    if len(carried.log_probs) != len(carried.tokens):
        return f"{len(carried.tokens)} carried tokens have {len(carried.log_probs)} log-probs"
    if max(carried.tokens) >= vocabulary_size or min(carried.tokens) < 0:
        return "the carried response has a token that is not in the model's vocabulary"
    return None
