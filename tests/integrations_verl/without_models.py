"""verl's trainer without models, for tests of what it does between them.

verl's own: trainer and its loop, data, replay buffer, queue, agent loops, client, balancer before
the servers, rewards, and checkpoints but for weights. Faked: the server, where each token takes the
same time whatever else runs, with lengths and tokens that the prompt and the seed alone decide;
weights, and all that the trainer does between a step's groups and the next step.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

MEDIAN, SPREAD, LONGEST = 20, math.log(20) / 2.326, 640
"""Lengths are log-normal: the 99th percentile is 20 times the median."""
ENDS_FROM = 200
"""The first of the test model's tokens that end a response."""
MOST_FAULTS = 2
"""Faults that responses to a prompt meet: as many as it is started again for."""


def response_of(prompt: list[int], seed: int) -> list[int]:
    dice = random.Random(f"{seed} {prompt}")
    length = min(math.ceil(dice.lognormvariate(math.log(MEDIAN), SPREAD)), LONGEST)
    return [dice.randrange(5, ENDS_FROM) for _ in range(length)]


class Server:
    """What verl's client calls of verl's vLLM server, and what the integration calls to abort."""

    def __init__(self, token_s: float, fault_rate: float) -> None:
        self.token_s, self.fault_rate = token_s, fault_rate
        self.stops: dict[str, asyncio.Event] = {}
        self.engine = self
        self.dice = random.Random(0)
        self.met: Counter[tuple[int, ...]] = Counter()
        """Faults that were met, by prompt."""

    def num_met(self) -> int:
        return self.met.total()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.output_handler = asyncio.current_task()  # vLLM's task, by which its loop is found
        tokens = response_of(list(prompt_ids), sampling_params.get("seed", 0))
        stop, began, reason = asyncio.Event(), time.monotonic(), "completed"
        self.stops[request_id] = stop
        prompt, fault = tuple(prompt_ids), ""
        if self.met[prompt] < MOST_FAULTS and self.dice.random() < self.fault_rate:
            fault = self.dice.choice(("raises", "aborts"))
            self.met[prompt] += 1
            tokens = tokens[: self.dice.randrange(len(tokens))]
        try:
            await asyncio.wait_for(stop.wait(), len(tokens) * self.token_s)
            tokens = tokens[: int((time.monotonic() - began) / self.token_s)]
            reason = "aborted"
        except TimeoutError:
            if fault == "raises":
                raise RuntimeError("made up") from None
            reason = "aborted" if fault else reason
        finally:
            del self.stops[request_id]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens),
            stop_reason=reason,
            extra_fields={"global_steps": 0},
        )

    async def abort(self, request_ids: list[str]) -> None:
        for one in request_ids:
            if one in self.stops:
                self.stops[one].set()


class Faked:
    """In place of verl's models: their parts of its trainer."""

    said: Any
    token_s: float
    poll_s: float | None = None
    fault_rate = 0.0
    config: Any

    def _setup(self) -> None:
        import ray
        from verl.experimental.reward_loop import RewardLoopManager
        from verl.workers.rollout.llm_server import LLMServerManager

        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.use_teacher_policy, self.use_reference_policy, self.use_critic = False, False, False
        self.reward_loop_manager = RewardLoopManager(config=self.config)
        self.server = (
            ray.remote(Server).options(max_concurrency=4000).remote(self.token_s, self.fault_rate)
        )
        self.llm_server_manager = LLMServerManager.create_empty(config=self.config)
        balancer = self.llm_server_manager.global_load_balancer
        ray.get(balancer.add_servers.remote({"made up": self.server}))
        nothing = lambda *_, **__: None  # noqa: E731
        self.checkpoint_manager = SimpleNamespace(sleep_replicas=nothing, update_weights=nothing)
        self.actor_rollout_wg = SimpleNamespace(save_checkpoint=nothing, load_checkpoint=nothing)
        self._load_checkpoint()
        self.responses: dict[str, str] = {}
        if self.poll_s is not None:
            self.replay_buffer.poll_interval = self.poll_s

    def prepare_step(self) -> dict[str, float]:
        self.asked_at = time.monotonic()
        return super().prepare_step()  # type: ignore[misc, no-any-return]

    def on_sample_end(self) -> None:
        self.rollout_s = time.monotonic() - self.asked_at
        super().on_sample_end()  # type: ignore[misc]

    def _same(self, batch: Any, **_: Any) -> Any:
        return batch

    _balance_batch = _compute_old_log_prob = _compute_advantage = _update_actor = _same

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, **_: Any) -> None:
        import transfer_queue

        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses", "index"]
        )
        lengths = []
        for key, row, tokens in zip(
            batch.keys, list(data["index"]), data["responses"].unbind(), strict=True
        ):
            lengths.append(len(tokens))
            found = hashlib.sha256(str(tokens.tolist()).encode()).hexdigest()[:16]
            name = f"{int(row)}/{key.split('_')[1]}"
            assert name not in self.responses, f"{name} was trained on twice"
            self.responses[name] = found
        self.said(
            {
                "step": self.global_steps,
                "rollout_s": round(self.rollout_s, 3),
                "step_s": round(timing_raw["step"], 3),
                "lengths": lengths,
            }
        )


def trained(config: Any, **own: Any) -> Any:
    """Train as verl's command does, in this process. `own`: attributes of `Faked`. Returns the
    trainer, and raises what it raises."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import get_trainer_cls

    base: Any = get_trainer_cls(config.trainer.v1.trainer_mode)
    runner = TaskRunnerV1.__ray_metadata__.modified_class()
    runner.config = config
    trainer = runner.trainer = type("Trainer", (Faked, base), own)(config)
    trainer.init()
    runner.init_agent_loop_manager()
    actors = [*runner.agent_loop_manager.agent_loop_workers, *trainer.get_reward_handles()]
    ray.get([one.__ray_ready__.remote() for one in (trainer.server, *actors)])
    try:
        trainer.fit(runner.agent_loop_manager)
    finally:
        trainer.num_faults = ray.get(trainer.server.num_met.remote())
        for one in (trainer.server, *actors):
            ray.kill(one)
    return trainer
