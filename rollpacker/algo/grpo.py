"""GRPO: a response is as good as its reward is above the mean of its group, in units of the group's
standard deviation. No critic.

DeepSeekMath (arXiv 2402.03300). Two values are not the paper's but those that the field has moved
to: the upper clip of DAPO (0.28 instead of 0.2), and the mean over all tokens of the step instead
of the mean of each response's mean.
"""

from rollpacker.algo.row import Row

ROW = Row(normalize_mean="group", normalize_std="group", clip_high=0.28)
