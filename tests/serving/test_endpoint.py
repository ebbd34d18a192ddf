"""A policy behind chat completions, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.engines.engine import Response
from rollpacker.serving import chat
from rollpacker.serving.sessions import Asked, Sessions, read_recorded
from tests.dialogue.families import SEARCH, template_of, tokenizer_of
from tests.serving.fakes import TOKEN, ScriptedEngine, served

openai = pytest.importorskip("openai")

QUESTION = {"role": "user", "content": "where is the town?"}


def asked(record: Path | None = None, engine: ScriptedEngine | None = None, **settings: Any) -> Any:
    """Decorates a test's coroutine, which is given a client and an engine: runs it."""

    def run(test: Any) -> ScriptedEngine:
        made = engine or ScriptedEngine(template_of("chatml"))

        async def all_of_it() -> None:
            async with served(template_of("chatml"), made, record, **settings) as url:
                client = openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
                async with client:
                    await test(client, made)

        asyncio.run(all_of_it())
        return made

    return run


async def session(client: Any, name: str, num_turns: int, *, stream: bool) -> None:
    """A dialogue with tools, as clients hold one."""
    messages: list[Any] = [{"role": "user", "content": f"question of {name}"}]
    for _ in range(num_turns):
        settings = {"model": "any", "messages": messages, "tools": [SEARCH], "user": name}
        if stream:
            message = await streamed(client, **settings)
        else:
            response = await client.chat.completions.create(**settings)
            message = response.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        for call in calls:
            found = json.loads(call["function"]["arguments"])["query"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
        if not calls:
            messages.append({"role": "user", "content": "and then?"})


async def streamed(client: Any, **settings: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    async for chunk in await client.chat.completions.create(stream=True, **settings):
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for call in delta.tool_calls or ():
            made = call.model_dump(exclude={"index"})
            message.setdefault("tool_calls", []).append(made)
    return message


def test_a_session_is_one_trajectory_of_the_tokens_that_were_drawn(tmp_path: Path) -> None:
    """With tools, streamed or not, several at once: ids and log-probs are the engine's."""

    async def test(client: Any, engine: ScriptedEngine) -> None:
        names = [f"s{n}" for n in range(8)]
        await asyncio.gather(
            *(session(client, name, 4, stream=bool(n % 2)) for n, name in enumerate(names))
        )

    engine = asked(tmp_path / "kept")(test)
    recorded = read_recorded(tmp_path / "kept")
    assert sorted(str(name) for name, _ in recorded) == [f"s{n}" for n in range(8)]
    last = [one for one in engine.answered if one[0].turn == 4]
    whole = {request.prompt_tokens + response.tokens for request, response in last}
    assert {one.prompt + one.tokens for _, one in recorded} == whole
    drawn = {(response.tokens, response.log_probs) for _, response in engine.answered}
    for _, trajectory in recorded:
        turns = [(one.tokens, one.log_probs) for one in trajectory.turns]
        assert len(turns) == 4 and set(turns) <= drawn
        text = template_of("chatml", (SEARCH,)).text_of(trajectory.prompt + trajectory.tokens)
        assert text.count("<tool_call>") == 2 + 1  # the template's own words have one
        # No tokenizer would have made these tokens of that text.
        assert template_of("chatml").canonical(text) != trajectory.prompt + trajectory.tokens


def test_calls_that_do_not_extend_another_begin_anew(tmp_path: Path) -> None:
    async def test(client: Any, engine: ScriptedEngine) -> None:
        create = client.chat.completions.create
        first = await create(model="m", messages=[QUESTION], user="a")
        said = {"role": "assistant", "content": first.choices[0].message.content}
        for user, other in (
            ("a", said),  # goes on
            ("b", said),  # another session's
            ("a", {**said, "content": "what was not said"}),
        ):
            await create(model="m", messages=[QUESTION, other, QUESTION], user=user)
        turns = [request.turn for request, _ in engine.answered]
        assert turns == [1, 2, 1, 1]

    asked(tmp_path)(test)
    assert len(read_recorded(tmp_path)) == 3
    with (tmp_path / "sessions.jsonl").open("a") as file:
        file.write('{"call": 9, "sess')  # it was cut off
    assert len(read_recorded(tmp_path)) == 3


def test_what_a_client_asks_for() -> None:
    async def test(client: Any, engine: ScriptedEngine) -> None:
        create = client.chat.completions.create
        found = await create(
            model="m",
            messages=[QUESTION],
            n=2,
            seed=5,
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=9,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        (one, response), (other, _) = engine.answered
        assert one.sampling == other.sampling and one.noise != other.noise
        assert (one.sampling.seed, one.sampling.temperature, one.sampling.top_p) == (5, 0.5, 0.9)
        choice = found.choices[0]
        assert [c.index for c in found.choices] == [0, 1] and choice.finish_reason == "length"
        assert tuple(choice.token_ids) == response.tokens
        assert tuple(found.prompt_token_ids) == one.prompt_tokens
        told = tuple(token.logprob for token in choice.logprobs.content)
        assert told == response.log_probs
        assert found.usage.completion_tokens == 18
        assert found.usage.prompt_tokens == len(one.prompt_tokens)
        again = await create(model="m", messages=[QUESTION], seed=5)
        assert engine.answered[2][0].noise == one.noise and again.model == "m"
        cut = await create(model="m", messages=[QUESTION, *CALLED], stop=["world"])
        assert cut.choices[0].message.content == "hello "
        assert [model.id for model in (await client.models.list()).data] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another")

    say = ScriptedEngine(template_of("chatml"), say=lambda request: "hello world of towns")
    asked(engine=say)(test)


CALLED = ({"role": "assistant", "content": "an answer"}, {"role": "user", "content": "more"})


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ({"messages": []}, 400, "messages must be a list"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "x"}]}, 400, "assistant's own"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "no text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "'wizard', not one of system,"),
        ({"temperature": "warm"}, 400, "temperature must be a number"),
        ({"n": 0}, 400, "n must lie between 1 and 128"),
        ({"tools": [{"type": "function"}]}, 400, "tools must be a list"),
        ({"tools": [SEARCH], "tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"extra_body": {"min_p": 0.1}}, 400, "min_p is not supported here"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "context is 4096"),
    ],
)
def test_what_cannot_be_is_refused_in_the_shape_of_openai(
    more: dict[str, Any], status: int, message: str
) -> None:
    async def test(client: Any, engine: ScriptedEngine) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**{"model": "m", "messages": [QUESTION], **more})
        assert caught.value.status_code == status
        assert message in caught.value.body["message"]
        assert caught.value.body["type"] == "invalid_request_error"
        assert not engine.answered

    asked()(test)


