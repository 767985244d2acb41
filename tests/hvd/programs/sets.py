"""Process sets: overlapping sets, their registration and removal, and their errors."""

import ctl.hvd as hvd
import numpy as np
import tensorflow as tf
from harness import raised, run_cases

FIRST, LAST = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 1])
SINGLE_RANK = hvd.ProcessSet([1])
try:
    hvd.init(process_sets=[FIRST, hvd.ProcessSet([1, 0])])
    raise AssertionError("two equal sets")
except ValueError as e:
    assert "two process sets of the ranks [0, 1]" in str(e)
hvd.init(process_sets=[FIRST, LAST])


def case_static_sets():
    assert FIRST.ranks == [0, 1] and LAST.ranks == [1, 2]
    assert (FIRST.size(), FIRST.included()) == (2, hvd.rank() < 2)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 1], 2: [1, 2]}
    assert hvd.global_process_set.size() == 3 and hvd.global_process_set.rank() == hvd.rank()


def case_an_equal_set_of_a_later_init_is_usable():
    duplicate = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[duplicate])
    assert duplicate.process_set_id == FIRST.process_set_id and duplicate.size() == 2
    assert str(duplicate) == "ProcessSet(process_set_id=1, ranks=[0, 1], mpi_comm=None)"


def case_overlapping_sets():
    for _ in range(5):
        for chosen in (FIRST, LAST):
            if chosen.included():
                actual = hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum, process_set=chosen)
                assert actual == sum(chosen.ranks), actual
                mean = tf.function(lambda t, s=chosen: hvd.allreduce(t, process_set=s))(tf.ones(2))
                assert mean.numpy().tolist() == [1.0, 1.0]


def case_every_collective_in_a_set():
    if hvd.rank() == 0:
        return
    own_rank = LAST.rank()
    assert own_rank == hvd.rank() - 1
    actual = hvd.allgather(tf.fill([own_rank + 1], hvd.rank()), process_set=LAST)
    assert actual.numpy().tolist() == [1, 2, 2]
    assert hvd.broadcast(tf.constant(hvd.rank()), 2, process_set=LAST) == 2
    big = hvd.broadcast(tf.fill([500_000], float(hvd.rank())), 2, process_set=LAST)
    assert (big.numpy() == 2.0).all()
    actual, rows = hvd.alltoall(tf.fill([2], hvd.rank()), splits=[1, 1], process_set=LAST)
    assert actual.numpy().tolist() == [1, 2] and rows.numpy().tolist() == [1, 1]
    share = hvd.reducescatter(tf.range(3.0), op=hvd.Sum, process_set=LAST)
    assert share.numpy().tolist() == ([0.0, 2.0] if own_rank == 0 else [4.0])
    hvd.barrier(process_set=LAST)
    assert hvd.broadcast_object(hvd.rank(), 1, process_set=LAST) == 1
    assert hvd.allgather_object(hvd.rank(), process_set=LAST) == [1, 2]
    values = [tf.Variable(float(hvd.rank())), tf.Variable([hvd.rank()])]
    hvd.broadcast_variables(values, 2, process_set=LAST)
    assert values[0].numpy() == 2.0 and values[1].numpy().tolist() == [2]
    with tf.GradientTape() as tape:
        x = tf.Variable(tf.ones([own_rank + 1]))
        loss = tf.reduce_sum(hvd.allgather(x, process_set=LAST) * float(hvd.rank()))
    np.testing.assert_allclose(tape.gradient(loss, x), [1.5] * (own_rank + 1))


def case_a_set_of_one_rank():
    hvd.init(process_sets=[SINGLE_RANK])
    if SINGLE_RANK.included():
        for size in (3, 500_000):
            x = tf.range(size) + 7
            for call in (hvd.allreduce, hvd.reducescatter, hvd.allgather, hvd.alltoall):
                assert (call(x, process_set=SINGLE_RANK).numpy() == x.numpy()).all(), call
            many = tf.function(lambda t: hvd.grouped_allreduce([t, t], process_set=SINGLE_RANK))(x)
            assert all((tensor.numpy() == x.numpy()).all() for tensor in many)
            assert (hvd.broadcast(x, 1, process_set=SINGLE_RANK).numpy() == x.numpy()).all()


def case_invalid_calls_in_a_set():
    no = tf.errors.FailedPreconditionError
    if hvd.rank() == 0:
        invalid = tf.errors.InvalidArgumentError
        raised(invalid, lambda: hvd.allreduce(tf.ones(2), process_set=LAST), "not in the process")
        raised(invalid, tf.function(lambda: hvd.allreduce(tf.ones(2), process_set=LAST)), "not in the")
        raised(ValueError, LAST.rank)
    else:
        raised(no, lambda: hvd.broadcast(tf.ones(2), 0, process_set=LAST), "root rank is 0")
    raised(ValueError, lambda: hvd.allreduce(tf.ones(2), process_set=hvd.ProcessSet([0, 2])), "init")
    raised(ValueError, lambda: hvd.ProcessSet(["a"]), "ranks")
    raised(ValueError, lambda: hvd.ProcessSet(3), "list of ranks")


def case_sets_that_are_added_and_removed():
    raised(ValueError, lambda: hvd.add_process_set([0, 2]), "HOROVOD_DYNAMIC_PROCESS_SETS")
    hvd.init(process_sets="dynamic")
    raised(ValueError, lambda: hvd.add_process_set([1, 0]), "already")
    raised(ValueError, lambda: hvd.add_process_set([0, 9]), "0 to 2")
    outer = hvd.add_process_set([2, 0])
    if outer.included():
        assert hvd.allreduce(tf.constant(hvd.rank()), op=hvd.Sum, process_set=outer) == 2
    assert hvd.remove_process_set(outer)
    assert outer.process_set_id is None and not hvd.remove_process_set(outer)
    assert not hvd.remove_process_set(hvd.global_process_set)
    raised(ValueError, lambda: hvd.allreduce(tf.ones(2), process_set=outer))
    new_set = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    assert new_set.process_set_id is not None
    assert hvd.remove_process_set(new_set)


def case_ranks_that_request_other_sets():
    ranks = [0, 2] if hvd.rank() == 0 else [0]
    raised(tf.errors.FailedPreconditionError, lambda: hvd.add_process_set(ranks), "[0, 2]", "rank 0")


run_cases(globals())
