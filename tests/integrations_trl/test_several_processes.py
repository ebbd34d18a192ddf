"""TRL's trainer in two processes, with gloo on a CPU: rank 0 decides, and both ranks generate. They
have the environment that `accelerate launch` gives them. No fakes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.integrations_trl.test_rollout_function import SAMPLES, run, sorted_responses
from tests.integrations_trl.test_rollout_function import model_folder as model_folder

LIMIT_S = 280


def launch(model_folder: Path, output: Path, **settings: Any) -> tuple[list[int], list[str]]:
    """Returns the two processes' exit codes, and what they say. Nobody ends one for the other."""
    settings = {"batching": {}, "changes": {}, **settings}
    command = [sys.executable, "-m", "tests.integrations_trl.training", str(model_folder)]
    command += [str(output), json.dumps(settings)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    files = [output / f"said{rank}.txt" for rank in (0, 1)]
    started = []
    for rank, file in enumerate(files):
        own = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with file.open("w") as out:
            root = Path(__file__).parents[2]
            started.append(subprocess.Popen(command, stdout=out, stderr=out, env=own, cwd=root))
    try:
        return [one.wait(LIMIT_S) for one in started], [file.read_text() for file in files]
    finally:
        for one in started:
            one.kill()


def trained(output: Path, *names: str) -> tuple[dict[int, list[Any]], list[list[int]]]:
    """The responses of each row, and the rows of each step, of all ranks together."""
    files = [json.loads((output / f"{name}.json").read_text()) for name in names]
    responses: dict[int, list[Any]] = defaultdict(list)
    for row, found in (pair for one in files for pair in one["responses"].items()):
        responses[int(row)] += map(tuple, found)
    steps = [[*chain(*rows)] for rows in zip(*(one["steps"] for one in files), strict=True)]
    return {row: sorted(found) for row, found in sorted(responses.items())}, steps


def test_two_processes_train_on_what_one_does(model_folder: Path, tmp_path: Path) -> None:
    """Each rank has 9 of the 18 responses, so that one prompt's 3 are divided between the ranks."""
    changes = {"per_device_train_batch_size": 9}
    codes, said = launch(model_folder, tmp_path, changes=changes)
    assert codes == [0, 0], said
    assert ["rollpacker: 6 steps in " in one for one in said] == [True, False]
    changes = {"per_device_train_batch_size": 18}
    one = run(model_folder, tmp_path, changes, enabled=False)
    found, steps = trained(tmp_path, "rank0", "rank1")
    assert found == sorted_responses(one)
    assert sum(map(len, found.values())) == sum(map(len, one.steps)) == 2 * 18 * SAMPLES
    assert steps != one.steps and list(map(len, steps)) == list(map(len, one.steps))
    for step in steps:
        assert [step[i] for i in range(0, len(step), SAMPLES) for _ in range(SAMPLES)] == step


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_others_and_the_training_is_resumed(
    model_folder: Path, tmp_path: Path, rank: int
) -> None:
    """Each prompt is trained on once an epoch over the kill, and both ranks learn the same."""
    changes: dict[str, Any] = {"per_device_train_batch_size": 9, "learning_rate": 1e-3}
    changes |= {"save_strategy": "steps", "save_steps": 1}
    codes, said = launch(model_folder, tmp_path, changes=changes, die=[rank, 4])
    assert codes[rank] == -9 and codes[1 - rank] == 1
    assert "RankLost: another process of the training is gone" in said[1 - rank]
    if rank == 0:
        return
    checkpoint = str(tmp_path / "checkpoint-3")
    codes, said = launch(model_folder, tmp_path, changes=changes, resume=checkpoint)
    assert codes == [0, 0], said
    lines = [line for one in said for line in one.splitlines()]
    weights = [line.split()[-1] for line in lines if "is done" in line]
    assert len(weights) == 2 and len({*weights}) == 1
    _, rest = trained(tmp_path, "rank0-resumed", "rank1-resumed")
    _, first = trained(tmp_path, "rank0", "rank1")
    assert (len(first), len(rest)) == (3, 3)
    times = Counter(row for step in [*first, *rest] for row in step)
    assert sum(times.values()) == 2 * 18 * SAMPLES
    assert max(times.values()) <= 2 * SAMPLES and {*times.values()} <= {SAMPLES, 2 * SAMPLES}
