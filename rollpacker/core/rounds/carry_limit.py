"""How many carried tokens of a response an engine verifies in passes (`tail_batching.carry: auto`).

Carried tokens are those that an earlier launch of a response left. A carried token spares the
decoding of a new one only if it and all tokens before it come out the same. If tokens come out
differently D tokens apart on average, token number n is reached with a chance of about exp(-n / D).
A token costs an eighth (`CARRIED_COST`) in a pass of what it costs to decode, so a pass pays up to
about 2 D tokens, where one response in eight is still the same. A limit that is twice too large or
too small costs little: from 2 D to 4 D tokens bring at least 85 % of what the best limit brings,
wherever a decoded token costs 8 to 200 times a verified one. So the limit is a power of two. It is
also the rule by length: shorter responses are verified whole.

The limit decides seconds, and nothing else. Tokens beyond it are decoded with the random numbers
that they had and compared with what was carried, so responses and the complement rule
(`tail_batching.complement`) are the same, token for token, as if all had been verified. No response
gets a second chance to be short or long. The limit follows from counts and not from a clock, so a
run repeats.

A run begins without a limit, and gets one when enough tokens came out differently. At least
`LEAST_VERIFIED` tokens are always verified. They cost about as much as two decoded tokens, and show
when tokens stay the same again, which is how a limit rises and goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.fleet.routing import CARRIED_COST
from rollpacker.core.lifecycle import SampleState
from rollpacker.core.rounds.groups import Group

PAYING_DISTANCES = 2
"""Number of mean distances D between tokens that come out differently, up to which verifying pays:
the logarithm of `CARRIED_COST` in whole numbers, which are the same on every processor."""
assert 2.7**PAYING_DISTANCES < CARRIED_COST < 2.8 ** (PAYING_DISTANCES + 1)
LEAST_VERIFIED = 16
"""Least number of carried tokens of a response that are verified in any case."""
ENOUGH_MISMATCHES = 8
"""Number of tokens that must have come out differently before there is a limit."""
MAX_ROUNDS = 8
"""Number of the last rounds with carried tokens whose counts the limit follows."""
UNBOUNDED = 1 << 20
"""Limit, in tokens, that counts as none where responses have no longest length."""


class CarriedCounts(NamedTuple):
    """Counts of tokens that earlier launches left, of samples whose tokens were compared with those
    that the current weights draw."""

    tokens: int = 0
    same: int = 0
    """Number of these tokens before each sample's first that came out differently."""
    verified: int = 0
    """Number of these tokens that engines verified in passes, up to each sample's first that came
    out differently, which is included."""
    different: int = 0
    """Number of samples in which a token came out differently among those verified in passes."""


def counts_of(groups: Iterable[Group]) -> CarriedCounts:
    """Return what came of the tokens that the samples of these groups began with, so far as it is
    known."""
    tokens = same = verified = different = 0
    for group in groups:
        for index in range(len(group.carried) and len(group.samples)):
            kept, carried = group.kept_tokens[index], group.carried_at(index).tokens
            if kept is None or group.states[index] is SampleState.FAILED:
                continue
            most = carried if group.most_verified is None else min(carried, group.most_verified)
            tokens += carried
            same += kept
            verified += min(kept + 1, most)
            different += kept < most
    return CarriedCounts(tokens, same, verified, different)


class CarryLimit:
    """Follows which carried tokens (left by an earlier launch) come out the same, and decides how
    many of a response are verified in passes."""

    def __init__(self, longest: int | None, *, follows: bool) -> None:
        """`longest`: most tokens of a response; None: no bound."""
        self.follows = follows
        """Whether this run has such limits at all."""
        self.most_verified: int | None = None
        """Most carried tokens of a response that engines verify in passes. None: all of them."""
        self._longest = longest or UNBOUNDED
        self._seen: deque[tuple[int, int]] = deque(maxlen=MAX_ROUNDS)
        """Of each of the last rounds: verified tokens, and those of them that came out
        differently."""

    def observe(self, carried: CarriedCounts) -> None:
        """Records what came of a round's carried tokens."""
        if not carried.verified:
            return
        self._seen.append((carried.verified, carried.different))
        verified, different = (sum(counts) for counts in zip(*self._seen, strict=True))
        now = self.most_verified
        if now is None and different < ENOUGH_MISMATCHES:
            return
        paying = PAYING_DISTANCES * verified // max(different, 1)
        if now is None or not now // 4 <= paying < 2 * now:
            limit = max(LEAST_VERIFIED, 1 << paying.bit_length())
            self.most_verified = limit if limit < self._longest else None

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The limit and what it follows, as an entry of the job's saved state. Empty if this run
        has no limits."""
        if not self.follows:
            return {}
        saved = SavedCarryLimit(most_verified=self.most_verified, seen=list(self._seen))
        return {"carry_limit": to_plain(saved)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` saved, if this run has limits and the one before had them."""
        if self.follows and "carry_limit" in state:
            saved = from_plain(SavedCarryLimit, state["carry_limit"])
            self.most_verified = saved.most_verified
            self._seen.extend(saved.seen)


class SavedCarryLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a `CarryLimit` in a checkpoint."""

    most_verified: int | None
    seen: list[tuple[int, int]]
