"""Keys and values of dialogues between two turns of the model, copied out of the slots (places in
the cache) at their own length.

A slot is as wide as its row may become, and is free for another row while an environment answers.
The copies count against the memory budget of the slots, and are dropped where rows that could run
need their room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollpacker.core.ids import SampleId
from rollpacker.engines.embedded.kv_slots import KVSlots, PromptCache

HEADROOM = 1 / 8
"""Share of the memory budget that `room` does not report as free. The core (which schedules
samples) learns of changes late: without this reserve, rows that end fast would not be kept."""


@dataclass(frozen=True, slots=True)
class KeptRow:
    """Keys and values of the first tokens of a dialogue, from the prompt's first token on."""

    tokens: tuple[int, ...]
    cache: PromptCache


class KeptRows:
    """The dialogues whose keys and values are kept, by sample, oldest first. For one thread."""

    def __init__(self, slots: KVSlots) -> None:
        self._slots = slots
        self._rows: dict[SampleId, KeptRow] = {}
        self.num_tokens = 0

    def size(self, sample: SampleId) -> int:
        """Number of tokens whose keys and values are kept of this sample; 0: none are kept."""
        return len(self._rows[sample].tokens) if sample in self._rows else 0

    def keep(self, sample: SampleId, tokens: tuple[int, ...], row: int) -> None:
        """Copy the keys and values of `tokens` out of the cache's slot number `row`. The caller
        must then call `settle`, which drops the copy if memory is short."""
        self.let_go([sample])
        self._rows[sample] = KeptRow(tokens, self._slots.snapshot(row, len(tokens)))
        self.num_tokens += len(tokens)

    def take(self, sample: SampleId, prompt: tuple[int, ...]) -> KeptRow | None:
        """Remove and return the keys and values kept of a sample, cut to the tokens with which
        `prompt` begins, without its last token, which must be fed. None: no tokens are left."""
        kept = self._rows.get(sample)
        if kept is None:
            return None
        self.let_go([sample])
        size = min(len(kept.tokens), len(prompt) - 1)
        if kept.tokens[:size] != prompt[:size]:
            pairs = zip(kept.tokens, prompt, strict=False)
            size = next(i for i, (one, other) in enumerate(pairs) if one != other)
        if size == len(kept.tokens):
            return kept
        cache = [part[:, :size] for part in kept.cache]
        return KeptRow(kept.tokens[:size], cache) if size else None

    def let_go(self, samples: Iterable[SampleId]) -> None:
        """Drop the keys and values kept of these samples. Samples that have none are ignored."""
        for sample in samples:
            kept = self._rows.pop(sample, None)
            if kept is not None:
                self.num_tokens -= len(kept.tokens)

    def clear(self) -> None:
        """Drop all kept keys and values. Called when the weights change or the memory is needed."""
        self._rows.clear()
        self.num_tokens = 0

    def settle(self, new: Sequence[SampleId], num_rows: int, width: int) -> None:
        """Drop copies of the samples in `new`, the last ones first, until slots and copies fit the
        memory budget. The slots are shrunk first if the live rows, `num_rows` rows of at most
        `width` positions, use no more than half of them."""
        if self._is_over and self._is_wasteful(num_rows * width):
            self._slots.shrink(num_rows, width)
        for sample in reversed(new):
            if not self._is_over:
                break
            self.let_go([sample])

    def trim(self) -> None:
        """Drop the oldest kept dialogues until memory suffices, as the slots may have grown."""
        while self._is_over and self._rows:
            self.let_go([next(iter(self._rows))])

    def room(self, num_positions: int) -> int:
        """Number of tokens of dialogues that can still be kept beside live rows of `num_positions`
        positions in all, as in `SampleGenerated.room`. Negative: too much is kept."""
        taken = 0 if self._is_wasteful(num_positions) else self._allocated
        most = int((1 - HEADROOM) * self._slots.budget_tokens)
        return most - max(taken, num_positions) - self.num_tokens

    @property
    def _allocated(self) -> int:
        return self._slots.num_slots * self._slots.width

    @property
    def _is_over(self) -> bool:
        return self._allocated + self.num_tokens > self._slots.budget_tokens

    def _is_wasteful(self, num_positions: int) -> bool:
        """Whether `num_positions` fill at most half of the allocated slots. With more in use it is
        not worth while to shrink them, since they would soon grow again."""
        return 2 * num_positions <= self._allocated
