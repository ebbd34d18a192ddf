"""A trajectory whose earlier turns were rewritten is one sample of several rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rollpacker.algo import AlgorithmConfig
from rollpacker.engines.engine import Response
from rollpacker.spans import outside
from rollpacker.trainer.calls import codec
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.rows import length_of, rows_of
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import ScoreRequest, TrainSample
from tests.trainer.test_learner import learner_of
from tests.trainer.test_trajectories import request_of
from tests.trainer.tiny import VOCABULARY, responses

PPO = AlgorithmConfig(name="ppo")
MODES = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "fixed-length")


def rewritten(seed: int) -> list[list[tuple[Response, float]]]:
    """Responses of several rows: each but the first with another prompt, some with tokens that
    were given inside of it, some with ones at its end, which are in no row."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    def cut(one: Response) -> Response:
        count, marks, given, place = len(one.tokens), [], [], 0
        while place + 8 < count:
            inside = place + 2
            if number(0, 2):
                given.append((inside, inside + 1))
            end = place + number(5, 8)
            if number(0, 2):
                given.append((end - 1, end))
            marks.append((end, tuple(number(3, VOCABULARY) for _ in range(number(1, 9)))))
            place = end
        return dataclasses.replace(
            one,
            given=tuple(given),
            rewritten=tuple(marks),
            log_probs=outside(one.log_probs, tuple(given)),
        )

    return [[(cut(one), reward) for one, reward in group] for group in responses(seed)]


def samples_for(learner: Learner, config: AlgorithmConfig, seed: int = 0) -> list[TrainSample]:
    groups, scores = rewritten(seed), {}
    if config.needs_scores:
        asked = [request(one) for group in groups for one, _ in group]
        scores = {r.sample: s for r, s in zip(asked, learner.score(asked), strict=True)}
    return build_train_samples(groups, config, scores=scores, max_response_tokens=30)[0]


def request(one: Response) -> ScoreRequest:
    return dataclasses.replace(request_of(one), rewritten=one.rewritten)


def turns_apart(sample: TrainSample) -> list[TrainSample]:
    """Each drawn stretch as a sample of its own, found token by token."""
    context, found, drawn = list(sample.prompt_tokens), list[TrainSample](), 0
    marks, is_given = dict(sample.rewritten), {p for a, b in sample.given for p in range(a, b)}
    of_token = isinstance(sample.advantage, tuple)
    for place, token in enumerate(sample.response_tokens):
        if place in marks:
            context = list(marks[place])
        if place not in is_given:
            part = slice(drawn, drawn := drawn + 1)
            found.append(
                dataclasses.replace(
                    sample,
                    prompt_tokens=tuple(context),
                    response_tokens=(token,),
                    given=(),
                    rewritten=(),
                    rollout_log_probs=sample.rollout_log_probs[part],
                    advantage=sample.advantage[part] if of_token else sample.advantage,
                    values=None if sample.values is None else sample.values[part],
                    returns=None if sample.returns is None else sample.returns[part],
                )
            )
        context.append(token)
    return found


def test_the_samples_have_rows() -> None:
    samples = samples_for(learner_of(), AlgorithmConfig())
    counts = [len(rows_of(one)) for one in samples]
    assert max(counts) >= 3 and 1 in counts
    for one in samples:
        rows = rows_of(one)
        assert sum(row.num_targets for row in rows) == one.num_targets
        sizes = [len(row.prompt_tokens) + len(row.response_tokens) for row in rows]
        assert length_of(one) == sum(sizes)
    assert codec().decode(codec().encode(samples[0])) == samples[0]


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_scores_are_those_behind_the_prompts_that_were_seen(layout: str) -> None:
    learner = learner_of(PPO, micro_batches=layout)
    samples = samples_for(learner, PPO)
    scores = learner.score([request(one) for group in rewritten(0) for one, _ in group])
    for one, found in zip(samples, scores, strict=True):
        apart = learner.score(turns_apart(one))
        assert found.values is not None and len(found.values) == one.num_targets
        assert found.values == pytest.approx([v for turn in apart for v in turn.values or ()])


@pytest.mark.parametrize("config", [AlgorithmConfig(), PPO], ids=["grpo", "ppo"])
@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_a_step_is_that_of_the_tokens_apart(config: AlgorithmConfig, layout: str) -> None:
    whole, apart = (learner_of(config, micro_batches=layout) for _ in range(2))
    samples = samples_for(whole, config)
    for number in (0, 1):  # any split of the samples is the same step
        whole.accumulate(samples[number::2])
    apart.accumulate([token for one in samples for token in turns_apart(one)])
    whole.apply()
    apart.apply()
    for (name, one), (_, other) in zip(whole.weights(), apart.weights(), strict=True):
        assert (one - other).abs().max() < 1e-7, name


@pytest.mark.parametrize("mode", MODES)
def test_a_trajectory_weighs_what_it_would_in_one_row(mode: str) -> None:
    """However it is cut: all of its tokens count as ever, and no token more."""
    config = AlgorithmConfig(loss_aggregation=mode)
    groups = rewritten(1)
    plain = [[(dataclasses.replace(r, rewritten=()), x) for r, x in group] for group in groups]
    found, expected = (
        build_train_samples(some, config, max_response_tokens=30)[0] for some in (groups, plain)
    )
    for one, other in zip(found, expected, strict=True):
        weight = sum(row.token_weight * row.num_targets for row in rows_of(one))
        assert weight == pytest.approx(other.token_weight * other.num_targets)
        assert one.advantage == other.advantage
