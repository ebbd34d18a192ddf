"""Scenario files: what is impossible is refused with its key and a cure; presets sit below the
file."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.config.load import ConfigError, load_config, save_config
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.hardware import GPUS, MODELS
from rollpacker.sim.presets import LENGTH_LAWS, REWARD_KINDS, SWITCHES, SYSTEMS, describe_presets
from rollpacker.sim.scenario import Scenario, load_scenario, with_system
from rollpacker.sim.simulate import simulate
from rollpacker.sim.workload_spec import RewardStage

GOOD = """\
name: 14b-16k
model: qwen2.5-14b
cluster: {gpu: h800, gpus: 32, gpus_per_node: 8}
rollout:
  {prompts_per_step: 128, samples_per_prompt: 8, max_response_tokens: 16384, tensor_parallel: 2}
lengths: {quantiles: {0.01: 196, 0.5: 663, 0.99: 16384}, within_prompt_correlation: 0.05}
rewards:
  - {kind: math, share: 0.34}
  - {kind: code, share: 0.33, seconds_quantiles: {0.5: 0.31, 0.95: 30.0}, workers: 62}
  - {kind: judge, share: 0.33, calls_per_s: 5.9}
train: {tensor_parallel: 2, pipeline_parallel: 2, context_parallel: 2}
system: rollpacker-published
tail_batching: {selection: published, prompt_factor: 1.25, sample_factor: 1.25, race: scored}
reward_scheduler: {overlap: true, adaptive_timeout: true, colocated_judge: true}
parallelism_planner: {enabled: true}
stream_trainer: {enabled: true}
steps: 40
seed: 0
"""
SHORT = """\
name: small
model: qwen2.5-7b
cluster: {gpu: a100, gpus: 8}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 8192}
lengths: {preset: rollpacker-math}
system: rollpacker-published
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scenario.yaml"


def load(path: Path, *overrides: str, text: str = GOOD, system: str | None = None) -> Scenario:
    path.write_text(text)
    return load_scenario(path, overrides, system)


def refusal(path: Path, *overrides: str, text: str = GOOD, system: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides, text=text, system=system)
    return str(caught.value)


def test_every_key_of_a_full_file(path: Path) -> None:
    scenario = load(path)
    assert scenario.lengths is not None
    assert scenario.lengths.quantiles == {0.01: 196, 0.5: 663, 0.99: 16384}
    assert scenario.rewards[1].seconds_quantiles == {0.5: 0.31, 0.95: 30.0}
    assert scenario.rewards[1].num_workers == 62
    assert scenario.shape == MODELS["qwen2.5-14b"]
    assert scenario.cluster.gpu_spec == GPUS["h800"]
    assert scenario.train.replica_gpus == 8
    assert scenario.tail_batching.race == "scored"


def test_shapes_and_datasheets_in_place_of_names(path: Path) -> None:
    scenario = load(
        path,
        "model={layers: 2, hidden: 64, kv_heads: 2, head_dim: 16, params: 1e6, dtype: float32}",
        "cluster.gpu={memory_gb: 24, bandwidth_tb_s: 0.9, tflops: 70, nvlink_gb_s: 60}",
    )
    assert scenario.shape.params == 1e6
    assert scenario.cluster.gpu_spec.memory_gb == 24


def test_overrides(path: Path) -> None:
    scenario = load(
        path,
        "rewards.1.workers=10",
        "cluster.gpus=64",
        "lengths.quantiles={0.5: 100, 0.9: 1000}",
        "rollout.speculation={speedup: 1.6, max_live: 8}",
        "rewards.2.lengths={preset: rollpacker-judge, within_prompt_correlation: 0.2}",
    )
    assert scenario.rewards[1].num_workers == 10
    assert scenario.cluster.gpus == 64
    assert scenario.lengths is not None and scenario.lengths.quantiles == {0.5: 100, 0.9: 1000}
    assert scenario.rollout.speculation is not None
    assert scenario.rollout.speculation.kinds == ("long", "flush")
    law = scenario.law_of(scenario.rewards[2])
    assert law.quantile_law == LENGTH_LAWS["rollpacker-judge"]
    assert law.within_prompt_correlation == 0.2


