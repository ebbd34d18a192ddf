"""Names that a scenario may use: systems, length laws and kinds of reward.

Models and GPUs are in `rollpacker.sim.hardware`. Numbers of the RollPacker paper (arXiv 2509.21009)
were read off its figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.sim.hardware import GPUS, MODELS

# -- systems -----------------------------------------------------------------------

SWITCHES = (
    *("tail_batching", "reward_scheduler", "parallelism_planner"),
    *("stream_trainer", "oracle"),
)
"""The sections of a scenario that a system is made of."""

STREAMED_SHARE = 0.52
"""At most so much of a step's training is hidden under its rollout. Fitted to the paper's training
times of short and long rounds (Fig. 10c)."""

RELEASE_WINDOW = [0.4, 0.5]
"""Shares of finished samples between which devices are released. The paper tries from 20 % on; 40 %
is what its published configurations fix."""

_RLHFUSE: dict[str, dict[str, Any]] = {
    "tail_batching": {"enabled": False},
    "reward_scheduler": {"overlap": True, "adaptive_timeout": False, "colocated_judge": True},
    "parallelism_planner": {"enabled": False},
    "stream_trainer": {
        "enabled": True,
        "kinds": ["plain"],
        "window": RELEASE_WINDOW,
        "max_share": STREAMED_SHARE,
    },
    "oracle": {"reorder_window": 0},
}

SYSTEMS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "verl": {
        "tail_batching": {"enabled": False},
        "reward_scheduler": {"overlap": False, "adaptive_timeout": False, "colocated_judge": True},
        "parallelism_planner": {"enabled": False},
        "stream_trainer": {"enabled": False},
        "oracle": {"reorder_window": 0},
    },
    "rlhfuse": _RLHFUSE,
    "rollpacker": {
        "tail_batching": {
            "enabled": True,
            "prompt_factor": 1.25,
            "sample_factor": 1.25,
            "race": "scored",
            "balance_sources": True,
        },
        "reward_scheduler": {"overlap": True, "adaptive_timeout": True, "colocated_judge": True},
        "parallelism_planner": {"enabled": True},
        "stream_trainer": {
            "enabled": True,
            "kinds": ["long", "flush"],
            "window": RELEASE_WINDOW,
            "max_share": STREAMED_SHARE,
        },
        "oracle": {"reorder_window": 0},
    },
    "oracle": {
        **_RLHFUSE,
        "reward_scheduler": {"overlap": True, "adaptive_timeout": True, "colocated_judge": True},
        "stream_trainer": {
            "enabled": True,
            "kinds": ["plain"],
            "window": RELEASE_WINDOW,
            "max_share": 1.0,
            "reward_wait": True,
        },
        "oracle": {"reorder_window": 20},
    },
}
"""The switches of each system, as a scenario file would write them."""

_SYSTEM_TEXTS = {
    "verl": "stages one after the other; rewards after the rollout, judge calls in one batch",
    "rlhfuse": "rewards beside the rollout, gradients before its end; every response is awaited",
    "rollpacker": "tail batching as published: factors 1.25, race on scored responses",
    "oracle": "a bound: knows all lengths, sorts the prompts of 20 steps, streams all it can",
}

# -- response lengths --------------------------------------------------------------

_CAP = 16384
"""Longest response of the paper's length measurement, in tokens."""
LONGER_SHARE = 0.8
"""Of the responses that ran into that cap, so many are taken to run past twice the cap. Not
published: set such that the 32k set-up's long rounds last as long as published."""


def _law(quantiles: Mapping[float, int], capped_share: float) -> dict[float, int]:
    """With the tail above the highest quantile that the figure shows."""
    tail = {1 - capped_share: _CAP, 1 - LONGER_SHARE * capped_share: 2 * _CAP}
    return {**quantiles, **tail}


LENGTH_LAWS: dict[str, Mapping[float, int]] = {
    "rollpacker-math": _law(
        {
            **{0.01: 16, 0.05: 151, 0.10: 244, 0.20: 364, 0.25: 415, 0.30: 465, 0.40: 558},
            **{0.50: 661, 0.60: 786, 0.70: 984, 0.75: 1129, 0.80: 1366, 0.85: 1758},
            **{0.90: 2566, 0.92: 3074, 0.94: 3779, 0.95: 4101},
        },
        capped_share=0.0105,
    ),
    "rollpacker-code": _law(
        {
            **{0.01: 196, 0.05: 286, 0.10: 349, 0.20: 443, 0.25: 481, 0.30: 517, 0.40: 590},
            **{0.50: 663, 0.60: 748, 0.70: 864, 0.75: 945, 0.80: 1062, 0.85: 1263},
            **{0.90: 1667, 0.92: 1952, 0.94: 2433, 0.95: 2815, 0.96: 3472, 0.97: 4053},
        },
        capped_share=0.009,
    ),
    "rollpacker-judge": _law(
        {
            **{0.01: 6, 0.05: 12, 0.10: 91, 0.20: 242, 0.25: 295, 0.30: 341, 0.40: 432},
            **{0.50: 520, 0.60: 607, 0.70: 702, 0.75: 755, 0.80: 826, 0.85: 914},
            **{0.90: 1064, 0.92: 1161, 0.94: 1326, 0.95: 1422, 0.96: 1666, 0.97: 1984},
            **{0.98: 2765, 0.99: 3968},
        },
        capped_share=0.002,
    ),
}
"""Tokens of a response by quantile: Fig. 2a of the paper, Qwen2.5-14B capped at 16k."""

