"""Who judges next, and when a reward host is given up."""

from __future__ import annotations

from rollpacker.core.checks.reward_hosts import MAX_LOSSES, RewardHosts


def test_the_one_with_the_fewest_samples_is_next() -> None:
    hosts = RewardHosts(3)
    assert hosts.deal(1) is None
    for number in (0, 1, 2):
        hosts.ready(number)
    assert [hosts.deal(size) for size in (4, 1, 2, 3, 1)] == [0, 1, 2, 1, 2]
    hosts.ended(0, 4, judged=True)
    assert hosts.deal(1) == 0
    hosts.hold(0)
    assert (hosts.deal(1), hosts.num_ready) == (2, 2)


def test_losses_count_until_a_check_is_finished() -> None:
    hosts = RewardHosts(2)
    for number in (0, 1):
        hosts.ready(number)
    for _ in range(MAX_LOSSES - 1):
        assert hosts.lost(1, "killed")
        assert hosts.deal(1) == 0
        hosts.ready(1)
    hosts.ended(1, 0, judged=False)  # a check that was lost changes nothing
    assert not hosts.lost(1, "killed again")
    assert hosts.given_up == {
        1: "lost 3 times without a finished check between them (killed; killed; killed again)"
    }
    for _ in range(4 * MAX_LOSSES):
        assert hosts.lost(0, "killed") and not hosts.is_settled()
        hosts.ready(0)
        assert hosts.deal(1) == 0
        hosts.ended(0, 1, judged=True)
    assert hosts.is_settled() and not hosts.all_given_up
    hosts.give_up(0, "no sandbox")
    assert hosts.all_given_up and hosts.deal(1) is None
    assert hosts.num_lost == 5 * MAX_LOSSES
