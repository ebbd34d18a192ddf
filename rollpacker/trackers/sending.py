"""A tracker: a callback that hands everything to a tracking library, in a thread of its own.

Whatever the library does, the run goes on: what it raises is one line in the log, a call that hangs
keeps nobody waiting, and at the run's end it gets a limited time. What was sent is kept in
`runs/NAME/trackers/NAME.json`, so that a resumed run goes on in the same run of the library, sends
nothing twice, and sends what was missed: `metrics.jsonl` has it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rollpacker.callbacks import Callback, Metrics, RunningRun
from rollpacker.trackers.samples_table import SamplesTable, samples_table
from rollpacker.trackers.tracker import TrackerConfig

logger = logging.getLogger(__name__)

FOLDER = "trackers"
"""Of a run's folder: what its trackers keep there."""
CONNECT_S = 5.0
OPEN_S = 60.0
"""How long a library may take to open its run."""
CALL_S = 120.0
"""How long it may take over any one thing after that."""
CLOSE_S = 60.0
"""How long the run's end waits for what is still to be sent."""

Status = Literal["ok", "interrupted", "failed"]
Row = dict[str, float | str]
Place = tuple[int, int]
"""Order of rows: the step, then 0 for its evaluation and 1 for the step itself."""
NOTHING: Place = (-1, 1)
OF_EVERY_STEP = "round/is_long"
"""A metric that every step has, and no evaluation."""


class TrackerProblem(Exception):
    """Why a tracker cannot be used, and what to do about it, in words that follow its name."""


