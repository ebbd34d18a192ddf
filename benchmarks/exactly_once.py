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
    version = steps = 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        entry = json.loads(line)
        if "session" in entry or "note" in entry:
            continue
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
        "problems": problems,
    }


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
