"""Connection of an elastic worker to the launcher: messages and their effects."""

import contextlib
import os
import socket
import threading

import pytest
from conftest import TIMEOUT_SECS
from ctl.errors import PeerLostError, UsageError
from ctl.hvd import elastic, elastic_line
from ctl.hvd.errors import HorovodInternalError, HostsUpdatedInterrupt
from ctl.io.authenticated_channel import ChannelRefusedError, Endpoint, UnprovenError, connect
from ctl.io.json_lines import JsonLines
from ctl.io.tcp_options import set_peer_timeout, set_tcp_options
from ctl.launch import worker_channels
from ctl.launch.elastic import _plan_ranks
from ctl.launch.membership import Slot
from ctl.launch.worker_channels import WorkerChannels
from ctl.supervision.beat_file import PollClock
from strangers import crowd


class Launcher:
    """The other end, in this process."""

    def __init__(self):
        self.service = WorkerChannels("s3cret", "127.0.0.1")

    def wait_for(self, key):
        """Returns the next message of worker 7 with this key."""
        over = threading.Event()
        for _ in range(6000):
            for worker, message in self.service.events():
                if worker == 7 and key in message:
                    return message
            over.wait(0.02)
        raise AssertionError(f"no {key!r} came")

    def assign(self, generation, size=2, must_sync=True):
        assignment = {
            "rank": 0, "size": size, "local_rank": 1, "local_size": size, "cross_rank": 0,
            "cross_size": 1, "addresses": [f"127.0.0.1:{n}" for n in range(size)],
            "generation": generation, "is_homogeneous": True,
        }  # fmt: skip
        self.send(place=assignment, must_sync=must_sync)

    def send(self, **message):
        assert self.service.send(7, message)


class Listener:
    def __init__(self):
        self.told = []
        self.came = threading.Event()

    def on_hosts_updated(self, timestamp, update_res):
        self.told.append((timestamp, update_res))
        self.came.set()


@pytest.fixture
def launcher(monkeypatch):
    launcher = Launcher()
    monkeypatch.setenv("CTL_HVD_RENDEZVOUS", f"127.0.0.1:{launcher.service.port}")
    monkeypatch.setenv("CTL_HVD_SECRET", "s3cret")
    monkeypatch.setenv("CTL_HVD_WORKER", "7")
    monkeypatch.setattr(elastic_line, "_client", None)
    elastic_line.report_synced()
    assert launcher.wait_for("synced")
    before = dict(os.environ)
    yield launcher
    launcher.service.close()
    for name in set(os.environ) - set(before):  # where it is in the group
        os.environ.pop(name)


def test_a_rank_is_assigned_once_the_launcher_has_a_group(launcher):
    elastic_line.set_skip_sync(True)
    launcher.assign(3, must_sync=False)
    assignment = elastic_line.join_next_group()
    request = launcher.wait_for("join")
    assert request["skips_sync"] is True and 0 < request["join"] < 65536
    assert (assignment.size, assignment.local_rank, assignment.generation) == (2, 1, 3)
    assert assignment.addresses == ("127.0.0.1:0", "127.0.0.1:1") and not elastic_line.must_sync()
    launcher.assign(4)
    elastic_line.join_next_group()
    assert launcher.wait_for("join")["skips_sync"] is False and elastic_line.must_sync()


def test_listeners_hear_of_changes_of_their_group_only(launcher):
    listener = Listener()
    elastic_line.add_listener(listener)
    launcher.assign(3)
    elastic_line.join_next_group()
    launcher.send(change=1, time=1.0, group=2)
    launcher.send(change=2, time=5.0, group=3)
    assert listener.came.wait(TIMEOUT_SECS) and listener.told == [(5.0, 2)]
    elastic_line.remove_listener(listener)
    launcher.send(change=2, time=6.0, group=3)
    launcher.assign(4)
    elastic_line.join_next_group()
    assert listener.told == [(5.0, 2)]


def test_a_lost_rank_is_reported_before_and_after_registration(launcher):
    launcher.assign(3)
    launcher.send(lost=1, group=3)
    elastic_line.join_next_group()
    reasons, has_message = [], threading.Event()

    def report_loss(reason):
        reasons.append(reason)
        has_message.set()

    elastic_line.set_loss_listener(report_loss)
    assert (
        has_message.wait(TIMEOUT_SECS)
        and "rank 1 is gone" in reasons[0]
        and elastic_line.read_loss() == reasons[0]
    )
    launcher.assign(4)
    elastic_line.join_next_group()
    assert elastic_line.read_loss() == ""
    has_message.clear()
    elastic_line.set_loss_listener(report_loss)
    launcher.send(lost=1, group=3)  # of the group before
    launcher.send(lost=0, group=4)
    assert has_message.wait(TIMEOUT_SECS) and len(reasons) == 2 and "rank 0 is gone" in reasons[1]


