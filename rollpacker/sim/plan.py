"""Which settings make a step fast without training on shorter responses than allowed.

Searched are ideas that can be switched on one by one (`plan_ideas.py`), and the factors of the
races:

    each idea alone  ->  with all that may help: factors, few steps each  ->  the better ones, more
        steps, and their neighbours  ->  ideas that nobody misses left out  ->  finalists, on fresh
        seeds  ->  step by step and leave one out: what each idea is worth

Two settings are always compared on the same seeds, so that they differ by their decisions alone and
the uncertainty is that of the paired difference. What is compared is the *long-run* step time (on
shared pools: `plan_shared.py`), the mean of each kind of round, weighted by how often that kind
comes round. A dozen steps hold too many or too few long rounds by chance; the weights are known
exactly.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed

from rollpacker.sim.plan_effort import BUDGETS as BUDGETS
from rollpacker.sim.plan_effort import WARM_STEPS
from rollpacker.sim.plan_effort import Budget as Budget
from rollpacker.sim.plan_effort import expected_steps as expected_steps
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
"""Called with the stage's name, how many of its simulations are done of how many, and about which
share of all stages is."""


MAX_LOSS = 0.01
"""An idea that lengthens the step by less, tried alone, may still help together with others."""
SCREEN_SLACK = 0.02
"""While few steps are simulated, a length shift may miss the bound by so much; not at the end."""
FINAL_MARGIN = 0.002
"""A finalist's length shift keeps the bound by this much, so that fresh seeds seldom refuse it."""
MOST_DONE = 0.99
"""Of a plan's work, before its end."""
FINAL_SEED = 1000
"""Finalists are compared on seeds that the search has not seen."""


MAX_STRETCH = 4
"""To see one round of the rarest kind, a simulation may be so many times longer than asked for."""


def plan(
    base: Base,
    evaluate: Evaluate,
    *,
    budget: Budget,
    max_shift: float | None = None,
    jobs: int = 1,
    progress: Progress = lambda stage, done, total, share: None,
) -> Plan:
    """Search. `max_shift`: trained responses may be shorter than the policy's own by this share;
    None: by as much as at the current settings. With debias any shift is allowed: the weights undo
    it.

    The result does not depend on `jobs`, the processes that simulate.
    """
    if max_shift is not None and not 0 <= max_shift < 1:
        raise ValueError(f"--max-shift must be at least 0 and less than 1, not {max_shift}")
    with workers(evaluate, jobs) as pool:
        search = _Search(base, evaluate, budget, max_shift, pool, progress)
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
    progress: Progress = lambda stage, done, total, share: None,
) -> list[Finding]:
    """These candidates on the same seeds (counted from the base's own); savings are against the
    first. More steps are simulated where they are needed to see every kind of round."""
    with workers(evaluate, jobs) as pool:
        search = _Search(base, evaluate, BUDGETS["quick"], None, pool, progress)
        return search.compare(candidates, seeds, steps, "comparison")


