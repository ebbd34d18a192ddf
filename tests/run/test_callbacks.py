"""Callbacks and trackers of a real run of a tiny model: what they are told, what they may do."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.callbacks import Callback, CallbackError
from rollpacker.report.files import write_reports
from rollpacker.run.parts import audience


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("callbacks")
    write_model(folder / "model")
    yield write_config(folder, steps=4)
    torch.set_num_threads(threads)


def train(config: Path, name: str, *callbacks: Callback, resume: bool = False, **settings: Any):
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return rollpacker.train(
        config,
        [f"name={name}", "tail_batching.enabled=false", *overrides],
        callbacks=callbacks,
        resume=resume,
    )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in rows_of(folder) if "actor/loss" in row}


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    clocks = ("timing_s/", "perf/", "step", "mine/")
    return {name: value for name, value in row.items() if not name.startswith(clocks)}


class Listener(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.samples: dict[int, list[dict[str, Any]]] = {}
        self.threads: set[threading.Thread] = set()

    def on_start(self, run) -> None:
        self.told.append(("start", run.name, run.total_steps, run.resumed_step))
        assert run.folder.is_dir() and run.config["name"] == run.name
        with pytest.raises(RuntimeError, match="log is for on_step"):
            run.log("mine/x", 1.0)

    def on_step(self, run, step, metrics) -> None:
        self.told.append(("step", step, metrics))
        self.samples[step] = run.samples()
        self.threads.add(threading.current_thread())
        run.log("mine/twice", 2 * step)

    def on_evaluation(self, run, step, metrics) -> None:
        self.told.append(("evaluation", step, metrics))
        run.log("mine/passed", metrics["eval/pass@1"])

    def on_end(self, run, reason) -> None:
        self.told.append(("end", reason, (run.folder / "summary.json").exists()))

    def names(self) -> list[tuple[Any, ...]]:
        return [one[:2] for one in self.told]


def test_they_are_told_in_order_and_what_they_log_is_a_metric(config: Path) -> None:
    first, second = Listener(), Listener()
    second.on_step = lambda run, step, metrics: second.told.append(metrics["mine/twice"])  # type: ignore[method-assign]
    run = train(config, "told", first, second, data__eval_fraction=0.2, eval__every_steps=2)
    assert first.names() == [
        *(("start", "told"), ("evaluation", 0), ("step", 1)),
        *(("evaluation", 2), ("step", 2), ("step", 3), ("evaluation", 4), ("step", 4)),
        ("end", "every step is done"),
    ]
    assert first.told[0][2:] == (4, None) and first.told[-1][2] is True
    assert [one for one in second.told if isinstance(one, float)] == [2.0, 4.0, 6.0, 8.0]
    written = steps_of(run.folder)
    assert [written[step]["mine/twice"] for step in range(1, 5)] == [2.0, 4.0, 6.0, 8.0]
    for _, step, metrics in [one for one in first.told if one[0] == "step"]:
        assert untimed(metrics) == untimed(written[step])
        assert {row["step"] for row in first.samples[step]} == {step}
        num_trained = sum(row["trained"] for row in first.samples[step])
        assert num_trained == metrics["round/samples_trained"] > 0
    evaluations = [row for row in rows_of(run.folder) if "eval/pass@1" in row]
    assert all(row["mine/passed"] == row["eval/pass@1"] for row in evaluations)
    assert first.threads == {threading.current_thread()}


def test_what_was_logged_survives_a_resume_and_no_step_is_told_twice(config: Path) -> None:
    whole, before, after = Listener(), Listener(), Listener()
    expected = train(config, "whole", whole)
    train(config, "resumed", before, Stops())
    run = train(config, "resumed", after, resume=True)
    told = [step for name, step in before.names() + after.names() if name == "step"]
    assert told == [1, 2, 3, 4]
    assert after.told[0] == ("start", "resumed", 4, 2)
    found, wanted = steps_of(run.folder), steps_of(expected.folder)
    assert {s: (untimed(r), r["mine/twice"]) for s, r in found.items()} == {
        s: (untimed(r), r["mine/twice"]) for s, r in wanted.items()
    }
    (run.folder / "metrics.jsonl").unlink()
    third = train(config, "resumed", resume=True, train__steps=5)
    again = steps_of(third.folder)
    assert [again[step].get("mine/twice") for step in range(1, 6)] == [2.0, 4.0, 6.0, 8.0, None]


class Stops(Callback):
    def on_step(self, run, step, metrics) -> None:
        if step == 2:
            run.stop("good enough")


def test_one_that_asks_to_stop_ends_the_run_with_that_step(config: Path) -> None:
    listener = Listener()
    run = train(config, "stopped", Stops(), listener, checkpoint__every_steps=100)
    assert run.reason == "good enough"
    assert list(steps_of(run.folder)) == [1, 2]
    assert listener.names()[-2:] == [("step", 2), ("end", "good enough")]
    assert run.model.is_dir()
    assert train(config, "stopped", resume=True).reason == "every step is done"
    assert list(steps_of(run.folder)) == [1, 2, 3, 4]


class Raises(Callback):
    def __init__(self, method: str) -> None:
        def fail(run, *arguments) -> None:
            raise KeyError("no such thing")

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_evaluation", "on_end"])
def test_one_that_raises_is_named_and_the_run_can_be_resumed(config: Path, method: str) -> None:
    listener = Listener()
    name = f"raises-{method}"
    at = {"on_step": " at step 1", "on_evaluation": " at step 0"}.get(method, "")
    with pytest.raises(CallbackError, match=rf"^Raises\.{method} raised KeyError{at}: .*line") as e:
        train(config, name, Raises(method), listener, data__eval_fraction=0.2)
    assert isinstance(e.value.__cause__, KeyError)
    ended = [one for one in listener.told if one[0] == "end"]
    if method == "on_end":
        assert ended == [("end", "every step is done", True)]
        return
    assert ended == [("end", None, False)]
    resumed = train(config, name, resume=True, data__eval_fraction=0.2)
    assert resumed.reason == "every step is done"


class Slow(Callback):
    """Busy machines sleep longer than they are told: what it took is kept."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {"start": [], "step": [], "evaluation": []}

    def _sleep(self, seconds: float, what: str) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.took[what].append(time.monotonic() - began)

    def on_step(self, run, step, metrics) -> None:
        self._sleep(0.1, "step")

    def on_evaluation(self, run, step, metrics) -> None:
        self._sleep(0.1, "evaluation")

    def on_start(self, run) -> None:
        self._sleep(0.2, "start")


