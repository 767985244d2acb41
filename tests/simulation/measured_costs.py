"""Costs of one core of the test machine, fitted by tests/benchmarks/simulation_errors.py on 2026-11-27."""

NETWORK_COSTS = {  # sockets on the loopback device, by dtype
    "float32": {
        "call_secs": 116e-6, "exchange_secs": 41.2e-6, "sent_byte_secs": 0.125e-9,
        "stored_byte_secs": 0.125e-9, "copied_byte_secs": 0.125e-9, "reduced_byte_secs": 0.370e-9,
    },
}  # fmt: skip
MEMORY_COSTS = {  # shared memory, float32
    "call_secs": 143e-6, "exchange_secs": 46.7e-6, "sent_byte_secs": 0.071e-9,
    "stored_byte_secs": 0.071e-9, "copied_byte_secs": 0.071e-9, "reduced_byte_secs": 0.183e-9,
}  # fmt: skip
