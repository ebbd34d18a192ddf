"""Keeps the tokens generated for deferred prompts (put off to a later step), to go on from there.

Each sample of such a prompt keeps its tokens, whole responses included, by *place*: the index of
the sample whose random numbers it is drawn with. Of a trajectory all tokens after the prompt are
kept, which its turns draw again (`carried_turns.py`). Tokens of a prompt that was trained on or
dropped are forgotten. Tokens kept at the end of a step go into its checkpoint, bit for bit:

checkpoints/step_000040/carried/      only if something waits
    tokens.npy, log_probs.npy         of all samples, one after the other
    carried.json                      whose they are, and the fingerprint of the tokenizer
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.bus import Routes
from rollpacker.core.commands import Defer, Launch, RoundKind
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import (
    Carried,
    GenerationRequest,
    Redraws,
    Response,
    SamplingParams,
)
from rollpacker.run.errors import RunError
from rollpacker.run.folder.checkpoint import CARRIED
from rollpacker.spans import Spans, check_spans
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)

_AWAITED = (
    "rounds wait for all their responses for now: carried tokens come out differently so often "
    "that racing may take longer (tail_batching.carry=auto, see docs/tail-batching.md)"
)
_INDEX, _TOKENS, _LOG_PROBS = "carried.json", "tokens.npy", "log_probs.npy"


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The tokens of one sample, with their log-probs, when its prompt was put off to a later
    step."""

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float64]
    floor: int = 0
    """Largest number of tokens at which an abort stopped this sample so far; 0: never stopped. When
    it is generated again and ends no later than there, its last part is drawn again."""
    redraws: Redraws = ()
    """Which tokens were drawn again with other random numbers, as in `Response.redraws`."""
    given: Spans = ()
    """Ranges of tokens that the model was given, not sampled; their log-probs are 0."""
    early: bool = False
    """True if the prompt was begun early and not put off since. Where its samples stopped says
    nothing of their lengths then, so that they may end anywhere."""

    def under(self, cut_off_at: int | None) -> KeptTokens:
        """Returns the tokens for a run whose cap on responses was `cut_off_at` tokens and is larger
        now; None: the cap is the same. A response of the old cap's length counts as stopped."""
        if cut_off_at is None or len(self.tokens) < cut_off_at:
            return self
        return replace(self, floor=max(self.floor, cut_off_at - 1))

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.log_probs.nbytes


KeptByPrompt = Mapping[PromptId, Mapping[int, KeptTokens]]
"""Kept tokens of prompts put off to a later step, by prompt and by place (the index of the sample
whose random numbers they were drawn with)."""


