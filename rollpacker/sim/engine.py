"""One simulated inference engine, with an event per finished response, not per decode step.

Every running sequence gains one token per step, so the engine is a *token clock*, which counts
steps: a response finishes when the clock shows its admission plus its length. While no sequence
joins or leaves, the seconds of s steps have a closed form (flat while a step is bound by kernel
launches, quadratic once reading the growing cache takes longer), which can be inverted.

A request that arrives during a step takes effect when that step ends. The clock always stands at
the end of a step, which may lie up to one step after the time of the last call. Sequences that the
cache has no room for are preempted when the next step begins, youngest first. They wait in front of
the queue until there is room to compute their cache again.
"""

from __future__ import annotations

import math
import operator
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from rollpacker.sim.cache_limits import Entry, Limits, finish_after_preemptions
from rollpacker.sim.decode_time import STEP_TOLERANCE, DecodeTimes
from rollpacker.sim.latency import StepCost


class Request(NamedTuple):
    """A response to generate. `submit` also accepts a plain tuple (key, length, done_tokens)."""

    key: int
    """Number by which the caller names the request. No other request in the engine has the same."""
    length: int
    """Tokens of the whole response, which the caller of a simulated engine knows beforehand."""
    done_tokens: int = 0
    """Number of these tokens that were generated elsewhere already; fewer than `length`."""


@dataclass(slots=True)
class _Totals:
    """Counts of one simulated engine since it was made."""

    tokens: int = 0
    """Tokens of sequences that have left this engine, minus the tokens that these and the running
    sequences had already when they came."""
    num_preemptions: int = 0
    idle_s: float = 0.0


