"""The engines of a training's processes, one in each rank of torch.distributed, as one engine of
rank 0. They work only while all ranks are in `Ranks.turn` (rank 0) or `Ranks.follow` (the others).

At each turn all ranks say how many bytes they have; then those of the others go to rank 0, and its
own to all. They are encoded as for engines in processes of their own (`engines/messages.py`), so
that nothing is run that another process sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollpacker.core.ids import SampleId
from rollpacker.engines.collect import at_once
from rollpacker.engines.engine import Engine, EngineError, EngineOutput, GenerationRequest, Response
from rollpacker.engines.messages import PackedResponse, Work, codec, packed

TURN_S = 0.01
"""Longest wait for outputs of the own engine before a turn, in seconds."""


class RankLost(EngineError):
    """Another process of the training is gone, or does not answer."""


class Ranks:
    """What a rank says to the others, and hears. On rank 0, an engine whose listener is called in
    `turn`."""

    def __init__(
        self, engine: Engine | None, prompt: Callable[[SampleId], tuple[int, ...]], limit_s: float
    ) -> None:
        """Join the training's other processes, which all do so at the same time. `engine` generates
        on this rank; None: rank 0 has its responses from elsewhere. `prompt` returns the tokens of
        a sample's prompt. A rank that is silent for `limit_s` seconds is lost."""
        self._engine, self._prompt = engine, prompt
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(timeout=timedelta(seconds=limit_s), backend="gloo")
        self._ended: SimpleQueue[Sequence[EngineOutput] | BaseException] = SimpleQueue()
        self._version, self.decode_steps = 0, 0
        self._requests: list[GenerationRequest] = []
        self._aborts: list[SampleId] = []
        self._place: dict[SampleId, int] = {}
        """The rank that generates each sample."""

    # -- rank 0 ------------------------------------------------------------------------------------

    def start(self, listener: Any, on_error: Any) -> None:
        """Set what `turn` calls with outputs."""
        self._listener = listener
        self._begin()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand these out at the next turn, each prompt to the rank with the fewest."""
        load = Counter(self._place.values())
        for _, group in groupby(requests, key=lambda one: one.sample.prompt):
            samples = [one.sample for one in group]
            rank = min(range(self._size), key=load.__getitem__)
            load[rank] += len(samples)
            self._place |= dict.fromkeys(samples, rank)
        self._requests += requests

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop these at the next turn, as far as they have not ended."""
        self._aborts += (one for one in samples if one in self._place)

    async def update_weights(self, version: int) -> None:
        """Note the version, which each rank is told with its next requests."""
        self._version = version

    def status(self) -> Ranks:
        """Return this object, which has `decode_steps`: those of all ranks, up to the last turn."""
        return self

    def turn(self, step: Sequence[Response] = ()) -> list[Response]:
        """Hand out what was submitted and aborted, and pass on what has ended. With the responses
        of a step: give each rank its part, in order, and return that of rank 0. Raises `RankLost`,
        and `EngineError` if an engine has failed."""
        requests, aborts, place = self._requests, self._aborts, self._place
        self._requests, self._aborts = [], []
        works = [
            Work(
                tuple(one for one in requests if place[one.sample] == rank),
                tuple(one for one in aborts if place[one] == rank),
            )
            for rank in range(self._size)
        ]
        said = {
            "version": self._version,
            "works": works,
            "step": [(one.sample, PackedResponse.of(one)) for one in step],
        }
        heard = self._exchange(codec().encode(said) if requests or aborts or step else b"")
        self._do(said)
        outputs = self._taken()
        for rank, data in enumerate(heard[1:], 1):
            found = codec().decode(data) if data else []
            if isinstance(found, str):
                raise EngineError(f"process {rank} of the training has failed: {found}")
            for event, response in found:
                outputs.append(EngineOutput(event, self._unpacked(event.sample, response)))
        for output in outputs:
            del place[output.event.sample]
        if outputs:
            self._listener(outputs)
        return list(step[: len(step) // self._size])

    def end(self, error: BaseException) -> None:
        """Have the other ranks end with this error, unless one of them is lost."""
        if not isinstance(error, RankLost):
            why = f"process 0 of the training has failed: {str(error) or type(error).__name__}"
            with suppress(RankLost):
                self._exchange(codec().encode(why))

    # -- the other ranks ---------------------------------------------------------------------------

    def follow(self) -> list[Response]:
        """Generate what rank 0 hands out, up to the end of its step, and return this rank's part of
        the step's responses. Raises `EngineError` if another rank has failed, and `RankLost`."""
        self._begin()
        raised: BaseException | None = None
        said: Any = {"works": [], "step": []}
        while not said["step"]:
            up: Any = []
            try:
                self._do(said)
                up = [packed(one) for one in self._taken()]
            except BaseException as error:  # rank 0 has to know first
                raised, up = error, str(error) or type(error).__name__
            down = self._exchange(codec().encode(up) if up else b"")[0]
            said = codec().decode(down) if down else {"works": [], "step": []}
            if isinstance(said, str):
                raise raised or EngineError(said)
        part = len(said["step"]) // self._size
        mine = said["step"][self._rank * part :][:part]
        return [response for pair in mine if (response := self._unpacked(*pair))]

    # -- all ranks ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._engine is not None:
            self._engine.start(self._ended.put, self._ended.put)

    def _do(self, said: dict[str, Any]) -> None:
        """Do this rank's part of what rank 0 said."""
        if self._engine is None or not said["works"]:
            return
        work, status = said["works"][self._rank], self._engine.status()
        if work.requests and status.version != said["version"]:
            at_once(self._engine.update_weights(said["version"]))
        self._engine.submit(work.requests)
        self._engine.abort(work.aborts)

    def _taken(self) -> list[EngineOutput]:
        """Wait for outputs of the own engine, and return them. Raises the error of its death."""
        outputs: list[EngineOutput] = []
        with suppress(Empty):
            wait_s = TURN_S
            while True:
                found = self._ended.get(timeout=wait_s)
                if isinstance(found, BaseException):
                    raise EngineError(f"the engine died: {found}")
                outputs += found
                wait_s = 0
        return outputs

    def _unpacked(self, sample: SampleId, response: PackedResponse | None) -> Response | None:
        return None if response is None else response.unpacked(sample, self._prompt(sample))

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Send these bytes to rank 0, or from there to all. Returns the bytes by rank, as far as
        they come here. Raises `RankLost`."""
        steps = 0
        with suppress(EngineError):  # a dead engine is told of otherwise
            steps = self._engine.status().decode_steps if self._engine is not None else 0
        head = torch.tensor([len(mine), steps])
        heads = [torch.empty_like(head) for _ in range(self._size)]
        try:
            dist.all_gather(heads, head, group=self._group)
            self.decode_steps = int(sum(one[1] for one in heads))
            data = [torch.zeros(int(one[0]), dtype=torch.uint8) for one in heads]
            data[self._rank] = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
            for rank in range(1, self._size):
                if len(data[rank]) and self._rank == 0:
                    dist.recv(data[rank], rank, group=self._group)
                elif len(data[rank]) and self._rank == rank:
                    dist.send(data[rank], 0, group=self._group)
            if len(data[0]):
                dist.broadcast(data[0], 0, group=self._group)
        except RuntimeError as error:
            why = "another process of the training is gone or hangs; its own last lines say why"
            raise RankLost(why) from error
        return [bytes(one.numpy()) for one in data]
