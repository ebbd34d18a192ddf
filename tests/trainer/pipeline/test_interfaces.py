"""Addresses of network interfaces."""

from __future__ import annotations

import sys

import pytest

from rollpacker.pipeline.links.host_route import own_addresses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def test_an_interface_has_its_address():
    assert own_addresses(["lo", "lo"]) == ["127.0.0.1", "127.0.0.1"]


def test_without_one_it_is_where_processes_meet(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_addresses([]) == ["127.0.0.1"]


def test_one_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ValueError, match=r"interfaces: nosuch0 has no IPv4 address .* are .*lo"):
        own_addresses(["nosuch0"])
