"""DAPO: GRPO with room for unlikely tokens to grow (a higher upper clip) and every token of the
step counting alike. Its two other parts are switches of their own: groups without signal are
replaced with `rollout.dynamic_sampling`, and `overlong_buffer_tokens` punishes responses that come
close to the limit.

DAPO (arXiv 2503.14476).
"""

from rollpacker.algo.row import Row

ROW = Row(normalize_mean="group", normalize_std="group", clip_high=0.28)
