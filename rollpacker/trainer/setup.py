"""Builds a learner from its settings, in the process where it will work. Imports torch only
then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.trainer.trainer import ModelConfig, TrainConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollpacker.trainer.learner import Learner
    from rollpacker.trainer.sharding import Shards


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

    with reading_on_call():  # for what the models are tried with before they are sharded
        return _learner(setup, model, tokenizer, shards)


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
