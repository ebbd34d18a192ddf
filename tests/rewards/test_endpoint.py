"""An endpoint that is slow, busy, down or hostile: nothing is lost, defaulted or piled up."""

import asyncio
import email.utils
import gzip
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollpacker.endpoints.http import retry_after_s
from rollpacker.rewards.judge.completer import CompletionFailed
from rollpacker.rewards.judge.endpoint import EndpointCompleter, error_text, reply_text
from rollpacker.rewards.reward import Cause
from tests.rewards.judge_stub import Answer, Asked, Stub, serve

ASK = [{"role": "user", "content": "Well?"}]
OK = Answer("fine")
ZIPPED = Answer("sound, but compressed")


def completer(url: str, **settings: Any) -> EndpointCompleter:
    settings = {"max_retries": 3, "first_backoff_s": 0.01, "probe_every_s": 0.05} | settings
    return EndpointCompleter(url=url, model="stub", **settings)


def completed(
    respond: Callable[[Asked], Answer | str],
    count: int = 1,
    timeout_s: float = 60.0,
    **settings: Any,
) -> tuple[list[Any], Stub, EndpointCompleter]:
    """What so many requests at once came to: text or `CompletionFailed`."""

    async def run() -> tuple[list[Any], Stub, EndpointCompleter]:
        async with serve(respond) as stub:
            endpoint = completer(stub.url, **settings)
            try:
                calls = (endpoint.complete(ASK, timeout_s=timeout_s) for _ in range(count))
                return await asyncio.gather(*calls, return_exceptions=True), stub, endpoint
            finally:
                await endpoint.close()

    return asyncio.run(run())


def first(*bad: Answer) -> Callable[[Asked], Answer]:
    """These answers, then good ones."""
    return lambda asked: bad[asked.number] if asked.number < len(bad) else OK


@pytest.mark.parametrize(
    "bad",
    [
        Answer("busy", status=429),
        Answer("busy", status=429, headers={"Retry-After": "0.01"}),
        Answer("busy", status=429, headers={"Retry-After": "soon"}),
        Answer("late", status=408),
        Answer("clash", status=409),
        Answer("oops", status=500),
        Answer(status=503, body=b"<html>down</html>"),
        Answer(status=502, body=b"\xff\x00" * 100),
        Answer(body=b'{"error": {"message": "overloaded"}}'),
        Answer(body=b""),
        Answer(body=b"null"),
        Answer(body=b"[" * 200_000),
        Answer(body=b'{"choices": []}'),
        Answer(body=b'{"choices": [{"message": {"content": 5}}]}'),
        Answer("sound, but far too long " * 100_000),
        Answer("half of it", cut_at=20),
        Answer("nothing", cut_at=0),
        Answer(body=gzip.compress(b"0" * 30_000_000), headers={"Content-Encoding": "gzip"}),
        Answer(body=gzip.compress(ZIPPED.payload()), headers={"Content-Encoding": "gzip"}),
        Answer("swapped", headers={"X-Request-Id": "rollpacker-of-another-request"}),
    ],
)
def test_what_may_pass_is_tried_again(bad: Answer) -> None:
    replies, stub, endpoint = completed(first(bad, bad))
    assert replies == ["fine"]
    assert len(stub.asked) == 3
    assert endpoint.num_retries == 2


@pytest.mark.parametrize("slow", [Answer("slow", delay_s=30), Answer("drip by drip", drip_s=0.05)])
def test_an_attempt_is_limited_as_a_whole(slow: Answer) -> None:
    started = time.monotonic()
    replies, *_ = completed(first(slow), timeout_s=0.5)
    assert replies == ["fine"]
    assert time.monotonic() - started < 25.0


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "Set token_env"),
        (403, "Set token_env"),
        (404, "Correct model or url"),
        (307, "final address"),
        (301, "final address"),
        (405, "Correct url or request"),
    ],
)
def test_a_wrong_set_up_fails_at_once(status: int, told: str) -> None:
    headers = {"Location": "http://169.254.169.254/latest"} if status < 400 else {}
    replies, stub, _ = completed(lambda asked: Answer("no", status=status, headers=headers))
    assert isinstance(replies[0], CompletionFailed)
    assert replies[0].wrong_set_up
    assert told in str(replies[0])
    assert str(status) in str(replies[0])
    assert len(stub.asked) == 1


