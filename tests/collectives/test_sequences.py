"""Parts of the repetition of all-reduces: detection, agreement, held requests."""

import collections
import socket
import time

import numpy as np
import pytest
from ctl.collectives import coordinator_link
from ctl.collectives import negotiation as negotiation_module
from ctl.collectives.frames import Channel, Inbox
from ctl.collectives.heartbeats import GroupFailedError
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.outgoing import Outgoing
from ctl.collectives.repetition import Repetition
from ctl.collectives.requests import Request
from ctl.collectives.sequences import SequenceAgreement, SequenceDetector, Unit
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline


def unit(name, size=2):
    return Unit([{rank: Request(0, name, "allreduce") for rank in range(size)}], {})


def added(detector, names):
    """Adds collectives and returns the names of the sequences that are found, and where."""
    found = {}
    for i, name in enumerate(names, start=1):
        sequence = detector.add(None if name == "-" else unit(name))
        if sequence:
            found[i] = "".join(one.requests[0][0].name for one in sequence)
    return found


@pytest.mark.parametrize("names, expected", [
    ("aaa", {3: "a"}),
    ("ababab", {6: "ab"}),
    ("xyababab", {8: "ab"}),
    ("aabaabaabaa", {11: "baa"}),
    ("abcabdabc", {}),
    ("aa-aa", {}),
    ("aa-aaa", {6: "a"}),
])  # fmt: skip
def test_a_sequence_is_found_when_it_has_occurred_three_times(names, expected):
    assert added(SequenceDetector(), names) == expected


def test_a_sequence_found_in_a_long_history_is_the_repeated_one():
    detector = SequenceDetector()
    names = [chr(1000 + i) for i in range(1500)]
    assert added(detector, names) == {}
    assert added(detector, "ababab") == {6: "ab"}


def test_after_a_short_repetition_the_longer_sequence_is_found():
    detector = SequenceDetector()
    assert added(detector, "aaa") == {3: "a"}
    detector.record_repetition(4, 1)
    assert added(detector, "aaaaab" * 5) == {}
    assert sorted(next(iter(added(detector, "aaaaab" * 2).values()))) == sorted("aaaaab")
    detector.record_repetition(100, 6)
    assert added(detector, "aaa") == {3: "a"}


class _Agreement(SequenceAgreement):
    """An agreement of two ranks that has found the sequence of the names, and its messages to rank 1."""

    def __init__(self, names="a"):
        self.sent = []
        super().__init__(2, lambda rank, header: self.sent.append(header) if rank else None, lambda: True)
        for name in 3 * names:
            self.add_unit(unit(name))

    def reply(self, **fields):
        for rank in range(2):
            self.add_reply(rank, {"number": self.sent[-1]["number"], **fields})

    @property
    def last(self):
        return {name: value for name, value in self.sent[-1].items() if name != "number"}


def test_rank_0_starts_a_repetition_when_all_ranks_hold_their_requests():
    agreement = _Agreement("ab")
    assert agreement.last["type"] == "prepare" and agreement.missing_ranks == [0, 1]
    assert not agreement.advance(list)
    agreement.add_unit(unit("a"))
    agreement.reply()
    held = {1: Request(7, "b", "allreduce")}
    assert agreement.advance(lambda: [held]) and agreement.missing_ranks == []
    assert agreement.last == {"type": "repeat", "position": 1, "returned": [7]}


@pytest.mark.parametrize("names, incomplete", [("b", []), (["-"], []), ("a", ["b"]), ("ab", ["a"])])
def test_no_repetition_starts_if_another_collective_comes_first(names, incomplete):
    agreement = _Agreement()
    for name in names:
        agreement.add_unit(None if name == "-" else unit(name))
    agreement.reply()
    assert not agreement.advance(lambda: [{0: Request(7, name, "allreduce")} for name in incomplete])
    assert agreement.last == {"type": "resume", "until": 0, "is_void": False}


