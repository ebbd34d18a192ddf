"""Pages of runs on 127.0.0.1, read-only: it answers GET, under its own names alone, from files
that it finds by listing a folder. What a browser sends is never made into a path."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from rollpacker.report.log import EVENTS_FILE
from rollpacker.report.page.document import document
from rollpacker.report.page.follower import Follower
from rollpacker.report.page.packing import pack
from rollpacker.report.summary import SUMMARY_FILE

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
PORT = 8765
NUM_PORTS = 20
"""So many are tried, from `PORT` on, unless one is asked for."""
NUM_FOLLOWED = 8
"""Runs that are kept in memory: those that were looked at last."""

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""


class Runs:
    """The runs of a folder (or the one run that it is), found anew with each look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._followed: dict[str, Follower] = {}

    def folders(self) -> dict[str, Path]:
        """By name. A folder without an event log is none; neither is one that goes away."""
        if (self.folder / EVENTS_FILE).is_file():
            return {self.folder.resolve().name: self.folder}
        try:
            inside = sorted(self.folder.iterdir())
        except OSError:
            return {}
        return {path.name: path for path in inside if (path / EVENTS_FILE).is_file()}

    def listed(self) -> list[dict[str, Any]]:
        """Name, age and what `summary.json` says of each; the newest first."""
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
        """None: there is no such run."""
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
    """Of a run that ended, from what it left; empty while there is nothing that can be read."""
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
    """Answers requests; knows nothing of sockets."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._page = document("Runs · RollPacker", "live").encode()

    def answer(self, target: str) -> Answer:
        parts = urlsplit(target)
        path = parts.path.split("/")[1:]
        if path in ([""], ["run", path[-1]]):
            return HTTPStatus.OK, "text/html; charset=utf-8", self._page
        if path == ["api", "runs"]:
            return _json(self.runs.listed())
        if path[:2] == ["api", "run"] and len(path) in (3, 4):
            name = unquote(path[2], errors="surrogateescape")
            if path[3:] not in ([], ["samples"]):
                return _nothing()
            have = parse_qs(parts.query).get("have", [""])[0]
            return self._run(name, have, samples=path[3:] == ["samples"])
        return _nothing()

    def _run(self, name: str, have: str, *, samples: bool) -> Answer:
        try:
            follower = self.runs.follower(name)
            if follower is None:
                return _nothing()
            if samples:
                return _packed(follower.samples())
            state, page = follower.look(have)
        except (OSError, ValueError) as error:  # deleted, or written anew, while it was read
            logger.info("%s: %s", name, error)
            self.runs.forget(name)
            return _nothing()
        return _json(state) if page is None else _packed({"state": state, "run": page})


def _json(value: Any) -> Answer:
    return HTTPStatus.OK, "application/json", json.dumps(value).encode()


def _packed(value: dict[str, Any]) -> Answer:
    return HTTPStatus.OK, "application/octet-stream", pack(value)


def _nothing() -> Answer:
    return HTTPStatus.NOT_FOUND, "application/json", b'{"gone": true}'


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Bound to `ADDRESS`; port 0: any that is free. Raises `OSError` where it is taken."""
    answer = Dashboard(Runs(folder)).answer
    return _Server((ADDRESS, port), _handler(answer))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away before it has its answer is nothing to tell."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(answer: Callable[[str], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "rollpacker", ""
        timeout = 30

        def do_GET(self) -> None:
            assert isinstance(self.server, ThreadingHTTPServer)
            hosts = {f"{host}:{self.server.server_port}" for host in (ADDRESS, "localhost")}
            if self.headers.get("Host") not in hosts:  # another site's name that leads here
                self._send((HTTPStatus.FORBIDDEN, "text/plain", b"not under this name\n"))
                return
            self._send(answer(self.path))

        def _send(self, found: Answer) -> None:
            status, kind, body = found
            zipped = len(body) > 1000 and "gzip" in self.headers.get("Accept-Encoding", "")
            body = gzip.compress(body, 1, mtime=0) if zipped else body
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if zipped:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    return Handler


def open_server(folder: Path, port: int | None) -> ThreadingHTTPServer:
    """On the port asked for, or on the first free one. Raises `ValueError` where there is none."""
    for number in range(PORT, PORT + NUM_PORTS) if port is None else [port]:
        try:
            return make_server(folder, number)
        except (OSError, OverflowError) as error:
            problem = error
    tried = f"port {port}" if port is not None else f"ports {PORT} to {PORT + NUM_PORTS - 1}"
    raise ValueError(f"cannot listen on {ADDRESS}, {tried} ({problem}): choose another with --port")


def serve(runs: str, port: int | None) -> int:
    """Until Ctrl-C. Raises `ValueError` where there is no such folder, or no port."""
    folder = Path(runs)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give a folder of runs, such as runs, or one run")
    server = open_server(folder, port)
    with contextlib.suppress(OSError):
        os.nice(10)  # whoever trains on this machine goes first
    num = len(Runs(folder).folders())
    runs_here = "1 run" if num == 1 else f"{num} runs"
    print(
        f"{runs_here} in {folder}: http://{ADDRESS}:{server.server_address[1]}/ (Ctrl-C ends it)",
        flush=True,
    )
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
