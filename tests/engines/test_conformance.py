"""What every engine promises (`engines/engine.py`), on each of `engines.ENGINES`."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import (
    Carried,
    Engine,
    EngineConfig,
    EngineError,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.engines.engine_worker import EngineHost
from rollpacker.engines.messages import Work
from rollpacker.weights.buffer import WeightBuffer
from rollpacker.weights.probe import weight_probe
from tests.engines.engines import (
    CONTEXT,
    END,
    ENGINES,
    Heard,
    Implementation,
    embedded,
    model_of,
    serve,
    write_model,
)

CONFIG = EngineConfig(max_slots=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> Implementation:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def engine(kind: Implementation, folder: Path) -> Iterator[Engine]:
    engine = kind.make(folder, CONFIG)
    yield engine
    asyncio.run(engine.close())


def asked(row: int, index: int = 0, *, prompt: Sequence[int] | None = None, **more: object):
    """One sample of prompt number `row`, whose tokens follow from the number unless given."""
    about = ("forced_length", "noise", "turn", "keep", "carried")
    options = {name: more.pop(name) for name in about if name in more}
    if prompt is None:
        prompt = [3 + (row * 5 + place * place) % 40 for place in range(1 + row % 9)]
    return GenerationRequest(
        sample=SampleId(PromptId("train", 0, row), index, 0),
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(**{"max_response_tokens": 24, **more}),
        **options,
    )


def responses(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Response]:
    found = serve(engine, requests)
    for output in found.values():
        assert isinstance(output.event, SampleGenerated), output.event
    return [found[request.sample].response for request in requests]


def full_pass(model: torch.nn.Module, response: Response, temperature: float) -> torch.Tensor:
    """Log-probs [tokens, vocabulary] in float64."""
    ids = torch.tensor([response.prompt_tokens + response.tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    return torch.log_softmax(logits[len(response.prompt_tokens) - 1 : -1] / temperature, dim=-1)


def check_greedy(model: torch.nn.Module, response: Response) -> None:
    """Each token is the most likely one, but for ties."""
    log_probs = full_pass(model, response, 1.0)
    taken = log_probs.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
    assert (log_probs.max(dim=-1).values - taken).max() < 1e-4


def test_greedy_tokens_equal_generate(engine: Engine, folder: Path) -> None:
    model = model_of(folder)
    requests = [asked(row, temperature=0.0, max_response_tokens=10 + row) for row in range(11)]
    found = responses(engine, requests)
    for request, response in zip(requests, found, strict=True):
        ids = torch.tensor([request.prompt_tokens])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.sampling.max_response_tokens,
        )[0, ids.shape[1] :].tolist()
        if list(response.tokens) != wanted:
            check_greedy(model, response)
        assert response.finish_reason == ("stop" if response.tokens[-1] == END else "length")
    assert len({response.tokens for response in found}) > 5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_full_forward_pass(
    engine: Engine, folder: Path, temperature: float
) -> None:
    model = model_of(folder)
    requests = [asked(row, i, temperature=temperature) for row in range(6) for i in range(3)]
    found = responses(engine, requests)
    assert len({response.tokens for response in found}) > 8
    for response in found:
        wanted = full_pass(model, response, temperature)
        taken = wanted.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        given = torch.tensor(response.log_probs, dtype=torch.float64)
        assert (given - taken).abs().max() < 1e-3


def test_truncated_draws_have_the_log_probs_of_what_they_were_drawn_from(
    engine: Engine, folder: Path
) -> None:
    model = model_of(folder)
    for response in responses(engine, [asked(row, top_k=3) for row in range(6)]):
        best = full_pass(model, response, 1.0).topk(3)
        renormalized = torch.log_softmax(best.values, dim=-1)
        for place, token in enumerate(response.tokens):
            (rank,) = (best.indices[place] == token).nonzero(as_tuple=True)
            wanted = float(renormalized[place, rank])
            assert response.log_probs[place] == pytest.approx(wanted, abs=1e-3)


def test_draws_are_the_embedded_engines_bit_for_bit(
    kind: Implementation, engine: Engine, folder: Path
) -> None:
    if not kind.is_embedded:
        pytest.skip("has noise or arithmetic of its own")
    requests = [
        *(asked(0, index) for index in range(4)),
        *(asked(1, index, temperature=0.6, top_p=0.8) for index in range(3)),
        *(asked(2, index, seed=3, max_response_tokens=60) for index in range(3)),
        asked(3, forced_length=33),
        asked(4, stop=("a", "7")),
    ]
    reference = embedded(folder, CONFIG)
    wanted = responses(reference, requests)
    asyncio.run(reference.close())
    assert [replace(one, version=0) for one in responses(engine, requests)] == wanted


def test_a_further_turn_goes_on_from_all_before_it_with_noise_of_its_own(engine: Engine) -> None:
    """The sample may come again, under its own id, once its turn has ended."""
    first = responses(engine, [asked(row, temperature=1.0) for row in range(4)])
    prompts = [(*one.prompt_tokens, *one.tokens, 7, 8, 9) for one in first]
    further = [asked(row, prompt=prompts[row], turn=2, temperature=1.0) for row in range(4)]
    second = responses(engine, further)
    assert [one.prompt_tokens for one in second] == prompts
    assert [one.tokens for one in responses(engine, further)] == [one.tokens for one in second]
    other = responses(engine, [replace(one, turn=3) for one in further])
    assert all(a.tokens != b.tokens for a, b in zip(second, other, strict=True))


def test_what_is_kept_of_a_turn_is_not_computed_again(kind: Implementation, engine: Engine) -> None:
    """But for what the last block of vLLM's prefix cache lacks, which does not let go when told."""
    before = [asked(row, forced_length=40, keep=True) for row in range(4)]
    first = responses(engine, before)
    prompts = [(*one.prompt_tokens, *one.tokens, 7, 8, 9) for one in first]
    further = [asked(row, prompt=prompts[row], turn=2, temperature=1.0) for row in range(4)]
    kept = serve(engine, further)
    for one in further:
        num_computed = len(one.prompt_tokens) - kept[one.sample].event.num_reused
        assert num_computed == 4 if kind.is_embedded else 4 <= num_computed < 36
    responses(engine, before)
    engine.let_go([one.sample for one in before])
    anew = serve(engine, further)
    for one in further:
        assert anew[one.sample].response.tokens == kept[one.sample].response.tokens
        assert anew[one.sample].event.num_reused == 0 or not kind.is_embedded


