"""Loss, gradient and advantages against TRL's own code, on the same random numbers."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig, RLOOConfig

from rollpacker.algo import AlgorithmConfig, policy_loss, step_advantages
from tests.algo.trl_settings import EQUAL_SETTINGS, Equal
from tests.algo.trl_stand_in import DEFAULTS, Rollout, trl_loss

GROUP_SIZE = 4
LENGTHS = [1, 7, 3, 9, 5, 2, 9, 4, 6, 8, 1, 3]


def draw_rollout(seed: int = 0, *, spread: float = 0.5) -> Rollout:
    """Three groups of responses of uneven lengths; the old log-probs lie about `spread` away."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        shape = (len(LENGTHS), max(LENGTHS))
        return scale * torch.randn(shape, generator=draw, dtype=torch.float64)

    log_probs = -normal(1.0).abs() - 0.1
    old = log_probs + normal(spread)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return Rollout(
        mask=mask,
        truncated=torch.tensor([n == max(LENGTHS) for n in LENGTHS]),
        rewards=torch.randint(0, 5, (len(LENGTHS),), generator=draw).double() / 3,
        group_size=GROUP_SIZE,
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old.detach(),
        ref_log_probs=(log_probs + normal(0.3)).detach(),
        # TRL reads the engine's log-probs in single precision.
        rollout_log_probs=(old + normal(0.3)).detach().float().double(),
        entropy=normal(1.0).abs(),
    )


def our_loss(rollout: Rollout, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    mask = rollout.mask.bool()
    found = step_advantages(
        rollout.rewards,
        torch.arange(len(rollout.rewards)) // rollout.group_size,
        mask.sum(1).tolist(),
        config=config,
        log_probs=rollout.old_log_probs[mask],
        ref_log_probs=rollout.ref_log_probs[mask],
    ).advantages
    if config.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]

    def padded(values: Tensor) -> Tensor:
        """What lies in the padding must not matter."""
        return torch.where(mask, values, math.nan)

    loss, _ = policy_loss(
        padded(rollout.log_probs),
        padded(rollout.old_log_probs),
        found,
        mask,
        config=config,
        ref_logprobs=padded(rollout.ref_log_probs),
        rollout_logprobs=padded(rollout.rollout_log_probs),
        entropy=padded(rollout.entropy),
    )
    return loss, found


def compare(rollout: Rollout, case: Equal) -> None:
    theirs, their_advantages = trl_loss(rollout, case.trainer, case.trl)
    ours, our_advantages = our_loss(rollout, AlgorithmConfig(**case.ours))
    torch.testing.assert_close(our_advantages, their_advantages, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    (their_gradient,) = torch.autograd.grad(theirs, rollout.log_probs)
    (our_gradient,) = torch.autograd.grad(ours, rollout.log_probs)
    scale = their_gradient.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(our_gradient, their_gradient, rtol=0, atol=1e-6 * scale)


def name_of(case: Equal) -> str:
    settings = ",".join(f"{key}={value}" for key, value in case.trl.items())
    return f"{case.trainer}({settings})"


@pytest.mark.parametrize("case", EQUAL_SETTINGS, ids=name_of)
@pytest.mark.parametrize("spread", [0.5, 1e-4])
def test_equals_trl(case: Equal, spread: float) -> None:
    """Far off policy, where everything is clipped, and close to it."""
    compare(draw_rollout(1, spread=spread), case)


@pytest.mark.parametrize("trainer", ["GRPOTrainer", "RLOOTrainer"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_baselines_without_a_verdict(trainer: str, scale_rewards: str) -> None:
    """TRL gives such a response an advantage of 0; we leave it out (NaN). The others agree, also in
    a group with a single verdict and in one whose rewards are equal."""
    rollout = draw_rollout(2)
    nothing = torch.tensor([3, 5, 6, 7])
    rewards = rollout.rewards.index_fill(0, nothing, math.nan)
    rewards[8:] = 0.7
    trl = {"beta": 0.0} if trainer == "RLOOTrainer" else {"scale_rewards": scale_rewards}
    ours = {"name": "rloo"} if trainer == "RLOOTrainer" else {"normalize_std": scale_rewards}
    if trainer == "GRPOTrainer" and scale_rewards == "group":
        rewards[4:6] = torch.tensor([0.25, 1.0])  # TRL's deviation of one verdict is NaN
    rollout = replace(rollout, rewards=rewards)
    _, theirs = trl_loss(rollout, trainer, trl)
    _, found = our_loss(rollout, AlgorithmConfig(**ours))
    assert found.isnan().equal(rewards.isnan())
    assert (theirs[rewards.isnan()] == 0).all()
    torch.testing.assert_close(found.nan_to_num(nan=0.0), theirs, rtol=0, atol=1e-6)
    assert found[:3].abs().max() > 0.1


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_truncated_responses_stay_in_trls_denominators(loss_type: str) -> None:
    """The one factor by which we differ where the denominator counts responses."""
    case = next(c for c in EQUAL_SETTINGS if c.trl.get("loss_type") == loss_type)
    rollout = draw_rollout(3)
    theirs, _ = trl_loss(rollout, "GRPOTrainer", {**case.trl, "mask_truncated_completions": True})
    config = AlgorithmConfig(**{**case.ours, "mask_truncated": True})
    ours, _ = our_loss(rollout, config)
    kept = (~rollout.truncated).sum() / len(rollout.truncated)
    assert 0 < kept < 1
    torch.testing.assert_close(ours * kept, theirs, rtol=0, atol=1e-6)


def test_delta_below_the_upper_clip_is_not_a_dual_clip() -> None:
    """As the page says: TRL lowers the upper clip with it, we do not."""
    rollout = draw_rollout(4)
    trl = {"delta": 1.1, "epsilon_high": 0.28}
    theirs, _ = trl_loss(rollout, "GRPOTrainer", trl)
    ours, _ = our_loss(rollout, AlgorithmConfig(name="dapo", clip_dual=1.1))
    assert abs(theirs.item() - ours.item()) > 1e-4


def test_the_stand_in_has_trls_defaults() -> None:
    """What the table leaves out is what TRL does by itself."""
    for trainer, config in (("GRPOTrainer", GRPOConfig), ("RLOOTrainer", RLOOConfig)):
        real = {field.name: field.default for field in fields(config)}
        for name, value in DEFAULTS[trainer].items():
            assert real[name] == value or name == "num_iterations", (trainer, name, real[name])
