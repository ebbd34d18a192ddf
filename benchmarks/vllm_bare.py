"""The arm of vllm_engine.py that has vLLM alone: tasks in by line, seconds out."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import torch
from vllm import LLM, SamplingParams


def main() -> None:
    folder, kv_cache_gib, block_tokens = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    engine = LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=block_tokens,
        kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
        logprobs_mode="processed_logprobs",
    )
    print("READY", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        params = SamplingParams(
            temperature=task["temperature"],
            top_p=task["top_p"],
            max_tokens=task["length"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
        start, busy = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = [time.perf_counter() - start, time.process_time() - busy]
        assert all(len(output.outputs[0].token_ids) == task["length"] for output in outputs)
        assert all(output.outputs[0].logprobs is not None for output in outputs)
        print("SECONDS", json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