class CarriedTokens:
    """Keeps the tokens generated so far for deferred prompts (put off to a later step), when the
    core commands `Defer`. Used under the bus's lock."""

    def __init__(
        self,
        config: TailBatchingConfig,
        waiting: KeptByPrompt | None = None,
        *,
        cut_off_at: int | None = None,
    ) -> None:
        """`waiting`: the kept tokens of a checkpoint; None: no tokens. `cut_off_at`: the smaller
        cap on responses under which these were generated; None: the cap is the same."""
        self._config = config
        self._warn_once = WarnOnce(logger)
        self._waiting = {
            prompt: {place: kept.under(cut_off_at) for place, kept in places.items()}
            for prompt, places in (waiting or {}).items()
        }
        self._launched: dict[PromptId, dict[int, KeptTokens]] = {}
        """Kept tokens from which samples of this step go on, by prompt and place (index of a
        sample). They stay until newer tokens are kept for that sample."""
        self._ended: dict[PromptId, list[Response]] = {}
        """Responses of this step by prompt, whose tokens are kept if their prompt is put off to a
        later step."""
        self._early: set[PromptId] = set()
        """Prompts that were begun early in this step, and are part of no round yet."""
        self._noise: dict[SampleId, SampleId] = {}
        """For each sample that replaces a failed one: the sample whose random numbers both are
        drawn with."""

    def routes(self) -> Routes:
        return {Defer: self._defer}

    @property
    def carries(self) -> bool:
        """Whether generated tokens of prompts put off to a later step are kept at all."""
        return self._config.carries

    def metrics(self) -> dict[str, float]:
        """Returns the metric for the bytes of all kept tokens. Empty if tokens are not kept."""
        if not self.carries:
            return {}
        waiting = [kept for places in self._waiting.values() for kept in places.values()]
        return {"carry/bytes": sum(kept.num_bytes for kept in waiting)}

    def requests(
        self, command: Launch, rows: Sequence[PromptRow], sampling: SamplingParams
    ) -> list[GenerationRequest]:
        """Returns the engines' request for each sample of the command `Launch`, with the kept
        tokens from which it goes on, if any. `rows`: the data set's rows."""
        return [
            GenerationRequest(
                sample=sample,
                prompt_tokens=rows[sample.prompt.row].tokens,
                sampling=sampling,
                noise=noise,
                carried=carried,
            )
            for sample, noise, carried in self.launched(command)
        ]

    def launched(self, command: Launch) -> list[tuple[SampleId, SampleId, Carried | None]]:
        """Returns for each sample of the command `Launch` its id, that of the sample whose random
        numbers it is drawn with, and the kept tokens from which it goes on, if any."""
        if command.kind is RoundKind.PLAIN and self._config.carry == "auto" and self.carries:
            self._warn_once(_AWAITED)
        prompts = {sample.prompt for sample in command.samples}
        for prompt in prompts & self._waiting.keys():
            self.begun(prompt)
        is_early = command.kind is RoundKind.AHEAD
        self._early = self._early | prompts if is_early else self._early - prompts
        for sample, replaced in zip(command.samples, command.replaces, strict=False):
            self._noise[sample] = self._noise_of(replaced)
        counts = command.carried or (0,) * len(command.samples)
        return [
            (sample, self._noise_of(sample), self._take(sample, count, command.most_verified))
            for sample, count in zip(command.samples, counts, strict=True)
        ]

    def begun(self, prompt: PromptId) -> None:
        """Note that samples of this prompt, if it was put off, are submitted to engines again."""
        if prompt in self._waiting:
            self._launched[prompt] = self._waiting.pop(prompt)

    def is_deferred(self, prompt: PromptId) -> bool:
        """Whether this prompt is put off to a later step and waits for it."""
        return prompt in self._waiting

    def taken_up(self, sample: SampleId) -> KeptTokens:
        """Returns the tokens kept from an earlier step, from which this sample went on."""
        return self._launched[sample.prompt][self._place_of(sample)]

    def ended(self, event: SampleGenerated | SampleAborted, response: Response | None) -> None:
        """Note the response with which an engine ended a sample. If the engine was stopped before
        it verified the tokens kept from an earlier step, or generated all of them again and no
        other, these stay."""
        if not self.carries or response is None:
            return
        prompt = event.sample.prompt
        places = self._waiting.get(prompt, self._launched.get(prompt, {}))
        kept = places.get(self._place_of(event.sample))
        if isinstance(event, SampleAborted) and kept is not None:
            has_more = event.num_kept == event.num_tokens < len(kept.tokens)
            if has_more or (event.num_kept is None and len(kept.tokens) == event.num_tokens):
                if kept.early:  # a race has stopped it now, and before it was cut off there
                    floor = min(kept.floor, event.num_tokens)
                    places[self._place_of(event.sample)] = replace(kept, floor=floor, early=False)
                return
        self.left(response)

    def left(self, response: Response) -> None:
        """Keep this response's tokens for its sample, in place of the tokens that were kept
        before."""
        prompt = response.sample.prompt
        if not self.carries:
            return
        if prompt in self._waiting:
            self._keep(response)
        else:
            self._ended.setdefault(prompt, []).append(response)

    def settle(self) -> KeptByPrompt:
        """End the step: return the kept tokens of prompts put off to a later step, and forget all
        others."""
        self._launched.clear()
        self._ended.clear()
        self._early.clear()
        self._noise.clear()
        return {prompt: dict(places) for prompt, places in self._waiting.items() if places}

    def _defer(self, command: Defer) -> None:
        if not self.carries:
            return
        for prompt in command.prompts:
            # A prompt whose environments have not begun yet waits as it did.
            self._waiting[prompt] = self._launched.pop(prompt, self._waiting.get(prompt, {}))
            for response in self._ended.pop(prompt, ()):
                self._keep(response)

    def _keep(self, response: Response) -> None:
        places = self._waiting[response.sample.prompt]
        place = self._place_of(response.sample)
        before = places.get(place)
        # Cut off once, it is one of the long responses, and is so however often it is drawn anew.
        floor = 0 if before is None else before.floor
        if response.finish_reason == "aborted":
            floor = max(floor, len(response.tokens))
        places[place] = KeptTokens(
            np.array(response.tokens, dtype=np.int32),
            _log_probs(response),
            floor,
            response.redraws,
            response.given,
            early=response.sample.prompt in self._early,
        )

    def _take(self, sample: SampleId, count: int, most_verified: int | None) -> Carried | None:
        """Returns the kept tokens from which the sample goes on, `count` in number; None for a
        `count` of 0. `most_verified`: as in `Carried`."""
        places = self._launched.get(sample.prompt, {})
        place = self._place_of(sample)
        if not count:
            places.pop(place, None)
            return None
        kept = places.get(place)
        found = 0 if kept is None else len(kept.tokens)
        assert kept is not None and found == count, f"{sample} has {found} tokens, not {count}"
        rule = self._config.complements and not kept.early
        return Carried(
            tokens=tuple(kept.tokens.tolist()),
            log_probs=tuple(kept.log_probs.tolist()),
            verify=self._config.verifies,
            floor=kept.floor if rule else 0,
            ceiling=_ceiling(places.values()) if rule and not kept.floor else None,
            redraws=kept.redraws,
            most_verified=most_verified,
        )

    def _noise_of(self, sample: SampleId) -> SampleId:
        if self._config.selection == "published":
            return sample
        return self._noise.get(sample, self._config.noise_of(sample))

    def _place_of(self, sample: SampleId) -> int:
        return self._noise_of(sample).index


