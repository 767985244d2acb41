"""Who does not know the secret is not let in and harms nobody: bytes, order, reflection, replay, crowds."""

import contextlib
import errno
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
from strangers import LINES, MAGIC, crowd

SECRET = b"known to this job only"
HERE = Endpoint(SECRET, "test", "rank 0")


class Door:
    """A listener in a thread; `came` are the claims of those that were let in."""

    def __init__(self, endpoint=HERE, judge=lambda claim: None):
        self.came, self.connections, self._over = [], [], threading.Event()
        self._news = threading.Condition()
        server = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = server.getsockname()
        self.listener = Listener(server, endpoint, judge)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(TIMEOUT_SECS)
        self.listener.close()
        for one in self.connections:
            one.close()

    def _run(self):
        while not self._over.is_set():
            for connection, claim in self.listener.accept_callers(0.05):
                connection.sendall(b"after the proof")
                with self._news:
                    self.came.append(claim)
                    self.connections.append(connection)
                    self._news.notify_all()

    def let_in(self, count):
        """The claims, once there are so many."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.came) >= count, TIMEOUT_SECS)
        return self.came

    def call(self, endpoint=HERE, claim=None):
        return connect(self.address, endpoint, claim or {"rank": 1}, TIMEOUT_SECS)


def answer_to(address, data):
    """What a raw caller gets for its bytes, until the listener closes."""
    with socket.create_connection(address, timeout=TIMEOUT_SECS) as raw:
        got = b""
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while data := raw.recv(4096):
                got += data
        except OSError:
            pass
        return got


def recorded(door, endpoint=HERE):
    """What both sides of one good meeting sent: (the caller's bytes, the listener's)."""
    sent, got = b"", b""
    proxy = socket.create_server(("127.0.0.1", 0))
    caller = threading.Thread(
        target=lambda: connect(proxy.getsockname(), endpoint, {"rank": 1}, TIMEOUT_SECS).close()
    )
    caller.start()
    left, _ = proxy.accept()
    with left, socket.create_connection(door.address) as right:
        got += right.recv(4096)
        left.sendall(got)
        while len(sent) < len(got) + 2 + len('{"rank": 1}') + 32:
            sent += left.recv(4096)
        right.sendall(sent)
        answer = right.recv(4096)
        left.sendall(answer)
    caller.join(TIMEOUT_SECS)
    proxy.close()
    return sent, got + answer


def test_both_sides_go_on_with_bytes_of_their_own_after_the_proof():
    with Door() as door, door.call(claim={"rank": 3}) as connection:
        assert connection.recv(15) == b"after the proof"
        assert door.let_in(1) == [{"rank": 3}]
        seconds = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert seconds == channel.PEER_TIMEOUT_SECS


@pytest.mark.parametrize("other", [
    Endpoint(b"a guess", "test", "rank 0"), Endpoint(b"", "test", "rank 0"),
    Endpoint(SECRET, "another port", "rank 0"), Endpoint(SECRET, "test", "rank 2"),
])  # fmt: skip
def test_another_secret_purpose_or_identity_is_not_let_in(other):
    with Door() as door:
        with pytest.raises(OSError):
            door.call(other)
        assert door.came == []
        with door.call():
            pass
        assert door.listener.refused == 1 and door.listener.last_refused == "127.0.0.1"


def test_who_is_not_wanted_is_told_why_and_whether_to_come_again():
    with Door(judge=lambda claim: ChannelRefusedError("not you", can_retry=claim["rank"] == 2)) as door:
        for rank in (1, 2):
            with pytest.raises(ChannelRefusedError, match="not you") as caught:
                door.call(claim={"rank": rank})
            assert caught.value.can_retry == (rank == 2)
        assert door.came == []


@pytest.mark.parametrize("name", LINES)
def test_garbage_ends_its_own_connection_only(name):
    with Door() as door:
        answer = answer_to(door.address, LINES[name])
        assert len(answer) <= 40, "the listener's nonce, and nothing else"
        with door.call():
            pass
        assert door.let_in(1) == [{"rank": 1}]


def test_no_byte_of_a_good_proof_can_be_left_out_changed_or_exchanged():
    source = random.Random(11)
    with Door() as door:
        sent, _ = recorded(door)
        door.let_in(1).clear()
        for _ in range(300):
            bad = bytearray(sent)
            for _ in range(source.randint(1, 3)):
                at = source.randrange(len(bad))
                how = source.randrange(4)
                if how == 0:
                    bad[at] ^= 1 << source.randrange(8)
                elif how == 1:
                    del bad[at]
                elif how == 2:
                    bad.insert(at, source.randrange(256))
                else:
                    other = source.randrange(len(bad))
                    bad[at], bad[other] = bad[other], bad[at]
            answer_to(door.address, bytes(bad))
        assert door.came == []


def test_what_was_recorded_is_worth_nothing_again():
    with Door() as door:
        sent, got = recorded(door)
        assert door.let_in(1) == [{"rank": 1}]
        for replayed in (sent, got, sent + got, got + sent):
            answer_to(door.address, replayed)
        assert door.came == [{"rank": 1}]

        false = socket.create_server(("127.0.0.1", 0))

        def play():
            connection, _ = false.accept()
            with connection:
                connection.sendall(got)
                connection.recv(4096)

        threading.Thread(target=play, daemon=True).start()
        with pytest.raises(UnprovenError, match="its secret is not that of this job"):
            connect(false.getsockname(), HERE, {"rank": 1}, TIMEOUT_SECS)
        false.close()


def test_a_listener_does_not_sign_for_a_stranger_what_lets_it_in_elsewhere():
    """Reflection: all that a listener says is sent back to it, or to another one of the same rank."""
    with Door() as door, Door() as other:
        for target in (door, other):
            with (
                socket.create_connection(door.address, timeout=TIMEOUT_SECS) as one,
                socket.create_connection(target.address, timeout=TIMEOUT_SECS) as two,
            ):
                nonce = one.recv(4096)
                two.recv(4096)
                two.sendall(nonce + b"\0\x0b" + b'{"rank": 1}' + nonce[-32:])
                with pytest.raises(ConnectionError):
                    if two.recv(4096) == b"":
                        raise ConnectionError
        assert door.came == other.came == []


def test_a_caller_believes_no_listener_that_only_sends_back_what_came():
    mirror = socket.create_server(("127.0.0.1", 0))

    def reflect():
        connection, _ = mirror.accept()
        with connection:
            connection.sendall(MAGIC + b"\0" * 32)
            came = connection.recv(4096)
            connection.sendall(b"\0\2{}" + came[-32:])
            connection.recv(4096)

    threading.Thread(target=reflect, daemon=True).start()
    with pytest.raises(UnprovenError, match="its secret is not that of this job"):
        connect(mirror.getsockname(), HERE, {"rank": 1}, TIMEOUT_SECS)
    mirror.close()


def test_one_byte_at_a_time_keeps_a_caller_no_longer_than_it_said():
    false = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip():
        connection, _ = false.accept()
        with connection:
            for byte in MAGIC + b"\0" * 32:
                if over.wait(0.5):
                    return
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return

    threading.Thread(target=drip, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(UnprovenError, match="did not prove within 1 s"):
        connect(false.getsockname(), HERE, {"rank": 1}, 1.0)
    assert time.monotonic() - start < 10  # all bytes take 20 s
    over.set()
    false.close()


def test_silent_callers_leave_when_their_time_is_over(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_SECS", 0.2)
    with Door() as door, socket.create_connection(door.address, timeout=TIMEOUT_SECS) as silent:
        assert len(silent.recv(4096)) == 40
        with pytest.raises(ConnectionError):
            if silent.recv(4096) == b"":
                raise ConnectionError
        assert door.listener.refused == 1


@pytest.mark.parametrize("count", [300, 1100])
def test_a_crowd_of_strangers_does_not_keep_a_member_out(count):
    count = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # both ends are in this process
    with Door() as door, crowd(door.address[1], silent=min(count, 600)):
        held = [socket.create_connection(door.address, timeout=30) for _ in range(count - 600)]
        until_secs = time.monotonic() + 60
        wanted = list(range(10))
        while wanted and time.monotonic() < until_secs:
            try:
                connect(door.address, HERE, {"rank": wanted[0]}).close()
                del wanted[0]
            except OSError:  # another try is what every caller of ours makes
                continue
        assert wanted == [] and {claim["rank"] for claim in door.let_in(10)} == set(range(10))
        for one in held:
            one.close()


def test_fewer_descriptors_than_strangers_do_not_end_the_listener(monkeypatch):
    monkeypatch.setattr(channel, "MAX_PENDING_CALLERS", 8)
    with Door() as door:
        held = [socket.create_connection(door.address, timeout=30) for _ in range(50)]
        with door.call():
            pass
        assert door.let_in(1) == [{"rank": 1}] and door.listener.refused >= 42
        for one in held:
            one.close()


def test_a_proof_says_for_whom_and_where_each_part_ends():
    proofs = [
        Endpoint(SECRET, purpose, identity).proof(role, *parts)
        for role, purpose, identity, parts in [
            ("caller", "a", "bc", (b"x", b"yz")), ("listener", "a", "bc", (b"x", b"yz")),
            ("caller", "ab", "c", (b"x", b"yz")), ("caller", "a", "b", (b"cx", b"yz")),
            ("caller", "a", "bc", (b"xy", b"z")), ("caller", "a", "bc", (b"xyz",)),
        ]
    ]  # fmt: skip
    assert len(set(proofs)) == len(proofs)


def test_a_caller_that_sends_a_byte_now_and_then_leaves_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_SECS", 0.3)
    sent = 0
    with Door() as door, socket.create_connection(door.address, timeout=TIMEOUT_SECS) as slow:
        with contextlib.suppress(ConnectionError):
            for byte in MAGIC + bytes(32) + b"\2\0" + bytes(500):
                slow.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert door.listener.refused == 1
    assert sent < 100  # of 542


def test_a_claim_that_would_be_too_long_ends_the_connection_before_it_comes(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_SECS", 1000.0)
    with Door() as door, socket.create_connection(door.address, timeout=TIMEOUT_SECS / 2) as raw:
        assert len(raw.recv(4096)) == 40
        raw.sendall(MAGIC + bytes(32) + (channel.MAX_CLAIM_BYTES + 1).to_bytes(2, "big"))
        with pytest.raises(ConnectionError):
            if raw.recv(4096) == b"":
                raise ConnectionError


class Full(socket.socket):
    """A listening socket for whose callers there is no file descriptor, as long as it `is_full`."""

    is_full = False

    def accept(self):
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_free_descriptor_the_oldest_stranger_leaves_and_the_listener_goes_on():
    server = Full()
    server.bind(("127.0.0.1", 0))
    server.listen()
    listener = Listener(server, HERE)
    with socket.create_connection(server.getsockname()), contextlib.closing(listener):
        listener.accept_callers(TIMEOUT_SECS)
        server.is_full = True
        with socket.create_connection(server.getsockname()):
            for _ in range(3):  # the second time there is nobody to leave
                assert listener.accept_callers(TIMEOUT_SECS) == []
            assert listener.refused == 1
            server.is_full = False
            with ThreadPoolExecutor() as pool:
                caller = pool.submit(connect, server.getsockname(), HERE, {"rank": 1}, TIMEOUT_SECS)
                found, until_secs = [], time.monotonic() + TIMEOUT_SECS
                while not found and time.monotonic() < until_secs:
                    found = listener.accept_callers(0.05)
                caller.result(TIMEOUT_SECS).close()
            assert [claim for _, claim in found] == [{"rank": 1}]
            found[0][0].close()


@pytest.mark.parametrize("verdict", [None, b"[" * 2000, b"5", b"{"])
def test_a_listener_that_answers_nonsense_is_something_else(verdict):
    """Without a secret anybody can sign; None: only a length, longer than any verdict."""
    here = Endpoint(b"", "test", "rank 0")
    false = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = false.accept()
        with connection:
            connection.sendall(MAGIC + bytes(32))
            came = connection.recv(4096)
            if verdict is None:
                connection.sendall(b"\xff\xff")
            else:
                claim = came[len(MAGIC) + 34 : -32]
                proof = here.proof("listener", bytes(32), came[len(MAGIC) :][:32], claim, verdict)
                connection.sendall(len(verdict).to_bytes(2, "big") + verdict + proof)
            connection.recv(1)  # until the caller leaves

    with false, ThreadPoolExecutor() as pool:
        answered = pool.submit(answer)
        with pytest.raises(UnprovenError, match="another program listens on this port"):
            connect(false.getsockname(), here, {"rank": 1}, 10.0)
        answered.result(TIMEOUT_SECS)
