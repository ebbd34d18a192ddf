"""What can be said of vLLM as an engine where there is none: refusals, and how it draws."""

from __future__ import annotations

import math

import pytest
import torch

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.imports import MissingPackageError
from rollpacker.rollout import vllm_draws, vllm_setup
from rollpacker.rollout.attention import UnsupportedModelError
from rollpacker.rollout.engine import EngineConfig, GenerationRequest, SamplingParams
from rollpacker.rollout.rows import Pending, RowTable
from rollpacker.rollout.sampling import draw, sample_key
from rollpacker.rollout.vllm_draws import Draw
from tests.rollout.tiny import tiny_model
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
