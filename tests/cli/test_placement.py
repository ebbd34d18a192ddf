"""Lines of `placement` on this machine and on made-up hosts: the dry run's table, the keys that
follow, and what is refused with one message."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rollpacker.config.load import load_config, save_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.placement.roles import Host, Placement, PlacementError, text_of_bytes
from rollpacker.run.parts import placement
from rollpacker.run.parts.placement import (
    on_nodes,
    on_this_host,
    placed,
    plan_of,
    request_of,
    table,
    table_without,
    this_host,
)
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.training_memory import engine_memory, rank_memory
from tests.cli.test_bad_input import ARCHITECTURE, Command, command, model

__all__ = ["command", "model"]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
TWO_CORES = Host(name="this host", cores=2, memory_bytes=8 * GIB)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is, the dry run sees one of two cores."""
    monkeypatch.setattr(placement, "this_host", lambda kind: TWO_CORES)


def config_with(*overrides: str, folder: object = "nowhere", **lines: object) -> RunConfig:
    """The quickstart's config with these lines of `placement`."""
    tree = {"model": {"path": str(folder)}} | ({"placement": lines} if lines else {})
    given = [f"{key}={json.dumps(value)}" for key, value in tree.items()]
    return load_config(ROOT / "configs/quickstart.yaml", [*given, *overrides], RunConfig)


SHARED = {
    "rollout": {"devices": "all"},
    "train": {"devices": "all"},
    "colocate": ["rollout", "train"],
}


