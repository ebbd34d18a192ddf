"""TRL's `GRPOTrainer` with `use_vllm`, in server mode, against a made-up server of a fake speed.

    python -m tests.integrations_trl.speed --mode plain|off|on --steps 20 --token-s 0.015

The protocol is that of `tests/scheduler/speed.py`. TRL's trainer, its `VLLMGeneration` and its
client are the installed ones, and the server answers what TRL asks of vLLM's. Faked are: vLLM,
which need not be installed; the way of weights to the server; and the loss, which is 0, so that
the policy stands still and training takes no time. `plain` is TRL alone, but for a seed of each
response by its prompt and place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_client, vllm_generation

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import sample_key
from rollpacker.integrations.trl import RolloutFunction, rollout_function
from rollpacker.trainer.model import write_character_tokenizer
from tests.integrations_trl import trl_server
from tests.scheduler.made_up_servers import LONGEST, VOCABULARY
from tests.scheduler.speed import arguments

POST: Any = vllm_client.VLLMClient._post


class Timed(GRPOTrainer):
    """TRL's trainer, whose loss is 0, and which keeps when it asks for responses and has them."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.asked_at = time.perf_counter()
        return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts: list[Any]) -> Any:
        found = super()._generate(prompts)
        self.rollout_s = time.perf_counter() - self.asked_at
        return found

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        return 0 * next(iter(model.parameters())).sum()


class Lines(TrainerCallback):
    """The driver's lines. As a reward, it keeps what a step trains on."""

    __name__ = "lines"

    def __init__(self, out: Any) -> None:
        self.out = out
        self.trainer: Any = None
        self.trained: dict[str, list[int]] = {}
        self.lengths: list[int] = []
        self.evaluated: list[int] = []

    def __call__(self, completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        if not self.trainer.model.training:
            self.evaluated += row
            return [0.0] * len(row)
        self.lengths = [*map(len, completion_ids)]
        places: dict[int, int] = {}
        for number, tokens in zip(row, completion_ids, strict=True):
            places[number] = places.get(number, -1) + 1
            name = f"{number}/{places[number]}"
            assert name not in self.trained, f"{name} is trained on twice"
            self.trained[name] = tokens
        return [0.0] * len(row)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, trainer = time.perf_counter(), self.trainer
        line = {"step": state.global_step, "rollout_s": trainer.rollout_s, "lengths": self.lengths}
        print(json.dumps(line | {"step_s": now - self.start}), file=self.out, flush=True)
        self.start = now

    def hashes(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]
            for name, tokens in self.trained.items()
        }


def fake_vllm(seed: int, tokenizer: Any) -> None:
    """Have TRL take vLLM for installed and weights for sent, and give its responses seeds."""
    client: Any = vllm_client.VLLMClient
    there: Any = lambda *_, **__: True  # noqa: E731
    vllm_generation.is_vllm_available = vllm_client.is_vllm_available = there
    client.init_communicator = client.update_named_params = lambda *_, **__: None

    def post_with_seeds(self: Any, url: str, json: Any = None) -> Any:
        if url.endswith("/v1/completions"):
            rows = [int(tokenizer.decode(prompt)) for prompt in json["prompt"]]
            prompts = [PromptId("train", 0, row) for row in rows]
            samples = [[SampleId(one, n, 0) for n in range(json["n"])] for one in prompts]
            json = json | {"seeds": [[sample_key(seed, one) >> 1 for one in of] for of in samples]}
        return POST(self, url, json=json)

    client._post = post_with_seeds


def train(
    url: str,
    asked: argparse.Namespace,
    lines: Lines,
    folder: Path,
    *,
    resume: str = "",
    sets_trainer: bool = True,
    **changes: Any,
) -> RolloutFunction | None:
    """Train on `asked.steps` steps of prompts."""
    tokenizer = write_character_tokenizer("0123456789", folder)
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=2 * LONGEST))
    fake_vllm(asked.seed, tokenizer)
    num_rows = asked.steps * asked.prompts
    rows = Dataset.from_list([{"prompt": f"{n:06d}", "row": n} for n in range(num_rows)])
    rest: dict[str, Any] = {"train_dataset": rows, "callbacks": [lines]}
    rollout = None
    if asked.mode != "plain":
        rollout = rollout_function(rows, enabled=asked.mode == "on", prompt_factor=1.25)
        rest = {"train_dataset": rollout.dataset, "rollout_func": rollout}
        rest["callbacks"] = [rollout, lines]
    if changes.get("eval_strategy"):
        rest["eval_dataset"] = rows.select(range(2))
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_importance_sampling_correction": False,  # needs the model's log-probs
        "per_device_train_batch_size": asked.prompts * asked.samples,
        "num_generations": asked.samples,
        "max_completion_length": LONGEST,
        "num_train_epochs": 1,
        "beta": 0.0,
        "learning_rate": 0.0,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": asked.seed,
    }
    args = GRPOConfig(**{**settings, **changes})
    own = Timed(model=model, reward_funcs=lines, args=args, processing_class=tokenizer, **rest)
    lines.trainer = own
    if rollout is not None and sets_trainer:
        rollout.trainer = own
    own.train(resume_from_checkpoint=resume or None)
    return rollout


def main() -> None:
    asked, out = arguments(), sys.stdout
    sys.stdout = sys.stderr  # what others print
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    lines = Lines(out)
    with trl_server.process(asked.token_s) as url, tempfile.TemporaryDirectory() as folder:
        train(url, asked, lines, Path(folder))
    print(json.dumps({"responses": lines.hashes()}), file=out, flush=True)


if __name__ == "__main__":
    main()
