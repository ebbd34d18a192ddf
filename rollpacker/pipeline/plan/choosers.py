"""Choosers of a pipeline stage's next op.

A model's layers are cut into *stages*, one after the other. A *sweep* takes micro-batches through
them, with three ops each on every stage:

    F   forward: needs the hidden states from the stage before
    I   backward for inputs: needs the gradient from the stage after (the last stage: its own F)
    W   backward for weights: needs the stage's own I, and frees what F kept

    F 0  --link 0-->  F 1  --link 1-->  F 2
    I 0  <--link 0--  I 1  <--link 1--  I 2        W where and when there is time

Each kind runs in the order of the micro-batches on every stage, so that timing cannot change a bit
of a sum of gradients. What a stage has done is therefore a few counters (`StageState`), and a
*chooser* is a function of them: the next of a fixed order, or the first of what is ready. The
executor asks the chooser whenever its stage is idle and something was done or arrived.

    `work`: costs of ops (fitted or given) and of messages.
    `virtual_time`: simulates a sweep with these choosers, to make plans and to replay them.
    `plan`: the orders 1f1b, zero-bubble and adapted. `search`: makes an order better.
    `order`: checks that orders can be run at all; reads and writes torch's CSV file of them.
    `split`: number of layers of each stage, and most tokens of a micro-batch.
    `watch`: finds links and stages that have turned slow.
    `link_choice`: the kind of links to use (direct or host), by whether links are slow.

Ready-first is RRFP (arXiv 2605.18750); warm-up quotas are those of ADAPTRA (arXiv 2504.19232).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

Kind = Literal["F", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "I", "W")


class Op(NamedTuple):
    """One stage's forward (F), backward for inputs (I) or backward for weights (W) of a
    micro-batch."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


Order = tuple[Op, ...]
"""All ops of one pipeline stage, in the order in which the stage runs them."""

ORDERS = ("1f1b", "zero-bubble", "adapted", "ready")
"""Values that `train.pipeline.order` may have, besides a CSV file's name (see `plan.py`)."""


def check_order_name(order: str) -> None:
    """Raise `ValueError` unless `order` is one of `ORDERS` or the name of a CSV file."""
    if order not in ORDERS and not order.endswith(".csv"):
        raise ValueError(f'order is "{order}". Known: {", ".join(ORDERS)}, or the name of a .csv')


@dataclass(slots=True)
class StageState:
    """Counts of the messages that have reached one stage in a sweep (all micro-batches once through
    the stages), and of the ops that the stage has done.

    A sweep may be *open*: micro-batches are added while it runs, until it is closed. Messages are
    counted in the order of the micro-batches: one that overtakes another counts only after it.
    """

    stage: int
    num_stages: int
    tokens: list[int] = field(default_factory=list)
    """Number of tokens of each micro-batch that was added so far."""
    closed: bool = False
    """Whether no more micro-batches will be added."""
    num_f_arrived: int = 0
    """Number of messages with hidden states from the stage before; 0 on the first stage."""
    num_i_arrived: int = 0
    """Number of messages with gradients received from the stage after; 0 on the last stage."""
    num_f: int = 0
    """Number of forward passes that the stage has done. `num_i` and `num_w` are the numbers of
    backward passes for inputs and for weights."""
    num_i: int = 0
    num_w: int = 0
    live_tokens: int = 0
    """Number of tokens whose activations the stage keeps, since their forward pass is done and
    their backward pass for weights is not."""
    peak_live_tokens: int = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add micro-batches with these numbers of tokens, behind the earlier ones."""
        assert not self.closed, "a closed sweep takes no more micro-batches"
        self.tokens += tokens

    def close(self) -> None:
        self.closed = True

    def arrive(self, kind: Kind) -> None:
        """Count an arrived message: hidden states for kind F, or a gradient for kind I."""
        if kind == "F":
            self.num_f_arrived += 1
        else:
            assert kind == "I", "W needs nothing from elsewhere"
            self.num_i_arrived += 1

    @property
    def num_done(self) -> int:
        return self.num_f + self.num_i + self.num_w

    @property
    def finished(self) -> bool:
        """Whether all ops are done on this stage, and no more micro-batches will come."""
        return self.closed and self.num_w == len(self.tokens)

    def ready(self, kind: Kind) -> bool:
        """Whether the next op of this kind has its input, whatever limits a chooser sets."""
        if kind == "F":
            here = len(self.tokens) if self.stage == 0 else self.num_f_arrived
            return self.num_f < here
        if kind == "I":
            last = self.stage == self.num_stages - 1
            here = self.num_f if last else min(self.num_i_arrived, self.num_f)
            return self.num_i < here
        return self.num_w < self.num_i

    def next_op(self, kind: Kind) -> Op:
        if kind == "F":
            return Op("F", self.num_f)
        return Op("I", self.num_i) if kind == "I" else Op("W", self.num_w)

    def done(self, op: Op) -> None:
        """Count this op as done. It must be the next of its kind, and have had its input."""
        assert op == self.next_op(op.kind) and self.ready(op.kind), f"{op} on stage {self.stage}"
        if op.kind == "F":
            self.num_f += 1
            self.live_tokens += self.tokens[op.micro_batch]
            self.peak_live_tokens = max(self.peak_live_tokens, self.live_tokens)
        elif op.kind == "I":
            self.num_i += 1
        else:
            self.num_w += 1
            self.live_tokens -= self.tokens[op.micro_batch]


class Chooser(Protocol):
    """Chooses the op (F, I or W of a micro-batch) that one stage runs next, in one sweep."""

    def choose(self, state: StageState) -> Op | None:
        """Return the op that the stage is to run now. None: the stage waits for a message or for
        more micro-batches. The op depends on `state` alone, and its input has arrived."""
        ...


class FixedOrder:
    """Chooses a stage's ops in a fixed order, each as soon as its input has arrived."""

    def __init__(self, order: Sequence[Op] = ()) -> None:
        self._order = list(order)

    def extend(self, order: Sequence[Op]) -> None:
        """Append `order`, the stage's ops for micro-batches added while the sweep runs. The
        micro-batches are numbered on from the earlier ones."""
        self._order += order

    def choose(self, state: StageState) -> Op | None:
        """Return the next op of the fixed order. None: its input has not arrived yet."""
        place = state.num_done
        if place >= len(self._order):
            return None
        op = self._order[place]
        assert op == state.next_op(op.kind), f"{op} comes too early in the order of a stage"
        return op if state.ready(op.kind) else None


