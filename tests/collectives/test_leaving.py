"""Ranks that leave: what all ranks have asked for is carried out, only what needs them later fails."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.frames import Lost, wait_until_received
from ctl.collectives.links import CHUNK, MemoryLink, SharedMemory, open_memory
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.ranks import build_ranks
from ctl.collectives.requests import Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline

ROWS = 20_000  # too many for the coordinator, few enough for the buffers of a socket
WAIT_SECS = 60.0


def tcp_pair():
    """Both ends of a connection; unlike a socketpair it can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


class Group:
    """Engines of this process, by rank; `hold` keeps one from exchanging."""

    def __init__(self, count, **settings):
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
        chosen = Settings(start_timeout=WAIT_SECS, secret=b"x" * 32, **settings)
        with ThreadPoolExecutor(count) as pool:
            made = [
                pool.submit(Engine, build_ranks(addresses, rank), chosen, server=servers[rank])
                for rank in range(count)
            ]
        self.engines = [future.result() for future in made]

    def hold(self, rank):
        """Two events: the exchanges of this rank set the first one, and wait for the second."""
        mesh, reached, go_on = self.engines[rank]._mesh, threading.Event(), threading.Event()
        exchange = mesh.exchange

        def held(*arguments, **options):
            reached.set()
            assert go_on.wait(WAIT_SECS)
            exchange(*arguments, **options)

        mesh.exchange = held
        return reached, go_on

    def ask_all(self, kind, **options):
        return [
            engine.submit(kind, "x", [np.full(ROWS, rank, np.float32)], **options)
            for rank, engine in enumerate(self.engines)
        ]

    def end_rank_0(self):
        """Rank 0 leaves, and its connections end as those of a process that ends."""
        coordinator = self.engines[0]._coordinator
        self.engines[0].close()
        coordinator._negotiation.notify_lost_rank = lambda *_: None  # it takes the others for dead then
        for sock in coordinator.remote_sockets:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(Engine.close, self.engines))


@pytest.fixture(params=[True, False], ids=["memory", "tcp"])
def group(request):
    made = Group(3, shares_memory=request.param)
    yield made
    made.close()


def test_numbers_are_read_from_memory_whose_other_end_has_left():
    left, right = tcp_pair()
    shared = SharedMemory()
    one = MemoryLink(left, 1, shared.memory, is_first=True)
    other = MemoryLink(right, 0, open_memory(shared.offer()), is_first=False)
    data, received = np.arange(4 * CHUNK, dtype=np.uint8), np.zeros(4 * CHUNK, np.uint8)
    for sender, receiver in ((other, one), (one, other)):
        receiver.receive(data.size, received, None)
        sender.send([data])
        if sender is other:
            receiver.read()
    one.close()  # with words unread: the connection is reset
    while not other.is_received:
        other.read()
    assert (received == data).all()
    other.receive(1, received[:1], None)
    with pytest.raises(Lost):
        other.read()


def test_rank_0_may_end_while_other_ranks_finish_what_it_has_finished(group):
    _, go_on = group.hold(1)
    pending = group.ask_all("broadcast", root=2)  # from rank 2 to rank 0, from there to rank 1
    group.engines[0].wait(pending[0])
    group.end_rank_0()
    late = group.engines[1].submit("barrier", "later")
    go_on.set()
    for rank in (1, 2):
        (values,) = group.engines[rank].wait(pending[rank])
        assert (values == 2.0).all()
    with pytest.raises(Exception, match="rank 0 (is gone|has left)"):
        group.engines[1].wait(late)


def test_a_rank_that_leaves_first_carries_out_what_all_have_asked_for(group):
    has_begun, go_on = group.hold(1)
    pending = group.ask_all("allreduce", op=SUM)
    assert has_begun.wait(WAIT_SECS)
    leaving = threading.Thread(target=group.engines[1].close)
    leaving.start()
    gone = group.engines[0]._coordinator._negotiation.departed
    until_secs = time.monotonic() + WAIT_SECS
    while 1 not in gone and time.monotonic() < until_secs:
        time.sleep(0.01)
    go_on.set()
    for rank in (0, 2):
        (total,) = group.engines[rank].wait(pending[rank])
        assert (total == 3.0).all()
    leaving.join(WAIT_SECS)
    late = group.engines[2].submit("barrier", "later")
    with pytest.raises(Exception, match="'later': rank 1 has left"):
        group.engines[2].wait(late)


def test_what_a_rank_asked_for_and_left_before_the_others_came_is_an_error_there():
    negotiation = Negotiation(2, Settings(), Timeline())
    request = Request(0, "x", "allreduce", ("float32",), ((ROWS,),), op=SUM)
    negotiation.add_request(1, request, b"")
    negotiation.remove_rank(1, "has left", is_lost=False)
    negotiation.add_request(0, request, b"")
    negotiation.send_responses()
    (message,) = negotiation.outboxes[0]._parts
    assert b"rank 1 has left: its script has ended" in message and b'"begin"' not in message


def test_what_is_complete_begins_before_a_rank_is_let_go():
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
    reading = threading.Thread(target=lambda: [None for _ in iter(lambda: receiver.recv(1 << 16), b"")])
    reading.start()
    wait_until_received([sender], limit_secs=10 * WAIT_SECS)
    sender.shutdown(socket.SHUT_WR)
    reading.join(WAIT_SECS)
    assert not reading.is_alive()
    gone, other = tcp_pair()
    gone.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            gone.send(bytes(1 << 16))
    other.close()
    wait_until_received([gone], limit_secs=10 * WAIT_SECS)
