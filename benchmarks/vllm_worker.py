"""vLLM alone in a process of its own, which waits while other arms work: tasks in, seconds out.

python benchmarks/vllm_worker.py SETTINGS      # those of vllm.LLM, as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any


class Bare:
    """The process, as another one has it."""

    def __init__(self, python: str, **settings: Any) -> None:
        """`python` has vLLM; `settings` are those of `vllm.LLM`."""
        self._process = subprocess.Popen(
            [python, __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._read("READY")

    def run(
        self, prompts: list[list[int]], lengths: list[int], **sampling: Any
    ) -> tuple[float, float]:
        """Seconds and processor seconds of responses of these lengths."""
        assert self._process.stdin is not None
        task = {"prompts": prompts, "lengths": lengths, "sampling": sampling}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        seconds, busy = json.loads(self._read("SECONDS"))
        return seconds, busy

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError("vLLM alone has ended; its messages are above")


def main(settings: Mapping[str, Any]) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    engine = LLM(dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **settings)
    torch.set_num_threads(1)
    print("READY", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        forced = {"ignore_eos": True, "detokenize": False, **task["sampling"]}
        params = [SamplingParams(max_tokens=length, **forced) for length in task["lengths"]]
        prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
        start, busy = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = [time.perf_counter() - start, time.process_time() - busy]
        found = [output.outputs[0] for output in outputs]
        assert [len(one.token_ids) for one in found] == task["lengths"]
        assert all((one.logprobs is not None) == ("logprobs" in forced) for one in found)
        print("SECONDS", json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
