"""verl's own training command on a CPU, with a model of 0.6 million random parameters."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES = 2, 4
"""Prompts that a step trains on, and responses to each."""
NUM_ENDS = 8
"""Tokens that end a response, of 264: random models seldom draw the one that a tokenizer has."""

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.integrations_verl.verl_on_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # under whose name the trainer's engines are registered
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else all of a busy machine goes before verl
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
}
_OVERRIDES = """
algorithm.adv_estimator=grpo data.train_batch_size=2 data.max_prompt_length=64
data.max_response_length=160 data.dataloader_num_workers=0 data.filter_overlong_prompts=False
data.shuffle=True data.seed=1
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.dtype=float32
actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.free_cache_engine=False
+actor_rollout_ref.rollout.enable_sleep_mode=False actor_rollout_ref.rollout.load_format=auto
actor_rollout_ref.rollout.max_num_seqs=16 actor_rollout_ref.rollout.max_model_len=256
actor_rollout_ref.rollout.gpu_memory_utilization=0.2
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
reward.custom_reward_function.name=share_of_digits reward.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.val_before_train=False
data.val_max_samples=4 trainer.total_epochs=1
ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=1
+ray_kwargs.ray_init.include_dashboard=False
"""


def settings(inputs: Path, folder: Path) -> list[str]:
    """verl's settings to train with what `write_inputs` wrote. Checkpoints go into `folder`."""
    return [
        *_OVERRIDES.split(),
        f"data.train_files={inputs}/prompts.parquet",
        f"data.val_files={inputs}/prompts.parquet",
        f"actor_rollout_ref.model.path={inputs}/model",
        f"reward.custom_reward_function.path={__file__}",
        f"trainer.default_local_dir={folder}",
        'trainer.logger=["console","file"]',
    ]


def share_of_digits(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """The reward: the share of a response's characters that are digits."""
    return sum(one.isdigit() for one in solution_str) / max(len(solution_str), 1)


def write_inputs(folder: Path, num_prompts: int = 64) -> None:
    """Write the model, its byte-level tokenizer and the prompts."""
    import pandas
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
    words += sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<{index}>" for index in range(264 - len(words))]  # as many as the model draws
    vocabulary = {word: index for index, word in enumerate(words)}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.Fuse()  # no two responses read the same
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    ends = [1, *range(200, 200 + NUM_ENDS - 1)]
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=ends,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "made up",
            "prompt": [{"role": "user", "content": f"count {index}"}],
            "reward_model": {"style": "rule", "ground_truth": str(index)},
            "extra_info": {"index": index},
        }
        for index in range(num_prompts)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")


class Training:
    """A run of verl that has ended: what its steps reported, and what they trained on."""

    def __init__(
        self, inputs: Path, folder: Path, *overrides: str, killed_at: str | None = None
    ) -> None:
        """Run verl's command with these settings. It resumes what is in `folder`. `killed_at`: all
        of its processes are killed once a file of this name is in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        given = [
            *settings(inputs, folder),
            f"trainer.rollout_data_dir={folder}/rollouts",
            *overrides,
        ]
        log, output = folder / "metrics.jsonl", folder / "output.txt"
        environment = {**os.environ, **ENVIRONMENT, "VERL_FILE_LOGGER_PATH": str(log)}
        environment |= {"PYTHONPATH": str(ROOT)}
        with output.open("w") as written:
            run = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *given],
                env=environment,
                cwd=folder,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        try:
            if killed_at is not None:
                _wait_for(folder / killed_at, run)
            else:
                run.wait(timeout=900)
        finally:
            _kill(run)
        self.output, self.returncode = output.read_text(errors="replace"), run.returncode
        self.metrics: dict[int, dict[str, float]] = {}
        if log.exists():
            for line in log.read_text().splitlines():
                row = json.loads(line)
                self.metrics[row["step"]] = row["data"]
        self.trained: dict[int, dict[str, list[str]]] = {}
        """For each step the sorted responses of each of its prompts, by the prompt's number."""
        for path in folder.glob("rollouts/*.jsonl"):
            step = self.trained.setdefault(int(path.stem), {})
            for line in path.read_text().splitlines():
                row = json.loads(line)
                prompt = re.search(r"count\D(\d+)", row["input"])
                assert prompt
                step.setdefault(prompt[1], []).append(row["output"])
            for outputs in step.values():
                outputs.sort()


def _wait_for(path: Path, run: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 900
    while not path.exists():
        assert run.poll() is None and time.monotonic() < limit, f"{path} did not come"
        time.sleep(0.02)


def _kill(run: subprocess.Popen[bytes]) -> None:
    """Kill a run and all that it started, ray's processes among them, as a machine's end would."""
    with contextlib.suppress(psutil.NoSuchProcess):
        everything = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        for one in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    run.wait()
