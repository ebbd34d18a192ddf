"""Tail batching in other people's trainers: what it saves there, and what it leaves as it was.

Each host trains on the same prompts in three ways, which take turns: `plain` is the host's own
synchronous mode, `off` goes through the scheduler without tail batching, `on` has it. Servers are
made up: a token takes `--token-s` seconds whatever the batch, lengths are log-normal with median 20
and 99th percentile 400 and end at 640, and a response depends on its prompt and seed alone. Tokens
are so slow that a step waits for them, and not for this machine. The claims, for each host: rollout
seconds of plain are at least 1.6 times those of on; the mean length is the same within 1 %; every
response that both trained on is equal, token for token; off takes less than 2 % longer than plain.

    python benchmarks/hosts.py [--hosts example slime] [--steps 20] [--repetitions 2]

A host whose driver (`tests/.../speed.py`) or environment is missing is left out, which is said.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from lab import ROOT, bench, markdown, turns

MODES = ("plain", "off", "on")
HOSTS = {
    "example": (".venv", "tests.scheduler.speed"),
    "slime": (".venv", "tests.integrations_slime.speed"),
    "TRL": (".venv", "tests.integrations_trl.speed"),
    "verl": (".venv-verl", "tests.integrations_verl.speed"),
}
"""The environment that runs a host's driver, and the driver's module."""
LEAST_RATIO, MOST_SHIFT, MOST_OVERHEAD, LEAST_SHARED = 1.6, 0.01, 0.02, 0.9
"""The claims, and the share of plain's responses that the others must have trained on too."""


def main(
    hosts: tuple[str, ...] = tuple(HOSTS),
    steps: int = 20,
    prompts: int = 64,
    samples: int = 8,
    token_s: float = 0.02,
    repetitions: int = 2,
) -> dict[str, Any]:
    options = {"steps": steps, "prompts": prompts, "samples": samples, "token-s": token_s}
    left_out = {host: why for host in hosts if (why := missing(host))}
    print(*(f"{host} is left out: {why}" for host, why in left_out.items()), sep="\n", flush=True)
    arms = [(host, mode) for host in hosts if host not in left_out for mode in MODES]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {arm: [] for arm in arms}
    failed = {}
    for seed, (host, mode) in turns(arms, repetitions):
        if host not in failed:
            try:
                runs[host, mode].append(drive(host, mode, options | {"seed": seed}))
            except RuntimeError as error:
                failed[host] = str(error)
                print(f"{host} {mode}: {error}", flush=True)
    whole = {host: [runs[host, mode] for mode in MODES] for host, _ in arms if host not in failed}
    found = {host: findings(*of) for host, of in whole.items()}
    head = ("plain_s", "off_s", "on_s", "plain_over_on", "length_shift", "equal", "overhead")
    print(markdown(("host", *head), [(h, *(one[c] for c in head)) for h, one in found.items()]))
    rest = {"repetitions": repetitions, "left_out": left_out, "failed": failed}
    return {**options, **rest, "hosts": found}


def missing(host: str) -> str:
    """Why a host cannot be measured here; empty if it can."""
    environment, module = HOSTS[host]
    paths = (f"{module.replace('.', '/')}.py", f"{environment}/bin/python")
    return ", ".join(f"{path} is not there" for path in paths if not (ROOT / path).exists())


def drive(host: str, mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run one driver to its end. Returns its steps and its responses."""
    environment, module = HOSTS[host]
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [str(ROOT / environment / "bin/python"), "-m", module, "--mode", mode, *words]
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    *rows, last = [json.loads(one) for one in done.stdout.splitlines() if one[0] == "{"] or [{}]
    if done.returncode or "responses" not in last:
        raise RuntimeError(f"the driver ended with {done.returncode}: {done.stderr[-2000:]}")
    if sum(len(step["lengths"]) for step in rows) != len(last["responses"]):
        raise RuntimeError("a response was trained on twice")
    print(f"{host} {mode}: {total(rows, 'rollout_s'):.1f} s of rollouts", flush=True)
    return {"steps": rows, **last}


def findings(*runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the runs of plain, off and on say, by repetition."""
    plain, off, on = ([step for run in of for step in run["steps"]] for of in runs)
    before, after = (statistics.mean(n for s in of for n in s["lengths"]) for of in (plain, on))
    equal = shared = 0
    for own, *others in zip(*([run["responses"] for run in of] for of in runs), strict=True):
        for other in others:
            both = own.keys() & other.keys()
            shared, equal = shared + len(both), equal + sum(own[one] == other[one] for one in both)
    pairs = [there["step_s"] / own["step_s"] - 1 for own, there in zip(plain, off, strict=True)]
    return {
        "plain_s": round(total(plain, "rollout_s"), 1),
        "off_s": round(total(off, "rollout_s"), 1),
        "on_s": round(total(on, "rollout_s"), 1),
        "plain_over_on": round(total(plain, "rollout_s") / total(on, "rollout_s"), 2),
        "length_shift": round(after / before - 1, 4),
        "equal": f"{equal} of {shared}",
        "shared": round(shared / sum(2 * len(run["responses"]) for run in runs[0]), 3),
        "overhead": round(statistics.median(pairs), 4),
        "overhead_in_total": round(total(off, "step_s") / total(plain, "step_s") - 1, 4),
    }


def total(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(step[key] for step in steps))


def holds(found: Mapping[str, Any]) -> bool:
    return not found["failed"] and all(
        one["plain_over_on"] >= LEAST_RATIO
        and abs(one["length_shift"]) <= MOST_SHIFT
        and len(set(one["equal"].split(" of "))) == 1
        and one["shared"] >= LEAST_SHARED
        and one["overhead"] < MOST_OVERHEAD
        for one in found["hosts"].values()
    )


if __name__ == "__main__":
    bench(main, holds=holds, hosts=HOSTS)
