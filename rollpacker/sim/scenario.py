"""What is simulated: a model on a cluster, its workload, and the system that runs it.

A scenario is a YAML file, checked like a run's config. `system` names a preset of the switches
(`presets.SYSTEMS`); what the file or an override says of a switch wins over the preset.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollpacker.config.check import Checker, field_types
from rollpacker.config.document import ConfigError, nearest, parse_document, read_text
from rollpacker.config.load import load_config
from rollpacker.core.commands import RoundKind
from rollpacker.core.stream_plan import StreamConfig
from rollpacker.core.tail_batching import TailBatchingConfig
from rollpacker.sim.hardware import GPUS, MODELS, GpuSpec, ModelShape
from rollpacker.sim.latency import DatasheetModel
from rollpacker.sim.presets import LENGTH_LAWS, REWARD_KINDS, SWITCHES, SYSTEMS

SHARE_TOLERANCE = 0.01
"""Shares may miss 1 by so much: 0.34 + 0.33 + 0.33 and three times 0.333 are both fine."""
MIN_SPEC, MAX_SPEC = 1e-6, 1e9
"""Of any number in a GPU's datasheet."""
MAX_GPUS = 1_000_000
MAX_SAMPLES = 10_000_000
"""Of a step, and of the steps that an oracle sorts together: what fits into memory."""
MAX_SECONDS = 1e9
"""Of any one thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs (`cluster.*`). Rollout and training use all of them in turn."""

    gpu: str | GpuSpec
    """A preset's name, or the numbers of a datasheet."""
    gpus: int
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        _at_least_one(self, "gpus", "gpus_per_node")
        if self.gpus > MAX_GPUS:
            raise ValueError(f"gpus must be at most {MAX_GPUS:,}, not {self.gpus:,}")
        if isinstance(self.gpu, str):
            _check_known("gpu", self.gpu, GPUS)
        else:
            for name in ("memory_gb", "bandwidth_tb_s", "tflops", "nvlink_gb_s"):
                value = getattr(self.gpu, name)
                if not MIN_SPEC <= value <= MAX_SPEC:
                    raise ValueError(
                        f"gpu has {name}={value:g}, which no GPU has: mind the unit in its name"
                    )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            whole = self.gpus // self.gpus_per_node * self.gpus_per_node
            raise ValueError(
                f"gpus must fill whole nodes of gpus_per_node ({self.gpus_per_node}), not "
                f"{self.gpus}: take {whole} or {whole + self.gpus_per_node}"
            )

    @property
    def node_gpus(self) -> int:
        """GPUs that share a node."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def gpu_spec(self) -> GpuSpec:
        return GPUS[self.gpu] if isinstance(self.gpu, str) else self.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as a property of the engine (`rollout.speculation.*`)."""

    speedup: float
    """Decode steps are this much faster ..."""
    max_live: int
    """... while an engine runs at most so many sequences ..."""
    kinds: tuple[str, ...] = ("long", "flush")
    """... in these kinds of round."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speedup) and self.speedup >= 1):
            raise ValueError(f"speedup must be at least 1, not {self.speedup}")
        _at_least_one(self, "max_live")
        for kind in self.kinds:
            _check_known("kinds", kind, [known.value for known in RoundKind])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """One round of generation (`rollout.*`)."""

    prompts_per_step: int
    """P0: prompts that each optimizer step trains on."""
    samples_per_prompt: int
    """R0: responses per prompt."""
    max_response_tokens: int
    tensor_parallel: int = 1
    """GPUs of one engine; with the parallelism planner, the degree that it begins with."""
    prompt_tokens: int = 200
    """Mean length of a prompt."""
    max_running: int | None = None
    """Sequences that an engine decodes at once; None: as many as its cache holds."""
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        _at_least_one(self, "prompts_per_step", "max_response_tokens", "tensor_parallel")
        _at_least_one(self, "prompt_tokens")
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt must be at least 2, not {self.samples_per_prompt}"
            )
        samples = self.prompts_per_step * self.samples_per_prompt
        if samples > MAX_SAMPLES:
            raise ValueError(
                f"prompts_per_step x samples_per_prompt are {samples:,} samples of a step, more "
                f"than can be simulated ({MAX_SAMPLES:,}): lower one of them"
            )
        if self.max_running is not None:
            _at_least_one(self, "max_running")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """How long responses are (`lengths.*`, `rewards.N.lengths.*`): one of `preset`, `quantiles` and
    `trace`."""

    preset: str | None = None
    quantiles: Mapping[float, int] | None = None
    """Tokens by quantile; the logarithm is linear between them. Below the lowest it falls to one
    token, above the highest it stays. An override sets the whole mapping."""
    trace: str | None = None
    """A JSONL file with {"length": n} per response, or {"prompt": id, "lengths": [n, ...]} per
    prompt. Of the second kind the prompts come in the file's order, and what follows here has no
    effect. The path is relative to the folder that the command is run in."""
    within_prompt_correlation: float = 0.05
    """Of the normal scores of two responses to one prompt: 0 is all luck, 1 is all the prompt."""
    hard_prompts: float = 0.0
    """This share of the prompts is hard: ..."""
    hard_prompt_cap_probability: float = 0.15
    """... each of their responses runs to the cap with this probability."""

    def __post_init__(self) -> None:
        given = [n for n in ("preset", "quantiles", "trace") if getattr(self, n) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"set exactly one of preset, quantiles and trace; set: {found}")
        if self.preset is not None:
            _check_known("preset", self.preset, LENGTH_LAWS)
        if self.quantiles is not None:
            _check_quantiles("quantiles", self.quantiles, smallest=1)
        if self.trace == "":
            raise ValueError("trace is empty: give the name of a JSONL file")
        for name in ("within_prompt_correlation", "hard_prompts", "hard_prompt_cap_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")

    @property
    def quantile_law(self) -> Mapping[float, int] | None:
        """The quantiles, whether written or by preset; None for a trace."""
        return self.quantiles if self.preset is None else LENGTH_LAWS[self.preset]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStage:
    """The prompts that are checked in one way (`rewards.N.*`). What is not set comes from the kind
    (`presets.REWARD_KINDS`)."""

    kind: Literal["math", "code", "judge", "none"]
    share: float
    """Of the prompts."""
    seconds_quantiles: Mapping[float, float] | None = None
    """Seconds of one check by quantile (math, code); the logarithm is linear between them, and
    beyond both ends it stays."""
    workers: int | None = None
    """Checks at once (math, code)."""
    calls_per_s: float | None = None
    """Calls that are answered per second (judge)."""
    slowest_correct_s: float | None = None
    """No answer that takes longer to check is correct (math, code). None: the kind's limit; with
    the kind's own times, what is known of them."""
    check_truncated: bool = True
    """Also responses that were cut off at the limit are checked. False: they are wrong at once, as
    a program without an end is."""
    lengths: LengthLaw | None = None
    """Response lengths of these prompts; None: the scenario's."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be more than 0 and at most 1, not {self.share}")
        pool = ("seconds_quantiles", "workers", "slowest_correct_s")
        meant = {"math": pool, "code": pool, "judge": ("calls_per_s",), "none": ()}[self.kind]
        for name in (*pool, "calls_per_s"):
            if getattr(self, name) is not None and name not in meant:
                takes = f"it takes {', '.join(meant)}" if meant else "it takes no time"
                raise ValueError(
                    f"{name} means nothing for kind={self.kind} ({takes}): leave it out"
                )
        if self.workers is not None and self.workers < 1:
            raise ValueError(
                f"workers must be at least 1, not {self.workers}, or nothing is ever checked"
            )
        if self.seconds_quantiles is not None:
            _check_quantiles(
                "seconds_quantiles", self.seconds_quantiles, smallest=0, largest=MAX_SECONDS
            )
        for name in ("calls_per_s", "slowest_correct_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_SECONDS:
                raise ValueError(
                    f"{name} must be more than 0 and at most {MAX_SECONDS:g}, not {value}"
                )

    @property
    def num_workers(self) -> int:
        """Checks at once: a judge is one worker that takes 1 / calls_per_s; 0 for none."""
        if self.kind == "judge":
            return 1
        return self.workers or REWARD_KINDS[self.kind].workers or 0

    @property
    def seconds_law(self) -> Mapping[float, float] | None:
        """Seconds that one check keeps a worker, by quantile; None if there is no check."""
        if self.kind == "judge":
            rate = self.calls_per_s or REWARD_KINDS["judge"].calls_per_s
            assert rate is not None
            return {0.5: 1 / rate}
        return self.seconds_quantiles or REWARD_KINDS[self.kind].seconds_quantiles

    @property
    def limit_s(self) -> float | None:
        """A check that takes longer has failed, whatever the deadline in force."""
        return REWARD_KINDS[self.kind].limit_s

    @property
    def correct_within_s(self) -> float:
        """No answer that takes longer is correct; infinite if time says nothing."""
        kind = REWARD_KINDS[self.kind]
        known = kind.slowest_correct_s if self.seconds_quantiles is None else None
        return self.slowest_correct_s or known or kind.limit_s or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The optimizer step (`train.*`)."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    fixed_s: float | None = None
    """Seconds of a step that do not depend on its tokens; None: a power law of the parameters."""

    def __post_init__(self) -> None:
        _at_least_one(self, "tensor_parallel", "pipeline_parallel", "context_parallel")
        _check_seconds("fixed_s", self.fixed_s)

    @property
    def replica_gpus(self) -> int:
        """GPUs of one data-parallel replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScheduler:
    """When and for how long answers are checked (`reward_scheduler.*`)."""

    overlap: bool = True
    """Each answer is checked as soon as it is generated; else all after the rollout."""
    adaptive_timeout: bool = True
    """The limit of a check follows the slowest correct one so far."""
    colocated_judge: bool = True
    """The judge shares the GPUs of the rollout."""
    order: Literal["fifo", "closest", "longest"] = "fifo"
    """Who is checked next: who came first, whose prompt lacks the fewest verdicts, or whose check
    is expected to take longest."""
    cancel: bool = False
    """Checks that run for samples which are not needed any more are ended, as real runs do. Off by
    default: the constants were calibrated without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSwitch:
    """The planner of the rollout's tensor-parallel degree (`parallelism_planner.*`)."""

    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleSpec:
    """What only a simulator can know (`oracle.*`)."""

    reorder_window: int = 0
    """The prompts of so many steps are sorted by their longest response; 0: as they come."""

    def __post_init__(self) -> None:
        if self.reorder_window < 0:
            raise ValueError(
                f"reorder_window must not be negative (0 is off), not {self.reorder_window}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation depends on."""

    name: str
    model: str | ModelShape
    """A preset's name, or a shape."""
    cluster: Cluster
    rollout: RolloutSpec
    lengths: LengthLaw | None = None
    """Of every response, unless its reward stage has lengths of its own."""
    rewards: tuple[RewardStage, ...] = ()
    """Ways in which answers are checked, mixed by share; none: every verdict is there at once."""
    train: TrainSpec = field(default_factory=TrainSpec)
    sync_s: float | None = None
    """Seconds to bring new weights into the engines; None: a power law of the parameters."""
    system: str = "rollpacker"
    """A preset of the switches below."""
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    reward_scheduler: RewardScheduler = field(default_factory=RewardScheduler)
    parallelism_planner: ParallelismSwitch = field(default_factory=ParallelismSwitch)
    stream_trainer: StreamConfig = field(default_factory=StreamConfig)
    oracle: OracleSpec = field(default_factory=OracleSpec)
    steps: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one(self, "steps")
        _check_seconds("sync_s", self.sync_s)
        if isinstance(self.model, str):
            _check_known("model", self.model, MODELS)
        _check_known("system", self.system, SYSTEMS)
        self._check_rewards()
        self._check_lengths()
        self._check_degrees()
        self._check_memory()
        tail = self.tail_batching
        window = self.oracle.reorder_window * self.rollout.prompts_per_step
        if window * self.rollout.samples_per_prompt > MAX_SAMPLES:
            raise ValueError(
                f"oracle.reorder_window is {self.oracle.reorder_window}, which sorts more than "
                f"{MAX_SAMPLES:,} samples together: lower it"
            )
        if tail.debias != "none" and self.stream_trainer.enabled:
            raise ValueError(
                f"tail_batching.debias is {tail.debias}, but a sample's weight is known only when "
                "its round is over, and stream_trainer trains on it before: set "
                "stream_trainer.enabled=false or debias=none"
            )
        if tail.enabled and tail.race == "scored" and not self.reward_scheduler.overlap:
            raise ValueError(
                "tail_batching.race is scored, but without reward_scheduler.overlap nothing is "
                "scored before the rollout ends: set race=generated or overlap=true"
            )

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model] if isinstance(self.model, str) else self.model

    @property
    def stages(self) -> tuple[RewardStage, ...]:
        """`rewards`, or one stage without a check."""
        return self.rewards or (RewardStage(kind="none", share=1.0),)

    def law_of(self, stage: RewardStage) -> LengthLaw:
        """Response lengths of the stage's prompts."""
        law = stage.lengths or self.lengths
        assert law is not None
        return law

    def _check_rewards(self) -> None:
        if not self.rewards:
            return
        total = sum(stage.share for stage in self.rewards)
        if abs(total - 1) > SHARE_TOLERANCE:
            shares = " + ".join(f"{stage.share:g}" for stage in self.rewards)
            raise ValueError(
                f"rewards have shares that add up to {total:g} ({shares}), not to 1: change "
                "rewards.N.share"
            )
        kinds = [stage.kind for stage in self.rewards]
        for index, kind in enumerate(kinds):
            if kind in kinds[:index]:
                raise ValueError(
                    f"rewards.{index}.kind is {kind} for the second time: make one stage of both, "
                    "with the sum of their shares"
                )

    def _check_lengths(self) -> None:
        if self.lengths is not None:
            self._check_cap("lengths", self.lengths)
        elif not self.rewards:
            raise ValueError("lengths is not set: give a preset, quantiles or a trace")
        for index, stage in enumerate(self.rewards):
            if stage.lengths is not None:
                self._check_cap(f"rewards.{index}.lengths", stage.lengths)
            elif self.lengths is None:
                raise ValueError(
                    f"rewards.{index}.lengths is not set: set it, or lengths for all rewards"
                )

    def _check_cap(self, place: str, law: LengthLaw) -> None:
        cap = self.rollout.max_response_tokens
        beyond = [q for q, tokens in sorted((law.quantiles or {}).items()) if tokens > cap]
        if beyond:
            assert law.quantiles is not None
            raise ValueError(
                f"{place}.quantiles has {law.quantiles[beyond[0]]} tokens at {beyond[0]:g}, more "
                f"than rollout.max_response_tokens ({cap}), where every response is cut: write "
                f"{cap} there, or raise the cap"
            )

    def _check_degrees(self) -> None:
        gpus, node = self.cluster.gpus, self.cluster.node_gpus
        for name, degree in (
            ("rollout.tensor_parallel", self.rollout.tensor_parallel),
            ("train.tensor_parallel", self.train.tensor_parallel),
        ):
            if node % degree:
                raise ValueError(
                    f"{name} must divide the GPUs of a node ({node}), not be {degree}: take "
                    f"{_listed(d for d in range(1, node + 1) if node % d == 0)}"
                )
        replica = self.train.replica_gpus
        if gpus % replica:
            degrees = (
                f"{self.train.tensor_parallel} x {self.train.pipeline_parallel} x "
                f"{self.train.context_parallel}"
            )
            raise ValueError(
                f"train has the degrees tensor x pipeline x context_parallel = {degrees} = "
                f"{replica}, which must divide cluster.gpus ({gpus}): lower one or change the GPUs"
            )

    def _check_memory(self) -> None:
        degree = self.rollout.tensor_parallel
        machine = DatasheetModel(model=self.shape, gpu=self.cluster.gpu_spec)
        try:
            capacity = machine.kv_tokens(degree)
        except ValueError as error:
            raise ValueError(f"rollout.tensor_parallel is {degree}: {error}") from None
        longest = self.rollout.prompt_tokens + self.rollout.max_response_tokens
        if capacity < longest:
            raise ValueError(
                f"rollout.tensor_parallel is {degree}: beside the weights an engine's cache has "
                f"room for {capacity} tokens, less than one response of full length with its "
                f"prompt ({longest}): raise it, or lower rollout.max_response_tokens"
            )


