"""All links of one stage, opened together with those of the other stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.trainer.pipeline.links.direct_link import (
    DirectReceiver,
    DirectSender,
    direct_group,
)
from rollpacker.trainer.pipeline.links.host_receiver import LOOPBACK, HostReceiver
from rollpacker.trainer.pipeline.links.host_route import decode_routes, encode_routes
from rollpacker.trainer.pipeline.links.host_sender import HostSender
from rollpacker.trainer.pipeline.links.link import Border, LinkLost, Receiver, Sender

LinkKind = Literal["direct", "host"]
What = Literal["F", "I"]
"""Hidden states, to the next stage, or gradients, to the one before."""
WHATS: tuple[What, ...] = ("F", "I")
MAX_ROUTES_BYTES = 1024
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinks:
    """What one stage sends with and receives by. None: there is no such stage."""

    to_next: Sender | None
    to_previous: Sender | None
    from_previous: Receiver | None
    from_next: Receiver | None

    def close(self) -> None:
        """Senders first: those at the other end of a direct link wait for them. Idempotent."""
        for end in (self.to_next, self.to_previous, self.from_previous, self.from_next):
            if end is not None:
                end.close()


def open_links(
    kind: LinkKind,
    group: dist.ProcessGroup,
    *,
    on_arrival: Callable[[What, int, Tensor], None],
    on_lost: Callable[[LinkLost], None],
    device: torch.device = _CPU,
    hosts: Sequence[str] = (LOOPBACK,),
    num_connections: int = 2,
) -> StageLinks:
    """Open the links of this process's stage. A joint call of all processes of the trainer; those
    of `group` (gloo) have the stages that this one has borders with, in order.

    `hosts`: this machine's addresses for host links, a route each; as many on every stage.
    `num_connections`: of each host link (`host_route.num_connections`).
    """
    ranks = dist.get_process_group_ranks(group)
    stage = dist.get_group_rank(group, dist.get_rank())
    ins, outs = _borders(stage, ranks)
    receivers: dict[What, Receiver] = {}
    senders: dict[What, Sender] = {}
    if kind == "direct":
        backend = "nccl" if device.type == "cuda" else "gloo"
        groups = {what: direct_group(backend) for what in WHATS}
        for what, border in ins.items():
            receivers[what] = DirectReceiver(
                *(border, groups[what]),
                on_arrival=functools.partial(on_arrival, what),
                on_lost=on_lost,
                device=device,
            )
        for what, border in outs.items():
            senders[what] = DirectSender(border, groups[what], on_lost=on_lost, device=device)
    else:
        own: dict[What, bytes] = {}
        for what, border in ins.items():
            receivers[what] = receiver = HostReceiver(
                border,
                on_arrival=functools.partial(on_arrival, what),
                on_lost=on_lost,
                hosts=hosts,
                device=device,
            )
            own[what] = encode_routes(receiver.routes)
        of_all = _exchanged(own, group)
        for what, border in outs.items():
            routes = decode_routes(of_all[border.stages[1]][what], _sources(hosts))
            senders[what] = HostSender(
                border, routes, on_lost=on_lost, num_connections=num_connections
            )
    return StageLinks(
        to_next=senders.get("F"),
        to_previous=senders.get("I"),
        from_previous=receivers.get("F"),
        from_next=receivers.get("I"),
    )


def _borders(stage: int, ranks: Sequence[int]) -> tuple[dict[What, Border], dict[What, Border]]:
    """What comes to this stage, and what goes out."""
    ins: dict[What, Border] = {}
    outs: dict[What, Border] = {}
    if stage > 0:
        ins["F"] = Border(stages=(stage - 1, stage), peer=ranks[stage - 1])
        outs["I"] = Border(stages=(stage, stage - 1), peer=ranks[stage - 1])
    if stage < len(ranks) - 1:
        ins["I"] = Border(stages=(stage + 1, stage), peer=ranks[stage + 1])
        outs["F"] = Border(stages=(stage, stage + 1), peer=ranks[stage + 1])
    return ins, outs


def _sources(hosts: Sequence[str]) -> Sequence[str]:
    """With one address the kernel chooses."""
    return hosts if len(hosts) > 1 else ()


def _exchanged(own: Mapping[What, bytes], group: dist.ProcessGroup) -> list[dict[What, bytes]]:
    """What every stage told all others, by stage."""
    padded = b"".join(own.get(what, b"").ljust(MAX_ROUTES_BYTES, b"\0") for what in WHATS)
    assert len(padded) == len(WHATS) * MAX_ROUTES_BYTES, "too many routes"
    said = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    of_all = [torch.empty_like(said) for _ in range(group.size())]
    dist.all_gather(of_all, said, group=group)
    return [
        {
            what: row.numpy().tobytes().rstrip(b"\0")
            for what, row in zip(WHATS, one.view(len(WHATS), -1), strict=True)
        }
        for one in of_all
    ]
