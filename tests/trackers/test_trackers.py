"""Trackers called as a run calls them; each test's libraries run in a process of their own, since
they hook into their process."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollpacker.trackers import sending
from rollpacker.trackers.by_name import TRACKERS, make_tracker
from rollpacker.trackers.samples_table import MAX_CHARACTERS, MAX_ROWS, samples_table, visible
from rollpacker.trackers.sending import Tracker, TrackerProblem
from rollpacker.trackers.tracker import TrackerConfig

from . import stores

ROOT = Path(__file__).parents[2]
NAMES = sorted(TRACKERS)
KEY = "a" * 40


class FakeRun:
    """A run that is told of and does not train. It keeps `metrics.jsonl` as a run does."""

    name, total_steps, resumed_step = "fake", 12, None
    config: ClassVar = {
        "name": "fake",
        "train": {"steps": 12, "kl": None},
        "rewards": [{"function": "f"}],
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def samples(self, *, untrained: bool = False) -> list[dict[str, Any]]:
        return [{"prompt": "1+1=", "completion": "\x1b[31m\ud800<b>", "reward": 0.5, "parts": {}}]

    def log(self, name: str, value: float) -> None: ...

    def stop(self, reason: str = "") -> None: ...

    def write(self, step: int, row: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")


def row(step: int) -> dict[str, Any]:
    many = {f"many/{number}": number / step for number in range(60)}  # as a real row has
    kind = {"round/kind": "short", "round/is_long": 0}
    return {"critic/rewards/mean": step / 7, **many, **kind, "num": step}


def tell(tracker: Tracker, run: FakeRun, steps: range, *, kill: bool = False) -> None:
    """What a run tells its callbacks; an evaluation before the first step and each fourth."""
    for step in steps:
        if step % 4 == 0 or step == 1:
            evaluated = step if step > 1 else 0
            metrics = {"eval/pass@1": evaluated / 100}
            run.write(evaluated, metrics)
            tracker.on_evaluation(run, evaluated, metrics)
        metrics = row(step)
        run.write(step, metrics)
        tracker.on_step(run, step, metrics)
    if kill:
        record = run.folder / "trackers" / f"{tracker.name}.json"
        while not record.exists() or json.loads(record.read_text()).get("sent") != [steps[-1], 1]:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)


def session(name: str, folder: Path, first: int, last: int, end: str) -> None:
    """One process's share of a run, for `in_process`."""
    logging.basicConfig(format="%(message)s")
    run = FakeRun(folder)
    tracker = make_tracker(TrackerConfig(name=name, samples_every_steps=5))  # type: ignore[arg-type]
    hook, stdout = sys.excepthook, sys.stdout
    tracker.on_start(run)
    tell(tracker, run, range(first, last + 1), kill=end == "killed")
    (folder / "summary.json").write_text('{"seconds": {"wall": 2.5}, "name": "fake"}')
    tracker.on_end(run, None if end == "error" else end)
    assert (sys.excepthook, sys.stdout) == (hook, stdout)


def in_process(call: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `call` of this module with `home` as the user's folder and working folder."""
    code = "from pathlib import Path; from tests.trackers.test_trackers import *; "
    code += "sending.OPEN_S = sending.CLOSE_S = 250.0\n" + call  # libraries load long when busy
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "TRACKIO_DIR": str(home / "t")}
    home.mkdir(exist_ok=True)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "SWANLAB"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**plain, "HOME": str(home), "PYTHONPATH": str(ROOT), **offline, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )


def values(name: str, run: Path, home: Path) -> stores.Values:
    """What the library holds."""
    folder = run / "trackers"
    if name == "wandb":
        return stores.wandb_values(folder)
    if name == "mlflow":
        told = stores.expected(run / "metrics.jsonl", texts=False)
        return stores.mlflow_values(folder, sorted(told))
    if name == "trackio":
        return stores.trackio_values(home / "t", "rollpacker")
    return stores.swanlab_values(folder)


def has_texts(name: str) -> bool:
    return name in ("wandb", "trackio")


