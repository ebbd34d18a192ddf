"""Two engines in processes of their own, killed and stopped again and again while a run trains.

A saboteur sends SIGKILL or SIGSTOP to one of the engines: when a round has just been launched, in
the middle of one, when a sample has just ended, while new weights are on their way, and at any
time, with a step at least between any three losses. Measured: how long until the log says
`EngineLost`, and until the engine is there again; steps committed in between. The log is read by
`exactly_once.py` and by the replay; at last the run is resumed with one engine, which trains on
what was deferred. vLLM has ten faults, and a fault waits until both engines are there.

    python benchmarks/engine_faults.py [--faults 110] [--quick]
    .venv-vllm/bin/python benchmarks/engine_faults.py --engine vllm [--quick]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from exactly_once import check
from lab import bench, write_result
from resume import write_config, write_model

import rollpacker
from rollpacker.core.commands import Command, Launch, SyncWeights
from rollpacker.core.events import Committed, EngineLost, EngineReady, Event, SampleGenerated
from rollpacker.core.records import Entry, Record

PATIENCE_S = 300.0
NOTICED_WITHIN_S = {"kill": 1.0, "stop": 6.0}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
MOMENTS: dict[str, tuple[type[Event] | type[Command] | None, float]] = {
    "launching": (Launch, 0.01),
    "generating": (Launch, 0.2),
    "ending": (SampleGenerated, 0.002),
    "updating": (SyncWeights, 0.01),
    "any": (None, 1.0),
}
"""By name: what the log tells first, and within how many seconds from there the signal is sent."""
OVERRIDES = (
    *("rollout.engines=2", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4"),
    *("rollout.max_response_tokens=200", "checkpoint.every_steps=20", "data.eval_fraction=0.2"),
    "eval.every_steps=25",
)
ENGINES: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "torch": ((), {}),
    "vllm": (
        (
            *("rollout.engine.name=vllm", "rollout.engine.kv_cache_gib=0.05"),
            "tail_batching.carry=none",
        ),
        # Heads of 32, the smallest for which vLLM has code on a CPU.
        {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
}
"""By name: what the config says besides, and the model's shape."""


@dataclass
class Fault:
    kind: str
    moment: str
    engine: int
    incarnation: int
    sent_s: float
    noticed_s: float | None = None
    """After it was sent."""
    ready_s: float | None = None
    """From the loss to the engine that took its place."""
    steps_meanwhile: int = 0
    """Committed in between."""


class Saboteur(rollpacker.Callback):
    """Sees the log as it is written, and ends the run when it is through."""

    def __init__(self, plan: Sequence[tuple[str, str]], *, one_by_one: bool) -> None:
        """`plan`: kinds and moments, one after the other. `one_by_one`: only while all engines are
        there."""
        self.faults: list[Fault] = []
        self.engines: Any = None
        self._plan = plan
        self._one_by_one = one_by_one
        self._random = random.Random(0)
        self._news = threading.Condition()
        self._waits_for: type | None = None
        self._seen = False
        self._losses = 0
        """Since the last commit."""
        self._run: Any = None

    def on_start(self, run: Any) -> None:
        self._run = run
        threading.Thread(target=self._work, name="saboteur", daemon=True).start()

    def saw(self, entry: Entry) -> None:
        """Called under the bus's lock, as the entry is logged."""
        if not isinstance(entry, Record):
            return
        now, event = time.monotonic(), entry.event
        with self._news:
            if isinstance(event, Committed):
                self._losses = 0
                for fault in self.faults:
                    fault.steps_meanwhile += fault.noticed_s is not None and fault.ready_s is None
            elif isinstance(event, EngineLost):
                self._losses += 1
            for fault in self.faults:
                if isinstance(event, EngineLost) and _is_of(fault, event, event.incarnation):
                    fault.noticed_s = now - fault.sent_s
                if isinstance(event, EngineReady) and _is_of(fault, event, event.incarnation - 1):
                    assert fault.noticed_s is not None
                    fault.ready_s = now - fault.sent_s - fault.noticed_s
            said = (event, *entry.commands)
            self._seen |= any(type(one) is self._waits_for for one in said)
            self._news.notify_all()

    def _work(self) -> None:
        try:
            for kind, moment in self._plan:
                while not self._strike(kind, moment):
                    pass
            self._wait(lambda: all(fault.ready_s is not None for fault in self.faults))
        finally:
            self._run.stop("no more faults")

    def _strike(self, kind: str, moment: str) -> bool:
        """False: the moment is over, since an engine has just been lost."""
        self._wait(lambda: self._losses + self._num_unnoticed() < 2 and bool(self._targets()))
        told, within_s = MOMENTS[moment]
        if told is not None:
            self._waits_for, self._seen = told, False
            self._wait(lambda: self._seen)
        time.sleep(self._random.uniform(0.0, within_s))
        with self._news:
            targets = self._targets()
            if self._losses + self._num_unnoticed() >= 2 or not targets:
                return False
            target = self._random.choice(targets)
            pid = target.engine.child.pid
            self.faults.append(
                Fault(kind, moment, target.number, target.incarnation, time.monotonic())
            )
            os.kill(pid, SIGNALS[kind])
            return True

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(holds, PATIENCE_S), "the run stands still"

    def _num_unnoticed(self) -> int:
        return sum(fault.noticed_s is None for fault in self.faults)

    def _targets(self) -> list[Any]:
        """Living engines that were not struck so far."""
        struck = {(fault.engine, fault.incarnation) for fault in self.faults}
        whole = [
            handle
            for handle in self.engines.living
            if (handle.number, handle.incarnation) not in struck
        ]
        return [] if self._one_by_one and len(whole) < len(self.engines.handles) else whole