def test_others_are_turned_away() -> None:
    async def test(client: Any, engine: ScriptedEngine) -> None:
        stranger = client.with_options(api_key="another")
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="m", messages=[QUESTION])
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        assert not engine.answered

    asked()(test)


def test_a_slash_behind_a_path_changes_nothing() -> None:
    """Clients that put a base address and a path together by hand send one; not all of them follow
    a redirection, and few do with what they post."""

    def told(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.url == url
            found: dict[str, Any] = json.load(response)
            return found

    async def test() -> None:
        async with served(template_of("chatml"), ScriptedEngine(template_of("chatml"))) as url:
            models = await asyncio.to_thread(told, f"{url}/models/")
            assert models == await asyncio.to_thread(told, f"{url}/models")
            [model] = models["data"]
            assert model == await asyncio.to_thread(told, f"{url}/models/{model['id']}/")
            body = {"model": model["id"], "messages": [QUESTION]}
            answer = await asyncio.to_thread(told, f"{url}/chat/completions/", body)
            assert answer["choices"][0]["message"]["role"] == "assistant"

    asyncio.run(test())


def test_who_hangs_up_is_taken_from_the_engine() -> None:
    async def test(client: Any, engine: ScriptedEngine) -> None:
        async def ask(stream: bool) -> None:
            settings = {"model": "m", "messages": [QUESTION], "stream": stream}
            async for _ in await client.chat.completions.create(**settings):
                pass

        for number, stream in enumerate((False, True), 1):
            asking = asyncio.ensure_future(ask(stream))
            async with asyncio.timeout(60):
                while engine.most_at_once < number:
                    await asyncio.sleep(0.01)
                asking.cancel()
                while len(engine.aborted) < number:
                    await asyncio.sleep(0.01)
            with pytest.raises(asyncio.CancelledError):
                await asking

    asked(engine=ScriptedEngine(template_of("chatml"), seconds=600.0))(test)


def test_nobody_goes_on_from_somebody_elses_answer() -> None:
    """Two answers that read alike, of other tokens: which one is gone on from, nobody knows."""
    tokenizer = tokenizer_of("chatml")
    sessions = Sessions(TemplateDialogue(DialogueTemplate(tokenizer)))

    def asked(*messages: dict[str, Any]) -> Asked:
        return sessions.asked(chat.read_chat(json.dumps({"messages": messages}).encode()))

    def answered(call: Asked, text: str) -> dict[str, Any]:
        ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        response = Response(
            sample=SampleId(PromptId("s", 0, 0), 0, 0),
            prompt_tokens=call.tokens,
            tokens=ids,
            log_probs=(-1.0,) * len(ids),
            finish_reason="stop",
            version=0,
        )
        wire = chat.on_wire(call.dialogue.message(ids, 1))
        sessions.answered(call, response, wire)
        return wire

    question, more = ({"role": "user", "content": text} for text in ("2+2?", "Sure?"))
    said = answered(asked(question), "4")
    assert asked(question, said, more).head is not None
    answered(asked(question), "4")  # the same tokens: whose they are makes no difference
    assert asked(question, said, more).head is not None
    answered(asked(question), " 4 ")
    assert asked(question, said, more).head is None


def test_a_text_that_is_no_unicode_comes_back() -> None:
    """JSON can name half of a pair of surrogates, which UTF-8 cannot write."""

    @asked()
    async def test(client: Any, engine: ScriptedEngine) -> None:
        body = json.dumps({"model": "\ud800", "messages": [QUESTION]}).encode()
        found = await client._client.post(
            "chat/completions", content=body, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        assert (found.status_code, found.json()["model"]) == (200, "\ud800")
