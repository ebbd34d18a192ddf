"""A process of `rollpacker doctor --gpu` for what may crash or hang in a kernel: it makes one call,
answers in JSON, and ends with its line."""

from __future__ import annotations

import json
import os
import time
from typing import Any

LENGTHS = (300, 17, 129, 64)
"""Tokens of the packed rows."""


def packed_step(kind: Any, device: str) -> dict[str, Any]:
    """Compute the gradient of a small random model's log-probs over packed rows by this kind of
    attention, and over padded rows. Returns how far apart they are, or `why_not` if the kind cannot
    be used here."""
    import torch

    from rollpacker.trainer.micro_batch import MicroBatch, Row, collate
    from rollpacker.trainer.model import character_tokenizer, new_model
    from rollpacker.trainer.packing import pack, packed_attention, why_not
    from rollpacker.trainer.policy import Policy

    tokenizer = character_tokenizer("abcdefgh")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    on = torch.device(device)
    model: Any = new_model({"model_type": "qwen3", **heads, **shape}, tokenizer, 0)
    model.to(on, dtype)
    reason = why_not(model, kind, on)
    if reason is not None:
        return {"why_not": reason}
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, len(tokenizer), (n,), generator=draw).tolist() for n in LENGTHS]
    rows = [Row(row[:4], row[4:]) for row in tokens]
    policy = Policy(model)

    def gradient(batch: MicroBatch) -> torch.Tensor:
        model.zero_grad()
        torch.autograd.backward(policy.forward(batch, 1.0)[0].mean())
        return torch.cat(
            [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        )

    padded = gradient(collate(rows, 0, on))
    with packed_attention(model, kind):
        gradient(pack(rows, on))  # compiles
        began = time.perf_counter()
        packed = gradient(pack(rows, on))
        distance = float((packed - padded).norm() / padded.norm())
        seconds = time.perf_counter() - began
    return {
        "tokens": sum(LENGTHS),
        "seconds": seconds,
        "gradient_distance": distance,
        "dtype": str(dtype).removeprefix("torch."),
    }


def _answered(call: bytes) -> tuple[int, bytes]:
    from rollpacker.workers.kinds import ANSWER, ERROR

    try:
        return ANSWER, json.dumps(packed_step(*json.loads(call))).encode()
    except Exception as error:  # whatever it is, the owner shows it
        return ERROR, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def main() -> None:
    from rollpacker.workers.kinds import HELLO
    from rollpacker.workers.line import inherited_line
    from rollpacker.workers.program import answer_calls, begin_quietly

    begin_quietly()
    line = inherited_line()
    assert line is not None, "a host starts it"
    line.send(HELLO, payload=str(os.getpid()).encode())
    answer_calls(line, _answered)


if __name__ == "__main__":
    main()
