"""Models of how long generation and training take on a machine: from datasheets and a few fitted
constants, or from a measured run. Both kinds have the methods of `LatencyModel`, so the simulator
does not know which it has. Seconds and workers of rewards are not here but in the scenario."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from rollpacker.bounds import check_at_least, check_within
from rollpacker.core.portable import power
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.hardware import GpuSpec, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost of one engine's decode step, in which each of n running sequences gains one token:
    max(launch_s, bytes_s + per_cached_token_s * K) + per_sequence_s * n seconds, with K tokens in
    the KV cache before the step."""

    launch_s: float
    """Least seconds of a decode step: the host's time to start the kernels of all layers."""
    bytes_s: float
    """Seconds of a decode step that do not grow with the batch: to read weights, and other work."""
    per_cached_token_s: float
    """Seconds of a decode step to read the keys and values of one cached token."""
    per_sequence_s: float
    """Seconds of a decode step for sampling and bookkeeping of one sequence."""
    speculation: Speculation | None = None
    """Given speed-up of decode steps in which few sequences run, in every round. None: none."""
    drafts: Drafts | None = None
    """How tokens are guessed, instead of a given `speculation`. None: no tokens are guessed."""
    knots: tuple[tuple[float, float], ...] = ()
    """Measured points (n, seconds of a step of n sequences with an empty cache), with straight
    lines between and beyond, for machines whose time is no straight line in n. Unless empty, they
    replace every field above but `per_cached_token_s`."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "launch_s", "bytes_s", "per_cached_token_s", "per_sequence_s")
        if not self.empty_step_s(1) > 0:
            raise ValueError("a decode step must take time: launch_s, bytes_s or per_sequence_s")

    def step_s(self, num_running: int, cached_tokens: int) -> float:
        """Seconds of a decode step of `num_running` sequences, with so many tokens in the cache."""
        read_s = self.reading_step_s(num_running, cached_tokens)
        return max(self.empty_step_s(num_running), read_s) / self.speedup(num_running)

    def empty_step_s(self, num_running: int) -> float:
        """Seconds of a decode step with an empty KV cache, without speculation."""
        if not self.knots:
            return max(self.launch_s, self.bytes_s) + self.per_sequence_s * num_running
        place = bisect_left(self.knots, (num_running, -math.inf), 1, len(self.knots) - 1)
        (low, low_s), (high, high_s) = self.knots[place - 1], self.knots[place]
        return low_s + (high_s - low_s) * max(0.0, num_running - low) / (high - low)

    def reading_step_s(self, num_running: int, cached_tokens: int) -> float:
        """Seconds of a decode step, without speculation, in which reading memory takes longest."""
        read_s = self.per_cached_token_s * cached_tokens
        if self.knots:
            return self.empty_step_s(num_running) + read_s
        return self.bytes_s + read_s + self.per_sequence_s * num_running

    def speedup(self, num_running: int) -> float:
        """Factor, at least 1, by which guessed tokens speed up steps of `num_running` sequences."""
        if self.drafts is not None:
            return self.drafts.speedup(num_running)
        if self.speculation is not None and num_running <= self.speculation.max_live:
            return self.speculation.speedup
        return 1.0


class LatencyModel(Protocol):
    """Times and limits of a machine (devices and a model on them), as a simulation needs them."""

    @property
    def train_fixed_s(self) -> float:
        """Seconds of a training step that do not depend on its tokens: load, offload, update."""

    @property
    def sync_s(self) -> float:
        """Seconds to bring new weights into the engines."""

    @property
    def commit_s(self) -> float:
        """Seconds to save a step (log, metrics, checkpoint) before the next step begins."""

    @property
    def stop_s(self) -> float:
        """Seconds from the order to abort samples until an engine has released them."""

    def step_cost(self, tensor_parallel: int) -> StepCost:
        """Cost of the decode steps of one engine on `tensor_parallel` GPUs."""

    def kv_tokens(self, tensor_parallel: int) -> int | None:
        """Number of tokens that the KV cache of one engine holds; None: the cache is never a limit.
        Raises `ValueError` if the engine has no room for its weights."""

    def prefill_s(self, num_samples: int, tensor_parallel: int) -> float:
        """Seconds that one engine takes to prefill the prompts of `num_samples` samples."""

    def recompute_token_s(self, tensor_parallel: int) -> float:
        """Prefill seconds per token of a preempted sequence, or one that another engine began."""

    def train_s(self, tokens: float, gpus: int) -> float:
        """Seconds that training on `tokens` tokens adds to a training step on `gpus` GPUs."""


def _fitted(default: float, unit: str, fitted_to: str) -> Any:
    return field(default=default, metadata={"unit": unit, "fitted_to": fitted_to})


_PAPER = "the RollPacker paper (arXiv 2509.21009)"
_STEPS = f"{_PAPER}, Fig. 4, 9, 10, 11 and 13 and Table 2, all at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of a machine that no datasheet gives, most of them fitted. `constants()` lists each
    with its unit and source."""

    launch_layer_s: float = _fitted(0.273e-3, "s per layer", _STEPS)
    """Host seconds to launch one layer's kernels, the least that the layer takes in a step."""
    per_sequence_s: float = _fitted(0.214e-3, "s per sequence", _STEPS)
    """Seconds of sampling and bookkeeping per running sequence of a decode step."""
    bandwidth_share: float = _fitted(0.8, "share of the datasheet's", "assumed, not fitted")
    """Share of the datasheet's memory bandwidth that decoding reaches."""
    tensor_parallel_layer_s: float = _fitted(0.02e-3, "s per layer", "assumed, not fitted")
    """Seconds of the all-reduces of one layer of a decode step, on two GPUs or more."""
    prefill_utilization: float = _fitted(
        400 / 989, "share of the datasheet's FLOP/s", "assumed, not fitted: 0.4 PFLOP/s on an H800"
    )
    train_utilization: float = _fitted(
        0.43, "share of the datasheet's FLOP/s", f"{_STEPS}, and Fig. 4b, training time"
    )
    """Share of the datasheet's FLOP/s that training and the log-prob passes before it reach."""
    train_fixed_scale_s: float = _fitted(
        1.1179, "s at 1e9 parameters", "17.9, 45 and 132 s at 7B, 14B and 32B"
    )
    """Scale a of the power law a * (params / 1e9)**b of the seconds of a training step that do not
    depend on its tokens: 1 % too high at 7B, 1 % too low at 14B, 0 % too high at 32B."""
    train_fixed_exponent: float = _fitted(
        1.3687, "power of the parameters", "17.9, 45 and 132 s at 7B, 14B and 32B"
    )
    """Exponent b of the power law of the seconds of a step that do not depend on its tokens."""
    sync_scale_s: float = _fitted(
        0.55558, "s at 1e9 parameters", f"5, 15 and 27 s at 7B, 14B and 32B ({_PAPER}, Fig. 10c)"
    )
    """Scale a of the power law a * (params / 1e9)**b of the weight sync's seconds: 13 % too high at
    7B, 20 % too low at 14B, 11 % too high at 32B."""
    sync_exponent: float = _fitted(
        1.14179, "power of the parameters", f"5, 15 and 27 s at 7B, 14B and 32B ({_PAPER})"
    )

    synchronous_judge_share: float = _fitted(
        0.62, "share of its rate", f"{_PAPER}, Fig. 4b, rewards of verl, and Fig. 9"
    )
    """Share of its calls per second that a judge model reaches when all calls of a training step
    come as one batch after the rollout."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, *(constant.name for constant in fields(self)))
        check_within(self, "(0, 1]", "bandwidth_share", "synchronous_judge_share")
        check_within(self, "(0, 1]", "prefill_utilization", "train_utilization")

    def constants(self) -> dict[str, tuple[float, str, str]]:
        """Mapping from the name of each constant to (value, unit, what it was fitted to)."""
        return {
            constant.name: (
                getattr(self, constant.name),
                constant.metadata["unit"],
                constant.metadata["fitted_to"],
            )
            for constant in fields(self)
        }


TRAIN_FLOPS_PER_PARAM = 10.0
"""Training FLOP per token and parameter: 6 for forward and backward, 2 each for the log-probs of
the policy and of the reference model."""
SHARED_PREFILL_SHARE = 0.6
"""Share of prompt tokens without prefill, as another sample of the prompt had them computed."""
KV_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that weights and KV cache may fill together; 0.9 is vLLM's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetModel:
    """Times of a model on a kind of GPU, computed from datasheets instead of measured."""

    model: ModelShape
    gpu: GpuSpec
    train_gpu: GpuSpec | None = None
    """Datasheet of the trainer's GPUs. None: the trainer has the same kind, `gpu`."""
    calibration: Calibration = Calibration()
    prompt_tokens: int = 200
    """Mean length of a prompt, in tokens."""
    train_fixed_given_s: float | None = None
    """Seconds of a training step that do not depend on its tokens. None: estimated from `model`."""
    sync_given_s: float | None = None
    """Seconds to bring new weights into the engines. None: estimated from the size of `model`."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompt_tokens")
        check_at_least(self, 0, "train_fixed_given_s", "sync_given_s")

    @property
    def train_fixed_s(self) -> float:
        if self.train_fixed_given_s is not None:
            return self.train_fixed_given_s
        c = self.calibration
        return c.train_fixed_scale_s * power(self.model.params / 1e9, c.train_fixed_exponent)

    @property
    def sync_s(self) -> float:
        if self.sync_given_s is not None:
            return self.sync_given_s
        c = self.calibration
        return c.sync_scale_s * power(self.model.params / 1e9, c.sync_exponent)

    @property
    def commit_s(self) -> float:
        return 0.0

    @property
    def stop_s(self) -> float:
        return 0.0

    def step_cost(self, tensor_parallel: int) -> StepCost:
        c = self.calibration
        bytes_per_s = c.bandwidth_share * self.gpu.bandwidth_tb_s * 1e12
        gpu_bytes = self.model.weight_bytes / tensor_parallel
        collective_s = c.tensor_parallel_layer_s * self.model.layers if tensor_parallel > 1 else 0.0
        return StepCost(
            launch_s=c.launch_layer_s * self.model.layers,
            bytes_s=gpu_bytes / bytes_per_s + collective_s,
            per_cached_token_s=self._kv_token_bytes(tensor_parallel) / bytes_per_s,
            per_sequence_s=c.per_sequence_s,
        )

    def kv_tokens(self, tensor_parallel: int) -> int:
        usable = KV_MEMORY_SHARE * self.gpu.memory_gb * 1e9
        weights = self.model.weight_bytes / tensor_parallel
        tokens = int((usable - weights) // self._kv_token_bytes(tensor_parallel))
        if tokens < 1:
            raise ValueError(
                f"the weights need {weights / 1e9:.1f} GB on each of {tensor_parallel} GPUs, but "
                f"only {usable / 1e9:.1f} of {self.gpu.memory_gb:g} GB may be used: raise "
                "rollout.tensor_parallel, or take a smaller model or a larger GPU"
            )
        return tokens

    def prefill_s(self, num_samples: int, tensor_parallel: int) -> float:
        tokens = num_samples * self.prompt_tokens * (1 - SHARED_PREFILL_SHARE)
        return tokens * self.recompute_token_s(tensor_parallel)

    def recompute_token_s(self, tensor_parallel: int) -> float:
        flops_per_s = self.calibration.prefill_utilization * self.gpu.tflops * 1e12
        return 2 * self.model.params / (tensor_parallel * flops_per_s)

    def train_s(self, tokens: float, gpus: int) -> float:
        tflops = (self.train_gpu or self.gpu).tflops
        flops_per_s = self.calibration.train_utilization * tflops * 1e12 * gpus
        return tokens * TRAIN_FLOPS_PER_PARAM * self.model.params / flops_per_s

    def _kv_token_bytes(self, tensor_parallel: int) -> float:
        """Bytes of one token's keys and values on each GPU. With more GPUs than key-value heads,
        each GPU keeps a whole head."""
        return self.model.kv_token_bytes / min(tensor_parallel, self.model.kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Times of a machine, measured in a run: constants that hold for that run's degree of tensor
    parallelism and number of devices only."""

    step: StepCost
    prefill_sample_s: float = 0.0
    """Seconds of prefill for each sample that is launched."""
    prefill_token_s: float = 0.0
    """Seconds per token to compute the KV cache of a sequence again."""
    train_fixed_s: float = 0.0
    """Seconds of a training step that do not depend on its tokens."""
    train_token_s: float = 0.0
    """Seconds of training per response token, on one device."""
    sync_s: float = 0.0
    commit_s: float = 0.0
    stop_s: float = 0.0

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{constant.name} must be 0 or more, not {value}")

    def step_cost(self, tensor_parallel: int) -> StepCost:
        """The measured cost of decode steps, whatever `tensor_parallel` is."""
        return self.step

    def kv_tokens(self, tensor_parallel: int) -> int | None:
        """Returns None: the KV cache of a measured machine is never a limit."""
        return None

    def prefill_s(self, num_samples: int, tensor_parallel: int) -> float:
        return self.prefill_sample_s * num_samples

    def recompute_token_s(self, tensor_parallel: int) -> float:
        return self.prefill_token_s

    def train_s(self, tokens: float, gpus: int) -> float:
        return tokens * self.train_token_s / gpus
