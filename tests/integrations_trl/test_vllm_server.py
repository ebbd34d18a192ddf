"""TRL's `use_vllm` with a server, which is made up (`speed.py` says what else is)."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from rollpacker.scheduler.servers import NoServer
from tests.integrations_trl import speed, trl_server
from tests.integrations_trl.test_several_processes import launch


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with trl_server.process(0.0002) as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)


def asked(mode: str, steps: int, prompts: int = 8, samples: int = 4) -> argparse.Namespace:
    return argparse.Namespace(mode=mode, steps=steps, prompts=prompts, samples=samples, seed=5)


def trained(
    url: str,
    folder: Path,
    what: argparse.Namespace,
    lines: speed.Lines | None = None,
    **changes: Any,
) -> tuple[dict[str, list[int]], list[dict[str, Any]]]:
    """The responses by prompt and place, and a line for each step."""
    lines = lines or speed.Lines(io.StringIO())
    speed.train(url, what, lines, folder, **changes)
    return lines.trained, [json.loads(line) for line in lines.out.getvalue().splitlines()]


def test_what_is_trained_on_is_what_trl_alone_trains_on(url: str, tmp_path: Path) -> None:
    """2,048 of 2,048 responses are those of TRL's own path to its server, token for token."""
    plain, order = trained(url, tmp_path, asked("plain", 8, 32, 8))
    ours, steps = trained(url, tmp_path, asked("on", 8, 32, 8))
    assert len(plain) == 2048 and ours == plain
    assert len(steps) == len(order) == 8
    assert [one["lengths"] for one in steps] != [one["lengths"] for one in order]
    _, steps = trained(url, tmp_path, asked("off", 2, 32, 8))
    assert [one["lengths"] for one in steps] == [one["lengths"] for one in order[:2]]


def test_an_evaluation_is_trls_own(url: str, tmp_path: Path) -> None:
    lines = speed.Lines(io.StringIO())
    changes = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    found, _ = trained(url, tmp_path, asked("on", 2), lines, **changes)
    assert sorted(lines.evaluated) == [0] * 8 + [1] * 8  # two evaluations of two prompts
    assert found == trained(url, tmp_path, asked("off", 2))[0]


def test_two_processes_share_the_server(url: str, tmp_path: Path) -> None:
    """Only rank 0 talks to it, and each trains on its part."""
    what, changes = vars(asked("on", 3)), {"per_device_train_batch_size": 16}
    codes, said = launch(tmp_path, tmp_path, server=url, asked=what, changes=changes)
    assert codes == [0, 0], said
    first, second = (json.loads((tmp_path / f"rank{n}.json").read_text()) for n in (0, 1))
    assert len(first) == len(second) == 48
    right, _ = trained(url, tmp_path, asked("off", 3))
    assert first | second == {name: [*tokens] for name, tokens in right.items()}


def test_a_server_with_faults(url: str, tmp_path: Path) -> None:
    """It breaks off, answers 5xx or late, aborts: nothing is lost, doubled or other. One that comes
    back with other weights ends the training."""
    right, _ = trained(url, tmp_path, asked("off", 6))
    with trl_server.process(0.0002, "some") as bad:
        assert trained(bad, tmp_path, asked("on", 6))[0] == right
    with (
        trl_server.process(0.0002, "other") as bad,
        pytest.raises(NoServer, match="is back without the step's weights"),
    ):
        trained(bad, tmp_path, asked("on", 6))


class Killed(BaseException):
    pass


class Kills(speed.Lines):
    def __call__(self, *args: Any, **columns: Any) -> list[float]:
        if self.trainer.state.global_step == 3:
            raise Killed
        return super().__call__(*args, **columns)


def test_every_prompt_once_over_a_kill_and_a_resume(url: str, tmp_path: Path) -> None:
    keep = {"save_strategy": "steps", "save_steps": 1}
    killed = Kills(io.StringIO())
    with pytest.raises(Killed):
        trained(url, tmp_path, asked("on", 6), killed, **keep)
    rest, steps = trained(
        url, tmp_path, asked("on", 6), resume=str(tmp_path / "checkpoint-3"), **keep
    )
    assert len(steps) == 3 and len(killed.trained) == len(rest) == 96
    assert {**killed.trained, **rest} == trained(url, tmp_path, asked("off", 6))[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sets_trainer": False}, r"set rollout\.trainer = trainer before"),
        ({"vllm_structured_outputs_regex": "a+"}, "does not go with vllm_structured_outputs_regex"),
    ],
)
def test_what_cannot_be_had_is_said(
    url: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trained(url, tmp_path, asked("on", 1), **changes)
