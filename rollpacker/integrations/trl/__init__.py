"""Tail batching, deadlines and the idle report for TRL's `GRPOTrainer`. docs/trl.md has the page.

from rollpacker.integrations.trl import rollout_function

rollout = rollout_function(dataset)
trainer = GRPOTrainer(
    ..., train_dataset=rollout.dataset, rollout_func=rollout, callbacks=[rollout]
)
"""

from rollpacker.integrations.trl.installed import SUPPORTED
from rollpacker.integrations.trl.rollout_function import RolloutFunction, rollout_function

__all__ = ["SUPPORTED", "RolloutFunction", "rollout_function"]