def test_stop_strings_limits_and_forced_lengths_end_a_response(engine: Engine) -> None:
    free, forced, short = responses(
        engine,
        [
            asked(5, max_response_tokens=40),
            asked(6, forced_length=70),
            asked(7, forced_length=1),
        ],
    )
    assert len(forced.tokens) == 70 and len(short.tokens) == 1
    assert forced.finish_reason == short.finish_reason == "stop"
    assert 1 <= len(free.tokens) <= 40
    assert free.finish_reason == ("stop" if free.tokens[-1] == END else "length")


def test_a_request_that_cannot_run_fails_alone(engine: Engine) -> None:
    impossible = {
        "context": asked(0, max_response_tokens=CONTEXT),
        "no tokens": asked(1, prompt=[]),
        "vocabulary": asked(2, prompt=[7, 99_999]),
    }
    good = asked(3, forced_length=4)
    found = serve(engine, [*impossible.values(), good])
    for words, request in impossible.items():
        event = found[request.sample].event
        assert isinstance(event, SampleFailed) and words in event.reason
    assert isinstance(found[good.sample].event, SampleGenerated)


def test_an_abort_ends_who_runs_and_who_waits_and_nobody_else(engine: Engine) -> None:
    requests = [asked(row, forced_length=300) for row in range(14)]
    late = [asked(row, forced_length=5) for row in range(20, 26)]  # 16 rows run together
    heard = Heard()
    engine.start(heard, heard.on_error)
    engine.submit([*requests, *late])
    heard.wait_for(1)
    victims = [request.sample for request in requests[::2]]
    engine.abort([*victims, SampleId(PromptId("train", 9, 9), 0, 0)])
    engine.abort(victims)
    outputs = {output.event.sample: output for output in heard.wait_for(20)}
    assert len(outputs) == len(heard.outputs) == 20
    for request in requests:
        output = outputs[request.sample]
        is_victim = request.sample in victims
        assert isinstance(output.event, SampleAborted if is_victim else SampleGenerated)
        length = 0 if output.response is None else len(output.response.tokens)
        assert output.event.num_tokens == length
        assert (length < 300) == is_victim
        if output.response is not None:
            assert output.response.finish_reason == ("aborted" if is_victim else "stop")
            assert len(output.response.log_probs) == length
    status = engine.status()
    assert (status.num_running, status.num_waiting) == (0, 0)


