"""The memory that `--dry-run` predicts for each pipeline stage against what its process takes.

    two             2 stages of one process, float32, as many live tokens as auto gives
    sharded         2 stages x 2 shards, tied embeddings, a reference in the loss, layers as given
    four, bfloat16  4 stages, tied embeddings, live tokens under a cap

Random weights, gloo, links over TCP, a CPU thread a process; the peak of a second step is measured
as in `memory_estimate.py`. Counted are the live tokens that each stage's chooser sees, against its
cap. Besides, in virtual time: what a sweep would gain if the output layer's W were put off.
Exit code 1 if an estimate is off by more than 15 %, or a cap is exceeded.

    python benchmarks/pipeline_memory.py [--only NAME]          # 3 minutes
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lab import bench
from memory_estimate import SMALL, new_learner, peak_bytes, random_model, run_config, samples
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.config.schema import RunConfig
from rollpacker.pipeline.plan.choosers import Op, StageState
from rollpacker.pipeline.plan.plan import ready_choosers
from rollpacker.pipeline.plan.split import split_layers
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.work import Link, Load, Work, constant
from rollpacker.pipeline.stages.connect import Connected
from rollpacker.pipeline.stages.orders import Ready, SweepChooser
from rollpacker.pipeline.stages.peers import GroupPeers
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.sharding import join, leave
from rollpacker.trainer.trainer import ModelConfig, PipelineConfig, TrainConfig

ROW_TOKENS = 257
"""Of a prompt and its response; every sample is as long as it may be."""
ARCHITECTURE = SMALL | {"num_hidden_layers": 8}
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 8}
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Malloc gives every block of 64 KiB or more a mapping of its own, which goes when it is freed."""
MAX_ERROR = 0.15
QWEN = {  # layers, hidden, feed-forward, keys or values, vocabulary
    "0.5B": (24, 896, 4864, 128, 151_936),
    "7B": (28, 3584, 18_944, 512, 152_064),
    "14B": (48, 5120, 13_824, 1024, 152_064),
}
NUM_STAGES, SWEEP = (2, 4, 8), 16
"""Stages, and micro-batches of a sweep."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    stages: int
    shards: int = 1
    architecture: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    layers: tuple[int, ...] | None = None
    live_tokens: int | None = None
    """Neither: auto."""
    reference: bool = False
    micro_batch_tokens: int = 512
    num_micro_batches: int = 6
    """Micro-batches of a step, of each shard."""


SETTINGS = {
    "two": Setting(stages=2, architecture={"tie_word_embeddings": False}),
    "sharded": Setting(stages=2, shards=2, layers=(4, 4), reference=True, num_micro_batches=5),
    "four, bfloat16": Setting(
        stages=4,
        architecture={"num_hidden_layers": 12},
        dtype="bfloat16",
        live_tokens=1536,
        num_micro_batches=4,
    ),
}


def _compared(name: str) -> dict[str, Any]:
    """Each stage's prediction and its largest process."""
    setting = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        _new_model(setting, {}).save_pretrained(folder)
        predicted = estimate(_run_config(setting, folder), has_cuda=False).ranks
        assert predicted
        ranks = _run_ranks(name, folder, setting.stages * setting.shards)
    stages = []
    for index, stage in enumerate(predicted):
        own = [one for one in ranks if one["stage"] == index]
        measured = max(one["peak_bytes"] for one in own)
        live = max(one["peak_live_tokens"] for one in own)
        error = stage.size_bytes / measured - 1
        stages.append(
            {
                "layers": stage.layers,
                "predicted_bytes": stage.size_bytes,
                "predicted_parts": {part.name: part.size_bytes for part in stage.parts},
                "measured_bytes": measured,
                "measured_bytes_of_each_process": [one["peak_bytes"] for one in own],
                "relative_error": error,
                "live_tokens_cap": stage.live_tokens,
                "peak_live_tokens": live,
            }
        )
        print(name, stage.name, stages[-1], flush=True)
    return {"setting": dataclasses.asdict(setting), "stages": stages}


def _run_ranks(name: str, folder: str, size: int) -> list[dict[str, int]]:
    """Run so many processes, and return what each printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "--rank", name, "--model", folder]
    common = os.environ | RETURNED | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if codes := [process.returncode for process in started if process.returncode]:
        sys.exit(f"{name}: a process ended with {codes[0]}")
    return [json.loads(one.splitlines()[-1]) for one in said]


def _output_layer() -> dict[str, dict[str, float]]:
    """Seconds of a sweep with the output layer's W put off, over those with it in I."""
    found = {}
    for name, (layers, hidden, feed_forward, key_value, vocabulary) in QWEN.items():
        layer = 2.0 * hidden * (2 * hidden + 2 * key_value + 3 * feed_forward)
        head = 2.0 * hidden * vocabulary
        for count in NUM_STAGES:
            split = split_layers([3 * layer] * layers, count, last_s=4 * head)
            kept, again = (
                _sweep_s(split, layer, head, put_off) / _sweep_s(split, layer, head, (1, 3, 0))
                for put_off in ((1, 2, 1), (1, 2, 2))
            )
            found[f"{name}, {count} stages"] = {"kept": kept, "computed again": again}
    return found


