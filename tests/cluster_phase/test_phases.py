"""`rollpacker.cluster.phase` in one process, with a seat that writes down what it is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rollpacker.cluster as cluster
from rollpacker.cluster.seats import phases
from rollpacker.cluster.seats.seat import Iteration
from tests.cluster_phase.file_seat import turns

ROOT = Path(__file__).parents[2]


class Seat:
    """Gives each pool at once, and takes `wait_s` for it by the clock of the test."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.iterations: list[Iteration] = []
        self.now_s, self.wait_s = 0.0, 0.0
        self.problem: Exception | None = None

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        if self.problem is not None:
            raise self.problem
        self.now_s += self.wait_s
        self.said.append(f"enter {pool} {purpose}")
        return True

    def leave(self, pool: str) -> None:
        self.said.append(f"leave {pool}")

    def committed(self, iteration: Iteration) -> None:
        self.iterations.append(iteration)

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        self.lost, self.stop = lost, stop

    def close(self) -> None:
        self.said.append("close")

    def hook(self, name: str, took_s: float = 0.0) -> Callable[[], None]:
        def call() -> None:
            self.now_s += took_s
            self.said.append(name)

        return call


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has opened nothing."""
    monkeypatch.setattr(phases, "_program", None)
    monkeypatch.setattr(phases.atexit, "register", lambda what: None)
    monkeypatch.delenv("ROLLPACKER_SEAT", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def seat(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Seat:
    seat = Seat()
    monkeypatch.setenv("ROLLPACKER_SEAT", "the test's")
    monkeypatch.setattr(phases, "open_seat", lambda environ: seat)
    monkeypatch.setattr(phases.time, "monotonic", lambda: seat.now_s)
    return seat


def never() -> None:
    raise AssertionError("a hook was called outside of a cluster")


def test_outside_of_a_cluster_nothing_happens(fresh: None) -> None:
    for _ in range(5):
        with cluster.phase("rollout", park=never, wake=never) as turn:
            assert (turn.waited_s, turn.wake_s) == (0.0, 0.0)
        with cluster.phase("train", park=never, wake=never):
            pass
    cluster.committed(1)


def test_it_loads_no_torch() -> None:
    code = "import sys, rollpacker.cluster as c\n"
    code += "with c.phase('train'): pass\n"
    code += "c.committed(1); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == (["False"], "")


def test_the_alone_seat_calls_the_hooks(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLPACKER_SEAT", "alone")
    said: list[str] = []
    with cluster.phase("train", park=lambda: said.append("park"), wake=lambda: said.append("wake")):
        said.append("work")
    cluster.committed(1)
    assert said == ["wake", "work", "park"]


def test_wake_comes_after_the_pool_and_park_before_it_is_left(seat: Seat) -> None:
    with cluster.phase("train", park=seat.hook("park"), wake=seat.hook("wake")):
        seat.hook("work")()
    with pytest.raises(KeyError), cluster.phase("rollout", park=seat.hook("park")):
        raise KeyError
    assert seat.said == [
        *("enter train step", "wake", "work", "park", "leave train"),
        *("enter rollout round", "park", "leave rollout"),
    ]


def test_what_an_iteration_took(seat: Seat) -> None:
    """Powers of two, so that each sum says what is in it: neither waits nor switches."""

    def spend(seconds: float) -> None:
        seat.now_s += seconds

    with cluster.phase("train"):  # setting up
        spend(1000)
    cluster.committed(0)
    assert seat.iterations == []
    seat.wait_s = 0.25
    for step in (1, 2):
        spend(1)
        with cluster.phase(
            "rollout", wake=seat.hook("wake", 100), park=seat.hook("park", 100)
        ) as t:
            spend(2)
        assert (t.waited_s, t.wake_s) == (0.25, 100)
        spend(4)
        with cluster.phase("train", wake=seat.hook("wake", 100), park=seat.hook("park", 100)):
            spend(8)
        spend(16)
        cluster.committed(step, kind="long")
    first, second = seat.iterations
    assert first == Iteration(step=1, kind="long", rollout_s=2, between_s=4, train_s=8, after_s=16)
    # What comes between a commit and the next rollout is the next iteration's.
    assert second == Iteration(step=2, kind="long", rollout_s=2, between_s=4, train_s=8, after_s=17)


@pytest.mark.parametrize("step", ["x", 1.5, None])
def test_a_step_that_is_no_number_is_refused(seat: Seat, step: object) -> None:
    with pytest.raises(ValueError, match=r"say which step it was, a whole number"):
        cluster.committed(step)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_seat", [True, False])
def test_one_phase_at_a_time(with_seat: bool, request: pytest.FixtureRequest) -> None:
    """Also outside of a cluster: a mistake shows on the laptop."""
    request.getfixturevalue("seat" if with_seat else "fresh")
    found: list[str] = []

    def in_another_thread() -> None:
        with pytest.raises(ValueError) as caught, cluster.phase("train"):
            pass
        found.append(str(caught.value))

    with cluster.phase("rollout"):
        with pytest.raises(ValueError, match=r"^phase\('train'\) inside phase\('rollout'\): "):
            cluster.phase("train").__enter__()
        with pytest.raises(ValueError, match=r"^phase\('rollout'\) inside phase\('rollout'\): "):
            cluster.phase("rollout").__enter__()
        with pytest.raises(ValueError, match=r"^committed\(3\) inside phase\('rollout'\): "):
            cluster.committed(3)
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
    assert found[0].startswith("phase('train') inside phase('rollout'): ")
    with cluster.phase("train"):  # the one that was interrupted has ended as ever
        pass


def test_a_pool_of_another_name(fresh: None) -> None:
    with pytest.raises(ValueError, match=r"^phase\('training'\): there are 'rollout' and 'train'$"):
        cluster.phase("training").__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", ["wake", "park"])
def test_a_hook_that_fails_keeps_the_pool(seat: Seat, hook: str) -> None:
    def fails() -> None:
        raise MemoryError("full")

    with pytest.raises(MemoryError), cluster.phase("train", **{hook: fails}):
        pass
    assert seat.said == ["enter train step"]
    expected = rf"^phase\('rollout'\): {hook} failed in phase\('train'\) \(MemoryError\('full'\)\);"
    with pytest.raises(ValueError, match=expected):
        cluster.phase("rollout").__enter__()
    phases._opened()._close()  # as at the end of the process
    assert seat.said == ["enter train step"]


def test_the_seat_is_closed_at_the_end(seat: Seat) -> None:
    with cluster.phase("train"):
        pass
    phases._opened()._close()
    assert seat.said[-1] == "close"


def test_an_unreachable_cluster_leaves_no_phase_open(seat: Seat) -> None:
    seat.problem = OSError("nobody answers")
    with pytest.raises(OSError, match="nobody answers"), cluster.phase("train", wake=never):
        pass
    seat.problem = None
    with cluster.phase("train"):
        pass


def test_no_such_seat(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLPACKER_SEAT", "nowhere")
    for _ in range(2):
        with pytest.raises(ValueError, match="no such seat"), cluster.phase("train", wake=never):
            pass


# -- stopping, and losing a lease ------------------------------------------------------


def test_a_wish_to_stop_is_heard_where_the_next_phase_begins(seat: Seat) -> None:
    with cluster.phase("rollout"):
        seat.stop("another job is more important")
    cluster.committed(1)  # the last one: the program is done, and not stopped
    with pytest.raises(SystemExit) as caught, cluster.phase("train", wake=never):
        pass
    assert isinstance(caught.value, cluster.Stopped) and caught.value.code == 130
    assert seat.said == ["enter rollout round", "leave rollout"]


def test_a_wish_to_stop_ends_a_wait(seat: Seat, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        threading.Timer(0.1, lambda: seat.stop("it moves")).start()
        assert given_up.wait(20)
        return False

    monkeypatch.setattr(seat, "enter", wait)
    with pytest.raises(cluster.Stopped), cluster.phase("rollout", wake=never):
        pass


def test_sigterm_is_a_wish_to_stop(seat: Seat) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with cluster.phase("rollout"):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(cluster.Stopped), cluster.phase("train"):
        pass
    # A second one ends the process.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_program_with_a_sigterm_of_its_own_keeps_it(seat: Seat) -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError

    signal.signal(signal.SIGTERM, own)
    with cluster.phase("rollout"):
        assert signal.getsignal(signal.SIGTERM) is own


def test_a_lease_lost_between_phases_is_told_at_the_next(seat: Seat) -> None:
    with cluster.phase("rollout"):
        pass
    seat.lost("silent for 5 s")
    with pytest.raises(cluster.LeaseLost, match="silent for 5 s"), cluster.phase("train"):
        pass
    with pytest.raises(cluster.LeaseLost, match="silent for 5 s"):
        cluster.committed(1)
    assert seat.said == ["enter rollout round", "leave rollout"]


def test_a_lease_lost_inside_a_phase_ends_the_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, time, rollpacker.cluster\n"
        "try:\n"
        "    with rollpacker.cluster.phase('train', park=lambda: print('parked')):\n"
        f"        pathlib.Path({str(tmp_path / 'lost-job')!r}).touch()\n"
        "        time.sleep(60)\n"
        "finally:\n"
        "    print('cleaned up', flush=True)\n"
    )
    environ = {**os.environ, "ROLLPACKER_SEAT": f"{tmp_path}#job", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cluster_phase.file_seat", str(script)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd=ROOT, timeout=50
    )
    expected = "rollpacker.cluster: the train pool is another job's now: a file says so. "
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == expected + "The process ends at once.\n"
    assert [entry["what"] for entry in turns(tmp_path)] == ["entered"]


def test_iterations_that_nobody_tells_are_warned_about(
    seat: Seat, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(6):
        with cluster.phase("rollout"):
            pass
        with cluster.phase("train"):
            pass
    (record,) = caplog.records
    assert "rollpacker.cluster.committed(step)" in record.getMessage()


# -- parking ---------------------------------------------------------------------------


def test_parking_takes_everything_and_brings_it_back() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer: torch.optim.Optimizer | None = None
    park, wake = cluster.parking(model, None, lambda: optimizer, device="cpu")
    wake()  # nothing was parked: nothing happens
    park()  # before there is an optimizer
    wake()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    assert len(tensors) == 4 + 3 + 4 + 4 * 3
    before = [tensor.detach().clone() for tensor in tensors]
    for _ in range(2):
        park()
        park()
        assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
        wake()
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    for name, parameter in model.named_parameters():
        assert parameter is dict(model.named_parameters())[name]


def test_parking_takes_no_other_things() -> None:
    park, _ = cluster.parking({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^parking\(dict\): give it modules, optimizers, "):
        park()
