"""Trainer processes, killed again and again while a run trains, and the run goes on by itself.

One of two trainer processes is killed at every moment at which a run needs them: while a round is
generated, in each call of a step, in a checkpoint, and on their way back from a loss. Arms:

    embedded   one engine in the run's own process: the last weights against an undisturbed run's
    engines    two engines in processes, and streamed gradients: the engines must be the same ones

Measured: how long until the log says `TrainerLost`, and until `TrainerReady`; updates that were
made once more. The logs are read by `exactly_once.py` and by the replay.

    python benchmarks/trainer_faults.py [--quick]
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine_faults import watched_by
from exactly_once import check
from lab import bench, write_result
from resume import write_config, write_model
from safetensors.numpy import load_file

import rollpacker
from rollpacker.core.commands import Launch
from rollpacker.core.events import Committed, Trained, TrainerLost, TrainerReady
from rollpacker.core.records import Entry, Record

STEPS = 14
TOLERANCE = 1e-6
GENERATING, AGAIN = "generating", "setup"
"""Moments that are no call of a step: a round has just begun; ranks are on their way back."""
PLAN = (
    *(GENERATING, "score", "accumulate", "apply", AGAIN, "write_weights", "save"),
    *("apply", GENERATING, "write_weights"),
)
"""Ten kills, in this order."""
QUICK = (GENERATING, "apply", AGAIN)
SHARED = (
    *("train.processes=2", "checkpoint.every_steps=3", "train.eps=1e-4", "algorithm.kl_coef=0.01"),
    "algorithm.kl_in=reward",
    *("data.eval_fraction=0.2", "eval.every_steps=50"),
)
ARMS = {
    "embedded": (),
    "engines": ("rollout.engines=2", "stream_trainer={enabled: true, reward_wait: true}"),
}


@dataclass
class Kill:
    moment: str
    rank: int
    sent_s: float
    noticed_s: float | None = None
    """After it was sent."""
    back_s: float | None = None
    """After it was sent. None: the next one came before."""
    updates_again: int = 0
    """Since the last checkpoint."""


class Saboteur:
    """Sees the log as it is written, and calls as they are sent."""

    def __init__(self, plan: Sequence[str]) -> None:
        self.kills: list[Kill] = []
        self.engines: Any = None
        self.engine_pids: set[tuple[int, ...]] = set()
        """As they were whenever the trainer was back, and at the end of every step."""
        self._plan = list(plan)
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._may_strike = True
        """A step was committed since the last loss."""
        self._version = self._saved = 0
        self._ranks: Any = None

    @property
    def is_through(self) -> bool:
        return not self._plan

    def called(self, ranks: Any, method: str) -> None:
        """All ranks were sent this call."""
        with self._lock:
            self._ranks = ranks
            if not self._plan or self._plan[0] != method:
                return
            if self._may_strike or (method == AGAIN and self.kills):
                self._strike()

    def saw(self, entry: Entry) -> None:
        if not isinstance(entry, Record):
            return
        now, event = time.monotonic(), entry.event
        with self._lock:
            if isinstance(event, Trained):
                self._version = event.version
            elif isinstance(event, Committed):
                self._may_strike = True
                self._saved = self._version if event.checkpointed else self._saved
                self._note_engines()
            elif isinstance(event, TrainerLost):
                self.kills[-1].noticed_s = now - self.kills[-1].sent_s
                self.kills[-1].updates_again = self._version - self._saved
            elif isinstance(event, TrainerReady):
                self.kills[-1].back_s = now - self.kills[-1].sent_s
                self._note_engines()
            begins = any(isinstance(command, Launch) for command in entry.commands)
            if begins and self._plan[:1] == [GENERATING] and self._may_strike and self._ranks:
                self._strike()

    def _strike(self) -> None:
        moment, number = self._plan.pop(0), self._random.randrange(2)
        self._may_strike = False
        self.kills.append(Kill(moment, number, time.monotonic()))
        os.kill(self._ranks.all[number].pid, signal.SIGKILL)

    def _note_engines(self) -> None:
        handles = self.engines.handles.values()
        self.engine_pids.add(
            tuple(handle.engine.child.pid for handle in handles if hasattr(handle.engine, "child"))
        )


def sabotage(config: Path, overrides: Sequence[str], plan: Sequence[str]) -> tuple[Path, Saboteur]:
    """Train to the end, with a kill at each of these moments. Returns the run's folder."""
    from rollpacker.trainer.launch import Ranks

    saboteur, replies = Saboteur(plan), Ranks._replies

    def replies_seen(ranks: Ranks, method: str, called: Any) -> Any:
        saboteur.called(ranks, method)
        return replies(ranks, method, called)

    with watched_by(saboteur), patch.object(Ranks, "_replies", replies_seen):
        return rollpacker.train(config, overrides).folder, saboteur


