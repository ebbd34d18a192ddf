"""The names that a scenario may use for systems, length laws and kinds of reward. The numbers and
their sources are in `presets.yaml`; models and GPUs are in `hardware.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.sim.hardware import GPUS, MODELS, read_tables

SWITCHES = (
    *("tail_batching", "reward_scheduler", "parallelism_planner"),
    *("stream_trainer", "oracle"),
)
"""Names of the sections of a scenario that a system's preset sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """Default values of a reward stage's fields, for one way to check answers (`kind`)."""

    text: str
    seconds_quantiles: Mapping[float, float] | None = None
    """Mapping from quantile to the seconds of one check, before any time limit. None: not set."""
    workers: int | None = None
    calls_per_s: float | None = None
    limit_s: float | None = None
    """Seconds after which a check fails. None: there is no limit."""
    slowest_correct_s: float | None = None
    """Seconds of a check above which the answer is always wrong. None: no such limit."""


_TABLES = read_tables("presets.yaml")

SYSTEMS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    name: system["switches"] for name, system in _TABLES["systems"].items()
}
"""Mapping from a system's name to its values of the sections `SWITCHES`, as in a scenario file."""

_STREAM = SYSTEMS["rollpacker-published"]["stream_trainer"]
RELEASE_WINDOW: list[float] = _STREAM["window"]
"""Lowest and highest share of a round's samples that are finished when devices of engines are
released to the trainer."""
STREAMED_SHARE: float = _STREAM["max_share"]
"""Largest share of a step's samples whose gradients are computed during generation."""

_LENGTHS = _TABLES["lengths"]
_CAP: int = _LENGTHS["cap"]
"""Longest response in the RollPacker paper's measurement of lengths, in tokens."""
LONGER_SHARE: float = _LENGTHS["longer_share"]
"""Share of responses taken to exceed twice the paper's cap, of those that exceed the cap by luck
(not because their prompt is hard)."""
LUCKY_SHARE: float = _LENGTHS["lucky_share"]
"""Of the responses that exceed the paper's cap, the share that does so by luck, and not because the
prompt is hard (its responses often run to the cap)."""
PROMPTS: dict[str, float] = _LENGTHS["prompts"]
"""Values of fields of `LengthLaw`, by name, that say how much a length depends on its prompt."""


def length_laws(longer_share: float, lucky_share: float) -> dict[str, Mapping[float, int]]:
    """Mapping from a length law's name to its mapping from quantile to response tokens, for prompts
    that are not hard. Quantiles are the paper's; those above are assumed: of responses that reach
    the paper's cap, `lucky_share` is by luck, of which `longer_share` exceeds twice the cap."""
    laws: dict[str, Mapping[float, int]] = {}
    for name, law in _LENGTHS["laws"].items():
        capped = lucky_share * law["capped_share"]
        tail = {1 - capped: _CAP, 1 - longer_share * capped: 2 * _CAP}
        laws[name] = {**law["quantiles"], **tail}
    return laws


LENGTH_LAWS = length_laws(LONGER_SHARE, LUCKY_SHARE)

REWARD_KINDS: Mapping[str, RewardKind] = {
    name: RewardKind(**facts) for name, facts in _TABLES["rewards"].items()
}
"""Mapping from the `kind` of a reward stage (a way to check answers) to its defaults."""

# -- listing -----------------------------------------------------------------------


def describe_presets() -> str:
    """Returns a text that lists every preset with its numbers."""
    return "\n\n".join(
        f"{title}\n" + "\n".join(f"  {line}" for line in lines)
        for title, lines in (
            ("model", _model_lines()),
            ("cluster.gpu", _gpu_lines()),
            ("system", _table({k: v["text"] for k, v in _TABLES["systems"].items()})),
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
        lucky = next(1 - q for q in sorted(law) if law[q] >= _CAP)
        texts[name] = f"{points}; {lucky:.2%} reach {_CAP} tokens by luck (Fig. 2a of the paper)"
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
