"""An engine's process from outside: how it is told things, how it ends, and what is left of it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import (
    Carried,
    EngineConfig,
    EngineError,
    EngineOutput,
    Response,
)
from rollpacker.engines.engine_worker import EngineHost
from rollpacker.engines.messages import (
    UPDATE_WEIGHTS,
    WEIGHT_PROBE,
    Call,
    EngineSetup,
    Work,
    codec,
    packed,
)
from rollpacker.engines.process_engine import EngineRefusedError, ProcessEngine
from rollpacker.weights.buffer import BufferLayout, Place, WeightSource
from rollpacker.workers.child import children, state
from rollpacker.workers.host import Host, ThisHost
from tests.engines.engines import Heard
from tests.engines.made import counting
from tests.engines.tiny import request
from tests.remote.agents import Net

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

KILL_SEEN_S = 20.0
"""A tenth of the heartbeat there, since machines may be busy."""


def setup(make: str = "counting", **arguments: object) -> EngineSetup:
    return EngineSetup(
        make=f"tests.engines.made:{make}", config=EngineConfig(), arguments=arguments
    )


@pytest.fixture(params=["here", "behind an agent", "over a bad line"])
def host(request) -> Iterator[Host]:
    """Where the process is: an engine on another host is the same engine."""
    if request.param == "here":
        yield ThisHost()
        return
    net = Net(lost=0.2 if request.param == "over a bad line" else 0.0)
    host = net.host()
    yield host
    host.close()


@pytest.fixture
def started(host) -> Iterator[Callable[..., tuple[ProcessEngine, Heard]]]:
    engines = []

    def start(make: str = "counting", **options: object) -> tuple[ProcessEngine, Heard]:
        arguments = {"step_s": options.pop("step_s")} if "step_s" in options else {}
        engine = ProcessEngine(setup(make, **arguments), host=host, **options)
        engines.append(engine)
        heard = Heard()
        engine.start(heard, heard.on_error)
        return engine, heard

    yield start
    for engine in engines:
        close(engine)


def close(engine: ProcessEngine) -> None:
    asyncio.run(engine.close())


def wait_for_worker(engine: ProcessEngine) -> None:
    """Until it is known which process does the work, and not its guardian."""
    while not (pid := engine.child.pid) or b"guardian" in Path(f"/proc/{pid}/cmdline").read_bytes():
        time.sleep(0.01)


def ready(engine: ProcessEngine) -> None:
    asyncio.run(engine.ready())


def test_requests_go_and_responses_come_also_before_it_is_ready(started):
    engine, heard = started()
    requests = [request(row, max_response_tokens=3 + row) for row in range(5)]
    engine.submit(requests[:3])
    assert engine.status().num_waiting == 3
    ready(engine)
    engine.submit(requests[3:])
    outputs = heard.wait_for(5)
    assert [type(output.event) for output in outputs] == [SampleGenerated] * 5
    by_sample = {output.event.sample: output.response for output in outputs}
    for asked in requests:
        response, length = by_sample[asked.sample], asked.sampling.max_response_tokens
        assert response.prompt_tokens == asked.prompt_tokens
        assert response.tokens == tuple(range(length))
        assert response.log_probs == tuple(-0.1 * token for token in range(length))
    status = engine.status()
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert status.generated_tokens == 3 + 4 + 5 + 6 + 7


def test_an_abort_acts_at_the_step_after_it_arrives(started):
    """An engine of a step a second: the abort is heard of long before a second one is over."""
    engine, heard = started(step_s=1.0)
    ready(engine)
    asked = request(0, max_response_tokens=400)
    engine.submit([asked])
    while engine.status().generated_tokens < 2:
        time.sleep(0.01)
    num_tokens = engine.status().generated_tokens
    engine.abort([asked.sample, request(1).sample])
    (output,) = heard.wait_for(1)
    assert isinstance(output.event, SampleAborted)
    assert output.event.num_tokens <= num_tokens + 1


def test_calls_are_answered_one_after_the_other(started):
    engine, _ = started()

    async def run() -> None:
        await engine.update_weights(3)
        assert engine.status().version == 3
        assert engine.weight_probe() == "of version 3"
        with pytest.raises(EngineError, match="from a source"):
            await engine.update_weights(4, {})
        with pytest.raises(EngineError, match="no version is below 0"):
            await engine.update_weights(-1)
        with pytest.raises(EngineError, match="could not be changed"):
            engine.submit([request(0)])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.update_weights(500), 0.1)
        await engine.update_weights(5)
        assert engine.status().version == 5

    asyncio.run(run())


@pytest.mark.parametrize("when", ["loading", "idle", "decoding"])
def test_a_killed_process_is_noticed_at_once_and_nothing_follows(started, when):
    options = {} if when == "loading" else {"step_s": 0.01}
    make = "slow" if when == "loading" else "counting"
    engine, heard = started(make, heartbeat_s=200.0, **options)
    if when == "loading":
        wait_for_worker(engine)
    else:
        ready(engine)
    if when == "decoding":
        engine.submit([request(row, max_response_tokens=400) for row in range(4)])
        while not engine.status().generated_tokens:
            time.sleep(0.01)
    killed_s = time.monotonic()
    os.kill(engine.child.pid, signal.SIGKILL)
    error = heard.wait_for_error()
    assert heard.error_s - killed_s < KILL_SEEN_S
    assert f"{engine.child} ended by itself (signal 9, SIGKILL)" == error
    assert re.match(rf"engine \(pid {engine.child.pid}( on there)?\) ended", error)
    with pytest.raises(EngineError, match=r"the engine died: .*SIGKILL"):
        engine.submit([request(9)])
    with pytest.raises(EngineError, match="SIGKILL"):
        asyncio.run(engine.update_weights(1))
    time.sleep(0.2)
    assert len(heard.errors) == 1 and not heard.outputs
    assert state(engine.child.pid) == ""


def test_who_waits_for_weights_hears_of_a_process_that_is_killed_meanwhile(started):
    engine, heard = started()
    ready(engine)

    async def update() -> None:
        killer = asyncio.get_running_loop().call_later(
            0.2, os.kill, engine.child.pid, signal.SIGKILL
        )
        await engine.update_weights(20_000)  # that engine takes as many milliseconds
        killer.cancel()

    with pytest.raises(EngineError, match="signal 9, SIGKILL"):
        asyncio.run(update())
    assert "SIGKILL" in heard.wait_for_error()


def test_a_stopped_process_is_noticed_by_its_silence_and_killed(started):
    engine, heard = started(heartbeat_s=1.0)
    ready(engine)
    engine.submit([request(0, max_response_tokens=400, prompt=[7])])
    os.kill(engine.child.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    error = heard.wait_for_error()
    assert 0.5 < heard.error_s - stopped_s < 20.0  # benchmarks/engine_faults.py measures it
    assert "has not answered for " in error and "it was stopped by a signal" in error
    close(engine)
    assert state(engine.child.pid) == ""
    assert len(heard.errors) == 1


def test_a_process_that_is_stopped_while_it_loads_is_noticed_too(started):
    engine, heard = started("slow", heartbeat_s=0.5)
    wait_for_worker(engine)
    os.kill(engine.child.pid, signal.SIGSTOP)
    assert "it was stopped by a signal" in heard.wait_for_error()


def test_a_short_stop_is_survived(started):
    engine, heard = started(heartbeat_s=10.0)
    ready(engine)
    engine.submit([request(0, max_response_tokens=50)])
    os.kill(engine.child.pid, signal.SIGSTOP)
    time.sleep(0.7)
    os.kill(engine.child.pid, signal.SIGCONT)
    assert len(heard.wait_for(1)) == 1
    assert not heard.errors


def test_a_listener_that_takes_long_is_not_the_engines_silence(started):
    engine, heard = started(heartbeat_s=2.0)
    ready(engine)
    slow_calls = []

    def listen(outputs: Sequence[EngineOutput]) -> None:
        slow_calls.append(len(outputs))
        time.sleep(2.5)
        heard(outputs)

    engine.start(listen, heard.on_error)
    engine.submit([request(0, max_response_tokens=2), request(1, max_response_tokens=400)])
    assert len(heard.wait_for(2)) == 2
    assert not heard.errors and sum(slow_calls) == 2


def test_a_process_answers_while_it_idles_and_in_the_middle_of_a_step(started):
    engine, heard = started(step_s=300.0, heartbeat_s=60.0)
    ready(engine)

    def answers() -> None:
        looked_s = time.monotonic()
        while engine._served.heard_s <= looked_s:
            assert time.monotonic() < looked_s + 60.0  # long before the step's end
            time.sleep(0.01)

    answers()
    engine.submit([request(0)])
    while not engine.status().generated_tokens:
        time.sleep(0.01)
    answers()
    answers()
    assert engine.status().generated_tokens == 1  # its second step is still to come
    assert not heard.errors


@pytest.mark.parametrize(
    ("make", "prompt", "error"),
    [
        ("refused", (7,), r"^there is no such model: name another$"),
        ("broken", (7,), r"it could not be made: ZeroDivisionError\('a bug'\)"),
        ("nowhere", (7,), "has no nowhere"),
        ("counting", (13,), r"RuntimeError\('13 is no good'\)"),
        ("counting", (14,), "ended by itself \\(exit status 7\\)"),
    ],
)
def test_an_engine_that_fails_says_why_once(started, make, prompt, error):
    engine, heard = started(make)
    if make == "counting":
        engine.submit([request(0, prompt=prompt), request(1)])
    assert re.search(error, heard.wait_for_error())
    with pytest.raises(EngineError, match="the engine died"):
        engine.status()
    if make != "counting":
        with pytest.raises(EngineError, match=error):
            ready(engine)
    assert isinstance(heard.errors[0], EngineRefusedError) == (make in ("refused", "nowhere"))
    assert len(heard.errors) == 1


def test_a_start_that_takes_too_long_is_ended(started):
    _, heard = started("slow", start_s=0.5)
    assert heard.wait_for_error().endswith("was not ready within 0.5 s")


def test_an_error_of_whoever_listens_ends_the_engine(started):
    engine, heard = started()

    def listen(_: Sequence[EngineOutput]) -> None:
        raise RuntimeError("the listener broke")

    engine.start(listen, heard.on_error)
    engine.submit([request(0)])
    assert heard.wait_for_error() == "the listener broke"
    with pytest.raises(EngineError, match="the listener broke"):
        engine.submit([request(1)])


def test_a_request_that_cannot_be_sent_ends_the_engine(started):
    engine, heard = started()
    engine.submit([request(0, temperature=object())])
    assert "no message can hold a object" in heard.wait_for_error()


def test_a_setup_that_cannot_be_sent_is_refused_at_once():
    """Its process was waited for, for ever."""
    with pytest.raises(TypeError, match="no message can hold a object"):
        ProcessEngine(setup(step_s=object()))


OWNER = """
import sys, time
from rollpacker.engines.process_engine import ProcessEngine
from tests.engines.test_process_engine import ready, setup
engine = ProcessEngine(setup())
ready(engine)
print(engine.child.pid, flush=True)
time.sleep(60)
"""


def test_it_does_not_outlive_the_run():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    with owner:
        pid = int(owner.stdout.readline())
        assert state(pid) != ""
        owner.kill()
    until = time.monotonic() + 60
    while state(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert state(pid) == ""


def test_nothing_is_left_of_engines_that_were_closed_or_killed():
    def left() -> set[object]:
        kinds = {os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in fds()}
        return {*kinds, *children(os.getpid()), *threading.enumerate()}

    def fds() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()]

    before, num_before = left(), len(fds())
    for number in range(6):
        engine, heard = ProcessEngine(setup()), Heard()
        engine.start(heard, heard.on_error)
        if number % 2:
            engine.submit([request(0, max_response_tokens=400)])
            ready(engine)
        if number >= 4:
            os.kill(engine.child.pid, signal.SIGKILL)
            heard.wait_for_error()
        close(engine)
        close(engine)
    # What tests before this one have left may end meanwhile, and answers a call now and then.
    until = time.monotonic() + 60
    while not (left() <= before and len(fds()) <= num_before) and time.monotonic() < until:
        time.sleep(0.02)
    assert left() <= before and len(fds()) <= num_before


def test_close_refuses_everything_after(started):
    engine, heard = started()
    ready(engine)
    engine.submit([request(0, max_response_tokens=400)])
    close(engine)
    for call in (
        engine.status,
        engine.weight_probe,
        lambda: engine.submit([request(1)]),
        lambda: engine.abort([]),
        lambda: engine.start(heard, heard.on_error),
        lambda: asyncio.run(engine.update_weights(1)),
        lambda: asyncio.run(engine.reload()),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert not heard.errors


def test_weights_that_come_after_the_last_engine_was_closed_are_refused():
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(ThisHost):
        def weights(self, source: WeightSource) -> WeightSource:
            begun.set()
            goes_on.wait()
            return source

    engine, heard = ProcessEngine(setup(), host=Slow()), Heard()
    engine.start(heard, heard.on_error)
    layout = BufferLayout(path="", inode=0, size_bytes=128, places={})
    refused: list[BaseException] = []

    def update() -> None:
        try:
            asyncio.run(engine.update_weights(1, layout.source(1)))
        except BaseException as error:
            refused.append(error)

    updating = threading.Thread(target=update)
    updating.start()
    begun.wait()
    close(engine)
    goes_on.set()
    updating.join()
    assert [type(error) for error in refused] == [EngineError]


# -- what is said ----------------------------------------------------------------------------------


def test_all_that_is_said_comes_back_equal():
    sample = SampleId(PromptId("code/a#b", 2, 77), 3, 1)
    carried = Carried(
        tokens=(1, 2, 3),
        log_probs=(-0.1, -1e-300, -math.inf),  # not all of them are numbers of 32 bits
        floor=3,
        ceiling=9,
        redraws=((4, 1), (6, 2)),
    )
    plain = request(5)
    work = Work(
        requests=(
            plain,
            replace(plain, sample=sample, carried=carried, noise=request(1).sample, turn=3),
            request(6, prompt=[1 << 40, -1], forced_length=2, stop=("x", "\n"), temperature=0.3),
        ),
        aborts=(sample,),
        let_go=(plain.sample,),
    )
    found = codec().decode(codec().encode(work))
    assert found == work
    assert found.requests[0].prompt_tokens is found.requests[1].prompt_tokens
    layout = BufferLayout(
        path="/proc/1/fd/3",
        inode=9,
        size_bytes=128,
        places={"w": Place(start=64, shape=(2, 3), dtype="bfloat16")},
    )
    call = Call(UPDATE_WEIGHTS, 4, WeightSource(version=4, layout=layout))
    assert codec().decode(codec().encode(call)) == call
    for log_probs in ((-0.5, math.nan), (-0.1, -0.2), (-float(np.float32(0.1)),) * 20, ()):
        response = Response(
            sample=sample,
            prompt_tokens=(1, 2),
            tokens=tuple(range(len(log_probs))),
            log_probs=log_probs,
            finish_reason="aborted",
            version=3,
            redraws=((2, 1),),
        )
        event = SampleAborted(time_s=0.0, sample=sample, num_tokens=len(log_probs), num_kept=1)
        said = codec().decode(codec().encode(packed(EngineOutput(event, response))))
        assert said[0] == event
        assert repr(said[1].unpacked(sample, (1, 2))) == repr(response)


# -- in the process --------------------------------------------------------------------------------


def hosted(beat_s: float = 60.0, **arguments: float) -> EngineHost:
    return EngineHost(counting(config=EngineConfig(), **arguments), beat_s)


def reported(host: EngineHost, num_outputs: int) -> list[tuple[int, int]]:
    """Row and number of tokens of so many outputs, in as many reports as they come in."""
    found = []
    while len(found) < num_outputs:
        report = codec().decode(codec().encode(host.report()[0]))
        found += [(event.sample.prompt.row, event.num_tokens) for event, _ in report.outputs]
    return found


def test_each_output_is_in_one_report_and_reports_come_without_being_asked_for():
    host = hosted()
    host.obey(0, Work(requests=(request(0, max_response_tokens=2),)))
    assert reported(host, 1) == [(0, 2)]
    asked = [request(row, max_response_tokens=1 + row) for row in (1, 2)]
    host.obey(0, Work(requests=tuple(asked)))
    assert sorted(reported(host, 2)) == [(1, 2), (2, 3)]


def test_calls_are_made_one_after_the_other_in_their_order():
    host = hosted()
    host.obey(1, Call(UPDATE_WEIGHTS, 300))  # that engine takes as many milliseconds
    host.obey(2, Call(WEIGHT_PROBE))
    host.obey(3, Call(UPDATE_WEIGHTS, -1))
    answers = []
    while len(answers) < 3:
        report, new = host.report()
        if new and not answers:
            assert report.status.version == 300  # as it is after the call
        answers += new
    assert [number for number, _ in answers] == [1, 2, 3]
    assert [answer.result for _, answer in answers] == [None, "of version 300", None]
    assert [answer.error for _, answer in answers] == [None, None, "no version is below 0"]


def test_without_news_a_report_comes_when_it_is_due():
    host = hosted(beat_s=0.5)
    assert not host.report()[0].outputs
    start_s = time.monotonic()
    assert not host.report()[0].outputs
    # Every engine of a host reports at a multiple of that time.
    assert time.monotonic() // 0.5 > start_s // 0.5
