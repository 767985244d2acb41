"""Single all-reduces of a function: which of them are fused, and which must not be."""

import ctl.hvd as hvd
import numpy as np
import tensorflow as tf
from ctl.hvd import process
from harness import raised, run_cases

MANY = 20


def requests_of(call, *arguments):
    """Returns the result of a traced call and the number of requests that this rank made for it."""
    call(*arguments)
    engine, requests = process.engine(), []
    submit = engine.submit
    engine.submit = lambda *a, **k: requests.append(a) or submit(*a, **k)
    try:
        result = call(*arguments)
    finally:
        del engine.submit
    return result, len(requests)


def tensors(dtype=tf.float32):
    return [tf.cast(tf.range(i + 1) + hvd.rank(), dtype) for i in range(MANY)]


def totals(tensors_of_rank=np.arange):
    ranks = hvd.size() * (hvd.size() - 1) // 2
    return [np.arange(i + 1) * hvd.size() + ranks for i in range(MANY)]


def close(results, expected):
    for result, expected_result in zip(results, expected, strict=True):
        assert result.shape == np.shape(expected_result), (result, expected_result)
        np.testing.assert_allclose(result, expected_result)


def case_many_are_one_request():
    call = tf.function(lambda ts: [hvd.allreduce(t, op=hvd.Sum) for t in ts])
    results, count = requests_of(call, tensors())
    close(results, totals())
    assert count == 1, count
    close([hvd.allreduce(t, op=hvd.Sum, name="after") for t in tensors()], totals())


def case_each_type_scale_and_reduction_by_itself():
    @tf.function
    def call(a, b):
        results = []
        for x, y in zip(a, b, strict=True):
            results += [
                hvd.allreduce(x, op=hvd.Sum),
                hvd.allreduce(y, op=hvd.Sum),
                hvd.allreduce(x),
                hvd.allreduce(x, op=hvd.Max),
                hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
            ]
        return results

    results, count = requests_of(call, tensors(), tensors(tf.int32))
    expected = totals()
    close(results[0::5], expected)
    close(results[1::5], expected)
    assert results[1].dtype == tf.int32
    close(results[2::5], [w / hvd.size() for w in expected])
    close(results[3::5], [np.arange(i + 1) + hvd.size() - 1 for i in range(MANY)])
    close(results[4::5], [w / 2 for w in expected])
    assert count == 5, count


def case_a_chain_stays_a_chain():
    @tf.function
    def call(x):
        for _ in range(4):
            x = hvd.allreduce(x, op=hvd.Sum) + 1.0
        return x

    expected = 1.0
    for _ in range(4):
        expected = expected * hvd.size() + 1.0
    result, count = requests_of(call, tf.constant(1.0))
    assert result == expected and count == 4, (result, count)


def case_optimizer_loop():
    """Each variable is updated before the next gradient is requested."""
    variables = [tf.Variable([1.0, 2.0]) for _ in range(MANY)]

    @tf.function
    def call(gradients):
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(hvd.allreduce(gradient, op=hvd.Sum))

    gradients = [tf.fill([2], float(i)) for i in range(MANY)]
    _, count = requests_of(call, gradients)
    close(variables, [np.array([1.0, 2.0]) - 2 * i * hvd.size() for i in range(MANY)])
    assert count == 1, count


def case_a_variable_that_was_written():
    variable = tf.Variable(0.0)

    @tf.function
    def call(x):
        variable.assign(hvd.allreduce(x, op=hvd.Sum))
        return hvd.allreduce(variable.read_value() + 1.0, op=hvd.Sum)

    assert call(tf.constant(2.0)) == (2.0 * hvd.size() + 1.0) * hvd.size()


def case_a_print_between():
    @tf.function
    def call(x, y):
        first = hvd.allreduce(x, op=hvd.Sum)
        tf.print("first", first)
        return first, hvd.allreduce(y, op=hvd.Sum)

    results, count = requests_of(call, tf.constant(1.0), tf.constant(2.0))
    close(results, [hvd.size(), 2 * hvd.size()])
    assert count == 2, count


def ranks_that_differ(between, dtype=tf.float32, size=1, op=hvd.Sum):
    """Rank 0 reads the first result before it requests the second."""

    @tf.function
    def call(ts):
        reduced = [hvd.allreduce(ts[0], op=op, name="first")]
        if hvd.rank() == 0:
            between(reduced[0])
        reduced += [hvd.allreduce(t, op=op, name=f"n{i}") for i, t in enumerate(ts[1:])]
        return reduced

    for step in range(3):
        ts = [tf.fill([size], tf.cast(i + step, dtype)) for i in range(4)]
        times = hvd.size() if op == hvd.Sum else 1
        close(call(ts), [np.full(size, (i + step) * times) for i in range(4)])


def case_ranks_that_join_others():
    ranks_that_differ(lambda results: tf.print("seen", results[0]))
    ranks_that_differ(lambda results: tf.print("seen", results[0]), tf.int32)
    ranks_that_differ(lambda results: tf.print("seen", results[0]), size=15_000)
    for size in (1, 100, 15_000):  # some parts are sent with the requests, others from rank to rank
        ranks_that_differ(lambda _: tf.print("between"), size=size, op=hvd.Average)


