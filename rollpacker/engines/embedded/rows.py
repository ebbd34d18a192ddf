"""The table of live rows (samples being decoded): which request has which slot of the cache, and
what it has generated.

Every property of a row is an entry in a numpy array (a column), so that a step's bookkeeping is a
handful of vector operations whatever the number of rows. The columns that the model and the sampler
read are seen as tensors too: on a CPU these share the arrays' memory, elsewhere each reading copies
the column to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rollpacker.engines.embedded import vllm_noise
from rollpacker.engines.embedded.sampling import DrawMode, exponentials, noise_size
from rollpacker.engines.engine import GenerationRequest, Response, sample_key

ANY_LENGTH = np.iinfo(np.int64).max
"""Value of the column `ceiling` for a row that may become as long as its limit allows."""
NOISE_BLOCK = 64
"""Number of decode steps whose noise (random numbers to draw tokens with) is made at a time."""
NOISE_BLOCK_ENTRIES = 1 << 15
"""Most random numbers in a block of noise, which covers fewer steps if need be: larger blocks leave
a CPU's caches and take twice as long."""
NOISE_BLOCK_UNEVEN = 4
"""Number of steps that the first block of noise (random numbers) covers after a step that gave rows
several tokens each, since further such steps may make the block useless."""
_DEVICE_COLUMNS = {
    "token": np.int64,
    "position": np.int64,
    "temperature": np.float64,
    "top_k": np.int64,
    "top_p": np.float64,
}
_HOST_COLUMNS = {
    "sequence": np.int64,
    "count": np.int64,
    "limit": np.int64,
    "may_stop": np.bool_,
    "has_stop_strings": np.bool_,
    "key": np.uint64,
    "redraw": np.int64,
    "floor": np.int64,
    "ceiling": np.int64,
    "num_kept": np.int64,
    "num_reused": np.int64,
    "store": np.int64,
    "log_prob": np.float64,
}


