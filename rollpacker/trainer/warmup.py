"""Supervised fine-tuning before reinforcement learning. It has stages, each a number of steps on
its own file of prompts and completions, or of chat messages. The loss is the mean over the batch's
completion tokens, the end token included."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollpacker.trainer.batches import Batcher
from rollpacker.trainer.checkpoint import save_model
from rollpacker.trainer.micro_batch import Row, row_length
from rollpacker.trainer.model import character_tokenizer, load_model, new_model
from rollpacker.trainer.optimizer import MasterOptimizer
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.warmup_output import WarmupError, check_output
from rollpacker.trainer.warmup_rows import RowParser, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollpacker.config.warmup import WarmupConfig, WarmupStage

BETAS = (0.9, 0.95)
EPS = 1e-8
MICRO_BATCH_TOKENS = 4096
SMALL_MODEL_PARAMETERS = 20_000_000
"""Number of a model's parameters below which one thread is at least as fast as several."""

LOSS_WINDOW = 20
"""Number of steps at a stage's end whose mean loss must not exceed the stage's `max_loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupProgress:
    """Progress of a warm-up (supervised fine-tuning), which the callback gets after each step."""

    stage: int
    """Number of the warm-up's present stage, counted from 0."""
    num_stages: int
    step: int
    """Number of steps done in the present stage."""
    num_steps: int
    loss: float
    """Mean loss of this step's completion tokens."""
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupResult:
    output: Path
    num_parameters: int
    losses: tuple[float, ...]
    """For each stage, the mean loss of its last steps (at most `LOSS_WINDOW` of them)."""
    trained_tokens: int
    """Number of completion tokens trained on; a token trained on twice counts twice."""
    elapsed_s: float


def run_warmup(
    config: WarmupConfig,
    on_progress: Callable[[WarmupProgress], None] | None = None,
    *,
    overwrite: bool = False,
) -> WarmupResult:
    """Run all stages of supervised fine-tuning, and write the model to `config.output`. This folder
    must not exist or must be empty; with `overwrite` it may be a model's folder, which is replaced
    at the end. The same config gives the same weights, bit for bit, on the same machine. Raises
    `WarmupError` (for bad rows, with file and line; a loss above `max_loss`; an output that is in
    the way) and `ModelError` if the model cannot be loaded or built."""
    started = time.monotonic()
    output = Path(config.output).expanduser()
    check_output(output, config, overwrite)
    model, tokenizer = _start(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    if config.threads != "auto" or num_parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1 if config.threads == "auto" else config.threads)
    parser = RowParser(
        tokenizer,
        max_tokens=getattr(model.config, "max_position_embeddings", None),
        chat_options=(config.model and config.model.chat_template_kwargs) or {},
    )
    stages = [
        (stage, rows_of(stage, (config.seed, index), parser))
        for index, stage in enumerate(config.stages)
    ]
    losses, trained_tokens = [], 0
    for index, (stage, rows) in enumerate(stages):
        recent: list[float] = []
        steps = _run_stage(model, tokenizer, stage, rows, (config.seed, index))
        for step, (loss, tokens) in enumerate(steps):
            recent = [*recent[1 - LOSS_WINDOW :], loss]
            trained_tokens += tokens
            if on_progress is not None:
                on_progress(
                    WarmupProgress(
                        stage=index,
                        num_stages=len(stages),
                        step=step + 1,
                        num_steps=stage.steps,
                        loss=loss,
                        elapsed_s=time.monotonic() - started,
                    )
                )
        losses.append(sum(recent) / len(recent))
        _check_loss(losses[-1], stage, index)
    _stop_at(model, {row[1][-1] for _, rows in stages for row in rows} - {tokenizer.eos_token_id})
    _write(model, tokenizer, output)
    return WarmupResult(
        output=output,
        num_parameters=num_parameters,
        losses=tuple(losses),
        trained_tokens=trained_tokens,
        elapsed_s=time.monotonic() - started,
    )


def _start(config: WarmupConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if config.model is not None:
        loaded = load_model(config.model)
        return loaded.model, loaded.tokenizer
    assert config.architecture is not None and config.alphabet is not None
    tokenizer = character_tokenizer(config.alphabet, config.markers, config.chat_template)
    return new_model(config.architecture, tokenizer, config.seed), tokenizer


def _run_stage(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: WarmupStage,
    rows: Sequence[Row],
    seed: tuple[int, int],
) -> Iterator[tuple[float, int]]:
    """Train for one stage, in batches that `seed` draws from `rows`. Yields after each step its
    mean loss and its number of completion tokens."""
    optimizer = MasterOptimizer(model.named_parameters(), betas=BETAS, eps=EPS, weight_decay=0.0)
    order = _shuffled_forever(len(rows), seed)
    policy = Policy(model)
    batcher = Batcher(
        model,
        layout="auto",
        max_tokens=MICRO_BATCH_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        device=model.device,
    )
    with batcher.attention():
        for step in range(stage.steps):
            batch = [rows[next(order)] for _ in range(stage.batch_size)]
            num_targets = sum(row.num_targets for row in batch)
            loss = 0.0
            for places in batcher.plan([row_length(row) for row in batch]):
                log_probs, _ = policy(batcher.batch([batch[place] for place in places]), 1.0)
                share = -log_probs.sum() / num_targets
                share.backward()
                loss += share.item()
            optimizer.step(_learning_rate(step, stage), stage.max_grad_norm)
            yield loss, num_targets


def _learning_rate(step: int, stage: WarmupStage) -> float:
    """Return the learning rate of a step (from 0). It rises linearly over the warm-up steps, then
    falls linearly; at the last step it is `final_learning_rate_ratio` of the stage's rate."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / (stage.warmup_steps + 1)
    span = max(stage.steps - 1 - stage.warmup_steps, 1)
    progress = min((step - stage.warmup_steps) / span, 1.0)
    return stage.learning_rate * (1 - progress * (1 - stage.final_learning_rate_ratio))


def _shuffled_forever(count: int, seed: tuple[int, int]) -> Iterator[int]:
    """Yield row indices without end: all of them in a random order, then in another, and so on."""
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(count).tolist()


def _check_loss(loss: float, stage: WarmupStage, index: int) -> None:
    if not np.isfinite(loss):
        raise WarmupError(f"stage {index + 1} ({stage.source}): the loss is {loss}; lower the rate")
    if stage.max_loss is not None and loss > stage.max_loss:
        raise WarmupError(
            f"stage {index + 1} ({stage.source}) ended with a mean loss of {loss:.3f} over its "
            f"last {min(LOSS_WINDOW, stage.steps)} steps, above max_loss={stage.max_loss:g}: train "
            "longer (steps), change learning_rate or seed, or raise max_loss"
        )


def _stop_at(model: PreTrainedModel, tokens: set[int]) -> None:
    """Add `tokens`, with which trained rows end, to the end tokens in the model's generation
    config, at which its responses stop."""
    generation = model.generation_config
    if not tokens or generation is None:
        return
    configured: Any = generation.eos_token_id
    known = configured if isinstance(configured, list) else [configured]
    ends = {*tokens, *(token for token in known if token is not None)}
    generation.eos_token_id = sorted(ends)


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Write the model to a folder beside `output`, then rename this folder to `output`, so that
    `output` never holds an incomplete model."""
    unfinished = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    try:
        save_model(model, tokenizer, unfinished)
        if (output / "config.json").is_file():
            shutil.rmtree(output)
        unfinished.replace(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
