"""CISPO: plain policy gradient whose importance weight is cut, not its gradient. Rare but decisive
tokens, which a clipped ratio would silence, keep on teaching. There is no lower cut; the upper one
is at 5.

MiniMax-M1 (arXiv 2506.13585); the upper cut is that of ScaleRL (arXiv 2510.13786).
"""

from rollpacker.algo.row import Row

ROW = Row(
    normalize_mean="group",
    normalize_std="group",
    objective="cispo",
    clip_low=1.0,
    clip_high=4.0,
)