@dataclass(frozen=True, slots=True)
class Pending:
    """A request that the engine has taken on. `sequence`: its number in the order of submission."""

    request: GenerationRequest
    sequence: int
    redraws: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (token's number, set of random numbers that it and later tokens are drawn with), as in
    `Response.redraws`. Empty: all tokens are drawn with set 0."""

    @property
    def limit(self) -> int:
        return self.request.forced_length or self.request.sampling.max_response_tokens

    @property
    def width(self) -> int:
        """Number of cache positions that the row can need: one for each token of its prompt and of
        its longest response but the last, which is never fed."""
        return len(self.request.prompt_tokens) + self.limit - 1

    @property
    def has_carried(self) -> bool:
        return bool(self.request.carried and self.request.carried.tokens)

    def carried_redraw(self, token: int) -> tuple[int, int | None]:
        """For a carried token (kept from before an abort), return its redraw (set of random
        numbers) and the number of the first later token of another redraw (None: there is none)."""
        carried = self.request.carried
        redraws = carried.redraws if carried is not None and carried.verify else ()
        redraw = max([redraw for start, redraw in redraws if start <= token], default=0)
        return redraw, min([start for start, _ in redraws if start > token], default=None)

    def key(self, redraw: int) -> int:
        """64-bit key of the request's random numbers in this redraw (0: the first set of them)."""
        request = self.request
        whose = request.noise or request.sample
        return sample_key(request.sampling.seed, whose, redraw, request.turn)

    def draw_with(self, start: int, redraw: int) -> int:
        """Note that the tokens from number `start` on are drawn with the noise of this redraw (set
        of random numbers). Returns the key of that noise."""
        self.redraws[:] = [one for one in self.redraws if one[0] < start]
        if redraw != (self.redraws[-1][1] if self.redraws else 0):
            self.redraws.append((start, redraw))
        return self.key(redraw)

    def redraw_from(self, start: int) -> int:
        """Note that tokens from number `start` on get unused random numbers. Returns their key."""
        carried = self.request.carried
        before = (*self.redraws, *(carried.redraws if carried is not None else ()))
        return self.draw_with(start, 1 + max([redraw for _, redraw in before], default=0))


class RowTable:
    """The columns over all slots, of which the first `num_rows` are live.

    Columns [slots]: token is the newest token, log_prob its log-probability, and position its
    place, where the next step writes its key and value. num_kept is the number of carried tokens
    (generated before an abort) that were drawn again just as they were (-1: not compared),
    num_reused the number of prompt tokens whose keys and values were kept from an earlier turn.
    A response may not end with floor tokens or fewer, nor become longer than ceiling; redraw counts
    how often its tokens were drawn with new noise for that reason.
    """

    def __init__(
        self, device: torch.device, vocabulary_size: int, *, noise_of_vllm: bool = False
    ) -> None:
        """`noise_of_vllm`: whether to draw with the noise (random numbers) that vLLM's own sampler
        makes."""
        self.device = device
        self.vocabulary_size = vocabulary_size
        self._noise_of_vllm = noise_of_vllm
        self._noise_size = vocabulary_size if noise_of_vllm else noise_size(vocabulary_size)
        self.num_rows = 0
        self.pending: list[Pending] = []
        self.mode = DrawMode()
        self._num_slots = 0
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(0, dtype) for name, dtype in {**_DEVICE_COLUMNS, **_HOST_COLUMNS}.items()
        }
        self._seen_as_tensors: dict[str, Tensor] = {}
        self._noise = torch.zeros(0)
        self._noise_column = 0
        self._is_uneven = False
        """Whether rows have got different numbers of tokens since the block of noise (random
        numbers for several steps) was made. The block's rest is then useless, and the next block is
        kept short."""
        self._free_stores: list[int] = []
        self._tokens = np.zeros((0, 0), np.int64)
        self._log_probs = np.zeros((0, 0), np.float32)

    # -- storage -----------------------------------------------------------------------------------

    def reserve(self, num_slots: int) -> None:
        """Make room for `num_slots` rows in the columns."""
        if num_slots <= self._num_slots:
            return
        added = num_slots - self._num_slots
        for name, old in self._columns.items():
            self._columns[name] = np.concatenate([old, np.zeros(added, old.dtype)])
        self._free_stores.extend(range(num_slots - 1, self._num_slots - 1, -1))
        width = self._tokens.shape[1]
        self._tokens = np.concatenate([self._tokens, np.zeros((added, width), np.int64)])
        self._log_probs = np.concatenate([self._log_probs, np.zeros((added, width), np.float32)])
        self._num_slots = num_slots
        self._seen_as_tensors = {
            name: torch.from_numpy(self._columns[name]) for name in _DEVICE_COLUMNS
        }
        steps = max(1, min(NOISE_BLOCK, NOISE_BLOCK_ENTRIES // (num_slots * self._noise_size)))
        shape = (num_slots, steps, self._noise_size)
        self._noise = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self._noise_column = steps

    def device_column(self, name: str) -> Tensor:
        """The column of this name over all slots, used or not, as a device tensor for reading."""
        return self._seen_as_tensors[name].to(self.device)

    def host_column(self, name: str) -> np.ndarray:
        """The entries of a column for the live rows, as an array that may be written to."""
        return self._columns[name][: self.num_rows]

    def _set_mode(self) -> None:
        """Note which parts of `sampling.draw` the rows need, after some came or went."""
        temperature, top_k, top_p = (
            self.host_column(name) for name in ("temperature", "top_k", "top_p")
        )
        self.mode = DrawMode(
            greedy=bool((temperature == 0).any()),
            tempered=bool((temperature != 1).any()),
            truncated=bool((top_k < self.vocabulary_size).any() or (top_p < 1).any()),
        )

    # -- noise -------------------------------------------------------------------------------------

    def next_noise(self) -> Tensor:
        """Return every slot's noise (random numbers to draw with) for the next step, float64
        [slots, `noise_size`] on the device."""
        num_steps = self._noise.shape[1]
        if self._noise_column >= num_steps:
            self._noise_column = max(0, num_steps - NOISE_BLOCK_UNEVEN) if self._is_uneven else 0
            self._is_uneven = False
            self._fill_noise(slice(0, self.num_rows))
        column = self._noise[:, self._noise_column]
        self._noise_column += 1
        return column

    def noise_ahead(
        self, rows: slice | np.ndarray, count: int, behind: np.ndarray | int = 0
    ) -> Tensor:
        """Noise (random numbers) for the next `count` tokens of these rows, float64 [rows, count,
        `noise_size`] on the device. `behind`: number of tokens of each row, or of all, between the
        row's newest token and these."""
        place = "position" if self._noise_of_vllm else "count"
        keys, places = (
            torch.from_numpy(column).to(self.device)
            for column in (
                self._columns["key"].view(np.int64)[rows],
                self._columns[place][rows] + behind,
            )
        )
        make = vllm_noise.exponentials if self._noise_of_vllm else exponentials
        return make(keys, places, count, self._noise_size)

    def _fill_noise(self, rows: slice | np.ndarray) -> None:
        """Make the noise (random numbers) of these rows for the remaining steps of the block. The
        first is for each row's next token."""
        left = self._noise.shape[1] - self._noise_column
        if left > 0:
            where = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.device)
            self._noise[where, self._noise_column :] = self.noise_ahead(rows, left)

    # -- rows come, advance, go --------------------------------------------------------------------

    def add(self, new: list[Pending]) -> Tensor:
        """Append rows without tokens. Returns the random numbers for each row's first token,
        float64 [new rows, random numbers that one draw takes]."""
        first, self.num_rows = self.num_rows, self.num_rows + len(new)
        rows = slice(first, self.num_rows)
        self.pending.extend(new)
        requests = [entry.request for entry in new]
        sampling = [request.sampling for request in requests]
        columns = self._columns
        columns["position"][rows] = [len(request.prompt_tokens) - 1 for request in requests]
        columns["temperature"][rows] = [params.temperature for params in sampling]
        truncations = [params.truncation(self.vocabulary_size) for params in sampling]
        columns["top_k"][rows] = [top_k for top_k, _ in truncations]
        columns["top_p"][rows] = [top_p for _, top_p in truncations]
        columns["sequence"][rows] = [entry.sequence for entry in new]
        columns["count"][rows] = 0
        columns["limit"][rows] = [entry.limit for entry in new]
        columns["may_stop"][rows] = [request.forced_length is None for request in requests]
        columns["has_stop_strings"][rows] = [
            bool(request.sampling.stop) and request.forced_length is None for request in requests
        ]
        columns["redraw"][rows] = 0
        columns["ceiling"][rows] = ANY_LENGTH
        for row, entry in enumerate(new, first):
            self.draw_with(row, 0, entry.carried_redraw(0)[0])
        columns["floor"][rows] = [
            request.carried.floor if request.carried and request.carried.verify else 0
            for request in requests
        ]
        columns["num_kept"][rows] = -1
        columns["num_reused"][rows] = 0
        columns["store"][rows] = [self._free_stores.pop() for _ in new]
        self._set_mode()
        return self.noise_ahead(rows, 1)[:, 0]

    def record(self, tokens: np.ndarray, log_probs: np.ndarray, first: int = 0) -> None:
        """Append one token to each row from index `first` on: `tokens`, `log_probs` are [rows]."""
        rows = slice(first, self.num_rows)
        store, count = self._columns["store"][rows], self._columns["count"][rows]
        while len(count) and count.max() >= self._tokens.shape[1]:
            self._widen_outputs()
        self._tokens[store, count] = tokens
        self._log_probs[store, count] = log_probs
        count += 1
        self._columns["token"][rows] = tokens
        self._columns["log_prob"][rows] = log_probs
        self._columns["position"][rows] += 1

    def begin(self, first: int, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Give the rows from `first` on their first tokens, and random numbers for the next."""
        self.record(tokens, log_probs, first)
        self._fill_noise(slice(first, self.num_rows))

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, num_new: np.ndarray
    ) -> None:
        """Append tokens to rows: row rows[i] gets the first num_new[i] >= 1 of tokens[i]. `tokens`
        and `log_probs` are [rows, tokens]."""
        columns = self._columns
        store, count = columns["store"][rows], columns["count"][rows]
        while count.max() + tokens.shape[1] > self._tokens.shape[1]:
            self._widen_outputs()
        places = count[:, None] + np.arange(tokens.shape[1])
        self._tokens[store[:, None], places] = tokens
        self._log_probs[store[:, None], places] = log_probs
        each, last = np.arange(len(rows)), num_new - 1
        columns["count"][rows] += num_new
        columns["position"][rows] += num_new
        columns["token"][rows] = tokens[each, last]
        columns["log_prob"][rows] = log_probs[each, last]
        self._noise_column = self._noise.shape[1]
        self._is_uneven = True

    def cut(self, rows: np.ndarray, counts: Sequence[int]) -> None:
        """Shorten row rows[i] to its first counts[i] tokens, and make the random numbers of the
        next ones. Keys and values of removed tokens stay in the cache as garbage. A row left
        without tokens feeds its prompt's last token again."""
        for row, count in zip(rows.tolist(), counts, strict=True):
            store, prompt = self._columns["store"][row], self.pending[row].request.prompt_tokens
            assert count <= self._columns["count"][row]
            token = self._tokens[store, count - 1] if count else prompt[-1]
            log_prob = self._log_probs[store, count - 1] if count else 0.0
            self._columns["count"][row] = count
            self._columns["token"][row] = token
            self._columns["log_prob"][row] = log_prob
            self._columns["position"][row] = len(prompt) + count - 1
        self._fill_noise(rows)

    def redraw_from(self, row: int, start: int) -> None:
        """Let the row's tokens from index `start` on be drawn with a set of random numbers that was
        not used yet. Only takes effect with the next `cut`, which makes the random numbers."""
        self._columns["redraw"][row] += 1
        self._columns["key"][row] = self.pending[row].redraw_from(start)

    def draw_with(self, row: int, start: int, redraw: int) -> None:
        """Draw the row's tokens from index `start` on with random numbers of set `redraw`."""
        self._columns["key"][row] = self.pending[row].draw_with(start, redraw)

    def _widen_outputs(self) -> None:
        added = max(64, self._tokens.shape[1])
        self._tokens = np.pad(self._tokens, ((0, 0), (0, added)))
        self._log_probs = np.pad(self._log_probs, ((0, 0), (0, added)))

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Tokens that a row has generated, from number `start` to before `stop` (None: all)."""
        count = int(self._columns["count"][row])
        store = self._columns["store"][row]
        found: list[int] = self._tokens[store, start : count if stop is None else stop].tolist()
        return found

    def token_array(self, row: int) -> np.ndarray:
        """A copy of all tokens that a row generated."""
        count, store = self._columns["count"][row], self._columns["store"][row]
        tokens: np.ndarray = self._tokens[store, :count].copy()
        return tokens

    def first_broken(self, row: int, start: int) -> int | None:
        """Index of the row's first token from `start` on with a NaN log-probability, or None."""
        count, store = int(self._columns["count"][row]), self._columns["store"][row]
        broken = np.flatnonzero(np.isnan(self._log_probs[store, start:count]))
        return start + int(broken[0]) if len(broken) else None

    def response(
        self, row: int, reason: Literal["stop", "length", "aborted"], version: int
    ) -> Response:
        request = self.pending[row].request
        store, count = self._columns["store"][row], self._columns["count"][row]
        return Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(self._tokens[store, :count].tolist()),
            log_probs=tuple(self._log_probs[store, :count].tolist()),
            finish_reason=reason,
            version=version,
            redraws=tuple(self.pending[row].redraws),
        )

    def remove(self, gone: np.ndarray) -> tuple[list[int], list[int]]:
        """Remove the rows whose indices are in `gone`. The last rows fill their places: row i of
        the first list returned has moved to row i of the second."""
        remaining = self.num_rows - len(gone)
        self._free_stores.extend(self._columns["store"][gone].tolist())
        dead = np.zeros(self.num_rows, np.bool_)
        dead[gone] = True
        holes = np.flatnonzero(dead[:remaining])
        movers = remaining + np.flatnonzero(~dead[remaining:])
        self.rearrange(movers, holes)
        self.num_rows = remaining
        del self.pending[remaining:]
        self._set_mode()
        return movers.tolist(), holes.tolist()

    def rearrange(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move rows: row source[i] takes the place of row target[i]."""
        if not len(source):
            return
        for column in self._columns.values():
            column[target] = column[source]
        to, taken = (torch.from_numpy(part).to(self.device) for part in (target, source))
        self._noise[to] = self._noise[taken]
        moved = [self.pending[row] for row in source]
        for row, entry in zip(target, moved, strict=True):
            self.pending[row] = entry
