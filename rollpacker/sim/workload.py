"""The workload: prompts, lengths of responses, and seconds and results of checks.

Every value is drawn from (seed, prompt, attempt, index): it is the same whatever else was launched,
in whatever order and by whichever system, so that two systems differ by their decisions alone. With
`tail_batching.selection=none` a sample that is launched again keeps its random numbers: callers
then ask for attempt 0, and only changes by newer weights depend on the real attempt.

Lengths follow a Gaussian copula. A prompt has a normal score u, each response of an attempt its own
e, and the response's score is

    z = sqrt(rho) * u + sqrt(1 - rho) * e

whose rank, Phi(z), picks the length from the law's quantiles. A relaunch keeps u and draws new e.
Values are drawn for blocks of prompts at once, and the latest blocks are kept.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.portable import exps, interpolated, log, log1p, logs, on_circle, total_of
from rollpacker.sim.length_laws import CHUNK, FloatArray, IntArray, Lengths, PoolLengths, lengths_of
from rollpacker.sim.scenario import Scenario
from rollpacker.sim.trajectories import Trajectories
from rollpacker.sim.workload_spec import RewardStage

BLOCK_ROWS = 512
"""Number of prompts in a block, whose values are all drawn together."""
MAX_BLOCKS = 64
"""Most blocks (of `BLOCK_ROWS` prompts) of lengths that are kept in memory, and of verdicts."""
CORRECT_SHARE = 0.5
"""Share of correct ones among responses whose check takes at most
`RewardStage.correct_within_s`."""

_PROMPT_STREAM, _RESPONSE_STREAM, _HARD_STREAM, _VERDICT_STREAM = range(4)
_MISMATCH_STREAM, _REDRAW_STREAM, _TURN_STREAM = 4, 5, 6
TURN_CHUNKS = 16
"""Number of chunks (of `CHUNK` responses to one prompt) reserved for each turn of trajectories: the
message of turn t has the length of a response in chunk t * TURN_CHUNKS or a later one."""


class Workload:
    """The endless sequence of prompts of a scenario or of a real run, with the lengths and the
    verdicts of responses to them."""

    trajectories: Trajectories | None = None
    """Trajectories of a scenario with turns, in which the lengths drawn here are those of messages.
    None: samples are single responses."""

    def __init__(self, scenario: Scenario) -> None:
        """Make a scenario's workload. Raises `ConfigError` if a trace of lengths cannot be read."""
        cap = scenario.rollout.max_response_tokens
        parts = [_Part(stage, lengths_of(scenario.law_of(stage), cap)) for stage in scenario.stages]
        window = scenario.oracle.reorder_window * scenario.rollout.prompts_per_step
        self._set_up(parts, scenario.seed, None, window, scenario.rollout.samples_per_prompt)
        if scenario.turns is not None:
            trajectories = Trajectories(self.at_rank, self.message, scenario.turns, cap)
            self.trajectories = trajectories
            lengths = trajectories.policy_lengths(self._sources)
            self.policy_length_mean, self.policy_length_p95 = lengths

    _latest: ClassVar[tuple[object, Workload] | None] = None
    """Settings that draws of the workload depend on that `of` made last, and it; None at first."""

    @classmethod
    def of(cls, scenario: Scenario) -> Workload:
        """Make the workload of a scenario in less time than `Workload(scenario)`: draws of the
        workload that this method made last are used again where they would be the same."""
        laws = [scenario.law_of(stage) for stage in scenario.stages]
        cap, turns = scenario.rollout.max_response_tokens, scenario.turns
        facts = (scenario.seed, cap, scenario.stages, laws, turns)
        if any(law.trace is not None for law in laws):  # a file may have changed
            return cls(scenario)
        kept = cls._latest
        if kept is None or kept[0] != facts:
            kept = cls._latest = (facts, cls(scenario))
        latest, workload = kept[1], cls.__new__(cls)
        window = scenario.oracle.reorder_window * scenario.rollout.prompts_per_step
        parts, num_samples = latest._parts, scenario.rollout.samples_per_prompt
        workload._set_up(parts, scenario.seed, None, window, num_samples)
        workload._lengths, workload._verdicts = latest._lengths, latest._verdicts
        workload.trajectories = latest.trajectories
        workload.policy_length_mean = latest.policy_length_mean
        workload.policy_length_p95 = latest.policy_length_p95
        return workload

    @classmethod
    def from_pools(
        cls,
        pools: Mapping[int, Sequence[int]],
        *,
        max_response_tokens: int,
        samples_per_prompt: int,
        stage: RewardStage | None = None,
        source: str | None = None,
        seed: int = 0,
    ) -> Workload:
        """Make the workload of a real run. `pools` maps each row of the data to the lengths of its
        finished responses, rows in the order in which they were fetched.

        A prompt's first launch gets its recorded lengths in order; further responses, relaunches
        and later epochs draw from its recorded lengths. After the last row the first comes again,
        as the next epoch. `stage` says how all prompts are checked (None: not at all), `source` is
        the name of their source (None: the kind of `stage`). Raises `ValueError` if there is no
        prompt, or a prompt without a recorded length.
        """
        workload = cls.__new__(cls)
        stage = stage or RewardStage(kind="none", share=1.0)
        lengths = PoolLengths(list(pools.values()), max_response_tokens)
        parts = [_Part(stage, lengths)]
        workload._set_up(parts, seed, tuple(pools), 0, samples_per_prompt)
        if source is not None:
            workload._sources = (source,)
        return workload

    def _set_up(
        self,
        parts: list[_Part],
        seed: int,
        rows: tuple[int, ...] | None,
        window: int,
        num_samples: int,
    ) -> None:
        self._parts = parts
        self._window = window
        """Number of prompts that an oracle, knowing all lengths, sorts together; 0: no sorting."""
        self._num_samples = num_samples
        self.seed = seed
        self._rows = rows
        self._place_of_row = {row: place for place, row in enumerate(rows or ())}
        self._pattern = _pattern([part.stage.share for part in parts])
        self._sources = tuple(parts[index].stage.kind for index in self._pattern)
        own = self._pattern == np.arange(len(parts))[:, None]
        self._num_before = np.cumsum(own, axis=1) - own
        """Array of shape (stages, length of `_pattern`): how many prompts of each reward stage come
        before each place of the repeated order `_pattern`."""
        self._next = 0
        self._ready: deque[PromptId] = deque()
        self._lengths = functools.lru_cache(MAX_BLOCKS)(self._draw_lengths)
        self._verdicts = functools.lru_cache(MAX_BLOCKS)(self._draw_verdicts)
        self.policy_length_mean, self.policy_length_p95 = _policy(parts)
        """Mean and 95th percentile of the policy's own response lengths, in tokens, cut at the cap,
        if no response is left out of training."""
        self.skip_truncated = frozenset(
            part.stage.kind for part in parts if not part.stage.check_truncated
        )
        """Sources of prompts whose cut-off responses count as wrong without a check."""

    # -- the cursor --------------------------------------------------------------------

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Returns the next `count` prompts and two flags, whether the epoch and whether the data
        ended with them: always False, since this data is endless. Raises `ValueError` if `count` is
        below 1."""
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        if not self._window:
            return tuple(self._fetched(count)), False, False
        while len(self._ready) < count:
            self._ready.extend(self._sorted(self._fetched(self._window)))
        return tuple(self._ready.popleft() for _ in range(count)), False, False

    def _fetched(self, count: int) -> list[PromptId]:
        places = range(self._next, self._next + count)
        self._next += count
        sources, period = self._sources, len(self._sources)
        if self._rows is None:
            return [PromptId(sources[place % period], 0, place) for place in places]
        rows = self._rows
        turns = (divmod(place, len(rows)) for place in places)
        return [PromptId(sources[0], epoch, rows[place]) for epoch, place in turns]

    def _sorted(self, prompts: list[PromptId]) -> list[PromptId]:
        """Sort the prompts by their longest response, but only among prompts of the same source, so
        that each place keeps its source and a step its mix of sources."""
        by_source: dict[str, deque[PromptId]] = {}
        for prompt in sorted(prompts, key=self._longest):
            by_source.setdefault(prompt.source, deque()).append(prompt)
        return [by_source[prompt.source].popleft() for prompt in prompts]

    def _longest(self, prompt: PromptId) -> int:
        return max(self.lengths(prompt, 0)[: self._num_samples])

    # -- what a response is like -------------------------------------------------------

    def lengths(self, prompt: PromptId, attempt: int, count: int | None = None) -> list[int]:
        """Lengths, in tokens, of at least `count` responses to the prompt at its launch number
        `attempt` (from 0), by sample index. `count` None: twice a step's samples per prompt."""
        place = prompt.row if self._rows is None else self._place(prompt)
        block, start = place // BLOCK_ROWS, place % BLOCK_ROWS * CHUNK
        values = self._lengths(block, attempt, 0)[start : start + CHUNK]
        count = 2 * self._num_samples if count is None else count
        if count > CHUNK:
            for chunk in range(1, math.ceil(count / CHUNK)):
                values += self._lengths(block, attempt, chunk)[start : start + CHUNK]
        return values

    def verdict(self, sample: SampleId) -> tuple[float, bool]:
        """Returns the seconds that a check of the sample takes of a worker if no deadline ends it
        (0.0: there is no check), and whether the response is correct. It is not if the check takes
        longer than `RewardStage.correct_within_s`."""
        prompt, index, attempt = sample.prompt, sample.index, sample.attempt
        place = prompt.row if self._rows is None else self._place(prompt)
        seconds, correct = self._verdicts(place // BLOCK_ROWS, attempt, index // CHUNK)
        at = place % BLOCK_ROWS * CHUNK + index % CHUNK
        return seconds[at], correct[at]

    def capped_share(self) -> float:
        """Share of the policy's own responses that reach the cap of tokens."""
        cap = max(part.lengths.cap for part in self._parts)
        prompts = range(BLOCK_ROWS)
        own = [self._lengths(0, 0, 0)[row * CHUNK : (row + 1) * CHUNK] for row in prompts]
        return float(np.mean(np.array(own) >= cap))

    # -- turns -------------------------------------------------------------------------

    def message(self, sample: SampleId, turn: int) -> int:
        """Number of tokens of the model's message in this turn (from 0) of a trajectory. A message
        is drawn as a response to the prompt: in turn 0 the sample's own, later a further one."""
        prompt, index, attempt = sample.prompt, sample.index, sample.attempt
        place = prompt.row if self._rows is None else self._place(prompt)
        chunk = turn * TURN_CHUNKS + index // CHUNK
        lengths = self._lengths(place // BLOCK_ROWS, attempt, chunk)
        return lengths[place % BLOCK_ROWS * CHUNK + index % CHUNK]

    def at_rank(
        self, law: Mapping[float, float], sample: SampleId, what: int, count: int
    ) -> FloatArray:
        """Draws `count` values for the sample from a law, a mapping from quantile to value. `what`
        is a number given to the law, so that draws from different laws are independent."""
        return _seconds_at(law, _uniforms(count, *self._key(_TURN_STREAM, sample), what))

    # -- under other weights -----------------------------------------------------------

    def first_mismatch(self, sample: SampleId, num_tokens: int, rate: float) -> int:
        """Index of the first of a sample's `num_tokens` tokens, kept from an earlier launch, that
        comes out differently, or `num_tokens` if none does. Each differs with chance `rate`. The id
        `sample` is that of the new launch."""
        if rate <= 0 or not num_tokens:
            return num_tokens
        luck = _uniforms(1, *self._key(_MISMATCH_STREAM, sample))[0]
        if rate >= 1:
            return 0
        return min(num_tokens, int(log(1.0 - luck) / log1p(-rate)))

    def redrawn(self, sample: SampleId, turn: int, above: int) -> int:
        """Length in tokens of a response whose first `above` tokens are kept and whose rest is
        drawn anew, with random numbers that depend on `sample` and on `turn` (a count of such
        draws). It is drawn from the prompt's own law, given that the response is longer than
        `above`. This is an approximation: the text of a real prefix says more of the response's end
        than the prefix's length does."""
        prompt = sample.prompt
        place = prompt.row if self._rows is None else self._place(prompt)
        luck = _uniforms(2, *self._key(_REDRAW_STREAM, sample), turn)
        scores, hard = _prompts(self.seed, place // BLOCK_ROWS)
        at = place % BLOCK_ROWS
        index = int(self._pattern[place % self._pattern.size])
        law = self._parts[index].lengths
        rank = int(self._ranks(place // BLOCK_ROWS, index, np.array([at]))[0])
        chance, longer = law.beyond(rank, scores[at], above)
        if law.hard_prompts and hard[at] < law.hard_prompts:
            to_cap = law.hard_prompt_cap_probability
            if luck[1] * (to_cap + (1 - to_cap) * chance) < to_cap:
                return law.cap
        return longer(float(luck[0]))

    def _key(self, stream: int, sample: SampleId) -> tuple[int, ...]:
        prompt = sample.prompt
        place = prompt.row if self._rows is None else self._place(prompt)
        return self.seed, stream, place, sample.attempt, sample.index

    def _place(self, prompt: PromptId) -> int:
        """Number of prompts that come before this one in the recorded order, over all epochs."""
        assert self._rows is not None
        return prompt.epoch * len(self._rows) + self._place_of_row[prompt.row]

    # -- drawing -----------------------------------------------------------------------

    def _draw_lengths(self, block: int, attempt: int, chunk: int) -> list[int]:
        """Lengths in tokens of one chunk of responses to every prompt of a block: a list of
        BLOCK_ROWS * CHUNK numbers, in which the responses to a prompt stand side by side."""
        u = _normals(BLOCK_ROWS, self.seed, _PROMPT_STREAM, block)
        e = _normals(BLOCK_ROWS * CHUNK, self.seed, _RESPONSE_STREAM, block, attempt, chunk)
        e = e.reshape(BLOCK_ROWS, CHUNK)
        lengths = np.empty((BLOCK_ROWS, CHUNK), dtype=np.int64)
        for index, part in enumerate(self._parts):
            chosen = self._rows_of(block, index)
            if chosen.size:
                ranks = self._ranks(block, index, chosen)
                lengths[chosen] = part.lengths.draw(ranks, attempt, chunk, u[chosen], e[chosen])
                self._cap_hard(lengths, chosen, part, block, attempt, chunk)
        return lengths.ravel().tolist()

    def _cap_hard(
        self, lengths: IntArray, chosen: IntArray, part: _Part, block: int, attempt: int, chunk: int
    ) -> None:
        """Set lengths of responses to hard prompts to the cap, in place, with the law's chance. Row
        i of `lengths` belongs to the prompt at place `chosen[i]` of the block."""
        law = part.lengths
        if not law.hard_prompts:
            return
        key = (self.seed, _HARD_STREAM, block)
        hard = _uniforms(BLOCK_ROWS, *key)[chosen] < law.hard_prompts
        luck = _uniforms(BLOCK_ROWS * CHUNK, *key, attempt, chunk).reshape(BLOCK_ROWS, CHUNK)
        capped = hard[:, None] & (luck[chosen] < law.hard_prompt_cap_probability)
        lengths[chosen] = np.where(capped, law.cap, lengths[chosen])

    def _draw_verdicts(
        self, block: int, attempt: int, chunk: int
    ) -> tuple[list[float], list[bool]]:
        """Seconds of the check, and correctness, of each response of a chunk (`CHUNK` responses to
        every prompt of a block), in the order of `_draw_lengths`."""
        size = (2, BLOCK_ROWS, CHUNK)
        key = (self.seed, _VERDICT_STREAM, block, attempt, chunk)
        ranks, luck = _uniforms(math.prod(size), *key).reshape(size)
        seconds = np.zeros((BLOCK_ROWS, CHUNK))
        in_time = np.ones((BLOCK_ROWS, CHUNK), dtype=bool)
        for index, part in enumerate(self._parts):
            chosen = self._rows_of(block, index)
            law = part.stage.seconds_law
            if chosen.size and law is not None:
                seconds[chosen] = _seconds_at(law, ranks[chosen])
                in_time[chosen] = seconds[chosen] <= part.stage.correct_within_s
        correct = in_time & (luck < CORRECT_SHARE)
        return np.round(seconds, 6).ravel().tolist(), correct.ravel().tolist()

    def _rows_of(self, block: int, part: int) -> IntArray:
        """Places in the block (from 0) of prompts of the reward stage number `part`."""
        if len(self._parts) == 1:
            return np.arange(BLOCK_ROWS)
        places = np.arange(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS) % self._pattern.size
        return np.flatnonzero(self._pattern[places] == part)

    def _ranks(self, block: int, part: int, chosen: IntArray) -> IntArray:
        """For each of the places `chosen` in the block: how many earlier prompts, of all blocks,
        are of the reward stage number `part`."""
        places = chosen + block * BLOCK_ROWS
        periods, offsets = np.divmod(places, self._pattern.size)
        num_own = np.count_nonzero(self._pattern == part)
        ranks: IntArray = periods * num_own + self._num_before[part, offsets]
        return ranks


@dataclass(frozen=True, slots=True)
class _Part:
    """A reward stage (one way to check responses) and the law of its responses' lengths."""

    stage: RewardStage
    lengths: Lengths


def _seconds_at(law: Mapping[float, float], ranks: FloatArray) -> FloatArray:
    at = sorted(law)
    if len(at) == 1:
        return np.full(ranks.shape, law[at[0]])
    known = logs(np.array([float(law[q]) for q in at]))
    return exps(interpolated(ranks, np.array(at), known))


def _policy(parts: Sequence[_Part]) -> tuple[float, float]:
    """Mean and 95th percentile of response lengths over the reward stages `parts`, those of hard
    prompts (which often run to the cap) included."""
    total = sum(part.stage.share for part in parts)
    lengths, weights = [], []
    for part in parts:
        values, probabilities = part.lengths.law()
        capped = part.lengths.hard_prompts * part.lengths.hard_prompt_cap_probability
        share = part.stage.share / total
        lengths += [values, np.array([part.lengths.cap])]
        weights += [probabilities * (share * (1 - capped)), np.array([share * capped])]
    values, probabilities = np.concatenate(lengths), np.concatenate(weights)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(probabilities[order])
    p95 = values[order][np.searchsorted(reached, 0.95 * reached[-1])]
    return total_of(values * probabilities) / float(reached[-1]), float(p95)


def _pattern(shares: Sequence[float]) -> IntArray:
    """Numbers (from 0) of the reward stages that prompts belong to, in order; repeated without end.
    `shares` are the stages' shares of prompts. Each beginning of the order has every stage as often
    as its share demands, give or take one prompt."""
    total = sum(shares)
    parts = [Fraction(share / total).limit_denominator(500) for share in shares]
    period = math.lcm(*(part.denominator for part in parts))
    if sum(parts) != 1 or period > 10_000:
        period = 1000
        ends = [round(period * sum(shares[: i + 1]) / total) for i in range(len(shares))]
        parts = [
            Fraction(end - start, period) for start, end in zip([0, *ends], ends, strict=False)
        ]
    counts = [0] * len(parts)
    order = []
    for place in range(1, period + 1):
        due = [part * place - count for part, count in zip(parts, counts, strict=True)]
        chosen = due.index(max(due))
        counts[chosen] += 1
        order.append(chosen)
    return np.asarray(order, dtype=np.int64)


# -- random numbers ----------------------------------------------------------------


def _uniforms(count: int, seed: int, *key: int) -> FloatArray:
    """Draws `count` random numbers in [0, 1), which depend on `seed` and `key` only, from a
    generator that numpy promises to leave as it is."""
    entropy = (int(seed < 0), abs(seed), *key)
    bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normals(count: int, seed: int, *key: int) -> FloatArray:
    """Draws `count` standard normal numbers, two from each pair of uniforms (Box and Muller)."""
    assert count % 2 == 0
    radius, turns = _uniforms(count, seed, *key).reshape(2, -1)
    radius = np.sqrt(-2 * logs(1 - radius))
    cosine, sine = on_circle(turns)
    return np.concatenate([radius * cosine, radius * sine])


@functools.lru_cache(MAX_BLOCKS)
def _prompts(seed: int, block: int) -> tuple[list[float], list[float]]:
    """Two lists, with a number for each prompt of a block: its normal score, which lengths of its
    responses depend on, and a number in [0, 1). If this is below `Lengths.hard_prompts`, the prompt
    is hard (its responses often run to the cap)."""
    scores = _normals(BLOCK_ROWS, seed, _PROMPT_STREAM, block)
    return scores.tolist(), _uniforms(BLOCK_ROWS, seed, _HARD_STREAM, block).tolist()
