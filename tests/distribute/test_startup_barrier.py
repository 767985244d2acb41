"""Startup barrier: errors for missing, duplicate and differing workers. The workers are threads."""

import contextlib
import gc
import itertools
import json
import socket
import sys
import threading
import time
import types
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
def short_intervals(monkeypatch):
    monkeypatch.setattr(messages, "FIRST_REMINDER_SECS", 0.2)
    monkeypatch.setattr(messages, "RETRY_SECS", 0.02)
    monkeypatch.delenv("CTL_HVD_SECRET", raising=False)


def make_topologies(count):
    addresses = tuple(f"127.0.0.1:{p}" for p in free_ports(count))
    return [Topology({"worker": addresses}, "worker", i) for i in range(count)]


def run_barriers(topologies, all_facts, timeout_secs=TIMEOUT_SECS):
    """Returns the error of each worker, or None. Waits until every worker has finished."""
    outcome_by_index = {}

    def run_one(index):
        try:
            startup_barrier.run_barrier(topologies[index], all_facts[index], timeout_secs)
            outcome_by_index[index] = None
        except Exception as e:
            outcome_by_index[index] = e

    threads = [threading.Thread(target=run_one, args=(i,), daemon=True) for i in range(len(topologies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECS)
    assert len(outcome_by_index) == len(topologies), "a worker still waits"
    return [outcome_by_index[i] for i in range(len(topologies))]


@pytest.mark.parametrize("count", [2, 5])
def test_matching_workers_continue_and_release_the_port(count):
    topologies = make_topologies(count)
    assert run_barriers(topologies, [{"a": 1}] * count) == [None] * count
    for topology in topologies:
        host, _, port = topology.address.rpartition(":")
        with socket.socket() as probe:
            probe.bind((host, int(port)))


def test_all_workers_name_the_missing_worker_and_end(caplog):
    topologies = make_topologies(3)
    errors = run_barriers(topologies[:2], [{}] * 2, timeout_secs=4.0)
    for error in errors:
        assert isinstance(error, PeerLostError) and error.exit_code == 134
        assert f"worker 2 ({topologies[2].address})" in str(error) and "4 s" in str(error)
    log_records = [r for r in caplog.records if "still waiting for worker 2" in r.getMessage()]
    assert len({r.threadName for r in log_records}) == 2, "the chief and the other worker log it"


def test_without_the_chief_its_address_is_named(caplog):
    topology = make_topologies(2)[1]
    (error,) = run_barriers([topology], [{}], timeout_secs=1.0)
    assert isinstance(error, PeerLostError) and topology.tasks["worker"][0] in str(error)
    assert any(topology.tasks["worker"][0] in m for m in caplog.messages)


def test_a_difference_is_a_usage_error_on_all_workers():
    errors = run_barriers(
        make_topologies(3), [{"--lr": 1, "GPUs": 0}, {"--lr": 1, "GPUs": 0}, {"--lr": 2, "GPUs": 1}]
    )
    for error in errors:
        assert isinstance(error, UsageError) and error.exit_code == 2
        assert "--lr: 2 on worker 2" in str(error) and "GPUs: 1 on worker 2" in str(error)


def test_clusters_in_another_order_are_refused():
    first, second = make_topologies(2)
    reversed_topology = Topology({"worker": (first.address, "127.0.0.1:1")}, "worker", 1)
    assert all("TF_CONFIG's cluster" in str(e) for e in run_barriers([first, reversed_topology], [{}, {}]))


def test_two_processes_of_one_index_are_refused(monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "known to this job only")
    topologies = make_topologies(3)
    errors = run_barriers([topologies[0], topologies[1], topologies[1]], [{}] * 3)
    assert all(isinstance(e, UsageError) and "two processes claim to be" in str(e) for e in errors)


def test_a_refusal_reaches_a_worker_that_has_not_yet_sent_its_facts(monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "known to this job only")
    chief, worker = make_topologies(2)
    errors = []
    thread = threading.Thread(target=lambda: errors.extend(run_barriers([chief], [{}])), daemon=True)
    thread.start()
    with connect_to_chief(worker, process="one") as first:
        with pytest.raises(ChannelRefusedError, match="two processes claim to be"):
            connect_to_chief(worker, process="another")
        first.settimeout(TIMEOUT_SECS)
        response = json.loads(first.makefile().readline())
    assert "two processes claim to be" in response["refused"]
    thread.join(TIMEOUT_SECS)
    assert isinstance(errors[0], UsageError)


def connect_to_chief(topology, rank=1, process="another process"):
    """Returns an authenticated connection to the chief, after retries until it listens."""
    endpoint = Endpoint(authenticated_channel.job_secret(), messages.PURPOSE, messages.IDENTITY)
    until_secs = time.monotonic() + TIMEOUT_SECS
    while True:
        try:
            claim = {"rank": rank, "process": process}
            return authenticated_channel.connect(
                messages.address_of(topology, 0), endpoint, claim, PROOF_SECS
            )
        except ChannelRefusedError:
            raise
        except OSError:
            assert time.monotonic() < until_secs
            time.sleep(0.02)


def assert_closed(connection):
    until_secs = time.monotonic() + TIMEOUT_SECS / 2
    connection.settimeout(TIMEOUT_SECS / 2)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):  # discards the chief's messages
            assert time.monotonic() < until_secs


INVALID_RANKS = (-1, 0, 2, 10**30, True, 1.0, "1", None)


def test_an_invalid_rank_is_refused_and_without_a_secret_other_workers_continue():
    topologies = make_topologies(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(run_barriers, topologies[:1], [{}], TIMEOUT_SECS / 2)
        for rank in INVALID_RANKS:
            with pytest.raises(ChannelRefusedError, match="a process has rank"):
                connect_to_chief(topologies[0], rank)
        with pytest.raises(ChannelRefusedError, match="a process has rank"):
            connect_to_chief(topologies[0], 1, process=5)
        assert run_barriers(topologies[1:], [{}]) == [None]
        assert chief.result(TIMEOUT_SECS) == [None]


@pytest.mark.parametrize("rank", INVALID_RANKS)
def test_with_a_secret_an_invalid_rank_ends_the_job(rank, monkeypatch):
    monkeypatch.setenv("CTL_HVD_SECRET", "known to this job only")
    topologies = make_topologies(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(run_barriers, topologies[:1], [{}], TIMEOUT_SECS / 2)
        with pytest.raises(ChannelRefusedError, match="a process has rank"):
            connect_to_chief(topologies[0], rank)
        (error,) = chief.result(TIMEOUT_SECS)
    assert isinstance(error, UsageError) and "a process has rank" in str(error)


@pytest.mark.parametrize(
    "line",
    [b"[" * 60_000 + b"\n", b"5\n", b"{}\n", b'{"facts": []}\n', b'{"facts": {"a": 1}}\n',
     b'{"facts": {"a": null}}\n', b"x" * (messages.MAX_LINE_BYTES + 200_000)],
)  # fmt: skip
def test_a_worker_with_an_invalid_message_is_disconnected_and_its_rank_is_free(line, monkeypatch):
    monkeypatch.setattr(chief_side, "PROOF_SECS", 1000.0)
    topologies = make_topologies(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(run_barriers, topologies[:1], [{}], TIMEOUT_SECS / 2)
        with connect_to_chief(topologies[0]) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(line)
            assert_closed(connection)
        assert run_barriers(topologies[1:], [{}]) == [None]
        assert chief.result(TIMEOUT_SECS) == [None]


def test_a_worker_without_a_message_is_disconnected_and_its_rank_is_free(monkeypatch):
    monkeypatch.setattr(chief_side, "PROOF_SECS", 1.0)
    topologies = make_topologies(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(run_barriers, topologies[:1], [{}], TIMEOUT_SECS / 2)
        with connect_to_chief(topologies[0]) as connection:
            assert_closed(connection)
            assert run_barriers(topologies[1:], [{}]) == [None]
        assert chief.result(TIMEOUT_SECS) == [None]


@pytest.mark.parametrize("line", [b"[" * 60_000 + b"\n", b"5\n", b"[]\n", b"{}\n"])
def test_a_chief_with_invalid_messages_is_another_program(line):
    """Without a secret any program can pass the handshake."""
    topology = make_topologies(2)[1]
    stop = threading.Event()
    endpoint = Endpoint(b"", messages.PURPOSE, messages.IDENTITY)
    listener = Listener(socket.create_server(messages.address_of(topology, 0)), endpoint)

    def answer():
        while not stop.is_set():
            for connection, _ in listener.accept_callers(0.05):
                with connection, contextlib.suppress(OSError):
                    connection.sendall(line)
                    connection.recv(65536)

    with ThreadPoolExecutor() as pool, contextlib.closing(listener):
        answered = pool.submit(answer)
        (error,) = run_barriers([topology], [{}], timeout_secs=3.0)
        stop.set()
        answered.result(TIMEOUT_SECS)
    assert isinstance(error, PeerLostError) and "another program listens" in str(error)


def test_without_a_secret_only_the_second_process_of_an_index_is_refused():
    topologies = make_topologies(3)
    errors = run_barriers([topologies[0], topologies[1], topologies[1]], [{}] * 3, timeout_secs=3.0)
    assert sorted(type(e).__name__ for e in errors) == ["PeerLostError", "PeerLostError", "UsageError"]
    assert isinstance(errors[0], PeerLostError), (
        "without a secret no process is proven to belong to the job"
    )


def test_a_secret_is_compared_but_never_shown():
    errors = run_barriers(make_topologies(2), [{"--api_token": "hunter2"}, {"--api_token": "hunter3"}])
    for error in errors:
        assert "--api_token" in str(error) and "hunter" not in str(error)


def test_code_that_only_one_has_loaded_is_no_difference():
    code = job_fingerprint.CODE
    assert run_barriers(make_topologies(2), [{f"{code}a": "1"}, {f"{code}b": "2"}]) == [None, None]
    assert all(isinstance(e, UsageError) for e in run_barriers(
        make_topologies(2), [{f"{code}a": "1"}, {f"{code}a": "2"}]))  # fmt: skip


def test_connections_of_other_programs_do_not_disturb_the_barrier():
    topologies = make_topologies(2)
    port = int(topologies[0].address.rpartition(":")[2])
    stop = threading.Event()

    def connect_with_other_protocols():
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b"PRI * HTTP/2.0\r\n\r\n")
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(json.dumps({"ctl": 1, "rank": "x"}).encode() + b"\n")
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b'{"ctl": 1, "rank": 1, "facts": {}')  # and disconnects
            except OSError:
                pass

    thread = threading.Thread(target=connect_with_other_protocols, daemon=True)
    thread.start()
    time.sleep(0.1)
    try:
        assert run_barriers(topologies, [{}, {}]) == [None, None]
    finally:
        stop.set()
        thread.join(TIMEOUT_SECS)


def test_another_program_at_the_address_of_the_chief_is_detected():
    topology = make_topologies(2)[1]
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(topology.tasks["worker"][0].rpartition(":")[2])))
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
        (error,) = run_barriers([topology], [{}], timeout_secs=3.0)
    assert isinstance(error, PeerLostError) and "another program listens" in str(error)


@pytest.mark.parametrize(
    ("argument_secs", "launcher_value", "expected"),
    [(5.0, "7", 5.0), (None, "7", 7.0), (None, "", 600.0), (None, "soon", 600.0), (None, "-3", 600.0)],
)
def test_the_timeout_is_the_argument_or_else_the_variable_of_the_launcher(
    argument_secs, launcher_value, expected, monkeypatch
):
    monkeypatch.setenv(startup_barrier.STARTUP_TIMEOUT_VARIABLE, launcher_value)
    assert startup_barrier.timeout_of(argument_secs) == expected


def test_facts_contain_the_modules_of_the_user_and_the_versions():
    facts = job_fingerprint.fingerprint_of_process(0, {"lr": 0.1})
    assert facts["--lr"] == 0.1 and facts["tensorflow"] and facts["GPUs"] == 0
    modules = [k.removeprefix(job_fingerprint.CODE) for k in facts if k.startswith(job_fingerprint.CODE)]
    assert "test_startup_barrier" in modules and not any(
        k.startswith(("numpy", "ctl.", "json")) for k in modules
    )


def test_a_last_call_that_is_cut_short_does_not_hide_the_reason_before(monkeypatch):
    errors = itertools.chain([OSError("the reason")], itertools.repeat(LateProofError("cut short")))

    def fails(*_):
        raise next(errors)

    monkeypatch.setattr(rendezvous, "connect", fails)
    (error,) = run_barriers([make_topologies(2)[1]], [{}], timeout_secs=1.0)
    assert isinstance(error, PeerLostError) and "the reason" in str(error)


def test_a_fingerprint_is_complete_while_another_thread_imports(monkeypatch):
    names = (f"imported_{i}" for i in itertools.count())

    def import_module(phase, info):  # garbage collection gives other threads a turn
        monkeypatch.setitem(sys.modules, next(names), types.ModuleType("imported"))

    thresholds = gc.get_threshold()
    gc.callbacks.append(import_module)
    gc.set_threshold(1)
    try:
        facts = job_fingerprint.fingerprint_of_process(0, {})
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(import_module)
    assert job_fingerprint.CODE + __name__ in facts and "imported_0" in sys.modules
