"""The corpus: programs that try to get out of the sandbox, to get more than their share, or to do
harm to whoever runs them. One module per class. They are for sandboxes only."""

from tests.sandbox.attacks import (
    floods,
    interpreter,
    kernel,
    later,
    network,
    processes,
    resources,
    secrets,
    writes,
)
from tests.sandbox.attacks.record import Attack

CLASSES: dict[str, tuple[Attack, ...]] = {
    "secrets": secrets.ATTACKS,
    "writes": writes.ATTACKS,
    "network": network.ATTACKS,
    "processes": processes.ATTACKS,
    "kernel": kernel.ATTACKS,
    "resources": resources.ATTACKS,
    "floods": floods.ATTACKS,
    "interpreter": interpreter.ATTACKS,
    "later": later.ATTACKS,
}
ATTACKS = tuple(attack for attacks in CLASSES.values() for attack in attacks)
assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