def rows(lines: list[str]) -> list[list[str]]:
    """Cells of the table: columns are two blanks apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def devices_in(out: str) -> list[list[str]]:
    lines = out.splitlines()
    [head] = [n for n, line in enumerate(lines) if line.split()[:2] == ["device", "host"]]
    return rows(lines[head : head + 4])


def test_the_dry_run_shows_each_device_its_host_roles_and_memory(
    command: Command, two_cores: None
) -> None:
    lines = {"rollout": {"devices": 1}, "train": {"devices": 1}}
    assert command.train("--dry-run", placement=lines) == 0
    head, first, second, together = devices_in(command.out)
    assert head == ["device", "host", "roles", "memory of each"]
    assert first[:3] == ["0", "this host", "engine 0"]
    assert second[:3] == ["1", "this host", "replica 0"]
    assert first[3].endswith("iB") and " of 8.0 GiB, " in together[0]
    assert "trainer's 1 processes" in command.out  # the estimate is that of the run as placed
    assert not (command.folder / "runs").exists()


def test_without_lines_the_machine_is_everybodys(command: Command, two_cores: None) -> None:
    assert command.train("--dry-run") == 0
    _, row, together, *_ = devices_in(command.out)
    assert row[:3] == ["0-1", "this host", "run"] and " of 8.0 GiB" in together[0]
    two = {"rollout__engines": 2, "train__processes": 2}
    assert command.train("--dry-run", **two) == 0
    _, row, *_ = devices_in(command.out)
    assert row[2] == "run, engine 0, trainer's process 0, engine 1, trainer's process 1"


def test_on_a_cpu_all_parts_of_an_engine_share_the_memory(shape: Path) -> None:
    settings = ("model.device=cpu", "rollout.engine.name=vllm", "rollout.engines=2")
    planner = "parallelism_planner={initial: 2, degrees: [2]}"
    config = config_with(*settings, planner, folder=shape)
    part = engine_memory(config, 2, on_cuda=False)
    assert part is not None
    of_run = estimate(config).memory.size_bytes
    total = of_run + 2 * 2 * (part.stays_bytes + part.turn_bytes)
    assert table_without(config, TWO_CORES, "cpu")[-1].startswith(
        f"this host: {text_of_bytes(total)} of "
    )


def test_a_gpu_that_is_not_there_is_said(command: Command, two_cores: None) -> None:
    assert command.train("--dry-run", model__device="cuda") == 0
    _, row, *_ = devices_in(command.out)
    assert row[:3] == ["0", "this host", "run"]
    assert row[3].endswith("iB, and there is no such device here")
    lines = {"rollout": {"devices": 1}, "train": {"devices": 1}}
    told = command.refused("--dry-run", placement=lines, model__device="cuda")
    assert "there is no CUDA device on this host" in told


def test_what_is_short_is_one_message(command: Command, two_cores: None) -> None:
    lines = {"rollout": {"devices": 2}, "train": {"devices": 1}}
    for option in ((), ("--dry-run",)):
        told = command.refused(*option, placement=lines)
        assert "at least 3 devices, and there are 2 on this host" in told


def test_a_memory_that_is_too_small_is_short(command: Command, two_cores: None) -> None:
    lines = {"rollout": {"devices": 1, "memory_gib": 6}, "train": {"devices": 1, "memory_gib": 5}}
    told = command.refused("--dry-run", placement=lines)
    assert "train asks for 1 device, 1 replica, and this host has 8.0 GiB" in told
    assert "(rollout takes 6.0 GiB on each core; train takes 5.0 GiB on each core)" in told


def test_keys_that_do_not_agree_and_turns_on_other_devices(
    command: Command, two_cores: None
) -> None:
    told = command.refused("--dry-run", placement=SHARED, rollout__engines=3)
    assert (
        "rollout.engines=3, but placement.rollout.devices=all with per_engine=1 makes it 2" in told
    )
    lines = SHARED | {"train": {"devices": 1}}
    told = command.refused("--dry-run", placement=lines)
    assert "engines are on devices 0-1, the trainer on 0, and where they take turns" in told


def test_a_cluster_is_never_without_a_token(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    for option in ((), ("--dry-run",)):
        said = command.refused(*option, runtime="ray")
        assert "ray's token cannot be read" in said and "make cluster makes one" in said
    file.write_text("secret")
    file.chmod(0o644)
    assert f"others may read it: chmod 600 {file}" in command.refused(runtime="ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE is disabled" in command.refused(runtime="ray")


def test_a_run_has_the_processes_of_its_placement(tmp_path: Path, two_cores: None) -> None:
    """Its folder will say both, which is read back."""
    config = config_with(rollout={"devices": 1}, train={"devices": 1})
    found, _ = on_this_host(config)
    assert (found.rollout.engines, found.train.processes, found.train.replicas) == (1, 1, 1)
    save_config(found, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml", [], RunConfig)
    assert again == found and on_this_host(again)[0] == found
    assert on_this_host(config_with()) == (config_with(), None)


def test_this_machine_has_cores_and_memory() -> None:
    host = this_host("cpu")
    assert host.cores >= 1 and host.memory_bytes > 1 << 20 and host.gpu_bytes == ()


# -- the issue's own lines on a cluster --------------------------------------------------------

CLUSTER = [
    Host(name=f"node{n}", cores=64, memory_bytes=900 * GIB, gpu_bytes=(80 * GIB,) * 8)
    for n in range(2)
]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of seven billion parameters, as far as a dry run looks."""
    folder = tmp_path_factory.mktemp("shape")
    of_7b = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE | of_7b))
    return folder


ON_GPUS = ("model.device=cuda", "rollout.engine.name=vllm", "tail_batching.carry=none")


def issue_lines(folder: Path, *overrides: str) -> RunConfig:
    return config_with(
        *(*ON_GPUS, *overrides),
        folder=folder,
        rollout={"devices": "all", "per_engine": 2},
        train={"devices": "all", "per_replica": 4},
        judge={"devices": 1},
        colocate=["rollout", "train"],
    )


def test_engines_and_trainer_by_turns_and_a_judge(shape: Path) -> None:
    config = issue_lines(shape, "rollout.engine.kv_cache_gib=8", "train.micro_batch_tokens=1024")
    plan = plan_of(config, CLUSTER)
    assert [len(plan.of(role)) for role in ("rollout", "train", "judge")] == [7, 3, 1]
    shown = rows(table(plan))
    assert shown[1][:3] == ["0-1", "node0", "engine 0, replica 0"]
    assert shown[2][:3] == ["2-3", "node0", "engine 1, replica 0"]
    of_devices = [row for row in shown[1:] if row[0][0].isdigit()]
    assert "judge 0" in [row[2] for row in of_devices]
    assert all(row[3].endswith(" of 80.0 GiB") for row in of_devices)
    [told] = [row[0] for row in shown if row[0].startswith("train takes on each device: ")]
    assert " gradients " in told and "; of it waits in host memory: weights " in told
    assert shown[-1][0].startswith("note: what judge takes is not known, and not counted")


