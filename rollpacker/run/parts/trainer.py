"""Builds the trainer, in this process or in processes of its own, and its algorithm."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollpacker.config.schema import RunConfig
    from rollpacker.run.folder.checkpoint import Checkpoint
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.policy import LoadedPolicy
    from rollpacker.trainer.launch import Ranks
    from rollpacker.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def check_algorithm(config: RunConfig) -> None:
    """Try the user's own advantage and loss functions, if the config names any, and check that
    bitsandbytes is installed if model or optimizer need it. Raises `ValueError`."""
    if config.model.quantization is not None or config.train.optimizer == "adamw_8bit":
        from rollpacker.imports import require

        require("bitsandbytes", extra="quantized", what="model.quantization and adamw_8bit")
    algorithm = config.algorithm
    algorithm.reload_own()
    if algorithm.own_advantages is None and algorithm.own_loss is None:
        return
    from rollpacker.algo.own_check import check_own, grouped_advantages

    size = config.rollout.samples_per_prompt
    check_own(algorithm, samples_per_prompt=size)
    own = algorithm.own_advantages
    if own is None or not config.stream_trainer.enabled:
        return
    if not grouped_advantages(algorithm, samples_per_prompt=size):
        raise ValueError(
            f"{own.said_by} compares the groups of a step, which are not all known when a streamed "
            "gradient begins: switch stream_trainer.enabled off, or compare samples of one group"
        )


def start_trainer_processes(config: RunConfig, hosts: Hosts | None = None) -> Ranks | None:
    """Start the trainer's processes on `hosts` (None: on this machine); they import their libraries
    in parallel with this process. Returns None if the trainer has no processes of its own."""
    if config.train.processes is None:
        return None
    from rollpacker.trainer.launch import Ranks

    if hosts is None or hosts.plan is None:
        return Ranks(config.train.processes, start_s=config.deadlines.start_s)
    return Ranks(
        config.train.processes, hosts.of_ranks(), hosts.address, start_s=config.deadlines.start_s
    )


def build_trainer(
    config: RunConfig, policy: LoadedPolicy, ranks: Ranks | None, folder: Path | None = None
) -> Trainer:
    """Returns the trainer of the config. With an engine in this process and no LoRA, it trains the
    engine's own weights; else it has weights of its own, here or in its processes (`ranks`). With
    LoRA the engine gets a copy of the adapter. `folder`: the run's folder."""
    from rollpacker.pipeline.stages.check import read_order, with_links_of
    from rollpacker.trainer.model import model_device
    from rollpacker.trainer.process_trainer import ProcessTrainer
    from rollpacker.trainer.setup import LearnerSetup, build_learner
    from rollpacker.trainer.torch_trainer import TorchTrainer
    from rollpacker.trainer.training_memory import micro_batch_choices

    device = model_device(config.model.device).type
    setup = LearnerSetup(
        model=config.model,
        train=with_links_of(config.train, device),
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        total_steps=config.train.steps,
        threads=max(policy.threads // (config.train.processes or 1), 1),
        order_csv=read_order(config),
        micro_batch_choices=micro_batch_choices(config, on_cuda=device == "cuda"),
    )
    if config.train.critic.path is not None and not config.algorithm.needs_critic:
        logger.warning(
            "train.critic.path is set and does nothing: algorithm.name=%s trains no critic; "
            "algorithm.name=ppo does",
            config.algorithm.name,
        )
    if config.model.quantization is not None:
        logger.info(
            "the base is kept in 4 bits; a checkpoint's adapter/ goes beside it, and its model/ is "
            "the merged model in %s, made of what the codes stand for",
            str(policy.loaded.dtype).removeprefix("torch."),
        )
    loaded = policy.loaded
    if ranks is None and config.engines_are_apart:
        learner = build_learner(setup, model=loaded.model, tokenizer=loaded.tokenizer)
        text = _compared_text(config, policy)
        return TorchTrainer(learner, in_place=False, shared=True, text=text, threads=policy.threads)
    give_adapter(config, loaded.model)
    if ranks is not None:
        named = loaded.model.named_parameters()
        weights = [(n, p) for n, p in named if p.requires_grad]
        text = _compared_text(config, policy)
        return ProcessTrainer(setup, ranks, weights, journal_in=folder, text=text)
    in_place = config.model.lora is None
    learner = (
        build_learner(setup, model=loaded.model, tokenizer=loaded.tokenizer)
        if in_place
        else build_learner(setup)
    )
    return TorchTrainer(learner, in_place=in_place, threads=policy.threads)


def _compared_text(config: RunConfig, policy: LoadedPolicy) -> tuple[int, ...]:
    """Returns tokens of training prompts, of which engines must give the trainer's log-probs. Empty
    for engines that decode with the trainer's own code: a hash of their weights is enough."""
    from rollpacker.engines.table import BRING_THEIR_OWN_MODEL
    from rollpacker.weights.comparison import text_of

    if config.rollout.engine.name not in BRING_THEIR_OWN_MODEL:
        return ()
    text_config = policy.loaded.model.config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    return text_of((row.tokens for row in policy.train_prompts.rows), context)


def give_adapter(config: RunConfig, model: PreTrainedModel) -> None:
    """Add the config's LoRA adapter, if it has any, to the model of an engine in this process. Must
    be called before the engine is made."""
    from rollpacker.trainer.lora import add_adapter, has_adapter

    if config.model.lora is not None and not has_adapter(model):
        add_adapter(model, config.model.lora)


def build_samples_function(config: RunConfig) -> Any:
    from rollpacker.trainer.samples import build_train_samples

    return partial(
        build_train_samples,
        config=config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def load_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load the checkpoint's state into the trainer. Raises `RunError` if it does not fit."""
    from rollpacker.run.errors import RunError
    from rollpacker.trainer.trainer import TrainerStateError

    try:
        trainer.load(checkpoint.folder)
    except TrainerStateError as error:
        raise RunError(
            f"{error}. The run cannot go on from there (`--overwrite` begins anew)"
        ) from error
