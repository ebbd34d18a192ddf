"""The search for settings that make a step fast without training on shorter responses than allowed.

It tries ideas that can be switched on one by one (`plan_ideas.py`), and factors by which a round
launches more prompts and samples than it needs, in stages that drop the slower candidates:

    each idea alone  ->  all ideas that may help together, with each factor of a grid  ->  the
        better candidates and their neighbours, in which a factor is moved  ->  neighbours that lack
        one idea, as long as they are no slower  ->  finalists on fresh seeds  ->  the best
        candidate's neighbours that lack one idea: what each idea is worth

Candidates (settings) are compared on the same seeds, so that they differ by decisions alone and the
uncertainty is that of the paired difference. What is compared is the *long-run* step time (or
what a step costs, `plan_shared.py`): the mean of each kind of round, weighted by that kind's share
of rounds. This share is known exactly, but a dozen steps hold too many or too few long rounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass

from rollpacker.sim.plan_ideas import (
    FACTORS,
    OFF,
    Base,
    Candidate,
    Evaluate,
    Idea,
    factor_grid,
    neighbours,
)
from rollpacker.sim.plan_result import (
    MIN_GAIN,
    Bound,
    Finding,
    Measure,
    Plan,
    Reason,
    choose,
    finding,
    measure,
    round_shares,
    total_s,
)
from rollpacker.sim.plan_workers import interrupt_held, work, workers
from rollpacker.sim.result import SystemResult

Progress = Callable[[str, int, int, float], None]
"""Function that is called with the name of a stage of the search, the number of its simulations
that are done, the number of all its simulations, and about which share of all stages is done."""


MAX_LOSS = 0.01
"""Share by which an idea, added alone, may lengthen a step and still be tried with others."""
SCREEN_SLACK = 0.02
"""Amount by which a length shift (mean trained length over the policy's own, minus 1) may exceed
its bound in the early stages of a search, which simulate few steps."""
FINAL_MARGIN = 0.002
"""Amount by which a finalist's length shift (see `SCREEN_SLACK`) must stay within its bound."""
MOST_DONE = 0.99
"""Largest share of a plan's work that is reported as done before the plan has ended."""
FINAL_SEED = 1000
"""First seed of the finalists' simulations, which the search before has not used."""
MAX_STRETCH = 4
"""Largest factor by which a simulation is made longer, so that every kind of round occurs."""
WARM_STEPS = 8
"""Number of steps at the beginning of a simulation that do not count where unfinished prompts wait
in a pool, because the pool is empty at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many settings, seeds and steps a search for fast settings simulates."""

    fine: bool
    """Whether the search tries more values of the factors of tail batching (how many more prompts
    and samples a round launches than it needs)."""
    screen_steps: int
    """Number of steps of each simulation that first tries an idea, or factors of tail batching."""
    kept: int
    """Most candidates (settings to compare) that pass one stage of the search."""
    second_steps: int
    """Number of steps of each simulation of the better candidates, and of others close to them."""
    finalists: int
    seeds: int
    """Number of seeds with which each finalist (one of the best settings found) is simulated."""
    steps: int
    """Number of steps that each simulation of a finalist has; more if long rounds are rare."""


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


def expected_steps(base: Base, budget: Budget) -> int:
    """About how many steps a plan will simulate. The exact number depends on which ideas help."""
    warm = WARM_STEPS if base.order_only else 0
    grid = factor_grid(base, fine=budget.fine)
    num_slots = len({idea.slot for idea in base.ideas})
    middle = next((idea for idea in grid[len(grid) // 2 :] if idea is not OFF), OFF)
    num_near = len(neighbours(base, Candidate(ideas=(middle,)))) * (2 if budget.fine else 1)
    screened = len(base.ideas) + len(grid) + 2
    # The better factors and their neighbours, those of the best of them, and without each slot.
    seconds = 1 + budget.kept + num_near + num_near // 2 + num_slots
    finals = 3 + budget.finalists + num_slots
    return (
        screened * (budget.screen_steps + warm)
        + seconds * (budget.second_steps + warm)
        + finals * budget.seeds * (budget.steps + warm)
    )


def plan(
    base: Base,
    evaluate: Evaluate,
    *,
    budget: Budget,
    max_shift: float | None = None,
    jobs: int = 1,
    progress: Progress = lambda stage, done, total, share: None,
) -> Plan:
    """Search for the settings with the shortest step and return the plan. `max_shift`: share by
    which trained responses may be shorter than the policy's own; None: as much as with the settings
    of `base`. With `tail_batching.debias` any share is allowed, since samples' weights undo it.

    The result does not depend on `jobs`, the number of processes that simulate. Raises `ValueError`
    for a `max_shift` outside of [0, 1).
    """
    if max_shift is not None and not 0 <= max_shift < 1:
        raise ValueError(f"--max-shift must be at least 0 and less than 1, not {max_shift}")
    with workers(evaluate, jobs) as pool:
        share_of = expected_steps(base, budget)
        search = _Search(_Simulations(base, evaluate, pool, progress, share_of), budget, max_shift)
        try:
            return search.run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; {search.so_far()}") from None


def compare(
    base: Base,
    evaluate: Evaluate,
    candidates: Sequence[Candidate],
    *,
    seeds: Sequence[int],
    steps: int,
    jobs: int = 1,
) -> list[Finding]:
    """Simulate these candidates on the same seeds (each added to the base's own seed) and return a
    `Finding` (result) for each, compared with the first. More than `steps` steps are simulated
    where some kind of round would not occur otherwise."""
    with workers(evaluate, jobs) as pool:
        simulations = _Simulations(base, evaluate, pool, lambda *of: None, 1)
        return simulations.compare(candidates, seeds, steps, "comparison")


class _Search:
    def __init__(self, simulations: _Simulations, budget: Budget, max_shift: float | None) -> None:
        self._simulations = simulations
        self._base = simulations.base
        self._budget = budget
        self._max_shift = max_shift
        self._fastest_so_far: Finding | None = None

    def run(self) -> Plan:
        budget, base = self._budget, self._base
        alone = self._try_alone()
        finalists = self._search(_together(alone, base))
        seeds = range(FINAL_SEED, FINAL_SEED + budget.seeds)
        now, untailed, found = self._finals(finalists, seeds)
        bound = self._bound(now)
        kept = [f for f in found if self._keeps_at_ends(f, bound, seeds)]
        shift = base.measured_shift
        keeps = bound.keeps(now.shift if shift is None else shift)
        best, refused = choose(now, kept, current_keeps=keeps, trust=base.trust)
        if best is now and not keeps:
            best = untailed  # nothing else keeps the lengths
        oracle = None
        if base.oracle is not None:
            steps = math.ceil(budget.steps / base.oracle_period) * base.oracle_period
            pair = [Candidate(), base.oracle]
            oracle = self._simulations.compare(pair, seeds, steps, "oracle")[1]
        taken = {idea.slot: idea.name for idea in best.candidate.ideas}
        return Plan(
            base=base,
            current=now,
            best=best,
            ranked=tuple(kept),
            too_short=tuple(f for f in found if f not in kept),
            reasons=() if best in (now, untailed) else self._reasons(best, seeds),
            rejected=tuple((i, s) for i, s in alone if i.name != taken.get(i.slot)),
            oracle=oracle,
            max_shift=bound.most,
            untailed=untailed,
            refused=refused,
            num_seeds=budget.seeds,
            num_steps=budget.steps,
            num_simulated=self._simulations.num_steps,
        )

    def so_far(self) -> str:
        """Words on the fastest settings found so far, for the message of an interrupted search."""
        best = self._fastest_so_far
        if best is None or best.saved_s <= 0:
            return "nothing faster was found so far"
        share = best.saved_s / (best.cost_s + best.saved_s)
        changes = " ".join(f"{key}={json.dumps(v)}" for key, v in best.candidate.changes.items())
        return f"fastest so far, by {share:.1%} in few steps, nothing confirmed: {changes}"

    def _try_alone(self) -> list[tuple[Idea, float]]:
        """Every idea with the share of a step's time that it saves if added alone to the current
        settings, largest first; negative if it costs time."""
        ideas, steps = self._base.ideas, self._budget.screen_steps
        candidates = [Candidate(), *(Candidate(ideas=(idea,)) for idea in ideas)]
        now, *found = self._simulations.compare(candidates, range(1), steps, "ideas alone")
        saved = zip(ideas, (one.saved_s / now.cost_s for one in found), strict=True)
        return sorted(saved, key=lambda item: -item[1])

    def _search(self, together: Candidate) -> list[Candidate]:
        """Returns the fastest candidates whose trained lengths are near enough to the policy's own.
        They differ in the factors of tail batching only, and have the other ideas of the fastest
        one. `together` has all ideas that may help."""
        budget = self._budget
        grid = factor_grid(self._base, fine=budget.fine)
        tried = [together, *(together.with_idea(idea) for idea in grid)]
        kept = self._fastest(tried, budget.screen_steps, "factors", SCREEN_SLACK)
        for stage, slack in (("closer", SCREEN_SLACK / 4), ("closest", -FINAL_MARGIN)):
            near = [
                best.with_idea(idea)
                for best in kept[: 2 if budget.fine else 1]
                for idea in neighbours(self._base, best)
            ]
            kept = self._fastest([*kept, *near], budget.second_steps, stage, slack) or kept
        while kept:
            best = kept[0]
            fewer = [best.without(idea) for idea in best.ideas if idea.slot != FACTORS]
            found = self._fastest(
                [best, *fewer], budget.second_steps, "leave one out", -FINAL_MARGIN
            )
            if not found or found[0] == best:
                break
            kept = [found[0], *kept[1:]]
        return _with_ideas_of_the_first(kept)

    def _fastest(
        self, tried: list[Candidate], steps: int, stage: str, slack: float
    ) -> list[Candidate]:
        """Returns the fastest of the candidates `tried` (at most `Budget.kept`), fastest first,
        whose trained lengths differ from the policy's by at most the bound plus `slack`. To drop
        ideas that gain little, each idea of a candidate adds the share `MIN_GAIN` to its time."""
        # Of several candidates with the same changes, the one with the fewest ideas is kept.
        by_ideas = sorted(tried, key=lambda candidate: -candidate.num_switches)
        distinct = {candidate.key: candidate for candidate in by_ideas}.values()
        seen = [c for c in distinct if self._simulations.sees_all(c, steps)]
        now, *found = self._simulations.compare([Candidate(), *seen], range(1), steps, stage)
        bound = self._bound(now)
        fit = [f for f in found if bound.keeps(f.shift, f.shift_error, slack)]
        fit.sort(key=lambda f: f.cost_s * (1 + MIN_GAIN) ** f.candidate.num_switches)
        self._fastest_so_far = fit[0] if fit else self._fastest_so_far
        return [f.candidate for f in fit[: self._budget.kept]]

    def _finals(
        self, finalists: Sequence[Candidate], seeds: Sequence[int]
    ) -> tuple[Finding, Finding, list[Finding]]:
        """Returns findings (results of settings) on seeds that the search has not used: of the
        current settings, of the first finalist without tail batching, and of the finalists, fastest
        first. Finalists come in groups of `Budget.finalists` until one keeps the bound on
        lengths."""
        num, steps = self._budget.finalists, self._budget.steps
        first = finalists[0] if finalists else Candidate()
        found = list[Finding]()
        for start in range(0, max(len(finalists), 1), num):
            tried = [Candidate(), first.with_idea(OFF), *finalists[start : start + num]]
            now, untailed, *some = self._simulations.compare(tried, seeds, steps, "finalists")
            found += some
            bound = self._bound(now)
            if any(bound.keeps(f.shift, f.shift_error) for f in some):
                break
        return now, untailed, sorted(found, key=lambda f: f.cost_s)

    def _keeps_at_ends(self, found: Finding, bound: Bound, seeds: Sequence[int]) -> bool:
        """Whether the candidate's trained lengths are near enough to the policy's own, also if kept
        tokens change as seldom or as often as `Base.mismatch_band` allows."""
        ends = [
            Idea(f"mismatch {rate:g}", "mismatch", {"carry.mismatch": rate})
            for rate in self._base.mismatch_band
        ]
        candidates = [Candidate(), *(found.candidate.with_idea(end) for end in ends)]
        if not bound.keeps(found.shift, found.shift_error):
            return False
        at_ends = self._simulations.compare(candidates, seeds, self._budget.steps, "mismatch band")[
            1:
        ]
        return all(bound.keeps(end.shift, end.shift_error) for end in at_ends)

    def _reasons(self, best: Finding, seeds: Sequence[int]) -> tuple[Reason, ...]:
        """What each idea of the best settings saves: the seconds lost without this idea alone."""
        ideas = best.candidate.ideas
        tried = [best.candidate, *(best.candidate.without(idea) for idea in ideas)]
        found = self._simulations.compare(tried, seeds, self._budget.steps, "reasons")[1:]
        return tuple(
            Reason(
                idea=idea,
                left_out_s=-without.saved_s,
                left_out_error_s=without.saved_error_s,
                left_out_shift=without.shift,
            )
            for idea, without in zip(ideas, found, strict=True)
        )

    def _bound(self, now: Finding) -> Bound:
        """The bound on the length shift (mean trained length over the policy's own, minus 1).
        Without a `max_shift` it is the shift of `now`, the current settings on the same seeds."""
        tail, most = self._base.tail_batching, self._max_shift
        if tail.debias != "none":
            return Bound(most=None, both_ways=self._base.order_only)
        if most is None and self._base.order_only:
            most = tail.max_length_shift or 0.0
        elif most is None:
            most = max(-now.shift, 0.0)
        return Bound(most=most, both_ways=self._base.order_only)


class _Simulations:
    """Simulates candidates (settings to compare), none twice for the same seed and steps."""

    def __init__(
        self,
        base: Base,
        evaluate: Evaluate,
        workers: Executor | None,
        progress: Progress,
        num_expected: int,
    ) -> None:
        self.base = base
        self.num_steps = 0
        """Number of steps simulated so far, in all simulations together."""
        self._evaluate = evaluate
        self._workers = workers
        self._progress = progress
        self._num_expected = num_expected
        self._known: dict[tuple[str, int, int], Measure] = {}

    def compare(
        self, candidates: Sequence[Candidate], seeds: Sequence[int], steps: int, stage: str
    ) -> list[Finding]:
        """Simulate all candidates on the same seeds and return a `Finding` (result) for each,
        compared with the first."""
        base, prices = self.base, self.base.prices
        keys = [
            [(c.key, base.seed + seed, self._num_steps(c, steps)) for seed in seeds]
            for c in candidates
        ]
        # One seed after the other: what a seed draws is kept (`Workload.of`).
        by_seed = [
            (of_one[place], candidate)
            for place in range(len(seeds))
            for of_one, candidate in zip(keys, candidates, strict=True)
        ]
        missing = {key: candidate for key, candidate in by_seed if key not in self._known}
        self._say(stage, 0, len(missing))
        for done, (key, result) in enumerate(self._simulate(missing), start=1):
            self._known[key] = measure(
                result,
                self._shares(missing[key]),
                num_warm=self._num_warm(missing[key]),
                paired=base.order_only,
                cost_s=total_s if prices is None else prices.busy_s,
            )
            self.num_steps += key[2]
            self._say(stage, done, len(missing))
        rows = [[self._known[key] for key in of_one] for of_one in keys]
        return [finding(c, row, rows[0]) for c, row in zip(candidates, rows, strict=True)]

    def sees_all(self, candidate: Candidate, steps: int) -> bool:
        """Whether every kind of round of this candidate occurs in `MAX_STRETCH * steps` steps."""
        return self._least_steps(candidate) <= MAX_STRETCH * steps

    def _say(self, stage: str, done: int, total: int) -> None:
        self._progress(stage, done, total, min(self.num_steps / self._num_expected, MOST_DONE))

    def _num_steps(self, candidate: Candidate, steps: int) -> int:
        """Number of steps to simulate: `steps`, or more so that every kind of round occurs, plus
        the steps at the beginning that results leave out."""
        return max(steps, self._least_steps(candidate)) + self._num_warm(candidate)

    def _num_warm(self, candidate: Candidate) -> int:
        return WARM_STEPS if self.base.tail_of(candidate).pooled else 0

    def _least_steps(self, candidate: Candidate) -> int:
        return math.ceil(1 / min((self._shares(candidate) or {"": 1.0}).values())) + 2

    def _shares(self, candidate: Candidate) -> dict[str, float] | None:
        return round_shares(self.base.tail_of(candidate), self.base.prompts_per_step)

    def _simulate(
        self, missing: Mapping[tuple[str, int, int], Candidate]
    ) -> Iterator[tuple[tuple[str, int, int], SystemResult]]:
        if self._workers is None:
            for key, candidate in missing.items():
                yield key, self._evaluate(candidate, key[1], key[2])
            return
        with interrupt_held():  # the first tasks start the processes
            tasks = {
                self._workers.submit(work, candidate, key[1], key[2]): key
                for key, candidate in missing.items()
            }
        try:
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        finally:
            for task in tasks:
                task.cancel()


def _together(alone: Sequence[tuple[Idea, float]], base: Base) -> Candidate:
    """A candidate of all ideas that may help, but only the best of each slot (ideas that exclude
    one another). `alone`: each idea and the share of a step's time that it saves, best first."""
    best: dict[str, Idea] = {}
    for idea, saved in alone:
        if saved > -MAX_LOSS:
            best.setdefault(idea.slot, idea)
    return Candidate(ideas=tuple(idea for idea in base.ideas if best.get(idea.slot) is idea))


def _with_ideas_of_the_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the first one's ideas, except that each keeps its own factors of tail
    batching. Candidates that are then equal come once."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        own = [idea for idea in candidate.ideas if idea.slot == FACTORS]
        first = [idea for idea in candidates[0].ideas if idea.slot != FACTORS]
        made = Candidate(ideas=(*first, *own))
        found.setdefault(made.key, made)
    return list(found.values())