def test_a_larger_replica_takes_less_of_each_device(shape: Path) -> None:
    """And more devices for an engine, too; what is estimated is what the plan goes by."""
    config = issue_lines(shape)
    rollout, train, _ = request_of(config, "cuda").roles
    for role in (rollout, train):
        needs = [role.needs(devices) for devices in (1, 2, 4, 8)]
        assert all(need is not None for need in needs)
        most = [need.most for need in needs if need is not None]
        assert most == sorted(most, reverse=True) and most[0] > 1.5 * most[-1]
    need = train.needs(4)
    assert need is not None and need.turn > 0
    assert need.on_host > 7e9 * 12 / 4  # a quarter of the weights and both moments, in float32


def test_a_model_too_large_for_its_devices_names_the_device_and_what_it_takes(shape: Path) -> None:
    config = config_with(
        *ON_GPUS, folder=shape, rollout={"devices": 4}, train={"devices": 8, "per_replica": 1}
    )
    with pytest.raises(
        PlacementError,
        match=r"device \d+ on node0 has 80.0 GiB, .*train takes .* GiB on each device, .* while",
    ):
        plan_of(config, CLUSTER)


def test_a_process_takes_what_the_estimate_of_the_run_says(shape: Path) -> None:
    config = config_with(*ON_GPUS, "train.processes=8", "train.replicas=2", folder=shape)
    memory = rank_memory(config, on_cuda=True)
    assert memory is not None
    whole = estimate(config).rank(0).size_bytes
    assert memory.stays_bytes + memory.turn_bytes == whole
    one = engine_memory(config, 1, on_cuda=True)
    assert one is not None and one.turn_bytes == 0
    weights = next(part for part in estimate(config).memory.parts if part.name == "engine")
    assert one.parts[0].size_bytes == weights.size_bytes


def test_keys_follow_from_the_plan(shape: Path) -> None:
    config = config_with(
        *(*ON_GPUS, "train.micro_batch_tokens=1024", "rollout.engine.kv_cache_gib=8"),
        folder=shape,
        rollout={"devices": "0-7", "per_engine": 2},
        train={"devices": "0-7", "per_replica": 4},
        colocate=["rollout", "train"],
    )
    found = placed(config, plan_of(config, CLUSTER))
    assert (found.rollout.engines, found.parallelism_planner.initial) == (4, 2)
    assert (found.train.processes, found.train.replicas, found.train.colocate) == (8, 2, True)
    layout = found.layout
    assert (layout.gpus, layout.tensor_parallel, layout.train_group) == (8, 2, 4)
    assert found.job().layouts == (layout,)
    assert placed(found, plan_of(found, CLUSTER)) == found  # as read from the run's folder
    assert plan_of(found, CLUSTER) == plan_of(config, CLUSTER)


def test_what_keys_alone_say_is_placed_as_well(shape: Path) -> None:
    """A cluster's run without `placement`: the trainer first, on the host of the run, where its
    weights are handed out."""
    config = config_with(
        *ON_GPUS, "rollout.engines=2", "train.processes=4", "train.replicas=2",
        "train.micro_batch_tokens=256", "train.offload=true", "runtime=ray", folder=shape
    )  # fmt: skip
    large = [replace(host, gpu_bytes=(140 * GIB,) * 8) for host in CLUSTER]
    plan = plan_of(config, large)
    assert [u.devices for u in plan.units] == [(0, 1), (2, 3), (4,), (5,)]
    with pytest.raises(ValueError, match=r"set train.processes, or placement"):
        plan_of(replace(config, train=replace(config.train, processes=None, replicas=1)), CLUSTER)