def test_what_has_ended_can_be_aborted_in_vain_and_submitted_again(engine: Engine) -> None:
    request = asked(0, forced_length=3)
    serve(engine, [request])
    engine.abort([request.sample])
    assert isinstance(serve(engine, [request])[request.sample].event, SampleGenerated)


def test_a_sample_cannot_be_there_twice(engine: Engine) -> None:
    with pytest.raises(EngineError, match="twice"):
        engine.submit([asked(0), asked(0)])


def test_carried_tokens_are_taken_up(kind: Implementation, engine: Engine) -> None:
    whole = responses(engine, [asked(row, forced_length=40) for row in range(4)])

    def again(row: int, verify: bool) -> GenerationRequest:
        carried = Carried(
            tokens=whole[row].tokens[:25], log_probs=whole[row].log_probs[:25], verify=verify
        )
        return replace(asked(row, 1, forced_length=40, carried=carried), noise=asked(row).sample)

    for verify in (True, False):
        requests = [again(row, verify) for row in range(4)]
        outputs = serve(engine, requests)
        for request, before in zip(requests, whole, strict=True):
            output = outputs[request.sample]
            assert output.event.num_kept == (25 if verify else None)
            assert output.response.tokens[:25] == before.tokens[:25]
            assert output.response.log_probs[:25] == pytest.approx(before.log_probs[:25], abs=1e-3)
            if kind.is_embedded:
                assert output.response.tokens == before.tokens


def test_carried_tokens_come_to_what_plain_generation_gives(engine: Engine, folder: Path) -> None:
    """Under other weights; but for a near tie."""
    requests = [asked(row, index) for row in range(6) for index in range(4)]
    old = responses(engine, requests)
    model, version = model_of(folder), engine.status().version + 1
    before = buffer_of(model, version + 1)
    with torch.no_grad():
        for place, value in enumerate(model.parameters()):
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(place))
            value.add_(0.02 * value.std(unbiased=False) * noise)
    update(engine, buffer_of(model, version), version)
    plain = responses(engine, requests)
    sizes = [1 + place % len(one.tokens) for place, one in enumerate(old)]
    carrying = [
        replace(one, carried=Carried(tokens=had.tokens[:size], log_probs=had.log_probs[:size]))
        for one, had, size in zip(requests, old, sizes, strict=True)
    ]
    found = serve(engine, carrying)
    update(engine, before, version + 1)
    num_same = num_cut = 0
    for request, wanted, size in zip(carrying, plain, sizes, strict=True):
        output = found[request.sample]
        kept = [a == b for a, b in zip(request.carried.tokens, wanted.tokens, strict=False)]
        num_kept = (*kept, False).index(False)
        num_cut += num_kept < size
        if output.response.tokens == wanted.tokens:
            num_same += 1
            assert output.event.num_kept == num_kept
            assert output.response.log_probs == pytest.approx(wanted.log_probs, abs=1e-3)
    assert num_same >= len(requests) - 1
    assert 3 < num_cut < len(requests)


