"""Before TensorFlow waits for its peers: are they all there, and are they alike?

    with preflight.checked(cluster, facts, timeout_secs=600.0):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

TensorFlow's constructor waits for ever, without a word, and holds the interpreter's lock. So the
workers meet before, at the chief's own address: each says who it is and what it was started with,
the chief names those that are missing, and lets all go on together. A small process of its own
looks after the constructor. Pure Python.
"""

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ctl.cluster import Cluster
from ctl.errors import PeerLostError, UsageError
from ctl.facts import CODE, shown

TIMEOUT_SECS = 600.0
VARIABLE = "CTL_STARTUP_TIMEOUT_SECS"
_NAME_SECS = 3.0  # before those that are missing are named; then ever more rarely
_RETRY_SECS = 0.2
_LEAVE_SECS = 5.0  # for the chief's last word to arrive
_LINE_BYTES = 1 << 20
_log = logging.getLogger("ctl")
_met = False  # in this process


def timeout_of(asked: float | None) -> float:
    """Seconds to wait for peers: what was asked for, else the launcher's wish, else ten minutes."""
    if asked is not None:
        return asked
    try:
        return max(0.0, float(os.environ.get(VARIABLE, ""))) or TIMEOUT_SECS
    except ValueError:
        return TIMEOUT_SECS


@contextlib.contextmanager
def checked(cluster: Cluster, facts: Mapping[str, Any], timeout_secs: float) -> Iterator[None]:
    """Waits for all workers, compares `facts`, and limits the time of the block, for this process once.

    Raises PeerLostError when one does not come in time, UsageError when one differs from the chief.
    """
    global _met  # noqa: PLW0603  TensorFlow's own server takes the port for good
    if _met or cluster.num_workers < 2:
        yield
        return
    _met = True
    meet(cluster, facts, timeout_secs)
    with _limited(cluster, timeout_secs):
        yield


def meet(cluster: Cluster, facts: Mapping[str, Any], timeout_secs: float) -> None:
    """The meeting alone; see `checked`."""
    mine = {k: str(shown(k, v)) for k, v in facts.items()}
    mine["TF_CONFIG's cluster"] = json.dumps({k: list(v) for k, v in cluster.tasks.items()})
    if cluster.is_chief:
        _Chief(cluster, mine, timeout_secs).run()
    else:
        _visit(cluster, mine, timeout_secs)


def name_of(cluster: Cluster, rank: int) -> str:
    """A worker by its name in TF_CONFIG and its address: "worker 1 (10.0.0.3:2222)"."""
    places = [
        (f"{kind} {i}", address)
        for kind in ("chief", "worker") for i, address in enumerate(cluster.tasks.get(kind, ()))
    ]  # fmt: skip
    called, address = places[rank]
    return f"{called} ({address})"


def _address(cluster: Cluster, rank: int) -> tuple[str, int]:
    addresses = [a for kind in ("chief", "worker") for a in cluster.tasks.get(kind, ())]
    host, _, port = addresses[rank].rpartition(":")
    return host.strip("[]"), int(port)


