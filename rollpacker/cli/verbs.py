"""The verbs (commands) of `rollpacker`, and how their arguments are parsed.

Every verb is a module beside this one with `add_parser(subparsers)` and `run(args) -> int`. Heavy
imports belong inside `run`, so that `rollpacker --help` answers at once."""

from __future__ import annotations

import argparse
import difflib
import importlib
from typing import Any, NoReturn

from rollpacker.run.error_messages import EXIT_CODES

VERBS = (
    *("init", "train", "warmup", "eval", "play", "replay", "report", "compare", "dash", "serve"),
    *("simulate", "plan", "cluster", "doctor"),
)

_EXAMPLES = """\
examples:
  rollpacker init quickstart                            a first run, in an empty folder
  rollpacker train configs/quickstart.yaml
  rollpacker train configs/quickstart.yaml rollout.prompts_per_step=32 train.learning_rate=1e-4
  rollpacker train configs/quickstart.yaml --dry-run    batch arithmetic and the first prompt
  rollpacker train configs/quickstart.yaml --resume     goes on exactly where it stopped
  rollpacker report runs/quickstart                     the summary table again, and the timeline
  rollpacker simulate configs/scenarios/14b-16k.yaml --compare verl,rollpacker

'rollpacker VERB --help' tells more about one verb.

exit codes:
"""


class _Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line, which points to the help, instead of the usage
    text.

    It takes no abbreviated options: `--over` must not replace a run (`--overwrite`)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n'{self.prog} --help' shows how it is used.\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"rollpacker {version('rollpacker')}")
        parser.exit(0)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, with all verbs."""
    codes = "".join(f"  {code:<4} {meaning}\n" for code, meaning in EXIT_CODES.items())
    parser = _Parser(
        prog="rollpacker",
        description="On-policy RL post-training of language models that does not wait for the "
        "longest response.",
        epilog=_EXAMPLES + codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        importlib.import_module(f"rollpacker.cli.{verb}").add_parser(subparsers)
        subparsers.choices[verb].add_argument(
            "--verbose", action="store_true", help="say more of what is done, on standard error"
        )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments. Unlike in argparse alone, `key=value` may also follow an option."""
    args, rest = parser.parse_known_args(arguments)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in late]
    if unknown or (late and not hasattr(args, "overrides")):
        early = [word for word in unknown if word in arguments[: arguments.index(args.verb)]]
        if early:
            parser.error(f"{' '.join(early)} stands before the verb: write it after {args.verb}")
        hint = _hint_for_flags(unknown) if hasattr(args, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown or late)}{hint}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def _hint_for_flags(words: list[str]) -> str:
    """A text on how flags of other frameworks, such as `--learning_rate 1e-6`, are written here (as
    `key=value`). Empty if none of `words` is such a flag."""
    from rollpacker.config.schema import RunConfig
    from rollpacker.config.synonyms import TRL, TRL_DIFFERS, all_keys, hint, of_others

    known = {*all_keys(RunConfig)}
    lines, names_trl = list[str](), False
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            path = flag.lstrip("-").replace("-", "_").split(".")
            name = ".".join(path)
            value = value or ("" if after.startswith("--") else after)
            ours = f" Here it is {name}" if name in known else hint(path, known, value)
            if ours:
                lines.append(f"\n  {flag}:{ours}")
                theirs = () if name in known else of_others(path, known, value)
                names_trl = names_trl or any(one.framework == TRL for one in theirs)
    if names_trl:
        lines.append(f"\n  {TRL_DIFFERS}")
    return "".join([*lines, "\n  settings are written key=value, without dashes"] if lines else [])


def unknown_verb(verb: str) -> str:
    """The error message for a first word that is no verb."""
    near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
    if near:
        return f"rollpacker: there is no verb {verb!r}. Did you mean '{near[0]}'?"
    if verb.endswith((".yaml", ".yml")):
        return f"rollpacker: the verb is missing. Did you mean 'rollpacker train {verb}'?"
    return f"rollpacker: there is no verb {verb!r}. The verbs are {', '.join(VERBS)}."