class TokenClockEngine:
    """One simulated engine. `next_finish` tells when a response finishes. Before a call with a
    later time, the caller must have taken out each response that finishes earlier with `pop`."""

    __slots__ = (
        *("_births", "_clock", "_direct", "_entries", "_joined", "_limits", "_peak"),
        *("_preemptions", "_reached", "_running", "_simple", "_start", "_times", "_totals"),
        *("_waiting", "next_finish"),
    )

    def __init__(
        self,
        cost: StepCost,
        kv_tokens: int | None,
        max_running: int | None,
        prompt_tokens: int,
        recompute_token_s: float = 0.0,
    ) -> None:
        """`kv_tokens` is the capacity of the KV cache in tokens, prompts included, and
        `max_running` the most sequences in one step; None means no limit for either.
        `recompute_token_s` are the seconds to prefill one token of a preempted sequence again."""
        self.next_finish = math.inf
        """Time at which the next response finishes, in seconds; inf when the engine is idle."""
        self._times = DecodeTimes(cost)
        self._limits = Limits.of(
            kv_tokens, max_running, prompt_tokens, recompute_token_s, self._times.flat_tokens
        )
        self._totals = _Totals()

        self._clock = 0
        """Number of decode steps since the engine was made."""
        self._reached = 0.0
        """Time at which the latest decode step ended, in seconds."""
        self._start = 0.0
        """Time in seconds at which the next decode step begins: after prefills of new requests."""
        self._running: dict[int, Entry] = {}
        """Running sequences by key, in the order of admission."""
        self._entries: list[Entry] = []
        """Sorted entries (see `Entry`) of running sequences, and of some that have left."""
        self._births = 0
        """Sum, over running sequences, of the step number at which the sequence had no token yet.
        The tokens in the cache follow from this sum and the clock."""
        self._simple = True
        """Whether the KV cache can neither overflow nor make a step longer, even when every
        sequence in the engine has its full length."""
        self._peak = 0
        """Tokens in the KV cache if every sequence in the engine had its full length at once."""
        self._direct = True
        """Whether no sequence is preempted before the next response finishes, at `next_finish`."""
        self._waiting: deque[tuple[int, int, int, float]] = deque()
        """Queue of requests that wait for admission or were preempted: (key, length, tokens
        generated so far, prefill seconds)."""
        self._joined: dict[int, int] = {}
        """Mapping from the key of a request, admitted during a decode step, to the number of that
        step. The step generates no token of this request."""
        self._preemptions: dict[int, int] = {}

    # -- what goes in --------------------------------------------------------------------

    def submit(
        self, now: float, requests: Sequence[Request | tuple[int, int, int]], prefill_s: float
    ) -> None:
        """Queue `requests`, which are admitted in this order. Their prefills take `prefill_s`
        seconds in all, in equal shares, and delay the engine when the requests are admitted.

        Raises `ValueError` for a request that the KV cache cannot hold even alone.
        """
        if not requests:
            return
        keys, lengths, done = zip(*requests, strict=True)
        self._measure(lengths, max(done))
        self._advance(now)
        if not self._running and not self._waiting:
            self._entries.clear()
            self._preemptions.clear()
            self._joined.clear()
        assert min(done) >= 0 and all(map(operator.lt, done, lengths))
        if not self._waiting and self._has_room_for(len(keys)):
            self._join(now, keys, lengths, done)
            self._start += prefill_s
        else:
            share_s = prefill_s / len(keys)
            self._waiting.extend(zip(keys, lengths, done, repeat(share_s), strict=False))
            self._admit(now)
        self._schedule()

    def abort(self, now: float, keys: Iterable[int]) -> list[int]:
        """Take requests out of the engine at the time `now`. Returns the number of tokens of each,
        without the token of a decode step that has not ended by then."""
        self._advance(now)
        reached = self._remove(now, keys)
        if self._waiting:
            self._admit(now)
        self._schedule()
        return reached

    def drain(self, now: float) -> list[Request]:
        """Take every request out of the engine and return them with the tokens that they have,
        ready for another engine: running requests in order of admission, then waiting requests."""
        keys = [*self._running, *(request[0] for request in self._waiting)]
        lengths = [entry[2] for entry in self._running.values()]
        lengths += [request[1] for request in self._waiting]
        done = self.abort(now, keys)
        return [Request(*fields) for fields in zip(keys, lengths, done, strict=True)]

    # -- what comes out ------------------------------------------------------------------

    def pop(self) -> tuple[int, int, int]:
        """Take out the response that finishes at `next_finish`. Returns its key, its length in
        tokens, and how often it was preempted here. If several finish in the same step, the one
        with the largest key comes first."""
        if not self._direct:
            self._walk_to_finish()
        entries, running, limits = self._entries, self._running, self._limits
        negative_finish, key, length = entries.pop()
        clock = -negative_finish
        if self._clock != clock:
            self._clock = clock
            self._start = self._reached = self.next_finish
        del running[key]
        self._births += length - clock
        self._totals.tokens += length
        self._peak -= limits.prompt_tokens + length
        if self._waiting or not self._simple:
            if not self._simple:
                self._simple = self._peak <= limits.simple
            if self._waiting:
                self._admit(self._reached)
            self._schedule()
            return key, length, self._preemptions.get(key, 0) if self._preemptions else 0
        # The hot path: what `_schedule` does in the simple case, without the call.
        while entries:
            entry = entries[-1]
            if running.get(entry[1]) is entry:
                steps = -entry[0] - clock
                if steps:
                    self.next_finish = self._start + steps * self._times.flat_s[len(running)]
                break
            entries.pop()
        else:
            self.next_finish = math.inf
        return key, length, self._preemptions.get(key, 0) if self._preemptions else 0

    def preemptions(self, key: int) -> int:
        """How often the request with this key was preempted in this engine, since the last call of
        `submit` at which the engine was empty."""
        return self._preemptions.get(key, 0)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions of any request since the engine was made."""
        return self._totals.num_preemptions

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, since they were not admitted yet or were preempted."""
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the KV cache as of the last call, prompts included."""
        running = len(self._running)
        return running * (self._limits.prompt_tokens + self._clock) - self._births

    @property
    def tokens_generated(self) -> int:
        """Number of tokens generated up to the last call, including those of aborted requests."""
        return self._totals.tokens + len(self._running) * self._clock - self._births

    @property
    def last_activity(self) -> float:
        """Time in seconds up to which the engine is simulated so far: the end of the last decode
        step or prefill. Later steps of running sequences are simulated by later calls."""
        return self._start

    @property
    def busy_s(self) -> float:
        """Seconds from time 0 to `last_activity` in which the engine decoded or prefilled."""
        return self._start - self._totals.idle_s

    # -- admission -----------------------------------------------------------------------

    def _measure(self, lengths: Sequence[int], most_done: int) -> None:
        """Add the full lengths of new requests to `_peak`, and set `_simple`. Each has at most
        `most_done` tokens already. Raises `ValueError` if the KV cache cannot hold one of them."""
        self._limits.check(max(lengths))
        self._peak += sum(lengths) + len(lengths) * self._limits.prompt_tokens
        self._simple = self._peak <= self._limits.simple
        if not self._simple and most_done <= 1 and not (self._running or self._waiting):
            self._simple = self._limits.stay_simple(lengths, most_done)

    def _leave(self, length: int) -> None:
        """Subtract a request of `length` tokens that left the engine from `_peak`."""
        self._peak -= self._limits.prompt_tokens + length
        self._simple = self._simple or self._peak <= self._limits.simple

    def _has_room_for(self, num: int) -> bool:
        """Whether `num` new requests, whose full lengths `_peak` has already, can all run at once
        and none will be preempted later."""
        fits = self._simple or self._peak <= self._limits.admission
        return fits and len(self._running) + num <= self._limits.max_running

    def _admit(self, now: float) -> None:
        """Let waiting requests run from time `now` on, in their order, while the cache has room."""
        waiting = self._waiting
        admitted: list[tuple[int, int, int]] = []
        num = len(self._running)
        cached = self.cached_tokens
        while waiting and num < self._limits.max_running:
            key, length, done, prefill_s = waiting[0]
            tokens = self._limits.prompt_tokens + done
            if num and cached + tokens + num + 1 > self._limits.admission:
                break
            waiting.popleft()
            admitted.append((key, length, done))
            num += 1
            cached += tokens
            self._start += prefill_s
        if admitted:
            self._join(now, *zip(*admitted, strict=True))

    def _join(
        self, now: float, keys: Sequence[int], lengths: Sequence[int], done: Sequence[int]
    ) -> None:
        """Let requests run, from the decode step that follows step `_clock`. `lengths` and `done`
        are tokens of each: of the whole response, and those generated already."""
        clock = self._clock
        columns = zip(keys, lengths, done, strict=True)
        new = [(tokens - length - clock, key, length) for key, length, tokens in columns]
        running = self._running
        num = len(running) + len(new)
        running.update(zip(keys, new, strict=True))
        assert len(running) == num, "a request is twice in one engine"
        if len(new) == 1:
            insort(self._entries, new[0])
        else:
            self._entries += new
            self._entries.sort()
        done_tokens = sum(done)
        self._births += len(new) * clock - done_tokens
        self._totals.tokens -= done_tokens
        if num >= len(self._times.flat_s):
            self._times.extend(num)
        if now < self._reached:
            self._joined.update(dict.fromkeys(keys, clock))

    def _remove(self, now: float, keys: Iterable[int]) -> list[int]:
        """Take out the requests with these keys, running or waiting. Returns how many tokens of
        each were generated by the time `now`."""
        running = self._running
        in_flight = now < self._reached
        clock = self._clock
        reached: list[int] = []
        for key in keys:
            entry = running.pop(key, None)
            if entry is None:
                reached.append(self._remove_waiting(key))
                continue
            length = entry[2]
            negative_birth = entry[0] + length
            self._births += negative_birth
            tokens = clock + negative_birth
            if in_flight and self._joined.get(key) != clock:
                tokens -= 1
            self._totals.tokens += tokens
            self._leave(length)
            reached.append(tokens)
        return reached

    def _remove_waiting(self, key: int) -> int:
        for place, request in enumerate(self._waiting):
            if request[0] == key:
                del self._waiting[place]
                self._leave(request[1])
                return request[2]
        raise AssertionError(f"request {key} is not in the engine")

    def _preempt(self) -> None:
        key, (negative_finish, _, length) = self._running.popitem()
        self._births += negative_finish + length
        done = self._clock + negative_finish + length
        self._totals.tokens += done
        prefill_s = (self._limits.prompt_tokens + done) * self._limits.recompute_token_s
        self._waiting.appendleft((key, length, done, prefill_s))
        self._preemptions[key] = self._preemptions.get(key, 0) + 1
        self._totals.num_preemptions += 1

    # -- the clock -----------------------------------------------------------------------

    def _schedule(self) -> None:
        """Compute `next_finish` and `_direct` for the sequences that run now."""
        entries = self._entries
        running = self._running
        while entries:
            entry = entries[-1]
            if running.get(entry[1]) is entry:
                break
            entries.pop()
        else:
            self.next_finish = math.inf
            return
        steps = -entry[0] - self._clock
        if not steps:
            self.next_finish = self._reached
            self._direct = True
        elif self._simple:
            self.next_finish = self._start + steps * self._times.flat_s[len(running)]
            self._direct = True
        else:
            num, limits = len(running), self._limits
            cached = num * (limits.prompt_tokens + self._clock) - self._births
            self._direct = cached + num * steps <= limits.capacity
            if self._direct:
                self.next_finish = self._start + self._times.seconds(steps, num, cached)
            else:
                self.next_finish = finish_after_preemptions(
                    self._times, limits, running, entries, self._clock, self._start, cached
                )

    def _walk_to_finish(self) -> None:
        """Move the clock to the next finish and preempt sequences on the way where the cache
        overflows. The response that finishes is then the last of `_entries`."""
        while True:
            steps = self._steps_to_finish()
            if not steps:
                return
            room = self._room()
            if room:
                self._step(min(steps, room))
            else:
                self._preempt()

    def _advance(self, now: float) -> None:
        """Move the clock to the end of the first step that ends at or after the time `now`."""
        if now <= self._start:
            return
        if not self._running:
            self._totals.idle_s += now - self._start
            self._start = self._reached = now
            return
        assert now <= self.next_finish, "a finish was passed over"
        if self._simple:
            step_s = self._times.flat_s[len(self._running)]
            steps = math.ceil((now - self._start) / step_s - STEP_TOLERANCE)
            steps_to_finish = -self._entries[-1][0] - self._clock
            if steps >= steps_to_finish:
                self._clock += steps_to_finish
                self._start = self._reached = self.next_finish
            else:
                self._clock += steps
                self._start = self._reached = self._start + steps * step_s
            return
        while now > self._start:
            steps = self._times.steps_by(now - self._start, len(self._running), self.cached_tokens)
            steps = min(steps, self._steps_to_finish())
            if not steps:
                return
            if steps <= self._room():
                self._step(steps)
                return
            if self._room():
                self._step(self._room())
            else:
                self._preempt()

    def _steps_to_finish(self) -> int:
        """Number of decode steps until the next running sequence finishes. Entries of sequences
        that have left are removed from the end of `_entries`."""
        entries = self._entries
        while self._running.get(entries[-1][1]) is not entries[-1]:
            entries.pop()
        return -entries[-1][0] - self._clock

    def _room(self) -> int:
        """Number of decode steps that the running sequences can take before the cache overflows."""
        return (self._limits.capacity - self.cached_tokens) // len(self._running)

    def _step(self, steps: int) -> None:
        self._start += self._times.seconds(steps, len(self._running), self.cached_tokens)
        self._reached = self._start
        self._clock += steps
