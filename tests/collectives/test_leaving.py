"""Departure of ranks: complete requests are executed, and only later requests fail."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ctl.collectives import engine as engine_module
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.frames import Lost, wait_until_received
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.ranks import build_ranks
from ctl.collectives.requests import Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline
from ctl.collectives.transports.link import CHUNK
from ctl.collectives.transports.shared_memory import MemoryLink, SharedMemory, open_memory

ROWS = 20_000  # too many for the coordinator, few enough for the buffers of a socket
WAIT_SECS = 600.0


def tcp_pair():
    """Returns both ends of a connection. Unlike a socketpair, it can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


class Group:
    """Engines of this process, by rank."""

    def __init__(self, count, **settings):
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
        chosen = Settings(start_timeout=WAIT_SECS, secret=b"x" * 32, **settings)
        with ThreadPoolExecutor(count) as pool:
            futures = [
                pool.submit(Engine, build_ranks(addresses, rank), chosen, server=servers[rank])
                for rank in range(count)
            ]
        self.engines = [future.result() for future in futures]

    def pause_exchange(self, rank):
        """Returns two events. Exchanges of the rank set the first one, and wait for the second."""
        mesh, reached, resume = self.engines[rank]._mesh, threading.Event(), threading.Event()
        exchange = mesh.exchange

        def paused_exchange(*arguments, **options):
            reached.set()
            assert resume.wait(WAIT_SECS)
            exchange(*arguments, **options)

        mesh.exchange = paused_exchange
        return reached, resume

    def submit_all(self, operation, **options):
        return [
            engine.submit(operation, "x", [np.full(ROWS, rank, np.float32)], **options)
            for rank, engine in enumerate(self.engines)
        ]

    def end_rank_0(self):
        """Closes rank 0 and its connections, as at the end of its process."""
        coordinator = self.engines[0]._coordinator
        self.engines[0].close()
        # else the coordinator would report the other ranks as lost
        coordinator._negotiation.notify_lost_rank = lambda *_: None
        for sock in coordinator.remote_sockets:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(Engine.close, self.engines))


@pytest.fixture(params=["memory", "tcp"])
def group(request):
    engine_group = Group(3, transport=request.param)
    yield engine_group
    engine_group.close()


def test_numbers_are_read_from_memory_after_the_other_end_has_left():
    left_socket, right_socket = tcp_pair()
    shared = SharedMemory()
    first_link = MemoryLink(left_socket, 1, shared.memory, is_first=True)
    second_link = MemoryLink(right_socket, 0, open_memory(shared.offer()), is_first=False)
    data, received = np.arange(4 * CHUNK, dtype=np.uint8), np.zeros(4 * CHUNK, np.uint8)
    for sender, receiver in ((second_link, first_link), (first_link, second_link)):
        receiver.receive(data.size, received, None)
        sender.send([data])
        if sender is second_link:
            receiver.read()
    first_link.close()  # with unread bytes: the connection is reset
    while not second_link.is_received:
        second_link.read()
    assert (received == data).all()
    second_link.receive(1, received[:1], None)
    with pytest.raises(Lost):
        second_link.read()


def test_rank_0_may_end_while_other_ranks_finish_its_last_collective(group):
    _, resume = group.pause_exchange(1)
    pending = group.submit_all("broadcast", root=2)  # from rank 2 to rank 0, then to rank 1
    group.engines[0].wait(pending[0])
    group.end_rank_0()
    late_request = group.engines[1].submit("barrier", "later")
    resume.set()
    for rank in (1, 2):
        (values,) = group.engines[rank].wait(pending[rank])
        assert (values == 2.0).all()
    with pytest.raises(Exception, match="rank 0 (is gone|has left)"):
        group.engines[1].wait(late_request)


def test_a_rank_of_a_failed_group_does_not_wait_for_rank_0_which_may_be_lost(group, monkeypatch):
    """A cut link: the launcher has detected the loss, and rank 0 does not answer."""
    coordinator = group.engines[0]._coordinator
    with monkeypatch.context() as changes:
        changes.setattr(engine_module, "_LEAVE_SECS", 10 * WAIT_SECS)
        changes.setattr(coordinator, "_handle_message", lambda *_: None)
        group.engines[1].fail_all("rank 0 is gone")
        closing_thread = threading.Thread(target=group.engines[1].close, daemon=True)
        closing_thread.start()
        closing_thread.join(WAIT_SECS)
        assert not closing_thread.is_alive()


def test_a_rank_that_leaves_first_executes_complete_requests(group):
    has_begun, resume = group.pause_exchange(1)
    pending = group.submit_all("allreduce", op=SUM)
    assert has_begun.wait(WAIT_SECS)
    closing_thread = threading.Thread(target=group.engines[1].close)
    closing_thread.start()
    departed = group.engines[0]._coordinator._negotiation.departed
    until_secs = time.monotonic() + WAIT_SECS
    while 1 not in departed and time.monotonic() < until_secs:
        time.sleep(0.01)
    resume.set()
    for rank in (0, 2):
        (total,) = group.engines[rank].wait(pending[rank])
        assert (total == 3.0).all()
    closing_thread.join(WAIT_SECS)
    late_request = group.engines[2].submit("barrier", "later")
    with pytest.raises(Exception, match="'later': rank 1 has left"):
        group.engines[2].wait(late_request)


def test_an_incomplete_request_of_a_rank_that_has_left_is_an_error_on_other_ranks():
    negotiation = Negotiation(2, Settings(), Timeline())
    request = Request(0, "x", "allreduce", ("float32",), ((ROWS,),), op=SUM)
    negotiation.add_request(1, request, b"")
    negotiation.remove_rank(1, "has left", is_lost=False)
    negotiation.add_request(0, request, b"")
    negotiation.send_responses()
    (message,) = negotiation.outboxes[0]._parts
    assert b"rank 1 has left: its script has ended" in message and b'"begin"' not in message


def test_a_complete_request_begins_before_a_rank_leaves():
    negotiation = Negotiation(2, Settings(), Timeline())
    request = Request(0, "x", "allreduce", ("float32",), ((ROWS,),), op=SUM)
    for rank in (0, 1):
        negotiation.add_request(rank, request, b"")
    negotiation.remove_rank(0, "has left", is_lost=False)
    (of_0,), (of_1,) = (negotiation.outboxes[rank]._parts for rank in (0, 1))
    assert of_0.index(b'"begin"') < of_0.index(b'"left"')
    assert of_1.index(b'"begin"') < of_1.index(b'"ending"')


def test_a_rank_waits_until_its_last_bytes_have_arrived_or_cannot():
    sender, receiver = tcp_pair()
    sender.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    start = time.monotonic()
    wait_until_received([sender], limit_secs=0.2)
    assert time.monotonic() - start >= 0.2
    reader_thread = threading.Thread(
        target=lambda: [None for _ in iter(lambda: receiver.recv(1 << 16), b"")]
    )
    reader_thread.start()
    wait_until_received([sender], limit_secs=10 * WAIT_SECS)
    sender.shutdown(socket.SHUT_WR)
    reader_thread.join(WAIT_SECS)
    assert not reader_thread.is_alive()
    unread_sender, other = tcp_pair()
    unread_sender.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            unread_sender.send(bytes(1 << 16))
    other.close()
    wait_until_received([unread_sender], limit_secs=10 * WAIT_SECS)
