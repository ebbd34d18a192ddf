"""Builds what multi-turn samples need: environments, the chat template, and the player of turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollpacker.config.schema import ENVIRONMENT, RunConfig
from rollpacker.core.checks.acting import ActingConfig, TurnLimits
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.schedule import KindConfig
from rollpacker.data.dataset import TRAIN
from rollpacker.run.driving import Caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollpacker.data.dataset import PromptSet
    from rollpacker.dialogue.parsing import TemplateDialogue
    from rollpacker.dialogue.rewrites import Rewrites
    from rollpacker.environments.supervised import SupervisedEnvironments
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.ports.player import Player

SLOW_FACTOR, SLOW_S = 3.0, 30.0
"""The deadline of an environment's answer: SLOW_FACTOR times the longest answer so far, at least
SLOW_S seconds. A tight deadline would favour short trajectories, which wait for fewer answers."""


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The parts of a run that are needed only if its samples take turns with environments."""

    environments: SupervisedEnvironments
    dialogue: TemplateDialogue
    limits: TurnLimits
    timeout_s: float
    max_prompt_tokens: int
    rewrites: Rewrites | None = None
    """How the chat template rewrites earlier messages when later ones follow. None: not at all."""
    takes_rewrites: bool = False
    """Whether the run accepts a chat template that changes earlier turns."""
    per_host: int | None = None

    def be_on(self, hosts: Hosts) -> None:
        """Have the environments' processes start on the engines' hosts, if the config asks for that
        (`per_host`). Called before the first use."""
        if self.per_host is not None:
            self.environments.be_on(hosts.beside_engines(self.per_host))

    def close(self) -> None:
        """End the processes of the environments. Further calls do nothing."""
        Caller().run(self.environments.close())

    def player(self, seed: int) -> Player:
        """Returns a new player of episodes in these environments. `seed`: seed of the
        environments."""
        from rollpacker.run.ports.player import Player

        return Player(
            self.environments,
            self.dialogue,
            seed=seed,
            limits=self.limits,
            timeout_s=self.timeout_s,
            max_prompt_tokens=self.max_prompt_tokens,
            takes_rewrites=self.takes_rewrites,
        )

    def acting(self, sources: set[str]) -> ActingConfig:
        """Returns the core's limits of turns and tokens, and the deadline of an environment's
        answer. `sources`: names of the groups of prompts, as `sources_of` returns them."""
        deadline = AdaptiveDeadlineConfig(
            min_s=min(SLOW_S, self.timeout_s), factor=SLOW_FACTOR, max_s=self.timeout_s
        )
        return ActingConfig(
            limits=self.limits,
            begins=self.environments.begins,
            is_deterministic=self.environments.is_deterministic,
            kinds={source: KindConfig(deadline=deadline) for source in sorted(sources)},
        )


def load_turns(config: RunConfig, of_tokenizer: Mapping[str, Any]) -> TurnParts | None:
    """Start the environments of the config and inspect them. Returns them with the chat template
    that shows their tools, or None if the config has no environment. `of_tokenizer`: the tokenizer
    and its settings, as `policy.of_tokenizer` returns them. Raises `EnvironmentSetupError` and
    `TemplateError`."""
    from rollpacker.dialogue.parsing import TemplateDialogue
    from rollpacker.dialogue.rewrites import find_rewrites
    from rollpacker.dialogue.template import DialogueTemplate
    from rollpacker.environments.supervised import SupervisedEnvironments

    environment = config.environment
    if environment is None:
        return None
    limits = TurnLimits(
        max_turns=environment.max_turns,
        max_trajectory_tokens=_most_tokens(config, of_tokenizer["max_context_tokens"]),
        max_environment_s=environment.max_environment_s,
    )
    data = config.data.train
    environments = SupervisedEnvironments(
        environment,
        sandbox=config.sandbox,
        brings_rows=data.kind == "environment",
        num_rows=data.size,
    )
    try:
        _check_rewards(config, environments)
        template = DialogueTemplate(
            of_tokenizer["tokenizer"],
            tools=environments.tools,
            chat_template_kwargs=of_tokenizer["chat_template_kwargs"],
            end_tokens=of_tokenizer["end_tokens"],
        )
        dialogue = TemplateDialogue(template)
        rewrites = find_rewrites(template)
    except ValueError:
        Caller().run(environments.close())
        raise
    return TurnParts(
        environments,
        dialogue,
        limits,
        environment.timeout_s,
        config.data.max_prompt_tokens,
        rewrites,
        takes_rewrites=environment.rewrites == "prefixes",
        per_host=environment.per_host,
    )


def _check_rewards(config: RunConfig, environments: SupervisedEnvironments) -> None:
    asked = any(reward.function == ENVIRONMENT for reward in config.rewards)
    if asked and not environments.gives_rewards:
        raise ValueError(
            f"rewards: the reward {ENVIRONMENT} is what an environment says, and"
            f" {environments.name} has neither a method step nor get_reward: write"
            " get_reward(self), or name a function of yours in rewards"
        )


def _most_tokens(config: RunConfig, context: int | None) -> int:
    """Returns the most tokens that a trajectory may have. `context`: the model's context length;
    None if unknown. Raises `ValueError` if no dialogue fits."""
    assert config.environment is not None
    most, prompt = config.environment.max_trajectory_tokens, config.data.max_prompt_tokens
    if context is None and most is None:
        raise ValueError(
            "the model's config.json does not say how long its context is: set"
            " environment.max_trajectory_tokens"
        )
    if context is None:
        assert most is not None
        return most
    if context - prompt < (1 if most is None else most):
        needed = "a dialogue" if most is None else f"environment.max_trajectory_tokens={most}"
        raise ValueError(
            f"data.max_prompt_tokens={prompt} leaves {max(context - prompt, 0)} tokens of the"
            f" model's context of {context}, too few for {needed}; lower it"
            + ("" if most is None else ", or both")
        )
    return context - prompt if most is None else most


def with_tools(of_tokenizer: Mapping[str, Any], turns: TurnParts | None) -> dict[str, Any]:
    """Returns the tokenizer's settings, with the environments' tools for the chat template."""
    if turns is None or not turns.environments.tools:
        return dict(of_tokenizer)
    kwargs = {**(of_tokenizer["chat_template_kwargs"] or {}), "tools": [*turns.environments.tools]}
    return {**of_tokenizer, "chat_template_kwargs": kwargs}


def check_turns(
    turns: TurnParts, prompts: Mapping[str, PromptSet], tell: Callable[[str], None]
) -> None:
    """Show a sample dialogue of three turns as the model gets it, line by line, by `tell`. Raises
    `ValueError` if prompts are plain texts, which no turn can follow, or if the chat template
    changes earlier turns and the config does not accept that."""
    from rollpacker.dialogue.check import dialogue_lines

    for split, of_split in prompts.items():
        if not turns.environments.begins and any(row.messages is None for row in of_split.rows):
            raise ValueError(
                f"the prompts of data.{split} are texts that the chat template has no part in, and"
                f" turns follow messages: set data.{split}.chat=true"
            )
    template, rewrites = turns.dialogue.template, turns.rewrites
    for line in dialogue_lines(template, rewrites, prompts["train"].rows[0].messages):
        tell(line)
    if rewrites is not None and not turns.takes_rewrites:
        raise ValueError(
            f"{rewrites.sentence} Set environment.rewrites=prefixes to draw and train each turn"
            " behind what the template makes of it then; or use a template that keeps what was"
            " said, or switch that off in model.chat_template_kwargs"
        )


def sources_of(config: RunConfig, prompts: PromptSet) -> set[str]:
    """Returns the names of the groups into which the core sorts prompts, to learn their times
    apart: the prompts' tasks if the config's rewards depend on tasks, else only `train`."""
    return {row.task or TRAIN for row in prompts.rows} if config.routed else {TRAIN}
