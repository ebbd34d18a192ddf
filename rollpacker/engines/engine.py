"""The engine protocol and the records that cross it. Light: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollpacker.core.commands import LIMITS
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.table import (
    ENGINES,
    TAKE_UP_CARRIED,
    TENSOR_PARALLEL,
    WITHOUT_QUANTIZATION,
)
from rollpacker.spans import Rewritten, Spans, num_in_rows, num_outside

if TYPE_CHECKING:
    from torch import Tensor

    from rollpacker.weights.buffer import WeightSource

Redraws = tuple[tuple[int, int], ...]
"""Pairs (first token, redraw): from that token on the noise is of that redraw. Before the first
pair it is of redraw 0."""

NOT_NUMBERS = "the model's logits are not numbers"
"""Beginning of the reason of a `SampleFailed` whose logits held a NaN."""


class EngineError(RuntimeError):
    """The engine as a whole cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of the draw of one response."""

    max_response_tokens: int
    temperature: float = 1.0
    """Sampling temperature. 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that are drawn from. 0: all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the response keeps the tokens up to and with the stop string."""
    seed: int = 0
    """Seed of the noise. The noise depends on the seed, the request's `noise`, the turn and the
    position, and on nothing else."""

    def truncation(self, vocabulary_size: int) -> tuple[int, float]:
        """The top_k and the top_p of a draw; the vocabulary's size and 1 where they change nothing,
        as in a greedy draw."""
        if self.temperature == 0:
            return vocabulary_size, 1.0
        return self.top_k or vocabulary_size, self.top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Tokens of a response that an earlier launch generated, for the engine to go on from."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probability of each token under the weights that it was drawn from."""
    verify: bool = True
    """Draw every token anew with its own noise, all in one pass, and keep those before the first
    that comes out differently: the response is then the one that generation from scratch gives.
    False: all stay, with the log-probabilities that they have."""
    floor: int = 0
    """A response that ends with at most so many tokens is not taken: its tokens after the first
    that came out differently are drawn once more, with noise of another redraw, sixteen times at
    most. With `verify` only."""
    ceiling: int | None = None
    """Most tokens of a response in which a token came out differently; a longer one is drawn once
    more, too. None: any length is accepted."""
    redraws: Redraws = ()
    """`Response.redraws` of the launch that left these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    sample: SampleId
    prompt_tokens: tuple[int, ...]
    """The samples of one prompt carry the same tuple; adjacent ones are prefilled once."""
    sampling: SamplingParams
    forced_length: int | None = None
    """For benchmarks: the response ends with "stop" exactly after this many tokens, whatever is
    drawn. None: it ends by itself."""
    noise: SampleId | None = None
    """The sample whose noise the response is drawn with. None: the request's own."""
    turn: int = 1
    """Number of the turn in its trajectory, from 1. The prompt of a later turn is all that came
    before it."""
    keep: bool = False
    """Whether to keep, if there is room, what was computed of a response that ends with "stop": a
    later request of the sample will begin with the same tokens."""
    carried: Carried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The response that an engine made of a request. It goes from the engine to the trainer and
    never passes through the core."""

    sample: SampleId
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """Response tokens as drawn, the end token included. They are never tokenized again."""
    log_probs: tuple[float, ...]
    """Log-probability of each drawn token (natural logarithm) under the distribution that it was
    drawn from, that is after temperature, top-k and top-p. Greedy: under the plain softmax."""
    finish_reason: str
    """"stop", "length", or "aborted": it was stopped before its end. A trajectory has the reason of
    its `Conclude`."""
    version: int
    redraws: Redraws = ()
    """The redraws whose noise parts of the response were drawn with, where earlier ends of it were
    refused."""
    given: Spans = ()
    """Ranges of tokens that the model was given between its turns and did not draw. Empty for a
    response as an engine returns it, which is one turn."""
    rewritten: Rewritten = ()
    """Where in the tokens a turn was drawn behind another prompt than all that came before it. Only
    of trajectories whose chat template rewrites earlier turns."""

    @property
    def num_drawn(self) -> int:
        return num_outside(len(self.tokens), self.given)

    @property
    def num_in_rows(self) -> int:
        """Tokens that training on it puts through a model."""
        return num_in_rows(self.prompt_tokens, len(self.tokens), self.given, self.rewritten)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens that were drawn last, without given tokens or another prompt in between."""
        given = self.given[-1][1] if self.given else 0
        anew = self.rewritten[-1][0] if self.rewritten else 0
        return self.tokens[max(given, anew) :]

    @property
    def is_cut_off(self) -> bool:
        """A limit ended it."""
        return self.finish_reason in LIMITS


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """An event that an engine reports, with its response. `time_s` of the event is 0: the driver
    stamps it."""

    event: SampleGenerated | SampleAborted | SampleFailed
    response: Response | None = None
    """The response of a `SampleGenerated`, and of a `SampleAborted` whose sample had tokens. None
    otherwise."""


