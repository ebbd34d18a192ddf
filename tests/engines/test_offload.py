"""An engine lets go of its device's memory and takes it back. Host memory plays the device's part,
so that something does move."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig, EngineError, Response
from rollpacker.engines.messages import EngineSetup
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.weights.host_store import HostStore
from tests.engines.test_engine import Recorder
from tests.engines.tiny import group, request, tiny_model

REQUESTS = [*group(0, 3, seed=1), *group(1, 3, seed=1)]


def generate(engine: TorchEngine) -> list[Response]:
    return asyncio.run(collect(engine, REQUESTS))


def lent(*, plain: bool = True) -> TorchEngine:
    config = EngineConfig(plain_forward=plain, draft_tokens=2)
    engine = TorchEngine(model=tiny_model(), tokenizer=None, config=config)
    engine._host = HostStore("cpu")
    return engine


@pytest.mark.parametrize("plain", [False, True])
def test_it_samples_on_as_before(plain: bool) -> None:
    engine = lent(plain=plain)
    before = generate(engine)
    for _ in range(2):
        asyncio.run(engine.offload())
        tensors = [*engine._model.parameters(), *engine._model.buffers()]
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        slots = engine._decoder.slots
        assert not (slots.keys or slots.values or slots.num_slots)
        asyncio.run(engine.reload())
        assert generate(engine) == before
    asyncio.run(engine.offload())
    asyncio.run(engine.reload())
    newer = tiny_model(seed=3)
    asyncio.run(engine.update_weights(1, dict(newer.named_parameters())))
    after = generate(engine)
    assert [one.tokens for one in after] != [one.tokens for one in before]
    fresh = TorchEngine(model=newer, tokenizer=None, config=EngineConfig(plain_forward=plain))
    assert [one.tokens for one in after] == [one.tokens for one in generate(fresh)]
    asyncio.run(engine.close())
    asyncio.run(fresh.close())


def test_nothing_may_be_asked_of_it_meanwhile() -> None:
    engine = lent()
    asyncio.run(engine.offload())
    for ask in (
        lambda: engine.submit([request(0)]),
        lambda: engine.weight_probe(),
        lambda: asyncio.run(engine.update_weights(1)),
    ):
        with pytest.raises(EngineError, match="let go of its device's memory: reload it first"):
            ask()
    assert engine.status().num_running == 0
    asyncio.run(engine.reload())
    assert len(generate(engine)) == len(REQUESTS)
    asyncio.run(engine.close())


def test_it_stays_while_samples_run() -> None:
    engine = lent()
    may_go_on = threading.Event()
    heard = Recorder(2, lambda outputs: may_go_on.wait(60))
    engine.start(heard, heard.on_error)
    engine.submit([request(0, forced_length=1), request(1, forced_length=30)])
    while engine.status().generated_tokens == 0:
        assert not heard.errors
    with pytest.raises(EngineError, match=r"memory can.* while [12] samples run"):
        asyncio.run(engine.offload())
    may_go_on.set()
    heard.wait()
    assert not heard.errors and len(heard.outputs) == 2
    asyncio.run(engine.offload())
    asyncio.run(engine.close())


def test_on_a_cpu_nothing_moves() -> None:
    engine = TorchEngine(model=tiny_model(), tokenizer=None, config=EngineConfig())
    before = generate(engine)
    pointers = [parameter.data_ptr() for parameter in engine._model.parameters()]
    asyncio.run(engine.offload())
    assert [parameter.data_ptr() for parameter in engine._model.parameters()] == pointers
    assert engine._decoder.slots.keys
    asyncio.run(engine.reload())
    assert generate(engine) == before
    asyncio.run(engine.close())


@pytest.fixture
def made() -> Callable[..., ProcessEngine]:
    def make(**arguments: object) -> ProcessEngine:
        setup = EngineSetup(
            make="tests.engines.made:counting", config=EngineConfig(), arguments=arguments
        )
        return ProcessEngine(setup)

    return make


def test_a_process_is_told_over_the_wire(made: Callable[..., ProcessEngine]) -> None:
    engine = made()

    async def go() -> None:
        await engine.ready()
        await engine.offload()
        with pytest.raises(EngineError, match="reload it first"):
            engine.submit([request(0)])
        with pytest.raises(EngineError, match="reload it first"):
            await engine.update_weights(1)
        await engine.reload()
        await engine.update_weights(1)
        assert await asyncio.to_thread(engine.weight_probe) == "of version 1"
        await engine.offload()
        with pytest.raises(EngineError, match="no memory is left"):
            await engine.reload()
        await engine.close()

    asyncio.run(go())


def test_one_that_ends_while_it_is_away_says_so(made: Callable[..., ProcessEngine]) -> None:
    engine = made()
    heard = Recorder(1)
    engine.start(heard, heard.on_error)

    async def go() -> None:
        await engine.ready()
        await engine.offload()
        engine.child.kill()
        assert engine.child.how_ended(60)
        with pytest.raises(EngineError):
            await engine.reload()
        await engine.close()

    asyncio.run(go())
    assert heard.errors and not heard.outputs
