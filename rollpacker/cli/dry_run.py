"""`rollpacker train CONFIG --dry-run`: prints what a run would do, without loading a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollpacker.config.schema import RunConfig
    from rollpacker.data.dataset import PromptRow
    from rollpacker.run.parts.environments import TurnParts

_MOST_ROWS = 64
"""Number of first rows of the data. Each reward function is tried out on one of them."""


def print_dry_run(config: RunConfig, *, num_rows: int | None) -> None:
    """Print batch arithmetic and memory of one step, what is on which device, and the first prompt,
    and try the user's own functions. No model is loaded. `num_rows`: rows of `data.train`; None if
    not known. Raises `ValueError` and `RewardError` for settings that no run starts with."""
    from rollpacker.trainer.estimate import estimate

    check_parts(config)
    print(f"{config.name}: {config.model.path}")
    print(f"  {config.algorithm.told}")
    config = _print_devices(config)
    for line in estimate(config).lines():
        print(f"  {line}")
    if config.without_effect is not None:
        print(f"  {config.without_effect}")
    sys.stdout.flush()
    if num_rows is not None:
        fraction = config.data.eval_fraction
        held_out = f", {fraction:g} of them held out" if fraction else ""
        print(f"  rows  {num_rows:,}{held_out}")
    told, rows = _first_rows(config)
    for line in told:
        print(f"  {line}")
    sys.stdout.flush()
    for line in _try_rewards(config, rows):
        print(f"  {line}")


def check_parts(config: RunConfig) -> None:
    """Check the settings of the algorithm, the pipeline stages and the rewards, without loading.
    Raises `ValueError` or `RewardError` for settings that no run would start with."""
    from rollpacker.pipeline.stages.check import check_stages
    from rollpacker.rewards.build import check_form
    from rollpacker.run.parts.trainer import check_algorithm

    check_algorithm(config)
    check_stages(config)
    check_form(config.rewards)


def _print_devices(config: RunConfig) -> RunConfig:
    """Print a table of what is on which device. Returns the config with the settings that follow
    from the placement. Raises `PlacementError` if devices or their memory are short."""
    from rollpacker.run.parts import placement

    if config.runtime == "local":
        placed, plan = placement.on_this_host(config)
    else:
        plan = placement.plan_of(config, placement.hosts_of(config))
        placed = placement.placed(config, plan)
    if plan is None:
        [host], kind = placement.hosts_of(config), placement.device_kind(config)
        lines = placement.table_without(config, host, kind)
    else:
        lines = placement.table(plan)
    for line in lines:
        print(f"  {line}")
    sys.stdout.flush()
    return placed


def _first_rows(config: RunConfig) -> tuple[Sequence[str], Sequence[PromptRow]]:
    """Returns lines that say how prompts are made and show the first, and the first rows of
    `data.train`. Only environments are loaded for that, since their tools stand in the prompt. If a
    prompt cannot be shown, a line says why. Raises what mistakes in environments raise."""
    from rollpacker.run.parts.environments import load_turns
    from rollpacker.run.parts.hub import look_for_hub
    from rollpacker.run.parts.policy import of_tokenizer

    try:
        look_for_hub(config)
        tokenizer = of_tokenizer(config, config.model.path)
    except (ValueError, OSError) as error:
        return [f"first prompt  cannot be shown: {error}"], []
    turns = load_turns(config, tokenizer)
    try:
        return _shown(config, tokenizer, turns)
    finally:
        if turns is not None:
            turns.close()


def _shown(
    config: RunConfig, tokenizer: Mapping[str, Any], turns: TurnParts | None
) -> tuple[Sequence[str], Sequence[PromptRow]]:
    from rollpacker.data.prompts import load_few
    from rollpacker.run.parts.environments import check_turns, with_tools

    told = []
    if turns is not None:
        tools = ", ".join(tool["function"]["name"] for tool in turns.environments.tools)
        told.append(f"environment  {turns.environments.name}; tools: {tools or 'none'}")
    try:
        few = load_few(
            config.data,
            "train",
            rows=_MOST_ROWS,
            brought=None if turns is None else turns.environments.rows,
            **with_tools(tokenizer, turns),
        )
    except (ValueError, OSError) as error:
        return [*told, f"first prompt  cannot be shown: {error}"], []
    if turns is not None:
        check_turns(turns, {"train": few}, told.append)
    return [*told, *few.told], few.rows


def _try_rewards(config: RunConfig, rows: Sequence[PromptRow]) -> list[str]:
    """Call the user's own reward functions as the start of a run does, each on the first of these
    rows that it judges. Returns lines to print. Raises `RewardError` if a function could judge
    nothing."""
    from rollpacker.imports import is_given
    from rollpacker.rewards.build import BUILT_IN, build_reward
    from rollpacker.run.parts.rewards import as_input

    own = [
        one
        for one in config.rewards
        if one.function not in BUILT_IN
        and not is_given(one.function)
        and any(one.tasks is None or row.task in one.tasks for row in rows)
    ]
    untried = [str(one.name or one.function) for one in config.rewards if one not in own]
    lines = []
    if own:
        reward = build_reward(own, sandbox=config.sandbox)
        steps = config.num_steps(len(rows))
        lines += reward.try_out([as_input(row, config, steps) for row in rows])
        lines.append(f"rewards  {', '.join(reward.names)}: tried on made-up completions")
    if untried:
        lines.append(f"rewards  {', '.join(untried)}: not tried (doctor and train do)")
    return lines
