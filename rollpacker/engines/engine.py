"""The engine protocol and the records that go in and out of an engine. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rollpacker.bounds import check_at_least, check_positive
from rollpacker.core.commands import LIMITS
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.table import (
    ENGINES,
    TAKE_UP_CARRIED,
    TENSOR_PARALLEL,
    VLLM_DECIDED,
    WITHOUT_QUANTIZATION,
)
from rollpacker.spans import Rewritten, Spans, num_in_rows, num_outside

if TYPE_CHECKING:
    from torch import Tensor

    from rollpacker.weights.buffer import WeightSource
    from rollpacker.weights.delivery import Delivery

Redraws = tuple[tuple[int, int], ...]
"""Pairs (number of a token, redraw): from that token on, tokens were drawn with the set of noise
(random numbers) number `redraw`. A further set is used when a response must not end where it did
(`Carried.floor`) and tokens are drawn again. Tokens before the first pair have set 0."""

NOT_NUMBERS = "the model's logits are not numbers"
"""Beginning of the `reason` of a `SampleFailed` event if the sample's logits held a NaN."""


def sample_key(seed: int, sample: SampleId, redraw: int = 0, turn: int = 1) -> int:
    """64-bit key of a sample's noise (random numbers). Each redraw (further set for the same
    tokens) and each turn of the model in a dialogue has another key."""
    text = f"{seed}|{sample}" if redraw == 0 else f"{seed}|{sample}|{redraw}"
    text = text if turn == 1 else f"{text}|turn {turn}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class EngineError(RuntimeError):
    """The engine as a whole has failed, or its state does not allow the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one response are drawn: limit, temperature, truncation, stops and seed."""

    max_response_tokens: int
    temperature: float = 1.0
    """Sampling temperature. 0: the likeliest token is always taken."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that are drawn from. 0: all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the response keeps the tokens up to and with the stop string."""
    seed: int = 0
    """Seed of the noise (random numbers). Noise depends only on the seed, the sample (or that in
    `GenerationRequest.noise`), the number of the dialogue's turn, and the token's position."""

    def truncation(self, vocabulary_size: int) -> tuple[int, float]:
        """The top_k and top_p to draw with. Where one truncates nothing (as both at temperature 0)
        it is `vocabulary_size` or 1."""
        if self.temperature == 0:
            return vocabulary_size, 1.0
        return self.top_k or vocabulary_size, self.top_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Tokens that a sample had generated when it was aborted. The sample's next request hands them
    to the engine, which keeps them (all, or as `verify` says) and generates the rest."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probability of each token under the weights that it was drawn from."""
    verify: bool = True
    """Whether to draw all tokens again with their own random numbers, in one pass, and keep those
    before the first that comes out differently: the response is then the one that generation from
    scratch gives. False: all tokens stay, with the log-probabilities that they have."""
    floor: int = 0
    """The response may not end with this many tokens or fewer: if it does, its tokens after the
    first that `verify` drew differently are drawn again, with new random numbers, up to 16 times.
    0, or without `verify`: it may end anywhere."""
    ceiling: int | None = None
    """Most tokens that the response may have if `verify` drew one of the carried tokens
    differently. If it gets longer, tokens after that one are drawn again, as with `floor`. None: no
    bound."""
    redraws: Redraws = ()
    """The sets of random numbers that these tokens were drawn with, as in `Response.redraws`."""
    most_verified: int | None = None
    """Most tokens, at least 1, that `verify` draws again in passes. Those behind are generated one
    by one, with the random numbers that they had, and compared when the response has ended: the
    response is the same, however many there are. None: all are drawn again in passes."""

    @property
    def num_verified(self) -> int:
        """Number of tokens that are drawn again in passes: at most `most_verified`, and with
        `redraws` at least up to the last token with which another set of random numbers begins."""
        last = max([start + 1 for start, _ in self.redraws], default=0)
        most = len(self.tokens) if self.most_verified is None else self.most_verified
        return min(len(self.tokens), max(most, last))

    def num_same(self, tokens: Sequence[int]) -> int:
        """Number of `tokens`, from the first on, that are the same as the carried tokens."""
        pairs = zip(tokens, self.tokens, strict=False)
        differs = (place for place, (one, other) in enumerate(pairs) if one != other)
        return next(differs, min(len(tokens), len(self.tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    sample: SampleId
    prompt_tokens: tuple[int, ...]
    """The prompt's tokens. Samples of one prompt share the tuple and, if adjacent, a prefill."""
    sampling: SamplingParams
    forced_length: int | None = None
    """Exact number of response tokens, for benchmarks: the response ends with "stop" after that
    many, whatever is drawn. None: the response ends by itself."""
    noise: SampleId | None = None
    """The sample whose noise (random numbers) the response is drawn with. None: its own."""
    turn: int = 1
    """Number of the model's turn in the sample's dialogue, from 1. The prompt of a later turn is
    everything that came before it."""
    keep: bool = False
    """Whether the engine is to keep the response's keys and values, if it ends with "stop" and
    there is room. Set for turns of a dialogue, whose next request begins with the same tokens."""
    carried: Carried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What an engine generated for one request: the tokens, their log-probabilities, and how the
    response ended. It goes from the engine to the trainer; the code that schedules samples
    (`rollpacker.core`) never sees it."""

    sample: SampleId
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """Response tokens as drawn, the end token included. They are never tokenized again."""
    log_probs: tuple[float, ...]
    """Log-probability (natural logarithm) of each token under the distribution that it was drawn
    from, that is after temperature, top-k and top-p. At temperature 0: under the plain softmax."""
    finish_reason: str
    """How the response ended: "stop", "length" (a limit), or "aborted" (before its end). For a
    trajectory of several turns: the reason that the scheduler's command `Conclude` gives."""
    version: int
    redraws: Redraws = ()
    """Pairs (token's index, set of random numbers that it and later tokens were drawn with). Made
    when tokens were drawn again because the response was too short or too long (`Carried.floor`,
    `Carried.ceiling`). Empty: all were drawn with set 0."""
    given: Spans = ()
    """Ranges of tokens that the model was given between its turns and did not draw. Empty for a
    response that comes from an engine, which is a single turn."""
    rewritten: Rewritten = ()
    """Places in the tokens from which on the model saw another context than all tokens before,
    because the chat template rewrites earlier turns. Empty for other templates and in an engine's
    response."""

    @property
    def num_drawn(self) -> int:
        return num_outside(len(self.tokens), self.given)

    @property
    def num_in_rows(self) -> int:
        """Number of tokens that training on this response puts through the model, prompts included.
        A response is trained as several sequences if a chat template rewrote earlier turns."""
        return num_in_rows(self.prompt_tokens, len(self.tokens), self.given, self.rewritten)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens drawn since the model was last given tokens or a rewritten prompt."""
        given = self.given[-1][1] if self.given else 0
        anew = self.rewritten[-1][0] if self.rewritten else 0
        return self.tokens[max(given, anew) :]

    @property
    def is_cut_off(self) -> bool:
        """Whether a limit ended the response."""
        return self.finish_reason in LIMITS


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """An event of one sample that an engine reports, with the sample's response. The event's
    `time_s` is 0 until the run's main loop, which receives the event, sets it."""

    event: SampleGenerated | SampleAborted | SampleFailed
    response: Response | None = None
    """Response of `SampleGenerated`, and of `SampleAborted` if the sample had tokens; else None."""


Listener = Callable[[Sequence[EngineOutput]], None]
"""Function that an engine calls, from any thread, with the outputs of one decode step, in the order
of submission. The embedded engine calls it between two decode steps and waits for its return: an
abort given inside the call takes effect at that very step, in every run alike. An engine in a
process of its own does not wait: it may report several steps at once, and an abort takes effect at
the first step after it arrives."""


class Engine(Protocol):
    """The protocol of an engine, which generates responses to requests. `submit` and `abort` are
    thread-safe and return at once."""

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """Begin to work, and call `listener` with all outputs. `on_error` is called once, from any
        thread, if the engine as a whole dies."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, first come, first served. Every request gets exactly one output. A
        request that can never run (prompt and response do not fit) gets `SampleFailed`."""
        ...

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop these samples, running or waiting. Each sample that had not ended gets
        `SampleAborted`. Ids of ended or unknown samples are ignored."""
        ...

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Allow the engine to drop the keys and values that it keeps of these samples
        (`GenerationRequest.keep`). Thread-safe; returns at once. The engine also drops them by
        itself when weights change, when it is offloaded, and when running samples need the room."""
        ...

    async def update_weights(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | Delivery | None = None
    ) -> None:
        """Generate with `version` of the weights from now on. `weights` None: the engine's tensors
        have been changed in place. An engine in a process of its own accepts no tensors, but a
        `WeightSource` to read or a `Delivery`, in which the trainer sends at the same time.

        Raises `EngineError` while samples run, if the weights are another model's, and if the
        source has another version or is being written to. After an error nothing may be submitted
        until an update succeeds: the engine may have parts of both versions.
        """
        ...

    async def offload(self) -> None:
        """Free the device's memory: weights wait in host memory, keys and values are dropped. Until
        `reload` the engine can only be closed. On a CPU nothing happens. Raises `EngineError` while
        samples run."""
        ...

    async def reload(self) -> None:
        """Take the device's memory again, with the same weights as before `offload`. Raises
        `EngineError` if that fails."""
        ...

    def weight_probe(self) -> str:
        """Return a hash of a fixed sample of the weights (`rollpacker.weights.probe`). May not be
        called while samples run."""
        ...

    def compare(self, text: Sequence[int], log_probs: Sequence[float]) -> None:
        """Compare the engine's log-probs of the tokens of `text` from the second one on with
        `log_probs`, the trainer's. Called after an update, while no samples run. Raises
        `EngineError` if the engine computes with other weights than the update brought. Engines
        that decode with the very module that `weight_probe` hashes have nothing to compare."""
        ...

    def status(self) -> EngineStatus:
        """Return counts of the engine's samples, tokens and steps. Raises `EngineError` if the
        engine is closed or dead."""
        ...

    async def close(self) -> None:
        """End the engine's thread or process; later calls raise `EngineError`. Idempotent."""
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
    """Number of tokens that were guessed and tried in decode steps
    (`rollout.engine.draft_tokens`)."""
    accepted_tokens: int = 0
    """Tokens gained by guessing: those of steps with guesses, less one per sample and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine that generates responses (`rollout.engine.*`)."""

    name: str = "torch"
    """The engine's name. torch: the embedded engine, over transformers' own modules. vllm: vLLM
    (docs: vLLM), which heeds only max_slots and kv_cache_gib of the keys below."""
    max_slots: int | None = None
    """Most samples decoded at the same time; the rest waits. None: as many as the memory budget
    allows, up to 1024; with vllm, as many as vLLM decides."""
    kv_cache_gib: float | None = None
    """Memory for keys and values, in GiB. None: 1 GiB on a CPU; on a GPU 60 % of what is free after
    the model, or with vllm what vLLM takes."""
    width_buckets: bool = True
    """Whether rows (samples being decoded) of different length attend over different widths of the
    cache in one step. Has an effect on a CPU only."""
    plain_forward: bool = True
    """Whether to run Llama, Mistral, Qwen2 and Qwen3 as plain tensor calls on the model's weights:
    up to three times faster where the model is small and few samples run. False: always through the
    model's own modules."""

    draft_tokens: int = 15
    """Most tokens of a sample that one decode step may guess ahead when few samples are left.
    Guesses are copies of what followed the same words before, in the sample itself, its prompt or
    other samples of that prompt. The tokens that come out are the same; only which sample ends
    first may change. 0: no guesses. Has an effect on a CPU only."""
    batch_invariant: bool | Literal["auto"] = "auto"
    """Whether vLLM computes with kernels that give a sequence the same results in every batch. They
    cost speed, and vLLM calls them beta. Without them carried tokens come out differently, the more
    often the longer they are. They need a GPU, from NVIDIA one of compute capability 8.0 or above.
    auto: if such a GPU runs the model and the run carries tokens exactly."""
    noise: Literal["auto", "rollpacker", "vllm"] = "auto"
    """Which noise (random numbers) tokens are drawn with. rollpacker: the embedded engine's, which
    vLLM's first model runner can be given. vllm: that of the sampler in vLLM's second model runner,
    which draws without waiting for Python; it needs a GPU, but with the embedded engine. Engines
    with the same noise say the same. auto: vllm where vLLM runs on a GPU, else rollpacker. A run
    keeps what it began with."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine by their names in vLLM (`EngineArgs`), such as
    `quantization: fp8`. Those that follow from other settings are refused. Empty for the embedded
    engine."""

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ValueError(f"name must be one of {', '.join(ENGINES)}, not {self.name}")
        check_at_least(self, 1, "max_slots")
        check_positive(self, "kv_cache_gib")
        check_at_least(self, 0, "draft_tokens")
        if self.batch_invariant is True and self.name != "vllm":
            raise ValueError(
                f"batch_invariant=true asks for kernels of vLLM, and name is {self.name}: set "
                "name=vllm, or leave batch_invariant out"
            )
        if self.vllm and self.name != "vllm":
            raise ValueError(f"vllm has arguments for vLLM, and name is {self.name}: set name=vllm")
        for argument in self.vllm:
            if (instead := VLLM_DECIDED.get(argument)) is not None:
                raise ValueError(f"vllm.{argument} follows from {instead}: leave it out")

    @property
    def takes_up_carried(self) -> bool:
        """Whether this engine accepts `GenerationRequest.carried`: the tokens that a sample had
        when it was aborted, from which a new request goes on."""
        return self.name in TAKE_UP_CARRIED

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether several devices can share one engine of this kind."""
        return self.name in TENSOR_PARALLEL

    @property
    def takes_quantized(self) -> bool:
        """Whether the engine can generate with an adapter over a base model quantised to 4 bits."""
        return self.name not in WITHOUT_QUANTIZATION
