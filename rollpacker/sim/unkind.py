"""Faults of simulated runs: failures, late finishes, lost verdicts, slow checks, hung environments.

    bus --command--> Unkind --> the port that obeys it
    bus <--event---- Unkind.answer <-- what that port says

The ports (simulated engines, rewards, environments) do what they are told. Between them and the bus
(event loop), `Unkind` turns some of their answers into faults. Which ones depends only on its seed
and on the sample or engine: the same run meets the same faults again, also after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from rollpacker.bus import Port, Routes
from rollpacker.core.commands import Act, Command, Launch, Score
from rollpacker.core.events import (
    Acted,
    Event,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.portable import log


@dataclass(frozen=True, slots=True, kw_only=True)
class UnkindConfig:
    """Rates and delays of the faults in a simulated run. All shares lie in [0, 1]; 0 means never.
    Raises `ValueError` for a value out of range."""

    failure_rate: float = 0.0
    """Share of the responses that fail at the moment when they would be complete."""
    late_finish_rate: float = 0.0
    """Share of aborted responses that turn out to have finished just before the abort."""
    no_verdict_rate: float = 0.0
    """Share of the samples that cannot be judged, however often their check is tried."""
    infrastructure_rate: float = 0.0
    """Share of the checks that fail for no fault of the sample; a second try may succeed."""
    verdict_delay_s: float = 0.0
    """Most seconds by which a check takes longer; every delay from 0 to that is equally likely."""
    act_failure_rate: float = 0.0
    """Share of all turns in which the environment raises an exception."""
    act_hang_rate: float = 0.0
    """Share of all turns that the environment never answers, until a deadline ends the turn."""
    act_infrastructure_rate: float = 0.0
    """Share of the turns in which the environment's process is lost; a second try may succeed."""
    engine_life_s: float = 0.0
    """Mean seconds until an engine is lost, exponentially distributed; 0: no engine is lost."""
    engine_start_s: float = 60.0
    """Seconds until a lost engine's replacement is ready."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            most = math.inf if each.name.endswith("_s") else 1.0
            if not (math.isfinite(value) and 0 <= value <= most):
                limits = "not be negative" if most > 1 else "lie in [0, 1]"
                raise ValueError(f"{each.name} must {limits}, not {value}")


class Unkind:
    """Stands between the scheduling core and the simulated engines, rewards and environments, and
    turns some of their events into faults."""

    def __init__(self, config: UnkindConfig, *ports: Port, seed: int = 0) -> None:
        self.config = config
        self._ports = ports
        self._seed = seed
        self._version = 0
        """Version of the weights that the latest launch generates with."""
        self._retries: dict[SampleId, int] = {}
        """How often the check of each sample was tried again, while its verdict is awaited."""
        self._replays: dict[SampleId, int] = {}
        """How often each sample's environment was tried again in a turn whose answer is awaited."""

    def routes(self) -> Routes:
        """Returns the function that obeys each command to the simulated engines, rewards and
        environments. Commands to launch, check and act are first seen by this object."""
        routes = {kind: obey for port in self._ports for kind, obey in port.routes().items()}
        overheard: Mapping[type[Command], Callable[[Any], None]] = {
            Launch: self._on_launch,
            Score: self._on_score,
            Act: self._on_act,
        }
        for kind, overhear in overheard.items():
            if kind in routes:
                routes[kind] = _both(overhear, routes[kind])
        return routes

    def answer(self, event: Event) -> Event:
        """Returns what the scheduling core gets for this event: a fault, or the event itself."""
        config = self.config
        match event:
            case SampleGenerated(sample=sample):
                if self._share("failure", sample) < config.failure_rate:
                    return SampleFailed(
                        time_s=event.time_s,
                        sample=sample,
                        reason="made to fail",
                        engine=event.engine,
                        incarnation=event.incarnation,
                    )
            case SampleAborted(sample=sample):
                if self._share("late", sample) < config.late_finish_rate:
                    return SampleGenerated(
                        time_s=event.time_s,
                        sample=sample,
                        num_tokens=event.num_tokens + 1,
                        finish_reason="stop",
                        version=self._version,
                        preemptions=event.preemptions,
                        num_kept=event.num_kept,
                        engine=event.engine,
                        incarnation=event.incarnation,
                    )
            case Acted(sample=sample, cause=""):
                return self._answer(event, self._replays.pop(sample, 0))
            case SampleScored(sample=sample, cause=""):
                return self._verdict(event, self._retries.pop(sample, 0))
        return event

    def delay_s(self, sample: SampleId) -> float:
        """Seconds to add to the check of this sample; 0 without `UnkindConfig.verdict_delay_s`."""
        most = self.config.verdict_delay_s
        return most * self._share("delay", sample) if most else 0.0

    def hangs(self, sample: SampleId, turn: int) -> bool:
        """Whether the environment of this sample never answers this turn."""
        rate = self.config.act_hang_rate
        return bool(rate) and self._share(f"hang {turn}", sample) < rate

    def life_s(self, engine: int, incarnation: int) -> float:
        """Seconds from the start of an engine to its loss; inf: it is never lost. `incarnation`
        counts how often the engine was started again."""
        mean = self.config.engine_life_s
        share = self._share("life", f"{engine}.{incarnation}")
        return -mean * log(1.0 - share) if mean else math.inf

    def _answer(self, event: Acted, retry: int) -> Acted:
        sample, turn = event.sample, event.turn
        if self._share(f"process {turn} {retry}", sample) < self.config.act_infrastructure_rate:
            cause, reason = "infrastructure", "made to be lost"
        elif self._share(f"raise {turn}", sample) < self.config.act_failure_rate:
            cause, reason = "environment", "made to raise"
        else:
            return event
        return Acted(
            time_s=event.time_s,
            sample=sample,
            turn=turn,
            seconds=event.seconds,
            reason=reason,
            cause=cause,
        )

    def _verdict(self, event: SampleScored, retry: int) -> SampleScored:
        sample = event.sample
        if self._share(f"machinery {retry}", sample) < self.config.infrastructure_rate:
            cause, reason = "infrastructure", "made to fail"
        elif self._share("verdict", sample) < self.config.no_verdict_rate:
            cause, reason = "sample", "made to be lost"
        else:
            return event
        return SampleScored(
            time_s=event.time_s,
            sample=sample,
            value=None,
            reason=reason,
            seconds=event.seconds,
            cause=cause,
        )

    def _on_launch(self, command: Launch) -> None:
        self._version = command.version

    def _on_score(self, command: Score) -> None:
        if command.retry:
            self._retries[command.sample] = command.retry

    def _on_act(self, command: Act) -> None:
        if command.retry:
            self._replays[command.sample] = command.retry

    def _share(self, what: str, of: object) -> float:
        """A pseudorandom number in [0, 1) that depends only on the seed, the kind of fault `what`,
        and `of`, the sample or engine that it may befall."""
        key = f"{self._seed} {what} {of}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64


def _both(overhear: Callable[[Any], None], obey: Callable[[Any], None]) -> Callable[[Any], None]:
    def route(command: Any) -> None:
        overhear(command)
        obey(command)

    return route
