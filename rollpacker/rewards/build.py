"""The rewards that a config names: built-ins by name, functions by where they are."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from rollpacker.rewards.base import RewardConfig, RewardError, RewardPart
from rollpacker.rewards.functions.part import RewardFunction
from rollpacker.rewards.functions.shapes import refuse_unknown
from rollpacker.rewards.judge.completer import MakeCompleter
from rollpacker.rewards.shared import Shared
from rollpacker.rewards.weighted import Weighted, WeightedReward
from rollpacker.sandbox.base import SandboxConfig

BUILT_IN: dict[str, str] = {
    "math": "rollpacker.rewards.math.reward:MathReward",
    "code": "rollpacker.rewards.code.grading:CodeReward",
    "judge": "rollpacker.rewards.judge.part:JudgeReward",
    "reward_model": "rollpacker.rewards.reward_model:RewardModel",
    "reasoning_gym": "rollpacker.rewards.reasoning_gym:ReasoningGymScorer",
}
"""Imported when they are named."""

FACTORIES = ("reward_model", "reasoning_gym")
"""Their instances are plain functions, made of `arguments` in a worker and called there. The others
are parts made of config, name and what the run shares."""

CONFIGS = {
    "math": "rollpacker.rewards.math.reward:MathConfig",
    "code": "rollpacker.rewards.code.grading:CodeConfig",
}
"""Dataclasses whose fields are a reward's `arguments`."""

SANDBOXED = ("math", "code")
"""They share one sandbox."""

_CHECKED_HERE = ("reasoning_gym",)
"""Factories whose `check` looks at the rows, in this process."""


def build_reward(
    configs: Sequence[RewardConfig],
    *,
    sandbox: SandboxConfig | None = None,
    engine_completer: MakeCompleter | None = None,
) -> WeightedReward:
    """The reward that a config names. Raises `RewardError` for one that cannot be used."""
    bounds = [c.workers for c in configs if c.function in SANDBOXED and c.workers != "auto"]
    shared = Shared(
        sandbox or SandboxConfig(),
        engine_completer=engine_completer,
        workers=max(bounds, default=None),
    )
    parts: list[Weighted] = []
    for config in configs:
        part = _part(config, shared)
        if part.name in [one.part.name for one in parts]:
            raise RewardError(
                f'two rewards are called "{part.name}"; give one of them another name'
                f" (rewards.{len(parts)}.name)."
            )
        parts.append(Weighted(part, config))
    return WeightedReward(parts, shared)


def _part(config: RewardConfig, shared: Shared) -> RewardPart:
    if config.function in BUILT_IN:
        return _built_in(config, shared)
    if ":" not in config.function:
        close = difflib.get_close_matches(config.function, BUILT_IN, n=1, cutoff=0.5)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        raise RewardError(
            f'there is no built-in reward "{config.function}".{hint} Built in:'
            f' {", ".join(BUILT_IN)}; a function of your own is "module:function" or'
            ' "path/to/file.py:function".'
        )
    return RewardFunction(config)


def _built_in(config: RewardConfig, shared: Shared) -> RewardPart:
    name = config.function
    module, _, attribute = BUILT_IN[name].partition(":")
    found: Any = getattr(importlib.import_module(module), attribute)
    if config.shape not in ("auto", "trl"):
        raise RewardError(f"reward {name} is built in and has no shape; take {config.shape} out.")
    if name in CONFIGS:
        return _configured(config, CONFIGS[name], found, shared)
    parameters = inspect.signature(found).parameters.values()
    if name not in FACTORIES:
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        refuse_unknown(config.arguments, known, name)
        part: RewardPart = found(config, config.name or name, shared, **config.arguments)
        return part
    refuse_unknown(config.arguments, [p.name for p in parameters], name)
    check = found(**config.arguments).check if name in _CHECKED_HERE else None
    config = dataclasses.replace(config, name=config.name or name, shape="trl")
    if config.workers == "auto":  # a factory knows best how often it fits into this machine
        config = dataclasses.replace(config, workers=getattr(found, "WORKERS", None) or "auto")
    return RewardFunction(config, factory=BUILT_IN[name], check=check)


def _configured(entry: RewardConfig, place: str, made: Any, shared: Shared) -> RewardPart:
    module, _, attribute = place.partition(":")
    config_class: Any = getattr(importlib.import_module(module), attribute)
    name = entry.function
    refuse_unknown(entry.arguments, [one.name for one in dataclasses.fields(config_class)], name)
    try:
        config = config_class(**entry.arguments)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {entry.name or name}: {error}") from None
    part: RewardPart = made(config, entry=entry, name=entry.name or name, shared=shared)
    return part
