"""Two pipeline stages that really compute: the trainer in two processes, each with a thread and a
core, and a Qwen2 of random weights.

    compute  one process against two stages: the same micro-batches, forward and backward
    slow     two network namespaces; `tc tbf` holds a message between them to 0.7 of a stage's
             F + I + W: zero-bubble's order with sends that block, against `ready` over host links
    packed   rows with a tail, packed and unequal (`packed`), against stages of one shape: each
             micro-batch padded to the largest (`padded`), or filled up to it first (`refilled`)

Arms take turns, step by step, and must give the same gradient. A step's time is the slower stage's.
Beside each ratio stands that *by processor time*, which hardly notices what else the machine does:
of stages the sweep in virtual time with ops' processor seconds, and what a stage spends besides.
Exit code 1 if a ratio misses its mark, or the link is not as slow as it should be.

    python benchmarks/pipeline_real.py [--arms compute slow packed] [--pairs 7]     # 5 minutes

`slow` needs Linux, root, and `tc` with tbf.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lab import bench
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.packs import plan_packs
from rollpacker.pipeline.links.host_receiver import LOOPBACK
from rollpacker.pipeline.links.link import Sender, SendTimes
from rollpacker.pipeline.plan.choosers import FixedOrder, Kind, Op, StageState
from rollpacker.pipeline.plan.plan import plan_zero_bubble, ready_choosers
from rollpacker.pipeline.plan.virtual_time import replay, run
from rollpacker.pipeline.plan.work import Link, Load, Work, constant
from rollpacker.pipeline.stages.connect import Connected
from rollpacker.pipeline.stages.orders import Ready, SweepChooser
from rollpacker.pipeline.stages.passes import StagedPasses, _Training
from rollpacker.pipeline.stages.peers import GroupPeers
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.trainer.batches import Batcher, MicroBatch, Row
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.model_set import ModelSet
from rollpacker.trainer.trainer import PipelineConfig, TrainConfig, TrainSample
from rollpacker.trainer.varlen import ROWS_KEYWORD, PackedRows
from tests.cluster.netns import Network, why_impossible

NUM_STAGES = 2
CPU = torch.device("cpu")
LINK_SHARE = 0.7
"""Seconds of a message, as a share of a stage's F + I + W of a micro-batch, on average."""
LINK_SHARES = (0.63, 0.77)
"""Found to be as it should."""
COMPUTE, SLOW, PACKED = "compute", "slow", "packed"
MARKS = {COMPUTE: 1.5, SLOW: 1.3, PACKED: 1.3}
TOLERANCE = 1e-4
"""The largest difference of float32 gradients, as a share of the largest element."""
CALIBRATIONS = 3
END_S = 60.0
SECONDS, PROCESSOR_SECONDS = 2, 3
"""Where they are in what is noted of an op: kind, micro-batch and these."""
Steps = list[list[dict[str, Any]]]
"""Answers of each stage, for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the model and of a step."""

    hidden: int = 256
    intermediate: int = 768
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 1024
    micro_batch_tokens: int = 512
    micro_batches: int = 16
    """About: so many times the budget are all rows together."""


QUICK = Size(hidden=64, intermediate=128, layers=4, heads=2, kv_heads=1, micro_batch_tokens=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """One arm."""

    name: str
    stages: bool = True
    blocking: bool = False
    """Zero-bubble's order, and sends that wait."""
    layout: str = "packed"


ARMS = {
    COMPUTE: (How(name="one process", stages=False), How(name="stages")),
    SLOW: (How(name="blocking", blocking=True), How(name="ready")),
    PACKED: (
        How(name="padded", layout="padded"),
        How(name="packed"),
        How(name="refilled", layout="refilled"),
    ),
}
"""Arms of each part: the one compared with, the one of a run, and what else is measured."""


def new_model(size: Size) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=4 * size.micro_batch_tokens,
            tie_word_embeddings=False,
        )
    )


