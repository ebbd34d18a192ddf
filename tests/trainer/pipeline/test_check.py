"""Which links stages have on which device."""

from __future__ import annotations

import pytest

from rollpacker.pipeline.stages.check import with_links_of
from rollpacker.trainer.trainer import PipelineConfig, TrainConfig


def train(stages: int, links: str) -> TrainConfig:
    pipeline = PipelineConfig(stages=stages, links=links)  # type: ignore[arg-type]  # a text here
    return TrainConfig(steps=1, processes=stages, pipeline=pipeline)


@pytest.mark.parametrize("links", ["auto", "host", "direct"])
def test_on_a_cpu_links_are_as_configured(links: str) -> None:
    config = train(2, links)
    assert with_links_of(config, "cpu") == config


@pytest.mark.parametrize("links", ["auto", "host"])
def test_on_cuda_all_links_are_host_links(links: str) -> None:
    assert with_links_of(train(2, links), "cuda") == train(2, "host")


def test_direct_links_on_cuda_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.pipeline\.links=direct: .*links=host"):
        with_links_of(train(2, "direct"), "cuda")


def test_without_stages_there_are_no_links_to_refuse() -> None:
    assert with_links_of(train(1, "direct"), "cuda") == train(1, "direct")
