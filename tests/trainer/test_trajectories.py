"""Training on responses of several turns: what was given between them is context, and no target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from rollpacker.algo import AlgorithmConfig
from rollpacker.engines.engine import Response
from rollpacker.spans import Spans, check_spans, num_outside, outside
from rollpacker.trainer.calls import codec
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import ScoreRequest, TokenScores, TrainSample
from tests.trainer.test_learner import learner_of
from tests.trainer.tiny import responses

PPO = AlgorithmConfig(name="ppo")
ALGORITHMS = [AlgorithmConfig(), AlgorithmConfig(name="dr_grpo"), AlgorithmConfig(name="gspo"), PPO]


def with_gaps(seed: int) -> list[list[tuple[Response, float]]]:
    """Responses of which stretches were given; some of none, some of several, one behind
    another turn of a single token."""
    draw = torch.Generator().manual_seed(seed)

    def given_of(count: int) -> Spans:
        spans, place = [], 0
        while (first := place + 1 + int(torch.randint(0, 6, (), generator=draw))) < count - 1:
            behind = min(first + 1 + int(torch.randint(0, 5, (), generator=draw)), count - 1)
            spans.append((first, behind))
            place = behind
        return tuple(spans)

    def cut(one: Response) -> Response:
        given = given_of(len(one.tokens))
        return dataclasses.replace(one, given=given, log_probs=outside(one.log_probs, given))

    return [[(cut(one), reward) for one, reward in group] for group in responses(seed)]


def turns_of(one: ScoreRequest) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each turn all that was before it, and what was drawn in it."""
    tokens, start = one.response_tokens, 0
    for first, behind in (*one.given, (len(tokens), len(tokens))):
        yield (*one.prompt_tokens, *tokens[:start]), tokens[start:first]
        start = behind


def request_of(one: Response) -> ScoreRequest:
    return ScoreRequest(
        sample=one.sample,
        prompt_tokens=one.prompt_tokens,
        response_tokens=one.tokens,
        given=one.given,
    )


def samples_for(learner: Learner, algorithm: AlgorithmConfig, seed: int) -> list[TrainSample]:
    groups, scores = with_gaps(seed), dict[object, TokenScores]()
    if algorithm.needs_scores:
        requests = [request_of(one) for group in groups for one, _ in group]
        scores = {r.sample: s for r, s in zip(requests, learner.score(requests), strict=True)}
    return build_train_samples(groups, algorithm, scores=scores, max_response_tokens=30)[0]


def split(sample: TrainSample) -> Iterator[TrainSample]:
    """Each turn as a sample of its own, whose prompt is all that was before it."""
    start = 0
    for prompt, drawn in turns_of(sample):
        part = slice(start, start := start + len(drawn))
        assert not isinstance(sample.advantage, tuple) or sample.values is not None
        yield dataclasses.replace(
            sample,
            prompt_tokens=prompt,
            response_tokens=drawn,
            given=(),
            rollout_log_probs=sample.rollout_log_probs[part],
            advantage=sample.advantage
            if isinstance(sample.advantage, float)
            else sample.advantage[part],
            values=None if sample.values is None else sample.values[part],
            returns=None if sample.returns is None else sample.returns[part],
        )


def test_the_samples_have_turns() -> None:
    given = [one.given for group in with_gaps(0) for one, _ in group]
    assert max(map(len, given)) >= 3 and () in given
    for group in with_gaps(0):
        for one, _ in group:
            check_spans(one.given, len(one.tokens))
            assert one.num_drawn == len(one.log_probs) == num_outside(len(one.tokens), one.given)


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_scores_of_a_turn_are_those_of_its_tokens_behind_all_before_it(layout: str) -> None:
    learner = learner_of(PPO, micro_batches=layout)
    for one, scores in zip(
        requests := [request_of(one) for group in with_gaps(1) for one, _ in group],
        learner.score(requests),
        strict=True,
    ):
        parts = learner.score(
            [
                ScoreRequest(sample=one.sample, prompt_tokens=prompt, response_tokens=drawn)
                for prompt, drawn in turns_of(one)
            ]
        )
        assert scores.values is not None and len(scores.values) == one.num_targets
        assert scores.values == pytest.approx([v for part in parts for v in part.values or ()])


@pytest.mark.parametrize("algorithm", [one for one in ALGORITHMS if one.name != "gspo"], ids=str)
@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_a_step_is_that_of_the_turns_apart(algorithm: AlgorithmConfig, layout: str) -> None:
    """Where the loss is token by token. What was given moves no weight."""
    whole, apart = (learner_of(algorithm, micro_batches=layout) for _ in range(2))
    samples = samples_for(whole, algorithm, 2)
    whole.accumulate(samples)
    apart.accumulate([turn for sample in samples for turn in split(sample)])
    assert whole.apply() != apart.apply()  # there are other samples, and other micro-batches
    for (name, one), (_, other) in zip(whole.weights(), apart.weights(), strict=True):
        assert (one - other).abs().max() < 1e-7, name  # Adam divides small sums by their own size


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_what_was_given_is_in_no_number(algorithm: AlgorithmConfig) -> None:
    """Neither advantages nor weights know how many tokens were given, or which."""
    learner = learner_of(algorithm)
    groups = with_gaps(3)
    bare = [
        [
            (dataclasses.replace(one, tokens=outside(one.tokens, one.given), given=()), reward)
            for one, reward in group
        ]
        for group in groups
    ]
    scores = {}
    if algorithm.needs_scores:
        requests = [request_of(one) for group in groups for one, _ in group]
        scores = {r.sample: s for r, s in zip(requests, learner.score(requests), strict=True)}
    found, expected = (
        build_train_samples(some, algorithm, scores=scores, max_response_tokens=30)[0]
        for some in (groups, bare)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.advantage == other.advantage and one.token_weight == other.token_weight
        assert one.returns == other.returns and one.num_targets == other.num_targets


def test_given_tokens_cross_to_a_process() -> None:
    sample = next(s for s in samples_for(learner_of(), AlgorithmConfig(), 4) if s.given)
    assert codec().decode(codec().encode(sample)) == sample


@pytest.mark.parametrize("spans", [((0, 0),), ((2, 1),), ((0, 2), (2, 3)), ((1, 9),), ((-1, 1),)])
def test_stretches_that_are_none(spans: Spans) -> None:
    with pytest.raises(ValueError, match="are no stretches of 5"):
        check_spans(spans, 5)
