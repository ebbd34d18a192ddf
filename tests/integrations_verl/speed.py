"""Seconds of verl's rollouts with a server of made-up speed:

    python -m tests.integrations_verl.speed --mode plain --steps 6 --prompts 64 --samples 8 \\
        --token-s 0.05

plain: verl's own trainer_mode=sync, off: rollpacker_sync that waits for every response, on: with
tail batching. Prints a line of JSON for each step, and at last a hash of each response trained on.

What is verl's own and what is faked, `without_models.py` says; each token takes `--token-s`
seconds. In the mode plain a response has its seed from `seeded.py`, and `--poll-s` shortens the
pauses between the looks at the queue, which are verl's own 2 seconds otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def config_of(given: argparse.Namespace, inputs: Path, *more: str) -> Any:
    from hydra import compose, initialize_config_module

    from tests.integrations_verl.training import settings
    from tests.integrations_verl.without_models import LONGEST

    mode = "sync" if given.mode == "plain" else "rollpacker_sync"
    overrides = [
        *settings(inputs, inputs / "run"),
        *(f"trainer.v1.trainer_mode={mode}", f"trainer.total_training_steps={given.steps}"),
        *(f"data.train_batch_size={given.prompts}", f"data.max_response_length={LONGEST}"),
        *("data.shuffle=False", f"actor_rollout_ref.rollout.n={given.samples}"),
        f"actor_rollout_ref.rollout.seed={given.seed}",
        *("actor_rollout_ref.rollout.nnodes=1", "trainer.resume_mode=disable"),
        'trainer.logger=["console"]',
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
        return compose("ppo_trainer", [*overrides, *more])


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

    from tests.integrations_verl.without_models import trained

    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        write_inputs(inputs, num_prompts=given.prompts * given.steps)
        config = config_of(given, inputs)
        OmegaConf.resolve(config)
        ray.init(num_cpus=16, include_dashboard=False, logging_level="error")
        transfer_queue.init(config.transfer_queue)
        own = {"said": staticmethod(said), "token_s": given.token_s, "poll_s": given.poll_s}
        said({"responses": trained(config, **own).responses})
        transfer_queue.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
