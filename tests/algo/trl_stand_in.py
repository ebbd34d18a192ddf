"""TRL's trainers without their constructors: their own arithmetic on tensors that we choose.

`_generate_and_score_completions` and `_compute_loss` are TRL's, unbound, on an object that answers
what they ask for: what was generated, what its reward is, and what each model's log-probs are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

PAD, END, WORD = 0, 1, 5
TRAINERS = {"GRPOTrainer": GRPOTrainer, "RLOOTrainer": RLOOTrainer}
DEFAULTS = {
    "GRPOTrainer": {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "beta": 0.0,
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "max_completion_length": 512,
        "mask_truncated_completions": False,
        "entropy_coef": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
        "use_bias_correction_kl": True,
        "num_iterations": 2,  # so that TRL asks for the old log-probs
    },
    "RLOOTrainer": {
        "epsilon": 0.2,
        "epsilon_high": None,
        "beta": 0.05,
        "reward_clip_range": None,
        "normalize_advantages": False,
        "mask_truncated_completions": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses as TRL and we take them: [N, T] tensors, whole groups of `group_size` rows."""

    mask: Tensor
    truncated: Tensor
    """[N], bool."""
    rewards: Tensor
    """[N]; NaN is no verdict."""
    group_size: int
    log_probs: Tensor
    """Requires a gradient."""
    old_log_probs: Tensor
    ref_log_probs: Tensor
    rollout_log_probs: Tensor
    entropy: Tensor


def trl_loss(rollout: Rollout, trainer: str, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """TRL's loss, and its advantages [N]."""
    unknown = set(settings) - set(DEFAULTS[trainer])
    assert not unknown, unknown
    self = _stand_in(rollout, SimpleNamespace(**(DEFAULTS[trainer] | dict(settings))))
    of = TRAINERS[trainer]
    rows = [{"prompt": "a prompt"} for _ in rollout.rewards]
    inputs = of._generate_and_score_completions(self, rows)
    return of._compute_loss(self, self.model, inputs), inputs["advantages"]


def _stand_in(rollout: Rollout, settings: SimpleNamespace) -> SimpleNamespace:
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    reference = SimpleNamespace(training=False, is_gradient_checkpointing=False)
    lengths = rollout.mask.sum(1).tolist()
    last = [WORD if cut else END for cut in rollout.truncated.tolist()]
    tokens = [[WORD] * (n - 1) + [end] for n, end in zip(lengths, last, strict=True)]
    engine = [row[:n].tolist() for row, n in zip(rollout.rollout_log_probs, lengths, strict=True)]
    prompts = [[WORD, WORD] for _ in tokens]
    is_grpo = hasattr(settings, "loss_type")

    def generate(_: Any) -> tuple:
        if not is_grpo:
            return prompts, tokens, ["" for _ in tokens]
        sampled = engine if settings.use_vllm else None
        return prompts, tokens, None, ["" for _ in tokens], sampled, {}, None, None

    def per_token(asked: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        if asked is reference:
            return rollout.ref_log_probs, rollout.entropy, None
        own = rollout.log_probs if torch.is_grad_enabled() else rollout.old_log_probs
        return own, rollout.entropy, None

    settings.per_device_train_batch_size = len(tokens)
    settings.steps_per_generation = settings.gradient_accumulation_steps = 1
    settings.gradient_checkpointing_kwargs = None
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    return SimpleNamespace(
        **{k: v for k, v in vars(settings).items() if k != "epsilon_high"},
        args=settings,
        epsilon_low=settings.epsilon,
        epsilon_high=high,
        model=model,
        ref_model=reference,
        model_wrapped=model,
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            sync_gradients=True,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        current_gradient_accumulation_steps=1,
        _generate=generate,
        _calculate_rewards=lambda *_: rollout.rewards[:, None],
        _get_per_token_logps_and_entropies=per_token,
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        eos_token_ids=[END],
        pad_to_multiple_of=None,
        num_generations=rollout.group_size,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_funcs=[None],
        reward_func_names=["reward"],
        multi_objective_aggregation="sum_then_normalize",
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=getattr(settings, "entropy_coef", 0.0) != 0,
        environment_factories=None,
        environments=None,
        tools=None,
        log_multimodal=False,
        _metrics={"train": defaultdict(list)},
        _logs={
            "prompt": [],
            "completion": [],
            "rewards": defaultdict(list),
            "advantages": [],
            "extra": {},
        },
        _pending_extra_logs={},
        _pending_metrics={},
    )
