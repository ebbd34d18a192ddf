"""vLLM has two model runners: each is given what its own loader takes, on a GPU too, which a CPU
build of vLLM alone would not show.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.vllm import setup as vllm_setup
from rollpacker.engines.vllm.draws import Draws
from rollpacker.engines.vllm.verify import RUNNER_VARIABLE, RUNNERS
from rollpacker.imports import load_function
from tests.engines.with_vllm import model_of, needs_vllm

pytestmark = needs_vllm


def asked_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, num_devices: int = 1
) -> tuple[Any, str, Draws]:
    """The arguments with which vLLM's engine would be made on a GPU, which runner is asked for, and
    how tokens are drawn."""
    from vllm.v1.engine.llm_engine import LLMEngine

    seen: list[Any] = []

    def opened(arguments: Any, usage_context: Any) -> Any:
        seen.extend((arguments, os.environ[RUNNER_VARIABLE]))
        return SimpleNamespace(collective_rpc=lambda method, args=(): [])

    draws = Draws()
    monkeypatch.setattr(vllm_setup, "_platform_is_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    monkeypatch.setattr(LLMEngine, "from_engine_args", opened)
    vllm_setup.open_vllm(model_of(), config, draws, num_devices)
    vllm_setup._the_only_one.release()
    return seen[0], seen[1], draws


def test_both_runners_are_where_they_are_looked_for() -> None:
    for path in RUNNERS.values():
        module, _, name = path.rpartition(".")
        assert load_function(f"{module}:{name}").__name__ == "GPUModelRunner"


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("noise", ["auto", "vllm", "rollpacker"])
def test_each_runner_takes_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, noise: Any, num_devices: int
) -> None:
    from vllm.v1.sample.logits_processor import _load_custom_logitsprocs
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs

    config = EngineConfig(name="vllm", noise=noise)
    arguments, runner, draws = asked_on_a_gpu(monkeypatch, config, num_devices)
    if noise == "rollpacker":
        (processor,) = _load_custom_logitsprocs(arguments.logits_processors)
        assert (processor.__name__, runner, draws.noise) == ("DrawTokens", "0", "rollpacker")
        assert arguments.async_scheduling is False
        with pytest.raises(ValueError, match="DrawTokens is not a subclass"):
            _load_v2_logitsprocs(arguments.logits_processors)
    else:
        assert _load_v2_logitsprocs(arguments.logits_processors) == []
        assert (runner, draws.noise, arguments.async_scheduling) == ("1", "vllm", True)


def test_noise_that_vllm_does_not_have_on_a_cpu() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("here it has")
    config = EngineConfig(name="vllm", noise="vllm")
    with pytest.raises(ValueError, match=r"rollout\.engine\.noise=vllm: .* needs Triton"):
        vllm_setup.open_vllm(model_of(), config, Draws())
