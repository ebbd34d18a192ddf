"""A training that `accelerate launch` starts in several processes: test_several_processes.py.

    python -m tests.integrations_trl.training MODEL OUTPUT SETTINGS

SETTINGS is JSON: `batching` for `rollout_function`, `changes` of TRL's arguments, `resume`, and
`die`: [rank, step], where that process is killed in the middle of the step's generation. With
`server`, the address of a made-up one, it is the training of speed.py instead, of `asked`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.integrations.trl import rollout_function
from tests.integrations_trl import speed
from tests.integrations_trl.test_rollout_function import ROWS, Seen, trainer


def main() -> None:
    torch.set_num_threads(1)
    model_folder, output, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    rank, seen = int(os.environ["RANK"]), Seen()
    if "server" in settings:
        lines = speed.Lines(io.StringIO())
        asked = argparse.Namespace(**settings["asked"])
        speed.train(settings["server"], asked, lines, output, **settings["changes"])
        (output / f"rank{rank}.json").write_text(json.dumps(lines.trained))
        return
    rollout = rollout_function(Dataset.from_list(ROWS), **settings["batching"])
    own = trainer(model_folder, output, rollout, seen, **settings["changes"])
    file = output / f"rank{rank}{'-resumed' if settings.get('resume') else ''}.json"
    if settings.get("die", [None])[0] == rank:
        die_in(settings["die"][1], seen, file)
    try:
        own.train(resume_from_checkpoint=settings.get("resume"))
    finally:
        keep(seen, file)
    probe = sum(p.double().sum().item() for p in own.model.parameters())
    print(f"rank {rank} is done, weights {probe!r}")


def keep(seen: Seen, file: Path) -> None:
    responses = {str(row): found for row, found in seen.responses.items()}
    file.write_text(json.dumps({"steps": seen.steps, "responses": responses}))


def die_in(step: int, seen: Seen, file: Path) -> None:
    """Kill this process as soon as its engine has generated tokens in that step."""
    turn = TorchEngine._turn

    def turn_and_die(engine: Any) -> Any:
        found = turn(engine)
        if len(seen.steps) == step - 1:
            keep(seen, file)
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    TorchEngine._turn = turn_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
