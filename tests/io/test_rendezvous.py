"""Addresses, listening sockets, and how long somebody waits for others."""

import socket

import pytest
from conftest import free_ports
from ctl.io.authenticated_channel import Endpoint, Listener
from ctl.io.rendezvous import Caller, Deadline, listener_sentence, listening_socket, split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [("host1:2222", ("host1", 2222)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:2222", ("::1", 2222))],
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


def test_a_name_that_no_address_here_has_is_listened_for_at_all_of_them():
    with listening_socket("192.0.2.1", 0) as server:  # reserved for documentation
        assert server.getsockname()[0] == "0.0.0.0"
    with listening_socket("127.0.0.1", 0) as server, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", server.getsockname()[1])


def test_an_address_of_this_machine_alone_is_not_listened_for_everywhere(monkeypatch):
    with listening_socket("127.0.0.1", 0, everywhere=True) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real("127.0.0.2", *a, **k))
    with listening_socket("me", 0, everywhere=True) as server, listening_socket("localhost", 0) as here:
        assert server.getsockname()[0] == "0.0.0.0" and here.getsockname()[0].startswith("127.")


def test_a_name_that_debian_gives_a_loopback_address_is_listened_for_everywhere(monkeypatch):
    """As with `127.0.1.1 NAME` in /etc/hosts."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real("127.0.1.1", *a, **k))
    with listening_socket("myhost", 0) as server:
        assert server.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "sentence"),
    [("127.0.0.1", "127.0.0.1:{}, which only this machine can reach"), ("", "0.0.0.0:{} (all interfaces)")],
)
def test_the_place_of_a_listener_is_a_sentence(host, sentence):
    listener = Listener(socket.create_server((host, 0)), Endpoint(b"", "test", "it"))
    port = listener.address[1]
    assert listener_sentence(listener, "The chief") == f" The chief listened at {sentence.format(port)}."
    listener.close()


def test_reminders_become_rarer_until_the_time_is_over(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    rarer, steady = Deadline(20, remind_secs=3), Deadline(20, remind_secs=3, has_backoff=False)
    due = {rarer: [], steady: []}
    for second in range(21):
        now[0] = 100.0 + second
        assert rarer.is_over == (second == 20)
        for deadline, seconds in due.items():
            if deadline.is_reminder_due():
                seconds.append(second)
    assert due[rarer] == [3, 9] and due[steady] == [3, 6, 9, 12, 15, 18]
    assert (rarer.waited_secs, rarer.remaining_secs) == (20, 0)


def test_a_call_that_nobody_takes_says_why_and_the_next_comes_later(monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    address = ("127.0.0.1", free_ports(1)[0])
    caller = Caller(address, Endpoint(b"", "test", "nobody"), {}, pause_secs=0.2)
    for _ in range(6):
        assert caller.call(1.0) is None
        caller.pause()
    assert caller.failure == "Connection refused"
    assert pauses == [0.0125, 0.025, 0.05, 0.1, 0.2, 0.2]
