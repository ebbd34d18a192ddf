"""Advantages turn by turn: against plain loops, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.algo import AlgorithmConfig, step_advantages, token_loss
from rollpacker.algo.turns import Turns
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.rewards.reward import TurnRewards
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import TokenScores

Group = Sequence[Sequence[float]]
"""Of each sample the rewards of its turns."""
Places = list[list[list[float]]]
"""By group, sample and turn."""

REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0])
GROUPS = st.lists(
    st.lists(st.lists(REWARDS, min_size=1, max_size=5), min_size=2, max_size=4),
    min_size=1,
    max_size=3,
)


def by_turn(**switches: object) -> AlgorithmConfig:
    return AlgorithmConfig(credit="turn", **switches)  # type: ignore[arg-type]


def num_drawn(rewards: Sequence[float]) -> tuple[int, ...]:
    """Tokens of each turn: as many as the turn's number, and one more of a sample of one turn."""
    return tuple(range(1, 1 + len(rewards))) if len(rewards) > 1 else (2,)


def turns_of(groups: Sequence[Group]) -> Turns:
    flat = [sample for group in groups for sample in group]
    return Turns(
        [len(sample) for sample in flat],
        [length for sample in flat for length in num_drawn(sample)],
        torch.tensor([r for sample in flat for r in sample], dtype=torch.float64),
    )


def found(groups: Sequence[Group], config: AlgorithmConfig, **scores: torch.Tensor) -> Places:
    """The step's advantages, of every turn."""
    turns = turns_of(groups)
    totals = torch.tensor([sum(sample) for group in groups for sample in group])
    ids = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    lengths = [sum(num_drawn(sample)) for group in groups for sample in group]
    step = step_advantages(totals, ids, lengths, config=config, turns=turns, **scores)
    values = iter(step.advantages.tolist())
    return [[[next(values) for _ in sample] for sample in group] for group in groups]


def returns_of(rewards: Sequence[float], discount: float) -> list[float]:
    count = len(rewards)
    return [
        sum(discount ** (later - now) * rewards[later] for later in range(now, count))
        for now in range(count)
    ]


def expected(groups: Sequence[Group], config: AlgorithmConfig) -> Places:
    """In plain loops: every return beside those that it is compared with."""
    returns = [[returns_of(s, config.turn_discount) for s in group] for group in groups]
    all_of_step = [value for group in returns for sample in group for value in sample]
    result: Places = []
    for group in returns:
        shared = sorted(map(len, group))[-2]
        result.append([])
        for own, sample in enumerate(group):
            result[-1].append([])
            for turn, value in enumerate(sample):
                place = min(turn, shared - 1)
                peers = [
                    (index, number, other)
                    for index, of in enumerate(group)
                    for number, other in enumerate(of)
                    if min(number, shared - 1) == place
                ]
                values = [other for _, _, other in peers]
                if config.normalize_mean == "batch":
                    values = all_of_step
                if config.normalize_mean == "leave-one-out":
                    mean = statistics.mean(o for i, n, o in peers if (i, n) != (own, turn))
                else:
                    mean = 0.0 if config.normalize_mean == "none" else statistics.mean(values)
                scale = 1.0
                if config.normalize_std != "none":
                    of = all_of_step if config.normalize_std == "batch" else values
                    scale = (statistics.stdev(of) if len(of) > 1 else 0.0) + 1e-4
                alike = config.normalize_mean != "none" and min(values) == max(values)
                result[-1][-1].append(0.0 if alike else (value - mean) / scale)
    return result


def flat(places: Places) -> list[float]:
    return [value for group in places for sample in group for value in sample]


def test_by_hand() -> None:
    """Rewarded early and punished late: the first turns have what followed, the last their own."""
    groups = [[[1.0, -1.0], [0.0, 0.0], [1.0, 0.0], [0.0, -1.0]]]
    first, second = [0.0, 0.0, 1.0, -1.0], [-1.0, 0.0, 0.0, -1.0]
    expect = [[a, b + 0.5] for a, b in zip(first, second, strict=True)]
    assert found(groups, by_turn(name="dr_grpo")) == [expect]
    halved = found(groups, by_turn(name="dr_grpo", turn_discount=0.5))
    assert [sample[0] for sample in halved[0]] == [0.25, -0.25, 0.75, -0.75]
    left_out = found(groups, by_turn(name="rloo"))
    assert left_out[0][0] == pytest.approx([0.0, -1 + 1 / 3])


