"""Worker's side of the startup barrier: sends its facts to the chief and waits for the release."""

import json
import logging
import secrets
import socket
import time

from ctl.distribute.startup_barrier import messages
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import authenticated_channel
from ctl.io.authenticated_channel import PROOF_SECS, ChannelRefusedError, Endpoint
from ctl.io.rendezvous import Caller, Deadline

_log = logging.getLogger("ctl")


def wait_for_release(topology: Topology, facts: dict[str, str], timeout_secs: float) -> None:
    """Returns when the chief releases the workers.

    Raises PeerLostError if the chief does not release them in time, UsageError if it refuses this worker.
    """
    chief, deadline = messages.name_of(topology, 0), Deadline(timeout_secs, messages.FIRST_REMINDER_SECS)
    claim = {"rank": topology.worker_index, "process": secrets.token_hex(8)}
    endpoint = Endpoint(authenticated_channel.job_secret(), messages.PURPOSE, messages.IDENTITY)
    address = messages.address_of(topology, 0)
    caller = Caller(address, endpoint, claim, pause_secs=messages.RETRY_SECS)
    while True:
        try:
            connection = caller.call(deadline.remaining_secs)
            if connection is not None:
                with connection:
                    connection.settimeout(PROOF_SECS)
                    connection.sendall(messages.line({"facts": facts}))
                    caller.failure = _read_answer(connection, deadline.remaining_secs + messages.CLOSE_SECS)
                if caller.failure is None:
                    return
        except ChannelRefusedError as e:
            raise UsageError(str(e)) from None
        except OSError as e:
            caller.failure = e.strerror or str(e)
        if deadline.is_over:
            raise PeerLostError(
                messages.timeout_message(topology, timeout_secs, f"{chief}: {caller.failure}")
            )
        if deadline.is_reminder_due():
            _log.warning("%.0f s: still waiting for %s: %s.", deadline.waited_secs, chief, caller.failure)
        caller.pause()


def _read_answer(connection: socket.socket, wait_secs: float) -> str | None:
    """Returns None when the chief releases the workers, or the reason why the connection is of no use.

    Raises PeerLostError or UsageError if the chief sends one of them.
    """
    received, until_secs = b"", time.monotonic() + wait_secs
    while (left_secs := until_secs - time.monotonic()) > 0:
        connection.settimeout(left_secs)
        try:
            data = connection.recv(65536)
        except TimeoutError:
            break
        if not data:
            return "it closed the connection"
        received += data
        *lines, received = received.split(b"\n")
        if len(received) > messages.MAX_LINE_BYTES:
            return "another program listens on this port"
        for line in lines:
            try:
                message = json.loads(line)
                keys = message.keys() & {"go", "waiting", "timeout", "refused"}
            except (ValueError, AttributeError, RecursionError):
                keys = set()
            if not keys:
                return "another program listens on this port"
            if "go" in keys:
                return None
            if "timeout" in keys:
                raise PeerLostError(str(message["timeout"]))
            if "refused" in keys:
                raise UsageError(str(message["refused"]))
            _log.warning("%s", message["waiting"])
    return "it does not answer"
