"""What RollPacker's parts of slime refuse, save, and make of servers that fail."""

from __future__ import annotations

import json
import logging
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import slime.rollout.sglang_rollout as sglang_rollout
from slime.rollout.data_source import RolloutDataSource
from slime.utils.types import Sample

from rollpacker.integrations.slime import DataSource, check_hooks, generate_rollout, rollouts
from rollpacker.scheduler.servers import Servers
from tests.integrations_slime import host, slimes
from tests.integrations_slime.host import arguments, expected, hashed, named
from tests.integrations_slime.servers import Server, here

SIZES = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 6}


def args_of(folder: Path, port: int = 1, **changes: Any) -> Namespace:
    args = arguments(folder, port, **{**SIZES, **changes})
    slimes.connect(args)
    return args


def rollout(args: Namespace, step: int, source: Any) -> dict[str, str]:
    """The responses of a rollout, as hashes by prompt and place."""
    groups = generate_rollout(args, step, source).samples
    return {
        named(args, one): hashed(one.tokens[-one.response_length :])
        for group in groups
        for one in group
    }


REFUSED = [
    ({"partial_rollout": True}, "--partial-rollout"),
    ({"dynamic_sampling_filter_path": "a.b"}, "--dynamic-sampling-filter-path"),
    ({"buffer_filter_path": "a.b"}, "--buffer-filter-path"),
    ({"over_sampling_batch_size": 8}, "--over-sampling-batch-size: rollpacker.prompt_factor"),
    ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset"),
    ({"multimodal_keys": {"image": "images"}}, "--multimodal-keys"),
    ({"rollpacker": {"carry": "exact"}}, "rollpacker.carry=exact"),
    ({"sglang_enable_deterministic_inference": False}, "--sglang-enable-deterministic-inference"),
    ({"rollpacker": {"prompt_facto": 2}}, "prompt_factor"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_does_not_go_together_is_one_sentence(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        DataSource(args_of(tmp_path, **changes))
    assert "\n" not in str(caught.value).strip()


def test_racing_off_needs_no_seeds(tmp_path: Path) -> None:
    off = {"rollpacker": {"enabled": False}, "sglang_enable_deterministic_inference": False}
    DataSource(args_of(tmp_path, **off))


def test_a_slime_that_moved_a_hook_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    check_hooks()
    monkeypatch.delattr(sglang_rollout, "generate_and_rm")
    with pytest.raises(ValueError, match=r"no slime\.rollout\.sglang_rollout\.generate_and_rm"):
        check_hooks()


def test_slimes_own_data_source_and_a_rollout_asked_for_twice_are_refused(tmp_path: Path) -> None:
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port)
        with pytest.raises(ValueError, match="--data-source-path"):
            generate_rollout(args, 0, RolloutDataSource(args))
        source = DataSource(args)
        rollout(args, 0, source)
        with pytest.raises(ValueError, match="rollout 0 was asked for twice"):
            generate_rollout(args, 0, source)
        rollout(args, 1, source)


def test_an_evaluation_is_slimes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(sglang_rollout, "generate_rollout", lambda *a, **b: asked.append((a, b)))
    args = args_of(tmp_path)
    generate_rollout(args, 3, "any source", evaluation=True)
    assert asked == [((args, 3, "any source"), {"evaluation": True})]


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("seeds", "draws other tokens with the same seed"),
        ("abort", "does not stop a response"),
        ("log-probs", "sent no log-probs"),
        ("prefill", "only prefill or decode"),
    ],
)
def test_a_server_that_cannot_do_it_is_one_sentence(tmp_path: Path, flaw: str, words: str) -> None:
    server = Server("sglang", flaw=flaw)
    server.worker_type = "prefill" if flaw == "prefill" else "regular"
    with here(server):
        args = args_of(tmp_path, server.port)
        with pytest.raises(ValueError, match=words):
            generate_rollout(args, 0, DataSource(args))


def test_samples_are_as_slime_makes_them(tmp_path: Path) -> None:
    published = {"rollpacker": {"selection": "published"}, "use_rollout_routing_replay": True}
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port, **published)
        groups = generate_rollout(args, 0, DataSource(args)).samples
    samples = [one for group in groups for one in group]
    firsts = [group[0].index for group in groups]
    assert firsts == sorted(firsts)
    assert [one.index - group[0].index for group in groups for one in group] == [0, 1] * 4
    for one in samples:
        assert one.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert one.generate_function_path is None
        assert one.loss_mask == [1] * one.response_length == [1] * len(one.rollout_log_probs)
        assert one.tokens[: -one.response_length] == slimes.Tokenizer().encode(one.prompt)
        assert one.reward == one.response_length
    assert len({one.session_id for one in samples}) == 8
    assert all(asked["return_routed_experts"] for asked in server.asked if "rid" in asked)


