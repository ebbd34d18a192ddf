"""Tail batching in slime: `--rollout-function-path rollpacker.integrations.slime.generate_rollout`
and `--data-source-path rollpacker.integrations.slime.DataSource`. docs/slime.md has the page."""

from importlib import import_module

HOOKS = {
    "backends.sglang_utils.server_control": "abort_servers_until_idle",
    "rollout.base_types": "RolloutFnTrainOutput",
    "rollout.data_source": "RolloutDataSource.load RolloutDataSource.save",
    "rollout.rm_hub": "batched_async_rm",
    "rollout.sglang_rollout": "GenerateState generate_and_rm generate_rollout",
    "utils.async_utils": "run",
    "utils.http_utils": "get",
    "utils.misc": "load_function",
    "utils.types": "Sample.append_response_tokens Sample.generate_function_path Sample.to_dict",
}
"""Names that are used of slime, by their module. slime has no version to ask for."""


def check_hooks() -> None:
    """Raise `ValueError` if the installed slime lacks a name that is used, or is not there."""
    for module, names in HOOKS.items():
        for path in names.split():
            try:
                found = import_module(f"slime.{module}")
                for name in path.split("."):
                    found = getattr(found, name)
            except (ModuleNotFoundError, AttributeError) as error:
                raise ValueError(
                    "rollpacker.integrations.slime works with slime as of August 2026 (0.3.1), "
                    f"and the one installed has no slime.{module}.{path}: {error}"
                ) from None


# Before anything of slime is imported, so that another version is a sentence and not a traceback.
check_hooks()

from rollpacker.integrations.slime.data_source import DataSource  # noqa: E402
from rollpacker.integrations.slime.rollouts import generate_rollout  # noqa: E402

__all__ = ["DataSource", "check_hooks", "generate_rollout"]