def test_saved_and_loaded(path: Path, tmp_path: Path) -> None:
    scenario = load(path, "tail_batching.sample_factor=1.125")
    save_config(scenario, tmp_path / "saved.yaml")
    assert load_scenario(tmp_path / "saved.yaml") == scenario
    assert load_config(tmp_path / "saved.yaml", [], Scenario) == scenario


QUANTILES = "lengths.quantiles="


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # Presets and keys
        ("model=qwen2.5-14", ["model", "Known:", 'Did you mean "qwen2.5-14b"?']),
        ("cluster.gpu=h900", ["cluster.gpu", "Known: a100,", 'Did you mean "h800"?']),
        ("system=rolpacker", ["system", "Known: verl,", 'Did you mean "rollpacker"?']),
        ("lengths={preset: rollpacker-mth}", ["lengths.preset", '"rollpacker-math"?']),
        ("rewards.0.kind=maths", ["rewards.0.kind", 'Did you mean "math"?']),
        ("rollout.tensor_paralel=2", ["rollout.tensor_paralel", "no known key", "tensor_parallel"]),
        ("rollout.speculation={speedup: 2, max_live: 4, kinds: [lng]}", ["kinds", '"long"?']),
        ("model.layers=2", ["model.layers=2", "single value"]),
        ("carry.mismatch=1.5", ["carry.mismatch", "between 0 and 1"]),
        (
            "carry={mismatch: 0.001, mismatch_band: [0.00001, 0.0001]}",
            ["carry.mismatch_band", "(1e-05 to 0.0001) must hold mismatch (0.001)"],
        ),
        ("unkind.failure_rat=0.1", ["unkind.failure_rat", "no known key", '"failure_rate"?']),
        ("unkind.failure_rate=1.5", ["unkind.failure_rate", "[0, 1]"]),
        ("model=null", ["model", "a text or a mapping"]),
        ("cluster.gpu=3", ["cluster.gpu", "Known:"]),
        ("cluster.gpu=B200", ["cluster.gpu", 'Did you mean "b200"?']),
        ("model=Qwen/Qwen2.5-7B-Instruct", ["model", 'Did you mean "qwen2.5-7b"?']),
        ("model=meta-llama/Llama-3.1-8B-Instruct", ["model", 'Did you mean "llama-3.1-8b"?']),
        # Degrees
        ("cluster.gpus=0", ["cluster.gpus", "at least 1"]),
        ("cluster.gpus=20", ["cluster.gpus", "whole nodes", "16 or 24"]),
        ("rollout.tensor_parallel=3", ["rollout.tensor_parallel", "node (8)", "1, 2, 4 or 8"]),
        ("rollout.tensor_parallel=16", ["rollout.tensor_parallel", "node (8)", "1, 2, 4 or 8"]),
        ("rollout.tensor_parallel=0", ["rollout.tensor_parallel", "at least 1"]),
        ("train.tensor_parallel=16", ["train.tensor_parallel", "node (8)"]),
        (
            "train.pipeline_parallel=3",
            ["train (line", "2 x 3 x 2 = 12", "cluster.gpus (32)"],
        ),
        ("train.context_parallel=0", ["train.context_parallel", "at least 1"]),
        # Memory
        ("model=qwen2.5-72b", ["rollout.tensor_parallel", "is 2", "72.7 GB", "raise"]),
        (
            "cluster={gpu: {memory_gb: 32, bandwidth_tb_s: 1, tflops: 9, nvlink_gb_s: 9}, gpus: 8}",
            [
                "cluster.gpus",
                "is 8: training",
                "18 bytes",
                "265.9 GB",
                "8 x 32 GB are 256.0",
                "take 16 GPUs",
            ],
        ),
        (
            "cluster.gpu={memory_gb: 18, bandwidth_tb_s: 1, tflops: 100, nvlink_gb_s: 100}",
            ["rollout.tensor_parallel", "is 2", "16584", "rollout.max_response_tokens"],
        ),
        # Shares
        ("rewards.0.share=0.5", ["rewards", "add up to 1.16", "0.5 + 0.33 + 0.33", "share"]),
        ("rewards.0.share=0", ["rewards.0.share", "(0, 1]"]),
        ("rewards.0.share=1.5", ["rewards.0.share", "(0, 1]"]),
        ("rewards.2={kind: math, share: 0.33}", ["rewards.2.kind", "second time", "one stage"]),
        # Quantiles
        (QUANTILES + "{0.5: 100, 0.9: 90}", ["lengths.quantiles", "90 at 0.9", "100 at 0.5"]),
        (QUANTILES + "{0.5: 100, 1.5: 900}", ["lengths.quantiles", "1.5", "not above 1"]),
        (QUANTILES + "{0: 1, 0.5: 900}", ["lengths.quantiles", "quantile 0", "above 0"]),
        (QUANTILES + "{0.5: 0}", ["lengths.quantiles", "at least 1"]),
        (QUANTILES + "{}", ["lengths.quantiles", "at least one"]),
        (QUANTILES + "{half: 100}", ["lengths.quantiles", "each key a number"]),
        (QUANTILES + "{0.5: 1.5}", ["lengths.quantiles", "each value a whole number"]),
        (QUANTILES + "{0.5: 100, 0.50: 200}", ["lengths.quantiles", "each key a number"]),
        (QUANTILES + "{nan: 100}", ["lengths.quantiles"]),
        (
            QUANTILES + "{0.5: 100, 0.99: 20000}",
            ["lengths.quantiles", "20000", "rollout.max_response_tokens (16384)", "write 16384"],
        ),
        ("lengths.trace=a.jsonl", ["lengths", "exactly one", "quantiles and trace"]),
        ("lengths={hard_prompts: 0.1}", ["lengths", "exactly one", "none"]),
        ("lengths=null", ["rewards.0.lengths", "not set"]),
        ("lengths.within_prompt_correlation=1.2", ["within_prompt_correlation", "0 and 1"]),
        ("lengths.hard_prompts=-0.1", ["lengths.hard_prompts", "0 and 1"]),
        # Rewards
        ("rewards.1.workers=0", ["rewards.1.workers", "at least 1"]),
        ("rewards.1.seconds_quantiles={}", ["rewards.1.seconds_quantiles", "at least one"]),
        ("rewards.1.seconds_quantiles={0.5: 0}", ["rewards.1.seconds_quantiles", "more than 0"]),
        ("rewards.1.seconds_quantiles={0.5: 2, 0.9: 1}", ["seconds_quantiles", "must not fall"]),
        ("rewards.2.calls_per_s=0", ["rewards.2.calls_per_s", "more than 0"]),
        ("rewards.2.workers=4", ["rewards.2.workers", "kind=judge", "calls_per_s"]),
        ("rewards.0.calls_per_s=4", ["rewards.0.calls_per_s", "kind=math", "workers"]),
        ("reward_scheduler.overlap=false", ["tail_batching.race", "scored", "race=generated"]),
        # Numbers
        ("steps=0", ["steps", "at least 1"]),
        ("rollout.prompts_per_step=0", ["rollout.prompts_per_step", "at least 1"]),
        ("rollout.samples_per_prompt=1", ["rollout.samples_per_prompt", "at least 2"]),
        ("rollout.max_running=0", ["rollout.max_running", "at least 1"]),
        ("sync_s=-1", ["sync_s", "0 or more"]),
        ("train.fixed_s=-1", ["train.fixed_s", "0 or more"]),
        ("oracle.reorder_window=-1", ["oracle.reorder_window", "at least 0"]),
        ("tail_batching.prompt_factor=0.5", ["tail_batching.prompt_factor", "0.5"]),
    ],
)
def test_impossible_scenarios(path: Path, override: str, expected: list[str]) -> None:
    message = refusal(path, override)
    for part in expected:
        assert part in message
    assert message.count("\n") == 0, "one problem, one line"
    assert message.endswith((".", "?", ")"))


