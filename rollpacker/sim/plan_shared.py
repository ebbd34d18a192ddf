"""Planning for pools of devices that several jobs share: settings are compared not by the seconds
of a step, but by what the pools cost while the job holds them. While the job holds no pool (it
awaits verdicts, or commits a step), it pays nothing, since other jobs use the devices.

    cost of a step = rollout_s x price of its rollout nodes + (train_s + sync_s) x price of its
                     training nodes
    busy_s         = cost of a step / price of all its nodes

`busy_s` is what a plan compares: the seconds of holding both pools that would cost as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.cluster.decide.job import Phase
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.sim.result import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrices:
    """Prices that a job pays per hour while it holds its nodes, in the currency of the pools."""

    rollout_per_h: float
    """Price per hour of all nodes on which the job generates."""
    train_per_h: float
    prompts_per_step: int

    @property
    def per_h(self) -> float:
        """Price per hour of all nodes of the job."""
        return self.rollout_per_h + self.train_per_h

    def to_plain(self) -> dict[str, float]:
        """The prices as plain values, as `rollpacker plan --json` prints them."""
        return {"rollout_per_h": self.rollout_per_h, "train_per_h": self.train_per_h}

    def busy_s(self, step: StepResult) -> float:
        """Seconds for which the job could hold all its nodes at the price of this step."""
        rollout, train = step.rollout_s, step.train_s + step.sync_s
        return (rollout * self.rollout_per_h + train * self.train_per_h) / self.per_h

    def price_of_1k_prompts(self, busy_s: float) -> float:
        """Price of training on 1000 prompts, if a step costs `busy_s` seconds of all the nodes."""
        return busy_s * self.per_h / 3600 / self.prompts_per_step * 1000


def pool_prices(
    pools: tuple[Pool, ...], devices: Mapping[Phase, int], prompts_per_step: int
) -> PoolPrices:
    """Prices of a job's nodes. For each phase (rollout and train) it takes them in the first of
    `pools` of this phase; `devices` is the job's number of devices, rounded up to whole nodes."""
    per_h = {}
    for phase, count in devices.items():
        pool = next(pool for pool in pools if pool.phase == phase)
        per_h[phase] = pool.nodes_for(count) * pool.node_price_per_h
    return PoolPrices(
        rollout_per_h=per_h["rollout"],
        train_per_h=per_h["train"],
        prompts_per_step=prompts_per_step,
    )
