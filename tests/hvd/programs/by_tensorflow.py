"""Collectives that TensorFlow executes on CPUs: all, or those of a device that represents a GPU.

by_tensorflow.py all | devices | words | dies | late
"""

import json
import os
import sys

import ctl.hvd as hvd
import numpy as np
import tensorflow as tf
from ctl.collectives import tensorflow_plane
from ctl.errors import UsageError
from ctl.hvd import process
from harness import raised, run_cases

mode = sys.argv[1]
carried = []
begin = tensorflow_plane.TensorFlowPlane.begin


def begin_and_count(self, pending_operations, header):
    carried.extend(pending.request.name for pending in pending_operations)
    if mode == "dies" and hvd.rank() == 3 and "last" in carried:
        os._exit(7)  # when the others have begun
    begin(self, pending_operations, header)


tensorflow_plane.TensorFlowPlane.begin = begin_and_count


def made_by(call, *arguments, **options):
    """Returns the result and the number of collectives that TensorFlow executed for it."""
    before = len(carried)
    return call(*arguments, **options), len(carried) - before


if mode == "all":

    def case_every_kind_gives_the_numbers_of_numpy():
        own_rank, n = hvd.rank(), hvd.size()
        for dtype in ("float16", "bfloat16", "float32", "float64", "uint8", "bool", "int64"):
            x = tf.cast(tf.range(6) % 2 + own_rank, dtype)
            total, count = made_by(hvd.allreduce, x, op=hvd.Sum)
            expected = sum(tf.cast(tf.cast(tf.range(6) % 2 + r, dtype), tf.float64) for r in range(n))
            assert count == 1 and total.dtype == x.dtype and "task:100" in total.device
            np.testing.assert_array_equal(total, tf.cast(expected, dtype))
            rows, count = made_by(hvd.allgather, tf.cast(tf.fill([own_rank * 2, 3], own_rank), dtype))
            assert count == 1 and rows.shape == [n * (n - 1), 3]
            expected = np.repeat(np.arange(n), np.arange(n) * 2)
            np.testing.assert_array_equal(rows[:, 0], tf.cast(expected, dtype))
            sent, count = made_by(hvd.broadcast, tf.cast(tf.fill([5], own_rank), dtype), 1)
            assert count == 1
            np.testing.assert_array_equal(sent, tf.cast(tf.ones([5]), dtype))
            parts, count = made_by(hvd.alltoall, tf.cast(tf.fill([n * (n + 1) // 2], own_rank), dtype),
                                   splits=list(range(1, n + 1)))  # fmt: skip
            assert count == 1 and parts[1].numpy().tolist() == [own_rank + 1] * n
            np.testing.assert_array_equal(parts[0], tf.cast(np.repeat(np.arange(n), own_rank + 1), dtype))
            scattered = hvd.reducescatter(tf.cast(tf.fill([5, 2], 1), dtype), op=hvd.Max)
            assert scattered.shape == [len(range(own_rank, 5, n)), 2] and bool(
                tf.reduce_all(tf.cast(scattered, tf.bool))
            )

    def case_averages_and_scales():
        actual = hvd.allreduce(tf.constant([2 * hvd.rank() - 1]), op=hvd.Average)
        n = hvd.size()
        np.testing.assert_array_equal(actual, [int((n * (n - 1) - n) / n)])
        x = tf.constant([1.5, -2.0])
        actual = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        np.testing.assert_allclose(actual, x * 2.0 * n)

    def case_functions_and_gradients():
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = [hvd.allreduce(x * i, op=hvd.Sum) for i in (1.0, 2.0)]
            return y, tape.gradient(y, x)

        for _ in range(2):
            ((first, second), gradient), count = made_by(step, tf.ones([3]))
            assert count == 1, count  # two all-reduces and two of their gradients, joined
            np.testing.assert_array_equal(first, 3 * [hvd.size()])
            np.testing.assert_array_equal(second, 3 * [2 * hvd.size()])
            np.testing.assert_array_equal(gradient, 3 * [3 * hvd.size()])

    def case_small_tensors_are_joined_and_large_ones_are_not():
        own_rank, sizes = hvd.rank(), []
        reduced = tensorflow_plane._Collective.all_reduce
        tensorflow_plane._Collective.all_reduce = lambda *a: sizes.append(len(a[1])) or reduced(*a)
        tensors = [tf.fill([n], float(own_rank)) for n in (1, 2, 1 << 19, 3)]
        mixed = [*tensors, tf.fill([4], tf.cast(own_rank, tf.int32)), tf.fill([0], 1.0)]
        grouped = hvd.grouped_allreduce(mixed, op=hvd.Sum)
        assert sizes == [6, 1 << 19, 4], sizes
        sizes.clear()
        each = tf.function(lambda xs: [hvd.allreduce(x, op=hvd.Sum) for x in xs])(mixed)
        tensorflow_plane._Collective.all_reduce = reduced
        assert sorted(sizes) == [4, 6, 1 << 19], sizes
        total = hvd.size() * (hvd.size() - 1) // 2
        for x, grouped_tensor, single_tensor in zip(mixed, grouped, each, strict=True):
            assert grouped_tensor.dtype == single_tensor.dtype == x.dtype
            np.testing.assert_array_equal(grouped_tensor, np.full(x.shape, total))
            np.testing.assert_array_equal(single_tensor, np.full(x.shape, total))

    def case_types_that_tensorflow_cannot_add_use_another_path():
        total, count = made_by(hvd.allreduce, tf.fill([3], tf.constant(2**63, tf.uint64)), op=hvd.Max)
        assert count == 0
        assert total.numpy().tolist() == [2**63] * 3

    def case_a_mistake_is_reported_and_later_collectives_work():
        def differs():
            hvd.allreduce(tf.ones([2 + hvd.rank()]), name="odd")

        raised(tf.errors.FailedPreconditionError, differs, "the shape of the tensor differs")
        assert float(hvd.allreduce(tf.ones([]), op=hvd.Sum)) == hvd.size()

    def case_sets_of_ranks():
        process_set = hvd.add_process_set([0, hvd.size() - 1])
        if process_set.included():
            actual, count = made_by(
                hvd.allreduce, tf.ones([2]) * hvd.rank(), op=hvd.Sum, process_set=process_set
            )
            assert count == 1
            np.testing.assert_array_equal(actual, 2 * [hvd.size() - 1])

    run_cases(globals())

elif mode == "devices":
    tensorflow_plane.has_gpus = lambda: True
    tensorflow_plane._is_on_gpu = lambda tensor: tensor.device.endswith("CPU:1")
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)

    def case_the_device_of_a_tensor_decides():
        for device, expected in (("CPU:0", 0), ("CPU:1", 1)):
            with tf.device(device):
                x = tf.ones([3])
            total, count = made_by(hvd.allreduce, x)
            assert count == expected, (device, count)
            assert not expected or total.device.endswith("CPU:1")
            np.testing.assert_array_equal(total, [1.0] * 3)

    def case_a_function_sends_requests_with_its_tensors():
        total, count = made_by(tf.function(hvd.allreduce), tf.ones([3]))
        assert count == 0  # there, TensorFlow has one name for all CPUs
        np.testing.assert_array_equal(total, [1.0] * 3)

    def case_another_device_on_each_rank_is_reported():
        with tf.device(f"CPU:{hvd.rank() % 2}"):
            x = tf.ones([3])
        text = raised(tf.errors.FailedPreconditionError, lambda: hvd.allreduce(x, name="x"))
        assert "the data plane differs" in text and "tensorflow" in text

    run_cases(globals())

elif mode == "words":
    if os.environ["HOROVOD_RANK"] == "1":
        os.environ["CTL_COLLECTIVES"] = "tcp"
    hvd.init()
    (total, count) = made_by(hvd.allreduce, tf.ones([3]))
    print(json.dumps({"total": total.numpy().tolist(), "count": count}))

elif mode == "dies":
    hvd.init()
    hvd.allreduce(tf.ones([3]))
    raised(hvd.HorovodInternalError, lambda: hvd.allreduce(tf.ones([3]), name="last"))
    next_error = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(tf.ones([3])))
    thread = process.engine().plane._thread
    hvd.shutdown()
    thread.join(600)
    print(json.dumps({"again": next_error, "waits": thread.is_alive()}))
    os._exit(0)

else:
    tf.ones([])
    try:
        hvd.init()
    except UsageError as e:
        print(json.dumps({"said": str(e), "code": e.exit_code, "plane": process.is_initialized()}))
