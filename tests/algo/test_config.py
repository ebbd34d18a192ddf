"""The config: what a row fills in, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields, replace
from typing import get_args, get_type_hints

import pytest

from rollpacker.algo import ALGORITHMS, AlgorithmConfig
from rollpacker.algo.row import Row


def test_every_configurable_algorithm_has_a_row():
    assert set(get_args(get_type_hints(AlgorithmConfig)["name"])) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_fills_in_what_is_not_set(name):
    config = AlgorithmConfig(name=name)
    for switch in fields(Row):
        assert getattr(config, switch.name) == getattr(ALGORITHMS[name], switch.name)
    assert AlgorithmConfig(**asdict(config)) == config  # as a saved config is read again


def test_what_is_set_holds():
    config = AlgorithmConfig(name="dapo", clip_high=0.2, normalize_std="none", whiten=True)
    assert (config.clip_high, config.normalize_std, config.whiten) == (0.2, "none", True)
    assert config.normalize_mean == ALGORITHMS["dapo"].normalize_mean


def test_grpo_keeps_its_defaults():
    config = AlgorithmConfig()
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)
    assert (config.normalize_mean, config.normalize_std) == ("group", "group")
    assert (config.loss_aggregation, config.kl_estimator) == ("token-mean", "k3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "grppo"}, "name must be one of grpo"),
        ({"advantage": "gae"}, "normalize_mean and normalize_std to none"),
        ({"name": "ppo", "normalize_mean": "group"}, "baseline of its own"),
        ({"normalize_mean": "none"}, "normalize_std=group divides rewards"),
        ({"normalize_mean": "batch"}, "normalize_std=group does not go with"),
        ({"gamma": 0.9}, "set gamma=1"),
        ({"name": "distillation", "gamma": 0.9}, "set gamma=1"),
        ({"kl_in": "reward"}, "set kl_coef"),
        ({"name": "distillation", "kl_coef": 0.1, "kl_in": "reward"}, "set kl_in=loss"),
        ({"fixed_length": 100}, "set loss_aggregation=fixed-length"),
        ({"name": "dr_grpo", "fixed_length": 0}, "fixed_length must be at least 1"),
        ({"name": "cispo", "clip_dual": 3.0}, "clip_dual belongs to objective=clipped"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "use k2 or k3"),
        ({"kl_bias_correction": True}, "set kl_coef and kl_in=loss"),
        ({"mismatch_correction": "token-mask", "old_logprobs": "rollout"}, "difference twice"),
        ({"mismatch_min": 0.5}, "without mismatch_correction"),
        ({"mismatch_correction": "token-mask", "mismatch_min": 3.0}, "less than mismatch_max"),
        ({"overlong_buffer_tokens": -1}, "overlong_buffer_tokens must be at least 0"),
        ({"clip_low": 1.5}, "clip_low must be a number from 0 to 1"),
        ({"clip_high": -0.1}, "clip_high must be a number from 0 upwards"),
        ({"clip_high": float("nan")}, "clip_high must be a number"),
        ({"kl_coef": float("inf")}, "kl_coef must be a number"),
        ({"clip_dual": 1.0}, "clip_dual must be a number above 1"),
        ({"value_clip": 0.0}, "value_clip must be a number above 0"),
        ({"mismatch_max": 0.0}, "mismatch_max must be a number above 0"),
        ({"name": "ppo", "gae_lambda": 1.1}, "gae_lambda must be a number from 0 to 1"),
        ({"turn_discount": 0.9}, "which needs credit=turn"),
        ({"credit": "turn", "turn_discount": 1.1}, "turn_discount must be a number from 0 to 1"),
        ({"name": "distillation", "credit": "turn"}, "no meaning with advantage=teacher"),
        ({"name": "ppo", "credit": "turn", "gamma": 0.9}, "set gamma=1, and turn_discount"),
        ({"credit": "turn", "advantage_function": "my.py:f"}, "advantages of your own"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**settings)


def test_what_an_algorithm_asks_for():
    def asked(**settings):
        config = AlgorithmConfig(**settings)
        names = ("critic", "teacher", "reference", "scores", "whole_batch", "groups")
        return {name for name in names if getattr(config, f"needs_{name}")}

    assert asked() == {"groups"}
    assert asked(kl_coef=0.1) == {"groups", "reference"}
    assert asked(name="rloo", kl_coef=0.1) == {"groups", "reference", "scores"}
    assert asked(name="ppo") == {"critic", "scores", "whole_batch"}
    assert asked(name="ppo", whiten=False) == {"critic", "scores"}
    assert asked(name="distillation") == {"teacher", "scores"}
    assert asked(name="reinforce_pp") == {"whole_batch"}
    assert asked(name="reinforce_pp_baseline") == {"groups", "whole_batch"}
    assert asked(normalize_std="batch") == {"groups", "whole_batch"}
    kept = replace(AlgorithmConfig(name="rloo"), kl_coef=0.1)
    assert kept.reference_in_scores and not AlgorithmConfig(kl_coef=0.1).reference_in_scores


def test_the_package_loads_no_torch():
    code = "import sys, rollpacker.algo, rollpacker.algo.table\nprint('torch' in sys.modules)\n"
    code += "print(callable(rollpacker.algo.advantages), 'torch' in sys.modules)\n"
    code += "import rollpacker.algo.baselines\nprint(callable(rollpacker.algo.advantages))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True", "True", "True"], done.stderr


def test_an_unknown_name_is_an_attribute_error():
    import rollpacker.algo

    with pytest.raises(AttributeError, match="no attribute 'advantage'"):
        _ = rollpacker.algo.advantage
