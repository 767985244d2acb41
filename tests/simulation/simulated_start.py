"""Start of a job in virtual time: the connections of up to thousands of ranks.

    simulated = simulate_start(Job(count=1024, ranks_per_machine=8, cores=8), START_COSTS)
    simulated.seconds, simulated.max_handshakes

The two threads of a rank follow `ctl.collectives.bootstrap` and `ctl.io.authenticated_channel`. The first
one calls rank 0 and then each lower partner, the second one accepts callers. Partners, the order of calls,
pauses and limits come from the real code. Kernel: a call waits in the queue of the listening socket; if the
queue is full, the call is repeated after 1, 3 and 7 s. Messages need the latency of the network.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

from ctl.collectives.bootstrap import list_calls, max_delay_secs, max_pause_secs
from ctl.collectives.control_tree import FANOUT, ControlTree
from ctl.collectives.partners import partners_of
from ctl.io.authenticated_channel import MAX_ACCEPTS, MAX_PENDING_CALLERS, PROOF_SECS
from ctl.io.handshake_limit import HandshakeLimit
from ctl.io.rendezvous import BACKLOG, growing_pauses
from virtual_processes import Machine, Mailbox, Process, VirtualClock, Wait

_POLL_SECS = 0.1  # of the accepting thread
_FIRST_RETRANSMISSION_SECS = 1.0  # of the kernel; the next ones double
_Thread = Generator[Wait, Any, Any]


@dataclasses.dataclass(frozen=True)
class StartCosts:
    """CPU time of the start of a job (seconds).

    Attributes:
      fork_secs: A machine starts one of its ranks.
      rank_secs: A rank, besides its connections.
      call_secs: Caller, for one handshake.
      refused_secs: Caller, for one call of a rank that does not listen yet.
      accept_secs: Called rank, until the first message is sent.
      proof_secs: Called rank, for the check of the proof and the verdict.
      link_secs: Each end of a link, for the offers of shared memory.
    """

    fork_secs: float = 0.0
    rank_secs: float = 0.0
    call_secs: float = 0.0
    refused_secs: float = 0.0
    accept_secs: float = 0.0
    proof_secs: float = 0.0
    link_secs: float = 0.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Ranks, machines and network.

    Attributes:
      count: Number of ranks.
      ranks_per_machine: Number of ranks of each machine.
      cores: Number of cores of each machine.
      latency_secs: Time of a message between two ranks.
      delays: Rank -> time of its start after that of the job (seconds).
      slowdowns: Rank -> factor of its CPU time.
      is_listening_early: True if the sockets of all ranks listen before the ranks start.
      max_queued: Capacity of the queue of a listening socket.
      fanout: Maximum number of children of a rank.
    """

    count: int
    ranks_per_machine: int = 1
    cores: int = 1
    latency_secs: float = 0.0
    delays: Mapping[int, float] = dataclasses.field(default_factory=dict)
    slowdowns: Mapping[int, float] = dataclasses.field(default_factory=dict)
    is_listening_early: bool = False
    max_queued: int = BACKLOG
    fanout: int = FANOUT


@dataclasses.dataclass(frozen=True)
class SimulatedStart:
    """Result of a simulation. Lists have a value for each rank.

    Attributes:
      connected_at: Time at which a rank has all connections, infinite if it lacks some.
      ready_at: Time at which it also has all links.
      cpu_secs: CPU time.
      max_handshakes: Largest number of handshakes that a rank handles at the same time as the called one.
      max_queued: Largest number of calls in the queue of its listening socket.
      accepted: Role and rank of the accepted callers.
      num_calls: Number of calls, with those that fail.
      num_disconnected: Number of callers that were disconnected in favour of others, or too late.
    """

    connected_at: list[float]
    ready_at: list[float]
    cpu_secs: list[float]
    max_handshakes: list[int]
    max_queued: list[int]
    accepted: list[set[tuple[str, int]]]
    num_calls: list[int]
    num_disconnected: list[int]

    @property
    def seconds(self) -> float:
        """Time until the last rank has all connections."""
        return max(self.connected_at)


