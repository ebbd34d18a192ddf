"""Which file may say where ray's head is: whoever is named there is sent the cluster's token."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="runtime=ray needs it")

from rollpacker.workers.hosts import ray_connection
from rollpacker.workers.hosts.ray_connection import find_head

STRANGER = 65534


@pytest.fixture
def address() -> Iterator[str]:
    """Somebody who answers on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ray would say so."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray_connection, "CURRENT_CLUSTER", path)
    return path


def refused() -> str:
    with pytest.raises(ValueError, match="set RAY_ADDRESS") as error:
        find_head()
    return str(error.value)


def test_a_file_of_this_user_is_heeded(path: Path, address: str) -> None:
    assert find_head() is None
    path.write_text(address + "\n")
    assert find_head() == address


def test_a_file_of_root_is_heeded(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(address)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert find_head() == address


def test_a_file_of_somebody_else_is_not(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(address)
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert str(path) in refused()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert find_head() == "head:6379"


def test_a_link_is_not_followed(path: Path, address: str) -> None:
    own = path.with_name("own")
    own.write_text(address)
    path.symlink_to(own)
    refused()


def test_what_is_no_file_is_refused_and_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    refused()
    path.unlink()
    path.mkdir()
    refused()


def test_an_old_file_whose_head_is_gone_is_passed_over(path: Path, address: str) -> None:
    path.write_text("no address")
    assert find_head() is None
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        path.write_text(f"127.0.0.1:{unused.getsockname()[1]}")
        assert find_head() is None
