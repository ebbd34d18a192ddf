"""Simulation of a sweep: choosers, costs of ops and links go in, a timeline comes out.

Every op takes the seconds that `Work` says, and every message those of its link when it is sent.
Three ways to send are known:

    free: each direction of a link has its own channel, and no stage waits for a send.
    blocking: both directions share a channel, and a stage computes nothing until its message
        has arrived, as if its next kernels were queued behind the send (head-of-line blocking).
    paired: as blocking, but each direction has its own channel (send and receive launched at once).

A plan is such a run with expected times; a replay runs `FixedOrder`s with other times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rollpacker.pipeline.plan.choosers import Chooser, FixedOrder, Op, Order, StageState
from rollpacker.pipeline.plan.work import Direction, LinkAt, Work

Sends = Literal["free", "blocking", "paired"]

TOGETHER_S = 1e-9
"""Seconds within which two simulated events count as simultaneous: sums are not exact."""


class Span(NamedTuple):
    """An op of a stage, and the seconds of the simulated sweep at which it began and ended."""

    op: Op
    start_s: float
    end_s: float


class Message(NamedTuple):
    """A simulated message between two stages, and the seconds at which it was sent and arrived."""

    link: int
    direction: Direction
    micro_batch: int
    posted_s: float
    """The second at which the op that made the message was over."""
    sent_s: float
    """The second at which the link began to send the message."""
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The ops and messages of a simulated sweep (all micro-batches once), with their times."""

    spans: tuple[tuple[Span, ...], ...]
    """By stage, the ops in the order in which the stage ran them, with their times."""
    messages: tuple[Message, ...]
    """All messages in the order in which the ops that made them ended."""
    peak_live_tokens: tuple[int, ...]
    """By stage, the most tokens whose activations were kept at once."""

    @property
    def orders(self) -> tuple[Order, ...]:
        """By stage, the ops in the order in which the stage ran them."""
        return tuple(tuple(span.op for span in spans) for spans in self.spans)

    @property
    def makespan_s(self) -> float:
        """The second at which the last op of all stages was over."""
        return max((spans[-1].end_s for spans in self.spans if spans), default=0.0)

    def busy_s(self, stage: int) -> float:
        return math.fsum(span.end_s - span.start_s for span in self.spans[stage])

    @property
    def bubble_share(self) -> float:
        """Share of all stages' time, until the last op ends, in which they computed nothing."""
        whole = self.makespan_s * len(self.spans)
        busy = math.fsum(self.busy_s(stage) for stage in range(len(self.spans)))
        return 1.0 - busy / whole if whole > 0 else 0.0


def run(
    choosers: Sequence[Chooser],
    work: Work,
    links: LinkAt,
    *,
    sends: Sends = "free",
    added_s: Sequence[float] | None = None,
    start_s: float = 0.0,
) -> Timeline:
    """Simulate a sweep (all micro-batches once) from second `start_s` on. `added_s`: rising seconds
    at which micro-batches are added; None: all are there at the start. Raises `ValueError`, which
    names the stages and what they have done, if the choosers wait for each other for ever."""
    return _Run(choosers, work, links, sends, added_s, start_s).to_the_end()


def replay(
    orders: Sequence[Sequence[Op]],
    work: Work,
    links: LinkAt,
    *,
    sends: Sends = "free",
    start_s: float = 0.0,
) -> Timeline:
    """Simulate a sweep with a fixed order of ops by stage. Raises `ValueError` if they deadlock."""
    choosers = [FixedOrder(order) for order in orders]
    return run(choosers, work, links, sends=sends, start_s=start_s)


