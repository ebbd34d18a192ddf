"""The accounting of a run: a summary of each step, and its seconds by cause. The entries come live
from the controller, one by one, or from a finished log."""

from __future__ import annotations

from rollpacker.core.records import Entry, Session
from rollpacker.report.history import History
from rollpacker.report.length_bias import LengthBias
from rollpacker.report.step_summary import StepSummary, summarize_step
from rollpacker.report.time_book import TimeBook


class Accounting:
    """Reads a log's entries: `feed` returns a `StepSummary` whenever a step is committed.

    `history` has what is known of the step under way, `time` the seconds by cause. `feed` is O(1)
    but at a step's end, where it is linear in the step's samples. Now and then a step's end also
    fits the model of response lengths anew; see `Debias` for how often."""

    def __init__(self, *, slots: int | None = None, max_response_tokens: int | None = None) -> None:
        """`slots` and `max_response_tokens`: the config's, for a log without them; None:
        unknown."""
        self.history = History()
        self.time = TimeBook(slots)
        self._max_response_tokens = max_response_tokens
        self._length_bias = LengthBias(max_response_tokens)
        self._bias_so_far: dict[str, float] | None = None
        """Length metrics that `so_far` has computed of the step under way. They are computed only
        once, since that counts the step. None: not computed yet."""

    def seconds(self) -> dict[str, float]:
        """Seconds by cause up to the last entry; they add up to the wall time."""
        return self.time.seconds(self.history.step.peak_live)

    @property
    def marks(self) -> tuple[str, ...]:
        """Warnings on how to read all metrics of the current session, such as "unsandboxed"."""
        session = self.history.session
        return () if session is None else session.marks

    def so_far(self, step: int) -> StepSummary:
        """The summary of the step that is being committed, as far as the entries go. Only its
        seconds can still grow."""
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
