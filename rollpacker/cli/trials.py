"""Tries things out for `rollpacker doctor`: the sandbox, the engine, and the model and data of a
config. Heavy imports stand inside functions."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollpacker.cli import findings
from rollpacker.cli.findings import GIB, Finding

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.sandbox.sandbox import Capabilities, SandboxConfig
    from rollpacker.trackers.tracker import TrackerConfig


def sandbox(config: SandboxConfig, *, needed: bool) -> Finding:
    """Finding on whether this machine can isolate untrusted programs. If it cannot, that is a
    failure if isolation is `needed`, else a warning."""
    import asyncio

    from rollpacker.sandbox.sandbox import SandboxUnavailable

    remote = config.backend == "http" or (config.backend == "auto" and config.url is not None)
    try:
        seen = asyncio.run(_self_test(config, "http" if remote else "bwrap"))
    except SandboxUnavailable as error:
        must = needed and config.allow_unsandboxed_code is None
        text, is_long, rest = str(error).partition("\n")
        if not is_long:
            text, _, rest = text.partition(". ")
        cure = " ".join(rest.split()) or "See docs/sandbox.md."
        return Finding("fail" if must else "warn", "sandbox", text.rstrip("."), cure)
    details = dataclasses.asdict(seen)
    if seen.failed:
        text = f"not contained: {', '.join(seen.failed)}"
        cure = "Run it once more; if the line stays, please report it."
        if remote:
            cure = "Mend the service's isolation, or use the embedded sandbox (no sandbox.url)."
        return Finding("warn", "sandbox", text, cure, details)
    text = (
        f"contains {len(seen.passed)} of {len(seen.passed)} attacks ({', '.join(seen.passed)});"
        f" memory: {seen.memory}; profiles: {', '.join(seen.profiles)}; {seen.seconds:.1f} s"
    )
    return Finding("ok", "sandbox", text, details=details)


async def _self_test(config: SandboxConfig, backend: str) -> Capabilities:
    """Returns the capabilities of the sandbox by a self-test made now. (Opening the embedded
    sandbox may go by the remembered result of an earlier test.)"""
    from rollpacker.sandbox import open_sandbox
    from rollpacker.sandbox.selftest import self_test

    async with open_sandbox(
        backend,
        workers=1,
        url=config.url if backend == "http" else None,
        token_env=config.token_env if backend == "http" else None,
        memory_bytes=config.memory_mb << 20,
        disk_bytes=config.disk_mb << 20,
        output_bytes=config.output_kb << 10,
    ) as box:
        from rollpacker.rewards.math.math_reward import PROFILE

        usable = () if await box.lacks(PROFILE) else (PROFILE.name,)
        profiles = (*box.capabilities.profiles, *usable)
        if backend == "http":
            return dataclasses.replace(box.capabilities, profiles=profiles)
        began = time.perf_counter()
        passed, failed = await self_test(box, backend=backend)
        seconds = time.perf_counter() - began
        return dataclasses.replace(
            box.capabilities, passed=passed, failed=failed, profiles=profiles, seconds=seconds
        )


def engine() -> Finding:
    """Finding on whether the engine generates tokens of a tiny random model, on a run's device."""
    import asyncio

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollpacker.core.ids import PromptId, SampleId
    from rollpacker.engines.collect import collect
    from rollpacker.engines.embedded.attention import install_attention
    from rollpacker.engines.embedded.engine import TorchEngine
    from rollpacker.engines.engine import EngineConfig, GenerationRequest, SamplingParams

    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    shaped = AutoConfig.for_model("qwen2", **shape, **heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tiny = AutoModelForCausalLM.from_config(shaped)  # type: ignore[no-untyped-call]  # no types
    install_attention(tiny.to(device, dtype).eval())
    prompt, sampling = PromptId("doctor", 0, 0), SamplingParams(max_response_tokens=16)
    facts: dict[str, Any] = {"prompt_tokens": (1, 2, 3), "sampling": sampling, "forced_length": 16}
    requests = [GenerationRequest(sample=SampleId(prompt, n, 0), **facts) for n in range(4)]

    async def decode() -> list[Any]:
        slots = TorchEngine(model=tiny, tokenizer=None, config=EngineConfig(max_slots=4))
        try:
            return list(await collect(slots, requests))
        finally:
            await slots.close()

    responses = asyncio.run(decode())
    tokens = sum(len(response.tokens) for response in responses)
    if tokens != 64 or not all(x <= 0 for response in responses for x in response.log_probs):
        cure = "Try model.device=cpu; please report this line if that does not fail."
        return Finding("fail", "engine", f"wrong tokens from a tiny model on {device}", cure)
    seconds = time.perf_counter() - began
    text = f"decoded {tokens} tokens of a tiny model on {device.type} in {seconds:.2f} s"
    return Finding("ok", "engine", text)


def model(config: RunConfig) -> list[Finding]:
    """Findings on whether the model's files are complete, its tokenizer loads, and as much memory
    is free as a step needs. Raises what a run's start would raise."""
    from rollpacker.run.parts.hub import look_for_hub
    from rollpacker.trainer.model import (
        check_weights,
        context_tokens,
        load_tokenizer,
        model_device,
    )

    path = config.model.path
    if config.warmup is not None and not Path(path).expanduser().exists():
        cure = f"rollpacker train makes it first; or now: rollpacker warmup {config.warmup}"
        return [Finding("warn", "model", f"{path} is not there yet", cure)]
    look_for_hub(config)
    tokenizer = load_tokenizer(path)
    model_device(config.model.device)
    check_weights(path)
    text = f"{path}: {len(tokenizer)} tokens, context {context_tokens(path) or 'not stated'}"
    return [Finding("ok", "model", text), *fit(config)]


def fit(config: RunConfig) -> list[Finding]:
    """Finding on whether the memory estimated for a step is free. Empty: no estimate."""
    import torch

    from rollpacker.trainer.estimate import estimate

    known = estimate(config)
    needed = known.total_bytes
    if not needed:
        return []
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    there = torch.cuda.mem_get_info()[0] if on_gpu else findings.memory().details["free_bytes"]
    kind = "the GPU" if on_gpu else "memory"
    text = f"a step needs about {needed / GIB:.1f} GiB of {kind}, {there / GIB:.1f} are free"
    largest = max(known.ranks, key=lambda rank: rank.size_bytes, default=known.memory)
    if known.sweep is not None and (needed > there or (on_gpu and largest.size_bytes > there)):
        text += (
            f"; of the pipeline's, {largest.name} takes the most, about "
            f"{largest.size_bytes / GIB:.1f} GiB in each process"
        )
        cure = "Lower train.pipeline.live_tokens or train.micro_batch_tokens, or add processes."
        return [Finding("warn", "memory fit", text, cure)]
    if needed <= there:
        return [Finding("ok", "memory fit", text)]
    cure = (
        "Lower rollout.engine.kv_cache_gib or train.micro_batch_tokens, or set"
        " model.gradient_checkpointing=true."
    )
    return [Finding("warn", "memory fit", text, cure)]


def run_folder(config: RunConfig) -> list[Finding]:
    """Finding on what keeps the run from starting, such as an older run of its name, if any."""
    from rollpacker.run.errors import RunError
    from rollpacker.run.folder.run_folder import RunFolder

    path = Path(config.runs_dir).expanduser() / config.name
    try:
        if path.exists():
            RunFolder(path, resume=False, overwrite=False).close()
    except RunError as error:
        level: Literal["fail", "warn"] = "warn" if "already holds a run" in str(error) else "fail"
        return [Finding(level, "run", str(error), "Choose one of these.")]
    return []


def training(config: RunConfig) -> Finding:
    """Checks a config's learning-rate schedule, algorithm, pipeline stages, rewards, adapter and
    further models. Returns a finding that they are right and names the algorithm. Raises
    `ValueError` and the like, as a run's start does."""
    from rollpacker.cli.dry_run import check_parts
    from rollpacker.trainer.model import load_tokenizer
    from rollpacker.trainer.schedule import check_schedule

    check_schedule(config.train)
    check_parts(config)
    if config.algorithm.needs_teacher and config.model.teacher is not None:
        load_tokenizer(config.model.teacher, setting="model.teacher")
    if config.algorithm.needs_critic and config.train.critic.path is not None:
        load_tokenizer(config.train.critic.path, setting="train.critic.path")
    _try_adapter(config)
    return Finding("ok", "algorithm", config.algorithm.told)


def _try_adapter(config: RunConfig) -> None:
    """Try to add the adapter (LoRA) to the model, without loading weights. Raises `ValueError` if
    it does not fit the model."""
    if config.model.lora is None or not (Path(config.model.path) / "config.json").is_file():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    from rollpacker.trainer.lora import add_adapter

    shape = AutoConfig.from_pretrained(config.model.path)
    with torch.device("meta"):
        model: PreTrainedModel
        model = AutoModelForCausalLM.from_config(shape)  # type: ignore[no-untyped-call]  # no types
        add_adapter(model, config.model.lora)


def inputs(config: RunConfig) -> list[Finding]:
    """Findings on data and rewards. As at a run's start, every row becomes a prompt, and every
    reward looks at the rows and is tried out. Raises what a run's start would raise."""
    from rollpacker.run.parts.policy import load_inputs
    from rollpacker.trainer.model import ModelError

    try:
        loaded = load_inputs(config)
    except ModelError:
        return [Finding("warn", "data", "not looked at, without a tokenizer", "Mend the model.")]
    found = []
    for name, prompts in loaded.prompt_sets.items():
        first, *more = prompts.told
        found.append(Finding("ok", f"data.{name}", "\n".join((first.partition(": ")[2], *more))))
    if not loaded.doubts:
        tried = ", ".join(loaded.reward.names)
        return [*found, Finding("ok", "rewards", f"{tried}: each has looked at the rows")]
    cure = "A run starts all the same; docs/rewards.md (Tried out) says what these mean."
    return [*found, Finding("warn", "rewards", "\n".join(loaded.doubts), cure)]


def tracker(config: TrackerConfig) -> Finding:
    """Finding on whether a tracker can be used: at worst a warning, as a run goes on without it."""
    from rollpacker.trackers.by_name import make_tracker
    from rollpacker.trackers.sending import TrackerProblem

    made = make_tracker(config)
    lacking = made.missing()
    try:
        if lacking is None:
            return Finding("ok", config.name, made.check())
    except TrackerProblem as problem:
        lacking = str(problem)
    text, _, cure = lacking.partition(": ")
    return Finding("warn", config.name, f"{text}; a run goes on without it", cure)


def cluster(config: RunConfig) -> list[Finding]:
    """Findings on a cluster's hosts, their versions and memory, and whether the engines and trainer
    of `config` fit there. Joins the cluster for that (if there is none, starts one on this
    machine), and leaves it again. Raises `ValueError` if it cannot be joined or a host does not
    answer."""
    from rollpacker.run.parts.cluster_facts import join_cluster, rooms_of
    from rollpacker.run.parts.hosts import SHM_BYTES
    from rollpacker.run.parts.placement import plan_of
    from rollpacker.workers.hosts.facts import differences

    joined = join_cluster()
    try:
        facts = {address: joined.facts(address) for address in joined.nodes}
        found = []
        for address, one in facts.items():
            text = (
                f"{address} ({one.name}): {one.num_cores} cores, {len(one.gpu_bytes)} GPUs, "
                f"{one.memory_bytes / GIB:.0f} GiB, {one.shm_bytes / GIB:.1f} GiB free in /dev/shm"
            )
            cure = f"Let /dev/shm there have {SHM_BYTES >> 20} MiB (in a container: --shm-size)."
            is_low = one.shm_bytes < SHM_BYTES
            found.append(
                Finding("fail", "host", text, cure) if is_low else Finding("ok", "host", text)
            )
        cure = "Install the same versions on every host."
        found += [Finding("fail", "versions", one, cure) for one in differences(facts)]
        text = "ray listens on every interface of a host and refuses who has no token"
        cure = "Let a firewall keep all but these hosts out."
        is_one = len(facts) == 1
        found.append(
            Finding("ok", "ports", text) if is_one else Finding("warn", "ports", text, cure)
        )
        plan = plan_of(config, rooms_of(joined, facts))
        counts = ", ".join(f"{len(plan.of(role))} of {role}" for role in ("rollout", "train"))
        return [*found, Finding("ok", "placement", f"{counts}: train --dry-run shows where")]
    finally:
        joined.close()
