"""The settings of TRL's trainers, and those of `AlgorithmConfig` that compute the same. Light.

`docs/algorithms.md` shows this list, and `tests/algo/test_parity_trl.py` runs it against TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal:
    """One line: TRL with `trl` set computes what we do with `ours` set."""

    trainer: Literal["GRPOTrainer", "RLOOTrainer"] = "GRPOTrainer"
    trl: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)


_DAPO = {"name": "dapo", "clip_high": 0.2}
_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}


def _mismatch(mode: str, **ours: Any) -> Equal:
    bounds = {"mismatch_max": 3.0, **ours}
    trl = {"use_vllm": True, "vllm_importance_sampling_mode": mode}
    if "mismatch_min" in bounds:
        trl["vllm_importance_sampling_clip_min"] = bounds["mismatch_min"]
    return Equal(trl=trl, ours={**_DAPO, "mismatch_correction": mode.replace("_", "-"), **bounds})


EQUAL_SETTINGS: tuple[Equal, ...] = (
    Equal(trl={}, ours=_DAPO),
    Equal(trl={"epsilon_high": 0.28}, ours={"name": "dapo"}),
    Equal(
        trl={"loss_type": "grpo"},
        ours={
            "name": "grpo",
            "clip_high": 0.2,
            "loss_aggregation": "sequence-mean-token-mean",
        },
    ),
    Equal(trl={"loss_type": "bnpo"}, ours={"name": "grpo", "clip_high": 0.2}),
    Equal(
        trl={"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 2048},
        ours={"name": "dr_grpo", "fixed_length": 2048},
    ),
    Equal(
        trl={"loss_type": "dr_grpo", "max_completion_length": 2048},
        ours={"name": "dr_grpo", "normalize_std": "group", "fixed_length": 2048},
    ),
    Equal(trl={**_GSPO, "epsilon": 3e-4, "epsilon_high": 4e-4}, ours={"name": "gspo"}),
    Equal(
        trl={**_GSPO, "loss_type": "luspo"},
        ours={
            "name": "gspo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "loss_aggregation": "sequence-mean-token-sum",
        },
    ),
    Equal(trl={"loss_type": "cispo", "epsilon_high": 5.0}, ours={"name": "cispo"}),
    Equal(
        trl={
            "loss_type": "cispo",
            "epsilon_high": 1.5,
            "importance_sampling_level": "sequence",
        },
        ours={"name": "cispo", "clip_high": 0.5, "importance_ratio": "sequence"},
    ),
    Equal(trl={"delta": 1.5}, ours={**_DAPO, "clip_dual": 1.5}),
    Equal(trl={"beta": 0.04}, ours={**_DAPO, "kl_coef": 0.04, "kl_bias_correction": True}),
    Equal(trl={"beta": 0.04, "use_bias_correction_kl": False}, ours={**_DAPO, "kl_coef": 0.04}),
    Equal(trl={"scale_rewards": "batch"}, ours={**_DAPO, "normalize_std": "batch"}),
    Equal(trl={"scale_rewards": "none"}, ours={**_DAPO, "normalize_std": "none"}),
    Equal(trl={"mask_truncated_completions": True}, ours={**_DAPO, "mask_truncated": True}),
    Equal(trl={"entropy_coef": 0.01}, ours={**_DAPO, "entropy_coef": 0.01}),
    _mismatch("token_truncate"),
    _mismatch("token_mask", mismatch_min=0.5),
    _mismatch("sequence_truncate", mismatch_min=0.5),
    _mismatch("sequence_mask"),
    Equal(trainer="RLOOTrainer", trl={"beta": 0.0}, ours={"name": "rloo"}),
    Equal(trainer="RLOOTrainer", trl={"beta": 0.05}, ours={"name": "rloo", "kl_coef": 0.05}),
)
