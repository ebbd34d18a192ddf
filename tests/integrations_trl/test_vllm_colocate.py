"""TRL's `use_vllm` with the engine in the trainer's own process: make test-vllm.

TRL, its `VLLMGeneration` and vLLM are the real ones, on a CPU. Faked is the way of weights: vLLM's
CPU build cannot take them in as TRL gives them, so the policy stands still at what vLLM has loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import sample_key
from rollpacker.integrations.trl import rollout_function
from rollpacker.trainer.model import write_character_tokenizer
from tests.engines.tiny import tiny_model

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM: make vllm, then make test-vllm"
    ),
    pytest.mark.timeout(900),
]

NUM_ROWS, PROMPTS, SAMPLES, SEED = 24, 6, 4, 3
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as TRL has it
    "VLLM_HOST_IP": "127.0.0.1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
Trained = Counter[tuple[int, tuple[int, ...]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_character_tokenizer("0123456789+-=", folder)
    shape: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_model(vocab_size=len(tokenizer), **shape, **ends).save_pretrained(folder)
    return folder


def trained(folder: Path, output: Path, rollout: Any, **changes: Any) -> Trained:
    """What is trained on, in one epoch."""
    found: Trained = Counter()

    def keep(completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        found.update((n, tuple(ids)) for n, ids in zip(row, completion_ids, strict=True))
        return [float(len(ids) % 3) for ids in completion_ids]

    rows = rows_of()
    rest: dict[str, Any] = {"train_dataset": rows}
    if rollout is not None:
        rest = {"train_dataset": rollout.dataset, "rollout_func": rollout, "callbacks": [rollout]}
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "per_device_train_batch_size": PROMPTS * SAMPLES,
        "num_generations": SAMPLES,
        "max_completion_length": 60,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }
    own = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=keep,
        args=GRPOConfig(**settings | changes),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **rest,
    )
    if rollout is None:
        with_seeds(own.vllm_generation.llm, own.processing_class)
    else:
        rollout.trainer = own
    own.train()
    return found


def rows_of() -> Dataset:
    return Dataset.from_list([{"prompt": f"{n:03d}=", "row": n} for n in range(NUM_ROWS)])


def with_seeds(llm: Any, tokenizer: Any) -> None:
    """Have TRL's own generation give each response the seed of the scheduler."""
    generate = llm.generate

    def seeded(prompts: Any, sampling_params: Any, **rest: Any) -> Any:
        given, places = [], Counter[int]()
        for prompt in prompts:
            row = int(tokenizer.decode(prompt["prompt_token_ids"])[:3])
            sample = SampleId(PromptId("train", 0, row), places[row], 0)
            places[row] += 1
            given.append(sampling_params.clone())
            given[-1].seed = sample_key(SEED, sample) >> 1
        return generate(prompts, sampling_params=given, **rest)

    llm.generate = seeded


def stand_still() -> None:
    """Have TRL leave vLLM's weights as they are."""
    VLLMGeneration.sync_weights = lambda self: self.llm.reset_prefix_cache()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """What TRL alone trains on, with its own way to generate."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(VLLMGeneration, "sync_weights", VLLMGeneration.sync_weights)  # put back
        stand_still()
        found = trained(folder, tmp_path_factory.mktemp("plain"), None)
        assert found.total() == NUM_ROWS * SAMPLES
        yield found


@pytest.mark.parametrize("enabled", [True, False])
def test_only_the_order_changes(
    plain: Trained, folder: Path, tmp_path: Path, enabled: bool
) -> None:
    rollout = rollout_function(rows_of(), enabled=enabled)
    assert trained(folder, tmp_path, rollout) == plain


def test_two_processes_have_a_vllm_each(plain: Trained, folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.integrations_trl.test_vllm_colocate", str(folder), str(tmp_path)]
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # TRL has set them
    rest = {name: value for name, value in os.environ.items() if name not in ours}
    root = Path(__file__).parents[2]
    two = subprocess.run(command, cwd=root, env=rest, capture_output=True, text=True)
    assert two.returncode == 0, two.stderr[-3000:]
    found: Trained = Counter()
    for rank in (0, 1):
        pairs = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(pairs) == NUM_ROWS * SAMPLES // 2
        found.update((row, tuple(tokens)) for row, tokens in pairs)
    assert found == plain


def main(folder: Path, output: Path) -> None:
    """One of two processes: train, and write what on."""
    stand_still()
    half = {"per_device_train_batch_size": PROMPTS * SAMPLES // 2}
    found = trained(folder, output, rollout_function(rows_of()), **half)
    (output / f"rank{os.environ['RANK']}.json").write_text(json.dumps([*found.elements()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
