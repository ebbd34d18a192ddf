"""The display of a run that goes on: a small live panel on a terminal, or elsewhere one line per
step.

The panel shows the `Accounting` of the run's `LiveReport`. A thread of its own draws the panel
twice a second, so that the controller loses no time but at a step's end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rollpacker.core.commands import RoundKind
from rollpacker.report.accounting import Accounting
from rollpacker.report.history import History
from rollpacker.report.step_summary import StepSummary
from rollpacker.report.time_book import STEP_CAUSES
from rollpacker.writing import clock

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

_REFRESH_PER_S = 2
_FEW_STEPS = 3
_ECHO = 4
"""Number of cells kept free on the right for the terminal's echo of Ctrl-C, "^C", twice. In a full
line the echo would begin another line, which the panel would not erase."""
_RECENT_STEPS = 10
"""Number of last steps from which the time left is estimated. Early steps are often slower."""
_MIN_BAR = 16
"""Fewest cells of the bar that shows a step's seconds. Parts of the legend give way to it."""
_COLOURS = {
    "decode": "green",
    "tail_idle": "red",
    "imbalance": "bright_red",
    "environment": "bright_cyan",
    "reward_wait": "yellow",
    "training": "blue",
    "sync": "cyan",
    "checkpoint": "white",
    "recovery": "bright_yellow",
    "controller": "magenta",
}
_SHORT_NAMES = {"tail_idle": "idle", "reward_wait": "reward", "checkpoint": "save"}
_PHASE_WORDS = {
    "rollout": "generating",
    "environment": "waiting for environments",
    "reward_wait": "waiting for rewards",
    "training": "training",
    "sync": "new weights to the engine",
    "checkpoint": "committing",
    "evaluation": "evaluating",
    "recovery": "bringing the trainer back",
    "pool_wait": "waiting for a pool that other jobs use too",
    "controller": "getting ready",
}


class Display(Protocol):
    """Shows a run to its user. `on_step` is called at each step's end, `on_evaluation` at each
    evaluation's. If `is_new` is False, an earlier process of the run has shown the step or
    evaluation, so no line is printed for it."""

    def on_step(self, step: StepSummary, *, is_new: bool = True) -> None: ...

    def on_evaluation(
        self, step: int, metrics: Mapping[str, float], *, is_new: bool = True
    ) -> None: ...

    def close(self) -> None: ...


def make_display(accounting: Accounting, *, total_steps: int | None, console: Console) -> Display:
    """Returns the live panel on a terminal, or plain lines elsewhere (a pipe, a log file,
    `TERM=dumb`). `total_steps`: planned number of steps; None: not known."""
    state = State(accounting, total_steps)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(state, console)
    return LineDisplay(state, console)


