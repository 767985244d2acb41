"""Estimated costs of transfers, from which the ranks choose the algorithm of a collective.

The constants are part of the protocol, and rank 0 sends the costs of the network with each collective,
because all ranks have to choose the same algorithm.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Measured with tests/benchmarks/collective_scaling.py.

EXCHANGE_SECS = 60e-6  # of one exchange without bytes
BYTE_SECS = 0.2e-9  # of a byte that a rank sends and receives, in parts that stay in the processor's cache
HALVED_BYTE_SECS = 0.3e-9  # the same for the halves of a vector, which are larger than the cache
COPIED_BYTE_SECS = 0.3e-9  # of a copy within a rank of a byte that is not in the cache


class NetworkCosts(NamedTuple):
    """Costs of the connections between machines, in addition to those of the processor.

    Attributes:
      latency_secs: Of one exchange.
      byte_secs: Of a byte that a rank sends and receives.
    """

    latency_secs: float = 0.0
    byte_secs: float = 0.0

    @classmethod
    def of_header(cls, header: Mapping[str, Any]) -> "NetworkCosts":
        """Returns the costs in a message of rank 0."""
        return cls(*header.get("network", ()))

    def header(self) -> dict[str, Sequence[float]]:
        """Returns the field of a message for `of_header`. It is empty for ranks on one machine."""
        return {"network": list(self)} if any(self) else {}

    def __str__(self) -> str:
        return f"{1e6 * self.latency_secs:.0f} µs per exchange and {1e9 * self.byte_secs:.2f} ns per byte"

    def rounded(self) -> "NetworkCosts":
        """Returns powers of two, in which small differences between measurements vanish."""
        return NetworkCosts(*(2.0 ** round(math.log2(secs)) if secs > 0 else 0.0 for secs in self))

    def exchanges(self, count: float, num_bytes: float, byte_secs: float) -> float:
        """Returns the estimated time of consecutive exchanges (seconds).

        Args:
          count: Number of exchanges.
          num_bytes: Bytes that a rank sends, and receives, in all of them.
          byte_secs: Time of the processor for each of them.
        """
        return count * (EXCHANGE_SECS + self.latency_secs) + num_bytes * (byte_secs + self.byte_secs)


ONE_MACHINE = NetworkCosts()
