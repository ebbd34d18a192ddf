"""Computes several new tokens of a row in one forward pass: guessed tokens are drawn again with the
row's noise (its random numbers).

A row's newest token is not in the cache yet. `Extender.extend` feeds it together with a guess of
the tokens after it, draws at every one of these positions with the noise that decoding would use
there, and keeps what came out up to and with the first token that differs from the guess. The row
is then exactly where as many decode steps would have brought it. Tokens that a response had when it
was aborted are such a guess (`Extender.take_up`).

The new prompt tokens of a row that was kept between turns (kept_rows.py) are fed in such passes,
too (`Extender.go_on`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollpacker.engines.embedded.decoder import (
    PREFILL_LOGITS,
    PREFILL_TOKENS,
    PREFILL_TOKENS_ACCELERATOR,
    Decoder,
)
from rollpacker.engines.embedded.endings import Endings
from rollpacker.engines.embedded.extend_step import SPAN_COST_SCORES, ExtendStep, NewTokens
from rollpacker.engines.embedded.kept_rows import KeptRow
from rollpacker.engines.embedded.plain_forward import LogitsAfter
from rollpacker.engines.embedded.rows import ANY_LENGTH, Pending
from rollpacker.engines.embedded.sampling import draw
from rollpacker.engines.engine import Carried

MAX_REDRAWS = 16
"""Most times that tokens of one response are drawn again for its length (`draw_again`)."""
FIRST_PORTION = 255
"""Most carried tokens of a row (kept from before an abort) that its first pass verifies. Each later
pass verifies at most as many as have come out the same so far. So a row with an early difference
costs one short pass, and a long one that stays the same costs few."""
EXTEND_SCORES = {"cpu": 1 << 24}
EXTEND_SCORES_ACCELERATOR = 1 << 27
"""Most attention scores of one head (elements of the mask) in a pass, on any device but a CPU."""

DRAW_LOGITS = 1 << 24
"""Most logits that tokens are drawn from at once. Drawing makes several float64 copies of them."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow a row's newest token, for comparison with the tokens drawn."""

    tokens: Sequence[int]
    log_probs: Sequence[float] | None = None
    """Log-probabilities of the tokens, which are then accepted without being drawn. None: the
    tokens are drawn again, and compared."""


