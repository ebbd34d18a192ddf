"""The built-in reward `judge`: a language model grades each answer by a rubric.

answer -> has it content? -> cleaned and fenced -> endpoint or engine -> strict reading -> [0, 1]
             no: 0                                                        none: no verdict

There is no score of last resort. A reply that cannot be read is asked for once more, then the
sample has no verdict; an endpoint that is down makes samples wait, then have no verdict.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.did_you_mean import did_you_mean
from rollpacker.endpoints.http import token_from
from rollpacker.imports import require
from rollpacker.rewards.judge.canaries import CANARIES, CanaryPick, has_content
from rollpacker.rewards.judge.completer import Completer, CompletionFailed
from rollpacker.rewards.judge.config import JudgeConfig
from rollpacker.rewards.judge.endpoint import EndpointCompleter
from rollpacker.rewards.judge.prompt import Question, instructions, question
from rollpacker.rewards.judge.verdicts import Unreadable, Verdict, read_verdict, schema
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError, RewardInput, Scored

if TYPE_CHECKING:
    from rollpacker.rewards.shared import Shared

logger = logging.getLogger(__name__)

POSITIVE = 0.5
"""Least value of a positive verdict, from 0 to 1. An answer without content should get less."""
ALARM_EVERY = 20
"""Number of positive verdicts on canaries (answers without content) for which one warning is
logged. The first is always reported."""
PROBE_S = 20.0
_COUNTS = (
    *("asked", "unreadable", "no_content", "split_votes", "canaries", "canary_passed"),
    *("retries", "waited_s"),
)


class JudgeReward:
    """Grades each answer by asking a language model. Meets `RewardPart`."""

    DEADLINE: AdaptiveDeadlineConfig | None = None
    """None: a judge has no adaptive deadline, since its time says nothing about whether an answer
    is right. It depends on the reply's length and the server's load. `timeout_s` limits each
    request."""
    WORKERS: int | None = 16

    def __init__(
        self, config: JudgeConfig, *, entry: RewardConfig, name: str, shared: Shared
    ) -> None:
        """`entry`: the reward's entry in the config, with workers and time limit. `shared`: makes
        the engine of a judge that has a `model_path`."""
        self.name = name
        self._config = config
        self._shared = shared
        self._timeout_s = entry.timeout_s
        self._places = 16 if entry.workers == "auto" else entry.workers
        self._scale = config.as_scale
        self._system = instructions(config.rubric, self._scale, with_id=config.reply_id)
        self._pick = CanaryPick(config.canary_rate, config.seed)
        self._completer: Completer | None = None
        self._opening: asyncio.Lock | None = None
        self._canaries: set[asyncio.Task[None]] = set()
        self._counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)

    # -- before the run ----------------------------------------------------------------

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._check_columns(rows)
        if self._config.model_path is not None:
            folder = Path(self._config.model_path).expanduser()
            if not (folder / "config.json").is_file():
                raise RewardError(
                    f"reward {self.name}: model_path {self._config.model_path} is no model folder"
                    " (it has no config.json)."
                )
            if self._shared.engine_completer is None:
                raise RewardError(
                    f"reward {self.name}: there is no engine here for model_path; use url."
                )
            return
        require("httpx2", extra="judge", what=f"the reward {self.name} with a url")
        self._token()
        if self._config.probe:
            self._shared.run(self._ask_once)

    def _check_columns(self, rows: Sequence[Mapping[str, Any]]) -> None:
        column = self._config.reference_column
        if column is None:
            return
        for number, row in enumerate(rows):
            if row.get(column) is not None:
                continue
            hint = "" if column in row else did_you_mean(column, row)
            raise RewardError(
                f"reward {self.name}: row {number} has no {column} to judge against.{hint} Set"
                " reference_column to the right column, or to null to judge without."
            )

    async def _ask_once(self) -> None:
        """Ask the endpoint one trial question. Raises `RewardError` if it does not answer."""
        endpoint = self._endpoint(max_retries=0, outage_s=1.0)
        asked = self._question("What is 2 + 3?", "2 + 3 = 5", "5")
        limit_s = min(self._timeout_s, PROBE_S)
        try:
            reply = await endpoint.complete(asked.messages, timeout_s=limit_s)
        except CompletionFailed as error:
            cure = "" if error.wrong_set_up else " Start it, or set probe to false to wait for it."
            raise RewardError(f"reward {self.name}: {error}.{cure}".replace("..", ".")) from None
        finally:
            await endpoint.close()
        verdict = self._read(reply, asked)
        if isinstance(verdict, Unreadable):
            logger.warning(
                "reward %s: the judge's first reply could not be read: %s", self.name, verdict.why
            )

    # -- scoring -----------------------------------------------------------------------

    async def open(self) -> None:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._completer is not None:
                return
            if self._config.model_path is None:
                self._completer = self._endpoint(self._config.max_retries, self._config.outage_s)
            else:
                make = self._shared.engine_completer
                assert make is not None, "check refuses this"
                self._completer = await asyncio.to_thread(
                    make,
                    self._config.model_path,
                    max_reply_tokens=self._config.max_reply_tokens,
                    concurrency=self._places,
                )

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        """Grade the answers of these samples, and return one verdict each. `timeout_s` limits each
        request to the judge."""
        await self.open()
        limit_s = timeout_s or self._timeout_s
        return list(await asyncio.gather(*(self._score(sample, limit_s) for sample in samples)))

    def outage(self) -> str | None:
        outage = getattr(self._completer, "outage", None)
        return None if outage is None else outage()

    def metrics(self) -> dict[str, float]:
        """Counts since the start: requests for real answers and for canaries (answers without
        content), unreadable replies, answers without content, answers whose votes were far apart,
        canaries with a positive verdict, and retries; and the seconds waited for an endpoint."""
        completer = self._completer
        return {
            **self._counts,
            "retries": self._counts["retries"] + getattr(completer, "num_retries", 0),
            "waited_s": self._counts["waited_s"] + getattr(completer, "waited_s", 0.0),
        }

    async def close(self) -> None:
        for task in tuple(self._canaries):
            task.cancel()
        await asyncio.gather(*self._canaries, return_exceptions=True)
        counts = self.metrics()
        completer, self._completer, self._opening = self._completer, None, None
        self._counts = counts
        if completer is not None:
            await completer.close()

    async def _score(self, sample: RewardInput, timeout_s: float) -> Scored | Failed:
        reference = self._reference(sample)
        answer = sample.completion
        if not has_content(answer, min_chars=self._config.min_answer_chars, reference=reference):
            self._counts["no_content"] += 1
            return Scored(value=0.0, seconds=0.0, correct=False)
        if canary := self._pick(sample.asked, answer):
            self._start_canary(canary, sample, reference, timeout_s)
        votes = await asyncio.gather(
            *(
                self._vote(sample.asked, answer, reference, timeout_s)
                for _ in range(self._config.votes)
            )
        )
        scores = [vote for vote in votes if isinstance(vote, float)]
        if 2 * len(scores) <= len(votes):
            return next(vote for vote in votes if isinstance(vote, Failed))
        if max(scores) - min(scores) >= POSITIVE:
            self._counts["split_votes"] += 1
        return Scored(value=float(statistics.median(scores)))

    async def _vote(
        self, prompt: Any, answer: str, reference: str | None, timeout_s: float
    ) -> float | Failed:
        """Ask the judge once for the score of an answer, and again while its reply is unreadable,
        at most `max_reasks` times. Returns the score, from 0 to 1, or why there is none."""
        why = ""
        for attempt in range(1 + self._config.max_reasks):
            asked = self._question(prompt, answer, reference, reminder=attempt > 0)
            self._counts["asked"] += 1
            try:
                reply = await self._complete(asked.messages, timeout_s)
            except CompletionFailed as error:
                return Failed(reason=str(error), cause=error.cause)
            verdict = self._read(reply, asked)
            if isinstance(verdict, Verdict):
                return self._scale.unit(verdict.score)
            self._counts["unreadable"] += 1
            why = verdict.why
        return Failed(reason=f"{self.name}: no readable verdict: {why}")

    async def _complete(self, messages: Sequence[Mapping[str, str]], timeout_s: float) -> str:
        assert self._completer is not None
        try:
            return await self._completer.complete(messages, timeout_s=timeout_s)
        except CompletionFailed:
            raise
        except TimeoutError:
            why, cause = f"no reply within {timeout_s:g} s", Cause.DEADLINE
        except ValueError as error:
            why, cause = f"it cannot be asked: {error}", Cause.SAMPLE
        except Exception as error:  # an engine that died: this sample must not end the run
            logger.warning("reward %s: the judge failed", self.name, exc_info=error)
            why, cause = f"{type(error).__name__}: {error}", Cause.INFRASTRUCTURE
        raise CompletionFailed(f"{self.name}: the judge gave no verdict: {why}", cause)

    def _question(
        self, prompt: Any, answer: str, reference: str | None, *, reminder: bool = False
    ) -> Question:
        return question(
            system=self._system,
            prompt=prompt,
            answer=answer,
            reference=reference,
            max_answer_chars=self._config.max_answer_chars,
            with_id=self._config.reply_id,
            reminder=reminder,
        )

    def _read(self, reply: str, asked: Question) -> Verdict | Unreadable:
        return read_verdict(
            reply, scale=self._scale, reply_id=asked.reply_id, delimiter=asked.delimiter
        )

    def _reference(self, sample: RewardInput) -> str | None:
        if self._config.reference_column is None:
            return None
        value = sample.columns.get(self._config.reference_column)
        return None if value is None else str(value)

    # -- canaries ----------------------------------------------------------------------

    def _start_canary(
        self, canary: str, sample: RewardInput, reference: str | None, timeout_s: float
    ) -> None:
        """Ask the judge about a canary (an answer without content) in a task of its own; the
        verdict on the sample does not wait for it."""
        task = asyncio.create_task(self._canary(canary, sample.asked, reference, timeout_s))
        self._canaries.add(task)
        task.add_done_callback(self._canaries.discard)

    async def _canary(
        self, canary: str, prompt: Any, reference: str | None, timeout_s: float
    ) -> None:
        value = await self._vote(prompt, CANARIES[canary](self._scale), reference, timeout_s)
        self._counts["canaries"] += 1
        if not isinstance(value, float) or value < POSITIVE:
            return
        passed = self._counts["canary_passed"] = self._counts["canary_passed"] + 1
        if passed % ALARM_EVERY == 1:
            logger.warning(
                "reward %s: the judge gave %.2f to an answer without content (%s); so far %d of %d"
                " such answers passed. Its verdicts can be had for nothing: use a stronger judge or"
                " a stricter rubric.",
                self.name,
                value,
                canary,
                passed,
                self._counts["canaries"],
            )

    # -- the endpoint ------------------------------------------------------------------

    def _endpoint(self, max_retries: int, outage_s: float) -> EndpointCompleter:
        config = self._config
        assert config.url is not None and config.model is not None
        request = {"max_tokens": config.max_reply_tokens, **(config.request or {})}
        if config.temperature is not None:
            request["temperature"] = config.temperature
        return EndpointCompleter(
            url=config.url,
            model=config.model,
            token=self._token(),
            schema=schema(self._scale, with_id=config.reply_id),
            request=request,
            concurrency=self._places,
            max_retries=max_retries,
            outage_s=outage_s,
        )

    def _token(self) -> str | None:
        try:
            return token_from(self._config.token_env)
        except ValueError as error:
            raise RewardError(
                f"reward {self.name}: {error}; put the endpoint's key there."
            ) from None
