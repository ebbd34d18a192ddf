"""The engine says what the model says: against `generate`, full forward passes, and itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.core.ids import SampleId
from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.engine import SLOW_ON_CUDA
from rollpacker.engines.embedded.plain_forward import FAMILIES
from rollpacker.engines.engine import GenerationRequest, Response
from tests.engines.tiny import END, MODELS, generate, group, request, tiny_model

BOTH_PATHS = [
    *((name, True) for name in MODELS),
    *((family.lower(), False) for family in FAMILIES),
]
"""Model type, and whether it may run as plain calls; the other types never do."""


def _greedy_reference(model: PreTrainedModel, asked: GenerationRequest) -> list[int]:
    ids = torch.tensor([asked.prompt_tokens])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=asked.sampling.max_response_tokens,
        eos_token_id=END,
    )
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(("model_type", "plain"), BOTH_PATHS)
def test_greedy_tokens_equal_generate(model_type: str, plain: bool) -> None:
    model = tiny_model(model_type)
    requests = [request(row, temperature=0.0, max_response_tokens=10 + row) for row in range(11)]
    wanted = [_greedy_reference(model, asked) for asked in requests]
    assert len({tuple(tokens) for tokens in wanted}) > 5
    responses = generate(model, requests, max_slots=3, plain_forward=plain)
    assert [list(response.tokens) for response in responses] == wanted


def _full_pass_log_probs(
    model: PreTrainedModel, response: Response, temperature: float
) -> torch.Tensor:
    ids = torch.tensor([response.prompt_tokens + response.tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    start = len(response.prompt_tokens) - 1
    log_probs = torch.log_softmax(logits[start:-1] / temperature, dim=-1)
    return log_probs.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]


@pytest.mark.parametrize(("model_type", "plain"), BOTH_PATHS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_full_forward_pass(
    model_type: str, plain: bool, temperature: float
) -> None:
    model = tiny_model(model_type)
    requests = [sample for row in range(6) for sample in group(row, 3, temperature=temperature)]
    responses = generate(model, requests, max_slots=7, plain_forward=plain)
    assert len({response.tokens for response in responses}) > 8
    model.set_attn_implementation("eager")
    for response in responses:
        wanted = _full_pass_log_probs(model, response, temperature)
        torch.testing.assert_close(
            torch.tensor(response.log_probs, dtype=torch.float64), wanted, atol=1e-4, rtol=0
        )


def _mixed_requests() -> list[GenerationRequest]:
    return [
        *group(0, 4),
        *group(1, 3, temperature=0.6, top_p=0.8),
        *group(2, 2, temperature=0.0),
        *group(3, 4, top_k=5, seed=3),
        *group(8, 3, max_response_tokens=40),
    ]


def test_a_seed_repeats_bit_for_bit_in_one_process_and_in_another() -> None:
    requests = _mixed_requests()
    first = generate(tiny_model(), requests)
    assert generate(tiny_model(), requests) == first
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.engines.test_exact import _mixed_requests, generate, tiny_model\n"
        "print([r.log_probs for r in generate(tiny_model(), _mixed_requests())])"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert other.stdout.strip() == str([response.log_probs for response in first])


def test_another_seed_or_attempt_draws_other_tokens() -> None:
    model = tiny_model()
    asked = request(3)
    again = GenerationRequest(
        sample=SampleId(asked.sample.prompt, asked.sample.index, 1),
        prompt_tokens=asked.prompt_tokens,
        sampling=asked.sampling,
    )
    tokens = {generate(model, [one])[0].tokens for one in (asked, again, request(3, seed=1))}
    assert len(tokens) == 3


@pytest.mark.parametrize("options", [{"max_slots": 1}, {"max_slots": 5}, {"width_buckets": False}])
def test_who_shares_the_batch_does_not_change_the_tokens(options: dict[str, object]) -> None:
    model = tiny_model()
    requests = _mixed_requests()
    wanted = generate(model, requests)
    order = [(place * 7) % len(requests) for place in range(len(requests))]
    shuffled = generate(model, [requests[place] for place in order], **options)
    for place, response in zip(order, shuffled, strict=True):
        assert response.tokens == wanted[place].tokens
        assert response.log_probs == pytest.approx(wanted[place].log_probs, abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_plain_and_generic_steps_sample_the_same_on_cuda(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model().to("cuda")
    requests = _mixed_requests()
    plain = generate(model, requests, max_slots=6)
    assert SLOW_ON_CUDA in caplog.text
    generic = generate(model, requests, max_slots=6, plain_forward=False)
    assert [response.tokens for response in generic] == [response.tokens for response in plain]


@pytest.mark.parametrize("model_type", MODELS)
def test_training_pass_equals_transformers_own_attention(model_type: str) -> None:
    ids = torch.randint(1, 48, (3, 13), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([13, 9, 4])
    real = torch.arange(13) < lengths[:, None]

    def loss_and_gradients(install: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = tiny_model(model_type).train()
        if install:
            install_attention(model)
            logits = model(input_ids=ids, use_cache=False).logits
        else:
            logits = model(input_ids=ids, attention_mask=real.long(), use_cache=False).logits
        log_probs = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
        loss = (log_probs * real[:, 1:]).sum()
        loss.backward()
        return loss.detach(), [weight.grad for weight in model.parameters()]

    (loss, gradients), (own_loss, own_gradients) = (
        loss_and_gradients(install) for install in (False, True)
    )
    torch.testing.assert_close(own_loss, loss)
    torch.testing.assert_close(own_gradients, gradients, atol=2e-4, rtol=1e-3)
