"""Asks again and again, in a thread, which hosts there are.

lookout = Lookout(script, slots=1)
lookout.newest()        -> a Found that nobody has been given yet, or None
lookout.stop()
"""

import queue
import threading
from collections.abc import Sequence

from ctl.launch import discovery
from ctl.launch.discovery import Found
from ctl.launch.hosts import Host

_ASK_SECS = 1.0


class Lookout:
    """Lives as long as its thread, with which the kernel would end the script."""

    def __init__(self, script: str, slots: int = 1):
        self._script = script
        self._slots = slots
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="discovery", daemon=True)
        self._thread.start()

    def newest(self) -> Found | None:
        """What the script said last, once."""
        found = None
        while not self._found.empty():
            found = self._found.get()
        return found

    def stop(self) -> None:
        """Ends the script if it runs."""
        self._stopped.set()
        self._thread.join(5.0)

    def _ask(self) -> None:
        while not self._stopped.is_set():
            found = discovery.ask(self._script, interrupted=self._stopped.is_set, slots=self._slots)
            self._found.put(found)
            self._stopped.wait(_ASK_SECS)


class Named:
    """The same for hosts that are named once."""

    def __init__(self, hosts: Sequence[Host]):
        self.hosts = hosts
        self._found: Found | None = Found(hosts)

    def newest(self) -> Found | None:
        """The hosts, the first time."""
        found, self._found = self._found, None
        return found

    def stop(self) -> None:
        """Nothing runs."""
