"""A trainer in pipeline stages, in virtual time: the time of a training phase, and its waits.

    1. Responses are dealt to replicas and packed into micro-batches, as a trainer does.
    2. Each op of a stage gets its seconds, from measured `OpTimes` or training cost by layers.
    3. A sweep (all micro-batches once through the stages) is simulated (`virtual_time.py`): by
       a planned order, or with each op run as soon as it has its input.

A phase is the forward sweeps of the log-probs and one sweep with gradients; it ends with the
slowest replica. With direct links a stage computes nothing until its message has arrived: so most
published measurements are met within 5 % (docs/pipeline.md). 1f1b launches a send together with a
receive, so that both directions of a link work at once.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rollpacker.core.packs import assign, plan_packs
from rollpacker.pipeline.plan.choosers import ORDERS, Order, check_caps
from rollpacker.pipeline.plan.order import check_orders
from rollpacker.pipeline.plan.plan import plan_order, ready_choosers
from rollpacker.pipeline.plan.virtual_time import Sends, Timeline, replay, run
from rollpacker.pipeline.plan.work import Link, Load, StageCost, Work
from rollpacker.pipeline.sim.spec import DrawnDelays, PipelineSpec
from rollpacker.sim.draws import NormalPairs

NUM_FORWARD_SWEEPS = 2
"""Number of sweeps (all micro-batches once through the stages) without gradients in a step:
log-probs of the policy and of the reference model, as `TRAIN_FLOPS_PER_PARAM` counts them."""

Caps = tuple[int | None, ...]


class DelayAt:
    """Random delays of messages on links, which change now and then. Equal seeds give equal
    delays."""

    def __init__(self, drawn: DrawnDelays, num_links: int, seed: int) -> None:
        links = range(num_links) if drawn.links is None else drawn.links
        self._drawn = drawn
        self._draws = {link: random.Random(f"delays/{seed}/{link}") for link in links}
        self._scores = {link: NormalPairs(draw) for link, draw in self._draws.items()}
        self._until_s: dict[int, list[float]] = {link: [] for link in links}
        self._delays_s: dict[int, list[float]] = {link: [] for link in links}

    def __call__(self, link: int, now_s: float) -> float:
        """Return the seconds by which a message sent at `now_s` is delayed, perhaps 0."""
        if link not in self._draws:
            return 0.0
        until_s, delays_s, drawn = self._until_s[link], self._delays_s[link], self._drawn
        draw = self._draws[link]
        while not until_s or until_s[-1] <= now_s:
            until_s.append((until_s[-1] if until_s else 0.0) + draw.uniform(*drawn.hold_s))
            delay_s = drawn.mean_s + drawn.sd_s * self._scores[link].draw()
            delays_s.append(max(0.0, delay_s))
        return delays_s[bisect.bisect_right(until_s, now_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMachine:
    """What the simulated stages are like: costs of ops, layers, room for activations, GPUs."""

    costs: tuple[StageCost, ...]
    """By stage, the cost of its ops forward (F), backward for inputs (I) and for weights (W)."""
    layers: tuple[int, ...]
    """Number of layers by stage; empty if the scenario gives the times of ops."""
    caps: Caps
    """By stage, the most tokens whose activations it may keep; None: any number."""
    num_replicas: int
    stage_gpus: int
    """Number of GPUs that one stage of one replica of the trainer has."""
    bytes_per_token: float
    """Bytes of a message between two stages per token of its micro-batch."""
    relayout: tuple[int, ...] = ()
    """Number of layers by stage in a faster split to propose to the user; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """Simulated times of one training phase, which is the trainer's part of a step."""

    seconds: float
    """Seconds that the slowest replica takes for all passes of the phase."""
    sweep_s: float
    """Seconds that the slowest replica takes for the passes with gradients alone."""
    idle_device_s: float
    """Seconds, summed over all GPUs, in which they waited for a message or another replica."""
    device_s: float
    """Seconds of the phase times the number of GPUs, without the scenario's fixed extra seconds."""
    links: Literal["direct", "host"]
    num_micro_batches: int
    """Number of micro-batches of the replica with the fewest; replicas without any do not count."""
    slowest: Timeline
    """Ops and messages of the slowest replica's sweep with gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Summary of a simulated trainer's stages over all training phases."""

    order: str
    links: str
    """Kind of links between stages: `direct`, `host`, or `both` if it was changed."""
    stages: int
    layers: tuple[int, ...]
    sweep_s: float
    """Mean seconds of a phase's passes with gradients, on its slowest replica."""
    bubble_share: float
    """Idle GPU time as a share of the GPU time of all training phases."""
    num_micro_batches: int
    """The fewest micro-batches into which a replica's responses of a training phase were packed."""
    peak_live_tokens: tuple[int, ...]
    """By stage, the most tokens whose activations were kept, over all steps' slowest replicas."""
    caps: Caps
    relayout: tuple[int, ...]
    """Number of layers by stage in a faster split to propose to the user; empty: none."""
    last: Timeline
    """Ops and messages of the slowest replica's last sweep with gradients."""

    def to_plain(self) -> dict[str, object]:
        """Return the result as plain values, as `rollpacker simulate --json` prints it."""
        return {
            "order": self.order,
            "links": self.links,
            "stages": self.stages,
            "layers": list(self.layers),
            "sweep_s": self.sweep_s,
            "bubble_share": self.bubble_share,
            "micro_batches": self.num_micro_batches,
            "peak_live_tokens": list(self.peak_live_tokens),
            "live_tokens": list(self.caps),
        }