def _log_probs(response: Response) -> NDArray[np.float64]:
    """Returns a log-prob for each token of the response; 0 for tokens that the model was given."""
    is_drawn = np.ones(len(response.tokens), dtype=bool)
    for first, behind in response.given:
        is_drawn[first:behind] = False
    found = np.zeros(len(response.tokens))
    found[is_drawn] = response.log_probs
    return found


def _ceiling(siblings: Iterable[KeptTokens]) -> int | None:
    """Returns the ceiling for a response that had ended by itself and is generated again, in
    tokens: the most that any of `siblings`, the samples of its prompt, had when it was stopped or
    ended. None if `siblings` is empty."""
    return max([kept.floor or len(kept.tokens) for kept in siblings], default=None)


def write_carried(folder: Path, waiting: KeptByPrompt, tokenizer: str) -> None:
    """Write the kept tokens into a checkpoint's folder; nothing is written if there are none.
    `tokenizer`: fingerprint of the tokenizer, which a resume compares."""
    flat = [(p, place, kept) for p, places in waiting.items() for place, kept in places.items()]
    if not flat:
        return
    folder = folder / CARRIED
    folder.mkdir()
    np.save(folder / _TOKENS, np.concatenate([kept.tokens for _, _, kept in flat]))
    np.save(folder / _LOG_PROBS, np.concatenate([kept.log_probs for _, _, kept in flat]))
    samples = [
        [str(prompt), place, len(k.tokens), k.floor, k.redraws, *([k.given] if k.given else [])]
        + ([*([] if k.given else [()]), True] if k.early else [])
        for prompt, place, k in flat
    ]
    index = {"tokenizer": tokenizer, "samples": samples}
    (folder / _INDEX).write_text(json.dumps(index) + "\n")


def read_carried(
    folder: Path, tokenizer: str, expected: Mapping[PromptId, Sequence[int]]
) -> KeptByPrompt:
    """Returns the kept tokens in the folder of a valid checkpoint. `expected`: how many tokens the
    core's saved state says there are, by prompt and place (index of a sample). Raises `RunError` if
    the files do not match these numbers or were made with another tokenizer."""
    folder = folder / CARRIED
    waiting: KeptByPrompt = {}
    if folder.exists():
        try:
            index = json.loads((folder / _INDEX).read_text())
            made_with, waiting = index["tokenizer"], _read(folder, index["samples"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{folder} cannot be read ({type(error).__name__}: {error})"
            raise RunError(f"{what}: {_CURE}") from error
        if made_with != tokenizer:
            raise RunError(
                f"{folder} holds responses in the tokens of another tokenizer than the model's at "
                f"hand: {_CURE}"
            )
    for prompt, counts in expected.items():
        for place, count in enumerate(counts):
            kept = waiting.get(prompt, {}).get(place)
            found = 0 if kept is None else len(kept.tokens)
            if count and found != count:
                raise RunError(
                    f"{folder} has {found} tokens of response {place} to {prompt}, of which the "
                    f"run had {count}: {_CURE}"
                )
    return waiting


_CURE = (
    "resume with what was there when the checkpoint was written, or with tail_batching.carry=none, "
    "which draws the prompts that wait anew"
)


def _read(folder: Path, samples: Sequence[Sequence[Any]]) -> KeptByPrompt:
    tokens = np.load(folder / _TOKENS, allow_pickle=False)
    log_probs = np.load(folder / _LOG_PROBS, allow_pickle=False)
    total = sum(sample[2] for sample in samples)
    if (tokens.dtype, tokens.shape) != (np.dtype(np.int32), (total,)):
        raise ValueError(f"{_TOKENS} does not hold {total} tokens")
    if (log_probs.dtype, log_probs.shape) != (np.dtype(np.float64), (total,)):
        raise ValueError(f"{_LOG_PROBS} does not hold {total} numbers")
    waiting: dict[PromptId, dict[int, KeptTokens]] = {}
    start = 0
    for prompt, place, count, floor, redraws, *rest in samples:
        own = slice(start, start + count)
        spans = tuple((a, b) for a, b in rest[0]) if rest else ()
        check_spans(spans, count)
        kept = KeptTokens(
            tokens[own],
            log_probs[own],
            floor,
            tuple((a, b) for a, b in redraws),
            spans,
            early=len(rest) > 1,
        )
        waiting.setdefault(PromptId.parse(prompt), {})[place] = kept
        start += count
    return waiting
