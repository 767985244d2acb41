"""A worker's side of the meeting before TensorFlow starts: reports to the chief and waits for its word."""

import json
import logging
import secrets
import socket
import time

from ctl.distribute.startup_barrier import messages
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import authenticated_channel
from ctl.io.authenticated_channel import PROOF_SECS, ChannelRefusedError, Endpoint, LateProofError

_log = logging.getLogger("ctl")


def visit(cluster: Topology, facts: dict[str, str], timeout_secs: float) -> None:
    """Returns when the chief says so; PeerLostError if it does not, UsageError if it refuses."""
    chief, start = messages.name_of(cluster, 0), time.monotonic()
    claim = {"rank": cluster.worker_index, "process": secrets.token_hex(8)}
    endpoint = Endpoint(authenticated_channel.job_secret(), messages.PURPOSE, messages.IDENTITY)
    remind_secs, every_secs = start + messages.NAME_SECS, messages.NAME_SECS
    why: str | None = None
    pause_secs = messages.CALL_AGAIN_SECS / 16  # at first: all workers start at the same time
    while True:
        left_secs = max(messages.CALL_AGAIN_SECS, start + timeout_secs - time.monotonic())
        try:
            with authenticated_channel.connect(
                messages.address_of(cluster, 0), endpoint, claim, min(PROOF_SECS, left_secs)
            ) as connection:
                connection.settimeout(PROOF_SECS)
                connection.sendall(messages.line({"facts": facts}))
                why = _hear(connection, start + timeout_secs + messages.LEAVE_SECS)
            if why is None:
                return
        except ChannelRefusedError as e:
            raise UsageError(str(e)) from None
        except LateProofError as e:  # the last call may be a short one
            why = why or str(e)
        except OSError as e:
            why = e.strerror or str(e)
        now = time.monotonic()
        if now - start >= timeout_secs:
            raise PeerLostError(messages.too_long(timeout_secs, f"{chief}: {why}"))
        if now >= remind_secs:
            _log.warning("%.0f s: still waiting for %s: %s.", now - start, chief, why)
            every_secs *= 2
            remind_secs = now + every_secs
        time.sleep(pause_secs)
        pause_secs = min(2 * pause_secs, messages.CALL_AGAIN_SECS)


def _hear(connection: socket.socket, until_secs: float) -> str | None:
    """What the chief says: None to go on; a word on why nobody useful is there. Raises its refusal."""
    heard = b""
    while (left_secs := until_secs - time.monotonic()) > 0:
        connection.settimeout(left_secs)
        try:
            data = connection.recv(65536)
        except TimeoutError:
            break
        if not data:
            return "it closed the connection"
        heard += data
        *lines, heard = heard.split(b"\n")
        if len(heard) > messages.MOST_LINE_BYTES:
            return "something else answers there"
        for line in lines:
            try:
                said = json.loads(line)
                known = said.keys() & {"go", "waiting", "timeout", "refused"}
            except (ValueError, AttributeError, RecursionError):
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
