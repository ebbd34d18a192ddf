"""What the README and the pages tell a reader to type and to write works."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rollpacker.cli.main import main
from rollpacker.cli.templates import templates
from rollpacker.cli.verbs import build_parser, parse
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.config.warmup import WarmupConfig
from rollpacker.sim.scenario import load_scenario
from tests.docs.blocks import PAGES, ROOT, Block, blocks, commands, named_files

COMMANDS = [(block, words) for page in PAGES for block in blocks(page) for words in commands(block)]
YAML = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
TEMPLATE_FILES = {name for one in templates().values() for name in one.files()}

PLACEHOLDERS = {
    "CONFIG": "configs/quickstart.yaml",
    "RUN": "runs/quickstart",
    "RUN_OR_SCENARIO": "runs/quickstart",
    "runs/NAME": "runs/quickstart",
    "runs/ONE": "runs/quickstart",
    "runs/one": "runs/quickstart",
    "runs/OTHER": "runs/short",
}
"""What stands for a name of the reader's own."""


def parsed(words: tuple[str, ...]) -> argparse.Namespace:
    try:
        return parse(build_parser(), [PLACEHOLDERS.get(word, word) for word in words])
    except SystemExit as stop:
        raise AssertionError(f"rollpacker {' '.join(words)}: not understood") from stop


def config_of(args: argparse.Namespace) -> str | None:
    """The config file or the scenario that a command reads."""
    for name in ("config", "scenario", "target", "file", "cluster"):
        value = getattr(args, name, None)
        if isinstance(value, str) and value.endswith(".yaml"):
            return value
    return None


def test_there_are_commands_and_blocks() -> None:
    assert len(COMMANDS) > 25
    assert len(YAML) > 8
    assert {words[0] for _, words in COMMANDS} >= {"init", "train", "eval", "report", "doctor"}


def test_what_assistants_are_sent_to_exists() -> None:
    page = (ROOT / "AGENTS.md").read_text("utf-8")
    named = set(re.findall(r"`((?:rollpacker|tests|docs)/[\w./]+)`", page))
    assert len(named) > 10
    assert not [one for one in sorted(named) if not (ROOT / one).exists()]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b", page)) <= targets


@pytest.mark.parametrize(
    ("block", "words"), COMMANDS, ids=[f"{block}: {' '.join(words)}" for block, words in COMMANDS]
)
def test_a_command_parses_and_its_config_takes_its_overrides(
    block: Block, words: tuple[str, ...], tmp_path: Path
) -> None:
    args = parsed(words)
    path = config_of(args)
    if path is None:
        return
    place = ROOT / path
    own = named_files(ROOT / "README.md") | named_files(block.page)
    if path in own:
        place = tmp_path / path
        place.write_text(own[path])
    elif "/" not in path:  # written by `rollpacker init` into the reader's folder
        assert path in TEMPLATE_FILES, path
        place = ROOT / "configs" / path
    if args.verb == "cluster" and args.action != "submit":
        load_cluster(place, list(args.overrides))
    elif "cluster:" in place.read_text():
        load_scenario(place, list(args.overrides))
    else:
        schema = WarmupConfig if args.verb == "warmup" else RunConfig
        load_config(place, list(args.overrides), schema)


