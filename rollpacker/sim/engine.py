"""One engine in virtual time: an event per finished response, not per decode step.

Every running sequence gains one token per step, so the engine is a *token clock*: a response
finishes when the clock shows its admission plus its length. While nothing joins or leaves, the time
of s steps has a closed form (flat while a step is bound by kernel launches, quadratic once reading
the growing cache takes longer), and so has its inverse.

What arrives during a step takes effect when that step ends; the clock always stands at such a
boundary, which may lie a step ahead of the last call. Sequences that the cache has no room for are
preempted when the next step begins, youngest first, and wait in front of the queue until there is
room to compute their cache again.
"""

from __future__ import annotations

import math
import operator
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from rollpacker.sim.latency import StepCost

STEP_TOLERANCE = 1e-6
"""Share of a step by which a time may miss a boundary through rounding."""

KV_WATERMARK = 0.01
"""Share of the cache that stays free when a request is admitted beside others, so that it is not
preempted at once."""

UNLIMITED = 1 << 60
"""Steps, tokens or sequences: more than any engine sees."""


class Request(NamedTuple):
    """A response to generate. A plain tuple of the same content will do where time matters."""

    key: int
    """Chosen by the caller, not in the engine yet."""
    length: int
    """Tokens of the whole response; the engine's user knows them beforehand."""
    done_tokens: int = 0
    """Generated elsewhere already; fewer than `length`."""


_Entry = tuple[int, int, int]
"""A running sequence: (-clock at its finish, key, length). Ascending order ends with the first to
finish."""