@pytest.mark.parametrize("name", NAMES)
def test_a_library_holds_what_the_run_told(name: str, tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    done = in_process(f"session({name!r}, Path({str(run)!r}), 1, 12, 'every step is done')", home)
    assert done.returncode == 0, done.stderr
    told = stores.expected(run / "metrics.jsonl", texts=has_texts(name))
    assert values(name, run, home) == told
    assert len(told["num"]) == 12 and len(told["eval/pass@1"]) == 4
    assert f"\n{name}: " in "\n" + done.stderr, "where to look"
    assert {path.name for path in home.iterdir()} <= {"t", ".cache", ".config", ".local"}


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_as_the_same_run(name: str, tmp_path: Path) -> None:
    """Killed after step 7, resumed from a checkpoint of step 4; then once more with nothing to
    do."""
    home, run = tmp_path / "home", tmp_path / "run"
    place = f"Path({str(run)!r})"
    killed = in_process(f"session({name!r}, {place}, 1, 7, 'killed')", home)
    assert killed.returncode == -9, killed.stderr
    record = json.loads((run / "trackers" / f"{name}.json").read_text())
    cut = [line for line in (run / "metrics.jsonl").open() if json.loads(line)["step"] <= 4]
    (run / "metrics.jsonl").write_text("".join(cut))
    for first, end in ((5, "interrupted"), (13, "every step is done")):
        done = in_process(f"session({name!r}, {place}, {first}, 12, {end!r})", home)
        assert done.returncode == 0, done.stderr
        assert "goes on without it" not in done.stderr
    again = json.loads((run / "trackers" / f"{name}.json").read_text())
    assert again["sent"] == [12, 1]
    if name != "trackio":  # which had the whole run in its buffer
        assert again["run_id"] == record["run_id"]
    told = stores.expected(run / "metrics.jsonl", texts=has_texts(name))
    assert_held(values(name, run, home), told, surely_from=8)


def assert_held(held: stores.Values, told: stores.Values, *, surely_from: int) -> None:
    """Everything that the library holds was told, nothing twice; and from this step on it holds all
    that was told. Before it, what was in the library's buffer at a kill may be missing."""
    for name, steps in held.items():
        assert all(told[name][step] == found for step, found in steps.items()), name
    for name, steps in told.items():
        missing = {step for step in steps if step not in held.get(name, {})}
        assert all(step < surely_from for step in missing), (name, missing)


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_that_joins_late_gets_the_rows_from_then_on(name: str, tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    fake = FakeRun(run)
    for step in range(1, 6):
        fake.write(step, row(step))
    done = in_process(f"session({name!r}, Path({str(run)!r}), 6, 8, 'every step is done')", home)
    assert done.returncode == 0, done.stderr
    told = stores.expected(run / "metrics.jsonl", texts=has_texts(name))
    held = values(name, run, home)
    assert held["num"] == {step: told["num"][step] for step in (6, 7, 8)}
    assert_held(held, told, surely_from=6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["interrupted", "error"])
def test_how_the_run_ended_is_told(name: str, end: str, tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    done = in_process(f"session({name!r}, Path({str(run)!r}), 1, 2, {end!r})", home)
    assert done.returncode == 0, done.stderr
    folder = run / "trackers"
    why = "an error" if end == "error" else end
    if name == "wandb":
        records = list(stores.wandb_records(folder))
        codes = [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]
        assert codes == [1 if end == "error" else 130]
        assert why in str(records)
    elif name == "mlflow":
        meta = (stores.mlflow_run(folder) / "meta.yaml").read_text()
        assert f"status: {4 if end == 'error' else 5}" in meta  # FAILED, KILLED
        assert (stores.mlflow_run(folder) / "tags" / "ended").read_text() == why
    elif name == "trackio":
        assert stores.trackio_rows(home / "t", "rollpacker")[-1][2]["summary/ended"] == why
    else:
        states = [r.finish.state for r in stores.swanlab_records(folder) if r.HasField("finish")]
        assert states == [2 if end == "error" else 3], states


@pytest.mark.parametrize("name", NAMES)
def test_samples_config_and_picture_arrive(name: str, tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    FakeRun(run)
    picture(run / "timeline.png")
    done = in_process(f"session({name!r}, Path({str(run)!r}), 1, 7, 'every step is done')", home)
    assert done.returncode == 0, done.stderr
    folder, shown = run / "trackers", "\\\\x1b[31m\\\\ud800<b>"  # as JSON writes \x1b[31m\ud800<b>
    if name == "wandb":
        tables = list(folder.glob("wandb/off*/files/media/table/*.json"))
        assert len(list(folder.glob("wandb/off*/files/media/images/timeline*"))) == 1
        config = "".join(str(record.run) for record in stores.wandb_records(folder))
    elif name == "mlflow":
        files = stores.mlflow_run(folder)
        tables = list(files.glob("artifacts/samples/*.json"))
        assert (files / "artifacts" / "timeline.png").exists()
        assert (files / "params" / "train.steps").read_text() == "12"
        config = (files / "artifacts" / "config.yaml").read_text()
    elif name == "trackio":
        rows = [row for _, _, row in stores.trackio_rows(home / "t", "rollpacker")]
        (tmp_path / "tables").mkdir()
        tables = [tmp_path / "tables" / f"{n}" for n, row in enumerate(rows) if "samples" in row]
        for path in tables:
            path.write_text(json.dumps(rows[int(path.name)]["samples"]))
        assert any("timeline" in row for row in rows)
        with stores.sqlite3.connect(home / "t" / "rollpacker.db") as base:
            config = str(base.execute("select config from configs").fetchall())
    else:
        tables = list(folder.glob("swanlab/run-*/media/echarts/*.json"))
        assert len(list(folder.glob("swanlab/run-*/media/image/*.png"))) == 1
        (file,) = folder.glob("swanlab/run-*/files/config.yaml")
        config = file.read_text()
    assert len(tables) == 2  # steps 1 and 5
    assert all(shown in path.read_text() for path in tables)
    assert "steps" in config and "rewards" in config


def picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), "red").save(path)


# --- what a tracker does wrong ----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_without_its_package(name: str, tmp_path: Path, monkeypatch, caplog) -> None:
    class Hidden:
        @staticmethod
        def find_spec(module: str, path: object = None, target: object = None) -> None:
            if module.partition(".")[0] == name:
                raise ModuleNotFoundError(module)

    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    tracker = make_tracker(TrackerConfig(name=name))  # type: ignore[arg-type]
    run = FakeRun(tmp_path / "run")
    tracker.on_start(run)
    tell(tracker, run, range(1, 4))
    tracker.on_end(run, "every step is done")
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: needs {name}, which is not installed: pip install 'rollpacker[{name}]'; the run "
        "goes on without it"
    ]
    assert not (run.folder / "trackers").exists()


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_without_a_key_nobody_is_asked(name: str, tmp_path: Path) -> None:
    """On a terminal, where the libraries ask."""
    call = f"session({name!r}, Path({str(tmp_path / 'run')!r}), 1, 2, 'every step is done')"
    done = in_process(  # who asked would wait for ever
        f"import pty, sys; sys.exit(pty.spawn([sys.executable, '-c', {prefixed(call)!r}]) >> 8)",
        tmp_path / "home",
        WANDB_MODE="online",
        SWANLAB_MODE="online",
    )
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if line.strip()]
    mode = f"{name.upper()}_MODE=offline"
    assert said == [
        f"{name}: no API key: run `{name} login` or set {mode}; the run goes on without it"
    ]


