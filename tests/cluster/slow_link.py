"""A trainer's host and others behind a slow link, which carry weights: for `test_link.py` and
`benchmarks/cluster_link.py`.

    trainer's host ==slow link==> switch --fast--> host 1 .. host R

Hosts are network namespaces of this machine (`netns.py`), each with one process; the link is held
by tc's token bucket, on the trainer's side and on the switch's. Calls to hosts go by pipes here, by
ray in a run. As root.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollpacker.weights.between_hosts.arriving import Shipment
from rollpacker.weights.between_hosts.host_weights import HostWeights
from rollpacker.weights.between_hosts.spread import Spread
from rollpacker.weights.buffer import ALIGNMENT, BufferLayout, WeightBuffer, WeightSource
from tests.cluster.netns import Network

GLOO_PORT = 6400
ARMS = ("published", "each pulls", "gloo, each", "gloo broadcast")
FAULTS = ("link cut, 3 s", "link cut, 12 s", "host cut off, 3 s", "host killed")
"""The last one leaves one host less."""


# -- a host ----------------------------------------------------------------------------------------


class Served(HostWeights):
    """What the process of a host does."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer: WeightBuffer | None = None
        self._received: torch.Tensor | None = None

    def write_version(self, version: int, num_bytes: int) -> BufferLayout:
        """As a trainer does: random bytes."""
        if self._buffer is None:
            tensors = [("weights", torch.zeros(num_bytes, dtype=torch.uint8))]
            self._buffer = WeightBuffer.create(tensors)
        generator = torch.Generator().manual_seed(version)
        with self._buffer.writing(version) as tensors:
            tensors["weights"].view(torch.int64).random_(generator=generator)
        return self._buffer.layout

    def sha256(self, source: WeightSource) -> str:
        """Of weights of this host that are whole."""
        buffer = WeightBuffer(source.layout)
        with buffer.reading(source.version) as tensors:
            return hashlib.sha256(tensors["weights"].numpy()).hexdigest()

    def interface_bytes(self) -> int:
        """Sent by it so far."""
        return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())

    def processor_s(self) -> float:
        return time.process_time()

    def gloo_begin(self, address: str, rank: int, size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        store = dist.TCPStore(address, GLOO_PORT, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.barrier()

    def gloo(self, arm: str, rank: int, num_bytes: int) -> None:
        if rank == 0:
            assert self._buffer is not None
            model = self._buffer.tensors["weights"]
        else:
            if self._received is None:
                self._received = torch.zeros(num_bytes, dtype=torch.uint8)
            model = self._received
        if arm == "gloo broadcast":
            dist.broadcast(model, 0)
        elif rank:
            dist.recv(model, 0)
        else:
            for sent in [dist.isend(model, to) for to in range(1, dist.get_world_size())]:
                sent.wait()

    def gloo_sha256(self) -> str:
        assert self._received is not None
        return hashlib.sha256(self._received.numpy()).hexdigest()


def serve() -> None:
    """Do what comes by stdin, each in a thread of its own; answers go to stdout."""
    torch.set_num_threads(1)
    served, said = Served(), threading.Lock()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nobody else writes there

    def do(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = getattr(served, method)(*arguments)
        except Exception as error:
            result = error
        with said:
            pickle.dump((number, result), output)
            output.flush()

    while True:
        try:
            threading.Thread(target=do, args=pickle.load(sys.stdin.buffer), daemon=True).start()
        except EOFError:
            return


class Host:
    """A host's process, as the run sees it; meets `Member`."""

    def __init__(self, network: Network, number: int) -> None:
        self.address = network.addresses[number]
        self.name = "trainer" if number == 0 else f"host {number}"
        self.process = network.popen(
            number,
            [sys.executable, "-m", "tests.cluster.slow_link"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self._lock = threading.Lock()
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._number = 0
        self._is_over = False
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        while not self._is_over:
            try:
                number, result = pickle.load(self.process.stdout)  # type: ignore[arg-type]
            except (EOFError, OSError, pickle.UnpicklingError):
                self._is_over = True
            else:
                self._answers[number] = result
            with self._changed:
                self._changed.notify_all()

    def agent(self) -> tuple[object, Callable[..., Any]]:
        return self, self.call

    def call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self._number += 1
            number = self._number
            pickle.dump((number, method, arguments), self.process.stdin)  # type: ignore[arg-type]
            self.process.stdin.flush()  # type: ignore[union-attr]
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._is_over)
        if number not in self._answers:
            raise OSError(f"{self.name} is lost")
        result = self._answers.pop(number)
        if isinstance(result, Exception):
            raise result
        return result


# -- the arms --------------------------------------------------------------------------------------


class Pools:
    """A trainer's host and R others, and what is measured of a transfer."""

    def __init__(self, num_hosts: int, mbit: float, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.network = Network(num_hosts + 1)
        self._mbit = mbit
        self._version = 0

    def __enter__(self) -> Pools:
        self.network.__enter__()
        trainers = self.network._name(0)
        for where, device in ((trainers, "eth0"), (self.network.switch, "p0")):
            held = ("rate", f"{self._mbit:g}mbit", "burst", "256kb", "latency", "100ms")
            order = ["tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *held]
            subprocess.run(order, check=True)
        self.trainer, *self.hosts = (
            Host(self.network, number) for number in range(len(self.network.addresses))
        )
        self.spread = Spread()
        self.spread.add("trainer", self.trainer)
        return self

    def __exit__(self, *_: object) -> None:
        self.network.__exit__()

    def all_at_once(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Each `(host, method, arguments...)`. Returns what they returned or raised."""
        found: list[Any] = [None] * len(calls)

        def do(number: int) -> None:
            host, *call = calls[number]
            try:
                found[number] = host.call(*call)
            except Exception as error:
                found[number] = error

        threads = [threading.Thread(target=do, args=(n,)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def begin_gloo(self) -> None:
        every, address = [self.trainer, *self.hosts], self.trainer.address
        calls = [(host, "gloo_begin", address, n, len(every)) for n, host in enumerate(every)]
        assert self.all_at_once(*calls) == [None] * len(every)

    def transfer(
        self, arm: str, amid: Callable[[], None] | None = None, after: float = 0.4
    ) -> dict[str, Any]:
        """`amid` is done when that part of the model has crossed."""
        self._version += 1
        layout = self.trainer.call("write_version", self._version, self.num_bytes)
        source = WeightSource(version=self._version, layout=replace(layout, host="trainer"))
        expected = self.trainer.call("sha256", WeightSource(version=self._version, layout=layout))
        every = [self.trainer, *self.hosts]
        before = [host.call("interface_bytes") for host in every]
        worked = [host.call("processor_s") for host in every]
        if amid is not None:
            threading.Thread(target=self._do_amid, args=(amid, before[0], after)).start()
        began_s = time.monotonic()
        failed = self._do(arm, source)
        seconds = time.monotonic() - began_s
        living = [host for host in self.hosts if host.name not in failed]
        sums = [self._sum(arm, host, source) for host in living]
        assert sums == [expected] * len(living), "other weights have arrived"
        numbers = {host: number for number, host in enumerate(every)}
        sent = [host.call("interface_bytes") - before[numbers[host]] for host in living]
        crossed = self.trainer.call("interface_bytes") - before[0]
        spent = [
            host.call("processor_s") - worked[numbers[host]] for host in (self.trainer, *living)
        ]
        return {
            "arm": arm,
            "hosts": len(self.hosts),
            "seconds": round(seconds, 3),
            "models_across": round(crossed / self.num_bytes, 4),
            "models_between_hosts": round(sum(sent) / self.num_bytes, 3),
            "processor_s": round(sum(spent), 2),
            "failed": sorted(failed),
        }

    def _do(self, arm: str, source: WeightSource) -> dict[str, Exception]:
        if arm == "published":
            return self.spread.publish([source], self.hosts)
        if arm == "each pulls":
            return self._each_pulls(source)
        every = [self.trainer, *self.hosts]
        calls = [(host, "gloo", arm, n, self.num_bytes) for n, host in enumerate(every)]
        assert self.all_at_once(*calls) == [None] * len(every)
        return {}

    def _each_pulls(self, source: WeightSource) -> dict[str, Exception]:
        self.spread._num_shipments += 1
        ports = [host.call("port", host.address) for host in self.hosts]
        shipment = Shipment(
            number=self.spread._num_shipments,
            layout=source.layout,
            head=self.trainer.call("read", source.layout, 0, ALIGNMENT),
            sources=(self.trainer.call("port", self.trainer.address),),
            takers=(),
            patience_s=60.0,
        )
        self.trainer.call("send", shipment.number, source.layout, shipment.head)
        found = self.all_at_once(
            *(
                (host, "take", replace(shipment, takers=(port,)), 0)
                for host, port in zip(self.hosts, ports, strict=True)
            )
        )
        assert all(isinstance(one, BufferLayout) for one in found), found
        return {}

    def _sum(self, arm: str, host: Host, source: WeightSource) -> str:
        if arm.startswith("gloo"):
            return str(host.call("gloo_sha256"))
        there = replace(source, layout=host.call("copy", source.layout))
        return str(host.call("sha256", there))

    def _do_amid(self, amid: Callable[[], None], before: int, after: float) -> None:
        while self.trainer.call("interface_bytes") - before < after * self.num_bytes:
            time.sleep(0.02)
        amid()

    def fault(self, name: str) -> dict[str, Any]:
        """What follows one in the middle of a transfer."""
        last = len(self.hosts)
        amid = {
            "link cut, 3 s": lambda: self._cut(0, 3.0),
            "link cut, 12 s": lambda: self._cut(0, 12.0),
            "host cut off, 3 s": lambda: self._cut(last, 3.0),
            "host killed": lambda: self.network.kill_all(last),
        }
        return {"fault": name, **self.transfer("published", amid[name])}

    def _cut(self, host: int, seconds: float) -> None:
        self.network.cut(host)
        time.sleep(seconds)
        self.network.mend(host)


if __name__ == "__main__":
    serve()
