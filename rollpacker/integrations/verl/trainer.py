"""verl's synchronous trainer with RollPacker's scheduler between its steps.

    prepare_step          Scheduler.begin_step, which starts requests by the workers
    ReplayBuffer.sample   reports their ends to the scheduler, until the step's groups are known
    step                  Scheduler.trained, whose metrics go into verl's own
    _save_checkpoint      which prompts wait, and their rows, before verl says it is complete

Loss, weights, validation and checkpoints stay verl's. Any trainer mode but "sync" makes verl fetch
single prompts, which over-starting needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transfer_queue
from omegaconf import OmegaConf, open_dict
from packaging.version import Version
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils

from rollpacker.config.load import config_of
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.vllm.setup import TESTED
from rollpacker.integrations.verl.carry import ENGINE
from rollpacker.integrations.verl.rollouts import Client, Manager
from rollpacker.scheduler import FOLDER, Counted, Request, Scheduler, Step, has_state

logger = logging.getLogger(__name__)

MODE = "rollpacker_sync"
MANAGER = f"{Manager.__module__}.{Manager.__name__}"
PARTITION = "train"
"""Partition of verl's queue with responses to train on."""
ROWS = "prompts.pt"
"""Name of the file with the rows of prompts that wait, beside what the scheduler saves."""
POLL_S = 0.05
"""Seconds between looks at verl's queue in a validation. verl's own trainers take 2 seconds."""


class Prompts(Counted):
    """verl's prompts. Its loader begins anew where the data end, so that the number of steps, which
    a resumed run may raise, decides where they end."""

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "ended": False})


