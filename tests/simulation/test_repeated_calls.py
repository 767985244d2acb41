"""Simulated CPU time of negotiated and repeated all-reduces, compared with docs/decisions/0049-*.md."""

import pytest
from ctl.collectives.allreduce import select_algorithm
from exchange_records import record_schedule
from measured_costs import MEMORY_COSTS
from virtual_clock import Costs, simulate

KILOBYTE = 1 << 10
CALLS = [  # ranks, bytes, measured ms: each negotiated, rank 0 negotiated, each repeated
    (4, 64 * KILOBYTE, 0.27, 0.53, 0.22),
    (16, 64 * KILOBYTE, 0.46, 1.24, 0.42),
    (16, 1024 * KILOBYTE, 1.16, 2.04, 1.01),
]


def cpu_ms(count, num_bytes, *, is_negotiated):
    """Returns the CPU time of rank 0 and of another rank."""
    schedule = record_schedule("allreduce", select_algorithm(count, num_bytes), count, num_bytes)
    simulated = simulate(schedule, Costs(**MEMORY_COSTS), is_negotiated=is_negotiated)
    return simulated.cpu_secs[:2] * 1e3


@pytest.mark.parametrize("call", CALLS)
def test_simulated_times_of_negotiated_and_repeated_calls_are_those_of_processes(call):
    count, num_bytes, negotiated_ms, coordinating_ms, repeated_ms = call
    coordinating, negotiated = cpu_ms(count, num_bytes, is_negotiated=True)
    _, repeated = cpu_ms(count, num_bytes, is_negotiated=False)
    assert [negotiated, coordinating, repeated] == pytest.approx(
        [negotiated_ms, coordinating_ms, repeated_ms], rel=0.2
    )
