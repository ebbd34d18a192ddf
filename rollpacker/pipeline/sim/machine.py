"""Computes what the pipeline stages of a scenario's trainer are like: how the layers are split,
what ops cost, and how many tokens' activations have room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollpacker.pipeline.plan.choosers import ORDERS, Order
from rollpacker.pipeline.plan.layout import faster_split
from rollpacker.pipeline.plan.order import orders_from_csv
from rollpacker.pipeline.plan.split import check_layers, split_layers
from rollpacker.pipeline.plan.work import Link, Load, OpCost, StageCost
from rollpacker.pipeline.sim.phase import Pipeline, PipelineMachine
from rollpacker.pipeline.sim.spec import OpTimes, PipelineSpec
from rollpacker.sim.devices_spec import Cluster
from rollpacker.sim.hardware import DTYPE_BYTES, ModelShape
from rollpacker.sim.latency import TRAIN_FLOPS_PER_PARAM, LatencyModel
from rollpacker.sim.scenario_checks import TRAINED_PARAMETER_BYTES
from rollpacker.sim.train_spec import TrainSpec

OP_FLOPS_PER_PARAM = 2.0
"""FLOPs per token and parameter of each op: forward, backward for inputs and for weights."""
ACTIVATION_BYTES = 34
"""Bytes of activations per token, layer and unit of hidden size: a transformer block in bfloat16
with attention that keeps no scores (Korthikanti et al., arXiv 2205.05198)."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that weights, optimizer state and activations may fill."""
NOMINAL_MICRO_BATCHES = 4
"""Number of micro-batches per stage in the simulated sweep by which splits are compared."""


class Trainer(NamedTuple):
    """The parts of a simulation's scenario on which cost and memory of the stages depend."""

    train: TrainSpec
    cluster: Cluster
    shape: ModelShape


def pipeline_of(trainer: Trainer, latency: LatencyModel, *, seed: int) -> Pipeline | None:
    """Return the simulation of the trainer's stages. None: the trainer has no stages. `seed` is for
    random delays of messages. Raises `ValueError` as `check_pipeline` does."""
    spec = trainer.train.pipeline
    if spec is None:
        return None
    even = split(trainer)
    faster = _faster(trainer, spec, even, latency)
    layers = (faster or even) if spec.relayout == "do" else even
    stage_gpus = trainer.train.replica_gpus // spec.stages
    machine = PipelineMachine(
        costs=_costs(trainer, spec, layers, latency),
        layers=() if spec.op_times is not None else layers,
        caps=_caps(trainer, layers),
        num_replicas=trainer.cluster.trainer_gpus // trainer.train.replica_gpus,
        stage_gpus=stage_gpus,
        bytes_per_token=_bytes_per_token(trainer, spec),
        relayout=faster if spec.relayout == "propose" else (),
    )
    return Pipeline(spec, machine, orders=_orders(spec), seed=seed)


def check_pipeline(trainer: Trainer, *, longest_tokens: int) -> None:
    """Raise `ValueError`, which names the config key, if the stages cannot run as configured.
    `longest_tokens`: tokens of the longest response with its prompt."""
    train, spec = trainer.train, trainer.train.pipeline
    if spec is None:
        return
    layers = trainer.shape.layers
    if train.pipeline_parallel not in (1, spec.stages):
        raise ValueError(
            f"train.pipeline_parallel is {train.pipeline_parallel} and train.pipeline.stages "
            f"{spec.stages}: leave pipeline_parallel out"
        )
    if spec.stages > layers:
        raise ValueError(
            f"train.pipeline.stages is {spec.stages}, more than the model's {layers} layers: take "
            f"at most {layers}"
        )
    if spec.layers != "auto":
        check_layers(spec.layers, num_layers=layers, num_stages=spec.stages)
    if spec.order not in ORDERS and spec.micro_batches is None:
        raise ValueError(
            f"train.pipeline.order is {spec.order}, a plan for a fixed number of micro-batches: "
            "set train.pipeline.micro_batches"
        )
    _orders(spec)
    caps = [cap for cap in _caps(trainer, split(trainer)) if cap is not None]
    if caps and min(caps) < longest_tokens:
        raise ValueError(
            f"train.pipeline.live_tokens leaves a stage room for {min(caps):,} tokens, less than "
            f"one response of full length with its prompt ({longest_tokens:,}): raise it, take "
            "more stages or GPUs, or lower rollout.max_response_tokens"
        )


