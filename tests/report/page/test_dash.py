"""`rollpacker dash`: pages that follow runs, for this machine's browser alone."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cli.main import main
from rollpacker.core.records import Entry, encode
from rollpacker.report.page import follower
from rollpacker.report.page.follower import Follower
from rollpacker.report.page.server import PORT, open_server
from tests.report.fake_run import FakeRun, write
from tests.report.page.browser import opened
from tests.report.page.runs import HOSTILE, write_run


@contextmanager
def served(folder: Path) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server, port = asyncio.run_coroutine_threadsafe(open_server(folder, 0), loop).result(60)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def ask(
    port: int, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    headers = {name.lower(): value for name, value in answer.getheaders()}
    found = answer.status, answer.read(), headers
    connection.close()
    return found


def apart(call: Callable[[], Any]) -> Any:
    """In a thread of its own: an event loop of playwright runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


def lines(entries: list[Entry]) -> str:
    return "".join(encode(entry) + "\n" for entry in entries)


def up_to(entries: list[Entry], step: int) -> int:
    """How many entries there are until the step is committed."""
    found = (
        n
        for n, e in enumerate(entries)
        if getattr(getattr(e, "event", None), "step", 0) == step
        and type(e.event).__name__ == "Committed"
    )  # type: ignore[union-attr]
    return next(found) + 1


class Looks:
    """Which look at a run gave which step's page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.gave: dict[int, int] = {}
        self._look = Follower.look
        monkeypatch.setattr(Follower, "look", lambda run, version: self.look(run, version))

    def look(self, run: Follower, version: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
        self.begun += 1
        number = self.begun
        state, page = self._look(run, version)
        if page is not None:
            self.gave[page["last_step"]] = number
        return state, page


def test_a_step_appears_within_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page asks each second, and the first question after a step was written is answered with
    it. Of the machine's speed this says nothing: making a page must take little processor time."""
    assert "const ASK_MS = 1000;" in (Path(follower.__file__).parent / "files/live.js").read_text()
    entries, log = FakeRun(1).run(12), tmp_path / "runs" / "live" / "events.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(lines(entries[: up_to(entries, 5)]))
    assert min(making_takes_s(log.parent) for _ in range(5)) < follower.MAX_WORK * 1.0
    monkeypatch.setattr(follower, "MAX_WORK", 1e9)
    monkeypatch.setattr(follower, "READ_S", 1e9)
    looks = Looks(monkeypatch)
    with (
        served(tmp_path / "runs") as port,
        opened(f"http://127.0.0.1:{port}/run/live") as (page, seen),
    ):
        page.wait_for_selector("html[data-step='5']", state="attached")
        assert "5 steps" in page.inner_text("#overview")
        page.fill("[aria-label=Metric]", "grad_norm")
        now = up_to(entries, 5)
        for step in (6, 7, 8):
            until = up_to(entries, step)
            with log.open("a") as file:
                file.write(lines(entries[now:until]))
            now, begun = until, looks.begun
            page.wait_for_selector(f"html[data-step='{step}']", state="attached")
            assert looks.gave[step] <= begun + 1
        assert "8 steps" in page.inner_text("#overview")
        assert (
            page.input_value("[aria-label=Metric]") == "grad_norm"
        )  # what the reader has set stays
        own = f"http://127.0.0.1:{port}/"
        assert all(request.startswith(own) for request in seen.requests if request != "data:,")
        assert seen.errors == []


def making_takes_s(folder: Path) -> float:
    """Of a processor, not of a clock."""
    follower = Follower(folder)
    follower.look("")
    began = time.thread_time()
    follower._book.plain()
    return time.thread_time() - began


