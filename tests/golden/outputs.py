"""What the goldens are: outputs of the package on fixed inputs, through its widest doors only (the
command, `rollpacker.train`, `LiveReport`), so that they outlive any change inside.

    python -m tests.golden.outputs          # compares; prints what differs
    python -m tests.golden.outputs --write  # writes the goldens anew, with a reason in the commit
    python -m tests.golden.outputs --record # also records the logs anew (a minute)

They pass on any x86-64 processor. Decisions are compared byte for byte; what is told of them to 12
digits (`comparing.py`); what is learned to the tolerance of `curve_differences`. Checked on a
processor with AVX-512, whole and with its kernels switched off by environment in the three ways of
`processors.kernels`: before `rollpacker/core/portable.py` was there, 15 of the goldens failed like
that (OpenBLAS without AVX-512 alone was enough), and now none does. On 64-bit Arm they should pass
by reason, and were not tried: all that decides is made of operations that IEEE 754 rounds, none of
them in C where a compiler may fuse two.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.cli.main import main as command
from tests.golden import processors, texts, worlds
from tests.golden.comparing import differences
from tests.golden.processors import LOGS, WORLD_LOGS, digest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = HERE / "golden.json"
TOLD = HERE / "told.json.gz"
"""Summaries, metrics and results: numbers that are compared to 12 digits."""

SMALLER = ("steps=6", "rollout.prompts_per_step=32")
CONSTANTS = (
    *("rewards.1.workers=62", "rewards.2.calls_per_s=5.9"),
    *(f"rewards.{place}.lengths.within_prompt_correlation=0.05" for place in range(3)),
    *(f"rewards.{place}.lengths.hard_prompts=0" for place in range(3)),
)
"""The world that the goldens were made in, where scenario keys can say it: a better fit of the
simulator changes no golden. `CALIBRATION`, `FIXED_S` and `LAWS` are the rest of it."""
FIXED_S = {"7b-8k": 11, "14b-16k": 22.8, "32b-32k": 122.6, "128-gpus": 22.8}
CALIBRATION = {
    "launch_layer_s": 0.246e-3,
    "per_sequence_s": 0.289e-3,
    "train_utilization": 0.139,
    "synchronous_judge_share": 0.61,
}
LAWS = {"longer_share": 0.8, "lucky_share": 1.0}
_PUBLISHED = ("system=rollpacker-published", "stream_trainer.max_share=0.52")
SIMULATIONS: dict[str, tuple[str, ...]] = {
    "7b-8k": _PUBLISHED,
    "7b-8k plain": ("system=verl",),
    "14b-16k": _PUBLISHED,
    "14b-16k rlhfuse": ("system=rlhfuse", "stream_trainer.max_share=0.52"),
    "14b-16k oracle": ("system=oracle",),
    "14b-16k auto": (
        *_PUBLISHED,
        "tail_batching.prompt_factor=auto",
        "tail_batching.sample_factor=auto",
        "tail_batching.race=generated",
    ),
    "14b-16k moments": (
        *_PUBLISHED,
        "tail_batching.debias=moments",
        "tail_batching.race=generated",
        "stream_trainer.enabled=false",
    ),
    "32b-32k": _PUBLISHED,
    "128-gpus": _PUBLISHED,
}
"""Scenario (and a name for the variant) -> overrides."""


def run_command(*arguments: str) -> str:
    """What the command prints; it must succeed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command([*arguments])
    assert code in (0, None), f"{arguments}: exit code {code}\n{printed.getvalue()}"
    return printed.getvalue()


