"""What a decode step of several tokens a row costs in plain ones: `STEP_COST` of drafts.py.

For the quickstart's model and two larger ones with random weights: seconds of the processor of a
plain step and of an extend step over the same rows, at two depths, in turns. `predicted` is what
the constants in `rollpacker/engines/embedded/drafts.py` say.

    python benchmarks/draft_costs.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import write_result
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from workload import add_workload_arguments, load_workload

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.drafts import MAX_ROWS, STEP_COST
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.embedded.extend import Guess
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import EngineConfig, GenerationRequest, SamplingParams

SIZES = {
    "1 M": (512, 128, 512, 4, 4, 2),
    "25 M": (4096, 512, 1536, 8, 8, 2),
}
"""Vocabulary, width, inner width, layers, heads, key heads."""
ROWS = (1, 4, 16, 64, MAX_ROWS)
TOKENS = (1, 2, 4, 8, 16, 32)
DEPTHS = (100, 250)
MAX_POSITIONS = 4096
"""Rows times tokens: larger steps are never taken."""


def random_model(size: str) -> PreTrainedModel:
    vocabulary, width, inner, layers, heads, key_heads = SIZES[size]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config)


def measure(model: PreTrainedModel, repeats: int) -> list[dict[str, Any]]:
    results = []
    for num_rows in ROWS:
        engine = TorchEngine(model=model.eval(), tokenizer=None, config=EngineConfig())
        sizes = [tokens for tokens in (0, *TOKENS) if num_rows * tokens <= MAX_POSITIONS]
        with torch.inference_mode():
            entries = [_entry(row) for row in range(num_rows)]
            engine._decoder.reserve(entries)
            engine._decoder.admit(entries, None)
            for depth in DEPTHS:
                while int(engine._decoder.rows.host_column("count")[0]) < depth:
                    engine._decoder.step()
                seconds: dict[int, list[float]] = {tokens: [] for tokens in sizes}
                for _ in range(repeats):
                    for tokens in sizes:
                        seconds[tokens].append(_step_s(engine, num_rows, tokens))
                        engine._decoder.rows.cut(np.arange(num_rows), [depth] * num_rows)
                        engine._decoder.forget_plan()
                results.append(_summary(num_rows, depth, seconds))
                print(results[-1], flush=True)
    return results


def _step_s(engine: TorchEngine, num_rows: int, tokens: int) -> float:
    """Of a step of so many tokens a row; 0: of a plain one."""
    rows, guesses = np.arange(num_rows), [Guess((7,) * (tokens - 1))] * num_rows
    start = time.process_time()
    if tokens:
        engine._extender.extend(rows, guesses)
    else:
        engine._decoder.step()
    return time.process_time() - start


def _entry(row: int) -> Pending:
    request = GenerationRequest(
        sample=SampleId(PromptId("train", 0, row), 0, 0),
        prompt_tokens=(1, 2, 3, 4, 5),
        sampling=SamplingParams(max_response_tokens=400),
        forced_length=400,
    )
    return Pending(request, row)


def _summary(num_rows: int, depth: int, seconds: dict[int, list[float]]) -> dict[str, Any]:
    plain_row, overhead, per_row, per_token = STEP_COST["cpu"]
    plain = median(seconds[0])
    return {
        "rows": num_rows,
        "depth": depth,
        "plain_us": round(1e6 * plain),
        "cost": {str(t): round(median(s) / plain, 2) for t, s in seconds.items() if t and s},
        "predicted": {
            str(t): round(
                (overhead + num_rows * (per_row + per_token * t)) / (1 + plain_row * num_rows), 2
            )
            for t, s in seconds.items()
            if t
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_arguments(parser)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    config = load_workload(args)
    torch.set_num_threads(args.threads)
    quickstart = AutoModelForCausalLM.from_pretrained(config.model.path)
    results = {"quickstart": measure(quickstart, args.repeats)}
    for size in SIZES:
        results[size] = measure(random_model(size), max(3, args.repeats // 3))
    write_result(
        "draft_costs",
        {"step_cost": STEP_COST, "repeats": args.repeats, "threads": args.threads, **results},
    )


if __name__ == "__main__":
    main()
