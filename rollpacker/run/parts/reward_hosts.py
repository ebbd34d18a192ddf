"""The rewards of a run on its hosts (`rewards_hosts.*`)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from rollpacker.run.driving import Caller

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.rewards.hosts import HostedReward
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.parts import Policy


def start_reward_hosts(
    config: RunConfig, policy: Policy, hosts: Hosts, stack: ExitStack
) -> HostedReward | None:
    """Begin to load the processes that judge. None: the rewards of this process do. Raises
    `RewardError`."""
    if config.rewards_hosts is None:
        return None
    from rollpacker.rewards.hosts import HostedReward

    reward = HostedReward(
        config.rewards,
        config.sandbox,
        hosts.beside_engines(config.rewards_hosts.per_host),
        names=policy.reward.names,
        heartbeat_s=config.deadlines.heartbeat_s,
    )
    stack.callback(lambda: Caller().run(reward.close()))
    return reward


def wait_for_reward_hosts(reward: HostedReward | None, policy: Policy) -> None:
    """Until all can judge; this process's own rewards have been tried out and end. Raises
    `RewardError` if one cannot judge."""
    if reward is not None:
        Caller().run(policy.reward.close())
        Caller().run(reward.ready())
