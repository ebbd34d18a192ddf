"""A run in stages over direct links, whose processes and connections are killed, through the
command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.resume import fingerprints, write_config, write_model
from rollpacker.cli.main import main
from rollpacker.config import schema
from rollpacker.core.events import TrainerLost
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog
from tests.run.test_process_run import KillRanks, worker_pids

DIRECT = (
    *("train.processes=2", "train.pipeline.stages=2", "train.pipeline.links=direct"),
    *("train.micro_batch_tokens=128", "save_samples=false"),
)
LOSS = '''
"""A loss that shuts connections of its process, when it is called for the n-th time."""
import os, socket, stat
from pathlib import Path

LEFT = Path(os.environ.get("SHUT_AFTER", "/nowhere"))


def loss(log_probs, old_log_probs, advantages):
    if LEFT.exists():
        left = int(LEFT.read_text()) - 1
        LEFT.write_text(str(left)) if left else LEFT.unlink()
        if not left:
            shut()
    return -(log_probs - old_log_probs).exp() * advantages


def shut():
    """Those to the other stage: neither the line to the run, nor the store."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            one = socket.socket(fileno=os.dup(number))
            if one.family in (socket.AF_INET, socket.AF_INET6):
                if one.getpeername()[1] != int(os.environ["MASTER_PORT"]):
                    one.shutdown(socket.SHUT_RDWR)
            one.close()
        except OSError:
            continue
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("faults")
    threads = torch.get_num_threads()
    write_model(folder / "model")
    (folder / "loss.py").write_text(LOSS)
    yield write_config(folder, steps=4)
    torch.set_num_threads(threads)


def train(config: Path, name: str, *options: str) -> int:
    return main(words(config, name, *options))


def words(config: Path, name: str, *options: str) -> list[str]:
    own = f"algorithm.loss_function={config.parent / 'loss.py'}:loss"
    return ["train", str(config), f"name={name}", own, *DIRECT, *options]


def folder(config: Path, name: str) -> Path:
    return config.parent / "runs" / name


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> dict[str, str]:
    assert train(config, "undisturbed") == 0
    return fingerprints(folder(config, "undisturbed"))


def test_a_run_that_loses_a_stage_and_a_connection_comes_back(
    config: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = config.parent / "left"
    left.write_text("3")
    monkeypatch.setenv("SHUT_AFTER", str(left))
    killer = KillRanks(monkeypatch, {("apply", 4): 0})
    assert train(config, "back") == 0
    assert killer.is_through and not left.exists()
    log = EventLog(folder(config, "back") / "events.jsonl")
    events = [entry.event for entry in log if isinstance(entry, Record)]
    lost = [event.reason for event in events if isinstance(event, TrainerLost)]
    assert len(lost) == 2 and "SIGKILL" in lost[1], lost
    assert fingerprints(folder(config, "back")) == undisturbed


def test_one_that_is_given_up_exits_with_6_and_is_resumed(
    config: Path,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MAX_TRAINER_LOSSES", 1)
        (left := config.parent / "left").write_text("5")
        patch.setenv("SHUT_AFTER", str(left))
        assert train(config, "ended") == 6
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rollpacker: ") and "lost" in error and "--resume" in error, error
    assert not left.exists() and not worker_pids(os.getpid())
    assert train(config, "ended", "--resume") == 0
    assert fingerprints(folder(config, "ended")) == undisturbed


def test_under_torchrun_a_stage_that_is_cut_off_ends_the_run_which_is_resumed_without(
    config: Path, undisturbed: dict[str, str]
) -> None:
    """There its line to the run is a connection too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (left := config.parent / "left").write_text("5")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(port), "-m", "rollpacker.cli.main"),
            *words(config, "torchrun"),
        ],
        env={**os.environ, "SHUT_AFTER": str(left)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode != 0 and not left.exists()
    told = [line for line in done.stderr.splitlines() if line.startswith("rollpacker: ")]
    assert len(told) == 1 and "--resume" in told[0], done.stderr
    assert "exitcode  : 6" in done.stderr
    assert train(config, "torchrun", "--resume") == 0
    assert fingerprints(folder(config, "torchrun")) == undisturbed
