"""Requests that reach rank 0 through other ranks: the tree, combined messages, and lost ranks."""

import re
import select
import socket

import pytest
from conftest import TIMEOUT_SECS
from ctl.collectives import relays
from ctl.collectives.control_tree import ControlTree
from ctl.collectives.coordinator import Coordinator
from ctl.collectives.frames import Channel, Inbox, Lost, Outbox
from ctl.collectives.group_outbox import GroupOutbox, MemberOutbox
from ctl.collectives.relays import Relay, unpack_messages
from ctl.collectives.settings import Settings, read_settings
from ctl.collectives.timeline import Timeline
from ctl.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

FANOUTS = [1, 2, 16]  # seven ranks: a chain, a tree with two relays, and without relays


@settings(max_examples=min(50, settings().max_examples), deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40))
def test_each_rank_is_below_one_parent_and_no_rank_has_more_children_than_the_fanout(count, fanout):
    tree = ControlTree(count, fanout)
    assert len(tree.children(0)) == min(fanout, count - 1)
    for rank in range(1, count, max(1, count // 50)):
        parent = tree.parent(rank)
        assert parent < rank and rank in tree.children(parent)
        assert len(tree.children(rank)) <= fanout
        below = [rank, *(member for subtree in tree.subtrees(rank) for member in subtree)]
        assert below == list(tree.members(rank))


def test_the_depth_of_the_tree_grows_with_the_logarithm_of_the_ranks():
    tree, rank, depth = ControlTree(4096), 4095, 0
    while rank:
        rank, depth = tree.parent(rank), depth + 1
    assert depth == 3
    assert ControlTree(33).children(0) == list(range(1, 33))


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many"])
def test_an_invalid_number_of_children_is_refused(value):
    with pytest.raises(UsageError, match=f"FANOUT is '{value}'; expected a whole number >= 1"):
        read_settings({"CTL_COLLECTIVE_FANOUT": value})
    assert read_settings({"CTL_COLLECTIVE_FANOUT": "7"}).fanout == 7


def read_messages(sock, inbox, count):
    """Returns the next `count` messages of a socket."""
    messages = []
    while len(messages) < count:
        inbox.read(sock)
        messages += inbox.messages()
    return messages


@given(st.lists(st.tuples(st.sampled_from([4, 5, 6]), st.integers(0, 3), st.integers(0, 1)), max_size=40))
def test_messages_to_a_subtree_keep_their_order_for_each_rank(sent):
    group = GroupOutbox()
    outboxes = {rank: MemberOutbox(group, rank, is_root=rank == 4) for rank in (4, 5, 6)}
    for rank, number, size in sent:
        outboxes[rank].put({"type": "begin", "number": number}, b"x" * size)
    assert any(outboxes.values()) == bool(sent)
    sender, receiver = socket.socketpair()
    with sender, receiver:
        group.write(sender)
        sender.shutdown(socket.SHUT_WR)
        inbox, received = Inbox(), []
        receiver.settimeout(TIMEOUT_SECS)
        for header, payload in read_messages(receiver, inbox, len(sent) and 1):
            received += [(rank, header["header"]["number"], len(payload)) for rank in header["ranks"]]
    for rank in outboxes:
        assert [m for m in received if m[0] == rank] == [m for m in sent if m[0] == rank]


def test_a_message_to_all_ranks_of_a_subtree_is_sent_once():
    group = GroupOutbox()
    for rank in (4, 5, 6):
        for number in (1, 2):
            group.put(rank, {"type": "begin", "number": number}, ())
    sender, receiver = socket.socketpair()
    with sender, receiver:
        group.write(sender)
        messages = read_messages(receiver, Inbox(), 2)
    assert [header["ranks"] for header, _ in messages] == [[4, 5, 6], [4, 5, 6]]
    assert [header["header"]["number"] for header, _ in messages] == [1, 2]


class RelayedRanks:
    """A relay on rank 1 of seven, with the sockets of its own engine, its children and rank 0."""

    def __init__(self):
        pairs = [socket.socketpair() for _ in range(4)]
        (self.own, own), (self.rank_2, child_2), (self.rank_3, child_3), (self.rank_0, upstream) = pairs
        for sock in (self.own, self.rank_2, self.rank_3, self.rank_0):
            sock.settimeout(TIMEOUT_SECS)
        self.relay_sockets = {2: child_2, 3: child_3}
        self.relay = Relay(1, ControlTree(7, fanout=2), self.relay_sockets, own, upstream)
        self._inbox = Inbox()

    def read(self, count):
        """Returns messages that rank 0 has received, as (ranks, name, payloads)."""
        found = []
        for header, payload in read_messages(self.rank_0, self._inbox, count):
            messages = unpack_messages(1, header, payload)
            name = messages.header.get("name") or messages.header["type"]
            found.append((messages.ranks, name, messages.payloads))
        return found

    def send_from_rank_0(self, *headers):
        for header in headers:
            Channel(self.rank_0).send(header)

    def close(self):
        for sock in (self.own, self.rank_2, self.rank_3, self.rank_0):
            sock.close()
        self.relay.join(TIMEOUT_SECS)


@pytest.fixture
def ranks():
    relayed_ranks = RelayedRanks()
    yield relayed_ranks
    relayed_ranks.close()


def send(sock, name, payload=b""):
    outbox = GroupOutbox()._outbox
    outbox.put({"type": "ask", "name": name}, payload)
    outbox.write(sock)


def test_equal_messages_of_all_ranks_become_one(ranks, monkeypatch):
    monkeypatch.setattr(relays, "_COMBINE_SECS", TIMEOUT_SECS)
    send(ranks.rank_3, "x", b"ccc")
    send(ranks.own, "x", b"a")
    assert select.select([ranks.rank_0], [], [], 0.2) == ([], [], [])
    send(ranks.rank_2, "x")
    ((found_ranks, name, payloads),) = ranks.read(1)
    assert name == "x" and dict(zip(found_ranks, payloads, strict=True)) == {1: b"a", 2: b"", 3: b"ccc"}


def test_a_message_does_not_wait_for_a_rank_that_sends_another_one_or_none(ranks):
    send(ranks.rank_2, "x")
    send(ranks.rank_2, "z")
    send(ranks.rank_3, "y")
    found = ranks.read(3)
    assert sorted(found) == [([2], "x", [b""]), ([2], "z", [b""]), ([3], "y", [b""])]
    assert [name for found_ranks, name, _ in found if found_ranks == [2]] == ["x", "z"]


def test_the_end_of_a_connection_is_reported_after_its_messages(ranks):
    send(ranks.rank_2, "x")
    ranks.rank_2.close()
    assert [(found_ranks, name) for found_ranks, name, _ in ranks.read(2)] == [([2], "x"), ([2], "gone")]


def test_the_last_message_of_a_rank_that_cannot_be_reached_is_relayed(monkeypatch):
    class ClosedOutbox(Outbox):
        """The rank sends a message and ends, after the relay has looked for messages."""

        def write(self, sock):
            if self and ranks.rank_2.fileno() >= 0 and sock.fileno() == ranks.relay_sockets[2].fileno():
                send(ranks.rank_2, "x")
                ranks.rank_2.close()
                raise Lost("it has ended")
            super().write(sock)

    monkeypatch.setattr(relays, "Outbox", ClosedOutbox)
    ranks = RelayedRanks()
    ranks.send_from_rank_0({"type": "to", "ranks": [2], "header": {"type": "begin"}})
    assert [(found_ranks, name) for found_ranks, name, _ in ranks.read(2)] == [([2], "x"), ([2], "gone")]
    ranks.close()


def test_an_ending_below_another_relay_does_not_hide_the_end_of_rank_0(ranks):
    ranks.send_from_rank_0({"type": "to", "ranks": [3], "header": {"type": "ending"}})
    ((header, _),) = read_messages(ranks.rank_3, Inbox(), 1)
    assert header == {"type": "ending"}
    ranks.rank_0.close()
    ((header, _),) = read_messages(ranks.rank_2, Inbox(), 1)
    assert header["type"] == "lost"


def test_the_end_of_the_connection_to_a_rank_0_that_has_left_is_no_error(ranks):
    ranks.send_from_rank_0({"type": "to", "ranks": [1, 2, 3], "header": {"type": "ending"}})
    ranks.rank_0.close()
    for sock in (ranks.own, ranks.rank_2, ranks.rank_3):
        inbox = Inbox()
        assert read_messages(sock, inbox, 1) == [({"type": "ending"}, b"")]
        with pytest.raises(Lost):
            read_messages(sock, inbox, 1)


def test_the_end_of_the_connection_to_rank_0_is_an_error_on_all_ranks(ranks):
    ranks.rank_0.close()
    for sock in (ranks.own, ranks.rank_2, ranks.rank_3):
        ((header, _),) = read_messages(sock, Inbox(), 1)
        assert header == {"type": "lost", "why": "rank 0 is gone (the connection was closed)."}


@pytest.mark.parametrize("has_left", [True, False])
def test_the_coordinator_ends_if_the_root_of_a_subtree_has_ended(has_left):
    """Rank 2 sends its messages through rank 1."""
    (own, rank_0), (socket_1, rank_1) = socket.socketpair(), socket.socketpair()
    tree = ControlTree(3, fanout=1)
    coordinator = Coordinator({0: rank_0, 1: socket_1}, Settings(), Timeline(), tree)
    coordinator.start()
    with own, rank_1:
        rank_1.settimeout(TIMEOUT_SECS)
        if has_left:
            leave = {"type": "of", "ranks": [1], "sizes": [], "header": {"type": "leave"}}
            Channel(rank_1).send(leave)
            headers = [header for header, _ in read_messages(rank_1, Inbox(), 2)]
            assert [(h["ranks"], h["header"]["type"]) for h in headers] == [([1], "left"), ([2], "ending")]
        rank_1.close()
        Channel(own).send({"type": "leave"})
        coordinator.join(TIMEOUT_SECS)
    assert not coordinator._thread.is_alive()


def run(run_program, fanout, event, rank=0):
    program = ["tests/programs/relayed_ranks.py", str(fanout), event, str(rank)]
    return run_program(1, program)[0].json["outcomes"]


@pytest.mark.parametrize("fanout", FANOUTS)
def test_collectives_in_changing_order_give_the_same_numbers(run_program, fanout):
    assert run(run_program, fanout, "none") == ["none"] * 7


@pytest.mark.parametrize(("fanout", "rank"), [(2, 0), (2, 1), (2, 2), (1, 3)])
def test_the_end_of_any_rank_is_an_error_on_all_others_that_names_it(run_program, fanout, rank):
    outcomes = run(run_program, fanout, "exit", rank)
    assert outcomes.pop(rank) is None
    for error in outcomes:
        assert re.fullmatch(rf"ctl.hvd: rank {rank} (died|is gone) \(.*\)\.?", error)


@pytest.mark.slow
@pytest.mark.parametrize(("fanout", "rank"), [(2, 1), (2, 2), (1, 3)])
def test_a_stopped_rank_is_an_error_on_all_others(run_program, fanout, rank):
    outcomes = run(run_program, fanout, "stop", rank)
    assert outcomes.pop(rank) is None
    for error in outcomes:
        assert re.search(rf"rank {rank} died \(silent for|rank \d or rank 0 has been silent", error)
    assert any(f"rank {rank} died" in error for error in outcomes)


@pytest.mark.parametrize("fanout", [1, 2])
def test_a_rank_that_leaves_early_is_named(run_program, fanout):
    outcomes = run(run_program, fanout, "leave", 1)
    del outcomes[1]
    assert all("rank 1 has left: its script has ended or failed" in error for error in outcomes)


@pytest.mark.parametrize("fanout", [1, 2])
def test_ranks_leave_after_the_rank_that_relayed_their_requests_has_ended(run_program, fanout):
    outcomes = run(run_program, fanout, "end", 1)
    assert outcomes.pop(1) is None
    assert outcomes == ["none"] * 6