def test_a_key_never_shows() -> None:
    def leaks(asked: Asked) -> Answer:
        return Answer(f"wrong key {asked.headers['authorization']}", status=401)

    replies, *_ = completed(leaks, token="sk-secret")
    assert "sk-secret" not in str(replies[0])
    assert "wrong key" in str(replies[0])


def test_a_request_that_is_refused_is_the_samples_own() -> None:
    replies, stub, _ = completed(lambda asked: Answer("context too long", status=400))
    assert replies[0].cause is Cause.SAMPLE
    assert "context too long" in str(replies[0])
    assert len(stub.asked) == 1


def test_schema_is_dropped_where_it_is_refused() -> None:
    def no_schema(asked: Asked) -> Answer:
        return Answer("what?", status=400) if "response_format" in asked.body else OK

    async def run() -> Stub:
        async with serve(no_schema) as stub:
            endpoint = completer(stub.url, schema={"type": "object"})
            for _ in range(3):
                assert await endpoint.complete(ASK, timeout_s=60) == "fine"
            await endpoint.close()
            return stub

    assert ["response_format" in asked.body for asked in asyncio.run(run()).asked] == [
        *(True, False),
        *(False, False),
    ]


def test_a_bad_sample_does_not_cost_the_others_their_schema() -> None:
    def too_long(asked: Asked) -> Answer:
        return Answer("too long", status=400) if asked.number < 2 else OK

    async def run() -> Stub:
        async with serve(too_long) as stub:
            endpoint = completer(stub.url, schema={"type": "object"})
            with pytest.raises(CompletionFailed, match="too long"):
                await endpoint.complete(ASK, timeout_s=60)
            await endpoint.complete(ASK, timeout_s=60)
            await endpoint.close()
            return stub

    asked = asyncio.run(run()).asked
    assert ["response_format" in one.body for one in asked] == [True, False, True]


def test_half_an_hour_of_outage_scaled_down() -> None:
    """Busy, failing, hanging and closed by turns for 2 s (standing for 1800 s of 1800 s allowed):
    every request is answered in the end, and there are never more open than allowed."""
    trouble = (
        Answer("busy", status=429, headers={"Retry-After": "0.1"}),
        Answer("down", status=503),
        Answer("hangs", delay_s=30),
        Answer("oops", status=500),
        Answer("cut", cut_at=10),
    )
    began: list[float] = []

    def respond(asked: Asked) -> Answer:
        began.append(time.monotonic())
        is_back = began[-1] > began[0] + 2.0 and asked.number >= len(trouble)
        return OK if is_back else trouble[asked.number % len(trouble)]

    replies, stub, endpoint = completed(
        respond, count=200, timeout_s=3.0, concurrency=8, outage_s=60.0
    )
    assert replies == ["fine"] * 200
    assert stub.max_open <= 8
    assert endpoint.waited_s > 1.0
    during = len(stub.asked) - 200
    print(f"200 of 200 answered after the outage; {during} attempts during it")
    assert during < 120


def test_a_server_that_is_not_there_is_waited_for() -> None:
    async def run() -> None:
        async with serve(lambda asked: OK) as stub:
            url = stub.url
        endpoint = completer(url, max_retries=1)
        call = asyncio.create_task(endpoint.complete(ASK, timeout_s=60))
        while endpoint.outage() is None:
            await asyncio.sleep(0.01)
        assert "has been down for" in (endpoint.outage() or "")
        assert not call.done()
        server = await asyncio.start_server(stub._serve, "127.0.0.1", int(url[17:-3]))
        assert await asyncio.wait_for(call, 60) == "fine"
        assert endpoint.outage() is None
        await endpoint.close()
        server.close()

    asyncio.run(run())


