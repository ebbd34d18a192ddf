"""Inference servers behind HTTP as the scheduler's host; the servers are made up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.engine import Response
from rollpacker.scheduler import Counted, Request, Scheduler
from rollpacker.scheduler import servers as servers_module
from rollpacker.scheduler.servers import NoServer, Servers
from rollpacker.scheduler.wire import Cut, Lost
from tests.docs.blocks import PAGES, blocks
from tests.scheduler.made_up_servers import (
    MAX_TOKENS,
    VOCABULARY,
    MadeUpServer,
    policy,
)

KINDS = ("vllm", "sglang")
PROMPTS, SAMPLES = 8, 4
LIMIT_S = 240.0
ENDLESS = {"sampling": {"ignore_eos": True}}


def prompt_of(number: int) -> tuple[int, ...]:
    return (7, number, 9)


def servers_of(kind: str, urls: Sequence[str], **settings: Any) -> Servers:
    own: dict[str, Any] = {"vocab_size": VOCABULARY, "max_response_tokens": MAX_TOKENS}
    own |= {"abort_s": 0.2, "pause_s": 0.01, "outage_s": 20.0}
    return Servers(kind, urls, prompt_of, **(own | settings))  # type: ignore[arg-type]


def scheduler_of(servers: Servers, num_prompts: int, *, enabled: bool = True) -> Scheduler:
    left = [num_prompts]

    def fetch(count: int) -> int:
        found = min(count, left[0])
        left[0] -= found
        return found

    servers.scheduler = Scheduler(config(enabled), servers, Counted(fetch))
    return servers.scheduler


def config(enabled: bool = True) -> JobConfig:
    return JobConfig(
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        max_steps=None,
        max_response_tokens=MAX_TOKENS,
        tail_batching=TailBatchingConfig(enabled=enabled, prompt_factor=1.5, carry="none"),
    )


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    asyncio.run(limited())


async def until(there: Callable[[], bool]) -> None:
    """Wait for it, up to the test's limit."""
    while not there():
        await asyncio.sleep(0.002)


async def train(servers: Servers, scheduler: Scheduler) -> Counter[tuple[Any, ...]]:
    """Train on all there is. Returns how often each response was trained on."""
    trained: Counter[tuple[Any, ...]] = Counter()
    while (step := await scheduler.next_step_async()) is not None:
        for request in (request for group in step.groups for request in group):
            found = servers.response(request)
            assert found.prompt_tokens == prompt_of(request.prompt)
            drawn = (found.tokens, found.log_probs, found.finish_reason)
            assert drawn == policy(found.prompt_tokens, request.seed)
            trained[request.prompt, request.place, *drawn] += 1
        scheduler.trained()
    return trained


async def all_of(kind: str, num_prompts: int, *, enabled: bool) -> Counter[tuple[Any, ...]]:
    async with MadeUpServer(kind) as one, MadeUpServer(kind) as other:
        servers = servers_of(kind, [one.url, other.url])
        trained = await train(servers, scheduler_of(servers, num_prompts, enabled=enabled))
        await servers.close()
        num_started = len(one.seen) + len(other.seen)
        assert (num_started > num_prompts * SAMPLES) is enabled  # some were stopped
        await until(lambda: one.open == other.open == 0)
    return trained


def test_it_trains_on_what_the_servers_alone_would() -> None:
    async def work() -> None:
        own = await all_of("vllm", 500, enabled=False)
        assert own.total() == 2000 and set(own.values()) == {1}
        assert await all_of("vllm", 500, enabled=True) == own
        assert await all_of("sglang", 500, enabled=True) == own

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_doubled_by_faults(kind: str) -> None:
    async def work() -> None:
        async with AsyncExitStack() as stack:
            made = [MadeUpServer(kind, faults=random.Random(seed)) for seed in range(3)]
            for one in made:
                await stack.enter_async_context(one)
            servers = servers_of(kind, [one.url for one in made], abort_s=0.02)
            trained = await train(servers, scheduler_of(servers, 160))
            await servers.close()
            met = sum((one.met for one in made), Counter())
            assert met.total() >= 50 and len(met) == 6, met
            assert trained.total() == 160 * SAMPLES and set(trained.values()) == {1}
            assert len({(prompt, place) for prompt, place, *_ in trained}) == 160 * SAMPLES
            await until(lambda: not any(one.open for one in made))

    run(work())


class Told:
    """In place of the scheduler: what it was told."""

    def __init__(self) -> None:
        self.version = 0
        self.ends: dict[str, tuple[str, list[int]]] = {}
        self.errors: list[BaseException] = []

    def ended(self, request: Request, tokens: Any = (), reason: str = "stop", **_: Any) -> None:
        assert request.id not in self.ends
        self.ends[request.id] = reason, list(tokens)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


