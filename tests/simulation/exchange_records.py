"""Exchanges of a collective, recorded from the functions of ctl.collectives without any transfer.

    schedule = record_schedule("allreduce", "halving", count=4096, num_bytes=100 << 20)

A `RecordingMesh` completes each exchange at once, so the real function of a rank runs to its end in one
thread. The content of arrays has no effect on its exchanges. Two properties make records of many ranks
small; the tests of this folder compare both with complete records:

- In a ring and in Bruck's algorithms all ranks have the same exchanges, relative to their own rank.
- The sizes of all-reduce, all-gather and all-to-all are proportional to the size of the vector, except for
  the rounding of the parts to 64 bytes.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from ctl.collectives import rings, trees
from ctl.collectives.allreduce import allreduce
from ctl.collectives.arithmetic import SUM
from ctl.collectives.machine_allreduce import allreduce_on_machines
from ctl.collectives.memory import ALIGNMENT
from ctl.collectives.reduce_scatter import reduce_scatter
from ctl.collectives.transfer_costs import NetworkCosts

ALGORITHMS = {
    "allreduce": ("ring", "doubling", "halving"), "broadcast": ("ring", "tree"),
    "allgather": ("ring", "tree"), "alltoall": ("ring", "tree"), "reducescatter": ("ring", "halving"),
}  # fmt: skip
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_MAX_COMPLETE_RANKS = 32  # more ranks: proportional sizes, and one rank for all if they are symmetric
_MAX_COMPLETE_BYTES = 1 << 28  # of all ranks


class Exchange(NamedTuple):
    """Arguments of `Mesh.exchange`. Ranks are relative to the rank of the caller, modulo the number."""

    destination: int
    sent_bytes: float
    source: int
    received_bytes: float
    is_reduced: bool


class RecordingMesh:
    """Replacement of `Mesh` that records exchanges.

    Args:
      rank: Rank of the caller.
      count: Number of ranks.
      mesh: Mesh that executes the exchanges. None: they complete at once, without a transfer.
      machine_by_rank: Number of the machine of each rank. Empty: all are on one machine.
    """

    def __init__(self, rank: int, count: int, mesh: Any = None, machine_by_rank: tuple[int, ...] = ()):
        self.machine_by_rank = machine_by_rank
        self._rank, self._count, self._mesh = rank, count, mesh
        self.exchanges: list[Exchange] = []

    def require_links(self, members: Sequence[int], *, all_pairs: bool = False) -> None:
        """Like `Mesh.require_links`."""
        if self._mesh is not None:
            self._mesh.require_links(members, all_pairs=all_pairs)

    def exchange(self, destination, arrays, source, size, target=None, consume=None) -> None:
        """Like `Mesh.exchange`."""
        sent_bytes = sum(array.nbytes for array in arrays)
        offsets = (destination - self._rank) % self._count, (source - self._rank) % self._count
        self.exchanges.append(Exchange(offsets[0], sent_bytes, offsets[1], size, consume is not None))
        if self._mesh is not None:
            self._mesh.exchange(destination, arrays, source, size, target, consume)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Exchanges of all ranks.

    The arrays `[rows, steps]` have a row for each rank, or one row for all ranks. Step i is the exchange i
    of a rank. Unused steps at the end of a row have a size of 0.

    Attributes:
      count: Number of ranks.
      num_steps: Number of exchanges `[rows]`.
      destinations: Rank that receives the message, relative to the sender.
      sent: Size of the sent message (bytes). 0: none is sent.
      sources: Rank that sends the received message, relative to the receiver.
      received: Size of the received message (bytes). 0: none is received.
      is_reduced: True if the received message is reduced, not stored.
      matches: Step of the source in which it sends the received message.
      copied_bytes: Bytes that a rank copies within its memory.
      machine_by_rank: Number of the machine of each rank, below `count`. Ranks of a machine share a network
        card and exchange without it. Empty: no ranks share a machine.
    """

    count: int
    num_steps: np.ndarray
    destinations: np.ndarray
    sent: np.ndarray
    sources: np.ndarray
    received: np.ndarray
    is_reduced: np.ndarray
    matches: np.ndarray
    copied_bytes: float = 0.0
    machine_by_rank: tuple[int, ...] = ()


