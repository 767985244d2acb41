"""Components of the collectives runtime: arithmetic, messages, requests, ranks and packed objects."""

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
    float32_values = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        expected = float32_values.astype(dtype)
    actual = arithmetic.from_float32(float32_values, np.dtype(dtype))
    is_number = ~np.isnan(float32_values)
    assert (actual.view(np.uint16)[is_number] == expected.view(np.uint16)[is_number]).all()
    assert np.isnan(actual[~is_number].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", [arithmetic.SUM, arithmetic.MIN, arithmetic.MAX, arithmetic.PRODUCT])
def test_large_and_small_arrays_of_16_bit_floats_are_reduced_equally(dtype, op):
    first, second = np.random.default_rng(0).normal(size=(2, 10_000)).astype(dtype)
    at_once, by_parts = np.empty_like(first), np.empty_like(first)
    arithmetic.reduce_to(at_once, op, first, second)
    for start in range(0, 10_000, 1000):
        part = slice(start, start + 1000)
        arithmetic.reduce_to(by_parts[part], op, first[part], second[part])
    assert (at_once.view(np.uint16) == by_parts.view(np.uint16)).all()
    for call in (lambda a: arithmetic.scale_array(a, 1 / 3), lambda a: arithmetic.average_array(a, 3)):
        parts = [call(first[start : start + 1000]) for start in range(0, 10_000, 1000)]
        assert (call(first).view(np.uint16) == np.concatenate(parts).view(np.uint16)).all()


def test_whole_numbers_are_averaged_and_scaled_towards_zero():
    integers = np.array([7, -7, 1, -1])
    assert arithmetic.average_array(integers, 2).tolist() == [3, -3, 0, 0]
    assert arithmetic.scale_array(integers, 0.5).tolist() == [3, -3, 0, 0]
    assert arithmetic.average_array(np.array([49]), 49).tolist() == [1]
    big = np.array([2**62 + 2], np.int64)
    assert arithmetic.average_array(big, 2).tolist() == [2**61 + 1]


@pytest.mark.parametrize(("rows", "count"), [(0, 3), (2, 3), (7, 3), (9, 3)])
def test_rows_are_split_as_equally_as_possible(rows, count):
    counts = arithmetic.split_rows(rows, count)
    assert sum(counts) == rows and max(counts) - min(counts) <= 1 and counts == sorted(counts)[::-1]


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary(max_size=300)), max_size=5),
       st.integers(1, 40))  # fmt: skip
def test_messages_are_received_unchanged_for_every_chunk_size(messages, step):
    data = b"".join(b"".join(pack_message(header, payload)) for header, payload in messages)
    inbox, received = Inbox(), []
    for start in range(0, len(data), step):
        inbox._bytes += data[start : start + step]
        received += inbox.messages()
    assert received == messages


def test_a_closed_connection_and_invalid_bytes_raise_lost():
    receiver, sender = socket.socketpair()
    Channel(sender).send({"a": 1}, b"xy")
    sender.close()
    inbox = Inbox()
    inbox.read(receiver)
    assert list(inbox.messages()) == [({"a": 1}, b"xy")]
    with pytest.raises(Lost):
        inbox.read(receiver)
    with pytest.raises(Lost):
        Channel(receiver).send({}, bytes(1 << 22))
    inbox._bytes += b"\xff" * 12
    with pytest.raises(Lost, match="not a message"):
        list(inbox.messages())
    receiver.close()


def request(operation="allreduce", shape=(3,), dtype="float32", **options):
    return Request(0, "x", operation, [dtype], [shape], **options)


def test_a_request_with_another_number_keeps_key_and_sizes():
    first = Request(3, "x", "allreduce", ["float32", "int8"], [(2, 5), ()])
    assert first.size == 41 and first.key
    renumbered = first.with_id(7)
    assert (renumbered.id, first.id) == (7, 3)
    assert renumbered.key is first.key and renumbered.sizes is first.sizes
    assert renumbered.header() == {**first.header(), "id": 7}


def test_equal_requests_have_no_fault():
    for operation in ("allreduce", "allgather", "broadcast", "reducescatter"):
        assert requests.find_error([0, 1], {0: request(operation), 1: request(operation)}) is None
    assert (
        requests.find_error([0, 1], {0: request("allgather", (2, 5)), 1: request("allgather", (0, 5))})
        is None
    )
    splits = {r: request("alltoall", splits=[1, 2]) for r in (0, 1)}
    assert requests.find_error([0, 1], splits) is None