def test_an_outage_ends_at_its_limit_without_a_verdict() -> None:
    started = time.monotonic()
    replies, stub, _ = completed(
        lambda asked: Answer("down for good", status=503), count=40, concurrency=4, outage_s=0.5
    )
    assert {reply.cause for reply in replies} == {Cause.INFRASTRUCTURE}
    assert "down for good" in str(replies[0])
    assert time.monotonic() - started < 60.0
    assert stub.max_open <= 4


def test_one_request_that_the_server_cannot_answer_does_not_wait_for_ever() -> None:
    """It makes the server fail, which answers everybody else: no outage, however often."""

    def poisoned(asked: Asked) -> Answer:
        return Answer("oops", status=500) if "Well" in asked.user else OK

    started = time.monotonic()
    replies, *_ = completed(poisoned, max_retries=4, outage_s=600.0)
    assert replies[0].cause is Cause.INFRASTRUCTURE
    assert "while it answers others" in str(replies[0])
    assert time.monotonic() - started < 60.0


def test_a_busy_endpoint_is_not_a_failing_one() -> None:
    """More 429s than retries, while it answers others: the request waits for its turn."""

    def crowded(asked: Asked) -> Answer:
        return Answer("busy", status=429) if asked.number < 7 and "Well" in asked.user else OK

    replies, stub, _ = completed(crowded, max_retries=1)
    assert replies == ["fine"]
    assert len(stub.asked) == 8


def test_retry_after_holds_for_everybody() -> None:
    times: list[float] = []

    def respond(asked: Asked) -> Answer:
        times.append(time.monotonic())
        return Answer("busy", status=429, headers={"Retry-After": "0.5"}) if len(times) == 1 else OK

    async def run() -> None:
        async with serve(respond) as stub:
            endpoint = completer(stub.url)
            early = asyncio.create_task(endpoint.complete(ASK, timeout_s=60))
            while endpoint.num_retries == 0:
                await asyncio.sleep(0.01)
            await endpoint.complete(ASK, timeout_s=60)
            await early
            await endpoint.close()

    asyncio.run(run())
    assert len(times) == 3
    assert all(later - times[0] >= 0.45 for later in times[1:])


def test_retry_after() -> None:
    now = 1_700_000_000.0

    def date(seconds: float) -> str:
        return email.utils.formatdate(now + seconds, usegmt=True)

    assert [retry_after_s(value, now) for value in ("3", "0", "1.5", "-5")] == [3, 0, 1.5, 0]
    assert [retry_after_s(value, now) for value in ("86400", "1e309", "9" * 400)] == [60] * 3
    assert retry_after_s(date(20), now) == 20
    assert retry_after_s(date(-20), now) == 0
    assert retry_after_s(date(10**8), now) == 60
    for value in (None, "", "soon", "nan", "Mon, 99 Foo 2026 99:99:99 GMT", "\x00"):
        assert retry_after_s(value, now) is None


def test_reply_text() -> None:
    def body(content: object) -> bytes:
        return json.dumps({"choices": [{"message": {"content": content}}]}).encode()

    assert reply_text(body("x")) == "x"
    assert reply_text(body(None)) == ""
    for bad in (
        body(1),
        body(["x"]),
        b"",
        b"\xff",
        b"{}",
        b'{"choices": {}}',
        b"7",
        b"[" * 100_000,
    ):
        assert reply_text(bad) is None
    assert error_text(b'{"error": {"message": "no\\n\\u001b[31mway"}}') == "no [31mway"
    assert error_text(b'{"error": "plain"}') == "plain"
    assert error_text(b"<html>") == "<html>"


def test_cancelled_requests_leave_nothing_open() -> None:
    async def run() -> Stub:
        async with serve(lambda asked: Answer("slow", delay_s=30)) as stub:
            endpoint = completer(stub.url, concurrency=2)
            calls = [asyncio.create_task(endpoint.complete(ASK, timeout_s=60)) for _ in range(4)]
            while stub.num_open < 2:
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            stub.respond = lambda asked: OK
            assert await endpoint.complete(ASK, timeout_s=60) == "fine"
            await endpoint.close()
            return stub

    asyncio.run(run())
