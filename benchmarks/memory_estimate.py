"""The memory that `--dry-run` predicts for training against what training takes.

Models of 50 to 150 million random weights, float32 on one CPU thread. A first step of one sample
makes the optimizer's state; of the second, of two full micro-batches, the peak of the resident set
is measured, above what was there before the model was loaded. Every setting runs twice: glibc's
malloc keeps blocks of less than 32 MB that were freed, by the order of sizes, which the estimate
does not count. In the run that it is held against, each block of more than 1 MiB has a mapping of
its own; what malloc as it is takes on top is told beside.

    python benchmarks/memory_estimate.py
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lab import bench, in_process
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.engines.embedded.attention import install_attention
from rollpacker.rewards.reward import RewardConfig
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.memory import PeakMemory
from rollpacker.trainer.trainer import ModelConfig, TrainConfig, TrainSample

VOCABULARY = 32_000
PROMPT_TOKENS = 16
SMALL = {
    **{"model_type": "qwen2", "vocab_size": VOCABULARY, "max_position_embeddings": 8192},
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
}
LARGE = SMALL | {
    **{"hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 12},
    **{"num_hidden_layers": 14, "tie_word_embeddings": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    architecture: dict[str, Any]
    row_tokens: int
    """Of a prompt and its response; every sample is as long as it may be."""
    micro_batch_tokens: int
    gradient_checkpointing: bool = False


SETTINGS = {
    "plain": Setting(architecture=SMALL, row_tokens=257, micro_batch_tokens=2048),
    "checkpointing": Setting(
        architecture=LARGE, row_tokens=257, micro_batch_tokens=1024, gradient_checkpointing=True
    ),
    "long samples": Setting(architecture=SMALL, row_tokens=1537, micro_batch_tokens=1024),
    "short samples": Setting(architecture=LARGE, row_tokens=65, micro_batch_tokens=4096),
    "wide and shallow": Setting(
        architecture=SMALL | {"hidden_size": 1024, "num_hidden_layers": 6},
        row_tokens=513,
        micro_batch_tokens=1536,
    ),
}
MALLOCS = {"returned": {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}, "as it is": {}}
"""Environment variables of glibc's malloc."""
MAX_ERROR = 0.10
"""A long sample is longer than a micro-batch, and has one of its own."""


def _in_process(name: str) -> dict[str, Any]:
    setting = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        _save_model(setting, folder)
        predicted = estimate(_run_config(setting, folder), has_cuda=False)
        measured = {
            malloc: in_process(__file__, "--measure", name, "--model", folder, environ=env)
            for malloc, env in MALLOCS.items()
        }
    parts = {p.name: p.size_bytes for p in predicted.memory.parts if p.name != "kv cache"}
    total = sum(parts.values())
    return {
        "setting": dataclasses.asdict(setting),
        "parameters": predicted.num_parameters,
        "predicted_bytes": total,
        "predicted_parts": parts,
        "measured_bytes": measured["returned"],
        "relative_error": total / measured["returned"] - 1,
        "measured_bytes_with_malloc_as_it_is": measured["as it is"],
        "kept_by_malloc": measured["as it is"] / measured["returned"] - 1,
    }


def _save_model(setting: Setting, folder: str) -> None:
    random_model(setting.architecture).save_pretrained(folder)


def random_model(architecture: dict[str, Any], dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**architecture)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def _measure(setting: Setting, folder: str) -> int:
    """Bytes."""
    torch.set_num_threads(1)
    config = _run_config(setting, folder)
    batch = samples(_num_samples(setting), setting.row_tokens)

    def build() -> Learner:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return new_learner(model, config, gradient_checkpointing=setting.gradient_checkpointing)

    return peak_bytes(build, batch)


def new_learner(model: Any, config: RunConfig, **parts: Any) -> Learner:
    install_attention(model)
    return Learner(
        model=model,
        tokenizer=None,
        pad_token_id=0,
        config=config.train,
        algorithm=config.algorithm,
        temperature=1.0,
        total_steps=None,
        **parts,
    )


def peak_bytes(build: Callable[[], Learner], batch: Sequence[TrainSample]) -> int:
    """The peak of a second step with this batch, above what was there before `build`."""
    before = PeakMemory(torch.device("cpu"))
    assert before.resets, "the peak cannot be set back on this system"
    learner = build()
    learner.accumulate(batch[:1])
    learner.apply()
    learner.accumulate(batch)
    return learner.apply().peak_memory_bytes - before.mark_bytes


def _run_config(setting: Setting, folder: str) -> RunConfig:
    checkpointing = setting.gradient_checkpointing
    return run_config(
        ModelConfig(path=folder, device="cpu", gradient_checkpointing=checkpointing),
        TrainConfig(steps=2, micro_batch_tokens=setting.micro_batch_tokens),
        _num_samples(setting),
        setting.row_tokens,
    )


def run_config(
    model: ModelConfig, train: TrainConfig, num_samples: int, row_tokens: int, **more: Any
) -> RunConfig:
    """A run whose steps are so many samples of such rows."""
    return RunConfig(
        name="memory",
        model=model,
        data=DataConfig(
            train=DatasetConfig(kind="jsonl", path="none"), max_prompt_tokens=PROMPT_TOKENS
        ),
        rollout=RolloutConfig(
            prompts_per_step=1,
            samples_per_prompt=num_samples,
            max_response_tokens=row_tokens - PROMPT_TOKENS,
        ),
        train=train,
        rewards=(RewardConfig(function="none:none"),),
        **more,
    )


def _num_samples(setting: Setting) -> int:
    """Two micro-batches of them."""
    return 2 * max(setting.micro_batch_tokens // (setting.row_tokens - 1), 1)


def samples(count: int, row_tokens: int) -> list[TrainSample]:
    """Rows of this length, of random tokens."""
    draw = torch.Generator().manual_seed(0)
    size = row_tokens - PROMPT_TOKENS
    return [
        TrainSample(
            sample=SampleId(PromptId("train", 0, 0), index, 0),
            prompt_tokens=(1,) * PROMPT_TOKENS,
            response_tokens=tuple(torch.randint(VOCABULARY, (size,), generator=draw).tolist()),
            rollout_log_probs=(-10.0,) * size,
            advantage=1.0 if index % 2 else -1.0,
            token_weight=1 / (count * size),
        )
        for index in range(count)
    ]


def main(
    only: str | None = None, measure: str | None = None, model: str = ""
) -> dict[str, Any] | None:
    """`measure`: run that setting here, with the model in this folder."""
    if measure is not None:
        print(json.dumps(_measure(SETTINGS[measure], model)))
        return None
    results = {name: _in_process(name) for name in ([only] if only else SETTINGS)}
    kept = [one["kept_by_malloc"] for one in results.values()]
    return {
        "max_error": max(abs(result["relative_error"]) for result in results.values()),
        "aim": MAX_ERROR,
        "kept_by_malloc": [round(min(kept), 3), round(max(kept), 3)],
        "settings": results,
    }


if __name__ == "__main__":
    bench(
        main,
        holds=lambda found: found["max_error"] <= MAX_ERROR,
        only=SETTINGS,
        measure=SETTINGS,
    )
