"""The driver that `benchmarks/hosts.py` times: the same responses in every mode."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

STEPS, PROMPTS, SAMPLES = 5, 4, 2


def drive(mode: str) -> list[dict[str, Any]]:
    options = {"mode": mode, "steps": STEPS, "prompts": PROMPTS, "samples": SAMPLES}
    options |= {"token-s": 0.0001}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.scheduler.speed", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_mode_trains_on_the_same() -> None:
    *steps, last = drive("plain")
    assert [len(step["lengths"]) for step in steps] == [PROMPTS * SAMPLES] * STEPS
    assert len(last["responses"]) == STEPS * PROMPTS * SAMPLES
    *of_off, off = drive("off")
    *of_on, on = drive("on")
    assert off == on == last
    assert [sorted(step["lengths"]) for step in of_off] == [sorted(s["lengths"]) for s in steps]
    assert of_on != of_off  # a race changes what comes first
    assert all(0 < step["rollout_s"] <= step["step_s"] for step in steps + of_off + of_on)