@pytest.mark.parametrize(
    ("different_request", "expected_text"),
    [
        (request(shape=(4,)), "ranks 0, 2: [3]; rank 1: [4]"),
        (request(dtype="int32"), "ranks 0, 2: float32; rank 1: int32"),
        (request(op=3), "Min"),
        (request(prescale=0.5), "0.5"),
        (request("allgather"), "allgather"),
    ],
)
def test_a_difference_names_the_ranks_and_what_they_have(different_request, expected_text):
    code, text = requests.find_error([0, 1, 2], {0: request(), 2: request(), 1: different_request})
    assert code == requests.FAILED_PRECONDITION and expected_text in text


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab")), max_size=40))
def test_requests_of_a_name_are_paired_in_their_order(requests_of_ranks):
    table, counts, completed = Table(3), {}, []
    for rank, name in requests_of_ranks:
        number = counts[rank, name] = counts.get((rank, name), -1) + 1
        round_of_requests = table.put(rank, Request(number, name, "barrier"), b"")
        if round_of_requests:
            completed.append((name, {r.id for r in round_of_requests.requests.values()}))
    for name in "ab":
        least = min(counts.get((rank, name), -1) for rank in range(3)) + 1
        assert [ids for n, ids in completed if n == name] == [{i} for i in range(least)]


def test_ranks_that_wait_for_each_other_are_a_deadlock():
    table = Table(3)
    table.put(0, Request(0, "a", "barrier"), b"")
    table.put(1, Request(0, "b", "barrier"), b"")
    assert list(table.find_deadlocks()) == []  # rank 2 may still submit either
    table.put(2, Request(0, "b", "barrier"), b"")
    ((first, second),) = table.find_deadlocks()
    assert table.find_missing_ranks(first) == [1, 2] and table.find_missing_ranks(second) == [0]


def nested_types(value):
    """Returns the types in a value as a text. The types in a set are sorted."""
    if isinstance(value, dict):
        return f"dict {[(nested_types(k), nested_types(v)) for k, v in value.items()]}"
    if isinstance(value, (list, tuple, set)):
        inner = [nested_types(part) for part in value]
        return f"{type(value).__name__} {sorted(inner) if isinstance(value, set) else inner}"
    return type(value).__name__


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
def test_objects_are_restored_with_their_types(value):
    restored = packing.deserialize_object(packing.serialize_object(value))
    assert restored == value and nested_types(restored) == nested_types(value)


@pytest.mark.parametrize(
    "value", [OrderedDict(b=1, a=(2,)), Namespace(lr=0.1, layers=[1, 2]), range(3, 9, 2)], ids=repr
)
def test_typical_containers_of_settings_are_packed(value):
    restored = packing.deserialize_object(packing.serialize_object({"x": value}))["x"]
    assert restored == value and type(restored) is type(value)


@pytest.mark.parametrize(
    "array", [np.float32(1.5), np.arange(6).reshape(2, 3), np.array([]), np.array(["a", "bc"]),
              np.ones(3, ml_dtypes.bfloat16), np.array([True])], ids=lambda a: str(a.dtype)
)  # fmt: skip
def test_arrays_are_restored_with_their_types(array):
    restored = packing.deserialize_object(packing.serialize_object({"x": [array]}))["x"][0]
    assert type(restored) is type(array) and restored.dtype == array.dtype and restored.shape == array.shape
    assert (restored == array).all()


class CustomClass:
    pass


@pytest.mark.parametrize(
    "value", [CustomClass(), CustomClass, len, np.array([None]), {"a": [1, CustomClass()]}]
)
def test_an_object_that_cannot_be_packed_is_refused_and_not_pickled(value):
    with pytest.raises(UsageError, match="allow_pickle=True"):
        packing.serialize_object(value)


