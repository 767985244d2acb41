"""The parts of the runtime by themselves: numbers, messages, requests, places, objects."""

import json
import socket
import time
from argparse import Namespace
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import arithmetic, inline, requests, settings
from ctl.collectives.coordinator import Coordinator
from ctl.collectives.frames import Channel, Inbox, Lost, pack_message
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.outgoing import Outgoing
from ctl.collectives.ranks import Ranks
from ctl.collectives.requests import Request
from ctl.collectives.table import Table
from ctl.collectives.timeline import Timeline
from ctl.distribute import rank_variables
from ctl.errors import UsageError
from ctl.hvd import packing
from hypothesis import given
from hypothesis import strategies as st

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_narrowing_rounds_as_the_type_s_own_cast(dtype, values):
    wide = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        want = wide.astype(dtype)
    got = arithmetic.from_float32(wide, np.dtype(dtype))
    numbers = ~np.isnan(wide)
    assert (got.view(np.uint16)[numbers] == want.view(np.uint16)[numbers]).all()
    assert np.isnan(got[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", [arithmetic.SUM, arithmetic.MIN, arithmetic.MAX, arithmetic.PRODUCT])
def test_many_and_few_sixteen_bit_floats_are_reduced_alike(dtype, op):
    one, other = np.random.default_rng(0).normal(size=(2, 10_000)).astype(dtype)
    many, few = np.empty_like(one), np.empty_like(one)
    arithmetic.reduce_to(many, op, one, other)
    for start in range(0, 10_000, 1000):
        part = slice(start, start + 1000)
        arithmetic.reduce_to(few[part], op, one[part], other[part])
    assert (many.view(np.uint16) == few.view(np.uint16)).all()
    for call in (lambda a: arithmetic.scale_array(a, 1 / 3), lambda a: arithmetic.average_array(a, 3)):
        parts = [call(one[start : start + 1000]) for start in range(0, 10_000, 1000)]
        assert (call(one).view(np.uint16) == np.concatenate(parts).view(np.uint16)).all()


def test_whole_numbers_are_averaged_and_scaled_towards_zero():
    whole = np.array([7, -7, 1, -1])
    assert arithmetic.average_array(whole, 2).tolist() == [3, -3, 0, 0]
    assert arithmetic.scale_array(whole, 0.5).tolist() == [3, -3, 0, 0]
    assert arithmetic.average_array(np.array([49]), 49).tolist() == [1]
    big = np.array([2**62 + 2], np.int64)
    assert arithmetic.average_array(big, 2).tolist() == [2**61 + 1]


@pytest.mark.parametrize(("rows", "count"), [(0, 3), (2, 3), (7, 3), (9, 3)])
def test_rows_are_dealt_as_equally_as_can_be(rows, count):
    dealt = arithmetic.split_rows(rows, count)
    assert sum(dealt) == rows and max(dealt) - min(dealt) <= 1 and dealt == sorted(dealt)[::-1]


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary(max_size=300)), max_size=5),
       st.integers(1, 40))  # fmt: skip
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages, step):
    data = b"".join(b"".join(pack_message(header, payload)) for header, payload in messages)
    inbox, found = Inbox(), []
    for start in range(0, len(data), step):
        inbox._bytes += data[start : start + step]
        found += inbox.messages()
    assert found == messages


def test_the_end_of_a_connection_is_lost_and_so_is_rubbish():
    ours, theirs = socket.socketpair()
    Channel(theirs).send({"a": 1}, b"xy")
    theirs.close()
    inbox = Inbox()
    inbox.read(ours)
    assert list(inbox.messages()) == [({"a": 1}, b"xy")]
    with pytest.raises(Lost):
        inbox.read(ours)
    with pytest.raises(Lost):
        Channel(ours).send({}, bytes(1 << 22))
    inbox._bytes += b"\xff" * 12
    with pytest.raises(Lost, match="not a message"):
        list(inbox.messages())
    ours.close()


def request(kind="allreduce", shape=(3,), dtype="float32", **more):
    return Request(0, "x", kind, [dtype], [shape], **more)


def test_a_request_with_another_number_keeps_key_and_sizes():
    first = Request(3, "x", "allreduce", ["float32", "int8"], [(2, 5), ()])
    assert first.size == 41 and first.key
    again = first.with_id(7)
    assert (again.id, first.id) == (7, 3)
    assert again.key is first.key and again.sizes is first.sizes
    assert again.header() == {**first.header(), "id": 7}


