"""Runs of slime's loop with RollPacker's rollouts, on a made-up server with a frozen policy. They
run with slime's own modules where SLIME_CHECKOUT names a checkout, else with stand-ins
(`slimes.py`)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integrations_slime import slimes
from tests.integrations_slime.host import arguments, expected, trained
from tests.integrations_slime.servers import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def port() -> Any:
    with serving() as found:
        yield found


def run(folder: Path, port: int, mode: str, **changes: Any) -> tuple[dict[str, str], list[Any]]:
    """What a run trained on, and what each rollout returned."""
    steps = list(trained(arguments(folder, port, mode, **changes)))
    return steps[-1][2], [output for _, output, *_ in steps]


def test_2000_of_2000_responses_are_those_of_slimes_synchronous_mode(
    tmp_path: Path, port: int
) -> None:
    plain, _ = run(tmp_path / "plain", port, "plain")
    on, outputs = run(tmp_path / "on", port, "on")
    assert len(on) == 2000
    assert sum(on[name] == plain[name] for name in plain) == 2000
    metrics = [one.metrics for one in outputs]
    assert sum(one["rollpacker/prompts_deferred"] for one in metrics) > 25
    assert metrics[-1]["rollpacker/prompts_waiting"] == 0
    assert Counter(one["rollpacker/is_long_round"] for one in metrics)[1.0] >= 2


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("off", {}),
        ("on", {"rollpacker": {"stragglers": "pool"}}),
        ("on", {"rollpacker": {"prompt_factor": 1.25}}),
        ("on", {"custom_generate_function_path": "tests.integrations_slime.host.own"}),
        ("on", {"group_rm": True}),
        ("on", {"num_rollout": None, "num_epoch": 1}),
    ],
)
def test_each_prompt_is_trained_on_once_and_is_what_the_policy_draws(
    tmp_path: Path, port: int, mode: str, settings: dict[str, Any]
) -> None:
    sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 3, "num_rollout": 6}
    if "num_epoch" in settings:
        lines = "".join(json.dumps({"text": f"prompt {n}"}) + "\n" for n in range(51))
        (tmp_path / "prompts.jsonl").write_text(lines)
    responses, outputs = run(tmp_path, port, mode, **{**sizes, **settings})
    assert len(outputs) == 6
    assert responses == expected(arguments(tmp_path, port, **sizes), 48)
    total = {key: sum(one.metrics[f"rollpacker/{key}"] for one in outputs) for key in SECONDS}
    assert all(seconds >= 0 for seconds in total.values()) and total["decode_s"] > 0


SECONDS = ("decode_s", "tail_idle_s", "between_steps_s", "controller_s")


def test_a_resumed_run_trains_on_each_prompt_once_wherever_it_was_killed(
    tmp_path: Path, port: int
) -> None:
    dice, num_kills, steps = random.Random(0), 0, 24
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.integrations_slime.host", str(tmp_path), str(port)]
    command += ["on", str(steps)]
    latest = tmp_path / "checkpoints" / "latest.txt"
    while not latest.exists() or int(latest.read_text()) < steps - 1:
        out = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out) as process:
            assert process.stdout is not None
            for _ in range(dice.randint(1, 9)):
                process.stdout.readline()  # a step was trained on, or the run has ended
            time.sleep(0.2 * dice.random())  # anywhere in the next step, or in its saving
            process.kill()
            num_kills += 1
        assert num_kills < 40
    args = arguments(tmp_path, port, n_samples_per_prompt=2)
    responses = json.loads((tmp_path / "checkpoints" / f"model_{steps - 1}.json").read_text())
    assert responses == expected(args, 8 * steps)
    assert num_kills >= 3


def test_the_driver_prints_its_protocol() -> None:
    command = [sys.executable, "-m", "tests.integrations_slime.speed", "--mode", "on"]
    sizes = ["--steps", "3", "--prompts", "4", "--samples", "2", "--token-s", "0.0002"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [*command, *sizes], cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True
    )
    *steps, last = map(json.loads, found.stdout.splitlines())
    assert [one["step"] for one in steps] == [0, 1, 2]
    assert all(one["step_s"] >= one["rollout_s"] > 0 for one in steps)
    assert [len(one["lengths"]) for one in steps] == [8, 8, 8]
    assert len(last["responses"]) == 24


def test_slime_is_what_the_tests_say_it_is() -> None:
    slimes.install()
    import slime.rollout.data_source as found

    is_real = found.RolloutDataSource is not slimes.RolloutDataSource
    assert is_real == bool(slimes.CHECKOUT)
