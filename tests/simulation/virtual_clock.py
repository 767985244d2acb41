"""Execution of a schedule in virtual time.

    simulated = simulate(record_schedule("allreduce", "ring", 4096, 1 << 20), Costs(exchange_secs=60e-6))
    simulated.seconds, simulated.cpu_secs[1:].mean()

Each rank has one CPU core and one network interface, which sends and receives at the same time. An exchange
takes its CPU time, half of the fixed part before its message is sent and half after the received message is
complete. CPU time per byte overlaps with the transfer, except for the last chunk of the received message.
A message needs the latency and its size divided by the bandwidth; messages of a rank follow one another.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from ctl.collectives.control_tree import FANOUT, ControlTree
from ctl.collectives.transports.link import CHUNK
from exchange_records import Schedule
from negotiation import NegotiationCosts, negotiate


@dataclasses.dataclass(frozen=True)
class Costs(NegotiationCosts):
    """Costs of a machine and its network, and those of negotiations.

    Attributes:
      exchange_secs: CPU time of an exchange without bytes.
      sent_byte_secs: CPU time of a sent byte.
      reduced_byte_secs: CPU time of a byte that is received and reduced.
      stored_byte_secs: CPU time of a byte that is received and stored.
      copied_byte_secs: CPU time of a byte that is copied within a rank.
      call_secs: CPU time of a collective besides its exchanges.
      latency_secs: Time from the last byte of a message until it has arrived.
      wire_byte_secs: Inverse of the bandwidth of the network.
      jitter: Each exchange takes an exponentially distributed addition to its CPU time and latency, with
        this mean, relative to them.
    """

    exchange_secs: float = 0.0
    sent_byte_secs: float = 0.0
    reduced_byte_secs: float = 0.0
    stored_byte_secs: float = 0.0
    copied_byte_secs: float = 0.0
    call_secs: float = 0.0
    latency_secs: float = 0.0
    wire_byte_secs: float = 0.0
    jitter: float = 0.0


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Result of a simulation.

    Attributes:
      finished_at: Time at which each rank has completed the collective `[count]` (seconds).
      cpu_secs: CPU time of each rank `[count]`.
    """

    finished_at: np.ndarray
    cpu_secs: np.ndarray

    @property
    def seconds(self) -> float:
        """Time until the last rank has completed the collective."""
        return float(self.finished_at.max())


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    is_negotiated: bool = False,
    fanout: int = FANOUT,
    slowdowns: Mapping[int, float] | None = None,
    seed: int = 0,
) -> Simulated:
    """Executes a schedule. All ranks start at time 0.

    Each iteration completes one exchange of all ranks that do not wait for a message.

    Args:
      schedule: Exchanges of all ranks.
      costs: Costs of each rank and of the network.
      is_negotiated: True if rank 0 has to schedule the collective, False for a repetition without rank 0.
      fanout: Maximum number of ranks that send their requests to the same rank.
      slowdowns: Rank -> factor of its CPU time.
      seed: Seed of the jitter.

    Returns:
      The times of the ranks.

    Raises:
      RuntimeError: If ranks wait for each other in a cycle.
    """
    execution = _Execution(schedule, costs, slowdowns or {}, np.random.default_rng(seed))
    if is_negotiated:
        execution.negotiate(fanout)
    waiting = np.arange(schedule.count)
    waiting = waiting[execution.num_steps > 0]
    execution.send(waiting)
    while waiting.size:
        is_ready = execution.has_message(waiting)
        ready_ranks = waiting if is_ready.all() else waiting[is_ready]
        if not ready_ranks.size:
            raise RuntimeError(f"ranks {waiting[:8].tolist()} wait for each other")
        execution.receive(ready_ranks)
        is_unfinished = execution.steps < execution.num_steps
        execution.send(ready_ranks if is_unfinished.all() else ready_ranks[is_unfinished[ready_ranks]])
        waiting = waiting if is_unfinished.all() else waiting[is_unfinished[waiting]]
    return Simulated(execution.clocks, execution.cpu_secs)


