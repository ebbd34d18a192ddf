"""What other frameworks call our metrics: docs/migration.md shows it, and a name that a run's table
does not have gets its hint from here."""

from __future__ import annotations

from collections.abc import Collection

NAMES = {
    "TRL": {
        "reward": "critic/rewards/mean",
        "reward_std": "critic/rewards/std",
        "frac_reward_zero_std": "critic/frac_reward_zero_std",
        "completions/mean_length": "response_length/mean",
        "completions/max_length": "response_length/max",
        "completions/clipped_ratio": "response_length/clip_ratio",
        "loss": "actor/loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "kl": "actor/kl",
        "entropy": "actor/entropy",
        "clip_ratio/low_mean": "actor/clip_ratio_low",
        "clip_ratio/high_mean": "actor/clip_ratio_high",
        "step_time": "timing_s/step",
        "eval_reward": "eval/reward",
    },
    "verl": {
        "critic/score/mean": "critic/rewards/mean",
        "actor/pg_loss": "actor/loss",
        "actor/kl_loss": "actor/kl",
        "actor/entropy_loss": "actor/entropy",
        "actor/pg_clipfrac": "actor/clip_ratio_high",
        "actor/pg_clipfrac_lower": "actor/clip_ratio_dual",
        "critic/vf_loss": "critic/value_loss",
        "critic/vf_clipfrac": "critic/value_clip_ratio",
    },
}
"""Framework -> theirs -> ours, where the two differ."""


def here_it_is(name: str, known: Collection[str]) -> str:
    """` Here it is ...`, or nothing where no framework has such a metric. `known` are those that
    there are."""
    ours = next((names[name] for names in NAMES.values() if name in names), None)
    if ours is None:
        return ""
    return f" Here it is {ours}{'' if ours in known else ', which no row has'}"
