"""When an engine's next response finishes, if its cache overflows before that."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.sim.cache_limits import Limits
from rollpacker.sim.decode_time import DecodeTimes

Entry = tuple[int, int, int]
"""A running sequence: (-clock at its finish, key, length). Ascending order ends with the first to
finish."""


def finish_after_preemptions(
    times: DecodeTimes,
    limits: Limits,
    running: dict[int, Entry],
    entries: Sequence[Entry],
    clock: int,
    time_s: float,
    cached_tokens: int,
) -> float:
    """The time of the next finish. The youngest sequence is preempted whenever a step would
    overflow the cache; nothing is changed here.

    `running` is in the order of admission; `entries` are the same sorted, and sequences that have
    left.
    """
    num, cached = len(running), cached_tokens
    youngest = reversed(running.values())
    gone: set[int] = set()
    for entry in reversed(entries):
        negative_finish, key, _ = entry
        if running.get(key) is not entry:
            continue
        while key not in gone:
            steps = min(-negative_finish - clock, (limits.capacity - cached) // num)
            if steps:
                time_s += times.seconds(steps, num, cached)
                clock += steps
                cached += num * steps
            if clock == -negative_finish:
                return time_s
            finish, last, length = next(youngest)
            gone.add(last)
            num -= 1
            cached -= limits.prompt_tokens + clock + finish + length
    raise AssertionError("nothing is running")