def _sweep_s(split: Sequence[int], layer: float, head: float, products: Sequence[int]) -> float:
    """`products`: of the output layer in F, I (one to make the logits again) and W."""
    ops = [[layers * layer for layers in split] for _ in products]
    for of_kind, number in zip(ops, products, strict=True):
        of_kind[-1] += number * head
    work = Work.even(SWEEP, f_s=ops[0], i_s=ops[1], w_s=ops[2])
    count = len(split)
    choosers = ready_choosers(count, caps=[2 * (count - stage) for stage in range(count)])
    return run(choosers, work, constant([Link()] * (count - 1))).makespan_s


class Counted:
    """A chooser that notes the live tokens that it sees."""

    def __init__(self, chooser: SweepChooser, peaks: list[int]) -> None:
        self._chooser, self._peaks = chooser, peaks

    def add(self, loads: Sequence[Load]) -> None:
        self._chooser.add(loads)

    def choose(self, state: StageState) -> Op | None:
        self._peaks.append(state.peak_live_tokens)
        return self._chooser.choose(state)


def _as_rank(setting: Setting, folder: str) -> dict[str, int]:
    torch.set_num_threads(1)
    shards = join(torch.device("cpu"), TIMEOUT_S, stages=setting.stages)
    mesh = shards.pipelines
    assert mesh is not None
    connected = Connected(mesh.mesh.T.tolist(), kind="host", device=shards.device)
    peaks: list[int] = []

    def learner(model: Any, config: RunConfig) -> Learner:
        layers = config.train.pipeline.layers
        stage = Stage(
            connected.place,
            layers=() if layers == "auto" else layers,
            peers=GroupPeers(mesh.get_group("stage")),
            executor=connected.executor,
            new_chooser=lambda _: Counted(Ready(connected.place, config.train.pipeline), peaks),
        )
        return new_learner(model, config, shards=shards, stage=stage)

    config = _run_config(setting, folder)
    batch = samples(_num_samples(setting), ROW_TOKENS)
    # What torch and others load late is no part of the estimate: a step of a tiny model has it all.
    tiny = learner(_new_model(setting, TINY), config)
    tiny.accumulate(batch[:1])
    tiny.apply()
    del tiny
    gc.collect()
    peaks.clear()
    dtype = getattr(torch, setting.dtype)
    peak = peak_bytes(
        lambda: learner(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), config), batch
    )
    connected.close()
    leave()
    return {"stage": connected.place.index, "peak_bytes": peak, "peak_live_tokens": max(peaks)}


def _new_model(setting: Setting, changed: dict[str, Any]) -> Any:
    return random_model(ARCHITECTURE | setting.architecture | changed, setting.dtype)


def _run_config(setting: Setting, folder: str) -> RunConfig:
    layers, live_tokens = setting.layers or "auto", setting.live_tokens or "auto"
    train = TrainConfig(
        steps=2,
        processes=setting.stages * setting.shards,
        micro_batch_tokens=setting.micro_batch_tokens,
        pipeline=PipelineConfig(stages=setting.stages, layers=layers, live_tokens=live_tokens),
    )
    loss = {"kl_coef": 0.1, "kl_in": "loss"} if setting.reference else {}
    return run_config(
        ModelConfig(path=folder, device="cpu", dtype=setting.dtype),
        train,
        setting.shards * _num_samples(setting),
        ROW_TOKENS,
        algorithm=AlgorithmConfig(**loss),
    )


def _num_samples(setting: Setting) -> int:
    """Samples of each shard."""
    return setting.num_micro_batches * (setting.micro_batch_tokens // (ROW_TOKENS - 1))


def main(
    only: str | None = None, rank: str | None = None, model: str = ""
) -> dict[str, Any] | None:
    """`rank`: be one of that setting's, with the model in this folder."""
    if rank is not None:
        print(json.dumps(_as_rank(SETTINGS[rank], model)))
        return None
    results = {name: _compared(name) for name in ([only] if only else SETTINGS)}
    found = [one for result in results.values() for one in result["stages"]]
    return {
        "max_error": max(abs(one["relative_error"]) for one in found),
        "aim": MAX_ERROR,
        "cap_exceeded": any(one["peak_live_tokens"] > one["live_tokens_cap"] for one in found),
        "output_layer": _output_layer(),
        "settings": results,
    }


def holds(found: dict[str, Any]) -> bool:
    """No estimate is too far off, and no stage holds more tokens than its cap."""
    return found["max_error"] <= MAX_ERROR and not found["cap_exceeded"]


if __name__ == "__main__":
    bench(main, holds=holds, only=SETTINGS, rank=SETTINGS)