def case_ranks_in_another_order():
    variable = tf.Variable(0.0)

    @tf.function
    def call(x, y):
        if hvd.rank() == 0:
            second = hvd.allreduce(y, op=hvd.Sum, name="y")
            tf.print("seen", second)
            first = hvd.allreduce(x, op=hvd.Sum, name="x")
        else:
            first = hvd.allreduce(x, op=hvd.Sum, name="x")
            second = hvd.allreduce(y, op=hvd.Sum, name="y")
        variable.assign(first)
        return first, second

    for _ in range(3):
        close(call(tf.constant(1.0), tf.constant(2.0)), [hvd.size(), 2 * hvd.size()])


def case_results_that_one_rank_does_not_want():
    @tf.function
    def call(ts):
        reduced = [hvd.allreduce(t, op=hvd.Sum) for t in ts]
        return reduced if hvd.rank() == 0 else tf.constant(0.0)

    for _ in range(3):
        results = call(tensors())
    if hvd.rank() == 0:
        close(results, totals())


def case_a_shape_that_differs_is_named():
    @tf.function
    def call():
        sizes = [2, 3, 4 if hvd.rank() else 5, 6]
        return [hvd.allreduce(tf.zeros([n]), name=f"t{i}") for i, n in enumerate(sizes)]

    for _ in range(2):
        raised(tf.errors.FailedPreconditionError, call, "t2: the shape", "[4]", "[5]")
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum) == hvd.size()


def case_branches_and_loops():
    @tf.function
    def call(x, flag):
        first = hvd.allreduce(x, op=hvd.Sum)
        chosen = tf.cond(
            flag,
            lambda: hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x + 1.0, op=hvd.Sum),
            lambda: hvd.allreduce(first, op=hvd.Sum),
        )
        total = tf.constant(0.0)
        for _ in tf.range(3):
            total += hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(2.0 * x, op=hvd.Sum)
        return first, chosen, total, hvd.allreduce(chosen, op=hvd.Sum)

    n = hvd.size()
    for flag in (True, False):
        chosen = 3.0 * n if flag else 1.0 * n * n
        close(call(tf.constant(1.0), tf.constant(flag)), [n, chosen, 9.0 * n, chosen * n])


def case_order_that_the_program_requests():
    @tf.function
    def call(x, y):
        first = hvd.allreduce(x, op=hvd.Sum)
        with tf.control_dependencies([first]):
            second = hvd.allreduce(y, op=hvd.Sum)
        return first, second

    close(call(tf.constant(1.0), tf.constant(2.0)), [hvd.size(), 2 * hvd.size()])


def case_constants_are_sent_at_every_call():
    @tf.function
    def call():
        return [hvd.allreduce(tf.constant([1.0, float(i)]), op=hvd.Sum) for i in range(3)]

    results, count = requests_of(call)
    close(results, [np.array([1.0, i]) * hvd.size() for i in range(3)])
    assert count == 1, count


def case_gradients():
    @tf.function
    def call(xs):
        with tf.GradientTape() as tape:
            tape.watch(xs)
            reduced = [hvd.allreduce(x, op=hvd.Sum) for x in xs]
            loss = tf.add_n([tf.reduce_sum(f * f) for f in reduced])
        return tape.gradient(loss, xs)

    xs = [tf.constant([float(i)]) for i in range(5)]
    results, count = requests_of(call, xs)
    close(results, [np.array([2.0 * i * hvd.size() * hvd.size()]) for i in range(5)])
    assert count == 2, count
    with tf.GradientTape() as tape:  # outside of the function
        tape.watch(xs)
        loss = tf.add_n(tf.function(lambda: [hvd.allreduce(x, op=hvd.Sum)[0] for x in xs])())
    close(tape.gradient(loss, xs), [np.array([1.0 * hvd.size()])] * 5)


def case_large_ones_among_them():
    @tf.function
    def call(ts):
        return [hvd.allreduce(t, op=hvd.Sum) for t in ts]

    ts = [tf.fill([50_000 if i % 2 else 10], float(i)) for i in range(10)]
    results, count = requests_of(call, ts)
    close(results, [np.full(t.shape, i * hvd.size()) for i, t in enumerate(ts)])
    assert count == 6, count


def case_other_ranks_of_a_set_in_between():
    process_set = hvd.add_process_set(list(range(hvd.size() - 1)))

    @tf.function
    def call(x):
        reduced = []
        for i in range(3):
            reduced.append(hvd.allreduce(x * float(i), op=hvd.Sum, name=f"{i}"))
            if process_set.included():
                sum_of_set = hvd.allreduce(x, op=hvd.Sum, process_set=process_set, name=f"within{i}")
            else:
                sum_of_set = float(hvd.size() - 1) * x
            reduced.append(hvd.allreduce(sum_of_set, op=hvd.Sum, name=f"all{i}"))
        return reduced

    for _ in range(2):
        results = call(tf.constant(1.0))
        close(results[0::2], [i * hvd.size() for i in range(3)])
        close(results[1::2], [(hvd.size() - 1) * hvd.size()] * 3)
    hvd.remove_process_set(process_set)


if __name__ == "__main__":
    run_cases(globals())