class Sampler(ReplayBuffer):  # type: ignore[misc]  # verl is not typed
    """Gives verl's trainer the groups that the scheduler chose."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.poll_interval = POLL_S
        self.manager: Manager
        self.scheduler: Scheduler
        self.rows: dict[int, Any] = {}
        """Row of each prompt that was fetched and not trained on yet, with a batch of one."""
        self.step: Future[Step | None] = Future()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, Any]:
        """Wait for the step's groups, and return their keys in verl's queue. What else is there is
        of prompts that were deferred, and is removed. Raises `RuntimeError` if the data ended."""
        if partition_id != PARTITION:
            return super().sample(global_steps, partition_id, batch_size)  # type: ignore[no-any-return]
        while not self.step.done():
            for end in self.manager.ends():
                if end.output is not None:
                    self.scheduler.heard(end.output)
                    continue
                self.scheduler.ended(end.id, end.num_tokens, end.reason, why=end.why)  # type: ignore[arg-type]
        step = self.step.result()
        if step is None:
            raise RuntimeError(
                f"step {global_steps} has no prompts left: too many of them failed, see above"
            )
        tags = held()
        by_response: dict[str, list[str]] = {}
        for key in sorted(tags, key=lambda key: int(key.rpartition("_")[2])):
            by_response.setdefault(key.rpartition("_")[0], []).append(key)
        keys: list[str] = []
        for group in step.groups:
            uid = self.rows.pop(group[0].prompt)["uid"][0]
            for request in group:
                keys += by_response.get(f"{uid}_{request.place}", [])
        if others := sorted(tags.keys() - set(keys)):
            transfer_queue.kv_clear(keys=others, partition_id=PARTITION)
        batch = KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[tags[key] for key in keys])
        return batch, {}


@register_trainer(MODE)
class RollPackerTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer, with tail batching."""

    def __init__(self, config: Any) -> None:
        """Check verl's config, and set its hooks to the classes here. Raises `ValueError` for what
        does not go with tail batching."""
        _check(config)
        # One that does nothing, so that what the scheduler refuses is refused before models load.
        job = _job(config)
        Scheduler(job, self, Counted(lambda _: 0))
        tail = job.tail_batching
        logger.warning(
            "rollpacker: a step trains on %s prompts; prompt_factor=%s stragglers=%s carry=%s%s",
            job.prompts_per_step,
            tail.prompt_factor,
            tail.stragglers,
            tail.carry,
            "" if tail.enabled else "; enabled=False: every response is awaited",
        )
        with open_dict(config):
            own = {"path": f"pkg://{__name__}", "name": Sampler.__name__}
            config.trainer.v1.sampler.custom_sampler = own
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = MANAGER
            if _carries(config):
                given = config.actor_rollout_ref.rollout.get("engine_kwargs") or {}
                vllm = {**(given.get("vllm") or {}), **ENGINE}
                config.actor_rollout_ref.rollout.engine_kwargs = {**given, "vllm": vllm}
        super().__init__(config)

    def get_llm_client(self) -> Any:
        return self.llm_server_manager.get_client(client_cls=Client)

    def on_train_begin(self) -> None:
        super().on_train_begin()
        sampler = self.replay_buffer
        sampler.manager = self.agent_loop_manager
        trained = self.global_steps - 1
        cursor = Prompts(self._fetch)
        # Unless saved state says more.
        cursor.num_fetched = trained * self.config.data.train_batch_size
        folder = self._checkpoint(trained) if trained else None
        if folder is not None and has_state(folder):
            sampler.rows = read_rows(folder / FOLDER / ROWS)
        sampler.scheduler = Scheduler(
            _job(self.config),
            self,
            cursor,
            seed=self.config.actor_rollout_ref.rollout.seed,
            resume=folder,
        )
        self._cursor = cursor

    def prepare_step(self) -> dict[str, float]:
        self.replay_buffer.step = self.replay_buffer.scheduler.begin_step()
        return {}

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        batch = super().step(metrics, timing_raw)
        found = self.replay_buffer.scheduler.trained()
        metrics.update({f"rollpacker/{name}": value for name, value in found.items()})
        if self.global_steps >= self.total_training_steps:
            logger.warning(self.replay_buffer.scheduler.report())
        return batch

    def start(self, requests: Sequence[Request]) -> None:
        """Start requests of the scheduler (`Host`)."""
        sampler = self.replay_buffer
        updates = sampler.scheduler.version if _carries(self.config) else None
        self.agent_loop_manager.start(requests, sampler.rows, self.global_steps, updates)

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop requests of the scheduler (`Host`)."""
        self.agent_loop_manager.stop(requests)

    def _reissue_inflight_prompts(self, partition_id: str = PARTITION) -> int:
        """Remove what verl's queue has from a checkpoint: responses that its step trained on, and
        prompts under way if another mode saved it. verl would start those."""
        if keys := list(held()):
            transfer_queue.kv_clear(keys=keys, partition_id=PARTITION)
        return 0

    def _fetch(self, count: int) -> int:
        rows, size = self.replay_buffer.rows, self.config.data.train_batch_size
        left = (self.total_training_steps - self.global_steps + 1) * size - len(rows)
        if (count := min(count, left)) <= 0:
            return 0
        batch, first = self._next_train_batch(count), self._cursor.num_fetched
        found = {first + index: batch[index : index + 1] for index in range(count)}
        for row in found.values():
            check_row(row)
        rows.update(found)
        return count

    def _checkpoint(self, step: int) -> Path:
        """Return verl's folder of the checkpoint of that step, from which the run goes on."""
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path" and step == self.global_steps - 1:
            return Path(trainer.resume_from_path)
        return Path(trainer.default_local_dir, f"global_step_{step}")

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        rows = {prompt: plain_row(row) for prompt, row in self.replay_buffer.rows.items()}
        torch.save(rows, folder / FOLDER / ROWS)
        self.replay_buffer.scheduler.save(folder)  # where its state is, the rows are
        super()._save_checkpoint()  # last: it says that the checkpoint is complete


def plain_row(row: Any) -> dict[str, tuple[bool, Any]]:
    """Return a prompt's row of verl as a dict, for a file: by its fields, whether the value is one
    of the batch's, and the value, a tensor or what Python is made of."""
    return {
        key: (
            not isinstance(row.get(key), tensordict_utils.NonTensorData),
            tensordict_utils.get(row, key),
        )
        for key in row.keys()  # noqa: SIM118  # a TensorDict iterates over its batch
    }


def read_rows(path: Path) -> dict[int, Any]:
    """Return verl's rows of prompts from a file of `plain_row`s. Nothing in the file is executed:
    what is neither a tensor nor made of Python's own types is refused."""
    saved = torch.load(path, weights_only=True)
    return {
        prompt: tensordict_utils.get_tensordict(
            {key: value for key, (is_of_batch, value) in row.items() if is_of_batch},
            {key: value for key, (is_of_batch, value) in row.items() if not is_of_batch},
        )
        for prompt, row in saved.items()
    }


def check_row(row: Any) -> None:
    """Raise `ValueError` if a row of verl holds what a checkpoint's file cannot have."""
    for key, (_, value) in plain_row(row).items():
        if (strange := _strange(value)) is not None:
            raise ValueError(
                f"the field {key} of a prompt holds a {strange}, which waits in no checkpoint: "
                f"leave it out of the data, or train without trainer_mode={MODE}"
            )