def request(prompt: int, place: int = 0) -> Request:
    sample = SampleId(PromptId("train", 0, prompt), place, 0)
    return Request(sample=sample, noise=sample, seed=100 * prompt + place)


def told(servers: Servers) -> Told:
    servers.scheduler = Told()  # type: ignore[assignment]
    return servers.scheduler  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_response_has_the_tokens_so_far(kind: str) -> None:
    async def work() -> None:
        async with MadeUpServer(kind, token_s=0.01) as server:
            servers = servers_of(kind, [server.url], **ENDLESS)
            host = told(servers)
            ended, never_asked = request(3), request(4)
            servers.start([ended])
            await until(lambda: server.open == 1)
            await asyncio.sleep(0.01)  # a few tokens; their number does not matter
            servers.start([never_asked])
            servers.stop([ended, never_asked])
            await until(lambda: len(host.ends) == 2 and server.open == 0)
            reason, tokens = host.ends[ended.id]
            assert reason == "stopped" and len(tokens) < MAX_TOKENS
            assert tuple(tokens) == policy(prompt_of(3), 300, endless=True)[0][: len(tokens)]
            assert host.ends[never_asked.id][0] == "stopped"
            servers.stop([ended])  # it has ended: nothing is said twice
            await servers.close()

    run(work())


def test_a_slow_abort_is_given_up_and_a_late_answer_counts() -> None:
    async def work() -> None:
        async with MadeUpServer("sglang", flaw="slow abort", token_s=0.005) as server:
            for abort_s, end in ((0.01, "stopped"), (LIMIT_S, "length")):
                servers = servers_of("sglang", [server.url], abort_s=abort_s, **ENDLESS)
                host = told(servers)
                servers.start([request(3)])
                await until(lambda: server.open == 1)
                servers.stop([request(3)])
                await until(lambda host=host: bool(host.ends) and server.open == 0)  # type: ignore[misc]
                reason, tokens = host.ends[request(3).id]
                assert (reason, len(tokens)) == (end, 0 if end == "stopped" else MAX_TOKENS)
                await servers.close()

    run(work())


def test_an_abort_that_came_too_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "ABORT_AGAIN_S", 0.002)

    async def work() -> None:
        async with MadeUpServer("sglang", flaw="first abort", token_s=0.01) as server:
            servers = servers_of("sglang", [server.url], abort_s=LIMIT_S, **ENDLESS)
            host = told(servers)
            servers.start([request(3)])
            await until(lambda: server.open == 1)
            servers.stop([request(3)])
            await until(lambda: bool(host.ends))
            assert host.ends[request(3).id][0] == "stopped" and server.num_aborts > 1
            await servers.close()

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_ends_that_response_alone(kind: str) -> None:
    """SGLang's abort takes an id for the beginning of ids."""

    async def work() -> None:
        async with MadeUpServer(kind, token_s=0.005) as server:
            servers = servers_of(kind, [server.url], **ENDLESS)
            host = told(servers)
            many = [request(3, place) for place in range(12)]
            servers.start(many)
            await until(lambda: server.open == 12)
            servers.stop(many[:2])
            await until(lambda: len(host.ends) == 12)
            reasons = [host.ends[one.id][0] for one in many]
            assert reasons == ["stopped"] * 2 + ["length"] * 10
            assert len(server.seen) == 12  # none was started again
            await servers.close()

    run(work())


def test_a_prompts_responses_go_to_one_server() -> None:
    async def work() -> None:
        async with MadeUpServer("vllm") as one, MadeUpServer("vllm") as other:
            servers = servers_of("vllm", [one.url, other.url], **ENDLESS)
            host = told(servers)
            servers.start([request(prompt, place) for prompt in range(6) for place in range(4)])
            await until(lambda: len(host.ends) == 24)
            by_server = [{prompt for prompt, _ in server.seen} for server in (one, other)]
            assert len(one.seen) == len(other.seen) == 12
            assert len(by_server[0]) == len(by_server[1]) == 3
            await servers.close()

    run(work())


