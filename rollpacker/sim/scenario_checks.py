"""Checks of values in a scenario's parts. Each check raises `ValueError` and names the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rollpacker.config.document import nearest

MAX_SECONDS = 1e9
"""Largest number of seconds that a key of a scenario may have."""
TRAINED_PARAMETER_BYTES = 18
"""Bytes of memory per trained parameter: a bfloat16 weight, and in float32 its gradient, master
weight and Adam's two moments."""


def check_seconds(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be 0 or more seconds, not {value}")
    if value is not None and value > MAX_SECONDS:
        raise ValueError(f"{name} must be at most {MAX_SECONDS:g} seconds, not {value:g}")


def check_known(name: str, value: str, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        hint = nearest(value.rpartition("/")[2], known)  # on the hub a name has an owner before it
        raise ValueError(f'{name} is "{value}". Known: {", ".join(known)}.{hint}')


def check_quantiles(
    name: str, quantiles: Mapping[float, float], smallest: float, largest: float = math.inf
) -> None:
    if not quantiles:
        raise ValueError(f"{name} must have at least one entry, such as 0.5: {smallest or 0.1}")
    last: tuple[float, float] | None = None
    for quantile, value in sorted(quantiles.items()):
        if not 0 < quantile <= 1:
            raise ValueError(
                f"{name} has the quantile {quantile:g}; quantiles lie above 0 and not above 1"
            )
        if not math.isfinite(value) or value < smallest or value <= 0:
            least = f"at least {smallest:g}" if smallest else "more than 0"
            raise ValueError(f"{name} has {value:g} at {quantile:g}; it must be {least}")
        if value > largest:
            raise ValueError(
                f"{name} has {value:g} at {quantile:g}; it must be at most {largest:g}"
            )
        if last is not None and value < last[1]:
            raise ValueError(
                f"{name} must not fall: {value:g} at {quantile:g} is less than {last[1]:g} at "
                f"{last[0]:g}"
            )
        last = (quantile, value)


def listed(values: Iterable[int]) -> str:
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last