def test_carried_tokens_come_back_from_who_never_had_a_turn(engine: Engine) -> None:
    """Exactly, as they were carried in."""
    carried = Carried(tokens=(5, 6, 7), log_probs=(-0.1, -1 / 3, -1e-9), verify=False)
    request = asked(0, carried=carried)
    heard = Heard()
    engine.start(heard, heard.on_error)
    engine.submit([*(asked(row, forced_length=300) for row in range(1, 17)), request])
    engine.abort([request.sample])
    (output,) = heard.wait_for(1)[:1]
    engine.abort([asked(row).sample for row in range(1, 17)])
    heard.wait_for(17)
    assert isinstance(output.event, SampleAborted) and output.event.num_tokens == 3
    assert output.response.tokens == carried.tokens
    assert output.response.log_probs == carried.log_probs


# -- weights ---------------------------------------------------------------------------------------


def buffer_of(model: torch.nn.Module, version: int) -> WeightBuffer:
    buffer = WeightBuffer.create(model.named_parameters())
    write(buffer, model, version)
    return buffer


@torch.no_grad()
def write(buffer: WeightBuffer, model: torch.nn.Module, version: int) -> None:
    with buffer.writing(version) as tensors:
        for name, value in model.named_parameters():
            tensors[name].copy_(value)


def check_weights(engine: Engine, model: torch.nn.Module, version: int) -> None:
    assert engine.status().version == version
    assert engine.weight_probe() == weight_probe(model.named_parameters())
    for response in responses(engine, [asked(row, temperature=0.0) for row in range(4)]):
        assert response.version == version
        check_greedy(model, response)


def update(engine: Engine, buffer: WeightBuffer, version: int) -> None:
    asyncio.run(engine.update_weights(version, buffer.layout.source(version)))


def test_weights_come_by_a_source(engine: Engine, folder: Path, tmp_path: Path) -> None:
    models = [model_of(write_model(tmp_path / f"{seed}", seed=seed)) for seed in (1, 2)]
    models.append(model_of(folder))
    buffer = buffer_of(models[0], 0)
    first = engine.status().version + 1
    for version, model in enumerate([*models[:2], *models], start=first):
        write(buffer, model, version)
        update(engine, buffer, version)
        check_weights(engine, model, version)


def test_untied_weights_come_by_a_source(kind: Implementation, tmp_path: Path) -> None:
    if kind.is_embedded and kind.make is not embedded:
        pytest.skip("what is in the process is the embedded engine")
    models = [
        model_of(write_model(tmp_path / f"{seed}", seed=seed, tied=False)) for seed in range(2)
    ]
    buffer = buffer_of(models[1], 1)
    engine = kind.make(tmp_path / "0", CONFIG)
    try:
        update(engine, buffer, 1)
        check_weights(engine, models[1], 1)
    finally:
        asyncio.run(engine.close())


def test_an_engine_without_its_weights_generates_nothing(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    """Refused: another version, what is written in part, another model's. Then what is right."""
    model, asking = model_of(folder), [asked(0)]
    version = engine.status().version + 1
    buffer = buffer_of(model, version)

    def refusal(buffer: WeightBuffer, version: int) -> str:
        with pytest.raises(EngineError) as refused:
            update(engine, buffer, version)
        with pytest.raises(EngineError, match="could not be changed"):
            engine.submit(asking)
        return str(refused.value)

    assert f"of version {version}, not {version + 1}" in refusal(buffer, version + 1)
    with buffer.writing(version + 1) as tensors:
        next(iter(tensors.values())).zero_()
        assert "are written only in part" in refusal(buffer, version + 1)
        assert "are written only in part" in refusal(buffer, version)
    other = model_of(write_model(tmp_path, tied=False))
    words = "weights of another model: lm_head.weight differs"
    assert words in refusal(buffer_of(other, version), version)
    write(buffer, model, version + 1)
    update(engine, buffer, version + 1)
    check_weights(engine, model, version + 1)


def test_one_that_joins_later_reads_what_the_others_have(
    kind: Implementation, engine: Engine, folder: Path
) -> None:
    model = model_of(folder)
    original = buffer_of(model, engine.status().version + 2)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.01)
    version = engine.status().version + 1
    buffer = buffer_of(model, version)
    update(engine, buffer, version)
    late = kind.make(folder, CONFIG)
    try:
        update(late, buffer, version)
        for one in (engine, late):
            check_weights(one, model, version)
    finally:
        asyncio.run(late.close())
    update(engine, original, version + 1)


