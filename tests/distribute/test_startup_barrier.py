"""Before TensorFlow waits: who is missing is named, and who is different is refused; in threads here."""

import contextlib
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import TIMEOUT_SECS, free_ports
from ctl.distribute import job_fingerprint, startup_barrier
from ctl.distribute.startup_barrier import chief as chief_side
from ctl.distribute.startup_barrier import messages
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import authenticated_channel, rendezvous
from ctl.io.authenticated_channel import PROOF_SECS, ChannelRefusedError, Endpoint, LateProofError, Listener


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(messages, "FIRST_REMINDER_SECS", 0.2)
    monkeypatch.setattr(messages, "RETRY_SECS", 0.02)
    monkeypatch.delenv("CTL_HVD_SECRET", raising=False)


def clusters(count, **kinds):
    addresses = tuple(f"127.0.0.1:{p}" for p in free_ports(count))
    return [Topology({"worker": addresses}, "worker", i) for i in range(count)]


def meeting(places, all_facts, timeout_secs=TIMEOUT_SECS):
    """What each of `places` met with: None, or its error; all have answered before the return."""
    found = {}

    def one(number):
        try:
            startup_barrier.run_barrier(places[number], all_facts[number], timeout_secs)
            found[number] = None
        except Exception as e:
            found[number] = e

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECS)
    assert len(found) == len(places), "somebody still waits"
    return [found[i] for i in range(len(places))]


@pytest.mark.parametrize("count", [2, 5])
def test_workers_that_are_alike_go_on_and_the_port_is_free_again(count):
    places = clusters(count)
    assert meeting(places, [{"a": 1}] * count) == [None] * count
    for place in places:
        host, _, port = place.address.rpartition(":")
        with socket.socket() as again:
            again.bind((host, int(port)))


def test_who_is_missing_is_named_to_everybody_and_then_everybody_ends(caplog):
    places = clusters(3)
    errors = meeting(places[:2], [{}] * 2, timeout_secs=4.0)
    for error in errors:
        assert isinstance(error, PeerLostError) and error.exit_code == 134
        assert f"worker 2 ({places[2].address})" in str(error) and "4 s" in str(error)
    waiting = [r for r in caplog.records if "still waiting for worker 2" in r.getMessage()]
    assert len({r.threadName for r in waiting}) == 2, "the chief says it, and the other worker"


def test_without_the_chief_its_address_is_named(caplog):
    place = clusters(2)[1]
    (error,) = meeting([place], [{}], timeout_secs=1.0)
    assert isinstance(error, PeerLostError) and place.tasks["worker"][0] in str(error)
    assert any(place.tasks["worker"][0] in m for m in caplog.messages)


def test_a_difference_is_named_to_everybody_as_a_usage_error():
    errors = meeting(clusters(3), [{"--lr": 1, "GPUs": 0}, {"--lr": 1, "GPUs": 0}, {"--lr": 2, "GPUs": 1}])
    for error in errors:
        assert isinstance(error, UsageError) and error.exit_code == 2
        assert "--lr: 2 on worker 2" in str(error) and "GPUs: 1 on worker 2" in str(error)


def test_clusters_in_another_order_are_refused():
    one, two = clusters(2)
    turned = Topology({"worker": (one.address, "127.0.0.1:1")}, "worker", 1)
    assert all("TF_CONFIG's cluster" in str(e) for e in meeting([one, turned], [{}, {}]))


def test_two_processes_of_one_index_are_refused(monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "known to this job only")
    places = clusters(3)
    errors = meeting([places[0], places[1], places[1]], [{}] * 3)
    assert all(isinstance(e, UsageError) and "two processes are" in str(e) for e in errors)


def test_a_refusal_reaches_a_worker_that_has_not_yet_said_how_it_was_started(monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "known to this job only")
    chief, worker = clusters(2)
    found = []
    thread = threading.Thread(target=lambda: found.extend(meeting([chief], [{}])), daemon=True)
    thread.start()
    with guest(worker, process="one") as first:
        with pytest.raises(ChannelRefusedError, match="two processes are"):
            guest(worker, process="another")
        first.settimeout(TIMEOUT_SECS)
        said = json.loads(first.makefile().readline())
    assert "two processes are" in said["refused"]
    thread.join(TIMEOUT_SECS)
    assert isinstance(found[0], UsageError)


