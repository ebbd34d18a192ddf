"""GSPO: GRPO with one probability ratio per response, the geometric mean of those of its tokens, so
that whole responses are clipped and not tokens. Steadier for mixtures of experts. Ratios of whole
responses vary little, hence the tiny clips.

"Group Sequence Policy Optimization" (arXiv 2507.18071).
"""

from rollpacker.algo.row import Row

ROW = Row(
    normalize_mean="group",
    normalize_std="group",
    importance_ratio="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
    loss_aggregation="sequence-mean-token-mean",
)