Listener = Callable[[Sequence[EngineOutput]], None]
"""Called by the engine, from any thread, with what one decode step brought, in launch order. The
embedded engine calls it between two decode steps and goes on when it returns: an abort given inside
the call takes effect at that very step, in every run alike. An engine in a process goes on
meanwhile: it may bring several steps at once, and an abort takes effect at the step after it
arrives."""


class Engine(Protocol):
    """An engine: commands go in, outputs come out. `submit` and `abort` are thread-safe and return
    at once."""

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """Begin to work. `on_error` is called once, from any thread, if the engine as a whole
        dies."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take on requests, first come, first served. Each gets exactly one output, sooner or
        later.

        A request that can never run (prompt and response do not fit) gets `SampleFailed`.
        """
        ...

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop these, running or waiting; each that was still going gets `SampleAborted`. Unknown
        or finished ids are ignored."""
        ...

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Allow the engine to drop what it keeps of these samples (`GenerationRequest.keep`).
        Thread-safe; returns at once. The engine drops it by itself when weights change, when it is
        offloaded, and when rows need the room."""
        ...

    async def update_weights(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | None = None
    ) -> None:
        """Sample from `version` from now on: from these weights, or if there are none, from the
        engine's tensors as they are. An engine in a process takes them from a source only.

        Raises `EngineError` while anything runs; if the weights are another model's; and if the
        source has another version, or is written to. After an error, nothing may be submitted
        until an update succeeds: the weights may be half of each.
        """
        ...

    async def offload(self) -> None:
        """Free the device's memory: its content waits in host memory, or is made anew. Until
        `reload` the engine can only be closed. On a CPU, nothing happens.

        Raises `EngineError` while anything runs.
        """
        ...

    async def reload(self) -> None:
        """Take the memory back, with the weights that it had. Raises `EngineError`."""
        ...

    def weight_probe(self) -> str:
        """The hash of a fixed sample of the weights (`rollpacker.weights.probe`). Not while
        anything runs."""
        ...

    def status(self) -> EngineStatus:
        """Counts of the engine's samples, tokens and steps. Raises `EngineError` if it is closed or
        dead."""
        ...

    async def close(self) -> None:
        """End its thread or process; later calls of anything raise `EngineError`. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    num_running: int
    num_waiting: int
    version: int
    generated_tokens: int
    """Number of tokens that were generated since the engine was made."""
    decode_steps: int
    drafted_tokens: int = 0
    """Tokens that decode steps tried ahead of their turn (`rollout.engine.draft_tokens`)."""
    accepted_tokens: int = 0
    """Tokens that came out of these steps beyond one a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine (`rollout.engine.*`)."""

    name: str = "torch"
    """The engine's name: torch is the embedded engine, over transformers' own modules; vllm is vLLM
    (docs: vLLM), which heeds max_slots and kv_cache_gib of the keys below."""
    max_slots: int | None = None
    """Samples decoded at the same time; the rest waits. None: as many as the memory budget allows,
    up to 1024; with vllm, as many as vLLM decides."""
    kv_cache_gib: float | None = None
    """Memory for keys and values. None: 1 GiB on a CPU; on a GPU 60 % of what is free after the
    model, or with vllm what vLLM takes."""
    width_buckets: bool = True
    """Let rows of different age attend over different cache widths in one step. CPU only: ignored
    elsewhere."""
    plain_forward: bool = True
    """Run Llama, Mistral, Qwen2 and Qwen3 as plain tensor calls on the model's weights: up to three
    times faster where the model is small and rows are few. False: always through the model's
    own modules."""

    draft_tokens: int = 15
    """With few samples left, try up to so many tokens a sample ahead of their turn in one decode
    step: copies of what followed the same words before, in the sample itself, its prompt or its
    siblings. What comes out is the same, token for token; only which sample ends first may change.
    0: never. CPU only: ignored elsewhere."""

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ValueError(f"name must be one of {', '.join(ENGINES)}, not {self.name}")
        if self.max_slots is not None and self.max_slots < 1:
            raise ValueError("max_slots must be at least 1")
        if self.kv_cache_gib is not None and not self.kv_cache_gib > 0:
            raise ValueError("kv_cache_gib must be more than 0")
        if self.draft_tokens < 0:
            raise ValueError("draft_tokens must be at least 0")

    @property
    def takes_up_carried(self) -> bool:
        """Whether the engine goes on from tokens that an earlier launch left, and draws them anew
        on demand."""
        return self.name in TAKE_UP_CARRIED

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether several devices can share the engine."""
        return self.name in TENSOR_PARALLEL

    @property
    def takes_quantized(self) -> bool:
        """Whether the engine generates with a base of 4 bits below the adapter."""
        return self.name not in WITHOUT_QUANTIZATION
