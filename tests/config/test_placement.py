"""The lines of `placement`, and the keys that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollpacker.config.load import changes_since, config_of, to_plain
from rollpacker.config.placement import (
    PlacementConfig,
    RewardHostsConfig,
    RolloutPlacement,
    TrainPlacement,
    devices_of,
    num_devices,
)
from rollpacker.config.schema import RunConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.engines.engine import EngineConfig
from tests.run.fakes import run_config


def with_placement(placement: PlacementConfig, **changes: object) -> RunConfig:
    return replace(run_config(), placement=placement, **changes)


FOUR = PlacementConfig(rollout=RolloutPlacement(devices=4), train=TrainPlacement(devices="4-7"))


@pytest.mark.parametrize(
    ("line", "devices", "number"),
    [
        ("all", "all", None),
        (3, 3, 3),
        ("0-3", (0, 1, 2, 3), 4),
        ("0-1,6,3-4", (0, 1, 3, 4, 6), 5),
        ("7-7", (7,), 1),
    ],
)
def test_a_line_is_all_a_number_or_ranges(line, devices, number) -> None:
    assert (devices_of(line), num_devices(line)) == (devices, number)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (0, "devices must be at least 1, not 0"),
        ("every", "must be all, a number, or ranges such as 0-7 or 0-3,6, not 'every'"),
        ("0-", "or ranges"),
        ("-3", "or ranges"),
        ("", "or ranges"),
        ("7-4", r"ends before it begins: did you mean 4-7\?"),
        ("0-3,2", "names one twice"),
        ("0-99999999999", "no so many devices"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line, told) -> None:
    with pytest.raises(ValueError, match=told):
        RolloutPlacement(devices=line)


def test_units_are_whole() -> None:
    with pytest.raises(
        ValueError, match="devices=7 is 7, which per_engine=2 does not divide: make it 6 or 8"
    ):
        RolloutPlacement(devices=7, per_engine=2)
    with pytest.raises(ValueError, match=r"devices=0-2 is 3, which per_replica=4 .* make it 4"):
        TrainPlacement(devices="0-2", per_replica=4)
    with pytest.raises(ValueError, match="per_engine must be at least 1, not 0"):
        RolloutPlacement(per_engine=0)
    with pytest.raises(ValueError, match="memory_gib must be a number from 0 on"):
        TrainPlacement(memory_gib=-1)


def test_roles_that_take_turns_are_two_and_exist() -> None:
    with pytest.raises(ValueError, match="colocate names rollout alone"):
        PlacementConfig(colocate=("rollout",))
    with pytest.raises(ValueError, match="colocate names judge, which has no devices"):
        PlacementConfig(colocate=("rollout", "judge"))
    with pytest.raises(ValueError, match="colocate names a role twice"):
        PlacementConfig(colocate=("train", "train"))


@pytest.mark.parametrize(
    ("part", "changes", "told"),
    [
        ("rollout", {"engines": 2}, r"rollout.engines=2, but placement.rollout.devices=4 with "
         "per_engine=1 makes it 4: placement rules, so leave rollout.engines out"),
        ("train", {"processes": 2}, "train.processes=2, but placement.train.devices=4-7 makes"),
        ("train", {"processes": 4, "replicas": 2}, "train.replicas=2, but .* makes it 4"),
        ("train", {"colocate": True}, r"train.colocate=true, but placement.colocate=\[\] makes it"
         " false"),
    ],
)  # fmt: skip
def test_keys_that_follow_must_agree(part, changes, told) -> None:
    config = run_config()
    # train.colocate asks for as many engines as processes by itself.
    rollout = replace(config.rollout, engines=4) if "colocate" in changes else config.rollout
    more = {"processes": 4} if "colocate" in changes else {}
    sections = {"rollout": rollout, "train": config.train}
    sections[part] = replace(sections[part], **(more | changes))
    with pytest.raises(ValueError, match=told):
        with_placement(FOUR, **sections)


def test_keys_that_agree_are_taken() -> None:
    config = run_config()
    train = replace(config.train, processes=4, replicas=4)
    with_placement(FOUR, rollout=replace(config.rollout, engines=4), train=train)


def test_the_planner_begins_with_the_engines_devices() -> None:
    two = PlacementConfig(rollout=RolloutPlacement(per_engine=2), train=TrainPlacement(devices=2))
    with pytest.raises(
        ValueError, match=r"per_engine=2 does not go with rollout.engine.name=torch"
    ):
        with_placement(two)
    rollout = replace(run_config().rollout, engine=EngineConfig(name="vllm"), engines=4)
    tail = replace(run_config().tail_batching, carry="none")
    config = with_placement(two, rollout=rollout, tail_batching=tail)
    enabled = ParallelismConfig(enabled=True, degrees=(1, 2, 4), initial=2)
    replace(config, parallelism_planner=enabled)
    with pytest.raises(
        ValueError, match=r"initial=1, but placement.rollout.per_engine=2: with the"
    ):
        replace(config, parallelism_planner=replace(enabled, initial=1))


def test_reward_hosts_are_for_several_hosts() -> None:
    with pytest.raises(ValueError, match="rewards_hosts is for several hosts: set runtime=ray"):
        replace(run_config(), rewards_hosts=RewardHostsConfig())
    replace(run_config(), rewards_hosts=RewardHostsConfig(), runtime="ray")
    with pytest.raises(ValueError, match="per_host must be at least 1, not 0"):
        RewardHostsConfig(per_host=0)


def test_the_lines_of_a_file_are_read_and_what_is_wrong_names_its_key() -> None:
    plain = to_plain(run_config())
    lines = {
        "rollout": {"devices": "all", "per_engine": 1},
        "train": {"devices": "0-3", "per_replica": 4},
        "judge": {"devices": 1},
        "colocate": ["rollout", "train"],
    }
    config = config_of({**plain, "placement": lines}, [], RunConfig)
    assert config.placement is not None and config.placement.turns
    assert config.placement.train.devices == "0-3"
    assert config_of(to_plain(config), [], RunConfig) == config
    overridden = config_of({**plain, "placement": lines}, ["placement.train.devices=8"], RunConfig)
    assert overridden.placement is not None and overridden.placement.train.devices == 8
    with pytest.raises(ValueError, match=r"placement.train.devices.*0-3,2.*names one twice"):
        config_of({**plain, "placement": lines}, ["placement.train.devices=0-3,2"], RunConfig)


def test_a_run_folder_from_before_these_keys_means_what_it_meant() -> None:
    config = run_config()
    old = to_plain(config)
    for key in ("runtime", "placement", "rewards_hosts"):
        del old[key]
    assert changes_since(old, config) == []
    assert config_of(old, [], RunConfig) == config


def test_engines_of_several_devices_share_them_with_the_trainer() -> None:
    """As many processes as devices, and one degree for good."""
    config = run_config()
    rollout = replace(config.rollout, engines=2, engine=EngineConfig(name="vllm"))
    train = replace(config.train, processes=4, replicas=2, colocate=True)
    two = ParallelismConfig(degrees=(2,), initial=2)
    tail = replace(config.tail_batching, carry="none")
    shared = replace(
        config, rollout=rollout, train=train, parallelism_planner=two, tail_batching=tail
    )
    assert shared.layout.gpus == 4 and shared.layout.tensor_parallel == 2
    with pytest.raises(ValueError, match="of at least two, 2 of them for each engine: set rollout"):
        replace(shared, train=replace(train, processes=2, replicas=2))
    with pytest.raises(ValueError, match=r"does not go with parallelism_planner.enabled=true"):
        replace(shared, parallelism_planner=replace(two, enabled=True, degrees=(1, 2)))
