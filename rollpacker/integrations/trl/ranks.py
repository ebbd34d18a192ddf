"""The processes of one training: rank 0 decides, and each rank generates with an engine of its own.

    rank 0   an engine for the scheduler, which hands each prompt to one of the ranks
    others   follow(): generate what rank 0 hands out, until the step is known

At each turn all ranks say how many bytes they have; then those of the others go to rank 0, and its
own to all. They are encoded as for engines in processes of their own (`engines/messages.py`), so
that nothing is run that another process sends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Listener,
    Response,
)
from rollpacker.engines.messages import PackedOutput, PackedResponse, Work, codec, packed
from rollpacker.integrations.trl.rollouts import at_once

TURN_S = 0.01
"""Longest wait for outputs of the own engine before a turn, in seconds."""


class RankLost(EngineError):
    """Another process of the training is gone, or does not answer."""


class Ranks:
    """What a rank says to the others, and hears. On rank 0 it is the scheduler's engine (`Engine`):
    its outputs are heard in `turn`."""

    def __init__(self, engine: Engine | None, prompts: Sequence[PromptRow], limit_s: float) -> None:
        """Join the training's other processes, which all do so at the same time. `engine` generates
        on this rank; None: rank 0 has its responses from elsewhere. `prompts` has the prompt of
        each row. A rank that is silent for `limit_s` seconds is lost."""
        self._engine, self._prompts = engine, prompts
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(timeout=timedelta(seconds=limit_s), backend="gloo")
        self._outputs: list[EngineOutput] = []
        self._error = ""
        self._lock, self._some = threading.Lock(), threading.Event()
        self._version = self._has = self._num_steps = 0
        self._requests: list[GenerationRequest] = []
        self._aborts: list[SampleId] = []
        self._place: dict[SampleId, int] = {}
        """The rank that generates each sample."""

    # -- the scheduler's engine, on rank 0 ---------------------------------------------------------

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        self._listener = listener
        self._begin()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        load = Counter(self._place.values())
        for _, group in groupby(requests, key=lambda one: one.sample.prompt):
            rank = min(range(self.size), key=load.__getitem__)
            samples = [one.sample for one in group]
            self._place.update(dict.fromkeys(samples, rank))
            load[rank] += len(samples)
        self._requests += requests

    def abort(self, samples: Sequence[SampleId]) -> None:
        self._aborts += (one for one in samples if one in self._place)

    async def update_weights(self, version: int) -> None:
        self._version = version  # told to each rank with its next work

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self._place),
            num_waiting=0,
            version=self._version,
            generated_tokens=0,
            decode_steps=self._num_steps,
        )

    def turn(self) -> None:
        """Hand out what was submitted and aborted, and hear of what has ended. Raises `RankLost`,
        and `EngineError` if an engine of another rank has failed."""
        self._some.wait(TURN_S)
        requests, self._requests = self._requests, []
        aborts, self._aborts = self._aborts, []
        said = {"version": self._version, "work": self._divided(requests, aborts)}
        self._hear(self._exchange(codec().encode(said) if requests or aborts else b""))
        self._do(said)

    def share(self, responses: Sequence[Response]) -> list[Response]:
        """Give each rank its part of a step's responses, in order, and return that of rank 0."""
        step = [(one.sample, PackedResponse.of(one)) for one in responses]
        self._hear(self._exchange(codec().encode({"step": step})))
        return list(responses[: len(responses) // self.size])

    def end(self, error: BaseException) -> None:
        """Have the other ranks end with this error, unless one of them is lost."""
        if not isinstance(error, RankLost):
            why = f"process 0 of the training has failed: {str(error) or type(error).__name__}"
            with suppress(RankLost):
                self._exchange(codec().encode({"error": why}))

    def _divided(
        self, requests: Sequence[GenerationRequest], aborts: Sequence[SampleId]
    ) -> list[Work]:
        place = self._place
        return [
            Work(
                tuple(one for one in requests if place[one.sample] == rank),
                tuple(one for one in aborts if place[one] == rank),
            )
            for rank in range(self.size)
        ]

    def _hear(self, heard: list[bytes]) -> None:
        """Pass on the outputs of this turn, those of rank 0's own engine first."""
        outputs = self._taken()
        for rank, data in enumerate(heard[1:], 1):
            if data:
                said = codec().decode(data)
                outputs += map(self._unpacked, said["outputs"])
                self._error = self._error or (said["error"] and f"process {rank}: {said['error']}")
        if self._error:
            raise EngineError(self._error)
        for output in outputs:
            del self._place[output.event.sample]
        if outputs:
            self._listener(outputs)

    # -- the other ranks ---------------------------------------------------------------------------

    def follow(self) -> list[Response]:
        """Generate what rank 0 hands out, up to the end of its step, and return this rank's part of
        the step's responses. Raises `EngineError` if another rank has failed, and `RankLost`."""
        self._begin()
        raised: BaseException | None = None
        said: dict[str, Any] = {}
        while True:
            try:
                self._do(said)
                self._some.wait(TURN_S)
            except BaseException as error:  # rank 0 has to know first
                raised, self._error = error, str(error) or type(error).__name__
            outputs = [packed(one) for one in self._taken()]
            up = {"outputs": outputs, "error": self._error}
            down = self._exchange(codec().encode(up) if outputs or self._error else b"")[0]
            said = codec().decode(down) if down else {}
            if "error" in said:
                raise raised or EngineError(said["error"])
            if "step" in said:
                part = len(said["step"]) // self.size
                mine = said["step"][self.rank * part : (self.rank + 1) * part]
                return [one.unpacked(sample, self._tokens(sample)) for sample, one in mine]

    # -- all ranks ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._error = ""
        if self._engine is not None:
            self._engine.start(self._ended, self._died)

    def _do(self, said: dict[str, Any]) -> None:
        """Do this rank's part of what rank 0 said."""
        if self._engine is None or "work" not in said:
            return
        work = said["work"][self.rank]
        if work.requests:
            if said["version"] != self._has:
                self._has = said["version"]
                at_once(self._engine.update_weights(self._has))
            self._engine.submit(work.requests)
        self._engine.abort(work.aborts)

    def _ended(self, outputs: Sequence[EngineOutput]) -> None:
        with self._lock:
            self._outputs += outputs
        self._some.set()

    def _died(self, error: BaseException) -> None:
        self._error = f"the engine died: {error}"
        self._some.set()

    def _taken(self) -> list[EngineOutput]:
        with self._lock:
            outputs, self._outputs = self._outputs, []
            self._some.clear()
        return outputs

    def _tokens(self, sample: SampleId) -> tuple[int, ...]:
        return tuple(self._prompts[sample.prompt.row].tokens)

    def _unpacked(self, output: PackedOutput) -> EngineOutput:
        event, response = output
        tokens = self._tokens(event.sample)
        return EngineOutput(event, response and response.unpacked(event.sample, tokens))

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Send these bytes to rank 0, or from there to all. Returns the bytes by rank, as far as
        they come here. Raises `RankLost`."""
        num_steps = 0
        with suppress(EngineError):  # a dead engine is told of otherwise
            num_steps = 0 if self._engine is None else self._engine.status().decode_steps
        head = torch.tensor([len(mine), num_steps])
        heads = [torch.empty_like(head) for _ in range(self.size)]
        try:
            dist.all_gather(heads, head, group=self._group)
            self._num_steps = int(sum(one[1] for one in heads))
            data = [torch.zeros(int(one[0]), dtype=torch.uint8) for one in heads]
            data[self.rank] = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
            for rank in range(1, self.size):
                if len(data[rank]) and self.rank == 0:
                    dist.recv(data[rank], rank, group=self._group)
                elif len(data[rank]) and self.rank == rank:
                    dist.send(data[rank], 0, group=self._group)
            if len(data[0]):
                dist.broadcast(data[0], 0, group=self._group)
        except RuntimeError as error:
            why = "another process of the training is gone or hangs; its own last lines say why"
            raise RankLost(why) from error
        return [bytes(one.numpy()) for one in data]
