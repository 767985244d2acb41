"""Ranks that exchange through queues of one process: many ranks without files, and a record of messages."""

import queue
from collections import defaultdict

import numpy as np
from ctl.collectives.partners import partners_of, peers_of
from ctl.collectives.transports.link import CHUNK

TIMEOUT_SECS = 600


class QueueMesh:
    """Replacement of `Mesh`, with the links of the start and those that `require_links` adds.

    Args:
      rank: Rank of the caller.
      machine_by_rank: Number of the machine of each rank.
      queues: (sender, receiver) -> queue, the same for all ranks.

    Attributes:
      sent: (receiver, size of the message) of all messages.
    """

    def __init__(self, rank, machine_by_rank, queues):
        self.machine_by_rank = tuple(machine_by_rank)
        self._rank, self._queues = rank, queues
        self._connected = {rank, *partners_of(len(machine_by_rank))[rank]}
        self.sent = []

    def require_links(self, members, *, all_pairs=False):
        """Like `Mesh.require_links`."""
        self._connected |= peers_of(self._rank, members, all_pairs=all_pairs)

    def exchange(self, destination, arrays, source, size, target=None, consume=None):
        """Like `Mesh.exchange`."""
        assert {destination, source} <= self._connected
        message = b"".join(array.tobytes() for array in arrays)
        if message:
            self.sent.append((destination, len(message)))
            self._queues[self._rank, destination].put(message)
        received = self._queues[source, self._rank].get(timeout=TIMEOUT_SECS) if size else b""
        assert len(received) == size
        for start in range(0, size, CHUNK):
            chunk = np.frombuffer(received[start : start + CHUNK], np.uint8)
            if consume is not None:
                consume(start, chunk)
            else:
                target.view(np.uint8)[start : start + chunk.size] = chunk

    def sent_to_other_machines(self):
        """Returns the number of messages and bytes that this rank has sent to other machines."""
        machine = self.machine_by_rank[self._rank]
        sizes = [size for rank, size in self.sent if self.machine_by_rank[rank] != machine]
        return len(sizes), sum(sizes)


def queue_meshes(machine_by_rank):
    """Returns a mesh for each rank."""
    count = len(machine_by_rank)
    queues = defaultdict(queue.SimpleQueue)
    for sender in range(count):
        for receiver in range(count):
            queues[sender, receiver]  # threads must not create queues
    return [QueueMesh(rank, machine_by_rank, queues) for rank in range(count)]
