"""The token clock against an engine that takes one decode step at a time."""

import math
import random
from dataclasses import dataclass, field, replace

import pytest

from rollpacker.sim.cache_limits import KV_WATERMARK
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.engine import Request, TokenClockEngine
from rollpacker.sim.latency import StepCost

COST = StepCost(launch_s=0.012, bytes_s=0.006, per_cached_token_s=4e-8, per_sequence_s=3e-4)


@dataclass
class Sequence:
    key: int
    length: int
    done: int
    prefill_s: float
    preemptions: int = 0
    fresh: bool = True
    """Took no step since it was admitted."""


@dataclass(kw_only=True)
class StepByStep:
    """The slow truth. `run` loops over decode steps; events are (time, "submit" | "abort" |
    "drain", what). `siblings` are aborted at once when a key finishes."""

    cost: StepCost
    kv_tokens: int | None
    max_running: int | None
    prompt_tokens: int
    recompute_token_s: float = 0.0
    siblings: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.reached = self.start = 0.0
        self.finished: list[tuple[float, int, int, int]] = []
        self.aborted: list[tuple[int, int]] = []
        self.drained: list[Request] = []
        self.preemptions = self.tokens = 0

    @property
    def cached(self) -> int:
        return sum(self.prompt_tokens + one.done for one in self.running)

    def admit(self) -> None:
        while self.waiting and len(self.running) < (self.max_running or math.inf):
            one = self.waiting[0]
            if self.kv_tokens is not None and self.running:
                after_step = self.cached + self.prompt_tokens + one.done + len(self.running) + 1
                if after_step > int(self.kv_tokens * (1 - KV_WATERMARK)):
                    return
            self.waiting.pop(0)
            one.fresh = True
            self.running.append(one)
            self.start += one.prefill_s

    def abort(self, now: float, keys: list[int]) -> list[Request]:
        gone = []
        for key in keys:
            for one in [*self.running, *self.waiting]:
                if one.key != key:
                    continue
                if one in self.waiting:
                    self.waiting.remove(one)
                    done = one.done
                else:
                    self.running.remove(one)
                    lost = now < self.reached and not one.fresh
                    done = one.done - lost
                    self.tokens -= lost
                gone.append(Request(key, one.length, done))
        return gone

    def apply(self, now: float, kind: str, what: list) -> None:
        if kind == "submit":
            requests, prefill_s = what
            share_s = prefill_s / len(requests)
            self.waiting += [Sequence(*request, share_s) for request in requests]
        elif kind == "abort":
            self.aborted += [(r.key, r.done_tokens) for r in self.abort(now, what)]
        else:
            keys = [one.key for one in [*self.running, *self.waiting]]
            self.drained += self.abort(now, keys)
        self.admit()

    def run(self, events: list) -> None:
        events = sorted(events, key=lambda event: event[0])
        while events or self.running or self.waiting:
            while events and events[0][0] < self.reached:
                self.apply(*events.pop(0))
            self.finish()
            if not self.running and events:
                self.reached = self.start = max(self.start, events[0][0])
            while events and events[0][0] <= self.start:
                self.apply(*events.pop(0))
            if self.running:
                self.step()

    def finish(self) -> None:
        while done := [one for one in self.running if one.done == one.length]:
            one = max(done, key=lambda one: one.key)
            self.running.remove(one)
            self.finished.append((self.reached, one.key, one.length, one.preemptions))
            self.admit()
            here = {one.key for one in [*self.running, *self.waiting]}
            if keys := [key for key in self.siblings.get(one.key, []) if key in here]:
                self.apply(self.reached, "abort", keys)

    def step(self) -> None:
        capacity = math.inf if self.kv_tokens is None else self.kv_tokens
        while self.cached + len(self.running) > capacity:
            one = self.running.pop()
            one.preemptions += 1
            one.prefill_s = (self.prompt_tokens + one.done) * self.recompute_token_s
            self.waiting.insert(0, one)
            self.preemptions += 1
        self.start += self.cost.step_s(len(self.running), self.cached)
        self.reached = self.start
        for one in self.running:
            one.done += 1
            one.fresh = False
        self.tokens += len(self.running)


@dataclass
class Outcome:
    finished: list[tuple[float, int, int, int]]
    aborted: list[tuple[int, int]]
    drained: list[Request]


