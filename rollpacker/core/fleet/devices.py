"""Which device is used by an engine, by a training replica, or by nobody.

The `Launch` of a round, `Resize` and `SyncWeights` give all devices to the engines. `Release` takes
some from engines, for nobody yet. `StartGradients` and `TrainOn` give those that they name, or all,
to training replicas. Where the trainer has devices of its own, they are not listed here: the listed
ones are always the engines'.

It is asserted that no device has two uses: no engine is given samples without its devices, and no
training replica begins on an engine's device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from rollpacker.core.commands import (
    NOWHERE,
    Command,
    Continue,
    Launch,
    Move,
    Place,
    Release,
    Resize,
    StartGradients,
    SyncWeights,
    TrainOn,
)

MOVERS = frozenset(
    {Launch, Place, Continue, Move, Release, Resize, StartGradients, TrainOn, SyncWeights}
)
"""Kinds of command for which `Devices` changes the devices' owners, or asserts who the owner is."""


class Owner(NamedTuple):
    kind: Literal["engine", "replica"]
    number: int


class Devices:
    """The owner of each device, kept by `obey`, which is called with every command in order."""

    def __init__(
        self, num_engines: int, degree: int, *, train_group: int = 1, trainer_apart: bool = False
    ) -> None:
        """`degree`: devices per engine. `train_group`: devices per copy of the trained model."""
        self.owners: list[Owner | None] = [None] * (num_engines * degree)
        self._degree = degree
        self._train_group = train_group
        self._apart = trainer_apart
        self._round = 0
        self._to_engines()

    def obey(self, command: Command) -> None:
        """Updates the owners for a command. Raises `AssertionError` if a device has two uses."""
        if type(command) not in MOVERS:
            return
        match command:
            case Launch(round=number, tensor_parallel=degree, engines=engines):
                if degree != self._degree:  # the same engines, of more or fewer devices each
                    self.owners = [None] * (len(self.owners) // self._degree * degree)
                if number != self._round:
                    self._round, self._degree = number, degree
                    self._to_engines()
                self._have(engines, command)
            case Place(engines=engines) | Continue(engines=engines):
                self._have(engines, command)
            case Move(engine=engine):
                self._have((engine,), command)
            case Release(devices=devices):
                self._have({device // self._degree for device in devices}, command)
                for device in devices:
                    self.owners[device] = None
            case StartGradients(devices=devices) if devices:
                for device in devices:
                    owner = self.owners[device]
                    assert owner is None or owner.kind == "replica", f"{command}: {owner} has it"
                self._to_replicas(devices)
            case StartGradients() | TrainOn():
                self._to_replicas(range(len(self.owners)))
            case Resize(tensor_parallel=degree):
                self._degree = degree
                self._to_engines()
            case SyncWeights():
                self._to_engines()

    def _have(self, engines: Iterable[int], command: Command) -> None:
        """Asserts that each of these engines has all of its devices."""
        for number in set(engines):
            if number == NOWHERE:
                continue
            first = number * self._degree
            owners = self.owners[first : first + self._degree]
            # A plain tuple, since every turn comes by here.
            is_whole = owners.count(("engine", number)) == self._degree  # type: ignore[arg-type]
            assert is_whole, f"{type(command).__name__}: {owners}"

    def _to_engines(self) -> None:
        for device in range(len(self.owners)):
            self.owners[device] = Owner("engine", device // self._degree)

    def _to_replicas(self, devices: Iterable[int]) -> None:
        if self._apart:
            return
        for device in devices:
            self.owners[device] = Owner("replica", device // self._train_group)
