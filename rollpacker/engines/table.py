"""The table of all engines and of what they can do. Does not import torch."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "torch": "rollpacker.engines.embedded.engine:TorchEngine",
    "vllm": "rollpacker.engines.vllm.engine:VllmEngine",
}
"""The function that makes each engine, as `module:callable`, by the name in `rollout.engine.name`.
It is called with `model`, `tokenizer` and `config` (`EngineConfig`) by keyword and returns an
`Engine`."""

TAKE_UP_CARRIED = ("torch", "vllm")
"""Engines that can continue from tokens which a sample had when it was aborted
(`GenerationRequest.carried`), and check whether each token would still be drawn."""

TENSOR_PARALLEL = ("vllm",)
"""Engines that several devices can share. If several do, the engine's function gets the keyword
argument `tensor_parallel`, too."""

TOLD_TO_SLEEP = ("vllm",)
"""Engines that must be told when they are made that they will have to free their device's memory.
If so, the engine's function gets the keyword argument `sleeps`, too."""

WITHOUT_QUANTIZATION = ("vllm",)
"""Engines that cannot generate with a base model quantised to 4 bits (`model.quantization`)."""

BRING_THEIR_OWN_MODEL = ("vllm",)
"""Engines that generate with their own code for the model's architecture. The module that is
trained then needs no attention that can decode (`engines/embedded/attention.py`)."""
