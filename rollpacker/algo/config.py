"""The config of an algorithm. Light: no torch.

An algorithm is a row of switches (`algo.table`); each switch can be set by itself. A switch left at
None takes the value of the algorithm's row when the config is made, so that a saved config shows
what ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from rollpacker.algo.own import (
    Algorithm,
    OwnFunction,
    file_digests,
    own_algorithm,
    own_function,
    reload_changed,
)
from rollpacker.algo.row import (
    Advantage,
    ImportanceRatio,
    KlEstimator,
    KlIn,
    LossAggregation,
    NormalizeMean,
    NormalizeStd,
    Objective,
    Row,
)
from rollpacker.algo.table import ALGORITHMS
from rollpacker.bounds import check_at_least

Name = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "distillation",
]
MismatchCorrection = Literal[
    "none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"
]


Credit = Literal["trajectory", "turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """The algorithm and its switches (`algorithm.*`)."""

    name: Name = "grpo"
    """Name of the algorithm, which is a row of switches. Every switch below that is null takes the
    row's value."""
    function: str | None = None
    """Your own algorithm in place of `name`: `module:function` or `path/to/file.py:function`. The
    function takes no arguments and returns a `rollpacker.algo.Algorithm`, with its own row of
    switches. None: `name` says which."""
    advantage_function: str | None = None
    """Your own advantages, in any algorithm: `path/to/file.py:function` or `module:function`. The
    function turns the rewards of a step into one number per sample, or per token
    (docs/algorithms.md). None: the algorithm's own."""
    loss_function: str | None = None
    """Your own loss in place of `objective`, in any algorithm: `path/to/file.py:function` or
    `module:function`. The function turns log-probs and advantages into one loss per token. None:
    the algorithm's own."""

    # -- from rewards to advantages ----------------------------------------------------
    advantage: Advantage | None = None
    """The source of an advantage: a sample's reward, a critic's estimates (gae), or a teacher's
    log-probs against the policy's. None: as in the algorithm `name`."""
    normalize_mean: NormalizeMean | None = None
    """Number that is subtracted from a reward: the mean of its group, of the other rewards of its
    group, of the step, or 0. None: as in the algorithm `name`."""
    normalize_std: NormalizeStd | None = None
    """Divisor of a reward: the standard deviation of its group or the step, or 1. None: as in the
    algorithm `name`."""
    whiten: bool | None = None
    """Whether to shift and scale the finished advantages of all tokens of the step to mean 0 and
    standard deviation 1. None: as in the algorithm `name`."""
    gamma: float = 1.0
    """Discount from token to token: with a critic, or where responses of a group are not
    compared."""
    gae_lambda: float = 0.95
    """The lambda of generalized advantage estimation (with a critic): at 0 an advantage looks only
    to the critic's value of the next token, at 1 to the rewards up to the response's end."""
    credit: Credit = "trajectory"
    """How trajectories of several turns are rewarded. trajectory: all tokens of a trajectory have
    the same advantage. turn: all tokens of a turn have the advantage of the rewards from that turn
    on. See docs/algorithms.md."""
    turn_discount: float = 1.0
    """With credit=turn: factor per turn by which rewards of later turns count less. 1: all
    alike."""
    overlong_buffer_tokens: int = 0
    """DAPO's soft punishment: a response that reaches into the last so many tokens before the limit
    loses up to `overlong_penalty` of reward, linearly. 0: off."""
    overlong_penalty: float = 1.0
    """Reward that a response loses at the limit of tokens, unless `overlong_buffer_tokens` is 0."""
    mask_truncated: bool = False
    """Whether responses cut off at the limit are left out of the loss and its denominators."""

    # -- the loss ----------------------------------------------------------------------
    objective: Objective | None = None
    """Loss of a token. clipped: PPO's clipped surrogate. cispo: log-prob times the ratio, which is
    cut and detached. None: as in the algorithm `name`."""
    importance_ratio: ImportanceRatio | None = None
    """Probability ratio that the loss uses. token: each token's own. sequence: the geometric mean
    of the ratios of a response (GSPO). sequence-product: their product (RLOO). None: as in the
    algorithm `name`."""
    clip_low: float | None = None
    """The probability ratio is clipped below at 1 - clip_low. None: as in the algorithm `name`."""
    clip_high: float | None = None
    """The probability ratio is clipped above at 1 + clip_high. None: as in the algorithm `name`."""
    clip_dual: float | None = None
    """Dual clip: with a negative advantage, a ratio counts at most this much (above 1). None:
    off."""
    loss_aggregation: LossAggregation | None = None
    """How tokens add up to one loss. token-mean: the mean of all tokens of the step.
    sequence-mean-token-mean: the mean of each response's mean. sequence-mean-token-sum: the mean of
    each response's sum. fixed-length: that sum divided by `fixed_length`. None: as in the algorithm
    `name`."""
    fixed_length: int | None = None
    """Number that each response's sum is divided by with loss_aggregation=fixed-length. None:
    rollout.max_response_tokens."""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """Log-probs in the denominator of the ratio. "recomputed": the trainer's own, under the weights
    that sampled; the ratio is then exactly 1 in a step's first update (train.updates_per_round).
    "rollout": the engine's, so that the ratio also corrects the difference between engine and
    trainer."""
    entropy_coef: float = 0.0
    """Weight of a bonus in the loss for the entropy of the policy. 0: none."""

    # -- the reference model -----------------------------------------------------------
    kl_coef: float = 0.0
    """Weight of the KL penalty against the model that the run started from. 0: no reference model
    is kept."""
    kl_estimator: KlEstimator | None = None
    """Estimate of the KL divergence of a token, with d = log-prob of the policy minus that of the
    reference model: k1 is d, k2 is d²/2, k3 is exp(-d) + d - 1. None: as in the algorithm
    `name`."""
    kl_in: KlIn | None = None
    """Where the KL penalty goes: into each token's loss, or into the reward. None: as in the
    algorithm `name`."""
    kl_bias_correction: bool = False
    """Whether to multiply the KL penalty in the loss by the probability ratio, so that its gradient
    is that of the divergence itself."""

    # -- engine against trainer --------------------------------------------------------
    mismatch_correction: MismatchCorrection = "none"
    """How to correct for engine and trainer giving tokens different probabilities, by the ratio of
    the trainer's to the engine's, of each token or of the whole response (sequence). none: not at
    all. truncate: weigh each token by this ratio, cut at mismatch_min and mismatch_max. mask: weigh
    by it as well, but leave out tokens whose ratio is outside of these bounds."""
    mismatch_max: float = 2.0
    """Upper bound of the ratio in `mismatch_correction`."""
    mismatch_min: float | None = None
    """Lower bound of the ratio in `mismatch_correction`. None: 0."""

    # -- the critic's loss -------------------------------------------------------------
    value_clip: float | None = 0.2
    """How far the critic's new value of a token may be from the value before the step until its
    loss is clipped. None: no clipping."""

    def __post_init__(self) -> None:
        self.reload_own()
        if self.name not in ALGORITHMS:
            raise ValueError(f"name must be one of {', '.join(ALGORITHMS)}, not {self.name}")
        row = self._row
        for switch in fields(Row):
            if getattr(self, switch.name) is None:
                object.__setattr__(self, switch.name, getattr(row, switch.name))
        self._check_own()
        self._check_numbers()
        self._check_advantages()
        self._check_credit()
        self._check_kl(row)
        self._check_loss()

    @property
    def told(self) -> str:
        """A line that describes the algorithm for people: its name, every switch that differs from
        the algorithm's row (its own values), and the user's functions."""
        line = f"algorithm {self.name if self.function is None else self.function}"
        functions = ("advantage_function", "loss_function")
        changed = [f"{name}={getattr(self, name)}" for name in functions if getattr(self, name)]
        changed += [
            f"{name}={_as_written(getattr(self, name))} "
            f"(its row: {_as_written(getattr(self._row, name))})"
            for name in self.not_its_row
        ]
        return f"{line} with {', '.join(changed)}" if changed else line

    @property
    def is_as_named(self) -> bool:
        """Whether all switches are as in the row of `name`, without functions of the user's."""
        own = (self.function, self.advantage_function, self.loss_function)
        return not self.not_its_row and own == (None, None, None)

    @property
    def not_its_row(self) -> tuple[str, ...]:
        """Names of the switches that differ from the algorithm's own values: the row of `name`, or
        the row of the `Algorithm` that `function` returns."""
        names = (switch.name for switch in fields(Row))
        return tuple(n for n in names if getattr(self, n) != getattr(self._row, n))

    @property
    def _row(self) -> Row:
        return ALGORITHMS[self.name] if self.own is None else self.own.row

    @property
    def own(self) -> Algorithm | None:
        """The `Algorithm` that `function` returned. None: `function` is not set. Raises
        `ValueError` if the function cannot be loaded or called."""
        return None if self.function is None else own_algorithm(self.function)

    @property
    def own_advantages(self) -> OwnFunction | None:
        """The user's function for advantages (None: not set). Raises `ValueError` if it does not
        load."""
        if self.advantage_function is not None:
            return own_function("advantages", "advantage_function", self.advantage_function)
        if self.own is None or self.own.advantages is None:
            return None
        assert self.function is not None, "own"
        return own_function("advantages", "function", self.function)

    @property
    def own_loss(self) -> OwnFunction | None:
        """The user's function for the loss (None: not set). Raises `ValueError` if it does not
        load."""
        if self.loss_function is not None:
            return own_function("loss", "loss_function", self.loss_function)
        if self.own is None or self.own.loss is None:
            return None
        assert self.function is not None, "own"
        return own_function("loss", "function", self.function)

    def reload_own(self) -> None:
        """Load the user's functions again if their files have changed since they were loaded."""
        reload_changed((self.function, self.advantage_function, self.loss_function))

    def own_files(self) -> dict[str, str]:
        """SHA-256 of the user's files with functions, by the config keys that name them."""
        keys = ("function", "advantage_function", "loss_function")
        return file_digests({f"algorithm.{key}": getattr(self, key) for key in keys})

    @property
    def needs_critic(self) -> bool:
        """Whether a critic (a model of values) is trained, whose values advantages are made of."""
        return self.advantage == "gae"

    @property
    def needs_teacher(self) -> bool:
        return self.advantage == "teacher"

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the model that the run started from is kept."""
        return self.reference_in_loss or self.reference_in_scores

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL penalty is subtracted from the rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def reference_in_loss(self) -> bool:
        """Whether log-probs of the reference model are computed along with the loss."""
        in_penalty = self.kl_coef > 0 and self.kl_in == "loss"
        return in_penalty or _takes(self.own_loss, "ref_log_probs")

    @property
    def reference_in_scores(self) -> bool:
        """Whether the reference model's log-probs are computed first, as advantages need them."""
        return self.kl_in_reward or _takes(self.own_advantages, "ref_log_probs")

    @property
    def policy_in_scores(self) -> bool:
        """Whether the policy's log-probs are computed first, as advantages need them."""
        asks_others = self.reference_in_scores or self.needs_teacher
        return asks_others or _takes(self.own_advantages, "log_probs")

    @property
    def needs_scores(self) -> bool:
        """Whether advantages need values or log-probs, so that `Trainer.score` is called first."""
        return self.needs_critic or self.policy_in_scores

    @property
    def needs_whole_batch(self) -> bool:
        """Whether advantages need a mean or standard deviation over all samples of the step, and so
        are known only after its last reward."""
        return bool(self.whiten) or "batch" in (self.normalize_mean, self.normalize_std)

    @property
    def needs_groups(self) -> bool:
        """Whether samples are compared with others of their prompt, so that the advantage of a
        group of one is always 0."""
        return self.normalize_mean in ("group", "leave-one-out")

    def _check_own(self) -> None:
        """Raise `ValueError` for keys that name no function; `check_own` loads and tries
        functions."""
        for key in ("advantage_function", "loss_function"):
            spec = getattr(self, key)
            if spec is not None and not all(spec.rpartition(":")):
                raise ValueError(
                    f'{key} must be "path/to/file.py:function" or "module:function", not "{spec}"'
                )

    def _check_numbers(self) -> None:
        self._check_range("gamma", 0, 1)
        self._check_range("gae_lambda", 0, 1)
        self._check_range("turn_discount", 0, 1)
        self._check_range("clip_low", 0, 1)
        self._check_range("mismatch_min", 0, math.inf)
        for name in ("clip_high", "entropy_coef", "kl_coef", "overlong_penalty"):
            self._check_range(name, 0, math.inf)
        check_at_least(self, 0, "overlong_buffer_tokens")
        check_at_least(self, 1, "fixed_length")
        for name, least in (("clip_dual", 1), ("mismatch_max", 0), ("value_clip", 0)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > least):
                raise ValueError(f"{name} must be a number above {least}, not {value}")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is None or (math.isfinite(value) and low <= value <= high):
            return
        limits = f"from {low} upwards" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} must be a number {limits}, not {value}")

    def _check_advantages(self) -> None:
        if self.advantage != "reward" and (self.normalize_mean, self.normalize_std) != (
            "none",
            "none",
        ):
            raise ValueError(
                f"advantage={self.advantage} has a baseline of its own: set normalize_mean and "
                "normalize_std to none (whiten=true normalizes its advantages)"
            )
        if self.normalize_std != "none" and self.normalize_mean == "none":
            raise ValueError(
                f"normalize_std={self.normalize_std} divides rewards that have no baseline: set "
                "normalize_mean too, or normalize_std=none"
            )
        if self.normalize_std == "group" and self.normalize_mean == "batch":
            raise ValueError(
                "normalize_std=group does not go with normalize_mean=batch: set one of them to "
                "what the other is"
            )
        if self.gamma != 1 and not (
            self.advantage == "gae" or (self.advantage == "reward" and not self.needs_groups)
        ):
            raise ValueError(
                "gamma discounts from token to token, which needs advantage=gae, or "
                "advantage=reward with normalize_mean none or batch: set gamma=1"
            )

    def _check_credit(self) -> None:
        if self.credit == "trajectory":
            if self.turn_discount != 1:
                raise ValueError(
                    "turn_discount discounts from turn to turn, which needs credit=turn: set that,"
                    " or turn_discount=1"
                )
            return
        if self.advantage == "teacher":
            raise ValueError(
                "credit=turn has no meaning with advantage=teacher, which asks no rewards and has"
                " an advantage for each token: set credit=trajectory"
            )
        if self.advantage_function is not None or (self.own is not None and self.own.advantages):
            raise ValueError(
                "credit=turn does not go with advantages of your own, which are for whole"
                " responses or for tokens: set credit=trajectory"
            )
        if self.gamma != 1:
            raise ValueError(
                "gamma discounts from token to token, and credit=turn from turn to turn: set"
                " gamma=1, and turn_discount"
            )

    def _check_kl(self, row: Row) -> None:
        in_loss = self.kl_coef > 0 and self.kl_in == "loss"
        if self.kl_in == "reward" and self.kl_coef == 0 and row.kl_in != "reward":
            raise ValueError("kl_in=reward does nothing while kl_coef is 0: set kl_coef")
        if self.kl_in_reward and self.advantage == "teacher":
            raise ValueError("advantage=teacher has no reward for kl_in=reward: set kl_in=loss")
        if self.kl_bias_correction and not in_loss:
            raise ValueError(
                "kl_bias_correction is for a penalty in the loss: set kl_coef and kl_in=loss, or "
                "leave it out"
            )
        if in_loss and self.kl_estimator == "k1" and not self.kl_bias_correction:
            raise ValueError(
                "kl_estimator=k1 has no effect in the loss, its gradient is 0 on average: use k2 "
                "or k3, kl_bias_correction=true, or kl_in=reward"
            )

    def _check_loss(self) -> None:
        if self.fixed_length is not None and self.loss_aggregation != "fixed-length":
            raise ValueError(
                "fixed_length is set, and loss_aggregation is "
                f"{self.loss_aggregation}: set loss_aggregation=fixed-length or leave it out"
            )
        if self.clip_dual is not None and self.objective == "cispo":
            raise ValueError("clip_dual belongs to objective=clipped: cispo cuts every ratio")
        if self.mismatch_correction != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                "mismatch_correction and old_logprobs=rollout correct the same difference twice: "
                "set old_logprobs=recomputed, or mismatch_correction=none"
            )
        if self.mismatch_min is not None:
            if self.mismatch_correction == "none":
                raise ValueError("mismatch_min does nothing without mismatch_correction: set it")
            if self.mismatch_min >= self.mismatch_max:
                raise ValueError(
                    f"mismatch_min ({self.mismatch_min:g}) must be less than mismatch_max "
                    f"({self.mismatch_max:g})"
                )


def _as_written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _takes(function: OwnFunction | None, argument: str) -> bool:
    return function is not None and argument in function.takes
