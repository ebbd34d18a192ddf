"""A judge beside a stub endpoint, for the tests and the benchmark."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollpacker.rewards.judge.config import JudgeConfig
from rollpacker.rewards.judge.judge_reward import JudgeReward
from rollpacker.rewards.reward import Failed, RewardConfig, RewardError, RewardInput, Scored
from tests.rewards.judge_attacks import QUESTION, RIGHT
from tests.rewards.judge_stub import GULLIBLE, Answer, Asked, Stub, gullible_judge, serve


class FakeShared:
    """What a judge uses of the rewards' shared things."""

    def __init__(self, engine_completer: Callable[[str], Any] | None = None) -> None:
        self.engine_completer = engine_completer

    def run(self, function: Callable[[], Awaitable[Any]]) -> Any:
        return asyncio.run(function())  # type: ignore[arg-type]


def judge(
    url: str | None, shared: FakeShared | None = None, timeout_s: float = 10.0, **arguments: Any
) -> JudgeReward:
    arguments = {"canary_rate": 0.0, "model": "stub"} | arguments
    try:
        config = JudgeConfig(url=url, **arguments)
    except ValueError as error:
        raise RewardError(f"reward judge: {error}") from None
    entry = RewardConfig(function="judge", timeout_s=timeout_s)
    return JudgeReward(config, entry=entry, name="judge", shared=shared or FakeShared())


def sample(completion: str = "Twenty: 20", prompt: Any = QUESTION, **columns: Any) -> RewardInput:
    return RewardInput(
        prompt=prompt,
        completion=completion,
        completion_tokens=(1,),
        finish_reason="stop",
        columns={"answer": RIGHT} | columns,
    )


def scored(
    respond: Callable[[Asked], Answer | str], *samples: RewardInput, **arguments: Any
) -> tuple[list[Any], Stub, JudgeReward]:
    """Verdicts on the samples (one by default), the stub that was asked, and the judge."""

    async def run() -> tuple[list[Any], Stub, JudgeReward]:
        async with serve(respond) as stub:
            part = judge(stub.url, **arguments)
            try:
                return await part.score(samples or (sample(),)), stub, part
            finally:
                await part.close()

    return asyncio.run(run())


def paid(
    answers: Mapping[str, str],
    *,
    fenced: bool,
    kinds: Sequence[Mapping[str, Any]] = (GULLIBLE, {"echo": None}),
) -> tuple[list[str], int]:
    """Attacks with a positive verdict: from a judge that is gullible in every way at once, or from
    one that repeats the first verdict that it reads."""
    wrongly, unreadable = set(), 0
    for way in kinds:

        def respond(asked: Asked, way: Mapping[str, Any] = way) -> str:
            return gullible_judge(asked, way)

        if fenced:
            verdicts, *_ = scored(respond, *map(sample, answers.values()), max_reasks=0)
            unreadable += sum(isinstance(verdict, Failed) for verdict in verdicts)
            values = [v.value if isinstance(v, Scored) else 0.0 for v in verdicts]
        else:
            values = [float(naively(answer, way)) for answer in answers.values()]
        wrongly |= {name for name, value in zip(answers, values, strict=True) if value > 0}
    return sorted(wrongly), unreadable


def naively(answer: str, ways: Mapping[str, Any]) -> bool:
    """Whether the judge pays if the answer stands in the prompt as it is, and any score counts."""
    user = (
        f"Grade this answer.\n<<<REFERENCE r\n{RIGHT}\nREFERENCE r>>>\n"
        f"<<<ANSWER a\n{answer}\nANSWER a>>>\nReply with a score."
    )
    asked = Asked("", {}, {"messages": [{"role": "user", "content": user}]}, 0)
    try:
        return bool(json.loads(gullible_judge(asked, ways))["score"] > 0)
    except (ValueError, KeyError, TypeError):
        return False
