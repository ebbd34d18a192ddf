"""Makes the chooser of a pipeline stage's ops for each sweep, by `train.pipeline.order`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rollpacker.pipeline.plan.choosers import (
    ORDERS,
    Chooser,
    FixedOrder,
    Op,
    Order,
    ReadyFirst,
    StageState,
    live_token_caps,
)
from rollpacker.pipeline.plan.order import orders_from_csv, orders_to_csv, peak_live_tokens
from rollpacker.pipeline.plan.plan import plan_order
from rollpacker.pipeline.plan.work import Load, Measured, Work
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.peers import Peers
from rollpacker.trainer.trainer import PipelineConfig, TrainerError

DIGEST_BYTES = 6
"""Number of bytes of a plan's hash that stages compare: so few that a float holds them exactly."""


class SweepChooser(Chooser, Protocol):
    """Chooses one stage's ops in one sweep. `add` must announce micro-batches before they run."""

    def add(self, loads: Sequence[Load]) -> None:
        """Announce micro-batches of these sizes. All stages make this call together. Raises
        `ValueError` if a micro-batch can never run."""
        ...


NewChooser = Callable[[Measured], SweepChooser]
"""A function that makes this stage's chooser for a sweep, from costs measured so far."""


class Orders:
    """Makes the choosers of one stage's ops. Each stage plans for all stages, from the same
    numbers; before a plan is used, the stages check that theirs are equal."""

    def __init__(
        self, place: Place, config: PipelineConfig, *, peers: Peers, csv: str | None = None
    ) -> None:
        """Prepare for sweeps. `peers` compares plans. `csv`: text of the file that `config.order`
        names, else None. Raises `ValueError` for a wrong file, as `orders_from_csv` does."""
        self._place = place
        self._config = config
        self._peers = peers
        assert (csv is None) == (config.order in ORDERS), "a file's content goes with its name"
        self._of_file = [] if csv is None else orders_from_csv(csv, num_stages=place.count)

    def new_chooser(self, measured: Measured) -> SweepChooser:
        """Return this stage's chooser for a new sweep, which plans with `measured` costs."""
        if self._config.order == "ready":
            return Ready(self._place, self._config)
        return Planned(self._place, partial(self._plan, measured))

    def _plan(self, measured: Measured, loads: Sequence[Load]) -> Sequence[Order]:
        """Return the orders by stage for these micro-batches and costs. All stages call this
        together. Raises `ValueError` for too many activations, `TrainerError` if plans differ."""
        caps = live_token_caps(
            self._config.live_tokens,
            num_stages=self._place.count,
            longest=max((load.tokens for load in loads), default=0),
        )
        if self._of_file:
            orders: Sequence[Order] = self._orders_for(len(loads))
        else:
            work = Work.of(measured.stages, loads, bytes_per_token=measured.bytes_per_token)
            orders = plan_order(self._config.order, work, measured.links, caps=caps)
        self._check_room(orders, loads, caps)
        self._compare(orders)
        return orders

    def _orders_for(self, num_micro_batches: int) -> Sequence[Order]:
        planned = len(self._of_file[0]) // 3
        if num_micro_batches == 1:  # as where a loss that is not finite is looked for
            return [(Op("F", 0), Op("I", 0), Op("W", 0))] * self._place.count
        if num_micro_batches != planned:
            raise ValueError(
                f"train.pipeline.order={self._config.order} is a plan for {planned} micro-batches, "
                f"and a sweep has {num_micro_batches} of them: how many there are is up to "
                "train.micro_batch_tokens (at 1, each response is one) and to the number of "
                "responses; or take a plan for as many, or train.pipeline.order=ready"
            )
        return self._of_file

    def _check_room(
        self, orders: Sequence[Order], loads: Sequence[Load], caps: Sequence[int]
    ) -> None:
        tokens = [load.tokens for load in loads]
        for stage, (order, cap) in enumerate(zip(orders, caps, strict=True)):
            needed = peak_live_tokens(order, tokens)
            if needed > cap:
                raise ValueError(
                    f"train.pipeline.order={self._config.order} keeps activations of {needed} "
                    f"tokens on stage {stage}, and train.pipeline.live_tokens="
                    f"{self._config.live_tokens} leaves room for {cap}: set it to {needed}, or "
                    "take order=ready, which heeds it"
                )

    def _compare(self, orders: Sequence[Order]) -> None:
        digest = hashlib.sha256(orders_to_csv(orders).encode()).digest()[:DIGEST_BYTES]
        found = self._peers.gather([float(int.from_bytes(digest))])
        others = [str(stage) for stage, one in enumerate(found) if one != found[0]]
        if others:
            raise TrainerError(
                f"pipeline stages planned different sweeps (train.pipeline.order="
                f"{self._config.order}): stage {', '.join(others)} another one than stage 0. They "
                "must be given the same samples, and run the same version; train.pipeline.order="
                "ready plans nothing"
            )


class Ready:
    """Chooses any op that has its input, within the cap on tokens with kept activations."""

    def __init__(self, place: Place, config: PipelineConfig) -> None:
        self._place = place
        self._cap = config.live_tokens
        self._longest = 0
        self._chooser = ReadyFirst(place.index)

    def add(self, loads: Sequence[Load]) -> None:
        """Announce micro-batches of these sizes. Raises `ValueError` if one is larger than the cap
        on tokens whose activations are kept."""
        self._longest = max([self._longest, *(load.tokens for load in loads)])
        caps = live_token_caps(self._cap, num_stages=self._place.count, longest=self._longest)
        cap = caps[self._place.index]
        # It remembers nothing, so that another one may go on in its place.
        self._chooser = ReadyFirst(self._place.index, caps=[None] * self._place.index + [cap])

    def choose(self, state: StageState) -> Op | None:
        """Return the next op that has its input. None: the stage waits."""
        return self._chooser.choose(state)


class Planned:
    """Chooses the next op of a planned order. Micro-batches added to an open sweep get a plan of
    their own, which runs after the earlier ones."""

    def __init__(self, place: Place, plan: Callable[[Sequence[Load]], Sequence[Order]]) -> None:
        """Begin without micro-batches. `plan` returns orders by stage for micro-batch sizes."""
        self._place = place
        self._plan = plan
        self._count = 0
        self._fixed = FixedOrder()

    def add(self, loads: Sequence[Load]) -> None:
        """Plan the ops of micro-batches of these sizes. Raises `ValueError` if the plan cannot run,
        and `TrainerError` if stages planned differently."""
        if loads:
            order = self._plan(loads)[self._place.index]
            self._fixed.extend([Op(op.kind, op.micro_batch + self._count) for op in order])
            self._count += len(loads)

    def choose(self, state: StageState) -> Op | None:
        """Return the planned order's next op. None: its input is not there, the stage waits."""
        return self._fixed.choose(state)
