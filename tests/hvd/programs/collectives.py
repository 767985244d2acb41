"""Every collective with every type, eagerly and in a function, compared with NumPy."""

import os

import ctl.hvd as hvd
import ml_dtypes
import numpy as np
import tensorflow as tf
from harness import run_cases

tf.random.set_seed(1)  # before hvd.init(), as programs do

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
VARIANTS = {"eager": lambda f: f, "function": tf.function}
SIZES = [0, 1, 5, 40_000, 300_001]  # no algorithm; through rank 0; from rank to rank


def for_all_ranks(make):
    """Returns `make(rank)` for all ranks."""
    return [make(rank) for rank in range(hvd.size())]


def numbers(rank, size, dtype):
    return (
        tf.constant((np.arange(size) % 5 + rank + 1).astype(np.float64))
        .numpy()
        .astype(getattr(ml_dtypes, dtype, dtype))
    )


def in_range(values, dtype):
    """Returns the values with the overflow of their integer type: 3 * 4 * 5 * 6 exceeds eight bits."""
    return values if dtype in FLOATS else values.astype(np.int64).astype(dtype)


def results_by_variant(call, *tensors):
    for name, call_variant in VARIANTS.items():
        yield name, call_variant(call)(*tensors)


def variants_of_vectors(call, dtype):
    """Returns the variants of a call with one vector. Only float32 uses a graph per size."""
    signature = None if dtype == "float32" else [tf.TensorSpec([None], dtype)]
    return {"eager": call, "function": tf.function(call, input_signature=signature)}


def case_allreduce():
    ops = hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Average
    for dtype in FLOATS + INTEGERS:
        results_by_op = {
            op: variants_of_vectors(lambda t, op=op: hvd.allreduce(t, op=op), dtype) for op in ops
        }
        for size in SIZES[: 5 if dtype in ("float32", "bfloat16", "int64") else 3]:
            parts = np.stack([numbers(r, size, dtype) for r in range(hvd.size())]).astype(np.float64)
            tensor = tf.constant(numbers(hvd.rank(), size, dtype))
            expected = {
                hvd.Sum: parts.sum(0), hvd.Min: parts.min(0), hvd.Max: parts.max(0),
                hvd.Product: parts.prod(0),
                hvd.Average: parts.mean(0) if dtype in FLOATS else np.trunc(parts.mean(0)),
            }  # fmt: skip
            for op, expected_values in expected.items():
                for variant, call in results_by_op[op].items():
                    actual = call(tensor)
                    assert actual.dtype.name == dtype, (variant, actual.dtype)
                    tolerance = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-6}.get(dtype, 0)
                    np.testing.assert_allclose(
                        tf.cast(actual, tf.float64).numpy(), in_range(expected_values, dtype),
                        rtol=tolerance, err_msg=f"{variant} {op}",
                    )  # fmt: skip


def case_scales():
    ranks = hvd.size()
    x = tf.constant([1.5, -2.0])
    actual = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_allclose(actual, x * 2.0 * ranks)
    integers = tf.constant([5, -5])
    actual = hvd.allreduce(integers, op=hvd.Sum, prescale_factor=0.5)
    np.testing.assert_array_equal(actual, [2 * ranks, -2 * ranks])  # cut towards zero before the sum
    actual = hvd.allreduce(tf.constant([2 * hvd.rank() - 1]), op=hvd.Average)
    np.testing.assert_array_equal(actual, [int((ranks * (ranks - 1) - ranks) / ranks)])


def case_compression():
    x = tf.constant(np.linspace(-3, 3, 1000), tf.float32)
    for compression, tolerance in ((hvd.Compression.fp16, 6e-3), (hvd.Compression.bf16, 5e-2)):
        actual = hvd.allreduce(x, compression=compression)
        assert actual.dtype == tf.float32
        np.testing.assert_allclose(actual, x, atol=tolerance)
        in_memory = os.environ.get("CTL_COLLECTIVES", "auto") == "auto"  # without rounding
        assert np.array_equal(actual, hvd.allreduce(x)) == in_memory
    assert hvd.allreduce(tf.constant([3]), compression=hvd.Compression.fp16).dtype == tf.int32


def case_grouped_allreduce():
    tensors = [tf.fill([n], tf.cast(hvd.rank() + 1, t)) for n, t in
               ((3, tf.float32), (0, tf.float32), (4, tf.int64), (100_000, tf.float32))]  # fmt: skip
    total = hvd.size() * (hvd.size() + 1) // 2
    for variant, actual in results_by_variant(
        lambda *ts: hvd.grouped_allreduce(list(ts), op=hvd.Sum), *tensors
    ):
        assert [g.shape[0] for g in actual] == [3, 0, 4, 100_000], variant
        assert [g.dtype for g in actual] == [t.dtype for t in tensors]
        for g in actual:
            assert (g.numpy() == total).all(), variant
    assert hvd.grouped_allreduce([]) == []


