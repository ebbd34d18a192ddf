"""A step's metrics under the names that the field uses, as JSON lines and for TensorBoard.

`docs/metrics.md` lists them. Everything that depends on a clock stands under `timing_s/` or
`perf/`; all the rest is the same whenever a seed is run again."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.core.commands import RoundKind
from rollpacker.imports import missing
from rollpacker.report.accounting import LengthStats, StepSummary
from rollpacker.report.checks import check_metrics

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

TIMING_NAMES = {
    "decode": "decode",
    "tail_idle": "tail_idle",
    "reward_wait": "reward",
    "training": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "controller": "controller",
    "evaluation": "testing",
    "startup": "startup",
}
"""Cause of time -> its name under `timing_s/`."""

Value = float | int | str


def step_metrics(step: StepSummary) -> dict[str, Value]:
    """Flat metrics of one step. What has no value (no group was trained on, say) is left out."""
    metrics: dict[str, Value | None] = {
        **step.trainer,
        "critic/rewards/mean": step.reward_mean,
        "critic/rewards/std": step.reward_std,
        "critic/rewards/min": step.reward_min,
        "critic/rewards/max": step.reward_max,
        "critic/frac_reward_zero_std": step.zero_std_ratio,
        **{f"rewards/{name}/mean": value for name, value in step.parts.items()},
        **_lengths("response_length", step.trained_lengths),
        **_lengths("response_length_all", step.finished_lengths),
        "response/aborted_ratio": _ratio(step.num_samples_aborted, step.num_samples_launched),
        **step.lengths,
        "tokens/generated": step.tokens_generated,
        "tokens/trained": step.tokens_trained,
        "tokens/generated_per_trained": _ratio(step.tokens_generated, step.tokens_trained),
        "long_queue/prompts": step.long_queue,
        **_round(step),
        **_timing(step),
        **check_metrics(step.checks),
        **dict.fromkeys(step.marks, 1),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _lengths(prefix: str, stats: LengthStats | None) -> dict[str, Value | None]:
    if stats is None:
        return {}
    return {
        f"{prefix}/mean": stats.mean,
        f"{prefix}/median": stats.median,
        f"{prefix}/max": stats.max,
        f"{prefix}/clip_ratio": stats.clip_ratio,
    }


def _round(step: StepSummary) -> dict[str, Value | None]:
    return {
        "round/kind": None if step.kind is None else str(step.kind),
        "round/is_long": int(step.kind in (RoundKind.LONG, RoundKind.FLUSH)),
        "round/prompts_launched": step.num_prompts_launched,
        "round/prompts_trained": step.num_prompts_trained,
        "round/prompts_deferred": step.num_prompts_deferred,
        "round/prompts_dropped": sum(step.dropped.values()),
        "round/samples_launched": step.num_samples_launched,
        "round/samples_trained": step.num_samples_trained,
        "round/samples_aborted": step.num_samples_aborted,
        "round/samples_failed": step.num_samples_failed,
        "round/samples_no_verdict": sum(step.no_verdict.values()),
        **{f"round/dropped/{reason}": num for reason, num in sorted(step.dropped.items())},
    }


def _timing(step: StepSummary) -> dict[str, Value | None]:
    return {
        "timing_s/step": step.step_s,
        "timing_s/gen": step.rollout_s,
        **{f"timing_s/{TIMING_NAMES[cause]}": value for cause, value in step.seconds.items()},
        "perf/throughput": _ratio(step.tokens_trained, step.step_s),
        "perf/gen_throughput": _ratio(step.tokens_generated, step.rollout_s),
        "perf/tail_idle_ratio": _ratio(step.seconds["tail_idle"], step.rollout_s),
        "perf/samples_streamed": step.num_samples_streamed,
        "perf/time_s": step.end_s,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class MetricsWriter:
    """Appends to `folder/metrics.jsonl` (one row a step) and to `folder/tensorboard/`.

    With `resume_step` rows of later steps, and a last row that a crash cut off, are taken out
    first, in one atomic replacement; TensorBoard is told to forget the same steps. Raises
    `ValueError` if a row in the middle of the file is no JSON object with a `step`, `OSError` as
    files do."""

    def __init__(
        self, folder: str | Path, *, resume_step: int | None = None, tensorboard: bool = True
    ) -> None:
        self.path = Path(folder) / METRICS_FILE
        self._evaluated: set[int] = set()
        if resume_step is not None and self.path.exists():
            self._cut(resume_step)
        # Held open for the life of the run and closed in close().
        self._file = self.path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            lacking = missing("tensorboard", extra="report", what="writing tensorboard/")
            if lacking is None:
                self._board = _Board(Path(folder) / TENSORBOARD_FOLDER, resume_step)
            else:
                logger.warning("%s; metrics.jsonl has all of it", lacking)

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """One row. Non-finite numbers become null, since JSON has none."""
        self._append(step, metrics)

    def write_evaluation(
        self, step: int, metrics: Mapping[str, float], marks: Sequence[str] = ()
    ) -> None:
        """A row of its own, with the names that the evaluation gave (`eval/...`) and the session's
        marks; a step that has one keeps it."""
        if step not in self._evaluated:
            self._evaluated.add(step)
            self._append(step, {**metrics, **dict.fromkeys(marks, 1)})

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _append(self, step: int, metrics: Mapping[str, Value]) -> None:
        row = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.write(step, metrics)

    def _cut(self, resume_step: int) -> None:
        kept = []
        for number, row in read_metrics(self.path):
            if not isinstance(row.get("step"), int):
                raise ValueError(f"{self.path}, line {number}: not a row of metrics")
            if row["step"] <= resume_step:
                kept.append(json.dumps(row, ensure_ascii=False) + "\n")
                if any(name.startswith("eval/") for name in row):
                    self._evaluated.add(row["step"])
        temporary = self.path.with_suffix(".jsonl.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def read_metrics(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, row) for each row. A last row without its newline is left out if it is
    broken."""
    rows = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(keepends=True), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: not a row of metrics ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a row of metrics")
        rows.append((number, row))
    return rows


def _finite(value: Value) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Board:
    """TensorBoard event files, written with its own library (TensorFlow and torch stay out)."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if resume_step is not None:
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(session_log=log, step=resume_step + 1))

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        summary = self._summary()
        for name, value in metrics.items():
            if not isinstance(value, str):
                summary.value.add(tag=name, simple_value=float(value))
        event = self._event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()