class TokenClockEngine:
    """One engine. The caller pops every finish at its time before it calls with a later one."""

    __slots__ = (
        "_admission_limit",
        "_births",
        "_capacity",
        "_clock",
        "_cost",
        "_direct",
        "_entries",
        "_flat_s",
        "_flat_tokens",
        "_idle_s",
        "_joined",
        "_joined_clock",
        "_max_running",
        "_peak",
        "_preemptions",
        "_prompt_tokens",
        "_reached",
        "_recompute_token_s",
        "_running",
        "_simple",
        "_simple_tokens",
        "_start",
        "_tokens",
        "_waiting",
        "next_finish",
        "num_preemptions",
    )

    def __init__(
        self,
        cost: StepCost,
        kv_tokens: int | None,
        max_running: int | None,
        prompt_tokens: int,
        recompute_token_s: float = 0.0,
    ) -> None:
        """`kv_tokens`: capacity of the cache, prompts included; `max_running`: sequences in one
        step; None is no limit. `recompute_token_s`: prefill of one token of a preempted sequence.
        """
        assert kv_tokens is None or kv_tokens > prompt_tokens
        assert max_running is None or max_running >= 1
        self.next_finish = math.inf
        """When the next response finishes, in seconds; inf when idle."""
        self.num_preemptions = 0
        """Since the engine was made."""
        self._cost = cost
        self._capacity = UNLIMITED if kv_tokens is None else kv_tokens
        self._admission_limit = UNLIMITED
        """Tokens in the cache up to which a request is admitted beside others."""
        if kv_tokens is not None:
            self._admission_limit = int(kv_tokens * (1 - KV_WATERMARK))
        self._max_running = UNLIMITED if max_running is None else max_running
        self._prompt_tokens = prompt_tokens
        self._recompute_token_s = recompute_token_s
        self._flat_tokens = _flat_tokens(cost)
        self._simple_tokens = min(self._flat_tokens, self._admission_limit)
        self._flat_s = _flat_table(cost)
        """Seconds of a step at its floor, by the number of running sequences."""

        self._clock = 0
        """Steps since the engine was made."""
        self._reached = 0.0
        """When the clock got there ..."""
        self._start = 0.0
        """... and when the next step begins: later by the prefills in between."""
        self._running: dict[int, _Entry] = {}
        """By key, in the order of admission."""
        self._entries: list[_Entry] = []
        """The same sorted, and entries of sequences that have left."""
        self._births = 0
        """Sum over the running sequences of the clock at which each had, or would have had, no
        token yet. All that grows with the clock follows from it, so a step changes nothing else."""
        self._simple = True
        """Whatever happens to what is in the engine, the cache will neither overflow nor make a
        step longer than its floor time."""
        self._peak = 0
        """Tokens of everything in the engine at its end; kept up only while not simple."""
        self._direct = True
        """No preemption comes before `next_finish`."""
        self._waiting: deque[tuple[int, int, int, float]] = deque()
        """(key, length, done tokens, prefill seconds)"""
        self._joined: set[int] = set()
        """Admitted at `_joined_clock`, before that boundary's time had come."""
        self._joined_clock = -1
        self._preemptions: dict[int, int] = {}
        self._tokens = 0
        """Generated by sequences that have left the running ones, less what these brought along."""
        self._idle_s = 0.0

    # -- what goes in --------------------------------------------------------------------

    def submit(
        self, now: float, requests: Sequence[Request | tuple[int, int, int]], prefill_s: float
    ) -> None:
        """Queue `requests`, first come first served. Their prefills, `prefill_s` together and the
        same for each, hold the engine up when they are admitted.

        Raises `ValueError` for a request that the cache cannot hold even alone.
        """
        if not requests:
            return
        keys, lengths, done = zip(*requests, strict=True)
        self._measure(lengths, max(done))
        self._advance(now)
        if not self._running and not self._waiting:
            self._entries.clear()
            self._preemptions.clear()
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
        """Take requests out; the tokens that each had reached, step in flight left out."""
        self._advance(now)
        reached = self._remove(now, keys)
        if self._waiting:
            self._admit(now)
        self._schedule()
        return reached

    def drain(self, now: float) -> list[Request]:
        """Take everything out, for `submit` elsewhere: running ones in order of admission, then
        waiting ones."""
        keys = [*self._running, *(request[0] for request in self._waiting)]
        lengths = [entry[2] for entry in self._running.values()]
        lengths += [request[1] for request in self._waiting]
        done = self.abort(now, keys)
        return [Request(*fields) for fields in zip(keys, lengths, done, strict=True)]

    # -- what comes out ------------------------------------------------------------------

    def pop(self) -> tuple[int, int, int]:
        """Take out the response that finishes at `next_finish`: its key, its length in tokens and
        how often it was preempted here. Of several that finish with the same step, the one with the
        largest key comes first."""
        if not self._direct:
            self._walk_to_finish()
        entries = self._entries
        running = self._running
        negative_finish, key, length = entries.pop()
        clock = -negative_finish
        if self._clock != clock:
            self._clock = clock
            self._start = self._reached = self.next_finish
        del running[key]
        self._births += length - clock
        self._tokens += length
        if self._waiting or not self._simple:
            if not self._simple:
                self._leave(length)
            if self._waiting:
                self._admit(self._reached)
            self._schedule()
            return key, length, self._preemptions.get(key, 0)
        # The hot path: what `_schedule` does in the simple case, without the call.
        while entries:
            entry = entries[-1]
            if running.get(entry[1]) is entry:
                steps = -entry[0] - clock
                if steps:
                    self.next_finish = self._start + steps * self._flat_s[len(running)]
                break
            entries.pop()
        else:
            self.next_finish = math.inf
        return key, length, self._preemptions.get(key, 0) if self._preemptions else 0

    def preemptions(self, key: int) -> int:
        """How often a request was preempted here; known until the engine is refilled."""
        return self._preemptions.get(key, 0)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        """In the KV cache, as of the last call."""
        running = len(self._running)
        return running * (self._prompt_tokens + self._clock) - self._births

    @property
    def tokens_generated(self) -> int:
        """Since the engine was made, up to the last call; those of aborted requests included."""
        return self._tokens + len(self._running) * self._clock - self._births

    @property
    def last_activity(self) -> float:
        """When the last step or prefill that was looked at ends. The steps up to there were looked
        at in the last call; an engine with running sequences has gone on since."""
        return self._start

    @property
    def busy_s(self) -> float:
        """Seconds with something to do, from time 0 to `last_activity`."""
        return self._start - self._idle_s

    # -- admission -----------------------------------------------------------------------

    def _measure(self, lengths: Sequence[int], most_done: int) -> None:
        """See what new requests, of which none has more tokens than `most_done`, can do to the
        cache at worst."""
        longest = max(lengths) + self._prompt_tokens
        if longest > self._capacity:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit the KV cache of one engine, "
                f"{self._capacity} tokens: raise rollout.tensor_parallel or lower "
                "rollout.max_response_tokens"
            )
        peak = sum(lengths) + sum([entry[2] for entry in self._running.values()])
        peak += sum([request[1] for request in self._waiting])
        num = len(lengths) + len(self._running) + len(self._waiting)
        self._peak = peak + num * self._prompt_tokens
        self._simple = self._peak <= self._simple_tokens
        if not self._simple and most_done <= 1 and num == len(lengths):
            # They start together, so the short ones are gone when the long ones are long.
            fixed = self._prompt_tokens + most_done
            ends = enumerate(sorted(lengths))
            if max([(num - place) * (fixed + tokens) for place, tokens in ends]) <= (
                self._simple_tokens
            ):
                self._simple = True

    def _leave(self, length: int) -> None:
        """A request of so many tokens in all has left, which may make things simple again."""
        self._peak -= self._prompt_tokens + length
        self._simple = self._peak <= self._simple_tokens

    def _has_room_for(self, num: int) -> bool:
        """So many measured requests can join, and nothing will ever be preempted."""
        fits = self._simple or self._peak <= self._admission_limit
        return fits and len(self._running) + num <= self._max_running

    def _admit(self, now: float) -> None:
        """Let waiting requests join, in order, as long as there is room."""
        waiting = self._waiting
        admitted: list[tuple[int, int, int]] = []
        num = len(self._running)
        cached = self.cached_tokens
        while waiting and num < self._max_running:
            key, length, done, prefill_s = waiting[0]
            tokens = self._prompt_tokens + done
            if num and cached + tokens + num + 1 > self._admission_limit:
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
        """Let requests run from the present boundary on."""
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
        self._tokens -= done_tokens
        if num >= len(self._flat_s):
            _extend(self._flat_s, self._cost, num)
        if now < self._reached:
            if self._joined_clock != clock:
                self._joined.clear()
                self._joined_clock = clock
            self._joined.update(keys)

    def _remove(self, now: float, keys: Iterable[int]) -> list[int]:
        """Tokens that each had reached."""
        running = self._running
        in_flight = now < self._reached
        clock = self._clock
        simple = self._simple
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
            if in_flight and not (self._joined_clock == clock and key in self._joined):
                tokens -= 1
            self._tokens += tokens
            if not simple:
                self._leave(length)
            reached.append(tokens)
        return reached

    def _remove_waiting(self, key: int) -> int:
        for place, request in enumerate(self._waiting):
            if request[0] == key:
                del self._waiting[place]
                if not self._simple:
                    self._leave(request[1])
                return request[2]
        raise AssertionError(f"request {key} is not in the engine")

    def _preempt(self) -> None:
        """Send the youngest running sequence back to the front of the queue."""
        key, (negative_finish, _, length) = self._running.popitem()
        self._births += negative_finish + length
        done = self._clock + negative_finish + length
        self._tokens += done
        prefill_s = (self._prompt_tokens + done) * self._recompute_token_s
        self._waiting.appendleft((key, length, done, prefill_s))
        self._preemptions[key] = self._preemptions.get(key, 0) + 1
        self.num_preemptions += 1

    # -- the clock -----------------------------------------------------------------------

    def _schedule(self) -> None:
        """Find the next finish."""
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
            self.next_finish = self._start + steps * self._flat_s[len(running)]
            self._direct = True
        else:
            num = len(running)
            cached = self.cached_tokens
            self._direct = cached + num * steps <= self._capacity
            if self._direct:
                self.next_finish = self._start + self._seconds(steps, num, cached)
            else:
                self.next_finish = self._foresee()

    def _foresee(self) -> float:
        """When the next response finishes, the preemptions before that included."""
        running = self._running
        clock, time, num, cached = self._clock, self._start, len(running), self.cached_tokens
        youngest = reversed(running.values())
        gone: set[int] = set()
        for entry in reversed(self._entries):
            negative_finish, key, _ = entry
            if running.get(key) is not entry:
                continue
            while key not in gone:
                steps = min(-negative_finish - clock, (self._capacity - cached) // num)
                if steps:
                    time += self._seconds(steps, num, cached)
                    clock += steps
                    cached += num * steps
                if clock == -negative_finish:
                    return time
                finish, last, length = next(youngest)
                gone.add(last)
                num -= 1
                cached -= self._prompt_tokens + clock + finish + length
        raise AssertionError("nothing is running")

    def _walk_to_finish(self) -> None:
        """Move the clock to the next finish, that of the last entry then, preempting on the way."""
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
        """Move the clock to the first boundary at or after `now`."""
        if now <= self._start:
            return
        if not self._running:
            self._idle_s += now - self._start
            self._start = self._reached = now
            return
        assert now <= self.next_finish, "a finish was passed over"
        if self._simple:
            step_s = self._flat_s[len(self._running)]
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
            steps = self._steps_by(now - self._start, len(self._running), self.cached_tokens)
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
        """Of the last entry, once those of sequences that have left are cleared away."""
        entries = self._entries
        while self._running.get(entries[-1][1]) is not entries[-1]:
            entries.pop()
        return -entries[-1][0] - self._clock

    def _room(self) -> int:
        """Steps until the cache overflows."""
        return (self._capacity - self.cached_tokens) // len(self._running)

    def _step(self, steps: int) -> None:
        """Take `steps` steps with what is running."""
        self._start += self._seconds(steps, len(self._running), self.cached_tokens)
        self._reached = self._start
        self._clock += steps

    def _seconds(self, steps: int, num: int, cached: int) -> float:
        """Seconds of `steps` steps of `num` sequences, the first with `cached` tokens in the
        cache."""
        num_flat = self._num_flat(num, cached)
        if steps <= num_flat:
            return steps * self._flat_s[num]
        first_s, growth_s = self._beyond_flat(num, cached + num * num_flat)
        rest = steps - num_flat
        return num_flat * self._flat_s[num] + rest * (first_s + growth_s * (rest - 1) / 2)

    def _steps_by(self, seconds: float, num: int, cached: int) -> int:
        """The fewest steps that take at least `seconds`: `_seconds` the other way round."""
        num_flat = self._num_flat(num, cached)
        flat_s = self._flat_s[num]
        if seconds <= num_flat * flat_s:
            return math.ceil(seconds / flat_s - STEP_TOLERANCE)
        seconds -= num_flat * flat_s
        first_s, growth_s = self._beyond_flat(num, cached + num * num_flat)
        # The positive root r of growth/2 * r**2 + linear * r = seconds, without cancellation.
        linear_s = first_s - growth_s / 2
        root_s = math.sqrt(linear_s * linear_s + 2 * growth_s * seconds)
        return num_flat + math.ceil(2 * seconds / (linear_s + root_s) - STEP_TOLERANCE)

    def _num_flat(self, num: int, cached: int) -> int:
        """Steps from here on that take their floor time."""
        return max(0, (self._flat_tokens - cached) // num + 1)

    def _beyond_flat(self, num: int, cached: int) -> tuple[float, float]:
        """Seconds of a step bound by reading the cache, and how much longer each next one is."""
        cost = self._cost
        speedup = cost.speedup(num)
        step_s = cost.bytes_s + cost.per_cached_token_s * cached + cost.per_sequence_s * num
        return step_s / speedup, cost.per_cached_token_s * num / speedup


def _flat_tokens(cost: StepCost) -> int:
    """Cached tokens up to which a step takes its floor time."""
    if not cost.per_cached_token_s:
        return UNLIMITED
    beyond_bytes_s = max(0.0, cost.launch_s - cost.bytes_s)
    return min(UNLIMITED, int(beyond_bytes_s / cost.per_cached_token_s))


@lru_cache(maxsize=64)
def _flat_table(cost: StepCost) -> list[float]:
    """Shared by all engines of this cost; it grows with the largest of them."""
    return []


def _extend(flat_s: list[float], cost: StepCost, num: int) -> None:
    """Fill the table up to `num` running sequences."""
    floor_s = max(cost.launch_s, cost.bytes_s)
    for n in range(len(flat_s), num + 1):
        flat_s.append((floor_s + cost.per_sequence_s * n) / cost.speedup(n))
