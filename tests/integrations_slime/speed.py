"""Rollouts of slime against a made-up SGLang server of a fake speed.

    python -m tests.integrations_slime.speed --mode plain --steps 10 --token-s 0.015

`plain` is slime's own `generate_rollout` where SLIME_CHECKOUT names a checkout of slime, and else a
loop that stands in for it (`slimes.py`): it starts all responses of a step and waits for all. `off`
and `on` are RollPacker's, without and with tail batching. Faked: training takes no time and leaves
the policy as it is, the tokenizer gives a token to each character, the reward is the length, and
the router is the one server itself. Prints a JSON object for each step, and one for what was
trained on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.integrations_slime.host import arguments, trained
from tests.integrations_slime.servers import serving


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("plain", "off", "on"), required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--token-s", type=float, default=0.015)
    parser.add_argument("--seed", type=int, default=42)
    asked = parser.parse_args()
    with serving(asked.token_s) as port, tempfile.TemporaryDirectory() as folder:
        args = arguments(
            Path(folder),
            port,
            asked.mode,
            num_rollout=asked.steps,
            rollout_batch_size=asked.prompts,
            n_samples_per_prompt=asked.samples,
            rollout_seed=asked.seed,
        )
        responses: dict[str, str] = {}
        for step, output, found, rollout_s, step_s in trained(args):
            responses |= found
            lengths = [one.response_length for group in output.samples for one in group]
            seconds = {"rollout_s": rollout_s, "step_s": step_s}
            print(json.dumps({"step": step, **seconds, "lengths": lengths}), flush=True)
    print(json.dumps({"responses": responses}), flush=True)


if __name__ == "__main__":
    main()
