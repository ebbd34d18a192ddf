"""An independent reader of event logs: was every prompt trained once, or dropped with a reason?

It knows the log's JSON and nothing of RollPacker's code, so that a bug there cannot hide here.

    python benchmarks/exactly_once.py runs/NAME/events.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def check(path: Path) -> dict[str, Any]:
    """Counts and a list of problems, empty if all is well."""
    fetched: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    launched: Counter[str] = Counter()
    launched_version: dict[str, int] = {}
    verdicts: dict[str, float | None] = {}
    problems: list[str] = []
    engines, trainer = Engines(), Trainer()
    version = steps = 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        entry = json.loads(line)
        if "session" in entry:
            engines, trainer = Engines(engines.lost), Trainer(trainer.lost, trainer.version)
        if "session" in entry or "note" in entry:
            continue
        found = [*engines.read(entry), *trainer.read(entry)]
        problems += [f"line {number}: {problem}" for problem in found]
        match entry["event"]:
            case "PromptsFetched":
                fetched.update(entry["prompts"])
            case "SampleScored":
                verdicts[entry["sample"]] = entry["value"]
            case "SampleGenerated":
                if entry["version"] != launched_version[entry["sample"]]:
                    problems.append(f"line {number}: {entry['sample']} was made by other weights")
            case "Trained":
                version = entry["version"]
            case "Committed":
                steps = max(steps, entry["step"])
        for command in entry.get("commands", ()):
            match command["command"]:
                case "Launch":
                    launched.update(command["samples"])
                    launched_version.update(dict.fromkeys(command["samples"], command["version"]))
                case "Drop":
                    dropped[command["prompt"]] += 1
                    if not command["reason"]:
                        problems.append(f"line {number}: a drop without a reason")
                case "TrainOn":
                    for group in command["groups"]:
                        trained[group[0].split("#")[0]] += 1
                        problems += _group_problems(
                            number, group, verdicts, launched_version, version
                        )
    problems += [f"{s} was launched {n} times" for s, n in launched.items() if n > 1]
    problems += [f"{p} was fetched {n} times" for p, n in fetched.items() if n > 1]
    settled = trained + dropped
    problems += [f"{p} was settled {settled[p]} times" for p in fetched if settled[p] != 1]
    problems += [f"{p} was settled but never fetched" for p in settled if p not in fetched]
    return {
        "fetched": fetched.total(),
        "trained": trained.total(),
        "dropped": dropped.total(),
        "steps": steps,
        "engines": {"lost": engines.lost},
        "trainer": {"lost": trainer.lost},
        "problems": problems,
    }


class Engines:
    """Where each sample is, and whether who ends it has it. A log that names no engine has one."""

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost
        self._incarnation: Counter[int] = Counter()
        self._at: dict[str, int] = {}
        """The engine of each sample that has not ended."""
        self._from: dict[str, int] = {}
        """Of those that are to move: where they were."""
        self._ended: set[str] = set()
        self._aborted: set[str] = set()
        self._concluded: set[str] = set()
        """Trajectories that are over; of them a turn ends at a time."""

    def read(self, entry: dict[str, Any]) -> list[str]:
        """Problems of the log in words; empty if it is sound."""
        problems = self._event(entry)
        for command in entry.get("commands", ()):
            samples = command.get("samples", ())
            where = command.get("engines") or [0] * len(samples)
            match command["command"]:
                case "Launch":
                    problems += [f"{s} was launched again" for s in samples if s in self._ended]
                    self._at.update(zip(samples, where, strict=True))
                case "Place":
                    over = (self._ended | self._aborted).intersection(samples)
                    problems += [f"{s} was placed, and is over" for s in over]
                    self._at.update(zip(samples, where, strict=True))
                case "Continue":
                    over = (self._concluded | self._aborted).intersection(samples)
                    problems += [f"{s} goes on, and is over" for s in over]
                    problems += [f"{s} goes on in mid-turn" for s in {*samples} - self._ended]
                    self._ended.difference_update(samples)
                    self._at.update(zip(samples, where, strict=True))
                case "Conclude":
                    if command["sample"] in self._concluded:
                        problems.append(f"{command['sample']} was concluded twice")
                    self._concluded.add(command["sample"])
                case "Move":
                    self._from.update({s: self._at[s] for s in samples})
                    self._at.update(dict.fromkeys(samples, command["engine"]))
                case "Resize":
                    problems += self._resize(command["incarnations"])
                case "Abort":
                    self._aborted.update(samples)
                case "TrainOn":
                    live = {s for group in command["groups"] for s in group} - self._ended
                    problems += [f"{s} was trained on, and had not ended" for s in live]
        return problems

    def _resize(self, incarnations: list[int]) -> list[str]:
        """All engines are others from now on, and what the earlier ones had must be over."""
        over = self._ended | self._aborted
        live = [sample for sample in self._at if sample not in over]
        self._incarnation.update(set(self._incarnation))  # one more each
        used = [n for n, one in enumerate(incarnations) if one < self._incarnation[n]]
        for number, incarnation in enumerate(incarnations):
            self._incarnation[number] = incarnation
        return [
            *(f"{sample} was in an engine that was laid out anew" for sample in live),
            *(f"engine {number} was laid out as one that it had been" for number in used),
        ]

    def _event(self, entry: dict[str, Any]) -> list[str]:
        engine, incarnation = entry.get("engine", 0), entry.get("incarnation", 0)
        match entry["event"]:
            case "EngineLost" if incarnation == self._incarnation[engine]:
                self.lost += 1
                self._incarnation[engine] += 1
            case "EngineReady" if incarnation != self._incarnation[engine]:
                return [f"incarnation {incarnation} of engine {engine} was not asked for"]
            case "SampleMoved":
                self._from.pop(entry["sample"], None)
            case "SampleGenerated" | "SampleAborted" | "SampleFailed":
                return self._end(entry["sample"], engine, incarnation, entry.get("commands", ()))
        return []

    def _end(self, sample: str, engine: int, incarnation: int, answer: Any) -> list[str]:
        if incarnation != self._incarnation[engine]:
            return [f"an engine that was lost is answered: {answer}"] if answer else []
        if engine not in (self._at.get(sample), self._from.get(sample)):
            return [f"engine {engine} ended {sample}, which it does not have"]
        twice = [f"{sample} ended twice"] if sample in self._ended else []
        self._ended.add(sample)
        return twice


class Trainer:
    """Whether each step is trained once, and one that comes back is where it was."""

    def __init__(self, lost: int = 0, version: int = 0) -> None:
        self.lost = lost
        self.version = version
        self._incarnation = 0
        self._is_there = True
        self._asked = 0
        """The step that it is to train."""

    def read(self, entry: dict[str, Any]) -> list[str]:
        """Problems of the log in words; empty if it is sound."""
        problems = []
        where = entry.get("incarnation"), entry.get("version")
        match entry["event"]:
            case "TrainerLost" if entry["incarnation"] == self._incarnation:
                self.lost += 1
                self._is_there = False
            case "TrainerReady":
                if where != (self._incarnation, self.version) or self._is_there:
                    problems.append(f"the trainer is back as {where}")
                self._is_there = True
            case "Trained":
                if (entry["step"], entry["version"]) != (self._asked, self.version + 1):
                    problems.append(f"step {entry['step']} was trained to {entry['version']}")
                if not self._is_there:
                    problems.append("a trainer that was lost has trained")
                self._asked, self.version = 0, entry["version"]
            case "WeightsSynced" if not self._is_there:
                problems.append("a trainer that was lost has handed weights over")
        for command in entry.get("commands", ()):
            match command["command"]:
                case "TrainOn":
                    self._asked = command["step"]
                case "RestoreTrainer":
                    self._incarnation += 1
                    asked = command["incarnation"], command["version"]
                    if asked != (self._incarnation, self.version):
                        problems.append("the trainer is to be where it was not")
        return problems


def _group_problems(
    number: int,
    group: list[str],
    verdicts: dict[str, float | None],
    launched_version: dict[str, int],
    version: int,
) -> list[str]:
    problems = []
    if len({sample.split("#")[0] for sample in group}) != 1:
        problems.append(f"line {number}: a group of several prompts")
    for sample in group:
        if verdicts.get(sample) is None:
            problems.append(f"line {number}: {sample} was trained without a verdict")
        if launched_version.get(sample) != version:
            problems.append(f"line {number}: {sample} was not sampled from version {version}")
    return problems


if __name__ == "__main__":
    result = check(Path(sys.argv[1]))
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["problems"]))
