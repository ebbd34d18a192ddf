"""Reconstructs an engine's decode steps from a log: how many lay between the ends of two samples.

An engine admits requests first come, first served, into its slots. Being admitted (the prefill)
gives a sample its first token (beside tokens kept from an earlier launch), every decode step one
more. So a sample of L tokens that was admitted at clock a (a steps after the launch) ends at clock
a + L - 1, and a log of lengths and times also holds the seconds of known numbers of decode steps
with known numbers of running samples.

Where steps may give several tokens (`rollout.engine.draft_tokens`), samples grow at different
speeds and the result is an average: the clock counts the tokens of the sample that is furthest, and
a sample that ends behind that one counts as ending at the same clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from rollpacker.core.ids import SampleId
from rollpacker.core.records import Entry
from rollpacker.report.history import iterate_steps
from rollpacker.report.step_history import End, RoundHistory, SampleHistory, StepHistory


class ClockError(ValueError):
    """Raised if the ends of a round's samples cannot come from an engine with this number of slots
    (samples generated at once)."""


class Stretch(NamedTuple):
    """Consecutive decode steps between two ends of samples (or the launch and the first end)."""

    steps: int
    """Number of decode steps in the stretch."""
    running: int
    """Number of samples that are decoded in each of the steps."""
    cached: int
    """Response tokens of the running samples before the first step. Prompts are not counted, since
    their lengths are not in a log."""
    admitted: int
    """Number of samples that were prefilled before the first step."""
    seconds: float


def iterate_rounds(entries: Iterable[Entry]) -> Iterator[RoundHistory]:
    """Yields the rounds of a log in order, also those of steps that were never committed. A round
    in which some sample has not ended is left out."""
    for step in iterate_steps(entries, unfinished=True):
        yield from finished_rounds(step)


def finished_rounds(step: StepHistory) -> list[RoundHistory]:
    return [round_ for round_ in step.rounds if round_.end_s is not None and round_.ends]


def by_engine(round_: RoundHistory) -> list[RoundHistory]:
    """Splits a round into several rounds, one for each engine that had samples."""
    if round_.num_engines == 1:
        return [round_]
    engines = round_.engines or (0,) * len(round_.samples)
    at = dict(zip(round_.samples, engines, strict=False))
    return [
        replace(
            round_,
            samples=tuple(sample for sample in round_.samples if at.get(sample) == number),
            ends=[end for end in round_.ends if at.get(end.sample) == number],
            slots=None if round_.slots is None else round_.slots // round_.num_engines,
        )
        for number in sorted(set(engines))
    ]


def stretches(round_: RoundHistory, *, slots: int | None, drafted: bool = False) -> list[Stretch]:
    """The stretches (decode steps in a row between two ends of samples), in order, for a round of
    one engine. `slots`: maximum number of samples at once; None: no limit. `drafted`: a step may
    give several tokens of a sample, so the tokens of the longest running sample count as the steps.
    Raises `ClockError` if the ends cannot come from such an engine."""
    redrawn = any(end.num_redraws for end in round_.ends)
    if round_.is_irregular or (redrawn and not drafted):
        raise ClockError("a sample failed or was launched again")
    # One whose tokens were all there has, as others do, its newest when it is admitted.
    taken_up = {end.sample: min(end.num_taken_up, end.num_tokens - 1) for end in round_.ends}
    if drafted:
        engine: _Engine = _DraftingEngine(round_, slots, taken_up)
    else:
        engine = _Engine(round_.samples, slots, taken_up)
    found = []
    last_s = round_.start_s
    for end in round_.ends:
        if end.num_generated == 0 and end.end is End.STOPPED:
            engine.forget(end.sample)
            continue
        clock = engine.clock_of(end)
        if clock > engine.clock or engine.num_admitted:
            assert end.end_s is not None
            found.append(engine.advance(clock, end.end_s - last_s))
            last_s = end.end_s
        engine.remove(end.sample)
    if found and drafted:  # the last ones ended behind the furthest
        rest_s = round_.ends[-1].end_s
        assert rest_s is not None
        found[-1] = found[-1]._replace(seconds=found[-1].seconds + rest_s - last_s)
    return found


class _Engine:
    """A model of an engine that has at most `slots` samples at once, first come, first served.
    `clock` is the number of decode steps since the round's launch."""

    def __init__(
        self, samples: Iterable[SampleId], slots: int | None, taken_up: Mapping[SampleId, int]
    ) -> None:
        """`slots`: maximum number of samples at once; None: no limit. `taken_up`: number of each
        sample's tokens that an earlier launch generated."""
        self.clock = 0
        self.num_admitted = 0
        """Number of samples that the engine admitted since the last call of `advance`."""
        self._slots = slots
        self._waiting = deque(samples)
        self._taken_up = taken_up
        self._admitted_at: dict[SampleId, int] = {}
        """For each running sample the clock (number of decode steps) at which it would have begun
        without tokens, had all its tokens come one in a step."""
        self._sum_admitted_at = 0
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._slots is None or len(self._admitted_at) < self._slots):
            sample = self._waiting.popleft()
            began = self.clock - self._taken_up.get(sample, 0)
            self._admitted_at[sample] = began
            self._sum_admitted_at += began
            self.num_admitted += 1

    def clock_of(self, end: SampleHistory) -> int:
        """The clock (decode steps since the launch) at which this sample ends; waiting samples are
        admitted if that is later than `self.clock`. Raises `ClockError` if it is earlier, or the
        sample has no slot."""
        if self._slots is not None and self._clock_if_running(end) != self.clock:
            self._admit()
        clock = self._clock_if_running(end)
        if clock is None or clock < self.clock:
            raise ClockError(
                f"sample {end.sample} ended after {end.num_tokens} tokens, which is too soon or "
                "too late for the samples before it"
            )
        return clock

    def _clock_if_running(self, end: SampleHistory) -> int | None:
        admitted_at = self._admitted_at.get(end.sample)
        return None if admitted_at is None else admitted_at + end.num_tokens - 1

    def advance(self, clock: int, seconds: float) -> Stretch:
        running = len(self._admitted_at)
        stretch = Stretch(
            steps=clock - self.clock,
            running=running,
            cached=running * (self.clock + 1) - self._sum_admitted_at,
            admitted=self.num_admitted,
            seconds=seconds,
        )
        self.clock, self.num_admitted = clock, 0
        return stretch

    def remove(self, sample: SampleId) -> None:
        self._sum_admitted_at -= self._admitted_at.pop(sample)

    def forget(self, sample: SampleId) -> None:
        """Drop a sample that was stopped while it waited. Raises `ClockError` if it was running."""
        if sample not in self._waiting:
            raise ClockError(f"sample {sample} was stopped while it waited, but had a slot")
        self._waiting.remove(sample)


