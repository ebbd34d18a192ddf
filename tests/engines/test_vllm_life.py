"""The life of an engine of vLLM: updates, scarce memory, what it leaves behind.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.engines.embedded.attention import UnsupportedModelError
from rollpacker.engines.engine import EngineConfig, EngineError, EngineOutput
from rollpacker.engines.vllm import setup as vllm_setup
from rollpacker.engines.vllm.draws import Draws
from rollpacker.weights.host_store import HostStore
from tests.engines.test_engine import Recorder
from tests.engines.tiny import carrying, generate, group, moved, request, tiny_model
from tests.engines.with_vllm import (
    SHAPE,
    check_empty,
    check_plain,
    made,
    model_of,
    needs_vllm,
    outputs_of,
    responses,
    says,
    served,
)

pytestmark = needs_vllm


def test_a_waiting_sample_can_be_aborted_and_leaves_nothing() -> None:
    engine = made(model_of(), max_slots=1)
    first, second = request(0, forced_length=200), request(1, forced_length=20)
    outputs = {}

    def answer(new: Sequence[EngineOutput]) -> None:
        outputs.update((output.event.sample, output) for output in new)

    recorder = Recorder(2, answer)
    engine.start(recorder, recorder.on_error)
    engine.submit([first, second])
    engine.abort([second.sample])
    engine.abort([first.sample])
    recorder.wait()
    assert engine.status().num_running == engine.status().num_waiting == 0
    asyncio.run(engine.close())
    assert outputs[second.sample].event.num_tokens == 0
    assert outputs[second.sample].response is None


def test_a_row_with_nan_logits_fails_alone() -> None:
    """Its keys stay in vLLM's cache, where no other sample may read them."""
    model = model_of(tied=False)
    engine = made(model)
    poison = 44
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    asyncio.run(engine.update_weights(1))
    requests = [
        request(0, forced_length=4),
        request(1, prompt=[7, poison, 9, 8, 7, 6, 10, 11]),
        request(2, forced_length=6),
        request(3, forced_length=40, seed=1),
    ]
    outputs = {output.event.sample: output.event for output in served(engine, requests)}
    again = served(engine, [request(3, forced_length=40, seed=1)])
    asyncio.run(engine.close())
    failed = outputs[requests[1].sample]
    assert isinstance(failed, SampleFailed)
    assert "not numbers at response token 0" in failed.reason
    assert all(isinstance(outputs[requests[row].sample], SampleGenerated) for row in (0, 2, 3))
    assert isinstance(again[0].event, SampleGenerated)


def test_preempted_samples_have_the_tokens_of_undisturbed_ones_and_are_counted() -> None:
    model = model_of()
    requests = [request(row, forced_length=200) for row in range(8)]
    wanted = generate(model, requests)
    # A block of 32 tokens takes 2 layers x 2 x 32 places x 32 numbers x 4 bytes = 16 KiB.
    engine = made(model, kv_cache_gib=24 * 2**14 / 2**30)
    outputs = served(engine, requests)
    asyncio.run(engine.close())
    assert sum(output.event.preemptions for output in outputs) > 0
    tokens = {output.event.sample: output.response.tokens for output in outputs}
    same = sum(tokens[one.sample] == one.tokens for one in wanted)
    assert same >= 7


def test_a_small_cache_that_puts_samples_back_changes_nothing() -> None:
    """Also while they are read: a step reads 60 tokens, and all of them want in."""
    model = model_of()
    asked = [request(row, forced_length=200) for row in range(8)]
    old = generate(model, asked)
    moved(model, 0.003, seed=4)
    wanted = generate(model, asked)
    # A block of 32 tokens takes 2 layers x 2 x 32 places x 32 numbers x 4 bytes = 16 KiB.
    engine = made(model, kv_cache_gib=24 * 2**14 / 2**30)
    engine._scheduler.max_num_scheduled_tokens = 60
    requests = [carrying(one, had, 150) for one, had in zip(asked, old, strict=True)]
    outputs = outputs_of(engine, requests)
    check_plain(outputs, requests, wanted)
    assert sum(output.event.preemptions for output in outputs) > 0
    assert 0 < sum(output.event.num_kept for output in outputs) < 8 * 150
    check_empty(engine)
    asyncio.run(engine.close())