def test_a_group_that_breaks_at_once_is_followed_by_the_next(launcher, capsys):
    launcher.assign(3)
    launcher.assign(4)

    def connect(assignment):
        if assignment.generation == 3:
            raise HorovodInternalError("rank 1 is gone")
        return assignment.generation

    assert elastic_line.connect_group(connect) == 4
    assert "group 3 failed to connect: rank 1 is gone" in capsys.readouterr().err


def test_a_process_that_is_not_needed_leaves_with_0(launcher):
    launcher.send(leave=True)
    with pytest.raises(SystemExit) as caught:
        elastic_line.join_next_group()
    assert caught.value.code == 0


def test_the_end_of_all_groups_is_an_error_with_the_reason(launcher):
    launcher.send(failure="too few")
    with pytest.raises(PeerLostError, match="no new group of ranks: too few"):
        elastic_line.join_next_group()


def test_a_launcher_that_is_gone_is_an_error(launcher):
    launcher.service.close()
    with pytest.raises(PeerLostError, match="the launcher is gone"):
        elastic_line.join_next_group()


def test_the_end_of_the_connection_ends_the_group_and_a_worker_without_one(launcher):
    listener, losses, came = Listener(), [], threading.Event()
    elastic_line.add_listener(listener)
    elastic_line.set_loss_listener(lambda message: (losses.append(message), came.set()))
    launcher.service.close()
    assert listener.came.wait(TIMEOUT_SECS) and came.wait(TIMEOUT_SECS)
    assert losses == ["the launcher is gone, or cannot be reached"]
    assert listener.told[0][1] == elastic_line.REMOVED
    elastic_line.remove_listener(listener)


def test_a_worker_is_silent_if_it_breaks_its_promise_of_messages(launcher):
    assert not launcher.service.is_silent(7), "it has promised nothing"
    elastic_line.limit_silence(0.4)
    over = threading.Event()
    for _ in range(20):
        over.wait(0.1)
        assert not launcher.service.is_silent(7)
    elastic_line._client._beats.stop(wait=True)
    for _ in range(6000):
        if launcher.service.is_silent(7):
            break
        over.wait(0.02)
    assert launcher.service.is_silent(7)
    assert not any("alive" in message for _, message in launcher.service.events())


def test_a_launcher_that_was_stopped_does_not_count_the_time():
    seconds = [0.0]
    service = WorkerChannels("s3cret", "127.0.0.1", PollClock(clock=lambda: seconds[0]))
    try:
        service._silence[7] = service._clock(), 10.0
        seconds[0] = 1000.0
        assert not service.is_silent(7)
        for _ in range(11):  # as the loop of the launcher, which reads events all the time
            seconds[0] += 1.0
            assert not list(service.events())
        assert service.is_silent(7)
    finally:
        service.close()


def test_a_cut_link_ends_a_connection_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = set_tcp_options(socket.create_connection(server.getsockname()))
        set_peer_timeout(connection, 800.0)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        set_peer_timeout(connection, 8.0)
        names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL")
        options = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        connection.close()
    assert options == [8000, 2, 2]


def test_half_of_the_variables_is_a_mistake_that_names_them(launcher, monkeypatch):
    monkeypatch.setattr(elastic_line, "_client", None)
    monkeypatch.delenv("CTL_HVD_WORKER")
    with pytest.raises(UsageError, match="expected the values that `ctlrun` sets"):
        elastic_line.join_next_group()


def wait_for_events(service, count):
    """Returns the next events of a service."""
    events, over = [], threading.Event()
    for _ in range(6000):
        events += service.events()
        if len(events) >= count:
            return events
        over.wait(0.02)
    raise AssertionError(events)


def test_a_place_is_also_in_the_environment(launcher, monkeypatch):
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{name}", "99")
    launcher.assign(1, size=3)
    elastic_line.join_next_group()
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [os.environ[f"HOROVOD_{name}"] for name in names] == ["0", "3", "1", "3", "0", "1"]


def test_new_hosts_are_reported_at_once_and_the_ranks_change_when_they_are_ready(launcher):
    launcher.assign(2)
    elastic_line.join_next_group()
    state = elastic.ObjectState(bcast_object=lambda value: value, batch=0)
    elastic_line.add_listener(state)
    launcher.send(notice=2, time=7.0, group=2)
    assert state._host_messages.get(timeout=TIMEOUT_SECS) == (7.0, 2)
    state.commit()  # continues
    launcher.send(change=2, time=8.0, group=2)
    assert state._host_messages.get(timeout=TIMEOUT_SECS) == (8.0, 2)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    elastic_line.remove_listener(state)


def test_processes_begin_with_the_place_that_is_planned_for_them():
    slots = [Slot("host1", 0), Slot("host1", 1), Slot("host2", 0)]
    plans = [_plan_ranks(slots, slot) for slot in slots]
    assert [(p.rank, p.size, p.local_rank, p.local_size) for p in plans] == [
        (0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1),
    ]  # fmt: skip
    assert [(p.cross_rank, p.cross_size) for p in plans] == [(0, 2), (0, 1), (1, 2)]