def load_scenario(
    path: str | Path, overrides: Sequence[str] = (), system: str | None = None
) -> Scenario:
    """The file with the overrides applied, for its own system or for another one.

    Switches in the file or the overrides belong to the file's own system; another system is its
    pure preset on the same workload and cluster. Raises `ConfigError` with one message.
    """
    _refuse_run_config(path)
    scenario = load_config(path, overrides, Scenario, below=_preset)
    if system is None:
        return scenario
    try:
        return with_system(scenario, system)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _refuse_run_config(path: str | Path) -> None:
    """Raises `ConfigError` for a file that is a run's config and no scenario."""
    tree, _ = parse_document(read_text(path), str(path))
    if {"data", "rollout"} <= tree.keys() and "cluster" not in tree:
        raise ConfigError(
            f"{path} is the config of a run, not a scenario (it has data and no cluster). "
            f"Scenarios are in configs/scenarios; of a run that has been made give the folder: "
            f"rollpacker simulate --from runs/NAME, or rollpacker plan runs/NAME"
        )


def with_system(scenario: Scenario, system: str) -> Scenario:
    """The scenario as it is if that is its system, else with the preset's switches.

    Raises `ValueError` for an unknown system.
    """
    if system == scenario.system:
        return scenario
    _check_known("system", system, SYSTEMS)
    checker = Checker({})
    types = field_types(Scenario)
    switches = {
        name: checker.build(types[name], SYSTEMS[system][name], (name,)) for name in SWITCHES
    }
    assert not checker.problems, checker.problems
    return dataclasses.replace(scenario, system=system, **switches)


