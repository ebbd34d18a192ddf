"""Other frameworks' names of our keys: the table is sound, and an unknown key gets its hint."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from rollpacker.cli.main import main
from rollpacker.config.load import ConfigError, load_config
from rollpacker.config.schema import RunConfig
from rollpacker.config.synonyms import TABLE, TRL_DIFFERS, all_keys, hint, synonyms
from rollpacker.config.warmup import WarmupConfig
from rollpacker.report.metrics import OTHER_NAMES
from tests.algo.trl_settings import EQUAL_SETTINGS

KNOWN = {*all_keys(RunConfig)}
MINIMAL = """\
name: mine
model: {path: some/model}
data: {train: {kind: jsonl, path: questions.jsonl}}
rollout: {prompts_per_step: 16, samples_per_prompt: 8, max_response_tokens: 512}
rewards: [{function: "my_reward.py:correct"}]
train: {steps: 200}
"""


def refusal(tmp_path: Path, *overrides: str, text: str = MINIMAL) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, RunConfig)
    return str(error.value)


@pytest.mark.parametrize("key", sorted({key for one in synonyms() for key in one.keys}))
def test_every_right_hand_side_is_a_key(key: str) -> None:
    assert key in KNOWN


@pytest.mark.parametrize("value", sorted({o for one in synonyms() for o in one.ours if "=" in o}))
def test_every_value_loads(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    load_config(path, [value.replace(".N.", ".0.")], RunConfig)


def test_the_table_says_nothing_twice_and_nothing_of_our_own_keys() -> None:
    for one in synonyms():
        assert one.theirs not in KNOWN or one.ours == (one.theirs,), one
        assert one.ours or one.note, one
    names = [(one.framework, one.theirs) for one in synonyms()]
    assert len(set(names)) == len(names)


def test_trl_keys_are_keys_of_trl() -> None:
    trl = pytest.importorskip("trl")
    import dataclasses

    config = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    script = {field.name for field in dataclasses.fields(trl.ModelConfig)}
    script |= {field.name for field in dataclasses.fields(trl.ScriptArguments)}
    trainer = {"reward_funcs", "peft_config", "quantization_config", "tools", "environment_factory"}
    trainer |= {"rollout_func", "train_dataset"}
    older = {
        *("max_prompt_length", "warmup_ratio", "vllm_importance_sampling_cap"),
        *("reward_model_name_or_path", "load_in_4bit"),
        *("torch_dtype", "overwrite_output_dir", "logging_dir"),
    }
    theirs = {one.key for one in synonyms() if one.framework == "TRL"}
    assert theirs - config - script - trainer - older == set()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learning_rate=1e-6", "Here it is train.learning_rate."),
        ("lr=1e-6", "Here it is train.learning_rate."),
        ("train.lr=1e-6", "Here it is train.learning_rate."),
        ("n=8", "Here it is rollout.samples_per_prompt."),
        ("rollout.n=8", "Here it is rollout.samples_per_prompt."),
        ("actor_rollout_ref.rollout.n=8", "Here it is rollout.samples_per_prompt."),
        ("+actor_rollout_ref.rollout.n=8", "Here it is rollout.samples_per_prompt."),
        ("num_generations=8", "Here it is rollout.samples_per_prompt."),
        ("algorithm.beta=0.04", "Here it is algorithm.kl_coef"),
        ("kl_coef=0.04", "Here it is algorithm.kl_coef"),
        ("loss_type=mine", "Here it is algorithm.name and algorithm.loss_aggregation"),
        ("train.gradient_accumulation_steps=4", "there is no such key: a step is"),
        ("per_device_train_batch_size=4", "rollout.prompts_per_step and train.micro_batch_tokens"),
        ("push_to_hub=true", "There is none: a run pushes nothing"),
        ("output_dir=out", "Here it is runs_dir and name"),
        ("train.max_completion_length=512", "Here it is rollout.max_response_tokens."),
        ("use_vllm=true", "There is none: responses come from the embedded engine"),
        ("max_steps=10", "Here it is train.steps."),
        ("prompts_per_step=64", "Here it is rollout.prompts_per_step."),
        ("model.model_name_or_path=x", "Here it is model.path."),
    ],
)
def test_an_unknown_key_gets_its_hint(tmp_path: Path, override: str, expected: str) -> None:
    message = refusal(tmp_path, override)
    assert "is no known key." in message and expected in message
    first, _, rest = message.partition("\n")
    assert expected in first, "one problem, one line"
    assert rest in ("", TRL_DIFFERS)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("beta=0.04", "with algorithm.kl_bias_correction: true for TRL's"),
        (
            "loss_type=grpo",
            "Here it is algorithm.name=grpo, algorithm.clip_high=0.2 and"
            " algorithm.loss_aggregation=sequence-mean-token-mean",
        ),
        ("loss_type=dr_grpo", "algorithm.name=dr_grpo and algorithm.normalize_std=group: TRL"),
        ("loss_type=sapo", "There is none: docs/algorithms.md"),
        ("algorithm.name=bnpo", "Here it is algorithm.name=grpo and algorithm.clip_high=0.2"),
        ("algorithm.name=luspo", "Here it is algorithm.name=gspo, algorithm.clip_low=0.2"),
        ("algorithm.name=sapo", "There is none: docs/algorithms.md"),
        ("train.optimizer=adamw_torch", "Here it is train.optimizer=adamw."),
        ("train.optimizer=adamw_torch_fused", "Here it is train.optimizer=adamw."),
        ("optim=adamw_torch", "Here it is train.optimizer=adamw."),
        ("report_to=none", "Here it is trackers=[]: the default: leave it out"),
        ("trackers=none", "leave it out"),
        ("trackers=[none]", "leave it out"),
        ("trackers=[tensorboard]", "tensorboard/ is always written"),
        ("dataset_name=rows.jsonl", "Here it is data.train.kind=jsonl and data.train.path"),
        ("dataset_name=some/name", "data.train.kind=huggingface"),
        ("project=mine", "Here it is trackers.N.project"),
        ("rollout_func=f", "docs/trl.md"),
        ("train_dataset=x", "Here it is data.train.path"),
        ("overwrite_output_dir=true", "--overwrite"),
        ("torch_dtype=bfloat16", "Here it is model.dtype"),
        ("min_p=0.1", "There is none: sampling has"),
        ("disable_dropout=true", "There is none"),
        ("bf16=true", "Here it is model.dtype=bfloat16"),
        ("bf16=false", "Here it is model.dtype=float32"),
        ("fp16=false", "There is none: there is no float16: leave it out"),
        ("use_cpu=true", "Here it is model.device=cpu."),
        ("use_cpu=false", "Here it is model.device=auto: the default: leave it out"),
        ("per_device_train_batch_size=8", "/ num_generations"),
        ("train.seed=3", "Here it is seed."),
    ],
)
def test_values_and_keys_of_trl(tmp_path: Path, override: str, expected: str) -> None:
    message = refusal(tmp_path, override)
    assert expected in message and "Did you mean" not in message
    assert message.endswith(TRL_DIFFERS) == (override != "train.seed=3")


def test_what_differs_is_said_once_and_for_trl_alone(tmp_path: Path) -> None:
    message = refusal(tmp_path, "beta=0.1", "num_generations=8")
    assert message.count("migration.md") == 1 and message.endswith(TRL_DIFFERS)
    assert TRL_DIFFERS not in refusal(tmp_path, "actor_rollout_ref.rollout.n=8")
    assert TRL_DIFFERS not in refusal(tmp_path, "train.lerning_rate=1")


def test_losses_of_trl_are_those_of_the_parity_table() -> None:
    """What a loss_type is answered with is a line that is tested against TRL."""
    equal = [
        (one.trl["loss_type"], {k: v for k, v in one.ours.items() if k != "fixed_length"})
        for one in EQUAL_SETTINGS
        if "loss_type" in one.trl
    ]
    equal.append(("dapo", dict(EQUAL_SETTINGS[0].ours)))
    answered = [one for one in synonyms() if one.key == "loss_type" and one.value and one.ours]
    assert {one.value for one in answered} == {name for name, _ in equal}
    for one in answered:
        pairs = (each.partition("=") for each in one.ours)
        ours = {key.removeprefix("algorithm."): yaml.safe_load(v) for key, _, v in pairs}
        assert (one.value, ours) in equal


def test_a_key_of_a_list_is_found_from_outside() -> None:
    """`steps` of a warm-up is in its stages."""
    where = "configs/code-tiny-warmup.yaml"
    for override in ("warmup.steps=30", "train.steps=30"):
        with pytest.raises(ConfigError) as error:
            load_config(where, [override], WarmupConfig)
        name = override.partition("=")[0]
        wanted = f"{name} (override {override}) is no known key. Here it is stages.0.steps"
        assert wanted in str(error.value)
    with pytest.raises(ConfigError, match='Did you mean "stages"'):
        load_config(where, ["stage.steps=30"], WarmupConfig)


def test_how_evaluation_is_switched_off_is_said(tmp_path: Path) -> None:
    message = refusal(tmp_path, "eval.every_steps=0")
    assert "must be at least 1, or null (only before the first and after the last step" in message
    assert "data.eval=null with data.eval_fraction=0: never)" in message
    path = tmp_path / "run.yaml"
    load_config(
        path, ["data.eval=null", "data.eval_fraction=0", "eval.every_steps=null"], RunConfig
    )


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("report_to", "trackers"),
        ("trainer.logger", "trackers"),
        ("ppo_mini_batch_size", "train.updates_per_round"),
        ("train_batch_size", "train.updates_per_round (as in OpenRLHF)"),
        ("num_iterations", "train.updates_per_round"),
        ("apply_chat_template", "data.train.chat"),
        ("load_in_4bit", "model.quantization"),
        ("policy_loss.loss_mode", "algorithm.loss_function"),
    ],
)
def test_keys_that_are_new(key: str, ours: str) -> None:
    assert ours in hint(key.split("."), KNOWN)


def test_a_foreign_section_in_a_file_is_gone_through(tmp_path: Path) -> None:
    text = MINIMAL + "actor_rollout_ref:\n  actor:\n    optim: {lr: 1.0e-6}\n  rollout: {n: 8}\n"
    message = refusal(tmp_path, text=text)
    for part in (
        "actor_rollout_ref.actor.optim.lr (line 9) is no known key. Here it is train.learning_rate",
        "actor_rollout_ref.rollout.n (line 10) is no known key. Here it is rollout.samples_per",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lerning_rate=1", 'Did you mean "learning_rate"?'),
        ("data.train.pth=x", 'Did you mean "path"?'),
        ("rollout.tempratur=1", 'Did you mean "temperature"?'),
    ],
)
def test_a_misspelt_key_is_still_that(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in refusal(tmp_path, override)


@pytest.mark.parametrize("flag", [["--learning_rate", "1e-6"], ["--learning-rate=1e-6"]])
def test_flags_of_other_frameworks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    assert main(["train", str(tmp_path / "run.yaml"), *flag]) == 2
    said = capsys.readouterr().err
    assert "Here it is train.learning_rate" in said and "key=value" in said


def test_other_schemas_keep_their_own_hints() -> None:
    assert hint(("learning_rate",), {"cluster.gpu", "model"}) == ""


def test_the_table_is_plain_yaml() -> None:
    assert set(yaml.safe_load(TABLE.read_text())) >= {"TRL", "verl", "OpenRLHF", "prime-rl"}


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text()


def test_the_page_is_the_table() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_migration.py"))["with_tables"]
    assert made(PAGE) == PAGE, "run: python docs/make_migration.py"
    shown = {one.framework for one in synonyms()} | {f"{one}-metrics" for one in OTHER_NAMES}
    assert shown == set(re.findall(r"table: ([\w-]+)", PAGE))


def test_metrics_are_metrics() -> None:
    listed = (ROOT / "docs" / "metrics.md").read_text()
    for theirs, ours in (pair for names in OTHER_NAMES.values() for pair in names.items()):
        section, _, last = ours.rpartition("/")
        assert f"`{ours}`" in listed or (f"`{section}/" in listed and f"`/{last}`" in listed), ours
        assert f"`{theirs}`" not in listed


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_the_pages_configs_load(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    load_config(path, [], RunConfig)


def test_the_pages_hints_are_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_run.yaml").write_text(MINIMAL)
    shown = PAGE.partition("    $ ")[2].partition("\n\n")[0]
    for part in ("$ " + shown).split("$ ")[1:]:
        command, *said = [line.removeprefix("    ") for line in part.splitlines()]
        assert main(command.split()[1:]) != 0
        found = capsys.readouterr().err
        for line in filter(None, said):
            assert line in found


def test_verls_command_on_the_page_is_hinted_to_the_end(tmp_path: Path) -> None:
    """Every key of it that is not ours gets a hint."""
    command = PAGE.partition("main_ppo")[2].partition("```")[0].replace("\\", " ")
    overrides = [word for word in command.split() if not word.startswith("algorithm.name")]
    foreign = [word for word in overrides if word.partition("=")[0] not in KNOWN]
    for word in foreign:
        said = hint(word.partition("=")[0].split("."), KNOWN)
        assert said.startswith((" Here it is", " There is none")), word
