"""What the engine does with requests: order, aborts, refill, stops, failures, life and death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.attention import UnsupportedModelError
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig, EngineError, EngineOutput, GenerationRequest
from tests.engines.tiny import END, generate, group, make_engine, request, tiny_model


class Recorder:
    """A listener that keeps what it hears and may answer inside the call."""

    def __init__(
        self, wanted: int, answer: Callable[[Sequence[EngineOutput]], None] | None = None
    ) -> None:
        self.calls: list[list[EngineOutput]] = []
        self.errors: list[BaseException] = []
        self._wanted = wanted
        self._answer = answer
        self._done = threading.Event()

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        self.calls.append(list(outputs))
        if self._answer is not None:
            self._answer(outputs)
        if len(self.outputs) >= self._wanted:
            self._done.set()

    def on_error(self, error: BaseException) -> None:
        self.errors.append(error)
        self._done.set()

    @property
    def outputs(self) -> list[EngineOutput]:
        return [output for call in self.calls for output in call]

    def wait(self) -> None:
        assert self._done.wait(30), "the engine did not answer"


def _serve(
    engine: TorchEngine, requests: Sequence[GenerationRequest], recorder: Recorder
) -> list[EngineOutput]:
    engine.start(recorder, recorder.on_error)
    engine.submit(requests)
    recorder.wait()
    return recorder.outputs


def _close(engine: TorchEngine) -> None:
    asyncio.run(engine.close())


def test_what_ends_in_one_step_comes_in_launch_order() -> None:
    engine = make_engine(tiny_model())
    requests = [request(17 - row, forced_length=4 + row % 2) for row in range(8)]
    recorder = Recorder(wanted=8)
    _serve(engine, requests, recorder)
    _close(engine)
    heard = [[output.event.sample.prompt.row for output in call] for call in recorder.calls]
    assert heard == [[17, 15, 13, 11], [16, 14, 12, 10]]


def test_forced_length_is_exact_and_ends_as_stop() -> None:
    model = tiny_model()
    (free,) = generate(model, [request(1, temperature=0.0)])
    (forced,) = generate(model, [request(1, temperature=0.0, forced_length=70)])
    assert len(forced.tokens) == 70
    assert forced.finish_reason == "stop"
    assert forced.tokens[: len(free.tokens)] == free.tokens


def test_a_response_ends_with_the_end_token_or_at_the_limit() -> None:
    responses = generate(tiny_model(), [sample for row in range(9) for sample in group(row, 6)])
    by_reason = {
        reason: [r for r in responses if r.finish_reason == reason] for reason in ("stop", "length")
    }
    assert by_reason["stop"] and by_reason["length"]
    assert all(r.tokens.index(END) == len(r.tokens) - 1 for r in by_reason["stop"])
    assert all(len(r.tokens) == 24 and END not in r.tokens for r in by_reason["length"])
    assert all(len(r.log_probs) == len(r.tokens) for r in responses)


def test_end_tokens_of_the_generation_config_count() -> None:
    model = tiny_model()
    (free,) = generate(model, [request(2, temperature=0.0)])
    other_end = free.tokens[0]
    model.generation_config.eos_token_id = [END, other_end]
    (ended,) = generate(model, [request(2, temperature=0.0)])
    assert ended.tokens == (other_end,)
    assert ended.finish_reason == "stop"


class Letters:
    """A tokenizer whose token t is one letter."""

    eos_token_id = END

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


def test_a_stop_string_ends_the_response_with_the_string_in_it() -> None:
    model = tiny_model()
    letters = Letters()
    (free,) = generate(model, [request(4, seed=1)], tokenizer=letters)
    text = letters.decode(free.tokens)
    assert len(text) > 8
    stop = text[3:6]
    (stopped,) = generate(model, [request(4, seed=1, stop=("~~", stop))], tokenizer=letters)
    assert letters.decode(stopped.tokens) == text[: text.index(stop) + 3]
    assert stopped.finish_reason == "stop"


def test_a_group_is_prefilled_once_even_when_it_waits_for_slots() -> None:
    prompt = list(range(7, 17))
    requests = [*group(0, 8, prompt=prompt, forced_length=5), *group(1, 4, forced_length=9)]
    for max_slots in (16, 3):
        engine = make_engine(tiny_model(), max_slots=max_slots)
        asyncio.run(collect(engine, requests))
        assert engine.num_prefilled_tokens == len(prompt) + len(requests[-1].prompt_tokens)
        _close(engine)


def test_an_abort_inside_the_listener_takes_effect_before_the_next_step() -> None:
    engine = make_engine(tiny_model(), max_slots=3)
    short, long, waiting = (request(row, forced_length=n) for row, n in ((0, 3), (1, 50), (2, 40)))
    late = request(3, forced_length=6)

    def answer(outputs: Sequence[EngineOutput]) -> None:
        if outputs[0].event.sample == short.sample:
            engine.abort([long.sample, SampleId(PromptId("train", 9, 9), 0, 0)])
            engine.submit([late])

    recorder = Recorder(4, answer)
    outputs = _serve(engine, [short, long, waiting], recorder)
    aborted = next(o.event for o in outputs if isinstance(o.event, SampleAborted))
    assert aborted == SampleAborted(time_s=0.0, sample=long.sample, num_tokens=3)
    order = [output.event.sample.prompt.row for output in outputs]
    assert order == [0, 1, 3, 2]
    assert engine.status().decode_steps == 39
    _close(engine)


def test_an_aborted_slot_is_free_for_who_waits_and_waiting_samples_can_be_aborted() -> None:
    engine = make_engine(tiny_model(), max_slots=1)
    first, second, third = (request(row, forced_length=400) for row in range(3))
    last = request(4, forced_length=2)
    recorder = Recorder(4)
    engine.start(recorder, recorder.on_error)
    engine.submit([first, second, third, last])
    engine.abort([third.sample, first.sample])
    engine.abort([second.sample])
    recorder.wait()
    ended = {output.event.sample: output.event for output in recorder.outputs}
    assert all(isinstance(ended[one.sample], SampleAborted) for one in (first, second, third))
    assert ended[third.sample].num_tokens == 0
    assert isinstance(ended[last.sample], SampleGenerated)
    _close(engine)


def test_neighbours_of_an_aborted_row_are_undisturbed() -> None:
    model = tiny_model()
    requests = [request(row, forced_length=10 + 3 * row) for row in range(8)]
    wanted = {response.sample: response.tokens for response in generate(model, requests)}
    engine = make_engine(model)
    victims = [requests[row].sample for row in (1, 4, 5)]
    recorder = Recorder(
        8,
        lambda outputs: engine.abort(victims) if outputs[0].event.sample.prompt.row == 0 else None,
    )
    outputs = _serve(engine, requests, recorder)
    _close(engine)
    generated = [o.response for o in outputs if isinstance(o.event, SampleGenerated)]
    assert len(generated) == 5
    assert all(response.tokens == wanted[response.sample] for response in generated)


def test_a_row_with_nan_logits_fails_alone_and_leaves_a_clean_slot() -> None:
    model = tiny_model(tie_word_embeddings=False)
    poison = 44
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    requests = [
        request(0, forced_length=4),
        request(1, prompt=[7, poison, 9, 8, 7, 6, 10, 11]),
        request(2, forced_length=6),
        request(3, forced_length=8, seed=1),
    ]
    engine = make_engine(model, max_slots=1)
    outputs = _serve(engine, requests, Recorder(4))
    _close(engine)
    events = [output.event for output in outputs]
    assert isinstance(events[1], SampleFailed)
    assert "not numbers" in events[1].reason
    assert [type(event) for event in events[2:]] == [SampleGenerated, SampleGenerated]


@pytest.mark.parametrize(
    ("asked", "config", "reason"),
    [
        (request(0, max_response_tokens=512), {}, "context of 512"),
        (request(0, prompt=[]), {}, "no tokens"),
        (request(0, prompt=[7, 999]), {}, "vocabulary"),
        (request(0, max_response_tokens=400), {"kv_cache_gib": 1e-5}, "kv_cache_gib"),
        (request(0, stop=("x",)), {}, "tokenizer"),
    ],
)
def test_a_request_that_can_never_run_fails_with_its_reason(
    asked: GenerationRequest, config: dict[str, float], reason: str
) -> None:
    engine = make_engine(tiny_model(), **config)
    good = request(1, forced_length=2)
    failed, generated = _serve(engine, [asked, good], Recorder(2))
    _close(engine)
    assert isinstance(failed.event, SampleFailed)
    assert reason in failed.event.reason
    assert generated.event.sample == good.sample


def test_memory_bounds_the_rows_that_run_together() -> None:
    model = tiny_model()
    # One row of 64 positions takes 64 x 2 layers x 2 x 2 heads x 8 x 4 bytes = 16 KiB.
    budget_gib = 3.5 * 2**14 / 2**30
    requests = [request(row, prompt=[7, 8], forced_length=63) for row in range(7)]
    engine = make_engine(model, kv_cache_gib=budget_gib)
    recorder = Recorder(7)
    _serve(engine, requests, recorder)
    _close(engine)
    assert [len(call) for call in recorder.calls] == [3, 3, 1]


def test_the_weights_are_read_in_place_and_the_version_is_noted() -> None:
    model = tiny_model(seed=0)
    engine = make_engine(model)
    requests = [request(row, temperature=0.0) for row in range(4)]

    async def run() -> tuple[list, list]:
        before = await collect(engine, requests)
        model.load_state_dict(tiny_model(seed=1).state_dict())
        await engine.update_weights(3)
        after = await collect(engine, requests)
        await engine.close()
        return before, after

    before, after = asyncio.run(run())
    assert {response.version for response in before} == {0}
    assert {response.version for response in after} == {3}
    wanted = generate(tiny_model(seed=1), requests)
    assert [r.tokens for r in after] == [r.tokens for r in wanted] != [r.tokens for r in before]


class SlowWeights(dict[str, torch.Tensor]):
    """They come when `arrive` is called."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.named_parameters())
        self._arrived = threading.Event()
        self.arrive = self._arrived.set

    def items(self):
        assert self._arrived.wait(30)
        return super().items()


