"""A queue of samples that wait for a worker, ordered by the rank of their prompts.

The rank is a number that the caller computes for a prompt. The prompt with the lowest rank comes
first, of its samples the longest, and among equals whichever came first. A rank changes only with
events of the prompt's own samples; after these it is computed again and put into a heap. Prompts of
which nothing is known have the mean rank of all, which changes all the time, so that they have a
heap of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from rollpacker.core.ids import PromptId, SampleId


class _Waiting:
    __slots__ = ("arrival", "entry", "prompt", "tokens")

    def __init__(self, prompt: PromptId, arrival: int) -> None:
        self.prompt = prompt
        self.arrival = arrival
        """Number of prompts that had begun to wait before this one."""
        self.tokens: dict[SampleId, int] = {}
        """Tokens of each sample that waits, in the order of arrival."""
        self.entry: _Entry | None = None
        """Entry by which heaps order this prompt; older entries are skipped. None: none yet."""


_Entry = tuple[float, int, int, _Waiting]
"""A prompt's heap entry: rank, minus the tokens of its longest sample, arrival, and its samples."""


class PromptQueue:
    """Queue of samples by the rank of their prompts. Before `pop`, call `look_again` for every
    prompt whose rank has changed."""

    __slots__ = ("_arrivals", "_changed", "_known", "_unknown", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[PromptId, _Waiting] = {}
        self._arrivals = count()
        self._changed: dict[_Waiting, None] = {}
        """Prompts whose rank must be computed again, in the order in which they changed."""
        self._known: list[_Entry] = []
        self._unknown: list[_Entry] = []
        """Heap of prompts without a known rank; their entries have 0 in place of the rank."""

    def __len__(self) -> int:
        """Number of prompts of which at least one sample waits."""
        return len(self._waiting)

    def add(self, sample: SampleId, num_tokens: int) -> None:
        prompt = sample.prompt
        waiting = self._waiting.get(prompt)
        if waiting is None:
            waiting = self._waiting[prompt] = _Waiting(prompt, next(self._arrivals))
        waiting.tokens[sample] = num_tokens
        self._changed[waiting] = None

    def remove(self, sample: SampleId) -> None:
        """Removes a sample from the queue, since it need not wait any more."""
        self._remove(self._waiting[sample.prompt], sample)

    def _remove(self, waiting: _Waiting, sample: SampleId) -> None:
        del waiting.tokens[sample]
        if waiting.tokens:
            self._changed[waiting] = None
            return
        del self._waiting[waiting.prompt]
        self._changed.pop(waiting, None)
        waiting.entry = None
        if not self._waiting:  # a heap keeps what does not count any more until it comes up
            self._known.clear()
            self._unknown.clear()

    def look_again(self, prompt: PromptId) -> None:
        """Marks the prompt's rank as possibly changed: `pop` computes it again."""
        waiting = self._waiting.get(prompt)
        if waiting is not None:
            self._changed[waiting] = None

    def look_at_all(self) -> None:
        """Marks the ranks of all prompts as possibly changed: `pop` computes them again."""
        self._changed.update(dict.fromkeys(self._waiting.values()))

    def pop(self, rank: Callable[[PromptId], float | None], mean: float) -> SampleId:
        """Removes and returns the next sample. `rank` returns a prompt's rank, the lowest being
        next, or None if it is unknown: `mean` then stands for it."""
        # Each check of a simulated run comes by here: benchmarks/sim_speed.py.
        known, unknown, changed = self._known, self._unknown, self._changed
        for waiting in changed:
            found = rank(waiting.prompt)
            longest = max(waiting.tokens.values())
            waiting.entry = entry = (found or 0.0, -longest, waiting.arrival, waiting)
            heapq.heappush(unknown if found is None else known, entry)
        changed.clear()
        while known and known[0][3].entry is not known[0]:
            heapq.heappop(known)
        while unknown and unknown[0][3].entry is not unknown[0]:
            heapq.heappop(unknown)
        assert known or unknown, "nobody waits"
        first = known[0] if known else unknown[0]
        if known and unknown and (mean, *unknown[0][1:3]) < first[:3]:
            first = unknown[0]
        waiting, longest = first[3], -first[1]
        sample = next(one for one, num_tokens in waiting.tokens.items() if num_tokens == longest)
        self._remove(waiting, sample)
        return sample
