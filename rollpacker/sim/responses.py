"""Lengths and progress of the current step's responses, and the unfinished responses of deferred
prompts (prompts that were put off to a later round).

With `tail_batching.selection=none` a response's length belongs to its prompt and sample index, not
to the attempt: launched again, the response continues the one that was cut off. Under newer weights
each earlier token may come out differently, with a chance given per token and weight update
(`carry.mismatch`). The tokens before the first such token are kept, and the rest is drawn anew from
the prompt's own law, given what is kept (`Workload.redrawn`, an approximation).

    kept tokens | the token that came out differently, and a new end    (first draw)
                | another end, if that one came at or before the floor  (drawn again, ...)

The floor is the largest number of tokens at which the response was ever cut off. A response that
had ended by itself has a ceiling: the length of its prompt's longest response at that time. An end
beyond it is drawn again as well. Both bounds hold with `tail_batching.complement` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import structs

from rollpacker.bus import Routes
from rollpacker.core.commands import Defer, Launch, RoundKind
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.portable import power
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.workload import Workload

FIRST_PORTION = 256
"""Number of carried tokens of a response that the first pass verifies. Each later pass verifies as
many as have come out the same, as in the embedded engine (engines/embedded/extend.py)."""
MAX_LENGTH = 1 << 40
"""Stands for no limit on a response, in tokens."""
MAX_REDRAWS = 16
"""Most times that a response's end is refused, as too early or too late, and drawn again."""


class Draw(msgspec.Struct, frozen=True, gc=False):
    """A response as it was when its prompt was put off to a later round of generation."""

    length: int
    """Number of tokens that the whole response would have if it went on under the same weights."""
    tokens: int
    """Number of tokens of the response generated so far."""
    version: int
    """Version of the weights that generated these tokens."""
    attempt: int
    """The launch (0: the prompt's first) whose random numbers decided the response's length."""
    floor: int
    """Largest number of tokens at which the response was cut off; 0: never cut off."""
    ceiling: int
    """Most tokens that the response may get if newer weights change a token of it, although it had
    ended by itself (`floor` is 0): the length of its prompt's longest response."""
    early: bool = False
    """True if the prompt was begun early and not put off since: neither bound holds."""


def num_passed(num_same: int, most: int) -> int:
    """Number of carried tokens that go through the model to verify `most` of them, if the first
    `num_same` come out the same: portion by portion, up to that with the first different one."""
    done = 0
    while done < most and done <= num_same:
        done = min(most, done + max(FIRST_PORTION, done))
    return done


@dataclass(slots=True)
class Verified:
    """Counts, over a whole run, of tokens of earlier launches that newer weights checked."""

    num_tokens: int = 0
    num_mismatches: int = 0
    """Number of checked tokens that came out differently; at most one of each response."""

    @property
    def mismatch(self) -> float:
        return self.num_mismatches / self.num_tokens if self.num_tokens else 0.0


