"""The base of all trackers: a callback that hands a run's data to a tracking library, through one
queue and one thread.

Whatever the library does, the run goes on: what it raises becomes one line in the log, a call that
hangs keeps nobody waiting, and at the run's end the library gets a limited time.
`runs/NAME/trackers/NAME.json` has the library's id of its run and the row that was handed over
last, so that a resumed run goes on in the same run of the library and sends no row twice. What the
library had not written when the run was killed is missing there; `metrics.jsonl` has it."""

from __future__ import annotations

import functools
import json
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rollpacker.callbacks import Callback, Metrics, RunningRun
from rollpacker.imports import missing
from rollpacker.trackers.samples_table import SamplesTable, samples_table
from rollpacker.trackers.tracker import TrackerConfig
from rollpacker.writing import replacing

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
OPEN_S = 60.0
"""Seconds that a tracking library may take to open its run."""
CALL_S = 120.0
"""Seconds that a tracking library may take over any later call."""
CLOSE_S = 60.0
"""Seconds that the end of a run waits until a tracking library has taken all that is left."""

Leaves = Iterator[tuple[str, Any]]
Status = Literal["ok", "interrupted", "failed"]
NOTHING = [-1, 1]
"""Place of a row of metrics before all others, when nothing is sent yet. A place is a list of the
row's step, and 0 for an evaluation or 1 for the step itself."""


class TrackerProblem(Exception):
    """A tracker cannot be used. The message, shown after its name, says why and what to do."""


def check_connection(url: str, cure: str) -> None:
    """Raise `TrackerProblem` if nobody answers at `url` within `CONNECT_S` seconds: the libraries
    themselves try for minutes. `cure` is a sentence for the message on what the user can do. URLs
    behind a proxy, or of another protocol than HTTP, are not tried."""
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


class Opening(NamedTuple):
    """What a tracking library is told about a run to open a run of its own for it."""

    project: str
    run_name: str
    config: dict[str, Any]
    folder: Path
    """An existing folder in which the tracking library may keep files."""
    run_id: str | None
    """Id that the library gave its run, which it is to continue. None: it begins a new run."""
    last_step: int
    """Step of the last row that was handed to the library before a resume. -1: none was."""