def config(addresses, index, task_type="worker"):
    cluster = (
        {task_type: addresses}
        if task_type != "chief"
        else {"chief": addresses[:1], "worker": addresses[1:]}
    )
    task = {
        "type": task_type if index == 0 else "worker",
        "index": index - (task_type == "chief" and index > 0),
    }
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_ranks_on_two_hosts():
    hosts = ["a:1", "a:2", "b:1", "a:3", "b:2"]
    processes = [rank_variables.read_ranks(config(hosts, i)) for i in range(5)]
    assert [(p.rank, p.size) for p in processes] == [(i, 5) for i in range(5)]
    assert [(p.local_rank, p.local_size) for p in processes] == [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2)]
    assert [(p.cross_rank, p.cross_size) for p in processes] == [(0, 2), (0, 2), (1, 2), (0, 1), (1, 2)]
    assert not processes[0].is_homogeneous
    assert rank_variables.read_ranks(config(["a:1", "b:1"], 1)).is_homogeneous


def test_the_chief_is_rank_0_and_one_process_needs_nothing():
    hosts = ["a:1", "b:1", "c:1"]
    assert [rank_variables.read_ranks(config(hosts, i, "chief")).rank for i in range(3)] == [0, 1, 2]
    assert rank_variables.read_ranks({}) == Ranks()
    ranks = rank_variables.read_ranks({**config(["a:1", "a:2"], 1), "HOROVOD_LOCAL_RANK": "5"})
    assert ranks.local_rank == 5 and ranks.rank == 1


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, "ctlrun -np"),
        ({"HOROVOD_LOCAL_RANK": "x"}, "whole number"),
        ({"TF_CONFIG": config(["a:1", "b:1"], 0, "ps")["TF_CONFIG"]}, "all ranks of ctl.hvd train"),
    ],
)
def test_invalid_variables_of_ranks_are_refused(extra, match):
    with pytest.raises(UsageError, match=match):
        rank_variables.read_ranks(extra)