def test_what_a_shape_lacks(path: Path) -> None:
    message = refusal(path, "model={layers: 2}")
    for key in ("hidden", "kv_heads", "head_dim", "params"):
        assert f"model.{key}" in message


def test_the_line_is_named(path: Path) -> None:
    text = GOOD.replace("train: {tensor_parallel: 2", "train: {tensor_parallel: 16")
    assert "train.tensor_parallel (line 11) must divide" in refusal(path, text=text)
    text = GOOD.replace("workers: 62", "workers: 0")
    assert "rewards.1.workers (line 9) must be" in refusal(path, text=text)


def test_without_rewards_lengths_are_needed(path: Path) -> None:
    message = refusal(path, text=SHORT.replace("lengths: {preset: rollpacker-math}\n", ""))
    assert "lengths is not set: give a preset" in message


def test_a_preset_longer_than_the_cap_is_cut(path: Path) -> None:
    assert load(path, text=SHORT).rollout.max_response_tokens == 8192


def test_several_problems_at_once(path: Path) -> None:
    message = refusal(path, "steeps=3", "rewards.0.share=7", "rollout.samples_per_prompt=1")
    assert "3 problems" in message
    for part in ('Did you mean "steps"?', "rewards.0.share", "rollout.samples_per_prompt"):
        assert part in message


