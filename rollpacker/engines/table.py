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
"""Engines that take `GenerationRequest.carried`, the tokens that a sample had when it was aborted:
they go on from these, or first check whether each would still be drawn."""

TENSOR_PARALLEL = ("vllm",)
"""Engines that several devices can share. If several do, the engine's function gets the keyword
argument `tensor_parallel`, too."""

TOLD_TO_SLEEP = ("vllm",)
"""Engines that must be told when they are made that they will have to free their device's memory.
If so, the engine's function gets the keyword argument `sleeps`, too."""

_DRAWS = "how tokens are drawn and carried, which needs it as it is"
VLLM_DECIDED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "skip_tokenizer_init": "model.path",
    "load_format": "model.path",
    "generation_config": "rollout",
    "dtype": "model.dtype",
    "max_num_seqs": "rollout.engine.max_slots",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_gib",
    "tensor_parallel_size": "placement.rollout.per_engine",
    "distributed_executor_backend": "placement.rollout.per_engine",
    "enable_sleep_mode": "train.colocate",
    "enable_lora": "model.lora",
    "max_lora_rank": "model.lora",
    "trust_remote_code": "a rule: no code of a model is ever run",
    "runner": _DRAWS,
    "async_scheduling": _DRAWS,
    "logprobs_mode": _DRAWS,
    "logits_processors": _DRAWS,
    "speculative_config": _DRAWS,
    "watermark_config": _DRAWS,
    "use_fp64_gumbel": _DRAWS,
    "worker_extension_cls": _DRAWS,
    "block_size": _DRAWS,
}
"""Arguments of vLLM's engine that nobody may give (`rollout.engine.vllm`), with what decides each
of them."""

WITHOUT_QUANTIZATION = ("vllm",)
"""Engines that cannot generate with a base model quantised to 4 bits (`model.quantization`)."""

BRING_THEIR_OWN_MODEL = ("vllm",)
"""Engines that generate with their own code for the model's architecture. The module that is
trained then needs no attention that can decode (`engines/embedded/attention.py`). In a process of
their own they get it without memory, and the keyword argument `folder`, that of its weights."""
