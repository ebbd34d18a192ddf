"""Whether rounds race at all, where carried tokens are to pay (`tail_batching.carry: auto`).

A race defers long responses and carries their tokens. If most of these come out differently under
newer weights, a deferred response is generated twice, and again whenever it would end before the
place where it was cut off (`tail_batching.complement`). Racing then takes longer than waiting for
every response. Carrying nothing while racing on would be no way out: without the rule a deferred
response has a second chance to be short, and with it, it takes as long. So a run stops deferring.

    racing    as without this rule, and as a run begins. If too few carried tokens come out the
              same, a trial begins
    trial     a few rounds that wait for all, after those in which what was deferred comes to its
              end, which count as races: a pool puts most of its seconds off. If waiting takes
              clearly fewer seconds per prompt, the run waits, else it races on for many rounds
    waiting   every round waits for all. Now and then comes a probe
    probing   one race
    judging   what it deferred comes back: if tokens come out differently less than half as often
              as when races were given up, the run races again, else it waits

When races stop, the deferred prompts are part of the next round beside fresh ones, so every prompt
is trained on once, with its own responses, whichever way is taken. Seconds are those of the event
log: a replay decides the same, but a run in which trials take place does not repeat bit by bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.rounds.carry_limit import CarriedCounts

State = Literal["racing", "trial", "waiting", "probing", "judging"]

ENOUGH_SAME = 0.95
"""Share of carried tokens that come out the same, from which on no trial is worth its seconds."""
ENOUGH_DIFFERENT = 8
"""Number of responses in which a carried token must have come out differently before a trial."""
TRIAL_AFTER = 3
"""Least number of rounds of racing before a trial: one turn of a queue with the default factor."""
TRIAL_ROUNDS = 3
"""Number of rounds of a trial whose seconds count."""
CLEARLY_FASTER = 0.95
"""Seconds per prompt of rounds that wait for all, over those of races, from which on they win. The
seconds of a few rounds vary by some percent."""
RACES_AT_LEAST = 64
"""Number of rounds of racing after a trial that found races faster, before the next trial."""
PROBE_EVERY = 64
"""Number of rounds that wait for all, between two probes."""
MAX_ROUNDS = 12
"""Number of the last rounds whose seconds and tokens count."""


class Pace(NamedTuple):
    """Rounds of one way to generate: how many prompts they should bring, and their seconds."""

    prompts: int
    seconds: float


class Racing:
    """State machine that decides, round by round, whether rounds race or wait for all."""

    def __init__(self, *, follows: bool) -> None:
        self.follows = follows
        """Whether this run may stop racing. False: every round races."""
        self.state: State = "racing"
        self.rounds_left = 0
        """Number of rounds until the next trial may begin (racing), until the trial is over, or
        until the next probe (waiting)."""
        self._races: deque[Pace] = deque(maxlen=MAX_ROUNDS)
        self._waits: deque[Pace] = deque(maxlen=MAX_ROUNDS)
        self._carried: deque[CarriedCounts] = deque(maxlen=MAX_ROUNDS)
        """What came of the tokens that earlier launches left, in the last rounds with some."""

    @property
    def races(self) -> bool:
        """Whether the next round of fresh prompts launches more of them than it needs."""
        return self.state in ("racing", "probing")

    def observe(self, num_prompts: int, seconds: float, carried: CarriedCounts) -> None:
        """Records a round that was to bring `num_prompts` prompts and generated for `seconds`, and
        what came of its carried tokens."""
        pace = Pace(num_prompts, seconds)
        if self.state == "judging":
            self._judge(carried)
            return
        if carried.tokens:
            self._carried.append(carried)
        self.rounds_left -= 1
        if self.state == "racing":
            self._races.append(pace)
            if self.rounds_left <= 0 and self._is_doubtful():
                self._enter("trial", TRIAL_ROUNDS)
        elif self.state == "trial":
            if carried.tokens:  # what races put off is part of what they take
                self._races.append(pace)
                self.rounds_left += 1
                return
            self._waits.append(pace)
            if not self.rounds_left:
                self._decide()
        elif self.state == "waiting":
            if self.rounds_left <= 0:
                self._enter("probing", 0)
        else:
            self._enter("judging", 0)

    def _enter(self, state: State, num_rounds: int) -> None:
        self.state, self.rounds_left = state, num_rounds

    def _is_doubtful(self) -> bool:
        seen = total(self._carried)
        is_known = len(self._races) >= TRIAL_AFTER and seen.different >= ENOUGH_DIFFERENT
        return is_known and seen.same < ENOUGH_SAME * seen.tokens

    def _decide(self) -> None:
        """Ends a trial: waits from now on if that took clearly fewer seconds per prompt."""
        racing, waiting = (
            sum(pace.seconds for pace in paces) / sum(pace.prompts for pace in paces)
            for paces in (self._races, self._waits)
        )
        self._races.clear()
        self._waits.clear()
        if waiting > CLEARLY_FASTER * racing:
            self._carried.clear()
            self._enter("racing", RACES_AT_LEAST)
        else:
            self._enter("waiting", PROBE_EVERY)

    def _judge(self, carried: CarriedCounts) -> None:
        """Ends a probe, whose deferred prompts were part of the round that is over."""
        before = total(self._carried)
        if 2 * carried.different * before.verified < before.different * carried.verified:
            self._carried.clear()
            self._enter("racing", 0)
        else:
            self._enter("waiting", PROBE_EVERY)

    # -- checkpoints -------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """The state for a checkpoint. Empty if this run never stops racing."""
        if not self.follows:
            return {}
        saved = SavedRacing(
            state=self.state,
            rounds_left=self.rounds_left,
            races=list(self._races),
            waits=list(self._waits),
            carried=list(self._carried),
        )
        return {"racing": to_plain(saved)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `saved` gave, if this run may stop racing and the one before might."""
        if self.follows and "racing" in state:
            saved = from_plain(SavedRacing, state["racing"])
            self._enter(saved.state, saved.rounds_left)
            self._races.extend(saved.races)
            self._waits.extend(saved.waits)
            self._carried.extend(saved.carried)


class SavedRacing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a `Racing` in a checkpoint."""

    state: State
    rounds_left: int
    races: list[Pace]
    waits: list[Pace]
    carried: list[CarriedCounts]


def total(counts: deque[CarriedCounts]) -> CarriedCounts:
    return CarriedCounts(*map(sum, zip(*counts, strict=True))) if counts else CarriedCounts()
