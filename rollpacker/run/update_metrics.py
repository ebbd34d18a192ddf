"""The metrics of a step that had several optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SUMS = (
    *("train/response_tokens", "train/tokens", "train/padded_tokens", "train/micro_batches"),
    "train/recomputed_micro_batches",
)
"""Counts of the whole step."""
_OF_EACH = ("actor/ppo_kl", "actor/ratio/mean", "actor/clip_ratio_low", "actor/clip_ratio_high")
"""What grows from update to update is shown of each, as NAME/update_1 and so on."""
_LAST = ("train/lora_merge_loss", "perf/pipeline/host_links")
_LAST_ENDINGS = ("/layers", "/slow")
"""What is true at the end of the step. The endings are those of pipeline stages and links."""

_FIRST = ("sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/")
"""What compares engine and trainer: only in the first update have both the same weights."""


def metrics_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Those of one update as they are. Of several: sums of what is counted, the first update's of
    what compares engine and trainer, extremes of what is one, and means of all else, each update
    alike."""
    if len(updates) == 1:
        return dict(updates[0])
    names = dict.fromkeys(name for update in updates for name in update)
    found = {name: _of(name, [u[name] for u in updates if name in u]) for name in names}
    for name in _OF_EACH:
        for number, update in enumerate(updates, start=1):
            if name in update:
                found[f"{name}/update_{number}"] = update[name]
    found["train/updates"] = float(len(updates))
    return found


def _of(name: str, values: Sequence[float]) -> float:
    if name in _SUMS or name.endswith("/busy_s"):
        return sum(values)
    if name.startswith(_FIRST):
        return values[0]
    if name in _LAST or name.endswith(_LAST_ENDINGS):
        return values[-1]
    if name.endswith("/max") or "peak" in name:
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return sum(values) / len(values)
