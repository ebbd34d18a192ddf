"""The trainer of the tests' world, and what goes wrong with it.

What it was asked for, and was lost before it could answer, it answers after it is back, once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rollpacker.core.commands import RestoreTrainer
from rollpacker.core.events import (
    Committed,
    Event,
    Trained,
    TrainerLost,
    TrainerReady,
    WeightsSynced,
)
from rollpacker.core.job.phases import Phase

if TYPE_CHECKING:
    from tests.core.world import World


@dataclass(frozen=True, kw_only=True)
class TrainerFaults:
    """How often what goes wrong with the trainer, by chance."""

    loss_rate: float = 0.0
    """Before so large a share of all events it is lost ..."""
    during: tuple[Phase, ...] = tuple(Phase)
    """... in these phases of the job."""
    again_rate: float = 0.3
    """Of those that are being brought back."""
    most: int = 20
    most_between_commits: int = 2
    """With more the run gives up."""
    ready_s: float = 30.0
    """It takes up to so long until it is back."""


class Trainer:
    """Obeys to the letter; `meets` says whether what was expected still comes."""

    def __init__(self, world: World, faults: TrainerFaults) -> None:
        self.world, self.faults = world, faults
        self.rng = random.Random(f"trainer {world.seed}")
        self.incarnation = 0
        self.is_up = True
        self.version = world.version
        """Of its weights."""
        self.owed: tuple[float, Event] | None = None
        """What it is at: how long that takes, and the answer."""
        self.due: Event | None = None
        """What it will say next, unless it is lost before."""
        self.num_losses = self.num_recent = 0
        self.pending: RestoreTrainer | None = None
        """It is to be brought back as soon as its pool is there."""

    def answer(self, seconds: float, event: Event) -> None:
        """It was asked for this."""
        assert self.owed is None, "it does one thing at a time"
        self.owed = seconds, event
        self._begin()

    def _begin(self) -> None:
        if self.owed is not None and self.is_up:
            seconds, event = self.owed
            # A commit is one of parked processes.
            assert isinstance(event, Committed) or self.world.has("train"), event
            self.due = replace(event)
            self.world.push(seconds, self.due)

    def meets(self, event: Event) -> bool:
        match event:
            case Trained() | WeightsSynced() | Committed() if self.owed is not None:
                if event is not self.due:
                    return False  # it was lost before it could say so
                self.owed = self.due = None
                if isinstance(event, Trained):
                    self.version = event.version
            case TrainerLost():
                self.is_up = False
            case TrainerReady():
                if event is not self.due:
                    return False
                self.is_up, self.due = True, None
                self._begin()
                if self.world.driver is not None:
                    self.world.driver.recovered()
        return True

    def restore(self, command: RestoreTrainer) -> None:
        assert not self.is_up, "it was not lost"
        assert command.incarnation == self.incarnation + 1
        assert command.version == self.version, "it had other weights"
        self.incarnation = command.incarnation
        self.pending = command
        driver = self.world.driver
        if driver is None or (driver.held == "train" and not driver.finishing):
            self.may_restore()
        else:
            driver.need("train", "recovery", self._with_pool)

    def _with_pool(self) -> None:
        """Its pool is there; it may be back already, by the step's turn."""
        if self.pending is None and self.is_up:
            assert self.world.driver is not None
            self.world.driver.done()
        self.may_restore()

    def may_restore(self) -> None:
        """On its pool."""
        assert self.world.has("train")
        command, self.pending = self.pending, None
        if command is None:
            return
        if self._may_lose() and self.rng.random() < self.faults.again_rate:
            self._lose(self.rng.random() * self.faults.ready_s)
            return
        self.due = TrainerReady(
            time_s=0.0, incarnation=command.incarnation, version=command.version
        )
        self.world.push(self.rng.random() * self.faults.ready_s, self.due)

    def misfortune(self) -> None:
        """Before each event."""
        is_time = self.world.job.phase in self.faults.during
        if is_time and self.is_up and self._may_lose():
            if self.rng.random() >= self.faults.loss_rate:
                return
            self._lose(0.0)

    def _may_lose(self) -> bool:
        faults = self.faults
        is_rare = self.num_recent < faults.most_between_commits
        return bool(faults.loss_rate) and is_rare and self.num_losses < faults.most

    def _lose(self, seconds: float) -> None:
        self.num_losses += 1
        self.num_recent += 1
        self.due = None
        lost = TrainerLost(time_s=0.0, incarnation=self.incarnation, reason="it was killed")
        self.world.push(seconds, lost, first=True)

    def committed(self) -> None:
        self.num_recent = 0