def split(trainer: Trainer) -> tuple[int, ...]:
    """Return the number of layers of each stage: the config's, or else a split for equal speeds."""
    spec = trainer.train.pipeline
    assert spec is not None
    if spec.layers != "auto":
        return spec.layers
    layers = [1.0] * trainer.shape.layers
    return tuple(split_layers(layers, spec.stages, last_s=spec.head_layers))


def _faster(
    trainer: Trainer, spec: PipelineSpec, layers: Sequence[int], latency: LatencyModel
) -> tuple[int, ...]:
    """Return the number of layers of each stage in a split faster than `layers`, such as a run that
    measures its stages would find. Empty: there is none, or the config fixes the split."""
    if spec.layers != "auto" or spec.op_times is not None:
        return ()
    count = spec.micro_batches or NOMINAL_MICRO_BATCHES * spec.stages
    found = faster_split(
        _costs(trainer, spec, layers, latency),
        layers,
        [Load.of([spec.micro_batch_tokens])] * count,
        [Link()] * (spec.stages - 1),
        head_layers=spec.head_layers,
    )
    return () if found is None else found.layers


def _costs(
    trainer: Trainer, spec: PipelineSpec, layers: Sequence[int], latency: LatencyModel
) -> tuple[StageCost, ...]:
    if spec.op_times is not None:
        return op_costs(spec)
    token_s = latency.train_s(1.0, 1) * OP_FLOPS_PER_PARAM / TRAIN_FLOPS_PER_PARAM
    whole = sum(layers) + spec.head_layers
    stage_gpus = trainer.train.replica_gpus // spec.stages
    costs = []
    for stage, count in enumerate(layers):
        work = count + (spec.head_layers if stage == spec.stages - 1 else 0.0)
        slower = spec.slow_stages.get(stage, 1.0)
        op = OpCost(per_token_s=slower * token_s * work / whole / stage_gpus)
        costs.append(StageCost(op, op, op))
    return tuple(costs)


def op_costs(spec: PipelineSpec) -> tuple[StageCost, ...]:
    """Return the cost of ops by stage, from the op times that the scenario gives."""
    assert spec.op_times is not None
    return tuple(
        _given(spec.op_times, stage, spec.slow_stages.get(stage, 1.0))
        for stage in range(spec.stages)
    )


def _given(times: OpTimes, stage: int, slower: float) -> StageCost:
    ops = []
    for seconds in (times.f_s[stage], times.i_s[stage], times.w_s[stage]):
        took_s = slower * seconds
        if times.tokens is None:
            ops.append(OpCost(fixed_s=took_s))
        else:
            ops.append(OpCost(per_token_s=took_s / times.tokens))
    f, i, w = ops
    return StageCost(f, i, w)


def _bytes_per_token(trainer: Trainer, spec: PipelineSpec) -> float:
    """Return a message's bytes per token: those of hidden states; 0 if the given op times do not
    depend on tokens, so that messages take the given delays alone."""
    if spec.op_times is not None and spec.op_times.tokens is None:
        return 0.0
    return float(trainer.shape.hidden * DTYPE_BYTES[trainer.shape.dtype])


def _caps(trainer: Trainer, layers: Sequence[int]) -> tuple[int | None, ...]:
    """Return for each stage the most tokens whose activations it may keep; None: any number."""
    spec = trainer.train.pipeline
    assert spec is not None
    if spec.live_tokens != "auto":
        return (spec.live_tokens,) * spec.stages
    cluster, shape, train = trainer.cluster, trainer.shape, trainer.train
    trained = TRAINED_PARAMETER_BYTES * shape.params / cluster.trainer_gpus
    room = max(MEMORY_SHARE * cluster.trainer_gpu_spec.memory_gb * 1e9 - trained, 0.0)
    sharing = train.tensor_parallel * train.context_parallel
    return tuple(
        int(room * sharing / (ACTIVATION_BYTES * shape.hidden * count)) for count in layers
    )


def _orders(spec: PipelineSpec) -> Sequence[Order]:
    """Return by stage the order of ops in the CSV file that `order` names; empty if it names none.
    Raises `ValueError` for a file that cannot be read or run."""
    if spec.order in ORDERS:
        return ()
    assert spec.micro_batches is not None
    try:
        text = Path(spec.order).read_text(encoding="utf-8")
        return orders_from_csv(text, num_stages=spec.stages, num_micro_batches=spec.micro_batches)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"train.pipeline.order is {spec.order}: {why}") from None
