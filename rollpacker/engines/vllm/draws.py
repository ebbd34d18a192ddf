"""How vLLM draws the tokens of each request, by the noise (random numbers) of the engine.

With vLLM's noise its own sampler draws: a request's seed is the key of its sample, and the noise
depends on seed, position and token (`parameters`). vLLM says the log-probabilities.

With RollPacker's own noise a logits processor draws every row's token from its logits with the
noise of its sample and position (`engines/embedded/sampling.py`), as the embedded engine does, and
leaves vLLM's greedy sampler nothing but that token. The log-probability noted here is that of the
distribution drawn from; vLLM's own `processed_logprobs` would not be, where the sampler is handed
a chosen token.

In both, a token does not depend on the other samples of its batch, and a preempted request goes on
with the tokens that it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollpacker.engines.embedded.sampling import DrawMode, draw, exponentials, noise_size
from rollpacker.engines.engine import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import LogitsProcessor

NUMBER, DRAW = "rollpacker", "rollpacker_draw"
"""Names of the extra arguments that a vLLM request carries: its number in the engine, and its
`Draw`, of which a worker in a process of its own keeps a copy."""
SEEDLESS = -1
"""The seed that vLLM takes for none."""


class Anew:
    """Carried response tokens (generated before an abort) at the end of a request's prompt, which
    are to be drawn again while vLLM reads the prompt (engines/vllm/verify.py)."""

    __slots__ = ("keys", "log_probs", "tokens")

    def __init__(self, keys: Sequence[int]) -> None:
        """`keys`: 64-bit key of the noise (random numbers) of each token that is drawn again."""
        self.keys = [_signed(key) for key in keys]
        self.tokens: list[int] = []
        """The tokens drawn so far in place of those generated before the abort."""
        self.log_probs: list[float] = []


class Draw:
    """How one request's tokens are drawn (parameters, random numbers), and those drawn so far."""

    __slots__ = ("anew", "key", "log_probs", "offset", "sampling", "tokens")

    def __init__(
        self, sampling: SamplingParams, key: int, *, offset: int = 0, anew: Anew | None = None
    ) -> None:
        """`offset`: number of response tokens at the end of the request's prompt. `anew`: describes
        these tokens if they are to be drawn again, else None."""
        assert anew is None or len(anew.keys) == offset
        self.sampling = sampling
        self.key = _signed(key)
        self.offset = offset
        self.anew = anew
        self.tokens: Sequence[int] = ()
        """vLLM's own list of the tokens that it generated for the request, which grows."""
        self.log_probs: list[float] = []
        """Log-probabilities of `tokens`, and maybe of one drawn in a prompt not read to its end."""

    def note(self, log_probs: Sequence[Mapping[int, Any]] | None) -> None:
        """Note the log-probabilities of all drawn tokens as vLLM itself says them. None: it does
        not."""
        if log_probs is not None:
            self.log_probs = [said.logprob for one in log_probs for said in one.values()]


def written(draw: Draw) -> list[Any]:
    """Return what `read` makes an equal `Draw` of, for a process that unpickles nothing. No token
    must have been drawn yet."""
    one, keys = draw.sampling, None if draw.anew is None else draw.anew.keys
    return [one.temperature, one.top_p, one.top_k, draw.key, draw.offset, keys]


def read(given: Sequence[Any]) -> Draw:
    """Return the `Draw` that was `written`."""
    temperature, top_p, top_k, key, offset, keys = given
    sampling = SamplingParams(
        max_response_tokens=0, temperature=temperature, top_p=top_p, top_k=top_k
    )
    return Draw(sampling, key, offset=offset, anew=None if keys is None else Anew(keys))


class Draws:
    """The `Draw` of each request that one vLLM engine has, by the request's number."""

    def __init__(self) -> None:
        self.noise = "rollpacker"
        """Which noise (random numbers) tokens are drawn with, as `EngineConfig.noise`."""
        self.by_number: dict[int | str, Draw] = {}
        self.broken: list[int | str] = []
        """Numbers of the requests whose logits held a NaN, since the list was last emptied."""
        self.ends: set[int] = set()
        """Tokens that end a response, as vLLM knows them."""


