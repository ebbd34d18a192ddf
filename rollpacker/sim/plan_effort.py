"""How much a plan simulates, about, before it does: who waits is told how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.sim.plan_ideas import OFF, Base, Candidate, factor_grid, neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is simulated."""

    fine: bool
    """The larger grid of factors."""
    screen_steps: int
    kept: int
    """Factors that pass the screen."""
    second_steps: int
    finalists: int
    seeds: int
    steps: int
    """Of each simulation of a finalist; more if long rounds are rare."""


BUDGETS = {
    "quick": Budget(
        fine=False, screen_steps=15, kept=4, second_steps=25, finalists=2, seeds=3, steps=20
    ),
    "normal": Budget(
        fine=True, screen_steps=20, kept=12, second_steps=40, finalists=4, seeds=4, steps=40
    ),
    "thorough": Budget(
        fine=True, screen_steps=40, kept=24, second_steps=100, finalists=8, seeds=8, steps=100
    ),
}
WARM_STEPS = 8
"""A pool begins without stragglers: its first rounds do not count."""


def expected_steps(base: Base, budget: Budget) -> int:
    """Simulated steps of all of a plan's stages, about: which ideas help, and with them some of the
    stages, comes out on the way."""
    warm = WARM_STEPS if base.order_only else 0
    grid = factor_grid(base, fine=budget.fine)
    num_slots = len({idea.slot for idea in base.ideas}) + 1
    middle = next((idea for idea in grid[len(grid) // 2 :] if idea is not OFF), OFF)
    num_near = len(neighbours(base, Candidate(ideas=(middle,)))) * (2 if budget.fine else 1)
    screened = len(base.ideas) + len(grid) + 2
    # The better factors and their neighbours, those of the best of them, and without each slot.
    seconds = 1 + budget.kept + num_near + num_near // 2 + num_slots
    # The finalists and the current settings, with and without each slot, and the oracle.
    finals = 2 + budget.finalists + num_slots + 1
    return (
        screened * (budget.screen_steps + warm)
        + seconds * (budget.second_steps + warm)
        + finals * budget.seeds * (budget.steps + warm)
    )
