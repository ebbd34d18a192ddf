"""A made-up algorithm from outside of the package: one file and one line of the config."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch

from rollpacker.algo import AlgorithmConfig
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.trainer.samples import build_train_samples
from tests.trainer.tiny import TEMPERATURE, responses, tiny_model, trainer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithms.md"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The page's own example."""
    (code,) = re.findall(r"```python\n# centred.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "centred.py"
    path.write_text(code)
    return path


def test_one_line_of_the_config_names_it(file: Path) -> None:
    line = f"algorithm.function={file}:algorithm"
    config = load_config(ROOT / "configs" / "quickstart.yaml", [line], RunConfig)
    assert config.algorithm.normalize_std == "none"  # its row's
    assert not config.algorithm.needs_whole_batch and config.algorithm.needs_groups


def test_its_advantages_and_its_loss_are_trained_on(file: Path) -> None:
    config = AlgorithmConfig(function=f"{file}:algorithm", old_logprobs="rollout")
    config = pickle.loads(pickle.dumps(config))  # as it goes to processes of the trainer's own
    groups = responses(1)
    samples, _ = build_train_samples(groups, config)
    rewards = torch.tensor([[reward for _, reward in group] for group in groups])
    expected = (rewards - rewards.median(1, keepdim=True).values).flatten().tolist()
    assert [sample.advantage for sample in samples] == expected
    own = trainer(algorithm=config)
    own.learner.accumulate(samples)
    model = tiny_model().eval()
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_tokens, *sample.response_tokens]])
        table = (model(input_ids=ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        log_probs = table.gather(-1, ids[0, 1:, None])[len(sample.prompt_tokens) - 1 :, 0]
        ratio = (log_probs - torch.tensor(sample.rollout_log_probs)).exp()
        loss = loss - (torch.tanh(ratio - 1) * sample.advantage * sample.token_weight).sum()
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in own.learner.gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-9)


def test_one_number_per_token_is_an_advantage_too(tmp_path: Path) -> None:
    path = tmp_path / "tokens.py"
    path.write_text(
        "import torch\nfrom rollpacker.algo import Algorithm\n\n"
        "def ramp(rewards, group_ids, lengths, *, config):\n"
        "    return torch.cat([torch.arange(n) * r for n, r in zip(lengths, rewards)])\n\n"
        "def algorithm():\n    return Algorithm(advantages=ramp)\n"
    )
    groups = responses(1)
    samples, _ = build_train_samples(groups, AlgorithmConfig(function=f"{path}:algorithm"))
    first, reward = groups[0][0]
    assert samples[0].advantage == tuple(i * reward for i in range(len(first.tokens)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def algorithm():\n    return 3\n", "must return a rollpacker.algo.Algorithm, not a int"),
        ("def algoritm():\n    return 3\n", "Did you mean"),
    ],
)
def test_what_is_no_algorithm_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(function=f"{path}:algorithm")


def test_advantages_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text(
        "from rollpacker.algo import Algorithm\n\n"
        "def algorithm():\n"
        "    return Algorithm(advantages=lambda rewards, *_, config: rewards[:2])\n"
    )
    with pytest.raises(ValueError, match="one of each sample, or one of each token"):
        build_train_samples(responses(1), AlgorithmConfig(function=f"{path}:algorithm"))