def prefixed(call: str) -> str:
    return "from pathlib import Path; from tests.trackers.test_trackers import *; " + call


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow"])
def test_a_network_that_refuses(name: str, tmp_path: Path) -> None:
    done = online(name, tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "goes on without it" in line]
    assert len(said) == 1
    assert said[0].startswith(f"{name}: no server at http://127.0.0.1:9")
    assert "Connection refused" in said[0]


def online(name: str, folder: Path, url: str, limits: str = "") -> subprocess.CompletedProcess[str]:
    call = f"session({name!r}, Path({str(folder / 'run')!r}), 1, 2, 'every step is done')"
    return in_process(
        limits + call,
        folder / "home",
        WANDB_MODE="online",
        SWANLAB_MODE="online",
        WANDB_BASE_URL=url,
        WANDB_API_KEY=KEY,
        SWANLAB_API_HOST=url,
        SWANLAB_API_KEY=KEY,
        MLFLOW_TRACKING_URI=url,
    )


class FakeTracker(Tracker):
    """Keeps what it is told, and fails or hangs where it is told to."""

    name = "fake"

    def __init__(self, **settings: Any) -> None:
        super().__init__(TrackerConfig(name="wandb", **settings))
        self.told: list[Any] = []
        self.fails: dict[str, BaseException] = {}
        self.hangs: dict[str, threading.Event] = {}

    def _do(self, what: str, *details: Any) -> None:
        if what in self.hangs:
            self.hangs[what].wait(120)
        if what in self.fails:
            raise self.fails[what]
        self.told.append((what, *details))

    def missing(self) -> str | None:
        return None

    def check(self) -> str:
        self._do("check")
        return "here"

    def open(self, run: sending.Opening) -> tuple[str, str]:
        self._do("open", run.run_id)
        return "7", "here"

    def send(self, step: int, row: Mapping[str, Any]) -> None:
        self._do("send", step, row)

    def send_samples(self, step: int, table: Any) -> None:
        self._do("samples", step)

    def send_picture(self, step: int, path: Path) -> None:
        self._do("picture", step)

    def finish(self, status: sending.Status, step: int, summary: Any) -> None:
        self._do("finish", status, step)


def told_of_trouble(caplog) -> list[str]:
    """What users are told beside where to look."""
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return [line for line in lines if line != "fake: here"]


