"""TRL's `GRPOTrainer`, taking turns on a rollout pool and a training pool with other jobs.

    python examples/trl_shared/train.py --output out --steps 4

By itself it trains as TRL does. As a job of a cluster it computes the same, bit for bit.
`SharedGRPOTrainer` is what a script of yours needs; the rest is a tiny model with random weights,
made here. Here one model generates and is trained. With vLLM, `park` and `wake` of the rollout
phase are the engine's `sleep` and `wake_up`.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import rollpacker.cluster as cluster
from rollpacker.trainer.model import write_character_tokenizer


class SharedGRPOTrainer(GRPOTrainer):
    """Holds the rollout pool while it generates, the training pool while its model does anything
    else, and none while it judges or waits."""

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        self._told_step = -1
        # The optimizer is made later.
        self._hooks = cluster.parking(self.model, self.ref_model, lambda: self.optimizer)
        self._pool: str | None = None
        with ExitStack() as self._held:
            self._hold("train")
            return super().train(*arguments, **keywords)

    def _hold(self, pool: str) -> None:
        if pool != self._pool:
            self._let_go()
            park, wake = self._hooks
            self._held.enter_context(cluster.phase(pool, park=park, wake=wake))
            self._pool = pool

    def _let_go(self) -> None:
        self._held.close()
        self._pool = None

    def _generate(self, *arguments: Any, **keywords: Any) -> Any:
        self._hold("rollout")
        found = super()._generate(*arguments, **keywords)
        self._let_go()  # rewards come next
        return found

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        self._hold("train")  # until the step, its log and its checkpoint are done
        return super()._get_per_token_logps_and_entropies(*arguments, **keywords)

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self._hold("train")
        super()._save_checkpoint(*arguments, **keywords)

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        super()._maybe_log_save_evaluate(*arguments, **keywords)
        self._let_go()
        step = self.state.global_step
        if step != self._told_step:  # an epoch's end comes right after its last step
            self._told_step = step
            cluster.committed(step)


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(str.isdigit, text))) for text in completions]


def make_trainer(output: Path, steps: int, seed: int) -> SharedGRPOTrainer:
    write_character_tokenizer("0123456789+-=", output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return SharedGRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=str(output),
            max_steps=steps,
            save_steps=1,  # a job goes on after the last step that is saved
            save_total_limit=1,
            per_device_train_batch_size=12,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=24,
            learning_rate=1e-3,
            logging_steps=1,
            seed=seed,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": f"{n}+{n % 7}="} for n in range(64)]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="goes on from what is there")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(arguments.output, arguments.steps, arguments.seed)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(arguments.output)))


if __name__ == "__main__":
    main()
