"""PPO: a second model, the critic, says how much reward is to be expected after each token; an
advantage is what came better than that, smoothed over the tokens to come (GAE), and all of a step
are brought to mean 0 and standard deviation 1. The KL penalty, if there is one, is part of the
reward.

PPO (arXiv 1707.06347), GAE (arXiv 1506.02438), InstructGPT (arXiv 2203.02155).
"""

from rollpacker.algo.row import Row

ROW = Row(advantage="gae", normalize_mean="none", whiten=True, kl_estimator="k1", kl_in="reward")
