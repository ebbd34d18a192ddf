"""Constants of a run's machine and its workload, as fitted to its log: values for a simulator, and
a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.report.decode_fit import DecodeFit
from rollpacker.report.reward_fit import Calls, Check


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundErrors:
    """Errors of the fitted constants: seconds of rounds predicted with them, against the log's."""

    num: int
    """Number of rounds of generation that were predicted."""
    mean_s: float
    """Mean of the measured seconds from the launch of a round to the end of its last sample."""
    ratio: float
    """Sum of the predicted seconds over the sum of the measured seconds."""
    mean_error: float
    """Mean over the rounds of |predicted - measured| / measured, where both are seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFit:
    """Constants of a training step, whose seconds are fixed_s + per_token_s * trained tokens."""

    fixed_s: float
    per_token_s: float
    mean_error: float
    """Mean over the training steps of |predicted - measured| / measured, where both are seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of a run and the lengths of their responses, in tokens."""

    source: str
    rows: tuple[int, ...]
    """Dataset rows (by number) in the order in which their prompts were fetched. A row that was
    fetched in several epochs is listed once for each."""
    pools: Mapping[int, tuple[int, ...]]
    """Mapping from a dataset row to the token counts of its finished responses, by their ends."""
    stopped: Mapping[int, tuple[int, ...]]
    """Mapping from a dataset row to the token counts that its stopped responses had reached."""
    max_response_tokens: int | None
    """Length in tokens of responses that ran into the length limit. None: no response did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """Everything that a simulator needs to know of a recorded run's machine and workload. Every
    field whose name ends in `_s` is a mean over the run, in seconds."""

    job: Mapping[str, Any]
    """`JobConfig`, the settings of steps and rounds, of the run's last process, as a mapping."""
    slots: int | None
    """Maximum number of samples that an engine generates at once. None: no limit."""
    num_steps: int
    num_rounds: int
    """Number of rounds of generation that the constants were fitted to."""
    num_skipped: int
    """Number of rounds left out of the fit: samples failed or ended in an impossible order."""
    step: DecodeFit
    """Constants of decode steps. If the engine gave several tokens of a sample in a step, they are
    fitted to whole rounds, each taken to have as many steps as its longest sample has tokens."""
    errors: Mapping[str, RoundErrors]
    """Errors of the fit for each kind of round, and for "all" rounds."""
    checks: Mapping[int, tuple[Check, ...]]
    """Mapping from a dataset row to the checks of its responses: verdicts and their seconds."""
    calls: Calls | None
    """Calls of rewards that check several responses at a time, if there were any, else None."""
    exposed_s: float
    """Seconds of waiting for verdicts: from the end of generation to the start of training."""
    stop_s: float
    """Seconds from the order to stop samples until the engine has released them."""
    train: TrainFit
    sync_s: float
    """Seconds from the end of training until the engine has the new weights."""
    commit_s: float
    """Seconds of a commit, the run's checkpoints included, its evaluations left out."""
    between_s: float
    """Seconds from a commit to the launch of the next round."""
    workload: Workload

    @property
    def drafted(self) -> bool:
        """Whether the engine gave several tokens of a sample in a step
        (`rollout.engine.draft_tokens`)."""
        return bool(self.step.knots)

    def describe(self) -> str:
        """The fitted constants as a text for people: a table with a line for each constant."""
        return "\n".join(
            f"{name:<31}{value:>13}  {what}".rstrip() for name, value, what in _rows(self)
        )


def _rows(run: FittedRun) -> list[tuple[str, str, str]]:
    """Rows of the table that `describe` prints: (constant, value, remark), all as texts."""
    step, train = run.step, run.train
    rows = [("fitted to", f"{run.num_rounds} rounds", f"{run.num_skipped} left out")]
    if run.drafted:
        rows.append(("drafts", "yes", "a decode step stands for a token; fitted to whole rounds"))
        rows += [
            (f"decode step, {count:g} running", _micro(level), "with an empty cache")
            for count, level in step.knots
        ]
    else:
        form = "a step takes max(floor, base + K x token)"
        rows += [
            ("decode step, floor", _micro(step.launch_s), form),
            ("decode step, base", _micro(step.bytes_s), "+ n x sample, with"),
            ("decode step, per sample", _micro(step.per_sequence_s), "and n samples running"),
        ]
    rows += [
        ("decode step, per cached token", _micro(step.per_cached_token_s), "K tokens in the cache"),
        ("admission of a sample", _micro(step.per_admitted_s), "prefill"),
        ("stop of a sample", _milli(run.stop_s), "until the engine lets go of it"),
        ("stalls", f"{100 * (step.stalls - 1):+.1f} %", "contained in the constants"),
    ]
    rows += [
        (
            f"generation, {kind} rounds",
            f"{errors.mean_s:.3f} s",
            f"fit/log {errors.ratio:.2f}, mean error {100 * errors.mean_error:.0f} %",
        )
        for kind, errors in run.errors.items()
    ]
    if run.calls is not None:
        num = run.calls.num_workers
        at_once = f"{num} at once" if num > 1 else "one at a time"
        rows += [
            (
                "call of the rewards",
                _milli(run.calls.fixed_s),
                f"{at_once}, where they are batches",
            ),
            ("... per sample", _milli(run.calls.per_sample_s), ""),
        ]
    return [
        *rows,
        ("wait for verdicts", _milli(run.exposed_s), "exposed, a round"),
        ("training step", _milli(train.fixed_s), f"mean error {100 * train.mean_error:.0f} %"),
        ("... per trained token", _micro(train.per_token_s), ""),
        ("weight sync", _milli(run.sync_s), ""),
        ("commit", _milli(run.commit_s), "with the checkpoints that there were"),
        ("from commit to launch", _milli(run.between_s), ""),
    ]


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.2f} us"


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
