from types import SimpleNamespace

import pytest
import torch

from tests.engines.tiny import SECOND_RUNNER

if SECOND_RUNNER:
    # vLLM takes Triton for usable on a CPU if it has a backend of that name.
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