class Pipeline:
    """Simulates a trainer's stages, one training phase after the other. The order of ops is planned
    for the delays that messages had in the phase before."""

    def __init__(
        self,
        spec: PipelineSpec,
        machine: PipelineMachine,
        *,
        orders: Sequence[Order] = (),
        seed: int = 0,
    ) -> None:
        """Begin a run. `orders`: by stage, the ops in the CSV file of `spec.order`; else empty."""
        self._spec = spec
        self._machine = machine
        self._orders = orders
        num_links = spec.stages - 1
        drawn = spec.drawn_delays
        self._drawn = None if drawn is None else DelayAt(drawn, num_links, seed)
        rates = dict.fromkeys(range(num_links), spec.link_gb_s) | dict(spec.slow_links_gb_s)
        self._links = [
            Link(spec.slow_links_s.get(link, 0.0), rates[link] * 1e9 * machine.stage_gpus)
            for link in range(num_links)
        ]
        expected = 0.0 if drawn is None else drawn.mean_s
        listed = None if drawn is None else drawn.links
        self._expected = [
            replace(link, latency_s=link.latency_s + expected)
            if listed is None or number in listed
            else link
            for number, link in enumerate(self._links)
        ]
        """Latency and rate of each link for which the next sweep is planned, as last observed."""
        self._steps: list[PipelineStep] = []

    @property
    def stages(self) -> int:
        return self._spec.stages

    # -- a phase -----------------------------------------------------------------------

    def train(self, lengths: Sequence[int], now_s: float) -> PipelineStep:
        """Simulate a training phase that begins at second `now_s`. `lengths`: tokens of each
        response with its prompt, at least one.

        Raises `ValueError` if a stage has no room for the activations.
        """
        machine = self._machine
        works = [self._work(share) for share in self._shares(lengths) if share]
        kind = self._link_kind(works[0])
        seconds = busy_s = sweep_s = 0.0
        slowest: tuple[Timeline, Work] | None = None
        done: dict[Work, tuple[float, Timeline]] = {}
        for work in works:
            if work not in done:  # replicas may have the same to do
                done[work] = self._run(work, kind, now_s)
            forward_s, timeline = done[work]
            took_s = max(timeline.makespan_s - now_s - forward_s, 0.0)
            seconds = max(seconds, forward_s + took_s)
            if slowest is None or took_s > sweep_s:
                slowest, sweep_s = (timeline, work), took_s
            busy_s += sum(map(work.stage_s, range(work.num_stages)))
            busy_s += NUM_FORWARD_SWEEPS * math.fsum(map(sum, work.f_s))
        assert slowest is not None
        if self._drawn is not None:
            self._learn(*slowest)
        fixed_s = self._spec.host_fixed_s if kind == "host" else self._spec.direct_fixed_s
        device_s = seconds * machine.num_replicas * self.stages * machine.stage_gpus
        step = PipelineStep(
            seconds=seconds + fixed_s,
            sweep_s=sweep_s + fixed_s,
            idle_device_s=max(device_s - busy_s * machine.stage_gpus, 0.0),
            device_s=device_s,
            links=kind,
            num_micro_batches=min(work.num_micro_batches for work in works),
            slowest=slowest[0],
        )
        self._steps.append(step)
        return step

    def _shares(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Return the tokens of each row (a response and its prompt), by replica and micro-batch."""
        shares = []
        for members in assign(lengths, self._machine.num_replicas):
            own = [lengths[index] for index in members]
            count = self._spec.micro_batches
            if count is None:
                packs = plan_packs(own, self._spec.micro_batch_tokens)
            else:
                packs = [pack for pack in assign(own, count, work=float) if pack]
            shares.append([[own[index] for index in pack] for pack in packs])
        return shares

    def _work(self, packs: Sequence[Sequence[int]]) -> Work:
        loads = [Load.of(pack) for pack in packs]
        work = Work.of(self._machine.costs, loads, bytes_per_token=self._machine.bytes_per_token)
        return merged(work) if self._spec.order == "1f1b" else work

    def _link_kind(self, work: Work) -> Literal["direct", "host"]:
        if self._spec.links != "auto":
            return self._spec.links
        sizes = work.message_bytes
        typical = sum(sizes) // len(sizes)
        both_s = [f + i for f, i in zip(work.mean_s("F"), work.mean_s("I"), strict=True)]
        slow = (
            2 * link.seconds(typical) > max(both_s[number : number + 2])
            for number, link in enumerate(self._expected)
        )
        return "host" if any(slow) else "direct"

    def _forward_s(self, work: Work, kind: str, now_s: float) -> float:
        """Return the seconds of one sweep without gradients, over links of this kind."""
        free_s, link_free_s = [0.0] * self.stages, [0.0] * self.stages
        for m in range(work.num_micro_batches):
            there_s = 0.0
            for stage in range(self.stages):
                end_s = max(free_s[stage], there_s) + work.f_s[stage][m]
                free_s[stage] = end_s
                if stage == self.stages - 1:
                    continue
                sent_s = max(end_s, link_free_s[stage])
                link = self._link_at(stage, now_s + sent_s)
                link_free_s[stage] = sent_s + link.leaves_s(work.message_bytes[m])
                there_s = link_free_s[stage] + link.latency_s
                if kind == "direct":
                    free_s[stage] = there_s
        return max(free_s)

    def _run(self, work: Work, kind: str, now_s: float) -> tuple[float, Timeline]:
        """Return a replica's seconds without gradients, and its times of ops with gradients."""
        forward_s = NUM_FORWARD_SWEEPS * self._forward_s(work, kind, now_s)
        timeline = self._sweep(work, kind, now_s + forward_s)
        self._check_peaks(timeline)
        return forward_s, timeline

    def _sweep(self, work: Work, kind: str, now_s: float) -> Timeline:
        sends: Sends = "free" if kind == "host" else "blocking"
        caps = self._machine.caps
        if self._spec.order == "ready":
            check_caps(caps, work.tokens)
            choosers = ready_choosers(self.stages, caps=caps)
            return run(choosers, work, self._link_at, sends=sends, start_s=now_s)
        if self._spec.order == "1f1b" and kind == "direct":
            sends = "paired"
        if self._spec.order in ORDERS:
            orders = plan_order(self._spec.order, work, self._expected, caps=caps)
        else:
            orders = list(self._orders)
            check_orders(orders, num_stages=self.stages, num_micro_batches=work.num_micro_batches)
        return replay(orders, work, self._link_at, sends=sends, start_s=now_s)

    def _check_peaks(self, timeline: Timeline) -> None:
        for stage, (peak, cap) in enumerate(
            zip(timeline.peak_live_tokens, self._machine.caps, strict=True)
        ):
            if cap is not None and peak > cap:
                raise ValueError(
                    f"train.pipeline.order {self._spec.order} keeps activations of {peak:,} tokens "
                    f"on stage {stage}, which has room for {cap:,}: lower micro_batch_tokens, or "
                    "take an order that heeds live_tokens, such as ready"
                )

    def _link_at(self, number: int, now_s: float) -> Link:
        link = self._links[number]
        if self._drawn is None:
            return link
        return replace(link, latency_s=link.latency_s + self._drawn(number, now_s))

    def _learn(self, timeline: Timeline, work: Work) -> None:
        """Expect of each link, in the next plan, its messages' median latency in this sweep."""
        took_s: dict[int, list[float]] = {}
        for message in timeline.messages:
            leaves_s = self._links[message.link].leaves_s(work.message_bytes[message.micro_batch])
            took_s.setdefault(message.link, []).append(
                message.arrived_s - message.sent_s - leaves_s
            )
        for number, seconds in took_s.items():
            latency_s = max(statistics.median(seconds), 0.0)
            self._expected[number] = replace(self._links[number], latency_s=latency_s)

    # -- the result --------------------------------------------------------------------

    def result(self) -> PipelineResult | None:
        """Return the summary of the training phases so far. None: there was no phase."""
        steps, machine = self._steps, self._machine
        if not steps:
            return None
        peaks = (step.slowest.peak_live_tokens for step in steps)
        return PipelineResult(
            order=self._spec.order,
            links="both" if len({step.links for step in steps}) > 1 else steps[0].links,
            stages=self.stages,
            layers=machine.layers,
            sweep_s=statistics.fmean(step.sweep_s for step in steps),
            bubble_share=_share(steps),
            num_micro_batches=min(step.num_micro_batches for step in steps),
            peak_live_tokens=tuple(map(max, zip(*peaks, strict=True))),
            caps=machine.caps,
            relayout=machine.relayout,
            last=steps[-1].slowest,
        )


def _share(steps: Sequence[PipelineStep]) -> float:
    whole_s = math.fsum(step.device_s for step in steps)
    return math.fsum(step.idle_device_s for step in steps) / whole_s if whole_s else 0.0


def merged(work: Work) -> Work:
    """Return `work` with the seconds of backwards for weights added to those for inputs (1f1b)."""
    both = tuple(
        tuple(i + w for i, w in zip(*rows, strict=True))
        for rows in zip(work.i_s, work.w_s, strict=True)
    )
    return replace(work, i_s=both, w_s=((0.0,) * work.num_micro_batches,) * work.num_stages)
