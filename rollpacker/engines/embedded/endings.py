"""Finds where a response ends: at an end token, stop string, length limit, or logits with a NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.engines.embedded.rows import RowTable

STOP_TAIL_TOKENS = 8
"""Number of a response's newest tokens, beyond the stop string's number of bytes, that are decoded
to look for that stop string."""


class Endings:
    """Finds the ends of responses of one model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        vocabulary_size: int,
    ) -> None:
        """Reads the end tokens from the model's generation config and from the tokenizer. Only stop
        strings need a tokenizer."""
        self.can_read = tokenizer is not None
        self._tokenizer = tokenizer
        self._is_end = np.zeros(vocabulary_size, np.bool_)
        generation_config = getattr(model, "generation_config", None)
        configured = getattr(generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        ids = [*ids, getattr(tokenizer, "eos_token_id", None)]
        self._is_end[[one for one in ids if one is not None and one < vocabulary_size]] = True
        self.end_tokens: list[int] = np.flatnonzero(self._is_end).tolist()

    def completes(self, stops: Sequence[str], tokens: Sequence[int]) -> bool:
        """Whether decoding the newest of `tokens` gives text that contains one of `stops`."""
        assert self._tokenizer is not None
        tail = tokens[-_tail(stops) :]
        text = self._tokenizer.decode(list(tail))
        return any(stop in text for stop in stops)

    def stopped(self, rows: RowTable, first: int) -> np.ndarray:
        """Whether each row, from row `first` on, was stopped by its newest token, which is an end
        token or completes a stop string: bool [rows]."""
        token, may_stop, has_strings = (
            rows.host_column(name)[first:] for name in ("token", "may_stop", "has_stop_strings")
        )
        stopped: np.ndarray = self._is_end[token] & may_stop
        if has_strings.any():
            for row in first + np.flatnonzero(has_strings):
                count = int(rows.host_column("count")[row])
                stopped[row - first] |= self._ends_string(rows, int(row), count)
        return stopped

    def among(
        self, rows: RowTable, drawn_for: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray
    ) -> np.ndarray:
        """Whether each of these tokens [rows, tokens], drawn for the rows with indices `drawn_for`,
        ends its row, whatever limits and stop strings say: it is an end token or has a NaN
        log-probability."""
        may_stop = rows.host_column("may_stop")[drawn_for]
        ends: np.ndarray = self._is_end[tokens] & may_stop[:, None] | np.isnan(log_probs)
        return ends

    def num_until_end(self, rows: RowTable, row: int, start: int) -> int | None:
        """Length of a row's response up to and with the first token that ends it; None if none
        does. Only tokens from index `start` of the response on are looked at."""
        count, limit = (int(rows.host_column(name)[row]) for name in ("count", "limit"))
        found = limit if count >= limit else None
        broken = rows.first_broken(row, start)
        if broken is not None:
            found = min(broken + 1, found or limit)
        if rows.host_column("may_stop")[row]:
            ends = np.flatnonzero(self._is_end[rows.tokens(row, start)])
            if len(ends):
                found = min(start + int(ends[0]) + 1, found or limit)
        if rows.host_column("has_stop_strings")[row]:
            for num_tokens in range(start + 1, (found or count) + 1):
                if self._ends_string(rows, row, num_tokens):
                    return num_tokens
        return found

    def _ends_string(self, rows: RowTable, row: int, num_tokens: int) -> bool:
        """Whether a row's first `num_tokens` tokens have just completed one of its stop strings."""
        stops = rows.pending[row].request.sampling.stop
        return self.completes(
            stops, rows.tokens(row, max(0, num_tokens - _tail(stops)), num_tokens)
        )


def _tail(stops: Sequence[str]) -> int:
    """Number of the newest tokens that are decoded to look for these stop strings."""
    return max(len(stop.encode()) for stop in stops) + STOP_TAIL_TOKENS
