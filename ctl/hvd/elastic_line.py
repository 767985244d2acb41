"""Connection from an elastic worker to the launcher, which assigns ranks.

    place = placement()                  # blocks until the launcher has a group
    add_listener(state)                  # state.on_hosts_updated(timestamp, result)

The launcher passes its address in CTL_HVD_RENDEZVOUS. Without it, a job is not elastic and this module is
not used. `ctl.launch.elastic` is the other end.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from ctl.collectives.errors import HorovodInternalError, PortInUseError
from ctl.collectives.ranks import Ranks
from ctl.errors import PeerLostError, UsageError
from ctl.io import authenticated_channel
from ctl.io.json_lines import JsonLines
from ctl.launch import worker_channels
from ctl.launch.ports import free_ports
from ctl.launch.rank_environment import rank_environ

LAUNCHER_VARIABLE = "CTL_HVD_RENDEZVOUS"
REMOVED, ADDED = 1, 2  # bit flags of the second argument of `on_hosts_updated`
_LOOK_SECS = 0.5
_REACH_SECS = 60.0  # for a launcher that does not answer in time
_RETRY_SECS = 0.2
_MOST_PORTS = 10  # limit of ports of one process that another program occupied before it could listen
T = TypeVar("T")


class HostListener(Protocol):
    """Interface of an object that is notified when hosts are added or removed."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Handles a change. Called in another thread, possibly several times for the same change."""


class Left(SystemExit):
    """Exit with code 0 of a process that the launcher does not need any more."""


class _Client:
    """The connection and the messages received over it."""

    def __init__(self) -> None:
        self.listeners: list[HostListener] = []
        self.loss_listener: Callable[[str], None] = lambda why: None
        self.lost = ""
        self.skips_sync = False
        self.must_sync = True
        self._generation = 0
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._line = _call()
        threading.Thread(target=self._read, name="elastic-line", daemon=True).start()

    def placement(self) -> Ranks:
        """Joins the next group. Returns when the group is complete."""
        (port,) = free_ports(1, "0.0.0.0")
        self._line.send({"join": port, "skips_sync": self.skips_sync})
        self.skips_sync = False
        answer = self._answer()
        if "leave" in answer:
            print("ctl.hvd: the launcher needs this process no more; it ends", file=sys.stderr)
            raise Left(0)
        if "failure" in answer:
            raise PeerLostError(f"there is no new group of ranks: {answer['failure']}")
        place = answer["place"]
        self.must_sync = answer["must_sync"]
        found = Ranks(**{**place, "addresses": tuple(place["addresses"])})
        os.environ.update(rank_environ(found, os.environ.get("HOROVOD_HOSTNAME", "")))
        return found

    def give_up(self, group: int, why: str) -> None:
        """Reports that this process cannot connect to its group, so that its peers do not wait for it."""
        self._line.send({"unmet": group, "why": why})

    def tell_synced(self) -> None:
        """Reports that this process has the state of the job and may be rank 0 of the next group."""
        self._line.send({"synced": True})

    def _answer(self) -> dict:
        while True:  # an unlimited wait would block Ctrl-C
            try:
                return self._answers.get(timeout=_LOOK_SECS)
            except queue.Empty:
                continue

    def _read(self) -> None:
        while (message := self._line.receive()) is not None:
            if "change" in message:
                if message["group"] == self._generation:
                    for listener in list(self.listeners):
                        listener.on_hosts_updated(message["time"], message["change"])
            elif "notice" in message:
                for listener in list(self.listeners):
                    notice = getattr(listener, "on_hosts_noticed", None)
                    if notice is not None and message["group"] == self._generation:
                        notice(message["time"], message["notice"])
            elif "lost" in message:
                gone = f"rank {message['lost']} is gone (its process has ended)."
                self._lose(message.get("why", gone), message["group"])
            else:
                with self._lock:  # here, because the next message may report a loss
                    self.lost, self.loss_listener = "", lambda why: None
                    self._generation = message.get("place", {}).get("generation", 0)
                self._answers.put(message)
        self._answers.put({"failure": "the launcher is gone"})

    def _lose(self, why: str, group: int) -> None:
        with self._lock:
            if group != self._generation:
                return
            self.lost = why
            tell = self.loss_listener
        tell(why)

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """Sets the listener of the newest group. Calls it at once if a rank is already lost."""
        with self._lock:
            self.loss_listener = tell
            lost = self.lost
        if lost:
            tell(lost)