class Tracker(Callback):
    """The base of all trackers. A subclass for a tracking library overrides methods from `check` to
    `finish`. They are called in the tracker's thread only, one at a time, and may raise."""

    name: ClassVar[str]
    shows_texts: ClassVar[bool] = True
    """Whether the tracking library takes texts as values of metrics."""
    library: Any = None
    """The tracking library's package, which `check` imports. None before that."""
    shown: Any = None
    """The tracking library's object for its run, made by `open`. None before that."""

    def __init__(self, config: TrackerConfig) -> None:
        self.config = config
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late_at: float | None = None
        """Time on the monotonic clock until which the call of the library that is under way may
        take. None: no call is under way."""
        self._given_up = False
        self._record: dict[str, Any] = {"run_id": None, "sent": NOTHING}
        self._hooks = (sys.excepthook, sys.exit)

    def missing(self) -> str | None:
        """A sentence that says which of the package's extras to install, or None if the library is
        installed. Imports nothing."""
        return missing(self.name, extra=self.name, what=f"the tracker {self.name}")

    def check(self) -> str:
        """Returns, in words, where the library would show the run. Raises `TrackerProblem`, within
        seconds, if it cannot show it."""
        raise NotImplementedError

    def open(self, run: Opening) -> tuple[str, str]:
        """Open a run of the library, or continue its run `run.run_id`. Returns the library's id of
        its run, and in words where to look at it."""
        raise NotImplementedError

    def send(self, step: int, row: Mapping[str, Any]) -> None:
        """Show a row of `metrics.jsonl`, with finite numbers, and texts if `shows_texts`."""
        self.shown.log(row, step=step)

    def send_samples(self, step: int, table: SamplesTable) -> None:
        self.send(step, {"samples": self.library.Table(columns=table.columns, data=table.rows)})

    def send_picture(self, step: int, path: Path) -> None:
        self.send(step, {path.stem: self.library.Image(str(path))})

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        """End the library's run, whose last step is `step` and whose end was `status`. `summary`:
        the values of `summary.json`, under names such as `a/b`, and "ended": why the run ended."""
        raise NotImplementedError

    # --- what the run calls -----------------------------------------------------------------------

    def on_start(self, run: RunningRun) -> None:
        if (lacking := self.missing()) is not None:
            self._give_up(lacking.removeprefix(f"the tracker {self.name} "))
            return
        config = json.loads(json.dumps(run.config, default=str))
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._put(self._begin, run.name, run.folder / "trackers", config, limit_s=OPEN_S)
        self._thread.start()

    def on_step(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        every = self.config.samples_every_steps
        if not self._given_up and every is not None and (step == 1 or step % every == 0):
            self._put(self._send_samples, step, samples_table(run.samples()))
        self._put(self._send_row, [step, 1], metrics)

    def on_evaluation(self, run: RunningRun, step: int, metrics: Metrics) -> None:
        self._put(self._send_row, [step, 0], metrics)

    def on_end(self, run: RunningRun, reason: str | None) -> None:
        if self._thread is None:
            return
        self._put(self._finish, run.folder, reason)
        self._tasks.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._give_up(f"it did not take everything within {CLOSE_S:g} s of the run's end")

    def _put(self, task: Callable[..., None], *arguments: Any, limit_s: float = CALL_S) -> None:
        """Have the tracker's thread call `task(*arguments)`, which may take `limit_s` seconds. If
        an earlier task has taken too long, the tracker gets no task any more."""
        if (late_at := self._late_at) is not None and time.monotonic() > late_at:
            self._give_up("it did not answer in time")
        if not self._given_up:
            self._tasks.put(functools.partial(self._timed, limit_s, task, *arguments))

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._tasks.put(None)
            logger.warning("%s: %s; the run goes on without it", self.name, why.rstrip("."))

    # --- in the thread ----------------------------------------------------------------------------

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

    def _timed(self, limit_s: float, task: Callable[..., None], *arguments: Any) -> None:
        self._late_at = time.monotonic() + limit_s
        task(*arguments)
        self._late_at = None

    def _begin(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        self.check()
        folder.mkdir(exist_ok=True)
        self._record_file = folder / f"{self.name}.json"
        if self._record_file.exists():
            self._record = json.loads(self._record_file.read_text())
        before, sent = self._record["run_id"], self._record["sent"]
        project, name = self.config.project or "rollpacker", self.config.run_name or name
        run_id, where = self.open(Opening(project, name, config, folder, before, sent[0]))
        self._write_record(run_id, sent if run_id == before else NOTHING)
        logger.warning("%s: %s", self.name, where)  # seen without any set-up

    def _write_record(self, run_id: str, sent: list[int]) -> None:
        self._record = {"run_id": run_id, "sent": sent}
        with replacing(self._record_file) as temporary:
            temporary.write_text(json.dumps(self._record) + "\n")

    def _send_row(self, place: list[int], metrics: Metrics) -> None:
        if place > self._record["sent"]:
            self.send(
                place[0], {name: value for name, value in metrics.items() if self._can_show(value)}
            )
            self._write_record(self._record["run_id"], place)

    def _can_show(self, value: Any) -> bool:
        if isinstance(value, str):
            return self.shows_texts
        return isinstance(value, int | float) and math.isfinite(value)

    def _send_samples(self, step: int, table: SamplesTable | None) -> None:
        if table is not None and [step, 1] > self._record["sent"]:
            self.send_samples(step, table)

    def _finish(self, run_folder: Path, reason: str | None) -> None:
        step = max(0, self._record["sent"][0])
        if (picture := run_folder / "timeline.png").exists():
            self.send_picture(step, picture)
        summary = run_folder / "summary.json"
        values = dict(leaves(json.loads(summary.read_text()), "/")) if summary.exists() else {}
        shown = {name: one for name, one in values.items() if isinstance(one, str | int | float)}
        status: dict[str | None, Status] = {None: "failed", "interrupted": "interrupted"}
        self.finish(status.get(reason, "ok"), step, {**shown, "ended": reason or "an error"})


def leaves(
    values: Mapping[str, Any], separator: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of every leaf in nested mappings and lists: `("a/b/0", 5)` of
    `{"a": {"b": [5]}}`, with `separator` "/". Names begin with `prefix`."""
    for key, value in values.items():
        value = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(value, Mapping):
            yield from leaves(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value