# -- rewards -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """What a reward stage takes where the scenario does not say."""

    text: str
    seconds_quantiles: Mapping[float, float] | None = None
    """Seconds of one check by quantile, without any limit on it."""
    workers: int | None = None
    calls_per_s: float | None = None
    limit_s: float | None = None
    """A check that takes longer fails."""
    slowest_correct_s: float | None = None
    """No slower answer is ever correct."""


CODE_SECONDS: dict[float, float] = {
    **{0.002: 0.13, 0.126: 0.18, 0.302: 0.25, 0.445: 0.29, 0.615: 0.36, 0.723: 0.48, 0.792: 0.64},
    **{0.846: 0.73, 0.890: 0.83, 0.911: 0.91, 0.927: 1.03, 0.937: 1.29, 0.941: 2.26, 0.943: 2.79},
    **{0.945: 15.0, 0.948: 23.6, 0.949: 30.1, 0.993: 30.4, 1.0: 31.3},
}
"""Seconds in the code sandbox by quantile: Fig. 7a of the paper. The wall at 30 s is its limit."""

REWARD_KINDS: dict[str, RewardKind] = {
    "math": RewardKind(
        text="a rule on the CPU", seconds_quantiles={0.5: 0.01}, workers=64, limit_s=2.0
    ),
    "code": RewardKind(
        text="a sandbox; times of Fig. 7a of the paper, workers fitted to Fig. 4b and 13c",
        seconds_quantiles=CODE_SECONDS,
        workers=62,
        limit_s=30.0,
        # A limit of a few seconds costs the paper no reward: what runs longer than the last value
        # before the gap in Fig. 7a is not correct.
        slowest_correct_s=2.8,
    ),
    "judge": RewardKind(
        text="a language model; calls answered at a rate, fitted to short rounds (Fig. 9)",
        calls_per_s=5.9,
    ),
    "none": RewardKind(text="no check: the verdict is there at once"),
}
"""By the `kind` of a reward stage. The pools are of this size whatever the number of GPUs."""

# -- listing -----------------------------------------------------------------------


def describe_presets() -> str:
    """Every preset with its numbers, for people."""
    return "\n\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines)
        for title, lines in (
            ("model", _model_lines()),
            ("cluster.gpu", _gpu_lines()),
            ("system", _table(_SYSTEM_TEXTS)),
            ("lengths.preset", _length_lines()),
            ("rewards.N.kind", _table({k: _reward_text(v) for k, v in REWARD_KINDS.items()})),
        )
    )


def _table(texts: Mapping[str, str]) -> list[str]:
    width = max(len(name) for name in texts)
    return [f"{name:<{width}}  {text}" for name, text in texts.items()]


def _model_lines() -> list[str]:
    texts = {
        name: f"{m.params / 1e9:5.1f}e9 parameters, {m.layers} layers, hidden {m.hidden}, "
        f"{m.kv_heads} key-value heads of {m.head_dim}, {m.dtype}"
        for name, m in MODELS.items()
    }
    return _table(texts)


def _gpu_lines() -> list[str]:
    texts = {
        name: f"{g.memory_gb:3g} GB at {g.bandwidth_tb_s:5.3f} TB/s, {g.tflops:3g} TFLOP/s, "
        f"NVLink {g.nvlink_gb_s:g} GB/s"
        for name, g in GPUS.items()
    }
    return _table(texts)


def _length_lines() -> list[str]:
    texts = {}
    for name, law in LENGTH_LAWS.items():
        points = ", ".join(f"P{100 * q:.0f} {law[q]}" for q in (0.25, 0.5, 0.75, 0.9, 0.95))
        capped = next(1 - q for q in sorted(law) if law[q] >= _CAP)
        texts[name] = f"{points}; {capped:.2%} reach {_CAP} tokens (Fig. 2a of the paper)"
    return _table(texts)


def _reward_text(kind: RewardKind) -> str:
    facts = []
    if kind.seconds_quantiles:
        law = kind.seconds_quantiles
        median = min(law, key=lambda q: abs(q - 0.5))
        facts.append(f"about {law[median]:g} s")
    if kind.workers is not None:
        facts.append(f"{kind.workers} workers")
    if kind.limit_s is not None:
        facts.append(f"limit {kind.limit_s:g} s")
    if kind.calls_per_s is not None:
        facts.append(f"{kind.calls_per_s:g} calls/s")
    return f"{kind.text} ({', '.join(facts)})" if facts else kind.text
