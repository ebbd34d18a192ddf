"""The display of a run in a notebook: one output that changes in place. It uses no widgets, only
`display_id`, which every kernel has. A thread of its own draws the output, at most once a second
and only if something has changed, so that it costs the run no time."""

from __future__ import annotations

import contextvars
import html
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rollpacker.report.accounting import Accounting
from rollpacker.report.display import State, doing, elapsed, learned, numbered
from rollpacker.report.step_summary import StepSummary
from rollpacker.report.time_book import STEP_CAUSES
from rollpacker.writing import clock

REFRESH_S = 1.0


class NotebookDisplay:
    """A `Display` that draws into the output of a notebook's cell."""

    def __init__(self, accounting: Accounting, *, total_steps: int | None, name: str = "") -> None:
        ipython: Any = importlib.import_module("IPython.display")  # not typed
        make_html = ipython.HTML
        self._state = State(accounting, total_steps)
        self._name = name
        self._shown = ""
        self._closing = threading.Event()
        handle = ipython.display(make_html(self.page()), display_id=True)
        # Which cell an output belongs to is a matter of the context: the thread needs this one's.
        self._context = contextvars.copy_context()
        self._update: Callable[[str], None] = lambda page: self._context.run(
            handle.update, make_html(page)
        )
        self._thread = threading.Thread(target=self._work, name="notebook-display", daemon=True)
        self._thread.start()

    def on_step(self, step: StepSummary, *, is_new: bool = True) -> None:
        self._state.on_step(step, is_new=is_new)

    def on_evaluation(
        self, step: int, metrics: Mapping[str, float], *, is_new: bool = True
    ) -> None:
        self._state.evaluation = (step, metrics)

    def close(self) -> None:
        """Draw the final state of the run, which stays in the cell, and end the thread."""
        self._closing.set()
        self._thread.join()
        self._state.is_over = True
        self._draw()

    def _work(self) -> None:
        while not self._closing.wait(REFRESH_S):
            self._draw()

    def _draw(self) -> None:
        page = self.page()
        if page != self._shown:
            self._shown = page
            self._update(page)

    def page(self) -> str:
        """The display as a few lines of HTML, with escaped texts."""
        state = self._state
        history = state.accounting.history
        done, total = history.last_step, state.total_steps
        head = f"step {numbered(done, total)}"
        left = state.left_s()
        told = [f"<b>{head}</b>", elapsed(state)]
        if left and not state.is_over:
            told.append(f"{clock(left)} left")
        value = f' value="{min(done, total)}" max="{total}"' if total else ""
        bar = f'<progress style="width: 100%; max-width: 40em"{value}></progress>'
        lines = [" &nbsp; ".join(told), bar]
        if not state.is_over:
            lines.append(html.escape(doing(history)))
        lines += [html.escape(line) for line in _learned(state)]
        title = f"{html.escape(self._name)} &nbsp; " if self._name else ""
        return (
            '<div style="font-family: monospace; line-height: 1.5">'
            + title
            + "<br>".join(lines)
            + "</div>"
        )


def _learned(state: State) -> list[str]:
    step = state.last
    parts = [f"{name} {told}" for name, told in learned(state).items()]
    lines = [", ".join(parts)] if parts else []
    if step is not None and step.step_s:
        shares = {c: step.seconds[c] / step.step_s for c in STEP_CAUSES}
        told = [f"{c.replace('_', ' ')} {s:.0%}" for c, s in shares.items() if s >= 0.02]
        lines.append(f"last step {step.step_s:.2f} s: {', '.join(told)}")
    return lines
