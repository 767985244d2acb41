"""Connection from an elastic worker to the launcher, which assigns ranks.

    ranks = join_next_group()            # blocks until the launcher has a group
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
from ctl.setting_values import WORKER_RANGE_VARIABLE
from ctl.supervision.beat_file import Beats

LAUNCHER_VARIABLE = "CTL_HVD_RENDEZVOUS"
REMOVED, ADDED = 1, 2  # bit flags of the second argument of `on_hosts_updated`
_POLL_SECS = 0.5
_CONNECT_SECS = 60.0  # time limit for the connection to the launcher
_RETRY_SECS = 0.2
_BEATS_PER_LIMIT = 4
_LAUNCHER_LOST = "the launcher is gone, or cannot be reached"
_MAX_PORTS = 10  # attempts of one process to listen at a port that another program does not use
T = TypeVar("T")


class HostListener(Protocol):
    """Interface of an object that is notified when hosts are added or removed."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Handles a change. Called in another thread, possibly several times for the same change."""


class WorkerReleasedExit(SystemExit):
    """Exit of a process that the launcher has released, with code 0."""


class _Client:
    """Connection to the launcher, with a thread that receives messages.

    Attributes:
      listeners: Listeners for changes of the hosts.
      loss_listener: Called with a message after the loss of a rank of the newest group.
      lost: Message about a lost rank of the newest group, or an empty string.
      skip_sync: Flag of the next request: this process needs no part of the state.
      must_sync: True if the newest group has to synchronize its state.
    """

    def __init__(self) -> None:
        self.listeners: list[HostListener] = []
        self.loss_listener: Callable[[str], None] = lambda message: None
        self.lost = ""
        self.skip_sync = False
        self.must_sync = True
        self._generation = 0
        self._beats: Beats | None = None
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._connection = _connect_to_launcher()
        threading.Thread(target=self._read, name="elastic-line", daemon=True).start()

    def join_next_group(self) -> Ranks:
        """Joins the next group. Blocks until the group is complete."""
        (port,) = free_ports(1, "0.0.0.0")
        self._connection.send({"join": port, "skips_sync": self.skip_sync, "group": self._generation})
        self.skip_sync = False
        answer = self._wait_for_answer()
        if "leave" in answer:
            print("ctl.hvd: the launcher has released this process; exiting", file=sys.stderr)
            raise WorkerReleasedExit(0)
        if "failure" in answer:
            raise PeerLostError(f"there is no new group of ranks: {answer['failure']}")
        placement_fields = answer["place"]
        self.must_sync = answer["must_sync"]
        ranks = Ranks(**{**placement_fields, "addresses": tuple(placement_fields["addresses"])})
        if not os.environ.get(WORKER_RANGE_VARIABLE):  # a program of ctl.hvd
            os.environ.update(rank_environ(ranks, os.environ.get("HOROVOD_HOSTNAME", "")))
        return ranks

    def limit_silence(self, limit_secs: float) -> None:
        """Sends regular messages, and ends the connection if the launcher's machine does not answer."""
        self._connection.set_peer_timeout(limit_secs)
        message = {"alive": limit_secs}
        self._connection.send(message)
        secs = limit_secs / _BEATS_PER_LIMIT
        self._beats = Beats(lambda: self._connection.send(message), secs=secs, name="elastic-beats")
        self._beats.start()

    def report_failed_group(self, group: int, reason: str) -> None:
        """Reports that this process cannot connect to its group. Its peers then stop waiting for it."""
        self._connection.send({"unmet": group, "why": reason})

    def report_synced(self) -> None:
        """Reports that this process has the state of the job and may be rank 0 of the next group."""
        self._connection.send({"synced": True})

    def _wait_for_answer(self) -> dict:
        while True:  # an unlimited wait would block Ctrl-C
            try:
                return self._answers.get(timeout=_POLL_SECS)
            except queue.Empty:
                continue

    def _read(self) -> None:
        while (message := self._connection.receive()) is not None:
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
                default_message = f"rank {message['lost']} is gone (its process has ended)."
                self._notify_loss(message.get("why", default_message), message["group"])
            else:
                with self._lock:  # before the next message, which may report a loss
                    self.lost, self.loss_listener = "", lambda message: None
                    self._generation = message.get("place", {}).get("generation", 0)
                self._answers.put(message)
        self._answers.put({"failure": _LAUNCHER_LOST})
        self._notify_loss(_LAUNCHER_LOST, self._generation)
        for listener in list(self.listeners):  # a worker without a group of others ends, too
            listener.on_hosts_updated(time.time(), REMOVED)

    def _notify_loss(self, error_message: str, group: int) -> None:
        with self._lock:
            if group != self._generation:
                return
            self.lost = error_message
            notify = self.loss_listener
        notify(error_message)

    def set_loss_listener(self, listener: Callable[[str], None]) -> None:
        """Sets the listener of the newest group. Calls it immediately if a rank is already lost."""
        with self._lock:
            self.loss_listener = listener
            error_message = self.lost
        if error_message:
            listener(error_message)