class _Run:
    def __init__(
        self,
        choosers: Sequence[Chooser],
        work: Work,
        links: LinkAt,
        sends: Sends,
        added_s: Sequence[float] | None,
        start_s: float,
    ) -> None:
        assert len(choosers) == work.num_stages, "one chooser a stage"
        self._choosers = choosers
        self._work = work
        self._links = links
        self._blocking = sends != "free"
        self._one_channel = sends == "blocking"
        stages = range(work.num_stages)
        self._states = [StageState(stage, work.num_stages) for stage in stages]
        self._running: list[Op | None] = [None for _ in stages]
        """By stage, the op that it runs, or whose message it is still sending. None: idle."""
        self._spans: list[list[Span]] = [[] for _ in stages]
        self._messages: list[Message] = []
        self._free_s = {(link, way): start_s for link in stages for way in ("down", "up")}
        """By link and direction, the second from which nothing is being sent. If both directions
        share a channel, only "down" is used."""
        self._events: list[tuple[float, int, str, int]] = []
        """Coming events as (second, number, what happens, stage). Simultaneous ones are in the
        order of their numbers."""
        self._num_events = 0
        self._last_arrival_s: dict[tuple[int, str], float] = {}
        added = [start_s] * work.num_micro_batches if added_s is None else list(added_s)
        assert len(added) == work.num_micro_batches and added == sorted(added)
        for at_s in added:
            self._event(at_s, "add", 0)
        if not added:
            self._event(start_s, "nothing", 0)

    def to_the_end(self) -> Timeline:
        events, states = self._events, self._states
        everyone = range(len(states))
        while events:
            now_s = events[0][0]
            concerned: set[int] = set()
            while events and events[0][0] <= now_s + TOGETHER_S:
                at_s, _, what, stage = heapq.heappop(events)
                self._happens(what, stage, at_s)
                concerned.update(everyone if what == "add" else (stage,))
            # A choice depends on the stage's own state alone, so that others need not be asked.
            for stage in sorted(concerned):
                if self._running[stage] is None:
                    op = self._choosers[stage].choose(states[stage])
                    if op is not None:
                        self._begin(stage, op, now_s)
        if any(not state.finished for state in states):
            raise ValueError(_stuck(states))
        return Timeline(
            spans=tuple(map(tuple, self._spans)),
            messages=tuple(self._messages),
            peak_live_tokens=tuple(state.peak_live_tokens for state in states),
        )

    def _event(self, at_s: float, what: str, stage: int) -> None:
        heapq.heappush(self._events, (at_s, self._num_events, what, stage))
        self._num_events += 1

    def _happens(self, what: str, stage: int, now_s: float) -> None:
        if what == "end":
            self._ends(stage, now_s)
        elif what == "free":
            self._running[stage] = None
        elif what == "F":
            self._states[stage].arrive("F")
        elif what == "I":
            self._states[stage].arrive("I")
        else:
            tokens, number = self._work.tokens, len(self._states[0].tokens)
            for state in self._states:
                if what == "add":
                    state.add([tokens[number]])
                if len(state.tokens) == len(tokens):
                    state.close()

    def _begin(self, stage: int, op: Op, now_s: float) -> None:
        end_s = now_s + self._work.table(op.kind)[stage][op.micro_batch]
        self._running[stage] = op
        self._spans[stage].append(Span(op, now_s, end_s))
        self._event(end_s, "end", stage)

    def _ends(self, stage: int, now_s: float) -> None:
        op = self._running[stage]
        assert op is not None
        self._states[stage].done(op)
        free_s = now_s
        if op.kind == "F" and stage < self._work.num_stages - 1:
            free_s = self._send(stage, "down", op.micro_batch, now_s)
        elif op.kind == "I" and stage > 0:
            free_s = self._send(stage - 1, "up", op.micro_batch, now_s)
        if self._blocking and free_s > now_s:
            self._event(free_s, "free", stage)
        else:
            self._running[stage] = None

    def _send(self, link: int, way: Direction, micro_batch: int, now_s: float) -> float:
        channel = (link, "down" if self._one_channel else way)
        sent_s = max(now_s, self._free_s[channel])
        speed = self._links(link, sent_s)
        size = self._work.message_bytes[micro_batch]
        arrived_s = sent_s + speed.seconds(size)
        # Messages do not overtake each other, should the latency fall in between.
        arrived_s = max(arrived_s, self._last_arrival_s.get((link, way), arrived_s))
        self._last_arrival_s[link, way] = arrived_s
        self._free_s[channel] = arrived_s if self._blocking else sent_s + speed.leaves_s(size)
        self._messages.append(Message(link, way, micro_batch, now_s, sent_s, arrived_s))
        self._event(arrived_s, *(("F", link + 1) if way == "down" else ("I", link)))
        return arrived_s


def _stuck(states: Sequence[StageState]) -> str:
    waits = []
    for state in states:
        if not state.finished:
            done = f"{state.num_f} F, {state.num_i} I, {state.num_w} W"
            waits.append(f"stage {state.stage} (of {len(state.tokens)} micro-batches: {done})")
    return f"the stages wait for each other for ever: {', '.join(waits)}"
