"""slime's `train.py` around its rollouts, with all of Megatron's part faked: nothing is trained, so
that the policy stays as it is, and a model's checkpoint is what was trained on up to it.

    python -m tests.integrations_slime.host FOLDER PORT MODE STEPS

trains in FOLDER, from its newest checkpoint on, with the server at PORT.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import sample_key
from rollpacker.scheduler.scheduler import SOURCE
from tests.integrations_slime import slimes
from tests.scheduler.made_up_servers import LONGEST, policy

OURS = "rollpacker.integrations.slime"


def arguments(folder: Path, port: int, mode: str = "on", **changes: Any) -> Namespace:
    """slime's arguments, those alone that its rollouts and data source read. `mode`: "plain" is
    slime's own synchronous mode, "off" and "on" are through the scheduler."""
    data = folder / "prompts.jsonl"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps({"text": f"prompt {n}"}) + "\n" for n in range(5000)))
    none = dict.fromkeys(
        (
            *("apply_chat_template", "apply_chat_template_kwargs", "buffer_filter_path", "ci_test"),
            *("custom_generate_function_path", "dump_details", "dynamic_sampling_filter_path"),
            *("group_rm", "label_key", "mask_offpolicy_in_partial_rollout", "multimodal_keys"),
            *("num_epoch", "partial_rollout", "reward_key", "rollout_all_samples_process_path"),
            *("rollout_max_prompt_len", "rollout_sample_filter_path", "rollout_shuffle"),
            *("rollout_stop", "rollout_stop_token_ids", "sglang_dp_size", "tool_key"),
            *("use_distributed_post", "use_rollout_routing_replay", "rm_type"),
        )
    )
    own = {
        "custom_generate_function_path": f"{__name__}.seeded" if mode == "plain" else None,
        "custom_rm_path": f"{__name__}.reward",
        "data_source_path": f"{OURS}.DataSource",
        "hf_checkpoint": "made up",
        "input_key": "text",
        "load": str(folder / "checkpoints"),
        "metadata_key": "metadata",
        "n_samples_per_prompt": 8,
        "num_rollout": 10,
        "over_sampling_batch_size": None,
        "prompt_data": str(data),
        "rollout_batch_size": 25,
        "rollout_function_path": f"{OURS}.generate_rollout",
        "rollout_global_dataset": True,
        "rollout_max_response_len": LONGEST,
        "rollout_num_engines": 1,
        "rollout_seed": 42,
        "rollout_skip_special_tokens": False,
        "rollout_temperature": 1.0,
        "rollout_top_k": -1,
        "rollout_top_p": 1.0,
        "rollpacker": {"enabled": mode == "on"},
        "save": str(folder / "checkpoints"),
        "save_interval": 2,
        "sglang_enable_deterministic_inference": mode != "plain",
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 4096,
    }
    if mode == "plain":
        own["data_source_path"] = "slime.rollout.data_source.RolloutDataSource"
        own["rollout_function_path"] = "slime.rollout.sglang_rollout.generate_rollout"
    args = Namespace(**{**none, **own, **changes})
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    return args


def seed_of(args: Namespace, prompt: int, place: int) -> int:
    """The seed that the scheduler gives a response."""
    return sample_key(args.rollout_seed, SampleId(PromptId(SOURCE, 0, prompt), place, 0)) >> 1


async def seeded(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """slime's own `generate`, with the scheduler's seed: slime's own depend on the place alone."""
    from slime.rollout.sglang_rollout import generate

    place = sample.index - sample.group_index * args.n_samples_per_prompt
    sampling_params["sampling_seed"] = seed_of(args, sample.group_index, place)
    return await generate(args, sample, sampling_params)


async def own(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A generate function of a user's."""
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, sampling_params)


async def reward(args: Namespace, samples: Any) -> Any:
    """The length of a response; of a list of them with `--group-rm`."""
    if isinstance(samples, list):
        return [float(one.response_length) for one in samples]
    return float(samples.response_length)


def hashed(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


def expected(args: Namespace, num_prompts: int) -> dict[str, str]:
    """What the policy draws for all responses to these prompts, as hashes by prompt and place."""
    found = {}
    for prompt in range(num_prompts):
        tokens = slimes.Tokenizer().encode(f"prompt {prompt}")
        for place in range(args.n_samples_per_prompt):
            drawn, _, _ = policy(tokens, seed_of(args, prompt, place), LONGEST)
            found[f"{prompt}/{place}"] = hashed(drawn)
    return found


def named(args: Namespace, sample: Any) -> str:
    return f"{sample.group_index}/{sample.index - sample.group_index * args.n_samples_per_prompt}"


def trained(args: Namespace) -> Iterator[tuple[int, Any, dict[str, str], float, float]]:
    """Train as slime's `train.py` does, from the newest checkpoint on. Yields for each step its
    number, what the rollout function returned, all that was trained on so far as hashes of tokens
    by prompt and place, and the seconds of the rollout and of the step before it is yielded."""
    slimes.install()
    from slime.utils.misc import load_function

    slimes.connect(args)
    source = load_function(args.data_source_path)(args)
    generate_rollout = load_function(args.rollout_function_path)
    latest = Path(args.load, "latest.txt")
    start, responses = 0, {}
    if latest.exists():
        start = int(latest.read_text()) + 1
        responses = json.loads(Path(args.load, f"model_{start - 1}.json").read_text())
    source.load(start - 1)
    num_rollout = args.num_rollout or len(source) // args.rollout_batch_size * args.num_epoch
    for step in range(start, num_rollout):
        began = time.monotonic()
        output = generate_rollout(args, step, source, evaluation=False)
        rollout_s = time.monotonic() - began
        for sample in (one for group in output.samples for one in group):
            name = named(args, sample)
            assert name not in responses, f"{name} is trained on twice"
            assert sample.reward == sample.response_length == len(sample.loss_mask)
            responses[name] = hashed(sample.tokens[-sample.response_length :])
        if args.save and ((step + 1) % args.save_interval == 0 or step + 1 == num_rollout):
            folder = Path(args.save)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"model_{step}.json").write_text(json.dumps(responses))
            (folder / "latest.part").write_text(str(step))
            os.replace(folder / "latest.part", folder / "latest.txt")
            source.save(step)
        yield step, output, responses, rollout_s, time.monotonic() - began


if __name__ == "__main__":
    folder, port, mode, steps = sys.argv[1:]
    settings = {"num_rollout": int(steps), "rollout_batch_size": 8, "n_samples_per_prompt": 2}
    for step, *_ in trained(arguments(Path(folder), int(port), mode, **settings)):
        print(step, flush=True)
