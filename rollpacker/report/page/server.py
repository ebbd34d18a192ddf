"""A read-only server of runs' pages on 127.0.0.1. It answers only GET requests for its own host
names, from files that it finds by listing a folder: no path is made from a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rollpacker.report.log import EVENTS_FILE
from rollpacker.report.page.document import document
from rollpacker.report.page.follower import Follower
from rollpacker.report.page.packing import pack
from rollpacker.report.summary import SUMMARY_FILE
from rollpacker.serving.http import (
    LOOPBACK,
    GZipMiddleware,
    Limits,
    Middleware,
    Request,
    Response,
    Route,
    Server,
    Starlette,
    in_json,
)

logger = logging.getLogger(__name__)

PORT = 8765
NUM_PORTS = 20
"""Number of ports that are tried, from `PORT` on, if the user names none."""
NUM_FOLLOWED = 8
"""Maximum number of runs that are kept in memory: those whose pages were last asked for."""
LIMITS = Limits(connections=256, head_s=30.0, body_s=30.0)

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Runs:
    """The runs in a folder, or the one run whose folder it is. It is listed at every use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._followed: dict[str, Follower] = {}

    def folders(self) -> dict[str, Path]:
        """Mapping from a run's name to its folder. A folder without an event log is left out, and
        so is one that disappears meanwhile."""
        if (self.folder / EVENTS_FILE).is_file():
            return {self.folder.resolve().name: self.folder}
        try:
            inside = sorted(self.folder.iterdir())
        except OSError:
            return {}
        return {path.name: path for path in inside if (path / EVENTS_FILE).is_file()}

    def listed(self) -> list[dict[str, Any]]:
        """Name, link, seconds since the last entry and some results of every run, newest first."""
        found = []
        for name, path in self.folders().items():
            try:
                changed_s = time.time() - (path / EVENTS_FILE).stat().st_mtime
            except OSError:
                continue
            link = f"/run/{quote(name, safe='', errors='surrogateescape')}"
            row = {"name": name, "link": link, "quiet_s": max(0.0, changed_s)}
            found.append(row | _short_summary(path / SUMMARY_FILE))
        return sorted(found, key=lambda row: row["quiet_s"])

    def follower(self, name: str) -> Follower | None:
        """The `Follower` of a run, made when it is first asked for. None for an unknown run."""
        path = self.folders().get(name)
        if path is None:
            return None
        with self._lock:
            found = self._followed.pop(name, None) or Follower(path)
            self._followed[name] = found
            for oldest in list(self._followed)[:-NUM_FOLLOWED]:
                del self._followed[oldest]
            return found

    def forget(self, name: str) -> None:
        with self._lock:
            self._followed.pop(name, None)


def _short_summary(path: Path) -> dict[str, Any]:
    """A few numbers of a run's `summary.json`, for the list of runs. Empty if the run has not
    ended, or if the file cannot be read."""
    try:
        summary = json.loads(path.read_text("utf-8"))
        passed = [row.get("eval/pass@1") for row in summary["evaluations"]]
        return {
            "steps": summary["steps"]["total"],
            "wall_s": summary["wall_s"],
            "finished": summary["finished"],
            "failed": summary.get("failed"),
            "reward": summary["training_reward"]["last"],
            "passed": passed[-1] if passed else None,
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Dashboard:
    """The web application that answers requests for runs' pages and for what the pages show."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._page = document("Runs · RollPacker", "live").encode()

    def app(self) -> Starlette:
        routes = [
            Route("/", self._document),
            Route("/run/{name}", self._document),
            Route("/api/runs", self._listed),
            Route("/api/run/{name}", self._run),
            Route("/api/run/{name}/samples", self._samples),
        ]
        compress = Middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)

        async def nothing(*_: Any) -> Response:
            return _gone()

        return Starlette(routes=routes, middleware=[compress], exception_handlers={404: nothing})

    def _document(self, _: Request) -> Response:
        return _sent(self._page, "text/html; charset=utf-8")

    def _listed(self, _: Request) -> Response:
        return in_json(self.runs.listed(), headers=_HEADERS)

    def _run(self, request: Request) -> Response:
        have = request.query_params.get("have", "")
        return self._looked_at(request, lambda follower: follower.look(have))

    def _samples(self, request: Request) -> Response:
        return self._looked_at(request, lambda follower: (None, follower.samples()))

    def _looked_at(
        self, request: Request, look: Callable[[Follower], tuple[Any, dict[str, Any] | None]]
    ) -> Response:
        """The response to a request for a run. `look` returns the run's state and page, of which
        one may be None; the response has the state as JSON, or else packed data. Status 404: the
        run is gone."""
        # Not of the decoded path: names of folders need not be UTF-8.
        name = unquote(request.scope["raw_path"].decode().split("/")[3], errors="surrogateescape")
        try:
            follower = self.runs.follower(name)
            if follower is None:
                return _gone()
            state, page = look(follower)
        except (OSError, ValueError) as error:  # deleted, or written anew, while it was read
            logger.info("%s: %s", name, error)
            self.runs.forget(name)
            return _gone()
        if page is None:
            return in_json(state, headers=_HEADERS)
        found = page if state is None else {"state": state, "run": page}
        return _sent(pack(found), "application/octet-stream")


def _sent(body: bytes, kind: str, status: int = 200) -> Response:
    return Response(body, status, {**_HEADERS, "Content-Type": kind})


def _gone() -> Response:
    return in_json({"gone": True}, 404, headers=_HEADERS)


async def open_server(folder: Path, port: int | None) -> tuple[Server, int]:
    """Opens a server on `port` (0: any free port; None: the first free port from `PORT` on), and
    returns it with its port. Raises `ValueError` if no port is free."""
    own_names: set[str] = set()

    def refused(head: Request) -> Response | None:
        """The response that refuses a request for another host name or by another method than GET.
        None: the request is allowed."""
        if head.headers.get("host") not in own_names:
            return _sent(b"not under this name\n", "text/plain", 403)
        return None if head.method == "GET" else _sent(b"only GET\n", "text/plain", 405)

    server = Server(Dashboard(Runs(folder)).app(), admit=refused, limits=LIMITS)
    for number in range(PORT, PORT + NUM_PORTS) if port is None else [port]:
        try:
            opened = await server.open(number)
        except (OSError, OverflowError) as error:
            problem = error
        else:
            own_names |= {f"{LOOPBACK}:{opened}", f"localhost:{opened}"}
            return server, opened
    tried = f"port {port}" if port is not None else f"ports {PORT} to {PORT + NUM_PORTS - 1}"
    where = f"{LOOPBACK}, {tried} ({problem})"
    raise ValueError(f"cannot listen on {where}: choose another with --port")


async def _serve(folder: Path, port: int | None) -> None:
    server, port = await open_server(folder, port)
    with contextlib.suppress(OSError):
        os.nice(10)  # whoever trains on this machine goes first
    num = len(Runs(folder).folders())
    runs_here = "1 run" if num == 1 else f"{num} runs"
    print(f"{runs_here} in {folder}: http://{LOOPBACK}:{port}/ (Ctrl-C ends it)", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()


def serve(runs: str, port: int | None) -> int:
    """Serve the pages of the runs in a folder until Ctrl-C; returns 0. Raises `ValueError` if the
    folder does not exist or no port is free."""
    folder = Path(runs)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give a folder of runs, such as runs, or one run")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(folder, port))
    return 0
