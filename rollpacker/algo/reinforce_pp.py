"""REINFORCE++: no critic and no groups. A token's advantage is its response's reward, less the KL
penalties from that token on, and all of a step are brought to mean 0 and standard deviation 1.

`BASELINE_ROW` is its variant for several responses per prompt: the group's mean is subtracted
first, and the KL penalty is part of the loss.

"REINFORCE++" (arXiv 2501.03262).
"""

from rollpacker.algo.row import Row

ROW = Row(normalize_mean="none", whiten=True, kl_estimator="k1", kl_in="reward")
BASELINE_ROW = Row(normalize_mean="group", whiten=True, kl_estimator="k2")
