"""Makes rows from reasoning-gym's procedural tasks: nothing is downloaded, and a seed decides all
rows.

Item i of a reasoning-gym dataset with seed s is drawn from `Random(s + i)`: neighbouring seeds
share items. So every task of every mixture gets a seed of its own, far from the others."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollpacker.data.dataset import DataError, DatasetConfig, TaskConfig
from rollpacker.data.files import RawRow
from rollpacker.did_you_mean import did_you_mean
from rollpacker.imports import require

_SEED_RANGE = 2**31
"""Upper bound of the seeds of tasks. Some tasks add the row's number and pass the sum to generators
that take 32 bits, so the bound is lower."""


def make_rows(config: DatasetConfig, split: str) -> list[RawRow]:
    """Make `config.size` rows of the mixture of tasks, in a fixed random order. `split` ("train" or
    "eval") is part of the seed, so that the two get different problems from one `config.seed`. The
    rows' columns are question, answer, metadata, task and task_options. Raises `DataError` for a
    task or option that does not exist."""
    assert config.size is not None
    counts = shares([task.weight for task in config.tasks], config.size)
    rows = []
    for position, (task, count) in enumerate(zip(config.tasks, counts, strict=True)):
        rows += _task_rows(task, count, _task_seed(config.seed, split, position, task), split)
    order = np.argsort(
        np.random.Philox(_task_seed(config.seed, split, -1, None)).random_raw(len(rows)),
        kind="stable",
    )
    return [rows[index] for index in order]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into whole numbers in proportion to `weights`. What rounding down leaves goes
    to the largest remainders."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def create_task(task: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    """Make a reasoning-gym dataset of `size` problems. Raises `DataError` for a task or option that
    reasoning-gym does not have."""
    require("reasoning_gym", extra="gym", what="data of kind reasoning_gym")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task}.{did_you_mean(task, DATASETS)}")
    known = inspect.signature(DATASETS[task][1]).parameters
    for name in options:
        if name not in known or name in ("seed", "size"):
            own = [key for key in known if key not in ("seed", "size")]
            raise DataError(
                f"task {task} has no option {name}.{did_you_mean(name, own)}"
                f" It has: {', '.join(own)}."
            )
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
    except Exception as error:  # the task's own checks: assertions, mostly without a text
        reason = str(error) or "its own check of them failed"
        raise DataError(
            f"task {task} does not take the options {dict(options)}: {reason}"
        ) from None


def _task_rows(task: TaskConfig, count: int, seed: int, split: str) -> list[RawRow]:
    if not count:
        return []
    dataset = create_task(task.task, task.options, count, seed)
    options = dict(task.options)
    rows = []
    for index in range(count):
        try:
            item = dataset[index]
        except Exception as error:  # whatever a third party's generator does
            raise DataError(
                f"task {task.task} could not make row {index} of {count} for {split}:"
                f" {type(error).__name__}: {error}"
            ) from None
        columns = {
            "question": item["question"],
            "answer": item["answer"],
            "metadata": item["metadata"],
            "task": task.task,
            "task_options": options,
        }
        rows.append(RawRow(f"{task.task}, item {index} ({split})", columns))
    return rows


def _task_seed(seed: int, split: str, position: int, task: TaskConfig | None) -> int:
    options = json.dumps(dict(task.options), sort_keys=True, default=str) if task else ""
    key = f"{seed}/{split}/{position}/{task.task if task else ''}/{options}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % _SEED_RANGE