def drive(engine: TokenClockEngine, events: list, siblings: dict[int, list[int]]) -> Outcome:
    """What the simulator does with one engine."""
    out = Outcome([], [], [])
    here: set[int] = set()

    def abort(now: float, keys: list[int]) -> None:
        keys = [key for key in keys if key in here]
        if keys:
            out.aborted.extend(zip(keys, engine.abort(now, keys), strict=True))
            here.difference_update(keys)

    for now, kind, what in [*sorted(events, key=lambda event: event[0]), (math.inf, "end", [])]:
        while engine.next_finish <= now and engine.next_finish < math.inf:
            finish = engine.next_finish
            key, length, preemptions = engine.pop()
            here.remove(key)
            out.finished.append((finish, key, length, preemptions))
            abort(finish, siblings.get(key, []))
        if kind == "submit":
            here.update(key for key, _, _ in what[0])
            engine.submit(now, what[0], what[1])
        elif kind == "abort":
            abort(now, what)
        elif kind == "drain":
            out.drained += engine.drain(now)
            here.clear()
    assert not here and engine.num_running == 0 and engine.num_waiting == 0
    return out


def random_case(rng: random.Random, pressure: bool) -> tuple[dict, list, dict[int, list[int]]]:
    """Engine arguments, events, siblings; with `pressure` the cache is too small for the load."""
    cap = rng.choice([5, 40, 300])
    prompt_tokens = rng.choice([1, 7, 50])
    bound = rng.choice(["launch", "bytes", "both", "cache"])
    cost = StepCost(
        launch_s=0.0 if bound in ("bytes", "cache") else rng.uniform(0.005, 0.02),
        bytes_s=0.0 if bound == "cache" else rng.uniform(0.001, 0.01),
        per_cached_token_s=0.0 if bound == "launch" else 10 ** rng.uniform(-6, -4),
        per_sequence_s=rng.choice([1e-9, 3e-4]),
    )
    speedup, max_live = rng.choice([1.0, 1.6]), rng.choice([0, 3, 8])
    if max_live:
        cost = replace(cost, speculation=Speculation(speedup=speedup, max_live=max_live))
    num = rng.randint(1, 30)
    load = num * (prompt_tokens + cap)
    arguments = {
        "cost": cost,
        "kv_tokens": max(prompt_tokens + cap + 1, int(load * rng.uniform(0.03, 0.25)))
        if pressure
        else rng.choice([None, 10 * load]),
        "max_running": rng.choice([None, 20] if pressure else [None, 1, 4, 16]),
        "prompt_tokens": prompt_tokens,
        "recompute_token_s": rng.choice([0.0, 1e-5]),
    }
    span = cap * num * 0.003
    keys = list(range(num))
    rng.shuffle(keys)
    events: list = []
    at = 0.0
    while keys:
        size = rng.randint(1, len(keys))
        batch = []
        for key in keys[:size]:
            length = rng.randint(1, cap)
            batch.append((key, length, rng.choice([0, 0, rng.randint(0, length - 1)])))
        keys = keys[size:]
        events.append((at, "submit", (batch, rng.choice([0.0, rng.uniform(0, 0.1)]))))
        at += rng.uniform(0, span)
    for _ in range(rng.randint(0, 3)):
        keys = rng.sample(range(num), rng.randint(1, num))
        events.append((rng.uniform(0, span), "abort", keys[: rng.choice([1, num])]))
    if rng.random() < 0.1:
        events.append((rng.uniform(0, span), "drain", []))
    siblings = {
        key: [other for other in range(num) if other % 5 == key % 5 and other != key]
        for key in range(num)
        if rng.random() < 0.15
    }
    return arguments, events, siblings


@pytest.mark.parametrize("pressure", [False, True], ids=["room", "pressure"])
def test_same_as_step_by_step(pressure: bool) -> None:
    num_preemptions = num_aborted = num_finished = num_drained = 0
    for seed in range(400):
        arguments, events, siblings = random_case(random.Random(seed), pressure)
        slow = StepByStep(siblings=siblings, **arguments)
        slow.run(events)
        engine = TokenClockEngine(**arguments)
        fast = drive(engine, events, siblings)

        assert [one[1:] for one in fast.finished] == [one[1:] for one in slow.finished], seed
        times = [one[0] for one in slow.finished]
        assert [one[0] for one in fast.finished] == pytest.approx(times, rel=1e-6), seed
        assert fast.aborted == slow.aborted, seed
        assert fast.drained == slow.drained, seed
        assert engine.num_preemptions == slow.preemptions, seed
        assert engine.tokens_generated == slow.tokens, seed
        assert engine.cached_tokens == 0, seed
        num_preemptions += slow.preemptions
        num_aborted += len(slow.aborted)
        num_finished += len(slow.finished)
        num_drained += len(slow.drained)
    assert num_aborted > 500 and num_finished > 2000 and num_drained > 100
    assert num_preemptions > 1000 if pressure else num_preemptions == 0