def test_equal_requests_have_no_fault():
    for kind in ("allreduce", "allgather", "broadcast", "reducescatter"):
        assert requests.find_error([0, 1], {0: request(kind), 1: request(kind)}) is None
    assert (
        requests.find_error([0, 1], {0: request("allgather", (2, 5)), 1: request("allgather", (0, 5))})
        is None
    )
    splits = {r: request("alltoall", splits=[1, 2]) for r in (0, 1)}
    assert requests.find_error([0, 1], splits) is None


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (request(shape=(4,)), "ranks 0, 2: [3]; rank 1: [4]"),
        (request(dtype="int32"), "ranks 0, 2: float32; rank 1: int32"),
        (request(op=3), "Min"),
        (request(prescale=0.5), "0.5"),
        (request("allgather"), "allgather"),
    ],
)
def test_a_difference_names_the_ranks_and_what_they_have(other, part):
    code, text = requests.find_error([0, 1, 2], {0: request(), 2: request(), 1: other})
    assert code == requests.FAILED_PRECONDITION and part in text


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab")), max_size=40))
def test_requests_of_a_name_are_paired_in_their_order(asked):
    table, counts, done = Table(3), {}, []
    for rank, name in asked:
        number = counts[rank, name] = counts.get((rank, name), -1) + 1
        found = table.put(rank, Request(number, name, "barrier"), b"")
        if found:
            done.append((name, {r.id for r in found.requests.values()}))
    for name in "ab":
        least = min(counts.get((rank, name), -1) for rank in range(3)) + 1
        assert [ids for n, ids in done if n == name] == [{i} for i in range(least)]


def test_ranks_that_wait_for_each_other_are_at_odds():
    table = Table(3)
    table.put(0, Request(0, "a", "barrier"), b"")
    table.put(1, Request(0, "b", "barrier"), b"")
    assert list(table.find_deadlocks()) == []  # rank 2 may come to either
    table.put(2, Request(0, "b", "barrier"), b"")
    ((one, other),) = table.find_deadlocks()
    assert table.find_missing_ranks(one) == [1, 2] and table.find_missing_ranks(other) == [0]


def kinds(thing):
    """The types in it, as a text; of a set in no order."""
    if isinstance(thing, dict):
        return f"dict {[(kinds(k), kinds(v)) for k, v in thing.items()]}"
    if isinstance(thing, (list, tuple, set)):
        inner = [kinds(part) for part in thing]
        return f"{type(thing).__name__} {sorted(inner) if isinstance(thing, set) else inner}"
    return type(thing).__name__


SIMPLE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
                   st.binary(), st.complex_numbers(allow_nan=False))  # fmt: skip


@given(
    st.recursive(
        SIMPLE,
        lambda inner: st.one_of(
            st.lists(inner), st.tuples(inner, inner), st.dictionaries(SIMPLE, inner), st.sets(SIMPLE)
        ),
        max_leaves=20,
    )
)
def test_objects_come_back_with_their_types(thing):
    back = packing.deserialize_object(packing.serialize_object(thing))
    assert back == thing and kinds(back) == kinds(thing)


@pytest.mark.parametrize(
    "thing", [OrderedDict(b=1, a=(2,)), Namespace(lr=0.1, layers=[1, 2]), range(3, 9, 2)], ids=repr
)
def test_what_scripts_keep_settings_in_travels(thing):
    back = packing.deserialize_object(packing.serialize_object({"x": thing}))["x"]
    assert back == thing and type(back) is type(thing)


@pytest.mark.parametrize(
    "array", [np.float32(1.5), np.arange(6).reshape(2, 3), np.array([]), np.array(["a", "bc"]),
              np.ones(3, ml_dtypes.bfloat16), np.array([True])], ids=lambda a: str(a.dtype)
)  # fmt: skip
def test_arrays_come_back_with_their_types(array):
    back = packing.deserialize_object(packing.serialize_object({"x": [array]}))["x"][0]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape
    assert (back == array).all()


class Mine:
    pass


@pytest.mark.parametrize("thing", [Mine(), Mine, len, np.array([None]), {"a": [1, Mine()]}])
def test_what_cannot_be_packed_says_so_and_is_not_pickled(thing):
    with pytest.raises(UsageError, match="allow_pickle=True"):
        packing.serialize_object(thing)


