"""Checks that the stages' fixed orders of ops can be run at all, and reads and writes the CSV file
in which orders are kept.

The file is torch's: `torch.distributed.pipelining` loads it (format `compute_only`), and so does
torchtitan. It has a row per stage, with cells such as `1F0` (stage, op, micro-batch); an empty cell
is no op. F is a forward, `B` a whole backward; I and W are its parts for inputs and for weights.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from rollpacker.pipeline.plan.choosers import KINDS, Kind, Op, Order, StageState

_CELL = re.compile(r"(\d+)([FIWB])(\d+)")
_NEEDS: dict[Kind, Kind | None] = {"F": None, "I": "F", "W": "I"}
"""By kind of op, the kind that must run before it on the same micro-batch. None: no other kind."""
_SHOWN = 4
"""The most stages that an error message about a deadlock names."""


def check_orders(
    orders: Sequence[Sequence[Op]],
    *,
    num_stages: int,
    num_micro_batches: int,
    tokens: Sequence[int] | None = None,
    caps: Sequence[int | None] | None = None,
) -> None:
    """Raise `ValueError`, which names the place, unless every stage runs every op once, each kind
    in the order of the micro-batches, and no stages wait for each other for ever. With `tokens` by
    micro-batch and `caps` by stage, none may keep activations of more tokens than its cap."""
    if len(orders) != num_stages:
        raise ValueError(f"the plan has {len(orders)} stages, but there are {num_stages}")
    for stage, order in enumerate(orders):
        _check_stage(stage, order, num_micro_batches)
    _check_progress(orders, num_micro_batches, tokens, caps)


def _check_stage(stage: int, order: Sequence[Op], num_micro_batches: int) -> None:
    counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for place, op in enumerate(order):
        where = f"stage {stage}, op {place} ({stage}{op})"
        if op.micro_batch >= num_micro_batches:
            raise ValueError(
                f"{where}: the plan is of another size, there are {num_micro_batches} micro-batches"
            )
        expected = counts[op.kind]
        if op.micro_batch < expected:
            raise ValueError(f"{where}: the stage has run it before")
        if op.micro_batch > expected:
            raise ValueError(
                f"{where}: {stage}{op.kind}{expected} is missing or comes later; each kind of op "
                "runs in the order of the micro-batches"
            )
        before = _NEEDS[op.kind]
        if before is not None and counts[before] <= op.micro_batch:
            raise ValueError(f"{where}: comes before {stage}{before}{op.micro_batch}")
        counts[op.kind] += 1
    for kind, count in counts.items():
        if count < num_micro_batches:
            raise ValueError(
                f"stage {stage}: {stage}{kind}{count} is missing; the plan must have F, I and W of "
                f"all {num_micro_batches} micro-batches"
            )


def _check_progress(
    orders: Sequence[Sequence[Op]],
    num_micro_batches: int,
    tokens: Sequence[int] | None,
    caps: Sequence[int | None] | None,
) -> None:
    """Step through the orders. Raises `ValueError` for a deadlock or tokens beyond `caps`."""
    stages = len(orders)
    states = [StageState(stage, stages) for stage in range(stages)]
    for state in states:
        state.add([1] * num_micro_batches if tokens is None else tokens)
        state.close()
    moved = True
    while moved:
        moved = False
        for stage, (state, order) in enumerate(zip(states, orders, strict=True)):
            while state.num_done < len(order) and state.ready(order[state.num_done].kind):
                op = order[state.num_done]
                state.done(op)
                moved = True
                cap = None if caps is None or tokens is None else caps[stage]
                if cap is not None and state.live_tokens > cap:
                    raise ValueError(
                        f"stage {stage}, op {state.num_done - 1} ({stage}{op}): the plan keeps "
                        f"{state.live_tokens} tokens alive, above the cap of {cap}"
                    )
                if op.kind == "F" and stage + 1 < stages:
                    states[stage + 1].arrive("F")
                elif op.kind == "I" and stage > 0:
                    states[stage - 1].arrive("I")
    stuck = [
        f"stage {state.stage} at op {state.num_done} ({state.stage}{order[state.num_done]})"
        for state, order in zip(states, orders, strict=True)
        if state.num_done < len(order)
    ]
    if stuck:
        more = "" if len(stuck) <= _SHOWN else f" and {len(stuck) - _SHOWN} more"
        raise ValueError(
            f"the plan deadlocks: {', '.join(stuck[:_SHOWN])}{more} would wait for each other"
        )


def peak_live_tokens(order: Sequence[Op], tokens: Sequence[int]) -> int:
    """Return the most tokens whose activations a stage with this `order` keeps at once."""
    peak = live = 0
    for op in order:
        if op.kind == "F":
            live += tokens[op.micro_batch]
            peak = max(peak, live)
        elif op.kind == "W":
            live -= tokens[op.micro_batch]
    return peak


def orders_to_csv(orders: Sequence[Sequence[Op]]) -> str:
    """Return the orders of all stages as text in torch's CSV format."""
    rows = (",".join(f"{stage}{op}" for op in order) for stage, order in enumerate(orders))
    return "".join(f"{row}\n" for row in rows)


def orders_from_csv(
    text: str, *, num_stages: int, num_micro_batches: int | None = None
) -> list[Order]:
    """Return the orders by stage that a CSV file's text describes, after checking them.
    `num_micro_batches`: how many they must be for; None: as many as the text names. Raises
    `ValueError` that names the line, or what `check_orders` finds."""
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    orders = [tuple(_ops(row, stage)) for stage, row in enumerate(rows)]
    if num_micro_batches is None:
        num_micro_batches = 1 + max((op.micro_batch for order in orders for op in order), default=0)
    check_orders(orders, num_stages=num_stages, num_micro_batches=num_micro_batches)
    return orders


def _ops(row: Sequence[str], stage: int) -> Iterator[Op]:
    for column, cell in enumerate(row):
        if not (written := cell.strip()):
            continue
        where = f"line {stage + 1}, cell {column + 1} ({written})"
        found = _CELL.fullmatch(written)
        if found is None:
            raise ValueError(
                f"{where}: a cell is a stage, one of F, I, W or B, and a micro-batch, such as 1F0"
            )
        if int(found[1]) != stage:
            raise ValueError(
                f"{where}: line {stage + 1} is that of stage {stage}, one stage a line"
            )
        number = int(found[3])
        if found[2] == "B":
            yield from (Op("I", number), Op("W", number))
        else:
            yield Op(_KIND[found[2]], number)


_KIND: dict[str, Kind] = {kind: kind for kind in KINDS}