class _Chief:
    """The chief's side: collects, names who is missing, compares, lets go."""

    def __init__(self, cluster: Cluster, facts: dict[str, str], timeout_secs: float):
        self._cluster = cluster
        self._facts = facts
        self._timeout_secs = timeout_secs
        self._guests: dict[socket.socket, bytes] = {}  # not yet heard out
        self._here: dict[int, tuple[socket.socket, dict]] = {}

    def run(self) -> None:
        start = time.monotonic()
        remind_secs, every_secs = start + _NAME_SECS, _NAME_SECS
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(_listen(self._cluster))
            stack.callback(self._close)
            while missing := self._missing():
                now = time.monotonic()
                if now - start >= self._timeout_secs:
                    text = _too_long(self._timeout_secs, self._names(missing))
                    self._tell({"timeout": text})
                    raise PeerLostError(text)
                if now >= remind_secs:
                    text = f"{now - start:.0f} s: still waiting for {self._names(missing)}."
                    _log.warning("%s", text)
                    self._tell({"waiting": text})
                    every_secs *= 2
                    remind_secs = now + every_secs
                self._listen_once(server)
            difference = self._difference()
            self._tell({"go": True} if difference is None else {"refused": difference})
            self._see_them_off()
        if difference is not None:
            raise UsageError(difference)

    def _missing(self) -> list[int]:
        return [r for r in range(1, self._cluster.num_workers) if r not in self._here]

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(name_of(self._cluster, r) for r in ranks)

    def _listen_once(self, server: socket.socket) -> None:
        known = {s: rank for rank, (s, _) in self._here.items()}
        for ready in select.select([server, *self._guests, *known], [], [], _RETRY_SECS)[0]:
            if ready is server:
                guest, _ = server.accept()
                guest.setblocking(False)
                self._guests[guest] = b""
                continue
            data = _received(ready)
            if ready in known:  # it has said all it had to say: it left
                if not data:
                    del self._here[known[ready]]
                    ready.close()
                continue
            self._guests[ready] += data
            if not data or len(self._guests[ready]) > _LINE_BYTES:
                self._forget(ready)
            elif b"\n" in self._guests[ready]:
                self._admit(ready, self._guests.pop(ready))

    def _admit(self, guest: socket.socket, line: bytes) -> None:
        try:
            said = json.loads(line)
            rank, facts = said["rank"], dict(said["facts"])
            if not (said["ctl"] == 1 and isinstance(rank, int)):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            guest.close()
            return
        size = self._cluster.num_workers
        if rank in self._here or not 0 < rank < size:
            why = (
                f"two processes say that they are {name_of(self._cluster, rank)}"
                if 0 <= rank < size else f"a process says that it is number {rank} of {size}"
            )  # fmt: skip
            text = f"{why}. Every process needs a task index of its own in TF_CONFIG."
            self._here[-1 - rank if rank >= 0 else rank] = guest, facts
            self._tell({"refused": text})
            self._see_them_off()
            raise UsageError(text)
        self._here[rank] = guest, facts

    def _difference(self) -> str | None:
        lines = []
        for rank, (_, facts) in sorted(self._here.items()):
            for key in sorted({*facts, *self._facts}):
                here, there = self._facts.get(key, "nothing"), facts.get(key, "nothing")
                loaded_by_one = key.startswith(CODE) and "nothing" in (here, there)
                if here != there and not loaded_by_one:
                    who = name_of(self._cluster, rank)
                    lines.append(f"  {key}: {there[:300]} on {who}, {here[:300]} on the chief")
        if not lines:
            return None
        more = [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
        return (
            "The workers of this job are not alike; nothing was started.\n"
            + "\n".join(lines[:20] + more)
            + "\nStart the same command, with the same versions, on every worker."
        )

    def _tell(self, message: dict) -> None:
        for guest, _ in self._here.values():
            _send(guest, message)

    def _see_them_off(self) -> None:
        """Lets them close first: the port is free again at once, for TensorFlow's own server."""
        until_secs = time.monotonic() + _LEAVE_SECS
        waiting = [s for s, _ in self._here.values()]
        while waiting and time.monotonic() < until_secs:
            for ready in select.select(waiting, [], [], _RETRY_SECS)[0]:
                if not _received(ready):
                    waiting.remove(ready)

    def _forget(self, guest: socket.socket) -> None:
        del self._guests[guest]
        guest.close()

    def _close(self) -> None:
        for guest in [*self._guests, *(s for s, _ in self._here.values())]:
            guest.close()


def _visit(cluster: Cluster, facts: dict[str, str], timeout_secs: float) -> None:
    """A worker's side: reports to the chief and waits for its word."""
    chief, start = name_of(cluster, 0), time.monotonic()
    hello = {"ctl": 1, "rank": cluster.worker_index, "facts": facts}
    remind_secs, every_secs = start + _NAME_SECS, _NAME_SECS
    while True:
        try:
            with socket.create_connection(_address(cluster, 0), timeout=_NAME_SECS) as connection:
                _send(connection, hello)
                why = _hear(connection, start + timeout_secs + _LEAVE_SECS)
            if why is None:
                return
        except OSError as e:
            why = e.strerror or str(e)
        now = time.monotonic()
        if now - start >= timeout_secs:
            raise PeerLostError(_too_long(timeout_secs, f"{chief}: {why}"))
        if now >= remind_secs:
            _log.warning("%.0f s: still waiting for %s: %s.", now - start, chief, why)
            every_secs *= 2
            remind_secs = now + every_secs
        time.sleep(_RETRY_SECS)


def _hear(connection: socket.socket, until_secs: float) -> str | None:
    """What the chief says: None to go on; a word on why nobody useful is there. Raises its refusal."""
    heard = b""
    while (left_secs := until_secs - time.monotonic()) > 0:
        if not select.select([connection], [], [], left_secs)[0]:
            break
        data = _received(connection)
        if not data:
            return "it closed the connection"
        heard += data
        *lines, heard = heard.split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
                known = said.keys() & {"go", "waiting", "timeout", "refused"}
            except (ValueError, AttributeError):
                known = set()
            if not known:
                return "something else answers there"
            if "go" in known:
                return None
            if "timeout" in known:
                raise PeerLostError(str(said["timeout"]))
            if "refused" in known:
                raise UsageError(str(said["refused"]))
            _log.warning("%s", said["waiting"])
    return "it does not answer"


def _listen(cluster: Cluster) -> socket.socket:
    host, port = _address(cluster, 0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            server.bind((host, port))
        except OSError:  # a name of this machine to others only
            server.bind(("", port))
        server.listen(socket.SOMAXCONN)
    except OSError as e:
        server.close()
        raise UsageError(
            f"This chief's own address {host}:{port} cannot be bound ({e.strerror or e}). Write an "
            "address of this machine and a free port into TF_CONFIG of every worker."
        ) from None
    return server


def _send(connection: socket.socket, message: dict) -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(_NAME_SECS)
        connection.sendall(json.dumps(message).encode() + b"\n")


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _too_long(timeout_secs: float, whom: str) -> str:
    return (
        f"Waited {timeout_secs:g} s (--startup_timeout_secs) for {whom}; it did not come. Is the process "
        "running, does the address in TF_CONFIG lead to it, and does no firewall stand between?"
    )


_WATCHDOG = """
import os, select, signal, sys
secs, pid, text = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], secs)[0] and os.getppid() == pid:
    sys.stderr.write(text); sys.stderr.flush(); os.kill(pid, signal.SIGABRT)
"""


@contextlib.contextmanager
def _limited(cluster: Cluster, timeout_secs: float) -> Iterator[None]:
    """Ends this process with SIGABRT (exit code 134) if the block takes too long.

    Another process does it: within the block Python may not run at all.
    """
    others = [name_of(cluster, r) for r in range(cluster.num_workers) if r != cluster.worker_index]
    text = (
        f"ctl: all workers had answered, but for {timeout_secs:g} s (--startup_timeout_secs) TensorFlow "
        f"has waited for {', '.join(others)}. This process is ended; it is worth another attempt.\n"
    )
    words = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(timeout_secs), str(os.getpid()), text]
    try:
        watchdog = subprocess.Popen(words, stdin=subprocess.PIPE)
    except OSError as e:
        _log.warning("No watchdog for the start of TensorFlow: %s.", e)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            watchdog.stdin.close()  # type: ignore[union-attr]
        watchdog.wait()