def test_a_server_that_comes_back_is_used_again() -> None:
    async def work() -> None:
        returned: list[str] = []

        async def load_weights(url: str) -> None:
            returned.append(url)
            if len(returned) == 1:
                raise OSError("not ready")  # and is asked again

        async with MadeUpServer("vllm") as server:
            servers = servers_of("vllm", [server.url], returned=load_weights)
            host = told(servers)
            servers.start([request(3)])
            await until(lambda: server.open == 1)
            await server.restart_after(0.05)
            await until(lambda: bool(host.ends))
            assert host.ends[request(3).id] == ("stop", list(policy(prompt_of(3), 300)[0]))
            assert returned == [server.url] * 2
            await servers.close()

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_on_a_server_that_was_cut_starts_again_elsewhere(kind: str) -> None:
    """The server may have died and be back with old weights, before all connections say so."""

    async def work() -> None:
        async with (
            MadeUpServer(kind, token_s=LIMIT_S) as one,
            MadeUpServer(kind) as other,
        ):
            servers = servers_of(kind, [one.url, other.url], pause_s=LIMIT_S)
            host = told(servers)
            servers.start([request(3, place) for place in range(3)])
            await until(lambda: one.open == 3)
            next(iter(one.connections)).transport.abort()
            await until(lambda: len(host.ends) == 3)
            assert len(other.seen) == 3
            for place in range(3):
                drawn = policy(prompt_of(3), 300 + place)
                assert host.ends[request(3, place).id] == ("stop", list(drawn[0]))
            await until(lambda: one.open == 0)
            await servers.close()

    run(work())


def test_a_server_that_is_cut_again_as_it_comes_back_loads_weights_again() -> None:
    async def work() -> None:
        returned: list[str] = []

        async def load_weights(url: str) -> None:
            returned.append(url)
            if len(returned) == 1:
                servers._lose(servers._servers[0], Cut("again"))

        async with MadeUpServer("vllm") as server:
            servers = servers_of("vllm", [server.url], returned=load_weights)
            servers._lose(servers._servers[0], Cut("once"))
            await until(lambda: servers._servers[0].is_up)
            assert len(returned) == 2
            await servers.close()

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_server_is_lost(kind: str) -> None:
    async def work() -> None:
        async with MadeUpServer(kind, flaw="silence") as one, MadeUpServer(kind) as other:
            servers = servers_of(kind, [one.url, other.url], silence_s=0.05, pause_s=LIMIT_S)
            host = told(servers)
            servers.start([request(3)])
            await until(lambda: bool(host.ends))
            assert host.ends[request(3).id] == ("stop", list(policy(prompt_of(3), 300)[0]))
            assert one.seen == other.seen == [(prompt_of(3), 300)]
            await servers.close()

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_no_server_left_is_one_sentence(kind: str) -> None:
    async def work() -> None:
        async with MadeUpServer(kind) as server:
            pass
        servers = servers_of(kind, [server.url], outage_s=0.05)
        with pytest.raises(NoServer, match=rf"no server has answered for 0.05 s: {server.url}"):
            await scheduler_of(servers, 80).next_step_async()
        await servers.close()

    run(work())


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("vllm", {"junk": b'data: {"choices": []}\n\n'}),
        *((kind, {"flaw": "crash"}) for kind in KINDS),
    ],
)
def test_a_request_that_takes_servers_down_is_given_up(kind: str, how: dict[str, Any]) -> None:
    async def work() -> None:
        async with MadeUpServer(kind, **how) as server:
            servers = servers_of(kind, [server.url])
            host = told(servers)
            servers.start([request(3)])
            await until(lambda: bool(host.ends))
            assert host.ends[request(3).id][0] == "failed" and len(server.seen) == 5
            await servers.close()

    run(work())


FLAWS = {
    ("vllm", "seeds"): "draws other tokens with the same seed$",
    ("sglang", "seeds"): "draws other tokens with the same seed: start SGLang with --enable-",
    ("vllm", "log-probs"): "cannot be used: it sent 16 tokens, and 0 log-probs",
    ("sglang", "log-probs"): "cannot be used: it sent no log-probs",
    ("vllm", "token ids"): "cannot be used: it sent no token ids",
    ("vllm", "stream"): "cannot be used: it does not stream, so that a response cannot be stopped",
    ("sglang", "abort"): "does not stop a response",
    ("sglang", "path"): "cannot be used: it answered 404",
    ("vllm", "redirect"): "cannot be used: it answered 302",
    ("vllm", "compressed"): r"cannot be used: it sent a compressed reply \(gzip\)",
    ("sglang", "compressed"): r"cannot be used: it sent a compressed reply \(gzip\)",
}


@pytest.mark.parametrize(("kind", "flaw"), FLAWS)
def test_what_a_server_does_not_do_is_one_sentence(kind: str, flaw: str) -> None:
    async def work() -> None:
        made = "vllm" if flaw == "path" else kind
        async with MadeUpServer(kind) as good, MadeUpServer(made, flaw=flaw) as server:
            servers = servers_of(kind, [good.url], abort_s=60.0)
            await servers.check()
            await servers.close()
            servers = servers_of(kind, [good.url, server.url], abort_s=60.0)
            with pytest.raises(ValueError, match=rf"{server.url} {FLAWS[kind, flaw]}"):
                await servers.check()
            await servers.close()

    run(work())


def event(choice: str) -> bytes:
    return b'data: {"choices": [%s]}\n\n' % choice.encode()