def guest(place, rank=1, process="a guest"):
    """An authenticated connection to the chief, once it listens; raises its RefusedError."""
    endpoint = Endpoint(authenticated_channel.job_secret(), messages.PURPOSE, messages.IDENTITY)
    until_secs = time.monotonic() + TIMEOUT_SECS
    while True:
        try:
            claim = {"rank": rank, "process": process}
            return authenticated_channel.connect(messages.address_of(place, 0), endpoint, claim, PROOF_SECS)
        except ChannelRefusedError:
            raise
        except OSError:
            assert time.monotonic() < until_secs
            time.sleep(0.02)


def assert_closed(connection):
    until_secs = time.monotonic() + TIMEOUT_SECS / 2
    connection.settimeout(TIMEOUT_SECS / 2)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):  # what the chief says meanwhile
            assert time.monotonic() < until_secs


RANKS = (-1, 0, 2, 10**30, True, 1.0, "1", None)


def test_a_rank_that_cannot_be_is_refused_and_without_a_secret_nobody_else_notices():
    places = clusters(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(meeting, places[:1], [{}], TIMEOUT_SECS / 2)
        for rank in RANKS:
            with pytest.raises(ChannelRefusedError, match="a process has rank"):
                guest(places[0], rank)
        with pytest.raises(ChannelRefusedError, match="a process has rank"):
            guest(places[0], 1, process=5)
        assert meeting(places[1:], [{}]) == [None]
        assert chief.result(TIMEOUT_SECS) == [None]


@pytest.mark.parametrize("rank", RANKS)
def test_with_a_secret_a_rank_that_cannot_be_is_a_mistake_in_the_job(rank, monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "known to this job only")
    places = clusters(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(meeting, places[:1], [{}], TIMEOUT_SECS / 2)
        with pytest.raises(ChannelRefusedError, match="a process has rank"):
            guest(places[0], rank)
        (error,) = chief.result(TIMEOUT_SECS)
    assert isinstance(error, UsageError) and "a process has rank" in str(error)


@pytest.mark.parametrize(
    "line",
    [b"[" * 60_000 + b"\n", b"5\n", b"{}\n", b'{"facts": []}\n', b'{"facts": {"a": 1}}\n',
     b'{"facts": {"a": null}}\n', b"x" * (messages.MAX_LINE_BYTES + 200_000)],
)  # fmt: skip
def test_a_guest_that_says_nonsense_leaves_and_its_place_is_free(line, monkeypatch):
    monkeypatch.setattr(chief_side, "PROOF_SECS", 1000.0)
    places = clusters(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(meeting, places[:1], [{}], TIMEOUT_SECS / 2)
        with guest(places[0]) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(line)
            assert_closed(connection)
        assert meeting(places[1:], [{}]) == [None]
        assert chief.result(TIMEOUT_SECS) == [None]


def test_a_guest_that_says_nothing_leaves_and_its_place_is_free(monkeypatch):
    monkeypatch.setattr(chief_side, "PROOF_SECS", 1.0)
    places = clusters(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(meeting, places[:1], [{}], TIMEOUT_SECS / 2)
        with guest(places[0]) as connection:
            assert_closed(connection)
            assert meeting(places[1:], [{}]) == [None]
        assert chief.result(TIMEOUT_SECS) == [None]


@pytest.mark.parametrize("line", [b"[" * 60_000 + b"\n", b"5\n", b"[]\n", b"{}\n"])
def test_a_chief_that_says_nonsense_is_something_else(line):
    """Without a secret anybody can stand in for it."""
    place = clusters(2)[1]
    over = threading.Event()
    endpoint = Endpoint(b"", messages.PURPOSE, messages.IDENTITY)
    listener = Listener(socket.create_server(messages.address_of(place, 0)), endpoint)

    def answer():
        while not over.is_set():
            for connection, _ in listener.accept_callers(0.05):
                with connection, contextlib.suppress(OSError):
                    connection.sendall(line)
                    connection.recv(65536)

    with ThreadPoolExecutor() as pool, contextlib.closing(listener):
        answered = pool.submit(answer)
        (error,) = meeting([place], [{}], timeout_secs=3.0)
        over.set()
        answered.result(TIMEOUT_SECS)
    assert isinstance(error, PeerLostError) and "another program listens" in str(error)


def test_without_a_secret_only_the_second_process_of_an_index_is_refused():
    places = clusters(3)
    errors = meeting([places[0], places[1], places[1]], [{}] * 3, timeout_secs=3.0)
    assert sorted(type(e).__name__ for e in errors) == ["PeerLostError", "PeerLostError", "UsageError"]
    assert isinstance(errors[0], PeerLostError), "nobody has proven to be of the job"


def test_a_secret_is_compared_but_never_shown():
    errors = meeting(clusters(2), [{"--api_token": "hunter2"}, {"--api_token": "hunter3"}])
    for error in errors:
        assert "--api_token" in str(error) and "hunter" not in str(error)


def test_code_that_only_one_has_loaded_is_no_difference():
    code = job_fingerprint.CODE
    assert meeting(clusters(2), [{f"{code}a": "1"}, {f"{code}b": "2"}]) == [None, None]
    assert all(isinstance(e, UsageError) for e in meeting(
        clusters(2), [{f"{code}a": "1"}, {f"{code}a": "2"}]))  # fmt: skip


def test_what_else_connects_or_leaves_disturbs_nobody():
    places = clusters(2)
    port = int(places[0].address.rpartition(":")[2])
    stop = threading.Event()

    def stranger():
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b"PRI * HTTP/2.0\r\n\r\n")
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(json.dumps({"ctl": 1, "rank": "x"}).encode() + b"\n")
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b'{"ctl": 1, "rank": 1, "facts": {}')  # and leaves
            except OSError:
                pass

    thread = threading.Thread(target=stranger, daemon=True)
    thread.start()
    time.sleep(0.1)
    try:
        assert meeting(places, [{}, {}]) == [None, None]
    finally:
        stop.set()
        thread.join(TIMEOUT_SECS)


def test_something_else_at_the_chiefs_address_is_not_taken_for_it():
    place = clusters(2)[1]
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(place.tasks["worker"][0].rpartition(":")[2])))
        server.listen()

        def answer():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"\x00\x00\x12\x04\n")

        threading.Thread(target=answer, daemon=True).start()
        (error,) = meeting([place], [{}], timeout_secs=3.0)
    assert isinstance(error, PeerLostError) and "another program listens" in str(error)


