"""On-policy distillation: the policy writes, a teacher reads. A token's advantage is the teacher's
log-probability of it minus the policy's, whose expectation is minus the reverse KL divergence.
Rewards do not enter.

MiniLLM (arXiv 2306.08543), GKD (arXiv 2306.13649).
"""

from rollpacker.algo.row import Row

ROW = Row(advantage="teacher", normalize_mean="none")