def dial(address, secret, worker):
    """Opens a worker's connection to the launcher."""
    endpoint = Endpoint(secret, worker_channels.PURPOSE, worker_channels.IDENTITY)
    return JsonLines(connect(address, endpoint, {"worker": worker}))


def test_a_worker_and_the_launcher_connect_if_both_have_the_secret():
    launcher = WorkerChannels("s3cret", "127.0.0.1")
    line = dial(("127.0.0.1", launcher.port), b"s3cret", 7)
    line.send({"join": 5})
    assert wait_for_events(launcher, 1) == [(7, {"join": 5})]
    assert launcher.send(7, {"place": {}}) and line.receive() == {"place": {}}
    assert not launcher.send(8, {})
    line.close()
    assert wait_for_events(launcher, 1) == [(7, {"gone": True})]
    launcher.close()


def test_a_stranger_is_not_heard():
    launcher = WorkerChannels("s3cret", "127.0.0.1")
    address = ("127.0.0.1", launcher.port)
    with pytest.raises(ConnectionError):
        dial(address, b"guess", 7)
    for number in (-1, True, "7", None):
        with pytest.raises(ChannelRefusedError, match="expected its number"):
            dial(address, b"s3cret", number)
    assert list(launcher.events()) == []
    launcher.close()


def test_an_invalid_message_ends_the_connection_of_its_worker_only():
    launcher = WorkerChannels("s3cret", "127.0.0.1")
    address = ("127.0.0.1", launcher.port)
    other = dial(address, b"s3cret", 8)
    for invalid_line in (b"[1]\n", b"5\n", b"[" * 100_000 + b"\n", b"x" * 3_000_000):
        endpoint = Endpoint(b"s3cret", worker_channels.PURPOSE, worker_channels.IDENTITY)
        with connect(address, endpoint, {"worker": 7}) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(invalid_line)
            assert wait_for_events(launcher, 1) == [(7, {"gone": True})]
    other.send({"join": 5})
    assert wait_for_events(launcher, 1) == [(8, {"join": 5})]
    launcher.close()


def test_the_end_of_an_older_connection_is_not_the_end_of_its_worker():
    launcher = WorkerChannels("s3cret", "127.0.0.1")
    address, before = ("127.0.0.1", launcher.port), set(threading.enumerate())
    older = dial(address, b"s3cret", 7)
    older.send({"first": 1})
    assert wait_for_events(launcher, 1) == [(7, {"first": 1})]
    [reader] = set(threading.enumerate()) - before
    newer = dial(address, b"s3cret", 7)
    newer.send({"second": 2})
    assert wait_for_events(launcher, 1) == [(7, {"second": 2})]
    older.close()
    reader.join(TIMEOUT_SECS)
    assert launcher.send(7, {"place": {}}) and newer.receive() == {"place": {}}
    assert list(launcher.events()) == []
    newer.close()
    assert wait_for_events(launcher, 1) == [(7, {"gone": True})]
    launcher.close()


@pytest.mark.parametrize(("fault", "calls"), [(UnprovenError, 3), (ConnectionRefusedError, 1)])
def test_a_launcher_that_is_busy_is_called_again_and_one_that_is_gone_is_not(monkeypatch, fault, calls):
    monkeypatch.setenv("CTL_HVD_RENDEZVOUS", "127.0.0.1:1")
    monkeypatch.setenv("CTL_HVD_SECRET", "s3cret")
    monkeypatch.setenv("CTL_HVD_WORKER", "7")
    monkeypatch.setattr(elastic_line, "_RETRY_SECS", 0.0)
    local_end, remote_end = socket.socketpair()
    connections = []

    def called(*_):
        connections.append(1)
        if len(connections) < 3:
            raise fault("not now")
        return local_end

    monkeypatch.setattr(elastic_line.authenticated_channel, "connect", called)
    with local_end, remote_end:
        if calls == 1:
            with pytest.raises(PeerLostError, match="cannot be reached: not now"):
                elastic_line._connect_to_launcher()
        else:
            elastic_line._connect_to_launcher()
    assert len(connections) == calls


def test_a_crowd_does_not_keep_a_replacement_from_the_launcher(monkeypatch):
    launcher = Launcher()
    monkeypatch.setenv("CTL_HVD_RENDEZVOUS", f"127.0.0.1:{launcher.service.port}")
    monkeypatch.setenv("CTL_HVD_SECRET", "s3cret")
    monkeypatch.setenv("CTL_HVD_WORKER", "7")
    with crowd(launcher.service.port, silent=600):
        for _ in range(5):
            monkeypatch.setattr(elastic_line, "_client", None)
            elastic_line.report_synced()
            assert launcher.wait_for("synced")
    launcher.service.close()
