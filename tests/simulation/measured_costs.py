"""Costs of one core of the test machine, measured on 2026-11-27.

`tests/benchmarks/simulation_errors.py` fits those of all-reduces, `simulated_rendezvous.py` those of the
start of a job. `coordinator.py` measures those of ranks and relays in combined requests; the one of a
message to rank 0 is that of the request of one rank.
"""

from simulated_regroup import RegroupCosts
from simulated_start import StartCosts
from virtual_clock import Costs

COORDINATOR_SECS = 50e-6  # of rank 0, for the request of one rank in a negotiated call
_TREE_COSTS = {
    "coordinator_secs": COORDINATOR_SECS, "combined_secs": COORDINATOR_SECS, "combined_rank_secs": 3.3e-6,
    "relay_secs": 65e-6, "relay_rank_secs": 18e-6,
}  # fmt: skip
MEMORY_COSTS = {  # shared memory, float32
    "call_secs": 111e-6, "request_secs": 46.7e-6, **_TREE_COSTS,
    "exchange_secs": 35.1e-6, "sent_byte_secs": 0.0836e-9, "stored_byte_secs": 0.0836e-9,
    "reduced_byte_secs": 0.239e-9, "copied_byte_secs": 0.0872e-9,
}  # fmt: skip
_NETWORK_COSTS = {  # sockets on the loopback device, 2026-11-28
    "float32": {
        "call_secs": 201e-6, "request_secs": 72.2e-6, **_TREE_COSTS,
        "exchange_secs": 50.8e-6, "sent_byte_secs": 0.232e-9, "stored_byte_secs": 0.232e-9,
        "reduced_byte_secs": 0.624e-9, "copied_byte_secs": 0.0986e-9,
    },
    "bfloat16": {
        "call_secs": 201e-6, "request_secs": 81.0e-6, **_TREE_COSTS,
        "exchange_secs": 64.4e-6, "sent_byte_secs": 0.415e-9, "stored_byte_secs": 0.415e-9,
        "reduced_byte_secs": 0.653e-9, "copied_byte_secs": 0.0634e-9,
    },
}  # fmt: skip
START_COSTS = StartCosts(
    fork_secs=888e-6, rank_secs=9.42e-3, call_secs=113e-6, refused_secs=26e-6, accept_secs=57e-6,
    proof_secs=57e-6, link_secs=809e-6,
)  # fmt: skip
REGROUP_COSTS = RegroupCosts(
    poll_secs=5e-6, send_secs=20e-6, read_secs=80e-6, assign_secs=40e-6, address_secs=60e-9,
    parse_secs=60e-9, leave_secs=14e-3, start=START_COSTS, sums=Costs(**_NETWORK_COSTS["float32"]),
)  # fmt: skip
REGROUP_CPU_SECS = {300: 0.051, 1000: 0.243}  # workers -> of the launcher
START_SECS = {16: 0.13, 64: 0.60, 256: 3.01}  # processes -> time on 2 cores, without other work


def network_costs(dtype: str = "float32") -> dict[str, float]:
    """Returns the CPU costs of an all-reduce over sockets."""
    return _NETWORK_COSTS[dtype]
