"""What deferred prompts keep, what their next launch takes up, and what a checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollpacker.core.commands import Defer, Launch, RoundKind
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import Carried, GenerationRequest, Response, SamplingParams
from rollpacker.run.errors import RunError
from rollpacker.run.folder.checkpoint import CheckpointError, newest_checkpoint, write_checkpoint
from rollpacker.run.ports.carried import CarriedTokens, read_carried, write_carried
from rollpacker.trainer.estimate import CARRIED_TOKEN_BYTES

PROMPT = PromptId("train", 0, 0)
ROWS = (PromptRow(prompt="p", tokens=(1, 2), columns={}),)
SAMPLING = SamplingParams(max_response_tokens=9)
LOG_PROB = -1 / 3


def sample(index: int, attempt: int = 0) -> SampleId:
    return SampleId(PROMPT, index, attempt)


def launch(
    carrying: CarriedTokens,
    *samples: SampleId,
    carried: tuple[int, ...] = (),
    replaces: tuple[SampleId, ...] = (),
    kind: RoundKind = RoundKind.SHORT,
) -> list[GenerationRequest]:
    command = Launch(
        round=1,
        kind=kind,
        samples=samples,
        version=0,
        carried=carried,
        replaces=replaces,
    )
    return carrying.requests(command, ROWS, SAMPLING)


def end(
    carrying: CarriedTokens, sample: SampleId, *tokens: int, kept: int | None = None, whole: bool
) -> None:
    response = Response(
        sample=sample,
        prompt_tokens=(1, 2),
        tokens=tokens,
        log_probs=(LOG_PROB,) * len(tokens),
        finish_reason="stop" if whole else "aborted",
        version=0,
    )
    if whole:
        event: SampleGenerated | SampleAborted = SampleGenerated(
            time_s=0,
            sample=sample,
            num_tokens=len(tokens),
            finish_reason="stop",
            version=0,
            num_kept=kept,
        )
    else:
        event = SampleAborted(time_s=0, sample=sample, num_tokens=len(tokens), num_kept=kept)
    carrying.ended(event, response if tokens else None)


def defer(carrying: CarriedTokens) -> None:
    carrying.routes()[Defer](Defer(prompts=(PROMPT,)))


def carried(*tokens: int, floor: int = 0, ceiling: int | None = None) -> Carried:
    return Carried(tokens=tokens, log_probs=(LOG_PROB,) * len(tokens), floor=floor, ceiling=ceiling)


def test_whole_and_cut_responses_are_taken_up_by_the_next_launch() -> None:
    """Those that ended before the race did, with it, and after it."""
    carrying = CarriedTokens(TailBatchingConfig())
    assert [r.carried for r in launch(carrying, sample(0), sample(1), sample(2))] == [None] * 3
    end(carrying, sample(0), 5, 6, whole=True)
    defer(carrying)
    end(carrying, sample(1), 7, whole=False)
    end(carrying, sample(2), whole=False)  # it had not begun
    assert carrying.metrics() == {"carry/bytes": 3 * CARRIED_TOKEN_BYTES}
    carrying.settle()
    requests = launch(carrying, *(sample(i, 1) for i in range(3)), carried=(2, 1, 0))
    assert [r.noise for r in requests] == [sample(0), sample(1), sample(2)]
    assert [r.carried for r in requests] == [carried(5, 6, ceiling=2), carried(7, floor=1), None]
    carrying.settle()
    assert carrying.metrics() == {"carry/bytes": 0}  # trained on


def test_counts_that_disagree_with_the_cores_are_a_bug() -> None:
    carrying = CarriedTokens(TailBatchingConfig())
    launch(carrying, sample(0))
    defer(carrying)
    end(carrying, sample(0), 7, 7, whole=False)
    with pytest.raises(AssertionError, match=r"train/0/0#1.0 has 2 tokens, not 3"):
        launch(carrying, sample(0, 1), carried=(3,))


def test_what_was_not_looked_at_stays_as_it_was() -> None:
    """A whole response stays one that may end anywhere, and a cut one stays one of the long."""
    carrying = CarriedTokens(TailBatchingConfig())
    launch(carrying, sample(0), sample(1))
    end(carrying, sample(0), 5, 6, whole=True)
    defer(carrying)
    end(carrying, sample(1), 7, 8, 9, whole=False)
    launch(carrying, sample(0, 1), sample(1, 1), carried=(2, 3))
    defer(carrying)
    end(carrying, sample(0, 1), 5, 6, kept=None, whole=False)
    end(carrying, sample(1, 1), 7, 4, kept=1, whole=False)  # it came out differently
    carrying.settle()
    first, second = launch(carrying, sample(0, 2), sample(1, 2), carried=(2, 2))
    assert first.carried == carried(5, 6, ceiling=3)
    assert second.carried == carried(7, 4, floor=3)
    end(carrying, sample(1, 2), 7, 4, 4, 4, kept=2, whole=True)
    defer(carrying)
    assert launch(carrying, sample(1, 3), carried=(4,))[0].carried == carried(7, 4, 4, 4, floor=3)


def begun_early() -> CarriedTokens:
    """Of two responses, the first ended and the second was stopped."""
    carrying = CarriedTokens(TailBatchingConfig(look_ahead=1.0))
    launch(carrying, sample(0), sample(1), kind=RoundKind.AHEAD)
    end(carrying, sample(0), 5, 6, whole=True)
    defer(carrying)
    end(carrying, sample(1), 7, 8, 9, whole=False)
    return carrying


def test_what_was_begun_early_may_end_anywhere_until_a_race_defers_it(tmp_path: Path) -> None:
    write_carried(tmp_path, begun_early().settle(), "abc")
    kept = read_carried(tmp_path, "abc", {PROMPT: (2, 3)})
    carrying = CarriedTokens(TailBatchingConfig(look_ahead=1.0), kept)
    requests = launch(carrying, sample(0, 1), sample(1, 1), carried=(2, 3))
    assert [r.carried for r in requests] == [carried(5, 6), carried(7, 8, 9)]
    defer(carrying)
    end(carrying, sample(0, 1), 5, kept=1, whole=False)  # the same so far
    end(carrying, sample(1, 1), 7, 8, kept=2, whole=False)
    carrying.settle()
    requests = launch(carrying, sample(0, 2), sample(1, 2), carried=(2, 3))
    assert [r.carried for r in requests] == [carried(5, 6, ceiling=2), carried(7, 8, 9, floor=2)]


def test_a_race_in_the_same_step_ends_that() -> None:
    """As where groups without signal are replaced (dynamic sampling)."""
    carrying = begun_early()
    launch(carrying, sample(0, 1), sample(1, 1), carried=(2, 3))
    defer(carrying)
    end(carrying, sample(1, 1), 7, 4, kept=1, whole=False)
    carrying.settle()
    (request,) = launch(carrying, sample(1, 2), carried=(2,))
    assert request.carried == carried(7, 4, floor=3)


def test_a_replacement_has_the_place_of_the_first_that_failed() -> None:
    carrying = CarriedTokens(TailBatchingConfig())
    launch(carrying, sample(0, 2), sample(1, 2))
    [second] = launch(carrying, sample(2, 2), replaces=(sample(1, 2),))
    [third] = launch(carrying, sample(3, 2), replaces=(sample(2, 2),))
    assert second.noise == third.noise == sample(1)
    defer(carrying)
    end(carrying, sample(3, 2), 8, whole=False)
    carrying.settle()
    requests = launch(carrying, sample(0, 3), sample(1, 3), carried=(0, 1))
    assert [r.carried for r in requests] == [None, carried(8, floor=1)]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (TailBatchingConfig(complement=False), carried(8, floor=0)),
        (TailBatchingConfig(carry="weighted"), replace(carried(8, floor=0), verify=False)),
        (TailBatchingConfig(carry="none"), None),
        (TailBatchingConfig(selection="published"), None),
        (TailBatchingConfig(enabled=False), None),
    ],
)
def test_what_the_config_says_of_carrying(config: TailBatchingConfig, kept: Carried | None) -> None:
    carrying = CarriedTokens(config)
    [request] = launch(carrying, sample(1))
    assert request.noise == sample(1)
    defer(carrying)
    end(carrying, sample(1), 8, whole=False)
    [request] = launch(carrying, sample(1, 1), carried=(1,) if kept else ())
    assert request.carried == kept
    assert request.noise == sample(1, 1 if config.selection == "published" else 0)
    assert bool(carrying.metrics()) == config.carries


def test_weighted_tokens_go_on_without_being_looked_at() -> None:
    carrying = CarriedTokens(TailBatchingConfig(carry="weighted"))
    launch(carrying, sample(0))
    defer(carrying)
    end(carrying, sample(0), 8, whole=False)
    launch(carrying, sample(0, 1), carried=(1,))
    defer(carrying)
    end(carrying, sample(0, 1), 8, 9, kept=None, whole=False)
    [request] = launch(carrying, sample(0, 2), carried=(2,))
    assert request.carried == replace(carried(8, 9, floor=0), verify=False)


def test_under_a_larger_cap_those_that_were_cut_off_go_on() -> None:
    """One of as many tokens as were allowed is at least so long, however often it is drawn anew; a
    shorter one had ended."""
    before = CarriedTokens(TailBatchingConfig())
    launch(before, sample(0), sample(1))
    end(before, sample(0), 5, 6, whole=True)
    end(before, sample(1), 7, 8, 9, whole=True)
    defer(before)
    waiting = before.settle()
    same = launch(
        CarriedTokens(TailBatchingConfig(), waiting), sample(0, 1), sample(1, 1), carried=(2, 3)
    )
    assert [r.carried for r in same] == [carried(5, 6, ceiling=3), carried(7, 8, 9, ceiling=3)]
    grown = CarriedTokens(TailBatchingConfig(), waiting, cut_off_at=3)
    first, second = launch(grown, sample(0, 1), sample(1, 1), carried=(2, 3))
    assert first.carried == carried(5, 6, ceiling=2)
    assert second.carried == carried(7, 8, 9, floor=2)


# -- checkpoints -----------------------------------------------------------------------

ODD = (-0.1, float(np.float32(-1 / 3)), -1e-300)


def waiting() -> CarriedTokens:
    carrying = CarriedTokens(TailBatchingConfig())
    launch(carrying, sample(0), sample(1))
    end(carrying, sample(0), 5, 6, whole=True)
    defer(carrying)
    response = Response(
        sample=sample(1),
        prompt_tokens=(1,),
        tokens=(7, 150_000, 9),
        log_probs=ODD,
        finish_reason="aborted",
        version=0,
    )
    carrying.ended(SampleAborted(time_s=0, sample=sample(1), num_tokens=3), response)
    return carrying


EXPECTED = {PROMPT: (2, 3)}


def save(root: Path, step: int = 1) -> Path:
    kept = waiting().settle()
    return write_checkpoint(root, step, {}, lambda folder: write_carried(folder, kept, "abc"), 9)


def test_a_checkpoint_has_it_bit_for_bit(tmp_path: Path) -> None:
    folder = save(tmp_path)
    found = read_carried(folder, "abc", EXPECTED)
    carrying = CarriedTokens(TailBatchingConfig(), found)
    first, second = launch(carrying, sample(0, 1), sample(1, 1), carried=(2, 3))
    assert first.carried == carried(5, 6, ceiling=3)
    assert second.carried == Carried(tokens=(7, 150_000, 9), log_probs=ODD, floor=3)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"carried/tokens.npy", "carried/log_probs.npy", "carried/carried.json"} <= files.keys()


def test_nothing_carried_leaves_no_file(tmp_path: Path) -> None:
    write_carried(tmp_path, CarriedTokens(TailBatchingConfig()).settle(), "abc")
    assert list(tmp_path.iterdir()) == []
    assert read_carried(tmp_path, "abc", {PROMPT: (0, 0)}) == {}


@pytest.mark.parametrize("name", ["tokens.npy", "log_probs.npy", "carried.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damage_is_one_message_with_a_cure(tmp_path: Path, name: str, damage: str) -> None:
    """Seen by the manifest first; without carrying it does no harm."""
    folder = save(tmp_path)
    path = folder / "carried" / name
    text = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(text[:-3] if damage == "cut" else text[:-3] + b"xyz")
    with pytest.raises(CheckpointError, match=rf"carried/{name} .*tail_batching.carry=none") as one:
        newest_checkpoint(tmp_path)
    assert "\n" not in str(one.value)
    assert newest_checkpoint(tmp_path, without="carried").folder == folder
    if damage != "other":
        with pytest.raises(RunError, match=r"carried cannot be read .*tail_batching.carry=none"):
            read_carried(folder, "abc", EXPECTED)


def test_another_tokenizer_is_one_message_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"another tokenizer .*tail_batching.carry=none"):
        read_carried(save(tmp_path), "abd", EXPECTED)


def test_less_than_the_job_expects_is_one_message_with_a_cure(tmp_path: Path) -> None:
    for expected, found in (({PROMPT: (2, 4)}, 3), ({PROMPT: (2, 3, 1)}, 0)):
        with pytest.raises(RunError, match=rf"has {found} tokens of response .*carry=none"):
            read_carried(save(tmp_path), "abc", expected)
    with pytest.raises(RunError, match=r"has 0 tokens of response 0 to train/0/0, of which"):
        read_carried(tmp_path, "abc", EXPECTED)


def test_what_nobody_could_have_pickled(tmp_path: Path) -> None:
    """Arrays of objects, which only unpickling could read, are refused."""
    folder = save(tmp_path)
    np.save(folder / "carried" / "tokens.npy", np.array([{}] * 5, dtype=object))
    with pytest.raises(RunError, match=r"ValueError: .*tail_batching.carry=none"):
        read_carried(folder, "abc", EXPECTED)