@pytest.mark.parametrize("where", ["check", "open", "send", "samples", "finish"])
def test_what_a_tracker_raises_is_one_line(where: str, tmp_path: Path, caplog) -> None:
    for error, said in (
        (TrackerProblem("no key: log in"), "no key: log in"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (SystemExit(3), "SystemExit: 3"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    ):
        caplog.clear()
        tracker, run = FakeTracker(), FakeRun(tmp_path / f"{where}{type(error).__name__}")
        tracker.fails[where] = error
        tracker.on_start(run)
        tell(tracker, run, range(1, 6))
        tracker.on_end(run, "every step is done")
        lines = told_of_trouble(caplog)
        assert lines == [f"fake: {said}; the run goes on without it"]


@pytest.mark.parametrize("where", ["open", "send", "finish"])
def test_a_tracker_that_hangs_keeps_nobody(where: str, tmp_path: Path, monkeypatch, caplog) -> None:
    for limit in ("OPEN_S", "CALL_S", "CLOSE_S"):
        monkeypatch.setattr(sending, limit, 0.2)
    tracker, run = FakeTracker(), FakeRun(tmp_path)
    free = tracker.hangs[where] = threading.Event()
    began = time.monotonic()
    tracker.on_start(run)
    tell(tracker, run, range(1, 4))
    time.sleep(0.3)
    tell(tracker, run, range(4, 6))
    tracker.on_end(run, "every step is done")
    assert time.monotonic() - began < 60
    lines = told_of_trouble(caplog)
    assert len(lines) == 1 and lines[0].endswith("the run goes on without it")
    free.set()


def test_nothing_is_sent_that_is_no_number(tmp_path: Path) -> None:
    tracker, run = FakeTracker(samples_every_steps=None), FakeRun(tmp_path)
    tracker.on_start(run)
    tracker.on_step(run, 1, {"a": math.nan, "b": None, "c": math.inf, "d": True, "e": "x", "f": 2})
    tracker.on_end(run, "every step is done")
    assert ("send", 1, {"d": True, "e": "x", "f": 2}) in tracker.told
    assert not [told for told in tracker.told if told[0] == "samples"]


def test_a_table_is_inert_and_small() -> None:
    assert visible("a\x1b[0m\u202eb\ud83d\n\té\U0001f600") == (
        "a\\x1b[0m\\u202eb\\ud83d\n\té\U0001f600"
    )
    long = visible("x" * (MAX_CHARACTERS + 5))
    assert long == "x" * MAX_CHARACTERS + " ... (5 more characters)"
    table = samples_table([{"a": 1, "b": {"k": "\x07"}}, {"a": None, "c": 2.5}] * MAX_ROWS)
    assert table is not None and len(table.rows) == MAX_ROWS
    assert table.columns == ["a", "b", "c"]
    assert table.rows[:2] == [[1, '{"k": "\\u0007"}', None], [None, None, 2.5]]
    assert samples_table([]) is None


def test_two_of_one_name_and_a_misspelt_one(tmp_path: Path) -> None:
    from rollpacker.config.load import ConfigError, load_config
    from rollpacker.config.schema import RunConfig

    config = ROOT / "configs" / "quickstart.yaml"
    loaded = load_config(config, ["trackers=[wandb,{name: mlflow, options: {a: 1}}]"], RunConfig)
    assert loaded.tracker_configs == (
        TrackerConfig(name="wandb"),
        TrackerConfig(name="mlflow", options={"a": 1}),
    )
    for value, said in (
        ("[wandb,{name: wandb}]", "names wandb twice"),
        ("[wanb]", 'Did you mean "wandb"?'),
        ("[{name: mlfow}]", 'Did you mean "mlflow"?'),
        ("wandb", "(in brackets: [wandb])"),
        ("[{project: x}]", "trackers.0.name"),
        ("[{name: wandb, projct: x}]", 'Did you mean "project"?'),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(config, [f"trackers={value}"], RunConfig)
        assert said in str(error.value)


def test_doctor_says_which_can_be_used(tmp_path: Path) -> None:
    """Without a key, with nobody listening, and without a package."""
    names = ", ".join(NAMES)
    call = f"""
import sys, importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "trackio" else known(name, *a)
from rollpacker.cli.main import main
main(["doctor", {str(ROOT / "configs" / "quickstart.yaml")!r}, "trackers=[{names}]"])
"""
    done = in_process(call, tmp_path, WANDB_MODE="online", MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    said = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 2}
    assert said["wandb"].startswith("warn") and "no API key" in said["wandb"]
    assert said["mlflow"].startswith("warn") and "Connection refused" in said["mlflow"]
    assert said["trackio"].startswith("warn") and "not installed" in said["trackio"]
    assert said["swanlab"].startswith("ok") and "offline" in said["swanlab"]
    assert "pip install 'rollpacker[trackio]'" in done.stdout
    assert "run `wandb login` or set WANDB_MODE=offline" in done.stdout
