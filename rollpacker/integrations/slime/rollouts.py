"""slime's rollouts, with RollPacker's scheduler between them.

    generate_rollout  Scheduler.next_step_async, whose requests run on the servers behind slime's
                      router or, with a generate function of the user's, as tasks of slime's own
    a response ends   slime's own `generate_and_rm` makes a sample of it, and scores it
    the step is known the samples of its groups go to slime, and what is left is stopped

Loss, weights, rewards, evaluation and checkpoints stay slime's.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
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

logger = logging.getLogger(__name__)

DRAW = "rollpacker_draw"
"""Key among the sampling settings by which `from_server` gets a response."""
MOST_TOKENS_KNOWN = 1 << 24
"""No vocabulary is larger. slime's data source does not know that of its model."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Generate what slime trains on in a rollout (`--rollout-function-path`), as its
    `RolloutFnTrainOutput`. An evaluation is slime's own. Raises `ValueError` for another data
    source than `DataSource`, and for a rollout that was asked for before."""
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    if not isinstance(data_source, DataSource):
        raise ValueError(
            "rollpacker.integrations.slime.generate_rollout needs "
            "--data-source-path rollpacker.integrations.slime.DataSource"
        )
    if rollout_id <= data_source.rollout_id:
        raise ValueError(
            f"rollout {rollout_id} was asked for twice: its prompts were trained on, or are now"
        )
    data_source.rollout_id = rollout_id
    if data_source.rollouts is None:
        data_source.rollouts = Rollouts(args, data_source)
    return run(data_source.rollouts.generate(rollout_id))


class Prompts(Counted):
    """slime's prompts. Its dataset begins anew where it ends, so that the number of rollouts, which
    a resumed run may raise, decides where they end."""

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "ended": False})


class Rollouts:
    """The responses of slime's rollouts, as a `Host` of the scheduler."""

    def __init__(self, args: Any, source: DataSource) -> None:
        self._args, self._source = args, source
        cursor = Prompts(source.fetch)
        cursor.num_fetched = source.sample_group_index  # unless saved state says more
        job, seed = source.job, args.rollout_seed
        self._scheduler = Scheduler(job, self, cursor, seed=seed, resume=source.resume)
        self._servers: Servers | None = None
        """The servers of this rollout. None: a generate function of the user's asks them."""
        self._is_checked = not job.tail_batching.enabled
        self._tokens: dict[int, Sequence[int]] = {}
        """Tokens of the prompts under way, by their numbers."""
        self._samples: dict[str, asyncio.Task[Any]] = {}
        """What slime makes of each request of this rollout, by the request's id: a sample, or a
        list of them if a generate function of the user's returns that."""
        self._weights: str | None = None
        """slime's version of the weights that the newest response came from."""

    async def generate(self, rollout_id: int) -> Any:
        args, source = self._args, self._source
        self._loop = asyncio.get_running_loop()
        self._state = sglang_rollout.GenerateState(args)
        urls = await self._urls()
        if args.custom_generate_function_path is None:
            self._servers = Servers(
                "sglang",
                urls,
                self._prompt,
                vocab_size=MOST_TOKENS_KNOWN,
                max_response_tokens=args.rollout_max_response_len,
                sampling=self._state.sampling_params,
                extra={"return_routed_experts": True} if args.use_rollout_routing_replay else {},
                ended=self._whole,
                returned=self._returned,
            )
            self._servers.scheduler = self._scheduler
        try:
            if self._servers is not None and not self._is_checked:
                await self._servers.check()
                self._is_checked = True
            step = await self._scheduler.next_step_async()
            data = await self._data(step)
        finally:
            for task in self._samples.values():
                task.cancel()
            self._samples.clear()
            if self._servers is not None:
                urls = self._servers.up
                await self._servers.close()
        await abort_servers_until_idle(urls)  # as slime does: its servers must be idle to sleep
        self._tokens.clear()
        metrics = self._scheduler.trained()
        del metrics["training_s"]  # slime does not say when it has trained: it is between steps
        source.keep(rollout_id, self._scheduler)
        if not source.rows and rollout_id + 1 == args.num_rollout:
            logger.warning(self._scheduler.report())
        if args.rollout_sample_filter_path is not None:
            load_function(args.rollout_sample_filter_path)(args, data)
        if args.rollout_all_samples_process_path is not None:
            process = load_function(args.rollout_all_samples_process_path)
            process(args, data, source.get_samples)
        named = {f"rollpacker/{name}": value for name, value in metrics.items()}
        return RolloutFnTrainOutput(samples=data, metrics=named)

    async def _data(self, step: Step | None) -> list[list[Any]]:
        """Return the scored samples of a step's groups, in slime's order."""
        groups = sorted(step.groups if step else (), key=lambda group: group[0].prompt)
        if (wanted := self._args.rollout_batch_size) != len(groups):
            raise RuntimeError(
                f"{len(groups)} of the {wanted} prompts of a rollout are left: too many failed, "
                "see above"
            )
        asked = [self._samples.pop(one.id) for one in chain(*groups)]
        found, data = iter(await asyncio.gather(*asked)), []
        for group in groups:
            samples, row = [next(found) for _ in group], self._source.rows.pop(group[0].prompt)
            if self._args.group_rm:
                rewards = await batched_async_rm(self._args, samples)
                for sample, reward in zip(samples, rewards, strict=True):
                    sample.reward = reward
            for index, sample in enumerate(samples, row.index):
                if isinstance(sample, Sample):  # its place may be one of those begun beyond the n
                    sample.index = index
            data.append(samples)
        return data

    # -- what the scheduler calls ----------------------------------------------------------------

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to generate these responses (`Host`)."""
        if self._servers is not None:
            self._servers.start(requests)
            return
        for one in requests:
            sample = self._sample(one)
            task = self._score(one, sample, {"sampling_seed": one.seed})
            task.add_done_callback(partial(self._ended, one, sample))

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop these responses (`Host`)."""
        if self._servers is not None:
            self._servers.stop(requests)
            return
        for one in requests:  # the connection closes, which SGLang notices
            self._samples[one.id].cancel()

    # -- a response ------------------------------------------------------------------------------

    def _prompt(self, number: int) -> Sequence[int]:
        if number not in self._tokens:
            row, encode = self._source.rows[number], self._state.tokenizer.encode
            self._tokens[number] = row.tokens or encode(row.prompt, add_special_tokens=False)
        return self._tokens[number]

    def _sample(self, request: Request) -> Any:
        sample = copy.deepcopy(self._source.rows[request.prompt])
        sample.index += request.place
        sample.session_id = str(uuid.uuid4())
        return sample

    def _score(self, request: Request, sample: Any, own: dict[str, Any]) -> asyncio.Task[Any]:
        """Have slime's own function generate and score a sample."""
        settings = {**self._state.sampling_params, **own}
        work = sglang_rollout.generate_and_rm(self._args, sample, settings)
        task = self._samples[request.id] = self._loop.create_task(work)
        return task

    def _whole(self, request: Request, draw: Draw) -> None:
        """Score a response while others are generated."""
        sample = self._sample(request)
        sample.generate_function_path = f"{__name__}.{from_server.__name__}"
        self._score(request, sample, {DRAW: draw})
        self._weights = json.loads(draw.reply)["meta_info"].get("weight_version")

    def _ended(self, request: Request, sample: Any, task: asyncio.Task[Any]) -> None:
        """Report how a task of a generate function ended."""
        if self._samples.get(request.id) is not task:
            return  # the rollout is over
        if task.cancelled():
            self._scheduler.ended(request, sample.response_length, "stopped")
        elif (error := task.exception()) is not None:
            self._scheduler.fail(error)
        else:
            found = task.result()
            found = found if isinstance(found, list) else [found]
            if any(one.status is Sample.Status.ABORTED for one in found):
                why = "its generate function returned it as aborted"
                self._scheduler.ended(request, reason="failed", why=why)
            else:
                self._scheduler.ended(request, sum(one.response_length for one in found))

    # -- servers ---------------------------------------------------------------------------------

    async def _urls(self) -> list[str]:
        """Return the addresses of the servers behind slime's router: its aborts go there, too."""
        router = f"http://{self._args.sglang_router_ip}:{self._args.sglang_router_port}"
        workers = (await get(f"{router}/workers"))["workers"]
        if any(worker.get("worker_type", "regular") != "regular" for worker in workers):
            raise ValueError(
                "servers of slime that only prefill or only decode cannot be used: leave out "
                "--prefill-num-servers"
            )
        return [worker["url"] for worker in workers if worker.get("is_healthy", True)]

    async def _returned(self, url: str) -> None:
        """Refuse a server that was lost in this rollout and holds other weights than its others:
        slime loads them before the next one."""
        found = (await get(f"{url}/get_weight_version"))["weight_version"]
        if self._weights is None or found != self._weights:
            raise RuntimeError(f"its weights are {found}, and those of others {self._weights}")


async def from_server(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Make slime's sample of a response that a server has sent, in place of slime's own `generate`
    (`Sample.generate_function_path`)."""
    draw: Draw = sampling_params[DRAW]
    answer = json.loads(draw.reply)
    sample.generate_function_path = None
    sample.tokens = list(draw.prompt)
    sample.append_response_tokens(
        args,
        tokens=draw.tokens,
        log_probs=draw.log_probs,
        trainable=True,
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample
