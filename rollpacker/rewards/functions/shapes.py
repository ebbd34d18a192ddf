"""How reward functions of several frameworks are called. The framework shows in the signature.

    trl       f(prompts, completions, completion_ids, **columns) -> list[float | None]
    openrlhf  reward_func(queries, prompts, labels, **kwargs) -> tensor, list, or
              {"rewards": ..., "scores": ..., "extra_logs": ...}
    verl      compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
              -> float or {"score": ..., ...}
    areal     reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float

Functions of the first two judge a batch, those of the last two one sample a call. All may be async.

trl: a function gets only the arguments in its signature. Functions of every framework may have
parameters `log_metric`, `log_extra` and `trainer_state`; trl's `**columns` get them too
(`logged.py`). verl: `ground_truth` is the row's column of that name, else its
`reward_model["ground_truth"]`, else its answer; `data_source` is the column, else the row's task.
openrlhf: `queries` are prompts with their completions, `labels` the row's answer; of a returned
dict only `rewards` are used. areal: `prompt_ids` is None, since rewards see text. Where a framework
passes prompts as text, chat messages become their contents, one a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.rewards.functions.logged import NAMES as LOGGERS
from rollpacker.rewards.reward import RewardConfig, RewardError, RewardInput, Shape

ANSWERS = ("labels", "label", "ground_truth", "answer", "solution", "target")
"""Columns that may hold a row's answer. The first that a row has is used."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a reward function, as far as they decide how it is called."""

    named: tuple[str, ...]
    required: tuple[str, ...]
    positional_only: tuple[str, ...]
    takes_all: bool
    """Whether the function has `**kwargs`, and so accepts any further name."""
    all_name: str | None = None
    """The name of the `**kwargs` parameter. None: there is none."""

    @classmethod
    def of(cls, parameters: Sequence[Mapping[str, Any]] | None) -> Signature:
        """The signature that a worker reports. `parameters` is None for a function that has no
        signature; any name is then assumed to be accepted."""
        if parameters is None:
            return cls((), (), (), True)
        named = [p for p in parameters if p["kind"] in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
        return cls(
            named=tuple(p["name"] for p in named),
            required=tuple(p["name"] for p in named if not p["has_default"]),
            positional_only=tuple(p["name"] for p in parameters if p["kind"] == "POSITIONAL_ONLY"),
            takes_all=any(p["kind"] == "VAR_KEYWORD" for p in parameters),
            all_name=next((p["name"] for p in parameters if p["kind"] == "VAR_KEYWORD"), None),
        )


def shape_of(signature: Signature) -> Shape:
    """The framework whose functions have such parameters; trl if no other fits."""
    named = set(signature.named)
    if {"solution_str", "ground_truth"} <= named:
        return "verl"
    if "queries" in named and named & {"labels", "prompts"}:
        return "openrlhf"
    if {"prompt", "prompt_ids"} <= named:
        return "areal"
    return "trl"


Field = Callable[[RewardInput], Any]


@dataclass(frozen=True, slots=True)
class _Style:
    """How one framework calls its reward functions."""

    usage: str
    fields: Mapping[str, Field]
    """For each argument that the framework passes besides columns, by name, a function that makes
    the argument. A `KeyError` raised by such a function names the column that it needs."""
    per_sample: bool = False
    num_positional: int = 0
    """Number of fields that are passed by position, from the first on."""
    all_columns: bool = True
    """Whether `**kwargs` of the function get all columns of the row."""


def _column(name: str, sample: RewardInput) -> Any:
    return sample.columns.get(name)


def _chat(sample: RewardInput) -> Any:
    """A completion as TRL passes it: a text, or messages; for a sample of several turns all
    messages, with the environment's."""
    if sample.episode is not None:
        return [dict(message) for message in sample.episode.messages]
    if isinstance(sample.prompt, str):
        return sample.completion
    return [{"role": "assistant", "content": sample.completion}]


def _prompt_text(sample: RewardInput) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "".join(f"{message['content']}\n" for message in sample.prompt)


def _answer(sample: RewardInput) -> Any:
    for name in ANSWERS:
        if name in sample.columns:
            return sample.columns[name]
    raise KeyError("answer")


def _ground_truth(sample: RewardInput) -> Any:
    if "ground_truth" in sample.columns:
        return sample.columns["ground_truth"]
    nested = sample.columns.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    try:
        return _answer(sample)
    except KeyError:
        raise KeyError("ground_truth") from None


def _data_source(sample: RewardInput) -> Any:
    return sample.columns.get("data_source", sample.task)


_STYLES: dict[str, _Style] = {
    "trl": _Style(
        "f(prompts, completions, **columns)",
        {
            "prompts": lambda sample: sample.prompt,
            "completions": _chat,
            "completion_ids": lambda sample: list(sample.completion_tokens),
            "finish_reasons": lambda sample: sample.finish_reason,
        },
    ),
    "openrlhf": _Style(
        "reward_func(queries, prompts, labels, **kwargs)",
        {
            "queries": lambda sample: _prompt_text(sample) + sample.completion,
            "prompts": _prompt_text,
            "labels": _answer,
        },
        num_positional=3,
        all_columns=False,
    ),
    "verl": _Style(
        "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
        {
            "data_source": _data_source,
            "solution_str": lambda sample: sample.completion,
            "ground_truth": _ground_truth,
            "extra_info": lambda sample: sample.columns.get("extra_info"),
        },
        per_sample=True,
        all_columns=False,
    ),
    "areal": _Style(
        "reward_fn(prompt, completions, prompt_ids, completion_ids, **data)",
        {
            "prompt": _prompt_text,
            "completions": lambda sample: sample.completion,
            "prompt_ids": lambda sample: None,
            "completion_ids": lambda sample: list(sample.completion_tokens),
        },
        per_sample=True,
        num_positional=4,
    ),
}


class Binding:
    """Decides by a reward function's signature and framework which arguments its calls get."""

    def __init__(self, config: RewardConfig, signature: Signature) -> None:
        self.shape = shape_of(signature) if config.shape == "auto" else config.shape
        self._style = _STYLES[self.shape]
        self.per_sample = self._style.per_sample
        """Whether a call judges only one sample."""
        self.all_columns = signature.all_name
        """The name of the `**kwargs` parameter. None: there is none."""
        self._config = config
        self._signature = signature
        num = self._style.num_positional
        first = (signature.positional_only + signature.named)[:num]
        by_name = not signature.positional_only and set(first) <= set(self._style.fields)
        self._positional = () if by_name else tuple(self._style.fields)[:num]
        self._filled = {*self._style.fields, *(() if by_name else first), *LOGGERS}
        """Names of parameters that get no column, but something else from framework or run."""
        self._check_signature()
        self._fields = [
            name
            for name in self._style.fields
            if name not in self._positional and (name in signature.named or signature.takes_all)
        ]
        self._columns_needed = [
            name
            for name in signature.required
            if name not in self._filled and name not in config.arguments
        ]

    def _check_signature(self) -> None:
        signature, function = self._signature, self._config.function
        style = self._style
        if signature.positional_only and not self._positional:
            raise RewardError(
                f"reward {function}: its parameter {signature.positional_only[0]} cannot be passed"
                " by name."
            )
        if taken := set(style.fields) & set(self._config.arguments):
            raise RewardError(
                f"reward {function}: the run itself passes {min(taken)}; take it out of arguments."
            )
        num_parameters = len(signature.positional_only) + len(signature.named)
        if not (num_parameters or signature.takes_all):
            raise RewardError(
                f"reward {function} takes no parameter; it must look like {style.usage}."
            )
        if num_parameters < len(self._positional):
            raise RewardError(
                f"reward {function} takes {num_parameters} parameters; with shape {self.shape} it"
                f" must look like {style.usage}."
            )
        if not signature.takes_all:
            refuse_unknown(self._config.arguments, signature.named, function)

    def _takes_column(self, name: str) -> bool:
        if name in self._filled:
            return False
        return name in self._signature.named or (
            self._signature.takes_all and self._style.all_columns
        )

    def missing_column(self, columns: Mapping[str, Any]) -> str | None:
        """The name of a column that a call needs and this row lacks. None: no column is missing."""
        for name in self._columns_needed:
            if name not in columns:
                return name
        sample = RewardInput(
            prompt="", completion="", completion_tokens=(), finish_reason="stop", columns=columns
        )
        required = {*self._positional, *self._signature.required}
        try:
            for name in (*self._positional, *self._fields):
                if name in required:
                    self._style.fields[name](sample)
        except KeyError as error:
            return str(error.args[0])
        return None

    def bind(self, samples: Sequence[RewardInput]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments of a call for these samples, except those
        that the config gives. Raises `KeyError` for a missing column."""
        named: dict[str, Any] = {}
        for name in dict.fromkeys(name for sample in samples for name in sample.columns):
            if self._takes_column(name):
                named[name] = self._each(partial(_column, name), samples)
        for name in self._fields:
            named[name] = self._each(self._style.fields[name], samples)
        args = [self._each(self._style.fields[name], samples) for name in self._positional]
        return args, named

    def _each(self, field: Field, samples: Sequence[RewardInput]) -> Any:
        return field(samples[0]) if self.per_sample else [field(sample) for sample in samples]


def refuse_unknown(arguments: Mapping[str, Any], known: Sequence[str], function: str) -> None:
    """Raise `RewardError` if the config's `arguments` have a name that is not `known` as a
    parameter. `function`: name for the message."""
    for name in arguments:
        if name not in known:
            hint = did_you_mean(name, known)
            raise RewardError(
                f"reward {function} takes no argument {name}.{hint} It takes: {', '.join(known)}."
            )
