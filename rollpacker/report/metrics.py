"""Metrics of a step under names that are usual elsewhere, as JSON lines and for TensorBoard.
`docs/metrics.md` lists them. Metrics that depend on a clock have names in `timing_s/` or `perf/`;
all others are the same whenever a seed is run again."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.core.commands import RoundKind
from rollpacker.imports import missing
from rollpacker.report.carrying import carry_metrics
from rollpacker.report.checks import check_metrics
from rollpacker.report.step_summary import LengthStats, StepSummary
from rollpacker.report.time_book import RARE_CAUSES
from rollpacker.writing import replacing

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

TIMING_NAMES = {
    "decode": "decode",
    "tail_idle": "tail_idle",
    "imbalance": "imbalance",
    "environment": "environment",
    "reward_wait": "reward",
    "training": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "recovery": "recovery",
    "controller": "controller",
    "evaluation": "testing",
    "callbacks": "callbacks",
    "startup": "startup",
    "pool_wait": "pool_wait",
    "switch": "switch",
}
"""Mapping from a cause (what a run spends seconds on) to its name under `timing_s/`."""

OTHER_NAMES = {
    "TRL": {
        "reward": "critic/rewards/mean",
        "reward_std": "critic/rewards/std",
        "frac_reward_zero_std": "critic/frac_reward_zero_std",
        "completions/mean_length": "response_length/mean",
        "completions/max_length": "response_length/max",
        "completions/clipped_ratio": "response_length/clip_ratio",
        "loss": "actor/loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "kl": "actor/kl",
        "entropy": "actor/entropy",
        "clip_ratio/low_mean": "actor/clip_ratio_low",
        "clip_ratio/high_mean": "actor/clip_ratio_high",
        "step_time": "timing_s/step",
        "eval_reward": "eval/reward",
    },
    "verl": {
        "critic/score/mean": "critic/rewards/mean",
        "actor/pg_loss": "actor/loss",
        "actor/kl_loss": "actor/kl",
        "actor/entropy_loss": "actor/entropy",
        "actor/pg_clipfrac": "actor/clip_ratio_high",
        "actor/pg_clipfrac_lower": "actor/clip_ratio_dual",
        "critic/vf_loss": "critic/value_loss",
        "critic/vf_clipfrac": "critic/value_clip_ratio",
    },
}
"""Mapping from another RL framework to its names of metrics, each with RollPacker's name, where the
two differ. It is shown in docs/migration.md, and gives a hint for a name that a run lacks."""

Value = float | int | str
Row = dict[str, Any]
"""A line of `metrics.jsonl`: the step's number under "step", and the step's metrics by name."""


def step_metrics(step: StepSummary) -> dict[str, Value]:
    """Metrics of one step by name. A metric without a value is left out, such as the mean reward of
    a step that trained on nothing."""
    metrics: dict[str, Value | None] = {
        **step.trainer,
        "critic/rewards/mean": step.rewards.mean,
        "critic/rewards/std": step.rewards.std,
        "critic/rewards/min": step.rewards.min,
        "critic/rewards/max": step.rewards.max,
        "critic/frac_reward_zero_std": step.rewards.zero_std_ratio,
        **{f"rewards/{name}/mean": value for name, value in step.rewards.parts.items()},
        **_lengths("response_length", step.lengths.trained),
        **_lengths("response_length_all", step.lengths.finished),
        "response/aborted_ratio": _ratio(step.samples.aborted, step.samples.launched),
        **step.lengths.bias,
        "tokens/generated": step.tokens.generated,
        "tokens/trained": step.tokens.trained,
        "tokens/generated_per_trained": _ratio(step.tokens.generated, step.tokens.trained),
        "long_queue/prompts": step.prompts.long_queue,
        **carry_metrics(step.carry),
        **_round(step),
        **_timing(step),
        **check_metrics(step.checks),
        **dict.fromkeys(step.marks, 1),
        **step.logged,
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
        "round/prompts_launched": step.prompts.launched,
        "round/prompts_trained": step.prompts.trained,
        "round/prompts_deferred": step.prompts.deferred,
        "round/prompts_dropped": sum(step.prompts.dropped.values()),
        "round/samples_launched": step.samples.launched,
        "round/samples_trained": step.samples.trained,
        "round/samples_aborted": step.samples.aborted,
        "round/samples_failed": step.samples.failed,
        "round/samples_no_verdict": sum(step.samples.no_verdict.values()),
        **{f"round/dropped/{reason}": num for reason, num in sorted(step.prompts.dropped.items())},
    }


def _timing(step: StepSummary) -> dict[str, Value | None]:
    return {
        "timing_s/step": step.step_s,
        "timing_s/gen": step.rollout_s,
        **{
            f"timing_s/{TIMING_NAMES[cause]}": value
            for cause, value in step.seconds.items()
            if value or cause not in RARE_CAUSES
        },
        "perf/throughput": _ratio(step.tokens.trained, step.step_s),
        "perf/gen_throughput": _ratio(step.tokens.generated, step.rollout_s),
        "perf/tail_idle_ratio": _ratio(step.seconds["tail_idle"], step.rollout_s),
        "perf/samples_streamed": step.samples.streamed,
        "perf/time_s": step.end_s,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def here_it_is(name: str, known: Collection[str]) -> str:
    """A hint such as " Here it is actor/loss" if `name` is a metric of another framework, or else
    an empty text. `known`: names of the metrics that the run has."""
    ours = next((names[name] for names in OTHER_NAMES.values() if name in names), None)
    if ours is None:
        return ""
    return f" Here it is {ours}{'' if ours in known else ', which no row has'}"


class MetricsWriter:
    """Appends rows of metrics to `folder/metrics.jsonl` (one row per step) and to
    `folder/tensorboard/`.

    With `resume_step` rows of later steps, and a last row that a crash cut off, are removed first,
    in one atomic replacement, and TensorBoard forgets the same steps. `log_rows` are rows made from
    the event log, evaluations included: rows that the file lacks are added, with a warning. They
    may end with the evaluation of the step after `resume_step`, which is written, too. Raises
    `OSError`, and `ValueError` for a row in mid-file that is no JSON object with a `step`."""

    def __init__(
        self,
        folder: str | Path,
        *,
        resume_step: int | None = None,
        log_rows: Sequence[Row] = (),
        tensorboard: bool = True,
    ) -> None:
        self.path = Path(folder) / METRICS_FILE
        self._evaluated: set[int] = set()
        if resume_step is not None:
            self._cut(resume_step, log_rows)
        # Held open for the life of the run and closed in close().
        # A half surrogate has no bytes; as an escape JSON knows it.
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self._board = None
        if tensorboard:
            lacking = missing("tensorboard", extra="report", what="writing tensorboard/")
            if lacking is None:
                self._board = _Board(Path(folder) / TENSORBOARD_FOLDER, resume_step)
            else:
                logger.warning("%s; metrics.jsonl has all of it", lacking)
        for row in log_rows:
            if resume_step is not None and row["step"] > resume_step:
                self.write_evaluation(row["step"], {k: v for k, v in row.items() if k != "step"})

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write the row of a step, its `metrics`. Numbers that are not finite become null."""
        self._append(step, metrics)

    def write_evaluation(self, step: int, metrics: Mapping[str, Value]) -> bool:
        """Write a row with the metrics of the evaluation after a step (`eval/...`). Returns False
        and writes nothing if the step has such a row already."""
        if step in self._evaluated:
            return False
        self._evaluated.add(step)
        self._append(step, metrics)
        return True

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _append(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._file.write(_line({"step": step, **metrics}))
        self._file.flush()
        if self._board is not None:
            self._board.write(step, metrics)

    def _cut(self, resume_step: int, log_rows: Sequence[Row]) -> None:
        """Cut the file back to the rows up to step `resume_step`, and add missing `log_rows`."""
        numbered = read_metrics(self.path) if self.path.exists() else []
        for number, row in numbered:
            if not isinstance(row.get("step"), int):
                raise ValueError(_foreign(self.path, number, "it has no step"))
        rows = [row for _, row in numbered if row["step"] <= resume_step]
        known = {_place(row) for row in rows}
        lacking = [
            row for row in log_rows if row["step"] <= resume_step and _place(row) not in known
        ]
        if lacking:
            rows = sorted(rows + lacking, key=_place)
            first, last = lacking[0]["step"], lacking[-1]["step"]
            logger.warning(
                "%s lacked %d of its rows (steps %d to %d): made again from the event log",
                self.path,
                len(lacking),
                first,
                last,
            )
        self._evaluated = {row["step"] for row in rows if is_evaluation(row)}
        with (
            replacing(self.path) as temporary,
            temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.writelines(map(_line, rows))
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: str | Path) -> list[tuple[int, Row]]:
    """The rows of a metrics file, as pairs (line number, row). A broken last row without its
    newline is left out. Raises `ValueError` for any other line that is no row."""
    rows = []
    # Bytes, since only they are split at newlines alone: text has U+2028 and its like as well.
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line.decode("utf-8"))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break
                raise ValueError(_foreign(path, number, str(error))) from error
            if not isinstance(row, dict):
                raise ValueError(_foreign(path, number, "it is no mapping"))
            rows.append((number, row))
    return rows


def _foreign(path: str | Path, number: int, what: str) -> str:
    return (
        f"{path}, line {number}: not a row of metrics ({what}). Mend the line or move the file"
        " away: --resume makes what it lacks again from the event log"
    )


def is_evaluation(row: Row) -> bool:
    return any(name.startswith("eval/") for name in row)


def _place(row: Row) -> tuple[int, bool]:
    """Key that sorts rows by step, with the row of a step's evaluation before its own."""
    return row["step"], not is_evaluation(row)


def _line(row: Row) -> str:
    plain = {name: _finite(value) for name, value in row.items()}
    return json.dumps(plain, ensure_ascii=False) + "\n"


def _finite(value: Value) -> Value | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Board:
    """Writes event files for TensorBoard, with its package alone: no TensorFlow, no torch."""

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
