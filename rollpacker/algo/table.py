"""The table of all algorithms: one row of switches for each. Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollpacker.algo import (
    cispo,
    dapo,
    distillation,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce_pp,
    rloo,
)
from rollpacker.algo.row import Row

ALGORITHMS: Mapping[str, Row] = MappingProxyType(
    {
        "grpo": grpo.ROW,
        "dr_grpo": dr_grpo.ROW,
        "dapo": dapo.ROW,
        "gspo": gspo.ROW,
        "cispo": cispo.ROW,
        "rloo": rloo.ROW,
        "reinforce_pp": reinforce_pp.ROW,
        "reinforce_pp_baseline": reinforce_pp.BASELINE_ROW,
        "ppo": ppo.ROW,
        "distillation": distillation.ROW,
    }
)
