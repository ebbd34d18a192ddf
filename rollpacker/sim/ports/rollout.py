"""The simulated engines: a list of engines for each degree of tensor parallelism."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rollpacker.bus import Routes
from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Continue,
    Launch,
    LetGo,
    Move,
    Place,
    Release,
    Replace,
    Resize,
)
from rollpacker.core.events import (
    EngineLost,
    EngineReady,
    Event,
    SampleAborted,
    SampleGenerated,
    SampleMoved,
)
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.engine import TokenClockEngine
from rollpacker.sim.machine import Machine
from rollpacker.sim.ports.training import GradientWork
from rollpacker.sim.ports.turns import Home, Turns
from rollpacker.sim.responses import Responses
from rollpacker.sim.tally import Tally


class Lane:
    """One simulated engine, with the number by which the scheduling core's commands name it."""

    __slots__ = ("engine", "finish", "last_busy_s", "number")

    def __init__(
        self, engine: TokenClockEngine, number: int, finish: Callable[[Lane], Event | None]
    ) -> None:
        self.engine = engine
        self.number = number
        """Number by which the scheduling core's commands name the engine."""
        self.last_busy_s = 0.0
        self.finish = partial(finish, self)
        """Function that takes out the response due at `next_finish` and returns its event."""


class Rollout:
    """The simulated engines; obeys the scheduling core's commands `Launch`, `Abort` and others."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        responses: Responses,
        tally: Tally,
        work: GradientWork,
        max_response_tokens: int | None,
        num_engines: int,
        turns: Turns | None = None,
    ) -> None:
        """`num_engines`: number of engines at the start of the run. `turns` knows how many messages
        each trajectory has so far; None: samples are single responses."""
        self._clock = clock
        self._machine = machine
        self._responses = responses
        self._tally = tally
        self._work = work
        self._cap = math.inf if max_response_tokens is None else max_response_tokens
        self._num_engines = num_engines
        self._incarnations = [0] * machine.gpus
        """How often each engine was started again after its first start, by engine number."""
        self.life_s: Callable[[int, int], float] = lambda engine, incarnation: math.inf
        """Function from an engine's number, and how often the engine was started again, to the
        seconds until it is lost."""
        self.start_s = 0.0
        """Seconds from the order to replace a lost engine until its replacement is ready."""
        self._fleets: dict[tuple[int, bool], list[Lane]] = {}
        """Lists of engines, by (tensor-parallel degree, whether they decode speculatively)."""
        self._fleet: list[Lane] = []
        """Engines of the current round of generation. The fields below describe that round only."""
        self._launch: Launch | None = None
        self._lane_of: dict[int, Lane] = {}
        """By a sample's key: the engine that has it. Samples that no engine has are missing."""
        self._carried: dict[int, int] = {}
        """By a sample's key: number of its tokens that its engine computes at once, before it
        generates others. No entry: 0."""
        self._turns = turns
        self._num_generating = 0
        self._empty_from_s = 0.0
        """Time in seconds at which the last response of the round had finished or was aborted."""
        self._released: tuple[float, list[Lane]] | None = None
        """Time in seconds when engines were released to the trainer, and these; else None."""

    def routes(self) -> Routes:
        return {
            Launch: self._obey_launch,
            Continue: self._continue,
            LetGo: lambda command: None,  # nothing is short of room here
            Abort: self._abort,
            Release: self._release,
            Place: self._place,
            Move: self._move,
            Replace: self._replace,
            Resize: self._resize,
        }

    @property
    def released(self) -> list[Lane]:
        """Engines whose devices the trainer has until the next round begins, since they have no
        samples any more; empty if none were released."""
        return [] if self._released is None else self._released[1]

    def is_busy(self) -> bool:
        """Whether some engine still generates, or still has samples to abort."""
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
        self._carried.clear()
        if self._turns is not None:
            self._turns.clear()
        self._released = None
        self._work.begin_round(now)
        for lane in self._fleet:
            lane.last_busy_s = now

    def _deal(self, command: Launch, now: float) -> None:
        keys = self._responses.add(command)
        self._num_generating += len(keys)
        if self._turns is not None:
            self._carried.update(self._turns.launch(keys, command.version))
        elif command.carried:
            self._carried.update((key, self._responses.passed.get(key, 0)) for key in keys)
        assert command.engines or len(self._fleet) == 1, "which engine, the core has to say"
        self._give(keys, command.engines or (0,) * len(keys), now)

    def _give(self, keys: Sequence[int], engines: Sequence[int], now: float) -> None:
        """Submit the sample of each key to the engine whose number stands beside it."""
        by_engine = defaultdict[int, list[int]](list)
        for key, number in zip(keys, engines, strict=True):
            by_engine[number].append(key)
        by_engine.pop(NOWHERE, None)
        carried = self._carried
        for number, own in by_engine.items():
            tokens = sum([carried.get(key, 0) for key in own]) if carried else 0
            self._submit(self._fleet[number], own, tokens, now)

    def _submit(
        self, lane: Lane, keys: Sequence[int], carried: int, now: float, *, is_new: bool = True
    ) -> None:
        """Submit samples to this engine, which first prefills their prompts and `carried` further
        tokens (summed over the samples). `is_new` False: it has the prompts in its cache."""
        assert self._launch is not None
        lengths, done = self._responses.lengths, self._responses.done
        latency, degree = self._machine.latency, self._launch.tensor_parallel
        self._lane_of.update(dict.fromkeys(keys, lane))
        # The prefill gives the first token; that of carried tokens the one that follows those that
        # stand. What is complete then takes one more step here.
        requests = [(key, lengths[key], min(done[key] + 1, lengths[key] - 1)) for key in keys]
        prefill_s = latency.prefill_s(len(keys), degree) if is_new else 0.0
        if carried:
            prefill_s += latency.recompute_token_s(degree) * carried
        lane.engine.submit(now, requests, prefill_s)
        self._clock.expect(lane.engine, lane.finish)

    # -- turns -------------------------------------------------------------------------

    def _continue(self, command: Continue) -> None:
        """Carry out `Continue`: engines generate the next message of trajectories, whose
        environments have answered."""
        assert self._launch is not None and self._turns is not None
        now = self._clock.time_s
        if not self._num_generating:
            self._tally.rollout_goes_on(now)
            for lane in self._fleet:
                lane.last_busy_s = now
        self._num_generating += len(command.samples)
        keys = [self._responses.keys[sample] for sample in command.samples]
        for key, number in zip(keys, command.engines or (0,) * len(keys), strict=True):
            has = self._carried[key] = self._turns.begin(key)
            if number == NOWHERE:
                continue
            lane = self._fleet[number]
            if not (lane.engine.num_running or lane.engine.num_waiting):
                idle_s = now - lane.last_busy_s
                self._tally.environments_waited(idle_s * self._launch.tensor_parallel)
            given = self._turns.to_compute(key, Home(number, self._incarnations[number]))
            is_new = given is None
            self._submit(lane, [key], has if given is None else given, now, is_new=is_new)

    def concluded(self) -> None:
        """Called when a trajectory is over. If no engine generates, the time since the last message
        counts as generation, not as a wait for verdicts."""
        if not self._num_generating:
            self._tally.rollout_goes_on(self._clock.time_s)

    def _fleet_of(self, degree: int, speculate: bool) -> list[Lane]:
        found = self._fleets.get((degree, speculate))
        if found is None:
            machine = self._machine
            cost = machine.latency.step_cost(degree)
            if machine.drafts is not None:
                cost = replace(cost, drafts=machine.drafts)
            if speculate and machine.speculation is not None:
                cost = replace(cost, speculation=machine.speculation)
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
            found = [Lane(engine, number, self._finish) for number, engine in enumerate(engines)]
            self._fleets[degree, speculate] = found
        return found

    # -- what comes out ----------------------------------------------------------------

    def _finish(self, lane: Lane) -> Event | None:
        """Take the response out that finishes now and return its event. None: its end was refused
        as too early or late (`tail_batching.complement`), and the engine generates on."""
        key, length, preemptions = lane.engine.pop()
        responses, step, number = self._responses, self._tally.step, lane.number
        lane.last_busy_s = self._clock.time_s
        done = responses.done[key]
        if responses.redraws_to_come and responses.next_redraw(key):
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
        is_cut_off = length >= self._cap
        if self._turns is not None:
            is_cut_off = self._turns.end(key, Home(number, self._incarnations[number]))
            length -= self._turns.start(key)
        return SampleGenerated(
            time_s=0.0,
            sample=responses.samples[key],
            num_tokens=length,
            finish_reason="length" if is_cut_off else "stop",
            version=self._launch.version,
            preemptions=preemptions,
            num_kept=responses.num_kept(key, length),
            num_redraws=responses.redraws.get(key, 0),
            engine=number,
            incarnation=self._incarnations[number],
        )

    def _abort(self, command: Abort) -> None:
        now, keys = self._clock.time_s, self._responses.keys
        by_lane: dict[Lane, list[int]] = {}
        for sample in command.samples:
            key = keys[sample]
            if key in self._lane_of:
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
            if key not in stopped:  # no engine has it: it has stopped
                responses.reached[key] = responses.done[key]
                continue
            tokens, preemptions = stopped[key]
            number = self._lane_of[key].number
            self._clock.after(
                stop_s,
                SampleAborted(
                    time_s=0.0,
                    sample=sample,
                    num_tokens=tokens if self._turns is None else tokens - self._turns.start(key),
                    preemptions=preemptions,
                    num_kept=responses.num_kept(key, tokens),
                    num_redraws=responses.redraws.get(key, 0),
                    engine=number,
                    incarnation=self._incarnations[number],
                ),
            )

    def _rollout_ends(self, now: float) -> None:
        """Note that from `now` on no engine has a response, so that the trainer can have all
        devices, and count the time that engines were idle before."""
        machine, launch = self._machine, self._launch
        assert launch is not None
        self._empty_from_s = now
        self._tally.rollout_ends(now)
        self._work.have(now, machine.gpus)
        idle_s = sum(now - lane.last_busy_s for lane in self._fleet) * launch.tensor_parallel
        if self._released is not None:
            when, lanes = self._released
            settling_s = min(machine.migration_s, now - when) * len(lanes) * launch.tensor_parallel
            idle_s -= self._work.done_s + settling_s
        self._tally.bubble["tail"] += max(idle_s, 0.0)

    # -- engines that are lost -----------------------------------------------------------

    def begin(self) -> None:
        """Begin the run: schedule the time at which each engine is lost, if ever."""
        for number in range(self._num_engines):
            self._live(number, 0.0)

    def _live(self, number: int, after_s: float) -> None:
        """Schedule the loss, if any, of an engine that will be ready in `after_s` seconds."""
        incarnation = self._incarnations[number]
        life_s = self.life_s(number, incarnation)
        if life_s < math.inf:
            self._clock.after(
                after_s + life_s,
                EngineLost(
                    time_s=0.0, engine=number, incarnation=incarnation, reason="made to end"
                ),
            )

    def _replace(self, command: Replace) -> None:
        """Start an engine anew, without its samples, if `command` has a new incarnation (number of
        the start) for it; else the engine is live and gets the newest weights."""
        number, start_s = command.engine, self.start_s
        if self._incarnations[number] == command.incarnation:
            start_s = self._machine.latency.sync_s  # it is there, and lacks the newest weights
        else:
            self._incarnations[number] = command.incarnation
            if self._fleet:
                lane = self._fleet[number]
                if lane.engine.num_running or lane.engine.num_waiting:
                    lane.last_busy_s = self._clock.time_s
                for request in lane.engine.drain(self._clock.time_s):
                    del self._lane_of[request.key]
            self._live(number, start_s)
        self._is_ready(number, command.version, start_s)

    def _resize(self, command: Resize) -> None:
        """Restart all engines, now empty; the next `Launch` tells their new number of GPUs."""
        machine = self._machine
        self._tally.bubble["sync"] += machine.resize_s * machine.gpus
        for number, incarnation in enumerate(command.incarnations):
            self._incarnations[number] = incarnation
            self._live(number, machine.resize_s)
            self._is_ready(number, command.version, machine.resize_s)

    def _is_ready(self, number: int, version: int, after_s: float) -> None:
        incarnation = self._incarnations[number]
        self._clock.after(
            after_s,
            EngineReady(time_s=0.0, engine=number, incarnation=incarnation, version=version),
        )

    def _place(self, command: Place) -> None:
        """Start samples that lost their engine anew on other engines, with the same lengths."""
        keys = [self._responses.keys[sample] for sample in command.samples]
        self._give(keys, command.engines, self._clock.time_s)

    def _move(self, command: Move) -> None:
        assert self._launch is not None
        now, target = self._clock.time_s, self._fleet[command.engine]
        token_s = self._machine.latency.recompute_token_s(self._launch.tensor_parallel)
        keys = [self._responses.keys[sample] for sample in command.samples]
        by_lane: dict[Lane, list[int]] = {}
        for key in keys:
            by_lane.setdefault(self._lane_of[key], []).append(key)
        reached: dict[int, int] = {}
        for lane, own in by_lane.items():
            reached.update(zip(own, lane.engine.abort(now, own), strict=True))
            lane.last_busy_s = now
            self._clock.expect(lane.engine, lane.finish)
        self._lane_of.update(dict.fromkeys(keys, target))
        for key, sample in zip(keys, command.samples, strict=True):
            self._clock.after(
                0.0,
                SampleMoved(
                    time_s=0.0,
                    sample=sample,
                    engine=target.number,
                    incarnation=self._incarnations[target.number],
                    num_tokens=reached[key],
                ),
            )
        # One that finishes at this very moment takes its last token on the other engine.
        lengths = self._responses.lengths
        requests = [(key, lengths[key], min(reached[key], lengths[key] - 1)) for key in keys]
        prompts = len(requests) * self._machine.prompt_tokens
        tokens = prompts + sum(done for _, _, done in requests)
        target.engine.submit(now, requests, tokens * token_s)
        self._clock.expect(target.engine, target.finish)

    # -- release -----------------------------------------------------------------------

    def _release(self, command: Release) -> None:
        """Release the engines on the command's devices to the trainer. A `Move` follows, which
        brings their samples to other engines."""
        now, launch = self._clock.time_s, self._launch
        assert launch is not None
        degree = launch.tensor_parallel
        gone = [self._fleet[i] for i in sorted({device // degree for device in command.devices})]
        self._released = (now, gone)
        for lane in gone:
            lane.last_busy_s = now
        migration_s = self._machine.migration_s
        self._tally.bubble["migration"] += migration_s * len(command.devices)
        self._work.have(now, len(command.devices), after_s=migration_s)