def case_indexed_slices():
    slices = tf.IndexedSlices(tf.fill([hvd.rank() + 1, 2], float(hvd.rank() + 1)),
                              tf.range(hvd.rank() + 1), tf.constant([8, 2]))  # fmt: skip
    actual = tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)).numpy()
    expected = np.zeros((8, 2))
    for rank in range(hvd.size()):
        expected[: rank + 1] += rank + 1
    np.testing.assert_array_equal(actual, expected)
    shape = tf.constant([8, 2])
    for variant, (twice, dense, repeated) in results_by_variant(
        lambda v, i: hvd.grouped_allreduce(
            [tf.IndexedSlices(v, i, shape), v[:1], tf.IndexedSlices(v * 2.0, i, shape)], op=hvd.Sum
        ),
        slices.values, slices.indices,
    ):  # fmt: skip
        np.testing.assert_array_equal(tf.convert_to_tensor(twice), expected, err_msg=variant)
        np.testing.assert_array_equal(tf.convert_to_tensor(repeated), 2 * expected, err_msg=variant)
        assert dense.shape == (1, 2)
    mean = tf.convert_to_tensor(hvd.allreduce(slices)).numpy()
    np.testing.assert_allclose(mean, expected / hvd.size(), rtol=1e-6)


def case_allgather():
    for dtype in [*FLOATS, *INTEGERS, "bool", "complex64"]:
        for rows in (0, 1, 3, 30_000 if dtype == "float32" else 2):

            def part(rank, rows=rows, dtype=dtype):  # another number of rows on each rank
                return (np.arange((rows + rank) * 2) % 2 == rank % 2).reshape(-1, 2).astype(
                    getattr(ml_dtypes, dtype, dtype))  # fmt: skip

            expected = np.concatenate(for_all_ranks(part))
            for variant, actual in results_by_variant(hvd.allgather, tf.constant(part(hvd.rank()))):
                np.testing.assert_array_equal(actual.numpy(), expected, err_msg=f"{variant} {dtype} {rows}")
    only_last = tf.ones([2 if hvd.rank() == hvd.size() - 1 else 0, 3])
    assert hvd.allgather(only_last).shape == (2, 3)
    a, b = hvd.grouped_allgather([tf.fill([hvd.rank()], 1), tf.fill([2, 2], 3.0)])
    assert a.shape[0] == sum(range(hvd.size())) and b.shape == (2 * hvd.size(), 2)


def case_broadcast():
    roots = range(hvd.size())
    for dtype in [*FLOATS, *INTEGERS, "bool", "complex64"]:
        results = [
            variants_of_vectors(lambda t, root=root: hvd.broadcast(t, root), dtype) for root in roots
        ]
        for size in (0, 1, 7, 3_000_000 if dtype == "float32" else 9):
            for root in roots:
                tensor = tf.cast(tf.range(size) % 2 == hvd.rank() % 2, dtype)
                expected = tf.cast(tf.range(size) % 2 == root % 2, dtype)
                for variant, call in results[root].items():
                    actual = call(tensor)
                    np.testing.assert_array_equal(
                        actual.numpy(), expected.numpy(), err_msg=f"{variant} {dtype}"
                    )


def case_alltoall():
    ranks, own_rank = hvd.size(), hvd.rank()
    for rows in (1, 50_000):
        sent = tf.repeat(tf.range(ranks) + 10 * own_rank, rows)[:, None] * tf.ones([1, 2], tf.int32)
        for _, actual in results_by_variant(hvd.alltoall, sent):
            expected = np.repeat([own_rank + 10 * r for r in range(ranks)], rows)
            np.testing.assert_array_equal(actual[:, 0], expected)
    splits = [(own_rank + to) % 3 for to in range(ranks)]
    uneven = tf.fill([sum(splits)], float(own_rank))
    for _, (actual, rows) in results_by_variant(lambda t: hvd.alltoall(t, splits=splits), uneven):
        expected = [(r + own_rank) % 3 for r in range(ranks)]
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(actual, np.repeat(np.arange(ranks), expected))
    one_sided = [0] * ranks
    one_sided[-1] = 2
    actual, rows = hvd.alltoall(tf.ones([2, 3]), splits=tf.constant(one_sided, tf.int64))
    assert actual.shape[0] == (2 * ranks if own_rank == ranks - 1 else 0), actual.shape