# A list or a dict per fact of a response, since every event reads some.
class Responses:
    """The samples launched since the last commit of a step, each with a key (a small number) and
    the length in tokens at which its response ends; for a trajectory, that at which its current
    message ends. One step may train on responses of several rounds."""

    def __init__(
        self, workload: Workload, tail: TailBatchingConfig | None = None, mismatch: float = 0.0
    ) -> None:
        """`tail` None: tail batching is off. `mismatch`: chance, per token and weight update, that
        a token kept of a deferred response comes out differently."""
        self.samples: list[SampleId] = []
        """Sample of each key. The lists below are indexed by key too."""
        self.lengths: list[int] = []
        """Number of tokens of each response; another if its end is refused and drawn again."""
        self.noises: list[SampleId] = []
        """Id of the random numbers that gave each response's length: the sample's own id, or that
        of an earlier launch whose response is continued or repeated."""
        self.done: list[int] = []
        """Number of tokens that each response begins with, which are not generated anew."""
        self.reached: dict[int, int] = {}
        """Number of tokens that each aborted response had, by key."""
        self.kept: dict[int, int] = {}
        """By key, for responses begun in an earlier launch: number of tokens that are the same."""
        self.passed: dict[int, int] = {}
        """By key: number of tokens of an earlier launch that the engine computes at once. No entry:
        none are left."""
        self._before: dict[int, tuple[Draw, int]] = {}
        """By key: what earlier launches left of the response, and number of its tokens that this
        launch was to begin with."""
        self.redraws: dict[int, int] = {}
        """By key: how often the response's end was refused and drawn again. No entry: never."""
        self.keys: dict[SampleId, int] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        """By key of a response that was put off before: the lengths that an end of it must exceed
        (`Draw.floor`) and may not exceed (`Draw.ceiling`)."""
        self.verified = Verified()
        self.redraws_to_come: dict[int, list[int]] = {}
        """By key: the response's next lengths, if its ends are refused, with the first one last."""
        self._keys_of: dict[PromptId, list[int]] = {}
        """Keys of the samples of each prompt."""
        self._workload = workload
        self._tail = tail or TailBatchingConfig(enabled=False, selection="published")
        self._mismatch = mismatch
        self._left: dict[PromptId, dict[int, Draw]] = {}
        """For every prompt put off to a later round: its unfinished responses, by sample index."""
        self._early: set[PromptId] = set()
        """Prompts that were begun early in this step, and are part of no round yet."""
        self._version = 0
        """Version of the weights that generate the current step's samples."""

    def routes(self) -> Routes:
        return {Defer: self._keep}

    def add(self, command: Launch) -> range:
        """Add the samples of a launch and return their keys (small numbers in order)."""
        samples = command.samples
        keys = range(len(self.samples), len(self.samples) + len(samples))
        self._version = command.version
        if command.kind is RoundKind.AHEAD:
            self._early.update(sample.prompt for sample in samples)
        elif self._early:
            self._early.difference_update(sample.prompt for sample in samples)
        self.samples += samples
        self.keys.update(zip(samples, keys, strict=True))
        prompt, own = None, list[int]()
        for key, sample in zip(keys, samples, strict=True):
            if sample.prompt is not prompt:  # those of a prompt are launched side by side
                prompt = sample.prompt
                own = self._keys_of.setdefault(prompt, [])
            own.append(key)
        self.noises += self._noises(command)
        self._add_lengths(self.noises[keys.start :])
        self.done += command.carried or [0] * len(samples)
        if self._workload.trajectories is not None:  # these begin anew, always
            return keys
        if command.replaces and self._tail.selection == "none":
            self._repeat(keys, [self.keys[sample] for sample in command.replaces])
        elif self._left:
            self._take_up(keys, bool(command.carried), command.most_verified)
        return keys

    def clear(self) -> None:
        for known in (self.samples, self.lengths, self.noises, self.done, self.keys):
            known.clear()
        for few in (self.reached, self.kept, self.redraws, self.passed, self._before):
            few.clear()
        self._bounds.clear()
        self.redraws_to_come.clear()
        self._keys_of.clear()
        self._early.clear()

    def lengths_of(self, groups: Iterable[Iterable[SampleId]]) -> list[int]:
        """Lengths in tokens of all samples of these groups."""
        keys, lengths = self.keys, self.lengths
        return [lengths[keys[sample]] for group in groups for sample in group]

    def own_tokens(self, groups: Iterable[Sequence[SampleId]]) -> int:
        """Sum of tokens that as many responses to these groups' prompts (a group has the samples of
        one prompt) would have if none had been left out and no weights had changed."""
        if self._workload.trajectories is not None:
            return self._workload.trajectories.own_tokens([*groups])
        lengths = self._workload.lengths
        return sum([sum(lengths(group[0].prompt, 0)[: len(group)]) for group in groups])

    def num_kept(self, key: int, num_tokens: int) -> int | None:
        """Number of the first `num_tokens` tokens of this key's response that are the same as in an
        earlier launch. None: nothing is compared."""
        kept = self.kept.get(key)
        return None if kept is None else min(kept, num_tokens)

    def next_redraw(self, key: int) -> bool:
        """Called when the response of this key ends. Returns whether the end is refused, since a
        deferred response may end neither where it was cut off or before, nor beyond a limit. If so,
        the response's length is set to the next one drawn."""
        redraws = self.redraws_to_come.get(key)
        if not redraws:
            return False
        self.lengths[key] = redraws.pop()
        self.redraws[key] = self.redraws.get(key, 0) + 1
        return True

    # -- launches ----------------------------------------------------------------------

    def _noises(self, command: Launch) -> list[SampleId]:
        if self._tail.selection == "published":
            return list(command.samples)
        if command.replaces:
            return [self.noises[self.keys[sample]] for sample in command.replaces]
        noise_of = self._tail.noise_of
        return [noise_of(sample) if sample.attempt else sample for sample in command.samples]

    def _add_lengths(self, samples: Sequence[SampleId]) -> None:
        lengths, workload = self.lengths, self._workload
        prompt, attempt, known = None, -1, [0]
        for sample in samples:
            if sample.prompt is not prompt or sample.attempt != attempt:
                prompt, attempt = sample.prompt, sample.attempt
                known = workload.lengths(prompt, attempt)
            index = sample.index
            if index >= len(known):
                known = workload.lengths(prompt, attempt, index + 1)
            lengths.append(known[index])

    def _repeat(self, keys: range, failed: Sequence[int]) -> None:
        """Give the samples `keys` the responses of those that they replace, which failed."""
        for key, before in zip(keys, failed, strict=True):
            self.lengths[key] = self.lengths[before]
            if before in self.kept and self.done[key]:
                self.kept[key], self.done[key] = self.kept[before], self.done[before]

    def _take_up(self, keys: range, carried: bool, most_verified: int | None) -> None:
        """Let the samples `keys` have the responses that earlier launches left unfinished.
        `carried`: their tokens are kept, and at most `most_verified` (None: all) of each, if they
        are verified, not generated again."""
        exact = carried and self._tail.verifies
        noises = self.noises
        prompt, left = None, dict[int, Draw]()
        for key in keys:
            noise = noises[key]
            if noise.prompt is not prompt:
                prompt = noise.prompt
                left = self._left.get(prompt, {})
            draw = left.pop(noise.index, None) if left else None
            if draw is None:
                continue
            if not left:
                del self._left[noise.prompt]
            self.lengths[key] = draw.length
            if draw.attempt != noise.attempt:
                self.noises[key] = SampleId(noise.prompt, noise.index, draw.attempt)
            self._bounds[key] = (0, MAX_LENGTH) if draw.early else (draw.floor, draw.ceiling)
            tokens = self.done[key] if carried else draw.tokens
            self.passed[key] = tokens if carried else 0
            if exact and tokens:
                self.kept[key] = tokens
                self._before[key] = draw, tokens
            if self._tail.carry != "weighted":
                self._verify(key, tokens, self._version - draw.version)
            if exact:
                most = tokens if most_verified is None else min(tokens, most_verified)
                self.passed[key] = num_passed(self.kept.get(key, 0), most)
                self.done[key] = min(self.done[key], most)

    def _verify(self, key: int, num_tokens: int, num_updates: int) -> None:
        """Decide how many of a deferred response's `num_tokens` tokens stay the same under weights
        that are `num_updates` updates newer, and the lengths at which the response then ends."""
        noise, kept = self.noises[key], num_tokens
        noise = SampleId(noise.prompt, noise.index, self.samples[key].attempt)
        if self._mismatch:
            rate = 1 - power(1 - self._mismatch, num_updates)
            kept = self._workload.first_mismatch(noise, num_tokens, rate)
        floor, ceiling = 0, math.inf
        if key in self.kept:
            self.verified.num_tokens += min(kept + 1, num_tokens)
            self.verified.num_mismatches += kept < num_tokens
            self.kept[key] = self.done[key] = kept
            if self._tail.complement:
                floor, grown = self._bounds[key]
                ceiling = math.inf if floor or kept == num_tokens else grown
        redraws = [self.lengths[key]]
        if kept < num_tokens:
            self.noises[key] = noise
            redraws = [self._workload.redrawn(noise, 0, kept)]
        while not floor < redraws[-1] <= ceiling and len(redraws) <= MAX_REDRAWS:
            if redraws[-1] > ceiling:  # given up as soon as that is known
                redraws[-1] = int(ceiling) + 1
            redraws.append(self._workload.redrawn(noise, len(redraws), kept))
        self.lengths[key] = redraws[0]
        if len(redraws) > 1:
            self.redraws_to_come[key] = redraws[:0:-1]

    def _keep(self, command: Defer) -> None:
        """Remember the unfinished responses of prompts that are put off to a later round."""
        if self._tail.selection == "published" or self._workload.trajectories is not None:
            return
        for prompt in command.prompts:
            keys = self._keys_of.get(prompt, ())
            left = {self.noises[key].index: self._left_of(key) for key in keys}
            ceiling = max([draw.floor or draw.tokens for draw in left.values()], default=0)
            for place, draw in left.items():
                draw = structs.replace(draw, ceiling=ceiling, early=prompt in self._early)
                self._left.setdefault(prompt, {})[place] = draw

    def _left_of(self, key: int) -> Draw:
        """What this launch leaves of the response of `key` to the next one."""
        tokens = self.reached.get(key, self.lengths[key])
        draw, carried = self._before.get(key, (None, 0))
        is_same = key in self.reached and 0 < tokens <= self.kept.get(key, 0)
        if draw is not None and is_same and tokens < carried:  # there is more of the same
            floor = min(draw.floor, tokens) if draw.early else draw.floor
            return structs.replace(draw, tokens=carried, floor=floor)
        floor = max(self._bounds.get(key, (0, 0))[0], self.reached.get(key, 0))
        attempt = self.noises[key].attempt
        return Draw(self.lengths[key], tokens, self._version, attempt, floor, ceiling=0)
