"""Every way in which new weights come to engines does the same, whatever goes wrong on the way: an
engine has the trainer's weights, or generates nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig, EngineError
from rollpacker.run.ports.deliveries import Deliveries
from rollpacker.run.ports.engines import Engines, Weights
from rollpacker.run.ports.hand_over import bring_up_to_date, hand_over_weights
from rollpacker.trainer.launch import store_at
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.weights import delivery as module
from rollpacker.weights.buckets import Part, buckets_of
from rollpacker.weights.buffer import WeightBuffer
from rollpacker.weights.delivery import Delivery, Group, Member, UndeliveredError, whole
from rollpacker.weights.probe import Probe, digest_of, weight_probe
from rollpacker.workers.loopback import LOOPBACK
from tests.engines.tiny import request
from tests.trainer.tiny import samples, step, tiny_model, trainer

CPU = torch.device("cpu")
STRAIGHT = ("broadcast", "ipc")


@pytest.fixture(params=["host", *STRAIGHT])
def carrier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STRAIGHT)
def straight(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the weights of small models need many."""
    sizes = dict.fromkeys(module.BUCKET_BYTES, 1000)
    monkeypatch.setattr(module, "BUCKET_BYTES", sizes)


@pytest.fixture
def own() -> Iterator[TorchTrainer]:
    made = TorchTrainer(trainer().learner, in_place=False, shared=True)
    yield made
    made.close()


def fleet(carrier: str, size: int = 2) -> Engines:
    deliveries = None if carrier == "host" else Deliveries(carrier, LOOPBACK, store_at)
    engines = Engines([engine(seed) for seed in range(1, size + 1)], deliveries=deliveries)
    return engines


def engine(seed: int) -> TorchEngine:
    model = tiny_model(seed)
    install_attention(model)
    return TorchEngine(model=model, tokenizer=None, config=EngineConfig(max_slots=1))


def probes(engines: Engines) -> set[str]:
    return {handle.engine.weight_probe() for handle in engines.living}


def refuses(one: TorchEngine) -> bool:
    try:
        one.submit([request(1, prompt=[3, 4])])
    except EngineError:
        return True
    return False


# -- the trainer and its engines -------------------------------------------------------------------


def test_all_engines_get_each_version(carrier: str, own: TorchTrainer) -> None:
    engines, seen = fleet(carrier), set()
    for version in range(3):
        asyncio.run(hand_over_weights(own, engines, version))
        assert probes(engines) == {weight_probe(own.learner.weights())}
        assert engines.weights.is_delivered == (carrier != "host")
        seen |= probes(engines)
        step(own, samples())
    assert len(seen) == 3, "each version is other weights"
    asyncio.run(engines.close())


def test_one_that_comes_later_reads_host_memory(straight: str, own: TorchTrainer) -> None:
    engines = fleet(straight)
    asyncio.run(hand_over_weights(own, engines, 0))
    late = engine(9)
    written = Weights(0, asyncio.run(own.hand_over()))
    assert not written.is_delivered
    bring_up_to_date(late, written)
    assert {late.weight_probe()} == probes(engines)
    asyncio.run(late.close())
    asyncio.run(engines.close())