def _is_of(fault: Fault, event: EngineLost | EngineReady, incarnation: int) -> bool:
    return (fault.engine, fault.incarnation) == (event.engine, incarnation)


@contextmanager
def watched_by(saboteur: Any) -> Iterator[None]:
    """Show it each entry of the log of the run inside, and have it know the run's engines."""
    from rollpacker.run.folder.event_log import LogWriter
    from rollpacker.run.parts import engines

    build, append = engines.build_engines, LogWriter.append

    def build_engines(*arguments: Any, **settings: Any) -> Any:
        saboteur.engines = build(*arguments, **settings)
        return saboteur.engines

    def append_seen(log: LogWriter, entry: Entry) -> None:
        append(log, entry)
        saboteur.saw(entry)

    with (
        patch.object(engines, "build_engines", build_engines),
        patch.object(LogWriter, "append", append_seen),
    ):
        yield


def sabotage(folder: Path, plan: Sequence[tuple[str, str]], *, engine: str = "torch") -> Saboteur:
    """Train in `folder`, which gets model, config and run, until all faults are through, and then
    to the end."""
    more, shape = ENGINES[engine]
    saboteur = Saboteur(plan, one_by_one=engine == "vllm")
    write_model(folder / "model", **shape)
    config, overrides = write_config(folder, 1_000_000), ["name=faults", *OVERRIDES, *more]
    with watched_by(saboteur):
        run = rollpacker.train(config, overrides, callbacks=[saboteur])
    # Deferred prompts still wait: one engine trains on them, and the run is over.
    last = [*overrides, f"train.steps={run.summary['steps']['total']}", "rollout.engines=1"]
    rollpacker.train(config, last, resume=True)
    return saboteur


def result_of(folder: Path, faults: list[Fault]) -> dict[str, Any]:
    from rollpacker.report.log import EventLog
    from rollpacker.run.replay import replay

    events = folder / "runs" / "faults" / "events.jsonl"
    checked = check(events)
    replayed = replay(EventLog(events))
    by_kind = {}
    for kind in SIGNALS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        noticed = [fault.noticed_s for fault in of_kind if fault.noticed_s is not None]
        by_kind[kind] = {
            "faults": len(of_kind),
            "by_moment": {m: sum(f.moment == m for f in of_kind) for m in MOMENTS},
            "noticed": len(noticed),
            "noticed_s_mean": round(sum(noticed) / max(len(noticed), 1), 3),
            "noticed_s_max": round(max(noticed, default=0.0), 3),
            "within_s": NOTICED_WITHIN_S[kind],
        }
    ready = [fault.ready_s for fault in faults if fault.ready_s is not None]
    return {
        "faults": len(faults),
        "by_kind": by_kind,
        "replaced_s_mean": round(sum(ready) / max(len(ready), 1), 2),
        "replaced_s_max": round(max(ready, default=0.0), 2),
        "steps_while_an_engine_was_away": sum(fault.steps_meanwhile for fault in faults),
        **{name: checked[name] for name in ("steps", "fetched", "trained", "dropped", "engines")},
        "problems": checked["problems"],
        "replay_difference": replayed.difference,
    }


def is_good(result: dict[str, Any]) -> bool:
    """Every fault was noticed, whenever that was, and nothing was lost."""
    return (
        not result["problems"]
        and result["replay_difference"] is None
        and all(kind["noticed"] == kind["faults"] for kind in result["by_kind"].values())
        and result["steps_while_an_engine_was_away"] > 0
    )


def is_quick(result: dict[str, Any]) -> bool:
    """Noticed within the limits, which no busy machine can promise."""
    return all(one["noticed_s_max"] <= one["within_s"] for one in result["by_kind"].values())


def plan_of(engine: str, num_faults: int | None, *, quick: bool) -> list[tuple[str, str]]:
    """Kinds and moments."""
    rng = random.Random(1)
    if engine == "vllm":
        plan = [(kind, moment) for moment in MOMENTS for kind in SIGNALS]
        rng.shuffle(plan)
        return [("kill", "generating"), ("stop", "ending")] if quick else plan[:num_faults]
    count = 6 if quick else num_faults or 110
    return [(rng.choice(list(SIGNALS)), rng.choice(list(MOMENTS))) for _ in range(count)]


def main(
    engine: str = "torch", faults: int | None = None, quick: bool = False
) -> dict[str, Any] | None:
    """`faults`: None: 110, and 10 with vllm."""
    plan = plan_of(engine, faults, quick=quick)
    with tempfile.TemporaryDirectory() as temporary:
        saboteur = sabotage(Path(temporary), plan, engine=engine)
        result = result_of(Path(temporary), saboteur.faults)
    struck_all = len(saboteur.faults) == len(plan)
    result["all_good"] = struck_all and is_good(result) and is_quick(result)
    if engine == "torch" or quick:
        return result
    write_result(f"engine_faults_{engine}", result)
    sys.exit(not result["all_good"])


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_good"], engine=ENGINES)
