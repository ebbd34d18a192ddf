"""How the ranks of the trainer and the run find each other: who else is at the door, and what a
call can say."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.trainer import launch
from rollpacker.trainer.calls import codec, error_bytes, error_of
from rollpacker.trainer.launch import RankPlace, Ranks, Torchrun
from rollpacker.trainer.model import ModelError
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.trainer import (
    LoraConfig,
    ModelConfig,
    NonFiniteError,
    RanksLost,
    TokenScores,
    TrainConfig,
    TrainerError,
    TrainerProcessError,
    TrainSample,
)
from rollpacker.weights.buffer import BufferLayout, Place
from rollpacker.workers import group
from rollpacker.workers.group import Member
from rollpacker.workers.host import ThisHost
from rollpacker.workers.kinds import SETUP
from rollpacker.workers.line import Line
from rollpacker.workers.loopback import INTERFACE, gloo_at

START_S = 200.0
"""For two processes to load torch on a busy machine."""


LOOPBACK = "0100007F"


def listening() -> dict[int, str]:
    """The ports at which this process listens, with the address in the kernel's hex digits."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    places = [words[1].split(":") for words in lines if words[3] == "0A" and words[9] in own]
    return {int(port, 16): address for address, port in places}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_of_this_machine_need_no_open_door() -> None:
    before = listening()
    ranks = Ranks(1)
    doors = listening().keys() - before.keys()
    strangers = [socket.create_connection(("127.0.0.1", port)) for port in doors]
    try:
        connecting = threading.Thread(target=ranks.connect, daemon=True)
        connecting.start()
        connecting.join(START_S)
        assert not connecting.is_alive(), "a silent connection keeps the start waiting"
        assert not doors
        store = {p: address for p, address in listening().items() if p not in before}
        assert list(store.values()) == [LOOPBACK], "torch's store, for this machine alone"
    finally:
        for stranger in strangers:
            stranger.close()
        ranks.close()


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """This process is rank 0 of two; the environment of rank 1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield {**os.environ, "RANK": "1", "LOCAL_RANK": "1"}


def test_a_silent_stranger_does_not_keep_the_start_waiting_under_torchrun(
    torchrun: dict[str, str],
) -> None:
    ranks = Ranks(2)
    listener = ranks._listener
    assert listener is not None
    strangers = [socket.create_connection((listener.host, listener.port)) for _ in range(3)]
    strangers[1].sendall(b"\x00\x00")
    other = subprocess.Popen([sys.executable, "-m", "rollpacker.trainer.worker"], env=torchrun)
    try:
        began = time.monotonic()
        ranks.connect()
        assert time.monotonic() - began < START_S
        assert [rank.number for rank in ranks.all] == [0, 1]
        assert ranks.all[1].pid == other.pid
        assert listener.host == "127.0.0.1", "all on one machine: nobody else can knock"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((listener.host, listener.port))
    finally:
        ranks.close()
        for stranger in strangers:
            stranger.close()
        other.kill()
        other.wait()


class OneRankHost(ThisHost):
    """Starts no process: a thread plays the rank, which greets and keeps what it is told."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        """The environment of the rank, which `line_to_run` changes."""
        self.is_welcome = threading.Event()

    def start(self, module: str, name: str, **more: Any) -> tuple[Any, Line]:
        ours, theirs = Line.pair()

        def play() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch, "inherited_line", lambda: Line(theirs))
                patch.setattr(os, "environ", self.variables)
                launch.line_to_run()
            self.is_welcome.set()

        threading.Thread(target=play, daemon=True).start()
        return OneRank(), ours


class OneRank:
    pid = 0

    def how_ended(self, wait_s: float = 0.0) -> str | None:
        return None

    def kill(self) -> None:
        """There is no process."""

    def close(self) -> None:
        """There is no process."""


@pytest.mark.parametrize(
    ("chosen", "found"), [({}, INTERFACE), ({"GLOO_SOCKET_IFNAME": "eth7"}, "eth7")]
)
def test_gloo_of_ranks_that_are_all_here_listens_on_the_loopback(
    chosen: dict[str, str], found: str
) -> None:
    host = OneRankHost(dict(chosen))
    ranks = Ranks(1, [RankPlace(0, host, {})])
    try:
        ranks.connect()
        assert host.is_welcome.wait(START_S)
    finally:
        ranks.close()
    assert host.variables["MASTER_ADDR"] == "127.0.0.1"
    assert host.variables["GLOO_SOCKET_IFNAME"] == found


def test_gloo_of_ranks_under_torchrun_on_one_machine_listens_on_the_loopback(
    torchrun: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, str]] = []

    class Heard(Line):
        def send(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
            if kind == SETUP:
                sent.append(json.loads(payload))

    ranks = Ranks(2)
    heard = [
        Member(name=f"rank {n}", number=n, pid=0, line=Heard(Line.pair()[1]), child=None)
        for n in range(2)
    ]
    monkeypatch.setattr(ranks, "_greeted", lambda: heard)
    try:
        ranks.connect()
    finally:
        ranks.close()
    assert sent == [{"GLOO_SOCKET_IFNAME": INTERFACE}] * 2


def test_gloo_of_ranks_on_several_machines_is_left_alone() -> None:
    assert gloo_at("192.0.2.1") == {}


def place(address: str) -> Torchrun:
    return Torchrun(rank=0, world_size=4, local_world_size=2, master=(address, 1), has_store=True)


def test_on_several_machines_the_door_is_at_one_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_own_address", list)
    monkeypatch.setattr(launch, "_addresses", lambda host: ["192.0.2.1", "127.0.0.2"])
    listener = place("a-name").listener()
    assert listener.host == "127.0.0.2", "192.0.2.1 is not of this machine"
    listener.close()
    monkeypatch.undo()
    assert launch._addresses("127.0.0.1") == []
    monkeypatch.setattr(launch, "_own_address", list)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is localhost.*--master-addr"):
        place("localhost").listener()


def test_a_rank_that_is_stopped_is_named_while_the_run_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "LOOK_S", 0.1)

    def said() -> list[str]:
        told = [record.getMessage() for record in caplog.records]
        return [text for text in told if "was stopped by a signal" in text]

    ranks = Ranks(1)
    try:
        ranks.connect()
        (rank,) = ranks.all
        os.kill(rank.pid, signal.SIGSTOP)

        def go_on_once_it_is_said() -> None:
            until = time.monotonic() + START_S
            while not said() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(rank.pid, signal.SIGCONT)

        threading.Thread(target=go_on_once_it_is_said, daemon=True).start()
        with pytest.raises(TrainerError, match="failed: AttributeError"):
            ranks.call("hashes", [()])
    finally:
        ranks.close()
    assert len(said()) == 1 and f"kill -CONT {rank.pid}" in said()[0]


def test_a_rank_that_stays_stopped_is_lost_and_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "LOOK_S", 0.1)
    monkeypatch.setattr(group, "STOPPED_S", 0.3)
    ranks = Ranks(1)
    try:
        ranks.connect()
        pid = ranks.all[0].pid
        assert ranks.how_lost() is None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RanksLost, match=rf"pid {pid}\) was stopped by a signal"):
            ranks.call("hashes", [()])
        ranks.start_anew()
        ranks.connect()
        another = ranks.all[0].pid
        assert another != pid and not Path(f"/proc/{pid}").exists()
        with pytest.raises(TrainerError, match="failed: AttributeError"):
            ranks.call("hashes", [()])
        os.kill(another, signal.SIGKILL)
        until = time.monotonic() + START_S
        while (how := ranks.how_lost()) is None and time.monotonic() < until:
            time.sleep(0.01)
        assert how is not None and f"pid {another}" in how and "SIGKILL" in how
    finally:
        ranks.close()
    with pytest.raises(TrainerProcessError, match="the run is over"):
        ranks.start_anew()


def test_a_rank_does_only_what_is_listed() -> None:
    ranks = Ranks(1)
    try:
        ranks.connect()
        with pytest.raises(TrainerError, match=r"failed: AssertionError.*__init__"):
            ranks.call("__init__", [()])
    finally:
        ranks.close()


ID = SampleId(PromptId("train", 0, 3), 1, 0)


@pytest.mark.parametrize(
    "value",
    [
        LearnerSetup(
            model=ModelConfig(path="x", lora=LoraConfig(rank=4), chat_template_kwargs={"a": True}),
            train=TrainConfig(steps=3, schedule_options={"num_cycles": 2.0}),
            algorithm=AlgorithmConfig(name="grpo", kl_coef=0.1),
            temperature=0.7,
            total_steps=None,
        ),
        TrainSample(
            sample=ID,
            prompt_tokens=tuple(range(50)),
            response_tokens=(1, 2),
            rollout_log_probs=(-0.1, -1e-9),
            advantage=(0.5, -0.5),
            token_weight=1 / 3,
        ),
        TokenScores(log_probs=tuple(-i / 7 for i in range(40))),
        StepOutcome(
            sums=StepSums(seconds=1.5, totals=Counter(a=1, b=0.5)),  # type: ignore[arg-type]
            grad_norm=0.1,
            learning_rate=1e-6,
            critic_grad_norm=None,
            peak_memory_bytes=1 << 40,
        ),
        BufferLayout(
            path="/dev/shm/x",
            inode=7,
            size_bytes=64,
            places={"w": Place(start=0, shape=(2, 3), dtype="bfloat16")},
        ),
        Path("/somewhere"),
    ],
)
def test_all_that_a_call_and_its_result_hold_come_back_equal(value: object) -> None:
    found = codec().decode(codec().encode(("method", (value, [value]))))
    assert found == ("method", (value, [value])) and repr(found[1][0]) == repr(value)


def raised(error: Exception) -> Exception:
    """As a rank in this test's module raised it."""
    try:
        raise error
    except Exception as caught:
        return error_of(error_bytes(caught))


def test_errors_arrive_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for error in (
        NonFiniteError("sample 3"),
        ModelError("no such model"),
        TrainerProcessError("gone"),
        torch.OutOfMemoryError("too much"),
    ):
        found = raised(error)
        assert type(found) is type(error) and str(found) == str(error)
    full = raised(OSError(errno.ENOSPC, "full", "/disk"))
    assert (type(full), full.args) == (OSError, (errno.ENOSPC, "full"))
    assert isinstance(full, OSError) and full.filename == "/disk"
    assert type(raised(FileNotFoundError(errno.ENOENT, "none", "/x"))) is FileNotFoundError
    for foreign in (
        KeyError("x"),
        ValueError("of a library"),
        UnicodeDecodeError("a", b"", 0, 1, "b"),
    ):
        found = raised(foreign)
        assert type(found) is TrainerError and "process 1 of the trainer failed" in str(found)
    lost = raised(RuntimeError("[../gloo/transport/tcp/pair.cc] closed"))
    assert type(lost) is TrainerProcessError and "--resume" in str(lost)
