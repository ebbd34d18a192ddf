"""`rollpacker play CONFIG`: one episode in the terminal, by hand or by a model, token by token."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli.arguments import add_overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollpacker.cli.episode_display import EpisodeDisplay
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.ids import SampleId
    from rollpacker.data.dataset import PromptRow
    from rollpacker.run.parts.policy import Inputs
    from rollpacker.run.ports.player import Player
    from rollpacker.run.ports.playing import Generate, StopKeeping


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "play",
        help="one episode with the config's environment, by hand or by a model",
        description="Plays one episode in the terminal: you write the model's messages, or a model "
        "does (--model). Shows the tokens as a run would train on them (> drawn, dim: given), and "
        "rewards and seconds of each turn. Writes no files.",
        epilog="By hand: a line is a message; one that ends in \\ goes on in the next. With tools, "
        '{"name": ..., "arguments": {...}} is a call, put into the model\'s own format. '
        "Ctrl-D ends the episode.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file with an `environment`")
    add_overrides(parser, "replace single settings of the config")
    parser.add_argument(
        "--model",
        metavar="RUN_OR_MODEL",
        nargs="?",
        const="",
        help="let a model play: a run's newest, a model's folder, or without a name the config's",
    )
    parser.add_argument(
        "--prompt",
        metavar="N",
        type=int,
        default=0,
        help="the prompt of data.train, counted from 0 as in prompt ids (default %(default)s)",
    )
    parser.add_argument(
        "--tokens", action="store_true", help="a line for each token, with its id and log-prob"
    )


def run(args: argparse.Namespace) -> int:
    """Play, and return the exit code. Raises `ValueError` for what the user can mend."""
    import asyncio

    from rollpacker.cli.eval import model_of
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.parts.hub import look_for_hub

    config = load_config(args.config, args.overrides, RunConfig)
    if config.environment is None:
        raise ValueError(
            f"{args.config} has no environment, so that a response is one message and nothing"
            " answers it: set environment.tools or environment.function (docs/turns.md), or let"
            " `rollpacker eval` draw single responses"
        )
    if args.prompt < 0:
        raise ValueError(f"--prompt counts from 0; there is no prompt {args.prompt}")
    model = None
    if args.model:
        if not Path(args.model).exists():
            raise ValueError(f"--model: there is no run or model at {args.model}")
        model = model_of(Path(args.model))
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"--model: {args.model} is no model's folder, nor a run's with one")
    look_for_hub(config, model_path=model)
    asyncio.run(_play(config, args, model))
    return 0


async def _play(config: RunConfig, args: argparse.Namespace, model: str | None) -> None:
    from rollpacker.cli.by_hand import ByHand
    from rollpacker.cli.episode_display import EpisodeDisplay
    from rollpacker.engines.collect import collect
    from rollpacker.run.parts.policy import load_inputs, load_policy

    policy = None
    if args.model is None:
        inputs = load_inputs(config)
    else:
        policy = load_policy(config, model_path=model)
        inputs = policy.inputs
    turns = inputs.turns
    assert turns is not None
    player = turns.player(config.seed)
    try:
        sample, row = _asked(config, inputs, args.prompt)
        stage = EpisodeDisplay(
            turns.dialogue.template,
            player.environments,
            by_hand=policy is None,
            each_token=args.tokens,
        )
        player.environments = stage
        await stage.open()
        generate: Generate
        let_go: StopKeeping = lambda samples: None  # noqa: E731
        if policy is None:
            generate = ByHand(turns.dialogue.template, stage.console).generate
        else:
            engine = policy.engine
            generate = lambda requests: collect(engine, requests)  # noqa: E731
            let_go = engine.let_go
        await _episode(config, inputs, player, stage, generate, let_go, (sample, row))
    finally:
        if policy is not None:
            await policy.engine.close()
        await player.environments.close()
        await inputs.reward.close()


def _asked(config: RunConfig, inputs: Inputs, number: int) -> tuple[SampleId, PromptRow]:
    """Returns a first epoch's first sample of the prompt of this number, and the prompt's row."""
    from rollpacker.core.ids import PromptId, SampleId
    from rollpacker.data.dataset import TRAIN

    rows = inputs.train_prompts.rows
    if number >= len(rows):
        raise ValueError(
            f"--prompt {number}: data.train has {len(rows)} prompts, 0 to {len(rows) - 1}"
        )
    row = rows[number]
    source = row.task or TRAIN if config.routed else TRAIN
    return SampleId(PromptId(source, 0, number), 0, 0), row


async def _episode(
    config: RunConfig,
    inputs: Inputs,
    player: Player,
    stage: EpisodeDisplay,
    generate: Generate,
    let_go: StopKeeping,
    asked: tuple[SampleId, PromptRow],
) -> None:
    """Play the episode and have it judged. Raises `ValueError` if the environment was lost."""
    from rollpacker.cli.by_hand import StoppedByHand
    from rollpacker.rewards.reward import Progress
    from rollpacker.run.ports.evaluation import reward_input
    from rollpacker.run.ports.playing import play_all

    sample, row = asked
    assert inputs.turns is not None
    stage.starts(sample, row, inputs.turns)
    try:
        responses, episodes = await play_all(
            player, [asked], stage.shown(generate), config.sampling, let_go
        )
    except StoppedByHand:
        stage.stopped()
        return
    if not responses:
        lost = stage.lost
        assert lost is not None, "an engine's failure raises"
        raise ValueError(
            f"the episode was lost ({lost.cause}): {lost.reason}. A run would ask for another"
            " sample; this one would never be a zero"
        )
    (response,), episode = responses, episodes[sample]
    stage.ended(response, episode, config)
    tokenizer = inputs.turns.dialogue.template.tokenizer

    def text_of(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    progress = Progress(0, config.num_steps(len(inputs.train_prompts.rows)))
    (verdict,) = await inputs.reward.score(
        [reward_input(row, response, text_of, progress, episode)]
    )
    stage.judged(verdict)
