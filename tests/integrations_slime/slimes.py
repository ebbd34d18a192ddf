"""slime for the tests: its own modules from a checkout that the environment variable
SLIME_CHECKOUT names (its requirements are Megatron and SGLang, but what is used here needs aiohttp,
httpx, pybase64, pylatexenc, ray and transformers alone), else stand-ins, written for these tests
from its contract. The tokenizer is made up in both."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
import sys
import threading
import types
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = os.environ.get("SLIME_CHECKOUT", "")


class Tokenizer:
    """A token for each character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(one) for one in text]


def install() -> None:
    """Make `import slime` find one of the two, once."""
    if "slime" in sys.modules:
        return
    if CHECKOUT:
        sys.path.insert(0, CHECKOUT)
        processing = importlib.import_module("slime.utils.processing_utils")
        processing.load_tokenizer = lambda *_, **__: Tokenizer()
        processing.load_processor = lambda *_, **__: None
        return
    names = {
        "slime.backends.sglang_utils.server_control": (abort_servers_until_idle,),
        "slime.rollout.base_types": (RolloutFnTrainOutput,),
        "slime.rollout.data_source": (RolloutDataSource,),
        "slime.rollout.rm_hub": (batched_async_rm,),
        "slime.rollout.sglang_rollout": (
            GenerateState,
            generate,
            generate_and_rm,
            generate_rollout,
        ),
        "slime.utils.async_utils": (run,),
        "slime.utils.http_utils": (get, post, init_http_client),
        "slime.utils.misc": (load_function,),
        "slime.utils.types": (Sample,),
    }
    for path, found in names.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            module = sys.modules.setdefault(name, types.ModuleType(name))
            module.__path__ = []
            if length > 1:
                setattr(sys.modules[name.rpartition(".")[0]], parts[length - 1], module)
        for one in found:
            setattr(sys.modules[path], one.__name__, one)


def connect(args: Namespace) -> None:
    """Make slime's HTTP client, and have it forget the arguments of a run before this one."""
    singletons = getattr(sys.modules["slime.utils.misc"], "SingletonMeta", None)
    if singletons is not None:
        singletons._instances.clear()
    sys.modules["slime.utils.http_utils"].init_http_client(args)


# -- stand-ins -------------------------------------------------------------------------------------


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    session_id: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        return Sample(**{**data, "status": Status(data["status"])})

    def append_response_tokens(
        self, args: Any, *, tokens: Any, log_probs: Any, trainable: bool, meta_info: Any, text: str
    ) -> None:
        assert trainable and len(tokens) == len(log_probs)
        self.tokens = self.tokens + list(tokens)
        self.response_length += len(tokens)
        self.response += text
        self.loss_mask = (self.loss_mask or []) + [1] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + list(log_probs)
        ends = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
        self.status = ends[meta_info["finish_reason"]["type"]]


Sample.Status = Status  # type: ignore[attr-defined]


@dataclass
class RolloutFnTrainOutput:
    samples: Any
    metrics: Any = None


class RolloutDataSource:
    def __init__(self, args: Namespace) -> None:
        self.args, self.metadata = args, {}
        self.epoch_id = self.sample_offset = self.sample_group_index = self.sample_index = 0
        lines = Path(args.prompt_data).read_text().splitlines()
        self.dataset = [Sample(prompt=json.loads(line)["text"]) for line in lines]

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(num_samples):
            if self.sample_offset == len(self.dataset):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(self.dataset[self.sample_offset])
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                group.append(sample)
                self.sample_index += 1
            self.sample_offset += 1
            self.sample_group_index += 1
            groups.append(group)
        return groups

    def _file(self, folder: str, rollout_id: Any) -> Path:
        return Path(folder, "rollout", f"stand_in_{rollout_id}.json")

    def save(self, rollout_id: int) -> None:
        path = self._file(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("epoch_id", "sample_offset", "sample_group_index", "sample_index")
        path.write_text(json.dumps({name: getattr(self, name) for name in names}))

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load and (path := self._file(self.args.load, rollout_id)).exists():
            self.__dict__ |= json.loads(path.read_text())


_loop = asyncio.new_event_loop()
_client: Any = None


def run(coro: Any) -> Any:
    if not _loop.is_running():
        threading.Thread(target=_loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coro, _loop).result()


def init_http_client(args: Namespace) -> None:
    import httpx

    global _client
    most = args.sglang_server_concurrency
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=0)
    _client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)


async def get(url: str) -> Any:
    return (await _client.get(url)).raise_for_status().json()


async def post(url: str, payload: Any) -> Any:
    for _ in range(60):  # as slime does
        try:
            return (await _client.post(url, json=payload)).raise_for_status().json()
        except Exception as error:
            last = error
            await asyncio.sleep(1)
    raise last


async def abort_servers_until_idle(urls: list[str]) -> None:
    for url in urls:
        while True:
            await post(f"{url}/abort_request", {"abort_all": True})
            loads = (await get(f"{url}/v1/loads?include=core"))["loads"]
            if not sum(one["num_total_reqs"] for one in loads):
                break
            await asyncio.sleep(0.1)


@cache
def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class GenerateState:
    def __init__(self, args: Namespace) -> None:
        self.tokenizer = Tokenizer()
        names = {
            "temperature": "temperature",
            "top_p": "top_p",
            "max_new_tokens": "max_response_len",
        }
        self.sampling_params = {key: getattr(args, f"rollout_{of}") for key, of in names.items()}


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens = sample.tokens or Tokenizer().encode(sample.prompt)
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    answer = await post(url, body)
    pairs = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[one[1] for one in pairs],
        log_probs=[one[0] for one in pairs],
        trainable=True,
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample


async def generate_and_rm(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    path = sample.generate_function_path or args.custom_generate_function_path
    function = load_function(path) if path else generate
    found = await function(args, sample, sampling_params)
    if not args.group_rm and found.status is not Status.ABORTED and found.reward is None:
        found.reward = await load_function(args.custom_rm_path)(args, found)
    return found


async def batched_async_rm(args: Namespace, samples: list[Sample]) -> Any:
    return await load_function(args.custom_rm_path)(args, samples)


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """slime's synchronous mode: all responses of a step are started, and all are awaited."""
    if evaluation:
        return "an evaluation"

    async def generated() -> Any:
        state = GenerateState(args)
        groups = data_source.get_samples(args.rollout_batch_size)
        work = [
            generate_and_rm(args, one, dict(state.sampling_params))
            for group in groups
            for one in group
        ]
        await asyncio.gather(*work)
        router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        workers = (await get(f"{router}/workers"))["workers"]
        await abort_servers_until_idle([worker["url"] for worker in workers])
        return RolloutFnTrainOutput(groups)

    return run(generated())
