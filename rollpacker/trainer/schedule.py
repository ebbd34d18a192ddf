"""Learning-rate schedules of transformers, by name, as a pure function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from rollpacker.trainer.trainer import TrainConfig

_NEED_METRICS = ("reduce_lr_on_plateau", "greedy")
"""Names of schedules that follow the loss, not the step, and are not supported."""
KNOWN = tuple(t.value for t in SchedulerType if t.value not in _NEED_METRICS)
_WITH_FLOOR = ("linear", "cosine")
_GIVEN = ("optimizer", "last_epoch", "num_warmup_steps", "num_training_steps")
"""Arguments of transformers' schedules that come from the config's own settings, so that a user may
not give them as options."""


def learning_rate(step: int, config: TrainConfig, total_steps: int | None) -> float:
    """Return the learning rate of step `step` (from 0). `total_steps` is the planned number of
    steps; None is allowed for the constant schedule alone. A linear warm-up rises from
    1/(warmup_steps + 1) and not from 0, since a first step at rate 0 would waste a whole round.
    After the warm-up the rate follows transformers' schedule of the configured name; linear and
    cosine end at `min_learning_rate_ratio`. Steps beyond `total_steps`, which train on the last
    prompts that were put off, keep the last planned rate."""
    if total_steps is not None:
        step = min(step, total_steps - 1)
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    assert total_steps is not None or config.schedule == "constant", config.schedule
    share = _share_of_the_rate(
        config.schedule,
        tuple(sorted(config.schedule_options.items())),
        config.learning_rate,
        config.warmup_steps,
        total_steps,
    )
    floor = config.min_learning_rate_ratio if config.schedule in _WITH_FLOOR else 0.0
    return config.learning_rate * (floor + (1.0 - floor) * share(step))


def check_schedule(config: TrainConfig) -> None:
    """Raise `ValueError` if the schedule is unknown, its options do not fit, or a planned step
    would have a learning rate that is negative or not finite."""
    name = config.schedule
    if name in _NEED_METRICS:
        raise ValueError(
            f"train.schedule={name} follows the loss, not the step, and is not supported: "
            f"use one of {', '.join(KNOWN)}"
        )
    if name not in KNOWN:
        raise ValueError(f"train.schedule={name} is not known: use one of {', '.join(KNOWN)}")
    if config.min_learning_rate_ratio and name not in _WITH_FLOOR:
        raise ValueError(
            f"train.min_learning_rate_ratio is for linear and cosine, not for {name}: leave it at "
            "0, and see train.schedule_options"
        )
    _check_options(config)
    total_steps = config.steps if config.steps is not None else 1
    try:
        rates = [learning_rate(step, config, total_steps) for step in range(total_steps)]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"train.schedule_options of {name}: {error}") from error
    for step, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(
                f"train.schedule={name} gives the learning rate {rate} at step {step}: "
                "change train.schedule_options"
            )


def _check_options(config: TrainConfig) -> None:
    """Raise `ValueError` for an option that the schedule does not have. Warm-up options are refused
    too, since `train.warmup_steps` is used."""
    make: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(config.schedule)]
    arguments = [name for name in inspect.signature(make).parameters if name not in _GIVEN]
    options = [name for name in arguments if not name.startswith("warmup")]
    for name, value in config.schedule_options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"train.schedule_options.{name} must be a finite number, not {value}")
        if name not in options:
            raise ValueError(
                f"train.schedule_options.{name} is not an option of {config.schedule}, "
                f"which has {', '.join(options) or 'none'}"
            )


@lru_cache(maxsize=16)
def _share_of_the_rate(
    name: str,
    options: tuple[tuple[str, float], ...],
    rate: float,
    warmup_steps: int,
    total_steps: int | None,
) -> Callable[[int], float]:
    """Return transformers' function from a step to the factor by which `rate` is multiplied in that
    step. `rate` matters only to `options` that are relative to it."""
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule = get_scheduler(
        name,
        nothing,
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=dict(options),
    )
    assert isinstance(schedule, LambdaLR), name
    return schedule.lr_lambdas[0]
