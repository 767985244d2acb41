"""Collectives where TensorFlow decides when they run: branches, loops, functions of functions."""

import threading

import numpy as np
import tensorflow as tf

early_variable = tf.Variable([1.0, 2.0])  # before hvd.init(), and before devices are chosen
early_function = tf.function(lambda x: x * early_variable)
early_function(tf.ones([2]))

import ctl.hvd as hvd  # noqa: E402
from harness import run_cases  # noqa: E402


def case_variables_from_before_init():
    hvd.broadcast_variables([early_variable], 0)
    total = hvd.allreduce(early_function(tf.ones([2])), op=hvd.Sum)
    np.testing.assert_allclose(total, np.array([1.0, 2.0]) * hvd.size())
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)


def case_settings_before_init_remain():
    from tensorflow.python.eager import context

    assert not context.context().config.experimental.disable_thread_spinning


def case_function_in_a_cond():
    @tf.function
    def inner(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def outer(x, flag):
        y = tf.cond(flag, lambda: inner(x), lambda: inner(x * 10.0))
        return y + inner(x)

    for step in range(6):
        actual = outer(tf.constant([1.0]), tf.constant(step % 2 == 0))
        expected = (2.0 if step % 2 == 0 else 11.0) * hvd.size()
        assert actual.numpy().tolist() == [expected], (step, actual)


def case_one_rank_skips_a_branch_without_collectives():
    @tf.function
    def step(x):
        if hvd.rank_op() == 0:
            x = x + 1.0
        return hvd.allreduce(x, op=hvd.Sum)

    assert step(tf.constant(0.0)) == 1.0


def case_loops():
    @tf.function
    def summed(n):
        total = tf.constant(0.0)
        for i in tf.range(n):
            total += hvd.allreduce(tf.cast(i, tf.float32), op=hvd.Sum)
        return total

    assert summed(tf.constant(10)) == 45.0 * hvd.size()


def case_retracing_on_one_rank_only():
    step = tf.function(lambda x: hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum))
    for call_number in range(1, 4):  # rank 0 traces three times, other ranks once
        total = step(tf.ones([call_number if hvd.rank() == 0 else 4]))
        assert total == call_number + 4.0 * (hvd.size() - 1), total


def case_unused_results():
    @tf.function
    def step(x):
        hvd.allreduce(x * 2.0)
        return hvd.allreduce(x, op=hvd.Sum)

    for _ in range(200):
        assert step(tf.constant(1.0)) == hvd.size()
    from ctl.collectives import graph_nodes

    assert len(graph_nodes.unclaimed) <= 70


def case_order_in_a_function_is_that_of_the_program():
    @tf.function
    def step(xs):
        return [hvd.allreduce(x, op=hvd.Sum) for x in xs]

    for _ in range(5):
        actual = step([tf.fill([100], float(i)) for i in range(40)])
        assert [g.numpy()[0] for g in actual] == [i * hvd.size() for i in range(40)]


def case_named_collectives_in_another_order_on_each_rank():
    from ctl.hvd import process

    engine = process.engine()
    order = list(range(20))
    np.random.default_rng(hvd.rank()).shuffle(order)
    handles = {
        i: engine.submit("allreduce", f"n{i}", [np.full(5, float(i))], is_eager=False) for i in order
    }
    for i in range(20):
        assert engine.wait(handles[i])[0].tolist() == [i * hvd.size()] * 5


def case_name_scopes_can_be_ignored():
    """Ranks with differently nested layers agree on names without the nesting."""

    @tf.function
    def step(x):
        with tf.name_scope("first" if hvd.rank() == 0 else "second"):
            total = hvd.allreduce(x, op=hvd.Sum, name="inner", ignore_name_scope=True)
            return total + hvd.allgather(x[None], name="rows", ignore_name_scope=True)[0]

    assert step(tf.constant(1.0)) == hvd.size() + 1.0


def case_threads():
    results = {}

    def work(name):
        results[name] = [float(hvd.allreduce(tf.constant(float(i)), op=hvd.Sum, name=f"{name}.{i}"))
                       for i in range(20)]  # fmt: skip

    names = ["a", "b", "c"] if hvd.rank() else ["c", "a", "b"]
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[n] == [i * float(hvd.size()) for i in range(20)] for n in "abc")


def case_sizes_at_run_time():
    step = tf.function(lambda: (hvd.size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.local_size_op()))
    assert [int(v) for v in step()] == [hvd.size(), hvd.rank(), hvd.local_rank(), hvd.local_size()]
    assert int(hvd.process_set_included_op()) == 1


def case_traced_functions_outlive_the_group():
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    assert step(tf.constant(1.0)) == hvd.size()
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        assert step(tf.constant(1.0)) == hvd.size()
    assert step.experimental_get_tracing_count() == 1


def case_keras_fit_and_a_dataset_from_python():
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones([8, 2], np.float32) * (hvd.rank() + 1)
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0,
              callbacks=[hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0)])  # fmt: skip
    weights = hvd.allgather(tf.reshape(model.get_weights()[0], [1, -1])).numpy()
    assert (weights == weights[0]).all()


run_cases(globals())
