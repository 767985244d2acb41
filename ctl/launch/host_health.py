"""Hosts of an elastic job and their failures: the time at which a host may be used again.

hosts = HostHealth()
hosts.update([Host("host1", 2)])
hosts.record_failure("host1")
hosts.can_start("host1")              # False during the delay after the failure
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ctl.launch.hosts import Host
from ctl.launch.restart_policy import LONGEST_DELAY_SECS, RESTART_PAUSE_SECS, exponential_delay_secs

_FORGET_SECS = 3600.0  # an older failure does not count


@dataclass
class HostHealth:
    """Hosts of the newest list, oldest first, with the failures of each.

    Attributes:
      cooldown: Minimum and maximum delay before a host with a failure is used again (seconds). With
        this setting no host is excluded permanently.
    """

    cooldown: tuple[float, float] | None = None
    clock: Callable[[], float] = time.monotonic
    hosts: list[Host] = field(default_factory=list)
    _failures: dict[str, list[float]] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _outages: dict[str, int] = field(default_factory=dict)  # since a process of the host connected

    def update(self, new_hosts: Sequence[Host]) -> bool:
        """Replaces the list, with the previous hosts first. Returns True if it has changed.

        The failures of a removed host are discarded: it may return as another machine with the same name.
        """
        previous_slots = {host.target: host.slots for host in self.hosts}
        new_slots = {host.target: host.slots for host in new_hosts}
        if previous_slots == new_slots:
            return False
        ordered_targets = [t for t in previous_slots if t in new_slots] + [
            t for t in new_slots if t not in previous_slots
        ]
        self.hosts = [Host(target, new_slots[target]) for target in ordered_targets]
        for target in set(previous_slots) - set(new_slots):
            self._failures.pop(target, None)
            self._not_before.pop(target, None)
            self._outages.pop(target, None)
        return True

    def record_failure(self, target: str) -> str:
        """Records a failure of a process. Returns a clause with the time of the next use of the host."""
        now_secs = self.clock()
        recent = [t for t in self._failures.get(target, []) if now_secs - t < _FORGET_SECS]
        self._failures[target] = [*recent, now_secs]
        delay_secs = self._delay_secs(len(recent))
        self._not_before[target] = now_secs + delay_secs
        if delay_secs == math.inf:
            return f"{len(recent) + 1} failures; no further process is started there"
        return f"the next process is started there in {delay_secs:.0f} s at the earliest"

    def record_outage(self, target: str) -> str:
        """Records that ssh could not connect or lost the host. Returns a clause with the time of the retry.

        The processes of a host end together with their connection, which counts once.
        """
        now_secs = self.clock()
        if now_secs >= self._not_before.get(target, -math.inf):
            outages = self._outages.get(target, 0)
            self._outages[target] = outages + 1
            delay_secs = exponential_delay_secs(RESTART_PAUSE_SECS[0], outages, LONGEST_DELAY_SECS)
            self._not_before[target] = now_secs + delay_secs
        return f"retrying the host in {self._not_before[target] - now_secs:.0f} s"

    def record_connection(self, target: str) -> None:
        """Records that a process of the host has connected. The next outage begins with a short pause."""
        self._outages.pop(target, None)

    def exclude(self, target: str) -> str:
        """Records that the host rejects ssh permanently. Returns a clause."""
        self._not_before[target] = math.inf
        return "no further process is started there"

    def is_listed(self, target: str) -> bool:
        """Returns True if the host is on the newest list."""
        return any(host.target == target for host in self.hosts)

    def can_start(self, target: str) -> bool:
        """Returns False during the delay after a failure on the host."""
        return self.clock() >= self._not_before.get(target, -math.inf)

    def _delay_secs(self, failures: int) -> float:
        """Returns the delay after the next failure of a host with this number of failures (seconds)."""
        if self.cooldown is None:
            return RESTART_PAUSE_SECS[failures] if failures < len(RESTART_PAUSE_SECS) else math.inf
        min_secs, max_secs = self.cooldown
        return min(
            max_secs, exponential_delay_secs(min_secs, failures + 1, max_secs) + random.random() * min_secs
        )
