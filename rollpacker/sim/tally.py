"""Counts of a simulated run: the seconds of every step, and idle device-seconds by cause. Time goes
from left to right, with a step's stages below the moments at which the tally is called:

    committed     launch       engines empty   (launch ...)    train on   trained   committed
        |--- sync ---|---- rollout ---|-- reward wait --|--- ... ---|-- train --|--- sync ---|

A report made from the event log gives the same numbers, which a test checks. They are counted here
all the same, since a simulation that keeps what a report needs takes 1.4 times as long
(`benchmarks/sim_speed.py --history`).

A step that dynamic sampling fills up has several rollouts. A step that trains on nothing is not
counted: its time belongs to the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.report.turn_book import ENVIRONMENT
from rollpacker.sim.result import (
    BUBBLE_CAUSES,
    OTHER_POOL,
    PIPELINE,
    StepResult,
    SystemResult,
)
from rollpacker.sim.workload import Workload


class Tally:
    """Counts the seconds of steps and idle time. Engines, rewards and trainer of the simulation
    call its methods as things happen, in order of time."""

    def __init__(self, gpus: int, workload: Workload, train_gpus: int = 0) -> None:
        """`train_gpus`: devices that only train, while the `gpus` ones only generate. 0: these do
        both."""
        self.steps: list[StepResult] = []
        self.bubble = dict.fromkeys(BUBBLE_CAUSES, 0.0)
        """Mapping from cause to idle device-seconds so far."""
        self._gpus, self._train_gpus = gpus, train_gpus
        self._workload = workload
        self._num_tail_trained = 0
        self._tokens_redrawn = self._own_tokens = 0
        self.step = OpenStep(began_s=0.0)
        """The step that is not committed yet. The simulated engines add to it the tokens and
        preemptions of each response that they end."""

    # -- what the ports tell -----------------------------------------------------------

    def rollout_begins(self, now_s: float, kind: str, tensor_parallel: int) -> None:
        """Count the wait until samples of a round of this `kind` are launched on empty engines."""
        step = self.step
        step.kind, step.tensor_parallel = kind, tensor_parallel
        if step.empty_since_s is None:
            self.bubble["sync"] += (now_s - step.began_s) * self._gpus
        else:
            self._waited(now_s)
            step.rollout_from_s = now_s

    def rollout_ends(self, now_s: float) -> None:
        """Count the rollout's seconds, now that the last engine with samples is empty."""
        step = self.step
        step.rollout_s += now_s - step.rollout_from_s
        step.empty_since_s = now_s

    def environments_waited(self, device_s: float) -> None:
        """Count `device_s` device-seconds in which engines idled while environments answered."""
        self.bubble[ENVIRONMENT] = self.bubble.get(ENVIRONMENT, 0.0) + device_s

    def rollout_goes_on(self, now_s: float) -> None:
        """Continue the rollout. The time since its last end counts as a wait for environments."""
        step = self.step
        assert step.empty_since_s is not None
        waited_s = now_s - step.empty_since_s
        step.rollout_s += waited_s
        step.rollout_from_s = step.empty_since_s = now_s
        self.environments_waited(waited_s * self._gpus)

    def streamed(self, num_samples: int) -> None:
        """Count samples whose gradients begin while other samples are still generated."""
        self.step.num_streamed += num_samples

    def training_begins(self, now_s: float, lengths: Sequence[int], own_tokens: int) -> None:
        """Count the wait for verdicts, and the responses (of these lengths) that training begins
        on. `own_tokens`: their sum if none had been left out and no weights had changed."""
        self._waited(now_s)
        step, p95 = self.step, self._workload.policy_length_p95
        step.train_on_s = now_s
        step.num_trained, step.tokens_trained = len(lengths), sum(lengths)
        step.max_trained = max(lengths, default=0)
        self._own_tokens += own_tokens
        self._num_tail_trained += sum(length > p95 for length in lengths)

    def pipeline_waited(self, device_s: float) -> None:
        """Count `device_s` device-seconds in which pipeline stages of the trainer were idle."""
        self.bubble[PIPELINE] = self.bubble.get(PIPELINE, 0.0) + device_s

    def trained(self, now_s: float) -> None:
        self.step.trained_s = now_s

    def committed(self, end_s: float) -> bool:
        """Close the step, which is saved at `end_s`. Returns False, and keeps the step open, if it
        had no sample to train on."""
        step = self.step
        if not step.num_trained:
            return False
        self.steps.append(step.result(end_s))
        self._tokens_redrawn += step.tokens_redrawn
        self.bubble["sync"] += (end_s - step.trained_s) * self._gpus
        if self._train_gpus:
            train_s = step.trained_s - step.train_on_s
            idle = train_s * self._gpus + (end_s - step.began_s - train_s) * self._train_gpus
            self.bubble[OTHER_POOL] = self.bubble.get(OTHER_POOL, 0.0) + idle
        self.step = OpenStep(began_s=end_s)
        return True

    def _waited(self, now_s: float) -> None:
        """Count the time since the engines became empty as a wait for verdicts."""
        step = self.step
        assert step.empty_since_s is not None
        waited_s = now_s - step.empty_since_s
        step.reward_s += waited_s
        self.bubble["reward_wait"] += waited_s * self._gpus

    # -- the result --------------------------------------------------------------------

    def result(self, num_releases: int, mismatch: float = 0.0) -> SystemResult:
        """The result of all steps so far, at least one. The arguments are parts of it."""
        steps = self.steps
        num_trained = sum(step.num_trained for step in steps)
        tokens_trained = sum(step.tokens_trained for step in steps)
        return SystemResult(
            steps=tuple(steps),
            tokens_generated=self._tokens_redrawn + sum(step.tokens_generated for step in steps),
            tokens_trained=tokens_trained,
            trained_length_mean=tokens_trained / num_trained,
            policy_length_mean=self._workload.policy_length_mean,
            policy_length_p95=self._workload.policy_length_p95,
            tail_trained_share=self._num_tail_trained / num_trained,
            bubble=dict(self.bubble),
            device_seconds=(self._gpus + self._train_gpus) * sum(step.total_s for step in steps),
            num_releases=num_releases,
            own_length_mean=self._own_tokens / num_trained,
            mismatch=mismatch,
        )


class OpenStep:
    """Counts and times of the step that is not committed yet."""

    def __init__(self, began_s: float) -> None:
        self.kind = ""
        """Kind of the step's latest round, whose degree is `tensor_parallel`; "" before a round."""
        self.tensor_parallel = 1
        self.began_s = self.rollout_from_s = began_s
        self.empty_since_s: float | None = None
        self.rollout_s = 0.0
        self.reward_s = 0.0
        self.train_on_s = 0.0
        self.trained_s = 0.0
        self.preemptions = 0
        self.tokens_generated = 0
        self.tokens_redrawn = 0
        """Tokens generated for responses by the time their ends were refused and drawn again."""
        self.tokens_trained = 0
        self.num_trained = 0
        self.max_trained = 0
        self.num_streamed = 0

    def result(self, end_s: float) -> StepResult:
        return StepResult(
            kind=self.kind,
            rollout_s=self.rollout_s,
            reward_s=self.reward_s,
            train_s=self.trained_s - self.train_on_s,
            sync_s=end_s - self.trained_s,
            total_s=end_s - self.began_s,
            tensor_parallel=self.tensor_parallel,
            preemptions=self.preemptions,
            max_response_tokens=self.max_trained,
            tokens_generated=self.tokens_generated,
            tokens_trained=self.tokens_trained,
            num_trained=self.num_trained,
            num_streamed=self.num_streamed,
        )
