"""What a checkpoint holds of a job, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollpacker.codec import to_plain
from rollpacker.core.ledger import Ledger
from rollpacker.core.progress import Progress

if TYPE_CHECKING:
    from rollpacker.core.job import Job


def saved(job: Job) -> dict[str, Any]:
    """The state of all parts, as JSON has it. See `Job.state`."""
    return {
        **to_plain(job.progress),
        **job.queues.state(),
        **job.lengths.state(),
        "rewards": job.rewards.state(),
        "parallelism": job.parallelism.state(),
        "stream": job.stream.state(),
        "num_late": dict(sorted(job.num_late.items())),
        "ledger": job.ledger.state(),
        **({} if job.acting is None else {"acting": job.acting.state()}),
        **({} if job.fleet is None else {"fleet": job.fleet.state()}),
    }


def restore_parts(job: Job, state: Mapping[str, Any]) -> None:
    """Bring the parts of a new job to it. See `Job.restore`."""
    job.progress = Progress.restore(state)
    job.queues.restore(state)
    job.lengths.restore(state)
    job.rewards.restore(state["rewards"])
    if job.acting is not None and "acting" in state:
        job.acting.restore(state["acting"])
    job.parallelism.restore(state["parallelism"])
    job.stream.restore(state["stream"])
    job.num_late.update(state["num_late"])
    if job.fleet is not None and "fleet" in state:
        job.fleet.restore(state["fleet"])
    job.ledger = Ledger.restore(state["ledger"])
