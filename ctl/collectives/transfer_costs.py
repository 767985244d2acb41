"""Estimated costs of transfers, from which the ranks choose the algorithm of a collective.

They are part of the protocol, because all ranks have to choose the same algorithm.
"""

# Measured with tests/benchmarks/collective_scaling.py.

EXCHANGE_SECS = 60e-6  # of one exchange without bytes
BYTE_SECS = 0.2e-9  # of a byte that a rank sends and receives, in parts that stay in the processor's cache
HALVED_BYTE_SECS = 0.3e-9  # the same for the halves of a vector, which are larger than the cache
COPIED_BYTE_SECS = 0.3e-9  # of a copy within a rank of a byte that is not in the cache
