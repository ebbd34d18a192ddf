"""Seconds of verl's rollouts with a server of made-up speed:

    python -m tests.integrations_verl.speed --mode plain --steps 6 --prompts 64 --samples 8 \\
        --token-s 0.05

plain: verl's own trainer_mode=sync, off: rollpacker_sync that waits for every response, on: with
tail batching. Prints a line of JSON for each step, and at last a hash of each response trained on.

verl's own: trainer and its loop, data, replay buffer, queue, agent loops, client, balancer before
the servers, rewards. Faked: the server, where each token takes `--token-s` seconds whatever else
runs, with lengths and tokens that the prompt and the seed alone decide; weights, and all that the
trainer does between a step's groups and the next step. In the mode plain a response has its seed
from `seeded.py`, and `--poll-s` shortens the pauses between the looks at the queue, which are
verl's own 2 seconds otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MEDIAN, P99, LONGEST = 20, 400, 640
VOCABULARY = 200
"""Tokens below the ends of the test model."""


def response_of(prompt: list[int], seed: int) -> list[int]:
    dice = random.Random(f"{seed} {prompt}")
    sigma = 1.2877  # so that P99 is 20 times the median
    length = min(int(dice.lognormvariate(3.0, sigma)) + 1, LONGEST)
    return [5 + dice.randrange(VOCABULARY - 5) for _ in range(length)]


class Server:
    """What verl's client calls of verl's vLLM server, and what the integration calls to abort."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.stops: dict[str, asyncio.Event] = {}
        self.engine = self

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.output_handler = asyncio.current_task()  # vLLM's task, by which its loop is found
        tokens = response_of(list(prompt_ids), sampling_params.get("seed", 0))
        stop, began, reason = asyncio.Event(), time.monotonic(), "completed"
        self.stops[request_id] = stop
        try:
            await asyncio.wait_for(stop.wait(), len(tokens) * self.token_s)
            tokens = tokens[: int((time.monotonic() - began) / self.token_s)]
            reason = "aborted"
        except TimeoutError:
            pass
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
    poll_s: float | None
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
        self.server = ray.remote(Server).options(max_concurrency=4000).remote(self.token_s)
        self.llm_server_manager = LLMServerManager.create_empty(config=self.config)
        balancer = self.llm_server_manager.global_load_balancer
        ray.get(balancer.add_servers.remote({"made up": self.server}))
        nothing = lambda *_, **__: None  # noqa: E731
        self.checkpoint_manager = SimpleNamespace(sleep_replicas=nothing, update_weights=nothing)
        self.global_steps = 0
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


def config_of(given: argparse.Namespace, inputs: Path) -> Any:
    from hydra import compose, initialize_config_module

    from tests.integrations_verl.training import settings

    mode = "sync" if given.mode == "plain" else "rollpacker_sync"
    overrides = [
        *settings(inputs, inputs / "run"),
        *(f"trainer.v1.trainer_mode={mode}", f"trainer.total_training_steps={given.steps}"),
        *(f"data.train_batch_size={given.prompts}", f"data.max_response_length={LONGEST}"),
        *("data.shuffle=False", f"actor_rollout_ref.rollout.n={given.samples}"),
        f"actor_rollout_ref.rollout.seed={given.seed}",
        *("actor_rollout_ref.rollout.nnodes=1", "trainer.resume_mode=disable"),
        "trainer.val_before_train=True",  # what happens once in each process happens there
    ]
    if given.mode == "plain":
        overrides.append(
            "+actor_rollout_ref.rollout.agent.agent_loop_manager_class="
            "tests.integrations_verl.seeded.Manager"
        )
    elif given.mode == "off":
        overrides.append("+trainer.v1.rollpacker_sync.enabled=False")
    else:
        overrides += [f"+trainer.v1.rollpacker_sync.{one}" for one in given.set]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("plain", "off", "on"), required=True)
    for name, kind, default in (
        *(("steps", int, 6), ("prompts", int, 64), ("samples", int, 8), ("seed", int, 0)),
        *(("token-s", float, 0.05), ("poll-s", float, None)),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of rollpacker_sync")
    given = parser.parse_args()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what verl prints goes elsewhere

    def said(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    from tests.integrations_verl.training import ENVIRONMENT, write_inputs

    os.environ |= ENVIRONMENT
    import ray
    import transfer_queue
    from omegaconf import OmegaConf
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import get_trainer_cls

    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        write_inputs(inputs, num_prompts=given.prompts * given.steps)
        config = config_of(given, inputs)
        OmegaConf.resolve(config)
        ray.init(num_cpus=16, include_dashboard=False, logging_level="error")
        transfer_queue.init(config.transfer_queue)
        base: Any = get_trainer_cls(config.trainer.v1.trainer_mode)
        own = {"said": staticmethod(said), "token_s": given.token_s, "poll_s": given.poll_s}
        runner = TaskRunnerV1.__ray_metadata__.modified_class()
        runner.config = config
        runner.trainer = type("Trainer", (Faked, base), own)(config)
        runner.trainer.init()
        runner.init_agent_loop_manager()
        trainer, workers = runner.trainer, runner.agent_loop_manager.agent_loop_workers
        actors = [trainer.server, *workers, *trainer.get_reward_handles()]
        ray.get([one.__ray_ready__.remote() for one in actors])  # no step waits for their start
        runner.trainer.fit(runner.agent_loop_manager)
        said({"responses": runner.trainer.responses})
        transfer_queue.close()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
