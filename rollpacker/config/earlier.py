"""What configs of earlier versions mean, where keys have come or gone since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GONE = {
    "rollout.engine.cuda_graphs": "It is gone, remove it: the embedded engine captures no CUDA"
    " graphs any more, and rollout.engine.name=vllm is the engine for GPUs",
}
"""Mapping from each key that only earlier versions had to advice for a user who still sets it."""


def as_it_was(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for keys newer than a run's `config.yaml` (`tree`), so that the run goes on as
    before: `chat` is False for data without a system prompt, since such text prompts used to go
    through no chat template."""
    data = tree.get("data")
    if not isinstance(data, Mapping):
        return {}
    plain = {
        name: {"chat": False}
        for name in ("train", "eval")
        if isinstance(data.get(name), Mapping) and data[name].get("system_prompt") is None
    }
    return {"data": plain}
