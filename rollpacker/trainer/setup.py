"""Builds a learner from its settings, in the process where it will work. Imports torch only
then."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.trainer.trainer import ModelConfig, TrainConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollpacker.trainer.learner import Learner
    from rollpacker.trainer.sharding import Shards


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """All settings of a learner, in a form that can be sent to the trainer's processes."""

    model: ModelConfig
    train: TrainConfig
    algorithm: AlgorithmConfig
    temperature: float
    """The sampling temperature, at which log-probs are taken."""
    total_steps: int | None
    """Number of the step with which learning-rate schedules end. None: it is not known, which only
    the constant schedule allows."""
    threads: int | None = None
    """Number of torch's threads on a CPU. None: torch's default number."""
    order_csv: str | None = None
    """Contents of the CSV file that `train.pipeline.order` names. None: it names no file."""
    micro_batch_choices: tuple[tuple[int, int], ...] = ()
    """Numbers of tokens of a micro-batch, each with the bytes that a rank then takes, from which
    ranks choose by their free memory. Empty: `train` says the number."""

    def device(self) -> torch.device:
        """The torch device on which a learner built in this process computes."""
        from rollpacker.trainer.model import model_device

        return model_device(self.model.device)


def build_learner(
    setup: LearnerSetup,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    shards: Shards | None = None,
) -> Learner:
    """Load the models and build a learner. A given `model` (with its `tokenizer`) is trained in
    place; None: it is loaded. `shards` are the ranks that share the model; None: there is one
    process. Raises `ModelError` or `ValueError` for a wrong model, teacher or setting."""
    from rollpacker.trainer.saved_weights import reading_on_call

    setup = replace(setup, train=_with_micro_batches(setup, shards))
    with reading_on_call():  # for what the models are tried with before they are sharded
        return _learner(setup, model, tokenizer, shards)


def _with_micro_batches(setup: LearnerSetup, shards: Shards | None) -> TrainConfig:
    """Return `setup.train` with the size of micro-batches for which all ranks have memory. Ranks
    decide this once, together, before they load anything."""
    from rollpacker.trainer.memory import room_bytes
    from rollpacker.trainer.sharding import max_over_ranks
    from rollpacker.trainer.training_memory import GIB, chosen_tokens

    if not setup.micro_batch_choices:
        return setup.train
    device = setup.device() if shards is None else shards.device
    room = -max_over_ranks([-room_bytes(device)], shards)[0]
    tokens = chosen_tokens(setup.micro_batch_choices, room)
    if shards is None or shards.rank == 0:
        message = "train.micro_batch_tokens=auto: %d tokens, for the %.1f GiB that a rank has"
        logger.info(message, tokens, room / GIB)
    return replace(setup.train, micro_batch_tokens=tokens)


def _learner(
    setup: LearnerSetup,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    shards: Shards | None,
) -> Learner:
    from rollpacker.trainer.critic import from_policy_model, load_critic
    from rollpacker.trainer.frozen import check_same_vocabulary, load_teacher
    from rollpacker.trainer.learner import Learner
    from rollpacker.trainer.lora import add_adapter
    from rollpacker.trainer.model import check_padding, load_model, load_tokenizer

    _ = setup.algorithm.own_loss  # what cannot be had in this process is said before it loads
    later = shards is not None
    if model is None:
        loaded = load_model(setup.model, weights_later=later)
        model, tokenizer = loaded.model, loaded.tokenizer
        if later:
            check_padding(model, setup.model.path)
    assert tokenizer is not None
    critic = None
    if setup.algorithm.needs_critic:
        path = setup.train.critic.path
        if path is None:
            critic = from_policy_model(model)
        else:
            name = f"train.critic.path {path}"
            check_same_vocabulary(
                load_tokenizer(path, setting="train.critic.path"), tokenizer, name
            )
            critic = load_critic(setup.model, path, weights_later=later)
    teacher = None
    if setup.algorithm.needs_teacher:
        assert setup.model.teacher is not None
        teacher = load_teacher(setup.model.teacher, model=model, tokenizer=tokenizer)
    if setup.model.lora is not None:
        model = add_adapter(model, setup.model.lora)
    stage = None
    if shards is not None and shards.pipelines is not None:
        from rollpacker.pipeline.stages.connect import connected_stage

        stage = connected_stage(shards, setup.train.pipeline, setup.order_csv)
    return Learner(
        model=model,
        tokenizer=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
        config=setup.train,
        algorithm=setup.algorithm,
        temperature=setup.temperature,
        total_steps=setup.total_steps,
        gradient_checkpointing=setup.model.gradient_checkpointing,
        critic=critic,
        teacher=teacher,
        shards=shards,
        stage=stage,
    )