def test_settings_are_numbers():
    assert settings.read_settings({}).stall_warning == 60.0
    assert settings.read_settings({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning == 0.0
    assert settings.read_settings({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}).stall_warning == 5.0
    with pytest.raises(UsageError, match="HOROVOD_START_TIMEOUT"):
        settings.read_settings({"HOROVOD_START_TIMEOUT": "soon"})


def test_a_timeline_is_a_chrome_trace(tmp_path):
    timeline, path = Timeline(), tmp_path / "trace.json"
    timeline.record_request("lost", "allreduce", 0)
    timeline.start(str(path), mark_cycles=True)
    timeline.record_request("x", "allreduce", 0)
    timeline.record_cycle()
    timeline.record_request("x", "allreduce", 1)
    timeline.record_agreement("x")
    timeline.record_execution("x", "allreduce", timeline._started)
    timeline.stop()
    timeline.record_request("late", "allreduce", 0)
    events = [event for event in json.loads(path.read_text()) if event]
    names = [event["name"] for event in events]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START", "process_name"} <= set(names)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["x", ""]
    assert sum(e["ph"] == "B" for e in events) == sum(e["ph"] == "E" for e in events) == 1


def test_bfloat16_values_that_are_not_finite_remain_so_in_a_sum():
    bits = np.arange(2**16, dtype=np.uint16)
    first = bits.view(ml_dtypes.bfloat16)
    second = np.roll(bits, 12345).view(ml_dtypes.bfloat16)
    total = np.empty_like(first)
    arithmetic.reduce_to(total, arithmetic.SUM, first, second)
    with np.errstate(all="ignore"):
        expected = (first.astype(np.float32) + second.astype(np.float32)).astype(ml_dtypes.bfloat16)
    is_number = ~np.isnan(expected.astype(np.float32))
    assert (total.view(np.uint16)[is_number] == expected.view(np.uint16)[is_number]).all()
    assert np.isnan(total[~is_number].astype(np.float32)).all() and not is_number.all()


def test_means_are_computed_in_place_in_writable_memory():
    total = np.array([2.0, 4.0], np.float32)
    assert arithmetic.finish_reduction(total, arithmetic.AVERAGE, 2, 3.0) is total
    assert total.tolist() == [3.0, 6.0]
    constant = np.frombuffer(np.array([2.0, 4.0], np.float32).tobytes(), np.float32)  # read-only
    assert arithmetic.finish_reduction(constant, arithmetic.AVERAGE, 2, 3.0).tolist() == [3.0, 6.0]
    assert arithmetic.finish_reduction(constant, arithmetic.SUM, 2, 3.0).tolist() == [6.0, 12.0]
    assert constant.tolist() == [2.0, 4.0]


def test_small_requests_are_batched_and_sent_in_full_once():
    sender, receiver = socket.socketpair()
    outgoing, inbox = Outgoing(Channel(sender)), Inbox()

    def received_messages():
        receiver.setblocking(False)
        inbox.read(receiver)
        return list(inbox.messages())

    def request(number, name):
        return Request(number, name, "allreduce", ["float32"], [(2,)], is_inline=True)

    data = [np.full(2, i, np.float32).view(np.uint8) for i in range(4)]
    outgoing.put(request(0, "a"), [data[0]], is_delayed=False)
    ((header, payload),) = received_messages()
    assert (header["type"], header["name"], payload) == ("template", "a", data[0].tobytes())
    outgoing.put(request(1, "a"), [data[1]], is_delayed=True)
    outgoing.put(request(2, "b"), [data[2]], is_delayed=True)
    assert outgoing.has_queued and received_messages() == []
    outgoing.flush()
    outgoing.flush()
    ((header, payload),) = received_messages()
    assert [part["type"] for part in header["of"]] == ["again", "template"]
    assert header["of"][0]["as"] == 0 and [part["size"] for part in header["of"]] == [8, 8]
    assert payload == data[1].tobytes() + data[2].tobytes()
    outgoing.put(request(3, "b"), [data[3]], is_delayed=True)
    outgoing.put(request(4, "a"), [], is_delayed=False)  # the delayed request is sent first
    assert [part["id"] for part in received_messages()[0][0]["of"]] == [3, 4]
    outgoing.close()


@pytest.mark.parametrize("plane", ["shm", "TCP"])
def test_an_unknown_data_plane_is_refused(plane):
    with pytest.raises(UsageError, match="expected one of auto, tcp"):
        settings.read_settings({"CTL_COLLECTIVES": plane})
    assert settings.read_settings({"CTL_COLLECTIVES": "tcp"}).transport == "tcp"
    assert settings.read_settings({"HOROVOD_CYCLE_TIME": "2.5"}).cycle == 0.0025


def test_a_rank_is_lost_for_its_own_silence_not_for_that_of_a_stopped_machine():
    pairs = {rank: socket.socketpair() for rank in range(2)}
    chosen = settings.Settings(heartbeat_timeout=30.0)
    coordinator = Coordinator({r: ours for r, (ours, _) in pairs.items()}, chosen, Timeline())

    def departed_after(secs, *, all_stopped):
        coordinator._last_heartbeat_at -= secs
        for rank in (0, 1) if all_stopped else (1,):
            coordinator._last_received_at[rank] -= secs
        if all_stopped:
            coordinator._last_poll_at -= secs
        coordinator._check_heartbeats()
        return coordinator._negotiation.departed

    assert departed_after(3600.0, all_stopped=True) == {}
    assert departed_after(10.0, all_stopped=False) == {}
    departed = departed_after(31.0, all_stopped=False)
    assert list(departed) == [1] and "silent for" in departed[1]


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", [2.0, 2.5]), ("int32", [4, 5]), ("float16", [4.0, 5.0])]
)
def test_a_mean_of_inline_requests_is_divided_like_a_mean_of_a_ring(dtype, expected):
    """Parts of one request may use either path."""
    numbers = [np.array([1, 2], dtype), np.array([3, 3], dtype)]
    requests_by_rank = {
        rank: Request(0, "x", "allreduce", [dtype], [(2,)], op=arithmetic.AVERAGE, is_inline=True)
        for rank in range(2)
    }
    results = inline.execute_inline(
        [0, 1], requests_by_rank, {rank: n.tobytes() for rank, n in enumerate(numbers)}
    )
    for buffers in results.values():
        assert np.frombuffer(buffers[0], dtype).tolist() == expected


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_has_left_is_not_warned_of_missing_ones(leaves, monkeypatch, capsys):
    """After a network failure the coordinator of the old group still waits for the lost rank."""
    chosen = settings.read_settings({"HOROVOD_STALL_CHECK_TIME_SECONDS": "20"})
    negotiation = Negotiation(2, chosen, Timeline())
    negotiation.add_request(0, Request(0, "x", "barrier"), b"")
    if leaves:
        negotiation.remove_rank(0, "has left", is_lost=False)
    now_secs = time.monotonic() + 30.0
    monkeypatch.setattr("time.monotonic", lambda: now_secs)
    negotiation.check_stalls()
    assert ("missing rank 1" in capsys.readouterr().err) is not leaves
