"""Resume is exact: k steps, `kill -9`, resume equals the uninterrupted run, for every k.

A tiny model is trained once without interruption. Then, for every k, a run is killed as soon as
step k is committed and resumed to its end; and one run is killed at random moments until it is
through. Compared by SHA-256: weights, optimizer, cursor, job (long queue and ledger) and metrics.
The logs are checked by `exactly_once.py`, which shares no code with RollPacker. Every arm has its
own runs: deferred prompts in a pool or in the long queue, with their tokens carried, or as
published; and the trainer in two pipeline stages.

    python benchmarks/resume.py [--steps 12] [--kills 20] [--arms NAME ...] [--quick]
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exactly_once import check
from lab import bench
from safetensors.numpy import load_file

ARMS = {
    "pool": ("tail_batching.prompt_factor=1.5",),
    "queue": ("tail_batching.prompt_factor=1.5", "tail_batching.stragglers=queue"),
    "ahead": ("tail_batching.prompt_factor=1", "tail_batching.look_ahead=1"),
    "published": ("tail_batching.selection=published",),
    "stages": ("train.processes=2", "train.pipeline.stages=2"),
}

ALPHABET = "0123456789+=aeioubcd"
"""Short, so that a random model ends its responses after some 20 tokens: lengths differ."""


def write_model(folder: Path, **shape: int) -> None:
    """A random Qwen2 of about 30 thousand parameters with a character tokenizer. `shape`: what is
    to be otherwise in its config."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rollpacker.trainer.model import write_character_tokenizer

    torch.manual_seed(0)
    tokenizer = write_character_tokenizer(ALPHABET, folder)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, **shape}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        intermediate_size=64,
        tie_word_embeddings=True,
        **sizes,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_config(folder: Path, steps: int) -> Path:
    """A run with every kind of round, two epochs, and rewards that now and then have no verdict."""
    (folder / "reward.py").write_text(
        "def vowels(completions, **columns):\n"
        "    found = [sum(c in 'aeiou' for c in text) for text in completions]\n"
        "    return [None if n == 7 else n / max(1, len(t))\n"
        "            for n, t in zip(found, completions)]\n"
    )
    rows = [{"prompt": f"{n}+{n % 7}="} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "reference",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": {"kind": "jsonl", "path": str(folder / "rows.jsonl")}},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 3, "max_response_tokens": 80},
        "train": {"steps": steps, "learning_rate": 1e-3, "threads": 1, "schedule": "linear"},
        "rewards": [{"function": f"{folder / 'reward.py'}:vowels"}],
        "checkpoint": {"every_steps": 1},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


class _KillAfter:
    """An observer that kills its own process when `condition` holds for an entry."""

    def __init__(self, condition: Callable[[Any], bool]) -> None:
        self._condition = condition

    def feed(self, entry: Any) -> None:
        if self._condition(entry):
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


def _train(
    config: Path,
    overrides: list[str],
    resume: bool | str,
    kill: Callable[[Any], bool] | float | None,
    prepare: Callable[[], None] | None,
    observers: Sequence[Any],
):
    import rollpacker
    from rollpacker.run.error_messages import report_error

    os.setsid()
    observers = [*observers, _KillAfter(kill)] if callable(kill) else observers
    if isinstance(kill, float):
        threading.Timer(kill, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if prepare is not None:
        prepare()
    try:
        rollpacker.train(config, overrides, resume=resume, observers=observers)
    except Exception as error:
        os._exit(report_error(error))
    os._exit(0)


def start(
    config: Path,
    name: str,
    *,
    resume: bool | str = False,
    kill: Callable[[Any], bool] | float | None = None,
    prepare: Callable[[], None] | None = None,
    overrides: Sequence[str] = (),
    observers: Sequence[Any] = (),
) -> Any:
    """Train in a forked process (so that torch is imported once), which is returned. `prepare` is
    called there first."""
    # What this process has let go of may have threads, which a child could not join.
    gc.collect()
    process = multiprocessing.get_context("fork").Process(
        target=_train,
        args=(config, [f"name={name}", *overrides], resume, kill, prepare, observers),
    )
    process.start()
    return process


def run(config: Path, name: str, **settings: Any) -> int:
    """`start`, to the end of the process. Returns its exit code."""
    process = start(config, name, **settings)
    process.join()
    assert process.exitcode is not None
    return int(process.exitcode)


def _optimizer_state(folder: Path) -> bytes:
    """Every tensor's name and bytes, by name: the files hold them in any order."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    assert tensors, f"no optimizer state in {folder}"
    return b"".join(name.encode() + tensors[name].tobytes() for name in sorted(tensors))


def fingerprints(folder: Path) -> dict[str, str]:
    """SHA-256 of everything that must not depend on interruptions."""
    checkpoint = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    state = json.loads((checkpoint / "state.json").read_text())
    metrics = [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("timing_s/", "perf/"))}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    job = {name: value for name, value in state["job"].items() if name != "num_late"}
    return {
        "weights": _sha256((checkpoint / "model" / "model.safetensors").read_bytes()),
        "optimizer": _sha256(_optimizer_state(checkpoint / "trainer")),
        "schedule": _sha256((checkpoint / "trainer" / "trainer.json").read_bytes()),
        "cursor": _sha256(json.dumps(state["cursor"], sort_keys=True).encode()),
        "job": _sha256(json.dumps(job, sort_keys=True).encode()),
        "metrics": _sha256(json.dumps(metrics, sort_keys=True).encode()),
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def committed(step: int) -> Callable[[Any], bool]:
    return lambda entry: (
        getattr(getattr(entry, "event", None), "step", None) == step
        and type(entry.event).__name__ == "Committed"
    )


def carried_at_a_kill(folder: Path) -> int:
    """Bytes of carried tokens in the newest checkpoint of a run that was killed."""
    newest = max((folder / "checkpoints").glob("step_*[0-9]"), default=folder)
    return sum(path.stat().st_size for path in (newest / "carried").glob("*.npy"))


def carried_tokens(folder: Path) -> int:
    """Count the tokens that were carried in all launches of a run's log."""
    log = map(json.loads, (folder / "events.jsonl").open())
    commands = [command for entry in log for command in entry.get("commands", ())]
    return sum(sum(command.get("carried", ())) for command in commands)


def killed_at_every_step(
    config: Path, runs: Path, steps: int, arm: tuple[str, ...]
) -> list[dict[str, Any]]:
    """For every k: killed once step k is committed, then resumed."""
    expected = fingerprints(runs / "reference")
    results = []
    for k in range(1, steps + 1):
        name = f"killed-{k}"
        code = run(config, name, kill=committed(k), overrides=arm)
        assert code == -signal.SIGKILL, f"the run was to be killed after step {k}, it exited {code}"
        carried = carried_at_a_kill(runs / name)
        assert run(config, name, resume=True, overrides=arm) == 0
        different = [
            part for part, digest in fingerprints(runs / name).items() if digest != expected[part]
        ]
        problems = check(runs / name / "events.jsonl")["problems"]
        result = {"k": k, "carried_bytes": carried, "different": different, "problems": problems}
        results.append(result)
        print(f"killed after step {k}: {different or 'equal'}", flush=True)
    return results


def killed_at_random(
    config: Path, runs: Path, kills: int, longest_s: float, arm: tuple[str, ...]
) -> dict[str, Any]:
    """One run, killed `kills` times, each time after at most `longest_s` seconds, checkpoints every
    second step."""
    rng = random.Random(0)
    name, overrides = "random", (*arm, "checkpoint.every_steps=2")
    killed = 0
    with_carried = 0
    while killed < kills:
        kill = rng.uniform(0.2, longest_s)
        if run(config, name, resume=killed > 0, kill=kill, overrides=overrides) == 0:
            break
        killed += 1
        with_carried += carried_at_a_kill(runs / name) > 0
    else:
        assert run(config, name, resume=True, overrides=overrides) == 0
    result = check(runs / name / "events.jsonl")
    expected = fingerprints(runs / "reference")
    found = fingerprints(runs / name)
    result["kills"] = killed
    result["kills_with_carried_tokens"] = with_carried
    result["different"] = [part for part in expected if expected[part] != found[part]]
    return result


def measure(arm: str, steps: int, kills: int) -> dict[str, Any]:
    import torch
    import transformers  # noqa: F401  (imported once, before the forks)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs, overrides = folder / "runs", ARMS[arm]
        write_model(folder / "model")
        config = write_config(folder, steps)
        assert run(config, "reference", overrides=overrides) == 0
        assert run(config, "again", overrides=overrides) == 0
        again = fingerprints(runs / "again") == fingerprints(runs / "reference")
        total = check(runs / "reference" / "events.jsonl")
        carried = carried_tokens(runs / "reference")
        every = killed_at_every_step(config, runs, total["steps"], overrides)
        runs.rename(folder / "short-runs")
        long_config = write_config(folder, max(steps, 10 * kills))
        began = time.perf_counter()
        assert run(long_config, "reference", overrides=overrides) == 0
        longest_s = (time.perf_counter() - began) / 2
        at_random = killed_at_random(long_config, runs, kills, longest_s, overrides)
    return {
        "two_runs_equal": again,
        "steps": total["steps"],
        "carried_tokens": carried,
        "killed_after_each_step": every,
        "killed_at_random": at_random,
    }


def is_good(result: dict[str, Any]) -> bool:
    """Nothing differs, and where tokens are carried some kills found them in a checkpoint."""
    at_random, each = result["killed_at_random"], result["killed_after_each_step"]
    carries = result["carried_tokens"] > 0
    return (
        result["two_runs_equal"]
        and not any(one["different"] or one["problems"] for one in [*each, at_random])
        and any(one["carried_bytes"] for one in each) == carries
    )


def main(
    steps: int = 12, kills: int = 20, arms: Sequence[str] = tuple(ARMS), quick: bool = False
) -> dict[str, Any]:
    counts = (3, 3) if quick else (steps, kills)
    found = {name: measure(name, *counts) for name in arms}
    for name, arm in found.items():
        assert (arm["carried_tokens"] > 0) == (name != "published"), name
    return {"arms": found, "all_equal": all(map(is_good, found.values()))}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_equal"], arms=ARMS)
