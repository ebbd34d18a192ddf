"""A job that takes turns with others on its devices: what cannot, and what its seat is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster_same_bits import JOBS, compared
from benchmarks.resume import run, start, write_config, write_model
from rollpacker.cluster.seats import mailbox_seat as seats
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, Alone, LeaseLost
from rollpacker.run.error_messages import classify
from rollpacker.run.errors import HostsLost
from rollpacker.run.parts.seats import RunSeat, take_seat
from tests.cli.test_bad_input import Command, command, model
from tests.cluster_phase import file_seat

__all__ = ["command", "model"]

JUDGE = {"function": "judge", "arguments": {"model_path": "judges"}}
REWARD_MODEL = {"function": "reward_model", "arguments": {"model_path": "rewards"}}


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({}, "set train.processes"),
        (
            {"train__processes": 2, "train__colocate": True, "rollout__engines": 2},
            "leave train.colocate out",
        ),
        ({"train__processes": 1, "rewards": [JUDGE]}, "rewards.0.arguments.url"),
        (
            {"train__processes": 1, "rewards": [REWARD_MODEL], "model__device": "auto"},
            "rewards.0.arguments.device=cpu",
        ),
        ({"train__processes": 1, "model__quantization": "4bit"}, "leave it out"),
    ],
)
def test_what_cannot_take_turns_is_refused_before_anything_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], cure: str
) -> None:
    monkeypatch.setenv(SEAT_VARIABLE, "alone")
    if changes.get("model__quantization"):
        changes = {**changes, "model__lora": {"rank": 2}}
    told = command.refused(**changes)
    assert cure in told and "a job of a cluster" in told and told.count("\n") == 1


def test_a_seat_that_is_none_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAT_VARIABLE, "throne")
    assert "no such seat" in command.refused(train__processes=1)


def test_a_cluster_that_cannot_be_reached_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(environ: object) -> None:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(seats, "open_seat", nobody)
    with pytest.raises(HostsLost, match="--resume") as caught:
        take_seat(object(), {}, ExitStack())  # type: ignore[arg-type]
    assert classify(caught.value)[0] == 6


class Watched(Alone):
    def __init__(self) -> None:
        self.said: list[str] = []

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        self.said.append(f"enter {pool}")
        return True

    def leave(self, pool: str) -> None:
        self.said.append(f"leave {pool}")

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        self.lost, self.stop = lost, stop


class Controller:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.end_at_once = self.request_stop = self.told.append


def test_a_lease_that_is_lost_while_parts_begin_ends_that() -> None:
    seat = Watched()
    starting = RunSeat(seat)
    with pytest.raises(LeaseLost, match="--resume"), starting.holding("train"):
        seat.lost("the lease of train is over")
    assert seat.said == ["enter train"], "what has begun there is closed first"


class Crowded(Watched):
    """Others have the pools."""

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        threading.Timer(0.2, lambda: self.stop("it was cancelled")).start()
        assert given_up.wait(60.0)
        return False


def test_a_wish_to_end_while_it_waits_to_begin_ends_it_before_anything_is_loaded() -> None:
    seat, loaded = Crowded(), []
    starting = RunSeat(seat)
    ended = pytest.raises(KeyboardInterrupt, match="it was cancelled")
    with ended as caught, starting.holding("rollout"):
        loaded.append("the model")
    assert not loaded and seat.said == []
    assert classify(caught.value)[0] == 130
    assert starting.waited_s >= 0.2, "which is no part of how long it takes to begin"


def test_what_the_cluster_wants_reaches_the_run_whenever_it_says_so() -> None:
    for early in (True, False):
        seat, controller = Watched(), Controller()
        starting = RunSeat(seat)
        if early:
            seat.stop("node 3 is drained")
        starting.watch_over(controller)  # type: ignore[arg-type]
        if not early:
            seat.stop("node 3 is drained")
        assert controller.told == ["interrupted"], "with the exit code of an interrupt"
        seat.lost("the lease of train is over")
        assert isinstance(controller.told[-1], LeaseLost)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    write_model(folder / "model")
    return write_config(folder, steps=3)


def test_two_jobs_that_share_pools_compute_what_they_compute_alone(config: Path) -> None:
    """Real ones, in processes of their own; one is killed and goes on."""
    runs, shared = config.parent / "runs", config.parent / "shared"
    first, second = JOBS
    for job, overrides in JOBS.items():
        assert run(config, f"{job}-alone", overrides=overrides) == 0

    def train(job: str, **settings: Any) -> Any:
        prepare = partial(file_seat.sit, shared, job)
        return start(config, f"{job}-shared", prepare=prepare, overrides=JOBS[job], **settings)

    other = train(second)
    killed = train(first, kill=lambda entry: getattr(entry, "name", "") == "switch" and _counts())
    killed.join()
    assert killed.exitcode == -9
    again = train(first, resume="auto")
    for process in (again, other):
        process.join()
        assert process.exitcode == 0
    found = compared(runs, shared)
    assert found["two_at_once"] == []
    for job in JOBS:
        assert found[job]["different"] == [] and found[job]["problems"] == []
    told = [turn for turn in file_seat.turns(shared) if turn["what"] == "committed"]
    assert {turn["job"] for turn in told} == {*JOBS}
    of_second = [turn for turn in told if turn["job"] == second]
    assert [turn["step"] for turn in of_second] == [*range(1, len(of_second) + 1)]
    assert all(turn["rollout_s"] > 0 and turn["train_s"] > 0 for turn in of_second)


def _counts(so_far: list[int] = []) -> bool:  # noqa: B006  (of the process that is killed)
    """Whether this is the fifth time."""
    so_far.append(1)
    return len(so_far) == 5


def test_what_seats_write_tells_a_pool_of_two_jobs_from_one_of_a_killed_job(tmp_path: Path) -> None:
    one, other = (file_seat.FileSeat(tmp_path, job) for job in ("one", "other"))
    nobody = threading.Event()
    assert one.enter("train", "step", given_up=nobody)
    one.leave("train")
    assert other.enter("train", "step", given_up=nobody)
    assert file_seat.two_at_once(tmp_path) == []
    (tmp_path / "train.lock").unlink()  # as if there were none
    assert one.enter("train", "step", given_up=nobody)
    assert file_seat.two_at_once(tmp_path) == [], "the other may have been killed"
    other.leave("train")
    (found,) = file_seat.two_at_once(tmp_path)
    assert "'one'" in found and "came to train of" in found
    assert file_seat.handed_over(tmp_path) == {"train": 2}
