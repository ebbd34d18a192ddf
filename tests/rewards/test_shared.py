"""The sandbox that a run's rewards share: opened once a loop, closed with it, never doubted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import rollpacker.sandbox as package
from rollpacker.rewards.build import BUILT_IN, build_reward
from rollpacker.rewards.reward import RewardConfig, RewardError
from rollpacker.rewards.shared import Shared
from rollpacker.sandbox.sandbox import I_ACCEPT, Capabilities, SandboxConfig, SandboxUnavailable


class Box:
    """A sandbox that counts."""

    def __init__(self, backend: str) -> None:
        self.capabilities = Capabilities(
            backend=backend,
            passed=(),
            failed=(),
            profiles=("python",),
            memory="no fork",
            can_fork=False,
            seconds=0.0,
        )


class Boxes:
    """Stands in for `open_sandbox`."""

    def __init__(self, unavailable: tuple[str, ...] = ()) -> None:
        self.unavailable = unavailable
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.num_open = 0

    @asynccontextmanager
    async def __call__(self, backend: str, **settings: Any) -> AsyncIterator[Box]:
        self.asked.append((backend, settings))
        await asyncio.sleep(0.01)
        if backend in self.unavailable:
            raise SandboxUnavailable("bwrap is missing\nmore lines")
        self.num_open += 1
        try:
            yield Box(backend)
        finally:
            self.num_open -= 1


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> Boxes:
    made = Boxes()
    monkeypatch.setattr(package, "open_sandbox", made)
    return made


def test_one_sandbox_for_each_loop(boxes: Boxes) -> None:
    shared = Shared(SandboxConfig(memory_mb=256, disk_mb=3, output_kb=5))

    async def run() -> None:
        found = await asyncio.gather(*(shared.sandbox() for _ in range(5)))
        assert len(set(map(id, found))) == 1 and boxes.num_open == 1
        await shared.close()
        assert boxes.num_open == 0
        await shared.sandbox()
        await shared.close()

    asyncio.run(run())
    asyncio.run(run())
    assert len(boxes.asked) == 4 and boxes.num_open == 0
    backend, settings = boxes.asked[0]
    assert backend == "auto"
    limits = {name: settings[name] for name in ("memory_bytes", "disk_bytes", "output_bytes")}
    assert limits == {"memory_bytes": 256 << 20, "disk_bytes": 3 << 20, "output_bytes": 5 << 10}


def test_checked_once_outside_of_loops_and_inside(boxes: Boxes) -> None:
    shared = Shared(SandboxConfig())
    assert shared.check_sandbox().backend == "auto"
    assert shared.check_sandbox().backend == "auto"
    assert len(boxes.asked) == 1 and boxes.num_open == 0

    async def inside() -> int:
        async def work() -> int:
            await shared.sandbox()
            return 3

        return shared.run(work)

    assert asyncio.run(inside()) == 3
    assert boxes.num_open == 0

    async def fails() -> None:
        await shared.sandbox()
        raise LookupError("told")

    with pytest.raises(LookupError, match="told"):
        shared.run(fails)
    assert boxes.num_open == 0


def test_no_sandbox_is_no_run_unless_accepted(
    boxes: Boxes, caplog: pytest.LogCaptureFixture
) -> None:
    boxes.unavailable = ("auto",)
    with pytest.raises(SandboxUnavailable, match="bwrap is missing"):
        Shared(SandboxConfig()).check_sandbox()
    assert boxes.asked[-1][1]["allow_unsandboxed_code"] is None
    accepted = Shared(SandboxConfig(allow_unsandboxed_code=I_ACCEPT))
    assert accepted.check_sandbox().backend == "none"
    assert "WITHOUT ISOLATION" in caplog.text and "more lines" not in caplog.text
    boxes.unavailable = ("auto", "none")
    with pytest.raises(SandboxUnavailable):
        Shared(SandboxConfig(allow_unsandboxed_code=I_ACCEPT)).check_sandbox()


def test_every_built_in_can_be_named() -> None:
    """An unknown argument is refused, which needs the class and its signature."""
    for name in BUILT_IN:
        with pytest.raises(RewardError, match=f"reward {name} takes no argument no_such_thing"):
            build_reward([RewardConfig(function=name, arguments={"no_such_thing": 1})])
    with pytest.raises(RewardError, match=r"built in and has no shape; take verl out"):
        build_reward([RewardConfig(function="code", shape="verl")])