def test_pressure_is_needed_for_preemptions_to_cost_time() -> None:
    requests = [(key, 200, 0) for key in range(10)]
    arguments = {"cost": COST, "max_running": None, "prompt_tokens": 10}
    ends = {}
    for kv_tokens, recompute_token_s in [(None, 1e-3), (700, 0.0), (700, 1e-3)]:
        engine = TokenClockEngine(
            kv_tokens=kv_tokens, recompute_token_s=recompute_token_s, **arguments
        )
        out = drive(engine, [(0.0, "submit", (requests, 0.0))], {})
        ends[kv_tokens, recompute_token_s] = out.finished[-1][0]
        assert engine.num_preemptions == sum(one[3] for one in out.finished)
    assert ends[None, 1e-3] < ends[700, 0.0] < ends[700, 1e-3]


def test_oldest_finishes_untouched_under_pressure() -> None:
    engine = TokenClockEngine(COST, kv_tokens=120, max_running=None, prompt_tokens=10)
    requests = [(key, 100, 0) for key in range(3)]
    out = drive(engine, [(0.0, "submit", (requests, 0.0))], {})
    assert [(key, preemptions > 0) for _, key, _, preemptions in out.finished] == [
        (0, False),
        (1, True),
        (2, True),
    ]


def test_waits_its_turn() -> None:
    engine = TokenClockEngine(COST, kv_tokens=None, max_running=2, prompt_tokens=10)
    engine.submit(0.0, [(0, 30, 0), (1, 10, 0), (2, 5, 0), (3, 1, 0)], 0.0)
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    step_s = COST.step_s(2, 0)
    assert engine.next_finish == pytest.approx(10 * step_s)
    assert [engine.pop()[0] for _ in range(4)] == [1, 2, 3, 0]
    assert engine.tokens_generated == 46
    assert engine.next_finish == math.inf


def test_times_of_a_plain_launch() -> None:
    """10 steps of three sequences, then 20 of one; the prefill first."""
    engine = TokenClockEngine(COST, kv_tokens=None, max_running=None, prompt_tokens=10)
    engine.submit(5.0, [Request(7, 10), Request(8, 30), Request(9, 10)], 0.5)
    first = 5.0 + 0.5 + 10 * (0.012 + 3 * 3e-4)
    assert engine.next_finish == pytest.approx(first)
    assert engine.pop() == (9, 10, 0)
    assert engine.next_finish == pytest.approx(first)
    assert engine.pop() == (7, 10, 0)
    last = first + 20 * (0.012 + 3e-4)
    assert engine.next_finish == pytest.approx(last)
    assert engine.pop() == (8, 30, 0)
    assert engine.last_activity == pytest.approx(last)
    assert engine.busy_s == pytest.approx(last - 5.0)
    engine.submit(100.0, [Request(1, 1)], 0.0)
    engine.pop()
    assert engine.busy_s == pytest.approx(last - 5.0 + 0.0123)


def test_abort_counts_whole_tokens() -> None:
    engine = TokenClockEngine(COST, kv_tokens=None, max_running=None, prompt_tokens=10)
    engine.submit(0.0, [(0, 100, 0), (1, 100, 40)], 0.0)
    step_s = 0.012 + 2 * 3e-4
    assert engine.abort(3.5 * step_s, [0, 1]) == [3, 43]
    assert engine.tokens_generated == 6
    assert engine.last_activity == pytest.approx(4 * step_s)
    assert engine.next_finish == math.inf


def test_abort_during_prefill_has_no_tokens() -> None:
    engine = TokenClockEngine(COST, kv_tokens=None, max_running=None, prompt_tokens=10)
    engine.submit(0.0, [(0, 100, 0)], 2.0)
    assert engine.abort(1.0, [0]) == [0]
    assert engine.busy_s == pytest.approx(2.0)


def test_speculation_in_the_tail() -> None:
    fast = StepCost(
        launch_s=0.012,
        bytes_s=0.006,
        per_cached_token_s=4e-8,
        per_sequence_s=3e-4,
        speculation=Speculation(speedup=1.6, max_live=2),
    )
    requests = [(0, 10, 0), (1, 20, 0), (2, 50, 0)]
    ends = []
    for cost in (COST, fast):
        engine = TokenClockEngine(cost, kv_tokens=None, max_running=None, prompt_tokens=10)
        engine.submit(0.0, requests, 0.0)
        ends.append([])
        while engine.next_finish < math.inf:
            ends[-1].append(engine.next_finish)
            engine.pop()
    plain, faster = ends
    assert faster[0] == plain[0]
    assert faster[1] - faster[0] == pytest.approx((plain[1] - plain[0]) / 1.6)
    assert faster[2] - faster[1] == pytest.approx((plain[2] - plain[1]) / 1.6)


