"""Measurement of the most memory that this process held since a given moment."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Text that a process writes to Linux's file `clear_refs` to reset the peak of its
resident set (physical memory)."""
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Number of bytes in one unit of `ru_maxrss` (the peak resident set that the system reports)."""


class PeakMemory:
    """Peak memory of this process: on a CUDA device what torch's allocator held for tensors, on a
    CPU the resident set. Only Linux can set the resident set's peak back; elsewhere (`resets` is
    False) the peak since the process began is given."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.resets = True
        self.mark_bytes = 0
        """Bytes that this process held when `reset` was last called: tensors on CUDA,
        the resident set on a CPU."""
        self.reset()

    def reset(self) -> None:
        """Measure the peak from now on."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self.mark_bytes = torch.cuda.memory_allocated(self._cuda)
            return
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            self.resets = False
        self.mark_bytes = self.read()

    def read(self) -> int:
        """Return the most bytes held since the last `reset`, including what was there before."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        return _peak_resident_set() if self.resets else _lifetime_peak()

    def above_mark(self) -> int:
        """Return by how many bytes the peak exceeds what was held at the last `reset`."""
        return self.read() - self.mark_bytes


def room_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device's memory that this process has or could still take."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _peak_resident_set() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return _lifetime_peak()


def _lifetime_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
