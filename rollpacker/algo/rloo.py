"""RLOO: REINFORCE on whole responses; the baseline of each is the mean reward of the others of its
group, which leaves the gradient unbiased. The KL penalty, if there is one, is part of the reward.

"Back to Basics" (arXiv 2402.14740), in the clipped form of TRL: one ratio per response, the product
of those of its tokens.
"""

from rollpacker.algo.row import Row

ROW = Row(
    normalize_mean="leave-one-out",
    importance_ratio="sequence-product",
    loss_aggregation="sequence-mean-token-mean",
    kl_estimator="k1",
    kl_in="reward",
)
