"""What `rollpacker doctor` tries out: the sandbox, the engine, and a config's model and data.

Heavy imports stand inside functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollpacker.cli import findings
from rollpacker.cli.findings import GIB, Finding
from rollpacker.imports import MissingPackageError

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.sandbox.sandbox import Capabilities, SandboxConfig


_READ = "See docs/sandbox.md."


def sandbox(config: SandboxConfig, *, needed: bool) -> list[Finding]:
    """Whether untrusted programs can be isolated. Missing is a failure only if it is needed."""
    import asyncio

    must = needed and config.allow_unsandboxed_code is None
    level: Literal["fail", "warn"] = "fail" if must else "warn"
    remote = config.backend == "http" or (config.backend == "auto" and config.url is not None)
    found = []
    if not remote:
        found = _bubblewrap()
        if found[-1].level != "ok":
            return [*found[:-1], dataclasses.replace(found[-1], level=level)]
    from rollpacker.sandbox.sandbox import SandboxUnavailable

    try:
        seen = asyncio.run(_self_test(config, "http" if remote else "bwrap"))
    except SandboxUnavailable as error:
        first, line_break, rest = str(error).partition("\n")
        text, _, cure = (first, "", rest) if line_break else first.partition(". ")
        return [
            *found,
            Finding(level, "sandbox", text.rstrip("."), " ".join(cure.split()) or _READ),
        ]
    if seen.failed:
        text = f"not contained: {', '.join(seen.failed)}"
        cure = "Run it once more; if the line stays, please report it."
        if remote:
            cure = "Mend the service's isolation, or use the embedded sandbox (no sandbox.url)."
        return [*found, Finding("warn", "sandbox", text, cure, dataclasses.asdict(seen))]
    text = (
        f"contains {len(seen.passed)} of {len(seen.passed)} attacks ({', '.join(seen.passed)});"
        f" memory: {seen.memory}; profiles: {', '.join(seen.profiles)}; {seen.seconds:.1f} s"
    )
    return [*found, Finding("ok", "sandbox", text, details=dataclasses.asdict(seen))]


async def _self_test(config: SandboxConfig, backend: str) -> Capabilities:
    """What the sandbox is seen to enforce now. Opening the embedded one may go by what is
    remembered of an earlier test."""
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


def _bubblewrap() -> list[Finding]:
    if sys.platform != "linux":
        cure = "Set sandbox.url to a service such as SandboxFusion."
        return [Finding("warn", "sandbox", "the embedded one needs Linux", cure)]
    where = shutil.which("bwrap")
    if where is None:
        cure = "Install it (make sandbox, or apt-get install bubblewrap), or set sandbox.url."
        return [Finding("warn", "bubblewrap", "not installed: no code or math rewards", cure)]
    version = _output(["bwrap", "--version"])[1]
    found = [Finding("ok", "bubblewrap", f"{version.removeprefix('bubblewrap ')} ({where})")]
    code, said = _output(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
    if code == 0:
        return [*found, Finding("ok", "namespaces", "user namespaces can be made")]
    return [*found, Finding("warn", "namespaces", f"refused: {said}", _namespaces_cure())]


def _namespaces_cure() -> str:
    """What keeps this user from making namespaces, as far as the kernel says."""
    for name, bad, cure in (
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or add an AppArmor profile for"
            " bwrap that allows userns",
        ),
    ):
        with contextlib.suppress(OSError):
            if Path("/proc/sys", name).read_text().strip() == bad:
                return f"As root: {cure}; or set sandbox.url."
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "Start the container with --security-opt seccomp=unconfined --security-opt"
            " systempaths=unconfined (or a profile that allows user namespaces), or set"
            " sandbox.url."
        )
    return "Allow user namespaces (unshare -Ur true must work for this user), or set sandbox.url."


def _output(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout or done.stderr).strip()


def engine() -> Finding:
    """A few tokens of a tiny random model, by the real engine on the device that runs take."""
    import asyncio

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollpacker.core.ids import PromptId, SampleId
    from rollpacker.rollout.attention import install_attention
    from rollpacker.rollout.collect import collect
    from rollpacker.rollout.engine import EngineConfig, GenerationRequest, SamplingParams
    from rollpacker.rollout.torch_engine import TorchEngine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = AutoConfig.for_model("qwen2", **shape, **heads)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tiny = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # no types
    tiny = tiny.to(device, dtype).eval()
    install_attention(tiny)
    requests = [
        GenerationRequest(
            sample=SampleId(PromptId("doctor", 0, 0), index, 0),
            prompt_tokens=(1, 2, 3),
            sampling=SamplingParams(max_response_tokens=16),
            forced_length=16,
        )
        for index in range(4)
    ]

    async def decode() -> list[Any]:
        slots = TorchEngine(model=tiny, tokenizer=None, config=EngineConfig(max_slots=4))
        try:
            return list(await collect(slots, requests))
        finally:
            await slots.close()

    began = time.perf_counter()
    responses = asyncio.run(decode())
    seconds = time.perf_counter() - began
    tokens = sum(len(response.tokens) for response in responses)
    if tokens != 64 or not all(x <= 0 for response in responses for x in response.log_probs):
        cure = "Try model.device=cpu; please report this line if that does not fail."
        return Finding("fail", "engine", f"wrong tokens from a tiny model on {device}", cure)
    text = f"decoded {tokens} tokens of a tiny model on {device.type} in {seconds:.2f} s"
    return Finding("ok", "engine", text)


def model(config: RunConfig) -> Finding:
    """The folder is whole, and its tokenizer loads."""
    from rollpacker.cli.hub import HubError, look_for_hub
    from rollpacker.trainer.model import (
        ModelError,
        check_weights,
        context_tokens,
        load_tokenizer,
        model_device,
    )

    path = config.model.path
    if config.warmup is not None and not Path(path).expanduser().exists():
        cure = f"rollpacker train makes it first; or now: rollpacker warmup {config.warmup}"
        return Finding("warn", "model", f"{path} is not there yet", cure)
    try:
        look_for_hub(config)
        tokenizer = load_tokenizer(path)
    except (ModelError, HubError) as error:
        cure = "Set model.path to a Hugging Face folder, or a name on the hub (network needed)."
        return Finding("fail", "model", str(error), cure)
    try:
        model_device(config.model.device)
        check_weights(path)
    except ModelError as error:
        return Finding("fail", "model", str(error), "Correct model.path or model.device.")
    text = f"{path}: {len(tokenizer)} tokens, context {context_tokens(path) or 'not stated'}"
    return Finding("ok", "model", text)


def run_folder(config: RunConfig) -> list[Finding]:
    """Whether a run of this name is there already. Only what is in the way is found."""
    from rollpacker.controller.errors import RunError
    from rollpacker.controller.run_folder import RunFolder

    path = Path(config.runs_dir).expanduser() / config.name
    if not path.exists():
        return []
    try:
        RunFolder(path, resume=False, overwrite=False).close()
    except RunError as error:
        level: Literal["fail", "warn"] = "warn" if "already holds a run" in str(error) else "fail"
        return [Finding(level, "run", str(error), "Choose one of these.")]
    return []


def training(config: RunConfig) -> list[Finding]:
    """What the algorithm comes to; the schedule is one, adapters fit the model, and the further
    models that the algorithm asks are there."""
    from rollpacker.cli.parts import check_algorithm
    from rollpacker.trainer.model import load_tokenizer
    from rollpacker.trainer.pipeline.check import check_stages
    from rollpacker.trainer.schedule import check_schedule

    further = {}
    if config.algorithm.needs_teacher and config.model.teacher is not None:
        further["model.teacher"] = config.model.teacher
    if config.algorithm.needs_critic and config.train.critic.path is not None:
        further["train.critic.path"] = config.train.critic.path
    try:
        check_schedule(config.train)
        check_algorithm(config)
        check_stages(config)
        for setting, path in further.items():
            load_tokenizer(path, setting=setting)
        _try_adapter(config)
    except MissingPackageError:
        raise
    except ValueError as error:
        return [Finding("fail", "training", str(error), "Correct the config.")]
    return [Finding("ok", "algorithm", config.algorithm.told)]


def _try_adapter(config: RunConfig) -> None:
    """Give the model its adapters, without weights. Raises `ValueError` if they do not fit."""
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
    """Data and rewards, as a run takes them up: every row becomes a prompt, every reward looks at
    the rows and is tried out."""
    from rollpacker.cli.parts import load_inputs
    from rollpacker.data.dataset import DataError
    from rollpacker.environments.environment import EnvironmentSetupError
    from rollpacker.rewards.reward import RewardError
    from rollpacker.sandbox.sandbox import SandboxUnavailable
    from rollpacker.trainer.model import ModelError

    told: list[str] = []
    try:
        loaded = load_inputs(config, tell=told.append)
    except ModelError:
        return [Finding("warn", "data", "not looked at, without a tokenizer", "Mend the model.")]
    except DataError as error:
        name = "data.train" if config.data.eval is None else "data"
        return [Finding("fail", name, str(error), f"Correct {name}.")]
    except EnvironmentSetupError as error:
        return [Finding("fail", "environment", str(error), "Correct the environment.")]
    except MissingPackageError:
        raise
    except (RewardError, SandboxUnavailable, ValueError) as error:
        found = [Finding("ok", "data", line) for line in told[:1]]
        return [*found, Finding("fail", "rewards", str(error), "Correct the reward.")]
    found = [
        Finding(
            "ok", f"data.{name}", "\n".join((_without_name(prompts.told[0]), *prompts.told[1:]))
        )
        for name, prompts in loaded.prompt_sets.items()
    ]
    tried = ", ".join(loaded.reward.names)
    if not loaded.doubts:
        return [*found, Finding("ok", "rewards", f"{tried}: each has looked at the rows")]
    cure = "A run starts all the same; docs/rewards.md (Tried out) says what these mean."
    return [*found, Finding("warn", "rewards", "\n".join(loaded.doubts), cure)]


def _without_name(line: str) -> str:
    return line.partition(": ")[2]


def fit(config: RunConfig) -> list[Finding]:
    """Whether a step's estimated memory is there."""
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
    cure = (
        "Lower rollout.engine.kv_cache_gib or train.micro_batch_tokens, or set"
        " model.gradient_checkpointing=true."
    )
    largest = None if known.stages is None else known.stages.largest
    if largest is not None and (needed > there or (on_gpu and largest.size_bytes > there)):
        text += (
            f"; of the pipeline's, stage {largest.index} takes the most, about "
            f"{largest.size_bytes / GIB:.1f} GiB in each process"
        )
        cure = "Lower train.pipeline.live_tokens or train.micro_batch_tokens, or add processes."
    elif needed <= there:
        return [Finding("ok", "memory fit", text)]
    return [Finding("warn", "memory fit", text, cure)]