class _Execution:
    """State of all ranks. Arrays `[count]` have the times of a rank."""

    def __init__(
        self, schedule: Schedule, costs: Costs, slowdowns: Mapping[int, float], random: np.random.Generator
    ):
        count = schedule.count
        self._machines = np.array(schedule.machine_by_rank or range(count))
        self._has_shared_cards = len(set(schedule.machine_by_rank)) < len(schedule.machine_by_rank)
        self._schedule, self._costs, self._random = schedule, costs, random
        self.num_steps = np.broadcast_to(schedule.num_steps, (count,))
        self._is_symmetric = len(schedule.num_steps) < count
        self._factors = np.ones(count)
        for rank, factor in slowdowns.items():
            self._factors[rank] = factor
        self.steps = np.zeros(count, np.int64)
        local_secs = costs.call_secs + schedule.copied_bytes * costs.copied_byte_secs
        self.clocks = self._factors * local_secs
        self.cpu_secs = self.clocks.copy()
        self._jitters = np.ones(count)
        self._sent_at = np.zeros(count)  # CPU time before the message, end of the fixed part
        self._free_at, self._received_at = np.zeros(count), np.zeros(count)  # the network interface
        self._arrivals = np.empty((schedule.sent.shape[1], count))  # of the messages sent in a step

    def negotiate(self, fanout: int) -> None:
        """Delays all ranks by their requests to rank 0 and the responses, before the first exchange."""
        tree = ControlTree(self._schedule.count, fanout)
        answered_at, cpu_secs = negotiate(tree, self._costs, self._factors, self._costs.latency_secs)
        self.clocks += answered_at
        self.cpu_secs += cpu_secs

    def send(self, ranks: np.ndarray) -> None:
        """Starts the next exchange of some ranks."""
        costs, steps = self._costs, self.steps[ranks]
        if costs.jitter:
            self._jitters[ranks] = 1 + costs.jitter * self._random.exponential(size=ranks.size)
        factors, jitters = self._factors[ranks], self._jitters[ranks]
        sent = self._take(self._schedule.sent, ranks, steps)
        sent_at = self.clocks[ranks] + costs.exchange_secs / 2 * factors * jitters
        byte_secs = np.maximum(costs.wire_byte_secs, costs.sent_byte_secs * factors)
        offsets = self._take(self._schedule.destinations, ranks, steps)
        destinations = (ranks + offsets) % self._schedule.count
        is_local = self._machines[ranks] == self._machines[destinations]
        free_at = self._occupy(self._free_at, ranks, sent_at, sent * byte_secs, is_local | (sent == 0))
        free_at = np.where(is_local, sent_at + sent * costs.sent_byte_secs * factors, free_at)
        self._sent_at[ranks] = sent_at
        self._arrivals[steps, ranks] = free_at + np.where(is_local, 0.0, costs.latency_secs * jitters)

    def has_message(self, ranks: np.ndarray) -> np.ndarray:
        """Returns `[ranks]`, True if a rank needs no message or the message has been sent."""
        schedule, steps = self._schedule, self.steps[ranks]
        matches = self._take(schedule.matches, ranks, steps)
        sources = (ranks + self._take(schedule.sources, ranks, steps)) % schedule.count
        return (matches < 0) | (self.steps[sources] >= matches)

    def receive(self, ranks: np.ndarray) -> None:
        """Completes the current exchange of some ranks. Their messages must have been sent."""
        schedule, costs, steps = self._schedule, self._costs, self.steps[ranks]
        matches = self._take(schedule.matches, ranks, steps)
        sources = (ranks + self._take(schedule.sources, ranks, steps)) % schedule.count
        sent = self._take(schedule.sent, ranks, steps)
        received = self._take(schedule.received, ranks, steps)
        is_reduced = self._take(schedule.is_reduced, ranks, steps)
        factors, sent_at = self._factors[ranks], self._sent_at[ranks]
        byte_secs = np.where(is_reduced, costs.reduced_byte_secs, costs.stored_byte_secs) * factors
        arrivals = np.where(matches < 0, 0.0, self._arrivals[matches, sources])
        is_local = self._machines[ranks] == self._machines[sources]
        wire_secs = received * costs.wire_byte_secs  # the message arrives while it is sent
        received_at = self._occupy(
            self._received_at, ranks, arrivals - wire_secs, wire_secs, is_local | (matches < 0)
        )
        received_at = np.where(is_local, arrivals, received_at)
        bytes_secs = sent * costs.sent_byte_secs * factors + received * byte_secs
        fixed_secs = costs.exchange_secs * factors * self._jitters[ranks]
        last_secs = np.minimum(received, CHUNK) * byte_secs
        ended_at = np.maximum(sent_at + bytes_secs, received_at + last_secs)
        self.clocks[ranks] = ended_at + fixed_secs / 2
        self.cpu_secs[ranks] += fixed_secs + bytes_secs
        self.steps[ranks] += 1

    def _occupy(
        self,
        free_at: np.ndarray,
        ranks: np.ndarray,
        starts: np.ndarray,
        durations: np.ndarray,
        is_unused: np.ndarray,
    ) -> np.ndarray:
        """Returns the ends of messages of some ranks on the network cards of their machines.

        Args:
          free_at: Time at which each card is free, by machine. It is updated.
          ranks: Senders or receivers.
          starts: Earliest start of each message.
          durations: Durations of the messages.
          is_unused: True if a rank has no message that uses the card.
        """
        machines = self._machines[ranks]
        if not self._has_shared_cards:
            ends = np.where(is_unused, free_at[machines], np.maximum(starts, free_at[machines]) + durations)
            free_at[machines] = ends
            return ends
        ends = np.maximum(starts, free_at[machines])
        for i in np.argsort(starts, kind="stable"):
            if not is_unused[i]:
                ends[i] = free_at[machines[i]] = max(starts[i], free_at[machines[i]]) + durations[i]
        return ends

    def _take(self, table: np.ndarray, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return table[0, steps] if self._is_symmetric else table[ranks, steps]
