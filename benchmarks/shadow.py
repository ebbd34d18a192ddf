"""How much longer or shorter training sees responses, against what the policy would have written.

The engine of a real run has a shadow on the same weights: before a prompt's *first* launch the
shadow generates its responses to their end, undisturbed, with the same noise. That is what training
without tail batching would see of this prompt at this step. The run then goes on as it would have,
aborts, defers and carries. At the end every trained response is compared with its shadow: the mean
of one over the mean of the other, in pairs, is the shift of lengths, while the policy learns.

    python benchmarks/shadow.py CONFIG [key=value ...]      # one run; prints JSON

`benchmarks/learning.py` runs it for several seeds.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rollpacker
from rollpacker.core.commands import Launch, TrainOn
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.engines.table import ENGINES
from rollpacker.report.log import EventLog

WHOLE: dict[tuple[PromptId, int], tuple[int, ...]] = {}
"""What the policy would have written, by prompt and index."""


class ShadowEngine(TorchEngine):
    """The embedded engine, with a shadow. Evaluations have none: their samples are not trained
    on."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._shadow = TorchEngine(**parts)
        self._shadow.start(self._collect, self._give_up)
        self._missing = 0
        self._done = threading.Event()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Prompts that are launched for the first time come in whole groups, to an idle engine."""
        fresh = [r for r in requests if r.sample.attempt == 0 and r.sample.prompt.source != "eval"]
        if fresh:
            self._missing = len(fresh)
            self._done.clear()
            self._shadow.submit(fresh)
            self._done.wait()
        super().submit(requests)

    def _collect(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            assert output.response is not None, output.event
            sample = output.event.sample
            WHOLE[sample.prompt, sample.index] = output.response.tokens
        self._missing -= len(outputs)
        if not self._missing:
            self._done.set()

    def _give_up(self, error: BaseException) -> None:
        print(f"the shadow died: {error}", file=sys.stderr)
        self._done.set()

    async def close(self) -> None:
        await self._shadow.close()
        await super().close()


def facts(log: Path) -> dict[str, Any]:
    """What a run did, and how its trained lengths compare with their shadows, if it had any."""
    lengths: dict[SampleId, int] = {}
    launched: dict[SampleId, int] = {}
    versions: dict[SampleId, int] = {}
    trained: list[SampleId] = []
    steps: list[list[SampleId]] = []
    num_new = num_looked_at = num_mismatches = num_redraws = num_carried = num_kept = 0
    for entry in EventLog(log):
        if not isinstance(entry, Record):
            continue
        for command in entry.commands:
            match command:
                case Launch():
                    carried = command.carried or (0,) * len(command.samples)
                    launched.update(zip(command.samples, carried, strict=True))
                    versions.update(dict.fromkeys(command.samples, command.version))
                case TrainOn():
                    steps.append([sample for group in command.groups for sample in group])
                    trained += steps[-1]
        event = entry.event
        if isinstance(event, SampleGenerated | SampleAborted):
            lengths[event.sample] = event.num_tokens
            had, kept = launched[event.sample], event.num_kept
            num_new += event.num_tokens - (had if kept is None else kept)
            num_redraws += event.num_redraws
            if had and kept is not None:
                num_looked_at += min(kept + 1, had)
                num_mismatches += kept < had
                num_carried += had
                num_kept += kept
    total = sum(lengths[sample] for sample in trained)
    found = {
        "steps": len(steps),
        "trained_samples": len(trained),
        "mean_trained_length": total / len(trained),
        "generated_per_trained": num_new / total,
        "deferred_share": sum(sample.attempt > 0 for sample in trained) / len(trained),
        "max_attempt": max(sample.attempt for sample in trained),
        "mismatch_per_token": num_mismatches / max(num_looked_at, 1),
        "prefix_kept": num_kept / max(num_carried, 1),
        "redraws_per_trained": num_redraws / len(trained),
    }
    if WHOLE:
        paired = [(lengths[s], len(WHOLE[s.prompt, s.index])) for s in trained]
        own = sum(whole for _, whole in paired)
        found["shift"] = total / own - 1
        by_prompt: dict[str, tuple[int, int]] = {}
        for sample, (length, whole) in zip(trained, paired, strict=True):
            before = by_prompt.get(str(sample.prompt), (0, 0))
            by_prompt[str(sample.prompt)] = (before[0] + length, before[1] + whole)
        found["tokens_and_own"] = list(by_prompt.values())
        found["shift_of_deferred"] = _shift(
            [pair for pair, s in zip(paired, trained, strict=True) if s.attempt > 0]
        )
        found["same_length_share"] = sum(a == b for a, b in paired) / len(paired)
    return found


def _shift(paired: Sequence[tuple[int, int]]) -> float | None:
    own = sum(whole for _, whole in paired)
    return sum(trained for trained, _ in paired) / own - 1 if own else None


def measured(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The facts of one run with a shadow."""
    ENGINES["torch"] = "shadow:ShadowEngine"
    train: Callable[..., Any] = rollpacker.train
    return facts(train(config, overrides=overrides).folder / "events.jsonl")


if __name__ == "__main__":
    sys.modules["shadow"] = sys.modules[__name__]
    print(json.dumps(measured(sys.argv[1], sys.argv[2:])))