def run_collective(
    collective: str, algorithm: str, mesh: Any, count: int, me: int, num_bytes: int, dtype: str = "float32"
) -> Any:
    """Executes the real function of one rank. `num_bytes` is the size of the array of each rank.

    Returns:
      The result of the function.
    """
    ranks, size = range(count), num_bytes // DTYPES[dtype].itemsize
    if collective == "allreduce":
        return allreduce(mesh, ranks, me, [np.ones(size, DTYPES[dtype])], SUM, algorithm)
    if collective == "reducescatter":
        sizes = [size * (i + 1) // count - size * i // count for i in ranks]
        return reduce_scatter(mesh, ranks, me, np.ones(size, DTYPES[dtype]), sizes, SUM, algorithm)
    own_bytes = np.empty(num_bytes, np.uint8)
    if collective == "broadcast":
        return trees.broadcast_bytes(mesh, ranks, me, own_bytes, 0, algorithm)
    if collective == "allgather":
        return trees.allgather_bytes(mesh, ranks, me, own_bytes, [num_bytes] * count, algorithm)
    row = [num_bytes * (i + 1) // count - num_bytes * i // count for i in ranks]
    return trees.alltoall_bytes(mesh, ranks, me, own_bytes, [row] * count, algorithm)


def record_exchanges(
    collective: str, algorithm: str, count: int, me: int, num_bytes: int, dtype: str = "float32"
) -> list[Exchange]:
    """Returns the exchanges of one rank."""
    mesh = RecordingMesh(me, count)
    run_collective(collective, algorithm, mesh, count, me, num_bytes, dtype)
    return mesh.exchanges


def record_schedule(
    collective: str, algorithm: str, count: int, num_bytes: int, dtype: str = "float32"
) -> Schedule:
    """Returns the schedule of a collective of `count` ranks.

    Args:
      collective: A key of `ALGORITHMS`.
      algorithm: One of its values.
      count: Number of ranks.
      num_bytes: Size of the array of each rank (bytes).
      dtype: A key of `DTYPES`.
    """
    is_complete = count <= _MAX_COMPLETE_RANKS and count * num_bytes <= _MAX_COMPLETE_BYTES
    unit = num_bytes if is_complete else _unit_bytes(collective, algorithm, count, num_bytes)
    is_symmetric = collective != "broadcast" and algorithm not in ("doubling", "halving")
    ranks = range(1 if is_symmetric and count > _MAX_COMPLETE_RANKS else count)
    records = [record_exchanges(collective, algorithm, count, me, unit, dtype) for me in ranks]
    copied_bytes = _count_copies(collective, algorithm, count, dtype, num_bytes) * float(num_bytes)
    return build_schedule(count, records, num_bytes / unit if unit else 1.0, copied_bytes)


def record_on_machines(
    algorithm: str, machine_by_rank: Sequence[int], num_bytes: int, network: NetworkCosts
) -> Schedule:
    """Returns the schedule of an all-reduce of float32 by ranks on several machines.

    Args:
      algorithm: One of `settings.COLLECTIVE_ALGORITHMS`.
      machine_by_rank: Number of the machine of each rank.
      num_bytes: Size of the array of each rank (bytes).
      network: Costs from which the algorithm is selected.
    """
    machines, records = tuple(machine_by_rank), []
    for me in range(len(machines)):
        mesh = RecordingMesh(me, len(machines), machine_by_rank=machines)
        arrays = [np.ones(num_bytes // 4, np.float32)]
        allreduce_on_machines(mesh, range(len(machines)), me, arrays, SUM, algorithm, network)
        records.append(mesh.exchanges)
    return dataclasses.replace(build_schedule(len(machines), records), machine_by_rank=machines)


def _count_copies(collective: str, algorithm: str, count: int, dtype: str, num_bytes: int) -> float:
    """Returns how often a rank copies or converts its vector within its memory."""
    if dtype == "bfloat16" and collective in ("allreduce", "reducescatter"):  # summed in float32
        if algorithm == "ring" and count == 2:
            return 3.0 if num_bytes <= rings.MAX_PAIR_BYTES else 1.5  # two addends and the sum
        return {"doubling": 2.0, "halving": 1 + 1 / count}.get(algorithm, 2 / count)
    if algorithm == "doubling":  # two vectors take turns; the result must be in the first one
        return 1.0 + (count.bit_length() - 1) % 2
    if algorithm == "tree":
        return {"allgather": count, "alltoall": 1}.get(collective, 0.0)
    return 1.0 if algorithm == "halving" else 0.0


def _unit_bytes(collective: str, algorithm: str, count: int, num_bytes: int) -> int:
    """Returns a small size to which the sizes of exchanges are proportional."""
    if collective == "broadcast":
        return num_bytes  # its pieces have a fixed size; its arrays are not written
    if collective == "allgather" or algorithm == "doubling":
        return ALIGNMENT
    if (collective, algorithm) == ("allreduce", "halving"):
        return ALIGNMENT << (count.bit_length() - 1)
    return count * ALIGNMENT if count > 2 else min(num_bytes, 2 * rings.MAX_PAIR_BYTES)


def build_schedule(
    count: int, records: Sequence[Sequence[Exchange]], scale: float = 1.0, copied_bytes: float = 0.0
) -> Schedule:
    """Returns a schedule from the exchanges of every rank, or of one rank if they are equal for all.

    Args:
      count: Number of ranks.
      records: Exchanges of the ranks.
      scale: Factor of all sizes.
      copied_bytes: Bytes that a rank copies within its memory.
    """
    num_steps = np.array([len(record) for record in records])
    table = np.zeros((len(records), num_steps.max(initial=0), len(Exchange._fields)))
    for row, record in zip(table, records, strict=True):
        if record:
            row[: len(record)] = record
    destinations, sent, sources, received, is_reduced = np.moveaxis(table, 2, 0)
    return Schedule(
        count=count,
        num_steps=num_steps,
        destinations=destinations.astype(np.int64),
        sent=sent * scale,
        sources=sources.astype(np.int64),
        received=received * scale,
        is_reduced=is_reduced.astype(bool),
        matches=_match_messages(count, records, table.shape[1]),
        copied_bytes=copied_bytes,
    )


def _match_messages(count: int, records: Sequence[Sequence[Exchange]], num_steps: int) -> np.ndarray:
    """Returns `Schedule.matches`. Messages between two ranks arrive in the order in which they are sent.

    Raises:
      ValueError: If a message is received that is not sent, or not received, or has another size.
    """
    sent_messages = defaultdict(list)  # (sender, receiver relative to it) -> (step, size)
    for rank, record in enumerate(records):
        for step, exchange in enumerate(record):
            if exchange.sent_bytes:
                sent_messages[rank, exchange.destination].append((step, exchange.sent_bytes))
    matches = np.full((len(records), num_steps), -1)
    is_symmetric = len(records) < count
    positions: dict[tuple[int, int], int] = defaultdict(int)
    for rank, record in enumerate(records):
        for step, exchange in enumerate(record):
            if not exchange.received_bytes:
                continue
            sender = 0 if is_symmetric else (rank + exchange.source) % count
            key = sender, -exchange.source % count
            position = positions[key]
            positions[key] += 1
            if position >= len(sent_messages[key]):
                raise ValueError(f"rank {rank}, exchange {step}: rank {sender} sends no such message")
            matches[rank, step], size = sent_messages[key][position]
            if not is_symmetric and size != exchange.received_bytes:
                raise ValueError(f"rank {rank}, exchange {step}: {size} bytes of {exchange.received_bytes}")
    for key, messages in sent_messages.items():
        if positions[key] < len(messages):
            raise ValueError(f"rank {key[0]} sends a message that is not received")
    return matches
