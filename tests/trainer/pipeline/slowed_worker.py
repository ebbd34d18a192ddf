"""A process of the trainer in stages that a test makes slow: each op takes a while longer, and a
file says what takes much longer: "link" (messages over direct links) or "stage S"."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollpacker.workers.child import Child
from rollpacker.workers.host import ThisHost
from rollpacker.workers.line import Line

SLOWED = "ROLLPACKER_TEST_SLOWED"
"""The file, for those who are started below."""
OP_S = 0.02
SLOW_OP_S = 0.3
MESSAGE_S = 0.5


class SlowedHost(ThisHost):
    """This machine, whose workers are those of this module."""

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Child, Line]:
        assert module == "rollpacker.trainer.worker"
        return super().start(__name__, name, guarded=guarded, environment=environment)


def _slow_down() -> None:
    from rollpacker.pipeline.links.direct_link import DirectSender
    from rollpacker.pipeline.stages import connect, passes
    from tests.trainer.pipeline.injected import Delay, InjectedSender

    file = Path(os.environ[SLOWED])

    class SlowedSender(InjectedSender):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(DirectSender(*args, **kwargs), Delay())

        def send(self, *args: Any, **kwargs: Any) -> None:
            self.delay = Delay(latency_s=MESSAGE_S if file.read_text() == "link" else 0.0)
            super().send(*args, **kwargs)

    def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            is_slow = file.read_text() == f"stage {self._place.index}"
            time.sleep(SLOW_OP_S if is_slow else OP_S)
            return method(self, *args)

        return run

    connect.DirectSender = SlowedSender  # type: ignore[assignment, misc]
    for name in ("forward", "backward", "weights"):
        setattr(passes._Training, name, slowed(getattr(passes._Training, name)))


if __name__ == "__main__":
    from rollpacker.trainer import worker

    _slow_down()
    worker.main()
