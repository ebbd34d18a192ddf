"""What can be said of vLLM as an engine where there is none: refusals, and how it draws."""

from __future__ import annotations

import math
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.attention import UnsupportedModelError
from rollpacker.engines.embedded.rows import Pending, RowTable
from rollpacker.engines.embedded.sampling import draw
from rollpacker.engines.engine import EngineConfig, GenerationRequest, SamplingParams, sample_key
from rollpacker.engines.vllm import draws as vllm_draws
from rollpacker.engines.vllm import setup as vllm_setup
from rollpacker.engines.vllm.draws import Draw
from rollpacker.imports import MissingPackageError
from tests.engines.tiny import tiny_model
from tests.trainer.hybrids import hybrid_model

VOCABULARY = 100


def sample(index: int) -> SampleId:
    return SampleId(PromptId("train", 0, 0), index, 0)


SETTINGS = [
    SamplingParams(max_response_tokens=9),
    SamplingParams(max_response_tokens=9, temperature=0.0, top_k=3),
    SamplingParams(max_response_tokens=9, temperature=0.7, seed=5),
    SamplingParams(max_response_tokens=9, top_p=0.5),
    SamplingParams(max_response_tokens=9, top_k=2),
]


def drawn_by_rows(logits: torch.Tensor, steps: int) -> list[tuple[list[int], list[float]]]:
    """As the embedded engine draws them; by step."""
    rows = RowTable(torch.device("cpu"), VOCABULARY)
    rows.reserve(len(SETTINGS))
    entries = [
        Pending(GenerationRequest(sample=sample(i), prompt_tokens=(1,), sampling=one), i)
        for i, one in enumerate(SETTINGS)
    ]
    noise = rows.add(entries)
    found = []
    for step in range(steps):
        settings = [rows.device_column(name) for name in ("temperature", "top_k", "top_p")]
        tokens, log_probs = draw(logits, noise, *settings, rows.mode)
        found.append((tokens.tolist(), log_probs.tolist()))
        if step == 0:
            rows.begin(0, tokens.numpy(), log_probs.numpy())
        else:
            rows.record(tokens.numpy(), log_probs.numpy())
        noise = rows.next_noise()
    return found


def test_tokens_are_drawn_as_the_embedded_engine_draws_them() -> None:
    logits = torch.randn(len(SETTINGS), VOCABULARY, generator=torch.Generator().manual_seed(0))
    draws = [Draw(one, sample_key(one.seed, sample(i))) for i, one in enumerate(SETTINGS)]
    batch = vllm_draws._Batch(list(enumerate(draws)), VOCABULARY, torch.device("cpu"))
    taken: list[list[int]] = [[] for _ in draws]
    for one, tokens in zip(draws, taken, strict=True):
        one.tokens = tokens
    for tokens, log_probs in drawn_by_rows(logits, 9):
        broken: list[int] = []
        thrown_away = batch.draw(logits, broken)  # as for a part of a prompt
        assert batch.draw(logits, broken).tolist() == thrown_away.tolist() == tokens
        assert [one.log_probs[-1] for one in draws] == log_probs
        assert broken == []
        for token, own in zip(tokens, taken, strict=True):
            own.append(token)
    assert all(len(one.log_probs) == len(own) for one, own in zip(draws, taken, strict=True))


def test_a_draw_that_goes_on_has_the_noise_of_its_place() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(max_response_tokens=9)
    device = torch.device("cpu")
    tokens = []
    for offset, count in ((0, 4), (3, 1), (4, 0), (2, 1)):
        one = Draw(params, sample_key(0, sample(0)), offset=offset)
        one.tokens = [7] * count
        batch = vllm_draws._Batch([(0, one)], VOCABULARY, device)
        tokens.append(int(batch.draw(logits, [])))
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[3] != tokens[0]


