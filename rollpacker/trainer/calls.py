"""Encoding of calls, results and errors as bytes, for the run's own process and the trainer's
ranks.

Decoding the bytes cannot execute code, which matters as under torchrun they come over a network.
Both sides know the same types, and a rank runs only the methods that `METHODS` names."""

from __future__ import annotations

import functools
import os
import traceback
from collections import Counter, defaultdict
from pathlib import Path

import torch

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.codec import Codec, Kind, by_field
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.pipeline.plan.work import Link, Load, Measured, OpCost, StageCost
from rollpacker.pipeline.stages.overseer import Arrangement
from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.model import ModelError
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.trainer import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    NonFiniteError,
    PipelineConfig,
    ScoreRequest,
    TokenScores,
    TrainConfig,
    TrainerError,
    TrainerProcessError,
    TrainerStateError,
    TrainSample,
)
from rollpacker.weights.buffer import BufferLayout, Place
from rollpacker.weights.delivery import Delivery

METHODS = (
    *("setup", "score", "accumulate", "discard", "rescale", "update", "apply", "arrange"),
    *("save", "load", "map_weights", "write_weights", "offload", "reload", "hashes"),
    *("log_probs_of", "send_weights"),
)
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(TrainerProcessError, TrainerStateError, NonFiniteError, TrainerError, ModelError),
        *(torch.OutOfMemoryError, OSError, ValueError),
    )
}
"""Classes of rank errors that the run's own process can raise again, by class name. A subclass
comes before its base class, since the first class that fits the error is taken."""


_RECORDS = (
    *(LearnerSetup, ModelConfig, LoraConfig, TrainConfig, CriticConfig, PipelineConfig),
    *(AlgorithmConfig, PromptId, SampleId, ScoreRequest, TokenScores, TrainSample, StageTimes),
    *(Load, Arrangement, Measured, StageCost, OpCost, Link, BufferLayout, Place, Delivery),
)
_KINDS = (
    by_field(StepOutcome),
    by_field(StepSums),
    Kind(Counter, dict, Counter),
    Kind(defaultdict, dict, lambda values: defaultdict(float, values)),
    Kind(type(Path()), str, Path),
)


@functools.cache
def codec() -> Codec:
    """Return the codec of calls and results, which knows only the types listed in this module."""
    return Codec([*_RECORDS, *_KINDS])


def error_bytes(error: Exception) -> bytes:
    """Encode an error of a rank so that the run's own process can raise it. An error from outside
    of the package becomes a `TrainerError` with its text, since that process may lack its class."""
    name = next((n for n, kind in _ERRORS.items() if isinstance(error, kind)), "")
    module = type(error).__module__
    is_ours = module.startswith("rollpacker.")
    said: tuple[object, ...] = (str(error),)
    if isinstance(error, OSError):
        said = (error.errno, error.strerror, error.filename) if error.errno else error.args
        is_ours = module == "builtins"
    elif type(error) is ValueError:
        is_ours = _raised_in(error).startswith("rollpacker.")
    if not name or not (is_ours or isinstance(error, torch.OutOfMemoryError)):
        name, said = _foreign(error)
    return codec().encode((name, said))


def error_of(data: bytes) -> Exception:
    """Decode bytes that `error_bytes` has made, and return the error."""
    name, said = codec().decode(data)
    return _ERRORS[name](*said)


def _foreign(error: Exception) -> tuple[str, tuple[str]]:
    rank = os.environ["RANK"]
    if _is_of_another(error):
        return TrainerProcessError.__name__, (
            f"process {rank} of the trainer lost its connection to another one. No"
            " update of this step was kept; --resume goes on from the last checkpoint",
        )
    traceback.print_exception(error)
    return TrainerError.__name__, (f"process {rank} of the trainer failed: {error!r}",)


def _is_of_another(error: Exception) -> bool:
    """Whether this error of a collective came about because another process is gone. Then the loss
    of that process is what to report."""
    return "gloo/transport" in str(error) or "ncclRemoteError" in str(error)


def _raised_in(error: Exception) -> str:
    """Return the name of the module that raised the error; empty if it has no traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
