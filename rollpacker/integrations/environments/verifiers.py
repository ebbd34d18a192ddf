"""Environments of verifiers 0.4 (its v1 interface): `verifiers:NAME`, a package that exports a
taskset, and perhaps an environment of its own.

An episode is played by verifiers itself, with its tasks' setup, tools, users, stops and rewards;
when it calls the model, the caller of `step` gives the answer. So the reward comes at the end.
Verifiers executes tool calls: `step` with a message that has some returns the tools' results.

Arguments: `num_rows`, `env` (an environment of verifiers to pair the taskset with, by its id) and
those of the taskset's config. Rows are the taskset's tasks, in the column `verifiers_task`.

Not supported: environments of several roles, tasks that need a container, programs other than a
dialogue (for those there is `program:COMMAND`), a tool call that a task's hook
rewrites before it is made (it ends the episode), images. A task's own tool servers are processes
that start with each episode, which takes seconds; those of the taskset are shared. Before 0.4
verifiers has another interface.
"""

from __future__ import annotations

import asyncio
import itertools
import pkgutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.environments.environment import Message, ToolSchema
from rollpacker.imports import require
from rollpacker.integrations.environments.messages import AdapterError, OwnArguments

if TYPE_CHECKING:
    from rollpacker.integrations.environments.verifiers_policy import PolicyClient

COLUMN = "verifiers_task"


def factory(name: str, arguments: dict[str, Any]) -> Callable[[], VerifiersEnvironment]:
    config, _, _ = _config(name, arguments)
    tools = _tools_of(config, f"verifiers:{name}")
    servers = Servers(config)
    return lambda: VerifiersEnvironment(servers, tools)


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    config, number, is_told = _config(name, arguments)
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(config.taskset)
    if not is_told and not taskset.INFINITE:
        number = None
    tasks = itertools.islice(taskset, number)
    found = [{COLUMN: task.data.model_dump(mode="json")} for task in tasks]
    if not found:
        raise AdapterError(f"verifiers:{name} has no tasks.")
    return found


