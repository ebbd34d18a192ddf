"""Checks the settings of pipeline stages before anything is started, from the config and the
models' `config.json`, without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.pipeline.plan.choosers import ORDERS
from rollpacker.pipeline.plan.order import orders_from_csv
from rollpacker.pipeline.plan.split import check_layers, split_layers
from rollpacker.trainer.model_shape import model_folder, read_shape
from rollpacker.trainer.trainer import TrainConfig

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig


def check_stages(config: RunConfig) -> None:
    """Raise `ValueError` if a model of the trainer has fewer layers than there are stages, or if
    `train.pipeline`'s layers, order or links cannot be used. A model whose shape is not known on
    this machine is checked by the stages, once it is loaded."""
    pipeline = config.train.pipeline
    if pipeline.stages == 1:
        return
    read_order(config)
    with_links_of(config.train, config.model.device)
    models = {"model.path": config.model.path}
    if config.algorithm.needs_teacher and config.model.teacher is not None:
        models["model.teacher"] = config.model.teacher
    if config.algorithm.needs_critic and config.train.critic.path is not None:
        models["train.critic.path"] = config.train.critic.path
    for setting, path in models.items():
        folder = model_folder(path)
        shape = None if folder is None else read_shape(folder, [])
        if shape is None:
            continue
        if setting == "model.path" and pipeline.layers != "auto":
            check_layers(pipeline.layers, num_layers=shape.layers, num_stages=pipeline.stages)
        try:
            split_layers([1.0] * shape.layers, pipeline.stages)
        except ValueError as error:
            raise ValueError(f"{setting} {path}: {error}") from None


def with_links_of(train: TrainConfig, device: str) -> TrainConfig:
    """Return the config with links that this type of device allows: on CUDA `auto` becomes host
    links. Raises `ValueError` if the config asks for direct links on CUDA."""
    pipeline = train.pipeline
    if device != "cuda" or pipeline.stages == 1 or pipeline.links == "host":
        return train
    if pipeline.links == "direct":
        raise ValueError(
            "train.pipeline.links=direct: direct links carry tensors of a CPU only, and the model "
            "is on CUDA: set train.pipeline.links=host"
        )
    return replace(train, pipeline=replace(pipeline, links="host"))


def check_longest_sample(config: RunConfig, longest_prompt: int) -> None:
    """Raise `ValueError` if a response to the longest prompt (in tokens) may make a sample that is
    too long for a stage's room for activations."""
    cap, response = config.train.pipeline.live_tokens, config.rollout.max_response_tokens
    longest = longest_prompt + response
    if config.train.pipeline.stages > 1 and cap != "auto" and cap < longest:
        raise ValueError(
            f"train.pipeline.live_tokens={cap} is less than a sample may have: {longest_prompt} "
            f"tokens of the longest prompt and {response} of a response "
            f"(rollout.max_response_tokens). Raise it to {longest}, or lower "
            "rollout.max_response_tokens or data.max_prompt_tokens"
        )


def read_order(config: RunConfig) -> str | None:
    """Return the text of the CSV file that `train.pipeline.order` names; None if it names none.
    Raises `ValueError` if the file cannot be read or does not fit the number of stages, or if
    training begins during generation. Whether it fits the micro-batches is checked in each step."""
    pipeline = config.train.pipeline
    if pipeline.stages == 1 or pipeline.order in ORDERS:
        return None
    if config.stream_trainer.enabled:
        raise ValueError(
            f"train.pipeline.order={pipeline.order} is a plan for all micro-batches of a step, and "
            "stream_trainer.enabled begins with some of them: switch streaming off, or set "
            f"train.pipeline.order to one of {', '.join(ORDERS)}"
        )
    try:
        text = Path(pipeline.order).expanduser().read_text(encoding="utf-8")
        orders_from_csv(text, num_stages=pipeline.stages)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"train.pipeline.order={pipeline.order}: {why}") from None
    return text