@pytest.mark.parametrize(
    ("asked", "launcher", "expected"),
    [(5.0, "7", 5.0), (None, "7", 7.0), (None, "", 600.0), (None, "soon", 600.0), (None, "-3", 600.0)],
)
def test_how_long_to_wait_is_the_persons_word_then_the_launchers(asked, launcher, expected, monkeypatch):
    monkeypatch.setenv(startup_barrier.STARTUP_TIMEOUT_VARIABLE, launcher)
    assert startup_barrier.timeout_of(asked) == expected


def test_facts_name_the_code_that_is_ones_own_and_the_versions():
    found = job_fingerprint.fingerprint_of_process(0, {"lr": 0.1})
    assert found["--lr"] == 0.1 and found["tensorflow"] and found["GPUs"] == 0
    own = [k.removeprefix(job_fingerprint.CODE) for k in found if k.startswith(job_fingerprint.CODE)]
    assert "test_startup_barrier" in own and not any(k.startswith(("numpy", "ctl.", "json")) for k in own)


def test_a_last_call_that_is_cut_short_does_not_hide_the_reason_before(monkeypatch):
    errors = itertools.chain([OSError("the reason")], itertools.repeat(LateProofError("cut short")))

    def fails(*_):
        raise next(errors)

    monkeypatch.setattr(rendezvous, "connect", fails)
    (error,) = meeting([clusters(2)[1]], [{}], timeout_secs=1.0)
    assert isinstance(error, PeerLostError) and "the reason" in str(error)
