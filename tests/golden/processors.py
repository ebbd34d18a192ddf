"""Decisions under the kernels of other processors.

`python -m tests.golden.processors` prints a digest of what the core decides in `SOME` of the golden
simulations, of its answers to every recorded log, and of the longest of its fits. The test runs it
in child processes in which parts of the processor are hidden from numpy, OpenBLAS, torch and the C
library (`KERNELS`), and expects the digests that `golden.json` has.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOGS = sorted((HERE / "logs").glob("*.jsonl.gz"))
WORLD_LOGS = sorted((HERE / "worlds").glob("*.jsonl.gz"))
SOME = ("7b-8k plain", "14b-16k auto", "14b-16k moments")
"""Simulations: one without a fit, one that chooses factors, one that weighs samples."""


def kernels() -> dict[str, dict[str, str]]:
    """Sets of variables, each of which hides kernels that this machine has. The first ones hide
    what a processor of some years ago has not, the last one all that can be hidden."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    wide = [name for name in found if name.startswith(("X86_V4", "AVX512", "SVE"))]
    if os.uname().machine != "x86_64":
        sets = {"numpy": {"NPY_DISABLE_CPU_FEATURES": " ".join(found)}}
        return sets | {"OpenBLAS": {"OPENBLAS_CORETYPE": "ARMV8"}}
    return {
        "no AVX-512": {
            "NPY_DISABLE_CPU_FEATURES": " ".join(wide),
            "OPENBLAS_CORETYPE": "Haswell",
            "ATEN_CPU_CAPABILITY": "avx2",
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW",
        },
        "no fused multiply-add in the C library": {
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F"
        },
        "nothing beyond SSE": {
            "NPY_DISABLE_CPU_FEATURES": " ".join(found),
            "OPENBLAS_CORETYPE": "Prescott",
            "ATEN_CPU_CAPABILITY": "default",
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX,-SSE4_2",
        },
    }


def digest(text: str | bytes) -> str:
    """The first 16 digits of its SHA-256."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]


def answers(log: Path) -> str:
    """The commands, a line each, with which the core answers the events of a recorded log; and
    what it has learned of lengths at the end."""
    from rollpacker.core.job.config import JobConfig
    from rollpacker.core.job.pooled_job import make_job, restore_job
    from rollpacker.core.records import Record, Session, decode, encode

    job, lines = None, []
    for line in gzip.decompress(log.read_bytes()).decode().splitlines():
        entry = decode(line)
        if isinstance(entry, Session):
            config = JobConfig.from_plain(entry.job)
            if job is None:
                job = make_job(config)
            else:
                job = restore_job(config, job.state(), data_ended=entry.data_ended)
        elif isinstance(entry, Record):
            assert job is not None
            commands = tuple(job.handle(entry.event))
            lines.append(encode(msgspec.structs.replace(entry, commands=commands)))
    assert job is not None
    return "\n".join([*lines, json.dumps(job.lengths.state(), sort_keys=True)])


def fits() -> str:
    """What a fit of lengths finds from its beginning, and what is planned with it; all digits."""
    from rollpacker.core.lengths.counts import PromptLengths
    from rollpacker.core.lengths.factor_plan import StepTime, predict
    from rollpacker.core.lengths.fit import choose_length_model

    prompts = []
    for number in range(400):
        lengths = sorted(1 + (number * 97 + place * place * 31 + 7) % 1900 for place in range(8))
        prompts.append(PromptLengths(finished=tuple(lengths[:6]), stopped=(lengths[5],) * 2))
    model = choose_length_model(prompts, cap=2048, max_iterations=25)
    time = StepTime(per_step_s=0.02, per_token_s=1e-5)
    choices = predict(model, time, prompts_per_step=32, samples_per_prompt=6)
    return json.dumps([model.to_plain(), list(map(str, choices))])


def decisions() -> dict[str, str]:
    """Digest of each kind of decision, by name."""
    from tests.golden.outputs import simulated

    found = {f"simulation {name}": digest(simulated(name)[0]) for name in SOME}
    found |= {f"log {log.name.split('.')[0]}": digest(answers(log)) for log in LOGS}
    found |= {f"world {log.name.split('.')[0]}": digest(answers(log)) for log in WORLD_LOGS}
    return found | {"fits": digest(fits())}


def decisions_under(variables: dict[str, str]) -> dict[str, str]:
    """`decisions` of a child process with these environment variables."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-W", "ignore", "-m", "tests.golden.processors"]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    found: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(decisions()))