def merged(base: Any, change: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    return {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_yaml_block_is_a_config_or_a_part_of_one(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the files that the page shows."""
    monkeypatch.chdir(tmp_path)
    for name, text in named_files(block.page).items():
        Path(name).write_text(text)
    found = yaml.safe_load(block.text)
    if isinstance(found, list):
        found = {"rewards": found}
    config = found
    if not {"model", "data", "rewards"} <= set(found):
        base = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
        for key in ("algorithm", *found.keys() & {"data"}):
            del base[key]  # a page's own comes without the quickstart's
        config = merged(base, found)
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    load_config(tmp_path / "config.yaml", [], RunConfig)


SHORT = (
    *("train.steps=3", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2"),
    *("rollout.max_response_tokens=256", "data.train.size=40", "data.eval.size=4"),
    *("eval.every_steps=3", "checkpoint.every_steps=3"),
)
SHORTENED = {
    "train": SHORT,
    "warmup": ("stages=[{path: rows.jsonl, steps: 2, batch_size: 4}]", "--overwrite"),
    "eval": (),
    "replay": (),
    "report": (),
    "compare": (),
    "doctor": (),
    "init": ("--files-only", "--overwrite"),
    "simulate": (),
    "plan": ("--budget", "quick", "--jobs", "1"),
    "cluster": ("jobs.count=8", "jobs.hours=20"),
}
"""Verbs whose commands are run -> what cuts them short."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader's: the configs, the warm-up's model (two steps of it), a short run."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    rows = [
        {"prompt": f"{a}+{b}=", "completion": f"{a}+{b}={a + b}"} for a in (1, 2) for b in (3, 4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["warmup", "configs/quickstart-warmup.yaml", *SHORTENED["warmup"]]) == 0
        for name in ("quickstart", "short"):
            assert main(["train", "configs/quickstart.yaml", *SHORT, f"name={name}"]) == 0
        assert main(["init", "quickstart", "--files-only"]) == 0
    return folder


def needs_service(words: tuple[str, ...]) -> bool:
    """Those are run by `SERVED`."""
    return words[0] == "cluster" and words[1] != "simulate"


def runnable(words: tuple[str, ...]) -> bool:
    """Whether all that the command needs is on this machine."""
    path = config_of(parsed(words)) or ""
    if needs_service(words):
        return False
    if words[0] == "plan" and "scenarios/" in path:
        return False  # minutes
    if "--gpu" in words:
        return False  # tests/cli/test_bring_up.py
    if words[0] == "train" and "vllm" in path:
        return False  # an environment of its own (make test-vllm)
    return words[0] in SHORTENED and (
        not path or any(part in path for part in ("scenarios/", "clusters/", "quickstart"))
    )


SERVED = ROOT / "tests/cli/test_cluster_service.py"
RUNNABLE = list(dict.fromkeys(words for _, words in COMMANDS if runnable(words)))


@pytest.mark.parametrize("words", RUNNABLE, ids=" ".join)
def test_a_command_runs(
    words: tuple[str, ...], workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Cut short. Overrides of the page stand last, so that they hold."""
    monkeypatch.chdir(workplace)
    Path("faster.yaml").unlink(missing_ok=True)
    verb, *rest = (PLACEHOLDERS.get(word, word) for word in words)
    overrides = [word for word in rest if "=" in word]
    rest = [word for word in rest if word not in overrides]
    short = list(SHORTENED[verb])
    if verb == "train" and "--resume" not in words:
        short += ["name=another", "--overwrite"]  # the run that others look at stays
    if verb == "simulate" and config_of(parsed(words)):
        short += ["steps=2"]
    code = main([verb, *rest, *short, *overrides])
    assert code in ((0, 1) if verb == "doctor" else (0,)), capsys.readouterr().err


def test_the_rewards_read_with_pandas_are_those_of_the_metrics(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a sample was kept that was not trained on."""
    pandas = pytest.importorskip("pandas")
    shutil.copytree(workplace / "runs" / "quickstart", tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    first = sorted(Path("runs/quickstart/samples").iterdir())[0]
    rows = pandas.read_parquet(first)
    kept = rows.head(1).assign(trained=False, reward=100.0, advantage=None)
    pandas.concat([rows, kept], ignore_index=True).to_parquet(first)
    [block] = [b for b in blocks(ROOT / "docs/run-folder.md") if "read_parquet" in b.text]
    shown: list[Any] = []
    exec(block.text, {"print": shown.append})
    lines = Path("runs/quickstart/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]  # the last evaluation has a row of its own
    means = {m["step"]: m["critic/rewards/mean"] for m in metrics if "critic/rewards/mean" in m}
    assert shown[0].to_dict() == pytest.approx(means)


def test_the_algorithm_of_the_page_is_centred() -> None:
    """As its name says: as many samples of a group above as below, in groups of 4, too."""
    source = named_files(ROOT / "docs/algorithms.md")["centred.py"]
    made: dict[str, Any] = {}
    exec(source, made)
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0, 1.0, 1.0, 3.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    found = made["advantages"](rewards, groups)
    assert found.tolist() == [-1.5, -0.5, 0.5, 3.5, 0.0, 0.0, 2.0]


ELSEWHERE = {
    "play": "tests/cli/test_play.py",
    "serve": "tests/cli/test_serve.py",
    "calculator": "tests/examples/test_turns.py",
    "guess": "tests/examples/test_turns.py",
}
"""What a command runs, or the config that it trains -> the tests that do so."""


def run_elsewhere(words: tuple[str, ...]) -> bool:
    config = Path(config_of(parsed(words)) or "").stem
    what = config if words[0] == "train" else words[0]
    return what in ELSEWHERE


def test_most_commands_are_run() -> None:
    known = {words for _, words in COMMANDS if not run_elsewhere(words)}
    for what, path in ELSEWHERE.items():
        assert f'"{what}"' in (ROOT / path).read_text(), path
    served = {words for words in known if needs_service(words)}
    there = SERVED.read_text()
    assert {words[1] for words in served if f'"{words[1]}"' not in there} <= {"serve"}
    assert len(RUNNABLE) > 0.7 * len(known - served)
