"""Memory that one process writes and others read: weights on their way to engines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollpacker.weights import buffer as weight_buffer
from rollpacker.weights.buffer import ALIGNMENT, StaleWeightsError, WeightBuffer, WeightReader

WEIGHTS = {
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(7.0, dtype=torch.float64),
    "odd": torch.arange(5, dtype=torch.uint8),
    "whole": torch.randn(3, 4, 5),
    "none": torch.empty(0, 4),
}


def write(buffer: WeightBuffer, version: int, factor: float = 1.0) -> None:
    with buffer.writing(version) as tensors:
        for name, value in WEIGHTS.items():
            tensors[name].copy_(value * factor)


def filled(version: int = 1) -> WeightBuffer:
    buffer = WeightBuffer.create(WEIGHTS.items())
    write(buffer, version)
    return buffer


def memory_files() -> set[str]:
    """The descriptors of buffers. Other threads of the tests open and close other ones."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "rollpacker-weights" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


def test_what_one_mapping_writes_the_other_reads():
    buffer = filled()
    with WeightReader().reading(buffer.layout.source(1)) as found:
        assert found.keys() == WEIGHTS.keys()
        for name, value in WEIGHTS.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
    other = WeightBuffer(buffer.layout)
    other.tensors["whole"].fill_(3.0)
    assert buffer.tensors["whole"].unique().tolist() == [3.0]
    assert torch.equal(buffer.tensors["half"], WEIGHTS["half"])  # neighbours are untouched


def test_tensors_are_aligned_and_do_not_overlap():
    layout = filled().layout
    end = ALIGNMENT
    for name, place in sorted(layout.places.items(), key=lambda item: item[1].start):
        assert place.start % ALIGNMENT == 0 and place.start >= end
        end = place.start + WEIGHTS[name].numel() * WEIGHTS[name].element_size()
    assert end <= layout.size_bytes - ALIGNMENT


READER = """
import sys
from rollpacker.weights.buffer import BufferLayout, Place, WeightReader, WeightSource
source = eval(sys.argv[1])
with WeightReader().reading(source) as tensors:
    print(tensors["scalar"].item())
"""


def test_other_processes_read_it_and_nothing_is_left_behind():
    descriptors = memory_files()
    buffer = filled()
    assert len(memory_files()) > len(descriptors)
    path = Path(buffer.layout.path)
    for version in (2, 3):  # one that comes later reads what is there then
        write(buffer, version, factor=version)
        command = [sys.executable, "-c", READER, repr(buffer.layout.source(version))]
        done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
        assert float(done.stdout) == 7.0 * version
    tensors = buffer.tensors
    del buffer
    assert not path.exists() and memory_files() <= descriptors
    assert tensors["scalar"].item() == 21.0  # as long as it is mapped
    assert not list(Path("/dev/shm").glob("rollpacker-*"))


def test_what_is_not_whole_is_refused():
    buffer = WeightBuffer.create(WEIGHTS.items())
    reader = WeightReader()

    def refusal(version: int) -> str:
        with (
            pytest.raises(StaleWeightsError) as refused,
            reader.reading(buffer.layout.source(version)),
        ):
            pytest.fail("it was served")
        return str(refused.value)

    assert refusal(0) == "no weights have been written yet"
    write(buffer, 4)
    assert refusal(5) == "the weights are of version 4, not 5"
    with pytest.raises(RuntimeError, match="killed"), buffer.writing(5) as tensors:
        tensors["half"].fill_(1)
        assert refusal(4) == refusal(5) == "the weights of version 5 are written only in part"
        raise RuntimeError("killed on the way")
    assert refusal(4) == refusal(5) == "the weights of version 5 are written only in part"
    write(buffer, 5)
    with reader.reading(buffer.layout.source(5)) as tensors:
        assert torch.equal(tensors["whole"], WEIGHTS["whole"])


@pytest.mark.parametrize("version", [1, 2])
def test_a_reader_is_told_that_weights_changed_under_it(version: int):
    """Of the same version too, as when a run hands them over once more."""
    buffer = filled()
    with (
        pytest.raises(StaleWeightsError, match="changed while being read"),
        WeightReader().reading(buffer.layout.source(1)),
    ):
        write(buffer, version)


WRITER = """
import os, sys
from rollpacker.weights.buffer import BufferLayout, Place, WeightBuffer
buffer = WeightBuffer(eval(sys.argv[1]))
number = 0
while True:
    number += 1
    with buffer.writing(1) as tensors:
        tensors["a"].fill_(number)
        tensors["b"].fill_(number)
"""


def test_readers_beside_a_writer_that_is_killed_read_whole_versions_or_none():
    buffer = WeightBuffer.create([(name, torch.zeros(1 << 16)) for name in "ab"])
    command = [sys.executable, "-c", WRITER, repr(buffer.layout)]
    writer = subprocess.Popen(command)
    served = refused = 0
    until = time.monotonic() + 60
    try:
        while (served < 10 or refused < 10) and time.monotonic() < until:
            try:
                with buffer.reading(1) as tensors:
                    copies = [tensors[name].clone() for name in "ab"]
            except StaleWeightsError:
                refused += 1
                continue
            served += 1
            assert len(torch.cat(copies).unique()) == 1
    finally:
        writer.kill()
        writer.wait()
    assert served >= 10 and refused >= 10


def test_weights_whose_owner_is_gone_are_said_to_be():
    source = filled().layout.source(1)
    lost = replace(source, layout=replace(source.layout, path="/proc/1/fd/999"))
    with pytest.raises(StaleWeightsError, match="weights are gone"), WeightReader().reading(lost):
        pytest.fail("it was served")


def test_a_path_that_means_another_buffer_by_now_is_not_taken_for_the_first():
    reader, buffer = WeightReader(), filled()
    first = buffer.layout.source(1)
    with reader.reading(first):
        pass
    del buffer
    buffer = WeightBuffer.create(WEIGHTS.items())
    write(buffer, 2, factor=2)
    assert buffer.layout.path == first.layout.path
    with reader.reading(buffer.layout.source(2)) as found:
        assert found["scalar"].item() == 14.0
    with pytest.raises(StaleWeightsError, match="is another file"), reader.reading(first):
        pytest.fail("it was served")


def test_too_little_memory_is_one_message_and_leaves_nothing(monkeypatch):
    descriptors = memory_files()
    with pytest.raises(ValueError, match=r"^[\d.]+ GiB of memory are left, .* need 1048576.00 GiB"):
        WeightBuffer.create([("huge", torch.empty(1 << 50, dtype=torch.uint8, device="meta"))])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"are left, .* smaller model"):
        WeightBuffer.create(WEIGHTS.items())
    assert memory_files() <= descriptors


def test_a_system_without_memory_files_has_a_file_that_goes_with_its_owner(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(weight_buffer.tempfile, "tempdir", str(tmp_path))
    buffer = filled()
    with WeightReader().reading(buffer.layout.source(1)) as tensors:
        assert torch.equal(tensors["half"], WEIGHTS["half"])
    assert list(tmp_path.iterdir()) == [Path(buffer.layout.path)]
    del buffer
    assert list(tmp_path.iterdir()) == []