def check_connection(url: str, cure: str) -> None:
    """Raises `TrackerProblem`, with the cure, if nobody answers at `url` within `CONNECT_S`: the
    libraries themselves try for minutes. Behind a proxy, and for what is no HTTP, it is left to
    them."""
    address = urlsplit(url)
    host = address.hostname
    if address.scheme not in ("http", "https") or host is None:
        return
    if address.scheme in getproxies() and not proxy_bypass(host):
        return
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else None
        raise TrackerProblem(f"no server at {url} ({said or error}): {cure}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a library is told of the run that it is to show."""

    project: str
    run_name: str
    config: Mapping[str, Any]
    folder: Path
    """Where the library may keep files; it exists."""
    run_id: str | None
    """The library's own, of the run that is gone on with. None: a new one."""
    last_step: int
    """The last step of which something was sent. -1: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The library's answer."""

    run_id: str
    where: str
    """Where to look at it."""
    held: Iterable[tuple[int, str]] | None = None
    """(step, name) of the values that the library holds, of the newest steps at least. What it had
    in a buffer when the run was killed is then sent again. None: it cannot tell."""


def _last_whole(held: Iterable[tuple[int, str]], of_every_step: str) -> Place:
    """The last row that is surely held as a whole: the one before the last that has begun."""
    last = NOTHING
    for step, name in held:
        if name == of_every_step:
            last = max(last, (step, 1))
        elif name.startswith(("eval/", "eval.")):
            last = max(last, (step, 0))
    step, kind = last
    return (step, 0) if kind else (step - 1, 1)


class Tracker(Callback):
    """What all trackers share. A library's own file overrides the six methods below `check`; they
    are called in the tracker's thread only, one at a time, and may raise anything."""

    name: ClassVar[str]

    def __init__(self, config: TrackerConfig) -> None:
        self.config = config
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._task_began: tuple[float, float] | None = None
        """When what the thread is at began, and how long it may take."""
        self._given_up = False
        self._record = _Record(Path(), {})
        self._held: set[tuple[int, str]] = set()
        """Values that must not be sent again, of rows that are not held as a whole."""
        self._hooks = (sys.excepthook, sys.exit)

    def missing(self) -> str | None:
        """The sentence that names the extra, if the library is not installed. Imports nothing."""
        raise NotImplementedError

    def check(self) -> str:
        """Where the run would be shown. Raises `TrackerProblem`, within seconds."""
        raise NotImplementedError

    def known_as(self, name: str) -> str:
        """The library's name of a metric."""
        return name

    def open(self, run: Opening) -> Opened:
        """Open a run, or go on with the one of `run.run_id`."""
        raise NotImplementedError

    def send(self, step: int, row: Row) -> None:
        """A row of `metrics.jsonl`: finite numbers and texts."""
        raise NotImplementedError

    def send_samples(self, step: int, table: SamplesTable) -> None:
        raise NotImplementedError

    def send_picture(self, step: int, path: Path) -> None:
        raise NotImplementedError

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        """The run's end, after `step`. `summary`: `summary.json`, flat, and why it ended."""
        raise NotImplementedError

    # --- what the run calls -----------------------------------------------------------------------

    def on_start(self, run: RunningRun) -> None:
        lacking = self.missing()
        if lacking is not None:
            self._give_up(f"{lacking.removeprefix(f'the tracker {self.name} ')}")
            return
        metrics = run.folder / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        config = json.loads(json.dumps(run.config, default=str))
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._put(lambda: self._begin(run.name, run.folder, config), limit_s=OPEN_S)
        self._put(lambda: self._catch_up(metrics, size))
        self._thread.start()

    def on_step(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        self._look_at_clock()
        every = self.config.samples_every_steps
        if not self._given_up and every is not None and (step == 1 or step % every == 0):
            table = samples_table(run.samples())
            if table is not None:
                self._put(functools.partial(self._send_samples, step, table))
        self._put_row((step, 1), metrics)

    def on_evaluation(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        self._look_at_clock()
        self._put_row((step, 0), metrics)

    def on_end(self, run: RunningRun, reason: str | None) -> None:
        if self._thread is None:
            return
        self._put(functools.partial(self._finish, run.folder, reason))
        self._tasks.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._give_up(f"it did not take everything within {CLOSE_S:g} s of the run's end")

    # --- in the thread ----------------------------------------------------------------------------

    def _put(self, task: Callable[[], None], limit_s: float = CALL_S) -> None:
        def timed() -> None:
            self._task_began = (time.monotonic(), limit_s)
            task()
            self._task_began = None

        if not self._given_up:
            self._tasks.put(timed)

    def _put_row(self, place: Place, metrics: Metrics) -> None:
        self._put(functools.partial(self._send_row, place, _sendable(metrics)))

    def _work(self) -> None:
        while not self._given_up and (task := self._tasks.get()) is not None:
            try:
                task()
            except TrackerProblem as problem:
                self._give_up(str(problem))
            # The boundary to a library: whatever it raises, the run goes on without it.
            except (Exception, SystemExit) as error:
                said = " ".join(str(error).split())[:300]
                self._give_up(f"{type(error).__name__}: {said}" if said else type(error).__name__)
            finally:
                # Libraries put their own in their places.
                sys.excepthook, sys.exit = self._hooks

    def _look_at_clock(self) -> None:
        """Give up on a library that hangs."""
        at = self._task_began
        if at is not None and not self._given_up and time.monotonic() > at[0] + at[1]:
            self._give_up(f"no answer for {at[1]:g} s")

    def _give_up(self, why: str) -> None:
        if self._given_up:
            return
        self._given_up = True
        self._tasks.put(None)
        logger.warning("%s: %s; the run goes on without it", self.name, why.rstrip("."))

    def _begin(self, name: str, run_folder: Path, config: Mapping[str, Any]) -> None:
        self.check()
        folder = run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        self._record = record = _Record.read(folder / f"{self.name}.json")
        opening = Opening(
            project=self.config.project or "rollpacker",
            run_name=self.config.run_name or name,
            config=config,
            folder=folder,
            run_id=record.run_id,
            last_step=record.sent[0],
        )
        opened = self.open(opening)
        if opened.run_id != record.run_id:
            record.sent = NOTHING
        if opened.held is not None:
            held = set(opened.held)
            record.sent = min(record.sent, _last_whole(held, self.known_as(OF_EVERY_STEP)))
            self._held = {value for value in held if value[0] >= record.sent[0]}
        record.run_id = opened.run_id
        record.write()
        logger.warning("%s: %s", self.name, opened.where)  # seen without any set-up

    def _catch_up(self, metrics: Path, size: int) -> None:
        """Send the rows that were written before this session and are not yet sent."""
        if size == 0:
            return
        with metrics.open("rb") as file:
            for line in file.read(size).splitlines():
                row = json.loads(line)
                step = row.pop("step")
                is_evaluation = any(key.startswith("eval/") for key in row)
                self._send_row((step, 0 if is_evaluation else 1), _sendable(row))

    def _send_row(self, place: Place, row: Row) -> None:
        if place > self._record.sent:
            step = place[0]
            self._held = {value for value in self._held if value[0] >= step}
            row = {n: v for n, v in row.items() if (step, self.known_as(n)) not in self._held}
            if row:
                self.send(step, row)
            self._record.sent = place
            self._record.write()

    def _send_samples(self, step: int, table: SamplesTable) -> None:
        if (step, 1) > self._record.sent:
            self.send_samples(step, table)

    def _finish(self, run_folder: Path, reason: str | None) -> None:
        picture, summary = run_folder / "timeline.png", run_folder / "summary.json"
        step = max(0, self._record.sent[0])
        if picture.exists():
            self.send_picture(step, picture)
        status: Status = "failed" if reason is None else "ok"
        if reason == "interrupted":
            status = "interrupted"
        flat = _flat(json.loads(summary.read_text())) if summary.exists() else {}
        self.finish(status, step, {**flat, "ended": reason or "an error"})


@dataclass(slots=True)
class _Record:
    """`runs/NAME/trackers/NAME.json`."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Record:
        try:
            values = json.loads(path.read_text())
            return cls(path, {"run_id": str(values["run_id"]), "sent": values["sent"]})
        except FileNotFoundError:
            return cls(path, {})

    @property
    def run_id(self) -> str | None:
        return self.values.get("run_id")

    @run_id.setter
    def run_id(self, run_id: str) -> None:
        self.values["run_id"] = run_id

    @property
    def sent(self) -> Place:
        """The last row that was sent."""
        step, kind = self.values.get("sent", NOTHING)
        return step, kind

    @sent.setter
    def sent(self, place: Place) -> None:
        self.values["sent"] = place

    def write(self) -> None:
        temporary = self.path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(self.values) + "\n")
        temporary.replace(self.path)


def _sendable(metrics: Mapping[str, Any]) -> Row:
    """Finite numbers and texts; a library makes nothing of the rest."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a/b": 1}`; lists and nulls are left out."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}/"))
        elif isinstance(value, str | int | float):
            flat[prefix + key] = value
    return flat