def test_a_page_that_lags_says_of_which_step_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "MAX_WORK", 1e-6)  # its page is made once
    entries, log = FakeRun(1).run(5), tmp_path / "runs" / "live" / "events.jsonl"
    log.parent.mkdir(parents=True)
    now = up_to(entries, 1)
    log.write_text(lines(entries[:now]))
    with (
        served(tmp_path / "runs") as port,
        opened(f"http://127.0.0.1:{port}/run/live") as (page, seen),
    ):
        page.wait_for_selector("html[data-step='1']", state="attached")
        assert "1 step in" in page.inner_text("#overview")
        assert "as of step" not in page.inner_text("[role=status]")
        with log.open("a") as file:
            file.write(lines(entries[now : up_to(entries, 4)]))
        page.wait_for_selector("[role=status] >> text=step 5: ")
        assert "(below: as of step 1)" in page.inner_text("[role=status]")
        assert page.locator("main .pill.live").count() == 1
        assert seen.errors == []


def test_a_finished_run_tells_its_state_once(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", steps=3)
    with served(tmp_path) as port, opened(f"http://127.0.0.1:{port}/run/plain") as (page, _):
        page.wait_for_selector("html[data-step='3']", state="attached")
        page.wait_for_timeout(100)
        assert page.locator("main .pill").all_inner_texts() == ["done"]


@pytest.mark.parametrize("reason", ["every step is done", "interrupted"])
def test_an_interrupted_run_is_not_green(tmp_path: Path, reason: str) -> None:
    run = write_run(tmp_path / "one", steps=3)
    log = run / "events.jsonl"
    log.write_text(log.read_text().replace('"done"', f'"{reason}"'))
    assert main(["report", str(run)]) == 0
    kind = "warning" if reason == "interrupted" else "good"
    with served(tmp_path) as port:
        for path in ("", "run/one"):
            with opened(f"http://127.0.0.1:{port}/{path}") as (page, _):
                page.wait_for_selector(f"main .pill.{kind} >> text={reason}")


def test_a_run_that_failed_is_red_and_says_of_what(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3)
    log = run / "events.jsonl"
    ended, failed = '"reason":"done","failed":false', '"reason":"no engine","failed":true'
    text = log.read_text()
    assert text.count(ended) == 1
    log.write_text(text.replace(ended, failed))
    assert main(["report", str(run)]) == 0
    with served(tmp_path) as port:
        for path in ("", "run/one"):
            with opened(f"http://127.0.0.1:{port}/{path}") as (page, _):
                page.wait_for_selector("main .pill.bad >> text=failed: no engine")
                assert page.locator("main .pill.good").count() == 0


def test_a_run_that_begins_anew_or_goes_away_while_it_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    write(FakeRun(1).run(6), folder / "events.jsonl")
    with (
        served(tmp_path / "runs") as port,
        opened(f"http://127.0.0.1:{port}/run/one") as (page, seen),
    ):
        page.wait_for_selector("html[data-step='6']", state="attached")
        write(FakeRun(2).run(3), folder / "events.jsonl")  # shorter: a resume cut it back
        page.wait_for_selector("html[data-step='3']", state="attached")
        shutil.rmtree(folder)
        page.wait_for_selector("text=folder is gone")
        assert "3 steps" in page.inner_text("#overview")  # what was known stays
        folder.mkdir()
        write(FakeRun(3).run(9), folder / "events.jsonl")
        page.wait_for_selector("html[data-step='9']", state="attached")
        assert [one for one in seen.errors if "404" not in one] == []


def test_the_list_names_runs_and_a_hostile_name_is_text(tmp_path: Path) -> None:
    name = "<img src=x onerror='window.hacked=1'>é %2e"
    write_run(tmp_path / name, steps=6, text=HOSTILE)
    write_run(tmp_path / "plain", steps=6)
    (tmp_path / "no run").mkdir()
    with served(tmp_path) as port, opened(f"http://127.0.0.1:{port}/") as (page, seen):
        page.wait_for_selector("table")
        assert page.locator("tbody tr").count() == 2
        page.click(f"text={name}")
        page.wait_for_selector("html[data-step='6']", state="attached")
        assert page.inner_text("h1") == name
        page.click("text=Read the samples")
        page.wait_for_selector(".row")
        page.click(".row")
        assert "</script><script>" in page.inner_text(".detail")
        assert page.evaluate("window.hacked") is None
        assert seen.errors == []


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil:80"])
def test_other_names_are_refused(tmp_path: Path, host: str) -> None:
    write_run(tmp_path / "plain", steps=3)
    with served(tmp_path) as port:
        assert ask(port, "/api/runs", host=host)[0] == 403
        assert ask(port, "/", host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_nothing_but_get_is_answered(tmp_path: Path, method: str) -> None:
    with served(tmp_path) as port:
        assert ask(port, "/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/run/..",
        "/api/run/%2e%2e",
        "/api/run/..%2f..%2fsecret",
        "/api/run/plain%2f..%2f..%2fsecret",
        "/api/run/plain/../../secret",
        "/api/run/plain/events.jsonl",
        "/run/plain/../../etc/passwd",
        "/files/page.css",
        "//etc/passwd",
        "/api/run/%00",
        "/api/run/%ff%fe",
    ],
)
def test_no_path_leads_out(tmp_path: Path, path: str) -> None:
    write_run(tmp_path / "runs" / "plain", steps=3)
    write_run(tmp_path / "secret", steps=3)
    with served(tmp_path / "runs") as port:
        status, body, _ = ask(port, path)
        assert status == 404 and b"secret" not in body
        status, _, headers = ask(port, "/api/run/plain")
        assert status == 200
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_a_log_that_cannot_be_read_is_told_on_its_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "plain", steps=3)
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"foreign": 1}\n')
    with served(tmp_path) as port, opened(f"http://127.0.0.1:{port}/run/plain") as (page, _):
        page.wait_for_selector("text=the event log cannot be read on")
        assert "3 steps" in page.inner_text("#overview")