def _preset(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The switches of the system that a scenario file names; nothing if there is no such system."""
    name = tree.get("system", "rollpacker")
    return SYSTEMS.get(name, {}) if isinstance(name, str) else {}


def _at_least_one(owner: object, *names: str) -> None:
    for name in names:
        if getattr(owner, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(owner, name)}")


def _check_seconds(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be 0 or more seconds, not {value}")
    if value is not None and value > MAX_SECONDS:
        raise ValueError(f"{name} must be at most {MAX_SECONDS:g} seconds, not {value:g}")


def _check_known(name: str, value: str, known: Iterable[str]) -> None:
    known = list(known)
    if value not in known:
        raise ValueError(f'{name} is "{value}". Known: {", ".join(known)}.{nearest(value, known)}')


def _check_quantiles(
    name: str, quantiles: Mapping[float, float], smallest: float, largest: float = math.inf
) -> None:
    if not quantiles:
        raise ValueError(f"{name} must have at least one entry, such as 0.5: {smallest or 0.1}")
    last: tuple[float, float] | None = None
    for quantile, value in sorted(quantiles.items()):
        if not 0 < quantile <= 1:
            raise ValueError(
                f"{name} has the quantile {quantile:g}; quantiles lie above 0 and not above 1"
            )
        if not math.isfinite(value) or value < smallest or value <= 0:
            least = f"at least {smallest:g}" if smallest else "more than 0"
            raise ValueError(f"{name} has {value:g} at {quantile:g}; it must be {least}")
        if value > largest:
            raise ValueError(
                f"{name} has {value:g} at {quantile:g}; it must be at most {largest:g}"
            )
        if last is not None and value < last[1]:
            raise ValueError(
                f"{name} must not fall: {value:g} at {quantile:g} is less than {last[1]:g} at "
                f"{last[0]:g}"
            )
        last = (quantile, value)


def _listed(values: Iterable[int]) -> str:
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last
