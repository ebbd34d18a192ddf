"""A step over host links, whose connections are killed all the time, is the same step."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rollpacker.pipeline.links.host_receiver import HostReceiver
from rollpacker.pipeline.links.host_sender import HostSender
from rollpacker.pipeline.links.link import Border, LinkLost
from tests.trainer.pipeline.relay import Relay
from tests.trainer.pipeline.stages import in_stages
from tests.trainer.pipeline.test_stages import PPO, case_of, of_stage, scores_of, union
from tests.trainer.test_partition import Partition

BORDER = Border(stages=(0, 1), peer=1)
NUM_KILLS = 50


class RelayedLink:
    """A host link through a relay."""

    def __init__(self, arrive: Callable[[int, Tensor], None]) -> None:
        self.lost: list[LinkLost] = []
        self._receiver = HostReceiver(BORDER, on_arrival=arrive, on_lost=self.lost.append)
        route = self._receiver.routes[0]
        self.relay = Relay(route.host, route.port)
        routes = [dataclasses.replace(route, port=self.relay.port)]
        self._sender = HostSender(BORDER, routes, on_lost=self.lost.append)

    def send(self, number: int, tensor: Tensor) -> None:
        self._sender.send(number, tensor)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
        self.relay.close()


def test_killed_connections_change_no_bit_of_a_step() -> None:
    case, scores = case_of(PPO, 3), scores_of(PPO, 3)
    how = Partition(layout="packed", budget=40)
    links: list[RelayedLink] = []

    def new_link(arrive: Callable[[int, Tensor], None]) -> RelayedLink:
        links.append(RelayedLink(arrive))
        return links[-1]

    def step(**others: object) -> dict[str, dict[str, Tensor]]:
        answers = in_stages((2, 1), lambda stage: of_stage(stage, case, how, scores), **others)  # type: ignore[arg-type]
        return union([gradients for gradients, _ in answers])

    undisturbed = step()
    random_ = random.Random(1)
    is_over = threading.Event()

    def num_killed() -> int:
        return sum(link.relay.num_killed for link in tuple(links))

    def kill() -> None:
        while not is_over.wait(random_.random() * 0.01) and num_killed() < NUM_KILLS:
            for link in tuple(links)[-2:]:
                link.relay.kill(random_)

    killing = threading.Thread(target=kill)
    killing.start()
    until = time.monotonic() + 120
    try:
        while num_killed() < NUM_KILLS:
            assert time.monotonic() < until, "no connections to kill"
            for model, gradients in step(new_link=new_link).items():
                for name, gradient in gradients.items():
                    assert torch.equal(undisturbed[model][name], gradient), (model, name)
    finally:
        is_over.set()
        killing.join()
    errors = [str(error) for link in links for error in link.lost]
    assert all("closed there" in error for error in errors), errors  # after the step