_client: _Client | None = None
_lock = threading.Lock()


def is_elastic() -> bool:
    """Returns True if ranks of this job may be added and removed."""
    return bool(os.environ.get(LAUNCHER_VARIABLE))


def join_next_group() -> Ranks:
    """Returns the ranks of this process in the next group. Blocks until the launcher has one.

    Raises:
      PeerLostError: If the launcher cannot start another group, or has ended.
      WorkerReleasedExit: If the launcher has released this process. It ends the process with exit code 0.
    """
    return _get_client().join_next_group()


def connect_group(connect: Callable[[Ranks], T]) -> T:
    """Calls `connect` for the next group and returns its result. Retries with the next group on failure.

    A group also fails if another program uses the port of a process. That process then takes another port.
    """
    num_ports = 0
    while True:
        ranks = join_next_group()
        try:
            return connect(ranks)
        except PortInUseError as e:
            num_ports += 1
            if num_ports == _MAX_PORTS:
                raise
            print(f"ctl.hvd: {e} Retrying with another port.", file=sys.stderr)
            _get_client().report_failed_group(ranks.generation, str(e))
        except HorovodInternalError as e:
            print(f"ctl.hvd: group {ranks.generation} failed to connect: {e}", file=sys.stderr)
            time.sleep(_POLL_SECS)


def add_listener(listener: HostListener) -> None:
    """Adds a listener for changes of the hosts. A no-op if the job is not elastic."""
    if is_elastic():
        _get_client().listeners.append(listener)


def remove_listener(listener: HostListener) -> None:
    """Removes a listener. A no-op if it was not added."""
    if _client is not None and listener in _client.listeners:
        _client.listeners.remove(listener)


def read_loss() -> str:
    """Returns a message about a failed rank of the newest group, or an empty string."""
    return "" if _client is None else _client.lost


def set_loss_listener(listener: Callable[[str], None]) -> None:
    """Sets the function that is called, in another thread, with a message about the loss of a rank.

    It applies to the newest group. If a rank is already lost, it is called immediately.
    """
    _get_client().set_loss_listener(listener)


def set_skip_sync(skip: bool) -> None:
    """Sets a flag for the next `join_next_group`: True if this process needs no part of the state."""
    _get_client().skip_sync = skip


def must_sync() -> bool:
    """Returns True if the newest group has to synchronize its state. False if all ranks may skip it."""
    return _client is None or _client.must_sync


def limit_silence(limit_secs: float) -> None:
    """Bounds the silence between this process and the launcher, also over a cut link (seconds).

    The launcher may kill this process if it is silent for longer and another rank has lost it. If the
    machine of the launcher does not answer for this time, the connection is lost, and this process ends.
    """
    if is_elastic():
        _get_client().limit_silence(limit_secs)


def report_synced() -> None:
    """Reports that this process has the state of the job and may be rank 0 of the next group."""
    if is_elastic():
        _get_client().report_synced()


def _get_client() -> _Client:
    global _client  # noqa: PLW0603  one per process, as ranks are
    with _lock:
        if _client is None:
            _client = _Client()
        return _client


def _connect_to_launcher() -> JsonLines:
    host, _, port = os.environ.get(LAUNCHER_VARIABLE, "").rpartition(":")
    secret, worker = authenticated_channel.job_secret(), os.environ.get("CTL_HVD_WORKER", "")
    if not (host and port.isdigit() and secret and worker.isdigit()):
        raise UsageError(
            f"{LAUNCHER_VARIABLE}, CTL_HVD_WORKER and CTL_HVD_SECRET do not contain the address of a "
            "launcher; expected the values that `ctlrun` sets. Start the script with `ctlrun --min-np 1 "
            "-np 2 python ...`."
        )
    endpoint = authenticated_channel.Endpoint(secret, worker_channels.PURPOSE, worker_channels.IDENTITY)
    deadline_secs = time.monotonic() + _CONNECT_SECS
    while True:
        try:
            connection = authenticated_channel.connect((host, int(port)), endpoint, {"worker": int(worker)})
            return JsonLines(connection)
        except OSError as e:  # the launcher may be busy with the connections of many processes
            is_refused = isinstance(e, ConnectionRefusedError)
            if is_refused or time.monotonic() > deadline_secs:
                raise PeerLostError(f"the launcher at {host}:{port} cannot be reached: {e}") from None
        time.sleep(_RETRY_SECS)