def config(addresses, index, kind="worker"):
    cluster = {kind: addresses} if kind != "chief" else {"chief": addresses[:1], "worker": addresses[1:]}
    task = {"type": kind if index == 0 else "worker", "index": index - (kind == "chief" and index > 0)}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_places_on_two_hosts():
    hosts = ["a:1", "a:2", "b:1", "a:3", "b:2"]
    found = [rank_variables.read_ranks(config(hosts, i)) for i in range(5)]
    assert [(p.rank, p.size) for p in found] == [(i, 5) for i in range(5)]
    assert [(p.local_rank, p.local_size) for p in found] == [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2)]
    assert [(p.cross_rank, p.cross_size) for p in found] == [(0, 2), (0, 2), (1, 2), (0, 1), (1, 2)]
    assert not found[0].is_homogeneous
    assert rank_variables.read_ranks(config(["a:1", "b:1"], 1)).is_homogeneous


def test_the_chief_is_rank_0_and_one_process_needs_nothing():
    hosts = ["a:1", "b:1", "c:1"]
    assert [rank_variables.read_ranks(config(hosts, i, "chief")).rank for i in range(3)] == [0, 1, 2]
    assert rank_variables.read_ranks({}) == Ranks()
    said = rank_variables.read_ranks({**config(["a:1", "a:2"], 1), "HOROVOD_LOCAL_RANK": "5"})
    assert said.local_rank == 5 and said.rank == 1


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, "ctlrun -np"),
        ({"HOROVOD_LOCAL_RANK": "x"}, "whole number"),
        ({"TF_CONFIG": config(["a:1", "b:1"], 0, "ps")["TF_CONFIG"]}, "equal ranks"),
    ],
)
def test_places_that_cannot_be(extra, match):
    with pytest.raises(UsageError, match=match):
        rank_variables.read_ranks(extra)


