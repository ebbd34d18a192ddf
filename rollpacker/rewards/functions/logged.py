"""Further arguments that a reward function may have, with the names that TRL gives them.

    log_metric(name, number)     logs a number, averaged over the samples that a step trains on
    log_extra(column, values)    logs one value per completion, as a column of the samples
    trainer_state                has `global_step` and `max_steps`

A function that has a parameter of such a name gets it, and one called in TRL's way gets all of them
in its `**kwargs`. Runs in the worker, but for `read`, which runs in the controller's process.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.rewards.functions.returned import WrongReturn, shortened

NAMES = ("log_metric", "log_extra", "trainer_state")

MAX_TEXT = 4000
"""Most characters of a text that is logged as an extra."""
MAX_LOGGED = 100
"""Most different metrics, and most different extras, that one call may log."""


@dataclass(frozen=True)
class TrainerState:
    """The fields of TRL's `TrainerState` that are known here."""

    global_step: int
    """Number of steps that the run has finished."""
    max_steps: int
    """Number of steps of the whole run."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name}")


class Logged:
    """Collects what one call of a reward function logs."""

    def __init__(self, count: int, progress: tuple[int, int] = (0, 1)) -> None:
        """`count`: number of completions in the call. `progress`: steps finished, and all steps."""
        self._count = count
        self._state = TrainerState(*progress)
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[Any]] = {}

    def arguments(self, wanted: Collection[str]) -> dict[str, Any]:
        """Return `log_metric`, `log_extra` and `trainer_state`, if their names are `wanted`."""
        given = {
            "log_metric": self.log_metric,
            "log_extra": self.log_extra,
            "trainer_state": self._state,
        }
        return {name: given[name] for name in wanted}

    def log_metric(self, name: str, value: float) -> None:
        number = float(value)
        if math.isfinite(number) and self._has_room(self._metrics, name):
            self._metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value per completion. Raises `WrongReturn` if the number of values differs."""
        listed = list(values)
        if len(listed) != self._count:
            raise WrongReturn(
                f"gave log_extra({column!r}) {len(listed)} values for {self._count} completions"
            )
        if self._has_room(self._extras, column):
            self._extras[str(column)] = [_plain(value) for value in listed]

    def _has_room(self, logged: Mapping[str, Any], name: str) -> bool:
        return name in logged or len(logged) < MAX_LOGGED

    def reply(self) -> dict[str, Any]:
        """Return all that the call logged, as values for JSON: "metrics" (means by name) and
        "extras" (lists by column). Either is left out if nothing of its kind was logged."""
        means = {name: math.fsum(of) / len(of) for name, of in self._metrics.items()}
        found = {"metrics": means, "extras": self._extras}
        return {name: value for name, value in found.items() if value}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def read(
    reply: Mapping[str, Any], count: int
) -> list[tuple[Mapping[str, float], Mapping[str, Any]]]:
    """Return the metrics and the extras of each of a call's `count` samples from a worker's reply.
    What is not of the form of `Logged.reply` is ignored: the function may have forged it."""
    metrics, extras = reply.get("metrics", {}), reply.get("extras", {})
    if not (isinstance(metrics, dict) and isinstance(extras, dict)):
        return [({}, {})] * count
    means = {n: float(v) for n, v in metrics.items() if isinstance(v, int | float)}
    whole = {n: of for n, of in extras.items() if isinstance(of, list) and len(of) == count}
    return [
        (means, {shortened(name): of[place] for name, of in whole.items()})
        for place in range(count)
    ]
