"""The accounting of a run: a summary of each step, and the run's seconds by cause. Log entries come
live from the controller, one by one, or from a finished log."""

from __future__ import annotations

from rollpacker.core.records import Entry, Session
from rollpacker.report.history import History
from rollpacker.report.length_bias import LengthBias
from rollpacker.report.step_summary import StepSummary, summarize_step
from rollpacker.report.time_book import TimeBook


class Accounting:
    """Makes summaries and seconds by cause from the entries of an event log. `feed` takes one entry
    and returns a `StepSummary` if the entry commits a step, else None.

    `history` has what is known of the step under way, `time` the seconds by cause. `feed` takes
    constant time, but at a step's end a time linear in the step's samples. Now and then a step's
    end also fits the model of response lengths anew; see `Debias` for how often."""

    def __init__(self, *, slots: int | None = None, max_response_tokens: int | None = None) -> None:
        """`slots` (maximum number of samples in engines at once) and `max_response_tokens` are the
        config's, for a log without them. None: not known."""
        self.history = History()
        self.time = TimeBook(slots)
        self._max_response_tokens = max_response_tokens
        self._length_bias = LengthBias(max_response_tokens)
        self._bias_so_far: dict[str, float] | None = None
        """Metrics of response lengths for the step under way. As a step must be counted only once,
        `so_far` computes them at its first call and `feed` takes them over. None: not computed
        yet."""

    def seconds(self) -> dict[str, float]:
        """Seconds of the run by cause up to the last log entry, which add up to the wall time."""
        return self.time.seconds(self.history.step.peak_live)

    @property
    def marks(self) -> tuple[str, ...]:
        """Warnings on how to read the run's metrics, such as "unsandboxed", from the last start of
        the run in the log. Empty before that."""
        session = self.history.session
        return () if session is None else session.marks

    def so_far(self, step: int) -> StepSummary:
        """The summary of the step that is being committed, from the log entries so far. Only the
        step's seconds can still grow."""
        done = self.history.so_far(step, self.time.now_s)
        if self._bias_so_far is None:
            self._bias_so_far = self._length_bias.add(done)
        return summarize_step(done, self.time.step_seconds(done.peak_live), self._bias_so_far)

    def feed(self, entry: Entry) -> StepSummary | None:
        history = self.history
        step = history.step
        self.time.advance(entry, history.phase, len(history.live), history.engines.idle_share)
        done = history.feed(entry)
        if done is not None:
            seconds = self.time.close_step(done.peak_live)
            bias, self._bias_so_far = self._bias_so_far, None
            return summarize_step(
                done, seconds, self._length_bias.add(done) if bias is None else bias
            )
        if history.step is not step:
            self.time.abandon_step(step.peak_live)
        if isinstance(entry, Session):
            self.time.begin_session(entry)
            cap = entry.job.get("max_response_tokens") or self._max_response_tokens
            self._length_bias.begin(cap, entry.job)
        return None
