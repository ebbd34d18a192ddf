"""Agents of this process, with a network between that loses what it is told to."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollpacker.weights.between_hosts.spread import OwnHost, Spread
from rollpacker.workers.hosts.agent import Agent
from rollpacker.workers.hosts.remote_host import Gone, RemoteHost, Unavailable

LEASE_S = 60.0


class Net:
    """Between a run and its agents."""

    def __init__(self, seed: int = 0, lost: float = 0.0) -> None:
        """`lost`: so many answers are lost, half of them before the call was made."""
        self.is_cut = threading.Event()
        self.agents: list[Agent] = []
        self.calls: list[str] = []
        self._random, self._lost = random.Random(seed), lost

    def host(self, name: str = "there", heartbeat_s: float = 5.0) -> RemoteHost:
        return self.remote(name, Spread(), heartbeat_s)

    def remote(self, name: str, spread: Spread, heartbeat_s: float = 5.0) -> RemoteHost:
        """A host of a run that has this spread, and the run's own host in it."""
        if "" not in spread._members:
            OwnHost(spread)
        return RemoteHost(name, self.connect, spread, heartbeat_s=heartbeat_s, address="127.0.0.1")

    def connect(self, predecessor: int) -> InProcess:
        self.agents.append(Agent(lease_s=LEASE_S, end=lambda: None))
        return InProcess(self, self.agents[-1])

    def loses(self) -> str:
        draw = self._random.random()
        return "" if draw >= self._lost else "call" if draw < self._lost / 2 else "answer"


class InProcess:
    """Meets `Calls`; every call in a thread of its own, but `say` one after the other."""

    def __init__(self, net: Net, agent: Agent) -> None:
        self._net, self._agent = net, agent
        self._saying = threading.Lock()
        self._is_over = False

    def begin(self, method: str, *arguments: Any) -> Pending:
        if self._is_over:
            raise Gone("the agent was ended")
        pending = Pending()
        self._net.calls.append(method)
        threading.Thread(target=self._do, args=(pending, method, arguments), daemon=True).start()
        return pending

    def _do(self, pending: Pending, method: str, arguments: tuple[Any, ...]) -> None:
        lost = self._net.loses()
        if self._net.is_cut.is_set():
            return
        if lost == "call":
            pending.set_exception(Unavailable("lost on its way"))
            return
        work: Callable[..., Any] = getattr(self._agent, method)
        try:
            if method == "say":
                with self._saying:
                    result = work(*arguments)
            else:
                result = work(*arguments)
        except Exception as error:
            pending.set_exception(error)
            return
        if lost == "answer":
            pending.set_exception(Unavailable("its answer was lost"))
        elif not self._net.is_cut.is_set():
            pending.set_result(result)

    def end(self) -> None:
        self._is_over = True
        if not self._net.is_cut.is_set():
            self._agent.close()


class Pending(Future[Any]):
    def result(self, timeout_s: float | None = None) -> Any:
        return super().result(timeout_s)
