"""CPU time of the coordinator and of a relay for one negotiated collective, by number of ranks.

    python tests/benchmarks/coordinator.py --ranks=64,256,1024

All ranks are sockets of one process. Compares `star` (each rank has a connection to rank 0), `combined`
(the ranks send equal requests through the tree), and `separate` (through the tree, but no relay combines
requests). `relay` is the relay with the largest subtree. Prints the time per collective (ms) and the ratio
to `star`, medians of the rounds.
"""

import resource
import socket
import statistics
import time

from absl import app, flags
from ctl.collectives.control_tree import FANOUT, ControlTree
from ctl.collectives.coordinator import Coordinator
from ctl.collectives.frames import Channel, pack_message
from ctl.collectives.relays import Relay
from ctl.collectives.requests import Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline

_RANKS = flags.DEFINE_list("ranks", ["64", "256", "1024"], "Numbers of ranks.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds, in which the variants take turns.")
_CALLS = flags.DEFINE_integer("calls", 5, "Collectives per round.")
VARIANTS = ("star", "combined", "separate")
_NUM_ELEMENTS = 1 << 20  # the request does not contain the data


class Job:
    """A coordinator, and sockets in place of the ranks."""

    def __init__(self, count: int, variant: str):
        self._variant = variant
        self._tree = ControlTree(count, count if variant == "star" else FANOUT)
        self._next_id, self._has_template = 0, False
        pairs = {rank: socket.socketpair() for rank in [0, *self._tree.children(0)]}
        ours = {rank: pair[0] for rank, pair in pairs.items()}
        self._channels = {rank: Channel(pair[1]) for rank, pair in pairs.items()}
        for channel in self._channels.values():
            channel.socket.settimeout(60)
        self._coordinator = Coordinator(ours, Settings(agrees_once=False), Timeline(), self._tree)
        self._coordinator.start()

    def call(self) -> None:
        """Requests a collective on all ranks and reads the responses."""
        number, self._next_id = self._next_id, self._next_id + 1
        header = {"type": "again", "id": number, "as": 0, "size": 0}
        if not self._has_template:
            request = Request(number, "x", "allreduce", ["float32"], [[_NUM_ELEMENTS]])
            header = {"type": "template", "size": 0, **request.header()}
            self._has_template = True
        for rank, channel in self._channels.items():
            members = list(self._tree.members(rank)) if rank else [0]
            groups = [members] if self._variant == "combined" else [[member] for member in members]
            messages = [{"type": "of", "ranks": ranks, "sizes": [], "header": header} for ranks in groups]
            messages = [header] if len(members) == 1 else messages
            channel.socket.sendall(b"".join(b"".join(pack_message(message)) for message in messages))
        for rank, channel in self._channels.items():
            num_missing = len(self._tree.members(rank)) if rank else 1
            while num_missing:
                channel.inbox.read(channel.socket)
                for response, _ in channel.inbox.messages():
                    num_missing -= len(response["ranks"]) if response["type"] == "to" else 1

    @property
    def cpu_secs(self) -> float:
        """CPU time of the thread of the coordinator (seconds)."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._coordinator._thread.ident))

    def close(self) -> None:
        """Ends the connections and the coordinator."""
        for rank, channel in self._channels.items():
            members = list(self._tree.members(rank)) if rank else [0]
            channel.send({"type": "of", "ranks": members, "sizes": [], "header": {"type": "leave"}})
            channel.close()
        self._coordinator.join(60)


class RelayJob:
    """The relay with the largest subtree, and sockets in place of its parent and of the ranks below it."""

    def __init__(self, count: int):
        tree = ControlTree(count, FANOUT)
        self._members = max(tree.subtrees(0), key=len)
        rank = self._members[0]
        sources = {rank: tree.members(rank)[:1]} | {part[0]: part for part in tree.subtrees(rank)}
        pairs = {root: socket.socketpair() for root in sources}
        parent, upstream = socket.socketpair()
        children = {root: pair[0] for root, pair in pairs.items() if root != rank}
        self._relay = Relay(rank, tree, children, pairs[rank][0], upstream)
        self._parent = Channel(parent)
        self._channels = {root: Channel(pair[1]) for root, pair in pairs.items()}
        self._sources, self._next_id = sources, 0

    def call(self) -> None:
        """Requests a collective on the ranks of the subtree and sends the responses."""
        number, self._next_id = self._next_id, self._next_id + 1
        header = {"type": "again", "id": number, "as": 0, "size": 0}
        for root, ranks in self._sources.items():
            message = {"type": "of", "ranks": [*ranks], "sizes": [], "header": header}
            self._channels[root].send(message if len(ranks) > 1 else header)
        num_missing = len(self._members)
        while num_missing:
            self._parent.inbox.read(self._parent.socket)
            for request, _ in self._parent.inbox.messages():
                num_missing -= len(request["ranks"])
        response = {"type": "begin", "ids": [number]}
        self._parent.send({"type": "to", "ranks": [*self._members], "header": response})
        for channel in self._channels.values():
            while not list(channel.inbox.messages()):
                channel.inbox.read(channel.socket)

    @property
    def cpu_secs(self) -> float:
        """CPU time of the thread of the relay (seconds)."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._relay._thread.ident))

    def close(self) -> None:
        """Ends the connections and the relay."""
        for channel in self._channels.values():
            channel.send({"type": "leave"})
            channel.close()
        self._relay.join(60)
        self._parent.close()


def measure(job: Job | RelayJob) -> float:
    """Returns the CPU time of the coordinator or relay per collective (ms)."""
    start_secs = job.cpu_secs
    for _ in range(_CALLS.value):
        job.call()
    return 1e3 * (job.cpu_secs - start_secs) / _CALLS.value


def main(_: list[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    print("ranks  variant       ms  ratio")
    for count in map(int, _RANKS.value):
        jobs = {variant: Job(count, variant) for variant in VARIANTS}
        if count > FANOUT + 1:
            jobs["relay"] = RelayJob(count)
        for job in jobs.values():
            measure(job)
        times = {variant: [] for variant in jobs}
        for _round in range(_ROUNDS.value):
            for variant, job in jobs.items():
                times[variant].append(measure(job))
        medians = {variant: statistics.median(secs) for variant, secs in times.items()}
        for variant, milliseconds in medians.items():
            print(f"{count:5}  {variant:9} {milliseconds:6.2f}  {milliseconds / medians['star']:5.2f}")
        for job in jobs.values():
            job.close()


if __name__ == "__main__":
    app.run(main)
