"""Ranks that find each other: who is let in, and what does not hold a rank up; in threads here."""

import contextlib
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import TIMEOUT_SECS, free_ports
from ctl.collectives import bootstrap, ranks
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.settings import Settings
from ctl.io import rendezvous
from ctl.io.authenticated_channel import ChannelRefusedError, Endpoint, connect

SECRET = b"known to this job only"
CLAIM = {"role": "peer", "rank": 2, "protocol": bootstrap._PROTOCOL, "size": 3, "generation": 0}


def called(addresses, rank, claim):
    """Rank `rank` lets the claim in, once it listens; raises its RefusedError."""
    host, _, port = addresses[rank].rpartition(":")
    until_secs = time.monotonic() + TIMEOUT_SECS
    while True:
        try:
            return connect((host, int(port)), Endpoint(SECRET, "ranks", f"rank {rank}"), claim)
        except ChannelRefusedError:
            raise
        except OSError:
            assert time.monotonic() < until_secs
            time.sleep(0.02)


@contextlib.contextmanager
def waiting(rank, size=3, **settings):
    """A rank that waits for the others until the block ends; its addresses."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
    over = threading.Event()
    place = ranks.build_ranks(addresses, rank)
    settings = Settings(secret=SECRET, **{"start_timeout": TIMEOUT_SECS} | settings)
    with ThreadPoolExecutor() as pool:
        met = pool.submit(bootstrap.connect_ranks, place, settings, lambda: "over" if over.is_set() else "")
        try:
            yield addresses
        finally:
            over.set()
            with pytest.raises(HorovodInternalError, match="over"):
                met.result(TIMEOUT_SECS)


def test_only_higher_ranks_of_the_same_group_are_let_in():
    with waiting(1) as addresses:
        called(addresses, 1, CLAIM).close()
        for rank in (-1, 0, 1, 3, 10**30, True, 2.0, 1.5, "2", None, [2]):
            with pytest.raises(ChannelRefusedError, match="expected a rank from 2 to 2"):
                called(addresses, 1, CLAIM | {"rank": rank})
        for role in ("x", "", None, 5):
            with pytest.raises(ChannelRefusedError, match="expected a rank from 2 to 2"):
                called(addresses, 1, CLAIM | {"role": role})
        with pytest.raises(ChannelRefusedError, match="is rank 1, not rank 0"):
            called(addresses, 1, CLAIM | {"role": "control"})


@pytest.mark.parametrize("hosts", [["127.0.0.1"] * 2, ["127.0.0.1", "127.0.0.1", "127.0.0.2"]])
def test_one_connection_joins_each_pair_of_ranks(hosts):
    addresses = [f"{h}:{p}" for h, p in zip(hosts, free_ports(len(hosts)), strict=True)]
    settings = Settings(secret=SECRET, start_timeout=TIMEOUT_SECS)

    def connect_rank(rank):
        return bootstrap.connect_ranks(ranks.build_ranks(addresses, rank), settings)

    with ThreadPoolExecutor() as pool:
        connections = list(pool.map(connect_rank, range(len(hosts))))
    for low, high in itertools.combinations(range(len(hosts)), 2):
        sender, receiver = connections[low].peers[high], connections[high].peers[low]
        receiver.settimeout(TIMEOUT_SECS)
        sender.sendall(b"%d%d" % (low, high))
        assert receiver.recv(8) == b"%d%d" % (low, high)
    assert [sorted(c.peers) for c in connections] == [
        [peer for peer in range(len(hosts)) if peer != rank] for rank in range(len(hosts))
    ]
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(("what", "again"), [("protocol", False), ("size", False), ("generation", True)])
def test_a_rank_of_another_version_number_or_group_is_refused_by_name(what, again):
    with waiting(0) as addresses:
        for role in ("peer", "control"):
            with pytest.raises(ChannelRefusedError, match=f"its {what} is 7") as caught:
                called(addresses, 0, CLAIM | {"role": role, what: 7})
            assert caught.value.can_retry is again


def test_a_rank_is_not_taken_for_another_one():
    """Whose address leads to rank 0 is not rank 1, though both know the secret."""
    with waiting(0) as addresses:
        called(addresses, 0, CLAIM).close()  # it listens
        wrong = ranks.build_ranks([addresses[0], addresses[0], addresses[2]], 2)
        with pytest.raises(HorovodInternalError, match="waits for rank 1"):
            bootstrap.connect_ranks(wrong, Settings(secret=SECRET, start_timeout=3.0))


def test_a_silent_listener_does_not_hold_a_rank_up(monkeypatch):
    monkeypatch.setattr(rendezvous, "PROOF_SECS", 0.3)
    with waiting(1) as addresses:
        silent = socket.create_server(("127.0.0.1", int(addresses[0].rpartition(":")[2])))
        silent.settimeout(TIMEOUT_SECS / 4)
        with silent, contextlib.ExitStack() as held:
            for _ in range(3):  # the same rank tries again
                held.enter_context(silent.accept()[0])


def test_a_rank_that_calls_once_more_takes_the_place_of_its_first_call():
    with waiting(0) as addresses, called(addresses, 0, CLAIM) as first, called(addresses, 0, CLAIM):
        first.settimeout(TIMEOUT_SECS)
        assert first.recv(1) == b""
