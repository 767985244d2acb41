"""Authentication of callers: invalid bytes, order, reflection, replay and many unauthenticated callers."""

import contextlib
import random
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import TIMEOUT_SECS
from ctl.io import authenticated_channel as channel
from ctl.io.authenticated_channel import ChannelRefusedError, Endpoint, Listener, UnprovenError, connect
from ctl.io.tcp_options import PEER_TIMEOUT_SECS
from strangers import LINES, MAGIC, crowd

SECRET = b"known to this job only"
ENDPOINT = Endpoint(SECRET, "test", "rank 0")


class ListenerThread:
    """A listener in a thread; `claims` holds the claims of authenticated callers."""

    def __init__(self, endpoint=ENDPOINT, check_claim=lambda claim: None):
        self.claims, self.connections, self._stopped = [], [], threading.Event()
        self._changed = threading.Condition()
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = listening.getsockname()
        self.listener = Listener(listening, endpoint, check_claim)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join(TIMEOUT_SECS)
        self.listener.close()
        for connection in self.connections:
            connection.close()

    def _run(self):
        while not self._stopped.is_set():
            for connection, claim in self.listener.accept_callers(0.05):
                connection.sendall(b"after the proof")
                with self._changed:
                    self.claims.append(claim)
                    self.connections.append(connection)
                    self._changed.notify_all()

    def wait_for_claims(self, count):
        """Returns the claims when there are at least `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.claims) >= count, TIMEOUT_SECS)
        return self.claims

    def call(self, endpoint=ENDPOINT, claim=None):
        return connect(self.address, endpoint, claim or {"rank": 1}, TIMEOUT_SECS)


def answer_to(address, data):
    """Returns the bytes that a raw caller receives for `data` until the listener closes."""
    with socket.create_connection(address, timeout=TIMEOUT_SECS) as raw:
        received = b""
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while data := raw.recv(4096):
                received += data
        except OSError:
            pass
        return received


def record_handshake(server, endpoint=ENDPOINT):
    """Records a successful handshake; returns (bytes of the caller, bytes of the listener)."""
    sent, received = b"", b""
    proxy = socket.create_server(("127.0.0.1", 0))
    caller = threading.Thread(
        target=lambda: connect(proxy.getsockname(), endpoint, {"rank": 1}, TIMEOUT_SECS).close()
    )
    caller.start()
    caller_side, _ = proxy.accept()
    with caller_side, socket.create_connection(server.address) as listener_side:
        received += listener_side.recv(4096)
        caller_side.sendall(received)
        while len(sent) < len(received) + 2 + len('{"rank": 1}') + 32:
            sent += caller_side.recv(4096)
        listener_side.sendall(sent)
        answer = listener_side.recv(4096)
        caller_side.sendall(answer)
    caller.join(TIMEOUT_SECS)
    proxy.close()
    return sent, received + answer


def test_both_sides_can_send_bytes_after_the_proof():
    with ListenerThread() as server, server.call(claim={"rank": 3}) as connection:
        assert connection.recv(15) == b"after the proof"
        assert server.wait_for_claims(1) == [{"rank": 3}]
        seconds = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert seconds == PEER_TIMEOUT_SECS


@pytest.mark.parametrize("other", [
    Endpoint(b"a guess", "test", "rank 0"), Endpoint(b"", "test", "rank 0"),
    Endpoint(SECRET, "another port", "rank 0"), Endpoint(SECRET, "test", "rank 2"),
])  # fmt: skip
def test_another_secret_purpose_or_identity_is_refused(other):
    with ListenerThread() as server:
        with pytest.raises(OSError):
            server.call(other)
        assert server.claims == []
        with server.call():
            pass
        assert server.listener.refused == 1 and server.listener.last_refused == "127.0.0.1"


def test_a_refused_caller_receives_the_reason_and_whether_to_retry():
    def refuse(claim):
        return ChannelRefusedError("not you", can_retry=claim["rank"] == 2)

    with ListenerThread(check_claim=refuse) as server:
        for rank in (1, 2):
            with pytest.raises(ChannelRefusedError, match="not you") as raised:
                server.call(claim={"rank": rank})
            assert raised.value.can_retry == (rank == 2)
        assert server.claims == []


@pytest.mark.parametrize("name", LINES)
def test_garbage_closes_only_its_own_connection(name):
    with ListenerThread() as server:
        answer = answer_to(server.address, LINES[name])
        assert len(answer) <= 40, "expected only the listener's nonce"
        with server.call():
            pass
        assert server.wait_for_claims(1) == [{"rank": 1}]


def test_no_byte_of_a_valid_proof_can_be_omitted_changed_or_exchanged():
    source = random.Random(11)
    with ListenerThread() as server:
        sent, _ = record_handshake(server)
        server.wait_for_claims(1).clear()
        for _ in range(300):
            changed_bytes = bytearray(sent)
            for _ in range(source.randint(1, 3)):
                position = source.randrange(len(changed_bytes))
                change = source.randrange(4)
                if change == 0:
                    changed_bytes[position] ^= 1 << source.randrange(8)
                elif change == 1:
                    del changed_bytes[position]
                elif change == 2:
                    changed_bytes.insert(position, source.randrange(256))
                else:
                    other = source.randrange(len(changed_bytes))
                    first, second = changed_bytes[position], changed_bytes[other]
                    changed_bytes[position], changed_bytes[other] = second, first
            answer_to(server.address, bytes(changed_bytes))
        assert server.claims == []


def test_a_recorded_handshake_cannot_be_replayed():
    with ListenerThread() as server:
        sent, received = record_handshake(server)
        assert server.wait_for_claims(1) == [{"rank": 1}]
        for replayed in (sent, received, sent + received, received + sent):
            answer_to(server.address, replayed)
        assert server.claims == [{"rank": 1}]

        impostor = socket.create_server(("127.0.0.1", 0))

        def replay_to_caller():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(received)
                connection.recv(4096)

        threading.Thread(target=replay_to_caller, daemon=True).start()
        with pytest.raises(UnprovenError, match="its secret is not that of this job"):
            connect(impostor.getsockname(), ENDPOINT, {"rank": 1}, TIMEOUT_SECS)
        impostor.close()


def test_a_listener_does_not_sign_a_proof_that_is_valid_elsewhere():
    """Reflection: all bytes of a listener are sent back to it or to another listener of the same rank."""
    with ListenerThread() as server, ListenerThread() as other:
        for target in (server, other):
            with (
                socket.create_connection(server.address, timeout=TIMEOUT_SECS) as source,
                socket.create_connection(target.address, timeout=TIMEOUT_SECS) as two,
            ):
                nonce = source.recv(4096)
                two.recv(4096)
                two.sendall(nonce + b"\0\x0b" + b'{"rank": 1}' + nonce[-32:])
                with pytest.raises(ConnectionError):
                    if two.recv(4096) == b"":
                        raise ConnectionError
        assert server.claims == other.claims == []


def test_a_caller_refuses_a_listener_that_reflects_its_bytes():
    mirror = socket.create_server(("127.0.0.1", 0))

    def reflect():
        connection, _ = mirror.accept()
        with connection:
            connection.sendall(MAGIC + b"\0" * 32)
            received = connection.recv(4096)
            connection.sendall(b"\0\2{}" + received[-32:])
            connection.recv(4096)

    threading.Thread(target=reflect, daemon=True).start()
    with pytest.raises(UnprovenError, match="its secret is not that of this job"):
        connect(mirror.getsockname(), ENDPOINT, {"rank": 1}, TIMEOUT_SECS)
    mirror.close()


def test_the_timeout_of_a_caller_holds_for_a_listener_that_sends_slowly():
    impostor = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def drip():
        connection, _ = impostor.accept()
        with connection:
            for byte in MAGIC + b"\0" * 32:
                if stopped.wait(0.5):
                    return
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return

    threading.Thread(target=drip, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(UnprovenError, match="did not prove within 1 s"):
        connect(impostor.getsockname(), ENDPOINT, {"rank": 1}, 1.0)
    assert time.monotonic() - start < 10  # all bytes take 20 s
    stopped.set()
    impostor.close()


def test_silent_callers_are_disconnected_after_the_timeout(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_SECS", 0.2)
    with (
        ListenerThread() as server,
        socket.create_connection(server.address, timeout=TIMEOUT_SECS) as caller,
    ):
        assert len(caller.recv(4096)) == 40
        with pytest.raises(ConnectionError):
            if caller.recv(4096) == b"":
                raise ConnectionError
        assert server.listener.refused == 1


@pytest.mark.parametrize("count", [300, 1100])
def test_many_unauthenticated_callers_do_not_block_a_member(count):
    count = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # both ends are in this process
    with ListenerThread() as server, crowd(server.address[1], silent=min(count, 600)):
        strangers = [socket.create_connection(server.address, TIMEOUT_SECS) for _ in range(count - 600)]
        deadline_secs = time.monotonic() + TIMEOUT_SECS
        remaining_ranks = list(range(10))
        while remaining_ranks and time.monotonic() < deadline_secs:
            try:
                connect(server.address, ENDPOINT, {"rank": remaining_ranks[0]}).close()
                del remaining_ranks[0]
            except OSError:  # each caller retries
                continue
        assert remaining_ranks == []
        assert {claim["rank"] for claim in server.wait_for_claims(10)} == set(range(10))
        for stranger in strangers:
            stranger.close()


def test_a_limit_of_pending_callers_does_not_end_the_listener(monkeypatch):
    monkeypatch.setattr(channel, "MAX_PENDING_CALLERS", 8)
    with ListenerThread() as server:
        strangers = [socket.create_connection(server.address, TIMEOUT_SECS) for _ in range(50)]
        with server.call():
            pass
        assert server.wait_for_claims(1) == [{"rank": 1}] and server.listener.refused >= 42
        for stranger in strangers:
            stranger.close()


def test_a_proof_depends_on_role_purpose_identity_and_boundaries_of_parts():
    proofs = [
        Endpoint(SECRET, purpose, identity).proof(role, *parts)
        for role, purpose, identity, parts in [
            ("caller", "a", "bc", (b"x", b"yz")), ("listener", "a", "bc", (b"x", b"yz")),
            ("caller", "ab", "c", (b"x", b"yz")), ("caller", "a", "b", (b"cx", b"yz")),
            ("caller", "a", "bc", (b"xy", b"z")), ("caller", "a", "bc", (b"xyz",)),
        ]
    ]  # fmt: skip
    assert len(set(proofs)) == len(proofs)


def test_a_caller_that_sends_slowly_is_disconnected_after_the_timeout(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_SECS", 0.3)
    sent = 0
    with ListenerThread() as server, socket.create_connection(server.address, timeout=TIMEOUT_SECS) as slow:
        with contextlib.suppress(ConnectionError):
            for byte in MAGIC + bytes(32) + b"\2\0" + bytes(500):
                slow.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert server.listener.refused == 1
    assert sent < 100  # of 542


def test_the_length_of_a_too_long_claim_closes_the_connection(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_SECS", 1000.0)
    with (
        ListenerThread() as server,
        socket.create_connection(server.address, timeout=TIMEOUT_SECS / 2) as raw,
    ):
        assert len(raw.recv(4096)) == 40
        raw.sendall(MAGIC + bytes(32) + (channel.MAX_CLAIM_BYTES + 1).to_bytes(2, "big"))
        with pytest.raises(ConnectionError):
            if raw.recv(4096) == b"":
                raise ConnectionError


@pytest.mark.parametrize("verdict", [None, b"[" * 2000, b"5", b"{"])
def test_a_listener_with_an_invalid_response_is_reported_as_another_program(verdict):
    """Without a secret any process can sign. None: only a length that exceeds the maximum."""
    endpoint = Endpoint(b"", "test", "rank 0")
    impostor = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(MAGIC + bytes(32))
            received = connection.recv(4096)
            if verdict is None:
                connection.sendall(b"\xff\xff")
            else:
                claim = received[len(MAGIC) + 34 : -32]
                proof = endpoint.proof("listener", bytes(32), received[len(MAGIC) :][:32], claim, verdict)
                connection.sendall(len(verdict).to_bytes(2, "big") + verdict + proof)
            connection.recv(1)  # until the caller disconnects

    with impostor, ThreadPoolExecutor() as pool:
        answered = pool.submit(answer)
        with pytest.raises(UnprovenError, match="another program listens on this port"):
            connect(impostor.getsockname(), endpoint, {"rank": 1}, 10.0)
        answered.result(TIMEOUT_SECS)