def test_torn_weights_are_refused_and_the_next_ones_taken(
    carrier: str, own: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket whose bytes change on the way, or a buffer whose writer is stopped half-way."""
    (one,) = engines_of(fleet(carrier, 1))
    torn = torn_host if carrier == "host" else torn_bucket
    with monkeypatch.context() as patched:
        torn(patched)
        with pytest.raises((EngineError, UndeliveredError, RuntimeError)):
            take(own, one, carrier, version=0)
    if carrier != "host":  # there nothing was asked of the engine
        assert refuses(one), "it has parts of two versions"
    take(own, one, carrier, version=0)
    assert one.weight_probe() == weight_probe(own.learner.weights())
    assert not refuses(one)
    asyncio.run(one.close())


def torn_bucket(patched: pytest.MonkeyPatch) -> None:
    stamp = module.stamp_of

    def early(data: Tensor, version: int, bucket: int) -> Tensor:
        found = stamp(data, version, bucket)
        if bucket == 3:
            data[5] ^= 1  # once it is stamped, or once it has arrived
        return found

    patched.setattr(module, "stamp_of", early)


def torn_host(patched: pytest.MonkeyPatch) -> None:
    writing = WeightBuffer.writing

    def stopped(self: WeightBuffer, version: int):  # type: ignore[no-untyped-def]
        written = writing(self, version)
        written.__enter__()
        raise RuntimeError("killed while it wrote")

    patched.setattr(WeightBuffer, "writing", stopped)


def engines_of(engines: Engines) -> list[TorchEngine]:
    found = [handle.engine for handle in engines.living]
    assert all(isinstance(one, TorchEngine) for one in found)
    return found  # type: ignore[return-value]


def take(own: TorchTrainer, one: TorchEngine, carrier: str, version: int) -> None:
    """Bring the trainer's weights to one engine as this version; raises what either side says."""
    if carrier == "host":
        asyncio.run(one.update_weights(version, asyncio.run(own.hand_over()).weights))
        return
    with open_store() as address, ThreadPoolExecutor(1) as pool:
        told = Delivery(
            carrier=carrier, version=version, address=address, epoch=1, senders=1, size=2
        )
        sending = pool.submit(lambda: asyncio.run(own.hand_over(told)))
        try:
            asyncio.run(one.update_weights(version, replace(told, number=1)))
        finally:
            sending.exception()
        sending.result()


def test_another_version_is_refused(carrier: str, own: TorchTrainer) -> None:
    """The trainer is at version 1 when engines are told that version 0 comes."""
    (one,) = engines_of(fleet(carrier, 1))
    take(own, one, carrier, version=0)
    step(own, samples())
    with pytest.raises(EngineError, match="version"):
        take(own, one, carrier, version=0)
    assert refuses(one)
    take(own, one, carrier, version=1)
    assert one.weight_probe() == weight_probe(own.learner.weights())
    asyncio.run(one.close())


def test_a_lost_engine_does_not_keep_the_others(
    straight: str, own: TorchTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One leaves after some buckets, as the sockets of a process that is killed do."""
    engines = fleet(straight, 3)
    asyncio.run(hand_over_weights(own, engines, 0))
    step(own, samples())
    receive, numbers = Group.receive, []

    def dying(self: Group, version: int) -> Iterator[module.Arrived]:
        for count, arrived in enumerate(receive(self, version)):
            if self._number == 2 and count == 5:
                numbers.append(self._number)
                raise EngineError("killed")
            yield arrived

    monkeypatch.setattr(Group, "receive", dying)
    asyncio.run(hand_over_weights(own, engines, 1))
    assert numbers == [2] and not engines.weights.is_delivered, "they have read host memory"
    assert probes(engines) == {weight_probe(own.learner.weights())}
    monkeypatch.undo()
    asyncio.run(hand_over_weights(own, engines, 1))  # by a new group
    assert engines.weights.is_delivered
    asyncio.run(engines.close())


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_another_model_are_refused(carrier: str, own: TorchTrainer, tied: bool) -> None:
    model = tiny_model(1, num_layers=3, tied=tied)
    install_attention(model)
    other = TorchEngine(model=model, tokenizer=None, config=EngineConfig(max_slots=1))
    with pytest.raises((EngineError, UndeliveredError), match="another model"):
        take(own, other, carrier, version=0)
    assert refuses(other)
    asyncio.run(other.close())


# -- many senders, many receivers, any tensors -----------------------------------------------------


class open_store:
    def __enter__(self) -> tuple[str, int]:
        self._store = store_at(LOOPBACK)
        return LOOPBACK, self._store.port

    def __exit__(self, *_error: object) -> None:
        del self._store


def at_once(*work: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(work)) as pool:
        doing: list[Future[object]] = [pool.submit(one) for one in work]
        return [one.result() for one in doing]


def mixtures() -> Mapping[str, Tensor]:
    """The weights of a small mixture of experts, whose experts are one tensor, and odd tensors."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(0)
    named = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    assert any("experts" in name for name in named)
    return {**named, "none": torch.empty(0, 4), "scalar": torch.tensor(3.0)}


def cut(named: Mapping[str, Tensor], sender: int, senders: int) -> dict[Part, Tensor]:
    """What a sender holds of them: rows, as torch shards them, in full precision."""
    held = {}
    for name, value in named.items():
        rows = value.detach() if value.dim() else value[None]
        shares = rows.tensor_split(senders)
        before = sum(one.numel() for one in shares[:sender])
        mine = shares[sender].reshape(-1)
        if len(mine) or (not value.numel() and sender == 0):
            held[Part(name, tuple(value.shape), "bfloat16", before, len(mine))] = mine
    return held


@pytest.mark.parametrize("senders", [1, 3])
def test_shards_become_whole_tensors_in_every_worker_of_an_engine(
    straight: str, senders: int
) -> None:
    """An engine of two workers (tensor parallel) has two receivers, and is told one number."""
    named = mixtures()
    members = [Member() for _ in range(senders + 2)]
    with open_store() as address:
        for version in (4, 5):
            told = Delivery(
                carrier=straight,
                version=version,
                address=address,
                epoch=1,
                senders=senders,
                size=senders + 2,
            )

            def send(sender: int, told: Delivery = told) -> str:
                held = cut(named, sender, senders)
                members[sender].send(told, sender, CPU, held, told.version)
                return ""

            def receive(worker: int, told: Delivery = told) -> dict[str, Tensor]:
                told = replace(told, number=senders)
                with members[senders + worker].receiving(told, CPU, worker) as (shapes, arriving):
                    found = {name: value.clone() for name, value in whole(arriving)}
                    assert {name: tuple(one.shape) for name, one in found.items()} == shapes
                    return found

            work: Sequence[Callable[[], object]] = [
                *(lambda s=s: send(s) for s in range(senders)),
                *(lambda w=w: receive(w) for w in range(2)),
            ]
            for found in at_once(*work)[senders:]:
                assert isinstance(found, dict) and found.keys() == named.keys()
                for name, value in named.items():
                    assert torch.equal(found[name], value.bfloat16())
    for one in members:
        one.leave(straight)


def test_buckets_hold_each_element_once_and_no_more_than_fits() -> None:
    named = mixtures()
    listed = [[*cut(named, sender, 3)] for sender in range(3)]
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in named}
    for bucket in buckets_of(listed, 1000):
        assert sum(module.end_of(spans) for spans in bucket) <= 1000 + 3 * 16
        for spans in bucket:
            for span in spans:
                seen[span.part.name].append((span.start, span.start + span.length))
    for name, value in named.items():
        ends = [0, *(end for _, end in sorted(seen[name]))]
        assert [start for start, _ in sorted(seen[name])] == ends[:-1] and ends[-1] == value.numel()


def test_shares_of_a_probe_make_the_whole_one() -> None:
    named = mixtures()
    found = []
    for sender in range(3):
        probe = Probe()
        for part, values in cut(named, sender, 3).items():
            probe.take_part(part, values)
        found.append(probe.samples())
    halved = {name: value.bfloat16() for name, value in named.items()}
    assert digest_of(found) == weight_probe(halved.items())
    assert digest_of(found[:2]) != digest_of(found)
