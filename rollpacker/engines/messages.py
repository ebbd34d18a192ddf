"""The messages between a run and an engine's process. Does not import torch.

    down   SETUP EngineSetup     what to make
           CALL 0 Work           requests, aborts and samples to forget; it is not answered
           CALL number Call      something with one answer; calls are made one after the other
    up     BEAT Report           outputs as they come, and at the latest after `beat_s`
           ANSWER number Answer  the answer to a call, behind a report with the status after it

The kinds of messages are those of all processes (`workers/kinds.py`).
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
from rollpacker.weights.delivery import Delivery

UPDATE_WEIGHTS, WEIGHT_PROBE = "update_weights", "weight_probe"
OFFLOAD, RELOAD, COMPARE = "offload", "reload", "compare"
"""Names of the methods of an engine that a message can call, for `Call.name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Describes the engine that a process is to make."""

    make: str
    """The function that makes the engine, as `module:function`. The process calls it with `config`
    and the arguments by keyword, and gets an `Engine`."""
    config: EngineConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of `make`: plain values, lists, tuples and mappings."""
    beat_s: float = 1.0
    """Longest time between two reports, in seconds. `ProcessEngine` sets it."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of the engine that takes time and gives one answer, such as `offload`."""

    name: str
    version: int = 0
    """New version number of the weights, for `UPDATE_WEIGHTS`; unused in other calls."""
    source: WeightSource | None = None
    """Where `UPDATE_WEIGHTS` finds the weights. None: the engine's tensors hold them already."""
    delivery: Delivery | None = None
    """The delivery by which `UPDATE_WEIGHTS` gets the weights, in place of a source."""
    text: tuple[int, ...] = ()
    """Tokens whose log-probs `COMPARE` compares; unused in other calls."""
    log_probs: tuple[float, ...] = ()
    """The trainer's log-probs of the tokens of `text` from the second one on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call, or its error's message. Both are None if the call returns nothing."""

    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What an engine is to do with samples: requests to submit, samples to abort, and samples whose
    kept keys and values it may drop (`Engine.let_go`). Has all since the last `Work`."""

    requests: tuple[GenerationRequest, ...] = ()
    aborts: tuple[SampleId, ...] = ()
    let_go: tuple[SampleId, ...] = ()


PackedOutput = tuple[SampleGenerated | SampleAborted | SampleFailed, "PackedResponse | None"]
"""An `EngineOutput` as it is sent: the event, and the response without sample and prompt (None if
the output has no response)."""


@dataclass(frozen=True, slots=True)
class Report:
    """A report of an engine's process, which also shows that it lives: the outputs since the last
    report and the engine's present status."""

    outputs: tuple[PackedOutput, ...]
    status: EngineStatus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedResponse:
    """A response as it is sent, without its sample and prompt, which the run's process knows."""

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
    """The numbers as an int32 array, or as int64 if one does not fit."""
    try:
        return np.array(values, np.int32)
    except OverflowError:
        return np.array(values, np.int64)


def floats(values: tuple[float, ...]) -> NDArray[np.floating]:
    """The numbers as a float32 array if that holds them all exactly, else as float64."""
    exact = np.array(values, np.float64)
    short = exact.astype(np.float32)
    return short if np.array_equal(short, exact, equal_nan=True) else exact


@functools.cache
def codec() -> Codec:
    """The codec of these messages, used by both processes."""
    written_by_hand = [by_field(EngineSetup), Kind(Work, _work_to_plain, _work_from_plain)]
    messages = [Call, Answer, Report]
    inside = [Delivery, EngineConfig, SamplingParams, Carried, SampleId, PackedResponse]
    events = [SampleGenerated, SampleAborted, SampleFailed]
    return Codec([*written_by_hand, *messages, *inside, *events])


def _work_to_plain(work: Work) -> list[Any]:
    """Turn a `Work` message into plain values. Each different prompt and each `SamplingParams`,
    which many samples share, is written once and named by its index."""
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
        for request in work.requests
    ]
    shared = [integers(prompt) for prompt in prompts], list(samplings)
    return [requests, *shared, work.aborts, work.let_go]


def _work_from_plain(plain: list[Any]) -> Work:
    requests, prompts, samplings, aborts, let_go = plain
    prompts = [tuple(prompt.tolist()) for prompt in prompts]
    return Work(
        tuple(
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
        aborts,
        let_go,
    )
