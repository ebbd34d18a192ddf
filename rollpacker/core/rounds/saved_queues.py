"""The prompts that wait for a later round, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollpacker.codec import Omitted, part_of, to_plain
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.groups import Waiting
from rollpacker.core.rounds.queues import Queues


class SavedQueues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts left for later rounds, queue by queue, as a checkpoint holds them."""

    queue: list[Waiting]
    tier_queues: list[list[Waiting]]
    draining: bool
    max_response_tokens: int | None = None
    """Cap on responses, in tokens, when the queues were saved. None: no cap, or not known."""
    fresh: Omitted[tuple[Waiting, ...]] = ()
    """Prompts that were fetched, and begun early or not."""
    fetched_all: Omitted[bool] = False


def saved(queues: Queues, config: JobConfig) -> dict[str, Any]:
    """Returns the waiting prompts of `queues` as entries of the job's saved state."""
    entries = SavedQueues(
        queue=list(queues.long),
        tier_queues=[list(waiting) for waiting in queues.tiers],
        draining=queues.draining,
        max_response_tokens=config.max_response_tokens,
        fresh=tuple(queues.fresh),
        fetched_all=queues.fetched_all,
    )
    return to_plain(entries)


def restore(queues: Queues, config: JobConfig, state: Mapping[str, Any]) -> None:
    """Fills `queues`, which are empty, from the job's saved `state`, by the configuration now.
    Prompts of a tier (a further round that keeps the first to finish) that no longer exists wait
    for a long round. If tail batching is off now, deferred prompts come before all fresh ones.
    Tokens of earlier launches are dropped if the configuration keeps none, and responses that a
    smaller limit cut off count as incomplete."""
    entries = part_of(SavedQueues, state)
    before, now = entries.max_response_tokens, config.max_response_tokens
    if before is not None and (now is None or before < now):
        queues.cut_off_at = before
    carries = config.tail_batching.carries
    fresh = [*entries.fresh]
    for queue in (entries.queue, *entries.tier_queues, fresh):
        for place, one in enumerate(queue):
            carried = tuple(c.under(queues.cut_off_at) for c in one.carried) if carries else ()
            queue[place] = one._replace(carried=carried)
    queues.long.extend(entries.queue)
    queues.fresh, queues.fetched_all = fresh, entries.fetched_all
    for tier, waiting in enumerate(entries.tier_queues):
        queues.defer(waiting, tier)
    queues.draining = entries.draining or (queues.without_races and len(queues) > 0)
