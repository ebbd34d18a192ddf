"""Every engine, one row each. Light: no torch."""

from __future__ import annotations

ENGINES: dict[str, str] = {
    "torch": "rollpacker.rollout.torch_engine:TorchEngine",
}
"""By the name in `rollout.engine.name`: `module:callable`. It is called with `model`, `tokenizer`
and `config` (`EngineConfig`) by keyword and gives an `Engine`."""

TAKE_UP_CARRIED = ("torch",)
"""Those that go on from tokens which an earlier launch left (`GenerationRequest.carried`)."""