def test_who_has_logits_that_are_not_numbers_is_noted() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 5] = math.nan
    rows = [(10 + i, Draw(SETTINGS[0], key=i)) for i in range(3)]
    broken: list[int] = []
    vllm_draws._Batch(rows, VOCABULARY, torch.device("cpu")).draw(logits, broken)
    assert broken == [11]
    assert [math.isnan(one.log_probs[0]) for _, one in rows] == [False, True, False]


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"vllm": "0.32.1", "transformers": "5.19.0"}, None),
        ({"vllm": "0.33.0", "transformers": "5.19.0"}, "vllm from 0.32 to before 0.33, and 0.33.0"),
        ({"vllm": "0.31.2", "transformers": "5.19.0"}, "0.31.2 is installed"),
        ({"vllm": "0.32.0", "transformers": "5.23.0"}, "transformers from 5.16 to before 5.20"),
    ],
)
def test_versions_that_nobody_tried_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], says: str | None
) -> None:
    monkeypatch.setattr(vllm_setup, "_version", installed.__getitem__)
    if says is None:
        vllm_setup.check_versions()
        return
    with pytest.raises(ValueError, match="make vllm") as refused:
        vllm_setup.check_versions()
    assert says in str(refused.value)


def test_a_missing_vllm_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError) as missing:
        vllm_setup.open_vllm(tiny_model(), EngineConfig(name="vllm"), vllm_draws.Draws())
    assert str(missing.value) == (
        "rollout.engine.name=vllm needs vllm, which is not installed: pip install "
        "'rollpacker[vllm]', or without a GPU make vllm in a checkout, which makes an environment "
        "for it (.venv-vllm)"
    )


def test_a_model_with_code_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup, "missing", lambda *args, **kwargs: None)
    monkeypatch.setattr(vllm_setup, "check_versions", lambda: None)
    model = tiny_model()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling.Mine"}
    with pytest.raises(UnsupportedModelError, match="auto_map"):
        vllm_setup.open_vllm(model, EngineConfig(name="vllm"), vllm_draws.Draws())


@pytest.mark.parametrize(
    ("family", "settings", "dtype", "torchvision", "says"),
    [
        ("qwen3_5_text", {}, torch.bfloat16, False, "imports torchvision, which is not installed"),
        ("qwen3_5_text", {}, torch.float32, True, "set model.dtype=bfloat16"),
        ("qwen3_5_text", {}, torch.bfloat16, True, "of size 64 and 128, .* this model has 8 and 8"),
        ("qwen3_5_text", {"linear_key_head_dim": 64}, torch.bfloat16, True, "has 64 and 8"),
        ("bamba", {}, torch.bfloat16, True, "of type qwen3_5_text alone, and this one is bamba"),
    ],
)
def test_what_a_hybrid_lacks_in_vllm_is_said(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, int],
    dtype: torch.dtype,
    torchvision: bool,
    says: str,
) -> None:
    monkeypatch.setattr(vllm_setup, "find_spec", lambda name: object() if torchvision else None)
    model = hybrid_model(family, **settings).to(dtype)
    with pytest.raises(UnsupportedModelError, match=says):
        vllm_setup.check_hybrid(model, on_cpu=True)


def test_a_hybrid_that_vllm_can_run_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_setup, "find_spec", lambda name: object())
    vllm_setup.check_hybrid(hybrid_model("bamba"), on_cpu=False)
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = hybrid_model("qwen3_5_text", **heads).to(torch.bfloat16)
    vllm_setup.check_hybrid(model, on_cpu=True)


def test_what_vllm_cannot_do_is_refused_before_anything_is_loaded() -> None:
    overrides = ["model.lora.rank=4", "model.quantization=4bit"]
    with pytest.raises(ValueError, match=r"does not go with rollout\.engine\.name=vllm: set"):
        load_config("configs/quickstart-vllm.yaml", overrides, RunConfig)


def test_weighted_carrying_goes_with_vllm() -> None:
    overrides = [
        "tail_batching.carry=weighted",
        "algorithm.mismatch_correction=token-truncate",
        "algorithm.old_logprobs=recomputed",
    ]
    config = load_config("configs/quickstart-vllm.yaml", overrides, RunConfig)
    assert config.tail_batching.carries


def test_the_quickstart_for_vllm_is_the_quickstart() -> None:
    """But for the engine and for the model's shape."""
    ours = load_config("configs/quickstart-vllm.yaml", [], RunConfig)
    same = load_config(
        "configs/quickstart.yaml",
        [
            *("name=quickstart-vllm", "model.path=runs/quickstart-vllm-warmup"),
            "rollout.engine.name=vllm",
        ],
        RunConfig,
    )
    assert ours == same