def test_what_stays_on_a_device_and_what_waits_in_host_memory(shape: Path) -> None:
    """With train.offload the optimizer's state goes to host memory between steps; engines and
    trainer that take turns leave the device altogether."""
    turns = {"rollout": {"devices": 4}, "train": {"devices": 4, "per_replica": 4}}
    of = {}
    for name, offload, lines in (
        ("apart", "false", {}),
        ("offload", "true", {}),
        ("turns", "false", {"colocate": ["rollout", "train"]}),
    ):
        config = config_with(*ON_GPUS, f"train.offload={offload}", folder=shape, **turns | lines)
        of[name] = [role.needs(role.per_unit) for role in request_of(config, "cuda").roles]
    (engine, rank), (_, offloaded), (sleeping, waiting) = of.values()
    assert None not in (engine, rank, offloaded, sleeping, waiting)
    assert rank.most == offloaded.most == waiting.most and rank.host_parts == ()
    assert offloaded.stays < 0.5 * rank.stays and waiting.stays == 0 < rank.stays
    assert offloaded.on_host == rank.stays - offloaded.stays
    assert [name for name, _ in waiting.host_parts] == ["weights", "optimizer"]
    assert waiting.on_host == rank.stays
    assert engine.stays == engine.most == sleeping.turn and sleeping.stays == 0
    assert sleeping.host_parts == ()  # vLLM gets its weights anew


NODE = Host(name="this host", cores=64, memory_bytes=1000 * GIB, gpu_bytes=(80 * GIB,) * 8)
SHAPES = Path(__file__).parents[1] / "trainer/shapes"
OF_8B, OF_30B = (
    json.loads((SHAPES / f"Qwen3-{name}/config.json").read_text()) for name in ("8B", "30B-A3B")
)
NUM_8B = 8_190_427_136
"""36 layers x 4,096 x (2 x 4,096 + 2 x 1,024 + 3 x 12,288), and 2 x 151,936 x 4,096."""
NUM_30B = 30_531_911_680
"""48 layers x 2,048 x (2 x 4,096 + 2 x 512 + 128 x (3 x 768 + 1)), and 2 x 151,936 x 2,048."""
SPLIT = ("rollout.engines=4", "train.processes=4")
BY_TURNS = ("rollout.engines=8", "train.processes=8", "train.colocate=true")


def on_a_node(folder: Path, shape: dict[str, object], *overrides: str) -> RunConfig:
    """Responses of 16k tokens, as such models give, with a gradient that is sharded at once."""
    (folder / "config.json").write_text(json.dumps(shape))
    return config_with(
        *(*ON_GPUS, "rollout.max_response_tokens=16384", "model.gradient_checkpointing=true"),
        *("train.micro_batch_tokens=20480", "train.gradient_sync=micro-batch", *overrides),
        folder=folder,
    )


def parts_of(plan: Placement) -> list[dict[str, int]]:
    return [dict(need.parts) for _, need in plan.needs]


def test_8b_on_a_node_split_in_two(tmp_path: Path) -> None:
    plan = plan_of(on_a_node(tmp_path, OF_8B, *SPLIT), [NODE])
    assert [u.devices for u in plan.units] == [(0,), (1,), (2,), (3,), (4, 5, 6, 7)]
    engine, rank = parts_of(plan)
    assert engine["weights"] == 2 * NUM_8B
    # At least one response of 16,384 tokens behind a prompt of 1,024, each token of 36 layers x
    # 2 x 1,024 x 2 bytes.
    assert engine["kv cache"] == 17_408 * 147_456
    assert rank["weights"] == rank["gradients"] == NUM_8B and rank["optimizer"] == 2 * NUM_8B
    assert [one.used_bytes for one in plan.devices] == [
        *[sum(engine.values())] * 4, *[sum(rank.values())] * 4
    ]  # fmt: skip
    assert all(one.used_bytes < 48 * GIB for one in plan.devices)
    assert (plan.hosts[0].used_bytes, plan.hosts[0].held_bytes) == (0, 2 * NUM_8B)


def test_8b_on_a_node_by_turns(tmp_path: Path) -> None:
    plan = plan_of(on_a_node(tmp_path, OF_8B, *BY_TURNS), [NODE])
    engine, rank = parts_of(plan)
    assert engine["weights"] == 2 * NUM_8B and rank["optimizer"] == NUM_8B
    assert rank["weights"] == rank["gradients"] == NUM_8B // 2
    turns = max(sum(engine.values()), sum(rank.values()))
    assert {one.used_bytes for one in plan.devices} == {turns} and turns < 32 * GIB
    # Weights and moments of all ranks wait in host memory; vLLM's weights come anew.
    assert (plan.hosts[0].used_bytes, plan.hosts[0].held_bytes) == (12 * NUM_8B, 2 * NUM_8B)
    assert f"host memory {text_of_bytes(14 * NUM_8B)} of 1000.0 GiB" in "".join(table(plan))


