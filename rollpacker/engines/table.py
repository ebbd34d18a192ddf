"""Every engine, one row each. Light: no torch."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "torch": "rollpacker.engines.embedded.engine:TorchEngine",
    "vllm": "rollpacker.engines.vllm.engine:VllmEngine",
}
"""By the name in `rollout.engine.name`: `module:callable`. It is called with `model`, `tokenizer`
and `config` (`EngineConfig`) by keyword and gives an `Engine`."""

TAKE_UP_CARRIED = ("torch", "vllm")
"""Those that go on from tokens which an earlier launch left (`GenerationRequest.carried`), and look
whether each still comes out the same."""

TENSOR_PARALLEL = ("vllm",)
"""Those that several devices can share; also called with `tensor_parallel` then."""

TOLD_TO_SLEEP = ("vllm",)
"""Those that must know from the beginning that they will have to let go of their device; also
called with `sleeps` then."""

WITHOUT_QUANTIZATION = ("vllm",)
"""Those that cannot generate with a base of 4 bits (`model.quantization`)."""

BRING_THEIR_OWN_MODEL = ("vllm",)
"""Those that generate with code of their own for the model's architecture, so that the module that
is trained needs no attention that can decode (`engines/embedded/attention.py`)."""
