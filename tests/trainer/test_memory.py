"""The measured peak against allocations of known size."""

from __future__ import annotations

import mmap

import pytest
import torch

from rollpacker.trainer import memory
from rollpacker.trainer.memory import PeakMemory

MIB = 1 << 20


def touch(size: int) -> None:
    """Pages of the system's own, written to and given back, whatever allocators keep."""
    with mmap.mmap(-1, size) as pages:
        for first in range(0, size, mmap.PAGESIZE):
            pages[first] = 1


@pytest.mark.skipif(not memory._CLEAR_REFS.exists(), reason="the peak cannot be set back here")
def test_the_peak_counts_from_the_mark():
    touch(200 * MIB)
    peak = PeakMemory(torch.device("cpu"))
    assert peak.above_mark() < 20 * MIB, "what was given back before the mark does not count"
    touch(64 * MIB)
    assert 60 * MIB < peak.above_mark() < 90 * MIB
    assert peak.read() == peak.mark_bytes + peak.above_mark()
    peak.reset()
    assert peak.above_mark() < 20 * MIB


def test_where_the_peak_cannot_be_set_back_the_process_peak_stands_in(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path)  # a folder: writing to it fails
    peak = PeakMemory(torch.device("cpu"))
    assert not peak.resets
    touch(16 * MIB)
    assert peak.read() >= peak.mark_bytes > 0