class ReadyFirst:
    """Chooses among the ops whose input has arrived: first backward for inputs (I), then forward
    (F), then backward for weights (W).

    Until its first I, a stage runs `quota` F and waits for them: that lead keeps the stage busy
    when a slow link is between it and the next. An F waits while its micro-batch would take the
    live tokens (those whose activations are kept) above the cap. Neither wait can block: a quota
    counts no more micro-batches than exist and than fit below the caps of this stage and all before
    it, so that each F that is waited for comes; and a stage that has no room for an F has an I or a
    W to run, or some stage after it has.
    """

    def __init__(
        self,
        stage: int,
        *,
        quotas: Sequence[int] | None = None,
        caps: Sequence[int | None] | None = None,
    ) -> None:
        """Choose for one stage. By stage, `quotas`: forward passes before its first backward pass
        (None: 0), `caps`: most tokens whose activations it keeps (None: any number)."""
        before = range(stage + 1)
        self._quota = min(quotas[s] for s in before) if quotas is not None else 0
        given = [caps[s] for s in before] if caps is not None else []
        self._cap = math.inf if not given or given[-1] is None else given[-1]
        self._lowest = min((cap for cap in given if cap is not None), default=math.inf)
        """The lowest of the `caps` of this stage and all stages before it; infinity without any."""
        self._known = 0
        self._reachable = 0
        """How many forward passes can run before the first backward pass: `_quota`, or as many as
        have at most `_lowest` tokens together, of `_known` micro-batches."""

    def choose(self, state: StageState) -> Op | None:
        """Return the next op that has its input: a backward for inputs, else a forward, else a
        backward for weights. None: the stage waits."""
        num_f = state.num_f
        here = len(state.tokens) if state.stage == 0 else state.num_f_arrived
        f_fits = num_f < here and state.live_tokens + state.tokens[num_f] <= self._cap
        if state.num_i == 0 and num_f < self._quota and num_f < self._quota_of(state):
            return Op("F", num_f) if f_fits else None
        if state.ready("I"):
            return Op("I", state.num_i)
        if f_fits:
            return Op("F", num_f)
        return Op("W", state.num_w) if state.num_w < state.num_i else None

    def _quota_of(self, state: StageState) -> int:
        if self._known != len(state.tokens):
            self._known = len(state.tokens)
            sums = accumulate(state.tokens[: self._quota])
            self._reachable = sum(1 for total in sums if total <= self._lowest)
        return self._reachable


def check_caps(caps: Sequence[int | None], tokens: Sequence[int]) -> None:
    """Raise `ValueError` if a micro-batch has more tokens than a stage may keep activations of."""
    largest = max(tokens, default=0)
    for stage, cap in enumerate(caps):
        if cap is not None and cap < largest:
            raise ValueError(
                f"a cap of {cap} live tokens on stage {stage} is below its largest micro-batch of "
                f"{largest}: raise train.pipeline.live_tokens to at least that, or make "
                "micro-batches and samples shorter"
            )


def live_token_caps(
    live_tokens: int | Literal["auto"], *, num_stages: int, longest: int
) -> list[int]:
    """Return for each stage the most tokens whose activations it may keep: `live_tokens` for all.
    auto: a stage with n stages after it may keep 2 (n + 1) micro-batches of `longest` tokens (those
    of the largest one). Raises `ValueError` for a number below `longest`."""
    if live_tokens == "auto":
        return [2 * (num_stages - stage) * longest for stage in range(num_stages)]
    if longest > live_tokens:
        raise ValueError(
            f"train.pipeline.live_tokens={live_tokens} is less than a micro-batch of {longest} "
            "tokens: raise it, or lower train.micro_batch_tokens or the longest sample"
        )
    return [live_tokens] * num_stages


# -- warm-up quotas --------------------------------------------------------------------


def even_quotas(num_stages: int, most: int) -> list[int]:
    """Return for each stage the number of forward passes before its first backward pass (ADAPTRA):
    evenly falling from `most` (what memory holds) on the first stage to 1 on the last."""
    assert num_stages >= 1 and most >= 1
    quotas = [most]
    if num_stages > 1:
        step, larger = divmod(most - 1, num_stages - 1)
        for stage in range(1, num_stages):
            quotas.append(quotas[-1] - step - (1 if stage <= larger else 0))
    return quotas