# -- what vLLM starts with, told by a stand-in for it -------------------------------


class Shutdown:
    """The engine core of a stand-in, which says whether it was shut down."""

    def __init__(self) -> None:
        self.is_shut_down = False

    def shutdown(self) -> None:
        self.is_shut_down = True


class StandIn:
    """An engine of vLLM's whose one worker has this model runner."""

    opened: list[StandIn]

    def __init__(self, runner: object) -> None:
        self.engine_core = Shutdown()
        self.worker = ModuleType("worker")
        self.worker.model_runner = runner  # type: ignore[attr-defined]  # a bag of attributes

    def collective_rpc(self, method: Any) -> list[Any]:
        return [method(self.worker)]


def runner_of(module: str, *bases: type) -> object:
    """A model runner as vLLM has it in this module."""
    methods = {"__module__": module, "_get_prompt_logprobs_dict": lambda self, *facts: {}}
    made: object = type("GPUModelRunner", bases, methods)()
    return made


FIRST = runner_of("vllm.v1.worker.gpu_model_runner")
SECOND = runner_of("vllm.v1.worker.gpu.model_runner")
SECOND.sampler = None  # type: ignore[attr-defined]  # a stand-in
SECOND.prompt_logprobs_worker = SimpleNamespace(  # type: ignore[attr-defined]  # and its parts
    add_request=None, remove_request=None, compute_prompt_logprobs=None
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a vLLM in place that starts with a runner, or raises an error; returns a function that
    does so and returns the list of what an environment variable was, at the import of vLLM's
    engine and when the engine was made."""

    def put(
        runner: object = None,
        error: Exception | None = None,
        variable: str = "VLLM_USE_V2_MODEL_RUNNER",
        capability: str = "9.0",
    ) -> list[str | None]:
        seen: list[str | None] = []
        StandIn.opened = []

        class LLMEngine:
            @staticmethod
            def from_engine_args(arguments: Any, usage_context: str) -> StandIn:
                assert usage_context == "as its LLM class"
                seen.append(os.environ.get(variable))
                if error is not None:
                    raise error
                StandIn.opened.append(StandIn(runner))
                return StandIn.opened[-1]

        class Engine(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name != "LLMEngine":
                    raise AttributeError(name)
                seen.append(os.environ.get(variable))
                return LLMEngine

        arguments = ModuleType("vllm.engine.arg_utils")
        arguments.EngineArgs = lambda **given: given  # type: ignore[attr-defined]  # a stand-in
        usage = ModuleType("vllm.usage.usage_lib")
        context = SimpleNamespace(LLM_CLASS="as its LLM class")
        usage.UsageContext = context  # type: ignore[attr-defined]  # a stand-in, too
        platforms = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]  # a stand-in
            is_cuda=lambda: True,
            has_device_capability=lambda least: float(capability) * 10 >= least,
            get_device_capability=lambda: SimpleNamespace(as_version_str=lambda: capability),
        )
        names = ("vllm", "vllm.engine", "vllm.usage", "vllm.v1")
        modules = [*(ModuleType(name) for name in names), usage, platforms]
        modules += [ModuleType("vllm.v1.engine"), arguments, Engine("vllm.v1.engine.llm_engine")]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(vllm_setup, "drawing_with", lambda draws: object)
        monkeypatch.setattr(vllm_setup, "missing", lambda *args, **kwargs: None)
        monkeypatch.setattr(vllm_setup, "check_versions", lambda: None)
        monkeypatch.setattr(vllm_setup, "_platform_is_cpu", lambda: False)
        monkeypatch.setattr(vllm_setup, "_share_of_memory", lambda: 0.5)
        return seen

    return put


def opened(**settings: Any) -> Any:
    engine = EngineConfig(name="vllm", **settings)
    found = vllm_setup.open_vllm(tiny_model(), engine, vllm_draws.Draws())
    vllm_setup.close_vllm(found)
    return found


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize(("noise", "variable"), [("rollpacker", "0"), ("vllm", "1"), ("auto", "1")])
def test_the_runner_that_draws_with_the_noise_is_asked_for_before_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch, stand_in: Any, before: str | None, noise: str, variable: str
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if before is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", before)
    seen = stand_in(FIRST if noise == "rollpacker" else SECOND)
    opened(noise=noise)
    assert len(seen) >= 2 and set(seen) == {variable}
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == before


INVARIANT = "VLLM_BATCH_INVARIANT"


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ("auto", "cuda 8.0", "1"),
        ("auto", "cuda 7.5", "0"),
        ("auto", "cpu", "0"),
        (True, "cuda 9.0", "1"),
        (True, "cuda 7.5", "need a GPU of compute capability 8.0 or above, and this one has 7.5"),
        (True, "cpu", "vLLM has no batch-invariant kernels for a CPU"),
        (False, "cuda 9.0", "0"),
    ],
)
def test_kernels_are_batch_invariant_where_they_are_wanted_and_can_be(
    monkeypatch: pytest.MonkeyPatch,
    stand_in: Any,
    wanted: bool | str,
    device: str,
    expected: str,
) -> None:
    monkeypatch.delenv(INVARIANT, raising=False)
    kind, _, capability = device.partition(" ")
    seen = stand_in(FIRST, variable=INVARIANT, capability=capability)
    monkeypatch.setattr(vllm_setup, "_platform_is_cpu", lambda: kind == "cpu")
    monkeypatch.setattr(vllm_setup, "_check_head_size", lambda model: None)
    if len(expected) > 1:
        with pytest.raises(ValueError, match=expected) as refused:
            opened(batch_invariant=wanted, noise="rollpacker")
        assert "rollout.engine.batch_invariant=true" in str(refused.value)
    else:
        opened(batch_invariant=wanted, noise="rollpacker")
        assert set(seen) == {expected}
    assert INVARIANT not in os.environ


def test_layers_without_batch_invariant_kernels_are_named(stand_in: Any) -> None:
    stand_in(FIRST)
    engine = EngineConfig(name="vllm", batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant=true: .* layers of type linear"):
        vllm_setup.open_vllm(hybrid_model(), engine, vllm_draws.Draws())


def test_a_runner_that_derives_from_the_known_one_is_taken(stand_in: Any) -> None:
    stand_in(runner_of("vllm.v1.worker.cpu_model_runner", type(FIRST)))
    assert opened(noise="rollpacker") is StandIn.opened[0]


@pytest.mark.parametrize(
    ("noise", "runner", "cure"),
    [
        ("rollpacker", SECOND, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("vllm", FIRST, "VLLM_USE_V2_MODEL_RUNNER=1"),
        ("auto", FIRST, "VLLM_USE_V2_MODEL_RUNNER=1"),
    ],
)
def test_a_runner_that_draws_with_other_noise_is_refused_by_name(
    stand_in: Any, noise: str, runner: object, cure: str
) -> None:
    stand_in(runner)
    with pytest.raises(UnsupportedModelError) as refused:
        opened(noise=noise)
    assert f"{type(runner).__module__}.GPUModelRunner" in str(refused.value)
    assert cure in str(refused.value)
    assert StandIn.opened[0].engine_core.is_shut_down
    stand_in(SECOND)
    opened()  # the process may have another engine


@pytest.mark.parametrize(
    ("reason", "names_memory"),
    [
        ("DrawTokens is not a subclass of vllm.v1.LogitsProcessor", False),
        ("No available memory for the cache blocks.", True),
        ("1.0 GiB KV cache is needed, which is larger than the available one", True),
    ],
)
def test_only_an_error_about_memory_names_the_key_for_memory(
    stand_in: Any, reason: str, names_memory: bool
) -> None:
    stand_in(error=ValueError(reason))
    with pytest.raises(UnsupportedModelError) as refused:
        opened(kv_cache_gib=0.5)
    assert reason in str(refused.value)
    assert ("kv_cache_gib=0.5" in str(refused.value)) is names_memory


def test_what_the_second_runner_lacks_the_first_may_have(stand_in: Any) -> None:
    stand_in(error=ValueError("Model Runner V2 does not yet support: this"))
    with pytest.raises(UnsupportedModelError, match=r"\(set rollout.engine.noise=rollpacker, "):
        opened()
