"""The benchmark's checker of event logs finds what must not be in one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reward_faults import check_log

A, B = "code/0/1#0.0", "code/0/1#0.1"


def asked(*samples: str, retry: int = 0) -> list[dict[str, Any]]:
    return [{"command": "Score", "sample": sample, "retry": retry} for sample in samples]


def verdict(
    sample: str, value: float | None, cause: str = "", commands: Any = ()
) -> dict[str, Any]:
    event = {"event": "SampleScored", "t": 1.0, "sample": sample, "value": value, "cause": cause}
    return {**event, "commands": list(commands)}


def train_on(*samples: str) -> list[dict[str, Any]]:
    return [{"command": "TrainOn", "groups": [list(samples)]}]


START = {"event": "SampleGenerated", "t": 0.0, "commands": asked(A, B)}
SOUND = [
    START,
    verdict(A, None, "infrastructure", asked(A, retry=1)),
    verdict(B, 0.0),
    verdict(A, 1.0, commands=train_on(A, B)),
]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (SOUND, None),
        ([START, verdict(A, 0.0, "infrastructure")], "has a value"),
        ([START, verdict(A, None, "infrastructure", train_on(A))], "without a verdict"),
        ([START, {"event": "Tick", "commands": train_on(B)}], "without a verdict"),
        ([START, verdict(A, 1.0), verdict(A, 1.0)], "nobody asked for"),
        ([START, verdict(A, None, "infrastructure", asked(A, retry=2))], "miscounted"),
    ],
)
def test_the_checker(tmp_path: Path, entries: list[dict[str, Any]], problem: str | None) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = check_log(log)["problems"]
    assert (found == []) if problem is None else any(problem in text for text in found)
