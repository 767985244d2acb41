"""Connections between ranks: accepted and refused claims, and silent peers. The ranks are threads."""

import contextlib
import itertools
import re
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import TIMEOUT_SECS, free_ports
from ctl.collectives import bootstrap, ranks
from ctl.collectives.control_tree import FANOUT
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.settings import Settings
from ctl.errors import UsageError
from ctl.io import rendezvous
from ctl.io.authenticated_channel import ChannelRefusedError, Endpoint, connect

SECRET = b"known to this job only"
CLAIM = {
    "role": "peer", "rank": 2, "protocol": bootstrap._PROTOCOL, "size": 3, "generation": 0,
    "fanout": FANOUT, "machines": zlib.crc32(b"(0, 0, 0)"),
}  # fmt: skip

CHECK_WITH_A_LIMIT = """
import resource, sys
from ctl.collectives.descriptors import check_descriptors
from ctl.errors import UsageError

num_free, num_links, num_controls = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (3 + num_free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for count in (num_controls, num_controls + 1, 5000):
    try:
        check_descriptors(num_links, count)
        print("accepted")
    except UsageError as e:
        print(e)
"""


def connect_to(addresses, rank, claim):
    """Returns a connection to rank `rank`, after retries until it listens. Raises if it refuses."""
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
def waiting_rank(rank, size=3, **settings):
    """Starts a rank that waits for the other ranks until the block ends. Yields the addresses."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
    stop = threading.Event()
    rank_info = ranks.build_ranks(addresses, rank)
    settings = Settings(secret=SECRET, **{"start_timeout": TIMEOUT_SECS} | settings)
    with ThreadPoolExecutor() as pool:
        connected = pool.submit(
            bootstrap.connect_ranks, rank_info, settings, lambda: "stopped" if stop.is_set() else ""
        )
        try:
            yield addresses
        finally:
            stop.set()
            with pytest.raises(HorovodInternalError, match="stopped"):
                connected.result(TIMEOUT_SECS)


def test_only_higher_ranks_of_the_same_group_are_accepted():
    with waiting_rank(1) as addresses:
        connect_to(addresses, 1, CLAIM).close()
        for rank in (-1, 0, 1, 3, 10**30, True, 2.0, 1.5, "2", None, [2]):
            with pytest.raises(ChannelRefusedError, match="expected a rank from 2 to 2"):
                connect_to(addresses, 1, CLAIM | {"rank": rank})
        for role in ("x", "", None, 5):
            with pytest.raises(ChannelRefusedError, match=r"expected 'peer' of a rank in \[2\]"):
                connect_to(addresses, 1, CLAIM | {"role": role})
        with pytest.raises(ChannelRefusedError, match="is rank 1, not rank 0"):
            connect_to(addresses, 1, CLAIM | {"role": "control"})


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


@pytest.mark.parametrize(
    ("field", "can_retry"),
    [("protocol", False), ("size", False), ("fanout", False), ("generation", True)],
)
def test_a_rank_of_another_version_number_or_group_is_refused_by_name(field, can_retry):
    with waiting_rank(0) as addresses:
        for role in ("peer", "control"):
            with pytest.raises(ChannelRefusedError, match=f"its {field} is 99") as caught:
                connect_to(addresses, 0, CLAIM | {"role": role, field: 99})
            assert caught.value.can_retry is can_retry


def test_a_rank_whose_addresses_assign_ranks_to_other_machines_is_refused():
    with waiting_rank(0) as addresses:
        connect_to(addresses, 0, CLAIM).close()
        other_addresses = [addresses[0], addresses[1], addresses[2].replace("127.0.0.1", "localhost")]
        with pytest.raises(UsageError, match="assigns the ranks to other machines.*host names.*TF_CONFIG"):
            bootstrap.connect_ranks(ranks.build_ranks(other_addresses, 1), Settings(secret=SECRET))


def test_a_rank_is_not_taken_for_another_one():
    """The process at the address of rank 1 is rank 0, and both have the secret."""
    with waiting_rank(0) as addresses:
        connect_to(addresses, 0, CLAIM).close()  # waits until it listens
        wrong_ranks = ranks.build_ranks([addresses[0], addresses[0], addresses[2]], 2)
        with pytest.raises(HorovodInternalError, match="waits for rank 1"):
            bootstrap.connect_ranks(wrong_ranks, Settings(secret=SECRET, start_timeout=3.0))


def test_a_rank_calls_its_parent_and_then_its_lower_peers():
    assert bootstrap.list_calls(5, {7, 4, 0}, 3) == [("control", 3), ("peer", 0), ("peer", 4)]
    assert bootstrap.list_calls(5, {7, 4, 0}) == [("peer", 0), ("peer", 4)]
    assert bootstrap.list_calls(0, {1, 2}) == []


@pytest.mark.parametrize("count", [2, 100, 1024, 4096])
def test_calls_of_all_ranks_to_a_coordinator_that_does_not_listen_are_limited(count):
    assert count / bootstrap.max_pause_secs("control", count) <= 2000
    assert bootstrap.max_pause_secs("peer", count) == bootstrap.max_pause_secs("control", 2) == 0.05
    assert bootstrap.max_delay_secs(count) == (0 if count <= 128 else (count - 128) / 2000)


@pytest.mark.parametrize(("num_links", "num_controls"), [(9, 25), (1, 57)])
def test_files_for_the_connections_of_a_rank_are_checked(num_links, num_controls):
    """A link needs four files, a connection to the coordinator one. A new process has three open files."""
    num_free = 4 * (num_links + 1) + num_controls + 10
    counts = [str(count) for count in (num_free, num_links, num_controls)]
    result = subprocess.run(
        [sys.executable, "-c", CHECK_WITH_A_LIMIT, *counts],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=True,
    )  # fmt: skip
    accepted, one_more, many_more = result.stdout.splitlines()
    assert accepted == "accepted"
    assert re.search(rf"{num_free + 1} additional files .* `ulimit -n 4096`", one_more)
    assert re.search(r"`ulimit -n 10\d\d\d`", many_more)


def test_a_silent_listener_does_not_block_a_rank(monkeypatch):
    monkeypatch.setattr(rendezvous, "PROOF_SECS", 0.3)
    with waiting_rank(1) as addresses:
        silent_server = socket.create_server(("127.0.0.1", int(addresses[0].rpartition(":")[2])))
        silent_server.settimeout(TIMEOUT_SECS / 4)
        with silent_server, contextlib.ExitStack() as accepted:
            for _ in range(3):  # the same rank tries again
                accepted.enter_context(silent_server.accept()[0])


def test_a_second_connection_of_a_rank_replaces_the_first():
    with (
        waiting_rank(0) as addresses,
        connect_to(addresses, 0, CLAIM) as first,
        connect_to(addresses, 0, CLAIM),
    ):
        first.settimeout(TIMEOUT_SECS)
        assert first.recv(1) == b""