def simulate_start(
    job: Job, costs: StartCosts, *, seed: int = 0, timeout_secs: float = 600.0
) -> SimulatedStart:
    """Simulates the start of a job.

    Args:
      job: Ranks, machines and network.
      costs: CPU times.
      seed: Seed of the random pauses.
      timeout_secs: End of the simulation (seconds).

    Returns:
      The times and numbers of the ranks.
    """
    clock, ranks = VirtualClock(), list[_Rank]()
    for first in range(0, job.count, job.ranks_per_machine):
        machine = Machine(clock, job.cores)
        members = range(first, min(first + job.ranks_per_machine, job.count))
        ranks += [_Rank(job, costs, rank, clock, machine, ranks, seed) for rank in members]
        clock.start(_fork(clock, Process(clock, machine), costs, ranks[first:]))
    clock.run(timeout_secs)
    return SimulatedStart(
        [rank.connected_at for rank in ranks],
        [rank.ready_at for rank in ranks],
        [rank.process.cpu_secs for rank in ranks],
        [rank.max_handshakes for rank in ranks],
        [rank.max_queued for rank in ranks],
        [rank.accepted for rank in ranks],
        [rank.num_calls for rank in ranks],
        [rank.num_disconnected for rank in ranks],
    )


def _fork(clock: VirtualClock, launcher: Process, costs: StartCosts, ranks: list["_Rank"]) -> _Thread:
    """Starts the ranks of one machine."""
    for rank in ranks:
        yield launcher.compute(costs.fork_secs)
        clock.start(rank.run())


class _Call:
    """A call of one rank to another. The caller receives the messages in `replies`."""

    def __init__(self, clock: VirtualClock, role: str, caller: int):
        self.role, self.caller = role, caller
        self.replies = Mailbox(clock)
        self.is_closed = False


