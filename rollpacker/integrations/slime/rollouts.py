"""slime's rollouts, by RollPacker's scheduler.

a response starts   on a server behind slime's router, or in a generate function of the user's
it has ended        slime's own `generate_and_rm` makes a sample of it, with reward
groups are known    their samples go to slime, and what is left is stopped
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.async_utils import run
from slime.utils.http_utils import get
from slime.utils.misc import load_function
from slime.utils.types import Sample

from rollpacker.integrations.slime.data_source import DataSource
from rollpacker.scheduler import Counted, Request, Scheduler, Step
from rollpacker.scheduler.servers import Servers
from rollpacker.scheduler.wire import Draw

DRAW = "rollpacker_draw"
"""Key of the sampling settings by which `from_server` gets a response."""
WEIGHTS = "/get_weight_version"
FROM_SERVER = f"{__name__}.from_server"
VOCAB_SIZE = 1 << 24  # more than any model's: slime's rollouts do not know that of theirs


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return what slime trains on in a rollout (`--rollout-function-path`), as its
    `RolloutFnTrainOutput`; an evaluation is slime's own. Raises `ValueError` for another data
    source than `DataSource`, and for a rollout that was asked for before."""
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    if not isinstance(data_source, DataSource):
        raise ValueError("this needs --data-source-path rollpacker.integrations.slime.DataSource")
    if rollout_id <= data_source.rollout_id:
        raise ValueError(f"rollout {rollout_id} was asked for twice: its prompts are trained on")
    data_source.rollout_id = rollout_id
    if data_source.rollouts is None:
        data_source.rollouts = Rollouts(args, data_source)
    return run(data_source.rollouts.generate())


class Prompts(Counted):
    """slime's prompts, whose end a resumed run with more rollouts may put off."""

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "ended": False})


