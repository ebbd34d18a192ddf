"""Builds what a checkpoint restores besides weights: the job (the core's state), the place in the
data, and the tokens generated so far for prompts put off to later steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollpacker.core.job.job import Job
from rollpacker.core.job.pooled_job import make_job, restore_job
from rollpacker.data.cursor import PromptCursor
from rollpacker.data.dataset import TRAIN
from rollpacker.run.parts.environments import sources_of
from rollpacker.run.parts.rewards import reward_kinds
from rollpacker.run.ports.carried import CarriedTokens, read_carried

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.folder.checkpoint import Checkpoint
    from rollpacker.run.parts.policy import LoadedPolicy


def build_job(
    config: RunConfig,
    policy: LoadedPolicy,
    cursor: PromptCursor,
    checkpoint: Checkpoint | None,
    *,
    shares_pools: bool,
) -> Job:
    """Returns the job (the core's state): a new one, or the checkpoint's. `shares_pools`: whether
    other jobs use its devices in turn."""
    turns, sources = policy.inputs.turns, sources_of(config, policy.train_prompts)
    known = config.job(
        prompt_tokens=policy.mean_prompt_tokens,
        reward_kinds=reward_kinds(policy.reward),
        acting=None if turns is None else turns.acting(sources),
    )
    known = replace(known, shares_pools=shares_pools)
    if checkpoint is None:
        return make_job(known)
    return restore_job(known, checkpoint.state["job"], data_ended=cursor.ended)


def build_cursor(
    config: RunConfig, policy: LoadedPolicy, checkpoint: Checkpoint | None = None
) -> PromptCursor:
    """Returns the cursor, which deals out the prompts of `data.train` in order: from the start, or
    from the place that the checkpoint records."""
    rows = policy.train_prompts.rows
    cursor = PromptCursor(
        TRAIN,
        len(rows),
        config.seed,
        config.data.shuffle,
        config.train.epochs,
        sources=[row.task or TRAIN for row in rows] if config.routed else None,
    )
    if checkpoint is not None:
        cursor.restore(checkpoint.state["cursor"])
    return cursor


def build_carried(
    config: RunConfig, checkpoint: Checkpoint | None, job: Job, tokenizer: str
) -> CarriedTokens:
    """Returns the store of tokens generated so far for prompts put off to later steps, as the
    checkpoint has them. It is empty without a checkpoint, and with `tail_batching.carry` off."""
    tail = config.tail
    if checkpoint is None or not tail.carries:
        return CarriedTokens(tail)
    kept = read_carried(checkpoint.folder, tokenizer, job.queues.carried())
    return CarriedTokens(tail, kept, cut_off_at=job.queues.cut_off_at)
