"""Direct links while all are well, host links while one is slow."""

from __future__ import annotations

import itertools

from rollpacker.pipeline.plan.link_choice import PATIENCE, LinkChoice


def test_host_links_from_the_step_after_and_direct_ones_when_all_have_been_well() -> None:
    choice = LinkChoice()
    assert [choice.observe(slow) for slow in ([], [2], [2, 3], [3])] == ["direct", *["host"] * 3]
    assert [choice.observe([]) for _ in range(PATIENCE - 1)] == ["host"] * (PATIENCE - 1)
    assert choice.observe([3]) == "host"  # the wait begins anew
    assert [choice.observe([]) for _ in range(PATIENCE)] == [*["host"] * (PATIENCE - 1), "direct"]
    assert [choice.observe([]) for _ in range(100)] == ["direct"] * 100


def test_a_lost_direct_link_is_not_returned_to() -> None:
    choice = LinkChoice()
    choice.observe([0])
    assert {choice.observe([], direct_lost=True) for _ in range(5 * PATIENCE)} == {"host"}


def test_what_only_host_links_make_well_is_tried_ever_less_often() -> None:
    """Over direct links it is found slow in two steps, over host links well in two."""
    choice, same, seen = LinkChoice(), 0, []
    for _ in range(2000):
        slow = (choice.kind == "direct") == (same >= 2)
        kind = choice.observe([0] if slow else [])
        same = same + 1 if not seen or kind == seen[-1] else 0
        seen.append(kind)
    returns = [at for at in range(1, 2000) if (seen[at - 1], seen[at]) == ("host", "direct")]
    waits = [later - at for at, later in itertools.pairwise(returns)]
    assert 4 <= len(returns) <= 9
    assert all(later > 1.7 * wait for wait, later in itertools.pairwise(waits))


def test_a_link_that_was_well_for_long_is_trusted_again() -> None:
    def steps_on_host(choice: LinkChoice) -> int:
        assert choice.observe([0]) == "host"
        return next(n for n in range(1, 1000) if choice.observe([]) == "direct")

    choice = LinkChoice()
    assert steps_on_host(choice) == PATIENCE
    assert steps_on_host(choice) == 2 * PATIENCE
    for _ in range(2 * PATIENCE):
        choice.observe([])
    assert steps_on_host(choice) == 4 * PATIENCE  # as long as the wait, and no longer
    for _ in range(4 * PATIENCE + 1):
        choice.observe([])
    assert steps_on_host(choice) == PATIENCE
