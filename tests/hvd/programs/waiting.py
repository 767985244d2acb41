"""More concurrent collectives than TensorFlow has threads, which it started before hvd.init()."""

import os
import threading

import numpy as np
import tensorflow as tf

assert float(tf.constant(1.0) + 1.0) == 2.0  # starts TensorFlow
WITHOUT_SESSIONS = len(os.listdir("/proc/self/task"))

import ctl.hvd as hvd  # noqa: E402
from harness import raised, run_cases  # noqa: E402

tf1 = tf.compat.v1


def graph_of(count, build):
    """Returns a graph and its `count` results."""
    with tf.Graph().as_default() as graph:
        return graph, [build(i) for i in range(count)]


def total(i):
    return hvd.allreduce(tf.fill([i % 7 + 1], float(i)), op=hvd.Sum, name=f"total{i}")


def check_totals(values):
    for i, value in enumerate(values):
        np.testing.assert_array_equal(value, np.full(i % 7 + 1, float(i * hvd.size())))


def run_in_an_order_of_its_own(session, results):
    order = np.random.default_rng(hvd.rank()).permutation(len(results))
    values = session.run([results[i] for i in order])
    return [value for _, value in sorted(zip(order, values, strict=True), key=lambda pair: pair[0])]


def case_threads_are_those_of_tensorflow():
    assert "TF_NUM_INTEROP_THREADS" not in os.environ or os.environ["TF_NUM_INTEROP_THREADS"] == "2"
    assert len(os.listdir("/proc/self/task")) < WITHOUT_SESSIONS + 20


def case_uneven_reduce_scatters_of_a_session():
    size = hvd.size()
    graph, results = graph_of(
        80, lambda i: hvd.reducescatter(tf.fill([i % 9 + 1, 2], float(i)), op=hvd.Sum, name=f"rows{i}")
    )
    with tf1.Session(graph=graph) as session:
        for _ in range(2):
            for i, value in enumerate(run_in_an_order_of_its_own(session, results)):
                rows = i % 9 + 1
                expected = rows // size + (hvd.rank() < rows % size)
                assert value.shape == (expected, 2) and (value == i * size).all(), (i, value)


def case_collectives_of_a_session_in_another_order_on_each_rank():
    graph, results = graph_of(60, total)
    with tf1.Session(graph=graph) as session:
        for _ in range(3):
            check_totals(run_in_an_order_of_its_own(session, results))


def case_barriers_and_gathers_of_a_session():
    def build(i):
        barrier = hvd.barrier(name=f"barrier{i}")
        with tf.control_dependencies([barrier]):
            return hvd.allgather(tf.fill([hvd.rank() + 1], i), name=f"rows{i}")

    graph, results = graph_of(20, build)
    with tf1.Session(graph=graph) as session:
        for i, value in enumerate(session.run(results)):
            assert value.tolist() == [i] * (hvd.size() * (hvd.size() + 1) // 2)


def case_two_sessions_of_one_finalized_graph():
    graph, results = graph_of(10, total)
    graph.finalize()
    with tf1.Session(graph=graph) as first, tf1.Session(graph=graph) as second:
        for session in (first, second, first):
            check_totals(session.run(results))
    with tf1.Session(graph=graph) as third:
        check_totals(third.run(results))


def case_signals_of_a_call_that_failed_do_no_harm():
    """Calls that fail on both ranks between the requests and the results, then calls that do not."""

    @tf.function
    def function(fails, x):
        tf.debugging.assert_equal(fails, False, message="on purpose")
        return [hvd.allgather(x + i, name=f"gathered{i}") for i in range(6)]

    for step in range(20):
        x = tf.constant([step])
        if step % 2:
            raised(tf.errors.InvalidArgumentError, lambda x=x: function(True, x), "on purpose")
        else:
            values = [value.numpy().tolist() for value in function(False, x)]
            assert values == [[step + i] * hvd.size() for i in range(6)]
        hvd.barrier()


def case_queues_are_used_again():
    from ctl.collectives import graph_nodes

    numbers = graph_nodes._function_signals._numbers
    # A queue without a reader is replaced, and freed later. A call that returns the first queue before it
    # takes the second one, or not, leaves one queue less or more than the calls before.
    for num_used, max_new_queues in ((2, 1), (1, 101)):
        function = tf.function(lambda x, n=num_used: [hvd.allgather(x), hvd.allgather(x * 2)][:n])
        for _ in range(100):
            function(tf.constant([1]))
        before = next(numbers)
        for _ in range(100):
            function(tf.constant([1]))
        assert next(numbers) - before - 1 <= max_new_queues


def case_functions_of_several_threads():
    """Each thread waits in a separate function; together they need more threads than there are."""
    functions = [
        tf.function(lambda x, i=i: [hvd.allgather(x + j, name=f"t{i}.{j}") for j in range(5)])
        for i in range(6)
    ]
    values = [None] * len(functions)

    def call(i):
        values[i] = functions[i](tf.fill([1], i))

    threads = [threading.Thread(target=call, args=[i]) for i in range(len(functions))]
    for thread in threads[:: 1 if hvd.rank() else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gathered in enumerate(values):
        assert [v.numpy().tolist() for v in gathered] == [[i + j] * hvd.size() for j in range(5)]


def case_one_function_of_several_threads():
    function = tf.function(lambda x: hvd.allgather(x, name="same"))
    function(tf.constant([0]))
    values = []

    def call():
        values.append(function(tf.constant([1])).numpy().tolist())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [[1] * hvd.size()] * 8


def case_a_function_in_the_graph_of_a_session():
    @tf.function
    def twice(x):
        return 2.0 * hvd.allreduce(x, op=hvd.Sum, name="inner")

    with tf.Graph().as_default() as graph:
        result = twice(tf.constant(3.0)) + hvd.allreduce(1.0, op=hvd.Sum, name="outer")
    with tf1.Session(graph=graph) as session:
        assert session.run(result) == 7.0 * hvd.size()


def case_nodes_are_linear_in_the_number_of_collectives():
    def count_nodes(count):
        function = tf.function(lambda xs: [hvd.allreduce(x, op=hvd.Sum) for x in xs])
        xs = [tf.fill([2, 2], float(i)) for i in range(count)]
        for i, value in enumerate(function(xs)):
            assert (value.numpy() == i * hvd.size()).all()
        return len(function.get_concrete_function(xs).graph.get_operations())

    num_nodes = [count_nodes(16), count_nodes(256)]
    assert num_nodes[1] <= 16 * num_nodes[0] and num_nodes[1] < 9 * 256, num_nodes


def case_gradients_are_not_registered_for_each_call():
    from tensorflow.python.framework import ops

    def count_gradients():
        x = tf.Variable([1.0, 2.0])

        @tf.function
        def gradient():
            with tf.GradientTape(persistent=True) as tape:
                y = [hvd.allreduce(x * float(i), op=hvd.Sum) for i in range(5)]
            return [tape.gradient(total, x) for total in y]

        for i, value in enumerate(gradient()):
            assert value.numpy().tolist() == [float(i * hvd.size())] * 2
        return len(ops.gradient_registry.list())

    assert count_gradients() == count_gradients()


if __name__ == "__main__":
    run_cases(globals())
