"""Which machines an elastic job may use, and since when not: failures count against a machine.

machines = Machines(cooldown=None)
machines.are([Host("host1", 2)])
machines.failed("host1")
machines.may_start("host1")     -> False, for a second
"""

import math
import random
import time
from collections.abc import Callable, Sequence

from ctl.launch.hosts import Host

RETRIES_SECS = (1.0, 2.0, 4.0)  # after a failure, before the next start there; then never more
_FORGIVEN_SECS = 3600.0  # a failure so long ago does not count


class Machines:
    """The hosts that were named last, oldest first, with what is held against each."""

    def __init__(
        self,
        cooldown: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Keeps.

        Args:
          cooldown: seconds, least and most, before a host with a failure is used again; with them no
            host is given up.
        """
        self.hosts: list[Host] = []
        self.clock = clock
        self._cooldown = cooldown
        self._failures: dict[str, list[float]] = {}
        self._not_before: dict[str, float] = {}

    def are(self, found: Sequence[Host]) -> bool:
        """Takes a new list, those that were there before first; True if it says anything new.

        A host that was away starts anew: it may be another machine with the same name.
        """
        before = {host.target: host.slots for host in self.hosts}
        now = {host.target: host.slots for host in found}
        if before == now:
            return False
        order = [t for t in before if t in now] + [t for t in now if t not in before]
        self.hosts = [Host(target, now[target]) for target in order]
        for target in set(before) - set(now):
            self._failures.pop(target, None)
            self._not_before.pop(target, None)
        return True

    def failed(self, target: str) -> str:
        """A process failed there; returns in words when the host is used again."""
        now = self.clock()
        recent = [t for t in self._failures.get(target, []) if now - t < _FORGIVEN_SECS]
        self._failures[target] = [*recent, now]
        delay_secs = self._delay_secs(len(recent))
        self._not_before[target] = now + delay_secs
        if delay_secs == math.inf:
            return f"{len(recent) + 1} failures; nothing more is started there"
        return f"something is started there again in {delay_secs:.0f} s at the earliest"

    def may_start(self, target: str) -> bool:
        """False while failures are held against a host."""
        return self.clock() >= self._not_before.get(target, -math.inf)

    def _delay_secs(self, failures: int) -> float:
        """After the next failure of a host that has had so many."""
        if self._cooldown is None:
            return RETRIES_SECS[failures] if failures < len(RETRIES_SECS) else math.inf
        least, most = self._cooldown
        doubled = least * 2.0 ** min(failures + 1, 30) + random.random() * least
        return max(least, min(most, doubled))
