"""Many callers of a listener at the same time, and a listener without a free file."""

import contextlib
import errno
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import TIMEOUT_SECS
from ctl.io import authenticated_channel as channel
from ctl.io import handshake_limit
from ctl.io.authenticated_channel import Endpoint, Listener, connect

ENDPOINT = Endpoint(b"known to this job only", "test", "rank 0")


@pytest.mark.parametrize("max_pending", [8, 20])
def test_members_that_call_at_the_same_time_wait_in_the_queue(monkeypatch, max_pending):
    """None of them is disconnected, and the number of handshakes at the same time is limited."""
    monkeypatch.setattr(channel, "MAX_PENDING_CALLERS", max_pending)
    monkeypatch.setattr(handshake_limit, "MIN_HANDSHAKE_SECS", TIMEOUT_SECS)
    count, server = 100, socket.create_server(("127.0.0.1", 0), backlog=4096)
    is_closing = threading.Event()
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(contextlib.closing(Listener(server, ENDPOINT)))
        silent = [opened.enter_context(socket.create_connection(listener.address)) for _ in range(count)]
        for _ in range(5):
            assert listener.accept_callers() == []
        assert len(listener._pending) == max_pending and listener.refused == 0
        assert select.select([listener], [], [], 0)[0] == []  # its owner does not poll in vain
        for connection in silent:
            connection.close()

        def call(rank):
            with connect(listener.address, ENDPOINT, {"rank": rank}, TIMEOUT_SECS):
                assert is_closing.wait(TIMEOUT_SECS)

        with ThreadPoolExecutor(count) as pool:
            calls = [pool.submit(call, rank) for rank in range(count)]
            ranks, deadline_secs = set(), time.monotonic() + TIMEOUT_SECS
            while len(ranks) < count and time.monotonic() < deadline_secs:
                for connection, claim in listener.accept_callers(0.05):
                    opened.enter_context(connection)
                    ranks.add(claim["rank"])
                assert len(listener._pending) <= max_pending
            is_closing.set()
            for one_call in calls:
                one_call.result(TIMEOUT_SECS)
        assert ranks == set(range(count)) and listener.refused == count  # the silent ones


class FullSocket(socket.socket):
    """A listening socket that has no file descriptor for callers while `is_full` is set."""

    is_full, num_failures = False, 0

    def accept(self):
        if self.is_full:
            self.num_failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_free_descriptor_the_oldest_pending_caller_is_disconnected():
    server = FullSocket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    listener = Listener(server, ENDPOINT)
    with socket.create_connection(server.getsockname()), contextlib.closing(listener):
        listener.accept_callers(TIMEOUT_SECS)
        server.is_full = True
        with socket.create_connection(server.getsockname()):
            deadline_secs = time.monotonic() + TIMEOUT_SECS
            while not listener.refused and time.monotonic() < deadline_secs:
                assert listener.accept_callers(TIMEOUT_SECS) == []
            assert listener.accept_callers(TIMEOUT_SECS) == []  # no caller is pending
            assert listener.refused == 1 and server.num_failures <= 3
            server.is_full = False
            with ThreadPoolExecutor() as pool:
                caller = pool.submit(connect, server.getsockname(), ENDPOINT, {"rank": 1}, TIMEOUT_SECS)
                accepted, deadline_secs = [], time.monotonic() + TIMEOUT_SECS
                while not accepted and time.monotonic() < deadline_secs:
                    accepted = listener.accept_callers(0.05)
                caller.result(TIMEOUT_SECS).close()
            assert [claim for _, claim in accepted] == [{"rank": 1}]
            accepted[0][0].close()