def _strange(value: Any) -> str | None:
    """Return the name of a type in this value that is neither a tensor's nor Python's own."""
    if isinstance(value, dict | list | tuple):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return next((found for one in inside if (found := _strange(one)) is not None), None)
    known = (str, int, float, bool, bytes, type(None), torch.Tensor)
    return None if type(value) in known or isinstance(value, torch.Tensor) else type(value).__name__


def held() -> dict[str, Any]:
    """Return the tags of all that verl's queue has to train on, by its keys."""
    return (transfer_queue.kv_list(PARTITION) or {}).get(PARTITION, {})  # type: ignore[no-any-return]


def _carries(config: Any) -> bool:
    """Whether tokens of stopped responses are carried to a later step, and verified there."""
    return bool((config.trainer.v1.get(MODE) or {}).get("carry", "none") == "exact")


def _job(config: Any) -> JobConfig:
    """Return what the scheduler is to know of verl's config: the sizes of a step, and the settings
    of tail batching, `trainer.v1.rollpacker_sync.*`."""
    given = OmegaConf.to_container(config.trainer.v1.get(MODE) or OmegaConf.create(), resolve=True)
    tree: dict[str, Any] = {"carry": "none", **given}
    if tree["carry"] not in ("none", "exact"):
        raise ValueError(f"{MODE}.carry={tree['carry']}: here it is none or exact")
    return JobConfig(
        prompts_per_step=config.data.train_batch_size,
        samples_per_prompt=config.actor_rollout_ref.rollout.n,
        max_steps=None,  # `_fetch` decides where the prompts end
        max_response_tokens=config.data.max_response_length,
        tail_batching=config_of(tree, (), TailBatchingConfig, where=f"trainer.v1.{MODE}"),
    )


def _check(config: Any) -> None:
    """Raise `ValueError` for settings of verl that do not go with tail batching."""
    rollout, sampler = config.actor_rollout_ref.rollout, config.trainer.v1.sampler
    refused = {
        f"actor_rollout_ref.rollout.name={rollout.name}: vLLM's responses alone can be stopped": (
            rollout.name != "vllm"
        ),
        "actor_rollout_ref.rollout.disaggregation: its servers' requests cannot be stopped": (
            (rollout.get("disaggregation") or {}).get("enabled", False)
        ),
        "algorithm.filter_groups: it replaces prompts that the scheduler has chosen": (
            (config.algorithm.get("filter_groups") or {}).get("enable", False)
        ),
        "algorithm.adv_estimator=remax: it needs a greedy response beside the others": (
            config.algorithm.adv_estimator == "remax"
        ),
        "trainer.v1.sampler.custom_sampler: the scheduler chooses what is trained on": (
            (sampler.get("custom_sampler") or {}).get("name") is not None
        ),
        "rollout.agent.agent_loop_manager_class: responses are started by RollPacker's": (
            rollout.agent.get("agent_loop_manager_class") is not None
        ),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"trainer_mode={MODE} does not go with {what}")
    if _carries(config):
        _check_carrying(rollout)


def _check_carrying(rollout: Any) -> None:
    """Raise `ValueError` for settings of verl's rollouts under which no tokens can be carried."""
    of_vllm = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    lowest, end = (".".join(map(str, one)) for one in TESTED["vllm"])
    is_plain = (rollout.get("temperature", 1), rollout.get("top_p", 1)) == (1, 1)
    refused = {
        f"vLLM {version('vllm')}: it was tried with vLLM from {lowest} to before {end}": not (
            TESTED["vllm"][0] <= Version(version("vllm")).release < TESTED["vllm"][1]
        ),
        "rollout.multi_turn: the tokens of a single turn can be carried": (
            (rollout.get("multi_turn") or {}).get("enable", False)
        ),
        "rollout.data_parallel_size or pipeline_model_parallel_size: one process is asked": (
            rollout.get("data_parallel_size", 1) * rollout.get("pipeline_model_parallel_size", 1)
            > 1
        ),
        "rollout.enable_rollout_routing_replay: the experts of carried tokens are not kept": (
            rollout.get("enable_rollout_routing_replay", False)
        ),
        "rollout.calculate_log_probs at a temperature, top_p or top_k: vLLM's are those before": (
            rollout.get("calculate_log_probs", False)
            and not (is_plain and rollout.get("top_k", -1) <= 0)
        ),
        "speculative decoding: vLLM gives it no logits processors": (
            "speculative_config" in of_vllm
            or (rollout.get("mtp") or {}).get("enable_rollout", False)
        ),
        f"rollout.engine_kwargs.vllm.{', '.join(set(ENGINE) & set(of_vllm))}: it is set here": (
            bool(set(ENGINE) & set(of_vllm))
        ),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"{MODE}.carry=exact does not go with {what}")