def test_a_folder_whose_name_is_no_unicode_has_its_page(tmp_path: Path) -> None:
    # Parquet files cannot be written there.
    write_run(tmp_path / "plain", steps=3).rename(tmp_path / os.fsdecode(b"caf\xe9"))
    with served(tmp_path) as port:
        (run,) = json.loads(ask(port, "/api/runs")[1])
        name = run["link"].removeprefix("/run/")
        assert name == "caf%E9" and state_of(port, name)["step"] == 3


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    entries, log = FakeRun(1).run(4), tmp_path / "half" / "events.jsonl"
    log.parent.mkdir()
    text = lines(entries)
    log.write_text(text[: len(text) // 2])
    with served(tmp_path) as port:
        state = state_of(port, "half")
        assert 1 <= state["step"] < 4 and not state["problem"]
        with log.open("a") as file:
            file.write(text[len(text) // 2 :])
        assert state_of(port, "half")["step"] == 4


def state_of(port: int, name: str) -> dict[str, Any]:
    status, body, headers = ask(port, f"/api/run/{name}")
    assert status == 200 and headers["content-type"] == "application/octet-stream"
    head = json.loads(body[8 : 8 + int.from_bytes(body[4:8], "little")])
    return dict(head["state"])


def test_a_port_in_use_is_passed_over_or_told(tmp_path: Path, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert apart(lambda: main(["dash", str(tmp_path), "--port", str(port)])) == 2
        assert f"port {port}" in capsys.readouterr().err

    async def two() -> list[int]:
        opened = [await open_server(tmp_path, None) for _ in range(2)]
        for server, _ in opened:
            await server.close()
        return [port for _, port in opened]

    first, second = apart(lambda: asyncio.run(two()))
    assert PORT <= first < second


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: Any) -> None:
    assert main(["dash", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_a_browser_that_goes_away_is_nothing(tmp_path: Path, capfd: Any) -> None:
    """It printed a traceback."""
    with served(tmp_path) as port:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as browser:
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                browser.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        time.sleep(1)
        assert ask(port, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollpacker.cli.main", "dash", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "0 runs in" in process.stdout.readline()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
