"""Samples that wait for a worker, where it goes by prompt who is next.

The most urgent prompt comes first, of its samples the longest, and among equals who came first. A
prompt's urgency changes with events of its own samples, and is looked at again after these alone:
a heap has what was found. Prompts of which nothing is known are as urgent as the mean of all, which
changes all the time, so that they have a heap of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from rollpacker.core.ids import PromptId, SampleId

Place = tuple[float, int, int]
"""Urgency, tokens of the longest sample and arrival of a prompt, such that the least is next."""
Entry = tuple[Place, PromptId]


class PromptQueue:
    """Tell it what may have changed (`look_again`) before `pop`."""

    __slots__ = ("_arrivals", "_changed", "_counter", "_entries", "_known", "_samples", "_unknown")

    def __init__(self) -> None:
        self._samples: dict[PromptId, dict[SampleId, int]] = {}
        """Who waits, with their tokens, in the order of arrival."""
        self._arrivals: dict[PromptId, int] = {}
        self._counter = count()
        self._changed: dict[PromptId, None] = {}
        """In order, so that nothing hangs on the order of a set."""
        self._entries: dict[PromptId, Entry] = {}
        """What of the heaps is valid."""
        self._known: list[Entry] = []
        self._unknown: list[Entry] = []
        """With urgency 0."""

    def __len__(self) -> int:
        """Prompts with someone who waits."""
        return len(self._samples)

    def add(self, sample: SampleId, num_tokens: int) -> None:
        prompt = sample.prompt
        if prompt not in self._samples:
            self._samples[prompt] = {}
            self._arrivals[prompt] = next(self._counter)
        self._samples[prompt][sample] = num_tokens
        self._changed[prompt] = None

    def remove(self, sample: SampleId) -> None:
        """It waits no more."""
        prompt = sample.prompt
        waiting = self._samples[prompt]
        del waiting[sample]
        self._changed[prompt] = None
        if not waiting:
            del self._samples[prompt], self._arrivals[prompt], self._changed[prompt]
            self._entries.pop(prompt, None)
        if not self._samples:  # a heap keeps what is not valid any more until it comes up
            self._known.clear()
            self._unknown.clear()

    def look_again(self, prompt: PromptId) -> None:
        """Its urgency may be another."""
        if prompt in self._samples:
            self._changed[prompt] = None

    def look_at_all(self) -> None:
        """Any urgency may be another."""
        self._changed.update(dict.fromkeys(self._samples))

    def pop(self, urgency: Callable[[PromptId], float | None], mean: float) -> SampleId:
        """Who is next, of those that wait. `urgency` of a prompt; None: the mean."""
        samples, entries = self._samples, self._entries
        for prompt in self._changed:
            found = urgency(prompt)
            longest = max(samples[prompt].values())
            entries[prompt] = entry = (
                (-(found or 0.0), -longest, self._arrivals[prompt]),
                prompt,
            )
            heapq.heappush(self._unknown if found is None else self._known, entry)
        self._changed.clear()
        first = self._first(self._known)
        mean_first = self._first(self._unknown) if self._unknown else None
        if first is None or (mean_first is not None and (-mean, *mean_first[0][1:]) < first[0]):
            first = mean_first
        assert first is not None, "nobody waits"
        waiting = samples[first[1]]
        sample = max(waiting, key=waiting.__getitem__)
        self.remove(sample)
        return sample

    def _first(self, heap: list[Entry]) -> Entry | None:
        """The least that is valid."""
        while heap and self._entries.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None
