"""Real runs of a tiny model whose trainer has processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.cli import train as train_verb
from rollpacker.cli.verbs import build_parser
from rollpacker.config import schema
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import StartGradients
from rollpacker.core.events import TrainerLost
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog
from rollpacker.run.error_messages import classify
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.run.replay import replay
from rollpacker.trainer import worker
from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.trainer import TrainerProcessError
from rollpacker.workers.group import Member

# Gradients that are next to zero must not move anything: with a tiny eps, Adam makes whole steps of
# what is little more than rounding.
CALM = "train.eps=1e-4"
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    threads = torch.get_num_threads()
    write_model(folder / "model")
    yield write_config(folder, steps=STEPS)
    torch.set_num_threads(threads)


def train(config: Path, name: str, *overrides: str, **settings: Any) -> Path:
    """The run's folder."""
    overrides = (f"name={name}", "save_samples=false", CALM, *overrides)
    return rollpacker.train(config, overrides, **settings).folder


def tensors(run: Path) -> dict[str, Tensor]:
    """All that the last checkpoint holds, by folder, file and name. What all processes have alike,
    any of them may have written."""
    folder = newest_checkpoint(run / "checkpoints").folder
    return {
        f"{path.parent.name}/{'' if '/step.' in name else path.name}/{name}": value
        for path in sorted(folder.glob("*/*.safetensors"))
        for name, value in load_file(path).items()
    }


def largest_difference(one: Path, other: Path) -> float:
    models = [{n: v for n, v in tensors(r).items() if n.startswith("model/")} for r in (one, other)]
    assert models[0].keys() == models[1].keys() and models[0]
    return max((models[0][n] - models[1][n]).abs().max().item() for n in models[0])


def assert_equal(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert [n for n in first if not torch.equal(first[n], second[n])] == []


def worker_pids(run_pid: int) -> dict[int, int]:
    """By rank, whichever thread of the run has started them."""
    found = {}
    children = list[str]()
    for thread in Path(f"/proc/{run_pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            children.append((thread / "children").read_text())
    for pid in map(int, " ".join(children).split()):
        if b"rollpacker.trainer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found[next(int(w[5:]) for w in words if w.startswith(b"RANK="))] = pid
    return found


class KillRanks:
    """Kills ranks in calls that they have been sent and not answered: the n-th of a method, counted
    from 1 over the whole run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: dict[tuple[str, int], int]) -> None:
        """`plan`: the call, and the rank."""
        self.pids: list[int] = []
        """Of those that were killed."""
        self._plan = plan
        self._counts = Counter[str]()
        replies = Ranks._replies

        def kill_first(ranks: Ranks, method: str, called: Sequence[Member]) -> Any:
            self._counts[method] += 1
            number = self._plan.pop((method, self._counts[method]), None)
            if number is not None:
                pid = ranks.all[number].pid
                assert pid in worker_pids(os.getpid()).values()
                self.pids.append(pid)
                os.kill(pid, signal.SIGKILL)
            return replies(ranks, method, called)

        monkeypatch.setattr(Ranks, "_replies", kill_first)

    @property
    def is_through(self) -> bool:
        return not self._plan


def test_a_streamed_run_replays_and_ends_where_the_other_does(config: Path) -> None:
    stream = "stream_trainer={enabled: true}"
    plain = train(config, "plain", "train.processes=1")
    streamed = train(config, "streamed", "train.processes=1", stream)
    log = list(EventLog(streamed / "events.jsonl"))
    commands = [c for entry in log if isinstance(entry, Record) for c in entry.commands]
    assert any(isinstance(command, StartGradients) for command in commands)
    replayed = replay(log)
    assert replayed.difference is None and replayed.num_steps >= STEPS
    assert 0 < largest_difference(plain, streamed) < 1e-5
    in_place = train(config, "in-place")
    assert largest_difference(in_place, plain) < 1e-5
    begin = load_file(config.parent / "model" / "model.safetensors")
    end = {n.rpartition("/")[2]: v for n, v in tensors(plain).items() if n.startswith("model/")}
    assert max((begin[n] - end[n]).abs().max().item() for n in begin) > 1e-3


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    return train(config, "two", "train.processes=2")


def test_a_run_whose_ranks_are_killed_goes_on_as_if_nothing_had_happened(
    config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before there is a checkpoint; with new weights on their way; and in a checkpoint.
    plan = {("apply", 2): 1, ("write_weights", 4): 0, ("save", 2): 0}
    killer = KillRanks(monkeypatch, plan)
    killed = train(config, "killed", "train.processes=2", "checkpoint.every_steps=2")
    assert killer.is_through and len(set(killer.pids)) == len(killer.pids) == 3
    assert_equal(killed, undisturbed)
    log = list(EventLog(killed / "events.jsonl"))
    events = [entry.event for entry in log if isinstance(entry, Record)]
    reasons = [event.reason for event in events if isinstance(event, TrainerLost)]
    assert len(reasons) == 3 and all("SIGKILL" in reason for reason in reasons)
    assert f"process 1 of the trainer (pid {killer.pids[0]})" in reasons[0]
    assert replay(log).difference is None
    assert not worker_pids(os.getpid())


def test_a_run_whose_trainer_is_given_up_is_resumed_as_if_nothing_had_happened(
    config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MAX_TRAINER_LOSSES", 1)
        killer = KillRanks(patch, {("apply", 3): 1})
        with pytest.raises(TrainerProcessError) as caught:
            train(config, "ended", "train.processes=2")
    code, message = classify(caught.value)
    assert code == 6
    assert f"process 1 of the trainer (pid {killer.pids[0]})" in message
    assert "SIGKILL" in message and "--resume" in message
    assert not worker_pids(os.getpid())
    resumed = train(config, "ended", "train.processes=2", resume=True)
    assert_equal(resumed, undisturbed)


def test_torchruns_processes_become_the_trainers(config: Path, undisturbed: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", "2", "--master-port", str(port)),
            *("-m", "rollpacker.cli.main", "train", str(config)),
            *("name=torchrun", "save_samples=false", CALM),
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = config.parent / "runs" / "torchrun"
    assert load_config(run / "config.yaml", (), RunConfig).train.processes == 2
    assert_equal(run, undisturbed)
    for line in (f"step 1/{STEPS} ", "where the seconds went"):
        assert done.stdout.count(line) == 1, done.stdout


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)


def test_another_number_of_processes_than_torchruns_is_refused(monkeypatch, config: Path) -> None:
    under_torchrun(monkeypatch, rank=0)
    args = build_parser().parse_args(["train", str(config), "train.processes=3"])
    with pytest.raises(ValueError, match=r"train\.processes=3.*2 processes.*leave"):
        train_verb.run(args)


def test_other_ranks_read_no_config_and_print_nothing(monkeypatch, capfd) -> None:
    under_torchrun(monkeypatch, rank=1)
    became: list[str] = []
    monkeypatch.setattr(worker, "main", lambda: became.append("worker"))
    parser = build_parser()
    assert train_verb.run(parser.parse_args(["train", "nowhere.yaml"])) == 0
    assert became == ["worker"]
    assert train_verb.run(parser.parse_args(["train", "nowhere.yaml", "--dry-run"])) == 0
    assert became == ["worker"]
    assert capfd.readouterr() == ("", "")