class _DraftingEngine(_Engine):
    """A model of an engine whose decode steps may give several tokens of a sample. Its `clock` is
    the number of tokens of the sample that grows fastest."""

    def __init__(self, round_: RoundHistory, slots: int | None, taken_up: Mapping[SampleId, int]):
        super().__init__(round_.samples, slots, taken_up)
        self._redrawn = _redrawn_tokens(round_)

    def _clock_if_running(self, end: SampleHistory) -> int | None:
        clock = super()._clock_if_running(end)
        if clock is None:
            return None
        return max(self.clock, clock + self._redrawn.get(end.sample, 0))


def _redrawn_tokens(round_: RoundHistory) -> Mapping[SampleId, int]:
    """Estimated number of tokens that each sample lost when its end was drawn again, since it came
    before the place where an earlier launch was cut off. No log has that number. Such an end is
    taken to lie where other responses to the prompt ended on average, between the kept tokens and
    the cut, or else half-way."""
    found = {}
    for end in round_.ends:
        if not end.num_redraws or end.carried is None:
            continue
        kept, cut = end.num_kept or 0, end.carried.num_tokens
        between = [
            other.num_tokens - kept
            for other in round_.ends
            if other.sample.prompt == end.sample.prompt and kept < other.num_tokens <= cut
        ]
        usual = sum(between) / len(between) if between else max(0, cut - kept) / 2
        found[end.sample] = round(end.num_redraws * usual)
    return found