def test_what_the_cache_can_never_hold_fails_and_the_rest_runs() -> None:
    engine = made(model_of(), kv_cache_gib=8 * 2**14 / 2**30)
    long, short = request(0, forced_length=300), request(1, forced_length=100)
    failed, generated = served(engine, [long, short])
    asyncio.run(engine.close())
    assert isinstance(failed.event, SampleFailed)
    assert "kv_cache_gib" in failed.event.reason
    assert generated.event.num_tokens == 100


@pytest.mark.parametrize("tied", [True, False])
def test_each_update_changes_what_is_sampled_and_the_version(tied: bool) -> None:
    """By tensors of a trainer elsewhere, and by the model's own after they were trained."""
    model = model_of(tied=tied)
    engine = made(model)
    requests = [request(row, forced_length=12) for row in range(6)]
    for version in range(1, 5):
        newer = model_of(version, tied=tied)
        before = responses(engine, requests)
        if version % 2:
            asyncio.run(engine.update_weights(version, dict(newer.named_parameters())))
        else:
            model.load_state_dict(newer.state_dict())
            asyncio.run(engine.update_weights(version))
        after = responses(engine, requests)
        assert {one.version for one in after} == {version}
        assert [one.tokens for one in after] != [one.tokens for one in before]
        for one in after:
            wanted = says(newer, one.prompt_tokens, one.tokens)
            picked = wanted.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            found = torch.tensor(one.log_probs, dtype=torch.float64)
            assert (found - picked).abs().max() < 1e-3
    asyncio.run(engine.close())


def test_an_update_that_does_not_arrive_whole_is_never_sampled_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM raises nothing of its own: neither for a stale output matrix nor for a tensor that is
    missing."""
    model = model_of()
    engine = made(model)
    newer = dict(model_of(1).named_parameters())
    with monkeypatch.context() as patched:
        patched.setattr("rollpacker.engines.vllm.worker.pack_output_layer", lambda model: None)
        with pytest.raises(EngineError, match="does not compute what the model does"):
            asyncio.run(engine.update_weights(1, newer))
    with pytest.raises(EngineError, match="while the weights change"):
        engine.submit([request(0)])
    call = engine._vllm.collective_rpc

    def lose(method: object, **arguments: Any) -> object:
        if method == "receive_weights":
            (named,) = arguments["args"]
            lost = "model.layers.1.mlp.down_proj.weight"
            arguments["args"] = ({name: value for name, value in named.items() if name != lost},)
        return call(method, **arguments)

    with monkeypatch.context() as patched:
        patched.setattr(engine._vllm, "collective_rpc", lose)
        model.load_state_dict(model_of(2).state_dict())
        with pytest.raises(EngineError, match="does not compute what the model does"):
            asyncio.run(engine.update_weights(2))
    asyncio.run(engine.update_weights(3))
    assert responses(engine, [request(0)])[0].version == 3
    asyncio.run(engine.close())


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma3_text"])
def test_other_architectures_give_what_the_embedded_engine_gives(model_type: str) -> None:
    """The last two have sliding windows."""
    model = tiny_model(model_type, head_dim=32, **SHAPE)
    engine = made(model)
    requests = [sample for row in range(9) for sample in group(row, 2)]
    found = [one.tokens for one in responses(engine, requests)]
    asyncio.run(engine.close())
    wanted = [one.tokens for one in generate(model, requests)]
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) >= 17


def test_an_architecture_that_vllm_computes_otherwise_is_refused() -> None:
    model = tiny_model("gemma2", head_dim=32, **SHAPE)
    with pytest.raises(UnsupportedModelError, match="Gemma2ForCausalLM: vLLM does not compute"):
        made(model)
    asyncio.run(made(model_of()).close())


def variables() -> dict[str, str]:
    """All but what torch itself sets for its own use."""
    return {k: v for k, v in os.environ.items() if not k.startswith("_TORCHINDUCTOR")}


def test_the_process_is_left_as_it_was() -> None:
    model = model_of()
    before, threads = variables(), torch.get_num_threads()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    engine = made(model)
    assert variables() == before
    assert torch.equal(torch.rand(3), wanted)
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        engine.submit([request(0)])
    assert "rollpacker-engine" not in {one.name for one in threading.enumerate()}


def test_a_head_size_that_the_cpu_kernel_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"heads of size 8.*quickstart-vllm\.yaml"):
        made(tiny_model())


def test_it_sleeps_and_wakes_up_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own order of things. A CPU's worker leaves the memory where it is, so it is emptied
    here. Weights are there before keys and values."""
    engine = made(model_of())
    requests = [*group(0, 3, seed=1), *group(1, 3, seed=1)]
    before = responses(engine, requests)
    vllm, calls = engine._vllm, []
    vllm.model_config.enable_sleep_mode = True
    for name in ("sleep", "wake_up", "reset_prefix_cache", "collective_rpc", "step"):
        original = getattr(vllm, name)

        def call(*arguments: Any, name: str = name, of: Any = original, **named: Any) -> Any:
            calls.append((name, *arguments, *named.values()))
            return of(*arguments, **named)

        monkeypatch.setattr(vllm, name, call)
    engine._host = HostStore("cpu")
    asyncio.run(engine.offload())
    assert vllm.is_sleeping() and calls.pop() == ("sleep", 2)
    assert {one[0] for one in calls} == {"step"}
    calls.clear()
    vllm.apply_model(lambda model: [one.data.zero_() for one in model.parameters()] and None)
    calls.clear()
    assert not any(one.untyped_storage().nbytes() for one in engine._model.parameters())
    with pytest.raises(EngineError, match="reload it first"):
        engine.submit(requests)
    asyncio.run(engine.reload())
    assert [one[:2] for one in calls if one[0] != "step"] == [
        ("wake_up", ["weights"]),
        ("collective_rpc", "receive_weights"),
        ("wake_up", ["kv_cache"]),
        ("reset_prefix_cache",),
    ]
    assert not vllm.is_sleeping()
    assert responses(engine, requests) == before
    newer = model_of(1)
    asyncio.run(engine.offload())
    asyncio.run(engine.reload())
    asyncio.run(engine.update_weights(1, dict(newer.named_parameters())))
    assert [one.tokens for one in responses(engine, requests)] != [one.tokens for one in before]
    asyncio.run(engine.close())


