"""The cursor: every row once per epoch, whatever is taken and wherever it is saved and restored."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.data.cursor import PromptCursor
from rollpacker.data.dataset import DataError

TAKES = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=40)


@given(
    rows=st.integers(1, 30),
    seed=st.integers(-(2**40), 2**40),
    shuffle=st.booleans(),
    epochs=st.integers(1, 4),
    takes=TAKES,
)
def test_every_row_once_per_epoch(
    rows: int, seed: int, shuffle: bool, epochs: int, takes: list[tuple[int, bool]]
) -> None:
    cursor = PromptCursor("train", rows, seed, shuffle, epochs)
    taken = []
    ended = 0
    for count, restart in takes:
        if restart:
            state = json.loads(json.dumps(cursor.state()))
            cursor = PromptCursor("train", rows, seed, shuffle, epochs)
            cursor.restore(state)
        prompts, epoch_ended, data_ended = cursor.take(count)
        assert len(prompts) <= count
        assert len({prompt.epoch for prompt in prompts}) <= 1, "never across an epoch"
        assert len(prompts) == count or epoch_ended
        taken += prompts
        ended += epoch_ended and bool(prompts)
        assert data_ended == (ended == epochs)
        assert all(prompt.epoch == len_before // rows for len_before, prompt in enumerate(taken))
    assert len(set(taken)) == len(taken)
    for epoch in range(ended):
        assert sorted(p.row for p in taken if p.epoch == epoch) == list(range(rows))
    assert ended == len(taken) // rows
    straight = PromptCursor("train", rows, seed, shuffle, epochs)
    again = []
    while len(again) < len(taken):
        again += straight.take(len(taken) - len(again))[0]
    assert again == taken, "neither the sizes taken nor a restart change the order"


def test_orders_differ_by_epoch_and_seed_and_stay_as_they_are() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        cursor = PromptCursor("train", 8, seed, True, None)
        for _ in range(epoch):
            cursor.take(8)
        return [prompt.row for prompt in cursor.take(8)[0]]

    orders = [order(seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1)]
    assert len({tuple(o) for o in orders}) == len(orders)
    # A change of this order would break every saved run.
    assert orders[0] == [0, 3, 7, 5, 1, 2, 6, 4]


def test_without_shuffling_in_file_order() -> None:
    cursor = PromptCursor("train", 3, 0, False, None)
    assert [p.row for p in cursor.take(5)[0]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_rows": 9}, "num_rows=9, now num_rows is 10"),
        ({"seed": 4}, "seed=4, now seed is 3"),
        ({"shuffle": False}, "shuffle=False"),
        ({"position": 10}, "outside the data"),
        ({"position": "x"}, "outside the data"),
        ({"epoch": -1}, "outside the data"),
    ],
)
def test_refuses_a_state_of_something_else(change: dict[str, object], expected: str) -> None:
    cursor = PromptCursor("train", 10, 3, True, None)
    with pytest.raises(DataError, match=expected):
        cursor.restore(cursor.state() | change)
    with pytest.raises(DataError, match="lacks"):
        cursor.restore({"epoch": 0})


def test_no_rows() -> None:
    with pytest.raises(DataError, match="no rows"):
        PromptCursor("train", 0, 0, True, None)
