"""Pairs of ranks: those that are connected at the start, and those that connect later."""

import math
import re

import pytest
from ctl.collectives.partners import are_connected_at_start, partners_of, peers_of


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 9, 13, 16, 100, 256, 1000])
def test_partners_are_mutual_and_their_number_grows_with_the_logarithm(count):
    partners = partners_of(count)
    for rank, rank_partners in enumerate(partners):
        assert rank not in rank_partners and all(rank in partners[partner] for partner in rank_partners)
        assert len(rank_partners) <= 4 * math.log2(max(2, count))
    if count <= 5:
        assert all(len(rank_partners) == count - 1 for rank_partners in partners)


def test_a_group_of_all_ranks_needs_further_links_for_all_pairs_only():
    everyone = range(9)
    assert are_connected_at_start(9, everyone, all_pairs=False)
    assert not are_connected_at_start(9, everyone, all_pairs=True)
    assert are_connected_at_start(5, range(5), all_pairs=True)
    assert are_connected_at_start(9, (0, 1, 2), all_pairs=True)
    assert not are_connected_at_start(9, (0, 3, 6), all_pairs=False)
    assert peers_of(3, (0, 3, 6), all_pairs=False) == {0, 6}


@pytest.mark.workers
@pytest.mark.smoke
def test_nine_ranks_connect_the_pairs_that_a_collective_needs_and_leave_no_port_open(run_program):
    (result,) = run_program(1, ["tests/programs/late_links.py", "all"])
    addresses = result.json["addresses"]
    for rank, outcome in enumerate(result.json["ranks"]):
        assert {f"127.0.0.1:{port}" for port in outcome["ports"]} == {addresses[rank]}
        num_partners = len(partners_of(9)[rank])
        assert outcome["links"] == [num_partners, num_partners, 8] and num_partners < 8
        assert len(outcome["correct"]) == (5 if rank in (0, 1, 2, 3, 5, 6, 8) else 4)
        assert all(outcome["correct"]) and outcome["listening"] == 0


@pytest.mark.workers
@pytest.mark.parametrize("moment", ["before_port", "after_port"])
def test_a_rank_that_is_lost_while_ranks_connect_is_an_error_on_all_others(run_program, moment):
    (result,) = run_program(1, ["tests/programs/late_links.py", "lost", moment])
    outcomes = result.json["ranks"]
    assert outcomes.pop(4) is None
    for outcome in outcomes:
        assert re.search("rank 4 (is gone|died)", outcome["error"])