def largest_difference(one: Path, other: Path) -> float:
    first, second = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys()
    return max(float(abs(first[name] - second[name]).max()) for name in first)


def result_of(run: Path, saboteur: Saboteur) -> dict[str, Any]:
    from rollpacker.report.log import EventLog
    from rollpacker.run.replay import replay

    checked = check(run / "events.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    by_moment = {}
    for moment in dict.fromkeys(kill.moment for kill in saboteur.kills):
        kills = [kill for kill in saboteur.kills if kill.moment == moment]
        by_moment[moment] = {
            "kills": len(kills),
            "noticed_s": _mean([k.noticed_s for k in kills if k.noticed_s is not None]),
            "back_s": _mean([k.back_s for k in kills if k.back_s is not None]),
            "updates_again": [kill.updates_again for kill in kills],
        }
    return {
        "kills": len(saboteur.kills),
        "by_moment": by_moment,
        "losses": summary["trainer"]["losses"],
        "wall_s": round(summary["wall_s"], 1),
        "waited_s": round(summary["seconds"]["recovery"], 1),
        "engine_processes": len(saboteur.engine_pids),
        **{
            name: checked[name]
            for name in ("steps", "fetched", "trained", "dropped", "engines", "trainer")
        },
        "problems": checked["problems"],
        "replay_difference": replay(EventLog(run / "events.jsonl")).difference,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def is_good(result: dict[str, Any], plan: Sequence[str]) -> bool:
    return (
        result["kills"] == result["losses"] == len(plan)
        and not result["problems"]
        and result["replay_difference"] is None
        and result["engine_processes"] == 1
        and result["engines"]["lost"] == 0
        and result.get("weights_difference", 0.0) <= TOLERANCE
    )


def run_arm(arm: str, folder: Path, plan: Sequence[str], steps: int) -> dict[str, Any]:
    config = write_config(folder, steps)
    overrides = [*SHARED, *ARMS[arm]]
    run, saboteur = sabotage(config, [f"name={arm}", *overrides], plan)
    result = result_of(run, saboteur)
    if arm == "embedded":
        plain = rollpacker.train(config, ["name=plain", *overrides]).folder
        result["weights_difference"] = largest_difference(run, plain)
    result["good"] = saboteur.is_through and is_good(result, plan)
    print(arm, json.dumps(result["by_moment"]), flush=True)
    return result


def main(arms: Sequence[str] = tuple(ARMS), quick: bool = False) -> int:
    """Each arm has a result of its own."""
    plan, steps = (QUICK, 4) if quick else (PLAN, STEPS)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        for arm in arms:
            began = time.perf_counter()
            result = results[arm] = run_arm(arm, folder, plan, steps)
            result["seconds"] = round(time.perf_counter() - began, 1)
            if not quick:
                write_result(f"trainer_faults_{arm}", result)
    print(json.dumps(results, indent=1))
    return 0 if all(result["good"] for result in results.values()) else 1


if __name__ == "__main__":
    bench(main, arms=ARMS)
