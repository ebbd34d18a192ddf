"""Deliveries of weights straight from the trainer's processes to the living engines'."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollpacker.engines.engine import Engine
from rollpacker.run.ports.held import Handle
from rollpacker.run.ports.waiting import failures
from rollpacker.trainer.trainer import HandOver, Trainer
from rollpacker.weights.delivery import Carrier, Delivery, UndeliveredError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub hides it

logger = logging.getLogger(__name__)


class Deliveries:
    """Makes deliveries to groups of the trainer's and the engines' processes. A group is made anew,
    with the next number, if it has others, or if a delivery failed."""

    def __init__(self, carrier: Carrier, address: str, serve: Callable[[str], TCPStore]) -> None:
        """`address`: where processes on all hosts reach this one. `serve`: serves a key-value store
        of torch's at an address of this machine."""
        self._carrier, self._address, self._serve = carrier, address, serve
        self._members: object = None
        """The processes of the newest group. None: there is none, or it has failed."""
        self._epoch = 0
        self._store: TCPStore | None = None
        """The key-value store by which they find each other, served by this process."""
        self.asked: object = None
        """The weights that were asked for last by an engine which missed their delivery. None: no
        engine has asked."""

    async def bring(
        self,
        trainer: Trainer,
        handles: Sequence[Handle],
        version: int,
        tensor_parallel: int,
        within_s: float | None,
    ) -> HandOver:
        """Send this version to all these engines, of `tensor_parallel` processes each. If that
        fails, or takes an engine more than `within_s` seconds, have the trainer write the weights,
        for all to read. Raises the trainer's errors."""
        told = self._told(handles, version, trainer.holders, tensor_parallel)
        arguments = {one: (one.engine, delivery) for one, delivery in told.items()}
        sent, missed = await asyncio.gather(
            trainer.hand_over(next(iter(told.values()))),
            failures(_take, arguments, "take new weights", within_s),
            return_exceptions=True,
        )
        if isinstance(sent, HandOver) and not missed:
            return sent
        self._members = None
        if isinstance(sent, BaseException) and not isinstance(sent, UndeliveredError):
            raise sent
        assert not isinstance(missed, BaseException)
        why = sent if isinstance(sent, UndeliveredError) else next(iter(missed.values()))
        logger.warning("%s; engines read version %d from host memory", why, version)
        return await trainer.hand_over()

    def _told(
        self, handles: Sequence[Handle], version: int, holders: tuple[int, ...], size: int
    ) -> dict[Handle, Delivery]:
        """Return what each engine is to be told of the next delivery."""
        members = holders, size, [(one.number, one.incarnation) for one in handles]
        if members != self._members:
            self._members, self._epoch = members, self._epoch + 1
        if self._store is None:
            self._store = self._serve(self._address)
        delivery = Delivery(
            carrier=self._carrier,
            version=version,
            address=(self._address, self._store.port),
            epoch=self._epoch,
            senders=len(holders),
            size=len(holders) + size * len(handles),
        )
        numbers = range(len(holders), delivery.size, size)
        return {
            one: replace(delivery, number=number)
            for one, number in zip(handles, numbers, strict=True)
        }


def _take(engine: Engine, delivery: Delivery) -> None:
    asyncio.run(engine.update_weights(delivery.version, delivery))
