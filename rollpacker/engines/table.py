"""The table of all engines, one row each. Light: no torch."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "torch": "rollpacker.engines.embedded.engine:TorchEngine",
    "vllm": "rollpacker.engines.vllm.engine:VllmEngine",
}
"""The function that makes each engine, as `module:callable`, by the name in `rollout.engine.name`.
It is called with `model`, `tokenizer` and `config` (`EngineConfig`) by keyword and returns an
`Engine`."""

TAKE_UP_CARRIED = ("torch", "vllm")
"""Engines that go on from tokens which an earlier launch left (`GenerationRequest.carried`), and
check whether each is still drawn."""

TENSOR_PARALLEL = ("vllm",)
"""Engines that several devices can share. They are also called with `tensor_parallel` then."""

TOLD_TO_SLEEP = ("vllm",)
"""Engines that must know from the beginning that they will have to free their device. They are also
called with `sleeps` then."""

WITHOUT_QUANTIZATION = ("vllm",)
"""Engines that cannot generate with a base of 4 bits (`model.quantization`)."""

BRING_THEIR_OWN_MODEL = ("vllm",)
"""Engines that generate with code of their own for the model's architecture. The module that is
trained then needs no attention that can decode (`engines/embedded/attention.py`)."""
