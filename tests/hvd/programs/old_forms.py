"""Old scripts: TF1 graphs with sessions. They run in a separate process because graphs are permanent."""

import sys

import numpy as np
import tensorflow as tf
from ctl import hvd
from measuring import RequestRecorder, comparable, examples, run, shared

v1 = tf.compat.v1
X, Y = examples()


def eager_global_variables():
    try:
        hvd.broadcast_global_variables(0)
    except RuntimeError as e:
        return str(e)
    return "nothing was raised"


def eager_tf1_optimizer():
    weight = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    pairs = optimizer.compute_gradients(lambda: weight * float(hvd.rank()), [weight])
    optimizer.apply_gradients(pairs)
    return float(weight.numpy()[0])


def graph_of(optimizer, **options):
    """Returns [weights, global step] after a train step, placeholders and optimizer of a linear model."""
    x = v1.placeholder(tf.float32, [None, 5])
    y = v1.placeholder(tf.float32, [None, 3])
    weights = v1.get_variable("w", initializer=np.ones((5, 3), "float32") * (hvd.rank() + 1))
    loss = tf.reduce_mean((x @ weights - y) ** 2)
    step = v1.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(optimizer, **options)
    with tf.control_dependencies([optimizer.minimize(loss, global_step=step)]):
        after = [weights.read_value(), step.read_value()]
    return after, (x, y), optimizer


def monitored_session():
    """The hook broadcasts rank 0's weights. Then the ranks train like one process."""
    shard = shared(X, Y)
    with tf.Graph().as_default():
        after, (x, y), optimizer = graph_of(v1.train.MomentumOptimizer(0.1, 0.9))
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=4)]
        count = 12 // hvd.size()
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            i = 0
            while not session.should_stop():
                fed = {x: shard[0][i : i + count], y: shard[1][i : i + count]}
                weights, steps = session.run(after, fed)
                i += count
        names = optimizer.get_slot_names()
    return {**comparable([weights]), "steps": int(steps), "slots": names}


def several_passes():
    """The weights change with every second pass, and the global step with each."""
    with tf.Graph().as_default():
        after, (x, y), _ = graph_of(
            v1.train.GradientDescentOptimizer(0.1),
            backward_passes_per_step=2,
            average_aggregated_gradients=True,
        )
        broadcast = hvd.broadcast_global_variables(0)
        changed, asked_for = [], []
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            session.run(broadcast)
            before = np.ones((5, 3), "float32")
            for _ in range(4):
                with RequestRecorder() as requests:
                    weights, steps = session.run(after, {x: X[:4], y: Y[:4]})
                changed.append(not np.array_equal(before, weights))
                asked_for.append(len(requests.gradients()))
                before = weights
    return {**comparable([weights]), "changed": changed, "asked": asked_for, "steps": int(steps)}


def values_in_a_session():
    import ctl.hvd.keras as hvd_keras

    with tf.Graph().as_default(), v1.Session():
        reduced = hvd_keras.allreduce(np.float32(hvd.rank()), name="value")
    return float(reduced)


if sys.argv[1] == "eager":
    run([eager_global_variables, eager_tf1_optimizer])
else:
    v1.disable_eager_execution()
    run([monitored_session, several_passes, values_in_a_session])