def test_requests_move_to_another_engine() -> None:
    """Two engines become one in mid-step: nothing is lost, nothing is generated twice but the
    steps in flight, and everybody finishes with the length they were to have."""
    rng = random.Random(1)
    engines = [TokenClockEngine(COST, 2000, 8, 10, 1e-5) for _ in range(2)]
    lengths = {key: rng.randint(1, 150) for key in range(24)}
    for place, engine in enumerate(engines):
        engine.submit(0.0, [(key, lengths[key], 0) for key in range(place, 24, 2)], 0.1)
    finished: dict[int, int] = {}
    now = 0.3001
    for engine in engines:
        while engine.next_finish <= now:
            key, length, _ = engine.pop()
            finished[key] = length
    moved = engines[0].drain(now)
    assert engines[0].next_finish == math.inf and engines[0].num_waiting == 0
    assert [request.length for request in moved] == [lengths[request.key] for request in moved]
    assert any(request.done_tokens for request in moved)
    assert any(not request.done_tokens for request in moved)
    engines[1].submit(now, moved, 0.05)
    while engines[1].next_finish < math.inf:
        assert engines[1].next_finish >= now
        now = engines[1].next_finish
        key, length, _ = engines[1].pop()
        finished[key] = length
    assert finished == lengths
    assert sum(engine.tokens_generated for engine in engines) == sum(lengths.values())


def test_too_long_for_the_cache() -> None:
    engine = TokenClockEngine(COST, kv_tokens=100, max_running=None, prompt_tokens=10)
    engine.submit(0.0, [(0, 90, 0)], 0.0)
    with pytest.raises(ValueError, match=r"91 tokens does not fit .* 90"):
        TokenClockEngine(COST, kv_tokens=90, max_running=None, prompt_tokens=10).submit(
            0.0, [(0, 81, 0)], 0.0
        )
    assert engine.pop() == (0, 90, 0)


def test_mistakes_are_caught() -> None:
    engine = TokenClockEngine(COST, kv_tokens=None, max_running=None, prompt_tokens=10)
    engine.submit(0.0, [(0, 10, 0)], 0.0)
    with pytest.raises(AssertionError, match="not in the engine"):
        engine.abort(0.0, [1])
    with pytest.raises(AssertionError, match="twice"):
        engine.submit(0.0, [(0, 10, 0)], 0.0)
    with pytest.raises(AssertionError, match="passed over"):
        engine.abort(10.0, [0])


# -- drafts ------------------------------------------------------------------------


def test_drafts_are_no_kinder_than_published() -> None:
    alone, siblings = (
        Drafts(max_depth=1000, max_positions=10**6),
        Drafts(acceptance=0.57, max_depth=1000, max_positions=10**6),
    )
    assert alone.tokens_per_step(1) <= 1.70 and siblings.tokens_per_step(1) <= 2.33


def test_drafts_get_shorter_with_more_sequences_and_never_slow_down() -> None:
    drafts = Drafts(acceptance=0.5, max_depth=4, max_positions=16, overhead=0.1)
    assert drafts.tokens_per_step(1) == drafts.tokens_per_step(4) == 1.9375
    assert drafts.tokens_per_step(8) == 1.75 and drafts.tokens_per_step(16) == 1.5
    assert drafts.tokens_per_step(17) == 1.0
    assert drafts.speedup(4) == 1.9375 / 1.1 and drafts.speedup(17) == drafts.speedup(0) == 1.0
    assert Drafts(acceptance=0.05).speedup(1) == 1.0


def test_an_engine_with_drafts_is_faster_in_its_tail() -> None:
    cost = StepCost(launch_s=0.01, bytes_s=0.0, per_cached_token_s=0.0, per_sequence_s=0.0)
    drafts = Drafts(acceptance=0.5, max_depth=1, max_positions=1, overhead=0.0)
    ends = []
    for made in (cost, replace(cost, drafts=drafts)):
        engine = TokenClockEngine(made, None, None, 1)
        engine.submit(0.0, [(0, 100, 0), (1, 300, 0)], 0.0)
        engine.pop()
        ends.append(engine.next_finish)
    assert ends == [pytest.approx(3.0), pytest.approx(1.0 + 2.0 / 1.5)]
