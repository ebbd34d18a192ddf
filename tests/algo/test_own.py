"""An advantage or a loss from outside of the package: what it is given, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rollpacker.algo import AlgorithmConfig
from rollpacker.algo.own_check import check_own, grouped_advantages
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import TokenScores
from tests.trainer.tiny import responses, trainer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "algorithm" / "own.py"


def config_of(tmp_path: Path, code: str, key: str = "loss_function", **switches) -> AlgorithmConfig:
    number = len(list(tmp_path.glob("*.py")))
    path = tmp_path / f"own{number}.py"
    path.write_text(f"import torch\n\n{code}")
    return AlgorithmConfig(**{key: f"{path}:f"}, **switches)


def refused(config: AlgorithmConfig) -> str:
    with pytest.raises(ValueError) as raised:
        check_own(config, samples_per_prompt=3)
    return str(raised.value)


def gradients(config: AlgorithmConfig) -> dict[str, torch.Tensor]:
    own = trainer(algorithm=config)
    samples, _ = build_train_samples(responses(1), config)
    own.learner.accumulate(samples)
    return own.learner.gradients()


def test_the_examples_equal_what_the_package_has_bit_for_bit() -> None:
    inside = AlgorithmConfig(name="rloo", importance_ratio="token", old_logprobs="rollout")
    outside = AlgorithmConfig(
        name="rloo",
        importance_ratio="token",
        old_logprobs="rollout",
        advantage_function=f"{EXAMPLE}:leave_one_out",
        loss_function=f"{EXAMPLE}:clipped",
    )
    check_own(outside, samples_per_prompt=3)
    found, expected = (build_train_samples(responses(1), c)[0] for c in (outside, inside))
    assert [s.advantage for s in found] == pytest.approx([s.advantage for s in expected])
    assert any(s.advantage != 0 for s in found)
    only_loss = AlgorithmConfig(
        name="grpo", old_logprobs="rollout", loss_function=f"{EXAMPLE}:clipped"
    )
    wanted = gradients(AlgorithmConfig(name="grpo", old_logprobs="rollout"))
    for name, gradient in gradients(only_loss).items():
        assert torch.equal(gradient, wanted[name]), name


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    code = EXAMPLE.read_text().split('"""\n\n', 1)[1].strip()
    assert code in page


def test_an_advantage_function_is_given_what_it_asks_for(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "seen = {}\n\ndef f(rewards, **known):\n    seen.update(known)\n    return rewards * 0\n",
        "advantage_function",
        name="ppo",
        whiten=False,
        kl_coef=0.1,
    )
    assert config.needs_scores and config.needs_critic and config.needs_reference
    groups = responses(1)
    flat = [response for group in groups for response, _ in group]
    scores = {
        r.sample: TokenScores(
            log_probs=(-1.0,) * len(r.tokens),
            ref_log_probs=(-2.0,) * len(r.tokens),
            values=(0.5,) * len(r.tokens),
        )
        for r in flat
    }
    parts = {r.sample: {"right": 1.0, "short": None} for r in flat}
    samples, _ = build_train_samples(groups, config, scores=scores, reward_parts=parts)
    seen = config.own_advantages.function.__globals__["seen"]
    tokens = sum(len(r.tokens) for r in flat)
    shapes = {
        name: tuple(value.shape) for name, value in seen.items() if isinstance(value, torch.Tensor)
    }
    assert shapes == {
        "group_ids": (12,),
        "truncated": (12,),
        **dict.fromkeys(
            ("tokens", "token_rewards", "log_probs", "rollout_log_probs", "ref_log_probs"),
            (tokens,),
        ),
        "values": (tokens,),
    }
    assert seen["lengths"] == [len(r.tokens) for r in flat] and seen["config"] == config
    assert seen["rewards_by_name"]["right"].tolist() == [1.0] * 12
    assert bool(seen["rewards_by_name"]["short"].isnan().all())
    assert all(sample.returns is not None for sample in samples), "the critic's, as without"


