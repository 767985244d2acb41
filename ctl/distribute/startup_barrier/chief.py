"""Chief's side of the startup barrier: accepts the workers, compares them and releases them.

    Chief(topology, facts, timeout_secs=600.0).run()

`ctl.distribute.startup_barrier.worker` is the other side. A connection that cannot authenticate as a part
of this job is closed and has no effect.
"""

import contextlib
import errno
import json
import logging
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ctl.distribute import own_port
from ctl.distribute.job_fingerprint import CODE
from ctl.distribute.startup_barrier import messages
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import authenticated_channel
from ctl.io.authenticated_channel import PROOF_SECS, ChannelRefusedError, Endpoint, Listener
from ctl.io.rendezvous import Deadline, listener_sentence, listening_socket, refusal_sentence

_log = logging.getLogger("ctl")


@dataclass(eq=False)
class _ConnectedWorker:
    """An authenticated worker.

    Attributes:
      process: Random identifier of the process. A second process of the same rank has another one.
      received: Received bytes of an incomplete message with the facts.
      facts: Fingerprint of the worker. None until it has been received.
    """

    rank: int
    process: str
    connection: socket.socket
    received: bytes = b""
    facts: dict[str, str] | None = None
    since_secs: float = field(default_factory=time.monotonic)


class Chief:
    """Server of the startup barrier. Accepts workers, logs missing ones and compares their facts."""

    def __init__(self, topology: Topology, facts: dict[str, str], timeout_secs: float):
        self._topology = topology
        self._facts = facts
        self._timeout_secs = timeout_secs
        self._workers: dict[int, _ConnectedWorker] = {}  # by rank
        self._fault = ""  # error message about an authenticated process
        self._secret = authenticated_channel.job_secret()
        endpoint = Endpoint(self._secret, messages.PURPOSE, messages.IDENTITY)
        self._listener = Listener(_listen(topology), endpoint, self._check_claim)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Waits for all workers. Raises PeerLostError if one is missing, UsageError if one differs."""
        deadline = Deadline(self._timeout_secs, messages.FIRST_REMINDER_SECS)
        with contextlib.closing(self):
            while (missing := self._missing_ranks()) and not self._fault:
                if deadline.is_over:
                    text = messages.timeout_message(
                        self._topology, self._timeout_secs, self._names_of(missing)
                    )
                    text += listener_sentence(self._listener, "The chief")
                    text += refusal_sentence(self._listener)
                    self._send_to_all({"timeout": text})
                    raise PeerLostError(text)
                if deadline.is_reminder_due():
                    text = f"{deadline.waited_secs:.0f} s: still waiting for {self._names_of(missing)}."
                    text += refusal_sentence(self._listener)
                    _log.warning("%s", text)
                    self._send_to_all({"waiting": text})
                self._listen_once()
            error = self._fault or self._describe_differences()
            self._send_to_all({"refused": error} if error else {"go": True})
            self._wait_for_disconnects()
        if error:
            raise UsageError(error)

    def close(self) -> None:
        """Closes all connections and frees the port."""
        self._selector.close()
        self._listener.close()
        for worker in self._workers.values():
            worker.connection.close()

    def _workers_with_facts(self) -> list[tuple[_ConnectedWorker, dict[str, str]]]:
        facts_by_worker = [(g, g.facts) for _, g in sorted(self._workers.items())]
        return [(worker, facts) for worker, facts in facts_by_worker if facts is not None]

    def _missing_ranks(self) -> list[int]:
        connected_ranks = {worker.rank for worker, _ in self._workers_with_facts()}
        return [r for r in range(1, self._topology.num_workers) if r not in connected_ranks]

    def _names_of(self, ranks: list[int]) -> str:
        return ", ".join(messages.name_of(self._topology, r) for r in ranks)

    def _listen_once(self) -> None:
        for key, _ in self._selector.select(messages.RETRY_SECS):
            if isinstance(key.data, _ConnectedWorker):
                self._read_facts(key.data)
        for connection, claim in self._listener.accept_callers():
            self._register(_ConnectedWorker(claim["rank"], claim["process"], connection))
        now_secs = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.facts is None and now_secs - worker.since_secs > PROOF_SECS:
                self._disconnect(worker)

    def _check_claim(self, claim: dict[str, Any]) -> ChannelRefusedError | None:
        """Returns the error for an invalid worker, or None. It ends the job if the job has a secret."""
        rank, process, size = claim.get("rank"), claim.get("process"), self._topology.num_workers
        is_known = type(rank) is int and 0 < rank < size
        if not (is_known and isinstance(process, str)):
            problem = f"a process has rank {rank!r} in a job of {size} processes"
        elif rank in self._workers and self._workers[rank].process != process:
            problem = f"two processes claim to be {messages.name_of(self._topology, rank)}"
        else:
            return None
        text = (
            f"{problem}. Give each process its own task index in {messages.job_variables(self._topology)}."
        )
        if self._secret:
            self._fault = self._fault or text
        else:
            _log.warning("Refused: %s", text)
        return ChannelRefusedError(text)

    def _register(self, worker: _ConnectedWorker) -> None:
        if worker.rank in self._workers:  # the same process has reconnected
            self._disconnect(self._workers[worker.rank])
        worker.connection.setblocking(False)
        self._workers[worker.rank] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _read_facts(self, worker: _ConnectedWorker) -> None:
        data = _received(worker.connection)
        if data is None:
            return
        if worker.facts is None:
            worker.received += data
        if not data or len(worker.received) > messages.MAX_LINE_BYTES:
            self._disconnect(worker)
        elif worker.facts is None and b"\n" in worker.received:
            worker.facts, worker.received = _facts_of(worker.received), b""
            if worker.facts is None:
                self._disconnect(worker)

    def _disconnect(self, worker: _ConnectedWorker) -> None:
        self._selector.unregister(worker.connection)
        worker.connection.close()
        del self._workers[worker.rank]

    def _describe_differences(self) -> str | None:
        lines = []
        for worker, facts in self._workers_with_facts():
            for key in sorted({*facts, *self._facts}):
                chief_value, worker_value = self._facts.get(key, "none"), facts.get(key, "none")
                loaded_by_one = key.startswith(CODE) and "none" in (chief_value, worker_value)
                if chief_value != worker_value and not loaded_by_one:
                    worker_name = messages.name_of(self._topology, worker.rank)
                    lines.append(
                        f"  {key}: {worker_value[:300]} on {worker_name}, {chief_value[:300]} on the chief"
                    )
        if not lines:
            return None
        omitted = [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
        return (
            "The workers of this job differ; training was not started.\n"
            + "\n".join(lines[:20] + omitted)
            + "\nStart the same command, with the same versions, on every worker."
        )

    def _send_to_all(self, message: dict) -> None:
        for worker in self._workers.values():  # also to workers that have not sent their facts
            _send(worker.connection, message)

    def _wait_for_disconnects(self) -> None:
        """Waits until workers have closed their connections, which allows TensorFlow to bind the port."""
        until_secs = time.monotonic() + messages.CLOSE_SECS
        while self._workers and time.monotonic() < until_secs:
            for key, _ in self._selector.select(messages.RETRY_SECS):
                if isinstance(key.data, _ConnectedWorker) and _received(key.data.connection) == b"":
                    self._disconnect(key.data)
            for connection, _ in self._listener.accept_callers():
                connection.close()


def _facts_of(line: bytes) -> dict[str, str] | None:
    """Returns the facts in a worker's message by name, or None for an invalid message."""
    try:
        facts = json.loads(line)["facts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_text = isinstance(facts, dict) and all(isinstance(v, str) for v in facts.values())
    return facts if is_text else None


def _listen(topology: Topology) -> socket.socket:
    host, port = messages.address_of(topology, 0)
    try:
        return listening_socket(host, port)
    except OSError as e:
        if e.errno == errno.EADDRINUSE and topology.port_variable != "TF_CONFIG":
            raise own_port.port_error(topology) from None
        raise UsageError(
            f"This chief's own address {host}:{port} cannot be bound ({e.strerror or e}). Write an "
            f"address of this machine and a free port into {messages.job_variables(topology)} of every "
            "worker."
        ) from None


def _send(connection: socket.socket, message: dict) -> None:
    """Sends a message without blocking. It is lost if the worker does not read."""
    with contextlib.suppress(OSError):
        connection.sendall(messages.line(message))


def _received(connection: socket.socket) -> bytes | None:
    """Returns the available bytes, b"" at the end of the connection, None if no bytes are available."""
    try:
        return connection.recv(65536)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""
