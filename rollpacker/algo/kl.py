"""Estimates of the KL divergence from sampled tokens (Schulman, "Approximating KL divergence")."""

from __future__ import annotations

from torch import Tensor

from rollpacker.algo.row import KlEstimator


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per token, with d = log-prob minus reference log-prob: k1 is d (unbiased, may be negative),
    k2 is d²/2, k3 is exp(-d) + d - 1 (unbiased, never negative). Any shape; differentiable."""
    difference = log_probs - ref_log_probs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return (-difference).exp() + difference - 1
