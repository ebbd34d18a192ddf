"""Planning for a recorded run, whose final simulations are those of `simulate --from`. The search
simulates a few steps with the prompts in a random order, which is enough to rank settings. The
final simulations have the run's number of steps and its order of prompts, since lengths drift, and
early steps also pay for the first calls of the rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollpacker.config.schema import RunConfig
from rollpacker.sim.plan import FINAL_SEED, Budget
from rollpacker.sim.plan_ideas import Base, Candidate, changed, plan_base_of_run
from rollpacker.sim.result import SystemResult
from rollpacker.sim.whatif import RunModel, asked_steps

MAX_FINAL_STEPS = 250
"""Most steps of a final simulation. Of a longer run only every second, third, ... row is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvaluate:
    """Simulates a recorded run with changed settings (a candidate's); an `Evaluate`."""

    model: RunModel
    config: RunConfig

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult:
        config = changed(self.config, candidate.changes)
        if seed < FINAL_SEED:
            # Never the seed 0: a few steps in random order shall stand for the whole run.
            return self.model.simulate_config(config, seed=seed + 1, steps=steps)
        mixed = self.model.simulate_config(config, seed=seed + 1, steps=steps)
        ordered = self.model.simulate_config(
            config,
            seed=seed - FINAL_SEED,
            steps=steps,
            in_order=True,
            every=-(-self._num_steps // MAX_FINAL_STEPS),
        )
        # The paired shift is of mixed rows: where lengths drift, who is trained on when has more
        # to do with chance.
        return replace(
            ordered,
            trained_length_mean=mixed.trained_length_mean,
            own_length_mean=mixed.own_length_mean,
        )

    @property
    def _num_steps(self) -> int:
        return asked_steps(self.model, self.config) or self.model.fitted.num_steps

    def budget(self, budget: Budget) -> Budget:
        """The search's budget, but with as many steps in each final simulation as the run had."""
        return replace(budget, steps=min(self._num_steps, MAX_FINAL_STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class AsMeasured:
    """Two results of a recorded run with its own settings: the measured one and a simulated one."""

    measured: SystemResult
    simulated: SystemResult
    """Result of simulating the run with its own settings, even if the plan starts from others."""

    @property
    def offset(self) -> float:
        """Mean seconds of a simulated step over the mean of a measured step, minus 1."""
        return self.simulated.mean["total_s"] / self.measured.mean["total_s"] - 1


def as_measured(model: RunModel) -> AsMeasured:
    """Returns the run's result from its event log, and the result of simulating it for as many
    steps, at most `MAX_FINAL_STEPS`."""
    own = RunEvaluate(model=model, config=model.config)
    steps = min(model.fitted.num_steps, MAX_FINAL_STEPS)
    simulated = own(Candidate(), FINAL_SEED, steps)
    return AsMeasured(measured=model.measured(), simulated=simulated)


def measured_base(config: RunConfig, model: RunModel, real: AsMeasured) -> Base:
    """The `Base` (starting point) of a search for better settings of a recorded run, with two
    measured numbers: `trust`, and, if `config` is the run's own, `measured_shift`."""
    return replace(
        plan_base_of_run(config, model),
        trust=abs(real.offset),
        measured_shift=real.measured.length_shift if config == model.config else None,
    )
