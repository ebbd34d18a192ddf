"""Tail batching in slime: `--rollout-function-path rollpacker.integrations.slime.generate_rollout`
and `--data-source-path rollpacker.integrations.slime.DataSource`. docs/slime.md has the page."""

import importlib
import importlib.util
import inspect

from rollpacker.imports import MissingPackageError

HOOKS = {
    "slime.backends.sglang_utils.server_control": ("abort_servers_until_idle(urls)",),
    "slime.rollout.base_types": ("RolloutFnTrainOutput(samples,metrics)",),
    "slime.rollout.data_source": (
        *("RolloutDataSource.get_samples(num_samples)", "RolloutDataSource.save(rollout_id)"),
        "RolloutDataSource.load(rollout_id)",
    ),
    "slime.rollout.rm_hub": ("batched_async_rm(args,samples)",),
    "slime.rollout.sglang_rollout": (
        *("GenerateState(args)", "generate_and_rm(args,sample,sampling_params)"),
        "generate_rollout(args,rollout_id,data_source,evaluation)",
    ),
    "slime.utils.async_utils": ("run(coro)",),
    "slime.utils.http_utils": ("get(url)",),
    "slime.utils.misc": ("load_function(path)",),
    "slime.utils.types": (
        "Sample(group_index,index,prompt,tokens,response_length,reward,status,session_id,"
        "generate_function_path)",
        "Sample.append_response_tokens(args,tokens,log_probs,trainable,meta_info,text)",
        *("Sample.to_dict()", "Sample.from_dict(data)"),
    ),
}
"""What is used of slime, by its module, with the parameters. slime has no version to ask for."""


def check_hooks() -> None:
    """Raise `ValueError` if the slime that is installed lacks something that is used of it."""
    for module, names in HOOKS.items():
        for name in names:
            path, _, parameters = name.rstrip(")").partition("(")
            try:
                found = importlib.import_module(module)
                for part in path.split("."):
                    found = getattr(found, part)
                # A class made by a metaclass of slime's has the parameters of its __init__.
                taken = inspect.signature(getattr(found, "__init__", found) if inspect.isclass(found) else found).parameters
                missing = {*parameters.split(",")} - {"", *taken}
            except (ModuleNotFoundError, AttributeError) as error:
                missing = {str(error)}
            if missing:
                raise ValueError(
                    f"rollpacker.integrations.slime does not know this version of slime: "
                    f"{module}.{name} is not as it was in August 2026 ({', '.join(sorted(missing))})"
                )


if importlib.util.find_spec("slime") is None:
    raise MissingPackageError(
        "rollpacker.integrations.slime needs slime, which is not installed here: "
        "install RollPacker into slime's own environment"
    )
# Before anything of slime is imported, so that another version is a sentence and not a traceback.
check_hooks()

from rollpacker.integrations.slime.data_source import DataSource  # noqa: E402
from rollpacker.integrations.slime.rollouts import generate_rollout  # noqa: E402

__all__ = ["DataSource", "check_hooks", "generate_rollout"]
