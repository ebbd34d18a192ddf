"""Builds the config's rewards, in this process or in processes of their own on the engines'
hosts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rollpacker.core.checks.reward_schedule import RewardKindConfig
from rollpacker.data.dataset import TRAIN
from rollpacker.run.driving import Caller

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.data.dataset import PromptRow
    from rollpacker.rewards.hosts import HostedReward
    from rollpacker.rewards.reward import RewardInput
    from rollpacker.rewards.weighted import WeightedReward
    from rollpacker.run.parts.hosts import Hosts


def load_reward(config: RunConfig, hosts: Hosts | None = None) -> WeightedReward:
    """Build the config's rewards in this process. `hosts`: those of the run, which know the devices
    of reward models; None: nothing is placed. Raises `RewardError` if one cannot be used, and
    `ValueError` as `Hosts.of_reward_models` does."""
    from rollpacker.rewards.build import build_reward

    if config.rewards_hosts is not None:
        from rollpacker.rewards.hosts import refuse_bound

        refuse_bound(config.rewards)
    return build_reward(
        config.rewards,
        sandbox=config.sandbox,
        engine_completer=_engine_completer,
        model_environments=[] if hosts is None else hosts.of_reward_models(),
    )


def _engine_completer(model_path: str, *, max_reply_tokens: int, concurrency: int) -> Any:
    """Load a judge (a model that rates responses), and return the engine of its replies."""
    from rollpacker.engines.completer import EngineCompleter
    from rollpacker.engines.embedded.attention import install_attention
    from rollpacker.trainer.model import load_model
    from rollpacker.trainer.trainer import ModelConfig

    loaded = load_model(ModelConfig(path=model_path))
    install_attention(loaded.model)
    return EngineCompleter(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        max_reply_tokens=max_reply_tokens,
        concurrency=concurrency,
    )


def as_input(row: PromptRow, config: RunConfig, num_steps: int) -> RewardInput:
    """Returns a reward's input for this data row with an empty response, to try rewards out."""
    from rollpacker.environments.environment import Episode
    from rollpacker.rewards.reward import Progress, RewardInput

    return RewardInput(
        prompt=row.prompt,
        completion="",
        completion_tokens=(),
        finish_reason="stop",
        columns=row.columns,
        task=row.task,
        messages=row.messages,
        progress=Progress(0, num_steps),
        episode=None if config.environment is None else Episode(messages=()),
    )


def reward_kinds(reward: WeightedReward) -> dict[str, RewardKindConfig]:
    """Returns how many reward checks may run at once and their deadline, by task of the prompts
    (`train` without tasks). Tasks with neither limit are left out."""
    kinds = {}
    for task, (workers, deadline) in reward.kinds().items():
        if workers is not None or deadline is not None:
            source = TRAIN if task is None else task
            kinds[source] = RewardKindConfig(workers=workers, deadline=deadline)
    return kinds


def start_reward_hosts(
    config: RunConfig, own: WeightedReward, hosts: Hosts, stack: ExitStack
) -> HostedReward | None:
    """Start the processes for rewards (`rewards_hosts`), which begin to load, and return the reward
    that uses them; `stack` closes it. None if `own`, this process's rewards, are used. Raises
    `RewardError` if a process cannot be started."""
    if config.rewards_hosts is None:
        return None
    from rollpacker.rewards.hosts import HostedReward

    reward = HostedReward(
        config.rewards,
        config.sandbox,
        hosts.beside_engines(config.rewards_hosts.per_host),
        names=own.names,
        heartbeat_s=config.deadlines.heartbeat_s,
    )
    stack.callback(lambda: Caller().run(reward.close()))
    return reward


def wait_for_reward_hosts(reward: HostedReward | None, own: WeightedReward) -> None:
    """Wait until the processes of `reward` are ready, and close `own`, this process's rewards,
    which were only tried out. Does nothing if `reward` is None. Raises `RewardError` if a process
    cannot judge."""
    if reward is not None:
        Caller().run(own.close())
        Caller().run(reward.ready())