def test_settings_are_numbers():
    assert settings.read_settings({}).stall_warning == 60.0
    assert settings.read_settings({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning == 0.0
    assert settings.read_settings({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}).stall_warning == 5.0
    with pytest.raises(UsageError, match="HOROVOD_START_TIMEOUT"):
        settings.read_settings({"HOROVOD_START_TIMEOUT": "soon"})


def test_a_timeline_is_a_chrome_trace(tmp_path):
    line, path = Timeline(), tmp_path / "trace.json"
    line.record_request("lost", "allreduce", 0)
    line.start(str(path), mark_cycles=True)
    line.record_request("x", "allreduce", 0)
    line.record_cycle()
    line.record_request("x", "allreduce", 1)
    line.record_agreement("x")
    line.record_execution("x", "allreduce", line._started)
    line.stop()
    line.record_request("late", "allreduce", 0)
    events = [event for event in json.loads(path.read_text()) if event]
    names = [event["name"] for event in events]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START", "process_name"} <= set(names)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["x", ""]
    assert sum(e["ph"] == "B" for e in events) == sum(e["ph"] == "E" for e in events) == 1


def test_bfloat16_that_is_not_finite_stays_so_in_a_sum():
    bits = np.arange(2**16, dtype=np.uint16)
    one = bits.view(ml_dtypes.bfloat16)
    other = np.roll(bits, 12345).view(ml_dtypes.bfloat16)
    total = np.empty_like(one)
    arithmetic.reduce_to(total, arithmetic.SUM, one, other)
    with np.errstate(all="ignore"):
        want = (one.astype(np.float32) + other.astype(np.float32)).astype(ml_dtypes.bfloat16)
    numbers = ~np.isnan(want.astype(np.float32))
    assert (total.view(np.uint16)[numbers] == want.view(np.uint16)[numbers]).all()
    assert np.isnan(total[~numbers].astype(np.float32)).all() and not numbers.all()


def test_means_are_made_in_place_where_the_memory_is_ours():
    total = np.array([2.0, 4.0], np.float32)
    assert arithmetic.finish_reduction(total, arithmetic.AVERAGE, 2, 3.0) is total
    assert total.tolist() == [3.0, 6.0]
    kept = np.frombuffer(np.array([2.0, 4.0], np.float32).tobytes(), np.float32)  # read-only
    assert arithmetic.finish_reduction(kept, arithmetic.AVERAGE, 2, 3.0).tolist() == [3.0, 6.0]
    assert arithmetic.finish_reduction(kept, arithmetic.SUM, 2, 3.0).tolist() == [6.0, 12.0]
    assert kept.tolist() == [2.0, 4.0]


def test_small_requests_wait_for_each_other_and_are_said_in_full_once():
    ours, theirs = socket.socketpair()
    outgoing, inbox = Outgoing(Channel(ours)), Inbox()

    def came():
        theirs.setblocking(False)
        inbox.read(theirs)
        return list(inbox.messages())

    def request(number, name):
        return Request(number, name, "allreduce", ["float32"], [(2,)], is_inline=True)

    data = [np.full(2, i, np.float32).view(np.uint8) for i in range(4)]
    outgoing.put(request(0, "a"), [data[0]], is_delayed=False)
    ((header, payload),) = came()
    assert (header["type"], header["name"], payload) == ("template", "a", data[0].tobytes())
    outgoing.put(request(1, "a"), [data[1]], is_delayed=True)
    outgoing.put(request(2, "b"), [data[2]], is_delayed=True)
    assert outgoing.has_queued and came() == []
    outgoing.flush()
    outgoing.flush()
    ((header, payload),) = came()
    assert [one["type"] for one in header["of"]] == ["again", "template"]
    assert header["of"][0]["as"] == 0 and [one["size"] for one in header["of"]] == [8, 8]
    assert payload == data[1].tobytes() + data[2].tobytes()
    outgoing.put(request(3, "b"), [data[3]], is_delayed=True)
    outgoing.put(request(4, "a"), [], is_delayed=False)  # what waits goes first
    assert [one["id"] for one in came()[0][0]["of"]] == [3, 4]
    outgoing.close()


@pytest.mark.parametrize("word", ["shm", "TCP"])
def test_an_unknown_data_plane_is_refused(word):
    with pytest.raises(UsageError, match="expected one of auto, tcp"):
        settings.read_settings({"CTL_COLLECTIVES": word})
    assert not settings.read_settings({"CTL_COLLECTIVES": "tcp"}).shares_memory
    assert settings.read_settings({"HOROVOD_CYCLE_TIME": "2.5"}).cycle == 0.0025


def test_a_rank_is_lost_for_its_own_silence_not_for_that_of_a_stopped_machine():
    pairs = {rank: socket.socketpair() for rank in range(2)}
    found = settings.Settings(heartbeat_timeout=30.0)
    coordinator = Coordinator({r: ours for r, (ours, _) in pairs.items()}, found, Timeline())

    def earlier(secs, *, all_stopped):
        coordinator._last_heartbeat_at -= secs
        for rank in (0, 1) if all_stopped else (1,):
            coordinator._last_received_at[rank] -= secs
        if all_stopped:
            coordinator._last_poll_at -= secs
        coordinator._check_heartbeats()
        return coordinator._negotiation.departed

    assert earlier(3600.0, all_stopped=True) == {}
    assert earlier(10.0, all_stopped=False) == {}
    gone = earlier(31.0, all_stopped=False)
    assert list(gone) == [1] and "silent for" in gone[1]


@pytest.mark.parametrize(
    ("dtype", "want"), [("float32", [2.0, 2.5]), ("int32", [4, 5]), ("float16", [4.0, 5.0])]
)
def test_a_mean_that_comes_with_the_requests_is_divided_as_one_from_rank_to_rank(dtype, want):
    """Parts of one request may go either way."""
    numbers = [np.array([1, 2], dtype), np.array([3, 3], dtype)]
    asked = {
        rank: Request(0, "x", "allreduce", [dtype], [(2,)], op=arithmetic.AVERAGE, is_inline=True)
        for rank in range(2)
    }
    found = inline.execute_inline([0, 1], asked, {rank: n.tobytes() for rank, n in enumerate(numbers)})
    for buffers in found.values():
        assert np.frombuffer(buffers[0], dtype).tolist() == want


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_has_left_is_not_warned_of_missing_ones(leaves, monkeypatch, capsys):
    """As after a rank on a host that was cut off: the coordinator of the old group waits for it."""
    chosen = settings.read_settings({"HOROVOD_STALL_CHECK_TIME_SECONDS": "20"})
    negotiation = Negotiation(2, chosen, Timeline())
    negotiation.add_request(0, Request(0, "x", "barrier"), b"")
    if leaves:
        negotiation.remove_rank(0, "has left", is_lost=False)
    now_secs = time.monotonic() + 30.0
    monkeypatch.setattr("time.monotonic", lambda: now_secs)
    negotiation.check_stalls()
    assert ("missing rank 1" in capsys.readouterr().err) is not leaves
