"""A stage of a trainer whose processes have met: its executor, and links to the neighbours."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.core.pipeline import Chooser, Kind, ReadyFirst
from rollpacker.trainer.pipeline.cut import Place
from rollpacker.trainer.pipeline.executor import TIMEOUT_S, Executor
from rollpacker.trainer.pipeline.links.direct_link import (
    DirectReceiver,
    DirectSender,
    direct_group,
)
from rollpacker.trainer.pipeline.links.host_receiver import LOOPBACK, HostReceiver
from rollpacker.trainer.pipeline.links.host_route import decode_routes, encode_routes
from rollpacker.trainer.pipeline.links.host_sender import HostSender
from rollpacker.trainer.pipeline.links.link import Border, Receiver, Sender
from rollpacker.trainer.pipeline.peers import GroupPeers
from rollpacker.trainer.pipeline.stage import Stage
from rollpacker.trainer.sharding import Shards
from rollpacker.trainer.trainer import PipelineConfig


def connected_stage(shards: Shards, config: PipelineConfig) -> Stage:
    """This rank's. A joint call of all of them. The links end with the process."""
    mesh = shards.pipelines
    assert mesh is not None
    connected = Connected(
        mesh.mesh.T.tolist(), kind=config.links, device=shards.device, host=_own_address()
    )
    return Stage(
        connected.place,
        layers=() if config.layers == "auto" else config.layers,
        peers=GroupPeers(mesh.get_group("stage")),
        executor=connected.executor,
        new_chooser=partial(new_chooser, connected.place, config),
    )


def new_chooser(place: Place, config: PipelineConfig, tokens: Sequence[int]) -> Chooser:
    """For a sweep over micro-batches of so many tokens: what is ready, under the cap of live
    tokens. Raises `ValueError` if a micro-batch is larger than the cap."""
    longest, cap = max(tokens, default=0), config.live_tokens
    if cap == "auto":
        caps = [2 * (place.count - stage) * longest for stage in range(place.count)]
    elif longest > cap:
        raise ValueError(
            f"train.pipeline.live_tokens={cap} is less than a micro-batch of {longest} tokens: "
            "raise it, or lower train.micro_batch_tokens or the longest sample"
        )
    else:
        caps = [cap] * place.count
    return ReadyFirst(place.index, caps=caps)


class Connected:
    """`executor`, ready for sweeps. A joint call of all ranks of the job: `ranks` are those of
    every pipeline (one for each shard of a stage), by stage."""

    def __init__(
        self,
        ranks: list[list[int]],
        *,
        kind: Literal["host", "direct"],
        device: torch.device,
        host: str = LOOPBACK,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        rank = dist.get_rank()
        self.ranks = next(pipeline for pipeline in ranks if rank in pipeline)
        self.place = Place(index=self.ranks.index(rank), count=len(self.ranks))
        self.executor = Executor(self.place, timeout_s=timeout_s)
        self._device = device
        self._ends: list[Sender | Receiver] = []
        connect = self._connect_direct if kind == "direct" else partial(self._connect_host, host)
        self.to_next: Sender | None
        self.to_previous: Sender | None
        self.to_next, self.to_previous = connect(ranks)
        self.executor.connect(self.to_next, self.to_previous)

    def close(self) -> None:
        """End all links; after the last sweep."""
        for end in self._ends:
            end.close()

    def _connect_host(
        self, host: str, ranks: list[list[int]]
    ) -> tuple[HostSender | None, HostSender | None]:
        receivers = {
            kind: HostReceiver(
                self._border(stage, self.place.index),
                on_arrival=self._arrive(kind),
                on_lost=self.executor.fail,
                hosts=[host],
                device=self._device,
            )
            for kind, stage in self._sources().items()
        }
        own = {kind: encode_routes(receiver.routes) for kind, receiver in receivers.items()}
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, own)
        senders = {
            kind: HostSender(
                self._border(self.place.index, stage),
                decode_routes(everybodys[self.ranks[stage]][kind]),
                on_lost=self.executor.fail,
            )
            for kind, stage in self._targets().items()
        }
        self._ends += [*senders.values(), *receivers.values()]
        return senders.get("F"), senders.get("I")

    def _connect_direct(
        self, ranks: list[list[int]]
    ) -> tuple[DirectSender | None, DirectSender | None]:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        groups = {
            (before, after): direct_group((before, after), backend)
            for pipeline in ranks
            for one, other in itertools.pairwise(pipeline)
            for before, after in ((one, other), (other, one))
        }
        own = self.ranks[self.place.index]
        senders = {
            kind: DirectSender(
                self._border(self.place.index, stage),
                groups[own, self.ranks[stage]],
                on_lost=self.executor.fail,
                device=self._device,
            )
            for kind, stage in self._targets().items()
        }
        receivers = [
            DirectReceiver(
                self._border(stage, self.place.index),
                groups[self.ranks[stage], own],
                on_arrival=self._arrive(kind),
                on_lost=self.executor.fail,
                device=self._device,
            )
            for kind, stage in self._sources().items()
        ]
        self._ends += [*senders.values(), *receivers]
        return senders.get("F"), senders.get("I")

    def _sources(self) -> dict[Kind, int]:
        """Which stages hidden states and gradients come from."""
        before = {} if self.place.is_first else {"F": self.place.index - 1}
        after = {} if self.place.is_last else {"I": self.place.index + 1}
        return before | after  # type: ignore[return-value]  # the literals are kinds

    def _targets(self) -> dict[Kind, int]:
        """Which stages they go to."""
        after = {} if self.place.is_last else {"F": self.place.index + 1}
        before = {} if self.place.is_first else {"I": self.place.index - 1}
        return after | before  # type: ignore[return-value]  # the literals are kinds

    def _border(self, sending: int, receiving: int) -> Border:
        other = receiving if sending == self.place.index else sending
        return Border(stages=(sending, receiving), peer=self.ranks[other])

    def _arrive(self, kind: Kind) -> Any:
        def arrive(number: int, tensor: Tensor) -> None:
            self.executor.arrive(kind, number, tensor)

        return arrive


def _own_address() -> str:
    """This machine's on the way to the ranks' store, where they have all met. Sends nothing."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])