class Rollouts:
    """The responses of slime's rollouts, as a `Host` of the scheduler."""

    def __init__(self, args: Any, source: DataSource) -> None:
        self._args, self._source = args, source
        cursor = Prompts(source.fetch)
        cursor.num_fetched = source.sample_group_index  # unless saved state says more
        seed, resume = args.rollout_seed, source.resume
        self._scheduler = Scheduler(source.job, self, cursor, seed=seed, resume=resume)
        self._servers: Servers | None = None
        """The servers of this rollout. None: a generate function of the user's asks them."""
        self._weights: dict[str, Any] = {}
        """What each server said of the version of its weights at this rollout's start."""
        self._samples: dict[str, asyncio.Task[Any]] = {}
        """What slime makes of each request of this rollout: a sample, or several, by its id."""

    async def generate(self) -> Any:
        args, scheduler = self._args, self._scheduler
        self._state = sglang_rollout.GenerateState(args)
        urls = await self._urls()
        try:
            if args.custom_generate_function_path is None:
                self._servers = await self._connected(urls)
            data = await self._data(await scheduler.next_step_async())
        finally:
            for task in self._samples.values():
                task.cancel()
            self._samples = {}
            if self._servers is not None:
                urls = self._servers.up
                await self._servers.close()
        await abort_servers_until_idle(urls)  # as slime does: a server must be idle to sleep
        metrics = scheduler.trained()
        # slime does not say when it has trained: what it does is between two rollouts.
        metrics["between_steps_s"] += metrics.pop("training_s")
        self._source.keep(self._source.rollout_id, scheduler)
        if args.rollout_sample_filter_path is not None:
            load_function(args.rollout_sample_filter_path)(args, data)
        if (path := args.rollout_all_samples_process_path) is not None:
            load_function(path)(args, data, self._source.get_samples)
        return RolloutFnTrainOutput(data, {f"rollpacker/{key}": metrics[key] for key in metrics})

    async def _data(self, step: Step | None) -> list[list[Any]]:
        """Return the samples of a step's groups, with rewards, in slime's order."""
        groups = [sorted(one, key=attrgetter("place")) for one in (step.groups if step else ())]
        if (size := self._args.rollout_batch_size) != len(groups):
            raise RuntimeError(f"{size - len(groups)} of {size} prompts have failed, see above")
        data = []
        for group in sorted(groups, key=lambda group: group[0].prompt):
            samples = await asyncio.gather(*(self._samples.pop(one.id) for one in group))
            if self._args.group_rm:
                rewards = await batched_async_rm(self._args, samples)
                for sample, reward in zip(samples, rewards, strict=True):
                    sample.reward = reward
            first = self._source.rows[group[0].prompt].index
            for index, sample in enumerate(samples, first):
                if isinstance(sample, Sample):  # its place may be above n_samples_per_prompt
                    sample.index = index
            data.append(samples)
        return data

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to generate these responses (`Host`)."""
        if self._servers is not None:
            return self._servers.start(requests)
        for one in requests:
            sample, task = self._scored(one, {"sampling_seed": one.seed})
            task.add_done_callback(partial(self._ended, one, sample))

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop these responses (`Host`)."""
        if self._servers is not None:
            return self._servers.stop(requests)
        for one in requests:  # its connection closes, which SGLang notices
            self._samples[one.id].cancel()

    def _scored(
        self, request: Request, settings: dict[str, Any], function: str | None = None
    ) -> tuple[Any, asyncio.Task[Any]]:
        """Have slime's own function generate a sample, by this function, and its reward."""
        sample = copy.deepcopy(self._source.rows[request.prompt])
        sample.index += request.place
        sample.session_id, sample.generate_function_path = str(uuid.uuid4()), function
        settings = {**self._state.sampling_params, **settings}
        work = sglang_rollout.generate_and_rm(self._args, sample, settings)
        task = self._samples[request.id] = asyncio.create_task(work)
        return sample, task

    def _ended(self, request: Request, sample: Any, task: asyncio.Task[Any]) -> None:
        """Report how a generate function of the user's has ended."""
        if self._samples.get(request.id) is not task:
            return  # the rollout has
        if task.cancelled():
            self._scheduler.ended(request, sample.response_length, "stopped")
        elif (error := task.exception()) is not None:
            self._scheduler.fail(error)
        else:
            found = result if isinstance(result := task.result(), list) else [result]
            num_tokens = sum(one.response_length for one in found)
            # An aborted one counts as failed: it was not asked to stop.
            is_cut = any(one.status is Sample.Status.ABORTED for one in found)
            self._scheduler.ended(request, num_tokens, "stopped" if is_cut else "stop")

    async def _urls(self) -> list[str]:
        """Return the addresses of the servers behind slime's router, where aborts go, too."""
        router = f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}"
        workers = (await get(f"{router}/workers"))["workers"]
        if any(worker.get("worker_type", "regular") != "regular" for worker in workers):
            raise ValueError("servers that only prefill or decode cannot be asked alone")
        return [worker["url"] for worker in workers if worker.get("is_healthy", True)]

    async def _connected(self, urls: Sequence[str]) -> Servers:
        servers = Servers(
            "sglang",
            urls,
            self._prompt,
            vocab_size=VOCAB_SIZE,
            max_response_tokens=self._args.rollout_max_response_len,
            sampling=self._state.sampling_params,
            extra={"return_routed_experts": bool(self._args.use_rollout_routing_replay)},
            ended=lambda request, draw: self._scored(request, {DRAW: draw}, FROM_SERVER),
            returned=self._returned,
        )
        servers.scheduler = self._scheduler
        if self._source.job.tail_batching.enabled and not self._weights:
            await servers.check()
        self._weights = {url: await get(url + WEIGHTS) for url in urls}
        return servers

    def _prompt(self, number: int) -> Sequence[int]:
        row, encode = self._source.rows[number], self._state.tokenizer.encode
        row.tokens = row.tokens or encode(row.prompt, add_special_tokens=False)
        return row.tokens  # type: ignore[no-any-return]

    async def _returned(self, url: str) -> None:
        """Refuse a server that was started anew: slime has to load its weights first."""
        if (found := await get(url + WEIGHTS)) != self._weights[url]:
            raise RuntimeError(f"its weights are {found}, and were {self._weights[url]}")


async def from_server(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Make slime's sample of a server's response (`Sample.generate_function_path`)."""
    draw: Draw = sampling_params[DRAW]
    answer = json.loads(draw.reply)
    sample.generate_function_path, sample.tokens = None, list(draw.prompt)
    settings = {"trainable": True, "meta_info": answer["meta_info"], "text": answer["text"]}
    sample.append_response_tokens(args, tokens=draw.tokens, log_probs=draw.log_probs, **settings)
    return sample
