"""Makes a pipeline stage's executor and its links, once the trainer's processes have met."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rollpacker.pipeline.links.direct_link import (
    DirectReceiver,
    DirectSender,
    direct_group,
)
from rollpacker.pipeline.links.host_receiver import LOOPBACK, HostReceiver
from rollpacker.pipeline.links.host_route import decode_routes, encode_routes, own_addresses
from rollpacker.pipeline.links.host_sender import HostSender
from rollpacker.pipeline.links.link import ArrivalTimes, Border, LinkLost
from rollpacker.pipeline.links.switched import SwitchedReceiver, SwitchedSender
from rollpacker.pipeline.plan.choosers import Kind
from rollpacker.pipeline.plan.link_choice import LinkKind
from rollpacker.pipeline.stages.clock import StageClock
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.executor import TIMEOUT_S, Executor
from rollpacker.pipeline.stages.orders import Orders
from rollpacker.pipeline.stages.overseer import first_arrangement
from rollpacker.pipeline.stages.peers import GroupPeers
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.trainer.sharding import Shards
from rollpacker.trainer.trainer import PipelineConfig


def connected_stage(shards: Shards, config: PipelineConfig, csv: str | None) -> Stage:
    """Return this rank's stage, with links that end with the process. All ranks must make this call
    together. `csv`: text of the file that `config.order` names; None if it names none."""
    mesh = shards.pipelines
    assert mesh is not None
    connected = Connected(
        mesh.mesh.T.tolist(),
        kind=first_arrangement(config).links,
        device=shards.device,
        hosts=() if config.links == "direct" else own_addresses(config.interfaces),
    )
    peers = GroupPeers(mesh.get_group("stage"))
    return Stage(
        connected.place,
        layers=() if config.layers == "auto" else config.layers,
        peers=peers,
        executor=connected.executor,
        new_chooser=Orders(connected.place, config, peers=peers, csv=csv).new_chooser,
        links=connected,
        shards=None if config.relayout == "never" else shards.own_replica,
    )


class Connected:
    """A stage's `executor` and links; all ranks make theirs together. `ranks`: those of each
    pipeline, by stage. `kind`: that of links at first. `hosts`: this host's addresses."""

    def __init__(
        self,
        ranks: list[list[int]],
        *,
        kind: LinkKind,
        device: torch.device,
        hosts: Sequence[str] = (LOOPBACK,),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        rank = dist.get_rank()
        self._pipelines = ranks
        self.ranks = next(pipeline for pipeline in ranks if rank in pipeline)
        self.place = Place(index=self.ranks.index(rank), count=len(self.ranks))
        clock = StageClock(device)
        self.executor = Executor(self.place, timeout_s=timeout_s, clock=clock)
        self._device = device
        self._hosts = hosts
        """Addresses of this host. Other stages can reach this one over any of them."""
        self._lost: dict[LinkKind, LinkLost] = {}
        """By kind of link, the error of a lost link: raised once that kind is used (again)."""
        self._made: set[LinkKind] = set()
        self._senders = {kind: SwitchedSender() for kind in self._targets()}
        self._receivers = {
            kind: SwitchedReceiver(partial(self.executor.arrive, kind)) for kind in self._sources()
        }
        self._ends: list[SwitchedSender | SwitchedReceiver] = [
            *self._senders.values(),
            *self._receivers.values(),
        ]
        self.use(kind)
        self.to_next, self.to_previous = self._senders.get("F"), self._senders.get("I")
        self.executor.connect(self.to_next, self.to_previous)

    def use(self, kind: LinkKind) -> None:
        """Use this kind of links, direct or host, from the next message on. All ranks make this
        call together, with nothing on its way; messages are sent after all have returned."""
        self._kind = kind
        if kind not in self._made:
            (self._connect_host if kind == "host" else self._connect_direct)()
            self._made.add(kind)
        for end in self._ends:
            end.use(kind)
        if kind in self._lost:
            self.executor.fail(self._lost[kind])

    @property
    def direct_lost(self) -> bool:
        """Whether a direct link was lost while host links were in use."""
        return "direct" in self._lost

    def arrivals(self) -> dict[Kind, list[ArrivalTimes]]:
        """Return the times of hidden states (F) and gradients (I) arrived since the last call.
        Their numbers count from the start."""
        return {kind: receiver.times() for kind, receiver in self._receivers.items()}

    def close(self) -> None:
        """Close all links of this stage, after the last sweep."""
        for end in self._ends:
            end.close()

    def _connect_host(self) -> None:
        receivers = {
            kind: HostReceiver(
                self._border(stage, self.place.index),
                on_arrival=self._receivers[kind].arrival_over("host"),
                on_lost=partial(self._lose, "host"),
                hosts=self._hosts,
                device=self._device,
            )
            for kind, stage in self._sources().items()
        }
        own = {kind: encode_routes(receiver.routes) for kind, receiver in receivers.items()}
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, own)
        # With one address the kernel knows best from where it is reached.
        sources = self._hosts if len(self._hosts) > 1 else ()
        for kind, stage in self._targets().items():
            sender = HostSender(
                self._border(self.place.index, stage),
                decode_routes(everybodys[self.ranks[stage]][kind], sources),
                on_lost=partial(self._lose, "host"),
            )
            self._senders[kind].add("host", sender)
        for kind, receiver in receivers.items():
            self._receivers[kind].add("host", receiver)

    def _connect_direct(self) -> None:
        assert self._device.type == "cpu", "direct links carry tensors of a CPU"
        groups = {
            (before, after): direct_group((before, after))
            for pipeline in self._pipelines
            for one, other in itertools.pairwise(pipeline)
            for before, after in ((one, other), (other, one))
        }
        own = self.ranks[self.place.index]
        for kind, stage in self._targets().items():
            sender = DirectSender(
                self._border(self.place.index, stage),
                groups[own, self.ranks[stage]],
                on_lost=partial(self._lose, "direct"),
            )
            self._senders[kind].add("direct", sender)
        for kind, stage in self._sources().items():
            receiver = DirectReceiver(
                self._border(stage, self.place.index),
                groups[self.ranks[stage], own],
                on_arrival=self._receivers[kind].arrival_over("direct"),
                on_lost=partial(self._lose, "direct"),
            )
            self._receivers[kind].add("direct", receiver)

    def _lose(self, kind: LinkKind, error: LinkLost) -> None:
        """Record a lost link. Sweeps fail now if its kind is in use, else once it is used again."""
        self._lost[kind] = error  # first: `use` looks after it has changed the kind
        if kind == self._kind:
            self.executor.fail(error)

    def _sources(self) -> dict[Kind, int]:
        """Numbers of the stages from which hidden states ("F") and gradients ("I") come here."""
        before = {} if self.place.is_first else {"F": self.place.index - 1}
        after = {} if self.place.is_last else {"I": self.place.index + 1}
        return before | after  # type: ignore[return-value]  # the literals are kinds

    def _targets(self) -> dict[Kind, int]:
        """Numbers of the stages to which hidden states ("F") and gradients ("I") go."""
        after = {} if self.place.is_last else {"F": self.place.index + 1}
        before = {} if self.place.is_first else {"I": self.place.index - 1}
        return after | before  # type: ignore[return-value]  # the literals are kinds

    def _border(self, sending: int, receiving: int) -> Border:
        other = receiving if sending == self.place.index else sending
        return Border(stages=(sending, receiving), peer=self.ranks[other])