class Extender:
    """Extends the rows of a decoder by more than one token at a time."""

    def __init__(self, decoder: Decoder, endings: Endings) -> None:
        self._decoder = decoder
        self._rows = decoder.rows
        self._endings = endings
        num_heads: int = decoder.model.config.get_text_config().num_attention_heads
        # The most query heads that share a key head.
        self._query_groups = -(-num_heads // min(one.num_kv_heads for one in decoder.slots.layers))
        self._span_cost = SPAN_COST_SCORES / num_heads if decoder.width_buckets else float("inf")
        kind = decoder.slots.device.type
        # Positions of a pass, by the model's work; by their logits; attention scores.
        self._max_tokens = PREFILL_TOKENS.get(kind, PREFILL_TOKENS_ACCELERATOR)
        self._max_logits = max(1, PREFILL_LOGITS // self._rows.vocabulary_size)
        self._max_scores = EXTEND_SCORES.get(kind, EXTEND_SCORES_ACCELERATOR)

    # -- guesses -----------------------------------------------------------------------------------

    def extend(self, rows: np.ndarray, guesses: Sequence[Guess]) -> np.ndarray:
        """Extend each of these rows by at least one token, and by more as far as its guess is
        right. A row's newest token is then the first that differs from the guess, the token after
        the whole guess, or the token that ended the row. Returns each row's number of new
        tokens."""
        before, positions = (self._rows.host_column(name)[rows] for name in ("count", "position"))
        max_tokens = self._max_tokens
        if not self._decoder.can_part_logits:
            max_tokens = min(max_tokens, self._max_logits)
        room = self._rows.host_column("limit")[rows] - before - 1
        assert (room >= 0).all(), "a row at its limit was to go on"
        sizes = np.array([len(guess.tokens) for guess in guesses])
        lengths = 1 + np.minimum(sizes, np.minimum(room, self._most(max_tokens) - 1))
        for part in self._passes(lengths, positions + lengths, max_tokens):
            self._pass(rows[part], [guesses[place] for place in part], lengths[part])
        num_new: np.ndarray = self._rows.host_column("count")[rows] - before
        return num_new

    def _most(self, max_tokens: int) -> int:
        width = self._decoder.slots.width * self._query_groups
        return max(1, min(max_tokens, self._max_scores // width))

    def _passes(
        self, lengths: np.ndarray, ends: np.ndarray, max_tokens: int
    ) -> Iterator[np.ndarray]:
        """Split rows into parts that go through the model together within its limits, and yield the
        indices of each part. Row i gets `lengths[i]` tokens, which end at position `ends[i]`."""
        order = np.argsort(lengths, kind="stable")
        if self._fits(lengths, ends, max_tokens):
            yield np.arange(len(lengths))
            return
        start = 0
        for stop in range(1, len(order) + 1):
            part = order[start : stop + 1]
            if stop == len(order) or not self._fits(lengths[part], ends[part], max_tokens):
                yield np.sort(order[start:stop])
                start = stop

    def _fits(self, lengths: np.ndarray, ends: np.ndarray, max_tokens: int) -> bool:
        padded = len(lengths) * int(lengths.max())
        masked = padded * int(ends.max()) * self._query_groups
        return int(lengths.sum()) <= max_tokens and masked <= self._max_scores

    def _pass(self, rows: np.ndarray, guesses: Sequence[Guess], lengths: np.ndarray) -> None:
        num_tokens = int(lengths.max())
        fed = np.zeros((len(rows), num_tokens), np.int64)
        fed[:, 0] = self._rows.host_column("token")[rows]
        for place, guess in enumerate(guesses):
            fed[place, 1 : lengths[place]] = guess.tokens[: lengths[place] - 1]
        starts = self._rows.host_column("position")[rows]
        real = np.arange(num_tokens) < lengths[:, None]
        drawn, log_probs = np.zeros(fed.shape, np.int64), np.zeros(fed.shape)
        drawn[real], log_probs[real] = self._draw(
            self._decoder.extend(fed[real], self._step(rows, starts, lengths)),
            np.repeat(rows, lengths),
            np.nonzero(real)[1],
        )
        drawn_for = [guess.log_probs is None for guess in guesses]
        doubtful = np.isnan(log_probs).any(axis=1) & (lengths > 1) & drawn_for
        if doubtful.any():
            self._pass_without(rows[doubtful])
            sound = np.flatnonzero(~doubtful)
            rows, lengths, fed, real = rows[sound], lengths[sound], fed[sound], real[sound]
            drawn, log_probs = drawn[sound], log_probs[sound]
            guesses = [guesses[place] for place in sound.tolist()]
            if not len(rows):
                return
        for place, guess in enumerate(guesses):
            if guess.log_probs is not None:
                size = lengths[place] - 1
                drawn[place, :size] = guess.tokens[:size]
                log_probs[place, :size] = guess.log_probs[:size]
        goes_on = (drawn[:, :-1] == fed[:, 1:]) & real[:, 1:]
        goes_on &= ~self._endings.among(self._rows, rows, drawn, log_probs)[:, :-1]
        num_new = 1 + np.logical_and.accumulate(goes_on, axis=1).sum(axis=1)
        self._rows.append(rows, drawn, log_probs, num_new)
        self._cut_at_strings(rows, num_new)

    def _pass_without(self, rows: np.ndarray) -> None:
        """Give each of these rows one token without its guess, because the guess led to logits that
        are not numbers. A wrong guess may do so, and spoils the tokens before it too, since a key
        that is not a number cannot be masked."""
        for row, position in zip(rows, self._rows.host_column("position")[rows], strict=True):
            self._decoder.slots.clear(int(row), int(position))
        self._pass(rows, [Guess(())] * len(rows), np.ones(len(rows), np.int64))

    def _cut_at_strings(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        """Remove the tokens after a stop string from rows whose newest `num_new` tokens contain
        one. `rows` and `num_new` are [rows]."""
        for place in np.flatnonzero(self._rows.host_column("has_stop_strings")[rows]):
            row, count = rows[place], int(self._rows.host_column("count")[rows[place]])
            end = self._endings.num_until_end(self._rows, row, count - num_new[place])
            if end is not None and end < count:
                self._rows.cut(rows[place : place + 1], [end])

    # -- what was kept -----------------------------------------------------------------------------

    def go_on(self, entries: Sequence[Pending], kept: Sequence[KeptRow]) -> None:
        """Add rows whose slots (places in the cache) are reserved and whose prompts begin with a
        dialogue that was kept from an earlier turn: restore its keys and values, feed the rest of
        the prompts, draw the first tokens."""
        for start in range(0, len(entries), self._max_logits):
            part = slice(start, start + self._max_logits)
            first = self._rows.num_rows
            noise = self._rows.add(list(entries[part]))
            rows = np.arange(first, self._rows.num_rows)
            for row, one in zip(rows.tolist(), kept[part], strict=True):
                self._decoder.slots.restore(one.cache, slice(row, row + 1))
            starts = np.array([len(one.tokens) for one in kept[part]])
            self._rows.host_column("num_reused")[rows] = starts
            prompts = [entry.request.prompt_tokens for entry in entries[part]]
            self._decoder.draw_first(first, self._read(rows, starts, prompts), noise)

    def _read(
        self, rows: np.ndarray, starts: np.ndarray, prompts: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """Feed these rows their prompts, row i from token `starts[i]` on. Returns the logits [rows,
        vocabulary] after the prompts."""
        done, most = starts.copy(), self._most(self._max_tokens)
        logits = torch.zeros(0)
        ends = np.array([len(prompt) for prompt in prompts])
        while len(going := np.flatnonzero(done < ends)):
            lengths = np.minimum(ends[going] - done[going], most)
            for part in self._passes(lengths, done[going] + lengths, self._max_tokens):
                places, sizes = going[part], lengths[part]
                fed = [
                    prompts[place][done[place] : done[place] + size]
                    for place, size in zip(places.tolist(), sizes.tolist(), strict=True)
                ]
                step = self._step(rows[places], done[places], sizes)
                logits_after = self._decoder.extend(np.concatenate(fed), step)
                last = logits_after(torch.from_numpy(step.last).to(self._decoder.slots.device))
                if not len(logits):
                    logits = last.new_empty((len(rows), last.shape[1]))
                logits[torch.from_numpy(places).to(last.device)] = last
            done[going] += lengths
        self._decoder.num_prefilled_tokens += int((ends - starts).sum())
        return logits

    # -- what was carried --------------------------------------------------------------------------

    def take_up(self, first: int) -> int:
        """Let the rows from `first` on keep their carried tokens (generated before an abort): all,
        or if they are to be verified, as far as they are drawn again. These rows have just drawn a
        first token. Returns how many tokens of all rows from `first` on are not carried ones."""
        carrying = [
            row for row in range(first, self._rows.num_rows) if self._rows.pending[row].has_carried
        ]
        self._take_first([row for row in carrying if not self._carried(row).verify])
        going = self._agreeing(carrying)
        while going:
            counts = self._rows.host_column("count")[going].tolist()
            guesses = [self._guess(row, count) for row, count in zip(going, counts, strict=True)]
            self.extend(np.array(going), guesses)
            going = self._agreeing(going)
        kept = 0
        for row in carrying:
            num_kept = self._num_agreed(row)
            kept += num_kept
            if self._carried(row).verify:
                self._rows.host_column("num_kept")[row] = num_kept
                ceiling = self._carried(row).ceiling
                if ceiling is not None and num_kept < len(self._carried(row).tokens):
                    self._rows.host_column("ceiling")[row] = ceiling
        return int(self._rows.host_column("count")[first:].sum()) - kept

    def _carried(self, row: int) -> Carried:
        carried = self._rows.pending[row].request.carried
        assert carried is not None
        return carried

    def _take_first(self, rows: list[int]) -> None:
        """Replace each row's first token by its first carried token (kept from before an abort)."""
        if not rows:
            return
        carried = [self._carried(row) for row in rows]
        self._rows.cut(np.array(rows), [0] * len(rows))
        self._rows.append(
            np.array(rows),
            np.array([[one.tokens[0]] for one in carried]),
            np.array([[one.log_probs[0]] for one in carried]),
            np.ones(len(rows), np.int64),
        )

    def num_kept(self, row: int) -> int:
        """Number of the row's carried tokens (from before an abort) that came out the same. -1: it
        has none, or they were not drawn again."""
        column = self._rows.host_column
        num_kept, entry = int(column("num_kept")[row]), self._rows.pending[row]
        carried = entry.request.carried
        if carried is None or num_kept < carried.num_verified or column("redraw")[row]:
            return num_kept
        return carried.num_same(self._rows.tokens(row))  # it was generated beyond them

    def _agreeing(self, rows: list[int]) -> list[int]:
        """The rows that may go on with their carried tokens (from before an abort): all tokens so
        far equal them, there are more of them to verify, and no token has ended the row."""
        counts = self._rows.host_column("count")[rows].tolist()
        return [
            row
            for row, count in zip(rows, counts, strict=True)
            if self._num_agreed(row) == count < self._carried(row).num_verified
            and self._endings.num_until_end(self._rows, row, count - 1) is None
        ]

    def _num_agreed(self, row: int) -> int:
        """Number of the row's tokens that equal those from before its abort, up to a difference."""
        return self._carried(row).num_same(self._rows.tokens(row))

    def _guess(self, row: int, count: int) -> Guess:
        """Return the row's carried tokens (from before an abort) from index `count` on as a guess.
        It ends before the last token that was drawn with one set of random numbers: the token after
        a guess is drawn with that set, too."""
        redraw, end = self._rows.pending[row].carried_redraw(count)
        self._rows.draw_with(row, count, redraw)
        carried = self._carried(row)
        size = min(max(FIRST_PORTION, count), carried.num_verified - count)
        part = slice(count, count + (size if end is None else min(size, end - count - 1)))
        return Guess(carried.tokens[part], None if carried.verify else carried.log_probs[part])

    def draw_again(self, rows: np.ndarray) -> np.ndarray:
        """Draw tokens again in rows whose length is not allowed, and return which of `rows` go on:
        bool [rows]. Each row has just stopped or passed its ceiling (longest allowed length).

        Bounds are set for responses that differ from their carried tokens (from before an abort). A
        response that was cut off at some length must not end before that length; one that had ended
        before its siblings were cut off must not grow longer than they. If it does, the tokens
        after the first different one are drawn again, with new noise (random numbers). If the
        different token ended the response, it is drawn again itself.
        """
        column = self._rows.host_column
        count = column("count")[rows]
        is_wrong = (count <= column("floor")[rows]) | (count > column("ceiling")[rows])
        again: np.ndarray = is_wrong & (column("redraw")[rows] < MAX_REDRAWS)
        column("ceiling")[rows[~again]] = ANY_LENGTH
        refused = rows[again]
        if len(refused):
            column("num_kept")[refused] = [self.num_kept(row) for row in refused.tolist()]
            starts = np.minimum(column("num_kept")[refused] + 1, column("count")[refused] - 1)
            for row, start in zip(refused.tolist(), starts.tolist(), strict=True):
                self._rows.redraw_from(row, start)
            self._rows.cut(refused, starts.tolist())
            self._decoder.forget_plan()
        return again

    # -- one pass ----------------------------------------------------------------------------------

    def _step(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> ExtendStep:
        return ExtendStep(self._decoder.slots, NewTokens(rows, starts, lengths), self._span_cost)

    def _draw(
        self, logits_after: LogitsAfter, rows: np.ndarray, ahead: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a token after each token of a pass, and return the drawn tokens and their
        log-probabilities [tokens]. The token drawn after the pass's token i is number `ahead[i]`,
        from 0, of those that row `rows[i]` gets."""
        size = max(1, DRAW_LOGITS // self._rows.vocabulary_size)
        tokens, log_probs = [], []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            row = torch.from_numpy(rows[part]).to(self._rows.device)
            temperature, top_k, top_p = (
                self._rows.device_column(name).index_select(0, row)
                for name in ("temperature", "top_k", "top_p")
            )
            noise = self._rows.noise_ahead(rows[part], 1, ahead[part])[:, 0]
            drawn = draw(logits_after(part), noise, temperature, top_k, top_p, self._rows.mode)
            tokens.append(drawn[0].cpu().numpy())
            log_probs.append(drawn[1].cpu().numpy())
        return np.concatenate(tokens), np.concatenate(log_probs)
