"""Memory and time of a forward and backward pass with a large vocabulary: the policy's blocks
against full logits.

One decoder layer under an output layer of 151,936 words, 8,192 tokens, float32 on a CPU thread.
Each way runs in a process of its own. Counted is the peak of the resident set above what was there
with the model and its gradients in place. Full logits are 5 GB there and exist three times over;
`--tokens 2048` is for smaller machines.

    python benchmarks/trainer_memory.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lab import bench, in_process
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rollpacker.trainer.memory import PeakMemory
from rollpacker.trainer.micro_batch import MicroBatch, Row, collate
from rollpacker.trainer.policy import Policy

VOCABULARY = 151_936
HIDDEN = 128
ROWS = 8
ARMS = ("plain", "policy")
MAX_SHARE = 1 / 3
MAX_GRADIENT_ERROR = 1e-4
"""Relative, of the gradient of each parameter, in float32."""


def _run_arm(arm: str, tokens: int, output: Path) -> None:
    # If memory is short, this process is the one to go.
    Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    model, batch = _model(), _batch(tokens)
    policy = Policy(model)
    assert policy.runs_in_blocks
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).fill_(0)  # resident from here on
    peak = PeakMemory(torch.device("cpu"))
    assert peak.resets, "the peak cannot be set back on this system"
    started = time.perf_counter()
    log_probs = policy(batch, 1.0)[0] if arm == "policy" else _plain_log_probs(model, batch)
    log_probs.mean().backward()
    seconds = time.perf_counter() - started
    print(json.dumps({"peak_bytes": peak.above_mark(), "seconds": seconds}))
    save_file({n: p.grad for n, p in model.named_parameters()}, output)


def _plain_log_probs(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The usual way, as lean as it gets: every position is a target, and there is neither a
    temperature nor an entropy."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits.flatten(0, 1)
    assert len(logits) == len(batch.targets)
    return logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def _gradient_error(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    errors = [(actual[n] - g).norm() / g.norm() for n, g in expected.items() if g.norm() > 0]
    assert len(errors) > len(expected) / 2, "most gradients are 0"
    return max(error.item() for error in errors)


def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes)).eval()


def _batch(tokens: int) -> MicroBatch:
    """Every token is a target."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (ROWS, tokens // ROWS + 1), generator=draw).tolist()
    return collate([Row(row[:1], row[1:]) for row in ids], 0, torch.device("cpu"))


def main(
    tokens: int = 8192, arm: str | None = None, output: Path | None = None
) -> dict[str, Any] | None:
    """`arm`: one, in this process, which writes its gradients to `output`."""
    if arm is not None and output is not None:
        _run_arm(arm, tokens, output)
        return None
    with tempfile.TemporaryDirectory() as folder:
        outputs = {arm: Path(folder) / arm for arm in ARMS}
        results = {
            arm: in_process(
                __file__, "--arm", arm, "--tokens", str(tokens), "--output", str(outputs[arm])
            )
            for arm in ARMS
        }
        error = _gradient_error(*(load_file(path) for path in outputs.values()))
    return {
        "vocabulary": VOCABULARY,
        "tokens": tokens,
        "hidden": HIDDEN,
        "full_logits_bytes": 4 * VOCABULARY * tokens,
        "arms": results,
        "peak_share": results["policy"]["peak_bytes"] / results["plain"]["peak_bytes"],
        "max_peak_share": MAX_SHARE,
        "gradient_error": error,
    }


def holds(found: dict[str, Any]) -> bool:
    """Whether as little memory is taken as is claimed, for the same gradients."""
    return found["peak_share"] <= MAX_SHARE and found["gradient_error"] <= MAX_GRADIENT_ERROR


if __name__ == "__main__":
    bench(main, holds=holds, arm=ARMS)