@dataclass(slots=True)
class State:
    """What the displays show of a run: accounting, last step and evaluation, and times."""

    accounting: Accounting
    total_steps: int | None
    last: StepSummary | None = None
    evaluation: tuple[int, Mapping[str, float]] | None = None
    """The number of the step before the last evaluation, and its metrics. None: there was none."""
    is_over: bool = False
    began_s: float = field(default_factory=time.monotonic)
    last_step_s: float = field(default_factory=time.monotonic)
    """Time of the monotonic clock at which this process's last step ended, or the process began."""
    steps_s: list[float] = field(default_factory=list)
    evaluations_s: list[float] = field(default_factory=list)
    """Seconds of each evaluation since this process began."""

    def on_step(self, step: StepSummary, *, is_new: bool = True) -> None:
        self.last = step
        if not is_new:
            return
        self.steps_s.append(step.step_s + step.waited_s)
        if step.seconds["evaluation"]:
            self.evaluations_s.append(step.seconds["evaluation"])
        self.last_step_s = time.monotonic()

    def left_s(self) -> float | None:
        """Estimated seconds until the end of the run: those of the steps and evaluations still to
        come, at the mean seconds of the last ones. None before the first step of this process, or
        if the number of steps is not known. The first step, which is often slow, counts only while
        there are few others."""
        if self.total_steps is None or not self.steps_s:
            return None
        history = self.accounting.history
        num_left = max(0, self.total_steps - history.last_step)
        steps_s = self.steps_s[1:] if len(self.steps_s) > _FEW_STEPS else self.steps_s
        steps_s = steps_s[-_RECENT_STEPS:]
        left = num_left * sum(steps_s) / len(steps_s)
        if self.evaluations_s:
            job = {} if history.session is None else history.session.job
            every = (job.get("cadence") or {}).get("eval_every_steps")
            last = history.last_step
            num_evaluations = min(1, num_left)  # after the last step
            if every and num_left:
                num_evaluations = -(-self.total_steps // every) - last // every
            left += num_evaluations * sum(self.evaluations_s) / len(self.evaluations_s)
        return max(0.0, left - (time.monotonic() - self.last_step_s))


def elapsed(state: State) -> str:
    """The time since this process of the run began, as a text such as "4:05"."""
    return clock(time.monotonic() - state.began_s)


def learned(state: State) -> dict[str, str]:
    """Results of the last step and of the last evaluation as texts, by name (reward, pass@1,
    tokens). Names without a value yet are left out."""
    found = {}
    step = state.last
    if step is not None and step.rewards.mean is not None:
        found["reward"] = f"{step.rewards.mean:.3f}"
    if state.evaluation is not None and "eval/pass@1" in state.evaluation[1]:
        number, metrics = state.evaluation
        found["pass@1"] = f"{metrics['eval/pass@1']:.3f}{left_out(metrics)} (step {number})"
    if step is not None and step.lengths.trained is not None:
        lengths = step.lengths.trained
        found["tokens"] = f"median {lengths.median:.0f}, max {lengths.max}"
    return found


def doing(history: History) -> str:
    """What the run is doing now, as a text for the display, such as "long round, generating, 5 of
    64 samples live". The kind (short or long) is that of the step's first batch of generation."""
    kind, words = history.step.kind, phase_words(history)
    text = words if kind is None else f"{kind} round, {words}"
    if history.phase == "rollout":
        text += f", {len(history.live)} of {history.step.num_launched} samples live"
    return text


def left_out(metrics: Mapping[str, float]) -> str:
    """A text such as " (28 without a verdict)" on samples that got no verdict in an evaluation with
    these `metrics`, and so do not count in pass@1. Empty if there are none."""
    num = metrics.get("eval/no_verdict", 0)
    return f" ({num:.0f} without a verdict)" if num else ""


def phase_words(history: History) -> str:
    """What the run is doing now, in a few words, such as "waiting for rewards"."""
    if history.last_step == 0 and history.phase == "controller" and history.session is None:
        return "loading"
    return _PHASE_WORDS[history.phase]


def numbered(step: int, total: int | None) -> str:
    """A text such as "3/40" for step 3 of `total` planned steps, or "40/40 + 1" for a further step
    at the end, which trains prompts that were put off before. `total` None: not known."""
    if total is None:
        return f"{step}"
    return f"{step}/{total}" if step <= total else f"{total}/{total} + {step - total}"


class LineDisplay:
    """A display that prints one plain line per step, with the local time."""

    def __init__(self, state: State, console: Console) -> None:
        self._state, self._console = state, console

    def on_step(self, step: StepSummary, *, is_new: bool = True) -> None:
        self._state.on_step(step, is_new=is_new)
        if not is_new:
            return
        total = self._state.total_steps
        number = numbered(step.step, total)
        parts = [f"step {number}", str(step.kind or "-"), f"{step.step_s:.3f} s"]
        if step.rewards.mean is not None:
            parts.append(f"reward {step.rewards.mean:.3f}")
        if step.lengths.trained is not None:
            lengths = step.lengths.trained
            parts.append(f"tokens median {lengths.median:.0f} max {lengths.max}")
        parts.append(f"deferred {step.prompts.long_queue}")
        shares = _shares(step)
        parts.append(" ".join(f"{_short(c)} {s:.0%}" for c, s in shares.items() if s >= 0.005))
        if step.waited_s:
            parts.append(f"waited {step.waited_s:.1f} s for pools")
        left = self._state.left_s()
        if left:
            parts.append(f"{clock(left)} left")
        self._print(" | ".join(parts))

    def on_evaluation(
        self, step: int, metrics: Mapping[str, float], *, is_new: bool = True
    ) -> None:
        self._state.evaluation = (step, metrics)
        if not is_new:
            return
        named = {name: f"{name} {value:.3f}" for name, value in metrics.items()}
        if "eval/pass@1" in named:
            named["eval/pass@1"] += left_out(metrics)
        shown = " | ".join(named.values())
        self._print(f"evaluation after step {step} | {shown}")

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} | {line}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A display of a few lines that change in place, and stay on the terminal after the run."""

    def __init__(self, state: State, console: Console) -> None:
        from rich.live import Live

        self._state, self._console = state, console
        self._live: Live = Live(
            get_renderable=self._panel,
            console=console,
            refresh_per_second=_REFRESH_PER_S,
            vertical_overflow="crop",
        )
        self._live.start()

    def on_step(self, step: StepSummary, *, is_new: bool = True) -> None:
        self._state.on_step(step, is_new=is_new)

    def on_evaluation(
        self, step: int, metrics: Mapping[str, float], *, is_new: bool = True
    ) -> None:
        self._state.evaluation = (step, metrics)

    def close(self) -> None:
        self._state.is_over = True
        self._live.stop()

    def _panel(self) -> RenderableType:
        from rich.console import Group

        width = min(self._console.width - _ECHO, 120)
        lines = [self._progress(width), self._learned(width)]
        if not self._state.is_over:
            lines.insert(1, self._now(width))
        if self._state.last is not None:
            lines.append(_seconds_line(self._state.last, width))
        return Group(*lines)

    def _progress(self, width: int) -> Text:
        from rich.text import Text

        state = self._state
        done, total = state.accounting.history.last_step, state.total_steps
        head, tail = f"step {numbered(done, total)}", f"  {elapsed(state)}"
        if total is None:
            return Text.assemble((head, "bold"), tail)
        if not state.is_over and done > total:  # steps that empty the long queue come on top
            tail = "  finishing deferred prompts"
        elif not state.is_over and (left := state.left_s()):
            tail += f", {clock(left)} left"
        room = max(10, width - len(head) - max(len(tail), 24) - 2)
        full = round(room * min(1.0, done / total)) if total else 0
        return Text.assemble(
            (head, "bold"), "  ", ("━" * full, "green"), ("━" * (room - full), "bright_black"), tail
        )

    def _now(self, width: int) -> Text:
        from rich.text import Text

        history = self._state.accounting.history
        kind, told = history.step.kind, doing(history)
        text = Text("now      ", style="dim").append(told)
        if kind is not None:
            colour = "red" if kind in (RoundKind.LONG, RoundKind.FLUSH) else "green"
            text.stylize(colour, 9, 9 + len(f"{kind} round, "))
        text.append("   deferred ", style="dim").append(str(len(history.queue)))
        text.truncate(width)
        return text

    def _learned(self, width: int) -> Text:
        from rich.text import Text

        text = Text("learning ", style="dim")
        parts = [
            Text(f"{name} ", style="dim").append(told)
            for name, told in {"reward": "-", **learned(self._state)}.items()
        ]
        text.append(Text("   ").join(parts))
        text.truncate(width)
        return text


def _seconds_line(step: StepSummary, width: int) -> Text:
    from rich.text import Text

    shares = _shares(step)
    waited = f" (and waited {step.waited_s:.1f} s)" if step.waited_s else ""
    text = Text(f"took {step.step_s:.2f} s{waited}  ", style="dim")
    legend = {c: f"  {_short(c)} {share:.0%}" for c, share in shares.items() if share >= 0.02}
    while legend and sum(map(len, legend.values())) > width - len(text) - _MIN_BAR:
        del legend[min(legend, key=lambda cause: shares[cause])]
    room = max(_MIN_BAR, width - len(text) - sum(map(len, legend.values())))
    for cause, num in _cells(shares, room).items():
        text.append("█" * num, style=_COLOURS[cause])
    for cause, told in legend.items():
        text.append(told, style=_COLOURS[cause])
    text.truncate(width)
    return text


def _cells(shares: Mapping[str, float], room: int) -> dict[str, int]:
    """Number of cells of the bar for each cause, rounded so that the numbers add up to `room`."""
    cells = {cause: math.floor(share * room) for cause, share in shares.items()}
    by_remainder = sorted(shares, key=lambda cause: cells[cause] - shares[cause] * room)
    for cause in by_remainder[: room - sum(cells.values())]:
        cells[cause] += 1
    return cells


def _shares(step: StepSummary) -> dict[str, float]:
    total = step.step_s
    return {cause: step.seconds[cause] / total if total else 0.0 for cause in STEP_CAUSES}


def _short(cause: str) -> str:
    return _SHORT_NAMES.get(cause, cause)