def test_a_copy_of_weights_leaves_the_callers_loop_free() -> None:
    """So that `deadlines.sync_s` can end the wait for one that hangs."""
    engine = make_engine(tiny_model(seed=0))
    weights = SlowWeights(tiny_model(seed=1))

    async def run() -> None:
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.update_weights(1, weights), 0.05)
            with pytest.raises(EngineError, match="while the weights change"):
                engine.submit([request(0)])
        finally:
            weights.arrive()
            await engine.close()

    threading.Timer(5.0, weights.arrive).start()
    asyncio.run(run())


def test_weights_and_listener_cannot_change_while_samples_run() -> None:
    engine = make_engine(tiny_model())
    refusals: list[str] = []

    def answer(outputs: Sequence[EngineOutput]) -> None:
        if outputs[0].event.sample.prompt.row == 0:
            for attempt in (
                lambda: asyncio.run(engine.update_weights(1)),
                lambda: engine.start(recorder, recorder.on_error),
                lambda: engine.submit([request(1)]),
            ):
                with pytest.raises(EngineError) as refusal:
                    attempt()
                refusals.append(str(refusal.value))

    recorder = Recorder(2, answer)
    _serve(engine, [request(0, forced_length=2), request(1, forced_length=9)], recorder)
    _close(engine)
    assert len(refusals) == 3
    assert "twice" in refusals[2]