# -- systems -----------------------------------------------------------------------


def test_a_preset_fills_what_is_not_written(path: Path) -> None:
    scenario = load(path, text=SHORT)
    assert scenario.tail_batching == TailBatchingConfig(
        selection="published", race="scored", balance_sources=True
    )
    assert scenario.stream_trainer.kinds == ("long", "flush")
    ours = load(path, text=SHORT.replace("system: rollpacker-published\n", ""))
    assert ours.system == "rollpacker"
    tail = ours.tail_batching
    assert (tail.selection, tail.carry, tail.stragglers) == ("none", "exact", "pool")
    assert (tail.sample_factor, tail.race, tail.balance_sources) == (1.0, "generated", True)
    scenario = load(path, "system=verl", text=SHORT)
    assert not scenario.tail_batching.enabled
    assert not scenario.reward_scheduler.overlap
    assert not scenario.stream_trainer.enabled
    scenario = load(path, "system=oracle", text=SHORT)
    assert scenario.oracle.reorder_window == 20
    assert scenario.stream_trainer.kinds == ("plain",)


def test_the_file_and_overrides_win_over_the_preset(path: Path) -> None:
    text = SHORT + "tail_batching: {sample_factor: 1.5}\nstream_trainer: {enabled: false}\n"
    scenario = load(path, "tail_batching.race=generated", text=text)
    tail = scenario.tail_batching
    assert (tail.prompt_factor, tail.sample_factor, tail.race) == (1.25, 1.5, "generated")
    assert tail.balance_sources, "the rest of a written section still comes from the preset"
    assert not scenario.stream_trainer.enabled
    assert scenario.stream_trainer.kinds == ("long", "flush")
    assert load(path, "system=verl", "reward_scheduler.overlap=true", text=SHORT).system == "verl"


def test_another_system_is_its_pure_preset_on_the_same_workload(path: Path) -> None:
    overrides = ("tail_batching.sample_factor=1.5", "steps=7", "rewards.1.workers=10")
    own = load(path, *overrides)
    assert load(path, *overrides, system="rollpacker-published") == own
    other = load(path, *overrides, system="verl")
    assert (other.steps, other.rewards, other.seed) == (7, own.rewards, own.seed)
    assert other == load(
        path,
        *("steps=7", "rewards.1.workers=10", "system=verl"),
        text="".join(
            line for line in GOOD.splitlines(keepends=True) if not line.startswith(SWITCHES)
        ),
    )
    assert with_system(other, "rollpacker-published").tail_batching.sample_factor == 1.25
    assert with_system(other, "rollpacker").tail_batching.sample_factor == 1.0


def test_every_system_is_complete(path: Path) -> None:
    for name, preset in SYSTEMS.items():
        assert set(preset) == set(SWITCHES)
        assert load(path, text=SHORT, system=name).system == name


def test_an_unknown_system_to_compare_with(path: Path) -> None:
    assert 'Did you mean "verl"?' in refusal(path, system="veerl")


# -- presets -----------------------------------------------------------------------


def test_what_a_kind_takes_when_nothing_is_said() -> None:
    code = RewardStage(kind="code", share=1.0)
    assert (code.num_workers, code.limit_s, code.correct_within_s) == (57, 30.0, 2.8)
    assert code.seconds_law is not None and max(code.seconds_law.values()) == 31.3
    assert RewardStage(kind="code", share=1.0, seconds_quantiles={0.5: 9}).correct_within_s == 30.0
    assert RewardStage(kind="code", share=1.0, slowest_correct_s=5.0).correct_within_s == 5.0
    judge = RewardStage(kind="judge", share=1.0)
    assert (judge.num_workers, judge.seconds_law) == (1, {0.5: 1 / 5.49})
    math = RewardStage(kind="math", share=1.0)
    assert (math.num_workers, math.seconds_law) == (64, {0.5: 0.01})
    none = RewardStage(kind="none", share=1.0)
    assert (none.num_workers, none.seconds_law, none.limit_s) == (0, None, None)