def reply(pairs: str, reason: str = '{"type": "stop"}') -> bytes:
    meta = f'"finish_reason": {reason}, "output_token_logprobs": {pairs}'
    return f'{{"meta_info": {{{meta}}}}}'.encode()


def choice(token: object, log_prob: object) -> bytes:
    return event(f'{{"token_ids": [{token}], "logprobs": {{"token_logprobs": [{log_prob}]}}}}')


JUNK = [
    ("vllm", b"data: {nonsense\n\n", "malformed"),
    ("vllm", b"data: [[[[\n\n", "array"),
    ("vllm", choice(VOCABULARY, -1), "of a vocabulary of"),
    ("vllm", choice(-1, -1), "of a vocabulary of"),
    ("vllm", choice("true", -1), "Expected `int`"),
    ("vllm", choice(3, "NaN"), "malformed"),
    ("vllm", choice(3, "null"), "as the logarithm of a probability"),
    ("vllm", choice(3, 2.5), "as the logarithm of a probability"),
    ("vllm", choice(3, '"-1"'), "Expected `float"),
    ("vllm", choice(", ".join("3" * 201), ", ".join("1" * 201)), "more than 200 tokens"),
    ("vllm", b"data: " + b" " * 10_000_000, "more than .* bytes"),
    ("vllm", event('{"token_ids": [], "finish_reason": "stop"}'), "without tokens"),
    ("sglang", b"\xff\xfe", "malformed"),
    ("sglang", b"{}", "missing required field"),
    ("sglang", reply("[[-1.0, 3]]"), "Expected `array` of length 3"),
    ("sglang", reply("[[null, 3, null]]"), "as the logarithm of a probability"),
    ("sglang", reply(f"[[-1, {1 << 70}, null]]"), "of a vocabulary of"),
    ("sglang", reply("[]"), "without tokens"),
    ("sglang", reply("[]", "null"), "Expected `object`"),
    ("sglang", b" " * 10_000_000, "more than .* bytes"),
]


@pytest.mark.parametrize(("kind", "junk", "says"), JUNK, ids=range(len(JUNK)))
def test_what_arrives_is_data(kind: str, junk: bytes, says: str) -> None:
    async def work() -> None:
        async with MadeUpServer(kind, junk=junk) as server:
            servers = servers_of(kind, [server.url])
            with pytest.raises(ValueError, match=says):
                await servers._wire.ask(server.url, servers._draw((1,), 2))
            host = told(servers)
            servers.start([request(3)])
            await until(lambda: bool(host.ends))
            assert host.ends[request(3).id][0] == "failed"
            assert not host.errors
            await servers.close()

    run(work())


def test_an_error_within_a_stream_is_a_lost_server() -> None:
    async def work() -> None:
        async with MadeUpServer("vllm", junk=b'data: {"error": {"message": "dead"}}\n\n') as server:
            servers = servers_of("vllm", [server.url])
            with pytest.raises(Lost, match=r"it failed: .*dead"):
                await servers._wire.ask(server.url, servers._draw((1,), 2))
            await servers.close()

    run(work())


def test_the_example_of_the_page() -> None:
    page = next(one for one in PAGES if one.name == "scheduler.md")
    example: dict[str, Any] = {}
    exec(next(one.text for one in blocks(page) if one.language == "python"), example)
    trained: list[list[bool]] = []

    async def train_on(groups: list[list[Response]]) -> None:
        trained.extend([len(one.log_probs) == len(one.tokens) > 0 for one in g] for g in groups)

    async def work() -> None:
        for kind in KINDS:
            async with MadeUpServer(kind) as server:
                prompts = [prompt_of(number) for number in range(20)]
                await example["run"](config(), kind, [server.url], prompts, train_on)

    run(work())
    assert trained == [[True] * SAMPLES] * 20 * len(KINDS)


def test_the_trainer_may_be_in_another_thread() -> None:
    async def work() -> None:
        async with MadeUpServer("vllm") as server:
            servers = servers_of("vllm", [server.url])
            scheduler = scheduler_of(servers, 80)
            step = await asyncio.to_thread(scheduler.next_step, LIMIT_S)
            assert step is not None and len(step.groups) == PROMPTS
            await servers.close()

    run(work())


def test_settings_that_cannot_be_right() -> None:
    async def work() -> None:
        for kind, urls, says in (
            ("trt", ["http://a"], "is not known"),
            ("vllm", [], "no server is given"),
            ("vllm", ["a:8000"], "is no address"),
        ):
            with pytest.raises(ValueError, match=says):
                servers_of(kind, urls)
        servers = servers_of("vllm", ["http://a"])
        with pytest.raises(RuntimeError, match=r"set servers\.scheduler"):
            servers.start([request(1)])
        await servers.close()

    run(work())