class Servers:
    """Runs the servers that verifiers needs for its episodes: its own endpoint, and tools that
    tasks share. All episodes use the same servers, which run while any episode is open."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._running: _Running | None = None

    @asynccontextmanager
    async def for_an_episode(self) -> AsyncIterator[Any]:
        """A context for one episode, in which verifiers' servers run; its value is verifiers'
        environment. Raises the error with which a server failed to start."""
        running = self._running = self._running or _Running(self._config)
        running.num_episodes += 1
        try:
            await asyncio.shield(running.ready)
            yield running.env
        finally:
            running.num_episodes -= 1
            if not running.num_episodes:
                if self._running is running:
                    self._running = None
                await running.stop()


class _Running:
    """One period in which verifiers' servers run, from the first open episode to the last. They are
    started and stopped in a single task, as verifiers requires."""

    def __init__(self, config: Any) -> None:
        from verifiers.v1.utils.loaders import load_environment

        self.env: Any = load_environment(config)
        self.num_episodes = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task = asyncio.ensure_future(self._serve())

    async def stop(self) -> None:
        self._over.set()
        if not self.ready.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self) -> None:
        try:
            async with self.env.serving():
                self.ready.set_result(None)
                await self._over.wait()
        except Exception as error:  # for the episodes that wait for it
            if self.ready.done():
                raise
            self.ready.set_exception(error)


class VerifiersEnvironment:
    """One episode of verifiers. All of its methods are called in one event loop."""

    deterministic = False

    def __init__(self, servers: Servers, tools: tuple[ToolSchema, ...] = ()) -> None:
        self.tools = tools
        self._servers = servers
        self._client: PolicyClient | None = None
        self._episode: asyncio.Task[Any] | None = None
        self._answer: asyncio.Future[Message] | None = None
        self._seen: list[dict[str, Any]] = []

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        from rollpacker.integrations.environments.verifiers_policy import PolicyClient

        if COLUMN not in row:
            raise AdapterError(
                f"the row has no column {COLUMN}: rows of verifiers come from its own taskset."
            )
        self._client = PolicyClient()
        self._episode = asyncio.ensure_future(self._play(row[COLUMN]))
        messages, _, is_over = await self._until_called()
        if is_over:
            raise RuntimeError("verifiers ended the episode before the model's first turn")
        return messages

    async def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        assert self._answer is not None, "reset begins an episode"
        self._answer.set_result(message)
        return await self._until_called()

    async def close(self) -> None:
        """Give up the episode. Its servers and processes have ended when this returns."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)

    async def _play(self, data: Mapping[str, Any]) -> Any:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        address = f"http://policy.invalid/{id(self)}/v1"  # nobody's: whose client is taken
        config = EvalClientConfig(base_url=address, api_key_var="NONE")
        async with self._servers.for_an_episode() as env:
            task_class = type(env.taskset).task_type()
            task = task_class(task_class.data_type().model_validate(data), env.taskset.config.task)
            clients = env._interception.clients
            clients[config.model_dump_json()] = self._client
            try:
                return await env.run_episode(task, ModelContext(model="policy", client=config))
            finally:
                del clients[config.model_dump_json()]

    async def _until_called(self) -> tuple[Sequence[Message], float | None, bool]:
        """Wait until verifiers calls the model again or the episode is over, and return the result
        of `step`: new messages, the reward or None, and whether the episode is over."""
        assert self._episode is not None and self._client is not None
        called = self._client.called
        await asyncio.wait({called, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if not called.done():
            return [], _reward_of(self._episode.result()), True
        call = called.result()
        self._client.called = asyncio.get_running_loop().create_future()
        self._answer, self.tools = call.answer, call.tools
        return self._what_is_new(call.messages), None, False

    def _what_is_new(self, messages: list[dict[str, Any]]) -> list[Message]:
        """The messages that verifiers added to the dialogue after the model's last message. Raises
        `RuntimeError` if it changed an earlier message."""
        number = len(self._seen)
        behind = number + 1 if number else 0  # the model's own message, which its caller has
        is_extended = messages[:number] == self._seen and (
            not number or (len(messages) > behind and messages[number]["role"] == "assistant")
        )
        if not is_extended:
            raise RuntimeError(
                "verifiers called the model with a dialogue that does not go on from the last one:"
                " the environment rewrites what was said, or holds several dialogues"
            )
        self._seen = messages
        return [dict(message) for message in messages[behind:]]


def _tools_of(config: Any, name: str) -> tuple[ToolSchema, ...]:
    """The schemas of the tools to show to the model. Verifiers knows them only when a tool's server
    runs, so an episode of the first task is begun and given up. This is done in a thread, since the
    caller may have an event loop, and not at all if there are no tools."""
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(config.taskset)
    of_tasks = type(taskset).task_type().toolsets(taskset.config.task)
    if not of_tasks and not taskset.toolsets(taskset.config):
        return ()

    task = next(iter(taskset), None)
    if task is None:
        raise AdapterError(f"{name} has no tasks.")

    async def begin() -> tuple[ToolSchema, ...]:
        environment = VerifiersEnvironment(Servers(config))
        try:
            await environment.reset({COLUMN: task.data.model_dump(mode="json")})
            return environment.tools
        finally:
            await environment.close()

    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(asyncio.run, begin()).result()
        except Exception as error:  # whatever a third party's tools need and do not find
            raise AdapterError(f"{name}: its tools cannot be started: {error}") from None


def _reward_of(episode: Any) -> float:
    """The reward of an episode of verifiers. Raises `RuntimeError` if the episode failed, since a
    failure must not count as a reward of zero."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        said = f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason is given"
        raise RuntimeError(f"the episode failed in verifiers: {said}")
    return float(episode.traces[-1].reward)


def _config(name: str, arguments: dict[str, Any]) -> tuple[Any, int | None, bool]:
    """Return the config of verifiers' environment, the number of rows (None: as many as there are
    tasks), and whether the arguments set that number."""
    require("verifiers", extra="verifiers", what="an environment of verifiers")
    if not (found := version("verifiers")).startswith("0.4."):
        raise AdapterError(
            f"verifiers {found} has another interface than 0.4: pip install 'rollpacker[verifiers]'"
        )
    own = OwnArguments(f"verifiers:{name}", arguments)
    is_told = "num_rows" in arguments
    number, paired = own.take_num_rows(), own.take("env", "", str)
    return _resolved(name, paired, arguments), number, is_told


def _resolved(name: str, paired: str, arguments: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, resolve_env_config

    from rollpacker.integrations.environments.verifiers_policy import HARNESS_ID

    try:
        taskset = {**arguments, "id": name}
        roles = list(agent_config_fields(env_config_type(name, paired)(id=paired)))
        if len(roles) != 1:
            raise AdapterError(
                f"verifiers:{name} has the roles {', '.join(roles)}; a run trains one."
            )
        role = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}}
        return resolve_env_config(
            {"id": paired, "taskset": taskset, "interception": {"type": "server"}, roles[0]: role}
        )
    except ModuleNotFoundError as error:
        from verifiers.v1 import tasksets

        known = [one.name for one in pkgutil.iter_modules(tasksets.__path__)]
        raise AdapterError(
            f"verifiers has no environment {name}, and no package of that name is installed."
            f"{did_you_mean(name, known)} ({error})"
        ) from None
    except (ImportError, AttributeError, TypeError) as error:
        raise AdapterError(f"verifiers:{name} cannot be had: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AdapterError(f"verifiers:{name}: {where}: {first['msg']}") from None
