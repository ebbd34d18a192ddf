"""Makes the rows of `samples/*.parquet` (samples trained on, and those whose rewards took longest)
and of `evaluations/*.parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from statistics import fmean
from typing import Any

from rollpacker.core.commands import TrainOn
from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import Response
from rollpacker.environments.environment import Episode
from rollpacker.rewards.reward import Failed, Scored
from rollpacker.run.errors import Decode
from rollpacker.run.folder.plain_json import plain_text, shortened
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.ports.desk import Desk
from rollpacker.run.ports.dialogue_text import dialogue_text
from rollpacker.trainer.trainer import TrainSample

NUM_SLOWEST = 10
"""Number of samples kept in each step because their reward took longest, trained on or not."""

MAX_VALUE_CHARS = 4096
"""Number of characters after which a value of the data row is cut off in a sample's row. The tests
of one programming problem can be megabytes, and every sample of it would repeat them."""


@dataclass(slots=True)
class PromptColumns:
    """Makes the columns that describe a sample's prompt. Called with the number of the prompt's row
    in the data set; samples of one prompt share the result."""

    rows: Sequence[PromptRow]
    render: Decode
    """Turns prompt tokens into text, special tokens included."""
    _last: tuple[int, Mapping[str, Any]] = field(default=(-1, {}), init=False)

    def __call__(self, number: int) -> Mapping[str, Any]:
        if self._last[0] != number:
            row = self.rows[number]
            told = {
                "row_where": row.where,
                "row": row_text(row.columns),
                "prompt": row.prompt if isinstance(row.prompt, str) else plain_text(row.prompt),
                "rendered_prompt": self.render(row.tokens),
            }
            self._last = number, told
        return self._last[1]


def row_text(columns: Mapping[str, Any]) -> str:
    """Returns a data row's columns as JSON. Values that JSON lacks (dates, arrays, objects) become
    texts, and long values are cut off."""
    return plain_text(
        {str(name): shortened(value, MAX_VALUE_CHARS) for name, value in columns.items()}
    )


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Makes a training step's rows of `samples/*.parquet` while the trainer computes that step."""

    desk: Desk
    writer: SampleWriter
    prompts: PromptColumns
    reward_names: Sequence[str]

    def add(self, command: TrainOn, samples: Sequence[TrainSample]) -> None:
        """Give `writer` a row for each of `samples`, which were trained on, and for each whose
        rewards took longest. `command`: the core's command to train, with loss weights."""
        trained = {sample.sample: sample for sample in samples}
        asked = list(chain(*command.groups))
        weights = (
            chain(*command.weights) if command.weights is not None else repeat(1.0, len(asked))
        )
        rows = []
        for sample, weight in zip(asked, weights, strict=True):
            row = self._row(command.step, sample)
            row["trained"] = True
            advantage = trained[sample].advantage
            of_tokens = advantage if isinstance(advantage, tuple) else (advantage,)
            row["advantage"] = fmean(of_tokens)
            if "turn_advantages" in row:
                row["turn_advantages"] = self._turn_advantages(sample, advantage)
            row["loss_weight"] = weight
            rows.append(row)
        slowest = self.desk.slowest(NUM_SLOWEST)
        rows += [self._row(command.step, sample) for sample in slowest if sample not in trained]
        self.writer.add(rows)

    def _row(self, step: int, sample: SampleId) -> dict[str, Any]:
        known = self.desk[sample]
        verdict = known.verdict
        return {
            "step": step,
            "round_kind": str(self.desk.round_kind),
            **_sample_columns(
                sample, self.prompts, known.response, known.completion, known.episode
            ),
            "reward": None if verdict is None else verdict.value,
            **_parts(verdict, self.reward_names),
            **_extras(verdict),
            "check_s": known.check_s,
            "trained": False,
            "advantage": None,
            "loss_weight": 0.0,
            **({} if known.episode is None else _turn_columns(verdict)),
        }

    def _turn_advantages(self, sample: SampleId, advantage: float | tuple[float, ...]) -> str:
        """Returns a JSON list with the advantage of the first token of each turn."""
        episode = self.desk[sample].episode
        assert episode is not None, "there are turns"
        if not isinstance(advantage, tuple):
            return plain_text([advantage] * len(episode.num_drawn))
        firsts = accumulate(episode.num_drawn[:-1], initial=0)
        return plain_text([advantage[first] for first in firsts])


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """Makes the rows of `evaluations/*.parquet`: one for each sample of an evaluation."""

    writer: SampleWriter
    prompts: PromptColumns
    reward_names: Sequence[str]
    pass_threshold: float

    def write(
        self,
        step: int,
        judged: Iterable[tuple[Response, str, Scored | Failed]],
        episodes: Mapping[SampleId, Episode],
    ) -> None:
        """Write the rows of the evaluation after step `step`. `judged`: each response with its text
        and the rewards' verdict. `episodes`: messages of samples with several turns, by sample."""
        rows = [self._row(step, *one, episodes.get(one[0].sample)) for one in judged]
        self.writer.write_evaluation(step, rows)

    def _row(
        self,
        step: int,
        response: Response,
        completion: str,
        verdict: Scored | Failed,
        episode: Episode | None,
    ) -> dict[str, Any]:
        reward = verdict.value if isinstance(verdict, Scored) else None
        return {
            "step": step,
            **_sample_columns(response.sample, self.prompts, response, completion, episode),
            "reward": reward,
            **_parts(verdict, self.reward_names),
            **_extras(verdict),
            "check_s": verdict.seconds,
            "passed": None if reward is None else reward >= self.pass_threshold,
            "failure": verdict.reason if isinstance(verdict, Failed) else None,
        }


def _sample_columns(
    sample: SampleId,
    prompts: PromptColumns,
    response: Response,
    completion: str | None,
    episode: Episode | None,
) -> dict[str, Any]:
    return {
        "prompt_id": str(sample.prompt),
        "sample_id": str(sample),
        **prompts(sample.prompt.row),
        **_said_first(response, prompts.render, episode),
        "completion": completion,
        "finish_reason": response.finish_reason,
        "num_tokens": response.num_drawn,
        **(
            {}
            if episode is None
            else {"dialogue": dialogue_text(response, episode, prompts.render)}
        ),
    }


def _said_first(response: Response, render: Decode, episode: Episode | None) -> dict[str, Any]:
    """Returns the prompt's columns if the environment gave the prompt; else an empty dict."""
    if episode is None or episode.prompt is None:
        return {}
    return {
        "prompt": plain_text(episode.prompt),
        "rendered_prompt": render(response.prompt_tokens),
    }


def _turn_columns(verdict: Scored | Failed | None) -> dict[str, str | None]:
    """Returns the columns `turn_rewards` (the rewards of a trajectory's turns as a JSON list; None
    if turns got none) and `turn_advantages`: None, as only samples trained on have advantages."""
    rewards = verdict.turns if isinstance(verdict, Scored) else None
    return {
        "turn_rewards": None if rewards is None else plain_text(rewards),
        "turn_advantages": None,
    }


def _extras(verdict: Scored | Failed | None) -> dict[str, Any]:
    """Returns a column for each value that reward functions logged for the sample (`log_extra`)."""
    extras = verdict.extras if isinstance(verdict, Scored) else {}
    return {f"extra/{name}": value for name, value in extras.items()}


def _parts(verdict: Scored | Failed | None, names: Sequence[str]) -> dict[str, float | None]:
    """Returns a column for each reward: its value, or None if it did not judge the sample."""
    parts: Mapping[str, float | None] = {} if verdict is None else verdict.parts
    return {f"reward/{name}": parts.get(name) for name in names}
