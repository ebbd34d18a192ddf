"""An advantage and a loss from outside of the package, which equal two of its own.

algorithm:
  name: rloo
  advantage_function: examples/algorithm/own.py:leave_one_out
  loss_function: examples/algorithm/own.py:clipped
"""

import torch


def leave_one_out(rewards, group_ids):
    """One per sample [N]: its reward less the mean of the others of its group, as `rloo` has it."""
    found = torch.empty_like(rewards)
    for group in group_ids.unique():
        mine = group_ids == group
        others = (rewards[mine].sum() - rewards[mine]) / (mine.sum() - 1)
        found[mine] = rewards[mine] - others
    return found


def clipped(log_probs, old_log_probs, advantages, *, config):
    """One per token [K]: PPO's clipped surrogate, as `grpo` has it; and what to log of it."""
    ratio = (log_probs - old_log_probs).exp()
    cut = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, cut * advantages)
    return loss, {"cut": (ratio != cut).to(ratio.dtype)}  # logged as actor/cut, a mean over tokens