def test_no_repetition_starts_after_a_rank_has_left():
    agreement = _Agreement()
    agreement.cancel()
    assert agreement.last["type"] == "resume"
    agreement.reply()
    assert not agreement.advance(list) and agreement.last["type"] == "resume"


def messages_to(negotiation, rank):
    inbox = Inbox()
    inbox._bytes += b"".join(map(bytes, negotiation.outboxes[rank]._parts))
    return [header["type"] for header, _ in inbox.messages()]


@pytest.mark.parametrize("is_lost", [False, True])
def test_ranks_that_hold_requests_send_them_when_another_rank_leaves(is_lost):
    negotiation = Negotiation(3, Settings(), Timeline())
    for number in range(3):
        for rank in range(3):
            request = Request(number, "a", "allreduce", ["uint8"], [[2]], is_inline=True)
            negotiation.add_request(rank, request, b"ab")
        negotiation.send_responses()
    assert messages_to(negotiation, 0) == ["result"] * 3 + ["prepare"]
    negotiation.remove_rank(2, "has left", is_lost=is_lost)
    assert "resume" in messages_to(negotiation, 0)


@pytest.mark.parametrize("fields, expected_type, is_printed", [
    ({"stall_shutdown": 0.2}, "lost", False),
    ({"stall_warning": 0.2}, "prepare", True),
    ({}, "prepare", False),
])  # fmt: skip
def test_ranks_that_do_not_reply_to_rank_0_are_named(fields, expected_type, is_printed, monkeypatch, capfd):
    monkeypatch.setattr(negotiation_module, "_POLL_INTERVAL_SECS", 0.0)
    negotiation = Negotiation(2, Settings(**fields), Timeline())
    for number in range(3):
        for rank in range(2):
            request = Request(number, "a", "allreduce", ["uint8"], [[2]], is_inline=True)
            negotiation.add_request(rank, request, b"ab")
        negotiation.send_responses()
    negotiation.agreement.add_reply(0, {"number": 1})
    time.sleep(0.3)
    negotiation.check_stalls()
    assert messages_to(negotiation, 0)[-1] == expected_type
    assert ("rank 1 did not respond to rank 0" in capfd.readouterr().err) is is_printed


@pytest.mark.parametrize("replies, until, is_void", [
    ([(5, True), (5, False)], 5, False),
    ([(5, True), (6, False)], 6, False),
    ([(5, False), (6, True)], 6, True),
])  # fmt: skip
def test_an_interrupted_repetition_ends_with_the_last_started_collective(replies, until, is_void):
    agreement = _Agreement()
    agreement.reply()
    agreement.advance(list)
    agreement.interrupt()
    assert agreement.last == {"type": "stop"}
    number = agreement.sent[-1]["number"]
    for rank, (started, is_ready) in enumerate(replies):
        assert not agreement.advance(list) and agreement.last == {"type": "stop"}
        agreement.add_reply(rank, {"number": number, "started": started, "is_ready": is_ready})
    agreement.advance(list)
    assert agreement.last == {"type": "resume", "until": until, "is_void": is_void}


class _Recorder:
    """A repetition whose exchanges are calls of `during`, and what it sends and finishes."""

    def __init__(self, during):
        self.sent, self.finished, self.zeros = [], [], []
        self.sockets = socket.socketpair()
        self.outgoing = Outgoing(Channel(self.sockets[0]))
        self.scheduled = collections.deque()

        def execute(unit, ids):
            if ids is None:
                self.zeros.append(unit.zeros())
            during(self)
            return [[]]

        def receive(_):
            raise AssertionError("waits for a message that will not come")

        self.repetition = Repetition(
            self.outgoing, self.scheduled, self.sent.append, receive, execute,
            lambda number, _: self.finished.append(number),
        )  # fmt: skip
        self.repetition.record(self.request(0), [np.ones(3, np.int32)])
        units = [{"ids": [0], "selection": {}}]
        self.repetition.prepare({"units": units, "number": 1})
        self.repetition.start({"position": 0}, [])

    def request(self, number):
        return Request(number, "step", "allreduce")

    def close(self):
        self.outgoing.close()
        for sock in self.sockets:
            sock.close()