def samples_of(part: str, size: Size) -> list[TrainSample]:
    """`packed`: lognormal lengths, the longest twice the budget. Else from a fifth to four fifths
    of it, so that micro-batches are about full."""
    draw = random.Random(part)
    budget = size.micro_batch_tokens
    wanted = budget * size.micro_batches * 0.95
    lengths = [2 * budget] if part == PACKED else []
    while sum(lengths) < wanted:
        length = draw.uniform(budget / 5, budget * 4 / 5)
        if part == PACKED:
            length = draw.lognormvariate(math.log(budget / 4), 0.8)
        lengths.append(max(min(round(length), 2 * budget), budget // 16))
    return [_sample(number, length, size, draw) for number, length in enumerate(lengths)]


def _sample(number: int, length: int, size: Size, draw: random.Random) -> TrainSample:
    """One whose `row_length` is `length`; an eighth of it is the prompt."""
    tokens = [draw.randrange(size.vocabulary) for _ in range(length + 1)]
    prompt = max(length // 8, 1)
    return TrainSample(
        sample=SampleId(PromptId("train", 0, number), 0, 0),
        prompt_tokens=tuple(tokens[:prompt]),
        response_tokens=tuple(tokens[prompt:]),
        rollout_log_probs=(-math.log(size.vocabulary),) * (length + 1 - prompt),
        advantage=draw.choice((-1.0, 1.0)),
        token_weight=1 / (size.micro_batch_tokens * size.micro_batches),
    )


def num_tokens(samples: Sequence[TrainSample]) -> int:
    """Real ones that go through the model."""
    return sum(len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in samples)


# -- what the arms differ in -----------------------------------------------------------------------


class ShapedBatcher:
    """A `Batcher` whose micro-batches may be padded to one shape."""

    def __init__(self, inner: Batcher) -> None:
        self._inner = inner
        self.attention, self.filler = inner.attention, inner.filler
        self.layout = "packed"
        self._width = 0
        self.shapes: list[int] = []
        """Tokens of each micro-batch of the last step, padding included."""

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        self.shapes = []
        if self.layout == "refilled":
            plan = plan_packs(lengths, max(lengths))
        else:
            plan = self._inner.plan(lengths)
        self._width = max(sum(lengths[place] for place in places) for places in plan)
        return plan

    def batch(self, rows: Sequence[Row]) -> MicroBatch:
        """The padding is a row of its own, which no other looks at."""
        made = self._inner.batch(rows)
        missing = self._width - made.num_tokens
        if self.layout != "packed" and missing:
            packed = PackedRows([*made.model_inputs[ROWS_KEYWORD].lengths, missing], CPU)
            padding = torch.zeros((1, missing), dtype=torch.int64)
            made = dataclasses.replace(
                made,
                input_ids=torch.cat([made.input_ids, padding], dim=1),
                model_inputs={"position_ids": packed.position_ids(), ROWS_KEYWORD: packed},
            )
        self.shapes.append(made.input_ids.numel())
        return made


class ShapedStage(Stage):
    """A stage with such a batcher."""

    batcher: ShapedBatcher

    def passes(self, models: ModelSet, batcher: Batcher, *others: Any) -> StagedPasses:
        self.batcher = ShapedBatcher(batcher)
        return super().passes(models, self.batcher, *others)  # type: ignore[arg-type]


class BlockingSender:
    """Meets `Sender` with a host link's. While `is_blocking`, `send` returns when the other stage
    has the message."""

    def __init__(self, inner: Sender) -> None:
        self._inner = inner
        self.is_blocking = False
        self.waited_s: list[float] = []

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        self._inner.times()
        self._inner.send(number, tensor, posted_s=posted_s)
        while self.is_blocking:
            for times in self._inner.times():
                if times.number == number:
                    self.waited_s.append(times.acknowledged_s - times.posted_s)
                    return
            time.sleep(0.0005)

    def times(self) -> list[SendTimes]:
        return self._inner.times()

    def close(self) -> None:
        self._inner.close()


class ZeroBubble:
    """The zero-bubble order, for a sweep whose micro-batches come at once."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._order = FixedOrder()

    def add(self, loads: Sequence[Load]) -> None:
        self._order.extend(plan_zero_bubble(_even(len(loads)))[self._stage])

    def choose(self, state: StageState) -> Op | None:
        return self._order.choose(state)


Ops = list[tuple[str, int, float, float]]
"""Kind, micro-batch, seconds and processor seconds (of the process: its links' threads, too)."""


def note_ops(found: Ops) -> None:
    """From now on, of all sweeps with gradients of this process."""
    for name, kind in (("forward", "F"), ("backward", "I"), ("weights", "W")):
        setattr(_Training, name, _noted(getattr(_Training, name), kind, found))


def _noted(run_op: Callable[..., Any], kind: str, found: Ops) -> Callable[..., Any]:
    def run_and_note(ops: _Training, micro_batch: int, *arrived: Tensor | None) -> Any:
        started, processor = time.perf_counter(), time.process_time()
        given = run_op(ops, micro_batch, *arrived)
        took = time.perf_counter() - started, time.process_time() - processor
        found.append((kind, micro_batch, *took))
        return given

    return run_and_note


# -- a stage's process -----------------------------------------------------------------------------


class StageProcess:
    """One process: it takes steps of the arms that it is asked for, one line each."""

    def __init__(self, size: Size, host: str) -> None:
        self._samples = {part: samples_of(part, size) for part in ARMS}
        self._connected = Connected(
            [list(range(NUM_STAGES))], kind="host", device=CPU, hosts=[host], timeout_s=600.0
        )
        place = self._connected.place
        to = self._connected.to_next or self._connected.to_previous
        assert to is not None
        self._sender = BlockingSender(to)
        self._connected.executor.connect(
            None if place.is_last else self._sender, None if place.is_first else self._sender
        )
        self._ops: Ops = []
        note_ops(self._ops)
        self._how = ARMS[COMPUTE][0]
        self._stage = ShapedStage(
            place,
            peers=GroupPeers(dist.group.WORLD),
            executor=self._connected.executor,
            new_chooser=self._chooser,
        )
        self._staged = _learner(size, self._stage)
        self._whole = _learner(size, None) if place.is_first else None

    def _chooser(self, *_measured: object) -> SweepChooser:
        place = self._connected.place
        if self._how.blocking:
            return ZeroBubble(place.index)
        return Ready(place, PipelineConfig(stages=NUM_STAGES))

    def step(self, part: str, how: How, gradients: Path | None) -> dict[str, Any]:
        """Leaves the gradient at this path."""
        self._how = how
        self._stage.batcher.layout = how.layout
        self._sender.is_blocking = how.blocking
        self._sender.waited_s = []
        learner = self._staged if how.stages else self._whole
        assert learner is not None
        if how.stages:
            dist.barrier()
        self._ops.clear()
        started, processor = time.perf_counter(), time.process_time()
        learner.accumulate(self._samples[part])
        gradient = learner.gradients()
        answer = {
            "seconds": time.perf_counter() - started,
            "processor_s": time.process_time() - processor,
            "ops": list(self._ops),
            "shapes": self._stage.batcher.shapes if how.stages else [],
            "waited_s": self._sender.waited_s,
            "parameters": sum(p.numel() for p in learner.model.parameters()),
        }
        if gradients is not None:
            torch.save(gradient, gradients)
        learner.discard()
        return answer

    def close(self) -> None:
        dist.barrier()
        self._connected.close()


def _even(num_micro_batches: int) -> Work:
    same = [1.0] * NUM_STAGES
    return Work.even(num_micro_batches, f_s=same, i_s=same, w_s=same)


def _learner(size: Size, stage: Stage | None) -> Learner:
    return Learner(
        model=new_model(size),
        tokenizer=None,
        pad_token_id=0,
        config=TrainConfig(
            steps=1, micro_batch_tokens=size.micro_batch_tokens, micro_batches="packed"
        ),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        total_steps=1,
        stage=stage,
    )


def stage_main(rank: int, size: Size, host: str, folder: Path) -> None:
    """Commands come as lines of JSON, and answers go where standard output went: what libraries
    print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    store = dist.FileStore(str(folder / "store"), NUM_STAGES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_STAGES)
    own = StageProcess(size, host)
    for line in sys.stdin:
        part, name, gradients = json.loads(line)
        how = next(how for how in ARMS[part] if how.name == name)
        answer = own.step(part, how, None if gradients is None else Path(gradients))
        print(json.dumps(answer), file=answers, flush=True)
    own.close()
    dist.destroy_process_group()


class Stages:
    """The two processes; `network`: each in a namespace of its own."""

    def __init__(self, size: Size, folder: Path, network: Network | None = None) -> None:
        self._folder = folder
        self._processes = []
        for rank in range(NUM_STAGES):
            host = LOOPBACK if network is None else network.addresses[rank]
            given = json.dumps([rank, dataclasses.asdict(size), host])
            command = [sys.executable, __file__, "--as-stage", given, "--folder", str(folder)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            if network is None:
                process = subprocess.Popen(command, env=environment, **pipes)
            else:
                environment["GLOO_SOCKET_IFNAME"] = "eth0"
                process = network.popen(rank, command, env=environment, **pipes)
            self._processes.append(process)

    def step(self, part: str, how: How, gradients: bool = False) -> list[dict[str, Any]]:
        """Take a step, and return each stage's answer; of one process, the first alone."""
        taking_part = self._processes if how.stages else self._processes[:1]
        for rank, process in enumerate(taking_part):
            path = str(self._gradients(rank)) if gradients else None
            assert process.stdin is not None
            print(json.dumps([part, how.name, path]), file=process.stdin, flush=True)
        return [self._answer(process) for process in taking_part]

    def gradient(self, part: str, how: How) -> dict[str, Tensor]:
        """The gradient of all stages, by an untimed step."""
        whole: dict[str, Tensor] = {}
        for rank in range(len(self.step(part, how, gradients=True))):
            whole |= torch.load(self._gradients(rank), weights_only=True)
        return whole

    def _gradients(self, rank: int) -> Path:
        return self._folder / f"{rank}.pt"

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a stage failed; its messages stand above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(END_S)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def stages_of(size: Size, network: Network | None = None) -> Iterator[Stages]:
    with tempfile.TemporaryDirectory() as folder:
        stages = Stages(size, Path(folder), network)
        try:
            yield stages
            stages.close()
        finally:
            stages.kill()


# -- the parts -------------------------------------------------------------------------------------


def check_gradients(stages: Stages, part: str) -> float:
    """The largest difference between two arms, as a share of the largest element."""
    first, *others = [stages.gradient(part, how) for how in ARMS[part]]
    largest = max(gradient.abs().max().item() for gradient in first.values())
    difference = 0.0
    for other in others:
        assert first.keys() == other.keys()
        difference = max(difference, *((first[n] - other[n]).abs().max().item() for n in first))
    assert difference <= TOLERANCE * largest, f"gradients differ by {difference} of {largest}"
    return difference / largest


def in_turn(stages: Stages, part: str, pairs: int) -> dict[str, Steps]:
    """Take `pairs` steps of each arm, and return the answers by arm."""
    found: dict[str, Steps] = {how.name: [] for how in ARMS[part]}
    for _ in range(pairs):
        for how in ARMS[part]:
            found[how.name].append(stages.step(part, how))
    return found


def work_of(steps: Steps, column: int) -> Work:
    """A sweep of the medians of each op's `SECONDS` or `PROCESSOR_SECONDS`."""
    tables: dict[str, list[tuple[float, ...]]] = {}
    for kind in "FIW":
        tables[kind] = []
        for stage in range(NUM_STAGES):
            seconds: dict[int, list[float]] = {}
            for step in steps:
                for op in step[stage]["ops"]:
                    if op[0] == kind:
                        seconds.setdefault(op[1], []).append(op[column])
            tables[kind].append(tuple(statistics.median(seconds[m]) for m in sorted(seconds)))
    shapes = tuple(steps[0][0]["shapes"])
    f_s, i_s, w_s = (tuple(tables[kind]) for kind in "FIW")
    return Work(f_s=f_s, i_s=i_s, w_s=w_s, tokens=shapes, message_bytes=shapes)


def work_s(work: Work) -> float:
    """F + I + W of a micro-batch on a stage, on average."""
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    return math.fsum(statistics.fmean(work.mean_s(kind)) for kind in kinds)


def virtual_s(part: str, how: How, work: Work) -> float:
    """The arm's sweep. A message has as many bytes as the micro-batch has tokens."""
    link = Link()
    if part == SLOW:
        link = Link(bytes_per_s=statistics.fmean(work.tokens) / (LINK_SHARE * work_s(work)))
    if how.blocking:
        orders = plan_zero_bubble(_even(work.num_micro_batches))
        return replay(orders, work, constant([link]), sends="paired").makespan_s
    longest = max(work.tokens)
    caps = [2 * (NUM_STAGES - stage) * longest for stage in range(NUM_STAGES)]
    return run(ready_choosers(NUM_STAGES, caps=caps), work, constant([link])).makespan_s


def besides_ops_s(steps: Steps) -> float:
    """Processor seconds of a step that no op takes: planning, packing, losses' sums, links."""
    return statistics.median(
        max(a["processor_s"] - math.fsum(op[PROCESSOR_SECONDS] for op in a["ops"]) for a in step)
        for step in steps
    )


def of_arm(part: str, how: How, steps: Steps, tokens: int) -> dict[str, Any]:
    """The numbers of one arm, for the result."""
    seconds = [max(answer["seconds"] for answer in step) for step in steps]
    step_s = statistics.median(seconds)
    found = {"step_s": round(step_s, 4), "tokens_per_s": round(tokens / step_s, 1)}
    if not how.stages:
        by_processor_s = statistics.median(step[0]["processor_s"] for step in steps)
        return found | {"by_processor_s": by_processor_s, "steps_s": seconds}
    work = work_of(steps, SECONDS)
    kinds: tuple[Kind, ...] = ("F", "I", "W")
    found |= {
        f"{kind}_ms": [round(1e3 * statistics.fmean(row), 2) for row in work.table(kind)]
        for kind in kinds
    }
    return found | {
        "besides_ops_s": besides_ops_s(steps),
        "by_processor_s": besides_ops_s(steps)
        + virtual_s(part, how, work_of(steps, PROCESSOR_SECONDS)),
        "parameters": [answer["parameters"] for answer in steps[0]],
        "micro_batches": steps[0][0]["shapes"],
        "steps_s": seconds,
    }


def measured(stages: Stages, part: str, size: Size, pairs: int, network: Any) -> dict[str, Any]:
    """One part's numbers."""
    more = {"gradient_difference": check_gradients(stages, part)}
    if network is not None:
        more["mbit_per_s"] = slowed(stages, part, size, network)
    found = in_turn(stages, part, pairs)
    tokens = num_tokens(samples_of(part, size))
    arms = {how.name: of_arm(part, how, found[how.name], tokens) for how in ARMS[part]}
    against, own, *_ = (arms[how.name] for how in ARMS[part])
    if network is not None:
        blocking, ready = (found[how.name] for how in ARMS[part])
        message_s = statistics.fmean(waited_s(blocking))
        more["message_ms"] = 1e3 * message_s
        more["message_over_work"] = message_s / work_s(work_of(ready, SECONDS))
    return {
        "tokens": tokens,
        "arms": arms,
        "ratio": against["step_s"] / own["step_s"],
        "ratio_by_processor_time": against["by_processor_s"] / own["by_processor_s"],
        **more,
    }


def waited_s(steps: Steps) -> list[float]:
    return [seconds for step in steps for answer in step for seconds in answer["waited_s"]]


def slowed(stages: Stages, part: str, size: Size, network: Network) -> float:
    """Hold the link to so many Mbit/s that its messages take their share, and return them."""
    blocking, ready = ARMS[part]
    work = work_of([stages.step(part, ready) for _ in range(3)], SECONDS)
    wanted_s = LINK_SHARE * work_s(work)
    mbit = 8e-6 * 4 * size.hidden * statistics.fmean(work.tokens) / wanted_s
    for calibration in range(CALIBRATIONS + 1):
        for host in range(NUM_STAGES):
            network.slow(host, mbit)
        if calibration < CALIBRATIONS:  # packets have heads, and the first ones need not wait
            steps = {how.name: [stages.step(part, how) for _ in range(2)] for how in ARMS[part]}
            wanted_s = LINK_SHARE * work_s(work_of(steps[ready.name], SECONDS))
            mbit *= statistics.fmean(waited_s(steps[blocking.name])) / wanted_s
    return mbit


def main(
    arms: Sequence[str] = tuple(MARKS),
    pairs: int = 7,
    micro_batches: int = 16,
    quick: bool = False,
    as_stage: str | None = None,
    folder: Path = Path(),
) -> dict[str, Any] | None:
    """`pairs`: steps of each arm, of about so many `micro_batches`. `as_stage`: be one."""
    if as_stage:
        rank, size, host = json.loads(as_stage)
        stage_main(rank, Size(**size), host, folder)
        return None
    own = dataclasses.replace(QUICK if quick else Size(), micro_batches=micro_batches)
    if SLOW in arms and (why := why_impossible()) is not None:
        raise SystemExit(f"--arms {SLOW} is not possible here: {why}")
    parts: dict[str, Any] = {}
    if on_loopback := [part for part in arms if part != SLOW]:
        with stages_of(own) as stages:
            for part in on_loopback:
                parts[part] = measured(stages, part, own, pairs, None)
    if SLOW in arms:
        with Network(NUM_STAGES) as network, stages_of(own, network) as stages:
            parts[SLOW] = measured(stages, SLOW, own, pairs, network)
    return {"size": dataclasses.asdict(own), "parts": parts}


def holds(found: Mapping[str, Any]) -> bool:
    """Each ratio reaches its mark, and the slow link was as slow as it should be."""
    low, high = LINK_SHARES
    return all(
        part["ratio"] >= MARKS[name] and low <= part.get("message_over_work", LINK_SHARE) <= high
        for name, part in found["parts"].items()
    )


if __name__ == "__main__":
    bench(main, holds=holds, arms=MARKS)
