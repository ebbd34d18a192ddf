"""The engines: a fleet of token clocks for each degree of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rollpacker.bus import Routes
from rollpacker.core.commands import Abort, Command, Launch, Move, Place, Release, Replace
from rollpacker.core.events import Event, SampleAborted, SampleGenerated
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.engine import TokenClockEngine
from rollpacker.sim.machine import Machine
from rollpacker.sim.ports.training import GradientWork
from rollpacker.sim.responses import Responses
from rollpacker.sim.tally import Tally

MIGRATION_S = 3.0
"""From a release to the moment when the trainer can use the devices: at most this, says the
RollPacker paper, section 4.4."""


class Lane:
    """One engine of a fleet."""

    __slots__ = ("engine", "finish", "last_busy_s")

    def __init__(self, engine: TokenClockEngine, finish: Callable[[Lane], Event | None]) -> None:
        self.engine = engine
        self.last_busy_s = 0.0
        self.finish = partial(finish, self)
        """Take out what finishes at `engine.next_finish`."""


class Rollout:
    """Obeys `Launch`, `Abort` and `Release`."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        responses: Responses,
        tally: Tally,
        work: GradientWork,
        max_response_tokens: int | None,
    ) -> None:
        self._clock = clock
        self._machine = machine
        self._responses = responses
        self._tally = tally
        self._work = work
        self._cap = math.inf if max_response_tokens is None else max_response_tokens
        self._fleets: dict[tuple[int, bool], list[Lane]] = {}
        """By degree and by whether the engines decode speculatively."""
        self._fleet: list[Lane] = []
        """Of the round, as are all below."""
        self._launch: Launch | None = None
        self._lane_of: dict[int, Lane] = {}
        """By key of the sample."""
        self._num_generating = 0
        self._empty_from_s = 0.0
        """When the engines let go of the last response."""
        self._released: tuple[float, list[Lane]] | None = None
        """When devices were released, and their engines."""

    def routes(self) -> Routes:
        return {
            Launch: self._obey_launch,
            Abort: self._abort,
            Release: self._release,
            **dict.fromkeys((Place, Move, Replace), self._not_yet),
        }

    def _not_yet(self, command: Command) -> None:
        raise AssertionError(f"{command}: engines of a simulation are not told apart yet")

    @property
    def released(self) -> list[Lane]:
        """Engines that take nothing until the next round."""
        return [] if self._released is None else self._released[1]

    def is_busy(self) -> bool:
        """Whether an engine still generates, or has not let go of what it was told to stop."""
        return self._num_generating > 0 or self._clock.time_s < self._empty_from_s

    # -- launch ------------------------------------------------------------------------

    def _obey_launch(self, command: Launch) -> None:
        now = self._clock.time_s
        if self._launch is None or self._launch.round != command.round:
            self._begin_round(command, now)
        elif not self._num_generating:
            self._tally.rollout_begins(now, str(command.kind), command.tensor_parallel)
        self._deal(command, now)

    def _begin_round(self, command: Launch, now: float) -> None:
        assert not self._num_generating, "a round began before the engines were empty"
        self._tally.rollout_begins(now, str(command.kind), command.tensor_parallel)
        self._launch = command
        self._fleet = self._fleet_of(command.tensor_parallel, command.speculate)
        self._lane_of = {}
        self._released = None
        self._work.begin_round(now)
        for lane in self._fleet:
            lane.last_busy_s = now

    def _deal(self, command: Launch, now: float) -> None:
        """Samples go to the engines in turn."""
        keys, responses = self._responses.add(command), self._responses
        lengths, done = responses.lengths, responses.done
        lanes, latency = self._staying(), self._machine.latency
        token_s = latency.recompute_token_s(command.tensor_parallel) if command.carried else 0.0
        self._num_generating += len(keys)
        for turn, lane in enumerate(lanes):
            own = keys[turn :: len(lanes)]
            if own:
                self._lane_of.update(dict.fromkeys(own, lane))
                # The prefill gives the first token; that of carried tokens the one that follows
                # those that stand. What is complete then takes one more step here.
                requests = [
                    (key, lengths[key], min(done[key] + 1, lengths[key] - 1)) for key in own
                ]
                prefill_s = latency.prefill_s(len(own), command.tensor_parallel)
                if token_s:
                    first = keys.start
                    prefill_s += token_s * sum([command.carried[key - first] for key in own])
                lane.engine.submit(now, requests, prefill_s)
                self._clock.expect(lane.engine, lane.finish)

    def _staying(self) -> list[Lane]:
        released = self.released
        return [lane for lane in self._fleet if lane not in released] if released else self._fleet

    def _fleet_of(self, degree: int, speculate: bool) -> list[Lane]:
        found = self._fleets.get((degree, speculate))
        if found is None:
            machine = self._machine
            cost = machine.latency.step_cost(degree)
            if machine.drafts is not None:
                cost = replace(cost, drafts=machine.drafts)
            if speculate and machine.speculation is not None:
                cost = replace(
                    cost,
                    speculation_speedup=machine.speculation.speedup,
                    speculation_max_live=machine.speculation.max_live,
                )
            engines = [
                TokenClockEngine(
                    cost,
                    machine.latency.kv_tokens(degree),
                    machine.max_running,
                    machine.prompt_tokens,
                    machine.latency.recompute_token_s(degree),
                )
                for _ in range(machine.gpus // degree)
            ]
            found = [Lane(engine, self._finish) for engine in engines]
            self._fleets[degree, speculate] = found
        return found

    # -- what comes out ----------------------------------------------------------------

    def _finish(self, lane: Lane) -> Event | None:
        """The next response of this engine is complete, now. None: its end is drawn once more."""
        key, length, preemptions = lane.engine.pop()
        responses = self._responses
        lane.last_busy_s = self._clock.time_s
        step = self._tally.step
        done = responses.done[key]
        if responses.next_turn(key):
            step.tokens_redrawn += length - done
            length = responses.lengths[key]
            lane.engine.submit(lane.last_busy_s, [(key, length, min(done + 1, length - 1))], 0.0)
            return None
        step.tokens_generated += length - done
        step.preemptions += preemptions
        self._num_generating -= 1
        if not self._num_generating:
            self._rollout_ends(self._clock.time_s)
        assert self._launch is not None
        return SampleGenerated(
            time_s=0.0,
            sample=responses.samples[key],
            num_tokens=length,
            finish_reason="stop" if length < self._cap else "length",
            version=self._launch.version,
            preemptions=preemptions,
            num_kept=responses.kept.get(key),
            num_redraws=responses.redraws.get(key, 0),
        )

    def _abort(self, command: Abort) -> None:
        now, keys = self._clock.time_s, self._responses.keys
        by_lane: dict[Lane, list[int]] = {}
        for sample in command.samples:
            key = keys[sample]
            by_lane.setdefault(self._lane_of[key], []).append(key)
        responses, step = self._responses, self._tally.step
        stopped: dict[int, tuple[int, int]] = {}
        for lane, group in by_lane.items():
            for key, tokens in zip(group, lane.engine.abort(now, group), strict=True):
                done, preemptions = responses.done[key], lane.engine.preemptions(key)
                responses.reached[key] = tokens = max(tokens, done)
                stopped[key] = (tokens, preemptions)
                step.tokens_generated += tokens - done
                step.preemptions += preemptions
            lane.last_busy_s = now
            self._clock.expect(lane.engine, lane.finish)
        self._num_generating -= len(command.samples)
        stop_s = self._machine.latency.stop_s
        if not self._num_generating:
            self._rollout_ends(now + stop_s)
        for sample in command.samples:
            key = keys[sample]
            tokens, preemptions = stopped[key]
            self._clock.after(
                stop_s,
                SampleAborted(
                    time_s=0.0,
                    sample=sample,
                    num_tokens=tokens,
                    preemptions=preemptions,
                    num_kept=responses.kept.get(key),
                    num_redraws=responses.redraws.get(key, 0),
                ),
            )

    def _rollout_ends(self, now: float) -> None:
        """The last engine is empty: from here on every device waits for verdicts."""
        machine, launch = self._machine, self._launch
        assert launch is not None
        self._empty_from_s = now
        self._tally.rollout_ends(now)
        self._work.have(now, machine.gpus)
        idle_s = sum(now - lane.last_busy_s for lane in self._fleet) * launch.tensor_parallel
        if self._released is not None:
            when, lanes = self._released
            settling_s = min(MIGRATION_S, now - when) * len(lanes) * launch.tensor_parallel
            idle_s -= self._work.done_s + settling_s
        self._tally.bubble["tail"] += max(idle_s, 0.0)

    # -- release -----------------------------------------------------------------------

    def _release(self, command: Release) -> None:
        now, machine, launch = self._clock.time_s, self._machine, self._launch
        assert launch is not None
        degree = launch.tensor_parallel
        gone = [self._fleet[i] for i in sorted({device // degree for device in command.devices})]
        self._released = (now, gone)
        # One that finishes at this very moment takes its last token on the other engine.
        moved = [
            request._replace(done_tokens=min(request.done_tokens, request.length - 1))
            for lane in gone
            for request in lane.engine.drain(now)
        ]
        staying = self._staying()
        token_s = machine.latency.recompute_token_s(degree)
        for turn, lane in enumerate(staying):
            requests = moved[turn :: len(staying)]
            if requests:
                tokens = sum(r.done_tokens + machine.prompt_tokens for r in requests)
                lane.engine.submit(now, requests, tokens * token_s)
                self._clock.expect(lane.engine, lane.finish)
                self._lane_of.update((request.key, lane) for request in requests)
        for lane in gone:
            lane.last_busy_s = now
        self._tally.bubble["migration"] += MIGRATION_S * len(command.devices)
        self._work.have(now, len(command.devices), after_s=MIGRATION_S)
