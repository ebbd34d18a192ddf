"""Orders in processes: a file in a whole trainer, and torch's own runtime of pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.pipeline.plan.order import orders_to_csv
from rollpacker.pipeline.plan.plan import plan_1f1b, plan_order
from rollpacker.pipeline.plan.work import Link, Work
from rollpacker.pipeline.stages.cut import Place, cut, decoder_of
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.sharding import Shards
from rollpacker.trainer.trainer import PipelineConfig, TrainConfig, TrainSample
from tests.trainer.pipeline.stages import in_stages
from tests.trainer.pipeline.test_orders import orders_of
from tests.trainer.pipeline.test_stage_trainer import begun, trainer_of
from tests.trainer.pipeline.test_stages import BUILDING
from tests.trainer.ranks import Ranks
from tests.trainer.test_partition import exact_model
from tests.trainer.test_process_trainer import folder, setup_of, step, weights  # noqa: F401
from tests.trainer.tiny import TEMPERATURE, largest_difference

COUNT, PROMPT, RESPONSE = 6, 4, 9
"""Samples, all of one shape, and tokens of each."""


def equal_samples() -> list[TrainSample]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 23, (COUNT, PROMPT + RESPONSE), generator=draw).tolist()
    return [
        TrainSample(
            sample=SampleId(PromptId("train", 0, number), 0, 0),
            prompt_tokens=tuple(row[:PROMPT]),
            response_tokens=tuple(row[PROMPT:]),
            rollout_log_probs=(-3.0,) * RESPONSE,
            advantage=1.5 - number,
            token_weight=1 / (COUNT * RESPONSE),
        )
        for number, row in enumerate(tokens)
    ]


def plan() -> str:
    """For two stages, below the cap of live tokens that is the default."""
    even = Work.even(COUNT, f_s=(1.0,) * 2, i_s=(1.0,) * 2, w_s=(1.0,) * 2)
    return orders_to_csv(plan_order("zero-bubble", even, [Link()], caps=[4, 2]))


def our_gradient() -> dict[str, Tensor]:
    """Each sample a micro-batch, in this plan."""

    def run(stage: Stage) -> dict[str, Tensor]:
        with BUILDING:
            model = exact_model(tied=False)
        learner = Learner(
            model=model,
            tokenizer=None,
            pad_token_id=0,
            config=TrainConfig(steps=1, micro_batch_tokens=1, max_grad_norm=None),
            algorithm=AlgorithmConfig(),
            temperature=TEMPERATURE,
            total_steps=1,
            stage=stage,
        )
        learner.accumulate(equal_samples())
        return {name: value.clone() for name, value in learner.gradients().items()}

    config = PipelineConfig(stages=2, order="plan.csv")
    parts = in_stages((1, 1), run, orders=orders_of(config, csv=plan()))
    return {name: value for part in parts for name, value in part.items()}


class First(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return decoder_of(self.model)(input_ids=tokens, use_cache=False)[0]


class Last(First):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.model(inputs_embeds=hidden, use_cache=False).logits


def in_torchs_runtime(shards: Shards, csv: str) -> dict[str, Tensor]:
    """The gradient of this rank's stage."""
    model = exact_model(tied=False).eval()
    cut(model, Place(index=shards.rank, count=2), (1, 1))
    module = (First, Last)[shards.rank](model)
    device = torch.device("cpu")
    schedule = _PipelineScheduleRuntime(
        [PipelineStage(module, shards.rank, 2, device)],
        n_microbatches=COUNT,
        loss_fn=lambda logits, row: weighted_loss(logits, *row.unbind(-1)),
        scale_grads=False,
    )
    schedule._load_csv(csv, format="compute_only")
    rows = equal_samples()
    tokens = torch.tensor([row.prompt_tokens + row.response_tokens for row in rows])
    if shards.rank == 0:
        schedule.step(tokens[:, :-1])
    else:
        per_token = [row.advantage * row.token_weight for row in rows]
        factors = torch.tensor(per_token, dtype=torch.float64)
        factors = factors[:, None].expand(tokens[:, 1:].shape)
        schedule.step(target=torch.stack([tokens[:, 1:].double(), factors], dim=-1))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def weighted_loss(logits: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    """Of the responses' tokens. Where nothing was updated yet, a ratio is 1 and no clip acts."""
    log_probs = (logits / TEMPERATURE).log_softmax(-1)
    chosen = log_probs.gather(-1, targets.long()[..., None])[..., 0]
    return -(chosen * factors)[:, PROMPT - 1 :].sum()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout_s=180.0) as started:
        yield started


def test_torchs_runtime_gives_our_gradient_in_a_plan_of_ours(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(plan())
    parts = ranks.run(2, in_torchs_runtime, str(path))
    torchs = {name: value for part in parts for name, value in part.items()}
    ours = our_gradient()
    assert max(value.abs().max().item() for value in ours.values()) > 1e-4
    assert largest_difference(torchs, ours) < 1e-10


def with_plan(setup: LearnerSetup, num_micro_batches: int) -> LearnerSetup:
    """Each sample is a micro-batch."""
    return dataclasses.replace(
        setup,
        train=dataclasses.replace(setup.train, micro_batch_tokens=1),
        order_csv=orders_to_csv(plan_1f1b(2, num_micro_batches)),
    )


def test_a_file_goes_to_the_trainers_processes_with_the_setup(
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """There is none of this name anywhere."""
    setup = setup_of(folder)
    own, first = begun(setup, tmp_path)
    trainer = trainer_of(
        with_plan(setup, 12), 2, PipelineConfig(stages=2, order="/nowhere/plan.csv")
    )
    try:
        trainer.load(first)
        for one in (own, trainer):
            step(one, 0)
        (wanted, _), (got, _) = weights(own), weights(trainer)
        assert largest_difference(wanted, got) < 1e-6
    finally:
        trainer.close()
