"""The HTTP backend against a stub service that runs programs honestly, or misbehaves."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.endpoints import http as http_parts
from rollpacker.sandbox import fusion, http, open_sandbox, selftest
from rollpacker.sandbox.fusion import Trouble, parse_result
from rollpacker.sandbox.http import HttpSandbox, open_http
from rollpacker.sandbox.sandbox import Limits, Profile, SandboxUnavailable, Status
from tests.sandbox import fusion_stub as stubs
from tests.sandbox.fusion_stub import FusionStub, answers, fusion_stub, reply

HELLO = "print('hello')"
OUTPUT = 4096


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(http, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(fusion, "MARGIN_S", 5.0)


@asynccontextmanager
async def sandbox(stub: FusionStub, **settings: Any):
    limits = Limits(wall_s=5.0, output_bytes=OUTPUT)
    box = HttpSandbox(stub.url, **{"limits": limits, **settings})
    try:
        yield box
    finally:
        await box.close()


def with_stub(
    test: Callable[[FusionStub, HttpSandbox], Awaitable[Any]],
    runner: stubs.Runner = stubs.toy,
    **settings: Any,
) -> Any:
    """Run the test within 20 seconds, with a fresh stub and a sandbox that uses it."""

    async def run() -> Any:
        async with (
            asyncio.timeout(20),
            fusion_stub(runner) as stub,
            sandbox(stub, **settings) as box,
        ):
            return await test(stub, box)

    return asyncio.run(run())


# --- honest service -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "status", "exit_code", "stdout"),
    [
        (HELLO, Status.OK, 0, b"hello\n"),
        ("import sys; print(sys.stdin.read()[::-1])", Status.OK, 0, b"cba\n"),
        ("print(open('data/a.bin', 'rb').read())", Status.OK, 0, b"b'\\x00\\xff'\n"),
        ("import sys; print('x'); sys.exit(3)", Status.NONZERO, 3, b"x\n"),
        ("import os; os.kill(os.getpid(), 9)", Status.KILLED, None, b""),
        ("print('x' * 10000)", Status.OUTPUT, 0, b"x" * OUTPUT),
        ("while True: pass", Status.TIMEOUT, None, b""),
    ],
)
def test_how_programs_end(program, status, exit_code, stdout):
    async def test(stub, box):
        limits = Limits(wall_s=0.3, output_bytes=OUTPUT) if "while" in program else None
        files = {"data/a.bin": b"\x00\xff"}
        return await box.run(program, stdin="abc", files=files, limits=limits)

    result = with_stub(test, stubs.plain)
    assert (result.status, result.exit_code, result.stdout) == (status, exit_code, stdout)
    assert result.truncated is (status is Status.OUTPUT)


def test_the_request_is_sandbox_fusions():
    async def test(stub, box):
        await box.run(
            HELLO,
            stdin="in",
            files={"a": "text", "b/c": b"\xff"},
            limits=Limits(wall_s=2.5, memory_bytes=100 << 20),
        )
        return stub.requests[0]

    headers, body = with_stub(test, token="secret")
    assert headers[":request"] == "POST /run_code HTTP/1.1"
    assert headers["authorization"] == "Bearer secret"
    assert body == {
        "code": HELLO,
        "language": "python",
        "run_timeout": 2.5,
        "compile_timeout": 2.5,
        "memory_limit_MB": 100,
        "stdin": "in",
        "files": {"a": "dGV4dA==", "b/c": base64.b64encode(b"\xff").decode()},
        "fetch_files": [],
    }


def test_many_at_a_time_but_no_more_than_workers():
    running = most = 0

    async def counted(stub, request, writer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        await answers(reply("Finished", 0, request["stdin"]))(stub, request, writer)

    async def test(stub, box):
        stub.behaviour = counted
        return await asyncio.gather(*(box.run(HELLO, stdin=str(n)) for n in range(40)))

    results = with_stub(test, workers=4)
    assert [int(result.stdout) for result in results] == list(range(40))
    assert most == 4


def test_cancelling_a_run_ends_its_request():
    async def test(stub, box):
        stub.behaviour = stubs.hangs
        task = asyncio.create_task(box.run(HELLO))
        while not stub.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not stub.gone_away:
            await asyncio.sleep(0.01)
        stub.behaviour = stubs.honest
        assert (await box.run(HELLO)).status is Status.OK

    with_stub(test, workers=1)


# --- a service in trouble -------------------------------------------------------------------------

PASSING = {
    "500": answers(b"oops", 500),
    "502": answers(b"", 502),
    "503": answers(b"", 503),
    "408": answers(b"", 408),
    "429": answers(b"", 429, Retry_After="0.1"),
    "cut": stubs.cuts,
    "no HTTP": stubs.talks_nonsense,
    "no JSON": answers(b"<html>gateway</html>"),
    "empty": answers(b""),
    "deep JSON": answers(b"[" * 100_000),
    "another shape": answers({"status": "Success"}),
    "a list": answers([1, 2]),
    "unknown status": answers({"status": "Great", "run_result": {}}),
    "no code": answers(reply("Finished", None)),
    "code is true": answers(reply("Finished", True)),
    "NaN seconds": answers(reply("Finished", 0, seconds=float("nan"))),
    "stdout a list": answers(
        {"status": "Success", "run_result": {**reply("Finished", 0)["run_result"], "stdout": [1]}}
    ),
    "SandboxError": answers({"status": "SandboxError", "message": "no container"}),
    "Error": answers({"status": "Failed", "run_result": {"status": "Error", "stderr": "e"}}),
    "gzip bomb": stubs.gzip_bomb,
    "endless garbage": stubs.endless(b"<html>"),
}


def test_trouble_that_passes_is_retried_with_the_same_key():
    async def test(stub, box):
        keys = set()
        for name, trouble in PASSING.items():
            stub.requests.clear()
            stub.script.append(trouble)
            result = await box.run(HELLO)
            assert (result.status, result.stdout) == (Status.OK, b"hello\n"), name
            first, second = (headers["idempotency-key"] for headers, _ in stub.requests)
            assert first == second, name
            keys.add(first)
        assert len(keys) == len(PASSING)

    with_stub(test)


@pytest.mark.parametrize("trouble", ["500", "cut", "no JSON", "SandboxError", "gzip bomb"])
def test_trouble_with_one_program_is_an_error_and_nobody_elses(trouble):
    async def test(stub, box):
        stub.behaviour = stubs.unless(lambda code: "poison" in code, PASSING[trouble])
        poison = [box.run(f"'poison {n}'") for n in range(4)]
        others = [box.run(f"print({n})") for n in range(8)]
        return await asyncio.gather(*poison, *others)

    results = with_stub(test)
    assert [result.status for result in results[:4]] == [Status.SANDBOX_ERROR] * 4
    assert [result.stdout for result in results[4:]] == [b"%d\n" % n for n in range(8)]
    assert all(result.detail.startswith("the sandbox at http://127.") for result in results[:4])


REFUSALS = {
    "401": (answers(b"", 401), "Set sandbox.token_env"),
    "403": (answers(b"", 403), "Set sandbox.token_env"),
    "404": (answers(b"", 404), "sandbox.url must be the address"),
    "302": (answers(b"", 302, Location="http://169.254.169.254/x"), "redirects are not followed"),
    "422": (answers(b"", 422), "answered 422"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_is_told_at_once(refusal, caplog):
    behaviour, words = REFUSALS[refusal]

    async def test(stub, box):
        stub.behaviour = behaviour
        with pytest.raises(SandboxUnavailable, match=words):
            await box.probe(attempts=3)
        results = await asyncio.gather(*(box.run(HELLO) for _ in range(3)))
        assert len(stub.requests) == 4
        return results

    for result in with_stub(test):
        assert result.status is Status.SANDBOX_ERROR
        assert words in result.detail
    assert len([record for record in caplog.records if words in record.message]) == 1


@pytest.mark.parametrize("slow", [stubs.hangs, stubs.drips])
def test_one_attempt_has_a_total_time(slow, monkeypatch):
    monkeypatch.setattr(fusion, "MARGIN_S", 0.2)

    async def test(stub, box):
        stub.behaviour = slow
        began = time.perf_counter()
        result = await box.run(HELLO, limits=Limits(wall_s=0.2))
        return result, time.perf_counter() - began, len(stub.requests)

    result, seconds, num_requests = with_stub(test)
    assert result.status is Status.SANDBOX_ERROR
    assert "did not answer within 0.4 s" in result.detail
    assert num_requests == 2
    assert 0.8 <= seconds < 60.0  # it hangs for an hour


def test_a_flood_of_output_is_bounded_and_the_programs_own_doing():
    async def test(stub, box):
        begin = b'{"status": "Success", "run_result": {"stdout": "\\u00e9\\n'
        stub.behaviour = stubs.endless(begin)
        tracemalloc.start()
        result = await box.run(HELLO)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return result, peak, len(stub.requests)

    result, peak, num_requests = with_stub(test)
    assert (result.status, result.truncated, num_requests) == (Status.OUTPUT, True, 1)
    assert result.stdout == "é\n".encode() + b"x" * (OUTPUT - 3)
    assert peak < 4 << 20


def test_a_pause_that_the_service_asks_for_is_kept_but_not_any(monkeypatch):
    monkeypatch.setattr(http_parts, "MAX_RETRY_AFTER_S", 0.3)

    async def test(stub, box):
        stub.script.append(answers(b"", 429, Retry_After="86400"))
        began = time.perf_counter()
        assert (await box.run(HELLO)).status is Status.OK
        return time.perf_counter() - began

    assert 0.3 <= with_stub(test) < 60.0  # it asks for a day


def test_being_busy_costs_no_attempts():
    async def test(stub, box):
        left = iter(range(6))
        busy = answers(b"", 429, Retry_After="0.1")
        stub.behaviour = stubs.unless(lambda code: "hello" in code and next(left, 6) < 6, busy)
        result = await box.run(HELLO)
        assert len([code for code in stub.programs if code == HELLO]) == 7 > http.ATTEMPTS
        return result

    assert with_stub(test).status is Status.OK


def test_a_compressed_reply_is_named():
    async def test(stub, box):
        stub.behaviour = stubs.unless(lambda code: code == HELLO, stubs.gzip_bomb)
        return await box.run(HELLO)

    assert "sent a compressed reply (gzip)" in with_stub(test).detail


# --- an outage ------------------------------------------------------------------------------------


def test_runs_wait_while_the_service_is_down(caplog):
    async def test(stub, box):
        await stub.stop()
        runs = [asyncio.create_task(box.run(f"print({n})")) for n in range(12)]
        while box.outage() is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.8)
        outage = box.outage()
        assert not any(run.done() for run in runs)
        await stub.start()
        results = await asyncio.gather(*runs)
        assert box.outage() is None
        return outage, results, stub.programs

    outage, results, programs = with_stub(test)
    assert [result.stdout for result in results] == [b"%d\n" % n for n in range(12)]
    assert outage.startswith("the sandbox at http://127.0.0.1:")
    assert re.search(r"has been down for \d+ s \(cannot be reached \(", outage)
    assert "importlib.util" in programs[0]  # a harmless program asked whether it is back
    assert len(programs) <= 14
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2 and "answers again after" in told[1]


def test_an_outage_without_end_is_an_error_and_never_a_verdict():
    async def test(stub, box):
        await stub.stop()
        began = time.perf_counter()
        results = await asyncio.gather(*(box.run(HELLO) for _ in range(20)))
        seconds = time.perf_counter() - began
        await stub.start()
        return results, seconds, await box.run(HELLO)

    results, seconds, after = with_stub(test, outage_s=2.0, workers=2)
    assert {result.status for result in results} == {Status.SANDBOX_ERROR}
    assert all("did not come back" in result.detail for result in results)
    # All at one time: ten sets of workers, one after the other, take 20 s.
    assert 1.9 < seconds < 15
    assert after.status is Status.OK


# --- what is refused before anything is sent ------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", ".", "a\0b"])
def test_file_names_stay_in_the_folder(name):
    async def test(stub, box):
        with pytest.raises(ValueError, match="file name"):
            await box.run(HELLO, files={name: b""})
        assert not stub.requests

    with_stub(test)


def test_what_cannot_be_sent():
    async def test(stub, box):
        with pytest.raises(ValueError, match="no sandbox profile 'math'; there are python, cold"):
            await box.run(HELLO, profile="math")
        binary = await box.run(HELLO, stdin=b"\xff")
        assert not stub.requests
        surrogate = await box.run("print('\ud800')")
        return binary, surrogate

    binary, surrogate = with_stub(test, stubs.plain)
    assert binary.status is Status.SANDBOX_ERROR and "not UTF-8" in binary.detail
    assert (surrogate.status, surrogate.stdout) == (Status.OK, b"?\n")


@pytest.mark.parametrize(
    ("url", "token", "words"),
    [
        ("ftp://host", None, "no address"),
        ("host:8080", None, "no address"),
        ("http://", None, "no address"),
        ("http://host:99999", None, "no address"),
        ("http://user:pass@host", None, "holds a password"),
        ("http://user@host", None, "holds a password"),
        ("http://host/?token=x", None, "without query"),
        ("http://[::1", "secret", "no address"),
        ("localhost:8080", "secret", "no address"),
        ("http://127.0.0.1:1", "", "not set"),
        ("http://127.0.0.1:1", "two\nlines", "holds no token"),
        ("http://sandbox.example", "secret", "not encrypted"),
        ("http://localhost.example", "secret", "not encrypted"),
        ("http://127.0.0.1:1", "secret", "cannot be reached"),
        ("http://localhost:1", "secret", "Check that the service runs"),
    ],
)
def test_addresses_and_tokens(url, token, words, monkeypatch):
    if token is not None:
        monkeypatch.setenv("SANDBOX_TOKEN", token)

    async def test():
        async with open_http(url, token_env=None if token is None else "SANDBOX_TOKEN"):
            raise AssertionError("opened")

    with pytest.raises(SandboxUnavailable, match=words) as caught:
        asyncio.run(test())
    assert not token or token not in str(caught.value)


def test_the_token_is_in_no_message(monkeypatch, caplog):
    monkeypatch.setenv("SANDBOX_TOKEN", "s3cr3t")

    async def test():
        async with fusion_stub() as stub:
            passing = (PASSING[name] for name in ("500", "cut", "no JSON", "SandboxError"))
            for behaviour in (*passing, *(refusal[0] for refusal in REFUSALS.values())):
                stub.behaviour = behaviour
                with pytest.raises(SandboxUnavailable) as caught:
                    async with open_http(stub.url, token_env="SANDBOX_TOKEN"):
                        pass
                assert "s3cr3t" not in str(caught.value)
            assert {headers["authorization"] for headers, _ in stub.requests} == {"Bearer s3cr3t"}

    with caplog.at_level(logging.DEBUG):
        asyncio.run(test())
    assert "s3cr3t" not in caplog.text


# --- a real sandbox behind the service ------------------------------------------------------------


@asynccontextmanager
async def bubblewrap():
    """Skips, and says so, where there is none."""
    async with AsyncExitStack() as stack:
        try:
            box = await stack.enter_async_context(open_sandbox("bwrap", workers=2))
        except SandboxUnavailable as error:
            pytest.skip(f"NO SANDBOX HERE, nothing tested: {error}")
        yield box


def test_a_service_that_isolates_is_accepted():
    async def test():
        async with (
            bubblewrap() as inner,
            fusion_stub(stubs.in_sandbox(inner)) as stub,
            open_sandbox(url=stub.url, wall_s=3.0) as box,
        ):
            seen = box.capabilities
            ran = await box.run("print(input())", stdin="hello", files={"a": "b"})
        return inner.capabilities, seen, ran

    inner, seen, ran = asyncio.run(test())
    assert (seen.backend, seen.failed) == ("http", ())
    assert seen.passed == inner.passed
    assert (ran.status, ran.stdout) == (Status.OK, b"hello\n")
    assert seen.can_fork is inner.can_fork


def test_what_a_service_has_is_asked():
    profile = Profile(name="tenant", packages=("json", "re"))
    missing = Profile(name="tenant", packages=("json", "no_such_package"))

    async def test(stub, box):
        assert await box.probe() is True
        assert (await box.run("print(1)", profile=profile)).stdout == b"1\n"
        num_asked = len(stub.requests)
        assert await box.lacks(profile) == "" and len(stub.requests) == num_asked
        with pytest.raises(ValueError, match=r"lacks .* of the profile 'tenant': no_such_package"):
            await box.run("print(1)", profile=missing)
        runner = stub.runner

        async def poor(request):
            code = request["code"].replace("\nprint", "\nos.fork = None\nprint", 1)
            code = code.replace("except (OSError,", "except (TypeError, OSError,")
            return await runner({**request, "code": code})

        stub.runner = poor
        return await box.probe()

    assert with_stub(test, stubs.plain) is False


def test_a_service_that_leaks_is_refused():
    """It runs programs in a sandbox, and then shows them something of this machine all the same."""

    async def test():
        async with bubblewrap() as inner:
            honest = stubs.in_sandbox(inner)

            async def leaky(request):
                answer = await honest(request)
                if "/etc/passwd" in request["code"]:
                    answer["run_result"]["stdout"] += Path("/etc/passwd").read_text()
                return answer

            async with fusion_stub(leaky) as stub, open_http(stub.url):
                raise AssertionError("opened")

    with pytest.raises(SandboxUnavailable, match=r"does not contain these attacks.*: host files"):
        asyncio.run(test())


def test_a_service_that_says_success_to_everything_is_refused():
    async def test():
        async with fusion_stub() as stub:
            stub.behaviour = answers(reply("Finished", 0, "42\n"))
            async with open_http(stub.url):
                raise AssertionError("opened")

    with pytest.raises(SandboxUnavailable, match="does not run Python programs"):
        asyncio.run(test())


def test_harm_to_the_service_alone_is_a_warning(monkeypatch, caplog):
    async def self_test(box, *, backend):
        return ("runs",), ("disk",)

    monkeypatch.setattr(selftest, "self_test", self_test)

    async def test():
        async with fusion_stub() as stub, open_http(stub.url) as box:
            return box.capabilities

    assert asyncio.run(test()).failed == ("disk",)
    assert "does not contain these attacks of the self-test: disk." in caplog.text


# --- replies --------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = (
    *("status", "message", "run_result", "run_result.status", "run_result.return_code"),
    *("run_result.stdout", "run_result.stderr", "run_result.execution_time"),
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1), st.booleans())
def test_a_reply_with_changed_fields_is_a_result_or_trouble(changes, is_good):
    fields = reply("Finished", 0 if is_good else 1, "out")
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        if not inner:
            fields[outer] = value
        elif isinstance(fields.get(outer), dict):
            fields[outer][inner] = value
    try:
        result = parse_result(json.dumps(fields).encode(), Limits())
    except Trouble:
        return
    assert result.status is not Status.SANDBOX_ERROR
    if result.status is Status.OK:
        assert fields["run_result"]["return_code"] == 0


@given(st.text(), st.integers(0, 100))
def test_stdout_of_a_reply_that_was_cut_off(text, cut):
    whole = json.dumps(reply("Finished", 0, text)).encode()
    assert fusion._stdout_so_far(whole) == text.encode(errors="backslashreplace")
    part = fusion._stdout_so_far(whole[: whole.index(b'"stdout": "') + 11 + cut])
    assert text.encode(errors="backslashreplace").startswith(part)


@given(st.binary(max_size=200))
def test_any_bytes_are_trouble(reply_bytes):
    with pytest.raises(Trouble):
        parse_result(reply_bytes, Limits())
