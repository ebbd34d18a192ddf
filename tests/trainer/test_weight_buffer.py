"""Memory that a trainer's process writes and the engine's reads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollpacker.trainer import weight_buffer
from rollpacker.trainer.weight_buffer import ALIGNMENT, WeightBuffer

WEIGHTS = {
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "odd": torch.arange(5, dtype=torch.uint8),
    "whole": torch.randn(3, 4, 5),
    "none": torch.empty(0, 4),
}


def filled() -> WeightBuffer:
    buffer = WeightBuffer.create(WEIGHTS.items())
    for name, value in WEIGHTS.items():
        buffer.tensors[name].copy_(value)
    return buffer


def test_what_one_mapping_writes_the_other_reads():
    buffer = filled()
    other = WeightBuffer(buffer.layout)
    buffer.unlink()
    assert other.tensors.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        assert other.tensors[name].dtype == value.dtype
        assert torch.equal(other.tensors[name], value)
    other.tensors["whole"].fill_(3.0)
    assert buffer.tensors["whole"].unique().tolist() == [3.0]
    assert torch.equal(buffer.tensors["half"], WEIGHTS["half"])  # neighbours are untouched


def test_tensors_are_aligned_and_do_not_overlap():
    buffer = filled()
    layout = buffer.layout
    assert layout.size_bytes == Path(layout.path).stat().st_size
    buffer.unlink()
    end = 0
    for name, place in sorted(layout.places.items(), key=lambda item: item[1].start):
        assert place.start % ALIGNMENT == 0 and place.start >= end
        end = place.start + WEIGHTS[name].numel() * WEIGHTS[name].element_size()
    assert end <= layout.size_bytes


def test_another_process_sees_them_and_leaves_nothing_behind(tmp_path):
    buffer = filled()
    (tmp_path / "layout").write_bytes(pickle.dumps(buffer.layout))
    code = (
        "import pathlib, pickle, sys\n"
        "from rollpacker.trainer.weight_buffer import WeightBuffer\n"
        "layout = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "WeightBuffer(layout).tensors['scalar'].fill_(8.0)\n"
    )
    path = Path(buffer.layout.path)
    assert path.exists()
    subprocess.run([sys.executable, "-c", code, tmp_path / "layout"], check=True, timeout=120)
    assert buffer.tensors["scalar"].item() == 8.0
    buffer.unlink()
    buffer.unlink()
    assert not path.exists()
    assert buffer.tensors["scalar"].item() == 8.0  # as long as it is mapped


def test_no_name_is_left_if_there_is_too_little_memory(monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_buffer, "_IN_MEMORY", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=rf"{tmp_path} has no room .*--shm-size"):
        WeightBuffer.create(WEIGHTS.items())
    assert not list(tmp_path.iterdir())