def test_30b_on_a_node(tmp_path: Path) -> None:
    plan = plan_of(on_a_node(tmp_path, OF_30B, *BY_TURNS), [NODE])
    engine, rank = parts_of(plan)
    assert engine["weights"] == 2 * NUM_30B and rank["optimizer"] == NUM_30B
    assert {one.used_bytes for one in plan.devices} == {sum(rank.values())}
    assert 16 * NUM_30B // 8 < sum(rank.values()) < 80 * GIB
    assert plan.hosts[0].used_bytes == 12 * NUM_30B
    small = replace(NODE, memory_bytes=300 * GIB)
    for hosts, lines, message in (
        ([NODE], SPLIT, "optimizer of train 56.9 GiB, weights of train 28.4 GiB, gradients of tra"),
        ([NODE], (*BY_TURNS, "train.gradient_sync=step"), "are gradients of train 113.7 GiB, weig"),
        ([small], BY_TURNS, "train keeps 42.7 GiB of host memory for each device); the largest pa"),
    ):
        with pytest.raises(PlacementError, match=re.escape(message)):
            plan_of(on_a_node(tmp_path, OF_30B, *lines), hosts)


def test_a_reward_model_is_counted_by_its_files_and_workers(tmp_path: Path) -> None:
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer/config.json").write_text(json.dumps(OF_8B))
    arguments = {"model_path": str(tmp_path / "scorer")}
    for more, count, expected in (
        ({}, 1, 2 * NUM_8B),
        ({"workers": 3}, 2, 4 * NUM_8B),
        ({"arguments": {**arguments, "dtype": "float32"}}, 2, 4 * NUM_8B),
    ):
        reward = {"function": "reward_model", "name": "scorer", "arguments": arguments} | more
        config = config_with(
            *ON_GPUS,
            f"rewards={json.dumps([reward])}",
            rollout={"devices": 1, "memory_gib": 1},
            train={"devices": 1, "memory_gib": 1},
            reward={"devices": count},
        )
        plan = plan_of(config, [NODE])
        assert dict(plan.needs)["reward"].parts == (("weights of scorer", expected),)
        assert [one.used_bytes for one in plan.devices][2 : 2 + count] == [expected] * count


def test_a_model_that_nobody_knows_is_placed_by_numbers_alone() -> None:
    config = config_with(folder="nobody/knows", **SHARED)
    plan = plan_of(config, [TWO_CORES])
    assert plan.unknown == ("rollout", "train")


def hosts_of_cores(**cores: int) -> list[Host]:
    return [Host(name=name, cores=n, memory_bytes=64 * GIB) for name, n in cores.items()]


def devices_by_role(config: RunConfig, hosts: list[Host]) -> dict[str, list[tuple[str, int]]]:
    plan = plan_of(config, hosts)
    return {
        role: [
            (plan.devices[n].host, plan.devices[n].local)
            for unit in plan.of(role)
            for n in unit.devices
        ]
        for role in ("rollout", "train")
    }


def test_a_job_of_a_cluster_is_on_the_first_devices_of_its_nodes() -> None:
    config = config_with("rollout.engines=2", "train.processes=1", "runtime=ray")
    hosts = hosts_of_cores(a=2, b=4, c=4)
    for nodes in ({"rollout": ["b"], "train": ["c"]}, {"rollout": ["c"], "train": ["a"]}):
        found = devices_by_role(on_nodes(config, hosts, nodes), hosts)
        assert found["rollout"] == [(nodes["rollout"][0], 0), (nodes["rollout"][0], 1)]
        assert found["train"] == [(nodes["train"][0], 0)]
    with pytest.raises(ValueError, match=r"placement.rollout has 2 devices.* devices_per_node"):
        on_nodes(config, hosts_of_cores(a=2, b=1), {"rollout": ["b"], "train": ["a"]})


def test_what_a_cluster_gave_a_run_is_in_its_environment() -> None:
    from rollpacker.run.parts.hosts import nodes_of

    assert nodes_of({}) == {}
    environ = {"ROLLPACKER_ROLLOUT_HOSTS": "a,b", "ROLLPACKER_TRAIN_HOSTS": "c"}
    assert nodes_of(environ) == {"rollout": ["a", "b"], "train": ["c"]}
