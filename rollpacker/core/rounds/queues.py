"""The prompts that wait for a round, and which round is next. There are these queues:

fresh:    prompts fetched for the next rounds, and part of none; with
          `tail_batching.look_ahead` some may have been begun early (`ahead.py`);
tiers:    deferred, and to be launched in a further round (a "cascade") that keeps the first
          to finish; one queue for each of the `tail_batching.tiers`;
long:     deferred, and to be awaited by a long round: first in, first out; with
          `tail_batching.stragglers: pool`, to be part of the next short round instead.

The next round is the first of these that is due:

a long round:    if the long queue fills one;
a flush:         if an epoch or the run ends, with whatever the long queue holds;
a cascade:       if a tier's queue fills one, the last tier first;
fresh prompts:   if nothing else is due; with the pool, deferred ones are launched with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import PromptId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.groups import RoundPlan, Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRound:
    """Kind and prompts of the next round, and the number of groups that it should bring."""

    kind: RoundKind
    prompts: tuple[Waiting, ...]
    num_samples: int
    """Number of samples launched per prompt."""
    prompts_needed: int
    """Number of prompts that must have finished for the round to be over."""
    defers_to: int = 0
    """Number, from 0, of the tier (a further round that keeps the first to finish) whose queue
    takes prompts that this one leaves unfinished. A number beyond the last tier: the long queue."""

    def plan(
        self,
        config: JobConfig,
        *,
        number: int,
        version: int,
        tensor_parallel: int,
        most_verified: int | None,
    ) -> RoundPlan:
        tail = config.tail_batching
        return RoundPlan(
            number=number,
            kind=self.kind,
            version=version,
            prompts=self.prompts,
            num_samples=self.num_samples,
            samples_needed=config.samples_per_prompt,
            prompts_needed=self.prompts_needed,
            # Without overlap no verdict is there before the last response is.
            race=tail.race if config.rewards.overlap else "generated",
            tail=tail,
            max_retries=config.max_retries,
            tensor_parallel=tensor_parallel,
            speculate=self.kind in config.speculate,
            min_verdicts=config.min_verdicts,
            most_verified=most_verified,
            defers_to=self.defers_to,
        )


class Queues:
    def __init__(self, config: JobConfig) -> None:
        tail = config.tail_batching
        self.prompts_per_step = config.prompts_per_step
        self.samples_per_prompt = config.samples_per_prompt
        self.races = tuple(tier.factors for tier in tail.tiers if tail.enabled)
        """Factors (launched over needed prompts and samples) of each tier: a further round of
        unfinished prompts that keeps the first to finish."""
        self.long: deque[Waiting] = deque()
        self.tiers: tuple[deque[Waiting], ...] = tuple(deque() for _ in self.races)
        self.fresh: list[Waiting] = []
        self.fetched_all = False
        """True if an epoch or the data ended with prompts that are still in `fresh`."""
        self.draining = False
        """True while an epoch or the run ends: nothing is fetched before the queues are empty."""
        self.without_races = not tail.enabled
        self.all_awaited = False
        """Whether rounds of fresh prompts wait for all at present, so that deferred prompts join
        them."""
        self._pooled = tail.pooled
        self.cut_off_at: int | None = None
        """Former limit on responses, in tokens, if it was raised at a resume. None: it was not."""

    def __len__(self) -> int:
        """Number of deferred prompts (left unfinished by an earlier round), in all queues."""
        return len(self.long) + sum(map(len, self.tiers))

    def next_round(self, *, ending: bool) -> NextRound | None:
        """The next round, if it is one of prompts that earlier rounds left unfinished. None: a
        round of fresh prompts is next. `ending`: the run launches no more fresh prompts."""
        self.draining = ending or (self.draining and len(self) > 0)
        if self.draining or self.all_awaited:
            for waiting in self.tiers:
                self.long.extend(waiting)
                waiting.clear()
        if len(self.long) >= self.prompts_per_step and (self.draining or not self._pooled):
            return self._awaited(RoundKind.LONG)
        if self.draining and self.long:
            return self._awaited(RoundKind.FLUSH)
        for tier in reversed(range(len(self.tiers))):
            if len(self.tiers[tier]) >= self.races[tier].num_prompts(self.prompts_per_step):
                return self._cascade(tier)
        return None

    def num_racing(self, most: int) -> int:
        """Number of prompts, at most `most`, that earlier rounds left unfinished and that the next
        round launches beside fresh ones."""
        joins = (self._pooled or self.all_awaited) and not self.draining
        return min(len(self.long), most) if joins else 0

    def take_racing(self, most: int) -> tuple[Waiting, ...]:
        """Removes and returns the prompts of the next short round, at most `most`: where they are
        launched beside fresh ones, the deferred, and then the fetched."""
        deferred = _first(self.long, self.num_racing(most))
        return deferred + self.take_fresh(most - len(deferred))

    def take_fresh(self, most: int) -> tuple[Waiting, ...]:
        """Removes and returns the first `most` of the fetched prompts."""
        taken, self.fresh = self.fresh[:most], self.fresh[most:]
        return tuple(taken)

    def waiting(self) -> Iterator[Waiting]:
        """Yields every prompt that waits for a round, in whatever queue."""
        return chain(self.long, *self.tiers, self.fresh)

    def carried(self) -> dict[PromptId, list[int]]:
        """Number of tokens that earlier launches left of each response, by prompt and index."""
        return {one.prompt: [kept.tokens for kept in one.carried] for one in self.waiting()}

    def defer(self, prompts: Iterable[Waiting], tier: int) -> None:
        """Adds prompts to the queue of this tier (a further round that keeps the first to finish),
        or, if its number is beyond the last, to that of the long rounds."""
        (self.tiers[tier] if tier < len(self.tiers) else self.long).extend(prompts)

    def _awaited(self, kind: RoundKind) -> NextRound:
        count = min(self.prompts_per_step, len(self.long))
        return NextRound(
            kind=kind,
            prompts=_first(self.long, count),
            num_samples=self.samples_per_prompt,
            prompts_needed=count,
            defers_to=len(self.tiers),
        )

    def _cascade(self, tier: int) -> NextRound:
        race = self.races[tier]
        return NextRound(
            kind=RoundKind.CASCADE,
            prompts=_first(self.tiers[tier], race.num_prompts(self.prompts_per_step)),
            num_samples=race.num_samples(self.samples_per_prompt),
            prompts_needed=self.prompts_per_step,
            defers_to=tier + 1,
        )


def _first(queue: deque[Waiting], count: int) -> tuple[Waiting, ...]:
    return tuple([queue.popleft() for _ in range(count)])
