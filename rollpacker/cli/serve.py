"""`rollpacker serve RUN_OR_MODEL`: puts a model behind an endpoint for OpenAI's clients."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli.arguments import add_overrides

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.engines.engine import SamplingParams
    from rollpacker.trainer.trainer import ModelConfig

PORT = 8000
LOOPBACK = "127.0.0.1"
MAX_RESPONSE_TOKENS = 1024
"""Maximum number of tokens of a response, if neither the request nor a config sets a limit."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="a run's policy behind an OpenAI-compatible endpoint",
        description="Serves the newest checkpoint of a run, a model folder, or the model of a "
        "config, as OpenAI's chat completions, on this machine alone unless told otherwise. Ctrl-C "
        "ends it.",
    )
    parser.add_argument(
        "target", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder, or a config"
    )
    add_overrides(parser, "replace single settings of the config")
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: a free one")
    parser.add_argument("--host", default=LOOPBACK, help=f"default {LOOPBACK}: this machine alone")
    parser.add_argument("--token", help="what clients must send; one is made if left out")
    parser.add_argument(
        "--record",
        metavar="FOLDER",
        type=Path,
        help="write tokens and log-probs of every answer to sessions.jsonl in this folder",
    )


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    model: ModelConfig
    config: RunConfig | None

    @property
    def sampling(self) -> SamplingParams:
        """The settings of generation where a request has none."""
        from rollpacker.engines.engine import SamplingParams

        if self.config is None:
            return SamplingParams(max_response_tokens=MAX_RESPONSE_TOKENS)
        rollout = self.config.rollout
        return SamplingParams(
            max_response_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
        )


def run(args: argparse.Namespace) -> int:
    """Serve a model until Ctrl-C; returns 0. Raises `ValueError` for what the user can mend."""
    import asyncio

    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port {args.port} is no port; one has a number from 0 to 65535")
    if args.token == "":
        raise ValueError("--token is empty; leave it out to have one made")
    target = _target(args)
    try:
        asyncio.run(_serve(args, target))
    except KeyboardInterrupt:
        return 0
    return 0


def _target(args: argparse.Namespace) -> _Target:
    """Returns the model that the command names: its name, settings and config, if it has one."""
    from rollpacker.config.earlier import as_it_was
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.folder.checkpoint import newest_checkpoint
    from rollpacker.trainer.trainer import ModelConfig

    path = Path(args.target)
    if path.suffix in (".yaml", ".yml"):
        config = load_config(path, args.overrides, RunConfig)
        return _Target(config.name, _whole(config.model, config.model.path), config)
    run_config = path / "config.yaml"
    if run_config.is_file():
        if not (path / "checkpoints").is_dir():
            raise ValueError(f"the run {path} has no checkpoint yet")
        config = load_config(run_config, args.overrides, RunConfig, below=as_it_was)
        folder = newest_checkpoint(path / "checkpoints").folder
        return _Target(config.name, _whole(config.model, str(folder / "model")), config)
    if args.overrides:
        raise ValueError(
            f"{path} is a model without a config, in which {args.overrides[0]} could be set"
        )
    if (path / "manifest.json").is_file():  # one checkpoint of a run
        return _Target(path.name, ModelConfig(path=str(path / "model")), None)
    return _Target(path.name, ModelConfig(path=args.target), None)


def _whole(config: ModelConfig, path: str) -> ModelConfig:
    """Returns the settings to load a checkpoint's model from `path`: its adapter is merged already,
    and it is not quantized."""
    return dataclasses.replace(config, path=path, quantization=None, lora=None)


async def _serve(args: argparse.Namespace, target: _Target) -> None:
    import asyncio
    import secrets

    from rollpacker.engines.embedded.attention import install_attention
    from rollpacker.engines.engine import EngineConfig
    from rollpacker.engines.table import BRING_THEIR_OWN_MODEL
    from rollpacker.run.parts.policy import engine_in_process, set_threads
    from rollpacker.serving.endpoint import Endpoint
    from rollpacker.serving.policy import EnginePolicy
    from rollpacker.serving.sessions import Sessions
    from rollpacker.trainer.model import context_tokens, load_model

    dialogue = _dialogue(target)
    sessions = Sessions(dialogue, record=args.record)
    engine_config = EngineConfig() if target.config is None else target.config.rollout.engine
    loaded = load_model(target.model)
    if engine_config.name not in BRING_THEIR_OWN_MODEL:
        install_attention(loaded.model)
    if target.config is not None:
        set_threads(target.config, loaded, None)
    engine = engine_in_process(loaded, engine_config)
    died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    token = args.token or secrets.token_urlsafe(24)

    def fail(error: BaseException) -> None:
        if not died.done():
            died.set_exception(error)

    try:
        policy = EnginePolicy(engine, fail)
        server = Endpoint(
            policy.draw,
            sessions,
            name=target.name,
            token=token,
            sampling=target.sampling,
            max_context_tokens=context_tokens(target.model.path),
            text_of=lambda tokens: str(loaded.tokenizer.decode(list(tokens))),
        ).server()
        try:
            port = await server.open(args.port, args.host)
        except OSError as error:
            raise ValueError(
                f"cannot listen on {args.host}:{args.port}: {error.strerror or error}; choose"
                " another --port"
            ) from None
        try:
            _tell(args, target, port, token, dialogue.rewritten())
            await died
        finally:
            await server.close()
    finally:
        await engine.close()
        sessions.close()


def _dialogue(target: _Target) -> Any:
    """Returns the chat template as an object that writes prompts and reads messages. It is made
    before the model loads, which takes longer. Raises `TemplateError` for an unusable template."""
    from rollpacker.dialogue.parsing import TemplateDialogue
    from rollpacker.dialogue.template import DialogueTemplate
    from rollpacker.trainer.model import end_tokens, load_tokenizer

    path = target.model.path
    template = DialogueTemplate(
        load_tokenizer(path),
        chat_template_kwargs=target.model.chat_template_kwargs,
        end_tokens=end_tokens(path),
    )
    return TemplateDialogue(template)


def _tell(
    args: argparse.Namespace, target: _Target, port: int, token: str, rewritten: str | None
) -> None:
    if rewritten is not None:
        print(
            f"rollpacker: {rewritten} Every call is rendered anew; calls of a session are not"
            " one trajectory.",
            file=sys.stderr,
        )
    if args.host not in (LOOPBACK, "localhost", "::1"):
        print(
            f"rollpacker: {args.host} can be reached from outside; what is sent is not encrypted,"
            " the token neither.",
            file=sys.stderr,
        )
    print(f"{target.model.path} (Ctrl-C ends it)")
    print(f"export OPENAI_BASE_URL=http://{args.host}:{port}/v1")
    print(f"export OPENAI_API_KEY={token}", flush=True)