class _Rank:
    """The threads of one rank."""

    def __init__(
        self,
        job: Job,
        costs: StartCosts,
        rank: int,
        clock: VirtualClock,
        machine: Machine,
        ranks: list["_Rank"],
        seed: int,
    ):
        self._job, self._costs, self._rank, self._clock, self._ranks = job, costs, rank, clock, ranks
        self._peers = partners_of(job.count)[rank]
        self._tree = ControlTree(job.count, job.fanout)
        self._random = random.Random(f"{seed} {rank}")
        self.process = Process(clock, machine, job.slowdowns.get(rank, 1.0))
        self._is_listening = job.is_listening_early
        self._limit: HandshakeLimit[_Call] = HandshakeLimit(MAX_PENDING_CALLERS)
        self._queue: deque[_Call] = deque()
        self._proven: list[_Call] = []
        self._events, self._has_event = Mailbox(clock), False
        self.accepted: set[tuple[str, int]] = set()
        self._arrivals, self._hellos = Mailbox(clock), Mailbox(clock)
        self.connected_at = self.ready_at = float("inf")
        self.max_handshakes = self.max_queued = self.num_calls = self.num_disconnected = 0

    def run(self) -> _Thread:
        """Connects this rank: `_Rendezvous.run`, then `connect_links`."""
        yield self._clock.sleep(self._job.delays.get(self._rank, 0.0))
        yield self.process.compute(self._costs.rank_secs)
        self._is_listening = True
        self._clock.start(self._accept_callers())
        parent = self._tree.parent(self._rank) if self._rank else None
        if parent is not None:
            num_callers = len(self._tree.children(parent))
            yield self._clock.sleep(self._random.uniform(0, max_delay_secs(num_callers)))
        for role, peer in list_calls(self._rank, self._peers, parent):
            num_callers = len(self._tree.children(peer))
            pauses = growing_pauses(max_pause_secs(role, num_callers), self._random.random)
            while not (yield from self._call(role, self._ranks[peer])):
                yield self._clock.sleep(next(pauses))
        while len(self.accepted) < self._num_callers():
            yield self._arrivals.receive(float("inf"))
        self.connected_at = self._clock.now_secs
        self._is_listening = False
        for call in (*self._queue, *self._proven):
            self._send(lambda call=call: call.replies.put("reset"))
        yield from self._connect_links()
        self.ready_at = self._clock.now_secs

    def _num_callers(self) -> int:
        return len(self._tree.children(self._rank)) + sum(peer > self._rank for peer in self._peers)

    def _connect_links(self) -> _Thread:
        secs = self._costs.link_secs
        higher = [self._ranks[peer] for peer in self._peers if peer > self._rank]
        for peer in higher:
            yield self.process.compute(secs / 2)
            self._send(lambda peer=peer: peer.put_hello(self))
        for _ in self._peers:  # offers of the lower ranks, answers of the higher ones
            peer = yield self._hellos.receive(float("inf"))
            yield self.process.compute(secs if peer not in higher else secs / 2)
            if peer not in higher:
                self._send(lambda peer=peer: peer.put_hello(self))

    def put_hello(self, peer: "_Rank") -> None:
        """Receives an offer or an answer of another rank."""
        self._hellos.put(peer)

    def _call(self, role: str, called: "_Rank") -> _Thread:
        """Calls a rank once. Returns True if it has accepted this rank: `Caller.call`."""
        call = _Call(self._clock, role, self._rank)
        until_secs = self._clock.now_secs + PROOF_SECS
        self.num_calls += 1
        yield self.process.compute(self._costs.refused_secs)
        self._send(lambda: called.queue_call(call))
        if (yield call.replies.receive(until_secs - self._clock.now_secs)) == "nonce":
            yield self.process.compute(self._costs.call_secs - self._costs.refused_secs)
            self._send(lambda: called.receive_proof(call))
            timeout_secs = max(0.0, until_secs - self._clock.now_secs)
            if (yield call.replies.receive(timeout_secs)) == "accepted":
                return True
        call.is_closed = True
        return False

    def _send(self, receive: Any) -> None:
        self._clock.call_after(self._job.latency_secs, receive)

    def queue_call(self, call: _Call, retry_secs: float = _FIRST_RETRANSMISSION_SECS) -> None:
        """Adds a call to the queue of the listening socket, as the kernel does."""
        if call.is_closed:
            return
        if not self._is_listening:
            self._send(lambda: call.replies.put("refused"))
        elif len(self._queue) >= self._job.max_queued:
            self._clock.call_after(retry_secs, lambda: self.queue_call(call, 2 * retry_secs))
        else:
            self._queue.append(call)
            self.max_queued = max(self.max_queued, len(self._queue))
            self._wake()

    def receive_proof(self, call: _Call) -> None:
        """Receives the proof of a caller."""
        self._proven.append(call)
        self._wake()

    def _wake(self) -> None:
        if not self._has_event:
            self._has_event = True
            self._events.put(True)

    def _accept_callers(self) -> _Thread:
        """Accepts callers while this rank connects: `Listener.accept_callers` in a loop."""
        pending: dict[_Call, None] = {}
        while self._is_listening:
            if not self._proven and not (self._queue and self._limit.has_place(self._clock.now_secs)):
                yield self._events.receive(_POLL_SECS)
            self._has_event = False
            proven, self._proven = self._proven, []
            for _ in range(MAX_ACCEPTS):
                if not self._queue or not self._limit.has_place(self._clock.now_secs):
                    break
                call = self._queue.popleft()
                ended = self._limit.add(call, self._clock.now_secs)
                pending[call] = None
                if ended is not None:
                    self._disconnect(ended, pending)
                self.max_handshakes = max(self.max_handshakes, len(self._limit))
                yield self.process.compute(self._costs.accept_secs)
                self._send(lambda call=call: call.replies.put("nonce"))
            for call in proven:
                if call in pending:
                    yield self.process.compute(self._costs.proof_secs)
                    self._accept(call, pending)
            for call in [*pending]:
                if call.is_closed:
                    self._disconnect(call, pending)
            for call in self._limit.list_overdue(self._clock.now_secs, PROOF_SECS):
                self._disconnect(call, pending)

    def _accept(self, call: _Call, pending: dict[_Call, None]) -> None:
        del pending[call]
        self._limit.remove(call)
        self.accepted.add((call.role, call.caller))
        self._arrivals.put(True)
        self._send(lambda: call.replies.put("accepted"))

    def _disconnect(self, call: _Call, pending: dict[_Call, None]) -> None:
        del pending[call]
        self._limit.remove(call)
        self.num_disconnected += 1
        self._send(lambda: call.replies.put("reset"))
