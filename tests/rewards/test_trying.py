"""A reward is tried out before anything loads: what every response would meet refuses the run, what
a made-up text may have brought about does not; and a function that fails everybody is given up."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rewards.functions.function_reward import Patience
from rollpacker.rewards.reward import Cause, Failed, RewardError, RewardInput, Scored
from tests.rewards.plain import reward, sample, scored

MESSAGES = [{"role": "user", "content": "p"}]


def tried(folder: Path, source: str, *rows: RewardInput, **settings: Any) -> list[str]:
    """The doubts; closes the reward's workers."""
    one = reward(folder, source, **settings)
    try:
        return one.try_out(rows or [sample(answer=4)])
    finally:
        one.shared.run(one.close)


def refusal(folder: Path, source: str, *rows: RewardInput, **settings: Any) -> str:
    with pytest.raises(RewardError) as caught:
        tried(folder, source, *rows, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return [messages[-1]['content'] == '4' for messages in completions]",
            "completions are texts",
        ),
        ("return [scoer(c) for c in completions]", "NameError"),
        ("import no_such_module", "no_such_module"),
        ("return [columns['gold'] for c in completions]", "KeyError"),
        ("return 'good'", "returned str, not a list"),
        ("return [1.0]", "returned 1 values for 2 completions"),
        ("return ['1.0' for c in completions]", "returned '1.0', not a number"),
        ("import os; os._exit(3)", "could not judge a test completion"),
    ],
)
def test_what_no_response_could_please(tmp_path: Path, body: str, words: str) -> None:
    message = refusal(tmp_path, f"def f(completions, **columns):\n    {body}\n")
    assert message.startswith("reward f ") and words in message


def test_the_shape_of_messages_is_named_too(tmp_path: Path) -> None:
    source = (
        "def f(completions, **columns):\n    return [float(len(c.strip())) for c in completions]\n"
    )
    message = refusal(tmp_path, source, sample(prompt=MESSAGES))
    assert "raised AttributeError on a test completion: 'list' object" in message
    assert "completions are lists of one message" in message and "text_of" in message
    assert "in f" in message and "c.strip()" in message  # the user's own line
    assert tried(tmp_path, source, sample()) == []


def test_one_that_hangs_is_found_by_one_call(tmp_path: Path) -> None:
    began = time.monotonic()
    message = refusal(
        tmp_path,
        "import time\ndef f(completions):\n    time.sleep(60)\n",
        timeout_s=0.5,
    )
    assert "did not answer a test completion within timeout_s=0.5" in message
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    "body",
    [
        "return [float(re.search('<a>(.*)</a>', c).group(1)) for c in completions]",
        "return [float(re.search('<a>(.*)</a>', c)[1]) for c in completions]",
        "return [float(c.split('#')[1]) for c in completions]",
        "return [{'yes': 1.0, 'no': 0.0}[c] for c in completions]",
        "return [float(dict.fromkeys(c)['score']) for c in completions]",
        "raise ConnectionError('the endpoint is down')",
        "return [float('nan') for c in completions]",
    ],
)
def test_what_the_made_up_text_may_have_brought_about(tmp_path: Path, body: str) -> None:
    """Each of these judges some responses."""
    (doubt,) = tried(tmp_path, f"import re\ndef f(completions, **columns):\n    {body}\n")
    assert doubt.startswith("reward f ") and "test completion" in doubt
    assert "get no verdict" in doubt


@pytest.mark.parametrize(
    "source",
    [
        "def f(completions, answer, **rest):\n    return [c == answer[0] for c in completions]",
        "def f(completions):\n    return [None for c in completions]",
        "def f(completions):\n    return [float(c) if c.isdigit() else 1 / 0 for c in completions]",
        "async def f(completions):\n    return [1.0 for c in completions]",
        "def f(data_source, solution_str, ground_truth):\n    return {'score': 1.0}",
        "def f(prompts, completions, completion_ids, finish_reasons):\n"
        "    return [len(ids) / (r == 'stop') for ids, r in zip(completion_ids, finish_reasons)]",
    ],
)
def test_what_is_sound_passes(tmp_path: Path, source: str) -> None:
    assert tried(tmp_path, source) == []


def test_each_reward_is_tried_on_a_row_of_its_own(tmp_path: Path) -> None:
    source = "def f(completions, gold):\n    return [float(g) for g in gold]\n"
    rows = [sample(task="chat"), sample(task="math", gold=4)]
    assert tried(tmp_path, source, *rows, tasks=("math",)) == []
    assert tried(tmp_path, source, rows[0], tasks=("math",)) == []


def test_workers_that_tried_it_out_judge_the_run(tmp_path: Path) -> None:
    source = (
        "import os\ndef f(completions):\n    return [float(os.getpid()) for c in completions]\n"
    )
    one = reward(tmp_path, source)
    assert one.try_out([sample()]) == []
    first, second = (scored(one, [sample()]) for _ in range(2))
    assert isinstance(first[0], Scored) and isinstance(second[0], Scored)


# --- in the run -----------------------------------------------------------------------------------

FAILED = Failed(reason="f raised")
LOST = Failed(reason="a worker was lost", cause=Cause.INFRASTRUCTURE)
GOOD = Scored(value=1.0)


def test_patience_counts_calls_in_a_row_that_nobody_got_a_verdict_of() -> None:
    patience = Patience("f", 3)
    calls = ([FAILED], [FAILED, FAILED], [FAILED, GOOD], [FAILED], [LOST], [FAILED], [None])
    assert not any(patience.saw(call) for call in calls)
    assert [patience.saw([FAILED]) for _ in range(4)] == [False, False, True, False]
    assert patience.ended == "reward f gave no verdict in 3 calls in a row, at last: f raised"
    endless = Patience("f", None)
    assert not any(endless.saw([FAILED]) for _ in range(1000))
    lost = Patience("f", 2)
    assert not any(lost.saw([LOST]) for _ in range(10))
    assert [lost.saw([LOST], even_so=True) for _ in range(2)] == [False, True]


def test_a_function_that_fails_everybody_is_given_up(tmp_path: Path) -> None:
    source = "def f(completions):\n    raise RuntimeError('the key has expired')\n"
    one = reward(tmp_path, source, max_failed_calls=5)
    verdicts = scored(one, [sample() for _ in range(12)])
    why = one.broken()
    assert why is not None and "5 calls in a row" in why and "the key has expired" in why
    assert all(isinstance(verdict, Failed) for verdict in verdicts)
    assert reward(tmp_path, source).broken() is None


def test_one_that_hangs_for_everybody_costs_so_many_limits_and_no_more(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    source = f"""
        import time
        def f(completions):
            with open({str(calls)!r}, "a") as file:
                print("call", file=file)
            time.sleep(600)
    """
    one = reward(tmp_path, source, max_failed_calls=3, timeout_s=0.3)
    scored(one, [sample() for _ in range(40)])
    assert "within" not in (one.broken() or "") and "took longer" in (one.broken() or "")
    assert len(calls.read_text().splitlines()) < 10  # and not 40, with as many starts


def test_some_failures_are_not_everybody(tmp_path: Path) -> None:
    source = "def f(completions):\n    return [float(c) for c in completions]\n"
    one = reward(tmp_path, source, max_failed_calls=3)
    verdicts = scored(one, [sample("x"), sample("x"), sample("1")] * 6)
    assert sum(isinstance(verdict, Scored) for verdict in verdicts) == 6
    assert one.broken() is None
    assert asyncio.run(one.close()) is None
