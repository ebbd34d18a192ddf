"""Makes the rewards that a config names: built-in ones by name, functions by where they are."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.rewards.functions.function_reward import RewardFunction
from rollpacker.rewards.functions.shapes import refuse_unknown
from rollpacker.rewards.judge.completer import MakeCompleter
from rollpacker.rewards.reward import RewardConfig, RewardError, RewardPart
from rollpacker.rewards.shared import Shared
from rollpacker.rewards.weighted import Weighted, WeightedReward
from rollpacker.sandbox.sandbox import SandboxConfig


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """Where a built-in reward is defined. The module is imported when a config names the reward."""

    module: str
    """Name of the module below `rollpacker.rewards`."""
    made: str
    """Name of the function or class in that module that makes the reward from its config and the
    run's `Shared`. If `in_worker`, it is a function: called in a worker process, with `arguments`
    by keyword, it returns a plain reward function."""
    config: str
    """Name of the dataclass, in that module, whose fields are the reward's `arguments`."""
    in_worker: bool = False


BUILT_IN: dict[str, BuiltIn] = {
    "math": BuiltIn("math.math_reward", "MathReward", "MathConfig"),
    "code": BuiltIn("code.grading", "CodeReward", "CodeConfig"),
    "judge": BuiltIn("judge.judge_reward", "JudgeReward", "JudgeConfig"),
    "reward_model": BuiltIn("reward_model", "make", "RewardModelConfig", in_worker=True),
    "environment": BuiltIn("environment_reward", "EnvironmentReward", "EnvironmentRewardConfig"),
    "reasoning_gym": BuiltIn("reasoning_gym", "make", "ReasoningGymConfig", in_worker=True),
}

SANDBOXED = ("math", "code")
"""Built-in rewards that run programs. All of them use one sandbox."""


def build_reward(
    configs: Sequence[RewardConfig],
    *,
    sandbox: SandboxConfig | None = None,
    engine_completer: MakeCompleter | None = None,
    model_environments: Sequence[Mapping[str, str]] = (),
) -> WeightedReward:
    """Make the rewards of a run from `configs`. `sandbox`: None for its defaults.
    `engine_completer`: makes the engine of a judge in this process (None: there can be no such
    judge). `model_environments`: all environment variables of a worker of a `reward_model`, for
    each device that these have of their own. Raises `RewardError` for a reward that cannot be
    used."""
    check_form(configs)
    bounds = [c.workers for c in configs if c.function in SANDBOXED and c.workers != "auto"]
    shared = Shared(
        sandbox or SandboxConfig(),
        engine_completer=engine_completer,
        workers=max(bounds, default=None),
    )
    parts: list[Weighted] = []
    for config in configs:
        part = _part(config, shared, model_environments if config.takes_device else ())
        if part.name in [one.part.name for one in parts]:
            raise RewardError(
                f'two rewards are called "{part.name}"; give one of them another name'
                f" (rewards.{len(parts)}.name)."
            )
        parts.append(Weighted(part, config))
    return WeightedReward(parts, shared)


def check_form(configs: Sequence[RewardConfig]) -> None:
    """Raise `RewardError` for a config that names neither a built-in reward nor a function as
    `module:function`. Nothing is imported."""
    for config in configs:
        if config.function in BUILT_IN or ":" in config.function:
            continue
        place, dot, name = config.function.rpartition(".")
        hint = f' Did you mean "{place}:{name}"?' if dot and place and name else ""
        hint = hint or did_you_mean(config.function, BUILT_IN)
        raise RewardError(
            f'there is no built-in reward "{config.function}".{hint} Built in:'
            f' {", ".join(BUILT_IN)}; a function of your own is "module:function" or'
            ' "path/to/file.py:function".'
        )


def _part(
    config: RewardConfig, shared: Shared, environments: Sequence[Mapping[str, str]]
) -> RewardPart:
    if config.function in BUILT_IN:
        return _built_in(config, shared, environments)
    return RewardFunction(config)


def _built_in(
    entry: RewardConfig, shared: Shared, environments: Sequence[Mapping[str, str]]
) -> RewardPart:
    name, row = entry.function, BUILT_IN[entry.function]
    if entry.shape not in ("auto", "trl"):
        raise RewardError(f"reward {name} is built in and has no shape; take {entry.shape} out.")
    module = importlib.import_module(f"rollpacker.rewards.{row.module}")
    config_class = getattr(module, row.config)
    known = [field.name for field in dataclasses.fields(config_class) if field.init]
    refuse_unknown(entry.arguments, known, name)
    try:
        config = config_class(**entry.arguments)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {entry.name or name}: {error}") from None
    if not row.in_worker:
        make = getattr(module, row.made)
        part: RewardPart = make(config, entry=entry, name=entry.name or name, shared=shared)
        return part
    entry = dataclasses.replace(entry, name=entry.name or name, shape="trl")
    if entry.workers == "auto":  # a model knows best how often it fits into this machine
        suited: Any = getattr(config_class, "WORKERS", "auto")
        entry = dataclasses.replace(entry, workers=len(environments) or suited)
    return RewardFunction(
        entry,
        factory=f"{module.__name__}:{row.made}",
        check=getattr(config, "check", None),
        environments=environments,
    )