def resumed_by(until, is_void):
    def during(recorder):
        if not recorder.scheduled:
            recorder.repetition.stop({"number": 2})
            recorder.scheduled.append({"until": until, "is_void": is_void})

    return during


@pytest.mark.parametrize(
    "until, is_void, is_finished", [(1, False, True), (1, True, False), (2, True, True)]
)
def test_a_result_counts_if_all_ranks_have_contributed_to_it(until, is_void, is_finished):
    recorder = _Recorder(resumed_by(until, is_void))
    recorder.outgoing.put(recorder.request(7), [], is_delayed=False)
    assert recorder.repetition.advance()
    assert recorder.sent[-1] == {"type": "stopped", "number": 2, "started": 1, "is_ready": False}
    assert recorder.finished == ([7] if is_finished else [])
    assert recorder.outgoing.has_held is not is_finished
    recorder.repetition.resume(recorder.scheduled[0])
    assert [len(arrays) for arrays in recorder.zeros] == [1] * (until - 1)
    assert not recorder.outgoing.has_held and not recorder.repetition.is_repeating
    recorder.close()


def test_held_requests_are_sent_in_the_order_of_their_numbers():
    ours, theirs = socket.socketpair()
    outgoing, inbox, payload = Outgoing(Channel(ours)), Inbox(), [np.ones(2, np.uint8)]
    requests = {i: Request(i, f"step {i}", "allreduce", ["uint8"], [[2]], is_inline=True) for i in range(4)}
    outgoing.hold()
    for number in (1, 3):
        outgoing.put(requests[number], payload, is_delayed=False)
    outgoing.hold_again([(requests[2], payload), (requests[0], payload)])
    assert [one.request.id for one in outgoing.take_held([requests[3].signature])] == [3]
    assert outgoing.take_held([requests[0].signature, requests[3].signature]) is None
    outgoing.leave()
    outgoing.release()
    inbox.read(theirs)
    (several, data), (leave, _) = inbox.messages()
    assert [header["id"] for header in several["of"]] == [0, 1, 2] and len(data) == 6
    assert leave == {"type": "leave"}
    outgoing.close()
    ours.close()
    theirs.close()


def test_a_rank_with_held_requests_detects_that_rank_0_does_not_respond(monkeypatch):
    monkeypatch.setattr(coordinator_link, "_ANSWER_SECS", 0.1)
    ours, theirs = socket.socketpair()
    link = coordinator_link.CoordinatorLink(ours, 1, Settings(stall_shutdown=0.2), lambda *_: None)
    link.outgoing.hold()
    link.outgoing.put(Request(1, "step", "allreduce"), [], is_delayed=False)
    requested_at = time.monotonic()
    with pytest.raises(GroupFailedError, match="rank 0 has not responded"):
        while not link.wait(lambda: 0.01, lambda: requested_at):
            pass
    link.close()
    theirs.close()




@pytest.mark.parametrize("answer", ["an earlier reason", "nothing", "end"])
def test_a_rank_that_reports_a_lost_rank_has_the_reason_of_rank_0(monkeypatch, answer):
    """The reported rank may have ended because of the earlier loss of another one."""
    monkeypatch.setattr(coordinator_link, "_REASON_SECS", 0.2)
    ours, theirs = socket.socketpair()
    link = coordinator_link.CoordinatorLink(ours, 1, Settings(), raise_reason)
    if answer == "an earlier reason":
        Channel(theirs).send({"type": "lost", "rank": 4, "why": "rank 4 died"})
    elif answer == "end":
        theirs.shutdown(socket.SHUT_RDWR)
    expected = "rank 4 died" if answer == "an earlier reason" else "rank 7 is gone"
    assert link.report(7, "rank 7 is gone") == expected
    link.close()
    theirs.close()


def raise_reason(header, payload):
    raise GroupFailedError(header["why"])
