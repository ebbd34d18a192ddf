"""How configs written for earlier versions are read, whose keys are not quite those of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GONE = {
    "rollout.engine.cuda_graphs": "It is gone, remove it: the embedded engine captures no CUDA"
    " graphs any more, and rollout.engine.name=vllm is the engine for GPUs",
}
"""Mapping from each key that only earlier versions had to advice for a user who still sets it."""


def as_it_was(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for keys that a run's `config.yaml` (its mapping is `tree`) is too old to
    have, so that the run goes on as it began: `chat` is False for data without a system prompt,
    since its prompts went through no chat template then."""
    data = tree.get("data")
    if not isinstance(data, Mapping):
        return {}
    plain = {
        name: {"chat": False}
        for name in ("train", "eval")
        if isinstance(data.get(name), Mapping) and data[name].get("system_prompt") is None
    }
    return {"data": plain}
