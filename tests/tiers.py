"""Which tests run when: quick, full or nightly.

A test has the tier of the longest row that its id begins with: of its folder, its file, or its own
name. A fixture in `FIXTURES` moves whatever uses it to a later tier, and so do the seconds that
were recorded of a test: `LONGEST_S`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tests import durations

Tier = Literal["quick", "full", "nightly"]
"""When a test runs. quick: `make check`, and with every other; full: `make test`, with quick;
nightly: `make nightly` alone."""

QUICK_EXAMPLES = 15
"""Most examples of a property in a quick run; elsewhere as many as the property says, or 100."""
NIGHTLY_EXAMPLES = 1000
"""Examples of a property in a nightly run, if it is so cheap that it is in no list of durations."""

FOLDERS: dict[str, Tier] = {
    "tests/": "full",
    **dict.fromkeys(
        (
            *("tests/algo/", "tests/config/", "tests/run/", "tests/core/", "tests/data/"),
            *("tests/dialogue/", "tests/docker/", "tests/drills/", "tests/endpoints/"),
            *("tests/golden/", "tests/report/", "tests/sim/", "tests/test_"),
        ),
        "quick",
    ),
    "tests/report/page/": "nightly",
    "tests/cluster/": "nightly",
    "tests/cluster_phase/": "nightly",
    "tests/integrations_verl/": "nightly",
    "tests/package/": "nightly",
}
"""Beginning of the ids of a folder's tests -> their tier. Where a row below begins longer, it
holds."""

SLOW: dict[str, str] = {
    **dict.fromkeys(
        ("tests/core/", "tests/config/", "tests/golden/", "tests/report/test_", "tests/sim/"),
        "pure, with as many examples as the decisions need; a quick run tries a few",
    ),
    **dict.fromkeys(("tests/test_", "tests/docs/test_site"), "looks at every file"),
    **dict.fromkeys(
        (
            "tests/run/test_salvage.py::test_a_real_round_is_taken_up",
            "tests/run/test_order_only.py::test_a_frozen_policy_is_trained_on_the_same_responses[0]",
            "tests/run/test_turns.py::test_a_resumed_run_is_the_uninterrupted_one",
            "tests/run/test_carried_turns.py::test_under_the_same_weights_only_the_order_changes[q",
            "tests/integrations_trl/test_rollout_function.py::test_only_the_order_changes[default]",
        ),
        "the promise of the project, once for each way in which it is kept",
    ),
    **dict.fromkeys(
        (
            "tests/docs/test_pages.py::test_a_command_runs[init quickstart]",
            "tests/cli/test_python.py::test_it_takes_a_dict_functions_and_rows",
        ),
        "what a user tries first",
    ),
    **dict.fromkeys(
        (
            "tests/engines/test_conformance.py::test_one_that_joins_later_reads_what_the_others_have"
            "[embedded in a process]",
            "tests/trainer/pipeline/test_open_sweep.py::test_portions_that_come_at_any_time_change_no"
            "_bit[(2, 1)",
            "tests/trainer/pipeline/test_stages.py::test_no_order_and_no_delay_changes_a_bit[(2",
            "tests/environments/test_tools.py::test_what_goes_wrong_is_told_to_the_model_and_counted"
            "[fails",
            "tests/sandbox/test_attacks.py::test_contained[bwrap python: own environment]",
        ),
        "one of many that differ in a parameter; the others are nightly",
    ),
}
"""Beginning of the ids of tests that take more than `LONGEST_S` -> why they are not nightly."""

LONGER = (
    "tests/rewards/test_code_corpus.py",
    "tests/rewards/test_verdicts.py",
    "tests/rewards/test_worker.py",
    "tests/rewards/test_worker_pool.py",
)
"""Files that a nightly run runs, too, and with more cases: `ROLLPACKER_FULL=1` asks for those."""

LONGEST_S = 2.0
"""A test that takes more processor seconds, by `durations.json`, is nightly unless a row of `SLOW`
says why it is not. On two busy cores that is about three seconds."""

FIXTURES: dict[str, Tier] = {"built": "nightly", "command": "nightly"}
"""Fixture -> the earliest tier of a test that uses it."""


def _rows(tier: Tier, reason: str, *tests: str) -> dict[str, tuple[Tier, str]]:
    return dict.fromkeys(tests, (tier, reason))


MOVED: dict[str, tuple[Tier, str]] = {
    # -- out of quick: what its guard refuses, or what takes longer than the whole is worth
    **_rows(
        "full",
        "runs with processes of their own",
        "tests/run/test_adapter_runs.py",
        "tests/run/test_callbacks.py",
        "tests/run/test_carried_turns.py",
        "tests/run/test_order_only.py",
        "tests/run/test_programs.py",
        "tests/run/test_reward_hosts_run.py",
        "tests/run/test_rewritten_turns.py",
        "tests/run/test_sample_rows.py",
        "tests/run/test_streaming_run.py",
        "tests/run/test_turn_credit.py",
        "tests/run/test_turns.py",
        "tests/run/test_weighted_carrying.py",
        "tests/run/test_worth_at_the_end.py",
    ),
    **_rows(
        "full",
        "ports and engines in threads, which are waited for",
        "tests/run/test_driver.py",
        "tests/run/test_engines.py",
        "tests/run/test_parts.py",
        "tests/run/test_pools.py",
        "tests/run/test_shared_devices.py",
        "tests/run/test_trainer_faults.py",
    ),
    **_rows(
        "full",
        "starts a process",
        "tests/algo/test_config.py::test_the_package_loads_no_torch",
        "tests/dialogue/test_call_formats.py::test_a_turn_that_repeats_itself",
        "tests/docs/test_many_jobs_page.py::test_the_batch_script_is_bash",
        "tests/drills/test_engine_drill.py::test_a_run_with_an_engine_of_one_row",
        "tests/golden/test_golden.py::test_seeded_loss_curves",
        "tests/golden/test_processors.py",
        "tests/run/test_salvage.py::test_a_real_round_is_taken_up",
        "tests/sim/test_plan.py::test_processes_change_nothing",
        "tests/sim/test_purity.py::test_the_log_is_the_same_under_every_hash_seed_and_replays[",
        "tests/sim/test_workload.py::test_two_processes_agree",
        "tests/test_layering.py::test_light_modules_load_nothing_heavy",
        "tests/test_layering.py::test_cli_module_loads_no_config_libraries",
        "tests/test_layering.py::test_help_answers_at_once",
        "tests/test_optional_packages.py",
        "tests/test_quickstart_files.py::test_the_script_writes_the_same_bytes_again",
        "tests/test_weight_buffer.py",
    ),
    # -- into quick
    **_rows(
        "quick",
        "texts alone, no run is started",
        "tests/cli/test_cluster_grown.py",
        "tests/cli/test_cluster_texts.py",
        "tests/cli/test_engines.py",
        "tests/cli/test_schedule.py",
        "tests/cli/test_simulate_bad_input.py",
        "tests/docs/test_many_jobs_page.py",
    ),
    **_rows(
        "quick",
        "pure",
        "tests/environments/adapters/test_gymnasium.py",
        "tests/environments/adapters/test_load.py",
        "tests/environments/adapters/test_reasoning_gym.py",
        "tests/workers/test_codec.py",
        "tests/report/page/test_settings.py",
        "tests/rewards/test_held_loop.py",
        "tests/rewards/test_verdicts.py",
        "tests/rewards/test_weighted.py",
    ),
    # -- into nightly
    **_rows(
        "nightly",
        "hosts and servers that are killed; the test before it does so for a few seconds",
        "tests/scheduler/test_faults.py::test_nor_do_two_hundred_faults",
    ),
    **_rows(
        "nightly",
        "runs that are killed, resumed and compared bit for bit, tens of processor seconds each; "
        "test_salvage.py and test_turns.py compare such runs in full",
        "tests/run/test_controller_faults.py",
        "tests/run/test_engine_faults.py",
        "tests/run/test_process_run.py",
        "tests/run/test_resume.py",
        "tests/run/test_released.py::test_a_run_that_releases_devices_learns",
        "tests/cli/test_seats.py::test_two_jobs_that_share_pools_compute",
        "tests/trainer/pipeline/test_stage_faults.py",
        "tests/trainer/pipeline/test_stage_run.py",
    ),
    **_rows(
        "nightly",
        "several sets of ranks, each of which loads torch and transformers; one such set is "
        "started in full for sharding, stages, replicas and faults",
        "tests/trainer/pipeline/test_order_ranks.py",
        "tests/trainer/pipeline/test_relayout.py::test_a_layout_in_which_a_process_is_lost",
        "tests/trainer/pipeline/test_relayout.py::test_other_layers_and_stages_go_on",
        "tests/trainer/pipeline/test_relayout.py::test_ranks_change_places",
        "tests/trainer/pipeline/test_relayout.py::test_state_that_nobody_can_read",
        "tests/trainer/pipeline/test_relayout.py::test_the_same_layout_goes_on",
        "tests/trainer/pipeline/test_slow.py",
        "tests/trainer/pipeline/test_stage_trainer.py",
        "tests/trainer/test_compiling.py::test_sharded_and_checkpointed_layers",
        "tests/trainer/test_launch.py::test_a_rank_that_stays_stopped_is_lost",
        "tests/trainer/test_launch.py::test_a_silent_stranger",
        "tests/trainer/test_lora.py::test_two_processes_with_sharded_adapters",
        "tests/run/test_rewritten_turns.py::test_turns_are_trained_on_behind_the_prompts_"
        "that_they_were_drawn_behind[train.processes=2]",
        "tests/cli/test_given_environment.py::test_a_class_and_tools_of_this_program",
        "tests/cli/test_bring_up.py::test_the_whole_bring_up",
        "tests/cli/test_order_bad_input.py::test_a_file_of_another_size",
        "tests/cli/test_own_functions.py::test_a_loss_is_called_wherever_training_is[2]",
        "tests/cli/test_stages_bad_input.py::test_a_model_whose_stages_do_not_reproduce_it",
        "tests/cli/test_stages_bad_input.py::test_fewer_micro_batches_than_stages",
        "tests/docs/test_pages.py::test_a_command_runs[train CONFIG train.processes=4",
        "tests/docs/test_pages.py::test_a_command_runs[train configs/quickstart.yaml "
        "rollout.engines=2 train.processes=2",
    ),
    **_rows(
        "nightly",
        "starts the command, or a script, in a terminal or a process again and again",
        "tests/cli/test_interrupt.py::test_a_script_gets_the_run",
        "tests/cli/test_interrupt.py::test_it_trains_in_a_thread",
        "tests/cli/test_operating.py::test_a_closed_terminal_saves",
        "tests/cli/test_operating.py::test_an_interrupt_that_a_library_catches_is_not_lost[1]",
        "tests/cli/test_operating.py::test_an_interrupt_that_a_library_catches_is_not_lost[15]",
        "tests/cli/test_operating.py::test_on_a_terminal_the_panel_stays",
        "tests/cli/test_operating.py::test_under_nohup",
        "tests/cli/test_operating.py::test_verbose_shows",
        "tests/cluster_service/test_chaos.py",
        "tests/cluster_service/test_chaos_runs.py",
        "tests/cluster_service/test_cold_start.py",
        "tests/cluster_service/test_together.py",
    ),
    **_rows(
        "nightly",
        "a long learning run, or one of several that differ in a number",
        "tests/run/test_order_only.py::test_a_frozen_policy_is_trained_on_the_same_responses[1]",
        "tests/run/test_order_only.py::test_a_frozen_policy_is_trained_on_the_same_responses[2]",
        "tests/run/test_programs.py::test_one_that_fails_is_no_zero",
        "tests/run/test_turns.py::test_a_round_leaves_its_pool_to_others",
        "tests/examples/test_turns.py::test_a_few_steps_of_the_game",
        "tests/examples/test_turns.py::test_a_few_steps_with_the_calculator",
        "tests/sim/test_purity.py::test_the_log_is_the_same_under_every_hash_seed_and_replays["
        "128-gpus]",
    ),
    **_rows("nightly", "a notebook, run in a kernel", "tests/examples/test_notebook.py"),
    **_rows(
        "nightly",
        "the libraries themselves, which start services and processes of their own",
        "tests/remote/test_ray.py",
        "tests/remote/test_ray_gpus.py",
        "tests/trackers/test_trackers.py::test_a_killed_run_goes_on_as_the_same_run",
        "tests/trackers/test_trackers.py::test_doctor_says_which_can_be_used",
    ),
    **_rows(
        "nightly",
        "starts two engines, and writes and reads 200 MB",
        "tests/engines/test_memory.py",
    ),
    **_rows(
        "nightly",
        "needs vLLM, which the environment of make test has not (make test-vllm)",
        "tests/cli/test_vllm_bad_input.py",
        "tests/engines/test_vllm.py",
        "tests/engines/test_vllm_adapters.py",
        "tests/engines/test_vllm_adapters_apart.py",
        "tests/engines/test_vllm_carry.py",
        "tests/engines/test_vllm_hybrid.py",
        "tests/engines/test_vllm_life.py",
        "tests/engines/test_vllm_no_copy.py",
        "tests/engines/test_vllm_native.py",
        "tests/engines/test_vllm_noise.py::test_noise_is_bit_by_bit_that_of_vllms_kernel",
        "tests/engines/test_vllm_noise.py::test_vllm_draws_what_is_written_down_here",
        "tests/engines/test_vllm_parallel.py",
        "tests/engines/test_vllm_runners.py",
        "tests/scheduler/test_vllm_server.py",
    ),
    **_rows(
        "nightly",
        "600 attacks; in full those below",
        "tests/sandbox/test_left_behind.py",
        "tests/sandbox/test_attacks.py::test_contained",
        "tests/sandbox/test_attacks.py::test_without_a_sandbox_the_harness_sees_the_escape",
    ),
    **_rows(
        "full",
        "an attack of each class, in the default sandbox",
        *(
            f"tests/sandbox/test_attacks.py::test_contained[bwrap python: {name}]"
            for name in (
                *("own environment", "environment of pid 1", "create a file in the home folder"),
                *("TCP", "fork bomb", "kill a bystander", "new namespaces by unshare"),
                *("memory: bytes", "output: one line", "crash: null pointer", "later: builtins"),
            )
        ),
        "tests/sandbox/test_attacks.py::test_without_a_sandbox_the_harness_sees_the_escape[own env",
        "tests/sandbox/test_attacks.py::test_without_a_sandbox_the_harness_sees_the_escape[TCP]",
    ),
}
"""Beginning of the ids of tests -> their tier, and why it is not that of their folder."""


def row(test: str) -> str:
    """The longest beginning of a test's id that `FOLDERS` or `MOVED` has."""
    fitting = [begin for table in (FOLDERS, MOVED) for begin in table if test.startswith(begin)]
    return max(fitting, key=len)


def tier_of(test: str, fixtures: Iterable[str] = ()) -> Tier:
    """The tier of the test with that id, which uses those fixtures."""
    begin = row(test)
    own = MOVED[begin][0] if begin in MOVED else FOLDERS[begin]
    if durations.listed().get(test, 0.0) > LONGEST_S and not test.startswith(tuple(SLOW)):
        own = "nightly"
    return max((own, *(FIXTURES.get(name, own) for name in fixtures)), key=_LATER.index)


_LATER: tuple[Tier, ...] = ("quick", "full", "nightly")


def runs(test: str, own: Tier, asked: str) -> bool:
    """Whether the test with that id and of that tier runs if that one is asked for."""
    longer = asked == "nightly" and test.startswith(LONGER)
    return longer or asked in ("all", own) or (asked == "full" and own == "quick")