# -- what is left of it ----------------------------------------------------------------------------


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def churn(engine: Engine, num_requests: int, seed: int) -> list[EngineOutput]:
    """Requests come by and by, and one in three is aborted, at any time."""
    random_ = random.Random(seed)
    heard = Heard()
    engine.start(heard, heard.on_error)
    rows = itertools.count()
    submitted: list[SampleId] = []
    while len(submitted) < num_requests:
        requests = [
            asked(next(rows), max_response_tokens=random_.randint(1, 24))
            for _ in range(min(32, num_requests - len(submitted)))
        ]
        engine.submit(requests)
        submitted += [request.sample for request in requests]
        engine.abort(random_.sample([one.sample for one in requests], len(requests) // 3))
        heard.wait_for(len(submitted) - 48)
    heard.wait_for(num_requests)
    return heard.outputs


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
def test_requests_and_aborts_leave_nothing(kind: Implementation, engine: Engine) -> None:
    """Of a thousand requests."""
    churn(engine, 200, seed=0)
    pid = kind.pid(engine)
    before, descriptors = resident_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))
    outputs = churn(engine, 1000, seed=1)
    kinds = {type(output.event) for output in outputs}
    assert kinds == {SampleAborted, SampleGenerated}
    assert len({output.event.sample for output in outputs}) == len(outputs) == 1000
    status = engine.status()
    assert (status.num_running, status.num_waiting) == (0, 0)
    assert len(os.listdir(f"/proc/{pid}/fd")) <= descriptors
    assert resident_mib(pid) - before < 50


@pytest.mark.parametrize("draft_tokens", [0])
def test_after_an_abort_is_read_no_sample_gains_more_than_one_token(
    folder: Path, draft_tokens: int
) -> None:
    """What the process of an engine reads, read here: only there one knows when that is."""
    engine = embedded(folder, replace(CONFIG, draft_tokens=draft_tokens))
    host = EngineHost(engine, 60.0)
    random_ = random.Random(0)
    lengths = set()
    for round_number in range(60):
        request = asked(round_number, forced_length=400, prompt=[7, 8])
        done = engine.status().generated_tokens
        host.obey(0, Work(requests=(request,)))
        time.sleep(random_.random() / 50)
        host.obey(0, Work(aborts=(request.sample,)))
        read_at = engine.status().generated_tokens - done
        while not (outputs := host.report()[0].outputs):
            pass
        ((event, _),) = outputs
        assert isinstance(event, SampleAborted)
        assert event.num_tokens <= read_at + 1
        lengths.add(event.num_tokens)
    asyncio.run(engine.close())
    assert len(lengths) > 5


def test_close_ends_it(kind: Implementation, folder: Path) -> None:
    engine = kind.make(folder, CONFIG)
    heard = Heard()
    engine.start(heard, heard.on_error)
    engine.submit([asked(0, forced_length=400)])
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    for call in (
        engine.status,
        lambda: engine.submit([asked(1)]),
        lambda: engine.abort([]),
        lambda: engine.start(heard, heard.on_error),
        lambda: asyncio.run(engine.update_weights(1)),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert not heard.errors
