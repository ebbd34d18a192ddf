"""The `arguments` of the built-in reward `judge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollpacker.endpoints.http import checked_url
from rollpacker.rewards.judge.verdicts import Scale

RUBRIC = (
    "Full score: the answer is right and complete, and agrees with the reference if there is one."
    " Lowest score: it is wrong, empty, or does not address the question."
)
OWN_FIELDS = ("messages", "model", "stream", "n", "response_format", "temperature")
"""Fields of a request that the judge sets itself, and that the config must not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Settings of the reward `judge`: the model that judges, its rubric, and how often it is asked.
    Raises `ValueError` for what cannot work."""

    url: str | None = None
    """Address of an OpenAI-compatible endpoint, up to and with `/v1`. Either this or `model_path`
    must be set. None: there is no endpoint."""
    model: str | None = None
    """The model's name at the endpoint. Needed with `url`; None with `model_path`."""
    token_env: str | None = None
    """The environment variable with the endpoint's key. None: no key is sent."""
    model_path: str | None = None
    """A Hugging Face folder with the model, which then runs on an engine of its own in this
    process. None: `url` is used."""
    rubric: str = RUBRIC
    """Text that tells the judge which answers earn which score."""
    reference_column: str | None = "answer"
    """The column with the right answer. None: the judge sees no right answer."""
    scale: Sequence[float] | Literal["binary"] = (0, 10)
    """Lowest and highest score, or "binary" (0 or 1). The reward's value is the score's place on
    this scale, from 0 to 1."""
    max_answer_chars: int = 16_000
    """Most characters of an answer that the judge sees. A longer answer loses its middle."""
    min_answer_chars: int = 1
    """Least number of letters, digits or symbols in an answer. An answer with fewer is worth 0
    without asking the judge."""
    votes: int = 1
    """Number of times that the judge is asked about an answer. The median score counts; more than
    half of the replies must be readable."""
    max_reasks: int = 1
    """Number of times that an unreadable reply is asked for again."""
    reply_id: bool = True
    """Whether the reply must repeat a random id of the request. Turn it off for judges that are too
    small to copy one."""
    temperature: float | None = 0.0
    """Sampling temperature of the judge. None: the request has no temperature."""
    max_reply_tokens: int = 1024
    request: Mapping[str, Any] | None = None
    """Further fields of each request to an endpoint. None: there are none."""
    max_retries: int = 6
    """Most times that a failed request is sent again. Failures while the endpoint is busy do not
    count; those while it is down count against `outage_s`."""
    outage_s: float = 1800.0
    """Most seconds that samples wait for an endpoint that is down or too busy."""
    canary_rate: float = 0.005
    """Share of samples, 0 to 1, beside which the judge is also asked about an answer without
    content, to see if it can be fooled."""
    seed: int = 0
    """Seed by which the samples for `canary_rate` are chosen."""
    probe: bool = True
    """Whether to ask the endpoint once before the run, which is refused if there is no reply."""
    as_scale: Scale = field(init=False, repr=False, compare=False)
    """The setting `scale` as a `Scale` object."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "as_scale", _read_scale(self.scale))
        if (self.url is None) == (self.model_path is None):
            raise ValueError(
                "a judge needs either url (of an endpoint) or model_path (a model folder)."
            )
        if self.url is not None:
            if not self.model:
                raise ValueError("url needs model, the model's name at the endpoint.")
            _check_base_address(self.url)
        if not self.rubric.strip():
            raise ValueError("rubric is empty.")
        if not 0 <= self.canary_rate <= 1:
            raise ValueError(f"canary_rate is a share from 0 to 1, not {self.canary_rate}.")
        if self.max_answer_chars < 200:
            raise ValueError(f"max_answer_chars must be at least 200, not {self.max_answer_chars}.")
        if self.votes < 1 or self.max_reasks < 0 or self.max_retries < 0:
            raise ValueError("votes must be at least 1, max_reasks and max_retries at least 0.")
        if not self.outage_s > 0:
            raise ValueError(f"outage_s must be more than 0, not {self.outage_s}.")
        if taken := [name for name in OWN_FIELDS if name in (self.request or {})]:
            raise ValueError(f"request must not set {taken[0]}; the judge sets it itself.")


def _check_base_address(url: str) -> None:
    base = checked_url(url)
    for ending in ("/chat/completions", "/completions"):
        if base.endswith(ending):
            raise ValueError(f'url "{url}" must be the address before {ending}.')


def _read_scale(scale: Sequence[float] | Literal["binary"]) -> Scale:
    if scale == "binary":
        return Scale(low=0.0, high=1.0, binary=True)
    try:
        low, high = (float(number) for number in scale)
        return Scale(low=low, high=high)
    except (TypeError, ValueError):
        raise ValueError(
            f'scale is a low and a high number, such as [0, 10], or "binary", not {scale!r}.'
        ) from None
