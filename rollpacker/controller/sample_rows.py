"""The rows of `samples/*.parquet`: what was trained on, and what was slowest to check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from rollpacker.controller.desk import Desk
from rollpacker.controller.samples import SampleWriter
from rollpacker.core.commands import TrainOn
from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.trainer.trainer import TrainSample

NUM_SLOWEST = 10
"""So many of a step's slowest checks are kept with their text, trained on or not."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Makes the rows of a step while the trainer works on it."""

    desk: Desk
    writer: SampleWriter
    prompts: Sequence[PromptRow]
    reward_names: Sequence[str]

    def add(self, command: TrainOn, samples: Sequence[TrainSample]) -> None:
        """Give the writer a row for each sample trained on, and for the slowest to check."""
        trained = {sample.sample: sample for sample in samples}
        asked = list(chain(*command.groups))
        weights = (
            chain(*command.weights) if command.weights is not None else repeat(1.0, len(asked))
        )
        for sample, weight in zip(asked, weights, strict=True):
            row = self._row(command.step, sample)
            row["trained"] = True
            row["advantage"] = trained[sample].advantage
            row["loss_weight"] = weight
            self.writer.add(row)
        for sample in self.desk.slowest(NUM_SLOWEST):
            if sample not in trained:
                self.writer.add(self._row(command.step, sample))

    def _row(self, step: int, sample: SampleId) -> dict[str, Any]:
        prompt = self.prompts[sample.prompt.row].prompt
        known = self.desk[sample]
        verdict = known.verdict
        parts: Mapping[str, float | None] = {} if verdict is None else verdict.parts
        return {
            "step": step,
            "round_kind": str(self.desk.round_kind),
            "prompt_id": str(sample.prompt),
            "sample_id": str(sample),
            "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt),
            "completion": known.completion,
            "finish_reason": known.response.finish_reason,
            "num_tokens": len(known.response.tokens),
            "reward": None if verdict is None else verdict.value,
            **{f"reward/{name}": parts.get(name) for name in self.reward_names},
            "check_s": known.check_s,
            "trained": False,
            "advantage": None,
            "loss_weight": 0.0,
        }