def simulated(name: str) -> tuple[str, str, dict[str, Any]]:
    """The event log of a simulation after its head, the head, and its results."""
    from rollpacker.core.records import Entry, Session, encode
    from rollpacker.sim import presets
    from rollpacker.sim.latency import Calibration
    from rollpacker.sim.scenario import load_scenario
    from rollpacker.sim.simulate import job_config, machine_of, simulate

    set_up = name.split()[0]
    scenario = load_scenario(
        ROOT / "configs" / "scenarios" / f"{set_up}.yaml",
        [*SMALLER, *CONSTANTS, f"train.fixed_s={FIXED_S[set_up]}", *SIMULATIONS[name]],
    )
    calibration = Calibration(**CALIBRATION)
    entries: list[Entry] = []
    shipped = dict(presets.LENGTH_LAWS)
    presets.LENGTH_LAWS.update(presets.length_laws(**LAWS))
    try:
        result = simulate(scenario, calibration=calibration, observe=entries.append)
    finally:
        presets.LENGTH_LAWS.update(shipped)
    config = job_config(scenario, machine_of(scenario, calibration))
    head = Session(
        started_at="1970-01-01T00:00:00+00:00", time_s=0.0, step=0, job=config.to_plain()
    )
    # The head holds the configuration, which may gain keys.
    records = "".join(f"{encode(entry)}\n" for entry in entries)
    told = result.to_plain()
    del told["trained_tokens_per_s"]  # came later, and is made of numbers that are there
    return records, encode(head), told


def simulation(name: str, folder: Path) -> dict[str, Any]:
    """Digest of the event log, and what `--json` prints of the results."""
    records, head, told = simulated(name)
    log = folder / "log.jsonl"
    log.write_text(f"{head}\n{records}", encoding="utf-8")
    run_command("replay", str(log))
    return {"log": digest(records), "results": json.loads(json.dumps(told))}


def world(log: Path, folder: Path) -> dict[str, str]:
    """Digest of what the core answers to the log of a run in virtual time, which is replayed."""
    name = log.name.split(".")[0]
    events = folder / f"{name}.jsonl"
    events.write_bytes(gzip.decompress(log.read_bytes()))
    run_command("replay", str(events))
    return {"recorded": digest(events.read_bytes()), "now": digest(worlds.log_of(name))}


def reports(log: Path, folder: Path) -> dict[str, Any]:
    """What a recorded run's log is told as: summary, metrics, trace, and that it replays."""
    from rollpacker.report.live import LiveReport
    from rollpacker.report.log import EventLog

    run = folder / log.name.split(".")[0]
    run.mkdir()
    events = run / "events.jsonl"
    events.write_bytes(gzip.decompress(log.read_bytes()))
    run_command("replay", str(run))
    run_command("report", str(run))
    live = LiveReport(run, total_steps=None, show=False, tensorboard=False)
    for entry in EventLog(events):
        live.feed(entry)
    live.close()
    summary = json.loads((run / "summary.json").read_text())
    summary.pop("paths")
    return {
        "summary": summary,
        "metrics": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "trace": digest((run / "trace.json").read_bytes()),
    }


# -- real runs ---------------------------------------------------------------------

RUNS: dict[str, tuple[str, ...]] = {
    "tail": (),
    "plain": ("tail_batching.enabled=false",),
    "moments": ("tail_batching.debias=moments", "tail_batching.prompt_factor=1.5"),
    "streamed": ("stream_trainer={enabled: true, reward_wait: true}",),
    "signal": ("rollout.dynamic_sampling.enabled=true",),
    "resumed": ("train.steps=4",),
    "stages": ("train.processes=2", "train.pipeline.stages=2", "train.steps=4"),
}
_AS_PUBLISHED = "tail_batching.selection=published"
CURVES: dict[str, tuple[str, ...]] = {
    "one process": (_AS_PUBLISHED,),
    "two processes": (_AS_PUBLISHED, "train.processes=2"),
    "adapter": (_AS_PUBLISHED, "model.lora.rank=4"),
    "only the order": (),
}
STEPS = 8


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder with a tiny model and a config."""
    import torch

    from benchmarks.resume import write_config, write_model

    threads = torch.get_num_threads()
    folder = Path(tempfile.mkdtemp())
    try:
        write_model(folder / "model")
        write_config(folder, steps=STEPS)
        yield folder
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)


def train(folder: Path, name: str, overrides: tuple[str, ...], **settings: bool) -> Path:
    """The run's folder."""
    import rollpacker

    fixed = (f"name={name.replace(' ', '-')}", "checkpoint.every_steps=100")
    return rollpacker.train(folder / "run.yaml", [*fixed, *overrides], **settings).folder