def test_training_mode_is_given_back() -> None:
    model = tiny_model().train()
    modes: list[bool] = []
    engine = make_engine(model)
    assert model.training
    _serve(
        engine,
        [request(0, forced_length=2), request(1, forced_length=4)],
        Recorder(2, lambda _: modes.append(model.training)),
    )
    _close(engine)
    assert modes == [False, True]


def test_an_error_in_the_listener_is_reported_once_and_ends_the_engine() -> None:
    def fail(_: Sequence[EngineOutput]) -> None:
        raise RuntimeError("the listener broke")

    engine = make_engine(tiny_model())
    recorder = Recorder(9, fail)
    _serve(engine, [request(0, forced_length=2)], recorder)
    assert [str(error) for error in recorder.errors] == ["the listener broke"]
    with pytest.raises(EngineError, match="the listener broke"):
        engine.submit([request(1)])
    _close(engine)


def test_close_is_idempotent_stops_work_and_refuses_everything_after() -> None:
    engine = make_engine(tiny_model())
    recorder = Recorder(1)
    engine.start(recorder, recorder.on_error)
    engine.submit([request(0, forced_length=400)])

    async def close_twice() -> None:
        await engine.close()
        await engine.close()

    asyncio.run(close_twice())
    for call in (
        engine.status,
        lambda: engine.submit([request(1)]),
        lambda: engine.abort([]),
        lambda: engine.start(recorder, recorder.on_error),
        lambda: asyncio.run(engine.update_weights(1)),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_status_counts() -> None:
    engine = make_engine(tiny_model(), max_slots=2)
    seen: list[tuple[int, int]] = []

    def answer(_: Sequence[EngineOutput]) -> None:
        status = engine.status()
        seen.append((status.num_running, status.num_waiting))

    _serve(engine, [request(row, forced_length=5) for row in range(5)], Recorder(5, answer))
    assert seen == [(0, 3), (0, 1), (0, 0)]
    assert engine.status().generated_tokens == 25
    assert engine.status().decode_steps == 12
    _close(engine)


def test_collect_names_what_failed() -> None:
    engine = make_engine(tiny_model())
    with pytest.raises(EngineError, match="vocabulary"):
        asyncio.run(collect(engine, [request(0, prompt=[999])]))
    _close(engine)


def test_models_that_cannot_run_are_refused_with_the_reason() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sinks = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
    )
    with pytest.raises(UnsupportedModelError, match="sinks"):
        TorchEngine(
            model=AutoModelForCausalLM.from_config(sinks), tokenizer=None, config=EngineConfig()
        )
    mamba = AutoConfig.for_model("mamba", vocab_size=48, hidden_size=32, num_hidden_layers=2)
    says = r"linear_attention.*set rollout\.engine\.name=vllm"
    with pytest.raises(UnsupportedModelError, match=says):
        TorchEngine(
            model=AutoModelForCausalLM.from_config(mamba), tokenizer=None, config=EngineConfig()
        )