def test_the_seconds_of_slow_ones_are_shown(config: Path) -> None:
    slow = Slow()
    run = train(config, "slow", slow, data__eval_fraction=0.2, eval__every_steps=2)
    seconds = run.summary["seconds"]
    (start,), (one, two, three, four), (first, second, third) = slow.took.values()
    all_s = start + one + two + three + four + first + second + third
    assert all_s <= seconds["callbacks"] < all_s + 2.0
    assert sum(seconds.values()) == pytest.approx(run.summary["wall_s"], abs=1e-6)
    steps = steps_of(run.folder)
    for step in range(1, 5):
        # A step's row has the seconds since the one before: also those of its evaluation.
        told = {1: start + first + one, 2: two + second, 3: three, 4: four + third}[step]
        assert told <= steps[step]["timing_s/callbacks"] + 1e-3
    rows_s = sum(row["timing_s/callbacks"] for row in steps.values())
    assert rows_s == pytest.approx(seconds["callbacks"], abs=1e-3)
    evaluations = [row["timing_s/callbacks"] for row in rows_of(run.folder) if "eval/pass@1" in row]
    pairs = zip(evaluations, (first, second, third), strict=True)
    assert all(took <= told_s + 1e-3 for told_s, took in pairs)
    assert sum(evaluations) <= seconds["callbacks"] - start - one - two - three - four
    assert write_reports(run.folder)["seconds"] == pytest.approx(seconds)


class Mistaken(Callback):
    def __init__(self, name: Any, value: Any) -> None:
        self.arguments = name, value

    def on_step(self, run, step, metrics) -> None:
        run.log(*self.arguments)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("actor/loss", 1.0, "metric of the run itself"),
        ("timing_s/mine", 1.0, "metric of the run itself"),
        ("step", 1.0, "metric of the run itself"),
        ("mine", "much", "could not convert"),
        (3, 1.0, "a text, not 3"),
    ],
)
def test_what_cannot_be_logged_is_refused(config: Path, name: Any, value: Any, told: str) -> None:
    with pytest.raises(CallbackError, match=rf"Mistaken\.on_step raised .* at step 1: .*{told}"):
        train(config, f"mistaken-{name}".replace("/", "-"), Mistaken(name, value), train__steps=1)


def test_numbers_of_other_kinds_are_logged(config: Path) -> None:
    import numpy as np

    class Logs(Callback):
        def on_step(self, run, step, metrics) -> None:
            run.log("mine/tensor", torch.tensor(0.5))  # type: ignore[arg-type]
            run.log("mine/numpy", np.float32(0.25))
            run.log("mine/bool", True)
            run.log("mine/nan", math.nan)

    run = train(config, "kinds", Logs(), train__steps=1)
    row = steps_of(run.folder)[1]
    assert [row[f"mine/{kind}"] for kind in ("tensor", "numpy", "bool")] == [0.5, 0.25, 1.0]
    assert row["mine/nan"] is None


class Tracker(Listener):
    name = "stub"

    def on_start(self, run) -> None:
        self.told.append(("start",))

    def on_step(self, run, step, metrics) -> None:
        self.told.append(("step", step, metrics))
        self.samples[step] = run.samples()

    def on_evaluation(self, run, step, metrics) -> None:
        self.told.append(("evaluation", step, metrics))


def test_trackers_get_the_rows_as_they_are_written(config: Path, monkeypatch) -> None:
    tracker = Tracker()
    monkeypatch.setattr(audience, "build_trackers", lambda config: [tracker])
    run = train(config, "tracked", Listener(), data__eval_fraction=0.2, eval__every_steps=2)
    told = [one for one in tracker.told if one[0] in ("step", "evaluation")]
    rows = rows_of(run.folder)
    assert [{"step": step, **metrics} for _, step, metrics in told] == rows
    assert {step: {row["step"] for row in rows} for step, rows in tracker.samples.items()} == {
        step: {step} for step in range(1, 5)
    }
    assert tracker.told[-1] == ("end", "every step is done", True)


class FailingTracker(Tracker):
    def __init__(self, method: str) -> None:
        super().__init__()

        def fail(run, *arguments) -> None:
            self.told.append(("failed", *arguments))
            raise ConnectionError("no network")

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_end"])
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    config: Path, monkeypatch, caplog, method: str
) -> None:
    failing, tracker = FailingTracker(method), Tracker()
    monkeypatch.setattr(audience, "build_trackers", lambda config: [failing, tracker])
    run = train(config, f"failing-{method}")
    assert run.reason == "every step is done"
    said = [record.message for record in caplog.records if "tracker stub" in record.message]
    assert len(said) == 1 and method in said[0] and "no network" in said[0]
    assert [one[1] for one in tracker.told if one[0] == "step"] == [1, 2, 3, 4]
    expected = {"on_start": 1, "on_step": 4, "on_end": 1}[method]
    assert len([one for one in failing.told if one[0] == "failed"]) == expected
