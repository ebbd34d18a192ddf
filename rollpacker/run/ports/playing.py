"""Plays the multi-turn samples of an evaluation to their ends, without the core."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollpacker.core.checks.acting import TurnLimits
from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import GenerationRequest, Response, SamplingParams
from rollpacker.environments.environment import Episode, Lost
from rollpacker.run.ports.player import Play, Player

Generate = Callable[[Sequence[GenerationRequest]], Awaitable[Sequence[Response]]]
StopKeeping = Callable[[Sequence[SampleId]], None]


async def play_all(
    player: Player,
    asked: Sequence[tuple[SampleId, PromptRow]],
    generate: Generate,
    sampling: SamplingParams,
    let_go: StopKeeping,
) -> tuple[list[Response], dict[SampleId, Episode]]:
    """Play these samples to their ends, one turn of all samples at a time: engines generate, then
    environments answer. Returns the trajectories, and the episodes by sample. Samples whose
    environment or engine failed are left out. `let_go` is told of samples whose caches engines need
    not keep."""
    limits, timeout_s = player.limits, player.timeout_s
    plays = {sample: player.new(sample, row) for sample, row in asked}
    reasons: dict[SampleId, str] = {}
    try:
        going = [*plays.values()]
        if player.environments.begins:
            going = await _begun(player, going, timeout_s)
        while going:
            requests = [player.request(one, sampling, None) for one in going]
            drawn = await generate(requests)
            turns = {response.sample: response for response in drawn}
            going = [one for one in going if one.sample in turns]
            for one in going:
                one.heard(turns[one.sample])
                reason = turns[one.sample].finish_reason
                if reason != "stop":
                    reasons[one.sample] = reason
            going = [one for one in going if one.sample not in reasons]
            going = await _answered(player, going, limits, timeout_s, reasons)
            going_on = {one.sample for one in going}
            let_go([sample for sample in turns if sample not in going_on])
        lost = await _finished(player, [plays[sample] for sample in reasons], reasons)
    finally:
        for one in plays.values():
            player.end(one)
    ended = [plays[sample] for sample in reasons if sample not in lost]
    responses = [one.response(reasons[one.sample]) for one in ended]
    return responses, {one.sample: player.episode(one) for one in ended}


async def _begun(player: Player, plays: Sequence[Play], timeout_s: float) -> list[Play]:
    found = await asyncio.gather(*(player.begin(one, timeout_s=timeout_s) for one in plays))
    return [one for one, begun in zip(plays, found, strict=True) if not isinstance(begun, Lost)]


async def _finished(
    player: Player, plays: Sequence[Play], reasons: dict[SampleId, str]
) -> set[SampleId]:
    """Ask the environments for final rewards where a limit ended the episode. Returns the samples
    whose environment failed."""
    asked = [one for one in plays if player.must_finish(one, reasons[one.sample])]
    found = await asyncio.gather(*map(player.finish, asked))
    return {one.sample for one, lost in zip(asked, found, strict=True) if lost is not None}


async def _answered(
    player: Player,
    plays: Sequence[Play],
    limits: TurnLimits,
    timeout_s: float,
    reasons: dict[SampleId, str],
) -> list[Play]:
    """Have the environments answer the model's latest turns. Returns the episodes that go on. Of
    those that ended, `reasons` gets the reason; those that were lost are left out."""
    answers = await asyncio.gather(
        *(player.act(one, one.num_turns, timeout_s=timeout_s) for one in plays)
    )
    going = []
    for one, answer in zip(plays, answers, strict=True):
        if isinstance(answer, Lost):
            continue
        reason = "truncated" if answer.truncated else "done" if answer.done else ""
        reason = reason or limits.reached(one.num_turns, one.num_tokens, one.seconds)
        if reason:
            reasons[one.sample] = reason
        else:
            going.append(one)
    return going