def test_every_preset_is_listed() -> None:
    text = describe_presets()
    for name in (*MODELS, *GPUS, *SYSTEMS, *LENGTH_LAWS, *REWARD_KINDS):
        assert name in text
    assert max(len(line) for line in text.splitlines()) <= 130


def test_length_laws_rise() -> None:
    for law in LENGTH_LAWS.values():
        tokens = [law[q] for q in sorted(law)]
        assert tokens == sorted(tokens)
        assert tokens[-2:] == [16384, 32768]


KEYS = st.sampled_from(
    ["steps", "model", "rewards", "rewards.1", "lengths.quantiles", "cluster.gpu", "oracle"]
)


@settings(max_examples=100, deadline=None)
@given(KEYS | st.text(max_size=30), st.text(max_size=40))
def test_no_override_makes_it_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: str
) -> None:
    try:
        load(tmp_path_factory.getbasetemp() / "fuzz-scenario.yaml", f"{key}={value}")
    except ConfigError as error:
        assert str(error)


# -- a trainer with devices of its own ---------------------------------------------

APART = ("cluster.train_gpus=16", "stream_trainer.enabled=false")


def test_a_trainer_may_have_devices_of_its_own(path: Path) -> None:
    plain = load(path)
    assert not plain.cluster.is_apart
    assert plain.cluster.trainer_gpu_spec == plain.cluster.gpu_spec
    assert plain.cluster.trainer_gpus == 32
    made = load(path, *APART, "cluster.gpu=h20", "cluster.train_gpu=h800")
    assert made.cluster.is_apart and made.cluster.gpus == 32 and made.cluster.trainer_gpus == 16
    assert made.cluster.gpu_spec == GPUS["h20"] and made.cluster.trainer_gpu_spec == GPUS["h800"]
    kind = load(path, "cluster.train_gpu=a100", "stream_trainer.enabled=false")
    assert kind.cluster.is_apart and kind.cluster.trainer_gpus == 32


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("cluster.train_gpus=16",), "cluster.train_gpus (override cluster.train_gpus=16) gives"),
        (("cluster.train_gpu=h20",), "set stream_trainer.enabled=false"),
        ((*APART, "cluster.train_gpu=h21"), 'is "h21". Known: a100'),
        ((*APART, "cluster.train_gpus=0"), "must be at least 1, not 0"),
        ((*APART, "cluster.train_gpus=20"), "must fill whole nodes of gpus_per_node (8), not 20"),
        ((*APART, "cluster.train_gpus=4"), "which must divide cluster.train_gpus (4)"),
        ((*APART, "cluster.train_gpus=1"), "must divide the GPUs of a node (1), not be 2"),
        (
            (*APART, "model=qwen2.5-72b", "cluster.gpu=mi300x", "cluster.train_gpu=h800"),
            "is 16: training needs 18 bytes",
        ),
    ],
)
def test_devices_of_a_trainer_that_cannot_be(
    path: Path, overrides: tuple[str, ...], told: str
) -> None:
    assert told in refusal(path, *overrides)


def test_training_takes_as_long_as_its_own_devices_do(path: Path) -> None:
    """Twice the arithmetic in half the time, and all is idle that the other phase leaves."""
    settings = ("steps=3", "stream_trainer.enabled=false", "train.fixed_s=0", "sync_s=1")
    turns = simulate(load(path, *settings))
    half = simulate(load(path, *settings, "cluster.train_gpus=16"))
    slow = simulate(load(path, *settings, "cluster.train_gpus=16", "cluster.train_gpu=h20"))
    speed = GPUS["h800"].tflops / GPUS["h20"].tflops
    for one, two, three in zip(turns.steps, half.steps, slow.steps, strict=True):
        assert one.rollout_s == pytest.approx(two.rollout_s)
        assert two.train_s == pytest.approx(2 * one.train_s)
        assert three.train_s == pytest.approx(speed * two.train_s)
    whole_s, train_s = (sum(getattr(s, n) for s in half.steps) for n in ("total_s", "train_s"))
    assert half.device_seconds == pytest.approx(48 * whole_s)
    assert half.bubble["other_pool"] == pytest.approx(32 * train_s + 16 * (whole_s - train_s))
    assert "other_pool" not in turns.bubble
