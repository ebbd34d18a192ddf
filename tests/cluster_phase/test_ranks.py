"""`rollpacker.cluster.phase` in a program of two ranks: rank 0 asks, all enter and leave."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollpacker.cluster.seats import phases
from rollpacker.workers.loopback import INTERFACE
from tests.cluster_phase.file_seat import jobs_of, turns, two_at_once

ROOT = Path(__file__).parents[2]
BEGIN = """
import os, pathlib, sys, time, datetime
import torch.distributed as dist
import rollpacker.cluster as cluster
from rollpacker.cluster.seats import phases
from rollpacker.workers.loopback import INTERFACE

FOLDER, RANK = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])

def say(what):
    with (FOLDER / "turns.jsonl").open("a") as file:
        file.write('{"job": "", "pid": 0, "what": "%s", "rank": %d}\\n' % (what, RANK))

def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.002)

# Who loads its libraries for long has nobody wait in the group. Less patient than a turn is long.
(FOLDER / f"loaded-{RANK}").touch()
wait_for(f"loaded-{1 - RANK}")
dist.init_process_group(
    "gloo", f"file://{FOLDER}/meet", timeout=datetime.timedelta(seconds=10), world_size=2, rank=RANK
)
"""


def run(folder: Path, body: str) -> list[tuple[int, str]]:
    """Exit codes and stderr of the ranks that run it. What is left after one has failed is ended,
    as torchrun does."""
    script = folder / "script.py"
    script.write_text(BEGIN + body)
    command = [sys.executable, "-m", "tests.cluster_phase.file_seat", str(script), str(folder)]
    environ = {**os.environ, "ROLLPACKER_SEAT": f"{folder}#job", "WORLD_SIZE": "2"}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            command,
            env={**environ, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    try:
        for rank in ranks:
            said = rank.communicate(timeout=250)[1]
            found.append((rank.returncode, said))
    finally:
        for rank in ranks:
            rank.kill()
    return found


def test_all_enter_and_leave_together_and_hear_the_same(tmp_path: Path) -> None:
    # Another job has the pool for longer than the ranks' own patience.
    (tmp_path / "all").write_text("job other")
    body = """
with cluster.phase("rollout", wake=lambda: say("wake"), park=lambda: say("park")):
    if RANK == 1:
        time.sleep(1.0)
    say("work")
cluster.committed(1)
if RANK == 0:
    (FOLDER / "stop-job").write_text("1")
    assert phases._opened()._wish.wait(60)
try:
    cluster.phase("train").__enter__()
except cluster.Stopped as error:
    say(f"stops with {error.code}")
if RANK == 0:
    wait_for("last")
(FOLDER / "last").touch()
"""

    def have_it() -> None:
        while not (tmp_path / "here-job").exists():
            time.sleep(0.01)
        time.sleep(12.0)
        (tmp_path / "here-other").touch()

    threading.Thread(target=have_it, daemon=True).start()
    codes = run(tmp_path, body)
    assert [code for code, _ in codes] == [0, 0], codes
    assert jobs_of(tmp_path, "rollout") == ["job"] and two_at_once(tmp_path) == []
    entries = turns(tmp_path)
    for rank in (0, 1):
        mine = [entry["what"] for entry in entries if entry.get("rank") == rank]
        assert mine == ["wake", "work", "park", "stops with 130"]
    said = [entry["what"] for entry in entries]
    assert said[0] == "entered" and said[7] == "left"
    assert sorted(said[8:]) == ["closed", "committed", "stops with 130", "stops with 130"]


def test_what_the_seat_raises_all_raise(tmp_path: Path) -> None:
    (tmp_path / "lost-job").touch()
    body = """
try:
    with cluster.phase("rollout"):
        pass
except cluster.LeaseLost as error:
    say(str(error))
if RANK == 0:
    wait_for("last")
(FOLDER / "last").touch()
"""
    codes = run(tmp_path, body.replace("    with", "    time.sleep(0.3)\n    with", 1))
    assert [code for code, _ in codes] == [0, 0], codes
    told = sorted((e["rank"], e["what"]) for e in turns(tmp_path) if "rank" in e)
    assert told == [(0, "a file says so"), (1, "a file says so")]


def test_a_program_that_ends_behind_its_last_phase_ends_well(tmp_path: Path) -> None:
    # Gloo's threads let go of what was sent last only when nothing else wants the processor. One
    # that does so while Python ends would abort it: every third time, where nobody ends the group.
    body = """
def threads_come_last():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for thread in os.listdir("/proc/self/task"):
        if "gloo" in pathlib.Path(f"/proc/self/task/{thread}/comm").read_text():
            os.sched_setaffinity(int(thread), os.sched_getaffinity(0))
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

with cluster.phase("rollout"):
    threads_come_last()
"""
    codes = run(tmp_path, body)
    assert [code for code, _ in codes] == [0, 0], codes


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank_ends_all_and_keeps_the_pool(tmp_path: Path, failing: int) -> None:
    body = f"""
with cluster.phase("train", park=lambda: say("park")):
    if RANK == {failing}:
        raise KeyError("mine")
"""
    codes = run(tmp_path, body)
    assert [code for code, _ in codes] == [1, 1], codes
    assert "KeyError: 'mine'" in codes[failing][1]
    assert "KeyError" not in codes[1 - failing][1]
    said = [entry["what"] for entry in turns(tmp_path)]
    # Who holds a pool lets go of it by its end.
    assert sorted(said) == ["entered", "park", "park"]


def test_the_phase_after_an_exception_on_one_rank_is_refused(tmp_path: Path) -> None:
    body = """
try:
    with cluster.phase("train"):
        raise KeyError("both")
except KeyError:
    pass
try:
    with cluster.phase("rollout"):
        pass
except ValueError as error:
    say(str(error).replace('"', "'"))
"""
    codes = run(tmp_path, body)
    assert [code for code, _ in codes] == [0, 0], codes
    expected = "phase('rollout'): an exception ended phase('train') on one of several ranks; "
    told = [entry["what"] for entry in turns(tmp_path) if "rank" in entry]
    assert told == [expected + "end the process"] * 2


def test_ranks_that_do_not_know_each_other_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_program", None)
    monkeypatch.setenv("ROLLPACKER_SEAT", "alone")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match=r"torch\.distributed is not initialised"),
        phases.phase("train"),
    ):
        pass


@pytest.mark.parametrize("chosen", [None, "eth7"])
def test_the_group_of_ranks_that_are_all_here_is_on_the_loopback(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    seen: list[str | None] = []

    class Distributed:
        """What the ranks use of `torch.distributed`."""

        is_available = is_initialized = staticmethod(lambda: True)
        get_world_size = staticmethod(lambda: 2)
        get_rank = staticmethod(lambda: 1)

        @staticmethod
        def new_group(**settings: object) -> object:
            seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
            return object()

    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed)  # type: ignore[arg-type]  # as much of it as is used
    monkeypatch.setattr("atexit.register", lambda function: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    for local in ("2", "1"):  # all on this machine, or half of them
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        phases._Ranks()
    assert seen == [chosen or INTERFACE, chosen]
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
