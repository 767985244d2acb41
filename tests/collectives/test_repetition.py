"""Sequences of all-reduces that the ranks repeat without rank 0."""

import contextlib
import random
import socket
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives.arithmetic import AVERAGE, MAX, MIN, PRODUCT, SUM
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings
from ctl.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs.rank_threads import run_on_ranks

MANY = 40  # calls, so that a sequence is repeated without rank 0


@contextlib.contextmanager
def group(count, **fields):
    """Engines of `count` ranks in threads."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]

    def build(rank):
        return Engine(build_ranks(addresses, rank), Settings(**fields), server=servers[rank])

    engines = run_on_ranks(count, build)
    try:
        yield engines
    finally:
        run_on_ranks(count, lambda rank: engines[rank].close(linger=True))
        for server in servers:
            server.close()


def sums_of(engine, name, array, op=SUM, **fields):
    return engine.wait(engine.submit("allreduce", name, [array], op=op, **fields))[0]


def repeat_step(engine):
    """Sums often enough for a repetition without rank 0."""
    for number in range(MANY):
        assert sums_of(engine, "step", np.full(5, number))[0] == engine.ranks.size * number


def control_bytes(engines):
    """Bytes of the messages between rank 0 and the ranks."""
    sent = sum(engine._control.channel.bytes_sent for engine in engines)
    return sent + sum(engines[0]._coordinator.bytes_sent(rank) for rank in range(len(engines)))


def test_while_a_timeline_is_written_each_call_is_negotiated(tmp_path):
    with group(2) as engines:

        def repeat(rank):
            for _ in range(MANY):
                assert sums_of(engines[rank], "step", np.ones(3))[0] == 2

        run_on_ranks(2, repeat)
        path = tmp_path / "timeline.json"
        engines[0].timeline.start(str(path))
        while "NEGOTIATE_ALLREDUCE" not in path.read_text():
            run_on_ranks(2, repeat)
        run_on_ranks(2, repeat)
        before = control_bytes(engines)
        run_on_ranks(2, lambda rank: sums_of(engines[rank], "step", np.ones(3)))
        assert control_bytes(engines) > before
        engines[0].timeline.stop()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("size", [1, 70_000])
def test_rank_0_sends_and_receives_nothing_during_a_repetition(count, size):
    with group(count) as engines:
        arrays = [np.arange(size, dtype=np.float64) + rank for rank in range(count)]
        expected = sum(arrays)
        sent = []

        def run(rank):
            for number in range(3 * MANY):
                assert np.array_equal(sums_of(engines[rank], "gradients", arrays[rank]), expected)
                if rank == 0 and number in (MANY, 2 * MANY):
                    sent.append(control_bytes(engines))

        run_on_ranks(count, run)
        assert sent[0] == sent[1] > 0


def test_each_call_is_negotiated_if_the_setting_asks_for_it():
    with group(2, agrees_once=False) as engines:
        run_on_ranks(2, lambda rank: [sums_of(engines[rank], "a", np.ones(3)) for _ in range(MANY)])
        before = control_bytes(engines)
        run_on_ranks(2, lambda rank: sums_of(engines[rank], "a", np.ones(3)))
        assert control_bytes(engines) > before


@pytest.mark.parametrize("size, process_set", [(0, 0), (3, 1)])
def test_empty_arrays_and_process_sets_are_negotiated_in_each_call(size, process_set):
    with group(3) as engines:
        if process_set:
            add = ("add_process_set", "set")
            run_on_ranks(3, lambda r: engines[r].wait(engines[r].submit(*add, splits=[0, 1])))

        def run(rank):
            for _ in range(MANY):
                if not process_set or rank < 2:
                    sums_of(engines[rank], "step", np.ones(size), process_set=process_set)

        run_on_ranks(3, run)
        before = control_bytes(engines)
        run_on_ranks(3, run)
        assert control_bytes(engines) > before + 50 * MANY


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("op", [SUM, AVERAGE, MIN, MAX, PRODUCT])
def test_a_repeated_call_has_the_bits_of_a_negotiated_one(dtype, op):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(3)
    with group(5) as engines:
        for size in (3, 2000, 40_000):
            arrays = [(10 * rng.normal(size=size)).astype(dtype) for _ in engines]

            def run(rank, size=size, arrays=arrays):
                name = f"{size}"
                return [sums_of(engines[rank], name, arrays[rank], op).tobytes() for _ in range(8)]

            assert len({bits for results in run_on_ranks(5, run) for bits in results}) == 1


@pytest.mark.parametrize("kind", ["broadcast", "allgather", "barrier", "allreduce"])
def test_another_collective_interrupts_a_repetition(kind):
    with group(3) as engines:

        def run(rank):
            engine, results = engines[rank], []
            for number in range(3 * MANY):
                assert sums_of(engine, "step", np.full(5, number))[0] == 3 * number
                if number % 25 == 24:
                    arrays = [] if kind == "barrier" else [np.full(2, number + rank)]
                    fields = {"root": 1} if kind == "broadcast" else {}
                    results.append(engine.wait(engine.submit(kind, "other", arrays, **fields)))
            return results

        results = run_on_ranks(3, run)
    expected = {"broadcast": [25, 25], "allgather": [24, 24, 25, 25, 26, 26], "allreduce": [75, 75]}
    for by_rank in results:
        assert kind == "barrier" or by_rank[0][0].tolist() == expected[kind]


def test_ranks_that_request_the_collectives_in_another_order_have_all_results():
    with group(3) as engines:

        def run(rank):
            chosen = random.Random(rank)
            for number in range(60):
                names = ["a", "b", "c", "d"]
                if number > 30:
                    chosen.shuffle(names)
                pending = {
                    name: engines[rank].submit(
                        "allreduce", name, [np.full(40, number + ord(name))], op=SUM, is_eager=False
                    )
                    for name in names
                }
                for name, one in pending.items():
                    assert engines[rank].wait(one)[0].tolist() == [3 * (number + ord(name))] * 40

        run_on_ranks(3, run)


def test_collectives_that_were_fused_are_requested_one_after_the_other():
    with group(2) as engines:

        def run(rank):
            engine = engines[rank]

            def submit(name, value):
                arrays = [np.full(100, value)]
                return engine.submit("allreduce", name, arrays, op=SUM, is_eager=False, may_wait=True)

            for number in range(2 * MANY):
                pending = [submit("a", number)]
                for factor, name in enumerate("bc", start=2):  # sent in one message, and fused
                    pending.append(submit(name, factor * number))
                    if number > MANY:
                        assert engine.wait(pending[-1])[0][0] == 2 * factor * number
                assert [engine.wait(one)[0][0] for one in pending] == [2 * number, 4 * number, 6 * number]

        run_on_ranks(2, run)


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(2, 4),
    program=st.lists(
        st.tuples(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), st.integers(1, 12)),
        min_size=1, max_size=6,
    ),
    is_eager=st.booleans(),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_any_program_has_the_results_of_numpy(count, program, is_eager, seed):
    sizes = {"a": 1, "b": 500, "c": 30_000, "d": 7}
    with group(count) as engines:

        def run(rank):
            rng = random.Random(1000 * seed + rank)
            value = 0
            for names, repeats in program:
                for _ in range(repeats):
                    if rng.random() < 0.05:
                        time.sleep(0.03 * rng.random())
                    value += 1
                    pending = [
                        engines[rank].submit(
                            "broadcast" if name == "d" else "allreduce",
                            name,
                            [np.full(sizes[name], float(value + rank))],
                            op=SUM,
                            is_eager=is_eager,
                        )
                        for name in names
                    ]
                    total = count * value + sum(range(count))
                    for name, one in zip(names, pending, strict=True):
                        (result,) = engines[rank].wait(one)
                        assert (result == (value if name == "d" else total)).all()

        run_on_ranks(count, run)


def test_ranks_that_wait_in_different_collectives_get_an_error_and_continue():
    with group(3, order_timeout=1.0) as engines:

        def run(rank):
            repeat_step(engines[rank])
            name = "only rank 1" if rank == 1 else "step"
            with pytest.raises(UsageError, match="wait in different collectives.*only rank 1"):
                sums_of(engines[rank], name, np.ones(5))
            repeat_step(engines[rank])

        run_on_ranks(3, run)


def test_a_rank_with_another_shape_gets_an_error_and_the_group_continues():
    with group(2) as engines:

        def run(rank):
            repeat_step(engines[rank])
            with pytest.raises(UsageError, match=r"rank 0: \[5\]; rank 1: \[6\]"):
                sums_of(engines[rank], "step", np.ones(5 + rank))
            assert sums_of(engines[rank], "step", np.ones(5))[0] == 2

        run_on_ranks(2, run)


def test_a_late_rank_is_named_in_a_warning(capfd):
    with group(2, stall_warning=0.5) as engines:
        run_on_ranks(2, lambda rank: [sums_of(engines[rank], "step", np.ones(5)) for _ in range(MANY)])
        warned = threading.Event()

        def run(rank):
            if rank == 1:
                assert warned.wait(600)
            sums_of(engines[rank], "step", np.ones(5))

        def wait_for_warning():
            text = ""
            while "missing rank 1" not in text:
                text += capfd.readouterr().err
                time.sleep(0.05)
            warned.set()

        threading.Thread(target=wait_for_warning, daemon=True).start()
        run_on_ranks(2, run)


def test_a_rank_leaves_during_a_repetition():
    with group(3) as engines:

        def run(rank):
            repeat_step(engines[rank])
            if rank == 2:
                engines[rank].close()
                return
            with pytest.raises(HorovodInternalError, match="rank 2 has left"):
                sums_of(engines[rank], "step", np.ones(5))

        run_on_ranks(3, run)


def test_a_rank_that_is_lost_during_a_repetition_fails_all_others():
    all_done = threading.Barrier(3)
    with group(3) as engines:

        def run(rank):
            repeat_step(engines[rank])
            all_done.wait(600)
            if rank == 2:
                for link in engines[rank]._mesh.sockets:
                    link.shutdown(socket.SHUT_RDWR)
                engines[rank]._control.channel.socket.shutdown(socket.SHUT_RDWR)
                return
            with pytest.raises(HorovodInternalError, match="rank 2"):
                for _ in range(3):
                    sums_of(engines[rank], "step", np.ones(5))

        run_on_ranks(3, run)
