"""What a run says to an engine's process, and that to the run. Light: no torch.

    down   SETUP EngineSetup     what to make
           CALL Exchange         whenever there is something new, and as soon as one is answered
    up     ANSWER Report         the answer to all exchanges so far

The kinds of messages are those of all processes (`workers/kinds.py`).
`exchange` is the one verb: requests, aborts and calls down; up come the outputs since the last one
that the run acknowledged. It is transport, sign of life and progress report at once. An exchange
that comes a second time changes nothing and is answered again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.codec import Codec, Kind, by_field
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    Carried,
    EngineConfig,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Redraws,
    Response,
    SamplingParams,
)
from rollpacker.weights.buffer import WeightSource

UPDATE_WEIGHTS, WEIGHT_PROBE = "update_weights", "weight_probe"
OFFLOAD, RELOAD = "offload", "reload"
"""What a `Call` may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine's process is to make."""

    make: str
    """`module:function`. It is called there, with `config` and the arguments by keyword, and gives
    an `Engine`."""
    config: EngineConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, lists, tuples and mappings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Something that takes its time and has one answer. There is one call at a time."""

    number: int
    name: str
    version: int = 0
    source: WeightSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    number: int
    """The call's."""
    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    sequence: int
    """1, 2, ..."""
    acknowledged: int = 0
    """The run has the outputs up to this one."""
    requests: tuple[GenerationRequest, ...] = ()
    aborts: tuple[SampleId, ...] = ()
    let_go: tuple[SampleId, ...] = ()
    call: Call | None = None
    wait_s: float = 0.0
    """Without anything to report the answer may take so long."""


PackedOutput = tuple[SampleGenerated | SampleAborted | SampleFailed, "PackedResponse | None"]
"""An `EngineOutput` on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    sequence: int
    """The newest exchange that it answers."""
    first: int
    """Outputs are numbered from 1; the first of these has this number."""
    outputs: tuple[PackedOutput, ...]
    status: EngineStatus
    answer: Answer | None = None
    """The newest one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedResponse:
    """A response without what the run knows of it already."""

    tokens: NDArray[np.integer]
    log_probs: NDArray[np.floating]
    finish_reason: str
    version: int
    redraws: Redraws

    @classmethod
    def of(cls, response: Response) -> PackedResponse:
        return cls(
            tokens=integers(response.tokens),
            log_probs=floats(response.log_probs),
            finish_reason=response.finish_reason,
            version=response.version,
            redraws=response.redraws,
        )

    def unpacked(self, sample: SampleId, prompt_tokens: tuple[int, ...]) -> Response:
        return Response(
            sample=sample,
            prompt_tokens=prompt_tokens,
            tokens=tuple(self.tokens.tolist()),
            log_probs=tuple(self.log_probs.tolist()),
            finish_reason=self.finish_reason,
            version=self.version,
            redraws=self.redraws,
        )


def packed(output: EngineOutput) -> PackedOutput:
    response = output.response
    return output.event, None if response is None else PackedResponse.of(response)


def integers(values: tuple[int, ...]) -> NDArray[np.integer]:
    """As int32, or int64 if they do not fit."""
    try:
        return np.array(values, np.int32)
    except OverflowError:
        return np.array(values, np.int64)


def floats(values: tuple[float, ...]) -> NDArray[np.floating]:
    """As float32 if that holds every one exactly, or float64."""
    exact = np.array(values, np.float64)
    short = exact.astype(np.float32)
    return short if np.array_equal(short, exact, equal_nan=True) else exact


@functools.cache
def codec() -> Codec:
    return Codec(
        *(by_field(EngineSetup), EngineConfig, Call, Report, PackedResponse),
        *(SampleGenerated, SampleAborted, SampleFailed, SampleId, Carried, SamplingParams),
        Kind(Exchange, _exchange_to_plain, _exchange_from_plain),
    )


def _exchange_to_plain(exchange: Exchange) -> list[Any]:
    """Samples share prompts and sampling parameters, so each of these goes once."""
    prompts: dict[tuple[int, ...], int] = {}
    samplings: dict[SamplingParams, int] = {}
    requests = [
        (
            request.sample,
            prompts.setdefault(request.prompt_tokens, len(prompts)),
            samplings.setdefault(request.sampling, len(samplings)),
            request.forced_length,
            request.noise,
            request.turn,
            request.keep,
            request.carried,
        )
        for request in exchange.requests
    ]
    return [
        *(exchange.sequence, exchange.acknowledged, exchange.aborts),
        *(exchange.let_go, exchange.call, exchange.wait_s),
        *([integers(prompt) for prompt in prompts], list(samplings), requests),
    ]


def _exchange_from_plain(plain: list[Any]) -> Exchange:
    sequence, acknowledged, aborts, let_go, call, wait_s, *said = plain
    prompts, samplings, requests = said
    prompts = [tuple(prompt.tolist()) for prompt in prompts]
    return Exchange(
        sequence=sequence,
        acknowledged=acknowledged,
        requests=tuple(
            GenerationRequest(
                sample=sample,
                prompt_tokens=prompts[prompt],
                sampling=samplings[sampling],
                forced_length=forced_length,
                noise=noise,
                turn=turn,
                keep=keep,
                carried=carried,
            )
            for sample, prompt, sampling, forced_length, noise, turn, keep, carried in requests
        ),
        aborts=aborts,
        let_go=let_go,
        call=call,
        wait_s=wait_s,
    )