class _Search:
    def __init__(
        self,
        base: Base,
        evaluate: Evaluate,
        budget: Budget,
        max_shift: float | None,
        workers: Executor | None,
        progress: Progress,
    ) -> None:
        self._base = base
        self._evaluate = evaluate
        self._budget = budget
        self._wanted_shift = max_shift
        self._bound = -math.inf
        """Least shift allowed, a negative number; on the seeds at hand."""
        self._workers = workers
        self._say = progress
        self._num_expected = expected_steps(base, budget)
        self._known: dict[tuple[str, int, int], Measure] = {}
        self._num_simulated = 0
        self._best_so_far: Finding | None = None

    def run(self) -> Plan:
        budget, base = self._budget, self._base
        alone = self._try_alone()
        finalists = self._choose_factors(_together(alone, base.ideas))
        if finalists:
            needed = {idea.slot for idea in self._simplify(finalists[0]).ideas}
            finalists = [
                Candidate(ideas=tuple(idea for idea in c.ideas if idea.slot in needed | {FACTORS}))
                for c in finalists
            ]
        seeds = range(FINAL_SEED, FINAL_SEED + budget.seeds)
        now, found = self._finals(finalists, seeds)
        without = self._without_tail(finalists, seeds)
        kept = [f for f in found if self._keeps(f) and self._keeps_at_ends(f, seeds)]
        keeps = self._current_keeps(now)
        best, refused = choose(now, kept, current_keeps=keeps, trust=base.trust)
        reasons = tuple[Reason, ...]() if best is now else self._explain(best, seeds)
        if best is now and without is not None and not keeps:
            best = without  # nothing else keeps the lengths
        oracle = None
        if base.oracle is not None:
            steps = math.ceil(budget.steps / base.oracle_period) * base.oracle_period
            oracle = self.compare([Candidate(), base.oracle], seeds, steps, "oracle")[1]
        taken = {idea.slot: idea.name for idea in best.candidate.ideas}
        return Plan(
            current=now,
            best=best,
            ranked=tuple(kept),
            too_short=tuple(f for f in found if f not in kept),
            reasons=reasons,
            rejected=tuple((i, s) for i, s in alone if i.name != taken.get(i.slot)),
            oracle=oracle,
            max_shift=None if math.isinf(self._bound) else -self._bound,
            num_seeds=budget.seeds,
            num_steps=budget.steps,
            num_simulated=self._num_simulated,
            untailed=without,
            has_tail_batching=self._base.tail_of(best.candidate).enabled,
            capped_share=self._base.capped_share,
            order_only=self._base.order_only,
            mismatch=self._base.mismatch,
            refused=refused,
            trust=base.trust,
            measured_shift=base.measured_shift,
            prices=base.prices,
        )

    def so_far(self) -> str:
        """The fastest that was found, for who does not wait for the end."""
        best = self._best_so_far
        if best is None or best.saved_s <= 0:
            return "nothing faster was found so far"
        share = best.saved_s / (best.cost_s + best.saved_s)
        changes = " ".join(f"{key}={json.dumps(v)}" for key, v in best.candidate.changes.items())
        return f"fastest so far, by {share:.1%} in few steps, nothing confirmed: {changes}"

    def _current_keeps(self, now: Finding) -> bool:
        """By what was measured of them, where it was."""
        shift = self._base.measured_shift
        if shift is not None:
            now = dataclasses.replace(now, shift=shift, shift_error=0.0)
        return self._keeps(now)

    def _keeps_at_ends(self, found: Finding, seeds: Sequence[int]) -> bool:
        """Whatever the mismatch is inside its band."""
        ends = [
            Idea(name=f"mismatch {rate:g}", slot="mismatch", changes={"carry.mismatch": rate})
            for rate in self._base.mismatch_band
        ]
        candidates = [Candidate(), *(found.candidate.with_idea(end) for end in ends)]
        at_ends = self.compare(candidates, seeds, self._budget.steps, "mismatch band")[1:]
        return all(map(self._keeps, at_ends))

    def _without_tail(self, finalists: Sequence[Candidate], seeds: Sequence[int]) -> Finding:
        """The first finalist, or the current settings, without tail batching."""
        best = finalists[0] if finalists else Candidate()
        candidates = [Candidate(), best.with_idea(OFF)]
        return self.compare(candidates, seeds, self._budget.steps, "no tail batching")[1]

    def _finals(
        self, finalists: Sequence[Candidate], seeds: Sequence[int]
    ) -> tuple[Finding, list[Finding]]:
        """The current settings and so many finalists on fresh seeds, the fastest first; further
        ones as long as none keeps the bound."""
        budget, found = self._budget, list[Finding]()
        for start in range(0, max(len(finalists), 1), budget.finalists):
            some = finalists[start : start + budget.finalists]
            now, *more = self.compare([Candidate(), *some], seeds, budget.steps, "finalists")
            self._set_bound(now.shift)
            found += more
            if any(self._keeps(f) for f in more):
                break
        return now, sorted(found, key=lambda f: f.cost_s)

    def _try_alone(self) -> list[tuple[Idea, float]]:
        """The share of a step's time that each idea saves by itself, most first."""
        ideas = self._base.ideas
        candidates = [Candidate(), *(Candidate(ideas=(idea,)) for idea in ideas)]
        found = self.compare(candidates, range(1), self._budget.screen_steps, "ideas alone")
        saved = [(f.candidate.ideas[0], f.saved_s / found[0].cost_s) for f in found[1:]]
        return sorted(saved, key=lambda item: -item[1])

    def _choose_factors(self, chosen: Candidate) -> list[Candidate]:
        """The few fastest factors with these switches, by successive halving."""
        budget = self._budget
        grid = factor_grid(self._base, fine=budget.fine)
        tried = [chosen, *(chosen.with_idea(idea) for idea in grid)]
        kept = self._fastest(tried, budget.screen_steps, budget.kept, "factors")
        for stage, slack in (("closer", SCREEN_SLACK / 4), ("closest", -FINAL_MARGIN)):
            around = [
                chosen.with_idea(near)
                for candidate in kept[: 2 if budget.fine else 1]
                for near in neighbours(self._base, candidate)
            ]
            tried = _distinct([*kept, *around])
            kept = self._fastest(tried, budget.second_steps, budget.kept, stage, slack) or kept
        return kept

    def _fastest(
        self,
        tried: list[Candidate],
        steps: int,
        count: int,
        stage: str,
        slack: float = SCREEN_SLACK,
    ) -> list[Candidate]:
        """So many of them that keep the bound within `slack`, the fastest first."""
        seen = [c for c in tried if self._sees_all(c, steps)]
        found = self.compare([Candidate(), *seen], range(1), steps, stage)
        self._set_bound(found[0].shift)
        fit = sorted((f for f in found[1:] if self._keeps(f, slack)), key=lambda f: f.cost_s)
        self._best_so_far = fit[0] if fit else self._best_so_far
        return [f.candidate for f in fit[:count]]

    def _simplify(self, candidate: Candidate) -> Candidate:
        """Without the ideas that nobody misses, one after the other, the last of the list first."""
        order = [*self._base.ideas]
        while True:
            ideas = [idea for idea in candidate.ideas if idea in order]
            without = [candidate.without(idea) for idea in ideas]
            steps = self._budget.second_steps
            found = self.compare(
                [Candidate(), candidate, *without], range(1), steps, "leave one out"
            )
            self._set_bound(found[0].shift)
            most_s = (1 + MIN_GAIN) * found[1].cost_s
            needless = [
                idea
                for idea, left in zip(ideas, found[2:], strict=True)
                if left.cost_s <= most_s and (self._keeps(left) or not self._keeps(found[1]))
            ]
            if not needless:
                return candidate
            candidate = candidate.without(max(needless, key=order.index))

    def _explain(self, best: Finding, seeds: Sequence[int]) -> tuple[Reason, ...]:
        """What every idea of the best setting is worth."""
        steps, ideas = self._budget.steps, best.candidate.ideas
        path = [Candidate(ideas=ideas[:size]) for size in range(len(ideas) + 1)]
        without = [best.candidate.without(idea) for idea in ideas]
        found = self.compare([best.candidate, *path, *without], seeds, steps, "reasons")
        path_s = [f.cost_s for f in found[1 : 1 + len(path)]]
        return tuple(
            Reason(
                idea=idea,
                added_s=path_s[index] - path_s[index + 1],
                left_out_s=-left_out.saved_s,
                left_out_error_s=left_out.saved_error_s,
                left_out_shift=left_out.shift,
            )
            for index, (idea, left_out) in enumerate(
                zip(ideas, found[1 + len(path) :], strict=True)
            )
        )

    def _set_bound(self, current_shift: float) -> None:
        """The bound on the seeds at hand: the current settings' own shift is measured on them."""
        if self._base.tail_batching.debias != "none":
            self._bound = -math.inf
        elif self._wanted_shift is None and self._base.order_only:
            self._bound = -(self._base.tail_batching.max_length_shift or 0.0)
        elif self._wanted_shift is None:
            self._bound = min(current_shift, 0.0)
        else:
            self._bound = -self._wanted_shift

    def _keeps(self, found: Finding, slack: float = 0.0) -> bool:
        """Not by luck alone: the seeds' noise counts against it."""
        shift, error = found.shift, found.shift_error
        if self._base.order_only and shift - error > -self._bound + slack:
            return False
        return shift - error >= self._bound - slack

    # -- simulations -------------------------------------------------------------------

    def compare(
        self, candidates: Sequence[Candidate], seeds: Iterable[int], steps: int, stage: str
    ) -> list[Finding]:
        """All of them on the same seeds; savings are against the first."""
        seeds = [self._base.seed + seed for seed in seeds]
        wanted = {
            (candidate.key, seed, self._num_steps(candidate, steps)): candidate
            for seed in seeds  # one after the other: what they draw is kept (`Workload.of`)
            for candidate in candidates
        }
        missing = {key: c for key, c in wanted.items() if key not in self._known}
        prices = self._base.prices
        self._progress(stage, 0, len(missing))
        for done, (key, result) in enumerate(self._simulate(missing), start=1):
            self._known[key] = measure(
                result,
                self._shares(missing[key]),
                num_warm=self._num_warm(missing[key]),
                paired=self._base.order_only,
                cost_s=total_s if prices is None else prices.busy_s,
            )
            self._num_simulated += key[2]
            self._progress(stage, done, len(missing))
        rows = [
            [self._known[c.key, seed, self._num_steps(c, steps)] for seed in seeds]
            for c in candidates
        ]
        return [finding(c, row, rows[0]) for c, row in zip(candidates, rows, strict=True)]

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._say(stage, done, total, min(self._num_simulated / self._num_expected, MOST_DONE))

    def _num_steps(self, candidate: Candidate, steps: int) -> int:
        """So many, or as many as it takes to see a round of every kind."""
        return max(steps, self._least_steps(candidate)) + self._num_warm(candidate)

    def _num_warm(self, candidate: Candidate) -> int:
        """A pool begins without stragglers: its first rounds do not count."""
        return WARM_STEPS if self._base.tail_of(candidate).pooled else 0

    def _sees_all(self, candidate: Candidate, steps: int) -> bool:
        """No kind of round of this candidate is so rare that it would take too many steps."""
        return self._least_steps(candidate) <= MAX_STRETCH * steps

    def _least_steps(self, candidate: Candidate) -> int:
        return math.ceil(1 / min((self._shares(candidate) or {"": 1.0}).values())) + 2

    def _shares(self, candidate: Candidate) -> dict[str, float] | None:
        return round_shares(self._base.tail_of(candidate), self._base.prompts_per_step)

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


def _together(alone: Iterable[tuple[Idea, float]], order: Sequence[Idea]) -> Candidate:
    """Every idea that may help, the best of each slot, in this order. `alone` has the best ideas
    first."""
    best: dict[str, Idea] = {}
    for idea, saved in alone:
        if saved > -MAX_LOSS:
            best.setdefault(idea.slot, idea)
    return Candidate(ideas=tuple(idea for idea in order if best.get(idea.slot) is idea))


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list({candidate.key: candidate for candidate in candidates}.values())
