"""What the links between pipeline stages carry, over loopback: direct ones (torch.distributed,
gloo) and host ones (TCP), between two processes.

    stream      messages one after the other: MB/s, and microseconds of each
    round trip  a message there and as large a one back, one at a time: microseconds of one way
    cut route   a host link with two routes, of which the first is cut in the middle of a stream:
                seconds until messages arrive again

Both kinds take turns. Exit code 1 if a cut takes more than 5 s.

    python benchmarks/pipeline_links.py [--rounds 7]          # 1 minute
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import queue
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write_result
from torch import Tensor

from rollpacker.pipeline.links.direct_link import (
    DirectReceiver,
    DirectSender,
    direct_group,
)
from rollpacker.pipeline.links.host_receiver import HostReceiver
from rollpacker.pipeline.links.host_route import decode_routes, encode_routes
from rollpacker.pipeline.links.host_sender import HostSender
from rollpacker.pipeline.links.link import Border, LinkLost, Receiver, Sender

KINDS = ("direct", "host")
SIZES = {64 << 10: 200, 1 << 20: 60, 16 << 20: 8}
"""Messages of a stream by the bytes of each."""
ROUND_TRIPS = 10
MAX_CUT_S = 5.0


class End:
    """One process's end of the links of one kind, there and back."""

    def __init__(self, kind: str, rank: int, store: dist.TCPStore) -> None:
        self._arrived: queue.SimpleQueue[Tensor | LinkLost] = queue.SimpleQueue()
        self._num_sent = 0
        there = Border(stages=(rank, 1 - rank), peer=1 - rank)
        back = Border(stages=(1 - rank, rank), peer=1 - rank)
        self._sender: Sender
        self._receiver: Receiver
        if kind == "direct":
            groups = [direct_group((0, 1)), direct_group((0, 1))]
            self._receiver = DirectReceiver(
                back, groups[1 - rank], on_arrival=self._arrive, on_lost=self._arrived.put
            )
            self._sender = DirectSender(there, groups[rank], on_lost=self._arrived.put)
        else:
            receiver = HostReceiver(back, on_arrival=self._arrive, on_lost=self._arrived.put)
            store.set(f"routes {rank}", encode_routes(receiver.routes))
            routes = decode_routes(store.get(f"routes {1 - rank}"))
            self._receiver = receiver
            self._sender = HostSender(there, routes, on_lost=self._arrived.put)

    def _arrive(self, _number: int, tensor: Tensor) -> None:
        self._arrived.put(tensor)

    def send(self, tensor: Tensor) -> None:
        self._sender.send(self._num_sent, tensor)
        self._num_sent += 1

    def receive(self) -> Tensor:
        found = self._arrived.get(timeout=60)
        if isinstance(found, LinkLost):
            raise found
        return found

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def process(rank: int, port: int, num_rounds: int, output: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ends = {kind: End(kind, rank, store) for kind in KINDS}
    seconds: dict[str, list[float]] = {}
    for _ in range(num_rounds + 1):
        for num_bytes, num_messages in SIZES.items():
            message = torch.ones(num_bytes, dtype=torch.uint8)
            for kind, end in ends.items():
                for way, measure in (("stream", stream_s), ("round trip", one_way_s)):
                    dist.barrier()
                    found = measure(end, rank, message, num_messages)
                    seconds.setdefault(f"{kind} {way} {num_bytes}", []).append(found)
    dist.barrier()
    for end in ends.values():
        end.close()
    if rank == 0:
        warm = {name: values[1:] for name, values in seconds.items()}
        output.write_text(json.dumps(warm))
    dist.destroy_process_group()


def stream_s(end: End, rank: int, message: Tensor, num_messages: int) -> float:
    """Seconds of each message."""
    started = time.perf_counter()
    if rank == 0:
        for _ in range(num_messages):
            end.send(message)
        end.receive()
    else:
        for _ in range(num_messages):
            end.receive()
        end.send(torch.zeros(1))
    return (time.perf_counter() - started) / num_messages


def one_way_s(end: End, rank: int, message: Tensor, num_messages: int) -> float:
    started = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        if rank == 0:
            end.send(message)
            end.receive()
        else:
            end.receive()
            end.send(message)
    return (time.perf_counter() - started) / ROUND_TRIPS / 2


class Cable:
    """Passes a route's bytes on until it is cut; then it swallows them, and greets nobody."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._listening = socket.create_server((host, 0))
        self.port: int = self._listening.getsockname()[1]
        self.is_cut = threading.Event()
        self._pass_on(self._accept)

    def _pass_on(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        while not self.is_cut.is_set():
            near, _ = self._listening.accept()
            far = socket.create_connection(self._to)
            self._pass_on(self._pump, near, far)
            self._pass_on(self._pump, far, near)

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        while data := one.recv(1 << 16):
            if self.is_cut.is_set():
                threading.Event().wait()  # holds on to both for the rest of the process
            other.sendall(data)


def seconds_after_cut() -> float:
    """Until the next message arrives, of 1 MB each; all arrive in order."""
    border = Border(stages=(0, 1), peer=1)
    arrived: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
    receiver = HostReceiver(
        border,
        on_arrival=lambda number, _: arrived.put((number, time.monotonic())),
        on_lost=print,
        hosts=("127.0.0.1", "127.0.0.2"),
    )
    first, second = receiver.routes
    cable = Cable(first.host, first.port)
    routes = [dataclasses.replace(first, port=cable.port), second]
    sender = HostSender(border, routes, on_lost=print)
    message = torch.ones(1 << 20, dtype=torch.uint8)
    for number in range(20):
        sender.send(number, message)
    for number in range(20):
        assert arrived.get(timeout=60)[0] == number
    cut_s = time.monotonic()
    cable.is_cut.set()
    for number in range(20, 40):
        sender.send(number, message)
    times = [arrived.get(timeout=60) for _ in range(20)]
    assert [number for number, _ in times] == list(range(20, 40))
    sender.close()
    receiver.close()
    return times[0][1] - cut_s


def measured(num_rounds: int) -> dict[str, list[float]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds.json"
        both = [
            context.Process(target=process, args=(rank, store.port, num_rounds, output))
            for rank in range(2)
        ]
        for one in both:
            one.start()
        for one in both:
            one.join()
        if any(one.exitcode for one in both):
            raise SystemExit("a process failed; its messages stand above")
        return json.loads(output.read_text())  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    seconds = measured(num_rounds)
    rows = []
    for num_bytes in SIZES:
        for kind in KINDS:
            stream = statistics.median(seconds[f"{kind} stream {num_bytes}"])
            one_way = statistics.median(seconds[f"{kind} round trip {num_bytes}"])
            rows.append(
                {
                    "kind": kind,
                    "bytes": num_bytes,
                    "mb_per_s": round(num_bytes / 1e6 / stream, 1),
                    "us_per_message": round(stream * 1e6, 1),
                    "us_one_way": round(one_way * 1e6, 1),
                }
            )
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ")
    cuts = [seconds_after_cut() for _ in range(3)]
    print(f"after a cut route: {max(cuts):.2f} s at most (<= {MAX_CUT_S})")
    write_result(
        "pipeline_links",
        {"rounds": num_rounds, "medians": rows, "after_cut_s": [round(one, 3) for one in cuts]},
    )
    return int(max(cuts) > MAX_CUT_S)


if __name__ == "__main__":
    sys.exit(main())