@pytest.mark.parametrize("fault", ["part of it sleeps on", "it forgot its weights"])
def test_one_that_does_not_wake_up_whole_is_never_sampled_from(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = made(model_of())
    vllm = engine._vllm
    vllm.model_config.enable_sleep_mode = True
    wake_up = vllm.wake_up
    asyncio.run(engine.offload())

    def fail(tags: list[str]) -> bool:
        if fault == "part of it sleeps on":
            return wake_up(tags=tags) if tags == ["weights"] else False
        vllm.apply_model(lambda model: [one.data.zero_() for one in model.parameters()] and None)
        return bool(wake_up(tags=tags))

    monkeypatch.setattr(vllm, "wake_up", fail)
    with pytest.raises(EngineError, match=r"did not wake up|does not compute what the model does"):
        asyncio.run(engine.reload())
    with pytest.raises(EngineError, match="reload it first"):
        engine.submit([request(0)])
    asyncio.run(engine.close())


@pytest.mark.parametrize("sleeps", [False, True])
def test_on_a_gpu_it_takes_of_what_is_free_and_can_sleep_if_it_must(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """By names that vLLM's own arguments have."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    told: list[Any] = []
    contexts: list[Any] = []

    class Opened:
        def collective_rpc(self, method: Any, *arguments: Any, **more: Any) -> list[str | None]:
            """Return no answers: it has no workers that could be asked."""
            return []

    def opened(arguments: Any, usage_context: Any) -> Opened:
        told.append(arguments)
        contexts.append(usage_context)
        return Opened()

    monkeypatch.setattr(vllm_setup, "_platform_is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    monkeypatch.setattr(LLMEngine, "from_engine_args", opened)
    own = {"max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.3} if sleeps else {}
    config = EngineConfig(name="vllm", vllm=own)
    vllm_setup.open_vllm(model_of(), config, Draws(), sleeps=sleeps)
    vllm_setup._the_only_one.release()
    (arguments,) = told
    assert arguments.enable_sleep_mode is sleeps and not arguments.enforce_eager
    share = 0.3 if sleeps else 0.9 * 60 / 80
    assert arguments.gpu_memory_utilization == pytest.approx(share)
    assert arguments.max_num_batched_tokens == own.get("max_num_batched_tokens")
    assert contexts == [UsageContext.LLM_CLASS]  # whose batches are those of vLLM's own users


def test_an_argument_that_vllm_does_not_have() -> None:
    config = EngineConfig(name="vllm", kv_cache_gib=0.02, vllm={"quantisation": "fp8"})
    with pytest.raises(ValueError, match=r'no such argument. Did you mean "quantization"\?'):
        vllm_setup.open_vllm(model_of(), config, Draws())
    asyncio.run(made(model_of()).close())  # another may be opened afterwards
