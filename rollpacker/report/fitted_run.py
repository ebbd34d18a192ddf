"""Constants of a run's machine and its workload, as fitted to its log. For a simulator, and as a
table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.report.decode_fit import DecodeFit
from rollpacker.report.reward_fit import Calls, Check


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundErrors:
    """Rounds predicted again with the fitted constants, against what the log says."""

    num: int
    """Rounds."""
    mean_s: float
    """Measured seconds from launch to the last end."""
    ratio: float
    """Predicted over measured, of the sums."""
    mean_error: float
    """Mean of |predicted - measured| / measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFit:
    """A training step takes fixed_s + per_token_s * (trained response tokens)."""

    fixed_s: float
    per_token_s: float
    mean_error: float
    """Mean of |predicted - measured| / measured over the training steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of a run and the lengths of their responses, in tokens."""

    source: str
    rows: tuple[int, ...]
    """Dataset rows in the order they were fetched; once per epoch."""
    pools: Mapping[int, tuple[int, ...]]
    """Lengths of each row's finished responses, in order of appearance."""
    stopped: Mapping[int, tuple[int, ...]]
    """How far each row's stopped responses had come: lower bounds of their lengths."""
    max_response_tokens: int | None
    """Length of the responses that ran into the limit; None: none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """Everything that a simulator needs to know of a machine and a workload. Seconds without
    another word are means."""

    job: Mapping[str, Any]
    """`JobConfig` as a plain mapping, of the last session."""
    slots: int | None
    """Samples that an engine decodes at the same time; None: all that it is given."""
    num_steps: int
    num_rounds: int
    """Rounds that the constants were fitted to."""
    num_skipped: int
    """Rounds whose token clock is not known: samples failed, or ended out of order."""
    step: DecodeFit
    """Decode steps. Where the engine drafted, a table that is fitted to whole rounds, in which a
    step stands for a token."""
    errors: Mapping[str, RoundErrors]
    """Errors for each kind of round, and for "all" rounds."""
    checks: Mapping[int, tuple[Check, ...]]
    """Verdicts on the responses to each dataset row, with their seconds."""
    calls: Calls | None
    """Calls of the rewards where checks go to them in batches; None: there were none."""
    exposed_s: float
    """From the last end of a round to the start of training."""
    stop_s: float
    """From telling samples to stop until the engine has released them: a decode step takes its
    time."""
    train: TrainFit
    sync_s: float
    """From the end of training until the engine has the new weights."""
    commit_s: float
    """A commit, with as many checkpoints as there were; evaluations are taken out."""
    between_s: float
    """From a commit to the launch of the next round."""
    workload: Workload

    @property
    def drafted(self) -> bool:
        """The engine gave several tokens of a sample in a step (`rollout.engine.draft_tokens`)."""
        return bool(self.step.knots)

    def describe(self) -> str:
        """The fitted constants as a table for people."""
        return "\n".join(
            f"{name:<31}{value:>13}  {what}".rstrip() for name, value, what in _rows(self)
        )


def _rows(run: FittedRun) -> list[tuple[str, str, str]]:
    """(constant, value, remark) for `describe`."""
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
