"""A name on the hub where there is no network: one message, within two seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rollpacker.run.parts import hub

CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def refusing() -> Iterator[str]:
    """One that answers, though it has no such page."""

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that it is put back afterwards
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setattr(hub, "_set_by_us", False)
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield


def test_nobody_there_and_one_that_is_silent(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ANSWER_S", 0.4)
    for endpoint, why in ((CLOSED, "refused"), (silent, "timed out|no answer within 0.4 s")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        began = time.monotonic()
        with pytest.raises(hub.HubError, match=why) as caught:
            hub.look_for_names({"model.path": "someone/model"})
        assert time.monotonic() - began < 8  # the library's own limits and repetitions take more
        assert str(caught.value).startswith("model.path someone/model: the Hugging Face hub (")
        assert os.environ["HF_HUB_OFFLINE"] == "1"  # for all that is asked after this
        with pytest.raises(hub.HubError, match=r"data\.train\.path someone/rows: .* that data set"):
            hub.look_for_names({}, {"data.train.path": "someone/rows"})


@pytest.mark.parametrize("through", ["directly", "by a proxy"])
def test_a_slow_answer_is_one(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    """A server behind a slow proxy counted as no network, and a good model was refused."""

    class Slow(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            time.sleep(2.0)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        if through == "directly":
            monkeypatch.setenv("HF_ENDPOINT", address)
        else:
            monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
            monkeypatch.setenv("http_proxy", address)
        assert hub.unreachable() is None
        server.shutdown()


def test_a_connection_that_does_not_come_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops what is sent: here, looking up the name takes for ever."""
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")

    def never(*_: object, **__: object) -> None:
        time.sleep(60)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", never)
    began = time.monotonic()
    assert hub.unreachable() == "no connection within 1.5 s"
    assert time.monotonic() - began < 50


def test_what_is_here_is_taken(tmp_path: Path, monkeypatch, caplog, refusing: str) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    copy = tmp_path / "hub" / "models--someone--model"
    (copy / "snapshots" / "1").mkdir(parents=True)
    (copy / "snapshots" / "1" / "config.json").write_text("{}")
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("1")
    (tmp_path / "hf" / "datasets" / "someone___rows").mkdir(parents=True)
    hub.look_for_names({"model.path": "someone/model"}, {"data.train.path": "someone/rows"})
    (record,) = caplog.records
    assert "someone/model, someone/rows from the copies on this machine" in record.message
    assert constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("HF_ENDPOINT", refusing)  # it is back
    hub.look_for_names({"model.path": "someone/model"})
    assert not constants.HF_HUB_OFFLINE and "HF_HUB_OFFLINE" not in os.environ


def test_nobody_is_asked_for_a_folder_or_where_it_is_forbidden(tmp_path: Path, monkeypatch) -> None:
    def asked() -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(hub, "unreachable", asked)
    hub.look_for_names({"model.path": str(tmp_path), "model.teacher": "./not/there"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(hub.HubError, match=r"someone/model: HF_HUB_OFFLINE=1 forbids asking"):
        hub.look_for_names({"model.path": "someone/model"})
    # The library would try for half a minute.
    with pytest.raises(hub.HubError, match=r"data.train.path someone/rows: .* that data set"):
        hub.look_for_names({}, {"data.train.path": "someone/rows"})
    monkeypatch.setattr(hub, "_model_is_here", lambda name: True)
    (tmp_path / "hf/datasets/someone___rows").mkdir(parents=True)
    hub.look_for_names({"model.path": "someone/model"}, {"data.train.path": "someone/rows"})


@pytest.mark.parametrize("missing", ["model", "data"])
def test_the_command_says_it_once(tmp_path: Path, missing: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    train = {"kind": "jsonl", "path": str(rows)}
    if missing == "data":
        train = {"kind": "huggingface", "path": "someone/rows"}
    config = {
        "name": "mine",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": "someone/model" if missing == "model" else str(tmp_path)},
        "data": {"train": train},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 8},
        "rewards": [{"function": "math"}],
        "train": {"steps": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "HF_ENDPOINT": CLOSED, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "rollpacker.cli.main", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.count("cannot be reached") == 1 and "Retry" not in done.stderr
    assert done.stderr.startswith(f"rollpacker: {missing}")
