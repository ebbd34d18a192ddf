"""Limits of an engine's KV cache, and when the next response finishes if the cache overflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.sim.decode_time import UNLIMITED, DecodeTimes

KV_WATERMARK = 0.01
"""Share of an engine's KV cache that stays free when a request is admitted beside others, so that
it is not preempted at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a simulated engine's KV cache and decode steps; `UNLIMITED` stands for no limit."""

    capacity: int
    """Most tokens that the KV cache can hold, prompts included."""
    admission: int
    """Most tokens that the KV cache may have for one more request to be admitted beside others."""
    simple: int
    """Tokens in the KV cache up to which it neither overflows nor makes a decode step longer."""
    max_running: int
    """Most sequences that the engine decodes in one step."""
    prompt_tokens: int
    recompute_token_s: float
    """Seconds to compute the cache of one token again, for a sequence that was preempted."""

    @classmethod
    def of(
        cls,
        kv_tokens: int | None,
        max_running: int | None,
        prompt_tokens: int,
        recompute_token_s: float,
        flat_tokens: int,
    ) -> Limits:
        """Make the limits from an engine's settings; `kv_tokens` or `max_running` None: no limit.
        Up to `flat_tokens` tokens in the KV cache, a decode step takes its shortest time."""
        assert kv_tokens is None or kv_tokens > prompt_tokens
        assert max_running is None or max_running >= 1
        admission = UNLIMITED if kv_tokens is None else int(kv_tokens * (1 - KV_WATERMARK))
        return cls(
            capacity=UNLIMITED if kv_tokens is None else kv_tokens,
            admission=admission,
            simple=min(flat_tokens, admission),
            max_running=UNLIMITED if max_running is None else max_running,
            prompt_tokens=prompt_tokens,
            recompute_token_s=recompute_token_s,
        )

    def check(self, longest: int) -> None:
        """Raises `ValueError` if the KV cache cannot hold even one response of `longest` tokens."""
        tokens = longest + self.prompt_tokens
        if tokens > self.capacity:
            raise ValueError(
                f"a sequence of {tokens} tokens does not fit the KV cache of one engine, "
                f"{self.capacity} tokens: raise rollout.tensor_parallel or lower "
                "rollout.max_response_tokens"
            )

    def stay_simple(self, lengths: Sequence[int], most_done: int) -> bool:
        """Whether responses of these `lengths` (in tokens), alone in the engine, never have more
        than `simple` tokens in the KV cache. They start together, each with at most `most_done`
        tokens already generated, so that short responses have left when long ones have grown."""
        fixed, num = self.prompt_tokens + most_done, len(lengths)
        ends = enumerate(sorted(lengths))
        return max([(num - place) * (fixed + tokens) for place, tokens in ends]) <= self.simple


Entry = tuple[int, int, int]
"""A running sequence: (minus the number of the decode step that finishes it, its key in the engine,
its length in tokens). The last entry of a sorted list is the one that finishes first."""


def finish_after_preemptions(
    times: DecodeTimes,
    limits: Limits,
    running: dict[int, Entry],
    entries: Sequence[Entry],
    clock: int,
    time_s: float,
    cached_tokens: int,
) -> float:
    """Returns the time in seconds at which the engine's next response finishes, where the youngest
    sequence is preempted whenever a step would overflow the KV cache. No argument is changed.

    At `time_s` the engine has made `clock` decode steps and has `cached_tokens` in the KV cache.
    `running` is in the order of admission. `entries` are the same sequences sorted, and perhaps
    some that have left.
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
