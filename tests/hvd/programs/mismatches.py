"""Ranks with different requests: every rank raises the same error and can continue."""

import ctl.hvd as hvd
import tensorflow as tf
from harness import raised, run_cases

MISMATCH, INVALID = tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError
VARIANTS = {"eager": lambda f: f, "function": tf.function}


def check_refused(error_type, call, *parts):
    """Checks an error eagerly and in a function. The next collective must work."""
    for variant in VARIANTS.values():
        raised(error_type, variant(call), *parts)
        assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum) == hvd.size()


def by_rank(first, value_of_others):
    return first if hvd.rank() == 0 else value_of_others


def case_shape():
    for size in (3, 300_000):  # through rank 0, and from rank to rank
        n = by_rank(size, size + 1)
        check_refused(
            MISMATCH, lambda n=n: hvd.allreduce(tf.zeros([n])), "rank 0", f"[{size}]", f"[{size + 1}]"
        )
    check_refused(
        MISMATCH, lambda: hvd.allreduce(tf.zeros(by_rank([2, 3], [6]))), "[2, 3]", "[6]", "rank 0"
    )
    check_refused(MISMATCH, lambda: hvd.broadcast(tf.zeros([by_rank(2, 4)]), 0), "[2]", "[4]")
    check_refused(MISMATCH, lambda: hvd.allgather(tf.zeros(by_rank([2, 3], [2, 4]))), "3]", "4]")
    check_refused(MISMATCH, lambda: hvd.allgather(tf.zeros(by_rank([2], [2, 4]))), "rank 0")
    check_refused(MISMATCH, lambda: hvd.reducescatter(tf.zeros([by_rank(2, 4)])), "[2]", "[4]")


def case_type():
    dtype = by_rank(tf.int32, tf.float32)
    for call in (hvd.allreduce, hvd.allgather, lambda t: hvd.broadcast(t, 0), hvd.alltoall):
        check_refused(MISMATCH, lambda call=call: call(tf.zeros([6], dtype)), "int32", "float32", "rank 0")


def case_number_of_tensors():
    check_refused(
        MISMATCH, lambda: hvd.grouped_allreduce([tf.zeros(2)] * by_rank(2, 3), name="g"), "rank 0: 2"
    )


def case_reduction_and_scale():
    check_refused(MISMATCH, lambda: hvd.allreduce(tf.zeros(2), op=by_rank(hvd.Sum, hvd.Max)), "Sum", "Max")
    check_refused(MISMATCH, lambda: hvd.allreduce(tf.zeros(2), op=by_rank(hvd.Sum, hvd.Average)), "Average")
    scale = by_rank(1.0, 2.0)
    check_refused(MISMATCH, lambda: hvd.allreduce(tf.zeros(2), prescale_factor=scale), "prescale", "2.0")
    check_refused(MISMATCH, lambda: hvd.allreduce(tf.zeros(2), postscale_factor=scale), "postscale", "2.0")


def case_root():
    check_refused(MISMATCH, lambda: hvd.broadcast(tf.zeros(2), by_rank(0, 1)), "root", "rank 0: 0")
    check_refused(MISMATCH, lambda: hvd.broadcast(tf.zeros(2), 77), "77")


def case_kind_under_one_name():
    def call():
        collective = hvd.allreduce if hvd.rank() else hvd.allgather
        return collective(tf.zeros(2), name="mixed")

    check_refused(MISMATCH, call, "allreduce", "allgather")


def case_names():
    """Horovod would block forever."""
    check_refused(
        MISMATCH, lambda: hvd.allreduce(tf.zeros(2), name=by_rank("a", "b")), "'a'", "'b'", "rank 0"
    )


def case_splits():
    splits = [1] * hvd.size()
    check_refused(INVALID, lambda: hvd.alltoall(tf.zeros([1]), splits=splits), "splits")
    check_refused(INVALID, lambda: hvd.alltoall(tf.zeros([1]), splits=[1]), "entries")
    check_refused(INVALID, lambda: hvd.alltoall(tf.zeros([hvd.size() + 1])), "rows")
    unequal_splits = by_rank([1] * hvd.size(), [2] * hvd.size())  # invalid on the other ranks only
    check_refused(INVALID, lambda: hvd.alltoall(tf.zeros([hvd.size()]), splits=unequal_splits), "on rank 1")
    raised(ValueError, lambda: hvd.alltoall(tf.zeros([2]), splits=[0.5, 0.5]), "integers")


def case_texts():
    raised(TypeError, lambda: hvd.allgather(tf.constant(["a"])), "allgather_object")


def case_scalars():
    check_refused(MISMATCH, lambda: hvd.allgather(tf.zeros([])), "scalar")


def case_objects():
    if hvd.rank() == 0:
        raised(hvd.errors.UsageError, lambda: hvd.broadcast_object(object()), "allow_pickle")
    else:
        raised(hvd.errors.UsageError, lambda: hvd.broadcast_object(None), "allow_pickle")
    raised(hvd.errors.UsageError, lambda: hvd.allgather_object({"x": {1: lambda: 0}}), "['x'][1]")
    assert hvd.broadcast_object(by_rank(3 + 4j, None), allow_pickle=True) == 3 + 4j
    assert hvd.broadcast_object(by_rank(len, None), allow_pickle=True) is len


def case_sessions():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        mismatched = hvd.allreduce(tf.zeros([by_rank(2, 3)]))
        raised(MISMATCH, lambda: session.run(mismatched), "[2]", "[3]", "rank 0")
        sums = [hvd.allreduce(tf.fill([4], float(i)), op=hvd.Sum) for i in range(30)]
        total = session.run(tf.add_n(sums))
        assert (total == sum(range(30)) * hvd.size()).all(), total


run_cases(globals())