def parameters(number: int, draw: Draw, noise: str) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` with which the tokens of the request of this number are
    drawn with this noise (`EngineConfig.noise`)."""
    ours = {NUMBER: number, DRAW: draw}
    if noise == "rollpacker":
        return {"temperature": 0.0, "extra_args": ours}
    return {
        "temperature": draw.sampling.temperature,
        "top_k": draw.sampling.top_k,
        "top_p": draw.sampling.top_p,
        "seed": draw.key if draw.key != SEEDLESS else SEEDLESS - 1,
        "logprobs": 0,
        "extra_args": ours if draw.anew is not None else None,
    }


def drawing_with(draws: Draws) -> type[LogitsProcessor]:
    """The class of a logits processor that draws tokens as the `Draw` of each request says, which
    is its extra argument, or `written` there, and leaves requests without one to vLLM. Give
    it to vLLM as `EngineArgs.logits_processors`."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class DrawTokens(LogitsProcessor):  # type: ignore[misc]  # not seen beside vLLM
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._device = device
            self._rows: dict[int, tuple[int | str, Draw]] = {}
            self._batch: _Batch | None = None

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            if process_dict_updates(self._rows, batch_update, _of_request):
                self._batch = None

        def apply(self, logits: Tensor) -> Tensor:
            if not self._rows:  # a trial run of vLLM's own
                return logits
            if self._batch is None:
                ordered = [self._rows[row] for row in sorted(self._rows)]
                self._batch = _Batch(ordered, logits.shape[1], self._device)
            if len(self._rows) == len(logits):
                tokens = self._batch.draw(logits, draws.broken)
                return logits.fill_(-math.inf).scatter_(1, tokens[:, None], 0.0)
            ours = torch.tensor(sorted(self._rows), device=self._device)
            tokens = self._batch.draw(logits[ours], draws.broken)
            logits[ours] = -math.inf
            logits[ours, tokens] = 0.0
            return logits

    def _of_request(params: Any, prompt: Any, tokens: list[int]) -> tuple[int | str, Draw] | None:
        given = params.extra_args or {}
        if NUMBER not in given:
            return None
        number, said = given[NUMBER], given[DRAW]
        found = draws.by_number.get(number)
        if found is None:
            found = said if isinstance(said, Draw) else read(said)
            if found is said or found.anew is not None:  # of others nobody asks here
                draws.by_number[number] = found
        found.tokens, draws.ends = tokens, params.all_stop_token_ids
        return number, found

    return DrawTokens


def _signed(key: int) -> int:
    return key if key < 1 << 63 else key - (1 << 64)


class Settings:
    """Sampling parameters of several requests, as tensors with one entry for each request."""

    def __init__(
        self, sampling: Sequence[SamplingParams], vocabulary_size: int, device: torch.device
    ) -> None:
        self._noise_size = noise_size(vocabulary_size)
        truncations = [one.truncation(vocabulary_size) for one in sampling]
        top_k, top_p = [k for k, _ in truncations], [p for _, p in truncations]
        self._mode = DrawMode(
            greedy=any(one.temperature == 0 for one in sampling),
            tempered=any(one.temperature != 1 for one in sampling),
            truncated=any(k < vocabulary_size for k in top_k) or any(p < 1 for p in top_p),
        )
        self._columns = [
            torch.tensor([one.temperature for one in sampling], dtype=torch.float64, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
        ]

    def draw(
        self, logits: Tensor, keys: Tensor, places: Tensor, requests: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row of logits [rows, vocabulary], with the random numbers of key
        keys[row] for the response token of index places[row] (both int64 [rows]). Returns tokens
        and log-probabilities [rows]. `requests` int64 [rows]: index of each row's request; None:
        row i is of request i."""
        noise = exponentials(keys, places, 1, self._noise_size)[:, 0]
        temperature, top_k, top_p = (
            column if requests is None else column[requests] for column in self._columns
        )
        return draw(logits, noise, temperature, top_k, top_p, self._mode)


class _Batch:
    """The requests of one decode step of vLLM, with their parameters as tensors. A new batch is
    made when requests come or go."""

    def __init__(
        self, rows: Sequence[tuple[int | str, Draw]], vocabulary_size: int, device: torch.device
    ) -> None:
        self._rows = rows
        self._device = device
        self._settings = Settings([one.sampling for _, one in rows], vocabulary_size, device)
        self._keys = torch.tensor([one.key for _, one in rows], device=device)

    def draw(self, logits: Tensor, broken: list[int | str]) -> Tensor:
        """Draw a token per row, int64 [rows], and note its log-probability. The numbers of requests
        whose logits hold a NaN are appended to `broken`."""
        counts = [len(one.tokens) for _, one in self._rows]
        places = [n + one.offset for n, (_, one) in zip(counts, self._rows, strict=True)]
        tokens, log_probs = self._settings.draw(
            logits, self._keys, torch.tensor(places, device=self._device)
        )
        for (number, one), count, log_prob in zip(
            self._rows, counts, log_probs.tolist(), strict=True
        ):
            # A prompt that comes in parts, or again after a preemption, is drawn for and thrown
            # away: the next one overwrites it.
            del one.log_probs[count:]
            one.log_probs.append(log_prob)
            if math.isnan(log_prob):
                broken.append(number)
        return tokens