def test_a_prompt_that_is_not_plain_json_is_refused_when_it_is_fetched(tmp_path: Path) -> None:
    class Source(DataSource):
        def get_samples(self, num_samples: int) -> Any:
            groups = super().get_samples(num_samples)
            groups[0][0].metadata = {"when": {1, 2}}
            return groups

    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port)
        with pytest.raises(ValueError, match="not plain JSON"):
            generate_rollout(args, 0, Source(args))
        args = args_of(tmp_path, server.port, save=None)
        rollout(args, 0, Source(args))


def test_a_checkpoint_without_our_state_goes_on_and_says_with_which_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port)
        plain = RolloutDataSource(args)
        plain.get_samples(12)
        plain.save(2)
        source = DataSource(args)
        with caplog.at_level(logging.WARNING):
            source.load(2)
        assert "those from number 12 of the data on are drawn anew" in caplog.text
        found = {name for step in (3, 4, 5) for name in rollout(args, step, source)}
    assert found == {f"{prompt}/{place}" for prompt in range(12, 24) for place in range(2)}


def test_a_first_run_says_nothing_of_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DataSource(args_of(tmp_path)).load(-1)
    assert not caplog.records


def test_state_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port)
        source = DataSource(args)
        rollout(args, 0, source)
        source.save(0)
    path = tmp_path / "checkpoints/rollout/rollpacker_0/rollpacker/prompts.json"
    path.write_text(path.read_text().replace('"prompts"', '"rows"'))
    with pytest.raises(ValueError, match=r"prompts\.json cannot be read \(KeyError"):
        DataSource(args).load(0)


def test_checkpoints_hold_json_alone_and_only_those_that_slime_saved_stay(tmp_path: Path) -> None:
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port)
        source = DataSource(args)
        for step in range(6):
            rollout(args, step, source)
            if step % 3 == 0:
                source.save(step)
    folder = tmp_path / "checkpoints" / "rollout"
    assert {path.name for path in folder.glob("rollpacker_*")} == {
        *("rollpacker_0", "rollpacker_3", "rollpacker_4", "rollpacker_5"),
    }
    for path in folder.glob("rollpacker_*/**/*.json"):
        json.loads(path.read_text())
    waiting = json.loads((folder / "rollpacker_0/rollpacker/prompts.json").read_text())["prompts"]
    assert len(waiting) == 2 and not any(one["response_length"] for one in waiting)


def test_train_async_saves_a_rollout_after_the_next_one_has_ended(tmp_path: Path) -> None:
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port)
        source = DataSource(args)
        found = rollout(args, 0, source) | rollout(args, 1, source)
        rollout(args, 2, source)
        source.save(1)  # its model's checkpoint: rollout 2 is not trained on
        resumed = DataSource(args)
        resumed.load(1)
        for step in (2, 3, 4, 5):
            more = rollout(args, step, resumed)
            assert not more.keys() & found.keys()
            found |= more
    assert found == expected(args, 24)


@pytest.mark.parametrize("weights", ["1", "default"])
def test_a_lost_server_is_used_again_only_with_the_weights_that_it_had(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Server):
        """Breaks off all responses but those of the check, and comes back with these weights."""

        def fault(self) -> str:
            if len(self.seen) <= 4 or self.met["cut"] == 12:
                return ""
            self.met["cut"] += 1
            self.weights = weights
            return "cut"

    quick = {"pause_s": 0.05, "outage_s": 3.0}
    monkeypatch.setattr(rollouts, "Servers", lambda *a, **b: Servers(*a, **b, **quick))
    with here(Breaks("sglang")) as server:
        args = args_of(tmp_path, server.port)
        if weights == "1":
            found = rollout(args, 0, DataSource(args))
            assert found.items() <= expected(args, 6).items()
        else:
            with pytest.raises(Exception, match="no server has answered"):
                generate_rollout(args, 0, DataSource(args))
            assert "its weights are {'weight_version': 'default'}" in caplog.text
    assert server.met["cut"] == 12


def test_a_generate_function_that_slime_aborts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, aborted = host.own, []

    async def aborts_once(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        if not aborted:
            aborted.append(sample)
            sample.status = Sample.Status.ABORTED
            return sample
        return await own(args, sample, sampling_params)

    monkeypatch.setattr(host, "aborts_once", aborts_once, raising=False)
    path = f"{host.__name__}.aborts_once"
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port, custom_generate_function_path=path)
        found = rollout(args, 0, DataSource(args))
        assert found.items() <= expected(args, 6).items()
    assert aborted


def test_slimes_filters_get_the_rollouts_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(host, "sees", lambda args, data, *more: seen.append(data), raising=False)
    path = f"{host.__name__}.sees"
    filters = {"rollout_sample_filter_path": path, "rollout_all_samples_process_path": path}
    with here(Server("sglang")) as server:
        args = args_of(tmp_path, server.port, **filters)
        groups = generate_rollout(args, 0, DataSource(args)).samples
    assert seen == [groups, groups]