def test_a_turn_that_only_one_sample_came_to_is_compared_with_the_last_shared_place() -> None:
    groups = [[[0.0, 0.0], [0.0], [0.0, 0.0, 0.0, 1.0]]]
    assert found(groups, by_turn(name="dr_grpo"))[0] == [
        pytest.approx([-1 / 3, -3 / 4]),
        pytest.approx([-1 / 3]),
        pytest.approx([2 / 3, 1 / 4, 1 / 4, 1 / 4]),
    ]
    won = [[[0.0, 1.0], [1.0], [0.0, 0.0, 0.0, 1.0]]]  # all win, sooner or later
    assert not any(flat(found(won, by_turn())))


@settings(max_examples=60, deadline=None)
@given(
    groups=GROUPS,
    discount=st.sampled_from([0.0, 0.5, 1.0]),
    mean=st.sampled_from(["group", "leave-one-out", "batch", "none"]),
    std=st.sampled_from(["group", "batch", "none"]),
)
def test_as_plain_loops_have_it(groups: list[Group], discount: float, mean: str, std: str) -> None:
    if mean == "none" or (mean, std) == ("batch", "group"):
        std = "none"
    config = by_turn(turn_discount=discount, normalize_mean=mean, normalize_std=std)
    assert flat(found(groups, config)) == pytest.approx(flat(expected(groups, config)), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(groups=GROUPS, data=st.data())
def test_advantages_of_a_place_add_up_to_nothing_in_any_order(groups, data) -> None:
    config = by_turn(name="dr_grpo")
    before = found(groups, config)
    for group, advantages in zip(groups, before, strict=True):
        shared = sorted(map(len, group))[-2]
        for place in range(shared - 1):
            sums = sum(sample[place] for sample in advantages if len(sample) > place)
            assert sums == pytest.approx(0, abs=1e-9)
        rest = [value for sample in advantages for value in sample[shared - 1 :]]
        assert sum(rest) == pytest.approx(0, abs=1e-9)
    order = data.draw(st.permutations(range(len(groups[0]))))
    after = found([[groups[0][index] for index in order], *groups[1:]], config)
    assert flat([after[0]]) == pytest.approx(flat([[before[0][index] for index in order]]))
    assert after[1:] == before[1:]
    of_step = found(groups, by_turn(normalize_mean="batch", normalize_std="none"))
    assert sum(flat(of_step)) == pytest.approx(0, abs=1e-9)


def test_whitening_counts_the_tokens_of_turns() -> None:
    groups = [[[1.0, -1.0], [0.0, 3.0]]]
    result = found(groups, by_turn(name="reinforce_pp"))
    tokens = [0.0, -1.0, -1.0, 3.0, 3.0, 3.0]  # turns of one token, and of two
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    assert flat(result) == pytest.approx([(r - mean) / std for r in (0.0, -1.0, 3.0, 3.0)])


def test_samples_without_a_verdict_are_in_no_place() -> None:
    groups = [[[1.0, 0.0, 0.0], [math.nan, math.nan, math.nan], [0.0], [0.0, 2.0]]]
    result = found(groups, by_turn(name="dr_grpo"))[0]
    assert all(map(math.isnan, result[1]))
    without = found([[groups[0][index] for index in (0, 2, 3)]], by_turn(name="dr_grpo"))[0]
    assert [result[index] for index in (0, 2, 3)] == without


def test_turns_that_are_missing_are_asked_for() -> None:
    with pytest.raises(ValueError, match="needs the turns"):
        step_advantages(torch.ones(2), torch.tensor([0, 0]), [1, 2], config=by_turn())


# -- penalties and a critic -------------------------------------------------------------


def test_a_kl_penalty_counts_for_its_turn_and_those_before_it() -> None:
    groups = [[[1.0, 0.0], [0.0, 0.0]]]
    own = torch.tensor([-1.0, -2.0, -0.5, -0.1, -0.2, -0.3], dtype=torch.float64)
    kl = torch.tensor([0.5, -1.0, 0.25, 0.125, 0.25, 0.5], dtype=torch.float64)
    config = by_turn(name="reinforce_pp", kl_coef=2.0, whiten=False, turn_discount=0.5)
    result = found(groups, config, log_probs=own, ref_log_probs=own - kl)
    last = [-2.0 * (-1.0 + 0.25), -2.0 * (0.25 + 0.5)]
    assert flat(result) == pytest.approx(
        [1 - 2 * 0.5 + 0.5 * last[0], last[0], -2 * 0.125 + 0.5 * last[1], last[1]]
    )


@settings(max_examples=30, deadline=None)
@given(groups=GROUPS, discount=st.floats(0, 1), gae_lambda=st.floats(0, 1), seed=st.integers(0, 99))
def test_gae_over_turns_is_the_textbooks(groups, discount, gae_lambda, seed) -> None:
    """A turn's value is the critic's at its first token; the others' say nothing."""
    turns, draw = turns_of(groups), torch.Generator().manual_seed(seed)
    values = torch.randn(sum(turns.lengths), generator=draw, dtype=torch.float64)
    config = by_turn(name="ppo", whiten=False, turn_discount=discount, gae_lambda=gae_lambda)
    ids = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    lengths = [sum(num_drawn(sample)) for group in groups for sample in group]
    totals = torch.zeros(len(ids))
    step = step_advantages(totals, ids, lengths, config=config, turns=turns, values=values)
    advantages, targets = iter(step.advantages.tolist()), iter(step.returns.tolist())
    start = 0
    for sample in (sample for group in groups for sample in group):
        before = []
        for length in num_drawn(sample):
            before.append(values[start].item())
            start += length
        following = [*before[1:], 0.0]
        errors = [r + discount * n - v for r, n, v in zip(sample, following, before, strict=True)]
        expect = returns_of(errors, discount * gae_lambda)
        assert [next(advantages) for _ in sample] == pytest.approx(expect)
        for length, advantage, value in zip(num_drawn(sample), expect, before, strict=True):
            assert [next(targets) for _ in range(length)] == pytest.approx(
                [advantage + value] * length
            )


def test_gae_over_turns_of_one_token_is_that_over_tokens() -> None:
    values = torch.tensor([0.5, -0.25, 1.0, 0.75], dtype=torch.float64)
    rewards = torch.tensor([0.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    ids, totals = torch.tensor([0, 0]), torch.tensor([2.0, 1.0])
    tokens = AlgorithmConfig(name="ppo", gamma=0.5)
    of_tokens = step_advantages(totals, ids, [3, 1], config=tokens, values=values)
    config = by_turn(name="ppo", turn_discount=0.5)
    turns = Turns([3, 1], [1, 1, 1, 1], rewards)
    of_turns = step_advantages(totals, ids, [3, 1], config=config, turns=turns, values=values)
    assert of_turns.advantages.equal(of_tokens.advantages)
    assert of_turns.returns.equal(of_tokens.returns)


# -- samples ----------------------------------------------------------------------------


def make(groups: Sequence[Group]) -> tuple[list[list[tuple[Response, float]]], dict]:
    """Responses with their rewards, and what their turns are worth."""
    made, turns = [], {}
    for row, group in enumerate(groups):
        made.append([])
        for index, rewards in enumerate(group):
            drawn, sample = num_drawn(rewards), SampleId(PromptId("train", 0, row), index, 0)
            given, place = [], 0
            for length in drawn[:-1]:
                given.append((place + length, place + length + 2))
                place += length + 2
            response = Response(
                sample=sample,
                prompt_tokens=(7, 8),
                tokens=tuple(range(place + drawn[-1])),
                log_probs=tuple(-0.1 * (1 + n % 3) for n in range(sum(drawn))),
                finish_reason="done",
                version=0,
                given=tuple(given),
            )
            made[-1].append((response, sum(rewards)))
            turns[sample] = TurnRewards(drawn, tuple(rewards))
    return made, turns


ONE_TURN = [[[1.0], [0.1], [0.7]], [[0.2], [0.3], [5.0]]]
SEVERAL = [[[1.0, -1.0], [0.0, 0.0, 0.5], [0.7]], [[0.2, 0.1], [0.3, 0.0], [5.0, -5.0]]]


def scores_of(groups: list[list[tuple[Response, float]]]) -> dict[SampleId, TokenScores]:
    return {
        response.sample: TokenScores(
            log_probs=response.log_probs,
            ref_log_probs=tuple(value - 0.05 for value in response.log_probs),
            values=response.log_probs,
        )
        for group in groups
        for response, _ in group
    }


@pytest.mark.parametrize(
    "switches",
    [
        {"name": "grpo", "overlong_buffer_tokens": 2},
        {"name": "dr_grpo"},
        {"name": "gspo"},
        {"name": "cispo"},
        {"name": "rloo", "kl_coef": 0.1},
        {"name": "reinforce_pp"},
        {"name": "reinforce_pp_baseline"},
        {"normalize_mean": "batch", "normalize_std": "batch"},
    ],
)
def test_with_one_turn_it_is_the_trajectorys_to_the_bit(switches: dict) -> None:
    groups, turns = make(ONE_TURN)
    built = [
        build_train_samples(
            groups,
            AlgorithmConfig(credit=credit, **switches),
            scores=scores_of(groups),
            max_response_tokens=3,
            turn_rewards=of_turns,
        )
        for credit, of_turns in (("trajectory", None), ("turn", turns), ("turn", None))
    ]
    assert built[0] == built[1] == built[2]


def test_each_drawn_token_has_its_turns_advantage() -> None:
    groups, turns = make(SEVERAL)
    config = by_turn(name="dr_grpo", fixed_length=9)
    samples, metrics = build_train_samples(groups, config, turn_rewards=turns)
    expect = expected(SEVERAL, config)
    for sample, rewards, of_turns in zip(samples, chain(*SEVERAL), chain(*expect), strict=True):
        tokens = [
            value
            for value, count in zip(of_turns, num_drawn(rewards), strict=True)
            for _ in range(count)
        ]
        is_one = len(of_turns) == 1
        assert sample.advantage == pytest.approx(tokens[0] if is_one else tuple(tokens))
        assert is_one or len(sample.advantage) == len(sample.rollout_log_probs)
    assert metrics["critic/advantages/max"] == pytest.approx(max(flat(expect)))


def test_what_speaks_of_the_whole_response_counts_at_its_last_turn() -> None:
    groups, turns = make([[[1.0, 0.0], [1.0, 0.0]]])
    config = by_turn(normalize_mean="none", normalize_std="none", overlong_buffer_tokens=2)
    plain, _ = build_train_samples(groups, config, turn_rewards=turns, max_response_tokens=9)
    assert plain[0].advantage == (1.0, 0.0, 0.0)
    late, _ = build_train_samples(groups, config, turn_rewards=turns, max_response_tokens=4)
    assert late[0].advantage == (0.5, -0.5, -0.5)  # three tokens: one of the last two


def test_groups_that_come_early_have_their_advantages() -> None:
    groups, turns = make(SEVERAL)
    for name in ("grpo", "rloo"):
        whole, _ = build_train_samples(groups, by_turn(name=name), turn_rewards=turns)
        early, _ = build_train_samples(
            groups[1:], by_turn(name=name), turn_rewards=turns, partial=True
        )
        assert [sample.advantage for sample in early] == [s.advantage for s in whole[3:]]


# -- the loss ---------------------------------------------------------------------------

IDS = torch.tensor([0, 0, 0, 1, 1])
OLD = torch.tensor([-1.0, -2.0, -0.5, -0.1, -0.2], dtype=torch.float64)


def gradient(name: str, credit: str, advantages: list[float], moved: float) -> torch.Tensor:
    config = AlgorithmConfig(name=name, credit=credit, clip_low=0.9, clip_high=9.0)
    log_probs = (OLD + moved * torch.tensor([1.0, -2.0, 0.5, 1.0, 3.0])).requires_grad_()
    values = torch.tensor(advantages, dtype=torch.float64)
    loss = token_loss(log_probs, OLD, values, IDS, num_samples=2, config=config)
    (found,) = torch.autograd.grad(loss.per_token.sum(), log_probs)
    return found


@pytest.mark.parametrize("name", ["gspo", "rloo"])
@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_one_ratio_a_response_teaches_each_token_by_its_own_advantage(
    name: str, moved: float
) -> None:
    alike = [1.0, 1.0, 1.0, -2.0, -2.0]
    whole = gradient(name, "trajectory", alike, moved)
    torch.testing.assert_close(gradient(name, "turn", alike, moved), whole)
    differing = gradient(name, "turn", [1.0, -1.0, -1.0, -2.0, 0.0], moved)
    torch.testing.assert_close(differing, whole * torch.tensor([1, -1, -1, 1, 0]))
    mixed = gradient(name, "trajectory", [1.0, -1.0, -1.0, -2.0, 0.0], moved)
    assert mixed[:3].unique().numel() == 1  # what the credit of turns is kept from
