"""OpenEnv's own server with a guessing game, on this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    """A number from 0 to 7, which is the seed's."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, offset=0, **_) -> Hint:
        self._number = (seed + offset) % 8
        return Hint(hint="Guess.")

    def step(self, action: Guess, timeout_s=None, **_) -> Hint:
        if action.guess == self._number:
            return Hint(hint="Yes.", reward=1.0, done=True)
        hint = "lower" if action.guess > self._number else "higher"
        return Hint(hint=hint, reward=-0.25)

    @property
    def state(self) -> State:
        return State()


@contextmanager
def serving() -> Iterator[str]:
    """Its address."""
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=16)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