def test_a_reference_that_a_loss_asks_for_is_there_without_a_penalty(tmp_path: Path) -> None:
    code = (
        "def f(log_probs, advantages, ref_log_probs):\n"
        "    return (log_probs - ref_log_probs).square() - log_probs * advantages\n"
    )
    config = config_of(tmp_path, code)
    assert config.kl_coef == 0 and config.needs_reference and not config.needs_scores
    check_own(config, samples_per_prompt=3)
    assert all(bool(g.isfinite().all()) for g in gradients(config).values())


GOOD = "def f(log_probs, advantages):\n    return -log_probs * advantages\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def g():\n    pass\n", r'algorithm.loss_function="[^"]*own0.py:f": .* has no f'),
        ("def f(:\n    pass\n", "own0.py, line 3: SyntaxError"),
        (
            "def f(logprobs):\n    pass\n",
            'no argument logprobs to give it. Did you mean "log_probs"',
        ),
        ("def f(log_probs):\n    return log_probs.mean()\n", "a loss of shape .* 8 tokens"),
        ("def f(log_probs):\n    return 3\n", "a loss 3 for 8 tokens"),
        ("def f(log_probs):\n    return log_probs / 0\n", "losses that are not finite"),
        ("def f(log_probs):\n    return log_probs.detach()\n", "no gradient comes through"),
        ("def f(log_probs):\n    return log_probs * 0\n", "no gradient comes through"),
        (
            "def f(log_probs, advantages):\n    return -log_probs * advantages.mean()\n",
            "changes with the samples it is computed together with",
        ),
        ("def f(log_probs):\n    return log_probs, {'x': 1.0}\n", "a metric x 1.0 for 8 tokens"),
        ("def f(log_probs):\n    return nothing\n", r"NameError: .* \(.*own0.py, line 4\)"),
        ("f = 3\n", "is a int, not a function"),
    ],
)
def test_a_wrong_loss_is_one_message(tmp_path: Path, code: str, message: str) -> None:
    said = refused(config_of(tmp_path, code))
    assert re.search(message, said) and "loss_function" in said, said
    check_own(config_of(tmp_path, GOOD), samples_per_prompt=3)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(reward):\n    pass\n", 'no argument reward to give it. Did you mean "rewards"'),
        ("def f(rewards):\n    return rewards[:2]\n", "advantages of shape"),
        ("def f(rewards):\n    return rewards.tolist()\n", "advantages \\["),
        (
            "def f(rewards):\n    return (rewards - rewards.mean()) / 0\n",
            "of . advantages are not finite",
        ),
        ("def f(rewards):\n    return rewards.view(-1, 3)\n", "groups need not have equally many"),
        ("def f(rewards, values):\n    return rewards\n", "only with algorithm.advantage=gae"),
    ],
)
def test_a_wrong_advantage_is_one_message(tmp_path: Path, code: str, message: str) -> None:
    said = refused(config_of(tmp_path, code, "advantage_function"))
    assert re.search(message, said) and "advantage_function" in said, said


def test_whether_groups_are_compared_is_seen(tmp_path: Path) -> None:
    whole = "def f(rewards):\n    return rewards - rewards.mean()\n"
    assert not grouped_advantages(
        config_of(tmp_path, whole, "advantage_function"), samples_per_prompt=3
    )
    alone = AlgorithmConfig(advantage_function=f"{EXAMPLE}:leave_one_out")
    assert grouped_advantages(alone, samples_per_prompt=3)


def test_a_spec_without_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r'loss_function must be .* not "my.py"'):
        AlgorithmConfig(loss_function="my.py")


def test_what_a_loss_counts_is_a_metric() -> None:
    config = AlgorithmConfig(old_logprobs="rollout", loss_function=f"{EXAMPLE}:clipped")
    own = trainer(algorithm=config)
    own.learner.accumulate(build_train_samples(responses(1), config)[0])
    outcome = own.learner.apply()
    assert 0 < outcome.sums.totals["actor/cut"] < outcome.sums.response_tokens
    assert "actor/clip_ratio_low" not in outcome.sums.totals
