"""Dr. GRPO: GRPO without its two biases. Advantages are not divided by the group's standard
deviation, which favours prompts that are very easy or very hard; and a response's sum of losses is
divided by a constant, not by its own length, which favours long wrong answers.

"Understanding R1-Zero-Like Training" (arXiv 2503.20783).
"""

from rollpacker.algo.row import Row

ROW = Row(normalize_mean="group", loss_aggregation="fixed-length")