_client: _Client | None = None
_lock = threading.Lock()


def is_elastic() -> bool:
    """Returns True if ranks of this job may be added and removed."""
    return bool(os.environ.get(LAUNCHER_VARIABLE))


def placement() -> Ranks:
    """Returns the ranks of this process in the next group. Blocks until the launcher has one.

    Raises PeerLostError if there will be no group, and Left, which ends the process with exit code 0,
    if this process is not needed any more.
    """
    return _connected().placement()


def meet_group(connect: Callable[[Ranks], T]) -> T:
    """Returns the result of `connect` for the next complete group. Retries if a group fails meanwhile.

    A port that another program occupies before this process could listen there fails the group, too.
    """
    ports = 0
    while True:
        place = placement()
        try:
            return connect(place)
        except PortInUseError as e:
            ports += 1
            if ports == _MOST_PORTS:
                raise
            print(f"ctl.hvd: {e} It takes another port.", file=sys.stderr)
            _connected().give_up(place.generation, str(e))
        except HorovodInternalError as e:
            print(f"ctl.hvd: group {place.generation} broke at once: {e}", file=sys.stderr)
            time.sleep(_LOOK_SECS)


def add_listener(listener: HostListener) -> None:
    """Adds a listener for changes of the hosts. Outside of an elastic job there are none."""
    if is_elastic():
        _connected().listeners.append(listener)


def remove_listener(listener: HostListener) -> None:
    """Removes a listener."""
    if _client is not None and listener in _client.listeners:
        _client.listeners.remove(listener)


def lost() -> str:
    """Returns a message about a failed rank of the newest group, or an empty string."""
    return "" if _client is None else _client.lost


def on_loss(tell: Callable[[str], None]) -> None:
    """Registers a function that is called with `lost()`, in another thread, if a rank is lost."""
    _connected().on_loss(tell)


def may_skip_sync(skips: bool) -> None:
    """Sets a flag of the next `placement`: True if this process needs no part of the state."""
    _connected().skips_sync = skips


def must_sync() -> bool:
    """Returns True if the newest group has to synchronize, unless all of its ranks may skip it."""
    return _client is None or _client.must_sync


def tell_synced() -> None:
    """Reports that this process has the state of the job and may be rank 0 of the next group."""
    if is_elastic():
        _connected().tell_synced()


def _connected() -> _Client:
    global _client  # noqa: PLW0603  one per process, as ranks are
    with _lock:
        if _client is None:
            _client = _Client()
        return _client


def _call() -> JsonLines:
    host, _, port = os.environ.get(LAUNCHER_VARIABLE, "").rpartition(":")
    secret, worker = authenticated_channel.job_secret(), os.environ.get("CTL_HVD_WORKER", "")
    if not (host and port.isdigit() and secret and worker.isdigit()):
        raise UsageError(
            f"{LAUNCHER_VARIABLE}, CTL_HVD_WORKER and CTL_HVD_SECRET do not say together where the "
            "launcher is; they are for `ctlrun` to set. Start the script with `ctlrun --min-np 1 -np 2 "
            "python ...`."
        )
    endpoint = authenticated_channel.Endpoint(secret, worker_channels.PURPOSE, worker_channels.IDENTITY)
    until_secs = time.monotonic() + _REACH_SECS
    while True:
        try:
            connection = authenticated_channel.connect((host, int(port)), endpoint, {"worker": int(worker)})
            return JsonLines(connection)
        except OSError as e:  # connections of many other processes may have delayed its answer
            is_gone = isinstance(e, ConnectionRefusedError)
            if is_gone or time.monotonic() > until_secs:
                raise PeerLostError(f"the launcher at {host}:{port} cannot be reached: {e}") from None
        time.sleep(_RETRY_SECS)
