"""Addresses, listening sockets, and the backoff of deadlines and callers."""

import itertools
import socket

import pytest
from conftest import free_ports
from ctl.io.authenticated_channel import Endpoint, Listener
from ctl.io.rendezvous import (
    Caller,
    Deadline,
    growing_pauses,
    listener_sentence,
    listening_socket,
    split_address,
)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("host1:2222", ("host1", 2222)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:2222", ("::1", 2222))],
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


def test_an_address_of_another_machine_is_replaced_by_all_interfaces():
    with listening_socket("192.0.2.1", 0) as server:  # reserved for documentation
        assert server.getsockname()[0] == "0.0.0.0"
    with listening_socket("127.0.0.1", 0) as server, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", server.getsockname()[1])


def test_a_loopback_address_is_not_replaced_by_all_interfaces(monkeypatch):
    with listening_socket("127.0.0.1", 0, everywhere=True) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: getaddrinfo("127.0.0.2", *a, **k))
    with listening_socket("me", 0, everywhere=True) as server, listening_socket("localhost", 0) as local:
        assert server.getsockname()[0] == "0.0.0.0" and local.getsockname()[0].startswith("127.")


def test_a_host_name_with_debian_s_loopback_address_is_replaced_by_all_interfaces(monkeypatch):
    """The file /etc/hosts has the line `127.0.1.1 NAME`."""
    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: getaddrinfo("127.0.1.1", *a, **k))
    with listening_socket("myhost", 0) as server:
        assert server.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "sentence"),
    [("127.0.0.1", "127.0.0.1:{}, which only this machine can reach"), ("", "0.0.0.0:{} (all interfaces)")],
)
def test_the_address_of_a_listener_is_described(host, sentence):
    listener = Listener(socket.create_server((host, 0)), Endpoint(b"", "test", "it"))
    port = listener.address[1]
    assert listener_sentence(listener, "The chief") == f" The chief listened at {sentence.format(port)}."
    listener.close()


def test_reminders_have_a_backoff_until_the_deadline(monkeypatch):
    now_secs = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_secs[0])
    with_backoff = Deadline(20, remind_secs=3)
    without_backoff = Deadline(20, remind_secs=3, has_backoff=False)
    due = {with_backoff: [], without_backoff: []}
    for second in range(21):
        now_secs[0] = 100.0 + second
        assert with_backoff.is_over == (second == 20)
        for deadline, seconds in due.items():
            if deadline.is_reminder_due():
                seconds.append(second)
    assert due[with_backoff] == [3, 9] and due[without_backoff] == [3, 6, 9, 12, 15, 18]
    assert (with_backoff.waited_secs, with_backoff.remaining_secs) == (20, 0)


def test_a_refused_call_has_a_reason_and_a_backoff(monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    address = ("127.0.0.1", free_ports(1)[0])
    caller = Caller(address, Endpoint(b"", "test", "nobody"), {}, pause_secs=0.2)
    for _ in range(6):
        assert caller.call(1.0) is None
        caller.pause()
    assert caller.failure == "Connection refused"
    longest = [0.0125, 0.025, 0.05, 0.1, 0.2, 0.2]
    assert all(secs / 2 <= pause <= secs for pause, secs in zip(pauses, longest, strict=True))


def test_pauses_double_and_differ_between_callers():
    longest, shortest = [growing_pauses(0.2, lambda value=value: value) for value in (1.0, 0.0)]
    assert [*itertools.islice(longest, 6)] == [0.0125, 0.025, 0.05, 0.1, 0.2, 0.2]
    assert [*itertools.islice(shortest, 6)] == [0.00625, 0.0125, 0.025, 0.05, 0.1, 0.1]
    ports, pauses = free_ports(2), []
    for port in ports:
        caller = Caller(("127.0.0.1", port), Endpoint(b"", "test", "nobody"), {}, pause_secs=1e-6)
        pauses.append([*itertools.islice(caller._pauses, 20)])
    assert pauses[0] != pauses[1]