def curve(folder: Path, name: str) -> dict[str, list[str]]:
    """Loss, gradient norm, reward and tokens of every step, in all their digits."""
    run = train(folder, name, CURVES[name])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("actor/loss", "actor/grad_norm", "critic/rewards/mean", "tokens/trained")
    return {key: [repr(row[key]) for row in rows if key in row] for key in keys}


FIRST_STEP = 1e-4
"""Largest relative difference of the first step's numbers on another machine: float32 keeps seven
digits, of which sums over some hundred tokens and a few layers lose two or three. Later steps are
not compared: the first update differs in its last digits, so sooner or later a token is drawn
otherwise, and that makes another run. (Bit for bit holds within one machine, and is tested where it
is promised: resuming, the order of training, several processes.)"""


def curve_differences(
    expected: Mapping[str, Sequence[str]], found: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """What differs in the first step of two curves by more than rounding explains."""
    for key, values in expected.items():
        one, other = float(values[0]), float(found[key][0])
        if not math.isclose(one, other, rel_tol=FIRST_STEP):
            yield f"{key}: {one} is now {other}"
        if len(values) != len(found[key]):
            yield f"{key}: {len(values)} steps are now {len(found[key])}"


# -- writing and comparing by hand -------------------------------------------------


def everything() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found: dict[str, Any] = {
            "simulations": {name: simulation(name, folder) for name in SIMULATIONS},
            "logs": {log.stem.split(".")[0]: reports(log, folder) for log in LOGS},
            "worlds": {log.stem.split(".")[0]: world(log, folder) for log in WORLD_LOGS},
        }
    found["decisions"] = processors.decisions()
    with workplace() as folder:
        found["curves"] = {name: curve(folder, name) for name in CURVES}
    return found


def record() -> None:
    (HERE / "logs").mkdir(exist_ok=True)
    with workplace() as folder:
        for name, overrides in RUNS.items():
            run = train(folder, name, overrides)
            if name == "resumed":
                train(folder, name, (), resume=True)
            packed = gzip.compress((run / "events.jsonl").read_bytes(), mtime=0)
            (HERE / "logs" / f"{name}.jsonl.gz").write_bytes(packed)
    record_worlds()


def record_worlds() -> None:
    """The logs of the runs in virtual time."""
    (HERE / "worlds").mkdir(exist_ok=True)
    for name in worlds.WORLDS:
        packed = gzip.compress(worlds.log_of(name).encode(), mtime=0)
        (HERE / "worlds" / f"{name}.jsonl.gz").write_bytes(packed)


def expected() -> dict[str, Any]:
    """The goldens as they are kept."""
    kept: dict[str, Any] = json.loads(GOLDEN.read_text())
    for kind, by_name in json.loads(gzip.decompress(TOLD.read_bytes())).items():
        for name, told in by_name.items():
            kept[kind][name] |= told
    return kept


def write(found: dict[str, Any]) -> None:
    """Keep these goldens: digests and curves as text, the many numbers packed."""
    told: dict[str, Any] = {
        "simulations": {
            name: {"results": one.pop("results")} for name, one in found["simulations"].items()
        },
        "logs": {
            name: {key: one.pop(key) for key in ("summary", "metrics")}
            for name, one in found["logs"].items()
        },
    }
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    TOLD.write_bytes(gzip.compress(json.dumps(told, sort_keys=True).encode(), mtime=0))
    texts.write()


def main() -> int:
    if "--record" in sys.argv:
        record()
        again = [sys.executable, "-m", "tests.golden.outputs", "--write"]
        return subprocess.run(again, cwd=ROOT).returncode  # which finds the new logs
    found = everything()
    if "--write" in sys.argv:
        write(found)
        return 0
    kept = expected()
    curves = zip(kept.pop("curves").items(), found.pop("curves").values(), strict=True)
    listed = [line for (_, one), other in curves for line in curve_differences(one, other)]
    listed += differences(kept, found)
    listed += differences({n: texts.file_of(n).read_text() for n in texts.texts()}, texts.texts())
    print(*listed or ["equal"], sep="\n")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main())