def case_reducescatter():
    ranks, own_rank = hvd.size(), hvd.rank()
    for rows in (ranks, ranks + 1, ranks - 1, 70_001):
        x = tf.reshape(tf.range(rows * 2, dtype=tf.float32), [rows, 2])
        counts = [rows // ranks + (i < rows % ranks) for i in range(ranks)]
        start = sum(counts[:own_rank])
        for op, factor in ((hvd.Sum, ranks), (hvd.Average, 1)):
            for _, actual in results_by_variant(lambda t, op=op: hvd.reducescatter(t, op=op), x):
                np.testing.assert_allclose(actual, x[start : start + counts[own_rank]] * factor, rtol=1e-6)
    a, b = hvd.grouped_reducescatter([tf.ones([ranks]), tf.ones([2 * ranks, 2], tf.int32)], op=hvd.Sum)
    assert a.numpy().tolist() == [ranks] and (b.numpy() == ranks).all() and b.shape == (2, 2)


def case_gradients():
    ranks, own_rank = hvd.size(), hvd.rank()

    def gradient(call):  # as an argument of the function `call` would be unwrapped and converted
        def gradient_of(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(call(x) * float(own_rank + 1))
            return tape.gradient(loss, x)

        return gradient_of

    mean, total = (ranks + 1) / 2, ranks * (ranks + 1) / 2
    x = tf.ones([ranks, 2])
    expected = [
        (hvd.allreduce, mean),
        (lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2.0), 2 * total),
        (lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum)[1], total),
        (hvd.allgather, mean),
        (lambda t: hvd.grouped_allgather([t])[0], mean),
        (lambda t: hvd.broadcast(t, 1), mean if own_rank == 1 else 0.0),
        (lambda t: hvd.alltoall(t)[::1], None),
        (lambda t: hvd.reducescatter(t, op=hvd.Average), None),
        (lambda t: hvd.reducescatter(t / float(ranks), op=hvd.Sum), None),
    ]
    for call, expected_value in expected:
        for variant, actual in results_by_variant(gradient(call), x):
            if expected_value is None:  # row i was returned by rank i
                expected_rows = np.repeat(np.arange(1, ranks + 1), 2).reshape(-1, 2)
                np.testing.assert_allclose(actual, expected_rows, err_msg=variant)
            else:
                np.testing.assert_allclose(
                    actual, np.full((ranks, 2), expected_value), rtol=1e-6, err_msg=variant
                )
    uneven = tf.ones([own_rank + 1, 2])
    for _, actual in results_by_variant(gradient(hvd.allgather), uneven):
        np.testing.assert_allclose(actual, np.full((own_rank + 1, 2), mean), rtol=1e-6)


def case_parts_of_large_results_are_whole_tensors():
    """TensorFlow aborts the process if the memory of a tensor is not aligned."""
    tensors = [tf.ones([n]) for n in (400_001, 300_003, 500_007)]
    for actual in hvd.grouped_allreduce(tensors, op=hvd.Sum):
        assert tf.reduce_sum(actual[1:]) == (actual.shape[0] - 1) * hvd.size()
    share = hvd.reducescatter(tf.ones([3_000_001]), op=hvd.Sum)
    assert tf.reduce_max(share[1:] * 2.0) == 2.0 * hvd.size()
    rows = hvd.allgather(tf.ones([300_001 + hvd.rank()]))
    assert tf.reduce_sum(rows[1:]) == rows.shape[0] - 1


def case_same_bits():
    x = tf.random.stateless_normal([200_003], seed=[hvd.rank(), 7])
    total = hvd.allreduce(x, op=hvd.Sum)
    totals = hvd.allgather(tf.bitcast(total, tf.int32)[None])
    assert (totals.numpy() == totals.numpy()[0]).all()


def case_barrier_and_join():
    hvd.barrier()
    tf.function(hvd.barrier)()
    for refused in (hvd.join, lambda: hvd.allreduce(tf.ones(2), op=hvd.Adasum)):
        try:
            refused()
        except NotImplementedError as e:
            assert "hvd." in str(e)
        else:
            raise AssertionError("expected a refusal with advice")


def case_broadcast_variables():
    import keras

    values = [tf.fill([3], float(hvd.rank())), tf.constant(hvd.rank()), tf.fill([0, 2], 1.0)]
    tf_variables = [tf.Variable(v) for v in values]
    hvd.broadcast_variables(tf_variables, root_rank=1)
    assert [v.numpy().tolist() for v in tf_variables] == [[1.0] * 3, 1, []]
    keras_variables = [keras.Variable(v) for v in values]
    tf.function(lambda: hvd.broadcast_variables(keras_variables, root_rank=0))()
    assert [v.numpy().tolist() for v in keras_variables] == [[0.0] * 3, 0, []]
    (actual,) = hvd.broadcast_([tf.Variable(float(hvd.rank()))], root_rank=1)
    assert actual.numpy() == 1.0


def case_objects():
    value = {"epoch": 3, 0: [1, (2, None)], "x": np.arange(3), 1.5: {True, b"\xff"}, "nan": float("inf")}
    actual = hvd.broadcast_object(value if hvd.rank() == 0 else None, 0)
    assert actual.keys() == value.keys() and actual[0] == [1, (2, None)] and actual[1.5] == {True, b"\xff"}
    np.testing.assert_array_equal(actual["x"], np.arange(3))
    assert hvd.allgather_object({"rank": hvd.rank()}) == for_all_ranks(lambda r: {"rank": r})
    big = hvd.allgather_object("x" * (hvd.rank() * 500_000))
    assert [len(text) for text in big] == for_all_ranks(lambda r: r * 500_000)


def case_idle_threads_sleep_where_ranks_share_cores():
    from tensorflow.python.eager import context

    config = context.context().config
    shares = len(os.sched_getaffinity(0)) < 2 * hvd.local_size()
    assert config.experimental.disable_thread_spinning == shares
    assert config.allow_soft_placement


run_cases(globals())
